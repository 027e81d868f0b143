//! Backends that move from one host to another: one host has them, and no segment is lost, whatever host dies.

mod deaths;
mod rows;

use crate::{SEGMENT, Shared, segments, spec};
use cbd_engine::{
    BackendEntry, BackendSpec, BlkdevSpec, CacheMode, ChannelArea, FormatOptions, MoveAnswer, MoveOffer,
    MoveRefusal, MoveState, MoveWish, RemoteBlkdev, RemoteState, Settings, Transport,
};
use cbd_format::Object;
use cbd_sim::hosts::{HostEnvironment, HostMemory, Medium};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, HostId, Name, Region, Result, SegmentId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A small region: it is opened thousands of times.
const SIZE: u64 = 5 << 20;
const CACHE: u64 = 9;
/// More than half of the region.
const LARGE: u64 = 40;
const NAMES: [&str; 3] = ["a", "b", "c"];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// A region with three hosts. Host a has a backend, and each host two blkdevs on it.
struct World {
    medium: Medium,
    is_coherent: bool,
    hosts: Vec<Shared>,
    backend: BackendEntry,
}

fn open_as(medium: &Medium, is_coherent: bool, host: usize, seed: u64) -> Shared {
    let memory = HostMemory::new(medium, is_coherent, seed);
    let environment = Arc::new(HostEnvironment::new(seed));
    let shared = Transport::open_shared(environment, Region::new(memory), NAMES[host], &mut |_, _, _| Ok(()));
    let shared = shared.expect("it can join");
    assert_eq!(shared.register_host(NAMES[host], None).expect("there is a row"), id(host));
    shared
}

fn id(host: usize) -> HostId {
    HostId(host as u32)
}

fn kind<T>(result: Result<T>) -> std::result::Result<T, ErrorKind> {
    result.map_err(|error: Error| error.kind())
}

impl World {
    /// Hosts without a backend.
    fn blank(is_coherent: bool) -> (Medium, Vec<Shared>) {
        let medium = Medium::new(SIZE);
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 3,
            backend_rows: 4,
            blkdev_rows: 8,
        };
        let region = Region::new(HostMemory::new(&medium, is_coherent, 1));
        Transport::format_shared(&Arc::new(HostEnvironment::new(1)), region, &options).expect("it fits");
        let hosts = (A..=C).map(|host| open_as(&medium, is_coherent, host, host as u64 + 2)).collect();
        (medium, hosts)
    }

    fn new(is_coherent: bool, cache: u64) -> Self {
        let (medium, hosts) = Self::blank(is_coherent);
        let settings =
            Settings { writeback_rate: 4 << 20, cache_mode: CacheMode::Writethrough, ..Settings::default() };
        let spec = BackendSpec { identity: "serial".into(), settings, ..spec(&hosts[A], "/disk", cache) };
        let name = Name::new("db").expect("it is one");
        let backend = hosts[A].create_named_backend(&spec, Some(&name)).expect("there is room");
        for (number, host) in hosts.iter().enumerate().chain(hosts.iter().enumerate()) {
            let spec = BlkdevSpec { backend, host: id(number), export: "nbd".into(), shared: true };
            let made =
                if number == A { host.create_blkdev(&spec) } else { host.create_remote_blkdev(&spec, None) };
            made.expect("there is room");
        }
        let backend = hosts[A].backend(backend).expect("it is there");
        let world = Self { medium, is_coherent, hosts, backend };
        world.serve(A);
        world
    }

    /// The next processes of all hosts, in a copy of the memory.
    fn copied(&self, bytes: &[u8], seed: u64) -> Self {
        let medium = Medium::with_bytes(bytes.to_vec());
        let seeds = (A..=C).map(|host| seed * 16 + 100 + host as u64);
        let hosts = seeds.enumerate().map(|(host, seed)| open_as(&medium, self.is_coherent, host, seed));
        let hosts = hosts.collect();
        Self { medium, hosts, is_coherent: self.is_coherent, backend: self.backend.clone() }
    }

    fn join_again(&mut self, host: usize, seed: u64) {
        self.hosts[host] = open_as(&self.medium, self.is_coherent, host, seed);
    }

    fn id(&self) -> BackendId {
        self.backend.id
    }

    fn memory(&self, host: usize) -> HostMemory {
        self.hosts[host].region().memory().clone()
    }

    /// What host `from` offers to host `to`.
    fn offer(&self, from: usize, to: usize) -> MoveOffer {
        let number = self.hosts[from].offer_move(self.id(), id(to), None).expect("it has the backend");
        let offers = self.hosts[to].moves_of_others().expect("they can be read");
        let offer =
            MoveOffer { backend: self.id(), from: id(from), to: id(to), number, state: MoveState::Offered };
        assert_eq!(offers, [offer]);
        offer
    }

    fn accept(&self, offer: &MoveOffer) {
        let host = &self.hosts[offer.to.index()];
        let entry = host.offered_backend(offer).expect("it is offered");
        host.accept_move(offer, &entry.path, &entry.identity).expect("it is offered");
        let answer = self.hosts[offer.from.index()].answer_to_move(offer.to, offer.number);
        assert_eq!(answer, Some(MoveAnswer::Accepted));
    }

    fn hold(&self, offer: &MoveOffer) {
        let from = offer.from.index();
        self.hosts[from].hold_for_move(offer.number).expect("it is stored");
        for host in (A..=C).filter(|host| *host != from) {
            let seen = self.hosts[host].move_of(offer.from).expect("it is offered");
            assert_eq!(seen, MoveOffer { state: MoveState::Hold, ..*offer });
            self.hosts[host].answer_move(self.id(), offer.number, MoveAnswer::Held).expect("it is stored");
            assert_eq!(self.hosts[from].answer_to_move(id(host), offer.number), Some(MoveAnswer::Held));
        }
    }

    fn hand_over(&self, offer: &MoveOffer) {
        let host = &self.hosts[offer.from.index()];
        host.hand_over_backend(self.id(), offer.to, offer.number).expect("all hold their requests");
        host.settle_blkdevs(Some(self.id())).expect("there is room");
        host.end_move(offer.number, false).expect("it is stored");
    }

    /// What a host does about backends that it has got, and blkdevs on those that have moved.
    fn follow(&self, host: usize) {
        let shared = &self.hosts[host];
        let offers = shared.moves_of_others().expect("they can be read");
        let is_answered =
            |backend| offers.iter().any(|offer| offer.backend == backend && offer.to == id(host));
        for (backend, uuid) in shared.incoming_backends(&is_answered).expect("they can be read") {
            let entry = shared.take_over_backend(backend, Epoch(7), &|_| 1, true).expect("it has got it");
            assert_eq!((entry.uuid, uuid), (self.backend.uuid, self.backend.uuid), "no other one has moved");
        }
        shared.settle_blkdevs(None).expect("there is room");
        self.serve(host);
    }

    fn move_between(&self, from: usize, to: usize) {
        let offer = self.offer(from, to);
        self.accept(&offer);
        self.hold(&offer);
        self.follow(to);
        self.hand_over(&offer);
        self.follow(to);
        for host in (A..=C).filter(|host| *host != from) {
            self.follow(host);
            self.hosts[host].end_answer(offer.number).expect("it is stored");
        }
        self.serve(to);
    }

    /// Ends server's areas that no blkdev of another host has, and gives one to each that has none.
    fn serve(&self, host: usize) {
        let shared = &self.hosts[host];
        let rows = shared.remote_blkdevs_of_others().expect("they can be read");
        for served in shared.served_blkdevs() {
            let is_of = |row: &&RemoteBlkdev| {
                (row.entry.id, row.entry.host, row.ownership)
                    == (served.blkdev, served.host, served.ownership)
            };
            if rows.iter().find(is_of).is_none() {
                shared.end_serving(&served).expect("it is stored");
            }
        }
        for row in &rows {
            shared.serve_remote(row).expect("there is room");
        }
    }

    /// What a process of a host does when it begins, and a process that lives after a move of a host that has died.
    fn recover(&self, host: usize) {
        let shared = &self.hosts[host];
        shared.end_former_answer().expect("it is stored");
        if let Some(own) = shared.own_move() {
            shared.end_move(own.number, false).expect("it is stored");
        }
        self.follow(host);
    }

    /// The host that has the backend: one alone, and all blkdevs use that.
    fn holder(&self) -> usize {
        let mut holders = (A..=C).filter(|host| {
            let backends = self.hosts[*host].backends().expect("they are valid");
            assert!(backends.iter().all(|entry| entry.uuid == self.backend.uuid));
            let has_it = self.hosts[*host].has_backend(self.id()).expect("it can be read");
            assert_eq!(has_it, !backends.is_empty());
            !backends.is_empty()
        });
        let holder = holders.next().expect("it is not lost");
        assert_eq!(holders.next(), None, "it has one host");
        let entry = self.hosts[holder].backend(self.id()).expect("it is there");
        let of = |entry: &BackendEntry| {
            let texts = (entry.name.clone(), entry.path.clone(), entry.identity.clone());
            (entry.uuid, texts, entry.size, entry.sector, entry.settings, entry.data_crc, entry.handlers)
        };
        assert_eq!(of(&entry), of(&self.backend));
        assert_eq!((entry.host, entry.cache_segments), (id(holder), self.segments(holder).len() as u32));
        let served = self.hosts[holder].served_blkdevs();
        for (host, shared) in self.hosts.iter().enumerate() {
            let (local, remote) = (shared.blkdevs(), shared.remote_blkdevs());
            assert_eq!((local.len(), remote.len()), if host == holder { (2, 0) } else { (0, 2) });
            for row in remote {
                assert_eq!((row.owner, row.backend_uuid), (id(holder), self.backend.uuid));
                let served =
                    served.iter().find(|served| served.blkdev == row.entry.id).expect("it is served");
                assert_eq!(kind(shared.server_area(&row, None)), Ok(RemoteState::Served(served.area)));
            }
        }
        assert_eq!(served.len(), 4);
        holder
    }

    fn segments(&self, host: usize) -> BTreeSet<u32> {
        segments(&self.hosts[host], self.id())
    }

    /// The free segments of the region, as the memory has it. Each segment is free, or has one use by one host.
    fn free_segments(&self) -> u32 {
        let copy = Medium::with_bytes(self.medium.bytes());
        let region = Arc::new(Region::new(HostMemory::new(&copy, true, 5)));
        let environment = Arc::new(HostEnvironment::new(5));
        let views = Transport::open_each(&environment, Arc::clone(&region)).expect("it can be read");
        let members =
            Transport::members_of(environment, region).expect("it can be read").expect("it is shared");
        let layout = views[0].info().layout;
        let parts = layout.shared_parts().expect("it is shared");
        let owners: Vec<Option<HostId>> = (0..layout.segment_count)
            .map(|segment| members.owner(Object::Group(parts.group_of(segment))).expect("it can be read"))
            .collect();
        let mut used = BTreeSet::new();
        let mut free = owners.iter().filter(|owner| owner.is_none()).count();
        for (host, view) in members.all().expect("they can be read").iter().zip(&views) {
            let number = |area: ChannelArea| {
                ((area.at - layout.segment_base(SegmentId(0))) / layout.segment_size) as u32
            };
            let backends = view.backends().expect("they are valid").into_iter();
            let own = backends.flat_map(|entry| segments(view, entry.id));
            let own = own.chain(view.remote_blkdevs().into_iter().map(|row| number(row.area)));
            let own = own.chain(view.served_blkdevs().into_iter().map(|served| number(served.area)));
            let before = used.len();
            for segment in own {
                assert!(used.insert(segment), "segment {segment} has one use");
                assert_eq!(owners[segment as usize], Some(host.id));
            }
            let all = owners.iter().filter(|owner| **owner == Some(host.id)).count();
            let unused = view.info().free_segments as usize;
            assert_eq!(
                used.len() - before + unused,
                all,
                "all segments of host {} are free or used",
                host.id
            );
            free += unused;
        }
        free as u32
    }

    /// Removes all blkdevs and the backend: everything is free then.
    fn remove_all(&self, holder: usize) {
        for shared in &self.hosts {
            let local = shared.blkdevs().into_iter();
            for id in local.chain(shared.remote_blkdevs().into_iter().map(|row| row.entry)).map(|row| row.id)
            {
                shared.remove_blkdev(id).expect("it is there");
            }
        }
        self.serve(holder);
        self.hosts[holder].remove_backend(self.id()).expect("it is not in use");
        assert_eq!(self.free_segments(), self.hosts[A].info().layout.segment_count);
    }

    /// Takes everything from a host that is dead.
    fn clear(&self, host: usize, by: usize) {
        let (members, member) = self.hosts[by].members().expect("it is shared");
        let dead = members.host(id(host)).expect("it can be read").expect("it is there");
        members.clear(&dead, member, &mut |_, _, _| Ok(())).expect("it is dead");
    }

    /// A backend that only host `host` has, without a blkdev.
    fn create_other(&self, host: usize, cache: u64) -> Result<BackendId> {
        self.hosts[host].create_backend(&spec(&self.hosts[host], "/other", cache))
    }

    fn owner(&self, by: usize) -> Option<HostId> {
        let members = self.hosts[by].members().expect("it is shared").0;
        members.owner(Object::Backend(self.id().0)).expect("it can be read")
    }
}

#[test]
fn a_backend_moves_with_its_blkdevs_and_returns() {
    for is_coherent in [false, true] {
        let world = World::new(is_coherent, CACHE);
        let free = world.free_segments();
        assert_eq!(world.holder(), A);
        for (from, to) in [(A, B), (B, A), (A, C), (C, B), (B, A)] {
            world.move_between(from, to);
            assert_eq!(world.holder(), to);
            assert!(world.segments(from).is_empty());
            assert_eq!(world.segments(to).len() as u64, CACHE);
            // Each host has a client's area, or the holder has one for it.
            assert_eq!(world.free_segments(), free);
            assert_eq!((world.hosts[from].own_move(), world.hosts[to].move_of(id(from))), (None, None));
            world.hosts[to].open_cache(world.id()).expect("it is empty").stop();
        }
        world.remove_all(A);
    }
}

#[test]
fn its_blkdevs_wait_until_the_new_host_serves_them() {
    let world = World::new(false, CACHE);
    let state = || {
        let row = world.hosts[C].remote_blkdevs().remove(0);
        kind(world.hosts[C].server_area(&row, None))
    };
    let offer = world.offer(A, B);
    world.accept(&offer);
    assert!(world.hosts[B].backends().expect("they are valid").is_empty(), "it is still a's");
    assert!(matches!(state(), Ok(RemoteState::Served(_))));
    world.hold(&offer);
    world.hand_over(&offer);
    assert!(world.hosts[B].backends().expect("they are valid").is_empty(), "it is not taken over yet");
    assert_eq!(state(), Ok(RemoteState::NotServed));
    world.follow(B);
    // Its row becomes another one, which b is to see first.
    world.follow(C);
    assert_eq!(state(), Ok(RemoteState::NotServed));
    world.follow(B);
    assert!(matches!(state(), Ok(RemoteState::Served(_))));
}

#[test]
fn the_new_host_sees_at_once_what_the_former_one_has_freed() {
    let world = World::new(false, LARGE);
    let offer = world.offer(A, B);
    world.accept(&offer);
    world.hold(&offer);
    // It is asked for its free space just before, as by a command that shows it.
    assert!(u64::from(world.hosts[B].info().free_segments) < LARGE);
    world.hand_over(&offer);
    world.follow(B);
    assert_eq!(world.segments(B).len() as u64, LARGE);
}

#[test]
fn what_cannot_be_moved_is_refused() {
    let world = World::new(false, CACHE);
    let (a, b, backend) = (&world.hosts[A], &world.hosts[B], world.id());
    assert_eq!(kind(a.offer_move(backend, id(A), None)), Err(ErrorKind::NotFound), "it has it already");
    assert!(kind(a.offer_move(backend, HostId(3), None)).is_err(), "there is no such host");
    assert_eq!(kind(a.offer_move(BackendId(2), id(B), None)), Err(ErrorKind::NotFound));
    assert_eq!(kind(b.offer_move(backend, id(A), None)), Err(ErrorKind::NotFound), "it is not b's");
    let (members, member) = world.hosts[C].members().expect("it is shared");
    members.leave(member).expect("it is alone");
    assert_eq!(kind(a.offer_move(backend, id(C), None)), Err(ErrorKind::NotFound), "it has left");
    let offer = world.offer(A, B);
    assert_eq!(kind(a.offer_move(backend, id(B), None)), Err(ErrorKind::Busy), "one at a time");
    assert_eq!(a.own_move(), Some(offer));
    let hand_over = |number| kind(a.hand_over_backend(backend, id(B), number));
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped), "b has said nothing");
    world.accept(&offer);
    assert_eq!(kind(a.hold_for_move(offer.number ^ 2)), Err(ErrorKind::Stopped), "that is of another move");
    b.answer_move(backend, offer.number, MoveAnswer::Held).expect("it is stored");
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped), "a has not asked for that");
    a.hold_for_move(offer.number).expect("it is stored");
    a.end_move(offer.number ^ 2, false).expect("it is another one");
    b.answer_move(backend, offer.number, MoveAnswer::Accepted).expect("it is stored");
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped), "b does not hold its requests");
    let held = |number| b.answer_move(backend, number, MoveAnswer::Held).expect("it is stored");
    let other = b.answer_move(backend, offer.number ^ 2, MoveAnswer::Held);
    assert_eq!(kind(other), Err(ErrorKind::Busy), "it takes part in this one");
    b.end_answer(offer.number).expect("it is stored");
    held(offer.number ^ 2);
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped), "that is of another move");
    b.end_answer(offer.number ^ 2).expect("it is stored");
    held(offer.number);
    let cache = a.open_cache(backend).expect("it is empty");
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Busy), "its cache is open");
    cache.stop();
    drop(cache);
    let why = [MoveRefusal::NoDisk, MoveRefusal::OtherDisk, MoveRefusal::NoIdentity, MoveRefusal::ReadOnly];
    for answer in why.map(MoveAnswer::Refused).into_iter().chain([MoveAnswer::Served]) {
        b.answer_move(backend, offer.number, answer).expect("it is stored");
        assert_eq!((a.answer_to_move(id(B), offer.number), b.answered_backend()), (Some(answer), None));
        assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped));
    }
    held(offer.number);
    b.end_answer(offer.number ^ 2).expect("it is of another move");
    assert_eq!(a.answer_to_move(id(B), offer.number), Some(MoveAnswer::Held));
    b.end_answer(offer.number).expect("it is stored");
    assert_eq!(hand_over(offer.number), Err(ErrorKind::Stopped), "b has ended its part");
    assert_eq!((world.owner(B), a.backends().expect("they are valid").len()), (Some(id(A)), 1));
    held(offer.number);
    assert_eq!(hand_over(offer.number), Ok(()));
    assert_eq!(hand_over(offer.number), Err(ErrorKind::NotFound), "it is b's");
}

#[test]
fn an_offer_that_was_withdrawn_is_not_accepted() {
    let world = World::new(false, CACHE);
    let offer = world.offer(A, B);
    world.hosts[A].end_move(offer.number, false).expect("it is stored");
    assert_eq!((world.hosts[A].own_move(), world.hosts[B].move_of(id(A))), (None, None));
    assert_eq!(kind(world.hosts[B].accept_move(&offer, "/disk", "serial")), Err(ErrorKind::NotFound));
    // Nor is it once there is a later one.
    let later = world.offer(A, B);
    assert_eq!(kind(world.hosts[B].accept_move(&offer, "/disk", "serial")), Err(ErrorKind::NotFound));
    world.accept(&later);
}

#[test]
fn a_host_that_asks_for_a_backend_gets_an_offer_or_is_refused() {
    let world = World::new(false, CACHE);
    let (a, b, backend) = (&world.hosts[A], &world.hosts[B], world.id());
    let number = b.new_move_number();
    b.answer_move(BackendId(2), number, MoveAnswer::Wanted).expect("it is stored");
    assert_eq!(a.move_wishes().expect("they can be read"), [], "it is not a's");
    b.answer_move(backend, number, MoveAnswer::Wanted).expect("it is stored");
    let wish = MoveWish { backend, to: id(B), number };
    assert_eq!(a.move_wishes().expect("they can be read"), [wish]);
    assert_eq!(b.move_wishes().expect("they can be read"), []);
    assert_eq!(a.answer_to_move(id(B), number), Some(MoveAnswer::Wanted));
    let other = a.offer_move(backend, id(C), None).expect("it has the backend");
    assert_eq!(kind(a.refuse_wish(&wish)), Err(ErrorKind::Busy));
    assert_eq!(a.own_move().expect("it goes on").number, other);
    a.end_move(other, false).expect("it is stored");
    a.refuse_wish(&wish).expect("it offers nothing");
    let refused = MoveOffer { backend, from: id(A), to: id(B), number, state: MoveState::Refused };
    assert_eq!(b.move_of(id(A)), Some(refused));
    b.end_answer(number).expect("it is stored");
    assert_eq!(a.move_wishes().expect("they can be read"), []);
    // The next one is granted.
    let number = b.new_move_number();
    b.answer_move(backend, number, MoveAnswer::Wanted).expect("it is stored");
    assert_eq!(a.offer_move(backend, id(B), Some(number)).expect("what was refused has ended"), number);
    let offer = MoveOffer { number, state: MoveState::Offered, ..refused };
    assert_eq!(b.move_of(id(A)), Some(offer));
    world.accept(&offer);
    assert_eq!(a.move_wishes().expect("they can be read"), []);
    world.hold(&offer);
    world.hand_over(&offer);
    (0..2).for_each(|_| [B, C].iter().for_each(|host| world.follow(*host)));
    assert_eq!(world.holder(), B);
}

/// A world in which b has accepted the backend, a has withdrawn the offer, and has removed the backend.
fn withdrawn() -> World {
    let world = World::new(false, CACHE);
    let offer = world.offer(A, B);
    world.accept(&offer);
    world.hosts[A].end_move(offer.number, false).expect("it is stored");
    world.remove_all(A);
    world
}

#[test]
fn a_row_of_a_move_that_did_not_end_does_not_count() {
    for (is_freed, joins_again) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut world = withdrawn();
        if is_freed {
            assert_eq!(world.hosts[B].incoming_backends(&|_| false).expect("they can be read"), []);
        }
        if joins_again {
            world.join_again(B, 9);
        }
        assert!(world.hosts[B].backends().expect("they are valid").is_empty());
        assert_eq!(world.create_other(B, CACHE).expect("there is room"), world.id(), "the number is free");
        for _ in 0..2 {
            let b = &world.hosts[B];
            assert_eq!(b.incoming_backends(&|_| true).expect("they can be read"), []);
            let [other] = b.backends().expect("they are valid").try_into().expect("there is one");
            assert_eq!((other.path.as_str(), other.uuid == world.backend.uuid), ("/other", false));
            assert_eq!(
                kind(b.take_over_backend(other.id, Epoch(0), &|_| 1, true)).err(),
                Some(ErrorKind::NotFound)
            );
            world.join_again(B, 10);
        }
    }
}

#[test]
fn another_backend_with_the_number_of_one_that_did_not_move_can_move() {
    let mut world = withdrawn();
    world.hosts[B].end_former_answer().expect("it is stored");
    let c = &world.hosts[C];
    let id = world.create_other(C, CACHE).expect("there is room");
    assert_eq!(id, world.id());
    world.backend = c.backend(id).expect("it is there");
    assert_eq!(world.hosts[B].incoming_backends(&|_| true).expect("they can be read"), []);
    world.move_between(C, B);
    let entry = world.hosts[B].backend(id).expect("it has moved");
    assert_eq!((entry.uuid, entry.cache_segments), (world.backend.uuid, CACHE as u32));
}

#[test]
fn a_host_that_is_cleared_before_the_decision_takes_the_backend_with_it() {
    for joins_again in [false, true] {
        let mut world = World::new(false, CACHE);
        let offer = world.offer(A, B);
        world.accept(&offer);
        world.hold(&offer);
        world.clear(A, C);
        assert_eq!(world.owner(B), None);
        let late = world.hosts[A].hand_over_backend(world.id(), id(B), offer.number);
        assert_eq!(kind(late), Err(ErrorKind::Stopped), "it is no host");
        if joins_again {
            world.join_again(B, 9);
        }
        assert_eq!(world.hosts[B].incoming_backends(&|_| true).expect("they can be read"), []);
        let taken_over = world.hosts[B].take_over_backend(world.id(), Epoch(0), &|_| 1, true);
        assert_eq!(kind(taken_over).err(), Some(ErrorKind::NotFound));
        let row = world.hosts[C].remote_blkdevs().remove(0);
        assert_eq!(kind(world.hosts[C].server_area(&row, None)), Ok(RemoteState::Gone));
        assert_eq!(world.create_other(C, CACHE).expect("the number is free"), world.id());
        assert_eq!(kind(world.hosts[C].server_area(&row, None)), Ok(RemoteState::Gone));
        assert_eq!(world.hosts[B].incoming_backends(&|_| false).expect("they can be read"), []);
        assert!(world.hosts[B].backends().expect("they are valid").is_empty());
        world.free_segments();
    }
}

#[test]
fn a_host_that_is_cleared_after_the_decision_takes_the_backend_with_it() {
    for is_taken_over in [false, true] {
        let mut world = World::new(false, CACHE);
        let offer = world.offer(A, B);
        world.accept(&offer);
        world.hold(&offer);
        world.hand_over(&offer);
        if is_taken_over {
            world.follow(B);
        }
        world.clear(B, C);
        assert_eq!(world.owner(A), None);
        let taken_over = kind(world.hosts[B].take_over_backend(world.id(), Epoch(0), &|_| 1, true));
        assert!(taken_over.is_err(), "it is no host");
        world.join_again(B, 9);
        for host in A..=C {
            let shared = &world.hosts[host];
            assert!(shared.backends().expect("they are valid").is_empty());
            assert_eq!(shared.incoming_backends(&|_| true).expect("they can be read"), []);
            for row in shared.remote_blkdevs() {
                assert_eq!(kind(shared.server_area(&row, None)), Ok(RemoteState::Gone));
            }
        }
        assert_eq!(world.create_other(A, CACHE).expect("the number is free"), world.id());
        assert_ne!(world.hosts[A].backend(world.id()).expect("it is there").uuid, world.backend.uuid);
        world.free_segments();
    }
}

#[test]
fn a_host_with_less_space_gives_it_a_smaller_cache_or_none() {
    for (left, cache) in [(14, 12), (11, 9), (10, 0), (2, 0), (0, 0)] {
        let world = World::new(false, 20);
        let offer = world.offer(A, B);
        world.accept(&offer);
        world.hold(&offer);
        world.hand_over(&offer);
        // Another host takes what was freed.
        let free = u64::from(world.free_segments());
        let other = world.create_other(C, free - left).expect("it is free");
        assert_ne!(other, world.id());
        let [(backend, _)] = world.hosts[B].incoming_backends(&|_| true).expect("they can be read")[..]
        else {
            panic!("it has moved");
        };
        let exact = kind(world.hosts[B].take_over_backend(backend, Epoch(7), &|_| 4, false));
        assert_eq!(exact.err(), Some(ErrorKind::NoSpace), "of {left}");
        let entry =
            world.hosts[B].take_over_backend(backend, Epoch(7), &|_| 4, true).expect("it needs no cache");
        assert_eq!((entry.cache_segments, world.segments(B).len()), (cache, cache as usize), "of {left}");
        assert_eq!(u64::from(world.free_segments()), left - u64::from(cache));
        let again = kind(world.hosts[B].take_over_backend(backend, Epoch(7), &|_| 4, true));
        assert_eq!(again.err(), Some(ErrorKind::NotFound), "it is taken over already");
    }
}
