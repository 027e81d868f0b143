//! Verification from Rust and from C: damaged memory, a disk that was changed, and ranges that are refused.
#![allow(unsafe_code, reason = "the functions of C take pointers")]

mod support;

use cbd::c::*;
use cbd::{
    ByteRange, Completion, DRAIN_TIMEOUT, Device, DeviceOptions, Error, ErrorKind, Finding, Flaw,
    QUEUED_VERIFY_MAX, Verified, Verify, VerifyLevel,
};
use std::ffi::{CStr, CString};
use std::mem::zeroed;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::{null, null_mut};
use std::time::Duration;
use support::{BLOCK, MIB, Place, pattern};

const EINVAL: i32 = -22;
const ALL: ByteRange = ByteRange { start: 0, end: 16 * MIB };

fn all(level: VerifyLevel, repair: bool) -> Verify {
    Verify { range: ALL, level, repair }
}

/// The bytes that were verified, and the findings.
fn verify(device: &Device, verify: Verify) -> (u64, Vec<Finding>) {
    let (mut at, mut bytes, mut findings) = (verify.range.start, 0, Vec::new());
    device
        .verify(verify, &mut |part, verified| {
            assert_eq!(part.start, at, "in order");
            at = part.end;
            bytes += verified.cache_bytes + verified.backing_bytes;
            findings.extend_from_slice(&verified.findings);
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(at, verify.range.end);
    (bytes, findings)
}

fn found(flaw: Flaw, block: u64, repaired: bool) -> Finding {
    Finding { range: ByteRange::at(block * BLOCK as u64, BLOCK as u64), flaw, repaired }
}

/// Flips a bit of the block in the only copy that the region has.
fn damage(region: &Path, block: &[u8]) {
    let bytes = std::fs::read(region).unwrap();
    let at = bytes.windows(BLOCK).step_by(64).position(|found| found == block).unwrap() * 64 + 100;
    let file = std::fs::OpenOptions::new().write(true).open(region).unwrap();
    file.write_at(&[bytes[at] ^ 1], at as u64).unwrap();
}

/// The disk has other data than was written in the whole block 3, which is clean.
fn changed_disk(place: &Place, device: &Device) {
    device.write_at(&pattern(3, 1), 3 * BLOCK as u64).unwrap();
    device.drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Continue(())).unwrap();
    let disk = std::fs::OpenOptions::new().write(true).open(place.disk()).unwrap();
    disk.write_at(&vec![9; BLOCK], 3 * BLOCK as u64).unwrap();
}

#[test]
fn a_changed_disk_is_found_by_the_level_that_compares_and_repaired_on_request() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    changed_disk(&place, &device);
    assert_eq!(verify(&device, all(VerifyLevel::Newest, false)), (16 * MIB, vec![]));
    let block = BLOCK as u64;
    let (bytes, findings) = verify(&device, all(VerifyLevel::Agree, false));
    // What differs is read twice.
    assert_eq!((bytes, findings), (16 * MIB + 2 * block, vec![found(Flaw::BackingDiffers, 3, false)]));
    let (_, findings) = verify(&device, all(VerifyLevel::Agree, true));
    assert_eq!(findings, [found(Flaw::BackingDiffers, 3, true)]);
    device.drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(verify(&device, all(VerifyLevel::Agree, false)).1, []);
    assert_eq!(place.on_disk(3), pattern(3, 1));
}

#[test]
fn clean_data_that_is_damaged_in_the_region_is_found_and_repaired() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    device.write_at(&pattern(5, 1), 5 * BLOCK as u64).unwrap();
    device.drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Continue(())).unwrap();
    damage(&place.region_path(), &pattern(5, 1));
    let (_, findings) = verify(&device, all(VerifyLevel::Newest, false));
    assert_eq!(findings, [found(Flaw::CacheDamaged, 5, true)]);
    assert_eq!(verify(&device, all(VerifyLevel::Newest, false)).1, []);
}

#[test]
fn ranges_that_the_device_does_not_have_are_refused_and_the_caller_may_end_a_verification() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    let refused = |start, end| {
        let range = ByteRange { start, end };
        let verify = Verify { range, level: VerifyLevel::Newest, repair: false };
        device.verify(verify, &mut |_, _| panic!("nothing is verified")).unwrap_err().kind()
    };
    assert_eq!(refused(0, 16 * MIB + 512), ErrorKind::OutOfRange);
    assert_eq!(refused(17 * MIB, 18 * MIB), ErrorKind::OutOfRange);
    assert_eq!(refused(100, 612), ErrorKind::InvalidArgument);
    let mut parts = 0;
    let ended = device.verify(all(VerifyLevel::Newest, false), &mut |_, _| {
        parts += 1;
        ControlFlow::Break(Error::new(ErrorKind::Busy, "enough"))
    });
    assert_eq!((ended.unwrap_err().kind(), parts), (ErrorKind::Busy, 1));
    assert_eq!(verify(&device, all(VerifyLevel::Newest, false)).0, 16 * MIB, "the device is usable");
    assert_eq!(device.queues_open(), 0);
    device.close().unwrap();
}

#[test]
fn a_disk_without_a_cache_is_verified() {
    let place = Place::new();
    let region = place.format();
    let options = DeviceOptions { cache_size: Some(0), ..DeviceOptions::default() };
    let device = region.attach(place.disk(), &options).unwrap();
    assert_eq!(verify(&device, all(VerifyLevel::Agree, false)), (16 * MIB, vec![]));
}

#[test]
fn a_queue_verifies_beside_other_requests_and_refuses_long_ranges() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    changed_disk(&place, &device);
    let mut queue = device.queue().unwrap();
    let request =
        |length| Verify { range: ByteRange::at(0, length), level: VerifyLevel::Agree, repair: false };
    let error = queue.verify(1, request(QUEUED_VERIFY_MAX + 512)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    queue.verify(7, request(QUEUED_VERIFY_MAX)).unwrap();
    queue.verify(8, Verify { range: ByteRange::at(17 * MIB, 512), ..request(512) }).unwrap();
    queue.write_at(9, &pattern(8, 1), 5 * MIB, false).unwrap();
    assert_eq!(queue.in_flight(), 3);
    let (mut done, mut verified): (Vec<Completion>, Vec<_>) = (Vec::new(), Vec::new());
    while queue.in_flight() > 0 {
        queue.wait(&mut done, 1, Some(Duration::from_secs(30))).unwrap();
        verified.extend(queue.take_verified());
    }
    assert_eq!((done.len(), done[0].id, done[0].result.is_ok()), (1, 9, true));
    verified.sort_by_key(|(id, _)| *id);
    let (first, second) = (&verified[0], &verified[1]);
    let Verified { findings, backing_bytes, .. } = first.1.as_ref().unwrap();
    assert_eq!((first.0, &findings[..]), (7, &[found(Flaw::BackingDiffers, 3, false)][..]));
    assert_eq!(*backing_bytes, QUEUED_VERIFY_MAX + BLOCK as u64, "what differs is read twice");
    assert_eq!((second.0, second.1.as_ref().unwrap_err().kind()), (8, ErrorKind::OutOfRange));
    // A queue that is closed cancels what it verifies.
    queue.verify(1, request(QUEUED_VERIFY_MAX)).unwrap();
    drop(queue);
    device.close().unwrap();
}

fn last_error() -> String {
    // SAFETY: it is a C string, and lives until the next call of this thread.
    unsafe { CStr::from_ptr(cbd_last_error()) }.to_str().unwrap().to_owned()
}

/// The disk of `place` behind a cache; block 3 is clean and differs on the disk.
fn opened_in_c(place: &Place) -> (*mut CbdRegion, *mut CbdDevice) {
    {
        let (_region, device) = place.cached(8 * MIB);
        changed_disk(place, &device);
        device.close().unwrap();
    }
    let (mut region, mut device) = (null_mut(), null_mut());
    let path = |path: &Path| CString::new(path.to_str().unwrap()).unwrap();
    let (at, disk) = (path(&place.region_path()), path(&place.disk()));
    // SAFETY: all pointers lead to valid objects.
    unsafe {
        assert_eq!(cbd_region_open(at.as_ptr(), null(), &raw mut region), 0, "{}", last_error());
        let attached = cbd_device_attach(region, disk.as_ptr(), null(), &raw mut device);
        assert_eq!(attached, 0, "{}", last_error());
    }
    (region, device)
}

#[test]
fn c_gets_the_counts_and_as_many_findings_as_fit() {
    let place = Place::new();
    let (region, device) = opened_in_c(&place);
    // SAFETY: the handles are open; structures of numbers and null pointers may be zeroes; the results live until they are written.
    unsafe {
        let mut findings: [CbdFinding; 2] = zeroed();
        let mut request: CbdVerifyRequest = zeroed();
        let mut result = CbdVerified { findings: 99, ..CbdVerified::default() };
        (request.length, request.level) = (16 * MIB, CBD_VERIFY_AGREE);
        let (block, differs) = (BLOCK as u64, CBD_FLAW_BACKING_DIFFERS);
        assert_eq!(cbd_verify(device, &raw const request, &raw mut result), 0, "{}", last_error());
        assert_eq!((result.findings, result.lost, result.changed_bytes), (1, 0, 0), "there is room for none");
        assert_eq!((result.cache_bytes, result.backing_bytes), (block, 16 * MIB + block));
        (request.findings, request.capacity) = (findings.as_mut_ptr(), findings.len());
        assert_eq!(cbd_verify(device, &raw const request, &raw mut result), 0, "{}", last_error());
        let first = findings[0];
        assert_eq!((first.offset, first.length, first.flaw, first.flags), (3 * block, block, differs, 0));
        assert_eq!(findings[1].length, 0, "only what was found is written");

        let mut queue = null_mut();
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        (request.length, request.flags) = (4 * MIB, CBD_VERIFY_REPAIR);
        (findings, result) = (zeroed(), zeroed());
        assert_eq!(cbd_queue_verify(queue, &raw const request, &raw mut result, 55), 0, "{}", last_error());
        assert_eq!((cbd_queue_in_flight(queue), result.findings), (1, 0));
        let mut done: [CbdCompletion; 2] = zeroed();
        assert_eq!(cbd_queue_wait(queue, done.as_mut_ptr(), 2, 1, 30_000), 1, "{}", last_error());
        assert_eq!((done[0].user_data, done[0].result), (55, 0));
        assert_eq!((result.findings, findings[0].flags), (1, CBD_FINDING_REPAIRED));
        assert_eq!(cbd_queue_in_flight(queue), 0);
        request.offset = 16 * MIB;
        assert_eq!(cbd_queue_verify(queue, &raw const request, &raw mut result, 56), 0);
        assert_eq!(cbd_queue_wait(queue, done.as_mut_ptr(), 2, 1, 30_000), 1);
        assert_eq!((done[0].user_data, done[0].result), (56, EINVAL));
        assert_eq!((cbd_queue_close(queue), cbd_device_close(device), cbd_region_close(region)), (0, 0, 0));
    }
}

#[test]
fn wrong_arguments_of_c_are_refused_with_a_text() {
    let place = Place::new();
    let (region, device) = opened_in_c(&place);
    let refused = |result: i32, words: &str| {
        assert_eq!(result, EINVAL, "{words}");
        assert!(last_error().contains(words), "{}", last_error());
    };
    // SAFETY: the handles are open; structures of numbers and null pointers may be zeroes.
    unsafe {
        let mut queue = null_mut();
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        let mut result: CbdVerified = zeroed();
        let good: CbdVerifyRequest = CbdVerifyRequest { length: 4096, ..zeroed() };
        refused(cbd_verify(null(), &raw const good, &raw mut result), "device is a null pointer");
        refused(cbd_verify(device, null(), &raw mut result), "request is a null pointer");
        refused(cbd_verify(device, &raw const good, null_mut()), "result is a null pointer");
        refused(cbd_queue_verify(queue, null(), &raw mut result, 0), "request is a null pointer");
        refused(cbd_queue_verify(null(), &raw const good, &raw mut result, 0), "queue is a null pointer");
        for (wrong, words) in [
            (CbdVerifyRequest { level: 3, ..good }, "CBD_VERIFY_.., not 3"),
            (CbdVerifyRequest { flags: 2, ..good }, "bits that mean nothing"),
            (CbdVerifyRequest { reserved: [0, 0, 0, 1], ..good }, "reserved field"),
            (CbdVerifyRequest { capacity: 1, ..good }, "findings is a null pointer"),
            (CbdVerifyRequest { offset: u64::MAX, ..good }, "past the end"),
        ] {
            refused(cbd_verify(device, &raw const wrong, &raw mut result), words);
            refused(cbd_queue_verify(queue, &raw const wrong, &raw mut result, 0), words);
        }
        let long = CbdVerifyRequest { length: 4 * MIB + 512, ..good };
        refused(cbd_queue_verify(queue, &raw const long, &raw mut result, 0), "split the range");
        let odd = CbdVerifyRequest { length: 100, ..good };
        refused(cbd_verify(device, &raw const odd, &raw mut result), "whole sectors");
        assert_eq!(cbd_queue_in_flight(queue), 0);
        assert_eq!(cbd_verify(device, &raw const good, &raw mut result), 0, "{}", last_error());
        assert_eq!((cbd_queue_close(queue), cbd_device_close(device), cbd_region_close(region)), (0, 0, 0));
    }
}
