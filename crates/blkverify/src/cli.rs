//! The options: the one source of parsing, help, completions and the man page.

use cbd_daemon::api::VerifyLevel;
use cbd_daemon::size::parse_size;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// Checks that every byte of a disk, a file or a block device of CBD can be read, or is what it should be
///
/// Of a disk every sector is read, by the disk itself where it has a command for that. Of a file its extents are read on
/// the disk beneath. Of a block device of CBD (/dev/cbdN) the daemon checks the copy in the cache by its checksum, and
/// the copy on the disk. Nothing is written, except with --repair.
#[derive(Parser, Clone, Debug)]
#[command(name = "blkverify", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub struct Cli {
    /// A disk, a partition, a file, or a block device of CBD
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// First byte, in whole sectors, e.g. 1G
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "0", hide_default_value = true)]
    pub offset: u64,
    /// Bytes from there, in whole sectors [default: to the end]
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    pub length: Option<u64>,
    /// Every copy that CBD has, and whether the copies agree: the same as --level agree
    #[arg(long, conflicts_with_all = ["level", "zero", "compare"])]
    pub all: bool,
    /// Copies of a block device of CBD: what a read returns now, also the disk's copy of it, or also whether they agree
    #[arg(long, value_enum, value_name = "LEVEL", conflicts_with_all = ["zero", "compare"])]
    pub level: Option<Level>,
    /// Check that all bytes are zero
    #[arg(long, conflicts_with = "compare")]
    pub zero: bool,
    /// Check that the content is that of an image of PATH: its byte N is compared with byte N of PATH
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Whether a disk reads for itself, without moving the data, where it has commands for that. With on its word is
    /// also taken for --zero and --compare
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    pub offload: Offload,
    /// Repair a lost copy on the disk from the one in the cache, through writeback
    #[arg(long, conflicts_with_all = ["zero", "compare"])]
    pub repair: bool,
    /// Print JSON, errors too
    #[arg(long)]
    pub json: bool,
    /// Show no progress bar
    #[arg(long)]
    pub no_progress: bool,
    /// Control socket of the daemon [default: the one under $XDG_RUNTIME_DIR if not root, else /run/cbd/control.sock]
    #[arg(long, value_name = "PATH", env = "CBD_SOCKET")]
    pub socket: Option<PathBuf>,
}

const EXIT_CODES: &str = "Exit codes: 0 all is right, 1 everything wrong was repaired, 2 something is wrong, 3 not everything could be looked at \
     (one line on standard error says why), 64 wrong usage";

/// Which copies are looked at.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// What a read returns now
    Newest,
    /// Also the copy on the disk of what the cache holds
    All,
    /// Also whether the copies have the same content
    Agree,
}

/// When the disk reads for itself.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Offload {
    /// By NVMe Verify; --zero and --compare read
    Auto,
    /// Also by NVMe Compare and SCSI VERIFY: the disk is trusted for what is zero or the same. Emulated SCSI disks may
    /// answer VERIFY without looking
    On,
    /// Never: the sectors are read
    Never,
}

impl From<Offload> for cbd_backing::Offload {
    fn from(offload: Offload) -> Self {
        match offload {
            Offload::Auto => Self::Auto,
            Offload::On => Self::On,
            Offload::Never => Self::Never,
        }
    }
}

impl Cli {
    /// The level of a block device of CBD.
    #[must_use]
    pub const fn level(&self) -> VerifyLevel {
        match self.level {
            _ if self.all => VerifyLevel::Agree,
            None | Some(Level::Newest) => VerifyLevel::Newest,
            Some(Level::All) => VerifyLevel::All,
            Some(Level::Agree) => VerifyLevel::Agree,
        }
    }

    /// Whether the user asked for more than what a read returns.
    #[must_use]
    pub const fn asks_for_copies(&self) -> bool {
        self.all || self.level.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from([&["blkverify"], arguments].concat())
    }

    #[test]
    fn sizes_and_levels_are_read() {
        let cli = parsed(&["/dev/sdb", "--offset", "1G", "--length", "4K", "--level", "all"]).unwrap();
        assert_eq!((cli.offset, cli.length, cli.level()), (1 << 30, Some(4096), VerifyLevel::All));
        assert_eq!(parsed(&["--all", "x"]).unwrap().level(), VerifyLevel::Agree);
        assert_eq!(parsed(&["x"]).unwrap().level(), VerifyLevel::Newest);
    }

    #[test]
    fn options_that_contradict_each_other_are_wrong_usage() {
        for arguments in [
            &["x", "--all", "--level", "newest"][..],
            &["x", "--zero", "--compare", "y"],
            &["x", "--zero", "--repair"],
            &["x", "--compare", "y", "--all"],
            &["x", "--offset", "-1"],
            &["x", "--length", "many"],
            &["x", "y"],
        ] {
            assert!(parsed(arguments).is_err(), "{arguments:?}");
        }
    }
}
