//! The report of a task: its steps with their times, and the numbers of passed and failed checks.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The result of one step.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Count {
    /// Tests or checks that passed.
    pub passed: u64,
    /// Tests or checks that failed.
    pub failed: u64,
    /// Tests that exist and did not run.
    pub ignored: u64,
}

impl Count {
    /// A step that is one check.
    pub fn one(passed: bool) -> Self {
        Self { passed: u64::from(passed), failed: u64::from(!passed), ignored: 0 }
    }

    /// Adds the numbers in a line of the Rust test harness, if it has any: `test result: ok. 12 passed; 0
    /// failed; 1 ignored; ..`.
    pub fn add_line(&mut self, line: &str) {
        let Some(figures) = line.trim_start().strip_prefix("test result: ") else { return };
        for part in figures.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let Some(Ok(number)) = words.next().map(str::parse::<u64>) else { continue };
            match words.next() {
                Some("passed") => self.passed += number,
                Some("failed") => self.failed += number,
                Some("ignored") => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// The tests that failed or did not end, according to the lines of the Rust test harness.
#[derive(Default, Debug)]
pub struct TestFailures {
    failed: BTreeSet<String>,
    slow: BTreeSet<String>,
    /// Panics: the thread, which has the name of its test, the place, and the beginning of the message.
    panics: Vec<[String; 3]>,
    /// Whether the next line is the message of the last panic.
    is_message: bool,
}

/// Panics that are repeated in the report, and characters of each message.
const PANICS_MAX: usize = 50;
const MESSAGE_MAX: usize = 400;

impl TestFailures {
    /// Reads one line.
    pub fn add_line(&mut self, line: &str) {
        if std::mem::take(&mut self.is_message)
            && let Some([.., message]) = self.panics.last_mut()
        {
            *message = line.trim().chars().take(MESSAGE_MAX).collect();
        }
        if let Some((thread, at)) = panic_in(line.trim())
            && self.panics.len() < PANICS_MAX
        {
            self.panics.push([thread.to_owned(), at.to_owned(), String::new()]);
            self.is_message = true;
        }
        let Some(text) = line.trim().strip_prefix("test ") else { return };
        if let Some(name) = text.strip_suffix(" has been running for over 60 seconds") {
            self.slow.insert(name.to_owned());
        } else if let Some((name, result)) = text.rsplit_once(" ... ") {
            self.slow.remove(name);
            if result == "FAILED" {
                self.failed.insert(name.to_owned());
            }
        }
    }

    /// One line for each test, behind each failed one its panics.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let panics_of = |name: &str| {
            let of_test = self.panics.iter().filter(|[thread, ..]| thread == name).collect::<Vec<_>>();
            of_test.into_iter().map(|[_, at, message]| format!("    {at} {message}"))
        };
        let failed = self
            .failed
            .iter()
            .flat_map(move |name| std::iter::once(format!("failed: {name}")).chain(panics_of(name)));
        failed.chain(self.slow.iter().map(|name| format!("did not end: {name}")))
    }
}

/// The thread and the place of the panic that a line reports.
fn panic_in(line: &str) -> Option<(&str, &str)> {
    let (thread, rest) = line.strip_prefix("thread '")?.split_once('\'')?;
    Some((thread, rest.split_once("panicked at ")?.1))
}

/// The report.
#[derive(Debug)]
pub struct Report {
    begun: Instant,
    total: Count,
    /// Lines that are printed after the table, so that they are visible at the end of a long log.
    notes: Vec<String>,
    steps: Vec<(&'static str, Duration, Count)>,
}

impl Report {
    /// An empty report; its time begins now.
    #[expect(clippy::new_without_default, reason = "it begins at the call")]
    pub fn new() -> Self {
        Self { begun: Instant::now(), total: Count::default(), notes: Vec::new(), steps: Vec::new() }
    }

    /// Announces a step, runs it and counts its result.
    pub fn step(&mut self, name: &'static str, about: &str, work: impl FnOnce() -> Count) {
        println!("==> {name}: {about}");
        let begun = Instant::now();
        let count = work();
        let word = if count.failed == 0 { "ok" } else { "FAILED" };
        println!("<== {name}: {word}, {:.1} s", begun.elapsed().as_secs_f64());
        self.total.passed += count.passed;
        self.total.failed += count.failed;
        self.total.ignored += count.ignored;
        self.steps.push((name, begun.elapsed(), count));
    }

    /// Adds lines that are printed after the table of the steps.
    pub fn note(&mut self, lines: impl IntoIterator<Item = String>) {
        self.notes.extend(lines);
    }

    /// Prints the table of the steps and, alone on the last line, the sum. True if nothing failed.
    pub fn finish(self) -> bool {
        println!();
        for (name, time, count) in &self.steps {
            let ignored =
                if count.ignored > 0 { format!(", {} ignored", count.ignored) } else { String::new() };
            println!(
                "{name:<10} {:>7.1} s   {} passed, {} failed{ignored}",
                time.as_secs_f64(),
                count.passed,
                count.failed
            );
        }
        for note in &self.notes {
            println!("{note}");
        }
        println!("{:<10} {:>7.1} s", "all", self.begun.elapsed().as_secs_f64());
        println!("{} passed, {} failed", self.total.passed, self.total.failed);
        self.total.failed == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_the_test_harness_are_added_up() {
        let mut count = Count::default();
        count.add_line(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.31s",
        );
        count.add_line("test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(count, Count { passed: 16, failed: 2, ignored: 1 });
    }

    #[test]
    fn tests_that_failed_or_did_not_end_are_named() {
        let mut problems = TestFailures::default();
        for line in [
            "test a::first ... ok",
            "test a::second ... FAILED",
            "test a::third has been running for over 60 seconds",
            "test a::fourth has been running for over 60 seconds",
            "test a::third ... ok",
            "thread 'a::second' (17) panicked at src/a.rs:5:1:",
            "the device took 12 s",
            "stack backtrace:",
            "thread 'another' (18) panicked at src/a.rs:6:1:",
            "this was expected",
        ] {
            problems.add_line(line);
        }
        let lines: Vec<_> = problems.lines().collect();
        assert_eq!(
            lines,
            ["failed: a::second", "    src/a.rs:5:1: the device took 12 s", "did not end: a::fourth"]
        );
    }

    #[test]
    fn other_lines_are_not_counted() {
        let mut count = Count::default();
        count.add_line("test a_write_of_12 passed; it says");
        count.add_line("running 12 tests");
        assert_eq!(count, Count::default());
    }
}
