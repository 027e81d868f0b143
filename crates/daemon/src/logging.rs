//! Logging, and the panic hook.
//!
//! Invariants: a panic in any thread logs its location and ends the process. A daemon that lost a thread would accept
//! requests and never complete them; a process that has died is restarted, and acknowledged data is in the region.

use cbd_types::{Error, ErrorKind};
use std::str::FromStr;
use tracing_subscriber::filter::LevelFilter;

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

/// Starts logging to standard error. Under systemd lines have no time, because the journal adds it.
pub fn start(format: LogFormat, verbose: bool) {
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    let builder = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_target(false)
        // A line that cannot be written, because the file system of the log is full, is lost. A report of that goes to the same
        // place, and a report that fails is a panic.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    let under_journal = std::env::var_os("JOURNAL_STREAM").is_some();
    // A second call, as in tests, has no effect.
    let _ = match (format, under_journal) {
        (LogFormat::Json, _) => builder.json().flatten_event(true).try_init(),
        (LogFormat::Text, true) => builder.without_time().try_init(),
        (LogFormat::Text, false) => builder.try_init(),
    };
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
