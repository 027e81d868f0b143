//! Several hosts on one shared region, each in a thread, over a memory that is coherent or is not: joining, leaving, dying, coming
//! back, being cleared, and taking rows and groups of segments from each other.
//!
//! Invariants: a seed decides every step of a history. Checked is, whenever any host looks:
//! - no decision has two values;
//! - no object has two users: a host uses one from the end of [`Members::acquire`] until it begins to release it, leaves, or dies;
//! - a host that comes back has what it had, unless it was cleared;
//! - no area has two living hosts, and no name two living hosts, although several machines use one name;
//! - once all processes have ended, a process can become each host;
//! - a host alone always comes to a decision.
//!
//! Elsewhere: the rules (`cbd-engine`, `agreement` and `members`), the memory ([`HostMemory`]).

mod memory;

use crate::baton::{self, TurnLock, together};
use crate::crash::until_crash;
use crate::explorer::{Tally, play_counted};
use crate::random::Seeded;
use cbd_engine::{Environment, Host, Member, Members};
use cbd_format::{Layout, Object, shared::Decided};
use cbd_types::{Error, ErrorKind, HostId, Region, Result};
pub use memory::{HostMemory, Medium};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The name of this kind of world.
pub const NAME: &str = "hosts";

/// Histories of one seed.
const BATCH: u64 = 20;
/// Acts of a process.
const ACTS: u64 = 6;
/// Hosts that the region can have.
const HOSTS: u32 = 3;
/// Processes that act as one host, one after the other.
const LIVES: u64 = 3;
/// Areas that processes may have left that died while they joined, and one more try.
const TRIES: usize = HOSTS as usize + 1;

/// The environment of one process.
#[derive(Debug)]
pub struct HostEnvironment {
    random: Mutex<Seeded>,
    clock_ms: AtomicU64,
}

impl HostEnvironment {
    /// The environment of a process.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { random: Mutex::new(Seeded::new(seed)), clock_ms: AtomicU64::new(seed % (1 << 40)) }
    }
}

impl Environment for HostEnvironment {
    type Memory = HostMemory;
    type Lock = TurnLock;

    fn random(&self) -> u64 {
        self.random.lock().next()
    }

    fn wall_ms(&self) -> u64 {
        self.monotonic_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.clock_ms.fetch_add(1, Ordering::Relaxed)
    }

    fn before_shared_access() {
        baton::may_switch();
    }
}

/// What is true outside of the memory.
#[derive(Default)]
struct Truth {
    /// The processes that live, by their incarnation, with their area.
    living: BTreeMap<u64, HostId>,
    /// The process that has a name.
    names: BTreeMap<String, u64>,
    /// Who uses an object.
    users: BTreeMap<Object, u64>,
    /// All decisions that anybody has seen.
    decided: BTreeMap<(Object, u64), Decided>,
    /// Areas and names of living hosts that a lock of their kernel protects.
    locks: BTreeMap<HostId, u64>,
    counts: BTreeMap<&'static str, u64>,
}

impl Truth {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn see(&mut self, object: Object, decided: Decided) {
        if decided.version > 0 {
            let known = *self.decided.entry((object, decided.version)).or_insert(decided);
            assert_eq!(known, decided, "decision {} on {object:?} has two values", decided.version);
        }
    }

    fn begin_use(&mut self, object: Object, incarnation: u64) {
        let former = self.users.insert(object, incarnation);
        assert!(
            former.is_none_or(|former| former == incarnation),
            "{object:?} is used by incarnation {former:?} and by {incarnation}"
        );
    }

    fn end(&mut self, incarnation: u64) {
        self.living.remove(&incarnation);
        self.names.retain(|_, holder| *holder != incarnation);
        self.users.retain(|_, user| *user != incarnation);
        self.locks.retain(|_, holder| *holder != incarnation);
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

/// A region that is shared by hosts, and as small as possible.
fn layout() -> Layout {
    Layout::shared(1 << 20, 64 << 10, HOSTS, 2, 1).unwrap_or_else(|error| unreachable!("it fits: {error}"))
}

fn play(seed: u64, truth: &Mutex<Truth>) -> std::result::Result<(), String> {
    let mut random = Seeded::new(seed);
    let layout = layout();
    let medium = Medium::new(layout.region_size);
    let is_coherent = random.chance(400);
    // One more than the region can have: it waits until one has left or was cleared.
    let hosts = random.between(2, u64::from(HOSTS) + 1);
    let switch_permille = *random.pick(&[1, 5, 20, 100]);
    let dies_permille = *random.pick(&[0, 100, 400]);
    // With few objects hosts meet often.
    let objects = random.between(1, 4);
    // Machines that use one name by mistake.
    let names = *random.pick(&[hosts, hosts, 1, 2]);
    let process = |number, seed| {
        let name = format!("host{}", number % names);
        Process { number, name, seed, medium: &medium, is_coherent, layout, truth, dies_permille, objects }
    };
    let works = (0..hosts).map(|number| {
        let process = process(number, random.next());
        Box::new(move || process.live()) as Box<dyn FnOnce() + Send + '_>
    });
    let works: Vec<_> = works.collect();
    let ended = together(random.next(), switch_permille, works);
    for outcome in ended {
        outcome.map_err(text_of)?;
    }
    (0..names).try_for_each(|number| {
        let alone = process(number, random.next());
        catch_unwind(AssertUnwindSafe(|| alone.join_alone())).map_err(text_of)
    })
}

pub(crate) fn text_of(payload: Box<dyn std::any::Any + Send>) -> String {
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without a text".to_owned())
}

/// The processes of one machine, one after the other.
struct Process<'a> {
    number: u64,
    name: String,
    seed: u64,
    medium: &'a Medium,
    is_coherent: bool,
    layout: Layout,
    truth: &'a Mutex<Truth>,
    dies_permille: u64,
    objects: u64,
}

impl Process<'_> {
    fn live(self) {
        let mut random = Seeded::new(self.seed);
        for _ in 0..LIVES {
            let memory = HostMemory::new(self.medium, self.is_coherent, random.next());
            let members = self.members(&memory, &mut random);
            if random.chance(self.dies_permille) {
                let most = *random.pick(&[300, 3000, 10_000]);
                memory.die_in(random.below(most));
            }
            let mut joined = None;
            let ended = until_crash(|| self.run(&members, &mut joined, &mut random));
            memory.live();
            let mut truth = self.truth.lock();
            if ended.is_err() {
                truth.count("death");
            }
            if let Some(incarnation) = joined {
                truth.end(incarnation);
            }
            // Locks of a process that died while it joined.
            let thread = u64::MAX - self.number;
            truth.locks.retain(|_, holder| *holder != thread);
        }
    }

    fn members(&self, memory: &HostMemory, random: &mut Seeded) -> Members<HostEnvironment> {
        let environment = Arc::new(HostEnvironment::new(random.next()));
        let region = Arc::new(Region::new(memory.clone()));
        Members::new(environment, region, self.layout).unwrap_or_else(|| unreachable!("the layout is shared"))
    }

    /// Becomes its host, after all other processes have ended: at once, or again where it helped one of them that died while it
    /// joined to its area.
    fn join_alone(&self) {
        let mut random = Seeded::new(self.seed);
        let memory = HostMemory::new(self.medium, self.is_coherent, random.next());
        let members = self.members(&memory, &mut random);
        let mut refused = Vec::new();
        while refused.len() < TRIES {
            match members.join(&self.name, &mut |_, _, _| Ok(())) {
                Ok(member) => {
                    let hosts = must(members.all()).into_iter().filter(|host| !host.is_being_cleared);
                    let own: Vec<_> = hosts.filter(|host| host.name == self.name).collect();
                    assert_eq!(own.len(), 1, "host {} is there once: {own:?}", member.id);
                    return;
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => return,
                Err(error) if error.kind() == ErrorKind::Busy => refused.push(error.line()),
                Err(error) => panic!("{} cannot join alone: {error}", self.name),
            }
        }
        panic!("{} cannot join alone: {refused:?}", self.name);
    }

    /// One process. `joined` is its incarnation once it has one.
    fn run(&self, members: &Members<HostEnvironment>, joined: &mut Option<u64>, random: &mut Seeded) {
        let name = &self.name;
        let member = match members.join(name, &mut |id, host, _| self.prove(id, host)) {
            Ok(member) => member,
            Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::NoSpace) => {
                let at_once = error.to_string().contains("at the same time, with number");
                self.truth.lock().count(if at_once { "joined_at_once" } else { "join_refused" });
                return;
            }
            Err(error) => panic!("{name} cannot join: {error}"),
        };
        *joined = Some(member.incarnation);
        self.note_join(members, &member);
        for number in 0..ACTS {
            members.beat(&member, number + 1, 1);
            match self.act(members, &member, random) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) if error.kind() == ErrorKind::Busy => self.truth.lock().count("busy"),
                Err(error) => panic!("host {}: {error}", member.id),
            }
        }
    }

    /// As the lock of a kernel that all processes share: a host that lives has it, and one that joins takes it.
    fn prove(&self, id: HostId, host: Option<&Host>) -> Result<()> {
        let mut truth = self.truth.lock();
        if let Some(host) = host
            && truth.living.contains_key(&host.incarnation)
        {
            return Err(Error::new(ErrorKind::Busy, "it lives"));
        }
        let thread = u64::MAX - self.number;
        match truth.locks.get(&id) {
            Some(holder) if *holder != thread => Err(Error::new(ErrorKind::Busy, "another process has it")),
            _ => {
                truth.locks.insert(id, thread);
                Ok(())
            }
        }
    }

    fn note_join(&self, members: &Members<HostEnvironment>, member: &Member) {
        let mut truth = self.truth.lock();
        truth.count("join");
        let thread = u64::MAX - self.number;
        truth.locks.retain(|id, holder| *id == member.id || *holder != thread);
        truth.locks.insert(member.id, member.incarnation);
        let other = truth.living.values().any(|id| *id == member.id);
        assert!(!other, "area {} has two hosts", member.id);
        truth.living.insert(member.incarnation, member.id);
        let former = truth.names.insert(member.name.clone(), member.incarnation);
        assert_eq!(former, None, "{} is the name of two living hosts", member.name);
        drop(truth);
        // What the host had before is its own again.
        for object in self.objects() {
            let decided = must(members.decided(object));
            let mut truth = self.truth.lock();
            truth.see(object, decided);
            if decided.holding.is_of(member.id.0) {
                truth.count("had_it_before");
                truth.begin_use(object, member.incarnation);
            }
        }
    }

    fn objects(&self) -> impl Iterator<Item = Object> + use<> {
        (0..self.objects).map(|number| match number {
            0 => Object::Group(0),
            1 => Object::Backend(1),
            2 => Object::Blkdev(0),
            _ => Object::Group(1),
        })
    }

    /// One act. `false` if the process has ended.
    fn act(&self, members: &Members<HostEnvironment>, member: &Member, random: &mut Seeded) -> Result<bool> {
        let objects: Vec<Object> = self.objects().collect();
        let object = *random.pick(&objects);
        match random.below(100) {
            0..60 => {
                if members.acquire(member, object)? {
                    let mut truth = self.truth.lock();
                    truth.count("acquired");
                    truth.begin_use(object, member.incarnation);
                } else {
                    self.truth.lock().count("not_acquired");
                }
            }
            60..85 => {
                let mut truth = self.truth.lock();
                if truth.users.get(&object) == Some(&member.incarnation) {
                    truth.users.remove(&object);
                }
                drop(truth);
                members.release(member, object)?;
                self.truth.lock().count("released");
            }
            85..90 => {
                let mut truth = self.truth.lock();
                truth.users.retain(|_, user| *user != member.incarnation);
                truth.names.remove(&member.name);
                drop(truth);
                members.leave(member)?;
                self.truth.lock().count("left");
                return Ok(false);
            }
            90..96 => self.clear_one(members, member)?,
            _ => self.look(members)?,
        }
        Ok(true)
    }

    /// Clears a host whose process is dead.
    fn clear_one(&self, members: &Members<HostEnvironment>, member: &Member) -> Result<()> {
        let dead = |host: &Host| !self.truth.lock().living.contains_key(&host.incarnation);
        let Some(host) = members.all()?.into_iter().find(dead) else { return Ok(()) };
        let cleared = members.clear(&host, member, &mut |id, host, _| self.prove(id, host));
        let thread = u64::MAX - self.number;
        self.truth.lock().locks.retain(|_, holder| *holder != thread);
        match cleared {
            Err(error) => Err(error),
            Ok(()) => {
                self.truth.lock().count("cleared");
                Ok(())
            }
        }
    }

    fn look(&self, members: &Members<HostEnvironment>) -> Result<()> {
        for object in self.objects().chain((0..HOSTS).map(Object::Area)) {
            let decided = members.decided(object)?;
            self.truth.lock().see(object, decided);
        }
        Ok(())
    }
}

pub(crate) fn must<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
