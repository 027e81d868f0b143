//! Events on the control socket: what happened, one JSON line each.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::str::FromStr;

/// How bad an event is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Nothing is wrong.
    #[default]
    Info,
    /// Something is not as it should be; no data is lost.
    Warning,
    /// Data is lost or will be without action by the user, or something is not served.
    Error,
}

impl Severity {
    /// All values, the mildest first.
    pub const ALL: [Self; 3] = [Self::Info, Self::Warning, Self::Error];

    /// The word in commands, JSON and configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl FromStr for Severity {
    type Err = cbd_types::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
            let text = format!("a severity is info, warning or error, not \"{text}\"");
            cbd_types::Error::new(cbd_types::ErrorKind::InvalidArgument, text)
        })
    }
}

/// Something that happened in the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Event {
    /// Its number in this run of the daemon, from 1 on, without gaps.
    pub sequence: u64,
    /// The run of the daemon: the sequence of another one begins with 1 again.
    pub instance: String,
    /// When it happened, in milliseconds since 1970 UTC.
    pub time_ms: u64,
    /// Its stable name, e.g. `backend.started`.
    pub name: String,
    /// How bad it is.
    pub severity: Severity,
    /// Number of the transport that it is about.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub transport: Option<u32>,
    /// Number of the backend that it is about.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub backend: Option<u32>,
    /// Number of the block device that it is about.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub blkdev: Option<u32>,
    /// What else is known of it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub fields: BTreeMap<String, Value>,
    /// The line of the log.
    pub text: String,
}

/// One line of the answer to a request for events: one `begin`, any number of `event` and `gap`, and one `end` if the
/// request does not follow. An answer that follows ends without one, with the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventLine {
    /// What there is.
    Begin(EventsBegin),
    /// An event.
    Event(Event),
    /// Events between the ones before and behind this line that are not kept any more.
    Gap(EventsGap),
    /// All events until now were sent.
    End(EventsEnd),
}

/// The state of the record when a request for events begins.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventsBegin {
    /// The run of the daemon.
    pub instance: String,
    /// Number of the oldest event that is kept.
    pub oldest: u64,
    /// Number of the latest event; 0 before the first.
    pub latest: u64,
}

/// Events that are not kept any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventsGap {
    /// How many.
    pub dropped: u64,
}

/// The end of an answer that does not follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventsEnd {}

/// The record of events, in the status.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventsInfo {
    /// The run of the daemon.
    pub instance: String,
    /// Events since the daemon started.
    pub recorded: u64,
    /// Events of them that are kept.
    pub kept: u64,
    /// Events of them that are not kept any more.
    pub dropped: u64,
    /// The number of events since the daemon started, by name; each name is there.
    pub counts: BTreeMap<String, u64>,
    /// The command that is run for events, if the configuration names one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub command: Option<EventCommandInfo>,
}

/// The command that is run for events.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct EventCommandInfo {
    /// The program.
    pub program: String,
    /// Events for which it ran and succeeded.
    pub succeeded: u64,
    /// Events for which it could not be started or ended with an error.
    pub failed: u64,
    /// Events for which it ran longer than its limit, and was killed.
    pub timed_out: u64,
    /// Events for which it was not run, since too many were waiting.
    pub dropped: u64,
    /// Events that wait for it.
    pub waiting: u64,
    /// Why it failed last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_error: Option<String>,
}
