//! The identity of a disk, independent of its path.
//!
//! An identity is a set of marks: properties of a disk or file that survive a restart of the machine (serial numbers,
//! world wide names, a file system's UUID with an inode and its birth time), and, for disks without such properties,
//! the port that they are plugged into. A path is not a mark, nor is a number that the kernel assigns at each start.
//!
//! Invariants: two identities are the same disk only if a mark is equal and none contradicts; a token is at most
//! [`TOKEN_MAX`] bytes of printable ASCII, and any text is either parsed or refused.
//!
//! Elsewhere: storing the token (the backend's table entry), and messages for the user.

use crate::hold::Held;
use crate::sys::{self, Status};
use crate::sysfs::{self, BlockDirectory};
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// Longest token in bytes: the size of its field in a backend's table entry.
pub const TOKEN_MAX: usize = 256;
/// Part of the warning that a device is larger than its recorded size.
pub const HAS_GROWN: &str = "has grown";
/// Longest value of a mark; a longer one is truncated, and ends in a checksum of the whole value.
const VALUE_MAX: usize = 56;

/// Marks from the strongest to the weakest. If a token exceeds its maximum, the last ones are omitted.
///
/// `inode`, `born`, `fs`, `fsid`, `subvol`: of a file, or of the file beneath a loop device; `offset`: where a loop
/// device begins in its file. `wwid`, `uuid`, `serial`: of a disk, or of a device of device mapper or md. `part`,
/// `slice`: a partition's UUID, and its number and first sector. `place`: the port. `boot`, `seq`: the boot of the
/// machine, and the kernel's number for the disk, which it uses once in a boot.
const KEYS: [&str; 14] = [
    "inode", "born", "fs", "fsid", "subvol", "offset", "slice", "part", "wwid", "uuid", "serial", "boot",
    "seq", "place",
];
/// Marks that must be equal if both identities have them.
const MUST_AGREE: [&str; 9] = ["inode", "born", "fs", "fsid", "subvol", "wwid", "uuid", "serial", "part"];
/// Marks that both must have, or neither.
const MUST_MATCH: [&str; 2] = ["offset", "slice"];
/// Marks of which at least one must be in both identities; otherwise they cannot be compared.
const DISTINCTIVE: [&str; 5] = ["wwid", "uuid", "serial", "part", "inode"];

/// File systems whose `f_fsid` is derived from data on the disk, so that it survives a restart: ext, btrfs, f2fs.
const PERSISTENT_FSID: [u64; 3] = [0xEF53, 0x9123_683E, 0xF2F5_2010];

/// The kind of a backing device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A block device.
    Block,
}

impl Kind {
    /// Its name in tokens and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Block => "block",
        }
    }
}

/// The identity of a backing device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    kind: Kind,
    size: u64,
    marks: BTreeMap<&'static str, String>,
}

impl Identity {
    /// A file or a block device.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Its exact size in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The same disk with another size in bytes.
    #[must_use]
    pub fn with_size(self, size: u64) -> Self {
        Self { size, ..self }
    }

    /// Whether it has no mark of its own, so that after a restart only the port distinguishes the disk from another
    /// one.
    #[must_use]
    pub fn is_weak(&self) -> bool {
        match self.kind {
            Kind::File => !["born", "fs", "fsid"].iter().any(|key| self.marks.contains_key(key)),
            Kind::Block => !DISTINCTIVE.iter().any(|key| self.marks.contains_key(key)),
        }
    }

    /// The identity as stable text without spaces, for [`parse`](Self::parse).
    #[must_use]
    pub fn to_token(&self) -> String {
        let mut token = format!("{};size={}", self.kind.name(), self.size);
        for key in KEYS {
            if let Some(value) = self.marks.get(key) {
                if token.len() + key.len() + value.len() + 2 > TOKEN_MAX {
                    break;
                }
                // Writing to a string can't fail.
                let _ = write!(token, ";{key}={value}");
            }
        }
        token
    }

    /// Parses a token. Marks of a later version are ignored.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if the text is not a token.
    pub fn parse(token: &str) -> Result<Self> {
        let refused =
            || Error::new(ErrorKind::Damaged, format!("not the identity of a backing device: {token:?}"));
        if token.len() > TOKEN_MAX {
            return Err(refused());
        }
        let mut fields = token.split(';');
        let kind = match fields.next() {
            Some("file") => Kind::File,
            Some("block") => Kind::Block,
            _ => return Err(refused()),
        };
        let mut size = None;
        let mut marks = BTreeMap::new();
        for field in fields {
            let (key, value) = field.split_once('=').ok_or_else(refused)?;
            if key == "size" {
                size = Some(value.parse().map_err(|_| refused())?);
            } else if let Some(known) = KEYS.into_iter().find(|known| *known == key) {
                marks.insert(known, value.to_owned());
            }
        }
        Ok(Self { kind, size: size.ok_or_else(refused)?, marks })
    }

    /// Whether `found` is the disk that this one describes. Sizes are not compared.
    ///
    /// # Errors
    /// The reason as text.
    pub fn same_disk(&self, found: &Self) -> std::result::Result<(), String> {
        if self.kind != found.kind {
            return Err(format!("it was a {} and is a {}", self.kind.name(), found.kind.name()));
        }
        for key in MUST_MATCH {
            if self.marks.get(key) != found.marks.get(key) {
                return Err(format!("its {key} differs"));
            }
        }
        for key in MUST_AGREE {
            if let Some((before, now)) = self.both(found, key)
                && before != now
            {
                return Err(format!("its {key} was {before} and is {now}"));
            }
        }
        if DISTINCTIVE.iter().any(|key| self.both(found, key).is_some()) {
            return Ok(());
        }
        self.same_port(found)
    }

    /// The comparison for disks without marks: by the kernel's numbers within one boot, by the port across boots.
    fn same_port(&self, found: &Self) -> std::result::Result<(), String> {
        if let Some((before, now)) = self.both(found, "boot")
            && before == now
            && let Some((before, now)) = self.both(found, "seq")
        {
            return if before == now { Ok(()) } else { Err(String::from("the disk was removed since")) };
        }
        match self.both(found, "place") {
            Some((before, now)) if before == now => Ok(()),
            Some((before, now)) => Err(format!("it was at {before} and is at {now}")),
            None => Err(String::from("no property distinguishes it from another disk")),
        }
    }

    /// Whether this disk and `other` are known to overlap: a file and a loop device over it, a disk and its partition,
    /// two loop devices over overlapping parts of a file.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        const OF_A_FILE: [&str; 5] = ["inode", "born", "fs", "fsid", "subvol"];
        const OF_A_DISK: [&str; 3] = ["wwid", "uuid", "serial"];
        let agree = |keys: &[&'static str]| {
            let both: Vec<_> = keys.iter().filter_map(|key| self.both(other, key)).collect();
            !both.is_empty() && both.iter().all(|(one, another)| one == another)
        };
        // The inode number alone does not suffice: every file system has an inode 12.
        let same_file = self.both(other, "inode").is_some()
            && OF_A_FILE[1..].iter().any(|key| self.both(other, key).is_some())
            && agree(&OF_A_FILE);
        if !same_file && !agree(&OF_A_DISK) {
            return false;
        }
        let (one, another) = (self.range_in_whole(), other.range_in_whole());
        one.start < another.end && another.start < one.end
    }

    /// Its range in the file or the disk that its marks describe.
    fn range_in_whole(&self) -> ByteRange {
        let number = |text: &str| text.parse::<u64>().unwrap_or(0);
        let offset = self.marks.get("offset").map_or(0, |offset| number(offset));
        let sectors = self.marks.get("slice").and_then(|slice| slice.split_once('@'));
        let start = offset.saturating_add(sectors.map_or(0, |(_, start)| number(start).saturating_mul(512)));
        ByteRange { start, end: start.saturating_add(self.size) }
    }

    fn both<'a>(&'a self, found: &'a Self, key: &str) -> Option<(&'a String, &'a String)> {
        Some((self.marks.get(key)?, found.marks.get(key)?))
    }

    /// Refuses the disk found at `path` unless it has this identity and is large enough. Returns warnings: a disk that
    /// has grown (the recorded size stays in use), a disk that cannot be identified for certain.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`] for another disk, with both identities; [`ErrorKind::OutOfRange`] for one that shrank.
    pub fn check(&self, found: &Self, path: &Path) -> Result<Vec<String>> {
        if let Err(why) = self.same_disk(found) {
            let text = format!(
                "{} is not the disk that it was: {why}; recorded {self}; found {found}; \
                 give the path that the recorded disk has now",
                path.display()
            );
            return Err(Error::new(ErrorKind::Exchanged, text));
        }
        if found.size < self.size {
            return Err(shrunk(path, self.size, found.size));
        }
        let mut warnings = Vec::new();
        if found.size > self.size {
            warnings.push(format!(
                "{} {HAS_GROWN} from {} to {} bytes; the recorded size stays in use until backend-grow",
                path.display(),
                self.size,
                found.size
            ));
        }
        if found.is_weak() {
            warnings.push(format!(
                "{} has no serial number or UUID: after a restart only the port that it is plugged into identifies it",
                path.display()
            ));
        }
        Ok(warnings)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "[{}]", self.to_token().replace(';', " "))
    }
}

/// The error of a device that is smaller than it was.
pub(crate) fn shrunk(path: &Path, recorded: u64, found: u64) -> Error {
    let text = format!(
        "{} has shrunk: {recorded} bytes were recorded, it has {found}; restore its size",
        path.display()
    );
    Error::new(ErrorKind::OutOfRange, text)
}

/// The identity of an open file or block device.
pub(crate) fn of_open(file: &Held, status: &Status, kind: Kind, size: u64) -> Identity {
    let mut identity = Identity { kind, size, marks: BTreeMap::new() };
    match kind {
        Kind::File => file_marks(file.as_fd(), status, &mut identity),
        Kind::Block => block_marks(file, status, &mut identity),
    }
    identity
}

impl Identity {
    fn mark(&mut self, key: &'static str, value: Option<String>) {
        let value = value.map(|value| encode_value(&value)).filter(|value| !value.is_empty());
        if let Some(value) = value {
            self.marks.insert(key, value);
        }
    }
}

fn file_marks(file: BorrowedFd<'_>, status: &Status, identity: &mut Identity) {
    identity.mark("inode", Some(status.inode.to_string()));
    identity.mark("born", status.born.map(|(seconds, nanoseconds)| format!("{seconds}.{nanoseconds:09}")));
    identity.mark("subvol", status.subvolume.map(|number| number.to_string()));
    identity.mark("fs", cbd_sys::ioctl::file_system_uuid(file).map(|uuid| hexadecimal(&uuid)));
    // Recorded as well, since an older kernel reports no other mark.
    if let Ok((magic, number, _)) = sys::file_system(file)
        && PERSISTENT_FSID.contains(&magic)
    {
        identity.mark("fsid", Some(format!("{number:016x}")));
    }
}

fn block_marks(device: &Held, status: &Status, identity: &mut Identity) {
    let Some(directory) = BlockDirectory::of(status.special) else { return };
    if directory.is_partition() {
        let field = |name: &str| directory.own(name).unwrap_or_default();
        identity.mark("slice", Some(format!("{}@{}", field("partition"), field("start"))));
        identity.mark("part", directory.event("PARTUUID").or_else(|| partition_uuid(status)));
    }
    // NVMe has these attributes at the disk, SCSI at its device; virtio has a serial number at the disk.
    let first = |names: &[&str]| names.iter().find_map(|name| directory.disk(name));
    identity.mark("wwid", first(&["wwid", "device/wwid", "nguid", "eui"]));
    identity.mark("serial", first(&["serial", "device/serial", "device/cid"]));
    identity.mark("uuid", first(&["dm/uuid", "md/uuid"]));
    if directory.loop_backing().is_some() {
        loop_marks(device, identity);
        identity.mark("offset", directory.disk("loop/offset").filter(|offset| offset != "0"));
    }
    let made = directory.disk("dm/name").map(|name| format!("dm/{name}"));
    identity.mark("place", directory.port().or(made));
    identity.mark("boot", sysfs::boot());
    identity.mark("seq", directory.disk("diskseq"));
}

/// A loop device has the marks of its file, since its number changes. The file was opened for the claim.
fn loop_marks(device: &Held, identity: &mut Identity) {
    let Some(held_object) = device.beneath.iter().next().and_then(|claim| claim.held_object.as_ref()) else {
        return;
    };
    let file = &held_object.file;
    let Ok(status) = sys::status(file.as_fd()) else { return };
    if status.is_regular() {
        file_marks(file.as_fd(), &status, identity);
    }
}

/// A partition's UUID from udev's links, for kernels that do not report it.
fn partition_uuid(status: &Status) -> Option<String> {
    let entries = std::fs::read_dir("/dev/disk/by-partuuid").ok()?;
    let found = entries.flatten().find(|entry| {
        sys::status_of(&entry.path()).is_ok_and(|found| found.is_block() && found.special == status.special)
    })?;
    Some(found.file_name().to_string_lossy().into_owned())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Encodes a value for a token: printable, without separators, bounded.
fn encode_value(value: &str) -> String {
    let words: Vec<&str> = value.split_whitespace().collect();
    let text = words.join("_");
    let text: String = text.chars().map(|letter| if allowed(letter) { letter } else { '_' }).collect();
    if text.len() <= VALUE_MAX {
        return text;
    }
    // FNV-1a: the checksum must be the same in every version.
    let sum = value.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{}~{sum:016x}", &text[..VALUE_MAX - 17])
}

fn allowed(letter: char) -> bool {
    letter.is_ascii_graphic() && !matches!(letter, ';' | '=' | '"' | '\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(token: &str) -> Identity {
        Identity::parse(token).expect("a token")
    }

    #[test]
    fn a_parsed_token_is_the_identity_that_it_was_made_of() {
        let token = "block;size=4096;slice=2@2048;wwid=naa.5000c500a1b2c3d4;serial=Z1D0";
        assert_eq!(identity(token).to_token(), token);
    }

    #[test]
    fn marks_of_a_later_version_are_ignored() {
        assert_eq!(identity("file;size=1;inode=7;colour=blue").to_token(), "file;size=1;inode=7");
    }

    #[test]
    fn text_that_is_not_a_token_is_refused() {
        let long = format!("file;size=1;inode={}", "9".repeat(300));
        for token in ["", "file", "file;size=", "file;size=-1", "disk;size=1", "file;size=1;inode", &long] {
            assert_eq!(
                Identity::parse(token).map_err(|error| error.kind()),
                Err(ErrorKind::Damaged),
                "{token}"
            );
        }
    }

    #[test]
    fn a_token_is_never_longer_than_its_field() {
        let mut long = Identity { kind: Kind::Block, size: u64::MAX, marks: BTreeMap::new() };
        for key in KEYS {
            long.mark(key, Some("é; x=".repeat(80)));
        }
        let token = long.to_token();
        assert!(token.len() <= TOKEN_MAX && token.is_ascii(), "{token}");
        assert_eq!(identity(&token).to_token(), token);
    }

    #[test]
    fn long_values_that_differ_at_their_end_stay_different() {
        assert_ne!(
            encode_value(&format!("{}1", "x".repeat(80))),
            encode_value(&format!("{}2", "x".repeat(80)))
        );
    }

    #[test]
    fn a_disk_keeps_its_identity_in_another_slot() {
        let before = identity("block;size=9;wwid=naa.1;place=pci0/a;boot=x;seq=1");
        let after = identity("block;size=9;wwid=naa.1;place=pci0/b;boot=y;seq=7");
        assert_eq!(before.same_disk(&after), Ok(()));
    }

    #[test]
    fn another_serial_number_in_the_same_slot_is_another_disk() {
        let before = identity("block;size=9;serial=A;place=pci0/a");
        let after = identity("block;size=9;serial=B;place=pci0/a");
        let why = before.same_disk(&after).expect_err("another disk");
        assert!(why.contains('A') && why.contains('B'), "{why}");
    }

    #[test]
    fn a_disk_without_marks_is_known_by_its_number_within_one_start() {
        let before = identity("block;size=9;boot=x;seq=1");
        assert_eq!(before.same_disk(&identity("block;size=9;boot=x;seq=1")), Ok(()));
        assert!(before.same_disk(&identity("block;size=9;boot=x;seq=2")).is_err());
    }

    #[test]
    fn a_disk_without_marks_and_port_is_not_recognised_after_a_restart() {
        let before = identity("block;size=9;boot=x;seq=1");
        assert!(before.same_disk(&identity("block;size=9;boot=y;seq=1")).is_err());
        let placed = identity("block;size=9;boot=x;seq=1;place=pci0/a");
        assert_eq!(placed.same_disk(&identity("block;size=9;boot=y;seq=4;place=pci0/a")), Ok(()));
    }

    #[test]
    fn a_partition_is_not_its_disk() {
        let disk = identity("block;size=9;wwid=naa.1");
        assert!(disk.same_disk(&identity("block;size=9;slice=1@2048;wwid=naa.1")).is_err());
    }

    #[test]
    fn a_disk_overlaps_only_devices_with_the_same_bytes() {
        let file = identity("file;size=8192;inode=12;born=1.5");
        for token in [
            "block;size=8192;inode=12;born=1.5;boot=x;seq=1",
            "block;size=4096;inode=12;born=1.5;offset=4096",
            "block;size=1024;inode=12;born=1.5;slice=1@2",
        ] {
            assert!(file.overlaps(&identity(token)) && identity(token).overlaps(&file), "{token}");
        }
        for token in [
            "block;size=4096;inode=12;born=1.5;offset=8192",
            "block;size=8192;inode=12;born=2.5",
            "block;size=8192;inode=13;born=1.5",
            "block;size=8192;wwid=naa.1",
            "block;size=8192;inode=12",
        ] {
            assert!(!file.overlaps(&identity(token)) && !identity(token).overlaps(&file), "{token}");
        }
        let disk = identity("block;size=8192;wwid=naa.1");
        let first = identity("block;size=4096;slice=1@0;part=a;wwid=naa.1");
        let second = identity("block;size=4096;slice=2@8;part=b;wwid=naa.1");
        assert!(disk.overlaps(&first) && disk.overlaps(&second) && !first.overlaps(&second));
    }

    #[test]
    fn a_file_re_created_with_the_same_inode_is_another_file() {
        let before = identity("file;size=9;inode=12;born=1.5;fs=aa");
        assert!(before.same_disk(&identity("file;size=9;inode=12;born=2.5;fs=aa")).is_err());
    }

    #[test]
    fn a_shrunk_disk_and_an_exchanged_one_are_different_errors() {
        let before = identity("block;size=4096;wwid=naa.1");
        let path = Path::new("/dev/sdx");
        let shrunk = before.check(&identity("block;size=2048;wwid=naa.1"), path).expect_err("smaller");
        assert_eq!(shrunk.kind(), ErrorKind::OutOfRange);
        let other = before.check(&identity("block;size=4096;wwid=naa.2"), path).expect_err("another");
        assert_eq!(other.kind(), ErrorKind::Exchanged);
        assert!(other.line().contains("wwid=naa.1") && other.line().contains("wwid=naa.2"), "{other}");
    }

    #[test]
    fn a_grown_disk_is_a_warning() {
        let before = identity("block;size=4096;wwid=naa.1");
        let warnings = before.check(&identity("block;size=8192;wwid=naa.1"), Path::new("/dev/sdx"));
        assert_eq!(warnings.expect("the same disk").len(), 1);
    }
}
