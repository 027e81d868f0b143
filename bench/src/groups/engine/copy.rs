//! The limit: a loop that only copies and fences.

use crate::scale::Sources;
use crate::turns::Turn;
use crate::window::{Store, Window};
use cbd_types::{Pmem, Result};

/// Repeats `stores` in `memory`, each durable before the next begins.
///
/// # Errors
/// Returns no error.
pub fn turn<M: Pmem>(memory: &Window<M>, sources: &Sources, stores: &[Store]) -> Result<Turn> {
    Turn::measure(stores.len(), || {
        for (number, store) in stores.iter().enumerate() {
            memory.store(store.at, &sources.get(number)[..store.length]);
            memory.fence();
        }
        Ok(())
    })
}
