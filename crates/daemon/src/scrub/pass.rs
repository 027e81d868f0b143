//! The thread of a pass.

use super::gather::{Added, words, words_of_copy};
use super::{RETRY_AFTER, SAVE_INTERVAL, Scrub, State, Turn, now_s};
use crate::api::{MetadataInfo, ScrubPass, VerifiedInfo};
use crate::events::EventName;
use cbd_runtime::verify::{Load, Sweep, VERIFY_STEP, Verifier};
use cbd_types::{ByteRange, Error, Result, Verified, VerifiedMetadata};
use parking_lot::MutexGuard;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the thread waits for a request before it looks whether it has to end.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long clients must make no request before the pass goes on.
const IDLE_TIME: Duration = Duration::from_millis(500);

/// The findings of a pass that are logged one by one.
const LOGGED_MAX: usize = 16;

/// How long a thread looks whether clients make requests before it makes its first one.
const FIRST_LOOK: Duration = Duration::from_millis(50);

/// Bytes of a request while clients use the disk, and the pause behind it in units of the time that it took: less than one in a hundred
/// requests of clients meets one of the pass.
const STEP_BESIDE_CLIENTS: u64 = 128 << 10;
const PAUSE_BESIDE_CLIENTS: u32 = 150;

/// Over what time the speed is measured.
const SPEED_TIME: Duration = Duration::from_secs(2);

/// Verifies metadata, step by step, as long as the second argument says so. Returns whether all was looked at.
pub type VerifyMetadata<'a> = dyn Fn(&mut VerifiedMetadata, &dyn Fn() -> bool) -> Result<bool> + 'a;

/// What the thread has of its backend.
pub struct Surroundings<'a> {
    /// Opens a queue for verification.
    pub open: &'a dyn Fn() -> Result<Box<dyn Verifier>>,
    /// Bytes of the device now: it may grow.
    pub size: &'a dyn Fn() -> u64,
    /// What clients have requested until now.
    pub load: &'a dyn Fn() -> Load,
    /// How the backing device is asked.
    pub method: &'a dyn Fn() -> String,
    /// Verifies the metadata of its region.
    pub metadata: &'a VerifyMetadata<'a>,
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Surroundings({} bytes)", (self.size)())
    }
}

/// The pace of a pass.
struct Pace {
    /// The number of the pass.
    pass: u64,
    /// When the next request may be submitted.
    due: Instant,
    measured: Instant,
    bytes: u64,
    load: Load,
    /// Until when clients count as busy.
    busy_until: Option<Instant>,
    /// Until when clients count as users of the disk.
    disk_busy_until: Option<Instant>,
    /// When the only request in flight was submitted, beside clients that use the disk.
    single: Option<Instant>,
}

impl Turn {
    /// Lets the pass go on until it ends, or until it has to wait for something.
    pub fn run(self, around: &Surroundings<'_>) {
        let result = (around.open)().and_then(|mut verifier| {
            let result = self.sweep(&mut *verifier, around);
            verifier.give_up();
            result
        });
        let scrub = &self.0;
        if let Err(error) = result {
            let mut state = scrub.state.lock();
            let line = error.line();
            tracing::warn!(
                transport = scrub.place.0,
                backend = scrub.place.1,
                event = EventName::ScrubFailed.name(),
                error = line,
                "its scrub cannot go on, and is tried again every {} s: {line}",
                RETRY_AFTER.as_secs()
            );
            (state.failure, state.retry) = (Some(line), Some(Instant::now() + RETRY_AFTER));
        }
    }

    fn sweep(&self, verifier: &mut dyn Verifier, around: &Surroundings<'_>) -> Result<()> {
        let scrub = &self.0;
        let begun = Instant::now();
        let load = (around.load)();
        let (mut sweep, mut pace) = {
            let mut state = scrub.state.lock();
            let Some(pass) = &state.record.pass else { return Ok(()) };
            let size = (around.size)();
            let range = ByteRange { start: pass.position.min(size), end: size };
            let sweep = Sweep::new(range, pass.level.into(), pass.repair);
            state.failure = None;
            (sweep, Pace::new(state.number, begun, load))
        };
        self.verify_metadata(around, &pace)?;
        loop {
            let mut state = scrub.state.lock();
            if !state.is_at(&pace) || !state.may_run(now_s()) {
                return Ok(());
            }
            // A device that has grown meanwhile is looked at to its present end.
            if sweep.is_done() && !sweep.extend((around.size)()) {
                scrub.end_pass(&mut state, (around.method)());
                return Ok(());
            }
            let rate = state.rate();
            let is_due = self.is_due(&mut state, &mut pace, around);
            // A rate is the user's choice. Without one the pass takes what clients leave of the disk.
            let is_beside = rate == 0 && pace.disk_busy_until.is_some_and(|until| Instant::now() < until);
            state.is_beside_clients = is_beside;
            let may_submit = is_due && if is_beside { !sweep.is_waiting() } else { sweep.has_room() };
            if !may_submit && !sweep.is_waiting() {
                let end = if state.waits_for_load { pace.busy_until } else { Some(pace.due) };
                let wait =
                    end.map_or(IDLE_TIME, |end| end.saturating_duration_since(Instant::now()).min(IDLE_TIME));
                let _ = scrub.changed.wait_for(&mut state, wait);
                continue;
            }
            drop(state);
            if may_submit {
                let step = if is_beside { STEP_BESIDE_CLIENTS } else { VERIFY_STEP };
                let bytes = sweep.submit(verifier, step);
                pace.note(bytes, rate);
                pace.single = is_beside.then(Instant::now);
            }
            if is_beside || !may_submit || !sweep.has_room() {
                verifier.wait(LOOK_INTERVAL)?;
            }
            self.collect(&mut sweep, verifier, &mut pace)?;
            if let Some(begun) = pace.single.filter(|_| !sweep.is_waiting()) {
                (pace.single, pace.due) = (None, Instant::now() + PAUSE_BESIDE_CLIENTS * begun.elapsed());
            }
        }
    }

    /// Looks at the metadata of the region, once in each pass. It takes milliseconds, and neither rate nor load bound it.
    fn verify_metadata(&self, around: &Surroundings<'_>, pace: &Pace) -> Result<()> {
        let scrub = &self.0;
        let may_run = || {
            let state = scrub.state.lock();
            let is_done = state.record.pass.as_ref().is_none_or(|pass| pass.results.is_metadata_done);
            !is_done && state.is_at(pace) && state.may_run(now_s())
        };
        if !may_run() {
            return Ok(());
        }
        let mut found = VerifiedMetadata::default();
        let result = (around.metadata)(&mut found, &may_run);
        let is_done = matches!(result, Ok(true));
        let mut state = scrub.state.lock();
        // A pass that was stopped has no results; what was repaired is repaired.
        state.record.metadata_repaired_total += found.repaired;
        if state.is_at(pace) {
            scrub.take_over_metadata(&mut state, &found, is_done);
        }
        result.map(drop)
    }

    /// Whether rate and load allow a request now.
    fn is_due(&self, state: &mut MutexGuard<'_, State>, pace: &mut Pace, around: &Surroundings<'_>) -> bool {
        let (load, now) = ((around.load)(), Instant::now());
        if load.disk != pace.load.disk {
            pace.disk_busy_until = Some(now + IDLE_TIME);
        }
        if load != pace.load {
            (pace.load, pace.busy_until) = (load, Some(now + IDLE_TIME));
        }
        let is_idle = pace.busy_until.is_none_or(|until| until <= now);
        state.waits_for_load = !is_idle && state.record.settings.scrub_idle_only;
        !state.waits_for_load && pace.due <= now
    }

    /// Takes over what has completed.
    fn collect(&self, sweep: &mut Sweep, verifier: &mut dyn Verifier, pace: &mut Pace) -> Result<()> {
        let scrub = &self.0;
        let mut results: Vec<(ByteRange, Result<Verified>)> = Vec::new();
        sweep.collect(verifier, |range, result| results.push((range, result)));
        let mut state = scrub.state.lock();
        for (range, result) in results {
            if let Err(error) = &result
                && error.kind() == cbd_types::ErrorKind::Stopped
            {
                return Err(Error::new(error.kind(), error.line()));
            }
            if state.is_at(pace) {
                scrub.take_over(&mut state, range, result);
            }
            pace.bytes += range.end - range.start;
        }
        let elapsed = pace.measured.elapsed();
        if elapsed >= SPEED_TIME {
            let per_s = u128::from(pace.bytes) * 1000 / elapsed.as_millis().max(1);
            state.bytes_per_s = u64::try_from(per_s).unwrap_or(u64::MAX);
            (pace.bytes, pace.measured) = (0, Instant::now());
        }
        let is_due = state.saved.is_none_or(|saved| saved.elapsed() >= SAVE_INTERVAL);
        drop(state);
        if is_due {
            scrub.save();
        }
        Ok(())
    }
}

impl Pace {
    fn new(pass: u64, begun: Instant, load: Load) -> Self {
        let (busy_until, disk_busy_until, single) = (None, None, None);
        Self {
            pass,
            due: begun + FIRST_LOOK,
            measured: begun,
            bytes: 0,
            load,
            busy_until,
            disk_busy_until,
            single,
        }
    }

    /// Notes a request; the next one may be submitted when this one's bytes are due.
    fn note(&mut self, bytes: u64, rate: u64) {
        let now = Instant::now();
        if rate == 0 {
            self.due = now;
            return;
        }
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
        // A pass that was late does not catch up with a burst.
        self.due = self.due.max(now) + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
    }
}

impl State {
    /// Whether the pass is still that of a thread.
    fn is_at(&self, pace: &Pace) -> bool {
        self.record.pass.is_some() && self.number == pace.pass
    }

    fn rate(&self) -> u64 {
        let own = self.record.pass.as_ref().and_then(|pass| pass.rate);
        own.unwrap_or(self.record.settings.scrub_rate)
    }
}

impl Scrub {
    /// Adds the result of a request to those of the pass.
    fn take_over(&self, state: &mut State, range: ByteRange, result: Result<Verified>) {
        let Some(pass) = &mut state.record.pass else { return };
        let Added { findings, by_flaw, repaired, verified_bytes } = pass.results.add(range, result);
        pass.position = range.end;
        state.record.verified_bytes_total += verified_bytes;
        state.record.repaired_total += repaired;
        add_all(&mut state.record.found_total, by_flaw);
        for finding in &findings {
            if state.logged < LOGGED_MAX {
                let text = words(finding);
                tracing::warn!(
                    transport = self.place.0,
                    backend = self.place.1,
                    "its scrub has found: {text}"
                );
            } else if state.logged == LOGGED_MAX {
                tracing::warn!(
                    transport = self.place.0,
                    backend = self.place.1,
                    "its scrub has found more than {LOGGED_MAX} ranges: cbdctrl scrub --status shows them"
                );
            }
            state.logged += 1;
        }
    }

    /// Adds what was found in the metadata of the region to the results of the pass.
    fn take_over_metadata(&self, state: &mut State, found: &VerifiedMetadata, is_done: bool) {
        let Some(pass) = &mut state.record.pass else { return };
        for copy in pass.results.add_metadata(found, is_done).iter().take(LOGGED_MAX) {
            let text = words_of_copy(copy);
            tracing::warn!(transport = self.place.0, backend = self.place.1, "its scrub has found: {text}");
        }
    }

    /// Logs the results of a pass, in `text`.
    fn log_results(&self, results: &VerifiedInfo, text: &str, has_damaged_metadata: bool) {
        let ((transport, backend), event) = (self.place, EventName::ScrubEnded.name());
        let VerifiedInfo { found, repaired, verified_bytes, error, .. } = results;
        match error {
            Some(error) => tracing::warn!(
                transport,
                backend,
                event,
                found,
                repaired,
                verified_bytes,
                "{text}; a part could not be looked at or repaired: {error}"
            ),
            None if *found > 0 || has_damaged_metadata => {
                tracing::warn!(transport, backend, event, found, repaired, verified_bytes, "{text}");
            }
            None => tracing::info!(transport, backend, event, found, repaired, verified_bytes, "{text}"),
        }
    }

    /// Ends a pass that has looked at everything.
    fn end_pass(&self, state: &mut State, method: String) {
        let Some(mut pass) = state.record.pass.take() else { return };
        pass.results.info.method = method;
        let last = ScrubPass {
            began: pass.began,
            ended: now_s(),
            level: pass.level,
            repair: pass.repair,
            results: pass.results.info,
        };
        let results = &last.results;
        let MetadataInfo { structures, repaired, unrepaired, .. } =
            results.metadata.clone().unwrap_or_default();
        let text = format!(
            "its scrub has ended: {} bytes, {} findings, {} repaired; {structures} structures of the region, {repaired} copies repaired, \
             {unrepaired} damaged",
            results.verified_bytes, results.found, results.repaired
        );
        self.log_results(results, &text, repaired + unrepaired > 0);
        state.record.last = Some(last);
        state.last_number = Some(state.number);
        self.changed.notify_all();
    }
}

fn add_all(totals: &mut BTreeMap<String, u64>, by_flaw: BTreeMap<&'static str, u64>) {
    for (flaw, count) in by_flaw {
        *totals.entry(flaw.to_owned()).or_default() += count;
    }
}
