//! A system with heavy barriers, which it may refuse later.

mod support;

use support::{add_up, forbid};

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
