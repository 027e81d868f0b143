//! The order in which notes and rows reach the disk: stores of a killed process that are in memory only, and syncs
//! that fail.

use crate::{BACKEND, SimCache, boot, drain, life, open, refused, see, write};
use cbd_engine::Pages;
use cbd_format::tables::USE_DIRTY;
use cbd_sim::{CrashMemory, SimDisk, act_as, until_crash};
use cbd_types::ErrorKind;

/// A region that was synced and closed with dirty data, and its disk.
fn synced_with_dirty_data() -> (CrashMemory, SimDisk) {
    let (memory, tables, cache, disk) = life();
    (0..6).for_each(|block| assert!(write(&cache, block, 7)));
    cache.stop();
    drop(cache);
    assert_eq!(tables.sync().expect("the disk takes it"), 0);
    (memory, disk)
}

/// Writes to the cache, and drains it. After a crash of the machine the cache is refused.
#[track_caller]
fn refused_after_use(memory: &CrashMemory, cache: &SimCache, disk: &SimDisk, seed: u64) {
    assert!(write(cache, 0, 9));
    drain(cache, disk);
    let tables = open(&memory.machine_crash(seed, boot(2)), 4).expect("the tables are on the disk");
    assert_eq!(tables.pages_of(BACKEND).expect("it is there"), Pages::MixedDirty, "seed {seed}");
    refused(&tables);
}

/// The note of the killed process is in memory only; the next process must not take it for one that is on the disk.
#[test]
fn the_note_of_a_killed_process_is_on_the_disk_before_its_successor_uses_the_cache() {
    let (before, disk) = synced_with_dirty_data();
    let mut noted = 0;
    for event in 1.. {
        let mut is_done = false;
        for seed in 0..20 {
            let memory = before.fork();
            memory.crash_after(event, seed);
            let opened = || open(&memory, 2).and_then(|tables| tables.open_cache(BACKEND)).map(drop);
            is_done = until_crash(|| opened().expect("it was synced")).is_ok();
            act_as(0);
            let memory = memory.process_crash();
            let tables = open(&memory, 3).expect("a transport");
            noted += u32::from(tables.backend_row(BACKEND).expect("a row").use_state.get() == USE_DIRTY);
            let cache = tables.open_cache(BACKEND).expect("the same boot");
            refused_after_use(&memory, &cache, &disk, seed);
        }
        if is_done {
            assert!(event > 4 && noted > 20, "the note is stored twice, each time with a sync: {noted}");
            break;
        }
    }
}

/// After a failed sync the kernel considers the pages clean, and the next sync succeeds.
#[test]
fn a_note_of_which_the_sync_failed_is_noted_again_by_the_next_attempt() {
    let (before, disk) = synced_with_dirty_data();
    for count in 1.. {
        let mut failed = 0;
        for seed in 0..40 {
            let memory = before.fork();
            // The seed also chooses the pages that a failed sync writes.
            memory.crash_after(u64::MAX / 2, seed);
            let tables = open(&memory, 2).expect("a transport");
            // One sync, or all for some time.
            memory.fail_syncs(count, if seed % 2 == 0 { 1 } else { 100 });
            failed += u32::from(tables.open_cache(BACKEND).is_err());
            memory.fail_syncs(1, 0);
            // The same process tries again, or another one does.
            let tables = if seed % 4 < 2 { tables } else { open(&memory, 3).expect("a transport") };
            let cache = tables.open_cache(BACKEND).expect("the disk works again");
            refused_after_use(&memory, &cache, &disk, seed);
        }
        if failed == 0 {
            assert!(count > 2, "each slot of the row has a sync");
            break;
        }
    }
}

#[test]
fn a_region_that_cannot_be_synced_is_not_opened() {
    let (memory, disk) = synced_with_dirty_data();
    for count in 1..=3 {
        memory.fail_syncs(count, 1);
        let error = open(&memory, 2).map(drop).expect_err("its disk fails");
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        assert!(error.line().contains("was not opened"), "{error}");
    }
    let cache = open(&memory, 3).and_then(|tables| tables.open_cache(BACKEND)).expect("the disk works again");
    assert_eq!(see(&cache, &disk, 0), 7);
}

/// The last sync fails, the operator repairs the disk, and another process closes the cache. The pages that the
/// kernel considers clean since the failure must be on the disk before the row says so.
#[test]
fn after_a_sync_that_failed_a_cache_counts_as_synced_only_when_its_pages_were_stored_again() {
    let mut failed = 0;
    for seed in 0..60 {
        let (memory, tables, cache, disk) = life();
        assert!((0..6).all(|block| write(&cache, block, 7)));
        cache.stop();
        drop(cache);
        memory.crash_after(u64::MAX / 2, seed);
        memory.fail_syncs(1, 1);
        failed += u32::from(tables.sync().is_err());
        // The same process tries again, or another one, which may write, does.
        let tables = if seed % 3 == 0 { tables } else { open(&memory, 2).expect("a transport") };
        if seed % 3 == 2 {
            let cache = tables.open_cache(BACKEND).expect("the same boot");
            assert!(write(&cache, 0, 7));
            cache.stop();
        }
        assert_eq!(tables.sync().expect("the disk works again"), 0);
        let tables = open(&memory.machine_crash(seed, boot(2)), 4).expect("a transport");
        let cache = tables.open_cache(BACKEND).expect("it was synced");
        assert!((0..6).all(|block| see(&cache, &disk, block) == 7), "seed {seed}");
    }
    assert_eq!(failed, 60);
}

/// As [`a_row_that_changes_while_the_machine_crashes_is_the_last_or_the_new_one`], with syncs that fail.
#[test]
fn a_row_of_which_a_sync_failed_is_valid_while_it_is_changed_again() {
    let (before, tables, cache, _disk) = life();
    cache.stop();
    drop(cache);
    let [first, second, third] = ["/first", "/second", "/third"].map(|text| text.repeat(28));
    tables.move_backend(BACKEND, &first, &first).expect("the disk takes it");
    drop(tables);
    for count in 1.. {
        let mut failed = 0;
        for seed in 0..400 {
            let memory = before.fork();
            memory.crash_after(u64::MAX / 2, seed);
            let tables = open(&memory, 2).expect("a transport");
            memory.fail_syncs(count, 1);
            failed += u32::from(tables.move_backend(BACKEND, &second, &second).is_err());
            memory.fail_syncs(1, 0);
            memory.crash_after(1 + seed % 64, seed);
            let is_reopened = seed % 2 == 0;
            let _ = until_crash(|| {
                let tables = if is_reopened { open(&memory, 3).expect("a transport") } else { tables };
                tables.move_backend(BACKEND, &third, &third).expect("the disk works again");
            });
            act_as(0);
            let tables = open(&memory.machine_crash(seed, boot(2)), 4).expect("a transport");
            let found = tables.backend(BACKEND).unwrap_or_else(|error| panic!("{count}, {seed}: {error}"));
            assert!([&first, &second, &third].contains(&&found.path), "{count}, {seed}: {}", found.path);
        }
        if failed == 0 {
            assert!(count > 2, "each slot of the row has a sync");
            break;
        }
    }
}

/// The disk may tear both slots of a row unless the first slot is on the disk before the second changes, and both are
/// on it before the next change.
#[test]
fn a_row_that_changes_while_the_machine_crashes_is_the_last_or_the_new_one() {
    let (memory, tables, cache, _disk) = life();
    cache.stop();
    drop(cache);
    tables.sync().expect("the disk takes it");
    drop(tables);
    // Texts that fill each sector of a row.
    let [last, new] = ["/last", "/new"].map(|text| text.repeat(40));
    for event in 1.. {
        let mut is_done = false;
        for seed in 0..400 {
            let memory = memory.fork();
            let tables = open(&memory, 2).expect("a transport");
            tables.move_backend(BACKEND, &last, &last).expect("the disk takes it");
            memory.crash_after(event, seed);
            is_done =
                until_crash(|| tables.move_backend(BACKEND, &new, &new).expect("the disk takes it")).is_ok();
            act_as(0);
            let tables = open(&memory.machine_crash(seed, boot(2)), 3).expect("a transport");
            let found = tables.backend(BACKEND).expect("one of its slots is valid");
            assert_eq!(found.path, found.identity, "event {event}, seed {seed}");
            let is_right = found.path == new || (!is_done && found.path == last);
            assert!(is_right, "event {event}, seed {seed}: {}", found.path);
            // A disk that the row no longer names would be served as if it were complete.
            let former = tables.former_disk(BACKEND).map(|former| former.path);
            assert!(
                found.path != new || former.as_ref() == Some(&last),
                "event {event}, seed {seed}: {former:?}"
            );
        }
        if is_done {
            assert!(event > 4, "it has two slots, each with a sync");
            break;
        }
    }
}

/// The next process stores the slot that the killed process did not reach, and then changes the row itself: the disk
/// must still write one slot at a time.
#[test]
fn a_row_that_a_killed_process_left_half_changed_is_valid_while_its_successor_changes_it() {
    let (memory, tables, cache, _disk) = life();
    cache.stop();
    drop(cache);
    // Texts that fill each sector of a row.
    let [first, second, third] = ["/first", "/second", "/third"].map(|text| text.repeat(28));
    tables.move_backend(BACKEND, &first, &first).expect("the disk takes it");
    drop(tables);
    for event in 1.. {
        let mut is_done = false;
        for seed in 0..600 {
            let memory = memory.fork();
            let tables = open(&memory, 2).expect("a transport");
            memory.crash_after(event, seed);
            is_done =
                until_crash(|| tables.move_backend(BACKEND, &second, &second).expect("the disk takes it"))
                    .is_ok();
            act_as(0);
            let memory = memory.process_crash();
            memory.crash_after(1 + seed % 64, seed);
            let _ = until_crash(|| {
                let tables = open(&memory, 3).expect("a transport");
                tables.move_backend(BACKEND, &third, &third).expect("the disk takes it");
            });
            act_as(0);
            let tables = open(&memory.machine_crash(seed, boot(2)), 4).expect("a transport");
            let found = tables.backend(BACKEND).unwrap_or_else(|error| panic!("{event}, {seed}: {error}"));
            assert!([&first, &second, &third].contains(&&found.path), "{event}, {seed}: {}", found.path);
        }
        if is_done {
            assert!(event > 4, "it has two slots, each with a sync");
            break;
        }
    }
}
