//! What is noted of the use of a cache on memory that mixes pages.

use super::*;

#[test]
fn on_memory_that_mixes_pages_the_row_notes_the_use_of_the_cache() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    let state = |transport: &Tested| {
        let row = transport.backend_row(id).expect("it is there");
        (row.use_state.get(), row.use_boot[0])
    };
    assert_eq!(
        (state(&transport), transport.pages_of(id).ok()),
        ((tables::USE_CLEAN, 1), Some(Pages::Whole))
    );
    let cache = transport.open_cache(id).expect("it opens");
    assert_eq!(state(&transport), (tables::USE_CLEAN, 1), "nothing is dirty");
    let waker = core::task::Waker::noop();
    let _ = cache.write(ByteRange::at(0, 512), &[1; 512], waker).expect("it runs");
    assert_eq!(state(&transport), (tables::USE_DIRTY, 1));
    assert_eq!(transport.sync().expect("no sync fails"), 1, "it is open");
    assert_eq!(state(&transport), (tables::USE_DIRTY, 1));
    let crashed = reopened(&transport);
    crashed.region.memory().set_boot(2);
    assert_eq!(crashed.pages_of(id).ok(), Some(Pages::MixedDirty));
    assert_eq!(kind(crashed.open_cache(id)), Some(ErrorKind::Torn));
    drop(crashed.open_cache_if(id, Mixed::Look).expect("it is only looked at"));
    assert_eq!(state(&crashed), (tables::USE_DIRTY, 1));
    drop(crashed.open_cache_if(id, Mixed::Recover).expect("the user said so"));
    assert_eq!(state(&crashed), (tables::USE_DIRTY, 2));
    drop(cache);
    ops(&transport);
    assert_eq!(transport.sync().expect("no sync fails"), 0);
    assert!(ops(&transport).contains(&Op::Sync(0, SIZE)));
    assert_eq!(state(&transport), (tables::USE_SYNCED, 0));
    ops(&transport);
    assert_eq!(transport.sync().expect("nothing to do"), 0);
    assert_eq!(ops(&transport), []);
    let next = reopened(&transport);
    next.region.memory().set_boot(2);
    assert_eq!(next.pages_of(id).ok(), Some(Pages::Whole));
    drop(next.open_cache(id).expect("it opens"));
    assert_eq!(state(&next), (tables::USE_DIRTY, 2), "its writes are dirty");
}

#[test]
fn a_cache_in_which_nothing_was_dirty_is_emptied_after_a_crash_of_the_machine() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    drop(transport.open_cache(id).expect("it opens"));
    let crashed = reopened(&transport);
    crashed.region.memory().set_boot(2);
    assert_eq!(crashed.pages_of(id).ok(), Some(Pages::MixedClean));
    drop(crashed.open_cache(id).expect("it opens"));
    assert_eq!(crashed.drained(id).map(|drained| drained.0.0 >> 32), Some(1));
}

#[test]
fn after_a_failed_sync_the_pages_of_a_cache_are_stored_again() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    drop(transport.open_cache(id).expect("it opens"));
    let state = || transport.backend_row(id).expect("it is there").use_state.get();
    transport.region.memory().fail_syncs(1);
    assert!(transport.sync().is_err());
    assert_eq!(state(), tables::USE_UNSURE);
    ops(&transport);
    assert_eq!(transport.sync().expect("no sync fails"), 0);
    let base = transport.layout().segment_area;
    assert_eq!(ops(&transport)[0], Op::Store(base, 64), "the first page of the state segment");
    assert_eq!(state(), tables::USE_SYNCED);
}

#[test]
fn what_memory_that_mixes_pages_noted_is_taken_back_elsewhere() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    let bytes = transport.region.memory().copy_to(false);
    let elsewhere = Transport::open(Arc::new(Still::default()), Region::new(bytes)).expect("it opens");
    assert_eq!(elsewhere.pages_of(id).ok(), Some(Pages::Whole));
    assert_eq!(elsewhere.sync().expect("nothing to do"), 0);
    drop(elsewhere.open_cache(id).expect("it opens"));
    let row = elsewhere.backend_row(id).expect("it is there");
    assert_eq!((row.use_state.get(), row.use_boot), (tables::USE_UNKNOWN, [0; 16]));
    let back = Region::new(elsewhere.region.memory().copy_to(true));
    let back = Transport::open(Arc::new(Still::default()), back).expect("it opens");
    assert_eq!(back.pages_of(id).ok(), Some(Pages::Unknown));
}

/// Four caches: one in use, one that was synced, one of another boot, and one that is open.
#[test]
fn a_sync_concerns_the_closed_caches_that_this_boot_has_used() {
    let small = || BackendSpec { lanes_max: 1, ..spec() };
    let first = formatted(true);
    let [used, synced, other] = [(); 3].map(|()| first.create_backend(&small()).expect("room"));
    drop(first.open_cache(synced).expect("it opens"));
    drop(first.open_cache(used).expect("it opens"));
    assert_eq!(first.sync().expect("no sync fails"), 0);
    let waker = core::task::Waker::noop();
    let cache = first.open_cache(other).expect("it opens");
    let _ = cache.write(ByteRange::at(0, 512), &[1; 512], waker).expect("it runs");
    drop(cache);
    let second = reopened(&first);
    second.region.memory().set_boot(2);
    let open = second.create_backend(&small()).expect("room");
    drop(second.open_cache(used).expect("it opens"));
    let cache = second.open_cache(open).expect("it opens");
    let states =
        || [used, synced, other, open].map(|id| second.backend_row(id).expect("it is there").use_state.get());
    let before = [tables::USE_DIRTY, tables::USE_SYNCED, tables::USE_DIRTY, tables::USE_CLEAN];
    assert_eq!(states()[1..], before[1..]);
    let used_before = states()[0];

    second.region.memory().fail_syncs(1);
    ops(&second);
    assert!(second.sync().is_err());
    let unsure = [tables::USE_UNSURE, tables::USE_SYNCED, tables::USE_DIRTY, tables::USE_UNSURE];
    assert_eq!((states(), used_before != unsure[0]), (unsure, true));
    // The pages of one that is open are left to its own sync.
    ops(&second);
    assert_eq!(second.sync().expect("no sync fails"), 1);
    let after = ops(&second);
    // The first page of its state; a page that is blank needs no store.
    let is_stored = |id| {
        let base = second.layout().segment_base(second.segments_of(id)[0]);
        after.contains(&Op::Store(base, 64))
    };
    assert_eq!([used, synced, other, open].map(is_stored), [true, false, false, false]);
    assert_eq!(states(), [tables::USE_SYNCED, tables::USE_SYNCED, tables::USE_DIRTY, tables::USE_UNSURE]);

    // What one process is not sure of, the next one stores again.
    drop(cache);
    let third = reopened(&second);
    third.region.memory().set_boot(2);
    drop(third.open_cache(open).expect("it opens"));
    assert_eq!(third.backend_row(open).expect("it is there").use_state.get(), tables::USE_UNSURE);
    ops(&third);
    assert_eq!(third.sync().expect("no sync fails"), 0);
    let base = third.layout().segment_base(third.segments_of(open)[0]);
    let after = ops(&third);
    assert!(after.contains(&Op::Store(base, 64)));
    let fence = after.iter().position(|op| *op == Op::Fence);
    assert!(fence < after.iter().position(|op| *op == Op::Sync(0, SIZE)), "the stores come first");
    assert_eq!(third.backend_row(open).expect("it is there").use_state.get(), tables::USE_SYNCED);
}

#[test]
fn a_cache_that_is_clean_is_synced_without_a_store_of_its_pages_and_not_at_all_after_a_failed_store() {
    let transport = formatted(true);
    let id = transport.create_backend(&spec()).expect("room");
    drop(transport.open_cache(id).expect("it opens"));
    let failing = reopened(&transport);
    ops(&failing);
    failing.region.memory().fail_stores_after(0);
    let _ = failing.region.store(SIZE - 64, &[0; 8]);
    ops(&failing);
    assert_eq!((kind(failing.sync()), ops(&failing)), (Some(ErrorKind::Media), vec![]));
    ops(&transport);
    transport.sync().expect("no sync fails");
    assert_eq!(ops(&transport)[..2], [Op::Fence, Op::Sync(0, SIZE)]);
}

#[test]
fn a_backend_without_a_cache_has_no_epoch_and_no_former_disk() {
    let transport = transport();
    let cached = transport.create_backend(&spec()).expect("room");
    let bare = transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    assert!(transport.drained(cached).is_some());
    assert_eq!((transport.drained(bare), transport.drained(BackendId(3))), (None, None));
    assert!(transport.former_disks(bare).is_empty() && transport.segments_of(bare).is_empty());
}
