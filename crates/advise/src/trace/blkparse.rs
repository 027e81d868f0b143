//! The text that `blkparse` prints by default.
//!
//! A request appears several times, with another action each time: queued (Q), issued to the driver (D), completed (C). What clients
//! requested is Q, before requests are merged. A trace that was filtered has only one of the others.

use super::{Action, Line, Request, invalid};
use cbd_types::{ByteRange, Result};
use std::os::unix::fs::MetadataExt;

/// Bytes of a sector in traces.
const SECTOR: u64 = 512;

/// The parser.
pub(super) struct Blkparse {
    /// The action that counts.
    action: &'static str,
}

impl Blkparse {
    /// Whether a file with this beginning is one.
    pub(super) fn recognize(head: &str) -> Option<Self> {
        let events = || head.lines().filter(|line| is_event(line));
        events().next()?;
        let has = |action: &&&str| events().any(|line| line.split_whitespace().nth(5) == Some(**action));
        let action = ["Q", "D", "C"].iter().find(has).copied().unwrap_or("Q");
        Some(Self { action })
    }

    pub(super) fn line(&self, line: &str) -> Option<Line> {
        if !is_event(line) {
            // A summary follows the events.
            return Some(if line.starts_with("CPU") || line.starts_with("Total (") {
                Line::End
            } else {
                Line::Other
            });
        }
        let mut fields = line.split_whitespace();
        let device = fields.next()?;
        let (_cpu, _sequence) = (fields.next()?, fields.next()?);
        let time = fields.next()?;
        let (_process, action) = (fields.next()?, fields.next()?);
        if action != self.action {
            return Some(Line::Other);
        }
        let kind = fields.next()?;
        let us = microseconds(time)?;
        let flush = Request { us, action: Action::Flush, range: ByteRange { start: 0, end: 0 } };
        let action = match kind {
            _ if kind.contains('D') => Action::Discard,
            _ if kind.contains('W') => Action::Write,
            _ if kind.contains('R') => Action::Read,
            _ if kind.starts_with('F') => {
                return Some(Line::Request { device: device.to_owned(), request: flush });
            }
            _ => return Some(Line::Other),
        };
        let sector = fields.next()?;
        if sector.starts_with('[') {
            // Without bytes the process follows: a flush, maybe one that is sent as a write.
            let line = Line::Request { device: device.to_owned(), request: flush };
            return Some(if kind.contains('F') { line } else { Line::Other });
        }
        let sector: u64 = sector.parse().ok()?;
        let plus = fields.next()?;
        let count: u64 = fields.next()?.parse().ok()?;
        if plus != "+" {
            return None;
        }
        let start = sector.checked_mul(SECTOR)?;
        let range = ByteRange { start, end: start.checked_add(count.checked_mul(SECTOR)?)? };
        let request = if range.is_empty() { flush } else { Request { us, action, range } };
        Some(Line::Request { device: device.to_owned(), request })
    }
}

/// Whether the line begins with the numbers of a device.
fn is_event(line: &str) -> bool {
    let device = line.split_whitespace().next().and_then(|first| first.split_once(','));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    device.is_some_and(|(major, minor)| is_number(major) && is_number(minor))
}

/// Seconds with nine digits behind the point.
fn microseconds(time: &str) -> Option<u64> {
    let (seconds, nanoseconds) = time.split_once('.')?;
    let seconds: u64 = seconds.parse().ok()?;
    let nanoseconds: u64 = nanoseconds.parse().ok()?;
    seconds.checked_mul(1_000_000)?.checked_add(nanoseconds / 1000)
}

/// The device that a user names, as traces name it: by its numbers, or by its path on this machine.
pub(super) fn device(name: &str) -> Result<String> {
    if !name.starts_with('/') {
        return Ok(name.replace(':', ","));
    }
    let number = std::fs::metadata(name).map(|data| data.rdev()).unwrap_or(0);
    if number == 0 {
        return Err(invalid(format!(
            "{name} is no device of this machine: name the device by its numbers, as the trace has them, e.g. --device 8,0"
        )));
    }
    let major = ((number >> 8) & 0xfff) | ((number >> 32) & !0xfff);
    let minor = (number & 0xff) | ((number >> 12) & !0xff);
    Ok(format!("{major},{minor}"))
}
