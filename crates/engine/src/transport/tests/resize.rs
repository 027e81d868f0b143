//! Caches that grow and shrink: what is stored, in which order, what is refused, and what a crash between two steps leaves.

use super::*;
use crate::tests::rig::{Options, Rig};

/// A cache of 12 log segments, and four segments that no cache has, or a few more.
fn rig() -> Rig {
    Rig::new(Options { segments: 13, ..Options::default() })
}

fn refused<T>(result: Result<T>) -> (ErrorKind, String) {
    let error = result.err().expect("it is refused");
    (error.kind(), error.line())
}

/// The log segments that the cache counts, those that are free, and the segments of the row.
fn sizes(rig: &Rig) -> (u32, u32, u32) {
    let status = rig.cache.status();
    let row = rig.transport.backend(rig.backend).expect("it is there");
    (status.segments, status.free_segments, row.cache_segments)
}

fn free(rig: &Rig) -> u32 {
    rig.transport.info().free_segments
}

fn entry(transport: &Transport<Still>, segment: u32) -> [u64; 2] {
    let layout = transport.layout();
    slots::<SegmentEntry>(layout.segment_table, layout.segment_count, segment)
}

fn stored(transport: &Transport<Still>) -> Vec<Op> {
    transport.region.memory().take_ops()
}

#[test]
fn a_cache_grows_with_segments_that_name_it_before_its_row_counts_them() {
    let rig = rig();
    let before = free(&rig);
    stored(&rig.transport);
    rig.transport.grow_cache(rig.backend, &rig.cache, 2).expect("there is room");
    let mut expected = Vec::new();
    for slot in 0..2 {
        expected.extend([13, 14].map(|segment| Op::Store(entry(&rig.transport, segment)[slot], 64)));
        expected.push(Op::Fence);
    }
    let row = slots::<BackendRow>(rig.transport.layout().backend_area, 4, 0);
    expected.extend(kept(row, 1024, false));
    assert_eq!(stored(&rig.transport), expected);
    assert_eq!((sizes(&rig), free(&rig)), ((14, 14, 15), before - 2));
    assert_eq!(rig.cache.capacity(), 14 * SEGMENT);
    assert_eq!(rig.reopened_sizes(), (14, 15));
}

impl Rig {
    /// The log segments and the segments of the row in the next process.
    fn reopened_sizes(&self) -> (u32, u32) {
        let region = Region::new(self.transport.region.memory().copy());
        let transport = Transport::open(Arc::new(Still::default()), region).expect("it opens");
        let cache = transport.open_cache(self.backend).expect("it opens");
        let row = transport.backend(self.backend).expect("it is there");
        let free = transport.info().free_segments + row.cache_segments;
        assert_eq!(free, transport.layout().segment_count, "each segment is of this cache or free");
        (cache.status().segments, row.cache_segments)
    }
}

#[test]
fn a_cache_does_not_grow_beyond_the_free_segments_nor_when_it_is_not_the_open_one() {
    let rig = rig();
    let all = free(&rig);
    let (kind, text) = refused(rig.transport.grow_cache(rig.backend, &rig.cache, all + 1));
    assert_eq!(kind, ErrorKind::NoSpace);
    assert!(text.contains("cannot grow by") && text.contains("of the transport are free"), "{text}");
    let other = self::rig();
    let (kind, text) = refused(rig.transport.grow_cache(rig.backend, &other.cache, 1));
    assert_eq!(kind, ErrorKind::Busy);
    assert!(text.contains("the cache of backend 0 is not open"), "{text}");
    assert_eq!((sizes(&rig), free(&rig)), ((12, 12, 13), all));
    rig.cache.stop();
    assert_eq!(refused(rig.transport.grow_cache(rig.backend, &rig.cache, 1)).0, ErrorKind::Busy);
}

#[test]
fn a_cache_shrinks_by_segments_that_its_row_does_not_count_before_they_name_none() {
    let rig = rig();
    let before = free(&rig);
    let shrink = rig.cache.begin_shrink(3).expect("it keeps more than it needs");
    assert_eq!((shrink.missing(), shrink.segments(), sizes(&rig)), (0, 3, (12, 9, 13)));
    stored(&rig.transport);
    rig.transport.finish_shrink(rig.backend, shrink).expect("no store fails");
    let all = stored(&rig.transport);
    let row = slots::<BackendRow>(rig.transport.layout().backend_area, 4, 0);
    assert_eq!(all[..4], kept(row, 1024, false), "the row comes first");
    assert_eq!(all.len(), 4 + 2 * (3 + 1));
    assert_eq!((sizes(&rig), free(&rig)), ((9, 9, 10), before + 3));
    assert_eq!(rig.reopened_sizes(), (9, 10));
}

#[test]
fn a_cache_does_not_shrink_below_what_its_lanes_need_or_what_the_disk_refuses_and_not_twice_at_once() {
    let mut rig = rig();
    let (kind, text) = refused(rig.cache.begin_shrink(5));
    assert_eq!(kind, ErrorKind::NoSpace);
    assert!(text.contains("cannot shrink to 512 KiB") && text.contains("1 lanes need 576 KiB"), "{text}");
    let first = rig.cache.begin_shrink(1).expect("it keeps more than it needs");
    let (kind, text) = refused(rig.cache.begin_shrink(1));
    assert_eq!(kind, ErrorKind::Busy);
    assert!(text.contains("already"), "{text}");
    drop(first);
    let mut at = 0;
    while rig.cache.dirty_bytes() <= 9 * SEGMENT && rig.write(ByteRange::at(at, 16 << 10), 1) {
        at += 16 << 10;
    }
    let dirty = rig.cache.dirty_bytes();
    assert!(dirty > 8 * SEGMENT, "{dirty}");
    drop(rig.cache.begin_shrink(4).expect("what is dirty is written first"));
    rig.disk.with(|disk| disk.unwritable = vec![ByteRange { start: 0, end: rig.cache.size() }]);
    rig.run();
    let (kind, text) = refused(rig.cache.begin_shrink(4));
    assert_eq!(kind, ErrorKind::NoSpace);
    assert!(text.contains("refuses or lacks") && text.contains("cannot shrink"), "{text}");
    rig.disk.with(|disk| disk.unwritable.clear());
    rig.drain();
    drop(rig.cache.begin_shrink(4).expect("nothing is dirty"));
}

#[test]
fn a_shrink_waits_for_segments_that_reclaim_frees() {
    let mut rig = rig();
    rig.fill_up();
    let mut shrink = rig.cache.begin_shrink(2).map(Some).unwrap_or_else(|error| {
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        None
    });
    if shrink.is_none() {
        rig.drain();
        shrink = rig.cache.begin_shrink(4).ok();
    }
    let shrink = shrink.expect("it keeps what is dirty");
    if shrink.missing() > 0 {
        let (kind, text) = refused(rig.transport.finish_shrink(rig.backend, shrink));
        assert_eq!(kind, ErrorKind::Busy);
        assert!(text.contains("still in use"), "{text}");
        let shrink = rig.cache.begin_shrink(2).expect("the first one was dropped");
        rig.settle();
        assert_eq!(shrink.missing(), 0);
        rig.transport.finish_shrink(rig.backend, shrink).expect("no store fails");
    }
    assert!(rig.reopened_sizes().0 < 13);
}

#[test]
fn a_shrink_that_is_given_up_takes_its_segments_back_and_one_that_ended_takes_nothing_of_the_next() {
    let rig = rig();
    let shrink = rig.cache.begin_shrink(3).expect("it keeps more than it needs");
    let first = shrink.take();
    assert_eq!((first.len(), sizes(&rig).1), (3, 9));
    let second = rig.cache.begin_shrink(1).expect("the first one has ended");
    assert_eq!(refused(rig.cache.begin_shrink(0)).0, ErrorKind::InvalidArgument);
    assert_eq!(sizes(&rig).1, 8);
    drop(second);
    assert_eq!(sizes(&rig).1, 9);
}

/// Grows the cache up to its first step, as a crash leaves it: the segments name it, and its row does not count them.
fn half_grown(rig: &Rig, segments: &[u32]) {
    let id = rig.cache.id();
    let segments: Vec<SegmentId> = segments.iter().copied().map(SegmentId).collect();
    let mut tables = rig.transport.tables.lock();
    rig.transport
        .store_entries(&mut tables, &segments, SegmentEntry::of_cache(0, id))
        .expect("no store fails");
}

#[test]
fn free_segments_beyond_the_number_in_the_row_are_released_when_the_cache_is_opened() {
    let rig = rig();
    half_grown(&rig, &[13, 14]);
    let entries: Vec<bool> = rig
        .transport
        .tables
        .lock()
        .segments
        .iter()
        .map(|entry| entry.content().is_some_and(|entry| entry.cache_id.get() != 0))
        .collect();
    assert_eq!(entries.iter().filter(|owned| **owned).count(), 15);
    assert_eq!(rig.reopened_sizes(), (12, 13));
    // Who only looks changes nothing.
    let region = Region::new(rig.transport.region.memory().copy());
    let looking = Transport::open(Arc::new(Still::default()), region).expect("it opens");
    let cache = looking.open_cache(rig.backend).expect("it opens");
    assert_eq!((cache.status().segments, cache.status().free_segments), (12, 12));
}

/// A segment that goes to another cache and comes back has records of both behind it. None of them counts, and its generation is
/// above that of all of them.
#[test]
fn a_segment_that_was_of_another_cache_meanwhile_shows_nothing_of_it() {
    let mut rig = rig();
    rig.fill_up();
    rig.drain();
    let highest = (0..rig.transport.layout().segment_count)
        .map(|number| rig.cache.base().segment(number).generation())
        .max();
    assert!(highest > Some(0), "segments were used");
    rig.cache.set_settings(Settings { gc_percent: 0, ..rig.cache.settings() }).expect("it is valid");
    rig.settle();
    let shrink = rig.cache.begin_shrink(4).expect("nothing is dirty");
    while shrink.missing() > 0 {
        rig.step();
    }
    rig.transport.finish_shrink(rig.backend, shrink).expect("no store fails");
    let spec = BackendSpec { host: HostId(0), cache_bytes: None, size: 1 << 20, ..spec() };
    let other = rig.transport.create_backend(&spec).expect("there is room");
    rig.transport.attach_cache(other, u64::from(free(&rig)) * SEGMENT, 1).expect("nine are free");
    let cache = rig.transport.open_cache(other).expect("it opens");
    let waker = core::task::Waker::noop();
    for block in 0..60 {
        let _ = cache.write(ByteRange::at(block * 4096, 4096), &[9; 4096], waker).expect("it runs");
    }
    assert_eq!(cache.status().damaged, []);
    let used: Vec<u32> = (0..rig.transport.layout().segment_count)
        .map(|number| cache.base().segment(number).generation())
        .collect();
    cache.stop();
    drop(cache);
    rig.transport.remove_backend(other).expect("nothing stands on it");
    rig.transport.grow_cache(rig.backend, &rig.cache, 4).expect("they are free");
    for SegmentId(number) in rig.transport.segments_of(rig.backend).into_iter().skip(1) {
        let claimed = rig.cache.base().segment(number).generation();
        let used = used[number as usize];
        assert!(claimed >= used, "segment {number}: {claimed} after {used}");
    }
    for block in 0..100 {
        assert!(rig.write(ByteRange::at(block * 4096, 4096), 5));
    }
    let next = rig.recovered();
    assert_eq!((next.status().damaged, next.dirty_bytes()), (vec![], 100 * 4096));
}
