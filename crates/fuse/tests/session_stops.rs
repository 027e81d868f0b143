//! Stops of a device that is in the descriptor store, completed and refused.
#![allow(missing_docs)]

mod support;

use cbd_fuse::{FuseLoop, SessionState, StopMode};
use cbd_types::{AlignedBuffer, ErrorKind};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::session::*;
use support::{Exported, LIMIT, MIB, TestDevice, in_sandbox, options, tool, until};

#[test]
fn a_stopped_device_leaves_nothing_in_the_system_or_the_descriptor_store() {
    in_sandbox("a_stopped_device_leaves_nothing_in_the_system_or_the_descriptor_store", |dir| {
        for mode in [StopMode::WhenUnused, StopMode::Force] {
            let store = Arc::new(LocalStore::default());
            let mut export = start_preserved(dir, &store);
            let state = state_of(&store);
            export.stop(mode, LIMIT).unwrap();
            assert_eq!(*store.log.lock().unwrap(), ["put", "removed"]);
            assert_eq!(loop_setting(&state, "backing_file"), "");
            assert!(!is_mounted_below(dir));
            assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        }
    });
}

#[test]
fn a_forced_stop_of_a_preserved_device_gives_its_users_errors() {
    in_sandbox("a_forced_stop_of_a_preserved_device_gives_its_users_errors", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let state = state_of(&store);
        let file =
            OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(export.loop_path()).unwrap();
        export.stop(StopMode::Force, LIMIT).unwrap();
        assert!(file.write_at(&AlignedBuffer::zeroed(4096), 0).is_err());
        assert!(store.session.lock().unwrap().is_none());
        drop(file);
        assert_eq!(loop_setting(&state, "backing_file"), "", "it is unbound with its last user");
    });
}

#[test]
fn a_stop_that_is_refused_leaves_the_device_persistent() {
    in_sandbox("a_stop_that_is_refused_leaves_the_device_persistent", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let state = state_of(&store);
        let persistent = || (loop_setting(&state, "autoclear"), loop_setting(&state, "dio"));
        assert_eq!(persistent(), ("0".into(), "1".into()));
        let file = File::open(export.loop_path()).unwrap();
        for _ in 0..2 {
            let error = export.stop(StopMode::WhenUnused, Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert_eq!(persistent(), ("0".into(), "1".into()));
        }
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert_eq!(loop_setting(&state, "backing_file"), "");
    });
}

/// A preserved device over one that answers no request while it is stuck.
fn start_stuck(dir: &Path, store: &Arc<LocalStore>) -> (FuseLoop, Arc<TestDevice>) {
    let device = Arc::new(TestDevice { parks: true, ..TestDevice::new(SIZE, 512) });
    let exported = Arc::new(Exported(Arc::clone(&device)));
    let export = FuseLoop::start(exported, preserved_options(dir, store)).expect("a device");
    assert!(export.is_preserved(), "{:?}", export.not_preserved());
    // The kernel reads a new block device; on a busy machine it takes a while.
    until("the end of the first requests", || in_flight(&state_of(store)) == 0);
    device.stuck.store(true, Ordering::Relaxed);
    (export, device)
}

/// A process that is killed while it waits for its own device must be able to end: so the connection has to
/// end with it.
#[test]
fn while_a_stop_waits_for_the_device_below_no_other_process_holds_the_connection() {
    let name = "while_a_stop_waits_for_the_device_below_no_other_process_holds_the_connection";
    in_sandbox(name, |dir| {
        let store = Arc::new(LocalStore::default());
        let (mut export, device) = start_stuck(dir, &store);
        let log = || store.log.lock().unwrap().clone();
        // The loop device has no request in flight; unbinding it needs a flush.
        let error = export.stop(StopMode::WhenUnused, Duration::from_millis(100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(log(), ["put", "removed"]);
        assert!(!export.is_preserved());
        device.stuck.store(false, Ordering::Relaxed);
        until("its return", || log() == ["put", "removed", "put"]);
        until("its return", || export.is_preserved());
        let state = state_of(&store);
        assert_eq!(loop_setting(&state, "autoclear"), "0");
        in_time(write_block(export.loop_path(), 0, 1)).unwrap();
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert_eq!(log(), ["put", "removed", "put", "removed"]);
    });
}

#[test]
fn a_device_that_its_own_process_waits_for_is_ended_instead_of_handed_over() {
    in_sandbox("a_device_that_its_own_process_waits_for_is_ended_instead_of_handed_over", |dir| {
        let store = Arc::new(LocalStore::default());
        let (mut export, device) = start_stuck(dir, &store);
        export.stop(StopMode::WhenUnused, Duration::from_millis(100)).unwrap_err();
        let began = Instant::now();
        // Threads still wait for the device below, and no thread waits for them.
        assert_eq!(export.hand_over(Duration::from_secs(1)).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
        assert!(export.is_ended() && !is_mounted_below(dir));
        device.stuck.store(false, Ordering::Relaxed);
        drop(export);
        assert_eq!(*store.log.lock().unwrap(), ["put", "removed"]);
    });
}

/// A client that has closed the device is no longer listed as an opener, but its dirty pages are only here.
#[test]
fn a_device_whose_last_closer_still_writes_pages_back_is_in_use() {
    in_sandbox("a_device_whose_last_closer_still_writes_pages_back_is_in_use", |dir| {
        let store = Arc::new(LocalStore::default());
        let (mut export, device) = start_stuck(dir, &store);
        let state = state_of(&store);
        let close = write_and_close(export.loop_path());
        until("its pages", || in_flight(&state) > 0);
        let error = export.stop(StopMode::WhenUnused, Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(export.is_preserved() && !close.is_finished());
        assert_eq!(*store.log.lock().unwrap(), ["put"]);
        device.stuck.store(false, Ordering::Relaxed);
        in_time(close);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert_eq!(device.bytes.read().unwrap()[HELD_FROM as usize], 7);
    });
}

/// Detaches an idle loop device, as an administrator may.
fn detach(state: &SessionState) {
    tool("losetup", &["-d", &format!("/dev/loop{}", state.loop_number)]);
    until("its end", || loop_setting(state, "backing_file").is_empty());
}

#[test]
fn a_manually_detached_loop_device_is_reported_and_the_next_user_of_its_number_is_not_touched() {
    let name = "a_manually_detached_loop_device_is_reported_and_the_next_user_of_its_number_is_not_touched";
    in_sandbox(name, |dir| {
        for mode in [StopMode::WhenUnused, StopMode::Force] {
            let store = Arc::new(LocalStore::default());
            let mut export = start_preserved(dir, &store);
            let state = state_of(&store);
            assert_eq!(export.failure(), None);
            detach(&state);
            assert!(
                export.failure().is_some_and(|text| text.contains("losetup -d")),
                "{:?}",
                export.failure()
            );
            let (other, loop_path) = (dir.join("other"), export.loop_path().to_str().unwrap().to_owned());
            File::create(&other).unwrap().set_len(MIB).unwrap();
            tool("losetup", &[&loop_path, other.to_str().unwrap()]);
            let stopped = export.stop(mode, LIMIT);
            let bound = loop_setting(&state, "backing_file");
            tool("losetup", &["-d", &loop_path]);
            stopped.unwrap();
            assert_eq!(bound, other.to_str().unwrap());
            assert!(!is_mounted_below(dir));
            assert_eq!(*store.log.lock().unwrap(), ["put", "removed"]);
        }
    });
}

#[test]
fn a_connection_that_has_ended_ends_no_other_that_has_its_number_now() {
    let name = "a_connection_that_has_ended_ends_no_other_that_has_its_number_now";
    in_sandbox(name, |dir| {
        let other_dir = dir.join("other");
        std::fs::create_dir(&other_dir).unwrap();
        // A connection can be addressed by its number only there.
        if !Path::new("/sys/fs/fuse/connections").read_dir().unwrap().any(|_| true) {
            tool("mount", &["-t", "fusectl", "none", "/sys/fs/fuse/connections"]);
        }
        // Other processes of the machine may take the number first.
        for _ in 0..20 {
            let store = Arc::new(LocalStore::default());
            let mut export = start_preserved(dir, &store);
            let state = state_of(&store);
            detach(&state);
            until("an unmount", || unmounts(&state));
            let other = FuseLoop::start(FileDevice::open(&other_dir, false), options(&other_dir, 1)).unwrap();
            let mount = cbd_export::mounts::at(&other_dir.join("fuse/cbd7")).unwrap().expect("a mount");
            export.stop(StopMode::Force, LIMIT).unwrap();
            if mount.device.minor == state.connection {
                assert_eq!(other.failure(), None);
                in_time(write_block(other.loop_path(), 0, 1)).unwrap();
                return;
            }
        }
        panic!("no other connection had the number");
    });
}

/// Unmounts the file system of a preserved device manually; returns whether that succeeded.
fn unmounts(state: &SessionState) -> bool {
    let mut umount = std::process::Command::new("umount");
    umount.arg(&state.mount_dir).stderr(std::process::Stdio::null()).status().unwrap().success()
}
