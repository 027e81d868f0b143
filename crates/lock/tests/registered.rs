//! A system with heavy barriers, which it may refuse later.

mod support;

use support::{forbid, increment_from_threads};

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
