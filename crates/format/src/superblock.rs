//! The superblock: two copies, in the first page and in the last.
//!
//! Invariants: only incompatible feature bits are ever added to a superblock, and none is removed; so the features of a
//! region are those of both copies together.
//!
//! Elsewhere: the order in which the copies are stored, so that one of them is valid at any moment (`cbd-engine`).

use crate::{
    FORMAT_VERSION, Layout, Unverified,
    checksum::crc32c,
    layout::{GROWTHS_MAX, on_media},
};
use alloc::{boxed::Box, format, string::String, vec::Vec};
use cbd_types::{Error, ErrorKind, MutationPoint, Result};
use zerocopy::{FromBytes, IntoBytes, little_endian::U32, little_endian::U64};

/// First bytes of every region: "CBDtrans".
pub const MAGIC: u64 = u64::from_le_bytes(*b"CBDtrans");

/// Incompatible feature 0: backend rows can record in which boot of the machine their cache is used, and how. A program that
/// ignores these records leaves stale ones behind. A later program would then empty a cache with dirty data, or recover a
/// mixture of pages.
pub const FEATURE_USE_NOTES: u64 = 1 << 0;

/// Incompatible feature 1: writes can go past a cache. A program that does not know their records would take them for damage,
/// and old data in the cache for the newest.
pub const FEATURE_BYPASS: u64 = 1 << 1;

/// Incompatible feature 2: the region has grown. A program that does not know it would compute other offsets.
pub const FEATURE_GROWN: u64 = 1 << 2;

/// Incompatible feature 3: the region is shared by several hosts ([`shared`](crate::shared)). A program that does not know it would
/// compute other offsets, and store where other hosts do.
pub const FEATURE_SHARED: u64 = 1 << 3;

/// Incompatible features that this program supports. An unknown compatible feature is ignored, an unknown read-only
/// compatible one forbids writing, an unknown incompatible one forbids opening.
pub const INCOMPATIBLE_KNOWN: u64 = FEATURE_USE_NOTES | FEATURE_BYPASS | FEATURE_GROWN | FEATURE_SHARED;
/// Read-only compatible features that this program supports; see [`INCOMPATIBLE_KNOWN`].
pub const READ_ONLY_KNOWN: u64 = 0;

on_media! {
    /// The description and layout of a region. Written by a format, when a feature is first used, and when the region grows.
    pub struct Superblock, size 192 {
        /// [`MAGIC`].
        0 magic: U64,
        /// CRC32C over all bytes of the structure behind this field, without a seed.
        8 crc: U32,
        /// [`FORMAT_VERSION`] of the program that created it.
        12 version: U32,
        /// Feature bits that a program may ignore.
        16 compatible: U64,
        /// Feature bits that a program must support to write.
        24 read_only_compatible: U64,
        /// Feature bits that a program must support to open the region.
        32 incompatible: U64,
        /// Random identity of the transport.
        40 uuid: [u8; 16],
        /// Bytes used, whole pages.
        56 region_size: U64,
        /// Bytes of a segment, a power of two.
        64 segment_size: U64,
        /// Number of segments, in all extents.
        72 segment_count: U32,
        /// Rows of the host table.
        76 host_rows: U32,
        /// Rows of the backend table.
        80 backend_rows: U32,
        /// Rows of the blkdev table.
        84 blkdev_rows: U32,
        /// First byte of the host table.
        88 host_area: U64,
        /// First byte of the backend table.
        96 backend_area: U64,
        /// First byte of the blkdev table.
        104 blkdev_area: U64,
        /// First byte of the segment table of the first extent.
        112 segment_table: U64,
        /// First byte of segment 0.
        120 segment_area: U64,
        /// Time of creation, in milliseconds since 1970 UTC; for information.
        128 created_ms: U64,
        /// `region_size` before each growth, in their order; zero behind the last one.
        136 grown_from: [U64; GROWTHS_MAX],
    }
}

impl Superblock {
    /// The superblock of a new transport, without features.
    #[must_use]
    pub fn new(layout: &Layout, uuid: [u8; 16], created_ms: u64) -> Self {
        let mut block = Self {
            magic: U64::new(MAGIC),
            crc: U32::ZERO,
            version: U32::new(FORMAT_VERSION),
            compatible: U64::ZERO,
            read_only_compatible: U64::ZERO,
            incompatible: U64::ZERO,
            uuid,
            region_size: U64::new(layout.region_size),
            segment_size: U64::new(layout.segment_size),
            segment_count: U32::new(layout.segment_count),
            host_rows: U32::new(layout.host_rows),
            backend_rows: U32::new(layout.backend_rows),
            blkdev_rows: U32::new(layout.blkdev_rows),
            host_area: U64::new(layout.host_area),
            backend_area: U64::new(layout.backend_area),
            blkdev_area: U64::new(layout.blkdev_area),
            segment_table: U64::new(layout.segment_table),
            segment_area: U64::new(layout.segment_area),
            created_ms: U64::new(created_ms),
            grown_from: grown_from(layout),
        };
        block.crc = U32::new(block.sum());
        block
    }

    /// The same superblock with these incompatible features added.
    #[must_use]
    pub fn with_incompatible(mut self, features: u64) -> Self {
        self.add_incompatible(features);
        self
    }

    /// Adds these incompatible features.
    pub fn add_incompatible(&mut self, features: u64) {
        self.incompatible = U64::new(self.incompatible.get() | features);
        self.crc = U32::new(self.sum());
    }

    /// Whether it has all of these incompatible features.
    #[must_use]
    pub const fn has_incompatible(&self, features: u64) -> bool {
        self.incompatible.get() & features == features
    }

    /// Whether both are superblocks of one transport: they are equal except for incompatible features.
    #[must_use]
    pub fn is_of_same_transport(&self, other: &Self) -> bool {
        self.with_incompatible(u64::MAX) == other.with_incompatible(u64::MAX)
    }

    /// The superblock of the same transport after it has grown to `layout`, with [`FEATURE_GROWN`].
    #[must_use]
    pub fn grown(mut self, layout: &Layout) -> Self {
        self.region_size = U64::new(layout.region_size);
        self.segment_count = U32::new(layout.segment_count);
        self.grown_from = grown_from(layout);
        self.add_incompatible(FEATURE_GROWN);
        self
    }

    /// The layout that the sizes and rows of the superblock lead to.
    #[inline(never)]
    fn layout_of_sizes(&self) -> Result<Layout> {
        let rows = [self.host_rows, self.backend_rows, self.blkdev_rows].map(U32::get);
        let region_size = self.region_size.get();
        if self.has_incompatible(FEATURE_SHARED) {
            return Layout::shared(region_size, self.segment_size.get(), rows[0], rows[1], rows[2]);
        }
        let mut sizes = self.grown_from.iter().map(|from| from.get()).take_while(|from| *from != 0);
        let Some(first) = sizes.next() else {
            return Layout::new(region_size, self.segment_size.get(), rows[0], rows[1], rows[2]);
        };
        let mut layout = Layout::new(first, self.segment_size.get(), rows[0], rows[1], rows[2])?;
        for size in sizes.chain(core::iter::once(region_size)) {
            layout = layout.grown_to(size)?;
        }
        Ok(layout)
    }

    /// The layout, if the offsets are those that follow from the sizes. Not inlined: its layouts would be in the frame of its caller.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] for impossible geometry.
    #[inline(never)]
    pub fn checked_layout(&self) -> Result<Layout> {
        let damaged = |text: String| Error::new(ErrorKind::Damaged, text);
        let layout = self
            .layout_of_sizes()
            .map_err(|error| damaged(format!("the superblock's geometry is impossible: {error}")))?;
        let expected = Superblock::new(&layout, self.uuid, self.created_ms.get());
        let geometry = |block: &Superblock| {
            (
                block.region_size,
                block.segment_count,
                block.grown_from,
                [
                    block.host_area,
                    block.backend_area,
                    block.blkdev_area,
                    block.segment_table,
                    block.segment_area,
                ],
            )
        };
        if geometry(&expected) != geometry(self) {
            return Err(damaged("the superblock's offsets contradict its geometry".into()));
        }
        if layout.grown_from().next().is_some() && !self.has_incompatible(FEATURE_GROWN) {
            return Err(damaged("the superblock names sizes before growths, but not the feature".into()));
        }
        Ok(layout)
    }

    /// The structure in the first bytes of a page; `None` if there are too few bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Unverified<Self>> {
        Some(Unverified::new(Self::read_from_prefix(bytes).ok()?.0))
    }

    fn sum(&self) -> u32 {
        crc32c(&self.as_bytes()[12..])
    }
}

fn grown_from(layout: &Layout) -> [U64; GROWTHS_MAX] {
    let mut sizes = [U64::ZERO; GROWTHS_MAX];
    for (into, from) in sizes.iter_mut().zip(layout.grown_from()) {
        *into = U64::new(from);
    }
    sizes
}

impl Unverified<Superblock> {
    /// Whether the magic number is that of CBD; nothing else is checked.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.claim(|block| block.magic.get() == MAGIC)
    }

    /// Whether it claims to be of the transport with this identity; nothing else is checked.
    #[must_use]
    pub fn is_of(&self, uuid: &[u8; 16]) -> bool {
        self.is_ours() && self.claim(|block| block.uuid == *uuid)
    }

    /// The superblock and the layout it describes, in a region of `mapped` bytes. On the heap, so that both copies together
    /// take little of the stack.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`] without the magic number, [`ErrorKind::Damaged`] with a wrong checksum or impossible
    /// geometry, [`ErrorKind::Unsupported`] for another version or an unknown incompatible feature.
    pub fn verify(&self, mapped: u64) -> Result<Box<(Superblock, Layout)>> {
        let damaged = |text: String| Error::new(ErrorKind::Damaged, text);
        let block = self
            .demand(MutationPoint::SuperblockMagic, |block| block.magic.get() == MAGIC)
            .ok_or_else(|| Error::new(ErrorKind::Foreign, "the region does not hold a CBD transport"))?
            .demand(MutationPoint::SuperblockChecksum, |block| block.crc.get() == block.sum())
            .ok_or_else(|| damaged("the superblock's checksum is wrong".into()))?
            .accept();
        if block.version.get() > FORMAT_VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the region was made by a newer CBD: it has format version {}, and this program knows versions up to {FORMAT_VERSION}; use that CBD",
                    block.version
                ),
            ));
        }
        if block.version.get() == 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the region has format version 0, which was never settled: drain it with the program that made it, and format it again",
            ));
        }
        let incompatible = block.incompatible.get() & !INCOMPATIBLE_KNOWN;
        let read_only = block.read_only_compatible.get() & !READ_ONLY_KNOWN;
        if incompatible != 0 || read_only != 0 {
            return Err(unknown_features(incompatible, read_only));
        }
        if block.region_size.get() > mapped {
            return Err(damaged(format!(
                "the transport has {} bytes, but only {mapped} are mapped: the region was cut short",
                block.region_size
            )));
        }
        let layout = block.checked_layout()?;
        Ok(Box::new((block, layout)))
    }
}

/// The superblock of a region, from the results of [`Unverified::verify`] for its two copies: the first valid one, with the
/// features of both if both belong to one transport. If one copy is valid but this program must not open it, that error takes
/// precedence: the other copy is older, and features that it lacks may be in use.
///
/// # Errors
/// As [`Unverified::verify`]. If one copy is CBD's, its error is returned instead of [`ErrorKind::Foreign`].
pub fn of_both_copies(
    first: Result<Box<(Superblock, Layout)>>,
    second: Result<Box<(Superblock, Layout)>>,
) -> Result<Box<(Superblock, Layout)>> {
    let is_newer = |error: &Error| error.kind() == ErrorKind::Unsupported;
    match (first, second) {
        (Ok(mut found), Ok(other)) => {
            let (first, second) = (&mut found.0, &other.0);
            let is_union = first.is_of_same_transport(second);
            let more = if is_union { second.incompatible.get() } else { 0 };
            first.add_incompatible(more);
            Ok(found)
        }
        (_, Err(error)) | (Err(error), _) if is_newer(&error) => Err(error),
        (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
        (Err(first), Err(second)) => Err(if first.kind() == ErrorKind::Foreign { second } else { first }),
    }
}

fn unknown_features(incompatible: u64, read_only: u64) -> Error {
    let numbers = |bits: u64, prefix: &str| -> Vec<String> {
        (0..u64::BITS).filter(|bit| bits >> bit & 1 == 1).map(|bit| format!("{prefix}{bit}")).collect()
    };
    let names = [numbers(incompatible, ""), numbers(read_only, "read-only ")].concat();
    let noun = if names.len() == 1 { "feature" } else { "features" };
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "the region was made by a newer CBD: it uses {noun} {}, and this program does not know {}; use that CBD",
            names.join(", "),
            if names.len() == 1 { "it" } else { "them" }
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> Superblock {
        Superblock::new(&Layout::new(8 << 20, 64 << 10, 4, 4, 4).unwrap(), [7; 16], 5)
    }

    fn verify(bytes: &[u8]) -> Result<Box<(Superblock, Layout)>> {
        Superblock::decode(bytes).unwrap().verify(8 << 20)
    }

    #[test]
    fn a_superblock_reads_back() {
        let (read, layout) = *verify(block().as_bytes()).unwrap();
        assert_eq!(read, block());
        assert_eq!(layout.segment_size, 64 << 10);
    }

    #[test]
    fn the_checksum_of_a_superblock_is_of_all_that_follows_it() {
        assert_eq!(block().crc.get(), crc32c(&block().as_bytes()[12..192]));
        assert_eq!(block().compatible, U64::ZERO);
    }

    #[test]
    fn a_region_is_ours_by_its_magic_number_alone() {
        let mut damaged = block();
        damaged.crc = U32::new(damaged.crc.get() + 1);
        let is_ours = |bytes: &[u8]| Superblock::decode(bytes).is_some_and(|block| block.is_ours());
        assert!(is_ours(damaged.as_bytes()));
        assert!(!is_ours(&[0; 192]));
    }

    #[test]
    fn superblocks_of_one_transport_differ_in_features_alone() {
        let (plain, more) = (block(), block().with_incompatible(1 << 40));
        assert!(plain.is_of_same_transport(&plain) && plain.is_of_same_transport(&more));
        assert!(!plain.is_of_same_transport(&Superblock { uuid: [8; 16], ..plain }));
    }

    #[test]
    fn every_single_bit_counts() {
        for bit in 0..size_of::<Superblock>() * 8 {
            let mut bytes = block().as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_valid_checksum_does_not_excuse_impossible_geometry() {
        let mut forged = block();
        forged.segment_area = U64::new(u64::MAX - 4095);
        forged.crc = U32::new(forged.sum());
        assert_eq!(verify(forged.as_bytes()).unwrap_err().kind(), ErrorKind::Damaged);
        let mut forged = block();
        forged.segment_size = U64::new(3);
        forged.crc = U32::new(forged.sum());
        assert_eq!(verify(forged.as_bytes()).unwrap_err().kind(), ErrorKind::Damaged);
    }

    fn grown() -> Superblock {
        let layout = Layout::new(4 << 20, 64 << 10, 4, 4, 4).unwrap();
        block().grown(&layout.grown_to(5 << 20).unwrap().grown_to(8 << 20).unwrap())
    }

    #[test]
    fn a_superblock_of_a_region_that_has_grown_reads_back() {
        let (read, layout) = *verify(grown().as_bytes()).unwrap();
        assert_eq!(read, grown());
        assert!(read.has_incompatible(FEATURE_GROWN) && read.uuid == block().uuid);
        assert!(layout.grown_from().eq([4 << 20, 5 << 20]) && layout.region_size == 8 << 20);
        assert_eq!(layout.extents().map(|extent| extent.segments).sum::<u32>(), read.segment_count.get());
        assert!(!grown().is_of_same_transport(&block()), "their offsets differ");
    }

    #[test]
    fn sizes_before_growths_that_contradict_each_other_are_refused() {
        let forged = |change: &dyn Fn(&mut Superblock)| {
            let mut forged = grown();
            change(&mut forged);
            forged.crc = U32::new(forged.sum());
            verify(forged.as_bytes()).expect_err("it is impossible").kind()
        };
        type Sizes = [u64; GROWTHS_MAX];
        let sizes: [Sizes; 8] = [
            [5 << 20, 4 << 20, 0, 0, 0, 0, 0],
            [4 << 20, 4 << 20, 0, 0, 0, 0, 0],
            [4 << 20, 0, 5 << 20, 0, 0, 0, 0],
            [0, 4 << 20, 5 << 20, 0, 0, 0, 0],
            [4 << 20, (5 << 20) + 1, 0, 0, 0, 0, 0],
            [4 << 20, 9 << 20, 0, 0, 0, 0, 0],
            [u64::MAX; GROWTHS_MAX],
            [(1 << 63) - 8192, (1 << 63) - 4096, 1 << 63, u64::MAX - 4096, u64::MAX, 0, 0],
        ];
        for sizes in sizes {
            let kind = forged(&|block| block.grown_from = sizes.map(U64::new));
            assert_eq!(kind, ErrorKind::Damaged, "{sizes:?}");
        }
        assert_eq!(forged(&|block| block.incompatible = U64::new(FEATURE_BYPASS)), ErrorKind::Damaged);
        assert_eq!(forged(&|block| block.segment_count = U32::new(1)), ErrorKind::Damaged);
    }

    #[test]
    fn a_region_that_was_cut_short_is_not_opened() {
        let error = Superblock::decode(block().as_bytes()).unwrap().verify((8 << 20) - 4096).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }

    #[test]
    fn an_unknown_feature_is_named_as_such() {
        for (change, name) in [
            (
                (|block: &mut Superblock| block.incompatible = U64::new(1 << 40 | 1)) as fn(&mut Superblock),
                "uses feature 40,",
            ),
            (|block| block.read_only_compatible = U64::new(1), "uses feature read-only 0,"),
            (|block| block.incompatible = U64::new(3 << 40), "uses features 40, 41,"),
        ] {
            let mut newer = block();
            change(&mut newer);
            newer.crc = U32::new(newer.sum());
            let error = verify(newer.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.line().contains("newer CBD") && error.line().contains(name), "{}", error.line());
            let pronoun = if name.contains("features") { "them;" } else { "it;" };
            assert!(error.line().contains(&format!("does not know {pronoun}")), "{}", error.line());
        }
        let mut newer = block();
        newer.compatible = U64::new(1 << 9);
        newer.crc = U32::new(newer.sum());
        assert!(verify(newer.as_bytes()).is_ok(), "what is compatible may be ignored");
    }

    #[test]
    fn a_known_feature_is_read_back() {
        let read = verify(block().with_incompatible(FEATURE_USE_NOTES).as_bytes()).unwrap().0;
        assert!(read.has_incompatible(FEATURE_USE_NOTES) && !block().has_incompatible(FEATURE_USE_NOTES));
    }

    #[test]
    fn a_feature_that_one_of_two_copies_names_counts() {
        let (without, with) = (block(), block().with_incompatible(FEATURE_USE_NOTES));
        for [first, second] in [[without, with], [with, without], [with, with]] {
            let both = of_both_copies(verify(first.as_bytes()), verify(second.as_bytes()));
            assert_eq!(both.unwrap().0, with);
        }
        let (whole, damaged) = (|| verify(with.as_bytes()), || verify(&[0; 192]));
        for both in [of_both_copies(whole(), damaged()), of_both_copies(damaged(), whole())] {
            assert_eq!(both.unwrap().0, with);
        }
    }

    #[test]
    fn of_two_copies_that_are_not_valid_the_one_that_is_ours_says_what_is_wrong() {
        let kind = |first: &[u8], second: &[u8]| {
            of_both_copies(verify(first), verify(second)).expect_err("neither is valid").kind()
        };
        let mut damaged = block();
        damaged.created_ms = U64::new(6);
        let (foreign, damaged) = ([0; 192], damaged.as_bytes());
        assert_eq!(kind(&foreign, damaged), ErrorKind::Damaged);
        assert_eq!(kind(damaged, &foreign), ErrorKind::Damaged);
        assert_eq!(kind(&foreign, &foreign), ErrorKind::Foreign);
    }

    #[test]
    fn the_features_in_a_message_are_those_whose_bits_are_set() {
        let line = unknown_features(1 | 1 << 63, 1 << 5).line();
        assert!(line.contains("uses features 0, 63, read-only 5,"), "{line}");
    }

    #[test]
    fn a_copy_with_an_unknown_feature_is_not_overruled_by_the_other() {
        let (known, newer) = (block(), block().with_incompatible(1 << 40));
        for [first, second] in [[known, newer], [newer, known]] {
            let error =
                of_both_copies(verify(first.as_bytes()), verify(second.as_bytes())).expect_err("it is newer");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
        }
    }

    #[test]
    fn the_superblock_of_another_transport_adds_no_feature() {
        let layout = Layout::new(8 << 20, 64 << 10, 4, 4, 4).unwrap();
        let other = Superblock::new(&layout, [8; 16], 5).with_incompatible(FEATURE_USE_NOTES);
        let both = of_both_copies(verify(block().as_bytes()), verify(other.as_bytes()));
        assert_eq!(both.unwrap().0, block());
    }

    #[test]
    fn another_magic_number_is_not_ours_whatever_its_checksum() {
        let mut foreign = block();
        foreign.magic = U64::new(MAGIC + 1);
        assert_eq!(verify(foreign.as_bytes()).unwrap_err().kind(), ErrorKind::Foreign);
    }

    #[test]
    fn a_version_that_cannot_be_read_is_named_as_such() {
        for version in [0, FORMAT_VERSION + 1] {
            let mut other = block();
            other.version = U32::new(version);
            other.crc = U32::new(other.sum());
            let error = verify(other.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.line().contains(&format!("version {version}")), "{}", error.line());
        }
    }
}
