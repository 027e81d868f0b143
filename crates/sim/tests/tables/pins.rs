//! The list of pins crashes at every store, fence and sync of a change: the former list or the new one is there, whole. What was
//! reported outlives a power cut together with one failed page, and in an ordinary file a crash of the machine.

use crate::rig::{SEGMENT, Tables, backend, ends_of, environment_of, made, open};
use cbd_engine::{Pin, PinKind, StoredPins, Transport};
use cbd_format::StateShape;
use cbd_sim::{CrashMemory, Keep, act_as, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, Region};

const PAGE: u64 = 4096;
const BACKEND: BackendId = BackendId(0);

/// A list of `count` pins of a block each, of several lines.
fn list(count: u64) -> Vec<Pin> {
    let pin = |number: u64| Pin {
        kind: PinKind::ALL[number as usize % 3],
        text: format!("/srv/file-{number}-of-{count}"),
        ranges: vec![ByteRange::at(2 * number * PAGE, PAGE)],
    };
    (0..count).map(pin).collect()
}

/// A transport with a cache that has these pins, one list after the other.
fn pinned(lists: &[u64]) -> (CrashMemory, Tables) {
    let (memory, tables) = made(&[
        |tables| tables.register_host("one", None).map(drop),
        |tables| tables.create_backend(&backend(14)).map(drop),
    ]);
    let cache = tables.open_cache(BACKEND).expect("it opens");
    for count in lists {
        tables.set_pins(BACKEND, &list(*count)).expect("it fits");
    }
    drop(cache);
    (memory, tables)
}

fn set(tables: &Tables, count: u64) {
    let _cache = tables.open_cache(BACKEND).expect("it opens");
    tables.set_pins(BACKEND, &list(count)).expect("it fits");
}

fn of(memory: &CrashMemory) -> StoredPins {
    open(memory).expect("a transport").pins(BACKEND).expect("it is there")
}

fn stored(count: u64) -> StoredPins {
    StoredPins { pins: list(count), are_lost: false }
}

/// The pages of both copies.
fn pages() -> Vec<u64> {
    let layout = pinned(&[]).1.info().layout;
    let (copies, length) = StateShape { lanes: 1 }.pins(SEGMENT).expect("there is room");
    let pages = copies.into_iter().flat_map(|copy| (copy..copy + length).step_by(PAGE as usize));
    pages.map(|at| layout.segment_area + at).collect()
}

#[test]
fn a_crash_at_any_store_leaves_the_former_list_or_the_new_one() {
    for lists in [&[3, 7][..], &[7, 3], &[7, 0]] {
        let (&last, before) = lists.split_last().expect("there is one");
        let events = {
            let (memory, tables) = pinned(before);
            let events = memory.events();
            set(&tables, last);
            memory.events() - events
        };
        let (mut old, mut new) = (0, 0);
        for event in 1..=events {
            let (memory, tables) = pinned(before);
            memory.crash_after(event, event);
            assert!(until_crash(|| set(&tables, last)).is_err(), "event {event}");
            for (fate, end) in ends_of(&memory, 12).into_iter().enumerate() {
                let found = of(&end);
                let is_old = found == stored(before[0]);
                assert!(is_old || found == stored(last), "event {event}, fate {fate}: {found:?}");
                (old, new) = (old + u32::from(is_old), new + u32::from(!is_old));
                // The cache opens with it, and takes another one.
                let tables = open(&end).expect("a transport");
                let cache = tables.open_cache(BACKEND).expect("it opens");
                assert_eq!(cache.pinned_bytes(), found.pins.len() as u64 * PAGE);
                tables.set_pins(BACKEND, &list(5)).expect("it fits");
                assert_eq!(of(&end.power_cut(1, Keep::Nothing)), stored(5));
            }
        }
        assert!(old > 0 && new > 0, "{lists:?}: {old} {new}");
    }
}

#[test]
fn a_list_that_was_reported_outlives_a_power_cut_and_one_failed_page() {
    for lists in [&[3][..], &[3, 7], &[3, 7, 2]] {
        let last = *lists.last().expect("there is one");
        let memory = pinned(lists).0.power_cut(1, Keep::Nothing);
        assert_eq!(of(&memory), stored(last));
        for at in pages() {
            let memory = memory.fork();
            memory.poison(ByteRange::at(at, PAGE));
            assert_eq!(of(&memory), stored(last), "the page at {at} failed");
        }
    }
}

#[test]
fn a_list_that_was_reported_outlives_a_crash_of_the_machine_in_a_file() {
    let boot = |number| BootId([number; 16]);
    let before = pinned(&[3]).0;
    before.become_file(boot(1));
    for seed in 0..40 {
        let memory = before.fork();
        memory.crash_after(u64::MAX / 2, seed);
        let tables = open(&memory).expect("a transport");
        set(&tables, 7);
        assert_eq!(of(&memory.machine_crash(seed, boot(2))), stored(7), "seed {seed}");
    }
}

#[test]
fn a_list_of_which_both_copies_are_damaged_is_lost_and_reported() {
    let memory = pinned(&[7]).0;
    for at in pages() {
        memory.poison(ByteRange::at(at, PAGE));
    }
    assert_eq!(of(&memory), StoredPins { pins: Vec::new(), are_lost: true });
    let tables = open(&memory).expect("a transport");
    assert_eq!(tables.open_cache(BACKEND).expect("it opens").pinned_bytes(), 0);
    // A cache that never had one lacks nothing.
    assert_eq!(of(&pinned(&[]).0), StoredPins::default());
}

#[test]
fn a_list_whose_first_copy_was_zeroed_and_whose_second_one_is_damaged_is_lost_too() {
    let memory = pinned(&[7]).0;
    let pages = pages();
    let (first, second) = (pages[0], pages[pages.len() / 2]);
    let mut image = memory.image();
    image[first as usize..(first + PAGE) as usize].fill(0);
    let zeroed = CrashMemory::from_image(image);
    assert_eq!(of(&zeroed), stored(7));
    zeroed.flip(second + 100, 0);
    assert_eq!(of(&zeroed), StoredPins { pins: Vec::new(), are_lost: true });
    // Where no list was, memory that fails takes none.
    let never = pinned(&[]).0;
    never.poison(ByteRange::at(second, PAGE));
    assert_eq!(of(&never), StoredPins::default());
}

#[test]
fn a_cache_that_is_attached_again_has_no_pins() {
    let (memory, tables) = pinned(&[7]);
    let cache = tables.open_cache(BACKEND).expect("it opens");
    cache.stop();
    tables.detach_cache(BACKEND).expect("nothing is dirty");
    assert_eq!(of(&memory), StoredPins::default());
    drop(cache);
    let tables = Transport::open(environment_of(8), Region::new(memory.clone())).expect("a transport");
    tables.attach_cache(BACKEND, 14 * SEGMENT, 1).expect("there is room");
    assert_eq!(of(&memory), StoredPins::default());
    act_as(0);
}
