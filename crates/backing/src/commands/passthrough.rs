//! What passes commands to a device: the kernel.
//!
//! Invariants: a call blocks until the device has answered or [`TIMEOUT`] has passed.
//!
//! Elsewhere: which commands are passed, and what an answer means (`commands`). Tests put a device of their own here.

use cbd_sys::passthrough::{self, IDENTIFY_BYTES, ScsiAnswer};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long a command may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Passes commands to the device of an open file; see [`cbd_sys::passthrough`] for each of them.
pub(crate) trait Passthrough: fmt::Debug + Send + Sync {
    /// The identifier of an NVMe namespace.
    fn nvme_namespace(&self, device: BorrowedFd<'_>) -> io::Result<u32>;

    /// The data structure `structure` of Identify, of a namespace or of the controller.
    fn nvme_identify(
        &self,
        device: BorrowedFd<'_>,
        namespace: u32,
        structure: u8,
    ) -> io::Result<Box<[u8; IDENTIFY_BYTES]>>;

    /// Verify, or Compare with `expected`; the status of the command.
    fn nvme_check(
        &self,
        device: BorrowedFd<'_>,
        namespace: u32,
        first: u64,
        blocks: u32,
        expected: Option<&[u8]>,
    ) -> io::Result<u16>;

    /// VERIFY(16) with `check` in its field BYTCHK.
    fn scsi_verify(
        &self,
        device: BorrowedFd<'_>,
        check: u8,
        first: u64,
        blocks: u32,
        data: &[u8],
    ) -> io::Result<ScsiAnswer>;
}

/// The kernel, which passes commands unchanged.
#[derive(Debug)]
pub(crate) struct Kernel;

impl Passthrough for Kernel {
    fn nvme_namespace(&self, device: BorrowedFd<'_>) -> io::Result<u32> {
        passthrough::nvme_namespace(device)
    }

    fn nvme_identify(
        &self,
        device: BorrowedFd<'_>,
        namespace: u32,
        structure: u8,
    ) -> io::Result<Box<[u8; IDENTIFY_BYTES]>> {
        const COMMAND_SET_NVM: u8 = 0;
        passthrough::nvme_identify(device, namespace, structure, COMMAND_SET_NVM, TIMEOUT)
    }

    fn nvme_check(
        &self,
        device: BorrowedFd<'_>,
        namespace: u32,
        first: u64,
        blocks: u32,
        expected: Option<&[u8]>,
    ) -> io::Result<u16> {
        passthrough::nvme_check(device, namespace, first, blocks, expected, TIMEOUT)
    }

    fn scsi_verify(
        &self,
        device: BorrowedFd<'_>,
        check: u8,
        first: u64,
        blocks: u32,
        data: &[u8],
    ) -> io::Result<ScsiAnswer> {
        passthrough::scsi_verify(device, check, first, blocks, data, TIMEOUT)
    }
}
