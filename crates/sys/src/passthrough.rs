//! Commands that the kernel passes to an NVMe or SCSI device unchanged.
//!
//! Invariants: only commands that read the device's properties, or compare its content, can be issued; the device gets
//! no more bytes than the slice that is passed has. A call blocks until the device has answered or the timeout has
//! passed.

use crate::ioctl::{Request, call};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

// <linux/nvme_ioctl.h>
const NVME_IOCTL_ID: Request<()> = Request::new(0x4E40);
const NVME_IOCTL_ADMIN_CMD: Request<NvmeCommand> = Request::new(0xC048_4E41);
const NVME_IOCTL_IO_CMD: Request<NvmeCommand> = Request::new(0xC048_4E43);
// <scsi/sg.h>
const SG_IO: Request<ScsiHeader> = Request::new(0x2285);

/// Bytes of a result of Identify.
pub const IDENTIFY_BYTES: usize = 4096;
/// Bytes of sense data that are kept.
pub const SENSE_BYTES: usize = 64;

const IDENTIFY: u8 = 0x06;
const COMPARE: u8 = 0x05;
const VERIFY: u8 = 0x0C;
const VERIFY_16: u8 = 0x8F;

/// `struct nvme_passthru_cmd`.
#[repr(C)]
#[derive(Default)]
struct NvmeCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    words_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_length: u32,
    data_length: u32,
    words_10_15: [u32; 6],
    timeout_ms: u32,
    result: u32,
}

/// `struct sg_io_hdr`.
#[repr(C)]
struct ScsiHeader {
    interface: i32,
    direction: i32,
    command_length: u8,
    sense_length: u8,
    vectors: u16,
    data_length: u32,
    data: *mut libc::c_void,
    command: *mut u8,
    sense: *mut u8,
    timeout_ms: u32,
    flags: u32,
    pack_id: i32,
    pointer: *mut libc::c_void,
    status: u8,
    masked_status: u8,
    message_status: u8,
    sense_written: u8,
    host_status: u16,
    driver_status: u16,
    residue: i32,
    duration_ms: u32,
    info: u32,
}

fn milliseconds(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX)
}

/// The identifier of the NVMe namespace behind a block device or a generic character device.
///
/// # Errors
/// The system error; `ENOTTY` for another device.
pub fn nvme_namespace(device: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(call(device, &NVME_IOCTL_ID, &mut ())? as u32)
}

/// Identify of an NVMe device: the data structure `structure` (CNS) of a namespace and a command set.
///
/// # Errors
/// The system error; [`io::ErrorKind::Unsupported`] if the controller refuses it.
pub fn nvme_identify(
    device: BorrowedFd<'_>,
    namespace: u32,
    structure: u8,
    command_set: u8,
    timeout: Duration,
) -> io::Result<Box<[u8; IDENTIFY_BYTES]>> {
    let mut data = Box::new([0; IDENTIFY_BYTES]);
    let mut command = NvmeCommand {
        opcode: IDENTIFY,
        namespace,
        address: data.as_mut_ptr() as u64,
        data_length: IDENTIFY_BYTES as u32,
        words_10_15: [u32::from(structure), u32::from(command_set) << 24, 0, 0, 0, 0],
        timeout_ms: milliseconds(timeout),
        ..NvmeCommand::default()
    };
    match call(device, &NVME_IOCTL_ADMIN_CMD, &mut command)? {
        0 => Ok(data),
        status => Err(io::Error::new(io::ErrorKind::Unsupported, format!("NVMe status {status:#x}"))),
    }
}

/// Verify of an NVMe namespace if `expected` is `None`, otherwise Compare with these bytes, which must be those of
/// `blocks` blocks. Returns the status of the command, 0 for success.
///
/// # Errors
/// The system error; `EINVAL` for no block or more than 65,536.
pub fn nvme_check(
    device: BorrowedFd<'_>,
    namespace: u32,
    first: u64,
    blocks: u32,
    expected: Option<&[u8]>,
    timeout: Duration,
) -> io::Result<u16> {
    let length = u32::try_from(expected.map_or(0, <[u8]>::len));
    let (Some(last @ ..=0xFFFF), Ok(data_length)) = (blocks.checked_sub(1), length) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let mut command = NvmeCommand {
        opcode: if expected.is_some() { COMPARE } else { VERIFY },
        namespace,
        // The device reads the bytes of a Compare: the direction is in the opcode.
        address: expected.map_or(0, |bytes| bytes.as_ptr() as u64),
        data_length,
        words_10_15: [first as u32, (first >> 32) as u32, last, 0, 0, 0],
        timeout_ms: milliseconds(timeout),
        ..NvmeCommand::default()
    };
    Ok(call(device, &NVME_IOCTL_IO_CMD, &mut command)? as u16)
}

/// The answer of a SCSI device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScsiAnswer {
    /// The status of the device; 2 is CHECK CONDITION.
    pub status: u8,
    /// The status of the host adapter; 0 unless the command did not reach the device or was aborted.
    pub host: u16,
    /// The status of the driver.
    pub driver: u16,
    /// Sense data; zeroes after its end.
    pub sense: [u8; SENSE_BYTES],
}

/// The bytes of VERIFY(16). `check` is the field BYTCHK: 0 no data, 1 as many bytes as are verified, 3 one block.
#[must_use]
pub const fn verify_command(check: u8, first: u64, blocks: u32) -> [u8; 16] {
    let (at, count) = (first.to_be_bytes(), blocks.to_be_bytes());
    [
        VERIFY_16,
        (check & 3) << 1,
        at[0],
        at[1],
        at[2],
        at[3],
        at[4],
        at[5],
        at[6],
        at[7],
        count[0],
        count[1],
        count[2],
        count[3],
        0,
        0,
    ]
}

/// VERIFY(16) of a SCSI disk; `data` are the bytes that [`verify_command`] needs for `check`, empty for 0.
///
/// # Errors
/// The system error.
pub fn scsi_verify(
    device: BorrowedFd<'_>,
    check: u8,
    first: u64,
    blocks: u32,
    data: &[u8],
    timeout: Duration,
) -> io::Result<ScsiAnswer> {
    const NO_DATA: i32 = -1;
    const TO_DEVICE: i32 = -2;
    let mut command = verify_command(check, first, blocks);
    let mut sense = [0; SENSE_BYTES];
    let data_length = u32::try_from(data.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let mut header = ScsiHeader {
        interface: i32::from(b'S'),
        direction: if data.is_empty() { NO_DATA } else { TO_DEVICE },
        command_length: command.len() as u8,
        sense_length: SENSE_BYTES as u8,
        vectors: 0,
        data_length,
        // The device only reads them.
        data: data.as_ptr().cast_mut().cast(),
        command: command.as_mut_ptr(),
        sense: sense.as_mut_ptr(),
        timeout_ms: milliseconds(timeout),
        flags: 0,
        pack_id: 0,
        pointer: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        message_status: 0,
        sense_written: 0,
        host_status: 0,
        driver_status: 0,
        residue: 0,
        duration_ms: 0,
        info: 0,
    };
    call(device, &SG_IO, &mut header)?;
    Ok(ScsiAnswer { status: header.status, host: header.host_status, driver: header.driver_status, sense })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_structures_have_the_sizes_of_the_kernel() {
        assert_eq!(size_of::<NvmeCommand>(), 72);
        #[cfg(target_pointer_width = "64")]
        assert_eq!(size_of::<ScsiHeader>(), 88);
    }

    #[test]
    fn a_verify_command_has_its_numbers_in_network_order() {
        let command = verify_command(3, 0x0102_0304_0506_0708, 0x0A0B_0C0D);
        assert_eq!(command, [0x8F, 6, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 0, 0]);
    }

    #[test]
    fn a_file_refuses_device_commands() {
        let file = std::fs::File::open("/dev/null").expect("always there");
        let timeout = Duration::from_secs(1);
        assert!(nvme_namespace(file.as_fd()).is_err());
        assert!(nvme_identify(file.as_fd(), 0, 1, 0, timeout).is_err());
        assert!(nvme_check(file.as_fd(), 1, 0, 8, None, timeout).is_err());
        assert!(nvme_check(file.as_fd(), 1, 0, 65_537, None, timeout).is_err());
        assert!(scsi_verify(file.as_fd(), 0, 0, 8, &[], timeout).is_err());
    }
}
