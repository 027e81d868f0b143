//! Backends whose backing device has become larger.

use super::*;
use crate::lane_map::LaneMap;
use core::task::Waker;

const LARGER: u64 = 3 << 30;

fn grown(transport: &Tested, id: BackendId) -> (u64, String) {
    let entry = transport.backend(id).expect("it is good");
    (entry.size, entry.identity)
}

#[test]
fn a_larger_size_is_in_both_slots_of_the_row_before_the_cache_has_it() {
    for mixes_pages in [false, true] {
        let transport = formatted(mixes_pages);
        let id = transport.create_backend(&spec()).expect("room");
        let cache = transport.open_cache(id).expect("it opens");
        let row = slots::<BackendRow>(transport.layout().backend_area, 4, 0);
        ops(&transport);
        transport.grow_backend(id, LARGER, "the disk, larger").expect("it is larger");
        let stores = |op: &Op| matches!(op, Op::Store(at, _) if row.contains(at));
        assert_eq!(ops(&transport).iter().filter(|op| stores(op)).count(), 2);
        assert_eq!((cache.size(), grown(&transport, id)), (LARGER, (LARGER, "the disk, larger".into())));
        assert_eq!(grown(&reopened(&transport), id), (LARGER, "the disk, larger".into()));
        // Again, as after a failure behind the row.
        transport.grow_backend(id, LARGER, "the disk, larger").expect("it has that size");
    }
}

#[test]
fn a_size_that_could_not_be_stored_durably_is_not_used() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    transport.region.memory().fail_syncs(1);
    assert_eq!(kind(transport.grow_backend(id, LARGER, "larger")), Some(ErrorKind::System));
    assert_eq!(cache.size(), 1 << 30);
    transport.grow_backend(id, LARGER, "larger").expect("the disk answers again");
    assert_eq!((cache.size(), grown(&transport, id).0), (LARGER, LARGER));
}

#[test]
fn a_size_that_is_smaller_or_odd_or_too_large_changes_nothing() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    let most = LaneMap { lanes: 1 }.device_max();
    let long = "x".repeat(257);
    for (size, identity) in
        [((1 << 30) - 512, "a"), (0, "a"), (LARGER + 1, "a"), (most + 512, "a"), (LARGER, long.as_str())]
    {
        let refused = kind(transport.grow_backend(id, size, identity));
        assert_eq!(refused, Some(ErrorKind::InvalidArgument), "{size}");
        assert_eq!((cache.size(), grown(&transport, id)), (1 << 30, (1 << 30, "a disk".into())));
    }
    let error = transport.grow_backend(id, most + 512, "a").expect_err("too large");
    assert!(error.line().contains("too large for a cache of 1 lanes"), "{}", error.line());
    assert_eq!(kind(transport.grow_backend(BackendId(3), LARGER, "a")), Some(ErrorKind::NotFound));
    assert_eq!(kind(transport.grow_backend(BackendId(77), LARGER, "a")), Some(ErrorKind::NotFound));
    transport.grow_backend(id, most, "a").expect("the largest device");
    // Without a cache no lane limits the size.
    let plain = transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    transport.grow_backend(plain, most + 512, "a").expect("it has no cache");
}

#[test]
fn a_moved_backend_does_not_grow_before_it_is_confirmed() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    transport.move_backend(id, "/dev/b", "b").expect("room");
    assert_eq!(kind(transport.grow_backend(id, LARGER, "b")), Some(ErrorKind::Exchanged));
    transport.settle_backend(id).expect("it is there");
    transport.grow_backend(id, LARGER, "b").expect("it is confirmed");
}

#[test]
fn records_beyond_the_former_size_are_recovered() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    transport.grow_backend(id, LARGER, "larger").expect("it is larger");
    let at = ByteRange::at(LARGER - 4096, 4096);
    let _ = cache.write(at, &[7; 4096], Waker::noop()).expect("it runs");
    let after = reopened(&transport);
    let cache = after.open_cache(id).expect("it opens");
    let (mut bytes, mut misses) = ([0; 4096], Vec::new());
    cache.read(at, &mut bytes, &mut misses).expect("it is sound");
    assert!(misses.is_empty() && bytes == [7; 4096]);
    assert_eq!((cache.size(), cache.status().damaged.len()), (LARGER, 0));
}
