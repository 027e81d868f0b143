//! Blocks that contain their own number and version, and the log of writes to which they are compared.
//!
//! Every word of a block is computed from the block's number and version, so a torn block matches no version. The
//! log is in this process and not in the daemon, so it outlives the daemon.
//!
//! Invariants: a block has one writer at a time, so at most its newest version was issued and not acknowledged.

use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a block.
pub const BLOCK: usize = 4096;
const WORDS: usize = BLOCK / 8;

/// Fills `buffer` with version `version` of block `slot`; version 0 is all zeroes, as on a new disk.
pub fn fill(buffer: &mut [u8], seed: u64, slot: u32, version: u32) {
    if version == 0 {
        buffer.fill(0);
        return;
    }
    let name = (u64::from(slot) << 32) | u64::from(version);
    let key = mix(seed ^ name);
    let (words, _) = buffer.as_chunks_mut::<8>();
    for (index, word) in (0_u64..).zip(words.iter_mut()) {
        *word = (key ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes();
    }
    // Not mixed, so that a wrong block can be identified.
    if let Some(first) = words.first_mut() {
        *first = name.to_le_bytes();
    }
}

/// The version of block `slot` in `buffer`; none if `buffer` is not one complete version of the block.
pub fn version_of(buffer: &[u8], seed: u64, slot: u32) -> Option<u32> {
    let (words, rest) = buffer.as_chunks::<8>();
    if words.len() != WORDS || !rest.is_empty() {
        return None;
    }
    let name = u64::from_le_bytes(*words.first()?);
    if name == 0 {
        return words.iter().all(|word| *word == [0; 8]).then_some(0);
    }
    let version = u32::try_from(name & u64::from(u32::MAX)).ok()?;
    let key = mix(seed ^ name);
    let right = (1_u64..)
        .zip(words.iter().skip(1))
        .all(|(index, word)| *word == (key ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes());
    (name >> 32 == u64::from(slot) && version > 0 && right).then_some(version)
}

/// The finalizer of SplitMix64.
const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// A generator of pseudo-random numbers (SplitMix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// A generator that begins with `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let high = mix(self.0) >> 32;
        // The product of two 32-bit numbers; its upper half is below `end`.
        u32::try_from((high * u64::from(end)) >> 32).unwrap_or(0)
    }
}

/// The result of a comparison of a block with the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The acknowledged version, or the version of the one write that was issued after it.
    Right,
    /// An older version; the number of acknowledged writes that are lost.
    Older(u32),
    /// Not a version of this block.
    Wrong,
}

/// The versions that were issued and acknowledged, for each block.
#[derive(Debug)]
pub struct Log {
    seed: u64,
    entries: Vec<Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    /// The newest version that was issued.
    issued: AtomicU32,
    /// The newest version that was acknowledged, or found after a crash.
    durable: AtomicU32,
    /// A version that was issued, not acknowledged, and not found after a crash: no later read may return it.
    vanished: AtomicU32,
    /// Number of acknowledged writes.
    acknowledged: AtomicU32,
}

impl Log {
    /// A log of `slots` blocks that are all zeroes.
    pub fn new(slots: u32, seed: u64) -> Self {
        Self { seed, entries: (0..slots).map(|_| Entry::default()).collect() }
    }

    /// Number of blocks.
    pub fn slots(&self) -> u32 {
        u32::try_from(self.entries.len()).unwrap_or(u32::MAX)
    }

    /// Issues the next version of `slot`: logs it, fills `buffer` with it, and returns its number.
    pub fn issue(&self, slot: u32, buffer: &mut [u8]) -> u32 {
        let version = self
            .entries
            .get(slot as usize)
            .map_or(0, |entry| entry.issued.fetch_add(1, Ordering::SeqCst) + 1);
        fill(buffer, self.seed, slot, version);
        version
    }

    /// The version of `slot` in a block; none if it is not one complete version of the block.
    pub fn version_of(&self, slot: u32, block: &[u8]) -> Option<u32> {
        version_of(block, self.seed, slot)
    }

    /// Logs that the newest version of `slot` was acknowledged.
    pub fn acknowledge(&self, slot: u32) {
        if let Some(entry) = self.entries.get(slot as usize) {
            entry.durable.store(entry.issued.load(Ordering::SeqCst), Ordering::SeqCst);
            entry.acknowledged.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Compares the content of `slot` with the log.
    pub fn validate(&self, slot: u32, buffer: &[u8]) -> Verdict {
        let Some(entry) = self.entries.get(slot as usize) else { return Verdict::Wrong };
        let durable = entry.durable.load(Ordering::SeqCst);
        let vanished = entry.vanished.load(Ordering::SeqCst);
        match version_of(buffer, self.seed, slot) {
            Some(version) if version < durable => Verdict::Older(durable - version),
            Some(version) if version > 0 && version == vanished => Verdict::Wrong,
            Some(version) if version <= entry.issued.load(Ordering::SeqCst) => Verdict::Right,
            _ => Verdict::Wrong,
        }
    }

    /// As [`validate`](Self::validate), while no write is in flight: the version found now is the version that
    /// later reads must return.
    pub fn validate_and_record(&self, slot: u32, buffer: &[u8]) -> Verdict {
        let verdict = self.validate(slot, buffer);
        if verdict == Verdict::Right
            && let (Some(entry), Some(version)) =
                (self.entries.get(slot as usize), version_of(buffer, self.seed, slot))
        {
            let issued = entry.issued.load(Ordering::SeqCst);
            entry.durable.store(version, Ordering::SeqCst);
            if issued > version {
                entry.vanished.store(issued, Ordering::SeqCst);
            }
        }
        verdict
    }

    /// Restarts the count of acknowledged writes.
    pub fn count_from_here(&self) {
        for entry in &self.entries {
            entry.acknowledged.store(0, Ordering::SeqCst);
        }
    }

    /// Acknowledged writes to `slot`.
    pub fn acknowledged(&self, slot: u32) -> u64 {
        self.entries
            .get(slot as usize)
            .map_or(0, |entry| u64::from(entry.acknowledged.load(Ordering::SeqCst)))
    }

    /// Acknowledged writes.
    pub fn acknowledged_total(&self) -> u64 {
        (0..self.slots()).map(|slot| self.acknowledged(slot)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_a_block_is_recognised() {
        let mut buffer = vec![0; BLOCK];
        for (slot, version) in [(0, 1), (7, 1), (7, 2), (u32::MAX - 1, 900)] {
            fill(&mut buffer, 5, slot, version);
            assert_eq!(version_of(&buffer, 5, slot), Some(version));
            assert_eq!(version_of(&buffer, 5, slot ^ 1), None);
            assert_eq!(version_of(&buffer, 6, slot), None);
        }
        fill(&mut buffer, 5, 3, 0);
        assert_eq!(version_of(&buffer, 5, 3), Some(0));
    }

    #[test]
    fn a_torn_block_is_no_version() {
        let (mut old, mut new) = (vec![0; BLOCK], vec![0; BLOCK]);
        fill(&mut old, 5, 7, 1);
        fill(&mut new, 5, 7, 2);
        for cut in [8, 512, 2048, 4088] {
            let torn: Vec<u8> = new[..cut].iter().chain(&old[cut..]).copied().collect();
            assert_eq!(version_of(&torn, 5, 7), None, "cut at {cut}");
        }
        assert_eq!(version_of(&old[..512], 5, 7), None);
    }

    #[test]
    fn acknowledged_versions_must_be_found_and_issued_ones_may_be() {
        let log = Log::new(4, 9);
        let (mut first, mut second, mut third) = (vec![0; BLOCK], vec![0; BLOCK], vec![0; BLOCK]);
        log.issue(1, &mut first);
        log.acknowledge(1);
        log.issue(1, &mut second);
        log.acknowledge(1);
        log.issue(1, &mut third);
        assert_eq!(log.validate(1, &first), Verdict::Older(1));
        assert_eq!(log.validate(1, &[0; BLOCK]), Verdict::Older(2));
        assert_eq!(log.validate(1, &second), Verdict::Right);
        assert_eq!(log.validate(1, &third), Verdict::Right);
        assert_eq!(log.validate(2, &third), Verdict::Wrong);
        assert_eq!(log.validate(0, &[0; BLOCK]), Verdict::Right);
    }

    #[test]
    fn a_version_that_was_found_after_a_crash_must_be_found_again() {
        let log = Log::new(1, 9);
        let (mut first, mut second) = (vec![0; BLOCK], vec![0; BLOCK]);
        log.issue(0, &mut first);
        log.acknowledge(0);
        log.issue(0, &mut second);
        assert_eq!(log.validate_and_record(0, &second), Verdict::Right);
        assert_eq!(log.validate(0, &first), Verdict::Older(1));
        assert_eq!(log.acknowledged(0), 1);
    }

    #[test]
    fn a_version_that_was_missing_after_a_crash_must_stay_missing() {
        let log = Log::new(1, 9);
        let (mut first, mut second) = (vec![0; BLOCK], vec![0; BLOCK]);
        log.issue(0, &mut first);
        log.acknowledge(0);
        log.issue(0, &mut second);
        assert_eq!(log.validate_and_record(0, &first), Verdict::Right);
        assert_eq!(log.validate(0, &second), Verdict::Wrong);
        assert_eq!(log.validate(0, &first), Verdict::Right);
    }

    #[test]
    fn random_numbers_are_below_their_end_and_distributed() {
        let mut random = Random::new(1);
        let mut seen = [0_u32; 10];
        for _ in 0..10_000 {
            seen[random.below(10) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
    }
}
