//! Where the system has barriers that reach all threads; and where it takes them away later.

mod support;

use support::{add_up, forbid};

#[test]
fn all_are_woken() {
    cbd_lock::prepare();
    add_up(|| {});
}

#[test]
fn who_can_make_nobody_pass_a_barrier_any_more_looks_again_by_itself() {
    cbd_lock::prepare();
    add_up(|| forbid(libc::SYS_membarrier));
}
