//! Tables of device mapper: the devices and bytes that each part of a device maps to.
//!
//! Invariants: a table is read only if the types of all its targets are in [`KNOWN`], since tables of other types can
//! contain keys; a line that does not parse has an unknown type.

use cbd_sys::DeviceNumber;
use cbd_sys::ioctl::mapper_table;
use cbd_types::ByteRange;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Bytes of a sector in a table.
const SECTOR: u64 = 512;

/// Types whose tables are parsed; they contain no secrets.
const KNOWN: [&str; 7] = ["linear", "striped", "thin", "snapshot", "snapshot-origin", "zero", "error"];

/// A part of a device, and what it maps to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Target {
    /// Its range in the device.
    pub bytes: ByteRange,
    pub kind: TargetKind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TargetKind {
    /// The bytes of a device from `start` on.
    Linear { device: DeviceNumber, start: u64 },
    /// Parts of `length` bytes on several devices, each with its own start.
    Striped { length: u64, parts: Vec<(DeviceNumber, u64)> },
    /// The thin device with this number in a pool, whose driver separates the devices. Bytes that were never written
    /// are read from the same offset of its external origin, if it has one.
    Thin { pool: DeviceNumber, id: u64, origin: Option<DeviceNumber> },
    /// A snapshot or its origin: the kernel separates them on the devices that they share.
    Snapshot,
    /// No device.
    Nothing,
    /// An unknown type.
    Unknown(String),
}

/// A line of a table as the kernel returns it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Line {
    /// In sectors.
    pub start: u64,
    pub length: u64,
    pub kind: String,
    pub parameters: String,
}

/// The table of a device.
///
/// # Errors
/// Errors of the system: a missing permission, or no device mapper.
pub(crate) fn table(device: DeviceNumber) -> io::Result<Vec<Target>> {
    let control = File::options().read(true).write(true).open("/dev/mapper/control")?;
    let ask = |with_parameters| {
        let (text, count) = mapper_table(control.as_fd(), device, with_parameters)?;
        lines(&text, count).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    };
    let kinds = ask(false)?;
    if kinds.iter().all(|line| KNOWN.contains(&line.kind.as_str())) {
        return Ok(ask(true)?.iter().map(target).collect());
    }
    Ok(kinds.iter().map(|line| target(&Line { parameters: String::new(), ..line.clone() })).collect())
}

/// Parses a line.
pub(crate) fn target(line: &Line) -> Target {
    let start = line.start.saturating_mul(SECTOR);
    let bytes = ByteRange { start, end: start.saturating_add(line.length.saturating_mul(SECTOR)) };
    let kind = parse_target(line).unwrap_or_else(|| TargetKind::Unknown(line.kind.clone()));
    Target { bytes, kind }
}

fn parse_target(line: &Line) -> Option<TargetKind> {
    let mut words = line.parameters.split_whitespace();
    let mut device = || DeviceNumber::parse(words.next()?);
    Some(match line.kind.as_str() {
        "linear" => {
            let device = device()?;
            TargetKind::Linear { device, start: sectors(words.next()?)? }
        }
        "striped" => {
            let count: u64 = words.next()?.parse().ok().filter(|count| *count > 0)?;
            let _chunk: u64 = words.next()?.parse().ok()?;
            let mut parts = Vec::new();
            for _ in 0..count {
                parts.push((DeviceNumber::parse(words.next()?)?, sectors(words.next()?)?));
            }
            // A length that is not a multiple of `count` is rounded up to a whole sector on each device.
            let length = line.length.div_ceil(count).saturating_mul(SECTOR);
            TargetKind::Striped { length, parts }
        }
        "thin" => {
            let pool = device()?;
            let id = words.next()?.parse().ok()?;
            let origin = match words.next() {
                Some(word) => Some(DeviceNumber::parse(word)?),
                None => None,
            };
            TargetKind::Thin { pool, id, origin }
        }
        "snapshot" | "snapshot-origin" => TargetKind::Snapshot,
        "zero" | "error" => TargetKind::Nothing,
        _ => return None,
    })
}

fn sectors(word: &str) -> Option<u64> {
    word.parse::<u64>().ok()?.checked_mul(SECTOR)
}

/// Parses the kernel's answer: `count` structures, each with the offset of the next and followed by its parameters.
pub(crate) fn lines(answer: &[u8], count: u32) -> Option<Vec<Line>> {
    const HEADER: usize = 40;
    let (mut at, mut found) = (0_usize, Vec::new());
    for _ in 0..count {
        let header = answer.get(at..at.checked_add(HEADER)?)?;
        let number = |from: usize| Some(u64::from_ne_bytes(header.get(from..from + 8)?.try_into().ok()?));
        let next = u32::from_ne_bytes(header[20..24].try_into().ok()?) as usize;
        let text = |bytes: &[u8]| {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        let parameters = text(answer.get(at + HEADER..)?);
        found.push(Line { start: number(0)?, length: number(8)?, kind: text(&header[24..40]), parameters });
        at = next;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn number(major: u32, minor: u32) -> DeviceNumber {
        DeviceNumber { major, minor }
    }

    fn read(kind: &str, parameters: &str) -> TargetKind {
        let line = Line { start: 8, length: 16, kind: kind.to_owned(), parameters: parameters.to_owned() };
        let target = target(&line);
        assert_eq!(target.bytes, ByteRange { start: 4096, end: 12288 });
        target.kind
    }

    #[test]
    fn a_table_is_read_with_the_devices_and_their_offsets_in_bytes() {
        assert_eq!(read("linear", "7:0 2048"), TargetKind::Linear { device: number(7, 0), start: 1 << 20 });
        let parts = vec![(number(7, 0), 0), (number(7, 1), 4096)];
        assert_eq!(read("striped", "2 8 7:0 0 7:1 8"), TargetKind::Striped { length: 4096, parts });
        let thin = |origin| TargetKind::Thin { pool: number(253, 4), id: 17, origin };
        assert_eq!(read("thin", "253:4 17"), thin(None));
        assert_eq!(read("thin", "253:4 17 7:3"), thin(Some(number(7, 3))));
        assert_eq!(read("snapshot", "253:4 253:5 P 8"), TargetKind::Snapshot);
        assert_eq!(read("zero", ""), TargetKind::Nothing);
    }

    #[test]
    fn a_line_that_does_not_parse_is_unknown() {
        for (kind, parameters) in [
            ("crypt", "aes 00 0 7:0 0"),
            ("linear", ""),
            ("linear", "7:0"),
            ("linear", "7:0 99999999999999999999"),
            ("linear", "/dev/loop0 0"),
            ("striped", "0 8"),
            ("striped", "4000000000 8 7:0 0"),
            ("thin", "253:4"),
            ("thin", "253:4 17 /dev/loop3"),
        ] {
            assert_eq!(read(kind, parameters), TargetKind::Unknown(kind.to_owned()), "{kind} {parameters}");
        }
    }

    #[test]
    fn the_answer_of_the_kernel_is_parsed_and_an_invalid_one_is_refused() {
        let mut answer = Vec::new();
        for (start, next, parameters) in [(0_u64, 56_u32, &b"7:0 2048\0"[..]), (16, 120, b"7:1 0\0")] {
            answer.extend(start.to_ne_bytes());
            answer.extend(16_u64.to_ne_bytes());
            answer.extend(0_u32.to_ne_bytes());
            answer.extend(next.to_ne_bytes());
            answer.extend(b"linear\0\0\0\0\0\0\0\0\0\0");
            answer.extend(parameters);
            answer.resize(next as usize, 0);
        }
        let parsed = lines(&answer, 2).expect("two lines");
        let found: Vec<_> =
            parsed.iter().map(|line| (line.start, line.length, line.parameters.as_str())).collect();
        assert_eq!(found, [(0, 16, "7:0 2048"), (16, 16, "7:1 0")]);
        assert!(parsed.iter().all(|line| line.kind == "linear"));
        assert_eq!(lines(&answer, 3), None);
        assert_eq!(lines(&answer[..50], 2), None);
        assert_eq!(lines(&[], 0), Some(Vec::new()));
    }
}
