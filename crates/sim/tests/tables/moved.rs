//! Disks that a backend had before it was moved: all are remembered until the user requests to forget one.

use crate::rig::{CHANGES, Tables, ends_of, made, open};
use cbd_engine::Admission;
use cbd_sim::{act_as, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, ErrorKind, Result};
use std::task::Waker;

const BACKEND: BackendId = BackendId(0);
/// The first disk of the backend.
const FIRST: &str = "/simulated/disk";

/// Moves the backend to the disk with this name.
fn move_to(tables: &Tables, name: &str) -> Result<()> {
    tables.move_backend(BACKEND, &format!("/simulated/{name}"), name)
}

fn former(tables: &Tables) -> Vec<String> {
    tables.former_disks(BACKEND).into_iter().map(|former| former.path).collect()
}

#[test]
fn every_former_disk_is_known_the_last_one_first() {
    let (memory, tables) = made(&CHANGES[..2]);
    assert!(former(&tables).is_empty());
    ["b", "c", "d"].into_iter().for_each(|name| move_to(&tables, name).expect("there is room"));
    let expected = ["/simulated/c", "/simulated/b", FIRST];
    assert_eq!(former(&tables), expected);
    tables.settle_backend(BACKEND).expect("stored");
    assert_eq!(former(&open(&memory).expect("a transport")), expected);
    tables.remove_backend(BACKEND).expect("nothing is open");
    assert!(former(&tables).is_empty());
}

#[test]
fn a_move_for_which_there_is_no_room_changes_nothing_and_names_what_can_be_forgotten() {
    let (memory, tables) = made(&CHANGES[..2]);
    ["b", "c", "d"].into_iter().for_each(|name| move_to(&tables, name).expect("there is room"));
    let before = memory.image();
    let error = move_to(&tables, "e").expect_err("one disk too many");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    for part in [FIRST, "/simulated/b", "/simulated/c", "--forget-disk"] {
        assert!(error.line().contains(part), "{error}");
    }
    assert!(memory.image() == before);
    assert_eq!(
        tables.forget_former_disk(BACKEND, "/simulated/d").expect_err("that is its disk").kind(),
        ErrorKind::NotFound
    );
    tables.forget_former_disk(BACKEND, "/simulated/b").expect("it was one");
    move_to(&tables, "e").expect("there is room again");
    assert_eq!(former(&tables), ["/simulated/d", "/simulated/c", FIRST]);
}

#[test]
fn a_disk_to_which_a_backend_is_moved_back_is_not_a_former_one_until_the_next_move() {
    let (_memory, tables) = made(&CHANGES[..2]);
    move_to(&tables, "b").expect("there is room");
    tables.move_backend(BACKEND, FIRST, "simulated").expect("there is room");
    assert_eq!(former(&tables), ["/simulated/b"]);
    move_to(&tables, "c").expect("there is room");
    assert_eq!(former(&tables), [FIRST, "/simulated/b"]);
    // A move that is reverted.
    let entry = tables.backend(BACKEND).expect("it is there");
    move_to(&tables, "d").expect("the row of the first disk is used again");
    tables.move_backend_back(&entry).expect("stored");
    assert_eq!(former(&tables), [FIRST, "/simulated/b"]);
    move_to(&tables, "e").expect("the row of the third disk is used again");
    assert_eq!(former(&tables), ["/simulated/c", FIRST, "/simulated/b"]);
}

#[test]
fn only_the_named_one_of_two_former_disks_with_the_same_path_is_forgotten() {
    let (_memory, tables) = made(&CHANGES[..2]);
    for identity in ["b1", "b2"] {
        tables.move_backend(BACKEND, "/simulated/b", identity).expect("there is room");
    }
    move_to(&tables, "c").expect("there is room");
    let identities =
        || tables.former_disks(BACKEND).into_iter().map(|former| former.identity).collect::<Vec<_>>();
    assert_eq!(identities(), ["b2", "b1", "simulated"]);
    let error = tables.forget_former_disk(BACKEND, "/simulated/b").expect_err("it can be either");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.line().contains("b1") && error.line().contains("b2"), "{error}");
    assert_eq!(identities(), ["b2", "b1", "simulated"]);
    tables.forget_former_disk(BACKEND, "b1").expect("it is one");
    assert_eq!(identities(), ["b2", "simulated"]);
    tables.forget_former_disk(BACKEND, "/simulated/b").expect("one disk has this path now");
    assert_eq!(identities(), ["simulated"]);
}

#[test]
fn what_was_forgotten_stays_forgotten_and_nothing_else_is() {
    let forget = |tables: &Tables| tables.forget_former_disk(BACKEND, "/simulated/b").expect("it was one");
    for is_file in [false, true] {
        for event in 1.. {
            let mut is_done = false;
            for seed in 0..40 {
                let (memory, tables) = made(&CHANGES[..2]);
                ["b", "c", "d"].into_iter().for_each(|name| move_to(&tables, name).expect("there is room"));
                if is_file {
                    memory.become_file(BootId([1; 16]));
                }
                memory.crash_after(event, seed);
                is_done = until_crash(|| forget(&tables)).is_ok();
                act_as(0);
                let ends = match is_file {
                    false => ends_of(&memory, 4),
                    true => vec![memory.machine_crash(seed, BootId([2; 16]))],
                };
                for end in ends {
                    let found = former(&open(&end).expect("a transport"));
                    let others: Vec<_> = found.iter().filter(|path| *path != "/simulated/b").collect();
                    assert_eq!(others, ["/simulated/c", FIRST], "event {event}, seed {seed}");
                    assert!(!is_done || found.len() == 2, "event {event}, seed {seed}: {found:?}");
                }
            }
            if is_done {
                assert!(event > 2, "two slots and a fence");
                break;
            }
        }
    }
}

/// Whatever is cut off, the cache is there, or empty, or the backend counts as moved, which no process serves unasked.
#[test]
fn a_cache_that_is_emptied_is_never_served_in_part() {
    let range = ByteRange::at(0, 4096);
    let filled = || {
        let (memory, tables) = made(&CHANGES[..2]);
        let cache = tables.open_cache(BACKEND).expect("recovered");
        assert!(matches!(cache.write(range, &[7; 4096], Waker::noop()), Ok(Admission::Done(_))));
        cache.flush().expect("it runs");
        cache.stop();
        (memory, tables)
    };
    let mut found = [0; 3];
    for place in 1.. {
        let (memory, tables) = filled();
        memory.crash_after(place, place);
        let is_done = until_crash(|| tables.empty_backend(BACKEND).expect("nothing is open")).is_ok();
        act_as(0);
        for end in ends_of(&memory, 8) {
            let tables = open(&end).expect("a transport");
            if tables.backend(BACKEND).expect("it is there").is_moved {
                found[0] += 1;
                // It can begin again.
                tables.empty_backend(BACKEND).expect("nothing is open");
                assert!(!tables.backend(BACKEND).expect("it is there").is_moved, "it has no other disk");
            }
            let cache = tables.open_cache(BACKEND).unwrap_or_else(|error| panic!("place {place}: {error}"));
            assert!(cache.status().damaged.is_empty(), "place {place}: {:?}", cache.status().damaged);
            let (mut read, mut misses) = (vec![0; 4096], Vec::new());
            cache.read(range, &mut read, &mut misses).expect("nothing is damaged");
            assert!(!misses.is_empty() || read == [7; 4096], "place {place}");
            assert!(!is_done || !misses.is_empty(), "place {place}: it is empty");
            found[if misses.is_empty() { 1 } else { 2 }] += 1;
            misses.drain(..).for_each(|miss| cache.cancel_fill(miss));
        }
        if is_done {
            break;
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
}

/// On memory whose pages the kernel writes to the disk in any order, a crash of the machine behind an emptying cache brings back some
/// of its old pages: they are refused or they are gone, or the backend counts as moved.
#[test]
fn a_crash_of_the_machine_brings_nothing_back_into_an_emptied_cache() {
    let range = ByteRange::at(0, 4096);
    let mut found = [0; 3];
    for is_synced in [false, true] {
        for place in 1.. {
            let mut is_done = false;
            for seed in 0..40 {
                let (memory, tables) = made(&CHANGES[..2]);
                memory.become_file(BootId([1; 16]));
                let tables = {
                    drop(tables);
                    open(&memory).expect("a transport")
                };
                let cache = tables.open_cache(BACKEND).expect("recovered");
                assert!(matches!(cache.write(range, &[7; 4096], Waker::noop()), Ok(Admission::Done(_))));
                cache.flush().expect("it runs");
                cache.stop();
                drop(cache);
                if is_synced {
                    assert_eq!(tables.sync().expect("the disk takes it"), 0);
                }
                memory.crash_after(place, seed);
                is_done = until_crash(|| tables.empty_backend(BACKEND).expect("nothing is open")).is_ok();
                act_as(0);
                let tables = open(&memory.machine_crash(seed, BootId([2; 16]))).expect("a transport");
                if tables.backend(BACKEND).expect("it is there").is_moved {
                    found[0] += 1;
                    continue;
                }
                let cache = match tables.open_cache(BACKEND) {
                    Ok(cache) => cache,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Torn, "place {place}, seed {seed}: {error}");
                        found[1] += 1;
                        continue;
                    }
                };
                let (mut read, mut misses) = (vec![0; 4096], Vec::new());
                let is_read = cache.read(range, &mut read, &mut misses);
                assert!(
                    is_read.is_ok(),
                    "synced {is_synced}, done {is_done}, place {place}, seed {seed}: {is_read:?}"
                );
                assert!(!misses.is_empty() || read == [7; 4096], "place {place}, seed {seed}");
                assert!(
                    !is_done || !misses.is_empty(),
                    "synced {is_synced}, place {place}, seed {seed}: old data"
                );
                found[2] += 1;
                misses.drain(..).for_each(|miss| cache.cancel_fill(miss));
            }
            if is_done {
                break;
            }
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
}
