//! A persistent memory that can crash at any store, and that keeps any legal subset of the stores that were not
//! fenced.
//!
//! Invariants:
//! - stores that their actor has fenced are durable; of the later stores, a power cut keeps any subset of the 8-byte
//!   words (of the lines, if the memory promises that), each with one of the values that were stored there;
//! - a process crash loses no store, but stores that were not fenced stay volatile: a power cut may still lose them,
//!   until a thread writes the line back or stores it again, and fences;
//! - if the processor's caches are persistent, a store is durable when it completes;
//! - after a crash the old handle is dead: its stores have no effect, so an abandoned engine can be dropped.
//!
//! Elsewhere: where and when to crash (the tests, and the explorer, which tries every state that a moment can leave),
//! and the expected contents afterwards ([`crate::Oracle`]).

mod lines;
mod machine;
mod pages;
mod pending;
mod sources;

use crate::actor::{self, GHOST};
use crate::baton;
use crate::crash::crash_now;
use crate::random::Seeded;
use cbd_types::pmem::blocks_of;
use cbd_types::{BootId, ByteRange, CHECKSUM_BLOCK, Durability, MediaError, Pmem};
pub use lines::{Line, OpenLine};
use pages::Pages;
use parking_lot::Mutex;
use pending::{Pending, choose, torn};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const LINE: u64 = 64;
const WORD: u64 = 8;

/// Which of the stores that no fence has followed survive a power cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// None of them.
    Nothing,
    /// All of them.
    Everything,
    /// Each store whole, not at all, or torn at words, at random.
    Random,
    /// The first stores, up to a random word.
    Prefix,
    /// One of the four rules above, at random.
    Any,
}

/// The guarantees of a memory beyond the contract.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum MemoryKind {
    /// None: only 8 bytes are atomic.
    #[default]
    Ordinary,
    /// A line of 64 bytes is stored whole or not at all.
    WholeLines,
    /// The processor's caches survive a power cut (eADR): every completed store is durable.
    PersistentCaches,
}

/// Counts of the operations on a memory since it was created.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MemoryCounters {
    /// Stores of any kind.
    pub stores: u64,
    /// Bytes stored.
    pub stored_bytes: u64,
    /// Fences.
    pub fences: u64,
    /// Write-backs.
    pub write_backs: u64,
    /// Loads of bytes that their actor had not fenced: an answer that is derived from them depends on bytes that a
    /// power cut can revert.
    pub loads_of_unfenced: u64,
    /// Stores to bytes that another living actor had not fenced: which of the two values remains is undefined.
    pub stores_over_unfenced: u64,
}

/// Called with a copy of the memory at a chosen moment.
type Witness = Box<dyn FnMut(CrashMemory) + Send>;

/// The witness, and the moments at which it is called.
struct Watch {
    witness: Witness,
    stores_permille: u64,
    random: Seeded,
}

struct State {
    /// The content that a running program loads.
    visible: Pages,
    /// The content that certainly survives a power cut; it differs from `visible` only in pending bytes.
    durable: Pages,
    /// Pending stores in the order of execution.
    pending: Vec<Pending>,
    poisoned: BTreeSet<u64>,
    kind: MemoryKind,
    events: u64,
    crash_at: Option<u64>,
    tear: Seeded,
    /// Chooses the sectors that clients change.
    random_sources: Seeded,
    dead: bool,
    counters: MemoryCounters,
    /// Writes whose clients change their buffers during the copy.
    fickle: BTreeSet<u64>,
    /// For each line whether it was loaded, while loads are traced.
    loaded: Option<Vec<bool>>,
    /// The part of the memory that is on a disk, if the memory is an ordinary file.
    file: Option<machine::File>,
}

/// The memory; clones share it.
#[derive(Clone)]
pub struct CrashMemory {
    state: Arc<Mutex<State>>,
    /// Separate from the state, so that a witness can use the memory freely.
    watch: Arc<Mutex<Option<Watch>>>,
    /// Raised when the memory becomes larger.
    length: Arc<AtomicU64>,
}

impl std::fmt::Debug for CrashMemory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        out.debug_struct("CrashMemory")
            .field("length", &self.len())
            .field("events", &state.events)
            .field("pending", &state.pending.len())
            .field("dead", &state.dead)
            .finish_non_exhaustive()
    }
}

impl CrashMemory {
    /// A memory of `length` zero bytes.
    #[must_use]
    pub fn new(length: u64) -> Self {
        Self::from_state(State::new(length))
    }

    /// A memory that holds `image`, all of it durable.
    #[must_use]
    pub fn from_image(image: Vec<u8>) -> Self {
        let pages = Pages::from_bytes(&image);
        Self::from_state(State { durable: pages.clone(), visible: pages, ..State::new(0) })
    }

    fn from_state(state: State) -> Self {
        Self {
            length: Arc::new(AtomicU64::new(state.visible.len())),
            state: Arc::new(Mutex::new(state)),
            watch: Arc::new(Mutex::new(None)),
        }
    }

    /// Makes the memory larger by `bytes`, which are durable, as a file that is extended while it is mapped.
    pub fn extend(&self, bytes: &[u8]) {
        let mut state = self.state.lock();
        let State { visible, durable, file, .. } = &mut *state;
        for pages in [visible, durable].into_iter().chain(file.as_mut().map(machine::File::disk)) {
            pages.extend(bytes);
        }
        self.length.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }

    /// Sets the kind of the memory; the kind persists across crashes.
    pub fn set_kind(&self, kind: MemoryKind) {
        self.state.lock().kind = kind;
    }

    /// Calls `witness` with a copy of the memory before every fence that covers stores takes effect, and before a
    /// random `stores_permille` of a thousand stores.
    pub fn watch(&self, stores_permille: u64, seed: u64, witness: impl FnMut(Self) + Send + 'static) {
        let witness = Box::new(witness);
        *self.watch.lock() = Some(Watch { witness, stores_permille, random: Seeded::new(seed) });
    }

    /// Stops the calls of the witness.
    pub fn unwatch(&self) {
        *self.watch.lock() = None;
    }

    /// A moment at which the witness may be called.
    fn show(&self, is_fence: bool) {
        baton::may_switch();
        let mut watch = self.watch.lock();
        let Some(watch) = watch.as_mut() else { return };
        if is_fence || watch.random.chance(watch.stores_permille) {
            let state = self.state.lock();
            let is_open = !state.pending.is_empty() || state.kind == MemoryKind::PersistentCaches;
            if !state.dead && is_open {
                let copy = Self::from_state(state.copy());
                drop(state);
                (watch.witness)(copy);
            }
        }
    }

    /// Crashes the process in the `count`-th store, write-back or fence from now (1 is the next). A store then takes effect in
    /// part, as `seed` decides; a fence has no effect.
    pub fn crash_after(&self, count: u64, seed: u64) {
        let mut state = self.state.lock();
        state.crash_at = Some(state.events + count.max(1));
        state.tear = Seeded::new(seed);
    }

    /// Removes a crash that was set up.
    pub fn never_crash(&self) {
        self.state.lock().crash_at = None;
    }

    /// The number of stores, fences, and effective write-backs: the events in which [`crash_after`](Self::crash_after) can crash.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.state.lock().events
    }

    /// The operations on this memory so far.
    #[must_use]
    pub fn counters(&self) -> MemoryCounters {
        self.state.lock().counters
    }

    /// Whether the process that used this handle has crashed.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.state.lock().dead
    }

    /// A copy of the whole memory in its present state, dead or alive, with all pending stores, to try several ends
    /// of one history. It costs microseconds: pages are shared until one side changes them.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self::from_state(self.state.lock().copy())
    }

    /// Cuts the power. The result is a memory with the durable content and the part of the pending stores that `keep`
    /// and `seed` choose. This handle and all its clones are dead afterwards.
    #[must_use]
    pub fn power_cut(&self, seed: u64, keep: Keep) -> Self {
        let mut next = self.take();
        let pending = std::mem::take(&mut next.pending);
        let unit = next.unit();
        choose(&mut next.durable, &pending, unit, keep, &mut Seeded::new(seed));
        next.visible = next.durable.clone();
        Self::from_state(next)
    }

    /// Kills the process. The next process sees all its stores, but a power cut can still lose those that it did not
    /// fence. This handle and all its clones are dead afterwards.
    #[must_use]
    pub fn process_crash(&self) -> Self {
        let mut next = self.take();
        for store in &mut next.pending {
            store.actor = GHOST;
        }
        Self::from_state(next)
    }

    /// Moves the contents into a successor and leaves a dead, empty memory.
    fn take(&self) -> State {
        let mut state = self.state.lock();
        let next = State {
            kind: state.kind,
            visible: std::mem::replace(&mut state.visible, Pages::zeroes(0)),
            durable: std::mem::replace(&mut state.durable, Pages::zeroes(0)),
            pending: std::mem::take(&mut state.pending),
            poisoned: std::mem::take(&mut state.poisoned),
            file: state.file.take(),
            ..State::new(0)
        };
        state.dead = true;
        next
    }

    /// The content that a running program loads.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().visible.to_vec()
    }

    /// Makes every load of one of these lines fail until the line is stored whole.
    pub fn poison(&self, range: ByteRange) {
        let mut state = self.state.lock();
        state.poisoned.extend(range.start / LINE..range.end.div_ceil(LINE));
    }

    /// Flips bit `bit` of the byte at `at`, permanently.
    pub fn flip(&self, at: u64, bit: u32) {
        let mut state = self.state.lock();
        let mask = 1 << (bit % 8);
        let State { visible, durable, pending, .. } = &mut *state;
        for pages in [visible, durable] {
            let mut byte = [0];
            pages.read(at, &mut byte);
            pages.write(at, &[byte[0] ^ mask]);
        }
        for store in pending {
            if store.range().contains(&ByteRange::at(at, 1)) {
                let mut bytes = store.bytes.to_vec();
                bytes[(at - store.at) as usize] ^= mask;
                store.bytes = bytes.into();
            }
        }
    }

    /// Counts one event; true when the process crashes in it.
    fn event(state: &mut State) -> bool {
        state.events += 1;
        state.crash_at.is_some_and(|at| state.events >= at)
    }

    fn put(&self, at: u64, from: &[u8]) {
        assert!(
            at.checked_add(from.len() as u64).is_some_and(|end| end <= self.len()),
            "a store of {} bytes at {at} reaches outside a region of {} bytes",
            from.len(),
            self.len()
        );
        self.show(false);
        let mut state = self.state.lock();
        if state.dead {
            return;
        }
        if Self::event(&mut state) {
            let mut tear = state.tear.clone();
            for piece in torn(ByteRange::at(at, from.len() as u64), state.unit(), &mut tear) {
                state.store(piece.start, &from[(piece.start - at) as usize..(piece.end - at) as usize]);
            }
            state.dead = true;
            drop(state);
            crash_now();
        }
        state.counters.stores += 1;
        state.counters.stored_bytes += from.len() as u64;
        state.store(at, from);
    }
}

impl State {
    fn new(length: u64) -> Self {
        Self {
            visible: Pages::zeroes(length),
            durable: Pages::zeroes(length),
            pending: Vec::new(),
            poisoned: BTreeSet::new(),
            kind: MemoryKind::Ordinary,
            events: 0,
            crash_at: None,
            tear: Seeded::new(0),
            random_sources: Seeded::new(0),
            dead: false,
            counters: MemoryCounters::default(),
            fickle: BTreeSet::new(),
            loaded: None,
            file: None,
        }
    }

    fn copy(&self) -> Self {
        Self {
            visible: self.visible.clone(),
            durable: self.durable.clone(),
            pending: self.pending.clone(),
            poisoned: self.poisoned.clone(),
            tear: self.tear.clone(),
            random_sources: self.random_sources.clone(),
            fickle: BTreeSet::new(),
            loaded: None,
            file: self.file.clone(),
            ..*self
        }
    }

    /// The size of an atomic store.
    const fn unit(&self) -> u64 {
        match self.kind {
            MemoryKind::Ordinary | MemoryKind::PersistentCaches => WORD,
            MemoryKind::WholeLines => LINE,
        }
    }

    fn store(&mut self, at: u64, from: &[u8]) {
        let range = ByteRange::at(at, from.len() as u64);
        let actor = actor::current();
        let foreign = |store: &Pending| store.actor != actor && store.actor != GHOST;
        if self.pending.iter().any(|store| foreign(store) && store.range().overlaps(&range)) {
            self.counters.stores_over_unfenced += 1;
        }
        self.visible.write(at, from);
        if let Some(file) = &mut self.file {
            file.touch(at, from.len() as u64);
        }
        if !self.poisoned.is_empty() {
            for line in at.div_ceil(LINE)..range.end / LINE {
                self.poisoned.remove(&line);
            }
        }
        if self.kind == MemoryKind::PersistentCaches {
            self.durable.write(at, from);
        } else {
            self.pending.push(Pending { at, bytes: from.into(), actor });
        }
    }

    /// Makes the stores of `actor` durable; an older store of another actor to the same bytes cannot take
    /// effect afterwards.
    fn fence(&mut self, actor: actor::Actor) {
        let mut rest: Vec<Pending> = Vec::new();
        for store in std::mem::take(&mut self.pending) {
            if store.actor != actor {
                rest.push(store);
                continue;
            }
            let range = store.range();
            self.durable.write(range.start, &store.bytes);
            if rest.iter().any(|older| older.range().overlaps(&range)) {
                rest = rest.into_iter().flat_map(|older| older.without(range)).collect();
            }
        }
        self.pending = rest;
    }

    fn load(&mut self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        if self.dead && self.visible.len() == 0 {
            return Err(MediaError { at });
        }
        let range = ByteRange::at(at, into.len() as u64);
        if range.end > self.visible.len() {
            return Err(MediaError { at });
        }
        if let Some(loaded) = &mut self.loaded {
            loaded[(at / LINE) as usize..range.end.div_ceil(LINE) as usize].fill(true);
        }
        if let Some(&line) = self.poisoned.range(at / LINE..range.end.div_ceil(LINE)).next() {
            return Err(MediaError { at: (line * LINE).max(at) });
        }
        if self.pending.iter().any(|store| store.actor != GHOST && store.range().overlaps(&range)) {
            self.counters.loads_of_unfenced += 1;
        }
        self.visible.read(at, into);
        Ok(())
    }
}

impl Pmem for CrashMemory {
    fn len(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    fn durability(&self) -> Durability {
        if self.mixes_pages() { Durability::ProcessCrash } else { Durability::PowerFail }
    }

    fn boot(&self) -> BootId {
        self.boot_of_file().unwrap_or_default()
    }

    fn mixes_pages(&self) -> bool {
        self.boot_of_file().is_some()
    }

    fn sync(&self, at: u64, length: u64) -> cbd_types::Result<()> {
        self.sync_file(at, length)
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.put(at, &self.load_source(from));
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        assert_eq!(checksums.len(), blocks_of(from.len(), first), "one checksum for each checksum block");
        let from = &*self.load_source(from);
        let (head, tail) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(tail.chunks(CHECKSUM_BLOCK as usize));
        for (sum, block) in checksums.iter_mut().zip(blocks) {
            *sum = crc_fast::crc32_iscsi(block);
        }
        self.put(at, from);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        assert_eq!(at % LINE, 0, "a line begins at a multiple of {LINE}");
        self.put(at, line);
    }

    fn fence(&self) {
        self.show(true);
        let mut state = self.state.lock();
        if state.dead {
            return;
        }
        if Self::event(&mut state) {
            state.dead = true;
            drop(state);
            crash_now();
        }
        state.counters.fences += 1;
        state.fence(actor::current());
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.state.lock().load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(crc_fast::crc32_iscsi(into))
    }

    fn write_back(&self, at: u64, length: u64) {
        let mut state = self.state.lock();
        if state.dead {
            return;
        }
        state.counters.write_backs += 1;
        // A write-back affects only lines with pending stores: they are as if stored again.
        let range = ByteRange { start: at / LINE * LINE, end: (at + length).div_ceil(LINE) * LINE };
        let range = ByteRange { end: range.end.min(self.len()), ..range };
        let lines: BTreeSet<u64> = state
            .pending
            .iter()
            .filter_map(|store| store.range().intersection(&range))
            .flat_map(|both| both.start / LINE..both.end.div_ceil(LINE))
            .collect();
        if lines.is_empty() {
            return;
        }
        if Self::event(&mut state) {
            state.dead = true;
            drop(state);
            crash_now();
        }
        for line in lines {
            let end = ((line + 1) * LINE).min(self.len());
            let mut bytes = vec![0; (end - line * LINE) as usize];
            state.visible.read(line * LINE, &mut bytes);
            state.pending.push(Pending { at: line * LINE, bytes: bytes.into(), actor: actor::current() });
        }
    }

    fn describe(&self) -> String {
        String::from("simulated memory")
    }
}

#[cfg(test)]
mod tests;
