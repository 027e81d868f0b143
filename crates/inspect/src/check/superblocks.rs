//! The two superblocks.

use super::{Checker, REPAIR, open_private};
use crate::finding::{Location, Repair, Severity, Structure};
use cbd_format::{Layout, Superblock, record::bytes_of};
use cbd_types::{Error, ErrorKind};

/// The cost of a region without a superblock.
const UNOPENABLE: &str = "the region cannot be opened, not by a daemon either";
/// The advice for a region without a superblock.
const WITHOUT_SUPERBLOCKS: &str = "keep a copy of the region (dd); then as in docs/operations.md under \"When both superblocks are \
     gone\": a superblock of an empty region of the same size on that copy, and cbdctrl check and rescue on it";

impl Checker<'_> {
    /// Checks both; returns whether one of them is usable.
    pub(super) fn superblocks(&mut self) -> bool {
        let size = self.bytes.len();
        let first = self.superblock(0);
        // The offset of the second superblock follows from the size of the mapping. If the mapping has grown, only the
        // first superblock gives that offset.
        let mut used = first.as_ref().map_or(size, |block| block.region_size.get());
        let mut offsets = [0, Layout::second_superblock(used.max(2 * cbd_format::PAGE))];
        let mut read = [first, self.superblock(offsets[1])];
        if let [Err(first), Err(second)] = &read
            && [first, second].iter().all(|error| error.kind() != ErrorKind::Unsupported)
            && let Ok(transports) = open_private(&self.bytes)
            && let Some(transport) = transports.first()
        {
            // Before the zeroes by which the file of a region was extended.
            used = transport.info().layout.region_size;
            offsets[1] = Layout::second_superblock(used);
            read[1] = self.superblock(offsets[1]);
        }
        let grows = read
            .iter()
            .flatten()
            .next()
            .and_then(|block| block.checked_layout().ok()?.grown_to(size).ok())
            .is_some();
        self.unused_end(used, grows);
        self.report.counted.slots += 2;
        let length = size_of::<Superblock>() as u32;
        if self.newer_superblock(offsets, &read) {
            return false;
        }
        match &read {
            [Err(first), Err(second)] => {
                // If one copy is a CBD superblock, its error is more specific than "foreign".
                let is_foreign = [first, second].iter().all(|error| error.kind() == ErrorKind::Foreign);
                // The attempt to open the transport determines whether the region was one of CBD.
                let opened = if is_foreign { open_private(&self.bytes).err() } else { None };
                let (cost, advice) = match &opened {
                    Some(error) if error.kind() == ErrorKind::Damaged => (UNOPENABLE, WITHOUT_SUPERBLOCKS),
                    Some(_) => (
                        "it is no region of CBD, or its superblocks and its tables were overwritten",
                        "if it should be one: check whether this is the right file, then search a copy of it",
                    ),
                    None => (
                        UNOPENABLE,
                        "if the region was cut short, restore its size; if it was created by a newer program, use that; \
                         else as in docs/operations.md under \"When both superblocks are gone\"",
                    ),
                };
                for (at, error) in offsets.into_iter().zip([first, second]) {
                    let what = opened.as_ref().unwrap_or(error).line();
                    let location = Location::bytes(at, u64::from(length));
                    self.add(Severity::Fatal, Structure::Superblock, location, what, cost, advice, None);
                }
                return false;
            }
            [Ok(first), Ok(second)] if first != second => self.differing(offsets, [first, second]),
            [Ok(_), Ok(_)] => {}
            [Ok(_), Err(error)] | [Err(error), Ok(_)] => {
                let (good, bad) =
                    if read[0].is_ok() { (offsets[0], offsets[1]) } else { (offsets[1], offsets[0]) };
                self.add(
                    Severity::Corrected,
                    Structure::Superblock,
                    Location::bytes(bad, u64::from(length)),
                    error.line(),
                    super::SECOND_COPY,
                    REPAIR,
                    Some(copy_of(good, bad, length)),
                );
            }
        }
        if let Some(Ok(block)) = read.iter().find(|block| block.is_ok()) {
            let others = read.iter().flatten().filter(|other| other.is_of_same_transport(block));
            let features = others.fold(0, |features, other| features | other.incompatible.get());
            for byte in bytes_of(&block.with_incompatible(features)) {
                self.report.add_to_fingerprint(u64::from(*byte));
            }
        }
        true
    }

    /// Notes what is behind the end of the transport, into which it can grow or not.
    fn unused_end(&mut self, used: u64, grows: bool) {
        let size = self.bytes.len();
        if used < size / cbd_format::PAGE * cbd_format::PAGE {
            let what =
                if grows { "cbdctrl tp-grow uses all of it while a daemon serves it; or " } else { "" };
            self.add(
                Severity::Note,
                Structure::Superblock,
                Location::bytes(used, size - used),
                format!("the region has {size} bytes, its transport uses {used} of them"),
                "nothing: the rest is not used",
                format!("{what}cut the file back to {used} bytes"),
                None,
            );
        }
    }

    /// Whether one of the superblocks was written by a newer program. That copy decides, whatever the other one
    /// contains: the other one is older.
    fn newer_superblock(&mut self, offsets: [u64; 2], read: &[Result<Superblock, Error>; 2]) -> bool {
        let mut is_newer = false;
        for (at, copy) in offsets.into_iter().zip(read) {
            let Err(error) = copy else { continue };
            if error.kind() == ErrorKind::Unsupported {
                is_newer = true;
                self.add(
                    Severity::Fatal,
                    Structure::Superblock,
                    Location::bytes(at, size_of::<Superblock>() as u64),
                    error.line(),
                    "this program cannot open it",
                    "use the version of CBD that created it; do not format it",
                    None,
                );
            }
        }
        is_newer
    }

    /// Reports two superblocks that are valid and differ.
    fn differing(&mut self, [first, second]: [u64; 2], blocks: [&Superblock; 2]) {
        let length = size_of::<Superblock>() as u32;
        let has_all_of = |one: usize| blocks[one].has_incompatible(blocks[1 - one].incompatible.get());
        let cut_short =
            "a crash interrupted the addition of a feature: one superblock has it, the other does not";
        let (at, what, cost, repair) = if !blocks[0].is_of_same_transport(blocks[1]) {
            (
                second,
                "the two superblocks are valid and differ: the second is of another format of this region",
                "nothing: the first counts",
                Some(copy_of(first, second, length)),
            )
        } else if has_all_of(1) {
            (first, cut_short, "nothing: the feature counts", Some(copy_of(second, first, length)))
        } else if has_all_of(0) {
            (second, cut_short, "nothing: the feature counts", Some(copy_of(first, second, length)))
        } else {
            (first, cut_short, "nothing: the features of both count", None)
        };
        let advice = if repair.is_some() {
            REPAIR
        } else {
            "nothing: the next program that uses a feature repairs it"
        };
        let location = Location::bytes(at, u64::from(length));
        self.add(Severity::Corrected, Structure::Superblock, location, what, cost, advice, repair);
    }

    fn superblock(&self, at: u64) -> Result<Superblock, Error> {
        let unreadable = || Error::new(ErrorKind::Media, "the memory of a superblock cannot be read");
        let bytes = self.read(at, size_of::<Superblock>()).ok_or_else(unreadable)?;
        let block = Superblock::decode(&bytes).ok_or_else(unreadable)?;
        Ok(block.verify(self.bytes.len())?.0)
    }
}

fn copy_of(from: u64, to: u64, length: u32) -> Repair {
    Repair::Copy { what: "superblock".to_owned(), from, to, length }
}
