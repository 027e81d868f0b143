//! The exported device as its users see it: through the loop device and through the file.
#![allow(missing_docs)]

mod support;

use cbd_fuse::StopMode;
use cbd_types::AlignedBuffer;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;
use support::{LIMIT, MIB, TestDevice, in_sandbox, options, start, start_with, tool, until};

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("the device")
}

fn pattern(length: usize, seed: u8) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::zeroed(length);
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index as u8).wrapping_mul(31) ^ seed);
    buffer
}

fn fallocate(file: &File, mode: i32, offset: u64, length: u64) -> std::io::Result<()> {
    // SAFETY: takes no pointer.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, length as i64) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn written_data_is_read_back_and_is_in_the_device() {
    in_sandbox("written_data_is_read_back_and_is_in_the_device", |dir| {
        // Sizes that are multiples of the sector only.
        for sector in [512_u32, 4096] {
            let size = 7 * MIB + 3 * u64::from(sector);
            let device = Arc::new(TestDevice::new(size, sector));
            let mut export = start(&device, dir);
            for path in [export.device_path().to_owned(), export.file_path()] {
                let file = open_direct(&path);
                let ranges = [(0, sector), (u64::from(sector), 8192), (MIB, 1 << 20), (size - 8192, 8192)];
                for (seed, (offset, length)) in ranges.into_iter().enumerate() {
                    let written = pattern(length as usize, seed as u8 + sector as u8);
                    file.write_all_at(&written, offset).unwrap();
                    let mut read = AlignedBuffer::zeroed(length as usize);
                    file.read_exact_at(&mut read, offset).unwrap();
                    assert_eq!(&*read, &*written);
                    let bytes = offset as usize..offset as usize + length as usize;
                    assert_eq!(&device.bytes.read().unwrap()[bytes], &*written);
                }
                let mut past = AlignedBuffer::zeroed(8192);
                assert_eq!(file.read_at(&mut past, size - 4096).unwrap(), 4096);
                assert_eq!(file.read_at(&mut past, size).unwrap(), 0);
            }
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        }
    });
}

#[test]
fn the_loop_device_reports_the_properties_of_the_device() {
    in_sandbox("the_loop_device_reports_the_properties_of_the_device", |dir| {
        for discard in [true, false] {
            let mut device = TestDevice::new(8 * MIB, 4096);
            device.geometry.discard = discard;
            let device = Arc::new(device);
            let mut export = start(&device, dir);
            let limits = export.queue_limits().unwrap().clone();
            println!("{limits:?}");
            assert_eq!(limits.logical_block_size, 4096);
            assert!(limits.write_back, "without it the kernel sends no flush");
            assert_eq!(limits.discard_max_bytes > 0, discard);
            assert!(limits.write_zeroes_max_bytes > 0);
            let path = export.device_path().to_str().unwrap();
            device.bytes.write().unwrap().fill(1);
            tool("blkdiscard", &["--zeroout", path]);
            assert!(device.bytes.read().unwrap().iter().all(|&byte| byte == 0));
            let discarded = std::process::Command::new("blkdiscard").arg(path).output().unwrap();
            assert_eq!(discarded.status.success(), discard);
            assert_eq!(device.discards.load(Ordering::Relaxed) > 0, discard);
            assert_eq!(limits.max_sectors_kb, 1024);
            assert_eq!(limits.read_ahead_kb, 2048);
            assert_eq!((limits.minimum_io_size, limits.optimal_io_size), (4096, 0));
            assert!(!limits.rotational);
            let name = export.loop_path().file_name().unwrap().to_string_lossy().into_owned();
            let size = std::fs::read_to_string(format!("/sys/block/{name}/size")).unwrap();
            assert_eq!(size.trim(), (8 * MIB / 512).to_string());
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        }
    });
}

/// A request of the block layer has at most 128 segments of memory, which can be single pages; one of the
/// file 256.
#[test]
fn a_large_write_arrives_whole() {
    in_sandbox("a_large_write_arrives_whole", |dir| {
        let device = Arc::new(TestDevice::new(16 * MIB, 512));
        let mut export = start(&device, dir);
        for (path, length) in [(export.device_path().to_owned(), MIB / 2), (export.file_path(), MIB)] {
            device.writes.lock().unwrap().clear();
            open_direct(&path).write_all_at(&pattern(length as usize, 1), 4 * MIB).unwrap();
            assert_eq!(*device.writes.lock().unwrap(), [length]);
        }
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn a_large_write_from_unaligned_memory_succeeds() {
    in_sandbox("a_large_write_from_unaligned_memory_succeeds", |dir| {
        let device = Arc::new(TestDevice::new(16 * MIB, 512));
        let mut export = start(&device, dir);
        let file = open_direct(&export.file_path());
        for shift in [1, 100, 511, 513, 4095] {
            let data = pattern(MIB as usize + 8192, shift as u8);
            let part = &data[shift..shift + MIB as usize];
            file.write_all_at(part, 4 * MIB).unwrap();
            let bytes = device.bytes.read().unwrap();
            assert!(bytes[4 * MIB as usize..5 * MIB as usize] == *part, "shifted by {shift}");
        }
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

/// Writes `bytes` at `offset` through `io_submit`, as libaio does; returns the kernel's result: a count, or a
/// negative errno.
fn submit_write(file: &File, bytes: &[u8], offset: u64) -> i64 {
    // struct iocb and struct io_event of <linux/aio_abi.h>.
    #[repr(C)]
    struct Block {
        data: u64,
        key: [u32; 2],
        operation: u16,
        priority: i16,
        descriptor: u32,
        buffer: u64,
        length: u64,
        offset: u64,
        reserved: u64,
        flags: [u32; 2],
    }
    const PWRITE: u16 = 1;
    let block = Block {
        data: 0,
        key: [0; 2],
        operation: PWRITE,
        priority: 0,
        descriptor: file.as_raw_fd() as u32,
        buffer: bytes.as_ptr() as u64,
        length: bytes.len() as u64,
        offset,
        reserved: 0,
        flags: [0; 2],
    };
    let (mut context, mut event) = (0_u64, [0_i64; 4]);
    let blocks = [&raw const block];
    // SAFETY: each call gets what its documentation names: a context that is 0 at first, one control block
    // that is filled in and outlives the request, as its buffer does, and room for one event. The wait has no
    // timeout, so the request has ended when it returns.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &raw mut context), 0);
        assert_eq!(libc::syscall(libc::SYS_io_submit, context, 1, blocks.as_ptr()), 1);
        let timeout = std::ptr::null::<libc::timespec>();
        assert_eq!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), timeout), 1);
        assert_eq!(libc::syscall(libc::SYS_io_destroy, context), 0);
    }
    event[2]
}

#[test]
fn a_large_asynchronous_write_from_memory_that_is_not_aligned_is_done() {
    in_sandbox("a_large_asynchronous_write_from_memory_that_is_not_aligned_is_done", |dir| {
        let device = Arc::new(TestDevice::new(16 * MIB, 512));
        let mut export = start(&device, dir);
        let file = open_direct(&export.file_path());
        if !Path::new("/proc/sys/fs/fuse/max_pages_limit").exists() {
            return println!("not run: the kernel has a fixed limit of pages, it needs Linux 6.13");
        }
        for (shift, length) in [(1, MIB), (511, MIB), (513, MIB), (4095, MIB), (100, 2 * MIB), (7, 4096)] {
            let data = pattern(length as usize + 8192, shift as u8);
            let part = &data[shift..shift + length as usize];
            device.writes.lock().unwrap().clear();
            assert_eq!(
                submit_write(&file, part, 4 * MIB),
                length as i64,
                "{length} bytes shifted by {shift}"
            );
            let bytes = device.bytes.read().unwrap();
            assert!(bytes[4 * MIB as usize..(4 * MIB + length) as usize] == *part, "shifted by {shift}");
            assert!(
                device.writes.lock().unwrap().iter().all(|write| *write == length.min(MIB)),
                "it arrives whole"
            );
        }
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn an_fsync_is_a_flush_and_a_synchronous_write_ends_with_one() {
    in_sandbox("an_fsync_is_a_flush_and_a_synchronous_write_ends_with_one", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start(&device, dir);
        let flushes = || device.flushes.load(Ordering::Relaxed);
        let file = open_direct(export.device_path());
        file.write_all_at(&pattern(4096, 1), 0).unwrap();
        let before = flushes();
        file.sync_all().unwrap();
        assert!(flushes() > before);
        let before = flushes();
        let flags = libc::O_DIRECT | libc::O_DSYNC;
        let mut synchronous = OpenOptions::new();
        synchronous.write(true).custom_flags(flags);
        synchronous.open(export.device_path()).unwrap().write_all_at(&pattern(4096, 2), 0).unwrap();
        assert!(flushes() > before);
        synchronous.open(export.file_path()).unwrap().write_all_at(&pattern(4096, 3), 0).unwrap();
        assert_eq!(device.fua_writes.load(Ordering::Relaxed), 1);
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn discards_and_zeroing_reach_the_device_as_such() {
    in_sandbox("discards_and_zeroing_reach_the_device_as_such", |dir| {
        let device = Arc::new(TestDevice::new(64 * MIB, 512));
        let mut export = start(&device, dir);
        let file = open_direct(export.device_path());
        file.write_all_at(&pattern(1 << 20, 1), 0).unwrap();
        let path = export.device_path().to_str().unwrap().to_owned();
        tool("blkdiscard", &["--offset", "4096", "--length", "8192", &path]);
        assert_eq!(device.discards.load(Ordering::Relaxed), 1);
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        fallocate(&file, libc::FALLOC_FL_ZERO_RANGE | keep, 65536, 4096).unwrap();
        assert!(device.zeroings.load(Ordering::Relaxed) > 0);
        {
            let bytes = device.bytes.read().unwrap();
            let expected = pattern(1 << 20, 1);
            for (index, (&is, &was)) in bytes.iter().zip(expected.iter()).enumerate() {
                let zeroed = (4096..12288).contains(&index) || (65536..69632).contains(&index);
                assert_eq!(is, if zeroed { 0 } else { was }, "{index}");
            }
        }
        // The whole device at once, and the file directly.
        tool("blkdiscard", &[&path]);
        assert!(device.bytes.read().unwrap().iter().all(|&byte| byte == 0));
        let direct = open_direct(&export.file_path());
        direct.write_all_at(&pattern(8192, 2), 0).unwrap();
        fallocate(&direct, libc::FALLOC_FL_PUNCH_HOLE | keep, 0, 4096).unwrap();
        assert!(device.bytes.read().unwrap()[..4096].iter().all(|&byte| byte == 0));
        let error = fallocate(&direct, 0, 0, 4096).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
        drop((file, direct));
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn the_file_can_be_read_unaligned_but_not_written() {
    in_sandbox("the_file_can_be_read_unaligned_but_not_written", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start(&device, dir);
        let file = OpenOptions::new().read(true).write(true).open(export.file_path()).unwrap();
        let written = pattern(8192, 9);
        file.write_all_at(&written, 0).unwrap();
        let mut read = [0; 3001];
        file.read_exact_at(&mut read, 701).unwrap();
        assert_eq!(read, written[701..3702]);
        let error = file.write_at(&[1; 100], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        let error = file.write_at(&pattern(1024, 1), 8 * MIB - 512).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        assert!(file.set_len(5).is_err());
        let names: Vec<_> =
            std::fs::read_dir(dir.join("fuse/cbd7")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["cbd7"]);
        assert!(std::fs::metadata(dir.join("fuse/cbd7/other")).is_err());
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn a_read_only_device_refuses_writes() {
    in_sandbox("a_read_only_device_refuses_writes", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let how = cbd_fuse::Options { read_only: true, ..options(dir, 1) };
        let mut export = start_with(&device, how);
        let file = OpenOptions::new().read(true).write(true).open(export.device_path());
        assert!(file.is_err() || file.unwrap().write_at(&pattern(4096, 1), 0).is_err());
        assert!(OpenOptions::new().write(true).open(export.file_path()).is_err());
        let mut bytes = AlignedBuffer::zeroed(4096);
        open_read(export.device_path()).read_exact_at(&mut bytes, 0).unwrap();
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

fn open_read(path: &Path) -> File {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

#[test]
fn an_error_of_the_device_fails_only_its_request() {
    in_sandbox("an_error_of_the_device_fails_only_its_request", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        device.fails_from.store(4 * MIB, Ordering::Relaxed);
        let mut export = start(&device, dir);
        for path in [export.device_path().to_owned(), export.file_path()] {
            let file = open_direct(&path);
            let error = file.write_at(&pattern(4096, 1), 5 * MIB).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            let error = file.read_at(&mut pattern(4096, 1), 4 * MIB).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            file.write_all_at(&pattern(4096, 2), MIB).unwrap();
        }
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn parked_requests_complete_with_their_own_data() {
    in_sandbox("parked_requests_complete_with_their_own_data", |dir| {
        let mut device = TestDevice::new(64 * MIB, 512);
        device.delay = Duration::from_micros(300);
        let device = Arc::new(device);
        let mut export = start(&device, dir);
        for path in [export.device_path().to_owned(), export.file_path()] {
            std::thread::scope(|scope| {
                for thread in 0..8_u64 {
                    let path = &path;
                    scope.spawn(move || {
                        let file = open_direct(path);
                        for turn in 0..40_u64 {
                            let length = [512, 4096, 200 << 10, 1 << 20][turn as usize % 4];
                            let offset = thread * 8 * MIB + turn * 4096;
                            let written = pattern(length, (thread * 40 + turn) as u8);
                            file.write_all_at(&written, offset).unwrap();
                            let mut read = AlignedBuffer::zeroed(length);
                            file.read_exact_at(&mut read, offset).unwrap();
                            assert!(*read == *written, "{thread} {turn}");
                        }
                        file.sync_all().unwrap();
                    });
                }
            });
        }
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn a_parked_request_delays_no_other_request_of_its_thread() {
    in_sandbox("a_parked_request_delays_no_other_request_of_its_thread", |dir| {
        let device = TestDevice { parks: true, parks_from: 4 * MIB, ..TestDevice::new(8 * MIB, 512) };
        let device = Arc::new(device);
        let mut export = start_with(&device, options(dir, 1));
        device.stuck.store(true, Ordering::Relaxed);
        let path = export.file_path();
        let before = device.submitted.load(Ordering::Relaxed);
        let parked = {
            let path = path.clone();
            std::thread::spawn(move || open_direct(&path).write_all_at(&pattern(4096, 9), 4 * MIB))
        };
        until("the parked request", || device.submitted.load(Ordering::Relaxed) > before);
        let (done, waiting) = mpsc::channel();
        std::thread::spawn(move || {
            let file = open_direct(&path);
            let written = (0..100).try_for_each(|turn| file.write_all_at(&pattern(4096, 1), turn * 4096));
            done.send(written).unwrap();
        });
        waiting.recv_timeout(LIMIT).expect("the other requests complete").unwrap();
        assert!(!parked.is_finished());
        device.stuck.store(false, Ordering::Relaxed);
        parked.join().unwrap().unwrap();
        assert_eq!(device.bytes.read().unwrap()[4 * MIB as usize..][..4096], *pattern(4096, 9));
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

/// A thread has at most 256 requests in flight; the kernel keeps the others.
#[test]
fn requests_beyond_the_limit_of_a_thread_wait_in_the_kernel() {
    in_sandbox("requests_beyond_the_limit_of_a_thread_wait_in_the_kernel", |dir| {
        const CLIENTS: u64 = 300;
        let device = Arc::new(TestDevice { parks: true, ..TestDevice::new(8 * MIB, 512) });
        let mut export = start_with(&device, options(dir, 1));
        let submitted = || device.submitted.load(Ordering::Relaxed);
        let path = export.file_path();
        // Before the device is stuck: an open reads nothing of it, but the loop device may.
        let files: Vec<_> = (0..CLIENTS).map(|_| open_direct(&path)).collect();
        device.stuck.store(true, Ordering::Relaxed);
        let before = submitted();
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0_u64..)
                .zip(&files)
                .map(|(client, file)| {
                    scope.spawn(move || file.write_all_at(&pattern(4096, client as u8), client * 4096))
                })
                .collect();
            until("the limit", || submitted() == before + 256);
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(submitted(), before + 256);
            assert!(clients.iter().all(|client| !client.is_finished()));
            device.stuck.store(false, Ordering::Relaxed);
            clients.into_iter().for_each(|client| client.join().unwrap().unwrap());
        });
        assert_eq!(submitted(), before + CLIENTS);
        let bytes = device.bytes.read().unwrap();
        for client in 0..CLIENTS as usize {
            assert!(bytes[client * 4096..][..4096] == *pattern(4096, client as u8), "{client}");
        }
        drop((bytes, files));
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn deep_queues_of_mixed_requests_are_served_correctly() {
    in_sandbox("deep_queues_of_mixed_requests_are_served_correctly", |dir| {
        for delay in [Duration::ZERO, Duration::from_micros(200)] {
            let device = Arc::new(TestDevice { delay, ..TestDevice::new(64 * MIB, 512) });
            let mut export = start(&device, dir);
            for path in [export.device_path().to_owned(), export.file_path()] {
                let file = format!("--filename={}", path.display());
                let job = "--name=job --ioengine=libaio --direct=1 --rw=randrw --bsrange=512-512k --iodepth=64 \
                           --numjobs=1 --size=32m --verify=crc32c --do_verify=1 --fsync=50 --randrepeat=1 \
                           --verify_state_save=0";
                let mut arguments: Vec<_> = job.split_whitespace().collect();
                arguments.push(&file);
                tool("fio", &arguments);
            }
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        }
    });
}

#[test]
fn a_file_system_works_on_the_device() {
    in_sandbox("a_file_system_works_on_the_device", |dir| {
        let mut device = TestDevice::new(256 * MIB, 512);
        device.delay = Duration::from_micros(50);
        let device = Arc::new(device);
        let mut export = start(&device, dir);
        let path = export.device_path().to_str().unwrap().to_owned();
        tool("mkfs.ext4", &["-q", &path]);
        let mount = dir.join("mnt");
        std::fs::create_dir(&mount).unwrap();
        let mount_text = mount.to_str().unwrap();
        tool("mount", &["-o", "discard", &path, mount_text]);
        for index in 0..50_usize {
            std::fs::write(mount.join(format!("file{index}")), vec![index as u8; index * 10_007]).unwrap();
        }
        tool("sync", &["-f", mount_text]);
        std::fs::remove_file(mount.join("file49")).unwrap();
        tool("fstrim", &[mount_text]);
        tool("umount", &[mount_text]);
        tool("fsck.ext4", &["-f", "-n", &path]);
        tool("mount", &["-o", "ro", &path, mount_text]);
        for index in 0..49_usize {
            let bytes = std::fs::read(mount.join(format!("file{index}"))).unwrap();
            assert!(bytes == vec![index as u8; index * 10_007], "file{index}");
        }
        tool("umount", &[mount_text]);
        assert!(device.flushes.load(Ordering::Relaxed) > 0 && device.discards.load(Ordering::Relaxed) > 0);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}
