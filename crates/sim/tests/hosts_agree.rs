//! Several hosts of a shared region: no object has two users, and no decision two values, whatever their memory and their pauses.

use cbd_engine::Members;
use cbd_format::{Layout, Object};
use cbd_sim::baton::{switch_with, together};
use cbd_sim::explorer::Tally;
use cbd_sim::hosts::{HostEnvironment, HostMemory, Medium};
use cbd_sim::{from_environment, hosts};
use cbd_types::{Error, ErrorKind, HostId, Region};
use std::sync::Arc;

#[test]
fn no_object_has_two_hosts() {
    let mut all = Tally::default();
    for seed in 1..=from_environment("CBD_SEEDS", 12) {
        all.add(hosts::explore(seed, None));
    }
    assert!(all.findings.is_empty(), "{:?}", all.findings);
    // The test proves nothing unless these events occur.
    let expected = [
        "join",
        "joined_at_once",
        "death",
        "acquired",
        "not_acquired",
        "released",
        "left",
        "cleared",
        "had_it_before",
    ];
    for name in expected {
        let count = all.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", all.faults);
    }
}

fn layout() -> Layout {
    Layout::shared(1 << 20, 64 << 10, 3, 2, 1).expect("it fits")
}

/// The hosts of a region, seen by a process on a machine of its own.
fn members(medium: &Medium, seed: u64) -> Members<HostEnvironment> {
    let memory = HostMemory::new(medium, true, seed);
    let environment = Arc::new(HostEnvironment::new(seed));
    Members::new(environment, Arc::new(Region::new(memory)), layout()).expect("it is shared")
}

/// A region in which hosts have joined, each one with the first area that is free.
fn with_hosts(names: &[&str]) -> Medium {
    let medium = Medium::new(layout().region_size);
    for (name, seed) in names.iter().zip(100..) {
        members(&medium, seed).join(name, &mut |_, _, _| Ok(())).expect("it fits");
    }
    medium
}

#[test]
fn two_areas_of_one_name_are_reported_with_their_numbers() {
    // Nothing leads there but a damaged or a forged region.
    let (mut bytes, other) = (with_hosts(&["a"]).bytes(), with_hosts(&["z", "a"]).bytes());
    let parts = layout().shared_parts().expect("it is shared");
    let votes = (0..parts.voters(Object::Area(1))).flat_map(|voter| parts.vote(Object::Area(1), voter));
    for at in votes.chain(parts.header(1)).map(|at| at as usize) {
        let end = at + 128;
        bytes[at..end].copy_from_slice(&other[at..end]);
    }
    let refused =
        members(&Medium::with_bytes(bytes), 7).join("a", &mut |_, _, _| Ok(())).expect_err("which one?");
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}");
    assert!(refused.line().contains("hosts 0 and 1 both have the name a: clear one"), "{refused}");
}

#[test]
fn a_host_that_moves_to_another_area_while_a_process_looks_is_never_taken_for_two() {
    let formatted = with_hosts(&["a"]).bytes();
    let mut seen_moved = 0;
    for seed in 0..60 {
        let medium = Medium::with_bytes(formatted.clone());
        let looks = || {
            // It is paused once, at a step that the seed decides.
            switch_with(2 + seed % 5);
            members(&medium, seed).join("a", &mut |_, host, _| match host {
                Some(_) => Err(Error::new(ErrorKind::Busy, "it lives")),
                None => Ok(()),
            })
        };
        let moves = || {
            switch_with(0);
            let all = members(&medium, seed + 1000);
            let a = all.join("a", &mut |_, _, _| Ok(())).expect("its former process has ended");
            all.leave(&a).expect("it has nothing");
            all.join("z", &mut |_, _, _| Ok(())).expect("area 0 is free");
            all.join("a", &mut |_, _, _| Ok(()))
        };
        let ended =
            together(seed, 0, vec![Box::new(looks) as Box<dyn FnOnce() -> _ + Send + '_>, Box::new(moves)]);
        for outcome in ended {
            match outcome.expect("it does not panic") {
                Ok(member) => seen_moved += u32::from(member.id == HostId(1)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "seed {seed}: {error}"),
            }
        }
        let hosts = members(&medium, 7).all().expect("they can be read");
        assert_eq!(hosts.iter().filter(|host| host.name == "a").count(), 1, "seed {seed}: {hosts:?}");
    }
    assert!(seen_moved > 10, "{seen_moved}");
}
