//! The last events of the daemon.
//!
//! Invariants: at most [`KEPT`] are kept; an answer that is not understood changes nothing.
//!
//! Elsewhere: all events, and their names ([`crate::cli::EventArguments`], `docs/events.md`).

use super::sample::Recorded;
use super::text::time_of_day;
use cbd_daemon::api::{Event, EventLine, NumberOrName, Severity, printable};
use cbd_daemon::client::Client;
use cbd_types::Result;
use std::collections::VecDeque;
use std::ops::ControlFlow;

/// The most events that are kept.
const KEPT: usize = 50;

/// The events that were fetched.
#[derive(Debug)]
pub struct Events {
    /// What the user asks for, as a part of the path.
    of: String,
    /// The state of the record up to which they were fetched.
    place: Recorded,
    last: VecDeque<String>,
}

impl Events {
    /// Those of a transport and a backend, or of all.
    pub fn new(transport: Option<u32>, backend: Option<&NumberOrName>) -> Self {
        let transport = transport.map_or_else(String::new, |transport| format!("&transport={transport}"));
        let backend = backend.map_or_else(String::new, |backend| format!("&backend={backend}"));
        Self { of: format!("{transport}{backend}"), place: Recorded::default(), last: VecDeque::new() }
    }

    /// Fetches those that were recorded since the last time; false if there are none.
    ///
    /// # Errors
    /// Those of the daemon.
    pub fn update(&mut self, client: &Client, recorded: &Recorded) -> Result<bool> {
        if self.place == *recorded {
            return Ok(false);
        }
        let Recorded { instance, count } = &self.place;
        let since = if *count == 0 { String::new() } else { format!("&since={count}&instance={instance}") };
        let path = format!("/v1/events?severity=info{}{since}", self.of);
        client.lines(&path, |line: EventLine| {
            match line {
                EventLine::Event(event) => self.add(&event),
                EventLine::End(_) => return Ok(ControlFlow::Break(())),
                EventLine::Begin(_) | EventLine::Gap(_) => {}
            }
            Ok(ControlFlow::Continue(()))
        })?;
        // The last ones may be of another backend than the user asks for.
        if self.place.instance != recorded.instance || self.place.count < recorded.count {
            self.place = recorded.clone();
        }
        Ok(true)
    }

    fn add(&mut self, event: &Event) {
        let is_known = event.instance == self.place.instance && event.sequence <= self.place.count;
        if is_known {
            return;
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(text(event));
        self.place = Recorded { instance: event.instance.clone(), count: event.sequence };
    }

    /// The events in one line each, the newest last.
    pub fn lines(&self) -> Vec<String> {
        self.last.iter().cloned().collect()
    }
}

fn text(event: &Event) -> String {
    let severity = match event.severity {
        Severity::Info => String::new(),
        worse => format!("{} ", worse.name().to_uppercase()),
    };
    let (time, name, text) = (time_of_day(event.time_ms), printable(&event.name), printable(&event.text));
    format!("{time} {severity}{name}: {text}")
}
