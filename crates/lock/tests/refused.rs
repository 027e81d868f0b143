//! Where the system has no barriers that reach all threads, from the beginning: each who lets go passes one.

mod support;

use support::{add_up, forbid};

#[test]
fn all_are_woken() {
    add_up(|| {
        forbid(libc::SYS_membarrier);
        cbd_lock::prepare();
    });
}
