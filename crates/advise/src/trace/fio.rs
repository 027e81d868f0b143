//! What fio writes: iologs, and logs of single requests.

use super::{Action, Line, Request};
use cbd_types::ByteRange;

/// An iolog (`write_iolog`).
pub(super) struct Iolog {
    version: u32,
    /// Of version 2: the sum of the waits.
    us: u64,
    waits: bool,
}

impl Iolog {
    /// Whether a file with this first line is one.
    pub(super) fn recognize(first: &str) -> Option<Self> {
        let version = first.strip_prefix("fio version ")?.strip_suffix(" iolog")?.parse().ok()?;
        (2..=3).contains(&version).then_some(Self { version, us: 0, waits: false })
    }

    pub(super) const fn has_times(&self) -> bool {
        self.version == 3
    }

    pub(super) fn line(&mut self, line: &str) -> Option<Line> {
        if line.starts_with("fio version ") || line.is_empty() {
            return Some(Line::Other);
        }
        let mut fields = line.split_whitespace();
        if self.version == 3 {
            self.us = fields.next()?.parse().ok()?;
        }
        let device = fields.next()?;
        let action = match fields.next()? {
            "add" | "open" | "close" => return Some(Line::Other),
            "wait" => {
                self.us = self.us.saturating_add(fields.next()?.parse().ok()?);
                self.waits = true;
                return Some(Line::Other);
            }
            "read" => Action::Read,
            "write" => Action::Write,
            "trim" => Action::Discard,
            "sync" | "datasync" => Action::Flush,
            _ => return None,
        };
        let range = if action == Action::Flush {
            ByteRange { start: 0, end: 0 }
        } else {
            range(fields.next()?.parse().ok()?, fields.next()?.parse().ok()?)?
        };
        let request = Request { us: self.us, action, range };
        Some(Line::Request { device: device.to_owned(), request })
    }
}

/// A log of latencies or bandwidth (`write_lat_log` and others) with `log_offset=1`: time in ms, value, direction, length, offset.
pub(super) struct Log;

impl Log {
    /// Whether a file with this first line is one.
    pub(super) fn recognize(first: &str) -> bool {
        // Without offsets there is one field less.
        first.split(',').count() >= 6 && Self.line(first).is_some()
    }

    pub(super) fn line(&self, line: &str) -> Option<Line> {
        let mut fields = line.split(',').map(str::trim);
        let ms: u64 = fields.next()?.parse().ok()?;
        let _value: u64 = fields.next()?.parse().ok()?;
        let action = match fields.next()? {
            "0" => Action::Read,
            "1" => Action::Write,
            "2" => Action::Discard,
            _ => return None,
        };
        let length = fields.next()?.parse().ok()?;
        let range = range(fields.next()?.parse().ok()?, length)?;
        let request = Request { us: ms.checked_mul(1000)?, action, range };
        Some(Line::Request { device: String::new(), request })
    }
}

/// `length` bytes at `start`, as far as this is a range.
fn range(start: u64, length: u64) -> Option<ByteRange> {
    Some(ByteRange { start, end: start.checked_add(length)? })
}
