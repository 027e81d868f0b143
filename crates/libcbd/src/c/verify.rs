//! Verification in C: a range of a device, and the requests of a queue.
//!
//! Invariants: a result has the number of all findings, also of those that did not fit into the caller's array.

use super::border::{call, check_flags, checked_length, give, invalid, shared, wanted};
use super::device::CbdDevice;
use crate::{ByteRange, Finding, Flaw, Result, Verified, Verify, VerifyLevel};
use std::ffi::c_int;
use std::ops::ControlFlow;

/// The newest data: what a read would return can be read, and has its checksum if the cache holds it.
pub const CBD_VERIFY_NEWEST: u32 = 0;
/// Each copy: also the one that the disk has of clean blocks can be read.
pub const CBD_VERIFY_ALL: u32 = 1;
/// Each copy, and whether the copies of clean blocks have the same content.
pub const CBD_VERIFY_AGREE: u32 = 2;
/// A copy on the disk that is lost is repaired from the one in the cache, by writeback. Copies in the cache are always repaired.
pub const CBD_VERIFY_REPAIR: u32 = 1;

/// The disk alone has the range, and cannot read it.
pub const CBD_FLAW_UNREADABLE: u32 = 1;
/// The copy of clean data in the cache is damaged; the disk has the data.
pub const CBD_FLAW_CACHE_DAMAGED: u32 = 2;
/// Dirty data, of which no other copy exists, is damaged.
pub const CBD_FLAW_DIRTY_DAMAGED: u32 = 3;
/// Clean data is damaged in the cache, and what the disk has is unreadable or different, too.
pub const CBD_FLAW_BOTH_DAMAGED: u32 = 4;
/// The disk cannot read clean data that the cache holds undamaged.
pub const CBD_FLAW_BACKING_UNREADABLE: u32 = 5;
/// The disk has other data than was written; the cache holds it undamaged.
pub const CBD_FLAW_BACKING_DIFFERS: u32 = 6;
/// The disk has other data than it had when the cache read it: another program has written to it.
pub const CBD_FLAW_BACKING_CHANGED: u32 = 7;
/// The range was quarantined before.
pub const CBD_FLAW_QUARANTINED: u32 = 8;
/// One of the two copies of a record was damaged. The range is that of its data.
pub const CBD_FLAW_RECORD_COPY: u32 = 9;

/// The copy in the cache is whole again, or writeback repairs the disk.
pub const CBD_FINDING_REPAIRED: u32 = 1;
/// Reads of the range fail until it is overwritten.
pub const CBD_FINDING_LOST: u32 = 2;

/// A range with a flaw.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdFinding {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// `CBD_FLAW_..`. Later versions may have more.
    pub flaw: u32,
    /// `CBD_FINDING_..`.
    pub flags: u32,
}

/// The result of a verification.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CbdVerified {
    /// Bytes whose copy in the cache was checked.
    pub cache_bytes: u64,
    /// Bytes that the disk read. What it was asked for twice counts twice.
    pub backing_bytes: u64,
    /// Bytes that were written during the verification, so that nothing is said about their former copies.
    pub changed_bytes: u64,
    /// Number of findings, also of those for which there was no room.
    pub findings: u64,
    /// Number of findings in ranges whose reads fail.
    pub lost: u64,
    /// 0.
    pub reserved: [u64; 3],
}

/// What is to be verified.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdVerifyRequest {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// `CBD_VERIFY_NEWEST`, `CBD_VERIFY_ALL` or `CBD_VERIFY_AGREE`.
    pub level: u32,
    /// 0 or `CBD_VERIFY_REPAIR`.
    pub flags: u32,
    /// Receives the first findings, in the order of the device. NULL if `capacity` is 0.
    pub findings: *mut CbdFinding,
    /// Number of findings for which there is room.
    pub capacity: usize,
    /// 0.
    pub reserved: [u64; 4],
}

/// Where the caller wants the result.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    result: *mut CbdVerified,
    findings: *mut CbdFinding,
    capacity: usize,
}

/// The request, and where its result goes.
///
/// # Errors
/// For null pointers, unknown values, and an array that is larger than any memory.
///
/// # Safety
/// `request` can be read, or is null.
pub(super) unsafe fn parse(
    request: *const CbdVerifyRequest,
    result: *mut CbdVerified,
) -> Result<(Verify, Destination)> {
    // SAFETY: the caller guarantees it.
    let request = unsafe { shared(request, "request") }?;
    let CbdVerifyRequest { offset, length, level, flags, findings, capacity, ref reserved } = *request;
    wanted(result, "result")?;
    checked_length(findings, capacity.saturating_mul(size_of::<CbdFinding>()), "findings")?;
    check_flags(flags, CBD_VERIFY_REPAIR, reserved)?;
    let level = match level {
        CBD_VERIFY_NEWEST => VerifyLevel::Newest,
        CBD_VERIFY_ALL => VerifyLevel::All,
        CBD_VERIFY_AGREE => VerifyLevel::Agree,
        _ => return Err(invalid(format!("the level is one of CBD_VERIFY_.., not {level}"))),
    };
    let past = || invalid(format!("{length} bytes at {offset} reach past the end of any device"));
    let range = ByteRange { start: offset, end: offset.checked_add(length).ok_or_else(past)? };
    let verify = Verify { range, level, repair: flags & CBD_VERIFY_REPAIR != 0 };
    Ok((verify, Destination { result, findings, capacity }))
}

impl Destination {
    /// Adds findings behind those that `sum` counts, and to `sum`.
    ///
    /// # Safety
    /// `capacity` elements at `findings` can be written.
    unsafe fn add(&self, sum: &mut CbdVerified, verified: &Verified) -> Result<()> {
        sum.cache_bytes += verified.cache_bytes;
        sum.backing_bytes += verified.backing_bytes;
        sum.changed_bytes += verified.changed_bytes;
        for finding in &verified.findings {
            if let Some(place) = usize::try_from(sum.findings).ok().filter(|place| *place < self.capacity) {
                // SAFETY: `place` is below `capacity`, and the caller guarantees the rest.
                unsafe { give(self.findings.add(place), "findings", in_c(finding)) }?;
            }
            sum.findings += 1;
            sum.lost += u64::from(finding.flaw.is_lost());
        }
        Ok(())
    }

    /// Writes the result of a request.
    ///
    /// # Safety
    /// `capacity` elements at `findings`, and `result`, can be written.
    pub(super) unsafe fn give(&self, verified: &Verified) -> Result<()> {
        let mut sum = CbdVerified::default();
        // SAFETY: the caller guarantees it.
        unsafe { self.add(&mut sum, verified) }?;
        // SAFETY: the caller guarantees it.
        unsafe { give(self.result, "result", sum) }
    }
}

const fn in_c(finding: &Finding) -> CbdFinding {
    let flaw = match finding.flaw {
        Flaw::Unreadable => CBD_FLAW_UNREADABLE,
        Flaw::CacheDamaged => CBD_FLAW_CACHE_DAMAGED,
        Flaw::DirtyDamaged => CBD_FLAW_DIRTY_DAMAGED,
        Flaw::BothDamaged => CBD_FLAW_BOTH_DAMAGED,
        Flaw::BackingUnreadable => CBD_FLAW_BACKING_UNREADABLE,
        Flaw::BackingDiffers => CBD_FLAW_BACKING_DIFFERS,
        Flaw::BackingChanged => CBD_FLAW_BACKING_CHANGED,
        Flaw::Quarantined => CBD_FLAW_QUARANTINED,
        Flaw::RecordCopy => CBD_FLAW_RECORD_COPY,
    };
    let repaired = if finding.repaired { CBD_FINDING_REPAIRED } else { 0 };
    let lost = if finding.flaw.is_lost() { CBD_FINDING_LOST } else { 0 };
    let length = finding.range.end - finding.range.start;
    CbdFinding { offset: finding.range.start, length, flaw, flags: repaired | lost }
}

/// Verifies a range and waits for it, in whole sectors: the copies in the cache by their checksums, the rest by reading the disk.
/// The result has the number of all findings; the first of them are in `request->findings`. What is wrong with the data is no
/// error. After a failure the result is that of the part before it.
///
/// # Safety
/// `device` is open or NULL; `request` can be read, and `result` written, or they are NULL; `request->capacity` elements at
/// `request->findings` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_verify(
    device: *const CbdDevice,
    request: *const CbdVerifyRequest,
    result: *mut CbdVerified,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        // SAFETY: the caller guarantees it.
        let (verify, destination) = unsafe { parse(request, result) }?;
        let mut sum = CbdVerified::default();
        let verified = device.0.verify(verify, &mut |_, part| {
            // SAFETY: the caller guarantees it.
            match unsafe { destination.add(&mut sum, part) } {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => ControlFlow::Break(error),
            }
        });
        // SAFETY: the caller guarantees it.
        unsafe { give(result, "result", sum) }?;
        verified.map(|()| 0)
    })
}
