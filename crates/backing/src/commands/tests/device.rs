//! A device that answers commands in place of the kernel and a disk, and notes them.

use super::UNRECOVERED;
use crate::commands::passthrough::Passthrough;
use crate::commands::{Blocks, Commands, Offload, Protocol};
use crate::job::Target;
use cbd_sys::passthrough::{IDENTIFY_BYTES, SENSE_BYTES, ScsiAnswer};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

/// A command that was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sent {
    /// `verify` or `compare`.
    pub name: &'static str,
    /// The field BYTCHK of a SCSI command.
    pub check: u8,
    pub first: u64,
    pub blocks: u32,
    /// Number of bytes that came with it.
    pub bytes: usize,
}

/// What is answered to a command.
#[derive(Clone, Copy)]
pub(crate) enum Reply {
    Nvme(u16),
    Scsi(ScsiAnswer),
    /// The system call fails with this number.
    Error(i32),
}

type Hook = Box<dyn Fn(&Sent) -> Option<Reply> + Send + Sync>;

/// A disk of zeroes with blocks of 512 bytes.
pub(crate) struct Device {
    /// NVMe, or SCSI.
    pub is_nvme: bool,
    /// The field ONCS.
    pub commands: u16,
    /// The limits VSL and MDTS, as powers of two in pages; without VSL its structure is refused.
    pub verify_limit: Option<u8>,
    pub transfer_limit: u8,
    /// Bytes of metadata of a block.
    pub metadata: u8,
    /// Bytes that are not zero: offset and value.
    pub content: Vec<(u64, u8)>,
    /// Bytes whose block cannot be read.
    pub unreadable: Vec<u64>,
    /// Called for each command; its reply, if there is one, is the answer.
    pub hook: Hook,
    /// The commands that were sent.
    pub log: Mutex<Vec<Sent>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Device")
    }
}

impl Device {
    /// An NVMe controller with Verify and Compare, without limits.
    pub fn nvme() -> Self {
        Self {
            is_nvme: true,
            commands: 1 << 7 | 1,
            verify_limit: Some(0),
            transfer_limit: 0,
            metadata: 0,
            content: Vec::new(),
            unreadable: Vec::new(),
            hook: Box::new(|_| None),
            log: Mutex::default(),
        }
    }

    /// A SCSI disk.
    pub fn scsi() -> Self {
        Self { is_nvme: false, ..Self::nvme() }
    }

    /// A device that reports success, whatever it is asked.
    pub fn that_says_yes(self) -> Self {
        let good = ScsiAnswer { status: 0, host: 0, driver: 0, sense: [0; SENSE_BYTES] };
        let reply = if self.is_nvme { Reply::Nvme(0) } else { Reply::Scsi(good) };
        Self { hook: Box::new(move |_| Some(reply)), ..self }
    }

    /// The commands of a target on this device, whose partition begins at byte `start`.
    pub fn commands(self: &Arc<Self>, target: &Target, offload: Offload, start: u64) -> Commands {
        let protocol = match self.is_nvme {
            true => Protocol::Nvme { device: None, namespace: 0 },
            false => Protocol::Scsi,
        };
        let blocks = Blocks { start, block: 512, data_limit: 1 << 20 };
        Commands::over(Arc::clone(self) as Arc<dyn Passthrough>, &target.file, protocol, blocks, offload)
    }

    /// The commands since the last call.
    pub fn take(&self) -> Vec<Sent> {
        std::mem::take(&mut self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, check: u8, first: u64, blocks: u32, data: &[u8]) -> Option<Reply> {
        let name = if check == 0 { "verify" } else { "compare" };
        let sent = Sent { name, check, first, blocks, bytes: data.len() };
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(sent);
        (self.hook)(&sent)
    }

    /// Whether a block of the range cannot be read.
    fn is_unreadable(&self, first: u64, blocks: u32) -> bool {
        self.unreadable.iter().any(|at| (first..first + u64::from(blocks)).contains(&(at / 512)))
    }

    /// Whether the range has these bytes, which are repeated.
    fn is_equal(&self, first: u64, blocks: u32, expected: &[u8]) -> bool {
        let mut bytes = vec![0; blocks as usize * 512];
        for (at, value) in &self.content {
            let inside = at.checked_sub(first * 512).and_then(|at| bytes.get_mut(at as usize));
            inside.into_iter().for_each(|byte| *byte = *value);
        }
        bytes.chunks(expected.len()).all(|chunk| chunk == expected)
    }
}

impl Passthrough for Device {
    fn nvme_namespace(&self, _: BorrowedFd<'_>) -> io::Result<u32> {
        Ok(7)
    }

    fn nvme_identify(
        &self,
        _: BorrowedFd<'_>,
        namespace: u32,
        structure: u8,
    ) -> io::Result<Box<[u8; IDENTIFY_BYTES]>> {
        let mut data = Box::new([0; IDENTIFY_BYTES]);
        match (namespace, structure, self.verify_limit) {
            (7, 0, _) => data[128] = self.metadata,
            (0, 1, _) => {
                data[77] = self.transfer_limit;
                data[520..522].copy_from_slice(&self.commands.to_le_bytes());
            }
            (0, 6, Some(limit)) => data[0] = limit,
            _ => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(data)
    }

    fn nvme_check(
        &self,
        _: BorrowedFd<'_>,
        namespace: u32,
        first: u64,
        blocks: u32,
        expected: Option<&[u8]>,
    ) -> io::Result<u16> {
        assert_eq!(namespace, 7);
        match self.note(u8::from(expected.is_some()), first, blocks, expected.unwrap_or_default()) {
            Some(Reply::Error(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(Reply::Nvme(status)) => Ok(status),
            Some(Reply::Scsi(answer)) => panic!("{answer:?} is no answer of an NVMe device"),
            None if self.is_unreadable(first, blocks) => Ok(UNRECOVERED),
            None if expected.is_some_and(|bytes| !self.is_equal(first, blocks, bytes)) => Ok(0x285),
            None => Ok(0),
        }
    }

    fn scsi_verify(
        &self,
        _: BorrowedFd<'_>,
        check: u8,
        first: u64,
        blocks: u32,
        data: &[u8],
    ) -> io::Result<ScsiAnswer> {
        let key = match self.note(check, first, blocks, data) {
            Some(Reply::Error(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(Reply::Scsi(answer)) => return Ok(answer),
            Some(Reply::Nvme(status)) => panic!("{status:#x} is no answer of a SCSI disk"),
            None if self.is_unreadable(first, blocks) => 3,
            None if check != 0 && !self.is_equal(first, blocks, data) => 0xE,
            None => 0,
        };
        let mut answer = ScsiAnswer { status: 0, host: 0, driver: 0, sense: [0; SENSE_BYTES] };
        if key != 0 {
            (answer.status, answer.sense[0], answer.sense[1]) = (2, 0x72, key);
        }
        Ok(answer)
    }
}
