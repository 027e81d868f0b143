//! The options of a guest, and how they are written.

use crate::problem::Problem;
use std::path::{Path, PathBuf};
use std::time::Duration;

const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// Memory is mapped in pages of this size, and a device has at least one.
const HUGE_PAGE: u64 = 2 * MIB;

/// How the guest's processors run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Two processors in parallel: for function.
    Normal,
    /// One processor, for which every instruction takes a nanosecond: for counting. Wall-clock time under
    /// emulation is not meaningful, since a wakeup of another processor costs a hundred times more than on a
    /// machine; these counts repeat.
    Counting,
}

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor, if a trial shows that it can; else QEMU.
    Auto,
    /// The processor.
    Kvm,
    /// QEMU, by translation.
    Tcg,
}

/// The memory of a device that survives the guest: a file of this machine, created if it does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedFile {
    /// Its path.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
}

/// A disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disk {
    /// Empty, of this many bytes, and removed with the guest.
    New(u64),
    /// A file of this machine with its content.
    File(PathBuf),
    /// A file that several guests have as a disk at the same time. It has the same serial number in all of them if it has the
    /// same place among their disks.
    Shared(PathBuf),
}

/// An NVMe disk of the guest, whose controller has the commands Verify and Compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvme {
    /// Its content.
    pub disk: Disk,
    /// Sectors of 512 bytes that it cannot read.
    pub unreadable: Vec<u64>,
}

/// A file that is shipped into the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shipped {
    /// Its path on this machine.
    pub from: PathBuf,
    /// Its path in the guest.
    pub to: PathBuf,
}

/// A system on a disk, and the initramfs with which it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct System {
    /// The disk with its root, which has the label `root`.
    pub disk: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
}

/// A guest and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How its processors run.
    pub mode: Mode,
    /// What executes its instructions.
    pub accelerator: Accelerator,
    /// Ordinary memory, in bytes.
    pub memory: u64,
    /// Memory that the kernel treats as persistent, in bytes; removed with the guest.
    pub pmem: Option<u64>,
    /// An NVDIMM.
    pub nvdimm: Option<SharedFile>,
    /// A CXL memory device.
    pub cxl: Option<SharedFile>,
    /// Disks, in the order in which the guest sees them: /dev/vda, /dev/vdb.
    pub disks: Vec<Disk>,
    /// Sockets of vhost-user-blk; the guest sees their disks behind the others. Their server has access to
    /// the guest's memory.
    pub vhost_user: Vec<PathBuf>,
    /// NVMe disks, in the order in which the guest sees them: /dev/nvme0n1, /dev/nvme1n1.
    pub nvme: Vec<Nvme>,
    /// A system with an init of its own, instead of the root that is generated; its disk comes behind the others. It loads
    /// modules itself, and files come without the libraries that they need.
    pub system: Option<System>,
    /// Files and folders, and programs with the libraries that they need.
    pub files: Vec<Shipped>,
    /// Kernel modules beside those that the devices need.
    pub modules: Vec<String>,
    /// Whether cbdctrl and cbdd are built and shipped.
    pub cbd: bool,
    /// The folder for the content of the guest's /out.
    pub out: Option<PathBuf>,
    /// Further parameters of the kernel.
    pub append: Vec<String>,
    /// Whether QEMU's standard input goes to the guest's port `orders`, for a guest that a [`crate::driven::Driven`] drives.
    pub takes_orders: bool,
    /// The socket at which QEMU takes the orders of a [`crate::monitor::Monitor`].
    pub monitor: Option<PathBuf>,
    /// The socket at which QEMU waits for a guest that migrates to it, instead of booting one.
    pub incoming: Option<PathBuf>,
    /// Limit of the whole run.
    pub timeout: Duration,
    /// The command; empty for a shell.
    pub command: Vec<String>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            mode: Mode::Normal,
            accelerator: Accelerator::Auto,
            memory: 2 * GIB,
            pmem: None,
            nvdimm: None,
            cxl: None,
            disks: Vec::new(),
            vhost_user: Vec::new(),
            nvme: Vec::new(),
            system: None,
            files: Vec::new(),
            modules: Vec::new(),
            cbd: false,
            out: None,
            append: Vec::new(),
            takes_orders: false,
            monitor: None,
            incoming: None,
            timeout: Duration::from_secs(300),
            command: Vec::new(),
        }
    }
}

impl Plan {
    /// Reads the options; what follows `--` is the command.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option, a missing value or an impossible guest.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut plan = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            if argument == "--" {
                plan.command = rest.cloned().collect();
                break;
            }
            if argument == "--cbd" {
                plan.cbd = true;
                continue;
            }
            if !argument.starts_with('-') {
                return Err(usage(format!("'{argument}': the command of a guest stands behind --")));
            }
            let given = rest.next().ok_or_else(|| usage(format!("{argument} needs a value")))?;
            plan.set(argument, given)?;
        }
        plan.check()?;
        Ok(plan)
    }

    /// A plan for a command, with a shell that runs `script`.
    pub fn of_script(script: &str) -> Self {
        Self { command: ["sh", "-e", "-c", script].map(str::to_owned).to_vec(), ..Self::default() }
    }

    fn set(&mut self, option: &str, given: &str) -> Result<(), Problem> {
        match option {
            "--mode" => {
                self.mode = match given {
                    "normal" => Mode::Normal,
                    "counting" => Mode::Counting,
                    other => return Err(usage(format!("--mode is normal or counting, not '{other}'"))),
                }
            }
            "--accel" => {
                self.accelerator = match given {
                    "auto" => Accelerator::Auto,
                    "kvm" => Accelerator::Kvm,
                    "tcg" => Accelerator::Tcg,
                    other => return Err(usage(format!("--accel is auto, kvm or tcg, not '{other}'"))),
                }
            }
            "--memory" => self.memory = size(option, given)?,
            "--pmem" => self.pmem = Some(size(option, given)?),
            "--nvdimm" => self.nvdimm = Some(shared_file(option, given)?),
            "--cxl" => self.cxl = Some(shared_file(option, given)?),
            "--disk" => self.disks.push(disk(option, given)?),
            "--vhost-user" => self.vhost_user.push(absolute(given)?),
            "--nvme" => self.nvme.push(Nvme { disk: disk(option, given)?, unreadable: Vec::new() }),
            "--unreadable" => {
                let sector = given.parse().map_err(|_| usage(format!("{option}: '{given}' is no sector")))?;
                let last = self.nvme.last_mut();
                let last = last.ok_or_else(|| usage(format!("{option} stands behind an --nvme")))?;
                last.unreadable.push(sector);
            }
            "--file" => self.files.push(shipped(given)?),
            "--module" => self.modules.push(given.to_owned()),
            "--out" => self.out = Some(given.into()),
            "--append" => self.append.push(given.to_owned()),
            "--timeout" => {
                let seconds = given.parse().ok().filter(|&seconds: &u64| seconds > 0);
                self.timeout = seconds
                    .map(Duration::from_secs)
                    .ok_or_else(|| usage(format!("{option} needs a number of seconds, not '{given}'")))?;
            }
            other => return Err(usage(format!("unknown option '{other}'"))),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Problem> {
        let shared = [("--nvdimm", &self.nvdimm), ("--cxl", &self.cxl)];
        let sizes = shared.iter().filter_map(|(option, file)| Some((*option, file.as_ref()?.size)));
        for (option, size) in
            sizes.chain(self.pmem.map(|size| ("--pmem", size))).chain([("--memory", self.memory)])
        {
            if size == 0 || size % HUGE_PAGE != 0 {
                return Err(usage(format!("{option} needs a multiple of 2M, not {size} bytes")));
            }
        }
        // The size of the host bridge's window is a multiple of this.
        if let Some(cxl) = self.cxl.as_ref().filter(|cxl| cxl.size % (256 * MIB) != 0) {
            return Err(usage(format!("--cxl needs a multiple of 256M, not {} bytes", cxl.size)));
        }
        if self.mode == Mode::Counting && self.accelerator == Accelerator::Kvm {
            return Err(usage(
                "a processor does not count: --mode counting goes without --accel kvm".to_owned(),
            ));
        }
        Ok(())
    }
}

fn usage(text: String) -> Problem {
    Problem::Usage(text)
}

/// A number of bytes, with an optional suffix K, M, G or T for powers of 1024.
fn size(option: &str, given: &str) -> Result<u64, Problem> {
    let (digits, unit) = match given.strip_suffix(['K', 'M', 'G', 'T', 'k', 'm', 'g', 't']) {
        Some(digits) => (digits, given[digits.len()..].to_ascii_uppercase()),
        None => (given, String::new()),
    };
    let factor = match unit.as_str() {
        "K" => KIB,
        "M" => MIB,
        "G" => GIB,
        "T" => KIB * GIB,
        _ => 1,
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    number.ok_or_else(|| usage(format!("{option}: '{given}' is no size; 512M or 4G is")))
}

/// FILE:SIZE.
fn shared_file(option: &str, given: &str) -> Result<SharedFile, Problem> {
    let (path, bytes) = given
        .rsplit_once(':')
        .filter(|(path, _)| !path.is_empty())
        .ok_or_else(|| usage(format!("{option} needs FILE:SIZE, not '{given}'")))?;
    Ok(SharedFile { path: absolute(path)?, size: size(option, bytes)? })
}

/// A text that is not a size is a file.
fn disk(option: &str, given: &str) -> Result<Disk, Problem> {
    match size(option, given) {
        Ok(bytes) if bytes > 0 && bytes % 512 == 0 => Ok(Disk::New(bytes)),
        Ok(bytes) => Err(usage(format!("{option} needs a multiple of 512 bytes, not {bytes}"))),
        Err(_) if Path::new(given).exists() => Ok(Disk::File(absolute(given)?)),
        Err(_) => Err(usage(format!("{option}: '{given}' is neither a size nor a file that exists"))),
    }
}

/// FILE, which has the same path in the guest, or FILE=PLACE.
fn shipped(given: &str) -> Result<Shipped, Problem> {
    let (from, to) = match given.split_once('=') {
        Some((from, to)) if to.starts_with('/') => (absolute(from)?, to.into()),
        Some(_) => return Err(usage(format!("--file {given}: the place in the guest begins with /"))),
        None => (absolute(given)?, absolute(given)?),
    };
    if !from.exists() {
        return Err(usage(format!("--file: there is no {}", from.display())));
    }
    Ok(Shipped { from, to })
}

fn absolute(path: &str) -> Result<PathBuf, Problem> {
    std::path::absolute(path).map_err(|error| usage(format!("'{path}': {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Plan, Problem> {
        Plan::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn everything_after_two_dashes_is_the_command() {
        let plan = parse("--mode counting --pmem 2G -- fio --disk --version").expect("all options are valid");
        assert_eq!((plan.mode, plan.pmem), (Mode::Counting, Some(2 * GIB)));
        assert_eq!(plan.command, ["fio", "--disk", "--version"]);
    }

    #[test]
    fn a_disk_is_a_size_or_a_file() {
        let plan = parse("--disk 64M --disk /dev/null").expect("both are fine");
        assert_eq!(plan.disks, [Disk::New(64 * MIB), Disk::File("/dev/null".into())]);
        assert!(matches!(parse("--disk /no/such/file"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--disk 100"), Err(Problem::Usage(_))));
    }

    #[test]
    fn an_nvme_disk_has_the_unreadable_sectors_that_stand_behind_it() {
        let plan = parse("--nvme 64M --unreadable 7 --unreadable 9 --nvme /dev/null").expect("both are fine");
        let first = Nvme { disk: Disk::New(64 * MIB), unreadable: vec![7, 9] };
        let second = Nvme { disk: Disk::File("/dev/null".into()), unreadable: Vec::new() };
        assert_eq!(plan.nvme, [first, second]);
        for line in ["--unreadable 7 --nvme 64M", "--nvme 64M --unreadable x", "--nvme 100"] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }

    #[test]
    fn a_shared_file_has_a_size_behind_its_last_colon() {
        let plan = parse("--nvdimm /tmp/a:b:1G").expect("a file and its size");
        assert_eq!(plan.nvdimm, Some(SharedFile { path: "/tmp/a:b".into(), size: GIB }));
        for line in ["--nvdimm /tmp/a", "--nvdimm :1G", "--nvdimm /tmp/a:1", "--cxl /tmp/a:2M"] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }

    #[test]
    fn a_file_has_its_own_path_or_the_given_one() {
        let plan = parse("--file /dev/null --file /dev/null=/etc/empty").expect("both are fine");
        let places: Vec<_> = plan.files.iter().map(|file| file.to.as_path()).collect();
        assert_eq!(places, [Path::new("/dev/null"), Path::new("/etc/empty")]);
        assert!(matches!(parse("--file /dev/null=etc"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--file /no/such/file"), Err(Problem::Usage(_))));
    }

    #[test]
    fn an_impossible_guest_is_wrong_usage() {
        for line in [
            "fio",
            "--fast 1",
            "--memory",
            "--memory 0",
            "--pmem 1M",
            "--memory 99999999T",
            "--timeout 0",
            "--mode quick",
            "--mode counting --accel kvm",
        ] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }
}
