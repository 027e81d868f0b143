//! The record of events: the latest ones, counters, and the threads and tasks that wait for the next.
//!
//! Invariants: one lock protects the record, is held for a bounded time, and no line is logged meanwhile. Sequence
//! numbers have no gaps.

use super::EventName;
use super::command::CommandQueue;
use crate::api::{Event, EventsBegin, EventsInfo, Severity};
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::watch;

/// Most events that are kept.
const KEPT_MAX: usize = 4096;
/// Most bytes of the events that are kept, about.
pub const KEPT_BYTES_MAX: usize = 2 << 20;
/// Most bytes of the text of an event, and of a field that is text; more are cut off.
const TEXT_MAX: usize = 4096;
/// Most fields of an event.
const FIELDS_MAX: usize = 24;
/// Most requests at a time that follow events.
const FOLLOWERS_MAX: usize = 16;
/// Memory of an event besides its texts, about.
const EVENT_OVERHEAD: usize = 256;
/// Memory of a field besides its texts, about.
const FIELD_OVERHEAD: usize = 64;

/// An event that is to be recorded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewEvent {
    /// Its name.
    pub name: EventName,
    /// How bad it is.
    pub severity: Severity,
    /// Number of the transport.
    pub transport: Option<u32>,
    /// Number of the backend.
    pub backend: Option<u32>,
    /// Number of the block device.
    pub blkdev: Option<u32>,
    /// What else is known of it.
    pub fields: BTreeMap<String, Value>,
    /// The line of the log.
    pub text: String,
}

/// Events behind a place in the record.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Events before these that are not kept any more.
    pub dropped: u64,
    /// The events, in order.
    pub events: Vec<Arc<Event>>,
    /// The place behind them.
    pub cursor: u64,
}

/// The record of events of one run of the daemon.
#[derive(Debug)]
pub struct Events {
    instance: String,
    kept_max: usize,
    state: Mutex<State>,
    /// The number of the latest event, for those that wait for the next.
    latest: watch::Sender<u64>,
    followers: AtomicUsize,
    is_ending: AtomicBool,
}

#[derive(Debug)]
struct State {
    kept: VecDeque<Arc<Event>>,
    bytes: usize,
    latest: u64,
    counts: [u64; EventName::ALL.len()],
    command: Option<Arc<CommandQueue>>,
}

/// The permission to follow events; ends with the value.
#[derive(Debug)]
pub struct Follower(Arc<Events>);

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.followers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Default for Events {
    fn default() -> Self {
        Self::keeping(KEPT_MAX)
    }
}

impl Events {
    /// An empty record that keeps at most `kept_max` events.
    #[must_use]
    pub fn keeping(kept_max: usize) -> Self {
        use cbd_engine::Environment;
        let environment: cbd_runtime::ProcessEnvironment = cbd_runtime::ProcessEnvironment::new();
        Self {
            instance: format!("{:016x}", environment.random()),
            kept_max,
            state: Mutex::new(State {
                kept: VecDeque::new(),
                bytes: 0,
                latest: 0,
                counts: [0; EventName::ALL.len()],
                command: None,
            }),
            latest: watch::Sender::new(0),
            followers: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
        }
    }

    /// The run of the daemon.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Records an event.
    pub fn record(&self, new: NewEvent) {
        let name = new.name;
        let mut event = Event {
            sequence: 0,
            instance: self.instance.clone(),
            time_ms: cbd_runtime::wall_ms(),
            name: name.name().to_owned(),
            severity: new.severity,
            transport: new.transport,
            backend: new.backend,
            blkdev: new.blkdev,
            fields: new
                .fields
                .into_iter()
                .take(FIELDS_MAX)
                .map(|(key, value)| (key, cut_value(value)))
                .collect(),
            text: cut(new.text),
        };
        let mut state = self.state.lock();
        state.latest += 1;
        event.sequence = state.latest;
        let (event, sequence) = (Arc::new(event), state.latest);
        state.bytes += size_of(&event);
        state.counts[name as usize] += 1;
        state.kept.push_back(Arc::clone(&event));
        while state.kept.len() > self.kept_max || (state.bytes > KEPT_BYTES_MAX && state.kept.len() > 1) {
            let bytes = state.kept.pop_front().map_or(0, |oldest| size_of(&oldest));
            state.bytes -= bytes;
        }
        let command = state.command.clone();
        // Within the lock, so that followers and the command have the events in their order.
        self.latest.send_replace(sequence);
        if let Some(command) = command {
            command.add(&event);
        }
    }

    /// Up to `limit` events behind number `cursor`.
    #[must_use]
    pub fn after(&self, cursor: u64, limit: usize) -> Batch {
        let state = self.state.lock();
        let before_oldest = state.before_oldest();
        let dropped = before_oldest.saturating_sub(cursor);
        let cursor = cursor.max(before_oldest);
        let skipped = usize::try_from(cursor - before_oldest).unwrap_or(usize::MAX);
        let events: Vec<_> = state.kept.iter().skip(skipped).take(limit).cloned().collect();
        let cursor = events.last().map_or(cursor, |last| last.sequence);
        Batch { dropped, events, cursor }
    }

    /// The number of the last kept event before `time_ms`, or of the one before the oldest.
    #[must_use]
    pub fn before(&self, time_ms: u64) -> u64 {
        let state = self.state.lock();
        let later = state.kept.iter().find(|event| event.time_ms >= time_ms);
        later.map_or(state.latest, |event| event.sequence - 1)
    }

    /// Whether an event of a transport, or of one of its backends, is kept: it may not be there any more.
    #[must_use]
    pub fn has_of(&self, transport: u32, backend: Option<u32>) -> bool {
        let is_of = |event: &Arc<Event>| {
            event.transport == Some(transport) && (backend.is_none() || event.backend == backend)
        };
        self.state.lock().kept.iter().any(is_of)
    }

    /// What is kept.
    #[must_use]
    pub fn extent(&self) -> EventsBegin {
        let state = self.state.lock();
        EventsBegin {
            instance: self.instance.clone(),
            oldest: state.before_oldest() + 1,
            latest: state.latest,
        }
    }

    /// The part of `status` about events.
    #[must_use]
    pub fn info(&self) -> EventsInfo {
        let (command, mut info) = {
            let state = self.state.lock();
            let counts = EventName::ALL.map(|name| (name.name().to_owned(), state.counts[name as usize]));
            let info = EventsInfo {
                instance: self.instance.clone(),
                recorded: state.latest,
                kept: state.kept.len() as u64,
                dropped: state.before_oldest(),
                counts: counts.into_iter().collect(),
                command: None,
            };
            (state.command.clone(), info)
        };
        info.command = command.map(|command| command.info());
        info
    }

    /// Gives the queue of a command each event from now on.
    pub(super) fn set_command(&self, queue: Arc<CommandQueue>) {
        self.state.lock().command = Some(queue);
    }

    /// Permits one more request to follow.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if there are 16 already.
    pub fn follow(self: &Arc<Self>) -> Result<Follower> {
        if self.followers.fetch_add(1, Ordering::SeqCst) < FOLLOWERS_MAX {
            return Ok(Follower(Arc::clone(self)));
        }
        self.followers.fetch_sub(1, Ordering::SeqCst);
        let text =
            format!("{FOLLOWERS_MAX} clients follow events already; end one of them, or leave --follow out");
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Receives the number of each new event, and a change when followers must end.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.latest.subscribe()
    }

    /// Ends those that follow, when they have what was recorded until now.
    pub fn end_followers(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        self.latest.send_modify(|_| ());
    }

    /// Whether those that follow must end.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::SeqCst)
    }
}

impl State {
    /// The number before that of the oldest kept event.
    fn before_oldest(&self) -> u64 {
        self.latest - self.kept.len() as u64
    }
}

fn size_of(event: &Event) -> usize {
    let of_value = |value: &Value| value.as_str().map_or(0, str::len);
    let fields = event.fields.iter().map(|(key, value)| FIELD_OVERHEAD + key.len() + of_value(value));
    EVENT_OVERHEAD + event.text.len() + fields.sum::<usize>()
}

/// The text, or what fits of it.
fn cut(mut text: String) -> String {
    if text.len() > TEXT_MAX {
        let end = (0..=TEXT_MAX).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
        text.shrink_to_fit();
    }
    text
}

fn cut_value(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(cut(text)),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> NewEvent {
        NewEvent {
            name: EventName::DiskFailing,
            severity: Severity::Error,
            transport: Some(0),
            backend: Some(1),
            blkdev: None,
            fields: BTreeMap::new(),
            text: text.to_owned(),
        }
    }

    fn texts(batch: &Batch) -> Vec<&str> {
        batch.events.iter().map(|event| event.text.as_str()).collect()
    }

    #[test]
    fn the_oldest_events_make_way_and_a_follower_that_is_late_learns_how_many() {
        let events = Events::keeping(3);
        for number in 1..=5 {
            events.record(event(&number.to_string()));
        }
        let batch = events.after(1, 10);
        assert_eq!((batch.dropped, texts(&batch), batch.cursor), (1, vec!["3", "4", "5"], 5));
        let batch = events.after(3, 1);
        assert_eq!((batch.dropped, texts(&batch), batch.cursor), (0, vec!["4"], 4));
        assert_eq!(events.after(5, 10).events.len(), 0);
        let info = events.info();
        assert_eq!((info.recorded, info.kept, info.dropped), (5, 3, 2));
        assert_eq!((info.counts["disk.failing"], info.counts["disk.recovered"]), (5, 0));
        assert_eq!(events.extent(), EventsBegin { instance: info.instance, oldest: 3, latest: 5 });
    }

    #[test]
    fn the_memory_of_the_record_is_bounded_whatever_the_texts_are() {
        let events = Events::default();
        for _ in 0..2000 {
            let mut event = event(&"x".repeat(1 << 20));
            let of = |number| (format!("field {number}"), Value::from("y".repeat(1 << 16)));
            event.fields = (0..40).map(of).collect();
            events.record(event);
        }
        let batch = events.after(0, usize::MAX);
        let bytes: usize = batch.events.iter().map(|event| serde_json::to_vec(&**event).unwrap().len()).sum();
        assert!(bytes <= KEPT_BYTES_MAX && batch.events.len() > 10, "{bytes}");
    }

    #[test]
    fn events_are_found_by_their_time() {
        let events = Events::default();
        events.record(event("1"));
        let at = events.after(0, 1).events[0].time_ms;
        assert_eq!((events.before(at), events.before(at + 1), events.before(0)), (0, 1, 0));
    }

    #[test]
    fn whoever_follows_is_told_of_each_event_and_of_the_end() {
        let events = Events::default();
        let mut latest = events.subscribe();
        assert!(!latest.has_changed().unwrap());
        events.record(event("1"));
        assert!(latest.has_changed().unwrap() && *latest.borrow_and_update() == 1);
        events.end_followers();
        assert!(latest.has_changed().unwrap() && events.is_ending());
    }

    #[test]
    fn a_follower_too_many_is_refused_until_another_one_ends() {
        let events = Arc::new(Events::default());
        let mut followers: Vec<_> = (0..FOLLOWERS_MAX).map(|_| events.follow().unwrap()).collect();
        assert_eq!(events.follow().unwrap_err().kind(), ErrorKind::Busy);
        followers.pop();
        events.follow().unwrap();
    }
}
