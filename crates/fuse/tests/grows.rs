//! A device that becomes larger while it is in use, and its users.
#![allow(missing_docs)]

mod support;

use cbd_fuse::{FuseLoop, StopMode};
use cbd_types::AlignedBuffer;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::session::*;
use support::{LIMIT, MIB, TestDevice, in_sandbox, start};

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("the device")
}

/// The bytes of a block device, as the kernel tells programs.
fn size_of(path: &Path) -> u64 {
    let output = std::process::Command::new("blockdev").arg("--getsize64").arg(path).output();
    let output = output.expect("blockdev is there");
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
}

/// Not a test of its own: the process that other tests kill.
#[test]
fn process_to_be_killed() {
    run_until_killed();
}

#[test]
fn users_see_the_new_size_while_they_write() {
    in_sandbox("users_see_the_new_size_while_they_write", |dir| {
        let device = Arc::new(TestDevice::new(4 * MIB, 512));
        let mut export = start(&device, dir);
        let (path, limits) = (export.device_path().to_owned(), export.queue_limits().cloned());
        let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            // Several, so that writes complete between any message of the kernel and its reply.
            for writer in 0..4_u64 {
                let (path, done, written) = (&path, &done, &written);
                scope.spawn(move || {
                    let file = open_direct(path);
                    let mut block = AlignedBuffer::zeroed(4096);
                    while !done.load(Ordering::Relaxed) {
                        block.fill(written.fetch_add(1, Ordering::Relaxed) as u8);
                        file.write_all_at(&block, writer * MIB).expect("written");
                    }
                });
            }
            for round in 1..=20 {
                let before = written.load(Ordering::Relaxed);
                let size = (4 + round) * MIB + 512 * round;
                device.bytes.write().unwrap().resize(size as usize, 0);
                export.grow(size).expect("it grows");
                assert_eq!((size_of(&path), export.size_seen()), (size, Some(size)));
                assert_eq!(std::fs::metadata(export.file_path()).expect("there").len(), size);
                let mut block = AlignedBuffer::zeroed(512);
                block.fill(round as u8);
                let file = open_direct(&path);
                file.write_all_at(&block, size - 512).expect("written at the new end");
                assert!(
                    device.bytes.read().unwrap()[size as usize - 512..]
                        .iter()
                        .all(|byte| *byte == round as u8)
                );
                assert_eq!(file.read_at(&mut block, size).expect("the end"), 0);
                // The writers go on.
                support::until("writes go on", || written.load(Ordering::Relaxed) > before + 20);
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(export.queue_limits().cloned(), limits);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn a_device_that_has_grown_is_taken_over_and_its_users_see_the_new_size() {
    in_sandbox("a_device_that_has_grown_is_taken_over_and_its_users_see_the_new_size", |dir| {
        let mut victim = start_victim(dir);
        let session = victim.session(dir);
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        in_time(write_block(&device, 0, 1)).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.line_after("held");
        // It is killed behind the growth, before its clients knew.
        victim.kill();
        assert_eq!(size_of(&device), SIZE);
        let file = File::options().write(true).open(dir.join("disk")).unwrap();
        file.set_len(2 * SIZE).unwrap();
        let of_size = |size| -> Arc<dyn cbd_export::BlockDevice> {
            let file = Arc::new(File::options().read(true).write(true).open(dir.join("disk")).unwrap());
            Arc::new(FileDevice { file, size, holds: false })
        };
        let store = Arc::new(LocalStore::default());
        let smaller = FuseLoop::take_over(&of_size(SIZE / 2), &preserved_options(dir, &store), &session);
        assert!(smaller.expect_err("it has shrunk").line().contains("was handed over with"));
        let mut export =
            FuseLoop::take_over(&of_size(2 * SIZE), &preserved_options(dir, &store), &session).unwrap();
        in_time(write).unwrap();
        assert_eq!((size_of(&device), export.size_seen()), (2 * SIZE, Some(2 * SIZE)));
        in_time(write_block(&device, 2 * SIZE - 4096, 9)).unwrap();
        assert_eq!((on_disk(dir, 2 * SIZE - 4096), on_disk(dir, HELD_FROM)), (9, 5));
        // It grows again in this process, and is handed over to the next one.
        file.set_len(3 * SIZE).unwrap();
        export.grow(3 * SIZE).unwrap();
        assert_eq!(size_of(&device), 3 * SIZE);
        export.hand_over(LIMIT).unwrap();
        let mut export =
            FuseLoop::take_over(&of_size(3 * SIZE), &preserved_options(dir, &store), &session).unwrap();
        assert_eq!(size_of(&device), 3 * SIZE);
        in_time(write_block(&device, 3 * SIZE - 4096, 7)).unwrap();
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}
