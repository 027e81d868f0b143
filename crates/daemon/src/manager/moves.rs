//! Moving a backend from this host to another one of a shared region, while block devices are in use on any host.
//!
//! The host that has the backend does the work: it asks the other one, drains, lets all hosts hold their requests, drains the rest,
//! closes the disk, and hands the backend over. Requests then continue at the other host.
//!
//! Invariants: until the backend is handed over, each failure leaves it where it is, and requests continue there. A disk is closed here
//! before it is opened there. No request is in flight anywhere when the backend is handed over, so none is executed twice.
//!
//! Elsewhere: the other hosts' part (`joining`), what is stored (`cbd-engine`, `transport/moves.rs`), requests that are held
//! (`cbd-remote`, `SwitchDevice`).

mod arriving;
mod fetching;
mod joining;
mod offers;
mod others;

use super::beneath::forget;
use super::drain::Wait;
use super::remote_blkdevs::RemoteSlot;
use super::slots::{TakenSlot, TransportHandle};
use super::tasks::poll_until;
use super::transport::running_mut;
use super::watch::check_file;
use super::{Manager, stopping};
use crate::api::{Done, MoveBackend};
use crate::control::{Flow, Report};
use crate::events::EventName;
use cbd_engine::{MoveAnswer, MoveState};
use cbd_runtime::{DrainRequest, RunningBackend};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, HostId, Result};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a host may take to answer. It looks each second.
const ANSWER_LIMIT: Duration = Duration::from_secs(6);
/// How long the requests that hosts have in flight may take.
const HOLD_LIMIT: Duration = Duration::from_secs(20);
/// How long the other host may take to start the backend before the command says that it has not.
const START_LIMIT: Duration = Duration::from_secs(15);
/// Timeout for the disk to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
/// How long what hosts have answered proves that they live.
const HELD_FOR: Duration = Duration::from_millis(500);
/// Drains with requests going on, at most; one that leaves little ends them.
const DRAINS: u32 = 8;
/// Dirty bytes that are little: what the last drain writes while requests are held.
const FEW_BYTES: u64 = 16 << 20;

/// What this host does for moves.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// The backends on whose moves a thread works.
    moving: Mutex<BTreeSet<(u32, BackendId)>>,
    /// Held while this host says something of a move, for as long as the other host needs to see it. Never held while a disk is used.
    answering: Mutex<()>,
    /// For each transport the number of the move whose backend this host takes over, and since when.
    arriving: Mutex<BTreeMap<u32, (u64, Instant)>>,
    /// The transports on which a command asks another host for a backend.
    fetching: Mutex<BTreeSet<u32>>,
    /// The number of the last move that this host asked for and wants no more.
    cancelled: Mutex<Option<u64>>,
    /// Why block devices could not follow a backend that had moved, the last time.
    follow_error: Mutex<Option<String>>,
    /// The number of the last move that this host has refused, and why.
    refused: Mutex<Option<(u64, String)>>,
}

/// A move to another host that is in progress.
struct Move<'a> {
    manager: &'a Manager,
    handle: TransportHandle,
    id: BackendId,
    to: HostId,
    number: u64,
    timeout: Duration,
}

/// What has become of a backend that was handed over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrival {
    Served,
    /// Not in time.
    NotServed,
    /// The other host was cleared.
    Gone,
}

/// A backend that is the other host's.
struct Moved {
    done: Done,
    /// Why its clients still wait.
    not_served: Option<String>,
}

fn log_failed(transport: u32, id: BackendId, host: &str, error: &Error) {
    let event = EventName::BackendMoveFailed.name();
    tracing::warn!(transport, backend = id.0, event, host, "was not moved to host {host}: {error}");
}

impl Manager {
    /// Moves a backend from or to this host. `report` gets the progress of its drain.
    pub(super) fn backend_move(
        &self,
        transport: u32,
        id: BackendId,
        request: &MoveBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        let _work = self.begin_work()?;
        let handle = self.handle(transport)?;
        let to = handle.host_by_name(&request.to)?;
        let timeout = self.timeout(request.timeout_s);
        let is_own = {
            let tables = self.tables()?;
            super::transport::running(&tables, transport)?.backends.contains_key(&id)
        };
        match (is_own, to == handle.host) {
            (true, false) => self.move_away(handle, id, (to, None), timeout, report),
            (false, true) => self.fetch_backend(&handle, id, report),
            (true, true) => {
                let text = format!("backend {id} is on host {} already", request.to);
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
            (false, false) => {
                let text = if handle.host_with(id)? == to {
                    format!("backend {id} is on host {} already", request.to)
                } else {
                    format!(
                        "backend {id} is on neither this host nor {}: move it from one of the two",
                        request.to
                    )
                };
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
        }
    }

    /// Moves a backend of this host; with a number, because the other host has asked for it.
    fn move_away(
        &self,
        handle: TransportHandle,
        id: BackendId,
        (to, number): (HostId, Option<u64>),
        timeout: Duration,
        report: Report<'_>,
    ) -> Result<Done> {
        let host = handle.host_name(to);
        let begun = self.wait_for_services(&handle, id);
        let run = match begun.and_then(|()| self.begin_backend_move(handle.id, id, &host)) {
            Ok(run) => run,
            Err(error) => {
                if number.is_some() {
                    // The user of the other host is told to look at the log.
                    log_failed(handle.id, id, &host, &error);
                }
                return Err(error);
            }
        };
        let event = EventName::BackendMoving.name();
        tracing::info!(transport = handle.id, backend = id.0, event, host, "is being moved to host {host}");
        let is_wished = number.is_none_or(|number| handle.transport.is_wished(to, number));
        if !is_wished {
            self.end_failed_move(&handle, id);
            let text = format!("host {host} does not ask for it any more");
            tracing::info!(transport = handle.id, backend = id.0, "is not moved: {text}");
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        let offered = handle.transport.offer_move(id, to, number);
        let result = offered.and_then(|own| {
            let moving = Move { manager: self, handle: handle.clone(), id, to, number: own, timeout };
            let moved = moving.run(run, report);
            // Without it the backend is here still, or this process cannot say.
            if moved.is_err()
                && let Err(second) = handle.transport.end_move(own, number.is_some())
            {
                tracing::error!(transport = handle.id, backend = id.0, "the move cannot be ended: {second}");
            }
            moved
        });
        let error = match result {
            Ok(Moved { done, not_served: None }) => return Ok(done),
            // The backend is the other host's; nothing continues here.
            Ok(Moved { not_served: Some(text), .. }) => return Err(Error::new(ErrorKind::TimedOut, text)),
            Err(error) => error,
        };
        self.end_failed_move(&handle, id);
        log_failed(handle.id, id, &host, &error);
        Err(error)
    }

    /// Marks the backend as being moved, so that no block device is added to it and none is removed.
    fn begin_backend_move(&self, transport: u32, id: BackendId, host: &str) -> Result<Arc<RunningBackend>> {
        let mut taken = self.take_slot(transport, id, "its use is being checked")?;
        let slot = &mut taken.slot;
        let result = if slot.stopping {
            Err(Error::new(ErrorKind::Busy, format!("backend {id} is being stopped or moved already")))
        } else {
            slot.run.clone().ok_or_else(|| {
                let why = slot.error.as_deref().unwrap_or("stopped");
                let text =
                    format!("backend {id} is not up ({why}): correct that, and start it with backend-start");
                Error::new(ErrorKind::Stopped, text)
            })
        };
        if result.is_ok() {
            (slot.stopping, slot.moving_to) = (true, Some(host.to_owned()));
        }
        self.put_back(taken);
        result
    }

    /// Continues here after a move that failed.
    fn end_failed_move(&self, handle: &TransportHandle, id: BackendId) {
        let end = Instant::now() + CLOSE_LIMIT;
        let Ok(mut taken) = self.take_slot_until(end, handle.id, id, "being started") else {
            return self.unmark_stop(handle.id, id);
        };
        (taken.slot.stopping, taken.slot.moving_to) = (false, None);
        if taken.slot.run.is_some() {
            taken.slot.resume_blkdevs();
        } else if !self.stopping.load(Ordering::SeqCst) {
            // Its block devices continue with it; what fails now is tried again.
            let _opening = self.opening.read();
            drop(taken.slot.start(&self.fixed, handle));
        }
        self.put_back(taken);
    }

    /// Ends work on moves that this daemon, or a former process of it, has begun, and begins what other hosts ask for.
    pub(super) fn follow_moves(self: &Arc<Self>) {
        for handle in self.shared_handles().into_iter().filter(|handle| !handle.is_lost()) {
            if self.moves.moving.lock().iter().all(|(transport, _)| *transport != handle.id) {
                self.end_former_move(&handle);
            }
            self.begin_wished(&handle);
            self.begin_joining(&handle);
            self.settle_held(&handle);
        }
    }

    /// A former process of this host was moving a backend when it ended. It is here still, or was handed over.
    fn end_former_move(&self, handle: &TransportHandle) {
        let own = handle.transport.own_move().filter(|own| own.state != MoveState::Refused);
        let is_working = |id: BackendId| {
            let tables = self.tables.try_lock()?;
            let running = tables.get(&handle.id)?.running.as_ref().ok()?;
            Some(running.backends.get(&id).is_some_and(|slot| slot.stopping || slot.work.is_some()))
        };
        if let Some(own) = own.filter(|own| is_working(own.backend) == Some(false))
            && let Err(error) = handle.transport.end_move(own.number, false)
        {
            tracing::error!(
                transport = handle.id,
                backend = own.backend.0,
                "the move cannot be ended: {error}"
            );
        }
    }

    /// Begins moves that other hosts have asked for.
    fn begin_wished(self: &Arc<Self>, handle: &TransportHandle) {
        let own = handle.transport.own_move();
        for wish in handle.transport.move_wishes().unwrap_or_default() {
            // It has been answered, or is begun when the move that this host offers has ended.
            if own.is_some_and(|own| own.number == wish.number || own.state != MoveState::Refused) {
                continue;
            }
            let Some(working) = self.begin_moving(handle.id, wish.backend) else { continue };
            let handle = handle.clone();
            self.spawn_retry(move |manager| {
                let _working = working;
                let Ok(_work) = manager.begin_work() else { return };
                let timeout = manager.timeout(None);
                let (transport, id) = (handle.id, wish.backend);
                let moved =
                    manager.move_away(handle.clone(), id, (wish.to, Some(wish.number)), timeout, &mut |_| {
                        Flow::Continue
                    });
                if moved.is_err()
                    && handle.transport.own_move().is_none_or(|own| own.number != wish.number)
                    && let Err(error) = handle.transport.refuse_wish(&wish)
                {
                    tracing::warn!(
                        transport,
                        backend = id.0,
                        "the other host cannot be told that the move has failed: {error}"
                    );
                }
            });
        }
    }

    /// Notes that a thread works on the move of a backend; none if one does already.
    fn begin_moving(self: &Arc<Self>, transport: u32, id: BackendId) -> Option<Moving> {
        self.moves
            .moving
            .lock()
            .insert((transport, id))
            .then(|| Moving { manager: Arc::clone(self), of: (transport, id) })
    }
}

/// One of them.
struct Moving {
    manager: Arc<Manager>,
    of: (u32, BackendId),
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.manager.moves.moving.lock().remove(&self.of);
    }
}

impl Move<'_> {
    fn run(&self, run: Arc<RunningBackend>, report: Report<'_>) -> Result<Moved> {
        let (manager, id) = (self.manager, self.id);
        let mut done = Done { warnings: check_file(id, &run)?.into_iter().collect(), ..Done::default() };
        self.wait_for_acceptance()?;
        // While clients go on, so that the pause is short.
        let mut left = u64::MAX;
        for _ in 0..DRAINS {
            done.written_bytes += self.drain(&run, report)?;
            let dirty = run.cache().map_or(0, |cache| cache.dirty_bytes());
            // Where clients write as fast as the disk does, another round leaves as much.
            if dirty <= FEW_BYTES || dirty > left / 16 * 15 {
                break;
            }
            left = dirty;
        }
        let hosts = self.other_hosts()?;
        self.refuse_dead(&hosts)?;
        self.wait_until_free(&hosts)?;
        let paused = Instant::now();
        self.hold_others(&hosts)?;
        let mut taken = manager.take_slot(self.handle.id, id, "it is being moved to another host")?;
        let result = self.close(&mut taken, &run, report, &mut done);
        // The disk closes with its last user.
        drop(run);
        if let Err(error) = result {
            manager.put_back(taken);
            return Err(error);
        }
        let committed = self.commit(&mut taken, &hosts, paused);
        if let Err(error) = committed {
            manager.put_back(taken);
            return Err(error);
        }
        let (path, segments) = (taken.slot.path.clone(), taken.slot.entry.cache_segments);
        let blkdevs = self.leave(taken, &mut done);
        let host = self.handle.host_name(self.to);
        let arrival = self.wait_for_arrival();
        if arrival == Arrival::Served {
            // A channel that does not open now is opened by a later pass.
            blkdevs.iter().for_each(|blkdev| manager.reopen_remote(self.handle.id, *blkdev));
        }
        let (transport, backend, event) = (self.handle.id, id.0, EventName::BackendMoved.name());
        if arrival == Arrival::Gone {
            let text = format!(
                "host {host} was cleared before it served backend {id}, which is gone and had no dirty data: start the disk again with \
                 backend-start"
            );
            tracing::warn!(
                transport,
                backend,
                event = EventName::BackendMoveFailed.name(),
                host,
                "{text}: {path}"
            );
            return Ok(Moved { done, not_served: Some(text) });
        }
        if arrival == Arrival::NotServed || manager.is_one_waiting(transport, &blkdevs) {
            let text = format!(
                "host {host} has backend {id} now, and does not serve it yet: requests wait; its log says why"
            );
            tracing::warn!(
                transport,
                backend,
                event,
                host,
                "moved to host {host}: {path}; it does not serve it yet"
            );
            return Ok(Moved { done, not_served: Some(text) });
        }
        done.warnings.extend(self.lost_space(segments));
        let pause_ms = u64::try_from(paused.elapsed().as_millis()).unwrap_or(u64::MAX);
        let text = format!("moved to host {host}: {path}; requests waited for {pause_ms} ms");
        tracing::info!(transport, backend, event, host, pause_ms, "{text}");
        Ok(Moved { done, not_served: None })
    }

    fn refuse_stopping(&self) -> Result<()> {
        if self.manager.stopping.load(Ordering::SeqCst) { Err(stopping()) } else { Ok(()) }
    }

    fn drain(&self, run: &RunningBackend, report: Report<'_>) -> Result<u64> {
        let Some(cache) = run.cache() else { return Ok(0) };
        let wait = Wait { id: self.id, run, timeout: self.timeout, stopping: &self.manager.stopping };
        wait.until_drained(DrainRequest::new(&cache), report)
    }

    /// Completes what is in flight, writes back the rest, and closes the disk.
    fn close(
        &self,
        taken: &mut TakenSlot,
        run: &RunningBackend,
        report: Report<'_>,
        done: &mut Done,
    ) -> Result<()> {
        let id = self.id;
        let end = Instant::now() + HOLD_LIMIT;
        for blkdev in taken.slot.blkdevs.values() {
            blkdev.hold(end.saturating_duration_since(Instant::now()))?;
        }
        taken.slot.end_services(false)?;
        done.written_bytes += self.drain(run, report)?;
        if let Some(status) = run.cache().map(|cache| cache.status())
            && !status.is_all_on_backing()
        {
            let text = format!(
                "the cache of backend {id} holds what its disk lacks: {}",
                cbd_runtime::lacking(&status).join("; and ")
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if let Some(changed) = check_file(id, run)?.filter(|warning| !done.warnings.contains(warning)) {
            // The other host has looked for the disk before that.
            return Err(Error::new(ErrorKind::Exchanged, format!("{changed}; nothing was moved")));
        }
        taken.slot.blkdevs.values().for_each(super::blkdev::BlkdevSlot::release);
        Ok(())
    }

    /// Ends the backend here, and hands it over.
    fn commit(&self, taken: &mut TakenSlot, hosts: &BTreeSet<HostId>, paused: Instant) -> Result<()> {
        let (id, transport) = (self.id, &self.handle.transport);
        if paused.elapsed() > HELD_FOR {
            // An answer may be that old.
            self.refuse_silent(hosts)?;
        }
        self.manager.end_run(taken, CLOSE_LIMIT)?;
        // No service accepts a session any more: a process that begins from now on has nothing in flight.
        self.refuse_unheld(hosts)?;
        if let Err(error) = transport.hand_over_backend(id, self.to, self.number) {
            if transport.has_backend(id).unwrap_or(true) {
                return Err(error);
            }
            tracing::error!(
                transport = self.handle.id,
                backend = id.0,
                "the backend was handed over, but: {error}"
            );
        }
        Ok(())
    }

    /// Makes its block devices here those of the other host's backend, and returns them.
    fn leave(&self, mut taken: TakenSlot, done: &mut Done) -> Vec<BlkdevId> {
        let (handle, manager) = (&self.handle, self.manager);
        forget(&manager.fixed, &taken.slot.entry);
        if let Err(error) = handle.transport.settle_blkdevs(Some(self.id)) {
            // Its row is settled with the next start of the daemon.
            done.warnings.push(format!(
                "a block device of this host waits until the daemon is started again: {}",
                error.line()
            ));
        }
        if let Err(error) = handle.transport.end_move(self.number, false) {
            tracing::error!(transport = handle.id, backend = self.id.0, "the move cannot be ended: {error}");
        }
        let rows = handle.transport.remote_blkdevs();
        let blkdevs = std::mem::take(&mut taken.slot.blkdevs);
        let (mut left, mut moved) = (Vec::new(), Vec::new());
        {
            let mut tables = manager.tables.lock();
            let running = running_mut(&mut tables, handle.id);
            for (id, mut blkdev) in blkdevs {
                match (rows.iter().find(|row| row.entry.id == id), &running) {
                    (Some(row), Ok(_)) => left.push((id, RemoteSlot::moved(row.clone(), blkdev))),
                    _ => {
                        let text = "its requests wait for the next start of the daemon";
                        tracing::error!(transport = handle.id, blkdev = id.0, "{text}");
                        blkdev.end();
                    }
                }
            }
            if let Ok(running) = running {
                moved.extend(left.iter().map(|(id, _)| *id));
                running.remotes.extend(left.drain(..));
            }
        }
        manager.scrubs.remove(handle.id, self.id);
        manager.remove_backend(taken);
        left.into_iter().for_each(|(_, slot): (BlkdevId, RemoteSlot)| slot.end());
        moved
    }

    /// Waits until the other host says whether it serves the backend.
    fn wait_for_arrival(&self) -> Arrival {
        let transport = &self.handle.transport;
        // What cannot be read now is looked at again.
        let is_there = || transport.is_taken_over(self.id).unwrap_or(false);
        let is_on = || !matches!(transport.has_owner(self.id, self.to), Ok(false));
        let is_elsewhere =
            || matches!(transport.has_backend(self.id), Ok(true)) || self.handle.host_with(self.id).is_ok();
        let is_moved_on = || !is_on() && is_elsewhere();
        let is_gone = || self.has_left(self.to) || !(is_on() || is_moved_on());
        let answer = || transport.answer_to_move(self.to, self.number);
        let is_known = || is_there() && matches!(answer(), Some(MoveAnswer::Served | MoveAnswer::Refused(_)));
        poll_until(Instant::now() + START_LIMIT, || is_known() || !is_on() || is_gone());
        match answer() {
            _ if is_moved_on() => Arrival::Served,
            _ if is_gone() => Arrival::Gone,
            Some(MoveAnswer::Served) if is_there() => Arrival::Served,
            _ => Arrival::NotServed,
        }
    }

    /// A warning if the cache is smaller than before.
    fn lost_space(&self, before: u32) -> Option<String> {
        let others = self.handle.transport.backends_of_others().ok()?;
        let now = others.iter().find(|entry| entry.id == self.id)?.cache_segments;
        let host = self.handle.host_name(self.to);
        let text =
            format!("there was less space: on host {host} its cache has {now} segments instead of {before}");
        (now < before).then_some(text)
    }
}
