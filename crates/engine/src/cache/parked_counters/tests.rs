//! What is counted of parking.

use super::*;
use crate::tests::Still;
use alloc::borrow::ToOwned;
use cbd_types::ErrorKind;

#[test]
fn each_event_has_its_own_count() {
    let counters = ParkedCounters::<Still>::new();
    (0..3).for_each(|_| counters.count_parked());
    (0..2).for_each(|_| counters.count_unparked());
    counters.count_attempt();
    let report = counters.report();
    assert_eq!((report.parked, report.unparked, report.attempts, report.error), (3, 2, 1, None));
    assert_eq!(counters.unparked(), 2);
}

#[test]
fn the_last_refusal_is_told_while_something_is_parked() {
    let counters = ParkedCounters::<Still>::new();
    for text in ["first", "second"] {
        counters.note_refusal(&Error::new(ErrorKind::Backing, text.to_owned()));
        assert!(counters.report().error.is_some_and(|line| line.contains(text)));
    }
    counters.forget_refusal();
    assert_eq!(counters.report().error, None);
}
