//! Moves of backends in which the test plays one of the hosts by the engine alone: it says and does what a daemon does at other moments,
//! or not at all.

use crate::fixture::{MIB, refused};
use crate::hosts::{Host, Shared, wait_until};
use cbd_backing::BackingFile;
use cbd_daemon::api::{Done, MoveBackend, StartBackend, StartBlkdev, StopBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_engine::{
    BackendEntry, BackendSpec, BlkdevSpec, MoveAnswer, MoveOffer, MoveRefusal, MoveState, RemoteState,
    Settings, Transport,
};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_runtime::ProcessEnvironment;
use cbd_runtime::region::OpenTransport;
use cbd_types::{BackendId, Epoch, ErrorKind, HostId, Region, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A host without a daemon, which gives signs of life.
pub(crate) struct Played(OpenTransport);

impl Played {
    pub(crate) fn join(shared: &Shared, name: &str) -> Self {
        Self::try_join(shared, name).unwrap()
    }

    fn try_join(shared: &Shared, name: &str) -> Result<Self> {
        let options = OpenOptions { with_hosts: true, ..OpenOptions::default() };
        let region = Region::new(Mapping::open(shared.path(), &options).unwrap());
        let joined = cbd_runtime::hosts::join(Arc::new(ProcessEnvironment::new()), region, name)?;
        let played = Self(joined);
        played.transport().register_host(name, None)?;
        Ok(played)
    }

    pub(crate) fn transport(&self) -> &Transport<ProcessEnvironment> {
        &self.0.transport
    }

    pub(crate) fn host(&self) -> HostId {
        self.transport().members().unwrap().1.id
    }

    /// A backend of this host with a cache of so many bytes.
    pub(crate) fn create_backend(&self, of: &BackendEntry, cache_bytes: u64) -> Result<BackendId> {
        self.transport().create_backend(&BackendSpec {
            host: self.host(),
            path: of.path.clone(),
            identity: of.identity.clone(),
            size: of.size,
            sector: of.sector,
            cache_bytes: Some(cache_bytes),
            lanes_max: 1,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })
    }

    /// Caches a disk that a daemon can reach, too; returns the number of the backend.
    fn cache(&self, reaches: &Host, disk: &str) -> BackendId {
        let id = start(reaches, disk);
        let entries = self.transport().backends_of_others().unwrap();
        let entry = entries.into_iter().find(|entry| entry.id == BackendId(id)).unwrap();
        reaches.daemon.stop_backend(0, id, &StopBackend::default(), &mut |_| Flow::Continue).unwrap();
        self.create_backend(&entry, 16 * MIB).unwrap()
    }

    /// Moves a backend of this host up to the moment at which it is handed over. Returns the number of the move.
    fn offer_until_held(&self, backend: BackendId, to: HostId) -> u64 {
        let number = self.transport().offer_move(backend, to, None).unwrap();
        let answer = || self.transport().answer_to_move(to, number);
        wait_until("it is accepted", || answer() == Some(MoveAnswer::Accepted));
        self.transport().hold_for_move(number).unwrap();
        wait_until("its requests are held", || answer() == Some(MoveAnswer::Held));
        number
    }

    /// Waits until a host asks for a backend; returns the number that its move is to have.
    fn wish(&self) -> u64 {
        let find = || self.transport().move_wishes().unwrap().first().map(|wish| wish.number);
        wait_until("a host asks for it", || find().is_some());
        find().unwrap()
    }

    /// Waits until the first host offers a backend and is in this state.
    fn offer(&self, state: MoveState) -> MoveOffer {
        let find = || self.transport().move_of(HostId(0)).filter(|offer| offer.state == state);
        wait_until("it is offered", || find().is_some());
        find().unwrap()
    }

    fn hold(&self) -> MoveOffer {
        let offer = self.offer(MoveState::Hold);
        self.transport().answer_move(offer.backend, offer.number, MoveAnswer::Held).unwrap();
        offer
    }

    /// Gets a backend, which it does not serve yet.
    fn receive(&self) -> MoveOffer {
        let offer = self.offer(MoveState::Offered);
        let entry = self.transport().offered_backend(&offer).unwrap();
        self.transport().accept_move(&offer, &entry.path, &entry.identity).unwrap();
        self.hold();
        let id = offer.backend;
        wait_until("it is this host's", || self.transport().has_backend(id).unwrap());
        wait_until("its space is free", || self.transport().is_released_by_others(id));
        self.transport().end_answer(offer.number).unwrap();
        self.transport().incoming_backends(&|_| true).unwrap();
        offer
    }

    fn take_over(&self, offer: &MoveOffer) -> BackendEntry {
        self.transport().take_over_backend(offer.backend, Epoch(7), &|_| 1, true).unwrap()
    }
}

/// Starts a backend with a cache and without a block device; returns its number.
fn start(host: &Host, disk: &str) -> u32 {
    let disk = host.fixture.disk(disk, 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..host.fixture.backend(&disk) };
    host.daemon.start_backend(0, &request).unwrap().backend_id
}

fn move_to(host: &Host, backend: u32, to: &str) -> Result<Done> {
    let request = MoveBackend { to: to.into(), timeout_s: None };
    host.daemon.move_backend(0, backend, &request, &mut |_| Flow::Continue)
}

#[test]
fn a_move_has_succeeded_when_the_other_host_says_that_it_serves_the_backend() {
    let shared = Shared::new();
    let a = Host::join(&shared, "a", true);
    let c = Played::join(&shared, "c");
    let a = &a;
    let [silent, small, gone] = ["silent", "small", "gone"].map(|disk| start(a, disk));
    std::thread::scope(|scope| {
        let moving = |backend| scope.spawn(move || move_to(a, backend, "c"));
        let moved = moving(small);
        let offer = c.receive();
        // Most of the space is another backend's by now.
        let other = a_disk(&c);
        let sizes = (1..60).rev().map(|size| size * MIB);
        sizes.map(|size| c.create_backend(&other, size)).find(Result::is_ok).unwrap().unwrap();
        let taken_over = c.take_over(&offer);
        assert!(!moved.is_finished(), "it is not known whether it is served");
        c.transport().answer_move(offer.backend, offer.number, MoveAnswer::Served).unwrap();
        let done = moved.join().unwrap().unwrap();
        let lost = format!("its cache has {} segments instead of 64", taken_over.cache_segments);
        assert!(done.warnings.iter().any(|warning| warning.contains(&lost)), "{done:?}");

        let moved = moving(silent);
        let offer = c.receive();
        c.take_over(&offer);
        refused(
            moved.join().unwrap(),
            ErrorKind::TimedOut,
            "host c has backend 0 now, and does not serve it yet",
        );

        let moved = moving(gone);
        c.receive();
        let (members, member) = c.transport().members().unwrap();
        members.leave(member).unwrap();
        refused(moved.join().unwrap(), ErrorKind::TimedOut, "host c was cleared before it served backend 2");
    });
}

#[test]
fn a_host_that_takes_a_backend_over_takes_part_in_no_other_move_until_it_has_said_that_it_serves_it() {
    let shared = Shared::new();
    let b = Host::join(&shared, "b", true);
    let (c, d) = (Played::join(&shared, "c"), Played::join(&shared, "d"));
    let here = HostId(0);
    let [first, second] = [(&c, "first"), (&d, "second")].map(|(host, disk)| host.cache(&b, disk));
    // What c frees does not suffice for a cache of the same size and its spare segments: b waits for more.
    let other = BackendEntry {
        path: "/nowhere".into(),
        identity: String::new(),
        ..c.transport().backends_of_others().unwrap().remove(0)
    };
    let fill = |segments| d.create_backend(&other, segments * MIB / 4);
    assert!((1..240).rev().map(fill).any(|created| created.is_ok()), "the rest of the region is used");

    let number = c.offer_until_held(first, here);
    let answer = || c.transport().answer_to_move(here, number);
    c.transport().hand_over_backend(first, here, number).unwrap();
    c.transport().end_move(number, false).unwrap();
    let other = d.transport().offer_move(second, here, None).unwrap();
    wait_until("it says that it serves the first one, or takes part in the second move", || {
        let is_over =
            answer() == Some(MoveAnswer::Served) || d.transport().answer_to_move(here, other).is_some();
        assert!(!is_over || c.transport().is_taken_over(first).unwrap());
        is_over
    });
    wait_until("the second one is accepted", || {
        d.transport().answer_to_move(here, other) == Some(MoveAnswer::Accepted)
    });
    d.transport().end_move(other, false).unwrap();
}

#[test]
fn a_daemon_that_was_killed_when_it_had_taken_a_backend_over_says_that_it_serves_it_once_it_is_back() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    let id = start(&a, "disk");
    move_to(&a, id, "b").unwrap();
    let Host { daemon, fixture } = b;
    drop(daemon);
    let (number, id, host) = (7777, BackendId(id), HostId(1));
    {
        let mut joined = None;
        wait_until("the daemon has ended", || {
            joined = Played::try_join(&shared, "b").ok();
            joined.is_some()
        });
        let killed = joined.unwrap();
        assert_eq!(killed.host(), host);
        killed.transport().answer_move(id, number, MoveAnswer::Held).unwrap();
    }
    let c = Played::join(&shared, "c");
    assert_eq!(c.transport().answer_to_move(host, number), Some(MoveAnswer::Held));
    let _b = fixture.daemon();
    wait_until("it says so", || c.transport().answer_to_move(host, number) == Some(MoveAnswer::Served));
}

#[test]
fn a_host_that_has_cancelled_its_wish_refuses_the_move_that_begins_all_the_same() {
    let shared = Shared::new();
    let b = Host::join(&shared, "b", true);
    let c = Played::join(&shared, "c");
    let id = c.cache(&b, "disk");
    let (is_cancelled, b) = (AtomicBool::new(false), &b);
    let number = std::thread::scope(|scope| {
        let fetched = scope.spawn(|| {
            let request = MoveBackend { to: "b".into(), timeout_s: None };
            let flow = || if is_cancelled.load(Ordering::SeqCst) { Flow::Cancel } else { Flow::Continue };
            b.daemon.move_backend(0, id.0, &request, &mut |_| flow())
        });
        let number = c.wish();
        is_cancelled.store(true, Ordering::SeqCst);
        refused(fetched.join().unwrap(), ErrorKind::Stopped, "cancelled; nothing was moved");
        number
    });
    assert!(c.transport().move_wishes().unwrap().is_empty());
    c.transport().offer_move(id, HostId(0), Some(number)).unwrap();
    let answer = || c.transport().answer_to_move(HostId(0), number);
    wait_until("it is answered", || answer().is_some());
    assert_eq!(answer(), Some(MoveAnswer::Refused(MoveRefusal::Other)));
}

#[test]
fn a_wish_that_the_answer_to_another_move_has_replaced_is_said_again() {
    let shared = Shared::new();
    let b = Host::join(&shared, "b", true);
    let (c, d) = (Played::join(&shared, "c"), Played::join(&shared, "d"));
    let (wanted, other) = (c.cache(&b, "wanted"), d.cache(&b, "other"));
    let b = &b;
    std::thread::scope(|scope| {
        let fetched = scope.spawn(move || move_to(b, wanted.0, "b"));
        let number = c.wish();
        let offered = d.transport().offer_move(other, HostId(0), None).unwrap();
        wait_until("another one is accepted", || {
            d.transport().answer_to_move(HostId(0), offered) == Some(MoveAnswer::Accepted)
        });
        assert!(c.transport().move_wishes().unwrap().is_empty());
        d.transport().end_move(offered, false).unwrap();
        assert_eq!(c.wish(), number);
        let wish = c.transport().move_wishes().unwrap().remove(0);
        c.transport().refuse_wish(&wish).unwrap();
        refused(fetched.join().unwrap(), ErrorKind::Stopped, "host c could not move backend");
    });
}

#[test]
fn a_wish_waits_for_the_move_that_its_host_offers_already() {
    let shared = Shared::new();
    let a = Host::join(&shared, "a", true);
    let (c, d) = (Played::join(&shared, "c"), Played::join(&shared, "d"));
    let [first, second] = ["first", "second"].map(|disk| start(&a, disk));
    let a = &a;
    std::thread::scope(|scope| {
        let moved = scope.spawn(move || move_to(a, first, "c"));
        let offer = c.offer(MoveState::Offered);
        let entry = c.transport().offered_backend(&offer).unwrap();
        c.transport().accept_move(&offer, &entry.path, &entry.identity).unwrap();
        c.offer(MoveState::Hold);
        let number = d.transport().new_move_number();
        d.transport().answer_move(BackendId(second), number, MoveAnswer::Wanted).unwrap();
        // The host looks for wishes each second.
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(d.transport().answer_to_move(d.host(), number), Some(MoveAnswer::Wanted));
        let no = MoveAnswer::Refused(MoveRefusal::Other);
        c.transport().answer_move(offer.backend, offer.number, no).unwrap();
        refused(moved.join().unwrap(), ErrorKind::Stopped, "host c refuses");
        let begun = || d.transport().move_of(HostId(0)).filter(|offer| offer.number == number);
        wait_until("the move that was asked for begins", || begun().is_some());
        d.transport().answer_move(BackendId(second), number, no).unwrap();
    });
}

#[test]
fn a_backend_arrives_also_while_another_program_looks_at_its_disk_and_its_former_host_is_gone() {
    let shared = Shared::new();
    let b = Host::join(&shared, "b", true);
    let c = Played::join(&shared, "c");
    let id = c.cache(&b, "disk");
    let number = c.offer_until_held(id, HostId(0));
    let held = BackingFile::open(b.fixture.path("disk"), Default::default()).unwrap();
    c.transport().hand_over_backend(id, HostId(0), number).unwrap();
    wait_until("it has the row", || c.transport().is_taken_over(id).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    drop(held);
    let answer = || c.transport().answer_to_move(HostId(0), number);
    wait_until("it is served, or not", || answer() != Some(MoveAnswer::Held));
    // The former host may be killed before it ends the move, which it shows until it is back.
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(answer(), Some(MoveAnswer::Served));
}

#[test]
fn two_commands_that_get_backends_at_the_same_moment_both_get_theirs() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    let ids = ["first", "second"].map(|disk| start(&a, disk));
    let b = &b;
    std::thread::scope(|scope| {
        let moves = ids.map(|id| scope.spawn(move || move_to(b, id, "b")));
        moves.into_iter().for_each(|moved| drop(moved.join().unwrap().unwrap()));
    });
    let own: Vec<u32> = b.daemon.backends(0, false).unwrap().iter().map(|own| own.backend_id).collect();
    assert_eq!(own, ids);
}

/// What is stored of a disk that does not exist.
fn a_disk(host: &Played) -> BackendEntry {
    let entry = host.transport().backends_of_others().unwrap().remove(0);
    BackendEntry { path: "/nowhere".into(), identity: String::new(), ..entry }
}

#[test]
fn a_block_device_of_a_host_that_has_not_followed_its_backend_is_the_only_one_all_the_same() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    let c = Played::join(&shared, "c");
    let backend = BackendId(start(&a, "disk"));
    let spec = BlkdevSpec { backend, host: c.host(), export: "nbd".into(), shared: false };
    c.transport().create_remote_blkdev(&spec, None).unwrap();
    let offer = std::thread::scope(|scope| {
        let moved = scope.spawn(|| move_to(&a, backend.0, "b"));
        let offer = c.hold();
        moved.join().unwrap().unwrap();
        offer
    });
    let request = StartBlkdev { backend: 0, export: Some(b.fixture.export()), ..StartBlkdev::default() };
    for shared in [false, true] {
        let started = b.daemon.start_blkdev(0, &StartBlkdev { shared, ..request.clone() });
        refused(started, ErrorKind::Busy, "stands on backend 0");
    }
    c.transport().end_answer(offer.number).unwrap();

    // While b waits for that host before a move, the one that has asked for the move wants it no more.
    let number = c.transport().new_move_number();
    c.transport().answer_move(backend, number, MoveAnswer::Wanted).unwrap();
    // It takes part in the former move for 3 s, sees the wish within a second, and waits for 4 s.
    std::thread::sleep(Duration::from_millis(4200));
    c.transport().end_answer(number).unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        let offer = c.transport().move_of(HostId(1)).filter(|offer| offer.number == number);
        assert_eq!(offer, None, "it is not wished any more");
        std::thread::sleep(Duration::from_millis(1));
    }

    c.transport().settle_blkdevs(None).unwrap();
    let row = c.transport().remote_blkdevs().remove(0);
    let is_served = || matches!(c.transport().server_area(&row, None), Ok(RemoteState::Served(_)));
    wait_until("it is served on the new host", is_served);
}
