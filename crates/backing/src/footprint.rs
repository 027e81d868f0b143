//! What a backing device shows of writes: whether it was written while no program of CBD had it.
//!
//! Invariants: nothing is written to the device. A footprint is taken while the device is held and none of the caller's
//! own operations are in flight, after a sync: then neither the caller's writes nor any read changes what it holds. What
//! a kernel or a file system cannot tell is absent, and what is absent on one side is not compared.
//!
//! Elsewhere: keeping footprints over a restart, and what a difference means (the daemon).

use crate::identity::Kind;
use crate::sysfs::{self, BlockDirectory};
use crate::{Backing, BackingFile, geometry, sys};
use cbd_types::{AlignedBuffer, BackingOp, Error, ErrorKind, OpToken, Result};
use std::os::fd::AsFd;

/// Bytes at the begin of a disk that are compared: superblocks of ext4, XFS, btrfs, LVM, md and their counters are there.
const HEAD: u64 = 1 << 20;
/// Bytes at the end of a disk, and at the begin of each partition on it, that are compared.
const EDGE: u64 = 128 << 10;
/// Most partitions that are looked at.
const PARTITIONS_MAX: usize = 16;
/// Most bytes of one read.
const CHUNK: u64 = 128 << 10;

/// Bytes of a disk, and a checksum of what they hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Checksum of the content.
    pub sum: u64,
}

/// The kernel's counter of writes to a block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Written {
    /// The boot of the machine in which it counts.
    pub boot: String,
    /// The kernel's number for the disk, which it uses once in a boot.
    pub disk: String,
    /// Sectors of 512 bytes that were written or discarded since the disk appeared.
    pub sectors: u64,
}

/// What a backing device shows of the writes that it has had.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Footprint {
    /// Of a file: its size in bytes.
    pub size: Option<u64>,
    /// Of a file: when its content was modified last, in nanoseconds since 1970 UTC.
    pub modified_ns: Option<i128>,
    /// Of a block device: its counter.
    pub written: Option<Written>,
    /// Of a block device: the places where file systems, LVM and md count their own changes.
    pub areas: Vec<Area>,
}

impl Footprint {
    /// What was written between `before` and this one, in words; empty if nothing can be seen.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        if let (Some(before), Some(now)) = (before.size, self.size)
            && before != now
        {
            changes.push(format!("its size was {before} bytes and is {now}"));
        }
        if let (Some(before), Some(now)) = (before.modified_ns, self.modified_ns)
            && before != now
        {
            changes.push(format!("its content was modified at {} and at {}", seconds(before), seconds(now)));
        }
        if let (Some(before), Some(now)) = (&before.written, &self.written)
            && (&before.boot, &before.disk) == (&now.boot, &now.disk)
            && before.sectors != now.sectors
        {
            let sectors = now.sectors.wrapping_sub(before.sectors);
            changes.push(format!("the kernel has counted {sectors} sectors that were written to it"));
        }
        for area in &before.areas {
            let is_it = |now: &&Area| (now.offset, now.length) == (area.offset, area.length);
            if self.areas.iter().find(is_it).is_some_and(|now| now.sum != area.sum) {
                let end = area.offset.saturating_add(area.length);
                changes.push(format!("its bytes {} to {end} have other content", area.offset));
            }
        }
        changes
    }
}

fn seconds(at_ns: i128) -> String {
    format!("{}.{:09} s", at_ns.div_euclid(1_000_000_000), at_ns.rem_euclid(1_000_000_000))
}

impl BackingFile {
    /// Syncs the file or device and takes its footprint. No operation of the caller may be in flight. For a comparison
    /// with an earlier footprint, `as_before` has its areas. It reads about a megabyte, and may block as long as a read
    /// of the device does.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if it cannot be synced, and the errors of reads.
    pub fn footprint(&self, as_before: Option<&[Area]>) -> Result<Footprint> {
        let (file, path) = (self.target.file.as_fd(), &self.target.path);
        let failed = |what: &str, error: std::io::Error| {
            Error::new(ErrorKind::System, format!("{} cannot be {what}", path.display())).caused_by(error)
        };
        rustix::fs::fsync(file).map_err(|error| failed("synced", error.into()))?;
        let status = sys::status(file).map_err(|error| failed("examined", error))?;
        if self.target.kind == Kind::File {
            let times = rustix::fs::fstat(file).map_err(|error| failed("examined", error.into()))?;
            let modified = i128::from(times.st_mtime) * 1_000_000_000 + i128::from(times.st_mtime_nsec);
            // These file systems are of this machine and store the time with each write. On another one the time is not
            // certain, and the open has changed it.
            let keeps = geometry::is_known_to_punch(&self.target.file, &status);
            return Ok(Footprint {
                size: Some(status.size),
                modified_ns: keeps.then_some(modified),
                ..Footprint::default()
            });
        }
        let directory = BlockDirectory::of(status.special);
        let areas = match as_before {
            Some(before) => before.to_vec(),
            None => areas_of(self.geometry().size, directory.as_ref()),
        };
        Ok(Footprint {
            written: directory.as_ref().and_then(written),
            areas: self.checksums_of(&areas)?,
            ..Footprint::default()
        })
    }

    /// The areas with the checksums of their present content; without those that are behind the end.
    fn checksums_of(&self, areas: &[Area]) -> Result<Vec<Area>> {
        let size = self.geometry().size;
        let mut queue = self.open_queue(1)?;
        let mut found = Vec::new();
        for area in areas {
            let Some(end) = area.offset.checked_add(area.length).filter(|&end| end <= size) else { continue };
            let (mut sum, mut offset) = (Fnv::new(), area.offset);
            while offset < end {
                let length = CHUNK.min(end - offset);
                let buffer = AlignedBuffer::zeroed(usize::try_from(length).unwrap_or(0));
                queue.submit(OpToken(offset), BackingOp::Read { offset, buffer });
                let mut done = Vec::new();
                while queue.in_flight() > 0 && done.is_empty() {
                    queue.wait(&mut done);
                }
                let one = done.pop().ok_or_else(|| {
                    Error::new(ErrorKind::System, "a read of the backing device has no result")
                })?;
                one.result?;
                if let BackingOp::Read { buffer, .. } = &one.op {
                    sum.add(buffer);
                }
                offset += length;
            }
            found.push(Area { sum: sum.0, ..*area });
        }
        Ok(found)
    }
}

/// The places of a disk of `size` bytes that are compared.
fn areas_of(size: u64, directory: Option<&BlockDirectory>) -> Vec<Area> {
    let area =
        |offset: u64, length: u64| Area { offset, length: length.min(size.saturating_sub(offset)), sum: 0 };
    let mut areas = vec![area(0, HEAD)];
    let partitions = directory.map(BlockDirectory::partition_starts).unwrap_or_default();
    areas.extend(
        partitions.into_iter().take(PARTITIONS_MAX).filter(|&at| at >= HEAD).map(|at| area(at, EDGE)),
    );
    areas.push(area(size.saturating_sub(EDGE), EDGE));
    areas.retain(|area| area.length > 0);
    areas
}

/// The counter of a device; `None` where the kernel does not count.
fn written(directory: &BlockDirectory) -> Option<Written> {
    let counts = directory.queue("iostats").is_none_or(|counts| counts == 1);
    let (boot, disk) = (sysfs::boot()?, directory.disk("diskseq")?);
    let sectors = sectors_in(&directory.own("stat")?)?;
    counts.then_some(Written { boot, disk, sectors })
}

/// The sectors that were written or discarded, from the text of a device's `stat`.
fn sectors_in(stat: &str) -> Option<u64> {
    let fields: Vec<u64> = stat.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some(fields.get(6)?.wrapping_add(fields.get(13).copied().unwrap_or(0)))
}

/// The checksum FNV-1a.
struct Fnv(u64);

impl Fnv {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, PermissionsExt};

    #[test]
    fn a_file_has_another_footprint_after_a_write_and_none_after_a_read_or_a_change_of_its_mode() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let take = || BackingFile::open(file.path(), Options::default()).unwrap().footprint(None).unwrap();
        let before = take();
        fs::read(file.path()).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(take().changes_since(&before), Vec::<String>::new());
        let at = fs::metadata(file.path()).unwrap().modified().unwrap();
        let other = File::options().write(true).open(file.path()).unwrap();
        other.write_all_at(b"x", 9).unwrap();
        // The clock of a file system has ticks of milliseconds.
        other.set_modified(at + std::time::Duration::from_millis(20)).unwrap();
        let changes = take().changes_since(&before);
        assert!(before.modified_ns.is_none() || changes.len() == 1, "{changes:?}");
        other.set_len(5 << 20).unwrap();
        let changes = take().changes_since(&before);
        assert!(changes.iter().any(|change| change.contains("5242880")), "{changes:?}");
    }

    #[test]
    fn counters_of_another_boot_or_disk_are_not_compared() {
        let of = |boot: &str, disk: &str, sectors| Footprint {
            written: Some(Written { boot: boot.into(), disk: disk.into(), sectors }),
            ..Footprint::default()
        };
        let before = of("a", "1", 100);
        assert_eq!(of("b", "1", 7).changes_since(&before), Vec::<String>::new());
        assert_eq!(of("a", "2", 7).changes_since(&before), Vec::<String>::new());
        assert_eq!(of("a", "1", 100).changes_since(&before), Vec::<String>::new());
        let changes = of("a", "1", 108).changes_since(&before);
        assert!(changes[0].contains("8 sectors"), "{changes:?}");
        assert_eq!(Footprint::default().changes_since(&before), Vec::<String>::new());
    }

    #[test]
    fn written_and_discarded_sectors_are_counted_and_reads_are_not() {
        assert_eq!(sectors_in("1 2 3 4 5 6 700 8 9 10 11 12 13 14 15 16 17"), Some(714));
        assert_eq!(sectors_in("9 9 9 9 5 6 700 8 9 10 11"), Some(700), "an old kernel");
        assert_eq!(sectors_in("1 2 3"), None);
    }

    #[test]
    fn areas_lie_within_a_small_disk() {
        for size in [512, 4096, EDGE + 512, HEAD + 512, 1 << 30] {
            let areas = areas_of(size, None);
            assert!(areas.iter().all(|area| area.offset + area.length <= size), "{size}: {areas:?}");
            assert_eq!(areas.first().map(|area| area.offset), Some(0));
            assert_eq!(areas.last().map(|area| area.offset + area.length), Some(size));
        }
    }
}
