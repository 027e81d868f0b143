//! A system without heavy barriers from the beginning: each unlock passes a full barrier.

mod support;

use support::{add_up, forbid};

#[test]
fn all_are_woken() {
    add_up(|| {
        forbid(libc::SYS_membarrier);
        cbd_lock::prepare();
    });
}
