//! The results of many requests to verify as one result.
//!
//! Invariants: adjacent ranges with the same flaw are one finding; the list of findings is bounded, their number is not.

use crate::api::{CopyInfo, FindingInfo, VerifiedInfo};
use cbd_types::{ByteRange, DamagedCopy, Finding, Result, Verified, VerifiedMetadata};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The findings that a result lists.
const LISTED_MAX: usize = 1024;

/// What was found up to a place.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Gathered {
    /// The result.
    pub info: VerifiedInfo,
    /// The last finding, listed or not.
    last: Option<FindingInfo>,
    /// Whether all metadata of the region was looked at.
    #[serde(default)]
    pub is_metadata_done: bool,
}

/// What one request has added.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct Added {
    /// New findings; one that continues an earlier one is not new.
    pub findings: Vec<FindingInfo>,
    /// Their number by the name of the flaw.
    pub by_flaw: BTreeMap<&'static str, u64>,
    /// The part of them that is repaired.
    pub repaired: u64,
    /// Bytes that were looked at.
    pub verified_bytes: u64,
}

impl Gathered {
    /// Adds the result for `range`, which follows those before.
    pub fn add(&mut self, range: ByteRange, result: Result<Verified>) -> Added {
        let mut added = Added::default();
        let verified = match result {
            Ok(verified) => verified,
            Err(error) => {
                self.note_error(&error.at_range(range).line());
                return added;
            }
        };
        added.verified_bytes = range.end - range.start;
        let info = &mut self.info;
        info.verified_bytes += added.verified_bytes;
        info.cache_bytes += verified.cache_bytes;
        info.backing_bytes += verified.backing_bytes;
        info.changed_bytes += verified.changed_bytes;
        for finding in &verified.findings {
            self.add_finding(finding, &mut added);
        }
        if let Some(error) = &verified.error {
            self.note_error(&error.line());
        }
        added
    }

    /// Adds what a look at the metadata of the region has found. One that did not come to its end begins again. Returns the copies that
    /// were found.
    pub fn add_metadata(&mut self, found: &VerifiedMetadata, is_done: bool) -> Vec<CopyInfo> {
        let copies: Vec<CopyInfo> = found.copies.iter().map(copy_info).collect();
        let metadata = self.info.metadata.get_or_insert_default();
        metadata.structures = found.structures;
        metadata.repaired += found.repaired;
        metadata.unrepaired = found.unrepaired;
        metadata.copies.extend_from_slice(&copies);
        metadata.copies.truncate(VerifiedMetadata::COPIES_LISTED_MAX);
        self.is_metadata_done = is_done;
        if let Some(error) = &found.error {
            self.note_error(&error.line());
        }
        copies
    }

    fn note_error(&mut self, line: &str) {
        self.info.error.get_or_insert_with(|| line.to_owned());
    }

    fn add_finding(&mut self, finding: &Finding, added: &mut Added) {
        let Finding { range, flaw, repaired } = *finding;
        let length = range.end - range.start;
        if let Some(last) = &mut self.last
            && (last.start + last.length, last.flaw.as_str(), last.repaired)
                == (range.start, flaw.name(), repaired)
        {
            last.length += length;
            if let Some(listed) = self.info.findings.last_mut().filter(|listed| listed.start == last.start) {
                listed.length = last.length;
            }
            return;
        }
        let new = FindingInfo { start: range.start, length, flaw: flaw.name().to_owned(), repaired };
        self.info.found += 1;
        self.info.repaired += u64::from(repaired);
        if self.info.findings.len() < LISTED_MAX {
            self.info.findings.push(new.clone());
        }
        added.repaired += u64::from(repaired);
        *added.by_flaw.entry(flaw.name()).or_default() += 1;
        added.findings.push(new.clone());
        self.last = Some(new);
    }
}

fn copy_info(copy: &DamagedCopy) -> CopyInfo {
    let DamagedCopy { structure, number, at, is_readable, is_repaired } = *copy;
    let structure = structure.name().to_owned();
    CopyInfo { structure, number, at, readable: is_readable, repaired: is_repaired }
}

/// A damaged copy of a structure in words.
#[must_use]
pub fn words_of_copy(copy: &CopyInfo) -> String {
    let CopyInfo { structure, number, at, readable, repaired } = copy;
    let what = match (repaired, readable) {
        (true, _) => "was damaged, repaired",
        (false, true) => "is damaged, and no copy can repair it",
        (false, false) => "cannot be read",
    };
    format!("a copy of {structure} {number}, at byte {at} of the region, {what}")
}

/// A finding in words.
#[must_use]
pub fn words(finding: &FindingInfo) -> String {
    let FindingInfo { start, length, flaw, repaired } = finding;
    let what = match flaw.as_str() {
        "unreadable" => "the backing device alone has this range, and cannot read it",
        "cache_damaged" => "the copy in the cache was damaged",
        "dirty_damaged" => "dirty data is damaged, and there is no other copy",
        "both_damaged" => "the copy in the cache is damaged, and the backing device has none",
        "backing_unreadable" => "the backing device cannot read it; the cache has it",
        "backing_differs" => "the backing device has other data than clients wrote; the cache has theirs",
        "backing_changed" => {
            "the backing device has other data than the cache read: another program has written to it"
        }
        "quarantined" => "it is quarantined",
        "record_copy" => "one of the two copies of a record was damaged",
        other => other,
    };
    let repaired = if *repaired { ", repaired" } else { "" };
    format!("{length} bytes at {start}: {what} ({flaw}{repaired})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::{Error, ErrorKind, Flaw};

    fn found(start: u64, length: u64, flaw: Flaw, repaired: bool) -> Verified {
        let range = ByteRange { start, end: start + length };
        Verified { findings: vec![Finding { range, flaw, repaired }], ..Verified::default() }
    }

    fn step(start: u64) -> ByteRange {
        ByteRange { start, end: start + 4096 }
    }

    #[test]
    fn adjacent_ranges_with_the_same_flaw_are_one_finding() {
        let mut all = Gathered::default();
        all.add(step(0), Ok(found(512, 3584, Flaw::Unreadable, false)));
        let added = all.add(step(4096), Ok(found(4096, 512, Flaw::Unreadable, false)));
        assert_eq!(added.findings, [], "it continues the first");
        all.add(step(8192), Ok(found(8192, 512, Flaw::Unreadable, false)));
        let added = all.add(step(8704), Ok(found(8704, 512, Flaw::CacheDamaged, true)));
        assert_eq!((added.findings.len(), added.repaired, added.by_flaw["cache_damaged"]), (1, 1, 1));
        let ranges: Vec<_> = all.info.findings.iter().map(|it| (it.start, it.length)).collect();
        assert_eq!(ranges, [(512, 4096), (8192, 512), (8704, 512)]);
        assert_eq!((all.info.found, all.info.repaired, all.info.verified_bytes), (3, 1, 4 * 4096));
    }

    #[test]
    fn the_list_is_bounded_and_the_number_is_not() {
        let mut all = Gathered::default();
        for number in 0..2000 {
            all.add(step(number * 4096), Ok(found(number * 4096, 512, Flaw::Unreadable, false)));
        }
        assert_eq!((all.info.found, all.info.findings.len()), (2000, LISTED_MAX));
    }

    fn damaged(number: u64, is_repaired: bool) -> DamagedCopy {
        let structure = cbd_types::Structure::SegmentHeader;
        DamagedCopy { structure, number, at: 4096, is_readable: true, is_repaired }
    }

    #[test]
    fn what_a_look_at_metadata_repaired_before_it_was_interrupted_counts() {
        let mut all = Gathered::default();
        let mut first = VerifiedMetadata { structures: 7, ..VerifiedMetadata::default() };
        first.add(damaged(1, true));
        first.add(damaged(2, false));
        assert_eq!(all.add_metadata(&first, false).len(), 2);
        assert!(!all.is_metadata_done);
        let mut second = VerifiedMetadata { structures: 9, ..VerifiedMetadata::default() };
        second.add(damaged(2, false));
        all.add_metadata(&second, true);
        let metadata = all.info.metadata.unwrap();
        assert_eq!((metadata.structures, metadata.repaired, metadata.unrepaired), (9, 1, 1));
        assert!(all.is_metadata_done);
        let text = words_of_copy(&metadata.copies[0]);
        assert_eq!(text, "a copy of segment_header 1, at byte 4096 of the region, was damaged, repaired");
        assert!(words_of_copy(&metadata.copies[1]).ends_with("no copy can repair it"));
    }

    #[test]
    fn an_error_of_metadata_is_one_of_the_pass() {
        let mut all = Gathered::default();
        let error = Some(Error::new(ErrorKind::Media, "a store has failed"));
        all.add_metadata(&VerifiedMetadata { error, ..VerifiedMetadata::default() }, true);
        assert!(all.info.error.unwrap().contains("a store has failed"));
    }

    #[test]
    fn the_first_error_is_kept_and_its_range_counts_as_not_looked_at() {
        let mut all = Gathered::default();
        let error = |text: &'static str| Err(Error::new(ErrorKind::Backing, text));
        all.add(step(0), error("first"));
        all.add(step(4096), error("second"));
        all.add(step(8192), Ok(Verified::default()));
        assert!(all.info.error.as_ref().unwrap().contains("first"));
        assert_eq!(all.info.verified_bytes, 4096);
    }
}
