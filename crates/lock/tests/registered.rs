//! A system with heavy barriers, which it may refuse later.

mod support;

use support::{add_up, forbid};

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
fn all_are_woken() {
    cbd_lock::prepare();
    add_up(|| {});
}

#[test]
fn a_sleeper_whose_heavy_barrier_is_refused_checks_the_lock_itself() {
    cbd_lock::prepare();
    add_up(|| forbid(libc::SYS_membarrier));
}
