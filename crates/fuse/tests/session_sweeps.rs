//! Sessions without a server: abandoned and unusable ones are removed, waiting ones are not.
#![allow(missing_docs)]

mod support;

use cbd_fuse::{FuseLoop, StopMode, Swept, abort_connections, sweep};
use cbd_types::ErrorKind;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::session::*;
use support::{LIMIT, in_sandbox, tool};

#[test]
fn ending_a_preserved_session_fails_the_waiting_requests() {
    in_sandbox("ending_a_preserved_session_fails_the_waiting_requests", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let (device, state) = (export.loop_path().to_owned(), state_of(&store));
        let file = File::open(&device).unwrap();
        export.hand_over(LIMIT).unwrap();
        drop(export);
        let write = write_block(&device, 0, 1);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!write.is_finished());
        // The start of another daemon does not change it, and does not wait for it.
        let began = Instant::now();
        let swept = sweep(dir, dir, std::slice::from_ref(&state.mount_dir)).unwrap();
        assert_eq!(swept, Swept { alive: vec![state.mount_dir.clone()], ..Swept::default() });
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        let session = store.session.lock().unwrap().take().unwrap();
        assert!(session.is_usable());
        session.end();
        assert!(in_time(write).is_err());
        assert!(!is_mounted_below(dir));
        assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        assert!(!dir.join("fuse/cbd7").exists());
        drop(file);
        assert_eq!(loop_setting(&state, "backing_file"), "");
    });
}

#[test]
fn a_session_whose_loop_device_has_another_file_is_not_usable() {
    in_sandbox("a_session_whose_loop_device_has_another_file_is_not_usable", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let mut session = store.session.lock().unwrap().as_ref().unwrap().try_clone().unwrap();
        assert!(session.is_usable());
        let number = std::mem::replace(&mut session.state.loop_number, 1_048_001);
        assert!(!session.is_usable());
        let error =
            FuseLoop::take_over(&FileDevice::open(dir, false), &preserved_options(dir, &store), &session);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
        session.state.loop_number = number;
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert!(!session.is_usable(), "the connection has ended");
    });
}

#[test]
fn a_loop_device_of_an_aborted_connection_is_swept_and_a_waiting_one_is_not() {
    let name = "a_loop_device_of_an_aborted_connection_is_swept_and_a_waiting_one_is_not";
    in_sandbox(name, |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let state = state_of(&store);
        let loop_path = export.loop_path().to_owned();
        export.hand_over(LIMIT).unwrap();
        drop(export);
        // Not visible, as after an unmount by an administrator, but a process may still serve it.
        tool("umount", &["-l", state.mount_dir.to_str().unwrap()]);
        assert_eq!(sweep(dir, dir, &[]).unwrap(), Swept::default());
        assert_ne!(loop_setting(&state, "backing_file"), "");
        *store.session.lock().unwrap() = None;
        let swept = sweep(dir, dir, &[]).unwrap();
        assert_eq!(swept.loops, [loop_path]);
        assert_eq!(swept.links, [dir.join("cbd7")]);
        // A program that opens every new block device for a moment delays the detachment until it closes the device.
        let end = std::time::Instant::now() + LIMIT;
        while !loop_setting(&state, "backing_file").is_empty() {
            assert!(std::time::Instant::now() < end, "the loop device is still bound");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(abort_connections(dir).unwrap(), 0);
    });
}

/// A process that reads from a device that waits for its daemon waits with it, and cannot even be killed.
#[test]
fn an_invisible_device_that_waits_for_another_daemon_is_not_read() {
    in_sandbox("an_invisible_device_that_waits_for_another_daemon_is_not_read", |dir| {
        let store = Arc::new(LocalStore::default());
        let mut export = start_preserved(dir, &store);
        let state = state_of(&store);
        export.hand_over(LIMIT).unwrap();
        drop(export);
        tool("umount", &["-l", state.mount_dir.to_str().unwrap()]);
        let other = dir.join("another");
        std::fs::create_dir(&other).unwrap();
        assert_eq!(sweep(&other, &other, &[]).unwrap(), Swept::default());
        assert_eq!(in_flight(&state), 0);
        *store.session.lock().unwrap() = None;
        assert_eq!(sweep(dir, dir, &[]).unwrap().loops.len(), 1);
    });
}
