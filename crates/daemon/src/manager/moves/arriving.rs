//! Backends that were moved to this host: it takes them over, serves them, and says so.
//!
//! Invariants: until this host has said whether it serves a backend it takes part in its move for all other hosts, though for no longer than
//! the former host waits for that: a disk may hang while it is opened.
//!
//! Elsewhere: this host's part before that (`joining`).

use super::START_LIMIT;
use crate::events::EventName;
use crate::manager::backend::BackendSlot;
use crate::manager::beneath::forget;
use crate::manager::slots::TransportHandle;
use crate::manager::tasks::{Stage, poll_until};
use crate::manager::transport::{running, running_mut};
use crate::manager::{Manager, stopping};
use cbd_engine::{BackendEntry, MoveAnswer, MoveOffer, MoveRefusal};
use cbd_runtime::disk::lanes_max;
use cbd_types::{BackendId, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a backend that was moved here waits for the space that it had.
const SPACE_LIMIT: Duration = Duration::from_secs(2);
/// How long the former host may take to free what it had.
const FREED_LIMIT: Duration = Duration::from_secs(1);
/// How long other hosts may take to follow a backend that was moved here. One that comes later is served by a later pass.
const FOLLOW_LIMIT: Duration = Duration::from_secs(3);
/// Time after which another host that waits has seen what this one says.
const SEEN: Duration = Duration::from_millis(100);

impl Manager {
    /// Takes over backends that were moved to this host: after a restart, or where it has failed before.
    pub(super) fn begin_arrivals(self: &Arc<Self>, handle: &TransportHandle, offers: &[MoveOffer]) {
        self.end_late_arrival(handle);
        self.say_former_part(handle);
        let answered = handle.transport.answered_backend();
        let is_offered = |id| offers.iter().any(|offer| offer.backend == id && offer.to == handle.host);
        let is_answered = |id: BackendId| answered == Some(id) || is_offered(id);
        for (id, _) in handle.transport.incoming_backends(&is_answered).unwrap_or_default() {
            let Some(working) = self.begin_moving(handle.id, id) else { continue };
            let handle = handle.clone();
            self.spawn_retry(move |manager| {
                let _working = working;
                if let Ok(_work) = manager.begin_work() {
                    // The last move was that one: this process, or a former one, took part in it.
                    let number = handle.transport.ended_answer(id);
                    manager.arrive(&handle, id, number.or_else(|| manager.former_number(&handle, id)));
                }
            });
        }
    }

    /// Takes over a backend that was moved here by the move with this number, and says whether this host serves it.
    pub(super) fn arrive(&self, handle: &TransportHandle, id: BackendId, number: Option<u64>) {
        if let Some(number) = number {
            self.begin_arrival(handle, id, number);
        }
        let is_served = self.take_over(handle, id);
        if let Some(number) = number {
            let _answering = self.moves.answering.lock();
            let said = match is_served {
                Some(is_served) => {
                    self.moves.arriving.lock().retain(|_, (arriving, _)| *arriving != number);
                    say_served(handle, id, number, is_served)
                }
                // The next process says it.
                None if self.stopping.load(Ordering::SeqCst) => Ok(()),
                None => handle.transport.end_answer(number),
            };
            if let Err(error) = said {
                tracing::warn!(
                    transport = handle.id,
                    backend = id.0,
                    "the former host is not told that backend {id} has arrived: {error}"
                );
            }
        }
        if is_served.is_some() {
            self.wait_for_followers(handle, id);
        }
    }

    /// Takes part in the move for all other hosts, but not for longer than the former host waits: it may have to be tried again and again.
    fn begin_arrival(&self, handle: &TransportHandle, id: BackendId, number: u64) {
        let _answering = self.moves.answering.lock();
        let mut arriving = self.moves.arriving.lock();
        let former = arriving.get(&handle.id).filter(|(arriving, _)| *arriving == number);
        let since = former.map_or_else(Instant::now, |(_, since)| *since);
        if since.elapsed() < START_LIMIT && handle.transport.answer_move(id, number, MoveAnswer::Held).is_ok()
        {
            arriving.insert(handle.id, (number, since));
        }
    }

    /// The number of the move in which a former process took part, if it was one of this backend.
    fn former_number(&self, handle: &TransportHandle, id: BackendId) -> Option<u64> {
        let tables = self.tables.lock();
        let former = running(&tables, handle.id).ok()?.former_part;
        former.and_then(|(backend, number)| (backend == id).then_some(number))
    }

    /// Says of a backend that a former process of this host took over whether this one serves it.
    fn say_former_part(&self, handle: &TransportHandle) {
        let (id, number, is_served) = {
            let mut tables = self.tables.lock();
            let Ok(running) = running_mut(&mut tables, handle.id) else { return };
            let Some((id, number)) = running.former_part else { return };
            // It is being started, or its disk is still in use by that process, or it was not taken over yet.
            let is_known = |slot: &&BackendSlot| slot.work.is_none() && !slot.is_busy;
            let Some(slot) = running.backends.get(&id).filter(is_known) else { return };
            let is_served = slot.run.is_some();
            running.former_part = None;
            (id, number, is_served)
        };
        let _answering = self.moves.answering.lock();
        if handle.transport.ended_answer(id) == Some(number)
            && let Err(error) = say_served(handle, id, number, is_served)
        {
            tracing::warn!(transport = handle.id, backend = id.0, "{error}");
        }
    }

    /// Lets this host take part in other moves while a backend takes longer to arrive than its former host waits.
    fn end_late_arrival(&self, handle: &TransportHandle) {
        let _answering = self.moves.answering.lock();
        let late = self.moves.arriving.lock().get(&handle.id).copied();
        if let Some((number, _)) = late.filter(|(_, since)| since.elapsed() > START_LIMIT)
            && let Err(error) = handle.transport.end_answer(number)
        {
            tracing::error!(transport = handle.id, "{error}");
        }
    }

    /// Starts a backend that was moved to this host, with this host's block devices on it. Whether it is served; `None` if it is not
    /// this host's yet.
    fn take_over(&self, handle: &TransportHandle, id: BackendId) -> Option<bool> {
        self.try_take_over(handle, id).unwrap_or_else(|error| {
            let (transport, backend) = (handle.id, id.0);
            tracing::error!(
                transport,
                backend,
                "backend {id}, which was moved to this host, is not taken over: {error}"
            );
            None
        })
    }

    /// Serves the block devices of other hosts on a backend that was moved here as soon as they have followed it.
    fn wait_for_followers(&self, handle: &TransportHandle, id: BackendId) {
        poll_until(Instant::now() + FOLLOW_LIMIT, || self.serves_all(handle, id));
    }

    fn try_take_over(&self, handle: &TransportHandle, id: BackendId) -> Result<Option<bool>> {
        let incoming = handle.transport.incoming_backends(&|_| true)?;
        let Some((_, uuid)) = incoming.into_iter().find(|(incoming, _)| *incoming == id) else {
            return Ok(None);
        };
        let blkdevs = self.close_channels(handle, id)?;
        let entry = match self.take_over_row(handle, id, &uuid) {
            Ok(entry) => entry,
            Err(error) => {
                blkdevs.into_iter().for_each(|taken| self.put_remote_back(taken));
                return Err(error);
            }
        };
        // What this machine knows of the disk is of a time before the backend was on another host.
        forget(&self.fixed, &entry);
        let mut slot = BackendSlot::new(entry);
        for mut taken in blkdevs {
            let entry = handle.transport.blkdevs().into_iter().find(|entry| entry.id == taken.id);
            if let Some(entry) = entry {
                let mut blkdev = taken.slot.take_blkdev();
                blkdev.entry = entry;
                slot.blkdevs.insert(taken.id, blkdev);
            }
            self.remove_remote(taken);
        }
        let opening = self.opening.read();
        let mut started = slot.start(&self.fixed, handle);
        let end = Instant::now() + FREED_LIMIT;
        while started.as_ref().is_err_and(|error| error.kind() == ErrorKind::Busy) && Instant::now() < end {
            // Another program looks at the disk at this moment, as a command does that finds it in use.
            poll_until(Instant::now() + SEEN, || false);
            started = slot.start(&self.fixed, handle);
        }
        if started.is_ok() {
            handle.open_exports(&self.fixed, &mut slot);
        }
        drop(opening);
        let (event, path) = (EventName::BackendStarted.name(), slot.path.clone());
        match &started {
            Ok(()) => {
                let cache = slot.entry.cache_segments;
                tracing::info!(
                    transport = handle.id,
                    backend = id.0,
                    event,
                    path,
                    "moved to this host, with a cache of {cache} segments: {path}"
                );
            }
            Err(error) => tracing::error!(transport = handle.id, backend = id.0, "{error}"),
        }
        let mut tables = self.tables.lock();
        match running_mut(&mut tables, handle.id) {
            Ok(running) => drop(running.backends.insert(id, slot)),
            Err(_) => {
                drop(tables);
                slot.end(handle.id, id, &Stage::nowhere());
                return Err(stopping());
            }
        }
        drop(tables);
        self.refresh_tables_copy(handle);
        // The other hosts' requests wait for it.
        self.serve_backend(handle.id, id);
        Ok(Some(started.is_ok()))
    }

    /// Makes the row of a backend that was moved to this host an active one, with a cache, and this host's block devices on it local.
    fn take_over_row(
        &self,
        handle: &TransportHandle,
        id: BackendId,
        uuid: &[u8; 16],
    ) -> Result<BackendEntry> {
        // The former host frees its segments right after it has handed the backend over.
        let is_free = || handle.transport.is_released_by_others(id);
        poll_until(Instant::now() + FREED_LIMIT, is_free);
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let lanes = |segments| lanes_max(u64::from(segments), processors);
        let after = self.last_drained(handle, uuid);
        let end = Instant::now() + SPACE_LIMIT;
        let (entry, is_less) = loop {
            let accepts_less = Instant::now() >= end;
            match handle.transport.take_over_backend(id, after, &lanes, accepts_less) {
                Err(error) if error.kind() == ErrorKind::NoSpace && !accepts_less => {}
                taken_over => break (taken_over?, accepts_less),
            }
            self.slot_returned.wait_for(&mut self.tables.lock(), Duration::from_millis(20));
        };
        if is_less {
            let (transport, segments) = (handle.id, entry.cache_segments);
            let text = format!("there is less space than its cache had: it has {segments} segments now");
            tracing::warn!(transport, backend = id.0, "{text}");
        }
        handle.transport.settle_blkdevs(Some(id))?;
        Ok(entry)
    }
}

/// Says whether this host serves a backend that was moved here. Called with `answering` locked.
fn say_served(handle: &TransportHandle, id: BackendId, number: u64, is_served: bool) -> Result<()> {
    let answer = if is_served { MoveAnswer::Served } else { MoveAnswer::Refused(MoveRefusal::Other) };
    say(handle, id, number, answer)
}

/// Says something of a move, for as long as the host that has the backend needs to see it. Called with `answering` locked.
pub(super) fn say(handle: &TransportHandle, id: BackendId, number: u64, answer: MoveAnswer) -> Result<()> {
    handle.transport.answer_move(id, number, answer)?;
    poll_until(Instant::now() + SEEN, || false);
    Ok(())
}
