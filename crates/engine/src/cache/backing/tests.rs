//! What status and requests without space learn of the backing device.

use super::*;
use crate::tests::{Still, WALL_MS};
use alloc::borrow::ToOwned;

fn error(text: &str) -> Error {
    Error::new(ErrorKind::Backing, text.to_owned())
}

#[test]
fn failures_are_counted_and_the_last_one_is_told() {
    let health = BackingHealth::<Still>::new();
    let report = health.report();
    assert_eq!((report.is_stalled, report.failures, report.last_failure), (false, 0, None));
    assert!(report.trouble.is_none());
    health.note_failure(&Still::default(), &error("first"));
    let later = Still::default();
    later.set_wall(WALL_MS + 1);
    health.note_failure(&later, &error("second"));
    let report = health.report();
    assert_eq!(report.failures, 2);
    assert!(report.last_failure.is_some_and(|line| line.contains("second")));
    let trouble = report.trouble.expect("it fails");
    assert_eq!((trouble.attempts, trouble.since_wall_ms), (2, WALL_MS));
    assert!(trouble.error.contains("second"));
    health.end_trouble();
    let report = health.report();
    assert!(report.trouble.is_none() && report.failures == 2 && report.last_failure.is_some());
    health.note_failure(&Still::default(), &error("third"));
    assert_eq!(health.report().trouble.map(|trouble| trouble.attempts), Some(1));
}

#[test]
fn bytes_and_flushes_add_up() {
    let health = BackingHealth::<Still>::new();
    health.count_written(512);
    health.count_written(4096);
    health.count_flush();
    assert_eq!((health.report().written_back_bytes, health.report().flushes), (4608, 1));
}

#[test]
fn who_waits_is_woken_once_when_failing_begins_and_never_when_it_ends() {
    let health = BackingHealth::<Still>::new();
    let changes = [false, true, true, false, false, true];
    assert_eq!(changes.map(|stalled| health.set_stalled(stalled)), [false, true, false, false, false, true]);
    assert!(health.report().is_stalled);
}

#[test]
fn a_request_without_space_fails_with_the_cause_while_the_device_is_stalled() {
    let health = BackingHealth::<Still>::new();
    health.note_failure(&Still::default(), &error("no such block"));
    assert!(health.check_not_stalled().is_ok());
    health.set_stalled(true);
    let refused = health.check_not_stalled().expect_err("it is stalled");
    assert_eq!(refused.kind(), ErrorKind::Backing);
    assert!(refused.line().contains("no such block"), "{}", refused.line());
    health.set_stalled(false);
    assert!(health.check_not_stalled().is_ok());
}
