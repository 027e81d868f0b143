//! A persistent memory that can crash at any store and keeps any legal subset of what was not fenced.
//!
//! Always true here:
//! - what an actor stored and fenced is durable; what it stored since then survives a power cut in any subset
//!   of its 8-byte words, each word holding one of the values that it was given, never an invented one;
//! - a process crash loses nothing that was stored, but what was not fenced stays volatile: a power cut may still
//!   take it, until somebody writes the line back, or stores it again, and fences;
//! - after a crash the old handle is dead: its stores do nothing, so an abandoned engine can be dropped.
//!
//! Left to others: what to crash and when (the tests), and what must be found afterwards ([`crate::Oracle`]).

use crate::actor::{self, Actor, GHOST};
use crate::crash::crash_now;
use crate::random::Seeded;
use cbd_types::pmem::blocks_of;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Durability, MediaError, Pmem};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

const LINE: u64 = 64;
const WORD: u64 = 8;

/// What a power cut keeps of the stores that no fence has followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// Nothing.
    Nothing,
    /// All of it.
    Everything,
    /// Each store whole, not at all, or torn at words, by chance.
    Random,
    /// What was stored first, up to a word by chance.
    Prefix,
    /// One of the four, by chance.
    Any,
}

/// What was asked of a memory since it was made.
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
    /// Loads that reached bytes which their actor had not fenced: whoever answers from them answers with what a
    /// power cut can take back.
    pub loads_of_unfenced: u64,
    /// Stores to bytes that another living actor had not fenced: nothing says which of the two will stay.
    pub stores_over_unfenced: u64,
}

#[derive(Clone, Debug)]
struct Pending {
    at: u64,
    bytes: Vec<u8>,
    actor: Actor,
}

impl Pending {
    fn range(&self) -> ByteRange {
        ByteRange::at(self.at, self.bytes.len() as u64)
    }

    /// What is left of the store when `newer` has taken its bytes away.
    fn without(self, newer: ByteRange) -> Vec<Self> {
        let own = self.range();
        let Some(both) = own.intersection(&newer) else {
            return vec![self];
        };
        [ByteRange { start: own.start, end: both.start }, ByteRange { start: both.end, end: own.end }]
            .into_iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| Self {
                at: piece.start,
                bytes: self.bytes[(piece.start - own.start) as usize..(piece.end - own.start) as usize]
                    .to_vec(),
                actor: self.actor,
            })
            .collect()
    }
}

#[derive(Clone)]
struct State {
    /// What a running program sees.
    visible: Vec<u8>,
    /// What a power cut leaves at least; differs from `visible` only where something is pending.
    durable: Vec<u8>,
    /// In the order of the stores.
    pending: Vec<Pending>,
    poisoned: BTreeSet<u64>,
    events: u64,
    crash_at: Option<u64>,
    tear: Seeded,
    dead: bool,
    counters: MemoryCounters,
}

/// The memory; clones share it.
#[derive(Clone)]
pub struct CrashMemory {
    state: Arc<Mutex<State>>,
    length: u64,
}

impl std::fmt::Debug for CrashMemory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.lock();
        out.debug_struct("CrashMemory")
            .field("length", &self.length)
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
        Self::from_image(vec![0; length as usize])
    }

    /// A memory that holds `image`, all of it durable.
    #[must_use]
    pub fn from_image(image: Vec<u8>) -> Self {
        Self::from_state(State {
            durable: image.clone(),
            visible: image,
            pending: Vec::new(),
            poisoned: BTreeSet::new(),
            events: 0,
            crash_at: None,
            tear: Seeded::new(0),
            dead: false,
            counters: MemoryCounters::default(),
        })
    }

    fn from_state(state: State) -> Self {
        Self { length: state.visible.len() as u64, state: Arc::new(Mutex::new(state)) }
    }

    /// The process crashes during the `count`-th store, write-back or fence from now (1 is the next): a store is
    /// done in part, as `seed` says, a fence not at all.
    pub fn crash_after(&self, count: u64, seed: u64) {
        let mut state = self.state.lock();
        state.crash_at = Some(state.events + count.max(1));
        state.tear = Seeded::new(seed);
    }

    /// The process does not crash by itself any more.
    pub fn never_crash(&self) {
        self.state.lock().crash_at = None;
    }

    /// Stores, fences, and write-backs that had something to do, so far: the places at which [`crash_after`](Self::crash_after) can crash.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.state.lock().events
    }

    /// What was asked of this memory so far.
    #[must_use]
    pub fn counters(&self) -> MemoryCounters {
        self.state.lock().counters
    }

    /// Whether the process that used this handle has crashed.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.state.lock().dead
    }

    /// A copy of the whole memory as it is, dead or alive, with everything that is pending: for trying several
    /// ends of one history.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self::from_state(self.state.lock().clone())
    }

    /// Cuts the power: what remains is a memory that holds what was durable and what `keep` and `seed` choose of
    /// the rest. This handle and all its clones are dead.
    #[must_use]
    pub fn power_cut(&self, seed: u64, keep: Keep) -> Self {
        let mut next = self.take();
        let pending = std::mem::take(&mut next.pending);
        choose(&mut next.durable, &pending, keep, &mut Seeded::new(seed));
        for store in &pending {
            let (from, to) = (store.at as usize, store.at as usize + store.bytes.len());
            next.visible[from..to].copy_from_slice(&next.durable[from..to]);
        }
        Self::from_state(next)
    }

    /// Kills the process: all that it stored is seen by the next one, but what it did not fence can still be lost
    /// by a power cut. This handle and all its clones are dead.
    #[must_use]
    pub fn process_crash(&self) -> Self {
        let mut next = self.take();
        for store in &mut next.pending {
            store.actor = GHOST;
        }
        Self::from_state(next)
    }

    /// Takes the contents for a successor and leaves a dead, empty memory behind.
    fn take(&self) -> State {
        let mut state = self.state.lock();
        let next = State {
            visible: std::mem::take(&mut state.visible),
            durable: std::mem::take(&mut state.durable),
            pending: std::mem::take(&mut state.pending),
            poisoned: std::mem::take(&mut state.poisoned),
            events: 0,
            crash_at: None,
            tear: Seeded::new(0),
            dead: false,
            counters: MemoryCounters::default(),
        };
        state.dead = true;
        next
    }

    /// What a running program sees.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().visible.clone()
    }

    /// Number of bytes that a power cut could still take.
    #[must_use]
    pub fn unfenced_bytes(&self) -> u64 {
        self.state.lock().pending.iter().map(|store| store.bytes.len() as u64).sum()
    }

    /// Every load that touches one of these lines fails until the line is stored whole.
    pub fn poison(&self, range: ByteRange) {
        let mut state = self.state.lock();
        state.poisoned.extend(range.start / LINE..range.end.div_ceil(LINE));
    }

    /// Flips bit `bit` of the byte at `at`, for good.
    pub fn flip(&self, at: u64, bit: u32) {
        let mut state = self.state.lock();
        let mask = 1 << (bit % 8);
        state.visible[at as usize] ^= mask;
        state.durable[at as usize] ^= mask;
        for store in &mut state.pending {
            if let Some(byte) = at.checked_sub(store.at).and_then(|from| store.bytes.get_mut(from as usize)) {
                *byte ^= mask;
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
            at.checked_add(from.len() as u64).is_some_and(|end| end <= self.length),
            "a store of {} bytes at {at} reaches outside a region of {} bytes",
            from.len(),
            self.length
        );
        let mut state = self.state.lock();
        if state.dead {
            return;
        }
        if Self::event(&mut state) {
            let mut tear = state.tear.clone();
            for piece in torn(ByteRange::at(at, from.len() as u64), &mut tear) {
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
    fn store(&mut self, at: u64, from: &[u8]) {
        let range = ByteRange::at(at, from.len() as u64);
        let actor = actor::current();
        let foreign = |store: &Pending| store.actor != actor && store.actor != GHOST;
        if self.pending.iter().any(|store| foreign(store) && store.range().overlaps(&range)) {
            self.counters.stores_over_unfenced += 1;
        }
        self.visible[at as usize..range.end as usize].copy_from_slice(from);
        if !self.poisoned.is_empty() {
            for line in at.div_ceil(LINE)..range.end / LINE {
                self.poisoned.remove(&line);
            }
        }
        self.pending.push(Pending { at, bytes: from.to_vec(), actor });
    }

    /// What `actor` stored is durable; an older store of another to the same bytes can't come after it.
    fn fence(&mut self, actor: Actor) {
        let mut rest: Vec<Pending> = Vec::new();
        for store in std::mem::take(&mut self.pending) {
            if store.actor != actor {
                rest.push(store);
                continue;
            }
            let range = store.range();
            self.durable[range.start as usize..range.end as usize].copy_from_slice(&store.bytes);
            if rest.iter().any(|older| older.range().overlaps(&range)) {
                rest = rest.into_iter().flat_map(|older| older.without(range)).collect();
            }
        }
        self.pending = rest;
    }

    fn load(&mut self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        if self.dead && self.visible.is_empty() {
            return Err(MediaError { at });
        }
        let range = ByteRange::at(at, into.len() as u64);
        if range.end > self.visible.len() as u64 {
            return Err(MediaError { at });
        }
        if let Some(&line) = self.poisoned.range(at / LINE..range.end.div_ceil(LINE)).next() {
            return Err(MediaError { at: (line * LINE).max(at) });
        }
        if self.pending.iter().any(|store| store.actor != GHOST && store.range().overlaps(&range)) {
            self.counters.loads_of_unfenced += 1;
        }
        into.copy_from_slice(&self.visible[at as usize..range.end as usize]);
        Ok(())
    }
}

impl Pmem for CrashMemory {
    fn len(&self) -> u64 {
        self.length
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.put(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, sums: &mut [u32]) {
        assert_eq!(sums.len(), blocks_of(from.len(), first), "one sum for each checksum block");
        let (head, tail) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(tail.chunks(CHECKSUM_BLOCK as usize));
        for (sum, block) in sums.iter_mut().zip(blocks) {
            *sum = crc_fast::crc32_iscsi(block);
        }
        self.put(at, from);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        assert_eq!(at % LINE, 0, "a line begins at a multiple of {LINE}");
        self.put(at, line);
    }

    fn fence(&self) {
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
        // Only lines that hold something pending change their fate: they are as if stored again.
        let range = ByteRange { start: at / LINE * LINE, end: (at + length).div_ceil(LINE) * LINE };
        let range = ByteRange { end: range.end.min(self.length), ..range };
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
            let end = ((line + 1) * LINE).min(self.length);
            let bytes = state.visible[(line * LINE) as usize..end as usize].to_vec();
            state.pending.push(Pending { at: line * LINE, bytes, actor: actor::current() });
        }
    }

    fn describe(&self) -> String {
        String::from("simulated memory")
    }
}

/// The parts of a store that are done when it is cut short, in whole words.
fn torn(range: ByteRange, random: &mut Seeded) -> Vec<ByteRange> {
    let words: Vec<ByteRange> = range.split_at_multiples(WORD).collect();
    match random.below(4) {
        0 => Vec::new(),
        1 => vec![range],
        2 => words[..random.below(words.len() as u64 + 1) as usize].to_vec(),
        _ => words.into_iter().filter(|_| random.chance(500)).collect(),
    }
}

/// Applies to `durable` what a power cut keeps of `pending`.
fn choose(durable: &mut [u8], pending: &[Pending], keep: Keep, random: &mut Seeded) {
    let keep = match keep {
        Keep::Any => {
            *random.pick(&[Keep::Nothing, Keep::Everything, Keep::Random, Keep::Random, Keep::Prefix])
        }
        chosen => chosen,
    };
    let mut apply = |store: &Pending, piece: ByteRange| {
        let bytes = &store.bytes[(piece.start - store.at) as usize..(piece.end - store.at) as usize];
        durable[piece.start as usize..piece.end as usize].copy_from_slice(bytes);
    };
    match keep {
        Keep::Nothing | Keep::Any => {}
        Keep::Everything => pending.iter().for_each(|store| apply(store, store.range())),
        Keep::Random => {
            for store in pending {
                torn(store.range(), random).into_iter().for_each(|piece| apply(store, piece));
            }
        }
        Keep::Prefix => {
            let whole = random.below(pending.len() as u64 + 1) as usize;
            pending[..whole].iter().for_each(|store| apply(store, store.range()));
            if let Some(store) = pending.get(whole) {
                let words: Vec<ByteRange> = store.range().split_at_multiples(WORD).collect();
                let kept = random.below(words.len() as u64) as usize;
                words[..kept].iter().for_each(|&piece| apply(store, piece));
            }
        }
    }
}

#[cfg(test)]
mod tests;
