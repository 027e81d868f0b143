//! A device that somebody keeps is stopped, or is to be and is not.
#![allow(missing_docs)]

mod support;

use cbd_fuse::StopMode;
use cbd_types::{AlignedBuffer, ErrorKind};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::Duration;
use support::kept::*;

/// Not a test of its own: the process that others kill.
#[test]
fn process_to_be_killed() {
    be_killed();
}

#[test]
fn a_kept_device_that_is_stopped_leaves_nothing_and_is_not_kept() {
    in_sandbox("a_kept_device_that_is_stopped_leaves_nothing_and_is_not_kept", |dir| {
        for mode in [StopMode::WhenUnused, StopMode::Force] {
            let keep = Arc::new(Here::default());
            let mut export = start_kept(dir, &keep);
            let state = state_of(&keep);
            export.stop(mode, SOON).unwrap();
            assert_eq!(*keep.log.lock().unwrap(), ["put", "removed"]);
            assert_eq!(loop_setting(&state, "backing_file"), "");
            assert!(!mounts().contains("fuse.cbd"));
            assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        }
    });
}

#[test]
fn a_stop_by_force_of_a_kept_device_gives_its_users_errors() {
    in_sandbox("a_stop_by_force_of_a_kept_device_gives_its_users_errors", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let state = state_of(&keep);
        let file =
            OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(export.loop_path()).unwrap();
        export.stop(StopMode::Force, SOON).unwrap();
        assert!(file.write_at(&AlignedBuffer::zeroed(4096), 0).is_err());
        assert!(keep.remains.lock().unwrap().is_none());
        drop(file);
        assert_eq!(loop_setting(&state, "backing_file"), "", "it goes with its last user");
    });
}

#[test]
fn a_stop_that_is_refused_leaves_the_device_entrusted_to_the_kernel() {
    in_sandbox("a_stop_that_is_refused_leaves_the_device_entrusted_to_the_kernel", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let state = state_of(&keep);
        let entrusted = || (loop_setting(&state, "autoclear"), loop_setting(&state, "dio"));
        assert_eq!(entrusted(), ("0".into(), "1".into()));
        let file = File::open(export.loop_path()).unwrap();
        for _ in 0..2 {
            let error = export.stop(StopMode::WhenUnused, Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert_eq!(entrusted(), ("0".into(), "1".into()));
        }
        drop(file);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert_eq!(loop_setting(&state, "backing_file"), "");
    });
}
