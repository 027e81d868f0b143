//! The tables as tools look at them.

use super::Transport;
use crate::Environment;
use cbd_format::BackendEntry as BackendRow;
use cbd_types::{BackendId, SegmentId};

impl<E: Environment> Transport<E> {
    /// The segments that belong to a backend, its state segment among them; none where it has no cache.
    pub fn segments_of(&self, id: BackendId) -> alloc::vec::Vec<SegmentId> {
        let tables = self.tables.lock();
        let row = tables.backends.get(id.index()).and_then(|row| row.content());
        row.map_or_else(alloc::vec::Vec::new, |_| tables.segments_of(id))
    }

    /// The row of a backend as it stands on the medium, if it can be read: also where what it says is impossible.
    pub fn backend_row(&self, id: BackendId) -> Option<BackendRow> {
        self.tables.lock().backends.get(id.index())?.content().copied()
    }
}
