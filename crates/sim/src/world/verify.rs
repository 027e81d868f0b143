//! Verifications beside the clients: a false alarm ends the world.

use super::World;
use cbd_types::{ByteRange, Flaw, Verified, Verify, VerifyLevel};

impl World {
    /// A client verifies a range, beside its other requests.
    pub(super) fn verify_some(&mut self) {
        if self.random.chance(200) {
            return self.verify_metadata_somewhere();
        }
        let client = self.random.below(self.options.clients as u64) as usize;
        let sector = u64::from(self.options.sector);
        let sectors = self.options.size / sector;
        let length = *self.random.pick(&[1, 8, 64, 1000, sectors]);
        let start = self.random.below(sectors);
        let range = ByteRange { start: start * sector, end: sectors.min(start + length) * sector };
        let verify =
            Verify { range, level: *self.random.pick(&VerifyLevel::ALL), repair: self.random.chance(500) };
        self.process().verify(client, verify);
    }

    /// Takes the results of verifications. Without damage nothing is found.
    pub(super) fn take_verified(&mut self) {
        for client in 0..self.options.clients {
            for result in self.process().take_verified(client) {
                let Ok(verified) = result else { continue };
                self.happened.verified_bytes += verified.cache_bytes + verified.backing_bytes;
                self.happened.changed_bytes += verified.changed_bytes;
                let listed: u64 = verified.changed.iter().map(ByteRange::len).sum();
                if listed != verified.changed_bytes {
                    self.fail(format!(
                        "{} changed bytes, but {:?}",
                        verified.changed_bytes, verified.changed
                    ));
                }
                if !self.is_damaged && !verified.findings.is_empty() {
                    self.fail(format!("a false alarm: {:?}", verified.findings));
                }
                self.happened.findings += verified.findings.len() as u64;
            }
        }
    }

    /// Verifies a range with no other request in flight, and returns the result.
    ///
    /// # Panics
    /// If the verification fails as a whole.
    pub fn verify(&mut self, range: ByteRange, level: VerifyLevel, repair: bool) -> Verified {
        self.process().verify(0, Verify { range, level, repair });
        let mut verified = None;
        self.wait_until(|world| {
            world.poll(0);
            verified = world.process().take_verified(0).pop();
            verified.is_some()
        });
        match verified {
            Some(Ok(verified)) => verified,
            other => self.fail(format!("the verification of {range}: {other:?}")),
        }
    }

    /// The parts of the device that the cache holds clean.
    pub fn clean_parts(&mut self) -> Vec<ByteRange> {
        let everything = ByteRange { start: 0, end: self.options.size };
        let extents = self.process().cache().extents(everything);
        extents
            .into_iter()
            .filter(|part| part.cached && !part.dirty && !part.zeroes)
            .map(|part| part.range)
            .collect()
    }

    /// Whether the cache holds any of `range`.
    pub fn is_any_cached(&mut self, range: ByteRange) -> bool {
        self.process().cache().extents(range).iter().any(|part| part.cached)
    }

    /// Verifies everything at the highest level. Returns what was found: the flaw, its range, and whether it was repaired.
    ///
    /// # Panics
    /// If a part could not be looked at or repaired.
    pub fn verify_everything(&mut self, repair: bool) -> Vec<(Flaw, ByteRange, bool)> {
        let everything = ByteRange { start: 0, end: self.options.size };
        let mut verified = self.verify(everything, VerifyLevel::Agree, repair);
        if let Some(error) = verified.error.take() {
            self.fail(format!("the verification: {error}"));
        }
        verified.findings.iter().map(|found| (found.flaw, found.range, found.repaired)).collect()
    }
}
