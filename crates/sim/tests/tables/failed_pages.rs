//! The tables store everything twice: a power cut and one failed page together lose nothing.

use crate::rig::{CHANGES, Tables, backend, made, open, snapshot};
use cbd_format::{
    BackendEntry, BlkdevEntry, Drained, HostEntry, LaneTail, Layout, SegmentEntry, Slot, SlotContent,
    StateShape,
};
use cbd_sim::{CrashMemory, Keep};
use cbd_types::{BackendId, ByteRange, LaneId};

const PAGE: u64 = 4096;

/// Opens the caches and expects no damage in them.
fn open_caches(tables: &Tables, what: &str) {
    for backend in tables.backends().expect("rows are sound") {
        if backend.cache_segments > 0 {
            let cache = tables.open_cache(backend.id).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(cache.status().damaged, [], "{what}");
        }
    }
}

#[test]
fn what_was_reported_outlives_a_power_cut_and_one_failed_page() {
    for number in 0..=CHANGES.len() {
        let (memory, tables) = made(&CHANGES[..number]);
        let (reported, layout) = (snapshot(&tables), tables.info().layout);
        let memory = memory.power_cut(1, Keep::Nothing);
        let tables_end = layout.segment_area;
        // The state segment of a cache is the first segment that was free.
        let state = (0..8).map(|page| tables_end + page * PAGE);
        let pages = (0..tables_end).step_by(PAGE as usize).chain(state).chain([layout.region_size - PAGE]);
        for at in pages {
            let what = format!("after {number} changes, with the page at {at} failed");
            let memory = memory.fork();
            memory.poison(ByteRange::at(at, PAGE));
            let tables = open(&memory).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(snapshot(&tables), reported, "{what}");
            open_caches(&tables, &what);
        }
    }
}

/// A row is stored only after both copies of its segments' entries name the cache.
#[test]
fn a_backend_that_a_crash_left_has_its_segments_beside_a_failed_page() {
    let layout = made(&[]).1.info().layout;
    let pages = (layout.segment_table..layout.segment_area).step_by(PAGE as usize);
    let free = {
        let (_memory, tables) = made(&CHANGES[..2]);
        tables.info().free_segments
    };
    let events = {
        let (memory, tables) = made(&CHANGES[..1]);
        let before = memory.events();
        CHANGES[1](&tables).expect("possible");
        memory.events() - before
    };
    let mut found = 0;
    for event in 1..=events {
        let (memory, tables) = made(&CHANGES[..1]);
        memory.crash_after(event, event);
        assert!(cbd_sim::until_crash(|| CHANGES[1](&tables)).is_err());
        for (fate, end) in crate::rig::ends_of(&memory, 20).into_iter().enumerate() {
            for at in pages.clone() {
                let end = end.fork();
                end.poison(ByteRange::at(at, PAGE));
                let what = format!("event {event}, fate {fate}, with the page at {at} failed");
                let tables = open(&end).unwrap_or_else(|error| panic!("{what}: {error}"));
                if !tables.backends().expect("rows are sound").is_empty() {
                    assert_eq!(tables.info().free_segments, free, "{what}");
                    open_caches(&tables, &what);
                    found += 1;
                }
            }
        }
    }
    assert!(found > 0, "no crash left the backend");
}

/// Both slots of each row of a table; none if a slot holds no row.
fn slots<T: SlotContent>(memory: &CrashMemory, area: u64, rows: u32) -> Vec<[Option<Slot<T>>; 2]> {
    let image = memory.image();
    let decode =
        |row: u32, at: u64| Slot::decode(u64::from(row), &image[at as usize..at as usize + T::SLOT_SIZE]);
    (0..rows).map(|row| Layout::slots::<T>(area, rows, row).map(|at| decode(row, at))).collect()
}

/// Expects that both slots of each row hold the same, and returns the number of rows.
fn twice<T: SlotContent + PartialEq + std::fmt::Debug>(memory: &CrashMemory, area: u64, rows: u32) -> usize {
    let mut found = 0;
    for (row, slots) in slots::<T>(memory, area, rows).into_iter().enumerate() {
        let [first, second] = slots.map(|slot| slot.map(|slot| slot.content));
        assert_eq!(first, second, "row {row}");
        found += usize::from(first.is_some());
    }
    found
}

#[test]
fn both_slots_of_every_row_are_equal_after_every_change() {
    for number in 0..=CHANGES.len() {
        let (memory, tables) = made(&CHANGES[..number]);
        let memory = memory.power_cut(1, Keep::Nothing);
        let layout = tables.info().layout;
        let hosts = twice::<HostEntry>(&memory, layout.host_area, layout.host_rows);
        let backends = twice::<BackendEntry>(&memory, layout.backend_area, layout.backend_rows);
        let blkdevs = twice::<BlkdevEntry>(&memory, layout.blkdev_area, layout.blkdev_rows);
        let segments = twice::<SegmentEntry>(&memory, layout.segment_table, layout.segment_count);
        assert_eq!(hosts, usize::from(number >= 1));
        assert_eq!(blkdevs, usize::from(number >= 3));
        assert_eq!((backends > 0, segments > 0), (number >= 2, number >= 2));
    }
}

#[test]
fn both_slots_of_tails_and_drained_of_a_new_cache_are_equal() {
    let (memory, tables) = made(&CHANGES[..2]);
    let layout = tables.info().layout;
    let row = slots::<BackendEntry>(&memory, layout.backend_area, layout.backend_rows)[0][0]
        .expect("a row")
        .content;
    let base = layout.segment_base(cbd_types::SegmentId(row.state_segment.get()));
    let state = StateShape { lanes: row.lanes.get() };
    let image = memory.image();
    let decode = |at: u64| image[(base + at) as usize..(base + at) as usize + 64].to_vec();
    for lane in (0..row.lanes.get()).map(LaneId) {
        let slots = state.tail(lane).map(|at| Slot::<LaneTail>::decode(u64::from(lane.0), &decode(at)));
        let tails = slots.map(|slot| slot.expect("a tail").content);
        assert_eq!(tails[0], tails[1]);
    }
    let drained = state.drained().map(|at| Slot::<Drained>::decode(0, &decode(at)).expect("drained").content);
    assert_eq!(drained[0], drained[1]);
}

/// The segments of an earlier cache are free, although their entries still name its row.
#[test]
fn a_smaller_cache_in_the_row_of_a_larger_one_leaves_the_other_segments_free() {
    let (_memory, tables) = made(&CHANGES[..1]);
    let all = tables.info().free_segments;
    let id = tables.create_backend(&backend(12)).expect("there is space");
    tables.remove_backend(id).expect("nothing stands on it");
    assert_eq!(tables.create_backend(&backend(9)).expect("there is space"), id);
    assert_eq!(tables.info().free_segments, all - 9);
    assert_eq!(tables.open_cache(id).expect("a new cache").status().segments, 8);
}

/// Whatever part of a change of a row a crash leaves, the next owner has a higher number.
#[test]
fn ownership_numbers_never_fall() {
    let highest = |memory: &CrashMemory, tables: &Tables| {
        let layout = tables.info().layout;
        let hosts = slots::<HostEntry>(memory, layout.host_area, layout.host_rows);
        let blkdevs = slots::<BlkdevEntry>(memory, layout.blkdev_area, layout.blkdev_rows);
        let host = hosts[0].iter().flatten().map(|slot| slot.content.ownership.get()).max();
        let blkdev = blkdevs[0].iter().flatten().map(|slot| slot.content.ownership.get()).max();
        (host.unwrap_or(0), blkdev.unwrap_or(0))
    };
    let change = |tables: &Tables| {
        tables.remove_blkdev(cbd_types::BlkdevId(0))?;
        tables.remove_backend(BackendId(0))?;
        tables.unregister_host(cbd_types::HostId(0))
    };
    let events = {
        let (memory, tables) = made(&CHANGES[..3]);
        let before = memory.events();
        change(&tables).expect("possible");
        memory.events() - before
    };
    for event in 1..=events {
        let (memory, tables) = made(&CHANGES[..3]);
        let before = highest(&memory, &tables);
        memory.crash_after(event, event);
        assert!(cbd_sim::until_crash(|| change(&tables)).is_err());
        for end in crate::rig::ends_of(&memory, 60) {
            let tables = open(&end).expect("a transport");
            let after = highest(&end, &tables);
            assert!(after.0 >= before.0 && after.1 >= before.1, "event {event}: {after:?} after {before:?}");
        }
    }
}
