//! Moves of backends that another host does: this host gets the backend, or has block devices on it.
//!
//! Invariants: this host accepts a backend only if it reaches the same disk. Its requests are held, with none in flight, before it says
//! so; they continue when the move has ended, with the host that has the backend then.
//!
//! Elsewhere: the host that has the backend (the parent module).

use super::arriving::say;
use super::{ANSWER_LIMIT, HOLD_LIMIT, Moving};
use crate::manager::Manager;
use crate::manager::remote_blkdevs::{RemoteSlot, TakenRemote};
use crate::manager::slots::TransportHandle;
use crate::manager::tasks::poll_until;
use crate::manager::transport::running;
use cbd_backing::{Identity, check_writable, identity_of};
use cbd_engine::{BackendEntry, MoveAnswer, MoveOffer, MoveRefusal, MoveState};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, HostId, Result};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Looks one after the other without the offer after which it has ended.
const MISSES: u32 = 3;
/// How long this host looks at a move at a time, to see whether the daemon stops.
const LOOK: Duration = Duration::from_secs(1);

impl Manager {
    /// Begins to take part in the moves that other hosts offer, and takes over what was moved to this host.
    pub(super) fn begin_joining(self: &Arc<Self>, handle: &TransportHandle) {
        let Ok(offers) = handle.transport.moves_of_others() else { return };
        let offers: Vec<MoveOffer> =
            offers.into_iter().filter(|offer| offer.state != MoveState::Refused).collect();
        for offer in &offers {
            let is_target = offer.to == handle.host;
            // What was handed over arrives below; its former host may show the offer for as long as it is away.
            if is_target && !matches!(handle.transport.has_owner(offer.backend, offer.from), Ok(true)) {
                continue;
            }
            if !is_target && self.remotes_on(handle.id, offer.backend).is_empty() {
                continue;
            }
            let Some(working) = self.begin_moving(handle.id, offer.backend) else { continue };
            let (handle, offer) = (handle.clone(), *offer);
            self.spawn_retry(move |manager| {
                let working: Moving = working;
                if let Ok(_work) = manager.begin_work() {
                    manager.join_move(&handle, &offer);
                }
                drop(working);
            });
        }
        self.begin_arrivals(handle, &offers);
    }

    /// The block devices of this host on a backend of another one.
    fn remotes_on(&self, transport: u32, backend: BackendId) -> Vec<BlkdevId> {
        let tables = self.tables.lock();
        let Ok(running) = running(&tables, transport) else { return Vec::new() };
        let on_it = running.remotes.iter().filter(|(_, slot)| slot.blkdev.entry.backend == backend);
        on_it.map(|(id, _)| *id).collect()
    }

    fn join_move(&self, handle: &TransportHandle, offer: &MoveOffer) {
        let is_target = offer.to == handle.host;
        if is_target && let Err((why, error)) = self.accept_when_free(handle, offer) {
            let host = handle.host_name(offer.from);
            let (transport, backend) = (handle.id, offer.backend.0);
            tracing::warn!(
                transport,
                backend,
                "this host cannot have backend {backend} of host {host}: {error}"
            );
            *self.moves.refused.lock() = Some((offer.number, error.line()));
            let _answering = self.moves.answering.lock();
            drop(say(handle, offer.backend, offer.number, MoveAnswer::Refused(why)));
        }
        let (is_held, missed) = (Cell::new(false), Cell::new(0_u32));
        let is_over = || {
            let now = handle.transport.move_of(offer.from).filter(|now| now.number == offer.number);
            let now = now.filter(|now| now.state != MoveState::Refused);
            if !is_held.get() && now.is_some_and(|now| now.state == MoveState::Hold) {
                is_held.set(self.hold_for(handle, offer));
            }
            // A header that is being stored may not be readable at a time.
            missed.set(if now.is_none() { missed.get() + 1 } else { 0 });
            missed.get() >= MISSES
                || !matches!(handle.transport.has_owner(offer.backend, offer.from), Ok(true))
        };
        while !poll_until(Instant::now() + LOOK, is_over) {
            if self.stopping.load(Ordering::SeqCst) || handle.is_lost() {
                return;
            }
        }
        let is_handed_over = || matches!(handle.transport.has_owner(offer.backend, offer.from), Ok(false));
        if is_target && is_handed_over() {
            // It takes part in no other move until it has said that it serves this backend.
            return self.arrive(handle, offer.backend, Some(offer.number));
        }
        // Before requests continue: the other host hands nothing over from then on. Looked at last: an offer ends after the backend
        // was handed over.
        let ended = handle.transport.end_answer(offer.number);
        if let Err(error) = &ended {
            tracing::error!(transport = handle.id, backend = offer.backend.0, "{error}");
        }
        match handle.transport.has_owner(offer.backend, offer.from) {
            Ok(true) if ended.is_ok() => self.resume_remotes(handle, offer.backend),
            Ok(true) => {}
            Ok(false) if is_target => self.arrive(handle, offer.backend, Some(offer.number)),
            Ok(false) => self.follow_backend(handle, offer.backend),
            // The region fails: requests wait.
            Err(error) => tracing::error!(transport = handle.id, backend = offer.backend.0, "{error}"),
        }
    }

    /// Accepts a backend once this host takes part in no other move. The other host waits as long for its answer.
    fn accept_when_free(
        &self,
        handle: &TransportHandle,
        offer: &MoveOffer,
    ) -> std::result::Result<(), (MoveRefusal, Error)> {
        let end = Instant::now() + ANSWER_LIMIT;
        let other = |error: Error| (MoveRefusal::Other, error);
        // A disk may hang while it is looked at: this host takes part in other moves meanwhile.
        let entry = find_disk(handle, offer)?;
        loop {
            let is_offered =
                || handle.transport.move_of(offer.from).is_some_and(|now| now.number == offer.number);
            poll_until(end, || is_free(handle, offer) || !is_offered());
            let _answering = self.moves.answering.lock();
            self.refuse_cancelled(offer.number).map_err(other)?;
            match handle.transport.accept_move(offer, &entry.path, &entry.identity) {
                // It was not free any more.
                Err(error) if error.kind() == ErrorKind::Busy && is_offered() && Instant::now() < end => {}
                accepted => return accepted.map_err(other),
            }
        }
    }

    /// Refuses a move that a command of this host has asked for, and wants no more.
    fn refuse_cancelled(&self, number: u64) -> Result<()> {
        if *self.moves.cancelled.lock() == Some(number) {
            let text = "the command that asked for it on this host has ended";
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        Ok(())
    }

    /// Holds the requests of this host on the backend, and says so. `false` while this host takes part in another move, and if that
    /// is not asked for any more or cannot be read now.
    fn hold_for(&self, handle: &TransportHandle, offer: &MoveOffer) -> bool {
        let is_asked = || {
            let now = handle.transport.move_of(offer.from).filter(|now| now.number == offer.number);
            now.is_some_and(|now| now.state == MoveState::Hold)
        };
        // Before clients wait. The other host sees that this one takes part in another move, and ends its own.
        poll_until(Instant::now() + ANSWER_LIMIT, || is_free(handle, offer) || !is_asked());
        if !is_asked() || !is_free(handle, offer) {
            return false;
        }
        let held = self.try_hold_for(handle, offer);
        let _answering = self.moves.answering.lock();
        let held =
            held.and_then(|()| handle.transport.answer_move(offer.backend, offer.number, MoveAnswer::Held));
        if let Err(error) = held {
            tracing::warn!(
                transport = handle.id,
                backend = offer.backend.0,
                "requests cannot be held for its move: {error}"
            );
        }
        true
    }

    fn try_hold_for(&self, handle: &TransportHandle, offer: &MoveOffer) -> Result<()> {
        let is_cancelled = self.refuse_cancelled(offer.number).map_err(|error| (MoveRefusal::Other, error));
        if offer.to == handle.host
            && let Err((why, error)) = is_cancelled.and_then(|()| find_disk(handle, offer))
        {
            // It was there when this host accepted.
            *self.moves.refused.lock() = Some((offer.number, error.line()));
            let _answering = self.moves.answering.lock();
            say(handle, offer.backend, offer.number, MoveAnswer::Refused(why))?;
            return Err(error);
        }
        // A device that is being opened may have clients in a moment; none is opened from now on.
        let end = Instant::now() + HOLD_LIMIT;
        let is_opening = || {
            let tables = self.tables.lock();
            let Ok(running) = running(&tables, handle.id) else { return false };
            let mut on_it =
                running.remotes.values().filter(|slot| slot.blkdev.entry.backend == offer.backend);
            on_it.any(|slot| slot.is_taken())
        };
        if !poll_until(end, || !is_opening()) {
            return Err(Error::new(ErrorKind::TimedOut, "a block device on it is being opened or closed"));
        }
        let switches: Vec<_> = {
            let tables = self.tables.lock();
            let running = running(&tables, handle.id)?;
            let on_it = running.remotes.values().filter(|slot| slot.blkdev.entry.backend == offer.backend);
            on_it.filter_map(|slot| slot.blkdev.switch.clone()).collect()
        };
        switches.iter().try_for_each(|switch| switch.hold(end.saturating_duration_since(Instant::now())))
    }

    /// Continues requests that are still held although no move is in progress, and follows backends that have moved: the end of a move
    /// could not be followed at once, or there was no space for another area then.
    pub(super) fn settle_held(self: &Arc<Self>, handle: &TransportHandle) {
        let known: Vec<(BackendId, HostId, [u8; 16], bool)> = {
            let Some(tables) = self.tables_to_retry() else { return };
            let Ok(running) = running(&tables, handle.id) else { return };
            let remotes = running.remotes.values().filter(|slot| !slot.is_taken());
            let of = |slot: &RemoteSlot| {
                (slot.blkdev.entry.backend, slot.owner(), slot.backend_uuid(), slot.has_held_session())
            };
            remotes.map(of).collect()
        };
        for (backend, owner, uuid, is_held) in known {
            let is_it =
                |entry: &BackendEntry| entry.id == backend && entry.uuid == uuid && entry.host != owner;
            let has_moved = || {
                matches!(handle.transport.has_owner(backend, owner), Ok(false))
                    && handle.entries_of_others().iter().any(is_it)
            };
            if !is_held && !has_moved() {
                continue;
            }
            let Some(working) = self.begin_moving(handle.id, backend) else { continue };
            let handle = handle.clone();
            self.spawn_retry(move |manager| {
                let _working = working;
                let Ok(_work) = manager.begin_work() else { return };
                match handle.transport.has_owner(backend, owner) {
                    Ok(true) => manager.resume_remotes(&handle, backend),
                    Ok(false) if matches!(handle.transport.has_backend(backend), Ok(false)) => {
                        manager.follow_backend(&handle, backend);
                    }
                    // A pass takes it over; the region fails.
                    Ok(false) | Err(_) => {}
                }
            });
        }
    }

    /// Whether requests of one of these block devices wait for their host.
    pub(super) fn is_one_waiting(&self, transport: u32, blkdevs: &[BlkdevId]) -> bool {
        let tables = self.tables.lock();
        let Ok(running) = running(&tables, transport) else { return false };
        let mut slots = blkdevs.iter().filter_map(|id| running.remotes.get(id));
        slots.any(|slot| slot.is_waiting())
    }

    /// Continues where the requests were.
    fn resume_remotes(&self, handle: &TransportHandle, backend: BackendId) {
        let tables = self.tables.lock();
        let Ok(running) = running(&tables, handle.id) else { return };
        for slot in running.remotes.values().filter(|slot| slot.blkdev.entry.backend == backend) {
            slot.blkdev.resume_former();
        }
    }

    /// Lets this host's block devices use the backend on its new host. A channel that does not open now is opened by a later pass.
    fn follow_backend(&self, handle: &TransportHandle, backend: BackendId) {
        // What cannot be taken is followed by a later pass.
        let Ok(mut closed) = self.close_channels(handle, backend) else { return };
        let settled = handle.transport.settle_blkdevs(Some(backend));
        let line = settled.err().map(|error| error.line());
        // A pass each second tries it again: only another error is logged.
        let former = std::mem::replace(&mut *self.moves.follow_error.lock(), line.clone());
        if let Some(line) = line.filter(|line| former.as_ref() != Some(line)) {
            tracing::error!(
                transport = handle.id,
                backend = backend.0,
                "a block device cannot follow its backend: {line}"
            );
        }
        closed.iter_mut().for_each(|taken| taken.slot.take_row(handle));
        let ids: Vec<BlkdevId> = closed.iter().map(|taken| taken.id).collect();
        closed.into_iter().for_each(|taken| self.put_remote_back(taken));
        ids.into_iter().for_each(|id| self.reopen_remote(handle.id, id));
    }

    /// Takes all block devices of this host on a backend of another one, and ends their sessions: a row is changed only while none of them
    /// uses its area.
    pub(super) fn close_channels(
        &self,
        handle: &TransportHandle,
        backend: BackendId,
    ) -> Result<Vec<TakenRemote>> {
        let mut all = Vec::new();
        for id in self.remotes_on(handle.id, backend) {
            match self.take_remote(handle.id, id) {
                Ok(taken) => all.push(taken),
                Err(error) => {
                    all.into_iter().for_each(|taken| self.put_remote_back(taken));
                    return Err(error);
                }
            }
        }
        all.iter_mut().for_each(|taken| taken.slot.close_channel());
        Ok(all)
    }
}

/// Whether this host takes part in no other move.
fn is_free(handle: &TransportHandle, offer: &MoveOffer) -> bool {
    handle.transport.other_part_of(handle.host, offer.number).is_none()
}

/// Refuses a backend whose disk this host does not reach.
fn find_disk(
    handle: &TransportHandle,
    offer: &MoveOffer,
) -> std::result::Result<BackendEntry, (MoveRefusal, Error)> {
    let other = |error: Error| (MoveRefusal::Other, error);
    let entry = handle.transport.offered_backend(offer).map_err(other)?;
    let recorded = Identity::parse(&entry.identity).map_err(other)?;
    let identity = identity_of(Path::new(&entry.path)).map_err(|error| (MoveRefusal::NoDisk, error))?;
    let differs = |why: String| {
        let error = Error::new(ErrorKind::Exchanged, format!("{}: {why}", entry.path));
        (MoveRefusal::OtherDisk, error)
    };
    recorded.same_disk(&identity).map_err(differs)?;
    let machine = handle.is_on_this_machine(offer.from);
    // It could not be opened here after the decision. On the machine of the other host that one uses it.
    check_writable(Path::new(&entry.path), machine == Some(false)).map_err(|error| match error.kind() {
        ErrorKind::ReadOnly | ErrorKind::Permission => (MoveRefusal::ReadOnly, error),
        _ => (MoveRefusal::Other, error),
    })?;
    if identity.is_weak() && machine != Some(true) {
        let text = format!("{} has nothing by which two machines know it as the same disk", entry.path);
        return Err((MoveRefusal::NoIdentity, Error::new(ErrorKind::Unsupported, text)));
    }
    Ok(entry)
}

impl TransportHandle {
    /// Whether another host is a process of this boot of this machine, if it has said that.
    fn is_on_this_machine(&self, host: HostId) -> Option<bool> {
        let (members, _) = self.transport.members()?;
        let boot = members.region().boot();
        let beat = members.host(host).ok().flatten().and_then(|host| host.beat)?;
        Some(beat.is_of_boot(boot))
    }
}
