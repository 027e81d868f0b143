//! The scrubs of the backends, and requests to verify a range once.
//!
//! Invariants: no lock of the tables is held while a device is looked at. A scrub and a request to verify end when a command changes
//! the backend, or when the daemon ends; neither waits for what they look at.
//!
//! Elsewhere: a scrub itself ([`crate::scrub`]).

use super::drain::REPORT_INTERVAL;
use super::transport::running;
use super::{Manager, backend, promise, stopping};
use crate::api::{
    Done, FindingInfo, Progress, ScrubAction, ScrubInfo, ScrubRequest, SettingsChange, VerifiedInfo,
    VerifyLevel, VerifyRange,
};
use crate::control::{Flow, Report};
use crate::scrub::gather::{Gathered, words};
use crate::scrub::{Held, Scrub, Surroundings, Turn, now_s};
use cbd_engine::{MetadataPlace, Transport};
use cbd_export::BlockDevice;
use cbd_runtime::verify::{Load, Sweep, VERIFY_STEP};
use cbd_runtime::{ProcessEnvironment, RunningBackend};
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, Result, VerifiedMetadata, uuid_text};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a command waits for the thread of a scrub, which cancels its requests.
const END_LIMIT: Duration = Duration::from_secs(2);

/// How long a verification waits for a request before it looks whether it has to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The findings that an error, and the log of a verification, name.
const NAMED_MAX: usize = 8;

/// A transport and one of its backends.
pub(super) type Place = (u32, u32);

/// The scrubs of all backends.
#[derive(Debug, Default)]
pub(super) struct Scrubs(Mutex<BTreeMap<Place, Arc<Scrub>>>);

impl Scrubs {
    /// The scrub of the backend `uuid`; a backend that has the number of a former one has none of its scrub.
    pub(super) fn of(&self, state_dir: &Path, place: Place, uuid: String) -> Arc<Scrub> {
        let mut scrubs = self.0.lock();
        if let Some(known) = scrubs.get(&place).filter(|known| known.uuid() == uuid) {
            return Arc::clone(known);
        }
        let scrub = Arc::new(Scrub::open(state_dir, place, uuid));
        if let Some(former) = scrubs.insert(place, Arc::clone(&scrub)) {
            former.begin_end();
        }
        scrub
    }

    fn known(&self, place: Place) -> Option<Arc<Scrub>> {
        self.0.lock().get(&place).cloned()
    }

    /// Its scrub for status, if there is something to show.
    pub(super) fn info(&self, place: Place, size: u64) -> Option<ScrubInfo> {
        let scrub = self.known(place).filter(|scrub| scrub.is_used())?;
        Some(scrub.info(size, now_s()))
    }

    /// Ends the thread of a scrub, and requests to verify, while a command changes the backend.
    pub(super) fn hold(&self, transport: u32, id: BackendId) -> Option<Held> {
        let scrub = self.known((transport, id.0))?;
        Some(scrub.hold(Instant::now() + END_LIMIT))
    }

    /// Ends the scrub of a backend that was removed.
    pub(super) fn remove(&self, transport: u32, id: BackendId) {
        let scrub = self.0.lock().remove(&(transport, id.0));
        if let Some(scrub) = scrub {
            scrub.remove();
        }
    }

    /// Ends all threads with the daemon. Their passes continue with the next one.
    pub(super) fn end(&self) {
        let end = Instant::now() + END_LIMIT;
        let scrubs: Vec<Arc<Scrub>> = self.0.lock().values().cloned().collect();
        scrubs.iter().for_each(|scrub| scrub.begin_end());
        scrubs.iter().for_each(|scrub| scrub.wait_for_end(end));
    }
}

/// A backend that can be looked at.
struct Found {
    scrub: Arc<Scrub>,
    run: Option<Arc<RunningBackend>>,
    transport: Weak<Transport<ProcessEnvironment>>,
    size: u64,
    why_down: String,
}

impl Found {
    fn info(&self) -> ScrubInfo {
        let method = self.run.as_ref().map(|run| run.backing().verify_method());
        ScrubInfo { method, ..self.scrub.info(self.size, now_s()) }
    }

    fn run(&self, id: BackendId) -> Result<&Arc<RunningBackend>> {
        self.run.as_ref().ok_or_else(|| {
            let why = &self.why_down;
            let text =
                format!("backend {id} is not up ({why}); correct that and start it again with backend-start");
            Error::new(ErrorKind::Stopped, text)
        })
    }
}

impl Manager {
    fn find(&self, transport: u32, id: BackendId) -> Result<Found> {
        let tables = self.tables()?;
        let up = running(&tables, transport)?;
        let slot = up.backends.get(&id).ok_or_else(|| backend::unknown(id))?;
        let region = Arc::downgrade(&up.transport);
        let (run, uuid, why) = (slot.run.clone(), uuid_text(slot.entry.uuid), slot.error.clone());
        let size = slot.entry.size;
        drop(tables);
        let scrub = self.scrubs.of(self.fixed.state.path(), (transport, id.0), uuid);
        Ok(Found {
            scrub,
            run,
            transport: region,
            size,
            why_down: why.unwrap_or_else(|| "stopped".to_owned()),
        })
    }

    /// Adds the scrub of a backend to the known ones.
    pub(super) fn open_scrub(&self, transport: u32, id: BackendId) {
        let _ = self.find(transport, id);
    }

    /// The state of a scrub.
    pub(super) fn scrub_info(&self, transport: u32, id: BackendId) -> Result<ScrubInfo> {
        let found = self.find(transport, id)?;
        Ok(found.info())
    }

    /// Changes the settings of a scrub.
    pub(super) fn set_scrub_settings(
        &self,
        transport: u32,
        id: BackendId,
        change: &SettingsChange,
    ) -> Result<()> {
        let found = self.find(transport, id)?;
        if let (Some(offload), Some(run)) = (change.offload, &found.run) {
            // The next thread of a pass opens a queue for the commands that are permitted then.
            let _held = found.scrub.hold(Instant::now() + END_LIMIT);
            run.set_offload(offload.into())?;
        }
        if let (Some(seconds), Some(run)) = (change.recovery_point_max_age_s, &found.run) {
            promise::set(run, seconds);
        }
        found.scrub.set(change);
        Ok(())
    }

    /// Begins, pauses, continues or stops a scrub.
    pub(super) fn change_scrub(
        &self,
        transport: u32,
        id: BackendId,
        request: &ScrubRequest,
        report: Report<'_>,
    ) -> Result<Done> {
        let found = self.find(transport, id)?;
        let Found { scrub, size, .. } = &found;
        let is_start = request.action == ScrubAction::Start;
        if is_start {
            found.run(id)?;
        }
        if is_start && request.repair {
            may_repair(id, found.run(id)?)?;
        }
        let number = scrub.change(request, *size, now_s())?;
        if let Some(run) = &found.run {
            Self::give_turn(scrub, id, &Arc::downgrade(run), &found.transport);
        }
        if is_start && request.wait {
            self.wait_for_scrub(id, &found, number, report)?;
        }
        Ok(Done { scrub: Some(Box::new(found.info())), ..Done::default() })
    }

    fn wait_for_scrub(&self, id: BackendId, found: &Found, number: u64, report: Report<'_>) -> Result<()> {
        let begun = Instant::now();
        let look = |info: &ScrubInfo| {
            if self.stopping.load(Ordering::SeqCst) {
                return Err(stopping());
            }
            let progress = Progress {
                backend_id: id.0,
                verified_bytes: Some(info.position),
                to_verify_bytes: Some(info.size),
                found: Some(info.results.as_ref().map_or(0, |results| results.found)),
                elapsed_ms: milliseconds(begun),
                ..Progress::default()
            };
            match report(progress) {
                Flow::Continue => Ok(()),
                Flow::Cancel => {
                    Err(Error::new(ErrorKind::Stopped, "no longer waited for; the scrub continues"))
                }
            }
        };
        found.scrub.wait(number, REPORT_INTERVAL, found.size, look).map(drop)
    }

    /// Starts threads for the passes that can go on, and the passes that are due.
    pub(super) fn schedule_scrubs(&self) {
        let Some(tables) = self.tables_to_retry() else { return };
        let mut runs = Vec::new();
        for (&transport, slot) in tables.iter().filter(|(_, slot)| !slot.is_taken) {
            let Ok(running) = &slot.running else { continue };
            for (&id, slot) in
                running.backends.iter().filter(|(_, slot)| slot.work.is_none() && !slot.stopping)
            {
                if let Some(run) = &slot.run {
                    let region = Arc::downgrade(&running.transport);
                    runs.push(((transport, id.0), uuid_text(slot.entry.uuid), Arc::downgrade(run), region));
                }
            }
        }
        drop(tables);
        for (place, uuid, run, region) in runs {
            let scrub = self.scrubs.of(self.fixed.state.path(), place, uuid);
            Self::give_turn(&scrub, BackendId(place.1), &run, &region);
        }
    }

    /// Starts the thread of a pass, if there is one that can go on. The thread keeps no backend that is stopped.
    fn give_turn(
        scrub: &Arc<Scrub>,
        id: BackendId,
        run: &Weak<RunningBackend>,
        transport: &Weak<Transport<ProcessEnvironment>>,
    ) {
        let Some(turn) = scrub.take_turn(now_s()) else { return };
        let (run, transport) = (Weak::clone(run), Weak::clone(transport));
        let spawned = std::thread::Builder::new()
            .name("cbd-scrub".to_owned())
            .spawn(move || look_at(turn, id, &run, &transport));
        if let Err(error) = spawned {
            tracing::warn!("no thread can be started for a scrub, which is tried again: {error}");
        }
    }

    /// Verifies a range of a backend once.
    pub(super) fn verify_once(
        &self,
        transport: u32,
        id: BackendId,
        request: VerifyRange,
        report: Report<'_>,
    ) -> Result<Done> {
        let found = self.find(transport, id)?;
        let run = found.run(id)?;
        if request.repair {
            may_repair(id, run)?;
        }
        let range = run.check_range(request.offset, request.length)?;
        let looked = Looked { id, run, scrub: &found.scrub, level: request.level, repair: request.repair };
        let gathered = self.look(&looked, range, report)?;
        log_found(transport, id, &gathered.info);
        Ok(Done { verified: Some(gathered.info), ..Done::default() })
    }

    /// Compares the whole backing device with the cache after a drain.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] with what was found, and the error for which a part could not be looked at.
    pub(super) fn verify_drained(
        &self,
        transport: u32,
        id: BackendId,
        run: &Arc<RunningBackend>,
        report: Report<'_>,
    ) -> Result<()> {
        let found = self.find(transport, id)?;
        let range = run.check_range(0, None)?;
        let looked = Looked { id, run, scrub: &found.scrub, level: VerifyLevel::Agree, repair: false };
        let info = self.look(&looked, range, report)?.info;
        log_found(transport, id, &info);
        // A copy in the cache that was damaged and is repaired says nothing against the backing device.
        let left = info.found - info.repaired;
        if left > 0 {
            let findings: Vec<_> = info.findings.into_iter().filter(|finding| !finding.repaired).collect();
            return Err(Error::new(ErrorKind::Damaged, lists(id, left, &findings)));
        }
        match info.error {
            Some(error) => Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "everything was written to the backing device of backend {id}, and a part could not be verified: {error}"
                ),
            )),
            None => Ok(()),
        }
    }

    fn look(&self, looked: &Looked<'_>, range: ByteRange, report: Report<'_>) -> Result<Gathered> {
        let Looked { id, run, scrub, level, repair } = looked;
        let mut verifier = run.verifier()?;
        let mut sweep = Sweep::new(range, (*level).into(), *repair);
        let mut gathered = Gathered::default();
        let (begun, mut reported) = (Instant::now(), None::<Instant>);
        loop {
            let ended = if self.stopping.load(Ordering::SeqCst) {
                Some(stopping())
            } else if scrub.is_held() {
                let text = format!("a command changes backend {id}: the verification has ended");
                Some(Error::new(ErrorKind::Stopped, text))
            } else if reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
                reported = Some(Instant::now());
                let progress = Progress {
                    backend_id: id.0,
                    verified_bytes: Some(sweep.position() - range.start),
                    to_verify_bytes: Some(range.end - range.start),
                    found: Some(gathered.info.found),
                    elapsed_ms: milliseconds(begun),
                    ..Progress::default()
                };
                (report(progress) == Flow::Cancel)
                    .then(|| Error::new(ErrorKind::Stopped, "the verification was cancelled"))
            } else {
                None
            };
            if let Some(error) = ended {
                verifier.give_up();
                return Err(error);
            }
            if sweep.is_done() {
                gathered.info.method = run.backing().verify_method();
                return Ok(gathered);
            }
            while sweep.has_room() {
                sweep.submit(&mut *verifier, VERIFY_STEP);
            }
            verifier.wait(LOOK_INTERVAL)?;
            sweep.collect(&mut *verifier, |range, result| drop(gathered.add(range, result)));
        }
    }
}

/// A verification that a client waits for.
struct Looked<'a> {
    id: BackendId,
    run: &'a RunningBackend,
    scrub: &'a Scrub,
    level: VerifyLevel,
    repair: bool,
}

/// Logs what a verification that a client waits for has found.
fn log_found(transport: u32, id: BackendId, info: &VerifiedInfo) {
    for finding in info.findings.iter().take(NAMED_MAX) {
        tracing::warn!(transport, backend = id.0, "a verification has found: {}", words(finding));
    }
    if info.found > NAMED_MAX as u64 {
        let more = info.found - NAMED_MAX as u64;
        tracing::warn!(transport, backend = id.0, "a verification has found {more} more ranges");
    }
}

/// Refuses a repair where the cache holds nothing dirty, by which it would be made.
fn may_repair(id: BackendId, run: &RunningBackend) -> Result<()> {
    let Some(cache) = run.cache() else {
        let text = format!(
            "backend {id} has no cache, and so no other copy to repair its disk from: leave out --repair"
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    };
    let mode = cache.settings().cache_mode;
    if mode == cbd_engine::CacheMode::Writeback {
        return Ok(());
    }
    let text = format!(
        "the cache of backend {id} holds nothing dirty with cache_mode={}, and a repair makes blocks dirty: set cache_mode=writeback first, \
         or leave out --repair",
        mode.name()
    );
    Err(Error::new(ErrorKind::Unsupported, text))
}

/// The thread of a pass.
fn look_at(
    turn: Turn,
    id: BackendId,
    run: &Weak<RunningBackend>,
    transport: &Weak<Transport<ProcessEnvironment>>,
) {
    let size = || run.upgrade().map_or(0, |run| run.device().geometry().size);
    let stopped = || Error::new(ErrorKind::Stopped, "the backend was stopped");
    let open = || run.upgrade().ok_or_else(stopped)?.verifier();
    let load = || run.upgrade().map_or_else(Load::default, |run| run.load());
    let method = || run.upgrade().map_or_else(String::new, |run| run.backing().verify_method());
    let metadata = |found: &mut VerifiedMetadata, may_run: &dyn Fn() -> bool| {
        let mut place = MetadataPlace::default();
        while !place.is_at_end() && may_run() {
            transport.upgrade().ok_or_else(stopped)?.verify_metadata(id, &mut place, found)?;
        }
        Ok(place.is_at_end())
    };
    turn.run(&Surroundings { open: &open, size: &size, load: &load, method: &method, metadata: &metadata });
}

fn milliseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// The error of a drain whose verification has found something.
fn lists(id: BackendId, count: u64, findings: &[FindingInfo]) -> String {
    let named: Vec<String> = findings.iter().take(NAMED_MAX).map(words).collect();
    let more = count.saturating_sub(named.len() as u64);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    format!(
        "everything was written to the backing device of backend {id}, and it does not have what it should: {}{more}. To repair what can \
         be repaired: cbdctrl scrub -b {id} --repair --wait",
        named.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_drain_names_some_of_the_findings_and_the_number_of_the_others() {
        let finding =
            |start| FindingInfo { start, length: 512, flaw: "backing_differs".into(), repaired: false };
        let findings: Vec<FindingInfo> = (0..20).map(|number| finding(number * 4096)).collect();
        let text = lists(BackendId(3), 20, &findings);
        assert!(text.contains("512 bytes at 4096: ") && text.contains("and 12 more"), "{text}");
        assert!(!text.contains("40960"), "{text}");
        assert!(!lists(BackendId(3), 1, &findings[..1]).contains("more"));
    }
}
