//! Tables at their limits: sizes that are just enough, rows that contradict each other, and syncs that fail.

use super::*;
use crate::lane_map::LaneMap;

#[test]
fn a_region_of_one_segment_less_than_the_smallest_cache_needs_is_too_small() {
    for size in [64 << 10, 640 << 10] {
        let error = Transport::format(Arc::new(Still::default()), Ram::region(size), &OPTIONS)
            .err()
            .expect("too small");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.line().contains("needs 9 segments of 64 KiB"), "{}", error.line());
    }
}

#[test]
fn the_segments_of_a_cache_name_it_on_the_disk_before_its_state_is_stored() {
    let transport = formatted(true);
    let layout = transport.layout();
    ops(&transport);
    transport.create_backend(&spec()).expect("room");
    let all = ops(&transport);
    let sync = Op::Sync(layout.segment_table, layout.segment_area - layout.segment_table);
    let syncs: Vec<_> = (0..all.len()).filter(|at| all[*at] == sync).collect();
    let state = all.iter().position(|op| *op == Op::Store(layout.segment_area, 128));
    assert!(syncs.len() == 2 && state == Some(syncs[1] + 1), "{all:?}");
    assert!(syncs.iter().all(|at| all[at - 1] == Op::Fence));
    for segment in &transport.tables.lock().segments[..9] {
        let entry = segment.content().expect("it is there");
        let expected = SegmentEntry::of_cache(0, entry.cache_id.get());
        assert_eq!(cbd_format::record::bytes_of(entry), cbd_format::record::bytes_of(&expected));
    }
}

#[test]
fn a_cache_reaches_the_last_byte_of_the_largest_device_and_not_one_sector_more() {
    let transport = transport();
    let largest = BackendSpec { size: LaneMap { lanes: 1 }.device_max(), ..spec() };
    let id = transport.create_backend(&largest).expect("it is not too large");
    drop(transport.open_cache(id).expect("it opens"));
    let larger = BackendSpec { size: largest.size + 512, ..largest };
    assert_eq!(kind(transport.create_backend(&larger)), Some(ErrorKind::InvalidArgument));
}

#[test]
fn a_cache_that_has_lost_a_segment_is_damaged() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let _ = transport.tables.lock().segments[5].clear(&transport.region);
    assert_eq!(kind(transport.open_cache(id)), Some(ErrorKind::Damaged));
    assert_eq!(kind(reopened(&transport).open_cache(id)), Some(ErrorKind::Damaged));
}

#[test]
fn a_segment_that_names_no_cache_is_of_no_backend() {
    let transport = transport();
    let id = transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    let nothing = |backend: u32| SegmentEntry::of_cache(backend, 0);
    let free = transport.info().free_segments;
    let _ = transport.tables.lock().segments[3].store(&transport.region, nothing(id.0));
    assert_eq!(transport.info().free_segments, free);
    let _ = transport.tables.lock().segments[3].store(&transport.region, nothing(2));
    lose::<BackendRow>(&transport, transport.layout().backend_area, 4, 2);
    assert_eq!(kind(reopened(&transport).backend(BackendId(2))), Some(ErrorKind::NotFound));
}

#[test]
fn a_row_whose_state_is_in_no_segment_has_no_former_disks() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    transport.move_backend(id, "/dev/b", "b").expect("room");
    for beyond in [0, 1, 1 << 20] {
        let segment = transport.layout().segment_count + beyond;
        let stored = transport.tables.lock().backends[0]
            .change(&transport.region, |row| row.state_segment = segment.into());
        transport.region.fence(MutationPoint::OpenFence, stored);
        assert_eq!((transport.former_disks(id), transport.drained(id)), (vec![], None));
        assert_eq!(kind(transport.move_backend(id, "/dev/c", "c")), Some(ErrorKind::InvalidArgument));
    }
}

fn use_of(transport: &Tested, id: BackendId) -> (u32, u8) {
    let row = transport.backend_row(id).expect("it is there");
    (row.use_state.get(), row.use_boot[0])
}

#[test]
fn a_use_that_could_not_be_noted_leaves_the_other_caches_unsure() {
    let transport = formatted(true);
    let [first, second] = [0, 1].map(|_| transport.create_backend(&spec()).expect("room"));
    drop(transport.open_cache(first).expect("it opens"));
    assert_eq!(use_of(&transport, first), (tables::USE_CLEAN, 1));
    transport.region.memory().fail_syncs(1);
    assert_eq!(kind(transport.open_cache(second)), Some(ErrorKind::System));
    assert_eq!(use_of(&transport, first), (tables::USE_UNSURE, 1));
    // A recovery does not make it sure.
    drop(transport.open_cache(first).expect("it opens"));
    assert_eq!(use_of(&transport, first), (tables::USE_UNSURE, 1));
}

#[test]
fn emptying_a_cache_is_a_use_of_it_in_this_boot() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    transport.region.memory().set_boot(2);
    transport.empty_backend(id).expect("no one uses it");
    assert_eq!(use_of(&transport, id), (tables::USE_DIRTY, 2));
}

#[test]
fn on_memory_that_does_not_mix_pages_nothing_is_synced_and_all_pages_are_whole() {
    let mixing = formatted(true);
    let id = mixing.create_backend(&spec()).expect("room");
    let copied = Region::new(mixing.region.memory().copy_to(false));
    let transport = Transport::open(Arc::new(Still::default()), copied).expect("it opens");
    assert_eq!(use_of(&transport, id), (tables::USE_CLEAN, 1));
    ops(&transport);
    assert_eq!(transport.sync().expect("nothing to do"), 0);
    assert_eq!(ops(&transport), []);
    drop(transport.open_cache(id).expect("it opens"));
    assert_eq!(use_of(&transport, id).0, tables::USE_UNKNOWN);
    assert_eq!(transport.pages_of(id).ok(), Some(Pages::Whole));
}

#[test]
fn a_backend_in_the_row_of_a_removed_one_inherits_nothing() {
    let transport = transport();
    let free = transport.info().free_segments;
    let first =
        transport.create_backend(&BackendSpec { path: "a long path".into(), ..spec() }).expect("room");
    transport.remove_backend(first).expect("nothing uses it");
    let plain = BackendSpec { path: "p".into(), cache_bytes: None, ..spec() };
    let second = transport.create_backend(&plain).expect("room");
    assert_eq!(second, first, "it is the same row");
    let entry = transport.backend(second).expect("it is there");
    assert_eq!((entry.path.as_str(), entry.cache_segments, entry.lanes), ("p", 0, 0));
    let row = *transport.tables.lock().backends[second.index()].content().expect("it is there");
    assert_eq!((row.cache_id.get(), row.state_segment.get()), (0, u32::MAX));
    // A row with the former cache's number would own its segments.
    assert_eq!(transport.info().free_segments, free);
    assert_eq!(reopened(&transport).info().free_segments, free);
}
