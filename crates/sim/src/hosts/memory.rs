//! A memory that several hosts have mapped, with a cache for each host that is not coherent with the others.
//!
//! Invariants:
//! - a store of a host is seen by others once the host has fenced it; before, any 8-byte word of it may be seen at any moment, since
//!   its caches write lines back when they like;
//! - a host that has loaded a line may see it as it was then, until it [observes](Pmem::observe) the line: caches drop lines when they
//!   like, but need not;
//! - with coherent memory, a load sees what others have fenced, and stores are seen as above;
//! - a host that dies leaves any words of what it had not fenced.
//!
//! Elsewhere: crashes of the whole machine ([`CrashMemory`](crate::CrashMemory)).

use crate::baton;
use crate::crash::crash_now;
use crate::random::Seeded;
use cbd_types::pmem::blocks_of;
use cbd_types::{BootId, CHECKSUM_BLOCK, Durability, MediaError, Pmem};
use parking_lot::{Mutex, MutexGuard};
use std::ops::Range;
use std::sync::Arc;

const LINE: u64 = 64;
const WORD: usize = 8;

/// Lines that a host's caches hold at most.
const CACHED_MAX: usize = 512;

/// The bytes that all hosts share.
#[derive(Clone, Debug)]
pub struct Medium(Arc<Mutex<Vec<u8>>>);

impl Medium {
    /// Blank memory.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self(Arc::new(Mutex::new(vec![0; bytes as usize])))
    }

    /// Memory with these bytes.
    #[must_use]
    pub fn with_bytes(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(bytes)))
    }

    /// A copy of the bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().clone()
    }

    fn line(&self, at: u64) -> Line {
        let mut line = [0; LINE as usize];
        line.copy_from_slice(&self.0.lock()[at as usize..][..LINE as usize]);
        line
    }

    /// Stores those of the words of a line that are dirty and that `keep` names.
    fn write(&self, line: &Cached, mut keep: impl FnMut() -> bool) {
        let mut medium = self.0.lock();
        let into = &mut medium[line.at as usize..][..LINE as usize];
        for (word, (into, from)) in into.chunks_exact_mut(WORD).zip(line.bytes.chunks_exact(WORD)).enumerate()
        {
            let dirty = (line.dirty >> (word * WORD)) as u8;
            if dirty == 0 || !keep() {
                continue;
            }
            if dirty == u8::MAX {
                into.copy_from_slice(from);
                continue;
            }
            for byte in (0..WORD).filter(|byte| dirty >> byte & 1 == 1) {
                into[byte] = from[byte];
            }
        }
    }
}

type Line = [u8; LINE as usize];

/// A line in the caches of a host.
#[derive(Clone, Copy, Debug)]
struct Cached {
    /// Its first byte in the memory.
    at: u64,
    bytes: Line,
    /// A bit for each byte that the host has stored and that is not in the medium.
    dirty: u64,
}

/// The lines that a host has cached, in no order.
#[derive(Debug)]
struct Lines {
    cached: Vec<Cached>,
    /// For each line of the memory its position in `cached`, plus one; 0 if it is not there.
    positions: Vec<u32>,
    dirty: usize,
}

impl Lines {
    fn of(bytes: usize) -> Self {
        let lines = bytes.div_ceil(LINE as usize);
        Self { cached: Vec::with_capacity(CACHED_MAX + 1), positions: vec![0; lines], dirty: 0 }
    }

    fn position(&self, at: u64) -> Option<usize> {
        (self.positions[(at / LINE) as usize] as usize).checked_sub(1)
    }

    fn get(&self, at: u64) -> Option<&Cached> {
        self.position(at).map(|position| &self.cached[position])
    }

    /// Adds a line that is not there, with what is in the medium.
    fn insert(&mut self, at: u64, bytes: Line) -> usize {
        self.cached.push(Cached { at, bytes, dirty: 0 });
        self.positions[(at / LINE) as usize] = self.cached.len() as u32;
        self.cached.len() - 1
    }

    fn set_dirty(&mut self, position: usize, dirty: u64) {
        let line = &mut self.cached[position];
        self.dirty = self.dirty + usize::from(dirty != 0) - usize::from(line.dirty != 0);
        line.dirty = dirty;
    }

    fn remove(&mut self, position: usize) {
        self.set_dirty(position, 0);
        let line = self.cached.swap_remove(position);
        self.positions[(line.at / LINE) as usize] = 0;
        if let Some(moved) = self.cached.get(position) {
            self.positions[(moved.at / LINE) as usize] = position as u32 + 1;
        }
    }
}

#[derive(Debug)]
struct Caches {
    lines: Lines,
    random: Seeded,
    /// Operations until the host dies.
    dies_in: Option<u64>,
    evict_permille: u64,
}

/// The memory as one host sees it. Clones are of the same host.
#[derive(Clone, Debug)]
pub struct HostMemory {
    medium: Medium,
    caches: Arc<Mutex<Caches>>,
    is_coherent: bool,
    boot: BootId,
}

impl HostMemory {
    /// A host that has just mapped the memory.
    #[must_use]
    pub fn new(medium: &Medium, is_coherent: bool, seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        // A store buffer drains at some time by itself, a cache need not.
        let evict_permille = *random.pick(if is_coherent { &[5, 5, 50, 300] } else { &[0, 5, 50, 300] });
        let boot = BootId(std::array::from_fn(|_| random.next() as u8 | 1));
        let lines = Lines::of(medium.0.lock().len());
        let caches = Caches { lines, random, dies_in: None, evict_permille };
        Self { medium: medium.clone(), caches: Arc::new(Mutex::new(caches)), is_coherent, boot }
    }

    /// The same of a process in this boot of the machine.
    #[must_use]
    pub fn in_boot(self, boot: BootId) -> Self {
        Self { boot, ..self }
    }

    /// The host dies at its operation number `operations` from now.
    pub fn die_in(&self, operations: u64) {
        self.caches.lock().dies_in = Some(operations);
    }

    /// The host does not die as was said before.
    pub fn live(&self) {
        self.caches.lock().dies_in = None;
    }

    /// Before each operation: another host may run, a line may be evicted, or this host dies.
    fn step(&self) -> MutexGuard<'_, Caches> {
        baton::may_switch();
        let mut caches = self.caches.lock();
        if let Some(left) = &mut caches.dies_in {
            if *left == 0 {
                caches.dies_in = None;
                self.lose(&mut caches);
                drop(caches);
                crash_now();
            }
            *left -= 1;
        }
        let permille = caches.evict_permille;
        if caches.random.chance(permille) || caches.lines.cached.len() > CACHED_MAX {
            self.evict_one(&mut caches);
        }
        caches
    }

    /// Some words of what was not fenced reach the medium.
    fn lose(&self, caches: &mut Caches) {
        let Caches { lines, random, .. } = caches;
        let kept = *random.pick(&[0, 300, 1000]);
        for line in &lines.cached {
            self.medium.write(line, || random.chance(kept));
        }
        while let Some(last) = lines.cached.len().checked_sub(1) {
            lines.remove(last);
        }
    }

    fn evict_one(&self, caches: &mut Caches) {
        let Caches { lines, random, .. } = caches;
        let position = random.below(lines.cached.len() as u64) as usize;
        let Some(line) = lines.cached.get(position) else { return };
        if line.dirty != 0 && random.chance(500) {
            // A write that is under way: some words are there, and the line is still in the cache.
            self.medium.write(line, || random.chance(500));
        } else {
            self.medium.write(line, || true);
            lines.remove(position);
        }
    }

    fn lines_of(at: u64, length: u64) -> impl Iterator<Item = u64> {
        let first = at / LINE * LINE;
        (first..at + length).step_by(LINE as usize)
    }

    /// The bytes of a line that belong to an access of `length` bytes at `at`, and those of the access.
    fn overlap(line_at: u64, at: u64, length: usize) -> (Range<usize>, Range<usize>) {
        let from = at.max(line_at);
        let end = (at + length as u64).min(line_at + LINE);
        ((from - line_at) as usize..(end - line_at) as usize, (from - at) as usize..(end - at) as usize)
    }

    /// Writes the dirty words of a line to the medium.
    fn clean(&self, caches: &mut Caches, at: u64) {
        let Some(position) = caches.lines.position(at) else { return };
        let line = &caches.lines.cached[position];
        if line.dirty != 0 {
            self.medium.write(line, || true);
        }
        // A store past the caches leaves no copy there; a write-back may.
        if self.is_coherent || caches.random.chance(500) {
            caches.lines.remove(position);
        } else {
            caches.lines.set_dirty(position, 0);
        }
    }
}

impl Pmem for HostMemory {
    fn len(&self) -> u64 {
        self.medium.0.lock().len() as u64
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        let mut caches = self.step();
        for line_at in Self::lines_of(at, from.len() as u64) {
            let lines = &mut caches.lines;
            let position = match lines.position(line_at) {
                Some(position) => position,
                None => lines.insert(line_at, self.medium.line(line_at)),
            };
            let (within, of) = Self::overlap(line_at, at, from.len());
            let stored = u64::MAX >> (LINE as usize - within.len()) << within.start;
            lines.cached[position].bytes[within].copy_from_slice(&from[of]);
            lines.set_dirty(position, lines.cached[position].dirty | stored);
        }
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.store(at, from);
        debug_assert_eq!(checksums.len(), blocks_of(from.len(), first), "one checksum for each block");
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(rest.chunks(CHECKSUM_BLOCK as usize));
        checksums.iter_mut().zip(blocks).for_each(|(sum, block)| *sum = cbd_format::crc32c(block));
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {
        let mut caches = self.step();
        if caches.lines.dirty == 0 {
            return;
        }
        let Caches { lines, random, .. } = &mut *caches;
        let mut dirty: Vec<u64> =
            lines.cached.iter().filter(|line| line.dirty != 0).map(|line| line.at).collect();
        // Lines reach the medium in any order.
        for last in (1..dirty.len()).rev() {
            let other = random.below(last as u64 + 1) as usize;
            dirty.swap(last, other);
        }
        for at in dirty {
            self.clean(&mut caches, at);
            drop(caches);
            caches = self.step();
        }
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        for line_at in Self::lines_of(at, into.len() as u64) {
            let lines = &mut self.step().lines;
            let (within, of) = Self::overlap(line_at, at, into.len());
            let into = &mut into[of];
            match lines.get(line_at) {
                Some(line) if !self.is_coherent || line.dirty == u64::MAX => {
                    into.copy_from_slice(&line.bytes[within]);
                }
                Some(line) => {
                    let fresh = self.medium.line(line_at);
                    for (into, byte) in into.iter_mut().zip(within) {
                        let is_dirty = line.dirty >> byte & 1 == 1;
                        *into = if is_dirty { line.bytes[byte] } else { fresh[byte] };
                    }
                }
                None => {
                    let fresh = self.medium.line(line_at);
                    into.copy_from_slice(&fresh[within]);
                    if !self.is_coherent {
                        lines.insert(line_at, fresh);
                    }
                }
            }
        }
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(cbd_format::crc32c(into))
    }

    fn write_back(&self, at: u64, length: u64) {
        for line in Self::lines_of(at, length) {
            self.clean(&mut self.step(), line);
        }
    }

    fn share(&self, at: u64, from: &[u8]) {
        if self.is_coherent {
            // What was shared before is visible first. This follows at any later moment, as from the store buffer of a processor.
            self.fence();
            return self.store(at, from);
        }
        self.store(at, from);
        self.publish(at, from.len() as u64);
    }

    fn share_summed(&self, at: u64, from: &[u8]) -> u32 {
        self.share(at, from);
        cbd_format::crc32c(from)
    }

    fn observe(&self, at: u64, length: u64) {
        for line in Self::lines_of(at, length) {
            let caches = &mut *self.step();
            if let Some(position) = caches.lines.position(line) {
                self.medium.write(&caches.lines.cached[position], || true);
                caches.lines.remove(position);
            }
        }
    }

    fn boot(&self) -> BootId {
        self.boot
    }

    fn describe(&self) -> String {
        String::from("a memory that hosts share")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(is_coherent: bool) -> (HostMemory, HostMemory) {
        let medium = Medium::new(4096);
        let quiet = |seed| {
            let host = HostMemory::new(&medium, is_coherent, seed);
            host.caches.lock().evict_permille = 0;
            host
        };
        (quiet(1), quiet(2))
    }

    fn byte(host: &HostMemory, at: u64) -> u8 {
        let mut bytes = [0];
        host.load(at, &mut bytes).expect("it does not fail");
        bytes[0]
    }

    #[test]
    fn a_host_sees_what_another_has_published_once_it_observes() {
        let (one, other) = two(false);
        assert_eq!(byte(&other, 100), 0);
        one.store(100, &[7]);
        assert_eq!((byte(&one, 100), byte(&other, 100)), (7, 0));
        one.publish(100, 1);
        assert_eq!(byte(&other, 100), 0, "its caches have the line as it was");
        other.observe(100, 1);
        assert_eq!(byte(&other, 100), 7);
    }

    #[test]
    fn coherent_memory_needs_no_observing() {
        let (one, other) = two(true);
        assert_eq!(byte(&other, 100), 0);
        one.store(100, &[7]);
        assert_eq!(byte(&other, 100), 0);
        one.publish(100, 1);
        assert_eq!(byte(&other, 100), 7);
    }

    #[test]
    fn what_a_host_shares_is_seen_in_the_order_in_which_it_shares_it() {
        let (one, other) = two(true);
        one.share(0, &[1]);
        assert_eq!(byte(&other, 0), 0, "it is in the store buffer");
        one.share(64, &[2]);
        assert_eq!((byte(&other, 0), byte(&other, 64)), (1, 0));
        let (one, other) = two(false);
        one.share(0, &[1]);
        other.observe(0, 1);
        assert_eq!(byte(&other, 0), 1);
    }

    #[test]
    fn two_hosts_that_write_one_line_keep_each_others_words() {
        let (one, other) = two(false);
        one.store(0, &[1; 8]);
        other.store(8, &[2; 8]);
        one.publish(0, 8);
        other.publish(8, 8);
        let (medium, _) = (one.medium.line(0), ());
        assert_eq!((medium[0], medium[8]), (1, 2));
    }

    #[test]
    fn a_host_that_dies_leaves_some_words_of_what_it_had_not_fenced() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..60 {
            let medium = Medium::new(4096);
            let host = HostMemory::new(&medium, false, seed);
            host.caches.lock().evict_permille = 0;
            host.store(0, &[9; 64]);
            host.die_in(0);
            assert!(crate::crash::until_crash(|| host.fence()).is_err());
            let words = medium.line(0).chunks(WORD).filter(|word| word[0] == 9).count();
            seen.insert(words);
        }
        assert!(seen.contains(&0) && seen.contains(&8) && seen.len() > 4, "{seen:?}");
    }
}
