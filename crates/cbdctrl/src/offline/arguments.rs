//! The arguments of the commands for offline recovery.

use cbd_daemon::api::NumberOrName;
use cbd_daemon::size::parse_size;
use cbd_format::RecordKind;
use cbd_inspect::dump::{KINDS, What};
use cbd_types::ByteRange;
use clap::{ArgGroup, Args, ValueEnum};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Options of `check`.
#[derive(Args, Debug)]
pub struct CheckArguments {
    /// The region: a file or a devdax device that no daemon serves
    pub region: PathBuf,
    /// Verify the data of every record too, not only metadata and the data that the disks lack
    #[arg(long)]
    pub data: bool,
}

/// Options of `dump`.
#[derive(Args, Debug)]
pub struct DumpArguments {
    /// The region: a file or a devdax device that no daemon serves
    pub region: PathBuf,
    /// Structure to show
    pub what: DumpWhat,
    /// Only of this backend, by number or name (segments, lanes, pins, records)
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<NumberOrName>,
    /// Only of this lane (segments, lanes, records)
    #[arg(short, long, value_name = "LANE")]
    pub lane: Option<u32>,
    /// Only in this segment (segments, records)
    #[arg(short, long, value_name = "SEGMENT")]
    pub segment: Option<u32>,
    /// Only records with these sequence numbers, both included; either may be left out
    #[arg(long, value_name = "A..B", value_parser = sequences)]
    pub sequence: Option<RangeInclusive<u64>>,
    /// Only records, or pins, that touch this range of the device, e.g. 1G+4K
    #[arg(long, value_name = "OFFSET+LENGTH", value_parser = range)]
    pub range: Option<ByteRange>,
    /// Only records of this kind: write, write-zeroes, discard, fill, parked-write, parked-zeroes or
    /// quarantine
    #[arg(long, value_parser = kind)]
    pub kind: Option<RecordKind>,
    /// Only records that the backing device does not have
    #[arg(long)]
    pub dirty: bool,
    /// Only records of which something is damaged; verifies their data
    #[arg(long)]
    pub damaged: bool,
}

/// What `dump` shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum DumpWhat {
    /// Both superblocks
    Superblock,
    /// The tables of hosts, backends and block devices, both slots of each row
    Tables,
    /// The owner of each segment, and its header
    Segments,
    /// Drained, tails, marks and chains of segments
    Lanes,
    /// The pins of the caches, and both copies of their lists
    Pins,
    /// The records of the logs
    Records,
}

impl From<DumpWhat> for What {
    fn from(what: DumpWhat) -> Self {
        match what {
            DumpWhat::Superblock => Self::Superblock,
            DumpWhat::Tables => Self::Tables,
            DumpWhat::Segments => Self::Segments,
            DumpWhat::Lanes => Self::Lanes,
            DumpWhat::Pins => Self::Pins,
            DumpWhat::Records => Self::Records,
        }
    }
}

/// Options of `unseal`.
#[derive(Args, Debug)]
pub struct UnsealArguments {
    /// The disk; without a disk and -b, all sealed disks are listed
    pub disk: Option<PathBuf>,
    /// Number, name or UUID of its backend
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<String>,
    /// Give up what the disk lacks; BYTES must be exactly the number that the command prints without this option, or
    /// "unknown" where the region cannot be read
    #[arg(long, value_name = "BYTES")]
    pub discard_dirty: Option<String>,
    /// Folder of the rules
    #[arg(long, value_name = "DIR", default_value = "/etc/udev/rules.d")]
    pub rules_dir: PathBuf,
}

/// Options of `repair`.
#[derive(Args, Debug)]
pub struct RepairArguments {
    /// The region: a file or a devdax device that no daemon serves
    pub region: PathBuf,
    /// Repair without a question
    #[arg(short, long, conflicts_with = "dry_run")]
    pub yes: bool,
    /// Only report what would be repaired
    #[arg(short = 'n', long)]
    pub dry_run: bool,
}

/// Other caches that `rescue` can read besides regions of CBD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum RescueFrom {
    /// A cache device of Linux's dm-pcache
    DmPcache,
}

/// Options of `rescue`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("whose").args(["backend", "from"]))]
pub struct RescueArguments {
    /// The region: a file or a devdax device that no daemon serves; with --from the other cache's device, or a copy of
    /// it
    pub region: PathBuf,
    /// It is not a region of CBD, but the cache device of another cache
    #[arg(long, value_name = "CACHE")]
    pub from: Option<RescueFrom>,
    /// Only this backend, by number or name [default: all]
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<NumberOrName>,
    /// Present path of the backend's disk, if it has changed; with --from the backing device, or a /dev/cbdN on it
    #[arg(long, value_name = "DISK", requires = "whose")]
    pub to: Option<PathBuf>,
    /// The disk given with --to replaces the recorded one: it is a complete copy, taken after the last write to the
    /// recorded one
    #[arg(long, requires = "to", conflicts_with = "from")]
    pub other_disk: bool,
    /// A disk that the backend had before an earlier rescue no longer exists, or its content is not needed: the region
    /// then accepts it. Its path, or its identity if several disks had that path
    #[arg(long, value_name = "PATH", requires = "other_disk")]
    pub forget_disk: Option<PathBuf>,
    /// Write the dirty data although the machine crashed while the region was in use: some of its pages may be old, and
    /// old data may overwrite newer data. Compare the disk with a backup first
    #[arg(long, conflicts_with = "from")]
    pub after_crash: bool,
    /// Write the dirty data although the disk was written without its cache, which loses what was written there since:
    /// what the region has replaces it
    #[arg(long, conflicts_with = "from")]
    pub changed_disk: bool,
    /// State of the daemon, which has the records of the disks [default: that of the rule of the sealed disk, or
    /// /var/lib/cbd]
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    pub state_dir: Option<PathBuf>,
    /// Folder of the rules that seal disks [default: /etc/udev/rules.d]
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    pub rules_dir: Option<PathBuf>,
    /// With --from: continue after a damaged part of the log, although the writes that it recorded are not known
    #[arg(long, requires = "from")]
    pub past_damage: bool,
    /// Write the data; without this nothing is changed
    #[arg(short, long, conflicts_with = "dry_run")]
    pub yes: bool,
    /// Only report what would be written, as without --yes
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Seconds without progress of writeback after which to give up
    #[arg(long, value_name = "SECONDS", default_value_t = 60, conflicts_with = "from")]
    pub timeout: u64,
}

/// `A..B`, `A..`, `..B` or one number.
fn sequences(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str, missing: u64| {
        if text.is_empty() {
            Ok(missing)
        } else {
            text.parse().map_err(|_| format!("\"{text}\" is no number"))
        }
    };
    match text.split_once("..") {
        Some((first, last)) => {
            let range = number(first, 0)?..=number(last, u64::MAX)?;
            if range.is_empty() { Err("write A..B with A not above B".to_owned()) } else { Ok(range) }
        }
        None => text.parse().map(|one| one..=one).map_err(|_| "write A..B, or one number".to_owned()),
    }
}

/// `OFFSET+LENGTH`.
fn range(text: &str) -> Result<ByteRange, String> {
    let (offset, length) = text.split_once('+').ok_or("write OFFSET+LENGTH, e.g. 1G+4K")?;
    let size = |text| parse_size(text).map_err(|error| error.line());
    Ok(ByteRange::at(size(offset)?, size(length)?))
}

fn kind(text: &str) -> Result<RecordKind, String> {
    let names = || KINDS.map(|(_, name)| name).join(", ");
    let known = KINDS.into_iter().find(|(_, name)| *name == text);
    known.map(|(kind, _)| kind).ok_or_else(|| format!("there are {}", names()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_are_a_range_with_both_ends() {
        assert_eq!(sequences("3..7"), Ok(3..=7));
        assert_eq!(sequences("3.."), Ok(3..=u64::MAX));
        assert_eq!(sequences("..7"), Ok(0..=7));
        assert_eq!(sequences("5"), Ok(5..=5));
        assert!(sequences("a..b").is_err() && sequences("-1").is_err() && sequences("7..3").is_err());
    }

    #[test]
    fn a_range_has_an_offset_and_a_length_with_units() {
        assert_eq!(range("1M+4K"), Ok(ByteRange::at(1 << 20, 4096)));
        assert!(range("1M").is_err() && range("x+1").is_err());
    }

    #[test]
    fn a_kind_is_known_by_its_name() {
        assert_eq!(kind("write-zeroes"), Ok(RecordKind::WriteZeroes));
        assert!(kind("read").is_err());
    }
}
