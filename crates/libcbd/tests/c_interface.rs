//! The C interface, called as C calls it: every misuse is an error with a text, and changes nothing.
#![allow(unsafe_code, reason = "the functions take pointers, as C has them")]

mod support;

use cbd::c::*;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::zeroed;
use std::path::Path;
use std::ptr::{null, null_mut};
use support::{BLOCK, MIB, Place, pattern};

const EBUSY: c_int = -16;
const EINVAL: c_int = -22;
const ENOENT: c_int = -2;
const EEXIST: c_int = -17;

fn last_error() -> String {
    // SAFETY: it is a C string, and lives until the next call of this thread.
    unsafe { CStr::from_ptr(cbd_last_error()) }.to_str().unwrap().to_owned()
}

fn text(path: &Path) -> CString {
    CString::new(path.to_str().unwrap()).unwrap()
}

/// A region with the disk behind a cache of 8 MiB.
fn opened(place: &Place) -> (*mut CbdRegion, *mut CbdDevice) {
    // SAFETY: structures of numbers and null pointers may be zeroes; all pointers lead to valid objects.
    unsafe {
        let mut options: CbdRegionOptions = zeroed();
        (options.flags, options.size, options.segment_size) = (CBD_REGION_FORMAT, 32 * MIB, 64 << 10);
        let (mut region, mut device) = (null_mut(), null_mut());
        let path = text(&place.region_path());
        assert_eq!(
            cbd_region_open(path.as_ptr(), &raw const options, &raw mut region),
            0,
            "{}",
            last_error()
        );
        let mut options: CbdDeviceOptions = zeroed();
        options.cache_size = 8 * MIB;
        let path = text(&place.disk());
        let attached = cbd_device_attach(region, path.as_ptr(), &raw const options, &raw mut device);
        assert_eq!(attached, 0, "{}", last_error());
        (region, device)
    }
}

#[track_caller]
fn refused(result: c_int, number: c_int, words: &str) {
    assert_eq!(result, number, "{}", last_error());
    assert!(last_error().contains(words), "{}", last_error());
}

#[test]
fn null_pointers_are_errors_except_for_a_close() {
    let place = Place::new();
    let (region, device) = opened(&place);
    let mut queue = null_mut();
    // SAFETY: the handles are open, and everything else is null, which this test checks.
    unsafe {
        let path = text(&place.disk());
        let name = path.as_ptr();
        let mut none: *mut CbdDevice = null_mut();
        refused(cbd_region_open(null(), null(), &mut null_mut()), EINVAL, "path is a null pointer");
        refused(cbd_region_open(name, null(), null_mut()), EINVAL, "region is a null pointer");
        refused(cbd_region_get_info(region, null_mut()), EINVAL, "info is a null pointer");
        refused(cbd_region_get_info(null(), &mut zeroed()), EINVAL, "region is a null pointer");
        refused(cbd_region_warnings(region, null_mut(), 10), EINVAL, "buffer is a null pointer");
        refused(cbd_region_backends(region, null_mut(), 1), EINVAL, "backends is a null pointer");
        refused(cbd_device_attach(null(), name, null(), &raw mut none), EINVAL, "region is a null pointer");
        refused(cbd_device_attach(region, null(), null(), &raw mut none), EINVAL, "path is a null pointer");
        refused(cbd_device_attach(region, name, null(), null_mut()), EINVAL, "device is a null pointer");
        refused(cbd_device_open(region, 0, null_mut()), EINVAL, "device is a null pointer");
        refused(cbd_device_geometry(device, null_mut()), EINVAL, "geometry is a null pointer");
        refused(cbd_device_grow(device, null_mut()), EINVAL, "size is a null pointer");
        refused(cbd_device_grow(null(), &mut 0), EINVAL, "device is a null pointer");
        refused(cbd_device_settings(device, null_mut()), EINVAL, "settings is a null pointer");
        refused(cbd_device_set_settings(device, null()), EINVAL, "settings is a null pointer");
        refused(cbd_device_status(device, null_mut()), EINVAL, "status is a null pointer");
        refused(cbd_device_status(null(), &mut zeroed()), EINVAL, "device is a null pointer");
        refused(cbd_device_detach(null_mut(), 0), EINVAL, "device is a null pointer");
        refused(cbd_device_detach(&raw mut none, 0), EINVAL, "device is a null pointer");
        refused(cbd_device_drain(null(), 0), EINVAL, "device is a null pointer");
        refused(cbd_read(device, null_mut(), 512, 0), EINVAL, "buffer is a null pointer");
        refused(cbd_read(null(), null_mut(), 0, 0), EINVAL, "device is a null pointer");
        refused(cbd_write(device, null(), 512, 0, 0), EINVAL, "data is a null pointer");
        refused(cbd_flush(null()), EINVAL, "device is a null pointer");
        refused(cbd_discard(null(), 0, 0), EINVAL, "device is a null pointer");
        refused(cbd_write_zeroes(null(), 0, 0, 0), EINVAL, "device is a null pointer");
        refused(cbd_queue_open(device, null_mut()), EINVAL, "queue is a null pointer");
        refused(cbd_queue_open(null(), &raw mut queue), EINVAL, "device is a null pointer");
        refused(cbd_queue_poll(null(), null_mut(), 0), EINVAL, "queue is a null pointer");
        refused(cbd_queue_write(null(), null(), 0, 0, 0, 0), EINVAL, "queue is a null pointer");
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        refused(cbd_queue_poll(queue, null_mut(), 4), EINVAL, "completions is a null pointer");
        refused(cbd_queue_read(queue, null_mut(), 512, 0, 0), EINVAL, "buffer is a null pointer");
        assert_eq!(cbd_queue_in_flight(queue), 0, "a refused request is not in flight");
        assert_eq!(cbd_queue_close(queue), 0);
        assert_eq!(cbd_queue_close(null_mut()), 0);
        assert_eq!(cbd_device_close(null_mut()), 0);
        assert_eq!(cbd_region_close(null_mut()), 0);
        assert_eq!(cbd_read(device, null_mut(), 0, 0), 0, "no bytes need no memory");
        assert_eq!((cbd_device_close(device), cbd_region_close(region)), (0, 0));
    }
}

#[test]
fn unknown_flags_and_values_are_refused() {
    let place = Place::new();
    let (region, device) = opened(&place);
    // SAFETY: the handles are open; structures of numbers and null pointers may be zeroes.
    unsafe {
        let mut none: *mut CbdDevice = null_mut();
        let path = text(&place.disk());
        let mut attach = |change: &dyn Fn(&mut CbdDeviceOptions)| {
            let mut options: CbdDeviceOptions = zeroed();
            change(&mut options);
            cbd_device_attach(region, path.as_ptr(), &raw const options, &raw mut none)
        };
        refused(attach(&|options| options.flags = 64), EINVAL, "bits that mean nothing: 0x40");
        refused(attach(&|options| options.reserved[5] = 1), EINVAL, "a reserved field is not zero");
        refused(attach(&|options| options.consistency = 9), EINVAL, "CBD_CONSISTENCY_.., not 9");
        let both = attach(&|options| (options.flags, options.cache_size) = (CBD_DEVICE_NO_CACHE, 1));
        refused(both, EINVAL, "does not go with CBD_DEVICE_NO_CACHE");
        let mut options: CbdRegionOptions = zeroed();
        options.flags = CBD_REGION_FORCE;
        let (path, mut other) = (text(&place.region_path()), null_mut());
        let forced = cbd_region_open(path.as_ptr(), &raw const options, &raw mut other);
        refused(forced, EINVAL, "with CBD_REGION_FORMAT only");
        let no_text = c"\xff\xfe";
        refused(cbd_region_open(no_text.as_ptr(), null(), &raw mut other), EINVAL, "path is not UTF-8");
        let data = pattern(0, 1);
        let data: *const c_void = data.as_ptr().cast();
        refused(cbd_write(device, data, BLOCK, 0, 2), EINVAL, "bits that mean nothing");
        refused(cbd_write(device, data, 100, 0, 0), EINVAL, "not whole sectors");
        refused(cbd_write(device, data, 512, 16 * MIB, 0), EINVAL, "past the end");
        refused(cbd_write(device, data, usize::MAX, 0, 0), EINVAL, "larger than any memory");
        refused(cbd_device_open(region, 7, &raw mut none), ENOENT, "7");
        let mut settings: CbdSettings = zeroed();
        assert_eq!(cbd_device_settings(device, &raw mut settings), 0);
        let before = settings.gc_percent;
        settings.gc_percent = 256;
        refused(cbd_device_set_settings(device, &raw const settings), EINVAL, "gc_percent is 256");
        (settings.gc_percent, settings.consistency) = (before, CBD_CONSISTENCY_DEFAULT);
        refused(cbd_device_set_settings(device, &raw const settings), EINVAL, "consistency is one of");
        assert_eq!((cbd_device_close(device), cbd_region_close(region)), (0, 0));
    }
}

#[test]
fn a_handle_in_use_is_not_closed_and_stays_usable() {
    let place = Place::new();
    let (region, device) = opened(&place);
    // SAFETY: the handles are open until they are closed.
    unsafe {
        let mut queue = null_mut();
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        refused(cbd_device_close(device), EBUSY, "1 queues");
        let mut handle = device;
        refused(cbd_device_detach(&raw mut handle, 0), EBUSY, "1 queues");
        assert_eq!(handle, device);
        refused(cbd_region_close(region), EBUSY, "1 devices or queues");
        let (path, mut second) = (text(&place.region_path()), null_mut());
        let who = format!("in use by process {}", std::process::id());
        refused(cbd_region_open(path.as_ptr(), null(), &raw mut second), EBUSY, &who);
        assert_eq!(cbd_flush(device), 0);
        assert_eq!((cbd_queue_close(queue), cbd_device_close(device), cbd_region_close(region)), (0, 0, 0));
        let mut options: CbdRegionOptions = zeroed();
        (options.flags, options.size) = (CBD_REGION_FORMAT, 32 * MIB);
        refused(
            cbd_region_open(path.as_ptr(), &raw const options, &raw mut second),
            EEXIST,
            "holds a CBD transport",
        );
    }
}

#[test]
fn a_queue_returns_as_many_completions_as_fit() {
    let place = Place::new();
    let (region, device) = opened(&place);
    // SAFETY: the handles are open; the memory of the reads lives until they have completed.
    unsafe {
        let mut queue = null_mut();
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        for block in 0..8_u64 {
            let data = pattern(block, 3);
            let flags = if block == 0 { CBD_FUA } else { 0 };
            let (data, at) = (data.as_ptr().cast(), block * BLOCK as u64);
            assert_eq!(cbd_queue_write(queue, data, BLOCK, at, flags, 100 + block), 0);
        }
        assert_eq!(cbd_queue_in_flight(queue), 8);
        let mut done: [CbdCompletion; 5] = zeroed();
        refused(cbd_queue_wait(queue, done.as_mut_ptr(), 5, 6, -1), EINVAL, "room for 5");
        assert_eq!(cbd_queue_wait(queue, done.as_mut_ptr(), 5, 5, -1), 5);
        assert_eq!(done.map(|one| (one.user_data, one.result)), [100, 101, 102, 103, 104].map(|id| (id, 0)));
        assert_eq!(cbd_queue_in_flight(queue), 3);
        assert_eq!(cbd_queue_poll(queue, done.as_mut_ptr(), 5), 3);
        assert_eq!(cbd_queue_poll(queue, done.as_mut_ptr(), 5), 0);
        // One half is in the cache, the other on the disk.
        let mut both = vec![1_u8; 4 * BLOCK];
        let at = 6 * BLOCK as u64;
        assert_eq!(cbd_queue_read(queue, both.as_mut_ptr().cast(), 4 * BLOCK, at, 9), 0);
        assert_eq!(cbd_queue_discard(queue, 0, u64::MAX, 10), 0);
        let mut seen = Vec::new();
        while seen.len() < 2 {
            let count = cbd_queue_wait(queue, done.as_mut_ptr(), 5, 1, 30_000);
            assert!(count > 0, "{}", last_error());
            seen.extend(done[..count as usize].iter().map(|one| (one.user_data, one.result)));
        }
        seen.sort_unstable();
        assert_eq!(seen, [(9, 0), (10, EINVAL)]);
        assert!(last_error().contains("past the end"), "{}", last_error());
        assert_eq!(both, [pattern(6, 3), pattern(7, 3), vec![0; 2 * BLOCK]].concat());
        let mut descriptors = [-1; 2];
        assert_eq!(cbd_queue_descriptors(queue, descriptors.as_mut_ptr(), 2), 2);
        assert!(descriptors.iter().all(|&descriptor| descriptor > 2));
        assert_eq!((cbd_queue_close(queue), cbd_device_close(device), cbd_region_close(region)), (0, 0, 0));
    }
}

#[test]
fn a_queue_in_use_by_another_thread_is_busy() {
    struct Shared(*mut CbdQueue);
    // SAFETY: this test checks that the library itself excludes the second thread.
    unsafe impl Sync for Shared {}
    let place = Place::new();
    let (region, device) = opened(&place);
    // SAFETY: the handles are open until all threads have ended.
    unsafe {
        let mut queue = null_mut();
        assert_eq!(cbd_queue_open(device, &raw mut queue), 0);
        let shared = Shared(queue);
        let busy = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|thread| {
                    let shared = &shared;
                    scope.spawn(move || {
                        let Shared(queue) = shared;
                        let data = vec![thread; 256 << 10];
                        let mut busy = 0;
                        for _ in 0..2000 {
                            match cbd_queue_write(*queue, data.as_ptr().cast(), data.len(), 0, 0, 1) {
                                0 => {}
                                EBUSY => busy += 1,
                                other => panic!("{other}: {}", last_error()),
                            }
                            let mut done: [CbdCompletion; 8] = zeroed();
                            let count = cbd_queue_poll(*queue, done.as_mut_ptr(), 8);
                            assert!(count >= 0 || count == EBUSY, "{}", last_error());
                            assert!(done.iter().all(|one| one.result == 0));
                        }
                        busy
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<i32>()
        });
        assert!(busy > 0, "the two threads never collided");
        assert_eq!((cbd_queue_close(queue), cbd_device_close(device), cbd_region_close(region)), (0, 0, 0));
    }
}

#[test]
fn properties_and_status_are_returned() {
    let place = Place::new();
    let (region, device) = opened(&place);
    // SAFETY: the handles are open; structures of numbers may be zeroes; fields of characters end with a zero
    // byte.
    unsafe {
        let mut info: CbdRegionInfo = zeroed();
        assert_eq!(cbd_region_get_info(region, &raw mut info), 0);
        assert_eq!((info.size, info.segment_size, info.power_fail), (32 * MIB, 64 << 10, 0));
        assert_eq!(CStr::from_ptr(info.uuid.as_ptr()).to_bytes().len(), 36);
        let mut warnings = [1 as c_char; 8];
        let length = cbd_region_warnings(region, warnings.as_mut_ptr(), warnings.len());
        assert!(
            length > 8,
            "a file in a temporary folder does not survive a power failure, and the warning says so"
        );
        assert_eq!(CStr::from_ptr(warnings.as_ptr()).to_bytes().len(), 7);
        let mut backends: [CbdBackendInfo; 2] = zeroed();
        assert_eq!(cbd_region_backends(region, backends.as_mut_ptr(), 2), 1);
        assert_eq!((backends[0].size, backends[0].cache_size, backends[0].data_crc), (16 * MIB, 8 * MIB, 1));
        assert_eq!(
            CStr::from_ptr(backends[0].path.as_ptr()).to_str().unwrap(),
            place.disk().to_str().unwrap()
        );
        let mut geometry: CbdGeometry = zeroed();
        assert_eq!(cbd_device_geometry(device, &raw mut geometry), 0);
        assert_eq!((geometry.size, geometry.backend_id), (16 * MIB, backends[0].id));
        let data = pattern(0, 1);
        assert_eq!(cbd_write(device, data.as_ptr().cast(), BLOCK, 0, CBD_FUA), 0);
        let mut read = vec![0_u8; BLOCK];
        assert_eq!(cbd_read(device, read.as_mut_ptr().cast(), BLOCK, 0), 0);
        assert_eq!(read, data);
        let mut status: CbdStatus = zeroed();
        assert_eq!(cbd_device_status(device, &raw mut status), 0);
        assert_eq!((status.written_bytes, status.read_hit_bytes), (BLOCK as u64, BLOCK as u64));
        assert_eq!(status.flags & CBD_STATUS_CACHED, CBD_STATUS_CACHED);
        let mut size = 0;
        assert_eq!((cbd_device_grow(device, &raw mut size), size), (0, 16 * MIB), "it is not larger");
        let file = std::fs::OpenOptions::new().write(true).open(place.disk()).unwrap();
        file.set_len(20 * MIB).unwrap();
        let beyond = (20 * MIB) - BLOCK as u64;
        assert_ne!(cbd_write(device, data.as_ptr().cast(), BLOCK, beyond, 0), 0);
        assert_eq!((cbd_device_grow(device, &raw mut size), size), (0, 20 * MIB), "{}", last_error());
        assert_eq!(cbd_device_geometry(device, &raw mut geometry), 0);
        assert_eq!(geometry.size, 20 * MIB);
        assert_eq!(cbd_write(device, data.as_ptr().cast(), BLOCK, beyond, CBD_FUA), 0, "{}", last_error());
        assert_eq!(cbd_device_drain(device, 0), 0);
        assert_eq!(place.on_disk(0), data);
        assert_eq!(cbd_device_close(device), 0);
        let mut again = null_mut();
        assert_eq!(cbd_device_open(region, geometry.backend_id, &raw mut again), 0, "{}", last_error());
        assert_eq!(cbd_device_detach(&raw mut again, 5), 0, "{}", last_error());
        assert!(again.is_null());
        assert_eq!(cbd_region_close(region), 0);
        assert_eq!(CStr::from_ptr(cbd_version()).to_str().unwrap(), env!("CARGO_PKG_VERSION"));
    }
}
