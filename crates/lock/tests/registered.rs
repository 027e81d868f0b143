//! A system with heavy barriers, which it may refuse later.

mod support;

use support::{forbid, increment_from_threads};

#[test]
fn a_lock_is_held_by_one_until_it_is_released() {
    let lock = lock_api::Mutex::<cbd_lock::Lock, ()>::new(());
    assert!(!lock.is_locked());
    let held = lock.lock();
    assert!(lock.is_locked() && lock.try_lock().is_none());
    drop(held);
    assert!(!lock.is_locked() && lock.try_lock().is_some());
}

#[test]
fn every_sleeping_thread_is_woken() {
    cbd_lock::prepare();
    increment_from_threads(|| {});
}

#[test]
fn a_sleeper_whose_heavy_barrier_is_refused_checks_the_lock_after_a_timeout() {
    cbd_lock::prepare();
    increment_from_threads(|| forbid(libc::SYS_membarrier));
}
