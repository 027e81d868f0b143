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
use parking_lot::Mutex;
use std::collections::BTreeMap;
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

    fn line(&self, at: u64) -> [u8; LINE as usize] {
        let mut line = [0; LINE as usize];
        line.copy_from_slice(&self.0.lock()[at as usize..][..LINE as usize]);
        line
    }

    /// Stores those of the words of a line that are dirty and that `keep` names.
    fn write(&self, at: u64, line: &Cached, mut keep: impl FnMut() -> bool) {
        let mut medium = self.0.lock();
        for word in 0..LINE as usize / WORD {
            let bytes = word * WORD..(word + 1) * WORD;
            if !line.dirty[bytes.clone()].contains(&true) || !keep() {
                continue;
            }
            for byte in bytes.filter(|byte| line.dirty[*byte]) {
                medium[at as usize + byte] = line.bytes[byte];
            }
        }
    }
}

/// A line in the caches of a host.
#[derive(Clone, Copy, Debug)]
struct Cached {
    bytes: [u8; LINE as usize],
    dirty: [bool; LINE as usize],
}

impl Cached {
    fn is_dirty(&self) -> bool {
        self.dirty.contains(&true)
    }
}

#[derive(Debug)]
struct Caches {
    lines: BTreeMap<u64, Cached>,
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
        let evict_permille = *random.pick(&[0, 5, 50, 300]);
        let boot = BootId(std::array::from_fn(|_| random.next() as u8 | 1));
        let caches = Caches { lines: BTreeMap::new(), random, dies_in: None, evict_permille };
        Self { medium: medium.clone(), caches: Arc::new(Mutex::new(caches)), is_coherent, boot }
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
    fn step(&self) {
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
        if caches.random.chance(permille) || caches.lines.len() > CACHED_MAX {
            self.evict_one(&mut caches);
        }
    }

    /// Some words of what was not fenced reach the medium.
    fn lose(&self, caches: &mut Caches) {
        let kept = *caches.random.pick(&[0, 300, 1000]);
        let lines = std::mem::take(&mut caches.lines);
        for (at, line) in lines {
            self.medium.write(at, &line, || caches.random.chance(kept));
        }
    }

    fn evict_one(&self, caches: &mut Caches) {
        let from = caches.random.below(self.medium.0.lock().len() as u64);
        let next = caches.lines.range(from..).next().or_else(|| caches.lines.iter().next());
        let Some((&at, &line)) = next else { return };
        if line.is_dirty() && caches.random.chance(500) {
            // A write that is under way: some words are there, and the line is still in the cache.
            self.medium.write(at, &line, || caches.random.chance(500));
        } else {
            self.medium.write(at, &line, || true);
            caches.lines.remove(&at);
        }
    }

    fn lines_of(at: u64, length: u64) -> impl Iterator<Item = u64> {
        let first = at / LINE * LINE;
        (first..at + length).step_by(LINE as usize)
    }

    /// Writes the dirty words of a line to the medium.
    fn clean(&self, caches: &mut Caches, at: u64) {
        if let Some(line) = caches.lines.get(&at).copied() {
            self.medium.write(at, &line, || true);
            // A store past the caches leaves no copy there; a write-back may.
            if self.is_coherent || caches.random.chance(500) {
                caches.lines.remove(&at);
            } else if let Some(line) = caches.lines.get_mut(&at) {
                line.dirty = [false; LINE as usize];
            }
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
        self.step();
        let mut caches = self.caches.lock();
        for line_at in Self::lines_of(at, from.len() as u64) {
            let fresh = self.medium.line(line_at);
            let line =
                caches.lines.entry(line_at).or_insert(Cached { bytes: fresh, dirty: [false; LINE as usize] });
            for byte in 0..LINE {
                if let Some(from) =
                    (line_at + byte).checked_sub(at).and_then(|index| from.get(index as usize))
                {
                    line.bytes[byte as usize] = *from;
                    line.dirty[byte as usize] = true;
                }
            }
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
        self.step();
        let dirty: Vec<u64> = {
            let mut caches = self.caches.lock();
            let mut dirty: Vec<u64> =
                caches.lines.iter().filter(|(_, line)| line.is_dirty()).map(|(at, _)| *at).collect();
            // Lines reach the medium in any order.
            for last in (1..dirty.len()).rev() {
                let other = caches.random.below(last as u64 + 1) as usize;
                dirty.swap(last, other);
            }
            dirty
        };
        for at in dirty {
            self.clean(&mut self.caches.lock(), at);
            self.step();
        }
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        for line_at in Self::lines_of(at, into.len() as u64) {
            self.step();
            let mut caches = self.caches.lock();
            let fresh = self.medium.line(line_at);
            let bytes = match caches.lines.get(&line_at) {
                Some(line) if !self.is_coherent => line.bytes,
                Some(line) => {
                    let mut bytes = fresh;
                    for byte in (0..LINE as usize).filter(|byte| line.dirty[*byte]) {
                        bytes[byte] = line.bytes[byte];
                    }
                    bytes
                }
                None => {
                    if !self.is_coherent {
                        caches.lines.insert(line_at, Cached { bytes: fresh, dirty: [false; LINE as usize] });
                    }
                    fresh
                }
            };
            for byte in 0..LINE {
                let index = (line_at + byte).checked_sub(at);
                if let Some(into) = index.and_then(|index| into.get_mut(index as usize)) {
                    *into = bytes[byte as usize];
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
            self.step();
            self.clean(&mut self.caches.lock(), line);
        }
    }

    fn observe(&self, at: u64, length: u64) {
        for line in Self::lines_of(at, length) {
            self.step();
            let mut caches = self.caches.lock();
            self.clean(&mut caches, line);
            caches.lines.remove(&line);
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
