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
    let base = transport.layout.segment_area;
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
