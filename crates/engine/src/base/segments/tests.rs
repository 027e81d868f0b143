//! When a segment returns to the pool.

use super::super::Requester;
use crate::tests::rig::{Options, Rig, SECTOR};
use cbd_format::SegmentHeader;
use cbd_types::{ByteRange, LaneId};

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
