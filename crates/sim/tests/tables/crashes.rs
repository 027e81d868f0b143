//! The tables of a transport crash at every store, write-back and fence of every change. Afterwards the change is
//! present or not, nothing else has changed, and a state that was observed once survives a power cut.

use crate::rig::{
    CHANGES, Tables, ends, ends_of, environment_of, format, format_as, made, open, region, rows, snapshot,
};
use cbd_sim::{Keep, act_as, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, ErrorKind};

const PAGE: u64 = 4096;

#[test]
fn a_change_is_there_or_not_and_stays_what_it_was_found_to_be() {
    for number in 0..CHANGES.len() {
        let (before, after, events) = {
            let (memory, tables) = made(&CHANGES[..number]);
            let (before, events) = (snapshot(&tables), memory.events());
            CHANGES[number](&tables).expect("possible");
            (before, snapshot(&tables), memory.events() - events)
        };
        for event in 1..=events {
            let (memory, tables) = made(&CHANGES[..number]);
            memory.crash_after(event, event);
            assert!(until_crash(|| CHANGES[number](&tables)).is_err(), "change {number}, event {event}");
            for (fate, end) in ends(&memory).into_iter().enumerate() {
                let event = format!("change {number}, event {event}, fate {fate}");
                let tables = open(&end).unwrap_or_else(|error| panic!("{event}: {error}"));
                let found = snapshot(&tables);
                assert!(
                    found == before || found == after,
                    "{event}: {found}\nbefore {before}\nafter {after}"
                );
                // It was observed, so it must survive a power cut.
                let tables =
                    open(&end.power_cut(1, Keep::Nothing)).unwrap_or_else(|error| panic!("{event}: {error}"));
                assert_eq!(snapshot(&tables), found, "{event}: lost by a power cut after it was seen");
                if found == before {
                    CHANGES[number](&tables).unwrap_or_else(|error| panic!("{event}: {error}"));
                    assert_eq!(snapshot(&tables), after, "{event}: made after the crash");
                }
            }
        }
    }
}

/// As above in an ordinary file. A killed process leaves its pages in the kernel's cache: the state that the next
/// process finds is on the disk.
#[test]
fn what_a_killed_process_left_in_a_file_stays_what_its_successor_found_it_to_be() {
    let boot = |number| BootId([number; 16]);
    for number in 0..CHANGES.len() {
        let before = made(&CHANGES[..number]).0;
        before.become_file(boot(1));
        for event in 1.. {
            let mut is_done = false;
            for seed in 0..6 {
                let when = format!("change {number}, event {event}, seed {seed}");
                let memory = before.fork();
                let tables = open(&memory).expect("a transport");
                memory.crash_after(event, seed);
                is_done = until_crash(|| CHANGES[number](&tables).expect("possible")).is_ok();
                act_as(0);
                let memory = memory.process_crash();
                let tables = open(&memory).unwrap_or_else(|error| panic!("{when}: {error}"));
                let found = snapshot(&tables);
                let end = memory.machine_crash(seed, boot(2));
                let after = open(&end).unwrap_or_else(|error| panic!("{when}: {error}"));
                assert_eq!(
                    snapshot(&after),
                    found,
                    "{when}: lost by a crash of the machine after it was seen"
                );
            }
            if is_done {
                break;
            }
        }
    }
}

/// If both slots are valid, the valid one with the higher number is durable by itself. If one of them is on a failed
/// page, the state that was found may be in a processor's cache only.
#[test]
fn what_was_found_beside_a_failed_page_outlives_a_power_cut() {
    let layout = made(&[]).1.info().layout;
    let pages: Vec<u64> = (PAGE..layout.segment_area).step_by(PAGE as usize).collect();
    for number in 0..CHANGES.len() {
        let events = {
            let (memory, tables) = made(&CHANGES[..number]);
            let events = memory.events();
            CHANGES[number](&tables).expect("possible");
            memory.events() - events
        };
        for event in 1..=events {
            let (memory, tables) = made(&CHANGES[..number]);
            memory.crash_after(event, event);
            assert!(until_crash(|| CHANGES[number](&tables)).is_err());
            let memory = memory.process_crash();
            for at in &pages {
                let memory = memory.fork();
                memory.poison(ByteRange::at(*at, PAGE));
                let what = format!("change {number}, event {event}, with the page at {at} failed");
                let tables = open(&memory).unwrap_or_else(|error| panic!("{what}: {error}"));
                if is_reported_as_lost(&tables) {
                    // The crash tore the second slot, and the first is on the failed page.
                    continue;
                }
                let found = rows(&tables);
                let tables = open(&memory.power_cut(1, Keep::Nothing))
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(rows(&tables), found, "{what}: lost by a power cut after it was seen");
            }
        }
    }
}

/// Whether a backend is reported as lost with both copies of its row.
fn is_reported_as_lost(tables: &Tables) -> bool {
    let is_lost = |row| tables.backend(BackendId(row)).is_err_and(|error| error.kind() == ErrorKind::Damaged);
    (0..2).any(is_lost)
}

/// Opening the tables makes stores durable that a dead process left in its processor's cache. This happens before the
/// repair of the other slot, because that repair may be interrupted as well.
#[test]
fn a_power_cut_while_a_row_is_repaired_leaves_one_valid_slot() {
    for number in 0..CHANGES.len() {
        let (before, after, events) = {
            let (memory, tables) = made(&CHANGES[..number]);
            let (before, events) = (rows(&tables), memory.events());
            CHANGES[number](&tables).expect("possible");
            (before, rows(&tables), memory.events() - events)
        };
        for event in 1..=events {
            let (memory, tables) = made(&CHANGES[..number]);
            memory.crash_after(event, event);
            assert!(until_crash(|| CHANGES[number](&tables)).is_err());
            let memory = memory.process_crash();
            for step in 1.. {
                let memory = memory.fork();
                memory.crash_after(step, step);
                if until_crash(|| open(&memory)).is_ok() {
                    break;
                }
                for (fate, end) in ends(&memory).into_iter().enumerate() {
                    let what = format!("change {number}, event {event}, step {step}, fate {fate}");
                    let found = rows(&open(&end).unwrap_or_else(|error| panic!("{what}: {error}")));
                    assert!(found == before || found == after, "{what}: {found}");
                }
            }
        }
    }
}

#[test]
fn a_crash_while_formatting_leaves_a_transport_or_none() {
    let events = {
        let memory = region();
        format(&memory, false).expect("a fresh region");
        memory.events()
    };
    for event in 1..=events {
        let memory = region();
        memory.crash_after(event, event);
        assert!(until_crash(|| format(&memory, false)).is_err());
        for end in ends(&memory) {
            let is_there = open(&end).is_ok_and(|tables| {
                assert_eq!(snapshot(&tables), snapshot(&made(&[]).1));
                true
            });
            // It was observed, so it must survive a power cut.
            let end = end.power_cut(1, Keep::Nothing);
            assert!(open(&end).is_ok() || !is_there, "event {event}: lost by a power cut after it was seen");
            let tables = format(&end, true).unwrap_or_else(|error| panic!("event {event}: {error}"));
            tables.register_host("one", None).expect("an empty table");
        }
    }
}

/// An old superblock belongs to the old tables, a new one to the new tables.
#[test]
fn a_crash_while_formatting_again_never_mixes_the_old_transport_with_the_new() {
    let transports = |again: bool| {
        let (memory, tables) = made(&CHANGES[..3]);
        let tables =
            if again { format_as(environment_of(8), &memory, true).expect("forced") } else { tables };
        (tables.info().uuid, snapshot(&tables))
    };
    let (old, fresh) = (transports(false), transports(true));
    assert!(old != fresh && fresh.1 == snapshot(&made(&[]).1));
    let events = {
        let (memory, _) = made(&CHANGES[..3]);
        let before = memory.events();
        format_as(environment_of(8), &memory, true).expect("forced");
        memory.events() - before
    };
    for event in 1..=events {
        let (memory, _) = made(&CHANGES[..3]);
        memory.crash_after(event, event);
        assert!(until_crash(|| format_as(environment_of(8), &memory, true)).is_err());
        for (fate, end) in ends_of(&memory, 60).into_iter().enumerate() {
            let Ok(tables) = open(&end) else { continue };
            let found = (tables.info().uuid, snapshot(&tables));
            assert!(found == old || found == fresh, "event {event}, fate {fate}: {found:?}");
        }
    }
}
