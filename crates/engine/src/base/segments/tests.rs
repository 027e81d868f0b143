//! When a segment returns to the pool.

use super::super::Requester;
use crate::tests::bell;
use crate::tests::rig::{Options, Rig, SECTOR};
use cbd_format::SegmentHeader;
use cbd_types::{ByteRange, CHUNK, LaneId};

#[test]
fn a_segment_returns_to_the_pool_once_when_it_is_retired_and_no_reader_has_pinned_it() {
    let rig = Rig::new(Options::default());
    let base = rig.cache.base();
    for pins in 0..4 {
        let free = base.pool().free();
        let number = base.pool().take(Requester::Essential, None).expect("there is one");
        base.segment(number).begin(LaneId(0), 1, 2, 3);
        for _ in 0..3 {
            // Readers that end before it is retired.
            base.segment(number).pin();
            base.unpin(number);
        }
        (0..pins).for_each(|_| base.segment(number).pin());
        base.retire(number);
        for left in (0..pins).rev() {
            assert_eq!(base.pool().free(), free - 1, "{} readers", left + 1);
            base.unpin(number);
        }
        assert_eq!(base.pool().free(), free);
        // A late reader releases it no second time.
        base.segment(number).pin();
        base.unpin(number);
        assert_eq!(base.pool().free(), free);
    }
}

#[test]
fn the_last_reader_of_a_retired_segment_wakes_the_worker_if_few_segments_are_free() {
    let rig = Rig::new(Options { lanes: 2, segments: 17, device: 2 * CHUNK, ..Options::default() });
    let (bell, waker) = bell();
    rig.cache.set_worker_waker(waker);
    let base = rig.cache.base();
    for (left, is_woken) in [(0, true), (1, true), (2, false), (5, false)] {
        let mut taken: alloc::vec::Vec<u32> = core::iter::from_fn(|| {
            (base.pool().free() > left).then(|| base.pool().take(Requester::Essential, None))
        })
        .map(|segment| segment.expect("there is one"))
        .collect();
        let number = taken.pop().expect("there are some");
        base.segment(number).begin(LaneId(0), 1, 2, 3);
        base.segment(number).pin();
        base.retire(number);
        let before = bell.rings();
        base.unpin(number);
        // With this one the reserve of two may be complete.
        assert_eq!((base.pool().free(), bell.rings() > before), (left + 1, is_woken), "{left} were free");
        rig.give_space(taken);
    }
}

#[test]
fn an_open_segment_is_what_its_header_says() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(ByteRange::at(0, SECTOR), 1));
    let view = rig.cache.log().segments(LaneId(0))[0];
    let mut bytes = [0; 128];
    rig.transport.region().load(view.base, &mut bytes).expect("it can be read");
    let cache_id = rig.cache.base().identity().cache_id;
    let header = SegmentHeader::decode(&bytes).expect("long enough").verify(view.segment, cache_id, 1);
    let header = header.expect("it is good");
    let place = rig.cache.log().place(&view, 5);
    assert_eq!((place.salt, place.segment, place.slot), (header.salt.get(), view.segment, 5));
    let number = rig.cache.lane(LaneId(0)).lock().segments().next().expect("there is one").segment;
    let segment = rig.cache.base().segment(number);
    assert_eq!((segment.generation(), segment.ordinal(), segment.lane()), (1, 1, LaneId(0)));
    assert_eq!(segment.base(), view.base);
}
