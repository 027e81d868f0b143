//! Requests to block devices, the device mapper and FUSE channels.
//!
//! Invariants: a request is declared once, in this crate, with the type that the kernel reads or fills for it
//! (`Request`); a wrong type there is the only way to make `call` unsound. The numbers are those of the architectures
//! with the generic layout.

use crate::{DeviceNumber, checked};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The number of an ioctl, with the type of what its argument points to. `()`: the kernel uses no argument.
pub(crate) struct Request<T: ?Sized>(u32, PhantomData<T>);

impl<T: ?Sized> Request<T> {
    /// The kernel must read or write at most a `T` for the request, and any bytes that it writes must be a `T`.
    pub(crate) const fn new(number: u32) -> Self {
        Self(number, PhantomData)
    }
}

/// Issues the request; returns the kernel's number.
pub(crate) fn call<T: ?Sized>(
    file: BorrowedFd<'_>,
    request: &Request<T>,
    argument: &mut T,
) -> io::Result<libc::c_int> {
    let argument: *mut libc::c_void = std::ptr::from_mut(argument).cast();
    // SAFETY: the pointer is to the type that the request was declared with, which is what the kernel reads or fills.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), request.0 as _, argument) })
}

// <linux/fs.h>
const BLKROGET: Request<libc::c_int> = Request::new(0x125E);
const BLKDISCARD: Request<[u64; 2]> = Request::new(0x1277);
const BLKGETSIZE64: Request<u64> = Request::new(0x8008_1272);
const FS_IOC_GETFSUUID: Request<Uuid> = Request::new(0x8011_1500);
/// `_IOR(229, 0, u32)`: makes an opened `/dev/fuse` one more channel to the connection of another.
const FUSE_DEV_IOC_CLONE: Request<u32> = Request::new(0x8004_E500);
/// Reads and fills as many bytes as the header in its argument states: see [`mapper_table`].
const DM_TABLE_STATUS: Request<[u64]> = Request::new(0xC138_FD0C);

/// `struct fsuuid2`.
#[repr(C)]
struct Uuid {
    length: u8,
    bytes: [u8; 16],
}

/// The UUID of the file system that holds `file`, if the kernel reports it (Linux 6.9).
#[must_use]
pub fn file_system_uuid(file: BorrowedFd<'_>) -> Option<[u8; 16]> {
    let mut uuid = Uuid { length: 0, bytes: [0; 16] };
    let result = call(file, &FS_IOC_GETFSUUID, &mut uuid);
    (result.is_ok() && uuid.length == 16 && uuid.bytes != [0; 16]).then_some(uuid.bytes)
}

/// The size of a block device in bytes.
///
/// # Errors
/// The system error.
pub fn block_size(device: BorrowedFd<'_>) -> io::Result<u64> {
    let mut size = 0;
    call(device, &BLKGETSIZE64, &mut size)?;
    Ok(size)
}

/// Whether a block device is set read-only.
///
/// # Errors
/// The system error.
pub fn block_read_only(device: BorrowedFd<'_>) -> io::Result<bool> {
    let mut is_read_only = 0;
    call(device, &BLKROGET, &mut is_read_only)?;
    Ok(is_read_only != 0)
}

/// Requests a block device to discard `length` bytes at offset `start`.
///
/// # Errors
/// The system error.
pub fn block_discard(device: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    call(device, &BLKDISCARD, &mut [start, length])?;
    Ok(())
}

/// Makes `new`, a freshly opened `/dev/fuse`, one more channel to the connection of `old`.
///
/// # Errors
/// The system error.
pub fn clone_fuse_channel(new: BorrowedFd<'_>, old: BorrowedFd<'_>) -> io::Result<()> {
    call(new, &FUSE_DEV_IOC_CLONE, &mut (old.as_raw_fd() as u32))?;
    Ok(())
}

/// The table of a device of the device mapper, from its control device: the targets as the kernel encodes them, and their
/// number. Without parameters only ranges and types.
///
/// # Errors
/// The system error; [`io::ErrorKind::InvalidData`] for a malformed or unreasonably large table.
pub fn mapper_table(
    control: BorrowedFd<'_>,
    device: DeviceNumber,
    with_parameters: bool,
) -> io::Result<(Vec<u8>, u32)> {
    // struct dm_ioctl of <linux/dm-ioctl.h>: version, data_size, data_start, target_count, open_count, flags, event_nr, padding,
    // dev, name, uuid, data.
    const HEADER: usize = 312;
    const STATUS_TABLE: u32 = 1 << 4;
    const BUFFER_FULL: u32 = 1 << 8;
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut words = 8192;
    loop {
        // Of u64, so that it is aligned as the structure.
        let mut buffer = vec![0_u64; words];
        let flags = if with_parameters { STATUS_TABLE } else { 0 };
        // `data_size` is what the buffer has: the kernel reads and fills no more.
        let header = [4_u32, 0, 0, (words * 8) as u32, HEADER as u32, 0, 0, flags, 0, 0];
        for (word, pair) in buffer.iter_mut().zip(header.chunks_exact(2)) {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&pair[0].to_ne_bytes());
            bytes[4..].copy_from_slice(&pair[1].to_ne_bytes());
            *word = u64::from_ne_bytes(bytes);
        }
        buffer[5] = device.encode();
        call(control, &DM_TABLE_STATUS, buffer.as_mut_slice())?;
        let mut bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let field = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (start, count) = (field(16) as usize, field(20));
        if field(28) & BUFFER_FULL == 0 {
            if start > bytes.len() {
                return Err(invalid());
            }
            bytes.drain(..start);
            return Ok((bytes, count));
        }
        words *= 4;
        if words > 1 << 22 {
            return Err(invalid());
        }
    }
}
