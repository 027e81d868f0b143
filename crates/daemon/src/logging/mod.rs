//! Logging, and the panic hook.
//!
//! Invariants: a panic in any thread logs its location and ends the process. A daemon that lost a thread would accept
//! requests and never complete them; a process that has died is restarted, and acknowledged data is in the region.

mod journal;
mod text;

use crate::events::{EventLayer, Events};
use cbd_types::{Error, ErrorKind};
use std::str::FromStr;
use std::sync::Arc;
use text::TextFields;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

/// The format of log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogFormat {
    /// For people and the journal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a log format is text or json, not \"{text}\""),
            )),
        }
    }
}

/// Starts logging: to the journal with fields if standard error is connected to it, else to standard error. Under systemd text
/// lines have no time, because the journal adds it. Lines that are events are recorded in `events`.
pub fn start(format: LogFormat, verbose: bool, events: &Arc<Events>) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let journal = if format == LogFormat::Text { journal::of_standard_error() } else { None };
    let log = match journal {
        Some(journal) => journal.boxed(),
        None => to_standard_error(format),
    };
    // A second call, as in tests, has no effect.
    let _ = tracing_subscriber::registry()
        .with(log.and_then(EventLayer(Arc::clone(events))).with_filter(level))
        .try_init();
}

fn to_standard_error(format: LogFormat) -> Box<dyn Layer<Registry> + Send + Sync> {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        // A line that cannot be written, because the file system of the log is full, is lost. A report of that goes to the same
        // place, and a report that fails is a panic.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let under_journal = std::env::var_os("JOURNAL_STREAM").is_some();
    match (format, under_journal) {
        (LogFormat::Json, _) => lines.json().flatten_event(true).boxed(),
        (LogFormat::Text, true) => lines.fmt_fields(TextFields).without_time().boxed(),
        (LogFormat::Text, false) => lines.fmt_fields(TextFields).boxed(),
    }
}

/// Installs a panic hook that logs the panic and ends the process.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        let thread = std::thread::current();
        tracing::error!(
            thread = thread.name().unwrap_or("?"),
            "the daemon failed and ends; acknowledged data is in the regions: {info}"
        );
        std::process::abort();
    }));
}
