//! The map of a device: what its cache holds of each part of it.

pub use cbd_engine::MAP_CELLS_MAX;
use serde::{Deserialize, Serialize};

/// What the cache holds of a device, by equal parts of it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DeviceMap {
    /// Number of the backend.
    pub backend_id: u32,
    /// Bytes of the device.
    pub size: u64,
    /// Bytes of the device that a cell stands for; the last cell may have fewer.
    pub cell_bytes: u64,
    /// One block in so many was looked at and stands for the others; 1 for a map without an error.
    pub sampled_one_of: u64,
    /// The cells, in the order of the device.
    pub cells: Vec<MapCell>,
}

/// What the cache holds of one part of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MapCell {
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Those of them that the disk does not have yet.
    pub dirty_bytes: u64,
    /// Those of them that were read since they were written into the cache: the blocks that reclaim keeps.
    pub read_bytes: u64,
}

impl From<cbd_engine::MapCell> for MapCell {
    fn from(cell: cbd_engine::MapCell) -> Self {
        let cbd_engine::MapCell { cached_bytes, dirty_bytes, read_bytes } = cell;
        Self { cached_bytes, dirty_bytes, read_bytes }
    }
}
