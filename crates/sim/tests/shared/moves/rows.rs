//! The rows of a backend that moves: on the host that gets it, of blkdevs on it, and what they leave free.

use super::{A, B, C, CACHE, World, id, kind, withdrawn};
use cbd_engine::{BlkdevSpec, RemoteState, TwoSlots};
use cbd_format::tables::{STATE_FREE, STATE_INCOMING};
use cbd_format::{BackendEntry as BackendRow, Layout, Object};
use cbd_sim::hosts::{HostMemory, Medium};
use cbd_types::{Epoch, ErrorKind, Region};

/// A world in which a has handed the backend over to b, which has not taken it over yet.
fn handed_over() -> World {
    let world = World::new(false, CACHE);
    let offer = world.offer(A, B);
    world.accept(&offer);
    world.hold(&offer);
    world.hand_over(&offer);
    world
}

/// The state and the ownership number in the row that a host has for the backend, as the memory has it.
fn row(world: &World, host: usize) -> (u32, u64) {
    let copy = Medium::with_bytes(world.medium.bytes());
    let region = Region::new(HostMemory::new(&copy, true, 5));
    let layout = world.hosts[host].info().layout.for_host(id(host).0).expect("it has a place");
    let at = Layout::slots::<BackendRow>(layout.backend_area, layout.backend_rows, world.id().0);
    let slots = TwoSlots::<BackendRow>::read(&region, at, u64::from(world.id().0));
    let content = slots.content().expect("it can be read");
    (content.state.get(), content.ownership.get())
}

/// Groups of segments that no host has; a group is a segment here.
fn groups_without_host(world: &World) -> usize {
    let (members, layout) = (world.hosts[C].members().expect("it is shared").0, world.hosts[C].info().layout);
    let parts = layout.shared_parts().expect("it is shared");
    let groups = (0..layout.segment_count).map(|segment| parts.group_of(segment));
    groups.filter(|group| members.owner(Object::Group(*group)).expect("it can be read").is_none()).count()
}

#[test]
fn the_row_of_a_move_stays_while_this_host_answers_it_and_is_freed_afterwards() {
    let world = withdrawn();
    assert_eq!(row(&world, B).0, STATE_INCOMING);
    assert_eq!(world.hosts[B].incoming_backends(&|_| true).expect("they can be read"), []);
    assert_eq!(row(&world, B).0, STATE_INCOMING, "it may still become its own");
    assert_eq!(world.hosts[B].incoming_backends(&|_| false).expect("they can be read"), []);
    assert_eq!(row(&world, B).0, STATE_FREE);
}

#[test]
fn a_backend_that_was_handed_over_is_known_to_all_hosts_before_it_is_taken_over() {
    let world = handed_over();
    let known = |host: usize| {
        let others = world.hosts[host].backends_of_others().expect("they can be read");
        others.into_iter().map(|entry| (entry.id, entry.path, entry.host)).collect::<Vec<_>>()
    };
    let expected = [(world.id(), world.backend.path.clone(), id(B))];
    assert_eq!([A, C].map(known), [&expected; 2], "another cache of its disk is refused");
    assert!(![A, C].iter().any(|host| world.hosts[*host].is_taken_over(world.id()).expect("it can be read")));
    let spec = BlkdevSpec { backend: world.id(), host: id(C), export: "nbd".into(), shared: true };
    assert_eq!(kind(world.hosts[C].create_remote_blkdev(&spec, None)), Err(ErrorKind::Busy));
    world.follow(B);
    assert_eq!([A, C].map(known), [&expected; 2]);
    assert!([A, C].iter().all(|host| world.hosts[*host].is_taken_over(world.id()).expect("it can be read")));
}

#[test]
fn a_backend_that_is_on_its_way_keeps_its_number() {
    let world = handed_over();
    let b = &world.hosts[B];
    assert_eq!(b.incoming_backends(&|_| true).expect("they can be read"), [(world.id(), world.backend.uuid)]);
    assert_ne!(world.create_other(B, CACHE).expect("there is room"), world.id());
    let entry = b.take_over_backend(world.id(), Epoch(7), &|_| 1, true).expect("it has got it");
    assert_eq!(entry.uuid, world.backend.uuid);
}

#[test]
fn each_host_that_gets_a_backend_gives_it_a_higher_ownership_number() {
    let world = World::new(false, CACHE);
    let mut last = row(&world, A).1;
    for (from, to) in [(A, B), (B, A), (A, B), (B, C)] {
        world.move_between(from, to);
        let now = row(&world, to).1;
        assert!(now > last, "{now} is above {last}");
        last = now;
    }
}

#[test]
fn a_blkdev_does_not_follow_another_backend_with_the_number_of_its_own() {
    let world = World::new(false, CACHE);
    world.clear(A, C);
    let c = &world.hosts[C];
    assert_eq!(world.create_other(C, CACHE).expect("the number is free"), world.id());
    assert!(!c.settle_blkdevs(None).expect("nothing changes"));
    assert!(c.blkdevs().is_empty());
    for row in c.remote_blkdevs() {
        assert_eq!(row.backend_uuid, world.backend.uuid);
        assert_eq!(kind(c.server_area(&row, None)), Ok(RemoteState::Gone));
    }
}

#[test]
fn a_host_that_gets_a_backend_has_the_areas_of_its_blkdevs_free_at_once() {
    let world = handed_over();
    let b = &world.hosts[B];
    let [(backend, _)] = b.incoming_backends(&|_| true).expect("they can be read")[..] else {
        panic!("it has moved");
    };
    b.take_over_backend(backend, Epoch(7), &|_| 1, true).expect("it has got it");
    let (before, areas) = (groups_without_host(&world), b.remote_blkdevs().len());
    assert!(b.settle_blkdevs(None).expect("they become local"));
    // Any host can use them.
    assert_eq!((groups_without_host(&world), areas), (before + areas, 2));
    assert_eq!(kind(b.take_over_backend(backend, Epoch(7), &|_| 1, true)).err(), Some(ErrorKind::NotFound));
}
