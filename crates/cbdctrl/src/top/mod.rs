//! `top`: every device, cache and disk, live on a terminal, once as a table, or as lines of JSON.
//!
//! Invariants: what is shown comes from the daemon's status and maps alone, and every rate from two of them.
//!
//! Elsewhere: the figures of the status ([`cbd_daemon::api`]).

mod events;
mod json;
mod keys;
mod live;
mod rates;
mod sample;
mod state;
mod table;
mod terminal;
mod text;
mod view;

#[cfg(test)]
mod tests;

use crate::cli::TopArguments;
use crate::command::{Output, failed, status_path, warn};
use cbd_daemon::api::{DeviceMap, MAP_CELLS_MAX};
use cbd_daemon::client::{Client, Timeout};
use cbd_types::{Error, ErrorKind, Result};
use events::Events;
use rates::Rates;
use sample::Sample;
use serde_json::Value;
use state::{Looks, Mapped, State};
use std::io::{ErrorKind as IoErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The least time after which a question counts as not answered.
const TIMEOUT_MIN: Duration = Duration::from_secs(5);
/// The most.
const TIMEOUT_MAX: Duration = Duration::from_secs(30);

/// Runs the command.
pub fn run(arguments: &TopArguments, socket: &Path, json: bool) -> ExitCode {
    match execute(arguments, socket, json) {
        Ok(code) => code,
        Err(error) => failed(&error, &Output { json }),
    }
}

fn execute(arguments: &TopArguments, socket: &Path, json: bool) -> Result<ExitCode> {
    let interval = arguments.interval;
    let is_live = !arguments.once && !json;
    if is_live && !std::io::stdout().is_terminal() {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            "standard output is no terminal, and top draws on one: give --once for a table of one interval, or \
             --json for a line of JSON each interval",
        ));
    }
    let path = status_path(arguments.transport, arguments.backend.as_ref());
    let source = Source { client: Client::new(socket), path, began: Instant::now() };
    let first = source.take(interval)?;
    if is_live {
        let state = State::new(interval, looks(arguments.no_colour));
        let of = Events::new(arguments.transport, arguments.backend.as_ref());
        return live::run(source, of, first, state);
    }
    in_turns(&source, first, interval, arguments.once, json).map(|()| ExitCode::SUCCESS)
}

/// Prints what happened in each interval, or in one.
fn in_turns(source: &Source, first: Sample, interval: Duration, once: bool, json: bool) -> Result<()> {
    // Nothing comes through it: the wait is one with a timeout.
    let (_sender, never): (_, Receiver<()>) = channel();
    let mut earlier = first;
    loop {
        let _ = never.recv_timeout((earlier.at + interval).saturating_sub(source.now()));
        let later = match source.take(interval) {
            Ok(sample) => sample,
            Err(error) if once => return Err(error),
            Err(error) => {
                if !print(&json::failure(&error, wall_ms()))? {
                    return Ok(());
                }
                let _ = never.recv_timeout(interval);
                continue;
            }
        };
        let rates = Rates::between(Some(&earlier), &later);
        let text = if json {
            json::line(&rates)
        } else {
            warn(&rates.notes);
            table::table(&rates)
        };
        if !print(&text)? || once {
            return Ok(());
        }
        earlier = later;
    }
}

/// Prints a text; false if it has no reader any more.
fn print(text: &str) -> Result<bool> {
    let mut out = std::io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == IoErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::new(ErrorKind::System, "the result cannot be printed").caused_by(error)),
    }
}

/// What the terminal can show, by the environment and the options.
fn looks(no_colour: bool) -> Looks {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is_plain = no_colour || set("NO_COLOR").is_some() || set("TERM").is_none_or(|term| term == "dumb");
    // As the C library chooses the locale of characters.
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    Looks { styled: !is_plain, unicode: locale.contains("utf-8") || locale.contains("utf8") }
}

/// Where samples come from.
struct Source {
    client: Client,
    /// The path of the status on the control socket.
    path: String,
    began: Instant,
}

impl Source {
    /// The time since the first sample was asked for.
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// The client for questions that are asked each interval.
    fn client(&self, interval: Duration) -> Client {
        self.client.clone().with_timeout(Timeout::Limit(interval.clamp(TIMEOUT_MIN, TIMEOUT_MAX)))
    }

    fn take(&self, interval: Duration) -> Result<Sample> {
        let status: Value = self.client(interval).get(&self.path)?;
        Ok(Sample::read(&status, self.now(), wall_ms()))
    }

    /// The map of a cache, as fine as there is one.
    fn map(&self, of: Mapped, interval: Duration) -> Result<DeviceMap> {
        let Mapped { transport, backend } = of;
        let path = format!("/v1/transports/{transport}/backends/{backend}/map?cells={MAP_CELLS_MAX}");
        self.client(interval).get(&path)
    }
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
