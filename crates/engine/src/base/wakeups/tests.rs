//! When the background worker is woken.

use super::*;
use crate::tests::{Still, bell};

#[test]
fn one_sleep_that_was_announced_costs_one_wakeup() {
    let wakeups = Wakeups::<Still>::new();
    wakeups.wake();
    let (bell, waker) = bell();
    wakeups.set_waker(waker);
    assert!(!wakeups.is_asleep());
    wakeups.wake_if_asleep();
    assert_eq!(bell.rings(), 0, "it is awake");
    for sleeps in 1..3 {
        wakeups.announce_sleep();
        assert!(wakeups.is_asleep());
        (0..3).for_each(|_| wakeups.wake_if_asleep());
        assert_eq!((wakeups.is_asleep(), bell.rings()), (false, sleeps));
    }
    wakeups.wake();
    assert_eq!(bell.rings(), 3, "whether it sleeps or not");
}
