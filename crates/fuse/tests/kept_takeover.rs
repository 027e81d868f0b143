//! The next process takes a device over: what was in flight is done, and nobody sees an error.
#![allow(missing_docs)]

mod support;

use cbd_export::BlockDevice;
use cbd_fuse::{FuseLoop, Remains, StopMode, Way};
use cbd_types::{ErrorKind, Operation};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::kept::*;
use support::{MIB, Wanted, in_sandbox_by, tool};

/// Requests that wait at a device before somebody comes, of the 128 that there can be in all.
const WAITING: usize = 16;

/// Not a test of its own: the process that others kill.
#[test]
fn process_to_be_killed() {
    be_killed();
}

#[test]
fn what_was_in_flight_when_the_process_was_killed_is_done_by_the_next() {
    in_sandbox("what_was_in_flight_when_the_process_was_killed_is_done_by_the_next", |dir| {
        let mut victim = start_victim(dir);
        let remains = victim.remains(dir);
        let link = dir.join("cbd7");
        let device = std::fs::read_link(&link).unwrap();
        in_time(write_block(&device, 0, 1)).unwrap();
        File::options()
            .write(true)
            .open(dir.join("disk"))
            .unwrap()
            .write_all_at(&[9; 4096], SIZE - 4096)
            .unwrap();
        let writes: Vec<_> =
            (0..8).map(|number| write_block(&device, HELD_FROM + number * 4096, 10 + number as u8)).collect();
        let read = read_block(&device, SIZE - 4096);
        for _ in 0..9 {
            victim.said("held");
        }
        victim.kill();
        assert!(writes.iter().all(|write| !write.is_finished()) && !read.is_finished());
        assert_eq!(on_disk(dir, HELD_FROM), 0);

        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        drop(remains);
        writes.into_iter().for_each(|write| in_time(write).unwrap());
        assert_eq!(in_time(read).unwrap(), 9);
        for number in 0..8 {
            assert_eq!(on_disk(dir, HELD_FROM + number * 4096), 10 + number as u8);
        }
        assert!(export.is_taken_over() && export.is_kept());
        assert_eq!(std::fs::read_link(&link).unwrap(), device);
        in_time(write_block(&device, 4096, 2)).unwrap();
        assert_eq!(in_time(read_block(&device, 0)).unwrap(), 1);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert!(!mounts().contains("fuse.cbd"));
        assert!(std::fs::symlink_metadata(&link).is_err());
        assert_eq!(*keep.log.lock().unwrap(), ["removed"]);
    });
}

#[test]
fn a_request_that_was_sent_again_is_sent_again_to_the_one_after() {
    in_sandbox("a_request_that_was_sent_again_is_sent_again_to_the_one_after", |dir| {
        let mut victim = start_victim(dir);
        let remains = victim.remains(dir);
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.said("held");
        victim.kill();
        for _ in 0..2 {
            let mut victim = start_heir(dir, &remains);
            assert_eq!(victim.said("held"), format!("{} at {HELD_FROM}", Operation::Write as u32));
            victim.kill();
            assert!(!write.is_finished());
        }
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(write).unwrap();
        assert_eq!(on_disk(dir, HELD_FROM), 5);
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn a_device_that_was_left_waits_and_the_next_goes_on_under_an_ext4() {
    in_sandbox("a_device_that_was_left_waits_and_the_next_goes_on_under_an_ext4", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let device = export.device_path().to_str().unwrap().to_owned();
        tool("mkfs.ext4", &["-q", &device]);
        let mount = dir.join("mnt");
        std::fs::create_dir(&mount).unwrap();
        tool("mount", &[&device, mount.to_str().unwrap()]);
        for round in 0..3_u8 {
            std::fs::write(mount.join("before"), [round; 100_000]).unwrap();
            export.leave(SOON).unwrap();
            drop(export);
            let remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
            assert!(remains.user().unwrap().expect("used").contains("mounted at"));
            let file = mount.join("meanwhile");
            let write = std::thread::spawn(move || {
                let mut file = File::create(file)?;
                file.write_all(&[round; 300_000])?;
                file.sync_all()
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!write.is_finished());
            export =
                FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
            in_time(write).unwrap();
            assert!(std::fs::read(mount.join("before")).unwrap() == [round; 100_000]);
        }
        let error = export.stop(StopMode::WhenUnused, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        tool("umount", &[mount.to_str().unwrap()]);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert!(!mounts().contains("fuse.cbd"));
        tool("e2fsck", &["-fn", dir.join("disk").to_str().unwrap()]);
    });
}

#[test]
fn dirty_pages_of_a_device_that_nobody_has_open_hold_no_killed_process_up() {
    in_sandbox("dirty_pages_of_a_device_that_nobody_has_open_hold_no_killed_process_up", |dir| {
        let mut victim = start_victim(dir);
        let remains = victim.remains(dir);
        let device = PathBuf::from(format!("/dev/loop{}", remains.state.loop_number));
        // Its close waits for a process that holds what it takes.
        let close = write_and_close(&device);
        victim.said("held");
        victim.kill();
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(close);
        assert_eq!(on_disk(dir, HELD_FROM + MIB - 1), 7);
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// What the kernel sends again is what any door has taken, not only a predecessor's: asked for too late, what the new process has taken would
/// come to it twice.
#[test]
fn what_waits_for_a_process_comes_to_it_once() {
    in_sandbox("what_waits_for_a_process_comes_to_it_once", |dir| {
        let mut remains = {
            let mut victim = start_victim(dir);
            let remains = victim.remains(dir);
            victim.kill();
            remains
        };
        let device = PathBuf::from(format!("/dev/loop{}", remains.state.loop_number));
        let write = |number: usize| write_block(&device, HELD_FROM + number as u64 * 4096, 3);
        let mut writes = Vec::new();
        // Who asks too late may be lucky once.
        for _ in 0..6 {
            // Beside what the last one had taken, some that nobody has.
            (0..WAITING).for_each(|_| writes.push(write(writes.len())));
            until("the requests", || in_flight(&remains.state) == writes.len() as u64);
            // It holds them, so that each is in flight as long as it lives.
            let mut heir = start_heir(dir, &remains);
            let mut held: Vec<String> = writes.iter().map(|_| heir.said("held")).collect();
            // One more, for which all that came before it has been taken.
            writes.push(write(writes.len()));
            held.push(heir.said("held"));
            let mut once = held.clone();
            once.sort();
            once.dedup();
            assert_eq!(once.len(), held.len(), "{held:?}");
            heir.kill();
        }
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        writes.into_iter().for_each(|write| in_time(write).unwrap());
        remains.doors.clear();
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// The store may have had them by then. Whoever is the last to have a block device open writes its pages out: if that were this process, it
/// would wait for the next, and the next for its end.
#[test]
fn a_process_that_is_killed_while_it_hands_its_device_over_ends() {
    in_sandbox("a_process_that_is_killed_while_it_hands_its_device_over_ends", |dir| {
        // SAFETY: no other thread of this process looks at the environment now.
        unsafe { std::env::set_var("CBD_FUSE_TEST_PUT_HANGS", "1") };
        let mut victim = start_victim(dir);
        let remains = victim.remains(dir);
        let device = PathBuf::from(format!("/dev/loop{}", remains.state.loop_number));
        let close = write_and_close(&device);
        until("a write or a close", || in_flight(&remains.state) > 0 || close.is_finished());
        victim.kill();
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(close);
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert_eq!(on_disk(dir, HELD_FROM + MIB - 1), 7);
    });
}

#[test]
fn a_device_that_has_become_another_is_not_served_and_its_clients_wait_on() {
    in_sandbox("a_device_that_has_become_another_is_not_served_and_its_clients_wait_on", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let device = export.loop_path().to_owned();
        export.leave(SOON).unwrap();
        drop(export);
        let write = write_block(&device, 0, 3);
        let remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
        let file = Arc::new(File::options().read(true).write(true).open(dir.join("disk")).unwrap());
        let other: Arc<dyn BlockDevice> = Arc::new(FileDevice { file, size: SIZE / 2, holds: false });
        let error = FuseLoop::adopt(&other, &kept_options(dir, &keep), &remains).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
        assert!(error.line().contains("waits for its daemon"), "{error}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!write.is_finished() && on_disk(dir, 0) == 0);
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(write).unwrap();
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// What is left when a process is killed that was letting the device go, and somebody had it open.
#[test]
fn a_loop_device_that_was_about_to_go_stays_with_who_takes_it_over() {
    in_sandbox("a_loop_device_that_was_about_to_go_stays_with_who_takes_it_over", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let (state, device) = (state_of(&keep), export.loop_path().to_owned());
        let used = File::open(&device).unwrap();
        export.leave(SOON).unwrap();
        drop(export);
        tool("losetup", &["-d", device.to_str().unwrap()]);
        assert_eq!(loop_setting(&state, "autoclear"), "1");
        let remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        drop((remains, used));
        assert_eq!(loop_setting(&state, "autoclear"), "0");
        in_time(write_block(&device, 0, 1)).unwrap();
        assert_eq!(export.failure(), None);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn what_is_kept_is_served_through_the_device_even_where_io_uring_is_offered() {
    let ways = [Wanted::Ring];
    in_sandbox_by(&ways, "what_is_kept_is_served_through_the_device_even_where_io_uring_is_offered", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        assert!(
            matches!(export.way(), Way::Door { reason } if reason.contains("outlive")),
            "{}",
            export.way()
        );
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// Why a device that is to outlive its process is not served by io_uring: what the kernel has handed to a ring is not sent again, and
/// what comes later goes to the ring that is gone. All of it waits until the connection ends.
#[test]
fn what_came_by_io_uring_cannot_be_taken_over_although_somebody_holds_the_connection() {
    let name = "what_came_by_io_uring_cannot_be_taken_over_although_somebody_holds_the_connection";
    in_sandbox_by(&[Wanted::Ring], name, |dir| {
        // SAFETY: no other thread of this process looks at the environment now.
        unsafe { std::env::set_var("CBD_FUSE_TEST_UNKEPT", "1") };
        let mut victim = start_victim(dir);
        if victim.said("way") != "true" {
            println!("not run: this kernel has no FUSE over io_uring");
            return;
        }
        let line = victim.said("has");
        let process = victim.child.id();
        let copies: Vec<OwnedFd> =
            line.split(' ').map(|number| descriptor_of(process, number.parse().expect("a number"))).collect();
        assert!(!copies.is_empty());
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        // So that the loop device does not go with the process.
        let held = File::open(&device).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.said("held");
        victim.kill();
        let connection = cbd_export::mounts::at(&dir.join("fuse/cbd7")).unwrap().expect("a mount").device.1;
        let number = device.to_str().unwrap().strip_prefix("/dev/loop").unwrap().parse().unwrap();
        let remains = Remains::new(state(dir, connection, number), copies).unwrap();
        let keep = Arc::new(Here::default());
        let heir =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        let later = write_block(&device, 0, 5);
        std::thread::sleep(Duration::from_millis(500));
        assert!(!write.is_finished() && !later.is_finished());
        drop((remains, heir));
        assert!(in_time(write).is_err() && in_time(later).is_err());
        drop(held);
    });
}
