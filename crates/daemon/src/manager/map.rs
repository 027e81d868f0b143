//! The map of a device.
//!
//! Invariants: no table is locked while the cache is looked at.
//!
//! Elsewhere: what the cache holds (`cbd-engine`).

use super::Manager;
use crate::api::{DeviceMap, MAP_CELLS_MAX, MapCell};
use cbd_types::{BackendId, Error, ErrorKind, Result};

/// The cells of a map if the client names no number.
const CELLS: usize = 128;

impl Manager {
    /// What the cache of a backend holds of the device, in at most `cells` cells.
    pub(super) fn map_of(&self, transport: u32, id: BackendId, cells: Option<usize>) -> Result<DeviceMap> {
        let cells = cells.unwrap_or(CELLS);
        if !(1..=MAP_CELLS_MAX).contains(&cells) {
            let text = format!("a map has 1 to {MAP_CELLS_MAX} cells, not {cells}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let cache = {
            let mut tables = self.tables()?;
            let slot = super::transport::running_mut(&mut tables, transport)?.backend_mut(id)?;
            slot.run.as_ref().and_then(|run| run.cache())
        };
        let cache = cache.ok_or_else(|| {
            let text = format!("backend {id} has no cache, or is not up: there is no map of it");
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        let map = cache.map(cells)?;
        Ok(DeviceMap {
            backend_id: id.0,
            size: cache.size(),
            cell_bytes: map.cell_bytes,
            sampled_one_of: map.sampled_one_of,
            cells: map.cells.into_iter().map(MapCell::from).collect(),
        })
    }
}
