//! Blkdevs on backends of other hosts: both hosts find the areas of the channel by the tables alone.

use crate::{SIZE, Shared, format, open, segments, spec};
use cbd_engine::{BlkdevSpec, ChannelArea, RemoteBlkdev, RemoteState};
use cbd_sim::hosts::Medium;
use cbd_sim::until_crash;
use cbd_types::{BackendId, BlkdevId, ErrorKind, HostId, Result};

fn remote(host: &Shared, backend: BackendId) -> Result<BlkdevId> {
    create_remote(host, backend, false)
}

fn create_remote(host: &Shared, backend: BackendId, shared: bool) -> Result<BlkdevId> {
    let host_id = host.members().expect("it is shared").1.id;
    let spec = BlkdevSpec { backend, host: host_id, export: "nbd".into(), shared };
    host.create_remote_blkdev(&spec, None)
}

fn only(rows: Vec<RemoteBlkdev>) -> RemoteBlkdev {
    let [row] = rows.try_into().expect("there is one");
    row
}

/// Two hosts, of which the first has a backend.
fn two_hosts(medium: &Medium) -> (Shared, Shared, BackendId) {
    format(medium);
    let (a, b) = (open(medium, "a", 2), open(medium, "b", 3));
    let backend = a.create_backend(&spec(&a, "/a", 9)).expect("there is room");
    (a, b, backend)
}

/// The numbers of the segments of areas.
fn numbers(host: &Shared, areas: &[ChannelArea]) -> Vec<u32> {
    let layout = host.info().layout;
    areas
        .iter()
        .map(|area| ((area.at - layout.segment_base(cbd_types::SegmentId(0))) / area.bytes) as u32)
        .collect()
}

#[test]
fn both_sides_find_each_other_and_have_a_segment_each_that_no_cache_gets() {
    let medium = Medium::new(SIZE);
    let (a, b, backend) = two_hosts(&medium);
    let id = remote(&b, backend).expect("there is room");
    let row = only(b.remote_blkdevs());
    assert_eq!(
        (row.entry.id, row.entry.backend, row.entry.host, row.owner),
        (id, backend, HostId(1), HostId(0))
    );
    assert_eq!(
        b.server_area(&row, None).expect("it can be read"),
        RemoteState::NotServed,
        "it is not served yet"
    );
    let seen = only(a.remote_blkdevs_of_others().expect("it can be read"));
    assert_eq!((seen.entry.id, seen.area, seen.ownership), (id, row.area, row.ownership));
    let area = a.serve_remote(&seen).expect("there is room");
    assert_eq!(a.serve_remote(&seen).expect("it has one"), area);
    assert_eq!(b.server_area(&row, None).expect("it can be read"), RemoteState::Served(area));
    assert_ne!(area, row.area);
    assert!(a.blkdevs().is_empty() && b.blkdevs().is_empty() && a.remote_blkdevs().is_empty());
    assert!(b.remote_blkdevs_of_others().expect("it can be read").is_empty());

    // All of the region's space is cache now, except for the areas.
    let of_b = b.create_backend(&spec(&b, "/b", 20)).expect("there is room");
    let of_a = a.create_backend(&spec(&a, "/c", a.info().free_segments.into())).expect("it is free");
    assert_eq!(a.info().free_segments, 0);
    let areas = numbers(&a, &[area, row.area]);
    for (host, cache) in [(&a, of_a), (&b, of_b)] {
        let used = segments(host, cache);
        assert!(areas.iter().all(|segment| !used.contains(segment)));
    }
    // Their next processes see the same.
    drop((a, b));
    let (a, b) = (open(&medium, "a", 5), open(&medium, "b", 6));
    assert_eq!(only(b.remote_blkdevs()), row);
    assert_eq!(only(a.remote_blkdevs_of_others().expect("it can be read")), seen);
    assert_eq!(
        a.served_blkdevs().iter().map(|served| (served.blkdev, served.area)).collect::<Vec<_>>(),
        [(id, area)]
    );
    assert_eq!(b.server_area(&row, None).expect("it can be read"), RemoteState::Served(area));
}

#[test]
fn what_a_channel_had_is_free_when_it_ends() {
    let medium = Medium::new(SIZE);
    let (a, b, backend) = two_hosts(&medium);
    let before = u64::from(b.info().free_segments);
    let id = remote(&b, backend).expect("there is room");
    let seen = only(a.remote_blkdevs_of_others().expect("it can be read"));
    a.serve_remote(&seen).expect("there is room");
    let row = only(b.remote_blkdevs());
    b.remove_blkdev(id).expect("it is there");
    assert!(a.remote_blkdevs_of_others().expect("it can be read").is_empty());
    // Its number is given again: the former server's area is not for the new one.
    assert_eq!(remote(&b, backend).expect("there is room"), id);
    let next = only(b.remote_blkdevs());
    assert!(next.ownership > row.ownership);
    assert_eq!(b.server_area(&next, None).expect("it can be read"), RemoteState::NotServed);
    let refused = a.serve_remote(&only(a.remote_blkdevs_of_others().expect("it can be read")));
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::Busy), "the former one is to end first");
    a.end_serving(&a.served_blkdevs()[0]).expect("it is there");
    b.remove_blkdev(id).expect("it is there");
    assert!(a.served_blkdevs().is_empty());
    b.create_backend(&spec(&b, "/b", before)).expect("all is free again");
}

#[test]
fn a_backend_has_one_blkdev_of_any_host() {
    let medium = Medium::new(SIZE);
    let (a, b, backend) = two_hosts(&medium);
    let kind = |result: Result<BlkdevId>| result.map_err(|error| error.kind());
    assert_eq!(kind(remote(&a, backend)), Err(ErrorKind::NotFound), "it is its own");
    assert_eq!(kind(remote(&b, BackendId(3))), Err(ErrorKind::NotFound));
    let local =
        |shared| a.create_blkdev(&BlkdevSpec { backend, host: HostId(0), export: "nbd".into(), shared });
    let id = local(false).expect("there is a row");
    assert_eq!(kind(remote(&b, backend)), Err(ErrorKind::Busy));
    a.remove_blkdev(id).expect("it is there");
    remote(&b, backend).expect("there is room");
    assert_eq!(kind(remote(&b, backend)), Err(ErrorKind::Busy));
    let c = open(&medium, "c", 4);
    assert_eq!(kind(remote(&c, backend)), Err(ErrorKind::Busy));
    let of_b = only(a.remote_blkdevs_of_others().expect("it can be read"));
    a.serve_remote(&of_b).expect("there is room");
    assert_eq!(kind(local(false)), Err(ErrorKind::Busy));
    assert_eq!(kind(local(true)), Err(ErrorKind::Busy));
    assert_eq!(a.remove_backend(backend).map_err(|error| error.kind()), Err(ErrorKind::Busy));
    // Another host has created one at the same moment: only one of them is served.
    let mut of_c = of_b;
    (of_c.entry.id, of_c.entry.host) = (BlkdevId(of_c.entry.id.0 + 1), HostId(2));
    assert_eq!(a.serve_remote(&of_c).map_err(|error| error.kind()), Err(ErrorKind::Busy));
    assert_eq!(a.served_blkdevs().len(), 1);
}

#[test]
fn hosts_share_a_backend_if_all_of_them_ask_for_it() {
    let medium = Medium::new(SIZE);
    let (a, b, backend) = two_hosts(&medium);
    let c = open(&medium, "c", 4);
    let kind = |result: Result<BlkdevId>| result.map_err(|error| error.kind());
    let local =
        |shared| a.create_blkdev(&BlkdevSpec { backend, host: HostId(0), export: "nbd".into(), shared });
    create_remote(&b, backend, true).expect("there is room");
    assert_eq!(kind(create_remote(&b, backend, false)), Err(ErrorKind::Busy));
    local(true).expect("there is room");
    assert_eq!(kind(local(false)), Err(ErrorKind::Busy));
    let refused = remote(&c, backend).expect_err("it does not ask for it");
    assert!(refused.kind() == ErrorKind::Busy && refused.to_string().contains("it shares it"), "{refused}");
    create_remote(&c, backend, true).expect("there is room");

    let rows = a.remote_blkdevs_of_others().expect("it can be read");
    let areas: Vec<ChannelArea> =
        rows.iter().map(|row| a.serve_remote(row).expect("there is room")).collect();
    assert!(areas.len() == 2 && areas[0] != areas[1]);
    for (host, row) in [&b, &c].into_iter().zip(&rows) {
        let found = host.server_area(row, None).expect("it can be read");
        assert!(areas.iter().any(|area| found == RemoteState::Served(*area)));
        let found_beside = host.server_area(row, Some(areas[0])).expect("it can be read");
        assert_eq!(found_beside, found, "each finds its own");
    }
    // One that does not share the backend was created at the same moment.
    let mut other = rows[0].clone();
    (other.entry.id, other.entry.shared) = (BlkdevId(other.entry.id.0 + 1), false);
    assert_eq!(a.serve_remote(&other).map_err(|error| error.kind()), Err(ErrorKind::Busy));
    // Each ends by itself.
    a.end_serving(&a.served_blkdevs()[0]).expect("it is there");
    assert_eq!(a.served_blkdevs().len(), 1);
    let again = open(&medium, "a", 5);
    assert!(again.blkdevs()[0].shared && again.served_blkdevs().len() == 1);
    // The first one that is served without sharing keeps the backend.
    again.remove_blkdev(again.blkdevs()[0].id).expect("it is there");
    again.end_serving(&again.served_blkdevs()[0]).expect("it is there");
    again.serve_remote(&other).expect("there is room");
    assert_eq!(again.serve_remote(&rows[1]).map_err(|error| error.kind()), Err(ErrorKind::Busy));
    let spec = BlkdevSpec { backend, host: HostId(0), export: "nbd".into(), shared: true };
    assert_eq!(kind(again.create_blkdev(&spec)), Err(ErrorKind::Busy));
}

#[test]
fn a_backend_with_the_number_of_a_former_one_is_not_served_to_its_users() {
    let medium = Medium::new(SIZE);
    let (a, b, backend) = two_hosts(&medium);
    remote(&b, backend).expect("there is room");
    let row = only(b.remote_blkdevs());
    let seen = only(a.remote_blkdevs_of_others().expect("it can be read"));
    let area = a.serve_remote(&seen).expect("there is room");
    assert_eq!(b.server_area(&row, Some(area)).expect("it can be read"), RemoteState::Served(area));
    // The backend is removed by force, and its number is that of another one.
    a.end_serving(&a.served_blkdevs()[0]).expect("it is there");
    assert_eq!(b.server_area(&row, Some(area)).expect("it can be read"), RemoteState::NotServed);
    a.remove_backend(backend).expect("it is not in use");
    assert_eq!(b.server_area(&row, Some(area)).expect("it can be read"), RemoteState::Gone);
    assert_eq!(a.create_backend(&spec(&a, "/other", 20)).expect("there is room"), backend);
    assert_eq!(b.server_area(&row, Some(area)).expect("it can be read"), RemoteState::Gone);
    assert!(a.remote_blkdevs_of_others().expect("it can be read").is_empty());
    assert_eq!(a.serve_remote(&seen).map_err(|error| error.kind()), Err(ErrorKind::NotFound));
}

#[test]
fn a_host_that_dies_while_it_makes_a_channel_leaves_it_whole_or_its_segment_free() {
    // Makes a channel until its operation number `operations`; the blkdevs that there are then, and whether it came to the end.
    let make = |operations: u64| {
        let medium = Medium::new(SIZE);
        let (a, b, backend) = two_hosts(&medium);
        let memory = b.region().memory().clone();
        memory.die_in(operations);
        let made = until_crash(|| remote(&b, backend).expect("there is room"));
        memory.live();
        drop((a, b));
        let (a, b) = (open(&medium, "a", 5), open(&medium, "b", 6));
        let rows = b.remote_blkdevs();
        assert_eq!(a.remote_blkdevs_of_others().expect("it can be read").len(), rows.len());
        let free = u64::from(b.info().free_segments);
        let cache = b.create_backend(&spec(&b, "/b", free)).expect("what is free can be used");
        let areas: Vec<ChannelArea> = rows.iter().map(|row| row.area).collect();
        let used = segments(&b, cache);
        assert!(numbers(&b, &areas).iter().all(|segment| !used.contains(segment)), "after {operations}");
        (rows.len(), used.len() + rows.len(), made.is_ok())
    };
    let (mut dies, mut lives) = (0, 1 << 16);
    while lives - dies > 1 {
        let middle = u64::midpoint(dies, lives);
        if make(middle).2 { lives = middle } else { dies = middle }
    }
    let (whole, all, _) = make(lives);
    assert_eq!(whole, 1);
    let mut seen = [0, 0];
    // The entry and the row are stored at the end.
    for operations in dies.saturating_sub(120)..=dies {
        let (rows, segments, _) = make(operations);
        assert_eq!(segments, all, "no segment is lost, after {operations} operations");
        seen[rows] += 1;
    }
    assert!(seen[0] > 10 && seen[1] > 0, "{seen:?}");
}
