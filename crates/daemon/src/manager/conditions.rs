//! Conditions (errors that last) in the log: a line when a condition begins, when it changes, and when it ends.
//!
//! Invariants: no code on the data path logs. The background thread samples every backend once a second, its state and
//! its counters, so that an error that begins and ends between two samples is logged, too. A line names the error and
//! the object. Each condition may log a burst of [`BURST`] lines, then one every [`REFILL`]; a change beyond that limit
//! is logged when the limit permits, if it still holds. The last pass over the conditions of a backend comes after its
//! stop: it logs what has occurred since the pass before, and each condition that is still in force, without a limit.
//!
//! Elsewhere: commands log their own actions.

#[cfg(test)]
mod tests;
mod topic;

use crate::events::EventName;
use cbd_backing::Oldest;
use cbd_engine::{CacheStatus, PaceReason};
use cbd_runtime::RunningBackend;
use cbd_runtime::hosts::SeenHost;
use cbd_types::{BackendId, BlkdevId, ByteRange};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(super) use topic::Topic;

/// Lines that a condition may log in a burst.
const BURST: u32 = 6;
/// Time after which a condition may log one more line.
const REFILL: Duration = Duration::from_secs(10);
/// A condition is over if its counter has not increased for this time.
const END_DELAY: Duration = Duration::from_secs(3);
/// Most ranges that a line names.
const NAMED_MAX: usize = 4;

/// An operation of a backing device that has had no answer for so long is reported.
const SILENT: Duration = Duration::from_secs(10);

/// An error that was observed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    /// Two observations with the same key are the same error.
    pub key: String,
    /// The text of the log line.
    pub text: String,
    /// How long the error had lasted when it was observed; zero if the observation is its beginning.
    pub age: Duration,
}

impl Fault {
    const fn new(key: String, text: String) -> Self {
        Self { key, text, age: Duration::ZERO }
    }

    fn from_text(text: String) -> Self {
        Self::new(text.clone(), text)
    }
}

/// One sample of one topic.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub transport: u32,
    pub backend: Option<BackendId>,
    pub topic: Topic,
    /// The path of the backing device or of the region.
    pub path: String,
    /// The present error, or with a `count` the last one.
    pub fault: Option<Fault>,
    /// Whether the error is present now.
    pub is_present: bool,
    /// For errors that may begin and end between two samples: their number so far. The condition lasts while it
    /// increases.
    pub count: Option<u64>,
}

/// A line for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub is_error: bool,
    pub is_over: bool,
    pub transport: u32,
    pub backend: Option<BackendId>,
    pub text: String,
    /// The event that the line is; none for a condition that is in force when it is no longer observed.
    pub event: Option<EventName>,
    /// The path of the backing device or of the region.
    pub path: String,
    /// How long a condition that is over has lasted.
    pub lasted_s: Option<u64>,
}

impl Line {
    /// Writes the line to the log.
    pub fn log(&self) {
        let Self { is_error, is_over, transport, text, path, lasted_s, .. } = self;
        let backend = self.backend.map(|BackendId(backend)| backend);
        match (self.event.map(EventName::name), is_over, is_error) {
            (None, true, _) => tracing::info!(transport, backend, "{text}"),
            (None, false, true) => tracing::error!(transport, backend, "{text}"),
            (None, false, false) => tracing::warn!(transport, backend, "{text}"),
            (event, true, _) => tracing::info!(transport, backend, event, path, lasted_s, "{text}"),
            (event, false, true) => tracing::error!(transport, backend, event, path, "{text}"),
            (event, false, false) => tracing::warn!(transport, backend, event, path, "{text}"),
        }
    }
}

/// The state of one topic of one backend or transport.
#[derive(Debug)]
struct Condition {
    /// The error that was logged last; none without a condition.
    logged: Option<Logged>,
    /// The counter, and when it last increased.
    counter: (u64, Option<Instant>),
    /// Since when samples have found the error.
    seen_since: Option<Instant>,
    /// Since when the error has not been present: the counter increased last, or a sample found it gone. None while it
    /// is present.
    gone_since: Option<Instant>,
    lines: u32,
    refilled: Instant,
}

/// An error in the log whose end is not logged yet.
#[derive(Clone, Debug)]
struct Logged {
    key: String,
    path: String,
    text: String,
    /// When the condition began, which may be before it was observed.
    since: Instant,
}

impl Condition {
    const fn new(now: Instant) -> Self {
        let (counter, gone_since, seen_since) = ((0, None), None, None);
        Self { logged: None, counter, seen_since, gone_since, lines: BURST, refilled: now }
    }

    /// Whether the counter has increased within [`END_DELAY`].
    fn has_increased(&mut self, count: u64, now: Instant) -> bool {
        if count != self.counter.0 {
            // The counter of a restarted backend begins at zero.
            let increased_at = if count == 0 { None } else { Some(now) };
            self.counter = (count, increased_at);
        }
        self.counter.1.is_some_and(|increased_at| now.saturating_duration_since(increased_at) < END_DELAY)
    }

    fn may_log(&mut self, now: Instant) -> bool {
        while self.lines < BURST && now.saturating_duration_since(self.refilled) >= REFILL {
            self.lines += 1;
            self.refilled += REFILL;
        }
        if self.lines == BURST {
            self.refilled = now;
        }
        self.lines = match self.lines.checked_sub(1) {
            Some(left) => left,
            None => return false,
        };
        true
    }

    /// The line of a sample, if any; with `limited`, only if the number of lines permits it.
    fn sample(&mut self, observed: &Observed, now: Instant, limited: bool) -> Option<Line> {
        let has_increased = observed.count.is_some_and(|count| self.has_increased(count, now));
        self.gone_since = match (observed.is_present && observed.fault.is_some(), self.counter.1) {
            (true, _) => None,
            (false, Some(increased_at)) if increased_at == now => Some(now),
            (false, _) => self.gone_since.or(Some(now)),
        };
        let fault = observed.fault.as_ref().filter(|_| observed.is_present || has_increased);
        self.seen_since = fault.and(self.seen_since.or(Some(now)));
        let since_seen = self.seen_since.map(|since| now.saturating_duration_since(since));
        let fault = fault.filter(|_| since_seen >= Some(observed.topic.delay()));
        let (began, ended) = observed.topic.events();
        let line = |lasted_s: Option<u64>, text: String| Line {
            is_error: observed.topic.is_error(),
            is_over: lasted_s.is_some(),
            transport: observed.transport,
            backend: observed.backend,
            text: format!("{}: {text}", observed.path),
            event: Some(if lasted_s.is_some() { ended } else { began }),
            path: observed.path.clone(),
            lasted_s,
        };
        match (self.logged.clone(), fault) {
            (None, None) => None,
            (Some(logged), Some(fault)) if logged.key == fault.key => None,
            _ if !self.may_log(now) && limited => None,
            (before, Some(fault)) => {
                let begun = self.seen_since.unwrap_or(now);
                let since = before
                    .map_or_else(|| begun.checked_sub(fault.age).unwrap_or(begun), |before| before.since);
                let (path, Fault { key, text, .. }) = (observed.path.clone(), fault.clone());
                self.logged = Some(Logged { key, path, text: text.clone(), since });
                Some(line(None, text))
            }
            (Some(logged), None) => {
                // The time after which it counts as over is no part of its duration.
                let until = self.gone_since.unwrap_or(now);
                let seconds = until.saturating_duration_since(logged.since).as_secs();
                let counter = observed.count.map_or_else(String::new, |count| format!(", {count} in all"));
                self.logged = None;
                let text = format!("{} (it lasted {seconds} s{counter})", observed.topic.end_text());
                Some(line(Some(seconds), text))
            }
        }
    }

    /// The line of a condition that is in force when its backend or region is stopped.
    fn end(&mut self, key: Key, now: Instant) -> Option<Line> {
        let (transport, backend, topic) = key;
        let Logged { path, text, since, .. } = self.logged.take()?;
        let seconds = now.saturating_duration_since(since).as_secs();
        let text = format!("{path}: stopped {seconds} s after this began: {text}");
        let (is_error, event, lasted_s) = (topic.is_error(), None, Some(seconds));
        Some(Line { is_error, is_over: true, transport, backend, text, event, path, lasted_s })
    }
}

/// A topic of a backend, or of a transport.
type Key = (u32, Option<BackendId>, Topic);

/// The conditions of all regions, or of one run of a backend.
#[derive(Default, Debug)]
pub(super) struct Conditions {
    of: BTreeMap<Key, Condition>,
    /// Whether the last pass was made; a later sample is older than it and has no lines.
    has_ended: bool,
}

/// The conditions of one run of a backend. The background thread and the thread that stops the backend share them.
pub(super) type SharedConditions = Arc<Mutex<Conditions>>;

impl Conditions {
    /// The lines for these samples. A condition without a sample ends: its region was unregistered.
    pub fn sample(&mut self, observed: &[Observed], now: Instant) -> Vec<Line> {
        self.pass(observed, now, true)
    }

    /// The last pass: the lines for these samples, and a line for each condition that is in force.
    pub fn end(&mut self, observed: &[Observed], now: Instant) -> Vec<Line> {
        let mut lines = self.pass(observed, now, false);
        self.has_ended = true;
        lines.extend(std::mem::take(&mut self.of).into_iter().filter_map(|(key, mut of)| of.end(key, now)));
        lines
    }

    fn pass(&mut self, observed: &[Observed], now: Instant, limited: bool) -> Vec<Line> {
        if self.has_ended {
            return Vec::new();
        }
        let key = |seen: &Observed| (seen.transport, seen.backend, seen.topic);
        let seen: std::collections::BTreeSet<_> = observed.iter().map(key).collect();
        let mut lines = Vec::new();
        self.of.retain(|key, condition| {
            let is_seen = seen.contains(key);
            if !is_seen {
                lines.extend(condition.end(*key, now));
            }
            is_seen
        });
        for observed in observed {
            let condition = self.of.entry(key(observed)).or_insert_with(|| Condition::new(now));
            lines.extend(condition.sample(observed, now, limited));
        }
        lines
    }
}

/// Logs the conditions of a backend before work that may take long, or that they may not outlast.
pub(super) fn log_now(
    of: &SharedConditions,
    transport: u32,
    id: BackendId,
    path: &str,
    run: &RunningBackend,
) {
    let status = run.cache().map(|cache| cache.status());
    let observed = of_backend(transport, id, path, run, status.as_ref());
    let lines = of.lock().sample(&observed, Instant::now());
    lines.iter().for_each(Line::log);
}

/// Logs the conditions of a backend that was stopped, and that those in force are no longer observed.
pub(super) fn log_after_stop(
    of: &SharedConditions,
    transport: u32,
    id: BackendId,
    path: &str,
    run: &RunningBackend,
) {
    let status = run.cache().map(|cache| cache.status());
    let observed = of_backend(transport, id, path, run, status.as_ref());
    let lines = of.lock().end(&observed, Instant::now());
    lines.iter().for_each(Line::log);
}

/// Logs the conditions in force of a backend whose stop has not ended when the daemon ends; nothing if it has ended.
pub(super) fn log_unended(of: &SharedConditions) {
    let lines = of.lock().end(&[], Instant::now());
    lines.iter().for_each(Line::log);
}

/// The samples of a backend that is served.
pub(super) fn of_backend(
    transport: u32,
    id: BackendId,
    path: &str,
    run: &RunningBackend,
    status: Option<&CacheStatus>,
) -> Vec<Observed> {
    let seen = |topic, fault: Option<Fault>, is_present, count| Observed {
        transport,
        backend: Some(id),
        topic,
        path: path.to_owned(),
        fault,
        is_present,
        count,
    };
    let failures = run.device().failures();
    let failed = failures.last().map(|(kind, error)| {
        let text = format!("requests of clients fail, with EIO or the like; the last one: {error}");
        Fault::new(kind.name().to_owned(), text)
    });
    let mut observed = vec![seen(Topic::Clients, failed, false, Some(failures.count()))];
    let silent = unanswered(run).map(|(oldest, text)| Fault { key: String::new(), text, age: oldest.age });
    observed.push(seen(Topic::Silent, silent, true, None));
    let Some(status) = status else { return observed };
    observed.extend([
        seen(Topic::Damage, damage(status), true, None),
        seen(Topic::Healed, healed(status), false, Some(status.damage_healed)),
        // An attempt that failed between two samples is logged even if writeback works now.
        seen(
            Topic::Writeback,
            writeback(status),
            status.backing_trouble.is_some(),
            Some(status.backing_failures),
        ),
        seen(Topic::Stalled, stalled(status), true, None),
        seen(Topic::Parked, parked(status), true, None),
        seen(Topic::Mode, mode(status), true, None),
        seen(Topic::Paused, paused(status), true, None),
        seen(Topic::Void, void(status), true, None),
        seen(Topic::Waiting, waiting(status), true, None),
        seen(Topic::Late, late(status), true, None),
    ]);
    observed
}

/// The operation that the backing device has not answered for [`SILENT`], in words.
pub(super) fn silence(run: &RunningBackend) -> Option<String> {
    unanswered(run).map(|(_, text)| text)
}

/// The oldest operation without an answer if it is reported, and its text.
fn unanswered(run: &RunningBackend) -> Option<(Oldest, String)> {
    let oldest = run.oldest_operation().filter(|oldest| oldest.age >= SILENT)?;
    let (name, seconds) = (oldest.name, oldest.age.as_secs());
    let text = format!("the backing device does not answer: a {name} has had no answer for {seconds} s");
    Some((oldest, text))
}

fn damage(status: &CacheStatus) -> Option<Fault> {
    if status.damaged.is_empty() {
        return None;
    }
    let ranges: Vec<ByteRange> = status.damaged.iter().map(|damaged| damaged.range).collect();
    let reason = status.damaged.first().map_or("", |damaged| damaged.reason.as_str());
    let named = named(&ranges);
    Some(Fault::new(
        format!("{} {named}", ranges.len()),
        format!(
            "data in the cache is damaged in {} ranges: {named} ({reason}); reads of them answer EIO until they are overwritten, and the \
             backing device has older data there",
            ranges.len()
        ),
    ))
}

fn healed(status: &CacheStatus) -> Option<Fault> {
    (status.damage_healed > 0).then(|| {
        let text = "data in the cache failed its checksum and was read from the backing device instead; nothing is lost, but the region's \
               memory may be failing";
        Fault::new(String::new(), text.to_owned())
    })
}

fn writeback(status: &CacheStatus) -> Option<Fault> {
    let now = status.backing_trouble.as_ref().map(|trouble| &trouble.error);
    now.or(status.last_backing_failure.as_ref()).map(|error| {
        let text =
            format!("writeback fails: {error}; dirty data stays in the cache, and writeback is retried");
        Fault::new(error.clone(), text)
    })
}

fn stalled(status: &CacheStatus) -> Option<Fault> {
    status.is_stalled.then(|| {
        Fault::from_text(
            "STALLED: the backing device has refused writes for longer than write_error_after_s: writes that find no space in the cache \
             fail with EIO"
                .to_owned(),
        )
    })
}

fn parked(status: &CacheStatus) -> Option<Fault> {
    if status.parked.is_empty() {
        return None;
    }
    let named = named(&status.parked);
    Some(Fault::new(
        format!("{} {named}", status.parked.len()),
        format!(
            "the backing device refuses {} ranges, {} bytes: {named} ({}); the cache keeps them",
            status.parked.len(),
            status.parked_bytes,
            status.parked_error.as_deref().unwrap_or("not tried since the start")
        ),
    ))
}

fn mode(status: &CacheStatus) -> Option<Fault> {
    let mode = status.cache_mode.name();
    status.is_changing_mode.then(|| {
        let text = format!(
            "cache_mode={mode} is not in force until the backing device has everything; {} bytes are dirty",
            status.dirty_bytes
        );
        Fault::new(mode.to_owned(), text)
    })
}

fn paused(status: &CacheStatus) -> Option<Fault> {
    (status.pace.reason == PaceReason::Paused)
        .then(|| Fault::from_text("writeback is paused; dirty data stays in the cache".to_owned()))
}

fn void(status: &CacheStatus) -> Option<Fault> {
    let reason = status.void_reason.as_ref()?;
    let text = format!("the backing device alone is not crash-consistent: {reason}");
    // The number in a reason changes with every write.
    Some(Fault::new(String::new(), text))
}

fn waiting(status: &CacheStatus) -> Option<Fault> {
    status.writers_waiting.then(|| Fault::from_text("writes wait for space in the cache".to_owned()))
}

fn late(status: &CacheStatus) -> Option<Fault> {
    let (age_ms, max_ms) = (status.recovery_point_age_ms, status.recovery_point_max_ms);
    (max_ms > 0 && age_ms > max_ms).then(|| {
        let by = Duration::from_millis(age_ms - max_ms).as_secs_f64();
        let text = format!(
            "the recovery point is {:.1} s old, {by:.1} s older than recovery_point_max_age={}s; {} bytes are dirty, and the pace of \
             writeback is: {}",
            Duration::from_millis(age_ms).as_secs_f64(),
            max_ms / 1000,
            status.dirty_bytes,
            status.pace.reason.name()
        );
        Fault { key: String::new(), text, age: Duration::from_millis(age_ms - max_ms) }
    })
}

/// The sample of the log of recovery points of a transport.
pub(super) fn of_recovery_points(transport: u32, path: &str, error: Option<&String>) -> Observed {
    let fault = error.map(|error| {
        Fault::from_text(format!(
            "the recovery point cannot be logged: {error}; if the region is lost, the recovery points of its disks are not known"
        ))
    });
    let topic = Topic::RecoveryPoints;
    Observed { transport, backend: None, topic, path: path.to_owned(), fault, is_present: true, count: None }
}

/// The sample of a region's memory.
pub(super) fn of_region(transport: u32, path: &str, failed: Option<String>) -> Observed {
    let (topic, fault) = (Topic::Region, failed.map(Fault::from_text));
    Observed { transport, backend: None, topic, path: path.to_owned(), fault, is_present: true, count: None }
}

/// The sample of the other hosts of a region: those that this daemon has seen live, and that give no sign of life any more.
pub(super) fn of_hosts(transport: u32, path: &str, hosts: &[SeenHost]) -> Observed {
    let silent: Vec<&SeenHost> =
        hosts.iter().filter(|seen| !seen.is_alive() && seen.since.is_some()).collect();
    let names: Vec<String> =
        silent.iter().map(|seen| format!("{} ({})", seen.host.name, seen.host.id)).collect();
    let fault = silent.iter().filter_map(|seen| seen.since).min().map(|age| {
        let names = names.join(", ");
        let text = format!("no sign of life of host {names}: no other host serves what it has");
        Fault { key: names, text, age }
    });
    let topic = Topic::Hosts;
    Observed { transport, backend: None, topic, path: path.to_owned(), fault, is_present: true, count: None }
}

/// Why requests wait for another host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HostWait {
    /// It gives no sign of life.
    Away,
    /// It lives.
    Alive,
    /// Requests are held until a host serves the backend, which is being moved, or was.
    Held,
}

/// The sample of a block device on a backend of another host: for how long its requests have waited for that host, its name, and why.
pub(super) fn of_remote_blkdev(
    (transport, path): (u32, &str),
    id: BlkdevId,
    backend: BackendId,
    waiting: Option<(Duration, String, HostWait)>,
) -> Observed {
    let fault = waiting.map(|(age, host, wait)| {
        let why = match wait {
            HostWait::Alive => {
                "that host is alive: its status says why, as a full cache or a disk that is slow or fails"
            }
            HostWait::Away => "that host gives no sign of life; none fails, and they go on when it is back",
            HostWait::Held => "they are held until a host serves the backend, which is being moved",
        };
        let text = format!(
            "requests to block device {id} have waited for host {host}, which has its backend {backend}; {why}"
        );
        Fault { key: format!("{host} {wait:?}"), text, age }
    });
    let (topic, backend) = (Topic::RemoteBlkdev, Some(backend));
    Observed { transport, backend, topic, path: path.to_owned(), fault, is_present: true, count: None }
}

fn named(ranges: &[ByteRange]) -> String {
    let first: Vec<String> = ranges.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    let more = ranges.len() - first.len();
    if more == 0 { first.join(", ") } else { format!("{} and {more} more", first.join(", ")) }
}

/// The result of recovery, for the log.
pub(super) fn recovered(run: &RunningBackend) -> Option<String> {
    let recovered = run.recovered()?;
    let status = &recovered.status;
    let mut text = format!(
        "recovered in {:.3} s: {} records, {} bytes dirty, {} ranges damaged ({} bytes), {} parked",
        recovered.elapsed.as_secs_f64(),
        status.records,
        status.dirty_bytes,
        status.damaged.len(),
        status.quarantined_bytes,
        status.parked.len()
    );
    for (count, what) in [
        (
            status.rare.torn_records_dropped,
            "last records were torn by a crash, never acknowledged, and dropped",
        ),
        (
            status.rare.mirror_reads,
            "records were read from their second copy: the region's memory may be failing",
        ),
    ] {
        if count > 0 {
            text.push_str(&format!("; {count} {what}"));
        }
    }
    Some(text)
}
