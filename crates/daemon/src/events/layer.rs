//! Makes events of the lines of the log that have a name.
//!
//! Invariants: a line is an event if it has the field `event` with the name of one. Its level is the severity,
//! `transport`, `backend` and `blkdev` are its objects, and its other fields are those of the event.

use super::{EventName, Events, NewEvent};
use crate::api::Severity;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The field of a line that names its event.
pub(crate) const EVENT: &str = "event";

/// Records the lines that are events.
#[derive(Debug)]
pub struct EventLayer(pub Arc<Events>);

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, line: &Event<'_>, _: Context<'_, S>) {
        if line.metadata().fields().field(EVENT).is_none() {
            return;
        }
        let mut fields = Fields::default();
        line.record(&mut fields);
        let Fields { event: Some(name), text, numbers: [transport, backend, blkdev], others } = fields else {
            return;
        };
        let severity = match *line.metadata().level() {
            Level::ERROR => Severity::Error,
            Level::WARN => Severity::Warning,
            _ => Severity::Info,
        };
        self.0.record(NewEvent { name, severity, transport, backend, blkdev, fields: others, text });
    }
}

/// The objects that an event can be about.
const OBJECTS: [&str; 3] = ["transport", "backend", "blkdev"];

#[derive(Default)]
struct Fields {
    event: Option<EventName>,
    text: String,
    numbers: [Option<u32>; 3],
    others: BTreeMap<String, Value>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        let number = || value.as_u64().and_then(|number| u32::try_from(number).ok());
        match (field.name(), number()) {
            ("message", _) => self.text = value.as_str().unwrap_or_default().to_owned(),
            (EVENT, _) => self.event = value.as_str().and_then(EventName::find),
            (name, Some(number)) if OBJECTS.contains(&name) => {
                let at = OBJECTS.iter().position(|known| *known == name).unwrap_or(0);
                self.numbers[at] = Some(number);
            }
            (name, _) => drop(self.others.insert(name.to_owned(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, Value::from(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, Value::from(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, Value::from(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn a_line_with_a_name_is_an_event_and_another_line_is_none() {
        let events = Arc::new(Events::default());
        let subscriber = tracing_subscriber::registry().with(EventLayer(Arc::clone(&events)));
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(transport = 1, backend = 2, "no event");
            tracing::info!(event = "no.such.name", "no event either");
            tracing::error!(
                transport = 1,
                backend = 2_u32,
                event = EventName::BackendDown.name(),
                path = "/dev/sdb",
                after_s = 7,
                "the backend is not up: {}",
                "why"
            );
            tracing::warn!(
                blkdev = Some(3),
                backend = None::<u32>,
                event = EventName::FileChanged.name(),
                "gone"
            );
        });
        let found = events.after(0, 10).events;
        assert_eq!(found.len(), 2);
        let first = &found[0];
        assert_eq!((first.name.as_str(), first.severity), ("backend.down", Severity::Error));
        assert_eq!((first.transport, first.backend, first.blkdev), (Some(1), Some(2), None));
        assert_eq!(first.text, "the backend is not up: why");
        let fields = [("after_s", Value::from(7)), ("path", Value::from("/dev/sdb"))];
        assert_eq!(first.fields, fields.map(|(key, value)| (key.to_owned(), value)).into());
        assert_eq!(
            (found[1].blkdev, found[1].backend, found[1].severity),
            (Some(3), None, Severity::Warning)
        );
    }
}
