//! A backend that moves between the hosts of a shared region, each in a thread, over a memory that is coherent or is not. Hosts offer it,
//! accept, hold, refuse, hand over and take over at any moment; their processes die at any store, end and come back.
//!
//! Invariants: a seed decides every step of a history. Checked is:
//! - no two living processes have the disk open;
//! - each host that looks sees the backend, so that no host caches its disk a second time;
//! - it is always the same backend, and once all processes have ended it is on one host, with a cache of its size.
//!
//! Elsewhere: the steps themselves (`cbd-engine`, `transport/moves.rs`), who does them when (`cbd-daemon`), requests in channels
//! ([`channels`](crate::channels)).

use crate::baton::together;
use crate::crash::until_crash;
use crate::explorer::{Tally, play_counted};
use crate::hosts::{HostEnvironment, HostMemory, Medium, must, text_of};
use crate::random::Seeded;
use cbd_engine::{
    BackendSpec, FormatOptions, MoveAnswer, MoveOffer, MoveRefusal, MoveState, Settings, Transport,
};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, HostId, Region, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// The name of this kind of world.
pub const NAME: &str = "moves";

/// Histories of one seed.
const BATCH: u64 = 10;
const HOSTS: u64 = 3;
/// Processes that act as one host, one after the other.
const LIVES: u64 = 3;
/// Acts of a process.
const ACTS: u64 = 40;
/// How often a process tries to join.
const TRIES: u32 = 20;
const SIZE: u64 = 3 << 20;
const SEGMENT: u64 = 64 << 10;
const CACHE_SEGMENTS: u64 = 9;
const PATH: &str = "/disk";
const BACKEND: BackendId = BackendId(0);

/// A process: its host, and its number among those of that host.
type Name = (u64, u64);

/// What is true outside of the memory.
#[derive(Default)]
struct Truth {
    /// The process that has the disk open.
    open: Option<Name>,
    counts: BTreeMap<&'static str, u64>,
}

impl Truth {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn end(&mut self, process: Name) {
        self.open.take_if(|open| *open == process);
    }
}

/// Plays the histories of one seed; with `only`, only the one with that number.
#[must_use]
pub fn explore(seed: u64, only: Option<u64>) -> Tally {
    play_counted(NAME, BATCH, seed, only, |seed| {
        let truth = Mutex::new(Truth::default());
        let outcome = play(seed, &truth);
        (outcome, truth.into_inner().counts)
    })
}

fn play(seed: u64, truth: &Mutex<Truth>) -> std::result::Result<(), String> {
    let mut random = Seeded::new(seed);
    let medium = Medium::new(SIZE);
    let scene = Scene {
        medium: &medium,
        is_coherent: random.chance(400),
        dies_permille: *random.pick(&[0, 300, 700]),
        truth,
        uuid: [0; 16],
    };
    let scene = Scene { uuid: scene.begin(&mut random), ..scene };
    let switch_permille = *random.pick(&[1, 5, 20, 100]);
    let scene = &scene;
    let works = (0..HOSTS).map(|host| {
        let seed = random.next();
        Box::new(move || scene.live(host, seed)) as Box<dyn FnOnce() + Send + '_>
    });
    let works: Vec<_> = works.collect();
    for outcome in together(random.next(), switch_permille, works) {
        outcome.map_err(text_of)?;
    }
    catch_unwind(AssertUnwindSafe(|| scene.check_end(&mut random))).map_err(text_of)
}

/// What all hosts of a history have in common.
#[derive(Clone, Copy)]
struct Scene<'a> {
    medium: &'a Medium,
    is_coherent: bool,
    dies_permille: u64,
    truth: &'a Mutex<Truth>,
    /// That of the backend.
    uuid: [u8; 16],
}

type Joined = Arc<Transport<HostEnvironment>>;

impl Scene<'_> {
    fn memory(&self, random: &mut Seeded) -> HostMemory {
        HostMemory::new(self.medium, self.is_coherent, random.next())
    }

    fn open(&self, host: u64, memory: HostMemory, random: &mut Seeded) -> Joined {
        let name = format!("host{host}");
        let environment = Arc::new(HostEnvironment::new(random.next()));
        // No other machine has this name.
        let opened = || {
            let region = Region::new(memory.clone());
            Transport::open_shared(Arc::clone(&environment), region, &name, &mut |_, _, _| Ok(()))
        };
        // Others decide at the same moment who is a host.
        let busy = |opened: &Result<Joined>| matches!(opened, Err(error) if error.kind() == ErrorKind::Busy);
        let opened = (0..TRIES).map(|_| opened()).find(|opened| !busy(opened));
        let transport = must(opened.unwrap_or_else(|| panic!("{name} cannot join")));
        assert_eq!(must(transport.register_host(&name, None)), HostId(host as u32));
        transport
    }

    /// Makes the region with all hosts, and the backend on the first one. Returns its uuid.
    fn begin(&self, random: &mut Seeded) -> [u8; 16] {
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: HOSTS as u32,
            backend_rows: 2,
            blkdev_rows: 1,
        };
        let environment = Arc::new(HostEnvironment::new(random.next()));
        drop(must(Transport::format_shared(&environment, Region::new(self.memory(random)), &options)));
        let hosts: Vec<Joined> =
            (0..HOSTS).map(|host| self.open(host, self.memory(random), random)).collect();
        let spec = BackendSpec {
            host: HostId(0),
            path: PATH.into(),
            identity: "serial".into(),
            size: 1 << 20,
            sector: 512,
            cache_bytes: Some(CACHE_SEGMENTS * SEGMENT),
            lanes_max: 1,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        };
        assert_eq!(must(hosts[0].create_backend(&spec)), BACKEND);
        must(hosts[0].backend(BACKEND)).uuid
    }

    /// The processes of a host, one after the other.
    fn live(&self, host: u64, seed: u64) {
        let mut random = Seeded::new(seed);
        for life in 0..LIVES {
            let memory = self.memory(&mut random);
            if random.chance(self.dies_permille) {
                let most = *random.pick(&[300, 3000, 20_000]);
                memory.die_in(random.below(most));
            }
            let ended = until_crash(|| {
                let transport = self.open(host, memory.clone(), &mut random);
                Process { scene: self, name: (host, life), transport, answering: None }.run(&mut random);
            });
            memory.live();
            let mut truth = self.truth.lock();
            if ended.is_err() {
                truth.count("death");
            }
            truth.end((host, life));
        }
    }

    /// The next processes of all hosts, one by one.
    fn check_end(&self, random: &mut Seeded) {
        let mut hosts: Vec<Process<'_>> = (0..HOSTS)
            .map(|host| {
                let transport = self.open(host, self.memory(random), random);
                Process { scene: self, name: (host, LIVES), transport, answering: None }
            })
            .collect();
        // What one of them frees another one may wait for.
        for _ in 0..2 {
            hosts.iter_mut().for_each(Process::recover);
        }
        let has_it = |process: &&Process<'_>| {
            let backends = must(process.transport.backends());
            assert_eq!(must(process.transport.has_backend(BACKEND)), !backends.is_empty());
            !backends.is_empty()
        };
        let holders: Vec<&Process<'_>> = hosts.iter().filter(has_it).collect();
        assert_eq!(holders.len(), 1, "it is on one host");
        let segments = holders[0].transport.segments_of(BACKEND).len();
        assert_eq!(segments as u64, CACHE_SEGMENTS, "its cache has its size");
        assert!(hosts.iter().all(|process| process.transport.own_move().is_none()));
    }
}

/// One process of a host.
struct Process<'a> {
    scene: &'a Scene<'a>,
    name: Name,
    transport: Joined,
    /// The move that it takes part in.
    answering: Option<MoveOffer>,
}

impl Process<'_> {
    fn run(&mut self, random: &mut Seeded) {
        self.recover();
        for _ in 0..ACTS {
            let has_it = must(self.transport.has_backend(BACKEND));
            match random.below(10) {
                0 => self.look(),
                1 | 2 => self.follow(),
                _ if has_it => self.lead(random),
                _ => self.join(random),
            }
        }
        // The daemon ends: the disk is closed.
        self.scene.truth.lock().end(self.name);
    }

    fn count(&self, what: &'static str) {
        self.scene.truth.lock().count(what);
    }

    fn id(&self) -> HostId {
        HostId(self.name.0 as u32)
    }

    /// What a process does when it begins.
    fn recover(&mut self) {
        must(self.transport.end_former_answer());
        if let Some(own) = self.transport.own_move() {
            must(self.transport.end_move(own.number, false));
        }
        self.follow();
    }

    /// Takes over what was moved here, and opens the disk of a backend that this host has.
    fn follow(&self) {
        let offers = must(self.transport.moves_of_others());
        let is_offered =
            |backend| offers.iter().any(|offer| (offer.backend, offer.to) == (backend, self.id()));
        let is_answered = |backend| self.transport.answered_backend() == Some(backend) || is_offered(backend);
        for (backend, uuid) in must(self.transport.incoming_backends(&is_answered)) {
            // The former host frees its segments after it has handed the backend over.
            if !self.transport.is_released_by_others(backend) {
                continue;
            }
            let entry = match self.transport.take_over_backend(backend, Epoch(7), &|_| 1, false) {
                Err(error) if error.kind() == ErrorKind::NoSpace => continue,
                entry => must(entry),
            };
            assert_eq!((entry.uuid, uuid), (self.scene.uuid, self.scene.uuid));
            self.count("taken_over");
        }
        if must(self.transport.backends()).iter().any(|entry| entry.uuid == self.scene.uuid) {
            let mut truth = self.scene.truth.lock();
            let former = truth.open.replace(self.name);
            assert!(former.is_none_or(|former| former == self.name), "{former:?} has the disk open still");
        }
    }

    /// This host has the backend.
    fn lead(&mut self, random: &mut Seeded) {
        let Some(own) = self.transport.own_move().filter(|own| own.state != MoveState::Refused) else {
            let to = HostId(random.below(HOSTS) as u32);
            return match self.transport.offer_move(BACKEND, to, None) {
                Ok(_) => self.count("offered"),
                // This host, or one that comes back; the backend is not taken over.
                Err(error) => self.expect_kinds(&error, &[ErrorKind::NotFound, ErrorKind::Busy]),
            };
        };
        match (own.state, self.transport.answer_to_move(own.to, own.number)) {
            (MoveState::Offered, Some(MoveAnswer::Accepted)) => {
                must(self.transport.hold_for_move(own.number))
            }
            (MoveState::Hold, Some(MoveAnswer::Held)) => self.hand_over(&own),
            // The other host is asked too early, or has a process that does not know of the move.
            (MoveState::Hold, _) if random.chance(50) => self.hand_over(&own),
            (_, Some(MoveAnswer::Refused(_))) => must(self.transport.end_move(own.number, false)),
            _ if random.chance(100) => {
                self.count("given_up");
                must(self.transport.end_move(own.number, false));
            }
            _ => {}
        }
    }

    fn hand_over(&self, own: &MoveOffer) {
        self.scene.truth.lock().open.take_if(|open| *open == self.name);
        let handed = self.transport.hand_over_backend(BACKEND, own.to, own.number);
        match handed {
            Ok(()) => self.count("handed_over"),
            Err(error) => {
                self.expect_kinds(&error, &[ErrorKind::Stopped]);
                self.count("not_handed_over");
            }
        }
        must(self.transport.end_move(own.number, false));
        self.follow();
    }

    /// Another host has the backend.
    fn join(&mut self, random: &mut Seeded) {
        if let Some(joined) = self.answering {
            let now = self.transport.move_of(joined.from).filter(|now| now.number == joined.number);
            match now {
                Some(now) if now.state == MoveState::Hold => {
                    must(self.transport.answer_move(BACKEND, now.number, MoveAnswer::Held));
                    self.count("held");
                }
                Some(now) if now.state == MoveState::Offered => {}
                _ => {
                    must(self.transport.end_answer(joined.number));
                    self.answering = None;
                    self.follow();
                }
            }
            return;
        }
        let is_ours = |offer: &MoveOffer| offer.to == self.id() && offer.state != MoveState::Refused;
        let Some(offer) = must(self.transport.moves_of_others()).into_iter().find(is_ours) else { return };
        if random.chance(100) {
            let refused = MoveAnswer::Refused(MoveRefusal::NoDisk);
            return must(self.transport.answer_move(BACKEND, offer.number, refused));
        }
        let accepted = self
            .transport
            .offered_backend(&offer)
            .and_then(|entry| self.transport.accept_move(&offer, &entry.path, &entry.identity));
        match accepted {
            Ok(()) => self.answering = Some(offer),
            Err(error) => self.expect_kinds(&error, &[ErrorKind::NotFound]),
        }
    }

    /// A user who would start a backend on the disk is told that there is one.
    fn look(&self) {
        // In this order: it may arrive meanwhile.
        let others = must(self.transport.backends_of_others());
        let arriving = must(self.transport.arriving_backends());
        let own = must(self.transport.backends());
        let mut all = others.iter().chain(&arriving).chain(&own);
        assert!(
            all.any(|entry| entry.uuid == self.scene.uuid && entry.path == PATH),
            "the disk has no backend"
        );
        self.count("looked");
    }

    fn expect_kinds(&self, error: &Error, kinds: &[ErrorKind]) {
        assert!(kinds.contains(&error.kind()), "host {}: {error}", self.name.0);
    }
}
