//! `pin` and `unpin`: files, ranges and metadata that stay in a cache.
//!
//! Files are looked up here, in the mount namespace and with the permissions of the user, and not in the daemon.
//!
//! Invariants: all that a command names is pinned, or nothing; a file is pinned only if all its bytes have a known place on the
//! block device of the backend.

mod extents;
mod place;

use crate::cli::{OfBackend, PinCommand, Pinned};
use crate::command::Output;
use crate::progress;
use crate::table::{Table, fit};
use cbd_daemon::api::{
    AddPins, BlkdevInfo, NewPin, PinKind, PinName, PinsInfo, RangeInfo, RemovePins, printable,
};
use cbd_daemon::client::Client;
use cbd_daemon::size::format_size;
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use place::Device;
use std::path::Path;

/// Runs `command`.
pub(crate) fn execute(command: PinCommand, client: &Client, output: &Output) -> Result<()> {
    let client = &client.clone().with_waiting_callback(progress::waiting);
    match command {
        PinCommand::Pin { of, list: true, .. } => {
            let info: PinsInfo = client.get(&path(&of, "pins"))?;
            output.result(&info, &fit(&page(&info)))
        }
        PinCommand::Pin { of, pinned, .. } => {
            let pins = new_pins(client, &of, &pinned)?;
            let info: PinsInfo = client.post(&path(&of, "pins"), &AddPins { pins })?;
            output.result(&info, "")
        }
        PinCommand::Unpin { of, pinned, all } => {
            let known: PinsInfo = client.get(&path(&of, "pins"))?;
            let request = RemovePins { pins: names(&pinned, &known)?, all };
            let info: PinsInfo = client.post(&path(&of, "unpin"), &request)?;
            output.result(&info, "")
        }
    }
}

fn path(of: &OfBackend, what: &str) -> String {
    format!("/v1/transports/{}/backends/{}/{what}", of.on.transport, of.backend)
}

/// The most ranges of a command. A list of pins has room for fewer; how many, depends on the cache.
const RANGES_MAX: usize = 1 << 16;

/// What the user named, with its ranges of the device.
fn new_pins(client: &Client, of: &OfBackend, pinned: &Pinned) -> Result<Vec<NewPin>> {
    let mut pins = Vec::new();
    let pin = |kind, name: String, ranges: &[ByteRange]| {
        let ranges = ranges.iter().map(|range| RangeInfo { start: range.start, end: range.end }).collect();
        NewPin { kind, name, ranges }
    };
    if !pinned.files.is_empty() || !pinned.metadata.is_empty() {
        let devices = devices_of(client, of)?;
        for file in &pinned.files {
            let ranges = extents::of_file(file, &devices, of)?;
            pins.push(pin(PinKind::File, canonical(file)?, &ranges));
        }
        for mount in &pinned.metadata {
            let ranges = extents::of_metadata(mount, &devices, of)?;
            pins.push(pin(PinKind::Metadata, canonical(mount)?, &ranges));
        }
    }
    pins.extend(pinned.range.iter().map(|range| pin(PinKind::Range, name_of(*range), &[*range])));
    let count: usize = pins.iter().map(|pin| pin.ranges.len()).sum();
    if count > RANGES_MAX {
        let most = pins.iter().max_by_key(|pin| pin.ranges.len());
        let name = most.map(|pin| format!(", {} of them of {}", pin.ranges.len(), printable(&pin.name)));
        let text = format!(
            "these are {count} ranges{}, and no cache has room for a list of more than {RANGES_MAX}: pin files with fewer fragments",
            name.unwrap_or_default()
        );
        return Err(Error::new(ErrorKind::NoSpace, text));
    }
    Ok(pins)
}

/// The kernel's devices of the block devices on the backend.
fn devices_of(client: &Client, of: &OfBackend) -> Result<Vec<Device>> {
    let pins: PinsInfo = client.get(&path(of, "pins"))?;
    let list: Vec<BlkdevInfo> = client.get(&format!("/v1/transports/{}/blkdevs", of.on.transport))?;
    let of_backend = list.iter().filter(|blkdev| blkdev.backend_id == pins.backend_id && blkdev.alive);
    let devices: Vec<Device> =
        of_backend.filter_map(|blkdev| Device::open(Path::new(&blkdev.dev_name))).collect();
    if devices.is_empty() {
        let text = format!(
            "backend {} has no block device of the kernel on this machine, so no file can be on it: pin a range (--range)",
            of.backend
        );
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    Ok(devices)
}

/// The names of the pins that the user named. A file or a mount point may be gone, or a link may be where it was: what is pinned by
/// the path itself comes first.
fn names(pinned: &Pinned, known: &PinsInfo) -> Result<Vec<PinName>> {
    let mut names = Vec::new();
    for (kind, paths) in [(PinKind::File, &pinned.files), (PinKind::Metadata, &pinned.metadata)] {
        for path in paths {
            let itself = crate::command::absolute(path);
            let is_pinned =
                |name: &String| known.pins.iter().any(|pin| pin.kind == kind && pin.name == *name);
            let name = match itself {
                Ok(name) if is_pinned(&name) => name,
                itself => canonical(path).or(itself)?,
            };
            names.push(PinName { kind, name });
        }
    }
    let ranges = pinned.range.iter();
    names.extend(ranges.map(|range| PinName { kind: PinKind::Range, name: name_of(*range) }));
    Ok(names)
}

fn name_of(range: ByteRange) -> String {
    format!("{}+{}", range.start, range.len())
}

/// The path in an error, which is one line.
fn shown(path: &Path) -> String {
    printable(&path.display().to_string())
}

/// The path without links.
fn canonical(path: &Path) -> Result<String> {
    let failed =
        |error| Error::new(ErrorKind::NotFound, format!("{} cannot be found", shown(path))).caused_by(error);
    let path = path.canonicalize().map_err(failed)?;
    let malformed =
        || Error::new(ErrorKind::InvalidArgument, format!("the path {} is not UTF-8", shown(&path)));
    path.to_str().map(str::to_owned).ok_or_else(malformed)
}

/// The pins as text.
fn page(info: &PinsInfo) -> String {
    let mut text = format!(
        "{} of at most {} are pinned\n",
        format_size(info.pinned_bytes),
        format_size(info.limit_bytes)
    );
    if info.lost {
        text.push_str("the list of pins is damaged: nothing is pinned; pin it again\n");
    }
    if !info.pins.is_empty() {
        let mut table = Table::new(&["KIND", "SIZE", "IN CACHE", "RANGES", "NAME"]);
        for pin in &info.pins {
            table.row(vec![
                pin.kind.name().to_owned(),
                format_size(pin.bytes),
                percent(pin.cached_bytes, pin.bytes),
                pin.ranges.to_string(),
                printable(&pin.name),
            ]);
        }
        text.push_str(&table.render(crate::table::terminal_width().unwrap_or(usize::MAX)));
    }
    text
}

fn percent(part: u64, whole: u64) -> String {
    // Rounded down, so that 100 % are all.
    format!("{} %", u128::from(part) * 100 / u128::from(whole.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_daemon::api::PinInfo;

    #[test]
    fn the_list_says_what_is_pinned_and_how_much_of_it_is_cached() {
        let mut info = PinsInfo { pinned_bytes: 12 << 20, limit_bytes: 1 << 30, ..PinsInfo::default() };
        assert_eq!(page(&info), "12 MiB of at most 1 GiB are pinned\n");
        let pin = |kind, name: &str, bytes, cached_bytes| PinInfo {
            kind,
            name: name.into(),
            bytes,
            ranges: 3,
            cached_bytes,
        };
        info.pins = vec![
            pin(PinKind::File, "/srv/db/index.ibd", 8 << 20, (8 << 20) - 1),
            pin(PinKind::Range, "0+4194304", 4 << 20, 4 << 20),
            pin(PinKind::File, "/srv/two\nlines\u{1b}[2J", 4096, 0),
        ];
        let text = page(&info);
        assert!(
            text.contains("file") && text.contains("99 %") && text.contains("/srv/db/index.ibd"),
            "{text}"
        );
        assert!(text.contains("100 %"), "{text}");
        assert!(text.contains("/srv/two\\nlines\\u{1b}[2J\n") && text.lines().count() == 5, "{text}");
        info.lost = true;
        assert!(page(&info).contains("damaged"));
    }
}
