//! A checkpoint of several backends at one moment, at which their disks then stay for a time.
//!
//! Invariants: nothing behind the moment gets to a disk from when the epochs are closed until the pause of writeback ends:
//! the limits of writeback are lifted only when the pauses of all backends are in their rows and in force, or when the
//! command fails, by dropping [`CommonMoment`]. A command that fails leaves no pause behind; a daemon that is killed may leave
//! one, which ends by itself.
//!
//! Elsewhere: why closing the epochs makes one moment (`cbd_engine`, `cache::moment`), the wait for one disk (`drain`).

use super::drain::Wait;
use super::transport::running;
use super::watch::check_file;
use super::{Manager, backend};
use crate::api::{CommonCheckpoint, Done, Moment, SettingsChange};
use crate::control::Report;
use crate::settings::check_hold;
use crate::size::format_time;
use cbd_engine::{Cache, CommonMoment};
use cbd_runtime::{DrainRequest, ProcessEnvironment, RunningBackend, wall_ms};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;

/// How often a moment is made again after one that was not crash-consistent: the batch before it was not over.
const ATTEMPTS: u32 = 3;

/// The progress of waits, which all members share.
struct Waits<'a, 'b> {
    timeout: Duration,
    report: Report<'a>,
    done: &'b mut Done,
}

/// A backend of the group.
struct Member {
    id: BackendId,
    run: Arc<RunningBackend>,
    cache: Arc<Cache<ProcessEnvironment>>,
}

impl Manager {
    /// Closes an epoch of each backend at one moment, waits until their disks have everything before it, and leaves the disks
    /// there for a time.
    pub(super) fn checkpoint_at_one_moment(
        &self,
        transport: u32,
        request: &CommonCheckpoint,
        report: Report<'_>,
    ) -> Result<Done> {
        let hold_s = check_hold(request.hold_s)?;
        let members = self.members(transport, &request.backends)?;
        let mut done = Done::default();
        for member in &members {
            done.warnings.extend(check_file(member.id, &member.run)?);
        }
        let timeout = self.timeout(request.timeout_s);
        let mut waits = Waits { timeout, report, done: &mut done };
        let mut attempt = 1;
        let moment = loop {
            match self.reach_moment(&members, &mut waits) {
                Err(error) if error.kind() == ErrorKind::Backing && attempt < ATTEMPTS => attempt += 1,
                ended => break ended?,
            }
        };
        for member in &members {
            let after = check_file(member.id, &member.run)?;
            done.warnings.extend(after.filter(|warning| !done.warnings.contains(warning)));
        }
        let at_ms = moment.wall_ms();
        let held_until_ms = self.hold(transport, &members, moment, hold_s)?;
        let named: Vec<String> = members.iter().map(|member| member.id.to_string()).collect();
        tracing::info!(
            transport,
            "the disks of backends {} are at the moment {}, until {} or writeback=on",
            named.join(", "),
            format_time(at_ms),
            format_time(held_until_ms)
        );
        done.moment = Some(Moment { at_ms, held_until_ms });
        Ok(done)
    }

    /// The backends of the group, none of which has a reason against a common moment.
    fn members(&self, transport: u32, ids: &[u32]) -> Result<Vec<Member>> {
        let refused = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        if ids.len() < 2 {
            return refused("a checkpoint together needs two backends or more".to_owned());
        }
        let tables = self.tables()?;
        let running = running(&tables, transport)?;
        let mut members: Vec<Member> = Vec::new();
        for id in ids.iter().copied().map(BackendId) {
            if members.iter().any(|member| member.id == id) {
                return refused(format!("backend {id} is named twice"));
            }
            let slot = running.backends.get(&id).ok_or_else(|| backend::unknown(id))?;
            if slot.stopping {
                return Err(slot.being_stopped());
            }
            let run = slot.run.clone().ok_or_else(|| {
                let why = slot.error.as_deref().unwrap_or("stopped");
                Error::new(
                    ErrorKind::Stopped,
                    format!(
                        "backend {id} is not up ({why}); correct that and start it again with backend-start"
                    ),
                )
            })?;
            let Some(cache) = run.cache() else {
                return refused(format!(
                    "backend {id} has no cache: writes reach its disk at once, so it cannot stay at a moment"
                ));
            };
            cache.check_common_moment()?;
            let paused_until_ms = slot.entry.settings.writeback_paused_until_ms;
            if paused_until_ms > wall_ms() {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "writeback of backend {id} is paused until {}: wait, or end the pause with cbdctrl set -b {id} writeback=on",
                        format_time(paused_until_ms)
                    ),
                ));
            }
            members.push(Member { id, run, cache });
        }
        Ok(members)
    }

    /// Makes a moment, and waits until the disks are there.
    fn reach_moment(
        &self,
        members: &[Member],
        waits: &mut Waits<'_, '_>,
    ) -> Result<CommonMoment<ProcessEnvironment>> {
        // Writeback of what follows the moment waits until all disks are there, and writers wait when a cache is full. So
        // little is left to be written when the moment is made.
        for member in members {
            self.wait_for(member, DrainRequest::new(&member.cache), waits)?;
        }
        let caches: Vec<_> = members.iter().map(|member| Arc::clone(&member.cache)).collect();
        let moment = CommonMoment::close(&caches)?;
        for (member, cut) in members.iter().zip(moment.cuts()) {
            self.wait_for(member, DrainRequest::of(&member.cache, cut), waits)?;
        }
        moment.check()?;
        Ok(moment)
    }

    fn wait_for(&self, member: &Member, request: DrainRequest, waits: &mut Waits<'_, '_>) -> Result<()> {
        let Member { id, run, .. } = member;
        let wait = Wait { id: *id, run, timeout: waits.timeout, stopping: &self.stopping };
        waits.done.written_bytes += wait.until_drained(request, waits.report)?;
        Ok(())
    }

    /// Pauses writeback of all members, and lifts the limits with the pauses only. Returns until when.
    fn hold(
        &self,
        transport: u32,
        members: &[Member],
        moment: CommonMoment<ProcessEnvironment>,
        hold_s: u32,
    ) -> Result<u64> {
        let mut held_until_ms = u64::MAX;
        let mut paused = Vec::new();
        let held = members.iter().try_for_each(|member| {
            let settings = self.pause(transport, member.id, hold_s)?;
            paused.push(member.id);
            held_until_ms = held_until_ms.min(settings.writeback_paused_until_ms);
            Ok(())
        });
        match held.and_then(|()| moment.hold()) {
            Ok(()) => Ok(held_until_ms),
            Err(error) => {
                let left = paused.into_iter().filter(|id| self.pause(transport, *id, 0).is_err());
                let left: Vec<String> = left.map(|id| id.to_string()).collect();
                if left.is_empty() {
                    return Err(error);
                }
                let text = format!(
                    "{}; writeback of backends {} stays paused for {hold_s} s, unless it is ended with writeback=on",
                    error.line(),
                    left.join(", ")
                );
                Err(Error::new(error.kind(), text))
            }
        }
    }

    /// Pauses writeback of a backend for so many seconds, in its row first; 0 ends the pause.
    fn pause(&self, transport: u32, id: BackendId, seconds: u32) -> Result<crate::api::Settings> {
        let change = SettingsChange { writeback_pause_s: Some(seconds), ..SettingsChange::default() };
        self.change_settings(transport, id, &change)
    }
}
