//! Commands to the driver about devices.
//!
//! Invariants: a command ends within its timeout; if the driver still executes it then, the memory that it may still
//! access is leaked.
#![allow(unsafe_code)]

use crate::abi::{ANY_DEVICE, CONTROL, ControlCommand, DeviceInfo, NO_QUEUE, Parameters, command, feature};
use cbd_export::system_error;
use cbd_types::{Error, ErrorKind, Result};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Timeout of commands that only query or store something.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The control device, opened.
#[derive(Debug)]
pub struct Control {
    file: File,
    features: u64,
}

/// Why a command failed.
#[derive(Debug)]
pub enum Refusal {
    /// The driver's errno.
    Errno(i32),
    /// It timed out, and may still be executed.
    TimedOut,
    /// It could not be submitted.
    System(io::Error),
}

impl Refusal {
    /// The error, with the attempted operation in front of its text.
    #[must_use]
    pub fn into_error(self, what: &str) -> Error {
        match self {
            Self::Errno(errno) => system_error(what, &io::Error::from_raw_os_error(errno)),
            Self::TimedOut => Error::new(
                ErrorKind::TimedOut,
                format!("{what}: the kernel did not complete the command in time"),
            ),
            Self::System(error) if error.raw_os_error() == Some(libc::EPERM) => Error::new(
                ErrorKind::Permission,
                format!(
                    "{what}: io_uring is forbidden here (sysctl kernel.io_uring_disabled, or a container's filter)"
                ),
            ),
            Self::System(error) => system_error(format!("{what}: io_uring cannot be used"), &error),
        }
    }
}

impl Control {
    /// Opens the control device, if the driver has the required features.
    ///
    /// # Errors
    /// The missing requirement, and how to provide it.
    pub fn open() -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(CONTROL)
            .map_err(|error| no_control_device(&error))?;
        let mut control = Self { file, features: 0 };
        let mut features = [0; 8];
        let asked = control.exchange(command::GET_FEATURES, ANY_DEVICE, 0, &mut features, TIMEOUT);
        match asked {
            Ok(()) => {}
            Err(Refusal::Errno(libc::EPERM | libc::EACCES)) => return Err(no_permission()),
            Err(Refusal::Errno(_)) => return Err(too_old()),
            Err(refusal) => return Err(refusal.into_error(CONTROL)),
        }
        control.features = u64::from_ne_bytes(features);
        let needed = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE | feature::IOCTL_ENCODED;
        if control.features & needed == needed { Ok(control) } else { Err(too_old()) }
    }

    /// Whether the driver can stop a device only if no process has it open.
    #[must_use]
    pub const fn stops_safely(&self) -> bool {
        self.features & feature::SAFE_STOP != 0
    }

    /// Whether the driver can change the size of a disk.
    #[must_use]
    pub const fn updates_size(&self) -> bool {
        self.features & feature::UPDATE_SIZE != 0
    }

    /// Creates a device; the kernel returns its actual properties in `info`.
    pub fn add(&self, info: &mut DeviceInfo) -> std::result::Result<(), Refusal> {
        self.exchange(command::ADD_DEVICE, info.device, 0, info.as_mut_bytes(), TIMEOUT)
    }

    /// The properties of a device; `None` if there is no such device.
    pub fn info(&self, device: u32) -> std::result::Result<Option<DeviceInfo>, Refusal> {
        let mut info = DeviceInfo::default();
        match self.exchange(command::GET_DEVICE_INFO, device, 0, info.as_mut_bytes(), TIMEOUT) {
            Ok(()) => Ok(Some(info)),
            Err(Refusal::Errno(libc::ENODEV | libc::ENOENT)) => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    /// Sets the parameters of the disk.
    pub fn set_parameters(&self, device: u32, parameters: &Parameters) -> std::result::Result<(), Refusal> {
        let mut copy = *parameters;
        self.exchange(command::SET_PARAMETERS, device, 0, copy.as_mut_bytes(), TIMEOUT)
    }

    /// The parameters of the disk.
    pub fn parameters(&self, device: u32) -> std::result::Result<Parameters, Refusal> {
        let length = size_of::<Parameters>() as u32;
        let mut parameters = Parameters { length, ..Parameters::default() };
        self.exchange(command::GET_PARAMETERS, device, 0, parameters.as_mut_bytes(), TIMEOUT)?;
        Ok(parameters)
    }

    /// The processors whose requests go to a queue.
    pub fn processors(&self, device: u32, queue: u16) -> std::result::Result<Vec<usize>, Refusal> {
        let mut bits = [0_u8; 1024];
        self.exchange(command::GET_QUEUE_AFFINITY, device, u64::from(queue), &mut bits, TIMEOUT)?;
        let is_set = |&processor: &usize| bits[processor / 8] >> (processor % 8) & 1 == 1;
        Ok((0..bits.len() * 8).filter(is_set).collect())
    }

    /// A command about a device whose only argument is a number.
    pub fn command(
        &self,
        operation: u32,
        device: u32,
        data: u64,
        timeout: Duration,
    ) -> std::result::Result<(), Refusal> {
        self.exchange(operation, device, data, &mut [], timeout)
    }

    /// Removes a device that has no disk any more. Its number becomes free when no process has the disk open.
    pub fn delete(&self, device: u32) -> std::result::Result<(), Refusal> {
        match self.command(command::DELETE_DEVICE_LATER, device, 0, TIMEOUT) {
            Err(Refusal::Errno(libc::EOPNOTSUPP | libc::EINVAL)) => {
                self.command(command::DELETE_DEVICE, device, 0, TIMEOUT)
            }
            deleted => deleted,
        }
    }

    /// Executes a command, with `bytes` as its argument and result.
    fn exchange(
        &self,
        operation: u32,
        device: u32,
        data: u64,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> std::result::Result<(), Refusal> {
        // On the heap, so that it can be leaked if the command does not end.
        let mut buffer = bytes.to_vec().into_boxed_slice();
        let command = ControlCommand {
            device,
            queue: NO_QUEUE,
            length: u16::try_from(buffer.len()).unwrap_or_default(),
            address: if buffer.is_empty() { 0 } else { buffer.as_mut_ptr().expose_provenance() as u64 },
            data,
            ..ControlCommand::default()
        };
        let mut entry = [0; 80];
        entry[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation).cmd(entry).build();
        let mut ring: IoUring<squeue::Entry128, cqueue::Entry> =
            IoUring::builder().dontfork().build(2).map_err(Refusal::System)?;
        // SAFETY: the buffer that the command names lives until its completion, or forever if the completion does not
        // arrive in time.
        unsafe { ring.submission().push(&entry) }
            .map_err(|_| Refusal::System(io::Error::from_raw_os_error(libc::EBUSY)))?;
        let Some(result) = wait(&mut ring, timeout)? else {
            // The driver may still write there, and closing the ring could wait for it.
            std::mem::forget((ring, buffer));
            return Err(Refusal::TimedOut);
        };
        if result < 0 {
            return Err(Refusal::Errno(-result));
        }
        bytes.copy_from_slice(&buffer);
        Ok(())
    }
}

/// The result of the only entry of a ring, if it arrives in time.
fn wait(
    ring: &mut IoUring<squeue::Entry128, cqueue::Entry>,
    timeout: Duration,
) -> std::result::Result<Option<i32>, Refusal> {
    let end = std::time::Instant::now() + timeout;
    let mut taken = false;
    loop {
        let left = types::Timespec::from(end.saturating_duration_since(std::time::Instant::now()));
        let entered = ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left));
        if let Some(entry) = ring.completion().next() {
            return Ok(Some(entry.result()));
        }
        match entered {
            Ok(_) => taken = true,
            // The kernel may have consumed the entry before the wait was interrupted.
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => taken = true,
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => return Ok(None),
            // In flight, and its completion cannot be awaited: treated as a timeout.
            Err(_) if taken => return Ok(None),
            // Nothing was consumed, so the driver has no command.
            Err(error) => return Err(Refusal::System(error)),
        }
    }
}

/// The numbers of all existing devices.
#[must_use]
pub fn devices() -> Vec<u32> {
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    let entries = std::fs::read_dir("/sys/class/ublk-char").into_iter().flatten().flatten();
    entries.filter_map(number).collect()
}

fn no_control_device(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => Error::new(
            ErrorKind::NotFound,
            format!(
                "{CONTROL} is not there: load the kernel's ublk driver with `modprobe ublk_drv` (Linux 6.5 or later, \
                 CONFIG_BLK_DEV_UBLK)"
            ),
        ),
        Some(libc::EPERM | libc::EACCES) => no_permission(),
        _ => system_error(CONTROL, error),
    }
}

fn no_permission() -> Error {
    Error::new(ErrorKind::Permission, format!("{CONTROL}: ublk devices need root (CAP_SYS_ADMIN)"))
}

fn too_old() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "this kernel's ublk driver cannot hand a device over to the daemon's successor (Linux 6.5 or later can)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_error_names_its_cause_and_its_remedy() {
        for (errno, kind, word) in [
            (libc::ENOENT, ErrorKind::NotFound, "modprobe ublk_drv"),
            (libc::ENODEV, ErrorKind::NotFound, "modprobe ublk_drv"),
            (libc::EACCES, ErrorKind::Permission, "CAP_SYS_ADMIN"),
            (libc::EMFILE, ErrorKind::NoSpace, CONTROL),
        ] {
            let error = no_control_device(&io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), kind);
            assert!(error.line().contains(word), "{error}");
        }
    }
}
