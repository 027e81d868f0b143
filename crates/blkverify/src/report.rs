//! The result: JSON, text and exit code.
//!
//! Invariants: a verification that did not look at everything never ends with the code of one that did.

use cbd_daemon::api::printable;
use cbd_daemon::size::format_size;
use serde::Serialize;
use std::fmt::Write;

/// All is right.
pub const ALL_RIGHT: u8 = 0;
/// All that was wrong is repaired.
pub const REPAIRED: u8 = 1;
/// Something is wrong.
pub const WRONG: u8 = 2;
/// Not everything could be looked at.
pub const NOT_LOOKED: u8 = 3;
/// Wrong usage, as sysexits.h has it.
pub const USAGE: u8 = 64;

/// A wrong range.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Wrong {
    /// First byte of the range in PATH.
    pub start: u64,
    /// Bytes of the range.
    pub length: u64,
    /// `unreadable`, `differs` or `not_zero`; of a block device of CBD a flaw that the daemon names.
    pub what: String,
    /// Whether it is repaired.
    pub repaired: bool,
}

/// The result.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Report {
    /// The path as it was given.
    pub path: String,
    /// `disk`, `file` or `cbd`.
    pub object: &'static str,
    /// `readable`, `zeroes` or `compare`.
    pub check: &'static str,
    /// The level, of a block device of CBD.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub level: Option<&'static str>,
    /// First byte of the range.
    pub offset: u64,
    /// Bytes of the range.
    pub length: u64,
    /// Bytes of the range that are done: looked at, or on no disk.
    pub done_bytes: u64,
    /// Bytes that were looked at on a disk, or by the daemon.
    pub verified_bytes: u64,
    /// The part of them whose copy in the cache was checked.
    pub cache_bytes: u64,
    /// Bytes that the backing device read for the daemon; what is read again to be sure counts again.
    pub backing_bytes: u64,
    /// Bytes that were read through a file system.
    pub through_file_bytes: u64,
    /// The part of them that is among metadata.
    pub inline_bytes: u64,
    /// Bytes of holes.
    pub hole_bytes: u64,
    /// Bytes that are allocated and were never written.
    pub unwritten_bytes: u64,
    /// Bytes that changed or moved while they were looked at.
    pub changed_bytes: u64,
    /// The number of wrong ranges.
    pub found: u64,
    /// The part of them that is repaired.
    pub repaired: u64,
    /// The wrong ranges, in order.
    pub findings: Vec<Wrong>,
    /// How the bytes were looked at.
    pub method: String,
    /// What the user should know about the result.
    pub notes: Vec<String>,
    /// Whether everything was looked at.
    pub complete: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Report {
    /// Adds a reason why not everything was looked at.
    pub fn incomplete(&mut self, why: String) {
        self.complete = false;
        self.error.get_or_insert(why);
    }

    /// The exit code.
    #[must_use]
    pub const fn code(&self) -> u8 {
        if !self.complete || self.error.is_some() {
            NOT_LOOKED
        } else if self.found > self.repaired {
            WRONG
        } else if self.found > 0 {
            REPAIRED
        } else {
            ALL_RIGHT
        }
    }

    /// The text for a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        /// Ranges in the text; all are in JSON.
        const SHOWN_MAX: usize = 100;
        let mut text = String::new();
        for wrong in self.findings.iter().take(SHOWN_MAX) {
            let Wrong { start, length, what, repaired } = wrong;
            let repaired = if *repaired { ", repaired" } else { "" };
            let _ = writeln!(text, "bytes {start} to {}: {what}{repaired}", start + length);
        }
        if self.found > SHOWN_MAX as u64 {
            let _ = writeln!(text, "and {} ranges (--json)", self.found - SHOWN_MAX as u64);
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {}", printable(note));
        }
        let right = match self.check {
            "zeroes" => "all zero",
            "compare" => "the same",
            _ if self.level.is_some() => "all right",
            _ => "all readable",
        };
        let result = match (self.found, self.repaired) {
            (0, _) if !self.complete => "nothing wrong so far".to_owned(),
            (0, _) => right.to_owned(),
            (found, 0) => format!("{found} wrong ranges"),
            (found, repaired) => format!("{found} wrong ranges, {repaired} of them repaired"),
        };
        let _ = writeln!(
            text,
            "{}: {} of {}, {result} ({})",
            printable(&self.path),
            format_size(self.done_bytes),
            format_size(self.length),
            self.parts()
        );
        text
    }

    /// What was looked at in which way.
    fn parts(&self) -> String {
        let mut parts = Vec::new();
        let by_daemon = format!("on the disk by {}", self.method);
        let on_disk = match self.level {
            Some(_) => (self.backing_bytes, by_daemon.as_str()),
            None => (self.verified_bytes, self.method.as_str()),
        };
        for (bytes, what) in [
            on_disk,
            (self.cache_bytes, "in the cache"),
            (self.through_file_bytes, "through the file system"),
            (self.inline_bytes, "of it inline"),
            (self.hole_bytes, "holes"),
            (self.unwritten_bytes, "never written"),
            (self.changed_bytes, "changed meanwhile"),
        ] {
            if bytes > 0 {
                parts.push(format!("{} {what}", format_size(bytes)));
            }
        }
        if parts.is_empty() { self.method.clone() } else { parts.join("; ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(found: u64, repaired: u64) -> Report {
        Report {
            path: "/dev/x".into(),
            check: "readable",
            complete: true,
            found,
            repaired,
            ..Report::default()
        }
    }

    fn report_of_device() -> Report {
        let (length, cache_bytes) = (8192, 4096);
        let bytes = Report { length, done_bytes: length, verified_bytes: length, ..report(0, 0) };
        Report { cache_bytes, backing_bytes: length, method: "reads".to_owned(), ..bytes }
    }

    #[test]
    fn the_exit_code_says_what_is_left_wrong_and_whether_all_was_seen() {
        assert_eq!(report(0, 0).code(), ALL_RIGHT);
        assert_eq!(report(2, 2).code(), REPAIRED);
        assert_eq!(report(2, 1).code(), WRONG);
        let mut early = report(2, 1);
        early.incomplete("a signal".to_owned());
        early.incomplete("another reason".to_owned());
        assert_eq!((early.code(), early.error.as_deref()), (NOT_LOOKED, Some("a signal")));
    }

    #[test]
    fn the_text_names_ranges_parts_and_the_result() {
        let mut report = report(1, 0);
        (report.length, report.done_bytes, report.verified_bytes, report.hole_bytes) =
            (8192, 8192, 4096, 4096);
        "reads past the page cache".clone_into(&mut report.method);
        report.findings = vec![Wrong { start: 512, length: 512, what: "unreadable".into(), repaired: false }];
        let expected = "bytes 512 to 1024: unreadable\n\
             /dev/x: 8 KiB of 8 KiB, 1 wrong ranges (4 KiB reads past the page cache; 4 KiB holes)\n";
        assert_eq!(report.text(), expected);
        // A block device of CBD has two copies of what is cached and clean.
        let mut report = report_of_device();
        report.level = Some("agree");
        assert_eq!(
            report.text(),
            "/dev/x: 8 KiB of 8 KiB, all right (8 KiB on the disk by reads; 4 KiB in the cache)\n"
        );
    }
}
