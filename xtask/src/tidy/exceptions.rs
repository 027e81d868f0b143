//! `xtask/tidy.txt`: subjects that may exceed the limit of a rule, by how much, and why.
//!
//! A line is `RULE SUBJECT LIMIT REASON`. Lines that begin with `#` are comments.

use super::{Measure, RULES};
use crate::workspace;
use serde_json::{Value, json};
use std::fmt::Write as _;

const FILE: &str = "xtask/tidy.txt";

/// The list.
#[derive(Debug)]
pub struct Exceptions {
    lines: Vec<Line>,
}

#[derive(Debug)]
enum Line {
    Comment(String),
    Exception(Exception),
}

#[derive(Debug)]
struct Exception {
    rule: String,
    subject: String,
    limit: usize,
    reason: String,
}

impl Exceptions {
    /// Reads the list.
    ///
    /// # Errors
    /// When it cannot be read, or a line of it is malformed.
    pub fn read() -> Result<Self, String> {
        let path = workspace::root().join(FILE);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = Vec::new();
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                lines.push(Line::Comment(line.to_owned()));
                continue;
            }
            let wrong =
                |what: &str| format!("{FILE}:{}: {what}: RULE SUBJECT LIMIT REASON is needed", index + 1);
            let mut parts = line.splitn(4, ' ');
            let mut next = |what| parts.next().filter(|part| !part.is_empty()).ok_or_else(|| wrong(what));
            let (rule, subject) = (next("no rule")?, next("no subject")?);
            let limit = next("no limit")?.parse().map_err(|_| wrong("the limit is no number"))?;
            let reason = next("no reason")?;
            if !RULES.iter().any(|known| known.name == rule) {
                return Err(wrong(&format!("there is no rule '{rule}'")));
            }
            lines.push(Line::Exception(Exception {
                rule: rule.to_owned(),
                subject: subject.to_owned(),
                limit,
                reason: reason.to_owned(),
            }));
        }
        Ok(Self { lines })
    }

    /// Writes the list.
    ///
    /// # Errors
    /// The error of the system, as text.
    pub fn write(&self) -> Result<(), String> {
        let path = workspace::root().join(FILE);
        std::fs::write(&path, self.text()).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            let written = match line {
                Line::Comment(comment) => writeln!(text, "{comment}"),
                Line::Exception(Exception { rule, subject, limit, reason }) => {
                    writeln!(text, "{rule} {subject} {limit} {reason}")
                }
            };
            written.expect("a string takes all text");
        }
        text
    }

    /// Lowers each limit to the present value, and removes exceptions that are no longer needed.
    pub fn lower(&mut self, measures: &[Measure]) {
        self.lines.retain_mut(|line| {
            let Line::Exception(exception) = line else { return true };
            let value = exception.value(measures);
            exception.limit = exception.limit.min(value);
            value > exception.default_limit()
        });
    }

    /// The violations of rules, and the exceptions that are not needed.
    pub fn problems(&self, measures: &[Measure]) -> Vec<String> {
        let mut problems = Vec::new();
        for measure in measures {
            let limit = self.limit(measure);
            if measure.value > limit {
                problems.push(format!(
                    "{} {}: {} ({}); the limit is {limit}\n    {}",
                    measure.rule.name,
                    measure.subject,
                    measure.value,
                    measure.rule.about,
                    measure.at.join("\n    ")
                ));
            }
        }
        for exception in self.exceptions() {
            if exception.value(measures) <= exception.default_limit() {
                problems.push(format!(
                    "{FILE}: the exception '{} {}' is not needed any more: run cargo xtask tidy --update",
                    exception.rule, exception.subject
                ));
            }
        }
        problems
    }

    /// The exceptions of a rule, for a report.
    pub fn of(&self, rule: &str) -> Value {
        self.exceptions()
            .filter(|exception| exception.rule == rule)
            .map(|exception| json!({ "subject": exception.subject, "limit": exception.limit, "reason": exception.reason }))
            .collect()
    }

    fn limit(&self, measure: &Measure) -> usize {
        self.exceptions()
            .find(|exception| exception.rule == measure.rule.name && exception.subject == measure.subject)
            .map_or(measure.rule.limit, |exception| exception.limit)
    }

    fn exceptions(&self) -> impl Iterator<Item = &Exception> {
        self.lines.iter().filter_map(|line| match line {
            Line::Exception(exception) => Some(exception),
            Line::Comment(_) => None,
        })
    }
}

impl Exception {
    fn value(&self, measures: &[Measure]) -> usize {
        measures
            .iter()
            .find(|measure| measure.rule.name == self.rule && measure.subject == self.subject)
            .map_or(0, |measure| measure.value)
    }

    fn default_limit(&self) -> usize {
        RULES.iter().find(|rule| rule.name == self.rule).map_or(0, |rule| rule.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::super::code::FUNCTION;
    use super::*;

    fn measure(subject: &str, value: usize) -> Measure {
        Measure { value, ..Measure::none(&FUNCTION, subject) }
    }

    #[test]
    fn a_subject_beyond_its_limit_is_a_problem() {
        let none = Exceptions::parse("# nothing\n").expect("a list");
        assert_eq!(none.problems(&[measure("a", 80)]).len(), 0);
        assert_eq!(none.problems(&[measure("a", 81)]).len(), 1);
        let some = Exceptions::parse("function a 90 a table\n").expect("a list");
        assert_eq!(some.problems(&[measure("a", 90)]).len(), 0);
        assert_eq!(some.problems(&[measure("a", 91)]).len(), 1);
    }

    #[test]
    fn an_exception_that_is_not_needed_is_a_problem_and_update_removes_it() {
        let mut list =
            Exceptions::parse("# why\nfunction a 90 a table\nfunction b 99 a loop\n").expect("a list");
        let measures = [measure("a", 80), measure("b", 85)];
        assert_eq!(list.problems(&measures).len(), 1);
        list.lower(&measures);
        assert_eq!(list.text(), "# why\nfunction b 85 a loop\n");
        list.lower(&[measure("b", 95)]);
        assert_eq!(list.text(), "# why\nfunction b 85 a loop\n", "a limit is never raised");
    }

    #[test]
    fn a_malformed_line_is_refused() {
        for line in ["function a", "function a many why", "nonsense a 1 why", "function a 90"] {
            assert!(Exceptions::parse(line).is_err(), "{line}");
        }
    }
}
