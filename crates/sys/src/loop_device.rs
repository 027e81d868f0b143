//! Loop devices.

use crate::DeviceNumber;
use crate::ioctl::{Request, call};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

// <linux/loop.h>
const LOOP_CLR_FD: Request<()> = Request::new(0x4C01);
const LOOP_SET_STATUS64: Request<LoopInfo> = Request::new(0x4C04);
const LOOP_GET_STATUS64: Request<LoopInfo> = Request::new(0x4C05);
const LOOP_SET_CAPACITY: Request<()> = Request::new(0x4C07);
const LOOP_CONFIGURE: Request<LoopConfig> = Request::new(0x4C0A);
const LOOP_CTL_GET_FREE: Request<()> = Request::new(0x4C82);

/// The loop device is read-only.
pub const LO_FLAGS_READ_ONLY: u32 = 1;
/// The kernel unbinds the loop device when the last opener closes it.
pub const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// The loop device bypasses the page cache of its file.
pub const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Size of a name in [`LoopInfo`].
pub const LO_NAME_SIZE: usize = 64;

/// `struct loop_info64` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LoopInfo {
    device: u64,
    /// Inode number of the bound file or device node.
    pub inode: u64,
    special: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    /// `LO_FLAGS_*`.
    pub flags: u32,
    /// A name that the configuring process has set; ends with a zero.
    pub file_name: [u8; LO_NAME_SIZE],
    crypt_name: [u8; LO_NAME_SIZE],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

const NO_INFO: LoopInfo = LoopInfo {
    device: 0,
    inode: 0,
    special: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; LO_NAME_SIZE],
    crypt_name: [0; LO_NAME_SIZE],
    encrypt_key: [0; 32],
    init: [0; 2],
};

impl LoopInfo {
    /// The number of the file system that has the bound file, or of the file system of the device node.
    #[must_use]
    pub const fn device(&self) -> DeviceNumber {
        DeviceNumber::decode(self.device)
    }

    /// The number of a bound block device; for a file, 0:0 or, from some kernels, [`device`](Self::device) again.
    #[must_use]
    pub const fn special(&self) -> DeviceNumber {
        DeviceNumber::decode(self.special)
    }

    /// The name, up to its zero.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        CStr::from_bytes_until_nul(&self.file_name).map_or(&self.file_name, CStr::to_bytes)
    }
}

/// The number of a loop device that is free at this moment; the kernel creates one if there is none.
///
/// # Errors
/// The system error.
pub fn free(control: BorrowedFd<'_>) -> io::Result<u32> {
    call(control, &LOOP_CTL_GET_FREE, &mut ()).map(|number| number as u32)
}

/// Binds a free loop device to a file.
///
/// # Errors
/// The system error; EBUSY if it is bound already.
pub fn configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    flags: u32,
    file_name: [u8; LO_NAME_SIZE],
) -> io::Result<()> {
    let info = LoopInfo { flags, file_name, ..NO_INFO };
    let mut config = LoopConfig { fd: file.as_raw_fd() as u32, block_size, info, reserved: [0; 8] };
    call(device, &LOOP_CONFIGURE, &mut config)?;
    Ok(())
}

/// The binding of a loop device. The kernel queries the bound file for it, which can block on that file's server.
///
/// # Errors
/// The system error; ENXIO if it is not bound.
pub fn status(device: BorrowedFd<'_>) -> io::Result<LoopInfo> {
    let mut info = NO_INFO;
    call(device, &LOOP_GET_STATUS64, &mut info)?;
    Ok(info)
}

/// Changes the setting of a bound loop device that may be changed: its flag [`LO_FLAGS_AUTOCLEAR`].
///
/// # Errors
/// The system error.
pub fn set_status(device: BorrowedFd<'_>, info: &LoopInfo) -> io::Result<()> {
    call(device, &LOOP_SET_STATUS64, &mut { *info })?;
    Ok(())
}

/// Makes a loop device as large as its file is now. The kernel may query the file, which can block on that file's server.
///
/// # Errors
/// The system error; ENXIO if it is not bound.
pub fn set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    call(device, &LOOP_SET_CAPACITY, &mut ())?;
    Ok(())
}

/// Unbinds a loop device: at once, or when its last opener closes it.
///
/// # Errors
/// The system error; ENXIO if it is not bound.
pub fn clear(device: BorrowedFd<'_>) -> io::Result<()> {
    call(device, &LOOP_CLR_FD, &mut ())?;
    Ok(())
}
