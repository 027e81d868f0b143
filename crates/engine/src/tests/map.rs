//! The map of a cache: what it holds of each part of the device.

use super::rig::{Options, Rig, SEGMENT};
use crate::{MAP_CELLS_MAX, MapCell};
use cbd_types::{ByteRange, CHUNK};

const BLOCK: u64 = 4096;

fn cell(cached: u64, dirty: u64, read: u64) -> MapCell {
    MapCell { cached_bytes: cached, dirty_bytes: dirty, read_bytes: read }
}

#[test]
fn each_part_of_the_device_has_what_is_cached_dirty_and_read_of_it() {
    for lanes in [1, 2] {
        let mut rig = Rig::new(Options { device: 4 * CHUNK, lanes, segments: 33, ..Options::default() });
        let block = |chunk: u64, number: u64| ByteRange::at(chunk * CHUNK + number * BLOCK, BLOCK);
        for number in 0..6 {
            assert!(rig.write(block(0, number), 1));
        }
        assert!(rig.write(block(3, 100), 2));
        rig.drain();
        // Two of the six are dirty again, one in part; another chunk has half a block.
        assert!(rig.write(block(0, 4), 3));
        assert!(rig.write(ByteRange::at(5 * BLOCK, 512), 3));
        assert!(rig.write(ByteRange::at(2 * CHUNK + 2048, 2048), 3));
        rig.read(block(0, 0));
        rig.read(block(3, 100));
        let map = rig.cache.map(4).expect("memory");
        assert_eq!((map.cell_bytes, map.sampled_one_of), (CHUNK, 1));
        let expected =
            [cell(6 * BLOCK, BLOCK + 512, BLOCK), cell(0, 0, 0), cell(2048, 2048, 0), cell(BLOCK, 0, BLOCK)];
        assert_eq!(map.cells, expected, "{lanes} lanes");
        rig.drain();
        assert!(rig.cache.map(4).expect("memory").cells.iter().all(|cell| cell.dirty_bytes == 0));
    }
}

#[test]
fn the_number_of_cells_has_bounds_and_the_last_one_may_be_shorter() {
    let rig = Rig::new(Options { device: 10 * BLOCK, ..Options::default() });
    assert!(rig.write(ByteRange::at(9 * BLOCK, BLOCK), 1));
    let cells = |cells| {
        let map = rig.cache.map(cells).expect("memory");
        (map.cell_bytes, map.cells.len(), map.cells.last().map_or(0, |cell| cell.cached_bytes))
    };
    assert_eq!(cells(0), (10 * BLOCK, 1, BLOCK));
    assert_eq!(cells(3), (4 * BLOCK, 3, BLOCK));
    assert_eq!(cells(usize::MAX), (BLOCK, 10, BLOCK));
    assert_eq!(Rig::new(Options::default()).cache.map(9999).expect("memory").cells.len(), MAP_CELLS_MAX);
}

#[test]
fn a_large_index_is_sampled_and_what_is_not_looked_at_is_estimated() {
    // An index far larger than what is in it, so that a map visits one bucket in several.
    let rig = Rig::new(Options { device: 16 * CHUNK, segments: 900, ..Options::default() });
    rig.cache.resize_index(300_000, || {}).expect("memory");
    let written = 500 * SEGMENT / 2;
    for at in (0..written).step_by(16 << 10) {
        assert!(rig.write(ByteRange::at(at, 16 << 10), 1));
    }
    let map = rig.cache.map(16).expect("memory");
    assert!(map.sampled_one_of > 1, "{map:?}");
    let cached: u64 = map.cells.iter().map(|cell| cell.cached_bytes).sum();
    assert!(cached.abs_diff(written) < written / 10, "{cached} of {written}");
    assert!(
        map.cells
            .iter()
            .all(|cell| cell.cached_bytes <= map.cell_bytes && cell.dirty_bytes == cell.cached_bytes)
    );
}
