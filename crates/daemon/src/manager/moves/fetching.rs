//! A command of this host that asks the host which has a backend for it.
//!
//! Invariants: this host asks for one backend at a time. What it does not want any more it refuses, whatever the other host has seen.
//!
//! Elsewhere: the move that begins then (`joining`, and the parent module on the other host).

use super::START_LIMIT;
use crate::api::{Done, HostInfo, Progress};
use crate::control::{Flow, Report};
use crate::manager::Manager;
use crate::manager::slots::TransportHandle;
use crate::manager::transport::running;
use cbd_engine::{MoveAnswer, MoveOffer, MoveState};
use cbd_types::{BackendId, Error, ErrorKind, HostId, Result};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a host that is asked for a backend may take to begin: it looks each second, and waits for its services before.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);
/// How long the other host may move another backend before this one.
const BUSY_LIMIT: Duration = Duration::from_secs(3);
/// How long a host that was asked for a backend may show neither its move nor its end.
const ENDED_LIMIT: Duration = Duration::from_secs(2);
/// How long the command waits at a time.
const STEP: Duration = Duration::from_millis(100);

/// A backend that this host asks for.
struct Fetch<'a> {
    manager: &'a Manager,
    handle: &'a TransportHandle,
    id: BackendId,
    from: HostId,
    host: String,
    number: u64,
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Stopped, "cancelled; nothing was moved")
}

impl Manager {
    /// Asks the host that has a backend for it, and waits until it is here.
    pub(super) fn fetch_backend(
        &self,
        handle: &TransportHandle,
        id: BackendId,
        report: Report<'_>,
    ) -> Result<Done> {
        let begun = Instant::now();
        let _fetching = loop {
            if let Some(fetching) = self.begin_fetching(handle.id) {
                break fetching;
            }
            if report(progress(id, begun)) == Flow::Cancel {
                return Err(cancelled());
            }
            if begun.elapsed() > BEGIN_LIMIT {
                let text = "this host asks another host for a backend already: try it again after that";
                return Err(Error::new(ErrorKind::Busy, text));
            }
            self.slot_returned.wait_for(&mut self.tables.lock(), STEP);
        };
        let is_own = running(&*self.tables()?, handle.id)?.backends.contains_key(&id);
        if is_own {
            // Another command has got it meanwhile.
            let text = format!("backend {id} is on host {} already", handle.host_name(handle.host));
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let from = handle.host_with(id)?;
        let (host, number) = (handle.host_name(from), handle.transport.new_move_number());
        let fetch = Fetch { manager: self, handle, id, from, host, number };
        match fetch.ask() {
            // It is said when this host takes part in no other move.
            Err(error) if error.kind() == ErrorKind::Busy => {}
            said => said?,
        }
        let result = fetch.wait(report);
        let _answering = self.moves.answering.lock();
        let is_wished = handle.transport.is_wished(handle.host, number);
        if result.is_err() {
            *self.moves.cancelled.lock() = Some(number);
        }
        // A daemon that stops leaves what it has said of a move: the next process goes on with it.
        if is_wished || result.is_err() && !self.stopping.load(Ordering::SeqCst) {
            handle.transport.end_answer(number)?;
        }
        result
    }

    /// Notes that a command asks for a backend; none if one does already.
    fn begin_fetching(&self, transport: u32) -> Option<Fetching<'_>> {
        let is_first = self.moves.fetching.lock().insert(transport);
        is_first.then_some(Fetching { manager: self, transport })
    }
}

/// One command that asks for a backend.
struct Fetching<'a> {
    manager: &'a Manager,
    transport: u32,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        self.manager.moves.fetching.lock().remove(&self.transport);
    }
}

fn progress(id: BackendId, begun: Instant) -> Progress {
    let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
    Progress { backend_id: id.0, elapsed_ms, ..Progress::default() }
}

impl Fetch<'_> {
    /// Says that this host wants the backend.
    fn ask(&self) -> Result<()> {
        let _answering = self.manager.moves.answering.lock();
        self.handle.transport.answer_move(self.id, self.number, MoveAnswer::Wanted)
    }

    /// Says it again where an answer to another move has replaced it.
    fn ask_again(&self) {
        let transport = &self.handle.transport;
        let _answering = self.manager.moves.answering.lock();
        let is_said = transport.answer_to_move(self.handle.host, self.number).is_some();
        if !is_said && self.offer().is_none() && matches!(transport.has_backend(self.id), Ok(false)) {
            // Not while this host takes part in that move.
            drop(transport.answer_move(self.id, self.number, MoveAnswer::Wanted));
        }
    }

    /// The move that the other host has begun.
    fn offer(&self) -> Option<MoveOffer> {
        self.handle.transport.move_of(self.from).filter(|now| now.number == self.number)
    }

    fn is_alive(&self) -> bool {
        let is_it = |seen: &HostInfo| seen.host_id == self.from.0 && seen.alive;
        self.handle.hosts().is_ok_and(|seen| seen.iter().any(is_it))
    }

    /// Refuses while the other host moves a backend.
    fn refuse_busy(&self) -> Result<()> {
        let other = self.handle.transport.move_of(self.from).filter(|now| now.number != self.number);
        // One that it has handed over is done.
        let is_its = |other: &MoveOffer| {
            other.state != MoveState::Refused
                && !matches!(self.handle.transport.has_owner(other.backend, self.from), Ok(false))
        };
        let Some(other) = other.filter(is_its) else { return Ok(()) };
        let (host, to) = (&self.host, self.handle.host_name(other.to));
        let backend = other.backend;
        let text =
            format!("host {host} moves backend {backend} to host {to} already; try it again after that");
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Whether the backend is here and up.
    fn is_here(&self) -> Result<bool> {
        let here = {
            let tables = self.manager.tables()?;
            running(&tables, self.handle.id)?.backends.get(&self.id).map(|slot| slot.error.clone())
        };
        match here {
            None => Ok(false),
            Some(None) => Ok(true),
            Some(Some(error)) => {
                let text = format!("backend {} is on this host now, and is not up: {error}", self.id);
                Err(Error::new(ErrorKind::Stopped, text))
            }
        }
    }

    /// The other host has refused, or its move has failed.
    fn refused(&self) -> Error {
        let (id, host) = (self.id, &self.host);
        let own = self.manager.moves.refused.lock().take_if(|(refused, _)| *refused == self.number);
        let text = own.map_or_else(
            || format!("host {host} could not move backend {id} to this one; its log says why"),
            |(_, why)| format!("this host cannot have backend {id} of host {host}: {why}; nothing was moved"),
        );
        Error::new(ErrorKind::Stopped, text)
    }

    /// Refuses a backend that another host has got before its move to this one has begun.
    fn refuse_moved(&self) -> Result<()> {
        match self.handle.host_with(self.id) {
            Ok(now) if now != self.from && now != self.handle.host => {
                let text = format!(
                    "backend {} was moved to host {} meanwhile: try it again",
                    self.id,
                    self.handle.host_name(now)
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
            _ => Ok(()),
        }
    }

    /// The other host has not begun in time, or shows no end.
    fn late(&self, has_begun: bool) -> Error {
        if let Err(busy) = self.refuse_busy() {
            return busy;
        }
        let (host, id) = (&self.host, self.id);
        let text = if let Some((_, other)) =
            self.handle.transport.other_part_of(self.handle.host, self.number)
        {
            format!("this host takes part in the move of backend {other}: try it again after that")
        } else if self.is_alive() {
            if has_begun {
                format!("the move does not end: backend-list --all shows where backend {id} is, the logs why")
            } else {
                format!("host {host} is alive and has not begun to move backend {id}: its log says why")
            }
        } else {
            format!(
                "host {host} gives no sign of life (host-list): start its daemon again; backend-list --all shows where backend {id} is then"
            )
        };
        Error::new(ErrorKind::TimedOut, text)
    }

    fn wait(&self, report: Report<'_>) -> Result<Done> {
        let transport = &self.handle.transport;
        let asked = Instant::now();
        let mut begun: Option<Instant> = None;
        loop {
            if self.is_here()? {
                return Ok(Done::default());
            }
            match self.offer().map(|now| now.state) {
                Some(MoveState::Refused) => return Err(self.refused()),
                Some(_) => begun = Some(Instant::now()),
                None if begun.is_none() => {
                    self.refuse_moved()?;
                    if asked.elapsed() > BUSY_LIMIT {
                        self.refuse_busy()?;
                    }
                    self.ask_again();
                }
                None => {}
            }
            let is_with_it = matches!(transport.has_owner(self.id, self.from), Ok(true));
            if begun.is_some_and(|last| last.elapsed() > ENDED_LIMIT) && is_with_it {
                return Err(without_result(&self.host, self.id));
            }
            if begun.is_some() && is_with_it && !self.is_alive() {
                return Err(self.late(true));
            }
            let limit = begun.map_or(asked + BEGIN_LIMIT, |last| last + START_LIMIT);
            if Instant::now() > limit {
                return Err(self.late(begun.is_some()));
            }
            if report(progress(self.id, asked)) == Flow::Cancel && begun.is_none() {
                *self.manager.moves.cancelled.lock() = Some(self.number);
                // This host refuses it from now on; one that has begun meanwhile may be done.
                if self.offer().is_none() {
                    return Err(cancelled());
                }
            }
            self.manager.slot_returned.wait_for(&mut self.manager.tables.lock(), STEP);
        }
    }
}

/// The host that has a backend shows neither its move nor its end.
fn without_result(host: &str, id: BackendId) -> Error {
    let text = format!(
        "host {host} has ended the move of backend {id} without a result: it was restarted, or its log says why; nothing was moved"
    );
    Error::new(ErrorKind::Stopped, text)
}
