//! Verification by commands of the device: the disk reads the range in itself, and no data is moved.
//!
//! NVMe: Verify and Compare, where the controller reports them, within its limits. SCSI: VERIFY(16), whose field BYTCHK
//! is 0 to read, 1 to compare with bytes and 3 to compare with zeroes. Commands are passed through the kernel by blocking
//! calls (`NVME_IOCTL_IO_CMD`, `SG_IO`) on threads of the queue ([`threads`](crate::threads)), because a ring for
//! `IORING_OP_URING_CMD` needs entries of twice the size.
//!
//! Invariants: a command reaches only the blocks of the device or partition that is open; a command that fails with
//! anything but a media error or a difference is not used again for this target; every command has a timeout. What a
//! device says about a difference is confirmed by a read.
//!
//! Elsewhere: the reads that take the place of a command (`job`).

use crate::job::{Target, zeroes};
use crate::sysfs::BlockDirectory;
use cbd_sys::DeviceNumber;
use cbd_sys::passthrough::{self, ScsiAnswer};
use cbd_types::{BackingOp, Expected};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// Whether the device verifies and compares ranges in itself.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Offload {
    /// By the Verify command of NVMe alone: emulated SCSI disks answer VERIFY without a look at the medium.
    #[default]
    Auto,
    /// By every command that the device has.
    On,
    /// By reads.
    Never,
}

/// How long a command may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of a command without data: a slow disk reads them in a second.
const VERIFY_PIECE: u64 = 8 << 20;
/// Most bytes of a command with data.
const COMPARE_PIECE: u64 = 256 << 10;
/// Most bytes of a Verify command if the controller does not report its limit.
const UNKNOWN_LIMIT: u64 = 128 << 10;

/// The answer to a step that the device reads for: it cannot read all of it.
pub(crate) const UNREADABLE: i32 = -libc::EIO;
/// It has other content.
pub(crate) const DIFFERS: i32 = -libc::EILSEQ;
/// The command is not possible.
pub(crate) const NOT_POSSIBLE: i32 = -libc::EOPNOTSUPP;

/// The commands that a target uses, and why not others.
#[derive(Debug)]
pub(crate) struct Commands {
    protocol: Option<Protocol>,
    /// What the user permits.
    offload: Offload,
    /// Where the partition begins on the disk, in bytes.
    start: u64,
    /// Logical block in bytes.
    block: u64,
    verify: Command,
    compare: Command,
}

#[derive(Debug)]
enum Protocol {
    Nvme { device: Option<File>, namespace: u32 },
    Scsi,
}

/// One command.
#[derive(Debug)]
struct Command {
    /// The longest range in bytes; 0 if it is not used.
    limit: u64,
    /// Its name; if it is not used, why.
    text: String,
    /// Why it is not used any more.
    refused: OnceLock<String>,
}

impl Command {
    fn used(limit: u64, name: &str) -> Self {
        Self { limit, text: name.to_owned(), refused: OnceLock::new() }
    }

    fn unused(why: impl Into<String>) -> Self {
        Self { limit: 0, text: why.into(), refused: OnceLock::new() }
    }

    fn is_used(&self) -> bool {
        self.limit > 0 && self.refused.get().is_none()
    }

    fn describe(&self) -> String {
        match self.refused.get() {
            Some(why) => format!("reads ({} failed: {why})", self.text),
            None if self.limit > 0 => self.text.clone(),
            None => format!("reads ({})", self.text),
        }
    }
}

impl Commands {
    /// No commands, for this reason.
    pub fn none(why: &str) -> Self {
        let (verify, compare) = (Command::unused(why), Command::unused(why));
        Self { protocol: None, offload: Offload::default(), start: 0, block: 512, verify, compare }
    }

    /// Asks the block device `file` what it can do.
    pub fn of_block_device(file: &File, number: DeviceNumber, offload: Offload) -> Self {
        Self { offload, ..Self::asked(file, number, offload) }
    }

    fn asked(file: &File, number: DeviceNumber, offload: Offload) -> Self {
        if offload == Offload::Never {
            return Self::none("the setting offload is never");
        }
        let Some(directory) = BlockDirectory::of(number) else {
            return Self::none("the disk is not in /sys");
        };
        let start = match directory.own("start") {
            Some(sectors) if directory.is_partition() => sectors.parse::<u64>().ok().map(|count| count * 512),
            _ => (!directory.is_partition()).then_some(0),
        };
        let block = rustix::fs::ioctl_blksszget(file).map_or(0, u64::from);
        let Some(start) = start.filter(|start| block >= 512 && start.is_multiple_of(block)) else {
            return Self::none("the start of the partition is not known");
        };
        // The host adapter's limit for the data of a command.
        let data_limit = directory.queue("max_hw_sectors_kb").map_or(UNKNOWN_LIMIT, |kib| kib << 10);
        let found = if directory.name().starts_with("nvme") {
            nvme(file, &directory, block, data_limit, offload)
        } else if directory.disk("device/type").as_deref() == Some("0")
            && directory.disk("device/scsi_level").is_some()
        {
            scsi(block, data_limit, offload)
        } else {
            return Self::none("the device is neither an NVMe nor a SCSI disk");
        };
        match found {
            Ok((protocol, verify, compare)) => {
                Self { protocol: Some(protocol), offload, start, block, verify, compare }
            }
            Err(error) => Self::none(&format!("the controller cannot be asked for its commands: {error}")),
        }
    }

    /// What the user permits.
    pub const fn offload(&self) -> Offload {
        self.offload
    }

    /// What is used for verifications and comparisons, and why not better, in one line.
    pub fn describe(&self) -> String {
        let (verify, compare) = (self.verify.describe(), self.compare.describe());
        if verify == compare { verify } else { format!("{verify}; comparisons: {compare}") }
    }

    /// Whether there is any command.
    pub fn are_used(&self) -> bool {
        self.verify.is_used() || self.compare.is_used()
    }

    /// Whether there is a command for `op`.
    pub fn has_one_for(&self, op: &BackingOp) -> bool {
        self.command(op).is_some_and(Command::is_used)
    }

    /// The longest range for `op`, in bytes; not 0.
    pub fn limit(&self, op: &BackingOp) -> u64 {
        self.command(op).map_or(self.block, |command| command.limit.max(self.block))
    }

    fn command(&self, op: &BackingOp) -> Option<&Command> {
        match op {
            BackingOp::Verify { .. } => Some(&self.verify),
            BackingOp::Compare { .. } => Some(&self.compare),
            _ => None,
        }
    }

    /// Runs the command for `length` bytes at `at`, `skip` bytes after the start of `op`. Returns `length`,
    /// [`UNREADABLE`], [`DIFFERS`] or [`NOT_POSSIBLE`]. Blocks.
    pub fn run(&self, target: &Target, op: &BackingOp, at: u64, skip: u64, length: u64) -> i32 {
        let Some(command) = self.command(op).filter(|command| command.is_used()) else { return NOT_POSSIBLE };
        let first = (self.start + at) / self.block;
        let Ok(blocks) = u32::try_from(length / self.block) else { return NOT_POSSIBLE };
        let answer = match &self.protocol {
            Some(Protocol::Nvme { device, namespace }) => {
                let file = device.as_ref().unwrap_or(&target.file);
                passthrough::nvme_check(
                    file.as_fd(),
                    *namespace,
                    first,
                    blocks,
                    data(op, skip, length),
                    TIMEOUT,
                )
                .map(nvme_answer)
            }
            Some(Protocol::Scsi) => {
                let (check, data) = match op {
                    BackingOp::Compare { expected: Expected::Zeroes, .. } => (3, data(op, 0, self.block)),
                    BackingOp::Compare { .. } => (1, data(op, skip, length)),
                    _ => (0, None),
                };
                let data = data.unwrap_or_default();
                passthrough::scsi_verify(target.file.as_fd(), check, first, blocks, data, TIMEOUT)
                    .map(|answer| scsi_answer(&answer))
            }
            None => return NOT_POSSIBLE,
        };
        match answer {
            Ok(Answer::Good) => i32::try_from(length).unwrap_or(NOT_POSSIBLE),
            Ok(Answer::Unreadable) => UNREADABLE,
            Ok(Answer::Differs) if matches!(op, BackingOp::Compare { .. }) => DIFFERS,
            Ok(Answer::Differs) => NOT_POSSIBLE,
            Ok(Answer::Other(why)) => {
                command.refused.get_or_init(|| why);
                NOT_POSSIBLE
            }
            Err(error) => {
                command.refused.get_or_init(|| error.to_string());
                NOT_POSSIBLE
            }
        }
    }

    #[cfg(test)]
    pub fn for_tests(limit: u64) -> Self {
        let (verify, compare) =
            (Command::used(limit, "a verify command"), Command::used(limit, "a compare command"));
        Self { protocol: Some(Protocol::Scsi), offload: Offload::On, start: 0, block: 512, verify, compare }
    }
}

/// What a comparison expects of `length` bytes from `skip` on; `None` for a verification, and past the end.
fn data(op: &BackingOp, skip: u64, length: u64) -> Option<&[u8]> {
    match op {
        BackingOp::Compare { expected: Expected::Bytes(bytes), .. } => {
            bytes.get(skip as usize..)?.get(..length as usize)
        }
        BackingOp::Compare { expected: Expected::Zeroes, .. } => zeroes().get(..length as usize),
        _ => None,
    }
}

/// What a device says about a range.
#[derive(PartialEq, Eq, Debug)]
enum Answer {
    Good,
    Unreadable,
    Differs,
    Other(String),
}

fn nvme_answer(status: u16) -> Answer {
    // Type and code; the bits above say whether to retry.
    match status & 0x7FF {
        0 => Answer::Good,
        // Unrecovered read error, and the checks of end-to-end protection.
        0x281..=0x284 => Answer::Unreadable,
        0x285 => Answer::Differs,
        other => Answer::Other(format!("NVMe status {other:#x}")),
    }
}

fn scsi_answer(answer: &ScsiAnswer) -> Answer {
    const CHECK_CONDITION: u8 = 2;
    /// The driver has sense data; it says nothing else.
    const DRIVER_SENSE: u16 = 8;
    if answer.host != 0 || !matches!(answer.driver & 0xF, 0 | DRIVER_SENSE) {
        return Answer::Other(format!("host status {:#x}, driver status {:#x}", answer.host, answer.driver));
    }
    let (key, code) = match answer.sense[0] & 0x7F {
        0x70 | 0x71 => (answer.sense[2] & 0xF, answer.sense[12]),
        0x72 | 0x73 => (answer.sense[1] & 0xF, answer.sense[2]),
        _ => (0, 0),
    };
    match (answer.status, key) {
        // Recovered errors are none.
        (0, _) | (CHECK_CONDITION, 1) => Answer::Good,
        (CHECK_CONDITION, 3) => Answer::Unreadable,
        (CHECK_CONDITION, 0xE) => Answer::Differs,
        (status, key) => {
            Answer::Other(format!("SCSI status {status:#x}, sense key {key:#x}, additional code {code:#x}"))
        }
    }
}

type Found = io::Result<(Protocol, Command, Command)>;

fn nvme(file: &File, directory: &BlockDirectory, block: u64, data_limit: u64, offload: Offload) -> Found {
    const NAMESPACE: u8 = 0;
    const CONTROLLER: u8 = 1;
    const CONTROLLER_OF_COMMAND_SET: u8 = 6;
    let device = generic_device(directory);
    let asked = device.as_ref().unwrap_or(file).as_fd();
    let namespace = passthrough::nvme_namespace(asked)?;
    let identify = |namespace, structure| passthrough::nvme_identify(asked, namespace, structure, 0, TIMEOUT);
    let controller = identify(0, CONTROLLER)?;
    let commands = u16::from_le_bytes([controller[520], controller[521]]);
    let verify_limit = match identify(0, CONTROLLER_OF_COMMAND_SET) {
        Ok(of_set) => pages(of_set[0]).unwrap_or(VERIFY_PIECE),
        Err(_) => pages(controller[77]).unwrap_or(UNKNOWN_LIMIT),
    };
    let most = |limit: u64| limit.min(65_536 * block) / block * block;
    let verify = if commands & (1 << 7) != 0 {
        Command::used(most(verify_limit.min(VERIFY_PIECE)), "NVMe Verify")
    } else {
        Command::unused("the controller has no Verify command")
    };
    let compare = if commands & 1 == 0 {
        Command::unused("the controller has no Compare command")
    } else if offload != Offload::On {
        Command::unused("NVMe Compare is used only if the setting offload is on")
    } else if has_metadata(&*identify(namespace, NAMESPACE)?) {
        Command::unused("the namespace has metadata, which NVMe Compare would need")
    } else {
        let limit = pages(controller[77]).unwrap_or(COMPARE_PIECE).min(data_limit).min(COMPARE_PIECE);
        Command::used(most(limit), "NVMe Compare")
    };
    Ok((Protocol::Nvme { device, namespace }, verify, compare))
}

/// A limit as a power of two in units of the smallest page, which is at least 4 KiB; `None` for none.
fn pages(power: u8) -> Option<u64> {
    (power > 0).then(|| 4096_u64.checked_shl(u32::from(power)).filter(|limit| *limit > 0).unwrap_or(u64::MAX))
}

/// Whether blocks of the namespace have metadata, from its Identify data.
fn has_metadata(namespace: &[u8]) -> bool {
    let format = usize::from(namespace[26] & 0xF) | usize::from(namespace[26] >> 5 & 3) << 4;
    let at = 128 + 4 * format;
    namespace[at] != 0 || namespace[at + 1] != 0
}

/// The character device of an NVMe namespace, if there is one and its node is the right one.
fn generic_device(directory: &BlockDirectory) -> Option<File> {
    let name = directory.name().replacen("nvme", "ng", 1);
    let number = crate::sysfs::attribute(Path::new(&format!("/sys/class/nvme-generic/{name}/dev")))?;
    let file = File::open(format!("/dev/{name}")).ok()?;
    let status = crate::sys::status(file.as_fd()).ok()?;
    (status.special.to_string() == number && status.type_name() == "a character device").then_some(file)
}

fn scsi(block: u64, data_limit: u64, offload: Offload) -> Found {
    let (verify, compare) = if offload == Offload::On {
        let limit = COMPARE_PIECE.min(data_limit) / block * block;
        (Command::used(VERIFY_PIECE, "SCSI VERIFY(16)"), Command::used(limit, "SCSI VERIFY(16) with data"))
    } else {
        let why = "SCSI VERIFY is used only if the setting offload is on";
        (Command::unused(why), Command::unused(why))
    };
    Ok((Protocol::Scsi, verify, compare))
}

#[cfg(test)]
mod tests;
