//! The tables of hosts that share a region: each has rows and segments of its own, and sees those of the others.

use cbd_engine::{BackendSpec, Beat, BlkdevSpec, FormatOptions, Host, Settings, Transport};
use cbd_sim::hosts::{HostEnvironment, HostMemory, Medium};
use cbd_types::{BackendId, ErrorKind, HostId, Name, Region, Result};
use std::collections::BTreeSet;
use std::sync::Arc;

const SEGMENT: u64 = 64 << 10;
const SIZE: u64 = 12 << 20;

type Shared = Arc<Transport<HostEnvironment>>;

fn format(medium: &Medium) {
    let environment = Arc::new(HostEnvironment::new(1));
    let options = FormatOptions {
        segment_size: Some(SEGMENT),
        force: false,
        host_rows: 3,
        backend_rows: 4,
        blkdev_rows: 4,
    };
    let memory = HostMemory::new(medium, false, 1);
    drop(Transport::format_shared(&environment, Region::new(memory), &options).expect("it fits"));
}

/// The host `name` on a machine of its own; `dead`: no process that has been that host lives.
fn open_if(medium: &Medium, name: &str, seed: u64, dead: bool) -> Result<Shared> {
    let memory = HostMemory::new(medium, false, seed);
    let mut prove = |_: HostId, host: Option<&Host>, _: &dyn Fn() -> Option<Beat>| match host {
        Some(_) if !dead => Err(cbd_types::Error::new(ErrorKind::Busy, "it lives")),
        _ => Ok(()),
    };
    Transport::open_shared(Arc::new(HostEnvironment::new(seed)), Region::new(memory), name, &mut prove)
}

fn open(medium: &Medium, name: &str, seed: u64) -> Shared {
    let shared = open_if(medium, name, seed, true).expect("it can join");
    let host = shared.register_host(name, None).expect("there is a row");
    assert_eq!(host, shared.members().expect("it is shared").1.id);
    shared
}

fn spec(shared: &Shared, path: &str, segments: u64) -> BackendSpec {
    BackendSpec {
        host: shared.members().expect("it is shared").1.id,
        path: path.into(),
        identity: String::new(),
        size: 1 << 20,
        sector: 512,
        cache_bytes: Some(segments * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    }
}

fn segments(shared: &Shared, id: BackendId) -> BTreeSet<u32> {
    shared.segments_of(id).into_iter().map(|segment| segment.0).collect()
}

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
        .create_blkdev(&BlkdevSpec { backend: of_b, host: HostId(1), export: "nbd".into() })
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
    let lives = members
        .clear(HostId(0), member, &mut |_, _, _| Err(cbd_types::Error::new(ErrorKind::Busy, "it lives")));
    assert_eq!(lives.expect_err("it lives").kind(), ErrorKind::Busy);
    assert_eq!(b.backends_of_others().expect("they can be read").len(), 1);
    members.clear(HostId(0), member, &mut |_, _, _| Ok(())).expect("it is dead");
    assert!(b.backends_of_others().expect("they can be read").is_empty());
    b.create_backend(&spec(&b, "/b", all)).expect("all is free");
    let new = open(&medium, "c", 4);
    assert_eq!(new.members().expect("it is shared").1.id, HostId(0));
    assert!(new.backends().expect("there are none").is_empty(), "its tables are blank");
    let missing = members.clear(HostId(2), member, &mut |_, _, _| Ok(())).expect_err("there is no such host");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
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

/// The lines of a region that are not zero, as the program of format version 1 that first knew shared regions left them.
const IMAGE: &str = include_str!("golden/shared-v1.txt");

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
    b.create_blkdev(&BlkdevSpec { backend: of_b, host: HostId(1), export: "nbd".into() })
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
