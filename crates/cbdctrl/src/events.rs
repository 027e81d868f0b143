//! `events`: shows what happened, and with `--follow` what happens, also over restarts of the daemon.
//!
//! Invariants: an event is printed once. A gap, and each time that the daemon is away and there again, is said on
//! standard error. The command ends when its output has no reader.

use crate::cli::{EventArguments, Since};
use crate::command::Output;
use cbd_daemon::api::{ErrorAnswer, ErrorBody, Event, EventLine, EventsGap, printable};
use cbd_daemon::client::Client;
use cbd_daemon::size::format_time;
use cbd_types::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time until the first attempt to reach a daemon that is away; each further one is twice as long, up to
/// [`LONGEST_WAIT`].
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Runs the command.
pub(crate) fn run(arguments: &EventArguments, client: &Client, output: &Output) -> ExitCode {
    let mut shown = Shown { place: None, is_json: output.json, is_away: false, is_done: false };
    match shown.all(arguments, client) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
            if output.json {
                let _ = output.json(&ErrorAnswer { error: ErrorBody::from(&error) });
            }
            ExitCode::FAILURE
        }
    }
}

/// What was shown so far.
struct Shown {
    /// The run of the daemon, and the number of the last event of it.
    place: Option<(String, u64)>,
    is_json: bool,
    /// Whether the daemon was not there at the last attempt.
    is_away: bool,
    /// Whether all was shown, or the output has no reader.
    is_done: bool,
}

impl Shown {
    fn all(&mut self, arguments: &EventArguments, client: &Client) -> Result<()> {
        let mut wait = FIRST_WAIT;
        let since_ms = since_ms(arguments.since);
        loop {
            let path = self.path(arguments, since_ms);
            let mut has_begun = false;
            let result = client.lines(&path, |line: EventLine| {
                has_begun = true;
                self.take(line)
            });
            if has_begun {
                wait = FIRST_WAIT;
            }
            match result {
                _ if self.is_done => return Ok(()),
                Err(error) if !arguments.follow || !is_absence(&error, client) => return Err(error),
                Ok(()) if !arguments.follow => {
                    return Err(Error::new(ErrorKind::Stopped, "the daemon ended within its answer"));
                }
                Ok(()) => self.say_away("the daemon has ended"),
                Err(error) => self.say_away(&error.line()),
            }
            if !pause(wait) {
                return Ok(());
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    fn path(&self, arguments: &EventArguments, since_ms: Option<u64>) -> String {
        let mut query = vec![format!("severity={}", arguments.severity.name())];
        query.extend(arguments.transport.map(|transport| format!("transport={transport}")));
        query.extend(arguments.backend.as_ref().map(|backend| format!("backend={backend}")));
        query.extend(arguments.follow.then(|| "follow=true".to_owned()));
        match (&self.place, arguments.since) {
            (Some((instance, last)), _) => query.push(format!("since={last}&instance={instance}")),
            (None, Some(Since::Sequence(number))) => query.push(format!("since={number}")),
            (None, _) => query.extend(since_ms.map(|time_ms| format!("since_ms={time_ms}"))),
        }
        format!("/v1/events?{}", query.join("&"))
    }

    fn take(&mut self, line: EventLine) -> Result<ControlFlow<()>> {
        match line {
            EventLine::Begin(begin) => {
                let is_new = self.place.as_ref().is_some_and(|(instance, _)| *instance != begin.instance);
                if std::mem::take(&mut self.is_away) {
                    let how =
                        if is_new { ", restarted: the numbers of its events begin with 1 again" } else { "" };
                    eprintln!("cbdctrl: the daemon is there{how}");
                }
                if is_new {
                    self.place = Some((begin.instance, 0));
                }
            }
            EventLine::Gap(EventsGap { dropped }) => {
                eprintln!(
                    "cbdctrl: {dropped} events are missing here: the daemon does not keep them any more"
                );
            }
            EventLine::Event(event) => {
                let is_read = print(&if self.is_json { json(&event)? } else { text(&event) })?;
                self.place = Some((event.instance, event.sequence));
                if !is_read {
                    self.is_done = true;
                    return Ok(ControlFlow::Break(()));
                }
            }
            EventLine::End(_) => self.is_done = true,
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Says once that the daemon is away.
    fn say_away(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_away, true) {
            eprintln!("cbdctrl: {}; waiting for it", why.replace('\n', " "));
        }
    }
}

/// The time of the first event that is wanted.
fn since_ms(since: Option<Since>) -> Option<u64> {
    match since? {
        Since::Sequence(_) => None,
        Since::Time(time_ms) => Some(time_ms),
        Since::Ago(seconds) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let then = now.saturating_sub(Duration::from_secs(seconds.into()));
            Some(u64::try_from(then.as_millis()).unwrap_or(u64::MAX))
        }
    }
}

/// Whether the error is that no daemon answers, not one of the daemon's.
fn is_absence(error: &Error, client: &Client) -> bool {
    match error.kind() {
        ErrorKind::Stopped | ErrorKind::TimedOut => true,
        ErrorKind::NotFound => !client.has_daemon(),
        _ => false,
    }
}

/// Waits; false if standard output has no reader any more.
fn pause(time: Duration) -> bool {
    let output = rustix::stdio::stdout();
    let timeout = Timespec::try_from(time).ok();
    // Without events poll waits for errors alone: the reader of the pipe is gone.
    !matches!(poll(&mut [PollFd::new(&output, PollFlags::empty())], timeout.as_ref()), Ok(1..))
}

/// Prints a line; false if the output has no reader.
fn print(line: &str) -> Result<bool> {
    let mut output = std::io::stdout().lock();
    match output.write_all(line.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::new(ErrorKind::System, "an event cannot be printed").caused_by(error)),
    }
}

fn json(event: &Event) -> Result<String> {
    let line = serde_json::to_string(event);
    line.map(|line| line + "\n")
        .map_err(|error| Error::new(ErrorKind::System, "an event cannot be printed").caused_by(error))
}

/// The event as a line for people.
fn text(event: &Event) -> String {
    let named = [
        ("transport", event.transport.filter(|transport| *transport > 0)),
        ("backend", event.backend),
        ("blkdev", event.blkdev),
    ];
    let objects: Vec<String> =
        named.iter().filter_map(|(what, number)| Some(format!("{what} {}", (*number)?))).collect();
    let objects = if objects.is_empty() { String::new() } else { format!("{}: ", objects.join(" ")) };
    format!(
        "{} {:>5} {:<7} {:<21} {objects}{}\n",
        format_time(event.time_ms),
        event.sequence,
        event.severity.name(),
        printable(&event.name),
        printable(&event.text)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_daemon::api::Severity;

    #[test]
    fn an_event_is_one_line_with_its_time_its_number_its_name_and_its_objects() {
        let event = Event {
            sequence: 12,
            time_ms: 1_767_225_599_123,
            name: "disk.failing".to_owned(),
            severity: Severity::Warning,
            transport: Some(0),
            backend: Some(3),
            text: "/dev/sd\n\u{1b}[31mb: writeback fails".to_owned(),
            ..Event::default()
        };
        assert_eq!(
            text(&event),
            "2025-12-31 23:59:59 UTC    12 warning disk.failing          backend 3: /dev/sd\\n\\u{1b}[31mb: writeback fails\n"
        );
        let event = Event { transport: Some(1), backend: None, blkdev: Some(4), ..event };
        assert!(text(&event).contains(" transport 1 blkdev 4: /dev/sd"));
    }
}
