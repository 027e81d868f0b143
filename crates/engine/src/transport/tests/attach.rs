//! Caches that backends get and lose: what is stored, in which order, and what is refused.

use super::*;
use crate::tests::rig::{Options, Rig};

fn uncached(transport: &Tested) -> BackendId {
    transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("there is room")
}

/// The kind and the text of the error.
fn refused<T>(result: Result<T>) -> (ErrorKind, String) {
    let error = result.err().expect("it is refused");
    (error.kind(), error.line())
}

fn has_all(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part} in {text}"));
}

#[test]
fn a_cache_is_attached_in_the_order_segments_state_row_and_is_empty() {
    let transport = transport();
    let (layout, id) = (transport.layout(), uncached(&transport));
    let free = transport.info().free_segments;
    ops(&transport);
    transport.attach_cache(id, 9 * SEGMENT, 16).expect("there is room");
    let all = ops(&transport);
    let entry = slots::<SegmentEntry>(layout.segment_table, layout.segment_count, 0);
    let row = slots::<BackendRow>(layout.backend_area, 4, id.0);
    let at = |op: Op| all.iter().position(|seen| *seen == op).unwrap_or_else(|| panic!("{op:?}: {all:?}"));
    let steps = [
        at(Op::Store(0, 192)),
        at(Op::Store(entry[0], 64)),
        at(Op::Store(entry[1], 64)),
        at(Op::Store(layout.segment_area, 128)),
        at(Op::Store(row[0], 1024)),
        at(Op::Store(row[1], 1024)),
    ];
    assert!(steps.is_sorted(), "the feature, both copies of the entries, the state, the row: {steps:?}");
    for step in steps.windows(2) {
        assert!(all[step[0]..step[1]].contains(&Op::Fence), "{step:?}");
    }
    let found = transport.backend(id).expect("it is there");
    assert_eq!((found.cache_segments, found.lanes, transport.info().free_segments), (9, 1, free - 9));
    let cache = transport.open_cache(id).expect("it opens");
    let status = cache.status();
    assert_eq!((status.segments, status.free_segments, status.dirty_records), (8, 8, 0));
}

#[test]
fn a_region_with_an_attached_cache_says_that_writes_have_gone_past_it() {
    let transport = transport();
    let id = uncached(&transport);
    assert_eq!(transport_features(&transport) & FEATURE_BYPASS, 0);
    transport.attach_cache(id, 9 * SEGMENT, 1).expect("there is room");
    assert_eq!(transport_features(&reopened(&transport)) & FEATURE_BYPASS, FEATURE_BYPASS);
    let cache = reopened(&transport).open_cache(id).expect("it opens");
    let mut seen = 0;
    let ticket = cache.flush_through(&mut seen).expect("it runs");
    assert!(
        ticket.is_some(),
        "the first flush after a crash covers what went straight to the backing device"
    );
}

#[test]
fn a_second_cache_one_without_space_and_one_that_is_too_small_are_refused() {
    let transport = transport();
    let cached = transport.create_backend(&spec()).expect("there is room");
    let (kind, text) = refused(transport.attach_cache(cached, 9 * SEGMENT, 1));
    assert_eq!(kind, ErrorKind::AlreadyExists);
    has_all(&text, &["backend 0 has a cache already"]);
    let id = uncached(&transport);
    let (kind, text) = refused(transport.attach_cache(id, 9 * SEGMENT - 1, 1));
    assert_eq!(kind, ErrorKind::NoSpace);
    has_all(&text, &["too small", "576 KiB", "9 segments"]);
    let free = u64::from(transport.info().free_segments);
    let (kind, text) = refused(transport.attach_cache(id, (free + 1) * SEGMENT, 1));
    assert_eq!(kind, ErrorKind::NoSpace);
    has_all(&text, &["larger than the free space"]);
    let (kind, _) = refused(transport.attach_cache(BackendId(3), 9 * SEGMENT, 1));
    assert_eq!(kind, ErrorKind::NotFound);
    assert_eq!(transport.backend(id).expect("it is there").cache_segments, 0);
    assert_eq!(u64::from(transport.info().free_segments), free);
}

#[test]
fn a_detached_cache_leaves_a_row_without_one_and_its_successor_has_another_identity() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("there is room");
    let free = transport.info().free_segments;
    let former = transport.backend_row(id).expect("it is there").cache_id.get();
    let cache = transport.open_cache(id).expect("it opens");
    cache.stop();
    ops(&transport);
    transport.detach_cache(id).expect("nothing is dirty");
    let row = slots::<BackendRow>(transport.layout().backend_area, 4, id.0);
    assert_eq!(ops(&transport), kept(row, 1024, false));
    let row = transport.backend_row(id).expect("it is there");
    assert_eq!((row.cache_id.get(), row.lanes.get(), row.segments.get()), (0, 0, 0));
    assert_eq!((row.state_segment.get(), row.use_state.get()), (u32::MAX, tables::USE_UNKNOWN));
    assert_eq!(transport.info().free_segments, free + 9);
    // The former cache is still in memory, and is no obstacle.
    transport.attach_cache(id, 9 * SEGMENT, 1).expect("there is room");
    assert_ne!(transport.backend_row(id).expect("it is there").cache_id.get(), former);
    drop(transport.open_cache(id).expect("the former one does not count as open"));
    drop(cache);
}

#[test]
fn a_cache_is_not_detached_while_it_runs_or_holds_more_than_the_backing_device() {
    let rig = Rig::new(Options::default());
    let (transport, id) = (&rig.transport, rig.backend);
    let (kind, text) = refused(transport.detach_cache(id));
    assert_eq!(kind, ErrorKind::Busy);
    has_all(&text, &["backend 0", "is in use"]);
    assert!(rig.write(ByteRange::at(0, 4096), 1));
    rig.cache.stop();
    for result in [transport.detach_cache(id), transport.take_unused_cache_back(id)] {
        let (kind, text) = refused(result);
        assert_eq!(kind, ErrorKind::Busy);
        has_all(&text, &["holds data that the backing device lacks"]);
    }
    assert_eq!(transport.backend(id).expect("it is there").cache_segments, 9);
}

#[test]
fn a_cache_that_is_not_open_is_not_detached_since_what_it_holds_is_not_known() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(ByteRange::at(0, 4096), 1));
    rig.cache.stop();
    let Rig { transport, backend, cache, worker, .. } = rig;
    drop((worker, cache));
    let (kind, text) = refused(transport.detach_cache(backend));
    assert_eq!(kind, ErrorKind::Busy);
    has_all(&text, &["is not open", "not known"]);
    let none = uncached(&transport);
    let (kind, text) = refused(transport.detach_cache(none));
    assert_eq!(kind, ErrorKind::InvalidArgument);
    has_all(&text, &["backend 1 has no cache"]);
    assert_eq!(refused(transport.detach_cache(BackendId(3))).0, ErrorKind::NotFound);
}

#[test]
fn a_damaged_cache_is_not_detached() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(ByteRange::at(0, 4096), 1));
    rig.damage(0);
    let (mut bytes, mut misses) = (vec![0; 4096], Vec::new());
    assert!(rig.cache.read(ByteRange::at(0, 4096), &mut bytes, &mut misses).is_err());
    rig.cache.request_drain();
    rig.run();
    rig.cache.stop();
    assert_eq!(kind(rig.transport.detach_cache(rig.backend)), Some(ErrorKind::Busy));
}

#[test]
fn a_cache_with_a_parked_range_is_not_detached() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    let range = ByteRange::at(0, 4096);
    rig.disk.with(|state| state.unwritable = vec![range]);
    assert!(rig.write(range, 1));
    rig.cache.request_drain();
    rig.settle_until(10_000);
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.dirty_records), (4096, 0), "only the parked range is left");
    rig.cache.stop();
    assert_eq!(kind(rig.transport.detach_cache(rig.backend)), Some(ErrorKind::Busy));
}

#[test]
fn a_cache_that_was_attached_and_not_used_is_taken_back_opened_or_not() {
    let transport = transport();
    let id = uncached(&transport);
    let free = transport.info().free_segments;
    transport.attach_cache(id, 9 * SEGMENT, 1).expect("there is room");
    let cache_id = || transport.backend_row(id).expect("it is there").cache_id.get();
    let first = cache_id();
    transport.take_unused_cache_back(id).expect("no thread has opened it");
    transport.attach_cache(id, 9 * SEGMENT, 1).expect("there is room");
    assert_ne!(cache_id(), first, "what names the first one does not name the second");
    let cache = transport.open_cache(id).expect("it opens");
    assert_eq!(kind(transport.take_unused_cache_back(id)), Some(ErrorKind::Busy), "it runs");
    cache.stop();
    transport.take_unused_cache_back(id).expect("it is empty");
    assert_eq!((transport.info().free_segments, transport.backend(id).expect("there").lanes), (free, 0));
}
