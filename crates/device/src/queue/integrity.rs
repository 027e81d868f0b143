//! Writes that come with a checksum: other data is not stored.
//!
//! Invariant: each path of a write looks, or leaves it to the engine, before anything changes. Out of line, because the errors need stack.

use super::Queue;
use alloc::vec::Vec;
use cbd_engine::{Environment, crc32c};
use cbd_types::{BackingQueue, Completion, Request};

/// Whether the data is not what its checksum is of, which is then of no interest any more.
#[inline(never)]
pub(super) fn has_other_data(request: &mut Request) -> bool {
    request.data_crc.is_some() && request.check_data(crc32c).is_err()
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    #[cold]
    #[inline(never)]
    pub(super) fn refuse_other_data(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.end(request, Err(Request::other_data()), 0, done);
    }
}
