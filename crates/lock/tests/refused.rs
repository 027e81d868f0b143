//! A system without heavy barriers from the beginning: each unlock passes a full barrier.

mod support;

use support::{forbid, increment_from_threads};

#[test]
fn every_sleeping_thread_is_woken() {
    increment_from_threads(|| {
        forbid(libc::SYS_membarrier);
        cbd_lock::prepare();
    });
}
