//! Caches that share the space of a transport.

use super::*;
use crate::SharedSpace;

const BOUNDS: SharedSpace = SharedSpace { min: 9, max: 24, weight: 3 };

#[test]
fn the_bounds_of_a_cache_are_in_its_row_from_its_first_store_on() {
    let transport = transport();
    let fixed = transport.create_backend(&BackendSpec { lanes_max: 1, ..spec() }).expect("room");
    let sharing = BackendSpec { lanes_max: 1, ..spec() };
    let id = transport.create_sharing_backend(&sharing, None, Some(BOUNDS)).expect("room");
    for found in [&transport, &reopened(&transport)] {
        assert_eq!(found.backend(id).expect("it is there").shared, Some(BOUNDS));
        assert_eq!(found.backend(fixed).expect("it is there").shared, None);
    }
    let other = SharedSpace { min: 9, max: u32::MAX, weight: 1000 };
    transport.share_cache(id, Some(other)).expect("possible");
    assert_eq!(reopened(&transport).backend(id).expect("it is there").shared, Some(other));
    transport.share_cache(id, None).expect("possible");
    assert_eq!(reopened(&transport).backend(id).expect("it is there").shared, None);
}

#[test]
fn a_cache_that_is_attached_shares_its_space_and_one_that_is_detached_does_not() {
    let transport = transport();
    let bare = BackendSpec { cache_bytes: None, ..spec() };
    let id = transport.create_backend(&bare).expect("room");
    assert_eq!(kind(transport.share_cache(id, Some(BOUNDS))), Some(ErrorKind::InvalidArgument));
    transport.attach_cache_after(id, 9 * SEGMENT, 1, cbd_types::Epoch(0), Some(BOUNDS)).expect("room");
    assert_eq!(reopened(&transport).backend(id).expect("it is there").shared, Some(BOUNDS));
    transport.take_unused_cache_back(id).expect("it was not used");
    assert_eq!(reopened(&transport).backend(id).expect("it is there").shared, None);
}

#[test]
fn bounds_that_a_cache_cannot_have_are_refused_and_change_nothing() {
    let transport = transport();
    let spec = BackendSpec { lanes_max: 1, ..spec() };
    let id = transport.create_sharing_backend(&spec, None, Some(BOUNDS)).expect("room");
    let free = transport.info().free_segments;
    for (change, why) in [
        (SharedSpace { weight: 0, ..BOUNDS }, "a weight is 1 to 1000, not 0"),
        (SharedSpace { weight: 1001, ..BOUNDS }, "not 1001"),
        (SharedSpace { min: 25, ..BOUNDS }, "is above its maximum"),
        (SharedSpace { min: 8, ..BOUNDS }, "the 1 lanes of the cache need"),
        (SharedSpace { min: 10, ..BOUNDS }, "which is not from"),
    ] {
        for refused in [
            transport.share_cache(id, Some(change)),
            transport.create_sharing_backend(&spec, None, Some(change)).map(|_| ()),
        ] {
            let error = refused.expect_err("it is not possible");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.line().contains(why), "{error}");
        }
    }
    assert_eq!(transport.backend(id).expect("it is there").shared, Some(BOUNDS));
    assert_eq!(transport.info().free_segments, free);
}

#[test]
fn hits_are_counted_up_to_the_maximum_or_to_twice_a_fixed_size() {
    let transport = transport();
    let spec = BackendSpec { lanes_max: 1, ..spec() };
    let total = u64::from(transport.layout().segment_count) * SEGMENT;
    for (shared, expected) in [
        (Some(BOUNDS), 24 * SEGMENT),
        (Some(SharedSpace { max: u32::MAX, ..BOUNDS }), total),
        (None, 16 * SEGMENT),
    ] {
        let id = transport.create_sharing_backend(&spec, None, shared).expect("room");
        let cache = transport.open_cache(id).expect("it opens");
        let counted = cache.hit_curve().rank_bytes * crate::RANKS as u64;
        assert!(counted.abs_diff(expected) < expected / 4, "{counted} instead of {expected}");
        drop(cache);
        transport.remove_backend(id).expect("it is not in use");
    }
}

#[test]
fn a_shrink_that_settles_gives_up_what_is_free_and_keeps_the_rest() {
    let transport = transport();
    let spec = BackendSpec { lanes_max: 1, cache_bytes: Some(30 * SEGMENT), ..spec() };
    let id = transport.create_backend(&spec).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    let free = transport.info().free_segments;
    let mut shrink = cache.begin_clean_shrink(20).expect("it is not too small then");
    assert_eq!(shrink.missing(), 0);
    assert_eq!(shrink.settle(), 20);
    transport.finish_shrink(id, shrink).expect("nothing is missing");
    assert_eq!(transport.info().free_segments, free + 20);
    // Of the nine that are left, the lanes need eight.
    assert_eq!(kind(cache.begin_clean_shrink(2)), Some(ErrorKind::NoSpace));
}
