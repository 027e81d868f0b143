//! The takeover by the next process: it executes the requests in flight, and no client sees an error.
#![allow(missing_docs)]

mod support;

use cbd_export::BlockDevice;
use cbd_fuse::{FuseLoop, StopMode};
use cbd_types::{ErrorKind, Operation};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::session::*;
use support::{LIMIT, MIB, in_sandbox, tool, until};

/// Requests that wait at a device before a process takes it over, of the 128 that are possible in all.
const WAITING: usize = 16;

/// Not a test of its own: the process that other tests kill.
#[test]
fn process_to_be_killed() {
    run_until_killed();
}

#[test]
fn requests_in_flight_at_a_kill_are_executed_by_the_next_process() {
    in_sandbox("requests_in_flight_at_a_kill_are_executed_by_the_next_process", |dir| {
        let mut victim = start_victim(dir);
        let session = victim.session(dir);
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
            victim.line_after("held");
        }
        victim.kill();
        assert!(writes.iter().all(|write| !write.is_finished()) && !read.is_finished());
        assert_eq!(on_disk(dir, HELD_FROM), 0);

        let store = Arc::new(LocalStore::default());
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        drop(session);
        writes.into_iter().for_each(|write| in_time(write).unwrap());
        assert_eq!(in_time(read).unwrap(), 9);
        for number in 0..8 {
            assert_eq!(on_disk(dir, HELD_FROM + number * 4096), 10 + number as u8);
        }
        assert!(export.is_taken_over() && export.is_preserved());
        assert_eq!(std::fs::read_link(&link).unwrap(), device);
        in_time(write_block(&device, 4096, 2)).unwrap();
        assert_eq!(in_time(read_block(&device, 0)).unwrap(), 1);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert!(!is_mounted_below(dir));
        assert!(std::fs::symlink_metadata(&link).is_err());
        assert_eq!(*store.log.lock().unwrap(), ["removed"]);
    });
}

#[test]
fn a_resent_request_is_resent_to_every_later_process() {
    in_sandbox("a_resent_request_is_resent_to_every_later_process", |dir| {
        let mut victim = start_victim(dir);
        let session = victim.session(dir);
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.line_after("held");
        victim.kill();
        for _ in 0..2 {
            let mut victim = start_successor(dir, &session);
            assert_eq!(victim.line_after("held"), format!("{} at {HELD_FROM}", Operation::Write as u32));
            victim.kill();
            assert!(!write.is_finished());
        }
        let store = Arc::new(LocalStore::default());
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        in_time(write).unwrap();
        assert_eq!(on_disk(dir, HELD_FROM), 5);
        drop(session);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn a_handed_over_device_waits_and_the_next_process_serves_its_mounted_ext4() {
    in_sandbox("a_handed_over_device_waits_and_the_next_process_serves_its_mounted_ext4", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let device = export.device_path().to_str().unwrap().to_owned();
        tool("mkfs.ext4", &["-q", &device]);
        let mount = dir.join("mnt");
        std::fs::create_dir(&mount).unwrap();
        tool("mount", &[&device, mount.to_str().unwrap()]);
        for round in 0..3_u8 {
            std::fs::write(mount.join("before"), [round; 100_000]).unwrap();
            export.hand_over(LIMIT).unwrap();
            drop(export);
            let session = store.session.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
            assert!(session.user().unwrap().expect("used").contains("mounted at"));
            let file = mount.join("meanwhile");
            let write = std::thread::spawn(move || {
                let mut file = File::create(file)?;
                file.write_all(&[round; 300_000])?;
                file.sync_all()
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!write.is_finished());
            export =
                FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                    .unwrap();
            in_time(write).unwrap();
            assert!(std::fs::read(mount.join("before")).unwrap() == [round; 100_000]);
        }
        let error = export.stop(StopMode::WhenUnused, LIMIT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        tool("umount", &[mount.to_str().unwrap()]);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert!(!is_mounted_below(dir));
        tool("e2fsck", &["-fn", dir.join("disk").to_str().unwrap()]);
    });
}

#[test]
fn dirty_pages_of_a_closed_device_do_not_delay_the_end_of_a_killed_process() {
    in_sandbox("dirty_pages_of_a_closed_device_do_not_delay_the_end_of_a_killed_process", |dir| {
        let mut victim = start_victim(dir);
        let session = victim.session(dir);
        let device = PathBuf::from(format!("/dev/loop{}", session.state.loop_number));
        // Its close waits for a process that answers none of its requests.
        let close = write_and_close(&device);
        victim.line_after("held");
        victim.kill();
        let store = Arc::new(LocalStore::default());
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        in_time(close);
        assert_eq!(on_disk(dir, HELD_FROM + MIB - 1), 7);
        drop(session);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

/// The kernel sends again what any channel has delivered, not only to a predecessor: requested too late, the
/// messages that the new process has read would reach it twice.
#[test]
fn each_waiting_request_reaches_the_next_process_once() {
    in_sandbox("each_waiting_request_reaches_the_next_process_once", |dir| {
        let mut session = {
            let mut victim = start_victim(dir);
            let session = victim.session(dir);
            victim.kill();
            session
        };
        let device = PathBuf::from(format!("/dev/loop{}", session.state.loop_number));
        let write = |number: usize| write_block(&device, HELD_FROM + number as u64 * 4096, 3);
        let mut writes = Vec::new();
        // A late resend may remain unnoticed in one round.
        for _ in 0..6 {
            // Besides the requests that the last process had read, some that no process has read.
            (0..WAITING).for_each(|_| writes.push(write(writes.len())));
            until("the requests", || in_flight(&session.state) == writes.len() as u64);
            // It answers none, so that each is in flight as long as it lives.
            let mut successor = start_successor(dir, &session);
            let mut held: Vec<String> = writes.iter().map(|_| successor.line_after("held")).collect();
            // One more, which arrives only after all earlier ones have been read.
            writes.push(write(writes.len()));
            held.push(successor.line_after("held"));
            let mut once = held.clone();
            once.sort();
            once.dedup();
            assert_eq!(once.len(), held.len(), "{held:?}");
            successor.kill();
        }
        let store = Arc::new(LocalStore::default());
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        writes.into_iter().for_each(|write| in_time(write).unwrap());
        session.channels.clear();
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

/// The store may have received the descriptors by then. The last closer of a block device writes its pages
/// out: if that were this process, it would wait for the next one, and the next one for its end.
#[test]
fn a_process_that_is_killed_while_it_hands_its_device_over_ends() {
    in_sandbox("a_process_that_is_killed_while_it_hands_its_device_over_ends", |dir| {
        // SAFETY: no other thread of this process accesses the environment now.
        unsafe { std::env::set_var("CBD_FUSE_TEST_PUT_HANGS", "1") };
        let mut victim = start_victim(dir);
        let session = victim.session(dir);
        let device = PathBuf::from(format!("/dev/loop{}", session.state.loop_number));
        let close = write_and_close(&device);
        until("a write or a close", || in_flight(&session.state) > 0 || close.is_finished());
        victim.kill();
        let store = Arc::new(LocalStore::default());
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        in_time(close);
        drop(session);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert_eq!(on_disk(dir, HELD_FROM + MIB - 1), 7);
    });
}

#[test]
fn a_device_with_another_geometry_is_not_served_and_its_clients_keep_waiting() {
    in_sandbox("a_device_with_another_geometry_is_not_served_and_its_clients_keep_waiting", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let device = export.loop_path().to_owned();
        export.hand_over(LIMIT).unwrap();
        drop(export);
        let write = write_block(&device, 0, 3);
        let session = store.session.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let file = Arc::new(File::options().read(true).write(true).open(dir.join("disk")).unwrap());
        let other: Arc<dyn BlockDevice> = Arc::new(FileDevice { file, size: SIZE / 2, holds: false });
        let error = FuseLoop::take_over(&other, &preserved_options(dir, &store), &session).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
        assert!(error.line().contains("waits for its daemon"), "{error}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!write.is_finished() && on_disk(dir, 0) == 0);
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        in_time(write).unwrap();
        drop(session);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

/// The state after a process was killed while it unbound a device that a client had open.
#[test]
fn a_takeover_clears_the_autoclear_flag_of_an_interrupted_stop() {
    in_sandbox("a_takeover_clears_the_autoclear_flag_of_an_interrupted_stop", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let (state, device) = (state_of(&store), export.loop_path().to_owned());
        let used = File::open(&device).unwrap();
        export.hand_over(LIMIT).unwrap();
        drop(export);
        tool("losetup", &["-d", device.to_str().unwrap()]);
        assert_eq!(loop_setting(&state, "autoclear"), "1");
        let session = store.session.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        let mut export =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session)
                .unwrap();
        drop((session, used));
        assert_eq!(loop_setting(&state, "autoclear"), "0");
        in_time(write_block(&device, 0, 1)).unwrap();
        assert_eq!(export.failure(), None);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}
