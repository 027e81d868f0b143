//! The two text formats of Prometheus: 0.0.4 and `OpenMetrics` 1.0.
//!
//! Invariants: a page has one block of lines for each metric: its help, its type, its values. A label value can hold
//! any text: control characters and the quoting characters of the formats are escaped. The text that is in memory at
//! a time is bounded if a sink takes it in parts.
//!
//! Elsewhere: which metrics there are ([`super`]).

use std::fmt::{Display, Write};

/// A text format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// Version 0.0.4 of the text format of Prometheus.
    #[default]
    Prometheus,
    /// `OpenMetrics` 1.0.
    OpenMetrics,
}

impl Format {
    /// The media type of a page.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Takes a page in parts; returns whether it takes further ones.
pub type Sink<'a> = &'a mut dyn FnMut(String) -> bool;

/// Bytes from which on a part is handed to the sink.
const PART: usize = 64 << 10;

/// A page that is being written.
pub(super) struct Page<'a> {
    text: String,
    format: Format,
    sink: Sink<'a>,
    /// The sink takes nothing any more.
    is_closed: bool,
}

impl<'a> Page<'a> {
    pub(super) fn new(format: Format, sink: Sink<'a>) -> Self {
        Self { text: String::new(), format, sink, is_closed: false }
    }

    /// The head of the metric `name`; those of kind `counter` end with `_total`.
    pub(super) fn head(&mut self, name: &str, kind: &str, help: &str) {
        if self.is_closed {
            return;
        }
        // In OpenMetrics, a counter's name lacks the suffix that its values have.
        let name = match (self.format, kind) {
            (Format::OpenMetrics, "counter") => name.strip_suffix("_total").unwrap_or(name),
            _ => name,
        };
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One value.
    pub(super) fn line(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        if self.is_closed {
            return;
        }
        self.text.push_str(name);
        for (index, (label, value)) in labels.iter().enumerate() {
            let _ = write!(self.text, "{}{label}=\"", if index == 0 { '{' } else { ',' });
            escape(&mut self.text, value);
            self.text.push('"');
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
        if self.text.len() >= PART {
            self.hand_over();
        }
    }

    fn hand_over(&mut self) {
        let part = std::mem::take(&mut self.text);
        self.is_closed = self.is_closed || !(self.sink)(part);
    }

    /// Ends the page.
    pub(super) fn end(mut self) {
        if self.format == Format::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.hand_over();
    }
}

/// Appends a label value.
fn escape(text: &mut String, value: &str) {
    for character in value.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            // The formats have no escape for these, and a terminal obeys them: the value has `\x1b` and the like
            // instead.
            control if control.is_control() => {
                let _ = write!(text, "\\\\x{:02x}", u32::from(control));
            }
            usual => text.push(usual),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(format: Format, write: impl FnOnce(&mut Page<'_>)) -> Vec<String> {
        let mut parts = Vec::new();
        let mut sink = |part| {
            parts.push(part);
            true
        };
        let mut page = Page::new(format, &mut sink);
        write(&mut page);
        page.end();
        parts
    }

    #[test]
    fn label_values_are_escaped() {
        let value = "/a \"b\"\\c\nd\re\u{1b}[31m\u{85} é".to_owned();
        let text = page(Format::Prometheus, |page| page.line("cbd_x", &[("path", value)], 1)).concat();
        assert_eq!(text, "cbd_x{path=\"/a \\\"b\\\"\\\\c\\nd\\\\x0de\\\\x1b[31m\\\\x85 é\"} 1\n");
    }

    #[test]
    fn openmetrics_names_a_counter_without_its_suffix_and_has_an_end() {
        let write = |page: &mut Page<'_>| {
            page.head("cbd_x_total", "counter", "Things.");
            page.line("cbd_x_total", &[("a", "1".to_owned()), ("b", "2".to_owned())], 3);
            page.head("cbd_y_seconds", "gauge", "Time.");
            page.line("cbd_y_seconds", &[], 1.5);
        };
        let values = "cbd_x_total{a=\"1\",b=\"2\"} 3\n\
                      # HELP cbd_y_seconds Time.\n# TYPE cbd_y_seconds gauge\ncbd_y_seconds 1.5\n";
        let text = page(Format::OpenMetrics, write).concat();
        assert_eq!(text, format!("# HELP cbd_x Things.\n# TYPE cbd_x counter\n{values}# EOF\n"));
        let text = page(Format::Prometheus, write).concat();
        assert_eq!(text, format!("# HELP cbd_x_total Things.\n# TYPE cbd_x_total counter\n{values}"));
    }

    #[test]
    fn a_long_page_is_handed_over_in_parts_and_ends_early_for_a_sink_that_is_gone() {
        let many = |page: &mut Page<'_>| {
            for number in 0..10_000 {
                page.line("cbd_x", &[("path", "p".repeat(500))], number);
            }
        };
        let parts = page(Format::OpenMetrics, many);
        assert!(parts.len() > 70 && parts.iter().all(|part| part.len() < PART + 600), "{}", parts.len());
        let mut taken = 0;
        let mut sink = |_: String| {
            taken += 1;
            taken < 2
        };
        let mut page = Page::new(Format::OpenMetrics, &mut sink);
        many(&mut page);
        assert!(page.text.is_empty(), "nothing is written that is not read");
        assert_eq!(taken, 2);
    }
}
