//! Regions that grow: what is stored, in which order, what is refused, and that open caches use the new segments.

use super::*;
use crate::tests::rig::{Options, Rig};
use cbd_format::{SegmentHeader, superblock::FEATURE_GROWN};

const LARGER: u64 = SIZE + 20 * SEGMENT;

fn grown(transport: &Tested, size: u64) -> Layout {
    // Whatever the new memory holds, the region does not take it for rows.
    transport.region.memory().extend(size, 0xa5);
    transport.grow_region().expect("there is room")
}

fn refused<T: core::fmt::Debug>(result: Result<T>) -> (ErrorKind, String) {
    let error = result.expect_err("it is refused");
    (error.kind(), error.line())
}

fn block(transport: &Tested, at: u64) -> Option<Superblock> {
    let mut bytes = [0; size_of::<Superblock>()];
    transport.region.load(at, &mut bytes).expect("it is readable");
    let found = Superblock::decode(&bytes).expect("long enough").verify(transport.region.size());
    found.ok().map(|found| found.0)
}

#[test]
fn a_growth_blanks_its_table_and_stores_the_superblock_behind_it_before_the_first_one() {
    let transport = formatted(true);
    ops(&transport);
    let before = transport.info();
    let layout = grown(&transport, LARGER + 5);
    let extent = layout.extent_of(SegmentId(before.layout.segment_count));
    let (table, length) = (extent.segment_table, extent.table_length());
    let last = LARGER - PAGE;
    let expected = [
        Op::Store(table, length),
        Op::Fence,
        Op::Sync(table, length),
        Op::Store(last, 192),
        Op::Fence,
        Op::Sync(last, PAGE),
        Op::Store(0, 192),
        Op::Fence,
        Op::Sync(0, PAGE),
        Op::Store(SIZE - PAGE, 192),
        Op::Fence,
        Op::Sync(SIZE - PAGE, PAGE),
    ];
    assert_eq!(ops(&transport), expected);
    let now = transport.info();
    assert_eq!((now.layout, now.layout.region_size), (layout, LARGER));
    assert_eq!(now.features[2], before.features[2] | FEATURE_GROWN);
    assert_eq!(now.free_segments, layout.segment_count, "all are free");
    assert!(layout.segment_count > before.layout.segment_count);
    let [first, second] = [0, last].map(|at| block(&transport, at).expect("it is complete"));
    assert_eq!(first, second);
    assert!(block(&transport, SIZE - PAGE).is_none(), "the former second copy is erased");
    let next = reopened(&transport).info();
    assert_eq!((next.layout, next.free_segments, next.uuid), (layout, now.free_segments, before.uuid));
}

#[test]
fn a_region_that_was_restored_and_grows_again_finds_no_log_of_its_later_state_in_the_new_space() {
    let rig = Rig::new(Options { segments: 13, ..Options::default() });
    let fill = |rig: &Rig, value| {
        let mut at = 0;
        while rig.cache.dirty_bytes() < rig.cache.capacity() / 2
            && rig.write(ByteRange::at(at, 16 << 10), value)
        {
            at += 16 << 10;
        }
    };
    let grow = |rig: &Rig| {
        let layout = rig.transport.grow_region().expect("there is room");
        let free = rig.transport.info().free_segments;
        rig.transport.grow_cache(rig.backend, &rig.cache, free).expect("they are free");
        layout
    };
    fill(&rig, 1);
    let before = rig.transport.info().layout.region_size;
    let larger = before + 20 * SEGMENT;
    let later = rig.in_memory(rig.memory());
    later.transport.region.memory().extend(larger, 0);
    grow(&later);
    fill(&later, 2);
    // The state before the growth is put into the larger memory.
    let mut behind = vec![0; (larger - before) as usize];
    later.transport.region.load(before, &mut behind).expect("it is readable");
    rig.transport.region.memory().extend(larger, 0);
    let _ = rig.transport.region.store(before, &behind);
    let layout = grow(&rig);
    let new = layout.extent_of(SegmentId(layout.segment_count - 1));
    let headers = (new.first..new.end()).flat_map(|id| {
        let base = layout.segment_base(SegmentId(id));
        [base, base + layout.segment_shape().header_copy()]
    });
    for at in headers {
        let mut bytes = [0; size_of::<SegmentHeader>()];
        rig.transport.region.load(at, &mut bytes).expect("it is readable");
        assert!(SegmentHeader::decode(&bytes).is_some_and(|found| !found.is_ours()), "byte {at}");
    }
    let (status, next) = (rig.cache.status(), rig.in_memory(rig.memory()).cache.status());
    assert_eq!((next.damaged.len(), next.dirty_bytes), (0, status.dirty_bytes));
    assert_eq!(next.free_segments, status.free_segments);
}

#[test]
fn a_region_grows_seven_times_and_all_its_segments_are_used() {
    let transport = transport();
    let mut size = SIZE;
    for growth in 1..=cbd_format::layout::GROWTHS_MAX {
        size += 20 * SEGMENT;
        grown(&transport, size);
        let layout = transport.layout();
        assert_eq!(layout.grown_from().count(), growth);
        let bytes = 9 * SEGMENT;
        let id = if growth <= 4 {
            let spec = BackendSpec { identity: format!("disk {growth}"), ..spec() };
            transport.create_backend(&spec).expect("there is room")
        } else {
            continue;
        };
        assert_eq!(transport.segments_of(id).len() as u64, bytes / SEGMENT);
    }
    let next = reopened(&transport);
    assert_eq!(next.info().free_segments, next.layout().segment_count - 4 * 9);
    transport.region.memory().extend(size + 20 * SEGMENT, 0);
    let (kind, text) = refused(transport.grow_region());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(text.contains("has grown 7 times") && text.contains("format a larger region"), "{text}");
}

#[test]
fn a_region_does_not_grow_by_less_than_a_segment_nor_behind_failed_stores_or_an_unreadable_superblock() {
    let transport = transport();
    let (kind, text) = refused(transport.check_growth(SIZE));
    assert_eq!(kind, ErrorKind::InvalidArgument, "{text}");
    let (kind, text) = refused(transport.check_growth(SIZE + SEGMENT));
    assert_eq!(kind, ErrorKind::NoSpace);
    assert!(text.contains("has no room for one more segment"), "{text}");
    let unreadable = reopened(&transport);
    unreadable.region.memory().fail(ByteRange::at(SIZE - PAGE, 64));
    let (kind, text) = refused(unreadable.check_growth(LARGER));
    assert_eq!(kind, ErrorKind::Media);
    assert!(text.contains("cbdctrl repair"), "{text}");
    transport.region.memory().fail_stores_after(0);
    let _ = transport.region.store(SEGMENT, &[0; 64]);
    ops(&transport);
    assert_eq!(refused(transport.check_growth(LARGER)).0, ErrorKind::Media);
    assert_eq!(refused(transport.grow_region()).0, ErrorKind::InvalidArgument, "its memory is not larger");
    transport.region.memory().extend(LARGER, 0);
    assert_eq!(refused(transport.grow_region()).0, ErrorKind::Media);
    assert_eq!(ops(&transport), [], "nothing was stored");
}

#[test]
fn a_damaged_copy_of_the_superblock_is_stored_again_before_the_region_grows() {
    for at in [0, SIZE - PAGE] {
        let transport = transport();
        let whole = block(&transport, 0);
        let _ = transport.region.store(at + 60, &[0xff; 4]);
        assert!(block(&transport, at).is_none());
        transport.check_growth(LARGER).expect("the other one is there");
        assert_eq!(block(&transport, at), whole);
        grown(&transport, LARGER);
    }
}

#[test]
fn after_a_failed_sync_the_region_has_its_former_size_and_grows_when_that_is_repeated() {
    for failing in 1..=4 {
        let transport = formatted(true);
        let before = transport.info();
        transport.region.memory().extend(LARGER, 0);
        // A sync fails that is not the first: count those before it.
        let memory = transport.region.memory();
        memory.fail_sync_after(failing - 1);
        let result = transport.grow_region();
        assert!(result.is_err(), "sync {failing}");
        let has_grown = failing == 4;
        let layout = if has_grown { before.layout.grown_to(LARGER).expect("it fits") } else { before.layout };
        assert_eq!(transport.layout(), layout, "sync {failing}");
        let next = reopened(&transport).info().layout.region_size;
        assert_eq!(next, if failing >= 3 { LARGER } else { SIZE }, "sync {failing}");
        if !has_grown {
            transport.grow_region().expect("nothing fails now");
        }
        assert_eq!(reopened(&transport).layout(), transport.layout());
        assert_eq!(transport.layout().region_size, LARGER);
    }
}

#[test]
fn superblocks_that_a_crash_left_are_erased_by_the_next_open() {
    let transport = transport();
    let former = block(&transport, 0).expect("complete");
    let layout = grown(&transport, LARGER);
    let now = block(&transport, 0).expect("complete");
    // The crash came before the former copy was erased.
    let _ = transport.region.store(SIZE - PAGE, bytes_of(&former));
    let next = reopened(&transport);
    assert_eq!((next.layout(), block(&next, SIZE - PAGE)), (layout, None));
    // The crash came before the first page was stored.
    let _ = transport.region.store(0, bytes_of(&former));
    let next = reopened(&transport);
    assert_eq!((next.layout().region_size, block(&next, LARGER - PAGE)), (SIZE, None));
    assert_eq!(block(&next, SIZE - PAGE), Some(former));
    // A torn first page: the one at the end counts, and the former one is erased.
    let _ = transport.region.store(0, &[0xa5; 100]);
    let next = reopened(&transport);
    assert_eq!((next.layout(), block(&next, LARGER - PAGE)), (layout, Some(now)));
    assert_eq!(block(&next, SIZE - PAGE), None);
}

#[test]
fn the_second_superblock_is_found_before_the_zeroes_of_a_file_that_was_extended() {
    let transport = transport();
    let layout = transport.layout();
    transport.create_backend(&spec()).expect("there is room");
    let _ = transport.region.store(0, &[0xa5; 192]);
    assert!(
        Transport::open(Arc::new(Still::default()), Region::new(transport.region.memory().copy())).is_ok()
    );
    transport.region.memory().extend(LARGER, 0);
    let next = reopened(&transport);
    assert_eq!(next.layout(), layout);
    let (_, second) = (next.check_growth(LARGER).expect("both are there"), block(&next, 0));
    assert_eq!(second, block(&next, SIZE - PAGE));
    // With other bytes behind it, nothing is guessed.
    let _ = transport.region.store(LARGER - 64, &[1; 64]);
    let error = Transport::open(Arc::new(Still::default()), Region::new(transport.region.memory().copy()));
    assert_eq!(error.err().map(|error| error.kind()), Some(ErrorKind::Damaged));
}

#[test]
fn an_open_cache_uses_segments_that_the_region_has_got_since_and_the_next_process_finds_its_data() {
    let rig = Rig::new(Options { segments: 13, ..Options::default() });
    let mut size = rig.transport.info().layout.region_size;
    for growth in 1..=3u32 {
        size += 20 * SEGMENT;
        rig.transport.region.memory().extend(size, 0);
        let before = rig.transport.info().layout.segment_count;
        rig.transport.grow_region().expect("there is room");
        let free = rig.transport.info().free_segments;
        rig.transport.grow_cache(rig.backend, &rig.cache, free).expect("they are free");
        assert_eq!(rig.transport.info().free_segments, 0);
        let owned = rig.transport.segments_of(rig.backend);
        assert!(owned.iter().any(|id| id.0 >= before), "growth {growth}");
    }
    let (mut at, mut value) = (0, 1);
    while rig.cache.dirty_bytes() < rig.cache.capacity() / 2 && rig.write(ByteRange::at(at, 16 << 10), value)
    {
        (at, value) = (at + (16 << 10), value % 250 + 1);
    }
    let used = rig.cache.status();
    assert!(used.segments - used.free_segments > 13, "segments of the growths are in use: {used:?}");
    let next = rig.in_memory(rig.memory());
    assert_eq!(next.cache.status().segments, used.segments);
    for (number, start) in (0..at).step_by(16 << 10).enumerate() {
        let value = (number % 250 + 1) as u8;
        let range = ByteRange::at(start, 16 << 10);
        assert!(rig.read(range).iter().chain(&next.read(range)).all(|byte| *byte == value), "{start}");
    }
}
