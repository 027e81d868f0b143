//! Bounds of metadata, in a cache that is opened and in one whose settings change.

use super::rig::{Options, Rig};
use crate::{Admission, Settings};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Class};

/// What clients leave in the pool, and what would be left while blocks are kept.
fn left(rig: &Rig) -> (u32, u32) {
    let pool = rig.cache.base().pool();
    (pool.left_by_clients(), pool.reserve_with_kept())
}

#[test]
fn a_cache_counts_its_metadata_and_reserves_for_its_minimum_when_it_is_opened_or_set() {
    let rig = Rig::new(Options { segments: 33, ..Options::default() });
    let unset = rig.cache.settings();
    let bounds = Settings { pin_percent: 20, metadata_min_percent: 30, metadata_max_percent: 40, ..unset };
    let data = [1; CHECKSUM_BLOCK as usize];
    for block in [0, 1, 7] {
        let range = ByteRange::at(block * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
        let written = rig.cache.write_marked(Class::Metadata, range, &data, &rig.waker);
        assert!(matches!(written, Ok(Admission::Done(_))), "block {block}");
    }
    let (before, kept) = left(&rig);
    assert!(before < kept, "{before} and {kept}");
    rig.transport.update_settings(rig.backend, bounds).expect("valid");
    let rig = rig.reopened();
    assert_eq!(rig.cache.settings(), bounds);
    assert_eq!((left(&rig), rig.cache.base().metadata_bytes()), ((kept, kept), 3 * CHECKSUM_BLOCK));
    rig.cache.set_settings(unset).expect("valid");
    assert_eq!(left(&rig), (before, kept), "no minimum");
    rig.cache.set_settings(bounds).expect("valid");
    assert_eq!(left(&rig), (kept, kept));
}
