//! Verification by commands of the device: the disk reads the range in itself, and no data is moved.
//!
//! NVMe: Verify and Compare, where the controller reports them, within its limits. SCSI: VERIFY(16), whose field BYTCHK
//! is 0 to read, 1 to compare with bytes and 3 to compare with zeroes. Commands are passed through the kernel by blocking
//! calls (`NVME_IOCTL_IO_CMD`, `SG_IO`) on threads of the queue ([`threads`](crate::threads)), because a ring for
//! `IORING_OP_URING_CMD` needs entries of twice the size.
//!
//! Invariants: a command reaches only the blocks of the device or partition that is open; a command that fails with
//! anything but a media error or a difference is not used again for this target; every command has a timeout. A device
//! is trusted for what it can read. It is trusted for what has the expected content only on request
//! ([`Offload::On`]), and what it says about a difference is confirmed by a read.
//!
//! Elsewhere: the reads that take the place of a command (`job`).

mod passthrough;

use crate::job::{Target, zeroes};
use crate::sysfs::BlockDirectory;
use cbd_sys::DeviceNumber;
use cbd_sys::passthrough::ScsiAnswer;
use cbd_types::{BackingOp, Expected};
use passthrough::{Kernel, Passthrough};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Whether the device verifies and compares ranges in itself.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Offload {
    /// By the Verify command of NVMe alone: emulated SCSI disks answer VERIFY without a look at the medium. What has
    /// the expected content is always read and compared by this process.
    #[default]
    Auto,
    /// By every command that the device has: its word is taken for what can be read and for what has the expected
    /// content.
    On,
    /// By reads.
    Never,
}

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
    passthrough: Arc<dyn Passthrough>,
    protocol: Option<Protocol>,
    /// What the user permits.
    offload: Offload,
    blocks: Blocks,
    verify: Command,
    compare: Command,
}

/// How bytes are addressed in commands.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    /// Where the partition begins on the disk, in bytes.
    start: u64,
    /// Logical block in bytes.
    block: u64,
    /// The host adapter's limit for the data of a command, in bytes.
    data_limit: u64,
}

impl Blocks {
    /// `limit` in whole blocks, and within the number of blocks of a command.
    fn most(&self, limit: u64) -> u64 {
        limit.min(65_536 * self.block) / self.block * self.block
    }
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
    /// A command for up to `limit` bytes.
    fn used(limit: u64, name: &str) -> Self {
        if limit == 0 {
            return Self::unused(format!("{name} is limited to less than a block"));
        }
        Self { limit, text: name.to_owned(), refused: OnceLock::new() }
    }

    fn unused(why: impl Into<String>) -> Self {
        Self { limit: 0, text: why.into(), refused: OnceLock::new() }
    }

    /// It is not used any more.
    fn refuse(&self, why: impl Into<String>) -> i32 {
        self.refused.get_or_init(|| why.into());
        NOT_POSSIBLE
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
        let blocks = Blocks { start: 0, block: 512, data_limit: 0 };
        let offload = Offload::default();
        Self { passthrough: Arc::new(Kernel), protocol: None, offload, blocks, verify, compare }
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
        let data_limit = directory.queue("max_hw_sectors_kb").map_or(UNKNOWN_LIMIT, |kib| kib << 10);
        let protocol = if directory.name().starts_with("nvme") {
            Protocol::Nvme { device: generic_device(&directory), namespace: 0 }
        } else if directory.disk("device/type").as_deref() == Some("0")
            && directory.disk("device/scsi_level").is_some()
        {
            Protocol::Scsi
        } else {
            return Self::none("the device is neither an NVMe nor a SCSI disk");
        };
        Self::over(Arc::new(Kernel), file, protocol, Blocks { start, block, data_limit }, offload)
    }

    /// Asks the device of `file` through `passthrough` what it can do.
    fn over(
        passthrough: Arc<dyn Passthrough>,
        file: &File,
        mut protocol: Protocol,
        blocks: Blocks,
        offload: Offload,
    ) -> Self {
        let found = match &mut protocol {
            Protocol::Nvme { device, namespace } => {
                let asked = device.as_ref().unwrap_or(file).as_fd();
                nvme(&*passthrough, asked, namespace, blocks, offload)
            }
            Protocol::Scsi => Ok(scsi(blocks, offload)),
        };
        match found {
            Ok((verify, compare)) => {
                Self { passthrough, protocol: Some(protocol), offload, blocks, verify, compare }
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
        let block = self.blocks.block;
        self.command(op).map_or(block, |command| command.limit.max(block))
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
        let Blocks { start, block, .. } = self.blocks;
        let first = (start + at) / block;
        let Ok(blocks) = u32::try_from(length / block) else { return NOT_POSSIBLE };
        let expected = data(op, skip, length);
        if expected.is_none() && matches!(op, BackingOp::Compare { .. }) {
            return NOT_POSSIBLE;
        }
        let answer = match &self.protocol {
            Some(Protocol::Nvme { device, namespace }) => {
                let file = device.as_ref().unwrap_or(&target.file).as_fd();
                self.passthrough.nvme_check(file, *namespace, first, blocks, expected).map(nvme_answer)
            }
            Some(Protocol::Scsi) => {
                let (check, data) = match op {
                    BackingOp::Compare { expected: Expected::Zeroes, .. } => (3, data(op, 0, block)),
                    BackingOp::Compare { .. } => (1, expected),
                    _ => (0, None),
                };
                let (file, data) = (target.file.as_fd(), data.unwrap_or_default());
                let answer = self.passthrough.scsi_verify(file, check, first, blocks, data);
                answer.map(|answer| scsi_answer(&answer))
            }
            None => return NOT_POSSIBLE,
        };
        match answer {
            Ok(Answer::Good) => i32::try_from(length).unwrap_or(NOT_POSSIBLE),
            Ok(Answer::Unreadable) => UNREADABLE,
            Ok(Answer::Differs) if matches!(op, BackingOp::Compare { .. }) => DIFFERS,
            Ok(Answer::Differs) => command.refuse("it reports a difference, and was not asked for one"),
            Ok(Answer::Other(why)) => command.refuse(why),
            Err(error) => command.refuse(error.to_string()),
        }
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

/// The commands Verify and Compare of an NVMe controller; notes the identifier of its namespace.
fn nvme(
    passthrough: &dyn Passthrough,
    device: BorrowedFd<'_>,
    namespace: &mut u32,
    blocks: Blocks,
    offload: Offload,
) -> io::Result<(Command, Command)> {
    const NAMESPACE: u8 = 0;
    const CONTROLLER: u8 = 1;
    const CONTROLLER_OF_COMMAND_SET: u8 = 6;
    *namespace = passthrough.nvme_namespace(device)?;
    let controller = passthrough.nvme_identify(device, 0, CONTROLLER)?;
    let commands = u16::from_le_bytes([controller[520], controller[521]]);
    let transfer_limit = pages(controller[77]);
    let has_verify = commands & (1 << 7) != 0;
    // A controller with a limit of its own for Verify reports the limit, and not the command: a host that does not know
    // the limit would exceed it.
    let of_set = passthrough.nvme_identify(device, 0, CONTROLLER_OF_COMMAND_SET);
    let verify_limit = match of_set.map(|of_set| pages(of_set[0])) {
        Ok(Some(limit)) => Some(limit),
        Ok(None) => has_verify.then_some(VERIFY_PIECE),
        Err(_) => has_verify.then(|| transfer_limit.unwrap_or(UNKNOWN_LIMIT)),
    };
    let verify = match verify_limit {
        Some(limit) => Command::used(blocks.most(limit.min(VERIFY_PIECE)), "NVMe Verify"),
        None => Command::unused("the controller has no Verify command"),
    };
    let compare = if commands & 1 == 0 {
        Command::unused("the controller has no Compare command")
    } else if offload != Offload::On {
        Command::unused("NVMe Compare is used only if the setting offload is on")
    } else if has_metadata(&*passthrough.nvme_identify(device, *namespace, NAMESPACE)?) {
        Command::unused("the namespace has metadata, which NVMe Compare would need")
    } else {
        let limit = transfer_limit.unwrap_or(COMPARE_PIECE).min(blocks.data_limit).min(COMPARE_PIECE);
        Command::used(blocks.most(limit), "NVMe Compare")
    };
    Ok((verify, compare))
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

fn scsi(blocks: Blocks, offload: Offload) -> (Command, Command) {
    if offload == Offload::On {
        let limit = COMPARE_PIECE.min(blocks.data_limit);
        (
            Command::used(blocks.most(VERIFY_PIECE), "SCSI VERIFY(16)"),
            Command::used(blocks.most(limit), "SCSI VERIFY(16) with data"),
        )
    } else {
        let why = "SCSI VERIFY is used only if the setting offload is on";
        (Command::unused(why), Command::unused(why))
    }
}

#[cfg(test)]
pub(crate) mod tests;
