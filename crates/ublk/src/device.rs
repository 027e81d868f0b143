//! The life cycle of a device in the kernel: created, started, taken over, stopped.
//!
//! Invariants: a device is changed only if it carries the project's mark; a start that fails leaves no device behind, a
//! takeover that fails leaves the device unchanged, so that its clients keep waiting.

use crate::abi::{ANY_DEVICE, CONTROL, DeviceInfo, Parameters, command, feature, state};
use crate::control::{Control, Refusal, TIMEOUT, devices};
use crate::ring::CAPACITY_MAX;
use crate::tag::Tag;
use cbd_export::system_error;
use cbd_export::users::BlockNode;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout of a start and of a takeover: the kernel scans for partitions.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of the kernel's cleanup after a server was killed.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of checks whether that cleanup has ended: the kernel has no event for it.
const TAKEOVER_INTERVAL: Duration = Duration::from_millis(5);

/// A device in the kernel.
#[derive(Debug)]
pub struct Device {
    control: Control,
    info: DeviceInfo,
    parameters: Parameters,
    /// Whether an earlier server created it.
    taken_over: bool,
}

/// The requested properties of a new device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRequest {
    /// Its mark.
    pub tag: Tag,
    /// Queues; the kernel may create fewer.
    pub queues: u16,
    /// Requests in flight of each queue.
    pub depth: u16,
    /// Bytes of the largest read or write.
    pub buffer_bytes: u32,
    /// The parameters of the disk.
    pub parameters: Parameters,
}

impl Device {
    /// Takes over the device that carries the mark, or creates a new one.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`] if the device with the mark is larger, or has another sector size; otherwise the refused
    /// command.
    pub fn take_over_or_create(request: &DeviceRequest) -> Result<Self> {
        let control = Control::open()?;
        match find(&control, request.tag)? {
            // Its server ended before the start or after the stop, so it has no users.
            Some(info) if info.state == state::DEAD => {
                control.delete(info.device).map_err(|refusal| refusal.into_error(&name(info.device)))?;
                Self::create(control, request)
            }
            Some(info) => Self::take_over(control, info, request),
            None => Self::create(control, request),
        }
    }

    fn create(control: Control, request: &DeviceRequest) -> Result<Self> {
        let mut info = DeviceInfo {
            queues: request.queues,
            depth: request.depth,
            buffer_bytes: request.buffer_bytes,
            device: ANY_DEVICE,
            flags: feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE | feature::IOCTL_ENCODED,
            tag: request.tag.value(),
            ..DeviceInfo::default()
        };
        control.add(&mut info).map_err(no_device)?;
        let device = Self { control, info, parameters: request.parameters, taken_over: false };
        let set = device.control.set_parameters(info.device, &request.parameters);
        let created = set
            .map_err(|refusal| {
                refusal.into_error(&format!("{}: cannot set the parameters of the disk", name(info.device)))
            })
            .and_then(|()| device.check());
        match created {
            Ok(()) => Ok(device),
            Err(error) => {
                // A device that was never started has no users.
                let _ = device.control.delete(info.device);
                Err(error)
            }
        }
    }

    fn take_over(control: Control, mut info: DeviceInfo, request: &DeviceRequest) -> Result<Self> {
        let number = info.device;
        let what = || format!("{} waits for its daemon, and cannot be taken over", name(number));
        let parameters = control.parameters(number).map_err(|refusal| refusal.into_error(&what()))?;
        // It may have grown since it was created.
        if !may_continue(&parameters, &request.parameters) {
            return Err(Error::new(
                ErrorKind::Exchanged,
                format!(
                    "{}: it was created with {} sectors of 512 bytes, and there are {} now, or sectors of another size; stop it with \
                     dev-stop --force and start it again",
                    what(),
                    parameters.basic.sectors,
                    request.parameters.basic.sectors
                ),
            ));
        }
        let end = Instant::now() + TAKEOVER_TIMEOUT;
        loop {
            match control.command(command::START_RECOVERY, number, 0, TIMEOUT) {
                Ok(()) => break,
                // An earlier takeover was interrupted after this step.
                Err(Refusal::Errno(libc::EINVAL)) if info.state == state::QUIESCED => break,
                Err(Refusal::Errno(libc::EBUSY)) if Instant::now() < end => {
                    std::thread::sleep(TAKEOVER_INTERVAL);
                }
                Err(refusal) => return Err(refusal.into_error(&what())),
            }
            info = control.info(number).map_err(|refusal| refusal.into_error(&what()))?.unwrap_or(info);
        }
        let device = Self { control, info, parameters, taken_over: true };
        device.check()?;
        Ok(device)
    }

    /// Checks that the device that the kernel created can be served.
    fn check(&self) -> Result<()> {
        let DeviceInfo { queues, depth, buffer_bytes, .. } = self.info;
        let largest = self.parameters.basic.sectors_max as usize * 512;
        if queues == 0
            || depth == 0
            || (buffer_bytes as usize) < largest
            || buffer_bytes as usize > CAPACITY_MAX
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} has {queues} queues of {depth} requests of {buffer_bytes} bytes, which cannot be served",
                    name(self.info.device)
                ),
            ));
        }
        Ok(())
    }

    /// Opens the device file through which its queues are served.
    ///
    /// # Errors
    /// The system error.
    pub fn open(&self) -> Result<File> {
        let path = format!("/dev/ublkc{}", self.info.device);
        OpenOptions::new().read(true).write(true).open(&path).map_err(|error| system_error(path, &error))
    }

    /// Starts the device, whose queues are served now: the disk appears, or its clients continue.
    ///
    /// # Errors
    /// The kernel's error. A new device is then removed; after a failed takeover the clients wait again.
    pub fn start(&self) -> Result<()> {
        let operation = if self.taken_over { command::END_RECOVERY } else { command::START_DEVICE };
        let server = u64::from(std::process::id());
        self.control
            .command(operation, self.info.device, server, START_TIMEOUT)
            .map_err(|refusal| refusal.into_error(&format!("{} cannot be started", name(self.info.device))))
    }

    /// Makes the disk `sectors` sectors of 512 bytes large, and tells its users. Returns whether the driver can do that.
    ///
    /// # Errors
    /// The kernel's error; the disk has its former size then.
    pub fn grow(&self, sectors: u64) -> Result<bool> {
        if !self.control.updates_size() {
            return Ok(false);
        }
        self.control.command(command::UPDATE_SIZE, self.info.device, sectors, TIMEOUT).map_err(
            |refusal| refusal.into_error(&format!("{} cannot be made larger", name(self.info.device))),
        )?;
        Ok(true)
    }

    /// The sectors of 512 bytes that the disk had when it was created or taken over.
    #[must_use]
    pub const fn sectors(&self) -> u64 {
        self.parameters.basic.sectors
    }

    /// Removes the disk, if no process has it open; otherwise nothing changes.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if a process has it open.
    pub fn stop_if_unused(&self, timeout: Duration) -> Result<()> {
        let safely = self.control.stops_safely();
        let operation = if safely { command::TRY_STOP_DEVICE } else { command::STOP_DEVICE };
        // A user in the kernel (a file system on several devices, a journal, a target) is not visible among processes
        // and mounts, but has opened the disk exclusively.
        let claimed = if safely { None } else { Some(self.claim()?) };
        drop(claimed);
        self.command_stop(operation, timeout)
    }

    /// Opens the disk exclusively, to check that no other user has.
    fn claim(&self) -> Result<File> {
        let path = format!("/dev/ublkb{}", self.info.device);
        OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&path).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    Error::new(ErrorKind::Busy, format!("{path} is claimed by a user in the kernel"))
                }
                _ => system_error(&path, &error),
            }
        })
    }

    /// Removes the disk; its users see errors.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if requests are not answered in time.
    pub fn stop(&self, timeout: Duration) -> Result<()> {
        self.command_stop(command::STOP_DEVICE, timeout)
    }

    fn command_stop(&self, operation: u32, timeout: Duration) -> Result<()> {
        self.control
            .command(operation, self.info.device, 0, timeout)
            .map_err(|refusal| refusal.into_error(&format!("{} cannot be stopped", name(self.info.device))))
    }

    /// Removes the device, after its disk.
    pub fn delete(&self) {
        // A device that stays is removed at the next start of the daemon.
        let _ = self.control.delete(self.info.device);
    }

    /// Its number.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.info.device
    }

    /// Whether it was taken over, with the clients of an earlier server.
    #[must_use]
    pub const fn is_taken_over(&self) -> bool {
        self.taken_over
    }

    /// Queues, slots of each, and bytes of a slot's buffer.
    #[must_use]
    pub const fn dimensions(&self) -> (u16, u16, usize) {
        (self.info.queues, self.info.depth, self.info.buffer_bytes as usize)
    }

    /// The processors whose requests go to a queue; empty if the kernel does not report them.
    #[must_use]
    pub fn processors(&self, queue: u16) -> Vec<usize> {
        self.control.processors(self.info.device, queue).unwrap_or_default()
    }

    /// The device number of the disk.
    ///
    /// # Errors
    /// When the kernel does not report it.
    pub fn disk_numbers(&self) -> Result<(u32, u32)> {
        let parameters = self.control.parameters(self.info.device);
        let numbers = parameters.map_err(|refusal| refusal.into_error(&name(self.info.device)))?.numbers;
        Ok((numbers.disk_major, numbers.disk_minor))
    }
}

/// Whether a disk with the parameters `of_kernel` can be served with `wanted`. An older version may have chosen the
/// others.
fn may_continue(of_kernel: &Parameters, wanted: &Parameters) -> bool {
    of_kernel.basic.sectors <= wanted.basic.sectors
        && of_kernel.basic.logical_shift == wanted.basic.logical_shift
}

/// The disk of a device.
#[must_use]
pub fn disk_path(device: u32) -> PathBuf {
    PathBuf::from(name(device))
}

fn name(device: u32) -> String {
    format!("/dev/ublkb{device}")
}

/// The device that carries a mark.
fn find(control: &Control, tag: Tag) -> Result<Option<DeviceInfo>> {
    for number in devices() {
        let info = control.info(number).map_err(|refusal| refusal.into_error(&name(number)))?;
        if let Some(info) = info.filter(|info| info.tag == tag.value()) {
            return Ok(Some(info));
        }
    }
    Ok(None)
}

/// Whether another process serves the device, which then has the character device `channel` open. A process that was
/// just killed has closed it, although the kernel may still report the device as live: no process serves that device.
fn is_served_elsewhere(info: &DeviceInfo, channel: &Path) -> bool {
    let server = u32::try_from(info.server).unwrap_or(0);
    info.state == state::LIVE && server != std::process::id() && {
        let opened = std::fs::read_dir(format!("/proc/{server}/fd")).into_iter().flatten().flatten();
        opened
            .map(|entry| entry.path())
            .any(|entry| std::fs::read_link(entry).is_ok_and(|file| file == channel))
    }
}

fn no_device(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Errno(libc::EACCES) => Error::new(
            ErrorKind::NoSpace,
            "the kernel makes no more ublk devices: raise ublks_max (/sys/module/ublk_drv/parameters/ublks_max) or stop \
             devices that are not needed",
        ),
        Refusal::Errno(libc::ENOSPC) => {
            Error::new(ErrorKind::NoSpace, "the kernel has no number for another ublk device")
        }
        Refusal::Errno(libc::EPERM) => {
            Error::new(ErrorKind::Permission, "ublk devices need root (CAP_SYS_ADMIN)")
        }
        refusal => refusal.into_error("the kernel makes no ublk device"),
    }
}

/// Removes unneeded devices of an earlier process: devices with the mark of the daemon that are not among `wanted`, and
/// entries in the folder `names` of disks that do not exist. Returns the names of the removed disks. A device that
/// another process serves is not removed: if the state of a daemon was copied, the copy uses the same mark.
///
/// # Errors
/// When the driver cannot be queried.
pub fn sweep(daemon: u64, wanted: &[Tag], names: &Path) -> Result<Vec<String>> {
    let control = Control::open()?;
    let mut swept = Vec::new();
    for number in devices() {
        let Ok(Some(info)) = control.info(number) else { continue };
        let is_wanted = wanted.iter().any(|tag| tag.value() == info.tag);
        let is_left = Tag::is_of(info.tag, daemon) && !is_served_elsewhere(&info, Path::new(CONTROL));
        if is_left && !is_wanted && remove(&control, number).is_ok() {
            swept.push(name(number));
        }
    }
    for entry in std::fs::read_dir(names).into_iter().flatten().flatten() {
        if !Path::new("/sys/block").join(entry.file_name()).exists() {
            // An entry that cannot be removed is replaced when a disk of this daemon gets the name.
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(swept)
}

/// A device that no other process serves, and whose clients wait.
#[derive(Debug)]
pub struct LeftBehind {
    control: Control,
    number: u32,
}

impl LeftBehind {
    /// The device with this mark, if there is one.
    #[must_use]
    pub fn find(tag: Tag) -> Option<Self> {
        let control = Control::open().ok()?;
        let info = find(&control, tag).ok()??;
        let is_left = info.state != state::DEAD && !is_served_elsewhere(&info, Path::new(CONTROL));
        is_left.then_some(Self { control, number: info.device })
    }

    /// The device of the daemon with this number whose disk is recorded in the folder `names` with the link `link`, if
    /// there is one: for a caller that cannot compute the mark, because the region with the identity is missing.
    #[must_use]
    pub fn named(daemon: u64, names: &Path, link: &Path) -> Option<Self> {
        for number in numbers_of_link(names, link) {
            let control = Control::open().ok()?;
            let Ok(Some(info)) = control.info(number) else { continue };
            let is_left = info.state != state::DEAD && !is_served_elsewhere(&info, Path::new(CONTROL));
            if is_left && Tag::is_of(info.tag, daemon) {
                return Some(Self { control, number });
            }
        }
        None
    }

    /// The use of the device, as a sentence.
    ///
    /// # Errors
    /// When a query to the system fails.
    pub fn user(&self) -> Result<Option<String>> {
        let what = || format!("{} waits for its daemon", name(self.number));
        let numbers =
            self.control.parameters(self.number).map_err(|refusal| refusal.into_error(&what()))?.numbers;
        let device = (numbers.disk_major, numbers.disk_minor);
        crate::export::is_busy(&BlockNode { path: disk_path(self.number), device }, None)
    }

    /// Removes it: its users see errors.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(self) -> Result<()> {
        let what = || format!("{} cannot be removed", name(self.number));
        remove(&self.control, self.number).map_err(|refusal| refusal.into_error(&what()))
    }
}

/// The numbers of the disks that the folder `names` records with the link `link`; removed disks may be among them.
fn numbers_of_link(names: &Path, link: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(names).into_iter().flatten().flatten();
    let entries_of_link =
        entries.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == link));
    entries_of_link
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("ublkb")?.parse().ok())
        .collect()
}

fn remove(control: &Control, number: u32) -> std::result::Result<(), Refusal> {
    control.command(command::STOP_DEVICE, number, 0, TIMEOUT)?;
    control.delete(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    #[test]
    fn a_device_is_left_behind_when_its_server_has_closed_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let channel = folder.path().join("channel");
        std::fs::write(&channel, "").expect("a file");
        let open = File::open(&channel).expect("it is there");
        let mut server = Command::new("sleep")
            .arg("1000")
            .stdin(open)
            .stdout(Stdio::piped())
            .spawn()
            .expect("sleep is there");
        let of = |state, server: u32| DeviceInfo { state, server: server as i32, ..DeviceInfo::default() };
        let pid = server.id();
        assert!(is_served_elsewhere(&of(state::LIVE, pid), &channel));
        assert!(!is_served_elsewhere(&of(state::LIVE, pid), &folder.path().join("another")));
        assert!(!is_served_elsewhere(&of(state::QUIESCED, pid), &channel), "its clients wait already");
        let mine = File::open(&channel).expect("it is there");
        assert!(
            !is_served_elsewhere(&of(state::LIVE, std::process::id()), &channel),
            "served by this process"
        );
        drop(mine);
        server.kill().expect("it is alive");
        // It has closed its files, and is not reaped yet.
        let mut words = server.stdout.take().expect("a pipe");
        words.read_to_end(&mut Vec::new()).expect("its end");
        assert!(
            !is_served_elsewhere(&of(state::LIVE, pid), &channel),
            "the kernel still reports the device as live"
        );
        server.wait().expect("it has ended");
        assert!(!is_served_elsewhere(&of(state::LIVE, 0), &channel), "the kernel does not report the server");
    }

    #[test]
    fn a_disk_continues_if_it_has_grown_and_not_if_it_has_shrunk_or_has_other_sectors() {
        let of = |sectors, logical_shift| Parameters {
            basic: crate::abi::Basic { sectors, logical_shift, ..crate::abi::Basic::default() },
            ..Parameters::default()
        };
        assert!(may_continue(&of(100, 9), &of(100, 9)) && may_continue(&of(100, 9), &of(101, 9)));
        assert!(!may_continue(&of(101, 9), &of(100, 9)) && !may_continue(&of(100, 9), &of(100, 12)));
    }

    #[test]
    fn the_disks_of_a_link_are_those_recorded_in_the_names_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let links = [
            ("ublkb3", "/dev/cbd0"),
            ("ublkb4", "/dev/cbd1"),
            ("other", "/dev/cbd0"),
            ("ublkbx", "/dev/cbd0"),
        ];
        for (name, link) in links {
            std::os::unix::fs::symlink(link, folder.path().join(name)).expect("a link");
        }
        assert_eq!(numbers_of_link(folder.path(), Path::new("/dev/cbd0")), [3]);
        assert_eq!(numbers_of_link(folder.path(), Path::new("/dev/cbd2")), Vec::<u32>::new());
        assert_eq!(
            numbers_of_link(&folder.path().join("missing"), Path::new("/dev/cbd0")),
            Vec::<u32>::new()
        );
    }

    #[test]
    fn a_refused_device_creation_names_its_cause_and_its_remedy() {
        for (errno, kind, word) in [
            (libc::EACCES, ErrorKind::NoSpace, "ublks_max"),
            (libc::ENOSPC, ErrorKind::NoSpace, "number"),
            (libc::EPERM, ErrorKind::Permission, "CAP_SYS_ADMIN"),
            (libc::ENOMEM, ErrorKind::System, "no ublk device"),
        ] {
            let error = no_device(Refusal::Errno(errno));
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.line().contains(word), "{error}");
        }
    }
}
