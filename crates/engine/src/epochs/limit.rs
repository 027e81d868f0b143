//! The limit of writeback: while there is one, nothing of a later epoch is written to the backing device.
//!
//! Invariants:
//! - a limit belongs to one caller: it is claimed before the epoch is closed that it names in the end. A batch that began before
//!   the claim has only epochs that were closed before, so it is below the limit, too;
//! - a limit names a later epoch than the one before it, so that no thread lifts another one than it has seen;
//! - the limit is in memory only: a process that ends leaves none.
//!
//! Elsewhere: who claims it (`cache::moment`), who obeys it (`worker::writeback`, `cache::bypass`).

use super::Epochs;
use crate::{Environment, sync::SharedU64};
use core::sync::atomic::Ordering;

/// The value of [`Limited::state`] while there is no limit. The first epoch is 1.
const NONE: u64 = 0;

/// The limit as threads share it.
pub(super) struct Limited<E: Environment> {
    /// The last epoch that may be written and, in the lowest bit, whether it is held; or [`NONE`].
    state: SharedU64<E>,
}

impl<E: Environment> Limited<E> {
    pub(super) const fn new() -> Self {
        Self { state: SharedU64::new(NONE) }
    }
}

/// A limit of writeback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limit {
    /// The last epoch that may be written.
    pub epoch: u64,
    /// It ends with the pause of writeback.
    pub is_held: bool,
}

impl Limit {
    const fn state(self) -> u64 {
        self.epoch << 1 | self.is_held as u64
    }
}

impl<E: Environment> Epochs<E> {
    /// The limit, if there is one. A caller that relies on closed epochs being below a later limit reads which are closed before it
    /// calls this.
    pub(crate) fn limit(&self) -> Option<Limit> {
        let state = self.limit.state.load(Ordering::SeqCst);
        (state != NONE).then_some(Limit { epoch: state >> 1, is_held: state & 1 != 0 })
    }

    /// Sets the limit to the present epoch. Returns `false` if there is a limit already.
    pub(crate) fn claim_limit(&self) -> bool {
        let limit = Limit { epoch: self.present(), is_held: false };
        self.limit.state.replace(NONE, limit.state())
    }

    /// Raises the limit, which the caller has claimed, to `epoch`, which it has closed since.
    pub(crate) fn raise_limit(&self, epoch: u64) {
        self.limit.state.fetch_max(Limit { epoch, is_held: false }.state(), Ordering::SeqCst);
    }

    /// From now on the limit, which the caller has raised to `epoch`, ends with the pause of writeback.
    pub(crate) fn hold_limit(&self, epoch: u64) {
        let limit = Limit { epoch, is_held: false };
        self.limit.state.replace(limit.state(), Limit { is_held: true, ..limit }.state());
    }

    /// Ends this limit, if it is still the present one.
    pub(crate) fn lift_limit(&self, limit: Limit) {
        self.limit.state.replace(limit.state(), NONE);
    }
}
