//! Each host has rows and segments of its own, and sees those of the others.

use crate::{SEGMENT, SIZE, Shared, format, open, open_if, segments, spec};
use cbd_engine::{BlkdevSpec, FormatOptions, Members, Transport};
use cbd_format::{Holding, Object, SharedLayout, Slot, Vote};
use cbd_sim::hosts::{HostEnvironment, HostMemory, Medium};
use cbd_sim::until_crash;
use cbd_types::{BackendId, ErrorKind, HostId, Name, Pmem, Region, Result};
use std::sync::Arc;

#[test]
fn hosts_use_rows_and_segments_of_their_own() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let all = a.info().free_segments;
    assert_eq!(b.info().free_segments, all);
    let of_a = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    let of_b = b.create_backend(&spec(&b, "/b", 20)).expect("there is room");
    assert_ne!(of_a, of_b, "numbers are of the whole transport");
    let (used_a, used_b) = (segments(&a, of_a), segments(&b, of_b));
    assert_eq!((used_a.len(), used_b.len()), (9, 20));
    assert!(used_a.is_disjoint(&used_b));
    assert!(segments(&a, of_b).is_empty() && segments(&b, of_a).is_empty());
    let seen: Vec<_> = a.backends_of_others().expect("it can be read");
    assert_eq!(seen.iter().map(|entry| (entry.id, entry.path.as_str())).collect::<Vec<_>>(), [(of_b, "/b")]);
    assert_eq!(seen[0].host, HostId(1));
    let blkdev = b
        .create_blkdev(&BlkdevSpec { backend: of_b, host: HostId(1), export: "nbd".into(), shared: false })
        .expect("there is a row");
    assert_eq!(a.blkdevs_of_others().expect("it can be read")[0].id, blkdev);
    assert!(a.blkdevs().is_empty() && a.backends().expect("they are valid").len() == 1);
    let names: Vec<String> = b.hosts().into_iter().map(|host| host.name).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn space_that_one_host_releases_is_another_ones() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let all = u64::from(a.info().free_segments);
    let of_a = a.create_backend(&spec(&a, "/a", all - 5)).expect("there is room");
    let refused = b.create_backend(&spec(&b, "/b", 9)).expect_err("5 segments are left");
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    assert_eq!(b.info().free_segments, 5, "it has not kept what it tried to get");
    a.remove_backend(of_a).expect("it is not open");
    assert_eq!(b.create_backend(&spec(&b, "/b", all)).expect("all is free"), of_a, "and so is the number");
}

#[test]
fn a_host_that_comes_back_has_what_it_had() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let of_a = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    b.create_backend(&spec(&b, "/b", 9)).expect("there is room");
    let used = segments(&a, of_a);
    let refused = open_if(&medium, "a", 4, false).err().expect("it lives");
    assert_eq!(refused.kind(), ErrorKind::Busy);
    drop(a);
    let again = open(&medium, "a", 5);
    assert_eq!(again.members().expect("it is shared").1.id, HostId(0));
    assert_eq!(segments(&again, of_a), used);
    assert_eq!(again.backend(of_a).expect("it is there").path, "/a");
    again.open_cache(of_a).expect("it is empty").stop();
}

/// The hosts of a region, seen by a process on a machine of its own.
fn members(memory: &HostMemory, seed: u64) -> Members<HostEnvironment> {
    let environment = Arc::new(HostEnvironment::new(seed));
    let found = Transport::members_of(environment, Arc::new(Region::new(memory.clone())));
    found.expect("it can be read").expect("it is shared")
}

fn busy(why: &str) -> Result<()> {
    Err(cbd_types::Error::new(ErrorKind::Busy, why.to_owned()))
}

/// The numbers of the hosts with a name.
fn hosts_named(medium: &Medium, name: &str) -> Vec<u32> {
    let hosts = members(&HostMemory::new(medium, false, 77), 77).all().expect("they can be read");
    hosts.into_iter().filter(|host| host.name == name).map(|host| host.id.0).collect()
}

#[test]
fn of_two_processes_that_join_under_one_name_at_once_one_is_told_of_the_other() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let mut first = None;
    let late = members(&HostMemory::new(&medium, false, 5), 5).join("a", &mut |_, _, _| {
        // The other one is quicker: it joins between two steps of this one.
        first = first.take().or_else(|| Some(open(&medium, "a", 4)));
        Ok(())
    });
    let refused = late.expect_err("the name has a host").to_string();
    assert!(refused.contains("joined as host a at the same time, with number 0"), "{refused}");
    assert_eq!(hosts_named(&medium, "a"), [0]);
    let c = open(&medium, "c", 6);
    assert_eq!(c.members().expect("it is shared").1.id, HostId(1), "it has left");
}

#[test]
fn what_died_while_it_joined_never_makes_a_second_host_of_one_name() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let formatted = medium.bytes();
    let (mut deaths, mut remains) = (0, 0);
    for operations in (0..).step_by(41) {
        let medium = Medium::with_bytes(formatted.clone());
        let memory = HostMemory::new(&medium, false, operations);
        let dying = members(&memory, operations);
        let mut living = None;
        let joined = until_crash(|| {
            dying.join("a", &mut |_, _, _| {
                if living.is_some() {
                    return Ok(());
                }
                // The other one finds that this one is about to take the first area, and takes the second one.
                let other = members(&HostMemory::new(&medium, false, operations ^ 1), operations ^ 1);
                let member =
                    other.join("a", &mut |id, _, _| if id == HostId(0) { busy("is taken") } else { Ok(()) });
                living = Some(member.expect("it is alone").incarnation);
                memory.die_in(operations);
                Ok(())
            })
        });
        memory.live();
        let living = living.expect("it was asked");
        let died = joined.is_err();
        if let Ok(joined) = joined {
            assert_eq!(joined.expect_err("the name has a host").kind(), ErrorKind::Busy);
        }
        deaths += u32::from(died);
        let next = members(&HostMemory::new(&medium, false, operations ^ 2), operations ^ 2);
        remains += u32::from(next.host(HostId(0)).expect("it can be read").is_some());
        let refused = next.join("a", &mut |_, host, _| match host {
            Some(host) if host.incarnation == living => busy("it lives"),
            _ => Ok(()),
        });
        assert_eq!(
            refused.expect_err("host 1 lives").kind(),
            ErrorKind::Busy,
            "after {operations} operations"
        );
        // Once that one has ended, its host is the one that comes back.
        let back = next.join("a", &mut |_, _, _| Ok(())).expect("no process is that host");
        assert_eq!(back.id, HostId(1), "after {operations} operations");
        assert_eq!(hosts_named(&medium, "a"), [1]);
        if !died {
            break;
        }
    }
    assert!(deaths > 20 && remains > 0, "{deaths} deaths, {remains} of them left an area");
}

/// Lets an area have been decided to be that of a process that joined as the host of area `of`, and died before its tables had a header.
fn leave_unsettled(medium: &Medium, area: u32, of: u32) {
    let memory = HostMemory::new(medium, false, 78);
    let seen = members(&memory, 78);
    let name = seen.decided(Object::Area(of)).expect("it can be read").holding.name;
    let holding =
        Holding { state: 1.into(), host: area.into(), incarnation: 99.into(), granted: 50.into(), name };
    let content = Vote { version: 50.into(), decided: holding, ..Vote::BLANK };
    let (object, voter) = (Object::Area(area), 2);
    let parts = shared_parts(medium);
    let at = parts.vote(object, voter)[1];
    memory.store(at, &Slot { sequence: 50, content }.encode(parts.place(object, voter)));
    memory.fence();
    assert!(seen.host(HostId(area)).expect("it can be read").is_some_and(|host| host.name.is_empty()));
}

fn shared_parts(medium: &Medium) -> SharedLayout {
    let other = Medium::with_bytes(medium.bytes());
    open(&other, "z", 79).info().layout.shared_parts().expect("it is shared")
}

/// A region of which host a has left the first area, and died in it and in the second one when it joined again.
fn with_two_remains() -> Medium {
    let medium = Medium::new(SIZE);
    format(&medium);
    let a = open(&medium, "a", 2);
    leave_unsettled(&medium, 1, 0);
    a.unregister_host(HostId(0)).expect("it has nothing");
    leave_unsettled(&medium, 0, 1);
    medium
}

#[test]
fn what_a_host_has_left_that_died_while_it_joined_is_freed_by_the_next_process_of_its_name() {
    let medium = with_two_remains();
    let a = open(&medium, "a", 4);
    let (members, member) = a.members().expect("it is shared");
    assert_eq!(member.id, HostId(0));
    assert_eq!(members.host(HostId(1)).expect("it can be read"), None);
}

#[test]
fn a_process_that_was_taken_for_dead_while_it_joined_is_no_host() {
    let medium = with_two_remains();
    let mut other = None;
    // It is paused when it has become host 0, and looks whether host 1 is dead.
    let late = members(&HostMemory::new(&medium, false, 5), 5).join("a", &mut |id, _, _| {
        if id == HostId(1) && other.is_none() {
            other = Some(open(&medium, "a", 4));
        }
        Ok(())
    });
    assert_eq!(late.expect_err("another process is host 0").kind(), ErrorKind::Stopped);
    let other = other.expect("it was asked");
    let id = other.create_backend(&spec(&other, "/a", 9)).expect("it is host 0");
    assert_eq!(segments(&other, id).len(), 9);
}

#[test]
fn tables_without_a_readable_header_are_never_taken_for_what_died_while_it_joined() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (z, a) = (open(&medium, "z", 2), open(&medium, "a", 3));
    let id = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    let used = segments(&a, id);
    z.unregister_host(HostId(0)).expect("it has nothing");
    drop((z, a));
    leave_unsettled(&medium, 0, 1);
    let parts = shared_parts(&medium);
    let mut bytes = medium.bytes();
    let headers = parts.header(1).map(|at| at as usize);
    let whole = headers.map(|at| bytes[at..at + 128].to_vec());
    headers.iter().for_each(|at| bytes[at + 20] ^= 1);
    let medium = Medium::with_bytes(bytes);
    let refused = open_if(&medium, "a", 4, true).err().expect("whose tables these are is not known");
    assert_eq!(refused.kind(), ErrorKind::Damaged, "{refused}");
    let mut bytes = medium.bytes();
    headers.iter().zip(&whole).for_each(|(at, header)| bytes[*at..at + 128].copy_from_slice(header));
    let again = open(&Medium::with_bytes(bytes), "a", 5);
    assert_eq!((again.members().expect("it is shared").1.id, segments(&again, id)), (HostId(1), used));
}

#[test]
fn names_that_have_one_number_are_those_of_two_hosts() {
    let medium = Medium::new(SIZE);
    format(&medium);
    // Found by solving the equations of the checksums, of which the number consists.
    let names = ["aaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ckaakakmagkgamkakaakcaaaaaaa"];
    let hosts =
        names.map(|name| open_if(&medium, name, name.len() as u64, false).expect("no host has the name"));
    let number = |host: &Shared| {
        let (members, member) = host.members().expect("it is shared");
        (member.id, members.decided(Object::Area(member.id.0)).expect("it can be read").holding.name.get())
    };
    let [(one, number_of_one), (other, number_of_other)] = [number(&hosts[0]), number(&hosts[1])];
    assert_eq!((one, other, number_of_one), (HostId(0), HostId(1), number_of_other));
    drop(hosts);
    for (name, id) in names.iter().zip([one, other]) {
        let again = open_if(&medium, name, u64::from(id.0) + 40, true).expect("it comes back");
        assert_eq!(again.members().expect("it is shared").1.id, id);
    }
}

#[test]
fn a_former_process_of_a_host_gets_nothing_more() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let paused = open(&medium, "a", 2);
    let again = open(&medium, "a", 3);
    let error = paused.create_backend(&spec(&paused, "/late", 9)).expect_err("another process is that host");
    assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    again.create_backend(&spec(&again, "/a", 9)).expect("there is room");
}

#[test]
fn a_host_that_was_cleared_has_nothing_and_its_place_is_free() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let all = u64::from(a.info().free_segments);
    a.create_backend(&spec(&a, "/a", all - 9)).expect("there is room");
    drop(a);
    let (members, member) = b.members().expect("it is shared");
    let dead = members.host(HostId(0)).expect("it can be read").expect("it is there");
    let busy = || Err(cbd_types::Error::new(ErrorKind::Busy, "it lives"));
    let lives = members.clear(&dead, member, &mut |_, _, _| busy());
    assert_eq!(lives.expect_err("it lives").kind(), ErrorKind::Busy);
    let before = cbd_engine::Host { incarnation: dead.incarnation ^ 2, ..dead.clone() };
    let changed = members.clear(&before, member, &mut |_, _, _| Ok(())).expect_err("it came back meanwhile");
    assert_eq!(changed.kind(), ErrorKind::Busy);
    assert_eq!(b.backends_of_others().expect("they can be read").len(), 1);
    members.clear(&dead, member, &mut |_, _, _| Ok(())).expect("it is dead");
    assert!(b.backends_of_others().expect("they can be read").is_empty());
    b.create_backend(&spec(&b, "/b", all)).expect("all is free");
    let new = open(&medium, "c", 4);
    assert_eq!(new.members().expect("it is shared").1.id, HostId(0));
    assert!(new.backends().expect("there are none").is_empty(), "its tables are blank");
    assert_eq!(members.host(HostId(2)).expect("it can be read"), None);
    let outside = members.host(HostId(3)).expect_err("there is no such area");
    assert_eq!(outside.kind(), ErrorKind::OutOfRange);
}

#[test]
fn a_host_that_leaves_makes_room_and_one_too_many_is_refused() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let hosts: Vec<Shared> =
        ["a", "b", "c"].iter().zip(2..).map(|(name, seed)| open(&medium, name, seed)).collect();
    let refused = open_if(&medium, "d", 9, true).err().expect("there are three");
    assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
    let id = hosts[1].create_backend(&spec(&hosts[1], "/b", 9)).expect("there is room");
    assert_eq!(hosts[1].unregister_host(HostId(1)).expect_err("it has a backend").kind(), ErrorKind::Busy);
    hosts[1].remove_backend(id).expect("it is not open");
    hosts[1].unregister_host(HostId(1)).expect("it has nothing");
    assert_eq!(open(&medium, "d", 10).members().expect("it is shared").1.id, HostId(1));
}

#[test]
fn a_name_belongs_to_one_backend_of_all_hosts() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let name = Name::new("db").expect("it is one");
    a.create_named_backend(&spec(&a, "/a", 9), Some(&name)).expect("it is free");
    let error = b.create_named_backend(&spec(&b, "/b", 9), Some(&name)).expect_err("it is taken");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let id = b.create_backend(&spec(&b, "/b", 9)).expect("there is room");
    assert_eq!(b.name_backend(id, Some(&name)).expect_err("it is taken").kind(), ErrorKind::AlreadyExists);
}

#[test]
fn a_shared_region_is_opened_only_as_a_host() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let region = || Region::new(HostMemory::new(&medium, false, 7));
    assert!(Transport::<HostEnvironment>::is_shared(&region()).expect("it is a transport"));
    let refused = Transport::open(Arc::new(HostEnvironment::new(7)), region()).err().expect("it has hosts");
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let environment = Arc::new(HostEnvironment::new(8));
    let again = Transport::format_shared(
        &environment,
        region(),
        &FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() },
    );
    assert_eq!(again.expect_err("it holds a transport").kind(), ErrorKind::AlreadyExists);
}

/// A region in which host `b` has cleared host `a`, whose tables are still in its area.
fn after_a_clear() -> Medium {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    let (members, member) = b.members().expect("it is shared");
    let dead = members.host(HostId(0)).expect("it can be read").expect("it is there");
    members.clear(&dead, member, &mut |_, _, _| Ok(())).expect("it is dead");
    medium
}

#[test]
fn a_host_that_dies_while_it_joins_never_has_the_tables_of_the_former_one() {
    let bytes = after_a_clear().bytes();
    // Joins until its operation number `operations`; whether it came to the end.
    let join = |operations: u64| {
        let medium = Medium::with_bytes(bytes.clone());
        let memory = HostMemory::new(&medium, false, operations);
        memory.die_in(operations);
        let environment = Arc::new(HostEnvironment::new(operations));
        let region = Region::new(memory.clone());
        let joined =
            until_crash(|| Transport::open_shared(environment, region, "c", &mut |_, _, _| Ok(())).map(drop));
        memory.live();
        (medium, joined.is_ok())
    };
    let (mut dies, mut lives) = (0, 1 << 20);
    while lives - dies > 1 {
        let middle = u64::midpoint(dies, lives);
        if join(middle).1 { lives = middle } else { dies = middle }
    }
    // The tables are blanked and described at the end.
    for operations in (dies.saturating_sub(6000)..dies).step_by(23) {
        let (medium, _) = join(operations);
        let again = open(&medium, "c", operations ^ 1);
        assert!(again.backends().expect("they are valid").is_empty(), "after {operations} operations");
        assert!(again.blkdevs().is_empty());
    }
}

#[test]
fn a_host_that_was_cleared_and_goes_on_gets_nothing() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (paused, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let all = u64::from(b.info().free_segments);
    let (members, member) = b.members().expect("it is shared");
    let dead = members.host(HostId(0)).expect("it can be read").expect("it is there");
    members.clear(&dead, member, &mut |_, _, _| Ok(())).expect("an operator says so");
    let error = paused.create_backend(&spec(&paused, "/a", 9)).expect_err("it is no host");
    assert_eq!(error.kind(), ErrorKind::Stopped, "{error}");
    let (members, member) = paused.members().expect("it is shared");
    assert_eq!(members.leave(member).expect_err("it is no host").kind(), ErrorKind::Stopped);
    let late = members.acquire(member, Object::Backend(3)).expect_err("it is no host");
    assert_eq!(late.kind(), ErrorKind::Stopped);
    assert_eq!(members.owner(Object::Backend(3)).expect("it can be read"), None, "it does not vote any more");
    b.create_backend(&spec(&b, "/b", all)).expect("it has taken nothing");
}

#[test]
fn signs_of_life_are_seen_whatever_caches_hold() {
    for seed in 2..30 {
        let medium = Medium::new(SIZE);
        format(&medium);
        let (a, b) = (open(&medium, "a", seed), open(&medium, "b", seed + 100));
        let (members, member) = a.members().expect("it is shared");
        let seen = b.members().expect("it is shared").0;
        for number in 1..6 {
            members.beat(member, number, 7);
            let beat = seen.beat_of(HostId(0)).expect("it was stored");
            assert_eq!((beat.number, beat.process), (number, 7), "seed {seed}");
        }
    }
}

#[test]
fn without_the_header_of_its_area_a_host_keeps_its_tables() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let a = open(&medium, "a", 2);
    let id = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    let used = segments(&a, id);
    let layout = a.info().layout;
    drop(a);
    let whole = medium.bytes();
    let mut damaged = whole.clone();
    for at in layout.shared_parts().expect("it is shared").header(0) {
        damaged[at as usize + 20] ^= 1;
    }
    let medium = Medium::with_bytes(damaged);
    let error = open_if(&medium, "a", 3, true).err().expect("whose tables these are is not known");
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    let parts = layout.shared_parts().expect("it is shared");
    let mut repaired = medium.bytes();
    for at in parts.header(0).map(|at| at as usize) {
        repaired[at..at + 128].copy_from_slice(&whole[at..at + 128]);
    }
    let again = open(&Medium::with_bytes(repaired), "a", 4);
    assert_eq!(segments(&again, id), used, "nothing was blanked");
}

#[test]
fn one_copy_of_what_was_decided_suffices() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    let of_a = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    b.create_backend(&spec(&b, "/b", 9)).expect("there is room");
    let used = segments(&a, of_a);
    let parts = a.info().layout.shared_parts().expect("it is shared");
    drop((a, b));
    let objects = [Object::Backend(0), Object::Group(0), Object::Group(5), Object::Area(0), Object::Area(1)];
    for copy in 0..2 {
        let mut bytes = medium.bytes();
        for object in objects {
            for voter in 0..parts.voters(object) {
                bytes[parts.vote(object, voter)[copy] as usize + 40] ^= 0x55;
            }
        }
        let damaged = Medium::with_bytes(bytes);
        let again = open(&damaged, "a", 4 + copy as u64);
        assert_eq!(again.members().expect("it is shared").1.id, HostId(0), "copy {copy}");
        assert_eq!(segments(&again, of_a), used, "copy {copy}");
        assert_eq!(again.backends_of_others().expect("it can be read").len(), 1, "copy {copy}");
    }
}

/// The lines of a region that are not zero, as the program of format version 1 that first knew shared regions left them.
const IMAGE: &str = include_str!("../golden/shared-v1.txt");

#[test]
fn a_region_that_an_earlier_program_left_is_opened_by_both_of_its_hosts() {
    let mut bytes = vec![0; SIZE as usize];
    for line in IMAGE.lines() {
        let (at, hex) = line.split_once(' ').expect("an offset and bytes");
        let at: usize = at.parse().expect("a number");
        for (byte, digits) in bytes[at..at + 64].iter_mut().zip(hex.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).expect("they are ASCII");
            *byte = u8::from_str_radix(digits, 16).expect("two digits");
        }
    }
    let medium = Medium::with_bytes(bytes);
    let (a, b) = (open(&medium, "a", 90), open(&medium, "b", 91));
    assert_eq!([&a, &b].map(|host| host.members().expect("it is shared").1.id), [HostId(0), HostId(1)]);
    assert_eq!(segments(&a, BackendId(0)).len(), 9);
    assert_eq!(segments(&b, BackendId(1)).len(), 12);
    assert_eq!(b.backend(BackendId(1)).expect("it is there").path, "/b");
    assert_eq!(a.blkdevs_of_others().expect("they can be read").len(), 1);
    b.open_cache(BackendId(1)).expect("it is empty").stop();
}

/// Writes the image, once.
#[test]
#[ignore = "the image is never made again: a program that cannot open it breaks what was promised"]
fn write_image() {
    let medium = Medium::new(SIZE);
    format(&medium);
    let (a, b) = (open(&medium, "a", 2), open(&medium, "b", 3));
    a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    let of_b = b.create_backend(&spec(&b, "/b", 12)).expect("there is room");
    b.create_blkdev(&BlkdevSpec { backend: of_b, host: HostId(1), export: "nbd".into(), shared: false })
        .expect("there is a row");
    drop((a, b));
    let bytes = medium.bytes();
    let lines = bytes.chunks(64).enumerate().filter(|(_, line)| line.iter().any(|byte| *byte != 0));
    let text: String = lines
        .map(|(number, line)| {
            let hex: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{} {hex}\n", number * 64)
        })
        .collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/shared-v1.txt");
    std::fs::write(path, text).expect("it is written");
}
