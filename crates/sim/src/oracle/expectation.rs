//! The legal contents of the device after a crash at one moment, computed once and compared with many recovered
//! states.

use super::{Entry, Oracle, Violation};
use crate::pattern::Content;
use crate::random::mix;
use cbd_types::ByteRange;
use std::collections::BTreeMap;

/// A part of the device that was changed at least once.
#[derive(Clone, Debug)]
struct Unit {
    range: ByteRange,
    /// The bytes without the open changes.
    bytes: Vec<u8>,
    /// A digest of the contents of its sectors without the open changes.
    digest: u64,
}

/// The legal contents.
#[derive(Clone, Debug)]
pub struct Expectation {
    sector: u64,
    units: Vec<Unit>,
    /// By sector: the content without open changes, the number of the open change, and its content.
    open: BTreeMap<u64, (Content, usize, Content)>,
    /// By sector: what else is legal, if changes may have gone past the cache: what no flush has covered may be lost.
    loose: BTreeMap<u64, Vec<Content>>,
    /// The open changes: the range of each, and whether it is atomic.
    changes: Vec<(ByteRange, bool)>,
}

/// For an open change: a sector that shows it, and one that does not.
type Halves = (Option<u64>, Option<u64>);

impl Oracle {
    /// The legal contents of the device after a crash now: every acknowledged change; of the open changes, an atomic
    /// one whole or not at all, and any sectors of the others. This decides no open change. The device is compared in
    /// units of `unit` bytes, and only the units with sectors that were ever changed.
    #[must_use]
    pub fn expectation(&self, unit: u64) -> Expectation {
        let mut open = BTreeMap::new();
        let mut changes = Vec::new();
        for change in self.open.values() {
            for sector in self.sectors_of(change.range) {
                let entries = self.sectors.get(&sector).map_or(&[][..], Vec::as_slice);
                let before = entries.len().checked_sub(2).and_then(|at| entries.get(at));
                let before = before.map_or(Content::INITIAL, |entry| entry.content);
                open.insert(sector, (before, changes.len(), change.content));
            }
            changes.push((change.range, change.atomic));
        }
        let units = self.changed(unit).into_iter().map(|range| {
            let mut bytes = self.fresh[range.start as usize..range.end as usize].to_vec();
            let mut digest = 0_u64;
            for (sector, entries) in self.sectors.range(self.sectors_of(range)) {
                let standing = match open.get(sector) {
                    Some((before, _, _)) => *before,
                    None => entries.last().map_or(Content::INITIAL, |entry| entry.content),
                };
                let at = (sector * self.sector - range.start) as usize;
                standing.fill(*sector, &mut bytes[at..at + self.sector as usize]);
                digest = digest.wrapping_add(digest_of(*sector, standing));
            }
            Unit { range, bytes, digest }
        });
        let mut loose = BTreeMap::new();
        if self.may_lose {
            for (sector, entries) in &self.sectors {
                let oldest = entries.iter().rposition(Entry::is_safe).unwrap_or(0);
                loose.insert(*sector, entries[oldest..].iter().map(|entry| entry.content).collect());
            }
        }
        Expectation { sector: self.sector, units: units.collect(), open, loose, changes }
    }
}

impl Expectation {
    /// Compares everything that was ever changed with the bytes that `read` returns. Returns a digest of the
    /// contents.
    ///
    /// # Errors
    /// The first sector with another content, an atomic change in part, or the error of `read`.
    pub fn compare(
        &self,
        mut read: impl FnMut(ByteRange, &mut [u8]) -> Result<(), Violation>,
    ) -> Result<u64, Violation> {
        let mut halves: Vec<Halves> = vec![(None, None); self.changes.len()];
        let mut digest = 0_u64;
        let mut found = Vec::new();
        for unit in &self.units {
            found.resize(unit.bytes.len(), 0);
            read(unit.range, &mut found)?;
            digest = digest.wrapping_add(unit.digest).wrapping_add(self.compare_unit(
                unit,
                &found,
                &mut halves,
            )?);
        }
        for ((range, atomic), half) in self.changes.iter().zip(halves) {
            if let (true, (Some(there), Some(missing))) = (atomic, half) {
                return Err(Violation(format!(
                    "the atomic change of {range} is there in part: sector {there} shows it, sector {missing} does not"
                )));
            }
        }
        Ok(digest)
    }

    /// Fills `into`, which is one of [`ranges`](Self::ranges), with its content without open changes.
    pub fn fill_standing(&self, range: ByteRange, into: &mut [u8]) {
        if let Ok(at) = self.units.binary_search_by_key(&range, |unit| unit.range) {
            into.copy_from_slice(&self.units[at].bytes);
        }
    }

    /// The ranges that [`compare`](Self::compare) reads.
    pub fn ranges(&self) -> impl Iterator<Item = ByteRange> {
        self.units.iter().map(|unit| unit.range)
    }

    /// Compares one unit. Returns the change of the digest.
    fn compare_unit(&self, unit: &Unit, found: &[u8], halves: &mut [Halves]) -> Result<u64, Violation> {
        let first = unit.range.start / self.sector;
        let mut change = 0_u64;
        if found != unit.bytes {
            let sectors = found.chunks_exact(self.sector as usize);
            let standing = unit.bytes.chunks_exact(self.sector as usize);
            for ((sector, found), standing) in (first..).zip(sectors).zip(standing) {
                if found == standing {
                    continue;
                }
                let shown = Content::of(sector, found);
                if shown.is_some() && shown == Content::of(sector, standing) {
                    // The client changed this sector during the copy.
                    continue;
                }
                match self.open.get(&sector) {
                    Some((before, open, content)) if shown == Some(*content) => {
                        halves[*open].0 = Some(sector);
                        change = change
                            .wrapping_sub(digest_of(sector, *before))
                            .wrapping_add(digest_of(sector, *content));
                    }
                    _ if shown.is_some_and(|shown| self.may_be(sector, shown)) => {
                        let [before, now] = [Content::of(sector, standing), shown]
                            .map(|content| content.map_or(0, |content| digest_of(sector, content)));
                        change = change.wrapping_sub(before).wrapping_add(now);
                    }
                    expected => return Err(self.violation(sector, shown, standing, expected)),
                }
            }
        }
        // The loop above noted sectors that show an open change; this one notes those that do not.
        let last = unit.range.end / self.sector;
        for (sector, (_, open, content)) in self.open.range(first..last) {
            let at = ((sector - first) * self.sector) as usize;
            if Content::of(*sector, &found[at..at + self.sector as usize]) != Some(*content) {
                halves[*open].1 = Some(*sector);
            }
        }
        Ok(change)
    }

    fn may_be(&self, sector: u64, shown: Content) -> bool {
        self.loose.get(&sector).is_some_and(|legal| legal.contains(&shown))
    }

    fn violation(
        &self,
        sector: u64,
        shown: Option<Content>,
        standing: &[u8],
        open: Option<&(Content, usize, Content)>,
    ) -> Violation {
        let shown =
            shown.map_or_else(|| String::from("torn or foreign bytes"), |content| content.0.to_string());
        let legal: Vec<u64> = Content::of(sector, standing)
            .into_iter()
            .chain(open.map(|(_, _, content)| *content))
            .map(|content| content.0)
            .collect();
        Violation(format!(
            "after recovery sector {sector} (byte {}) shows {shown}, legal are {legal:?} (0 is zeroes, 1 the initial content)",
            sector * self.sector
        ))
    }
}

const fn digest_of(sector: u64, content: Content) -> u64 {
    mix(mix(sector) ^ content.0)
}
