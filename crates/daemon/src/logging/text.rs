//! The fields of a line of text.
//!
//! Invariants: a text line has the fields before `event` and neither that nor those behind it, which the text of the
//! line says: they are for the journal, JSON and events.

use crate::events::EVENT;
use std::fmt::{self, Debug};
use tracing::field::{Field, Visit};
use tracing_subscriber::field::{MakeVisitor, VisitFmt, VisitOutput};
use tracing_subscriber::fmt::format::{DefaultVisitor, Writer};

/// Writes the fields of a line.
#[derive(Debug, Default)]
pub(super) struct TextFields;

impl<'a> MakeVisitor<Writer<'a>> for TextFields {
    type Visitor = TextVisitor<'a>;

    fn make_visitor(&self, target: Writer<'a>) -> TextVisitor<'a> {
        TextVisitor { inner: DefaultVisitor::new(target, true), is_behind_event: false }
    }
}

/// Writes the fields of one line.
#[derive(Debug)]
pub(super) struct TextVisitor<'a> {
    inner: DefaultVisitor<'a>,
    is_behind_event: bool,
}

impl Visit for TextVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.is_behind_event |= field.name() == EVENT;
        if !self.is_behind_event {
            self.inner.record_debug(field, value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.is_behind_event |= field.name() == EVENT;
        if !self.is_behind_event {
            self.inner.record_str(field, value);
        }
    }
}

impl VisitOutput<fmt::Result> for TextVisitor<'_> {
    fn finish(self) -> fmt::Result {
        self.inner.finish()
    }
}

impl VisitFmt for TextVisitor<'_> {
    fn writer(&mut self) -> &mut dyn fmt::Write {
        self.inner.writer()
    }
}
