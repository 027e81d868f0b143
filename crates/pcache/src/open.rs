//! Opening an image: superblock, cache info, the chain of segments, their generations, the tails.
//!
//! Invariants: of two copies the newest valid one is used; a substitute for an object that is damaged in both
//! copies is a finding; a [`Cache`] contains no segment twice, and none beyond the possible ones.
//!
//! Elsewhere: the log (`log`).

use crate::format::{self, u32_at, u64_at};
use crate::report::{Finding, Findings};
use crate::{Image, Options};
use cbd_types::{Error, ErrorKind, Result};

/// A position in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Position {
    /// The segment, by its position in the cache.
    pub segment: u32,
    /// Bytes behind the segment's header.
    pub offset: u32,
}

/// The beginning of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LogStart {
    /// The dirty tail: everything before it is on the backing device.
    DirtyTail(Position),
    /// The key tail, which is older, because the dirty tail is damaged: a part of the data behind it is on the backing
    /// device, and is written again.
    KeyTail(Position),
}

impl LogStart {
    pub const fn position(self) -> Position {
        match self {
            Self::DirtyTail(position) | Self::KeyTail(position) => position,
        }
    }
}

/// The generation of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Generation {
    Known(u64),
    /// No copy is valid.
    Unknown,
}

/// The location of a segment in the image, and its generation.
#[derive(Clone, Copy, Debug)]
struct Segment {
    number: u32,
    generation: Generation,
}

/// An opened image.
#[derive(Debug)]
pub struct Cache<I> {
    pub(crate) image: I,
    pub(crate) options: Options,
    pub(crate) start: LogStart,
    version: u8,
    flags: u32,
    /// By their position in the cache; shorter than `count` if the chain is broken.
    segments: Vec<Segment>,
    count: u32,
    findings: Findings,
}

impl<I: Image> Cache<I> {
    /// Opens an image.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`] if dm-pcache did not create it; [`ErrorKind::Unsupported`] if a machine with another byte
    /// order created it; [`ErrorKind::Damaged`] if both copies of an object are damaged and it has no substitute.
    pub fn open(image: I, options: Options) -> Result<Self> {
        let mut findings = Findings::default();
        let superblock = superblock(&image, &mut findings)?;
        let info = copies::<{ format::INFO_SIZE }, _>(&image, format::INFO_AT);
        let Some(bytes) = info.newest() else {
            return Err(missing_info_error(&info, superblock));
        };
        info.note("cache info", &mut findings);
        let held = (image.size().saturating_sub(format::SEGMENTS_AT)) / format::SEGMENT_SIZE;
        let all = superblock.map_or(held.min(format::SEGMENTS_MAX) as u32, |count| count);
        let (first, count, flags) = (u32_at(&bytes, 8), u32_at(&bytes, 12), u32_at(&bytes, 16));
        if count == 0 || u64::from(count) > format::SEGMENTS_MAX || superblock.is_some_and(|all| count > all)
        {
            return Err(damaged(format!("its cache info names {count} segments, and there are {all}")));
        }
        if u64::from(count) > held {
            let at = image.size();
            let missing = format::SEGMENTS_AT + u64::from(count) * format::SEGMENT_SIZE - at;
            findings.add(at, missing, true, format!("the image ends before its last {missing} bytes"));
        }
        let mut cache = Self {
            image,
            options,
            start: LogStart::DirtyTail(Position { segment: 0, offset: 0 }),
            version: bytes[5],
            flags,
            segments: Vec::new(),
            count,
            findings,
        };
        if flags & format::CREATED == 0 {
            return Err(damaged(
                "dm-pcache was interrupted while it created the cache, and stored nothing in it".to_owned(),
            ));
        }
        cache.follow(first, all.max(count));
        cache.start = cache.tails()?;
        Ok(cache)
    }

    /// Bytes of the image.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.image.size()
    }

    /// Whether keys have the checksum of their data.
    #[must_use]
    pub const fn has_data_crc(&self) -> bool {
        self.flags & format::DATA_CRC != 0
    }

    /// Version field of the cache info; 0 is the only one so far.
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.version
    }

    /// The number of the cache mode; 0 is writeback, the only one so far.
    #[must_use]
    pub const fn mode(&self) -> u32 {
        self.flags >> 2 & 0xf
    }

    /// The percentage of used segments at which dm-pcache collects garbage.
    #[must_use]
    pub const fn gc_percent(&self) -> u32 {
        self.flags >> 6 & 0x7f
    }

    /// Segments of the cache.
    #[must_use]
    pub const fn segments(&self) -> u32 {
        self.count
    }

    /// Whether the log is read from its oldest end, because it is not known how much of it is on the backing device.
    #[must_use]
    pub const fn from_key_tail(&self) -> bool {
        matches!(self.start, LogStart::KeyTail(_))
    }

    /// Damage of the structures that [`open`](Self::open) read.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        &self.findings.listed
    }

    /// Number of findings that may mean a loss.
    #[must_use]
    pub const fn harmful(&self) -> u64 {
        self.findings.harmful
    }

    /// The offset of a segment's data, behind its header, in the image.
    pub(crate) fn data_at(&self, segment: u32) -> Option<u64> {
        let segment = self.segments.get(segment as usize)?;
        Some(base(segment.number) + format::SEGMENT_HEAD)
    }

    /// A segment's generation; `None` if it is not known.
    pub(crate) fn generation(&self, segment: u32) -> Option<u64> {
        match self.segments.get(segment as usize)?.generation {
            Generation::Known(generation) => Some(generation),
            Generation::Unknown => None,
        }
    }

    /// Capacity of all segments in bytes of data.
    pub(crate) fn capacity(&self) -> u64 {
        u64::from(self.count) * u64::from(format::SEGMENT_DATA)
    }

    /// Follows the chain of segments from the first one. dm-pcache creates it once, in ascending order; so if a link is
    /// damaged and all others follow that order, the next segment is the expected one.
    fn follow(&mut self, first: u32, all: u32) {
        let mut used = vec![0_u64; all as usize / 64 + 1];
        let mut number = first;
        let mut ascending = true;
        for index in 0..self.count {
            let mut word = used.get_mut(number as usize / 64).filter(|_| number < all);
            let bit = 1 << (number % 64);
            let Some(word) = word.as_mut().filter(|word| ***word & bit == 0) else {
                let what = format!(
                    "the chain of segments has segment {number} as number {index}, which is not possible"
                );
                self.findings.add(base(number.min(all)), format::SEGMENT_HEAD, true, what);
                return;
            };
            **word |= bit;
            let info = self.segment_copies(number, format::SEGMENT_INFO_AT);
            let next = info.newest().filter(|bytes| u32_at(bytes, 8) & format::HAS_NEXT != 0);
            let generation = self.segment_copies(number, format::GENERATION_AT);
            let generation = self.generation_of(number, &generation);
            self.segments.push(Segment { number, generation });
            if index + 1 == self.count {
                return;
            }
            let expected = number.wrapping_add(1);
            let at = base(number);
            match next.map(|bytes| u32_at(&bytes, 12)) {
                Some(next) => {
                    ascending &= next == expected;
                    number = next;
                    if info.is_damaged() {
                        let what = format!(
                            "a copy of the info of segment {number} is damaged; the other copy is used"
                        );
                        self.findings.add(at, format::SEGMENT_HEAD, false, what);
                    }
                }
                None if ascending => {
                    let what = format!(
                        "the link of segment {number} is damaged; the order of the segments replaces it"
                    );
                    self.findings.add(at, format::SEGMENT_HEAD, false, what);
                    number = expected;
                }
                None => {
                    let what =
                        format!("the link of segment {number} is damaged; the segments behind it are lost");
                    self.findings.add(at, format::SEGMENT_HEAD, true, what);
                    return;
                }
            }
        }
    }

    fn segment_copies(&self, number: u32, at: [u64; 2]) -> Copies<{ format::SMALL_SIZE }> {
        copies(&self.image, at.map(|at| base(number) + at))
    }

    fn generation_of(&mut self, number: u32, copies: &Copies<{ format::SMALL_SIZE }>) -> Generation {
        if let Some(bytes) = copies.newest() {
            return Generation::Known(u64_at(&bytes, 8));
        }
        let at = base(number) + format::GENERATION_AT[0];
        let what = format!("the generation of segment {number} is damaged in both copies");
        // If data has checksums, they validate it without the generation.
        self.findings.add(at, 2 * format::SMALL_SIZE as u64, !self.has_data_crc(), what);
        Generation::Unknown
    }

    fn tails(&mut self) -> Result<LogStart> {
        let dirty = copies::<{ format::SMALL_SIZE }, _>(&self.image, format::DIRTY_TAIL_AT);
        let key = copies::<{ format::SMALL_SIZE }, _>(&self.image, format::KEY_TAIL_AT);
        let position = |bytes: [u8; format::SMALL_SIZE]| {
            let position = Position { segment: u32_at(&bytes, 8), offset: u32_at(&bytes, 12) };
            // A key set begins at a multiple of eight bytes.
            let inside = position.offset < format::SEGMENT_DATA && position.offset.is_multiple_of(8);
            (position.segment < self.count && inside).then_some(position)
        };
        let (dirty_at, key_at) = (dirty.newest().and_then(position), key.newest().and_then(position));
        let tail_at = format::DIRTY_TAIL_AT[0];
        let length = 2 * format::SMALL_SIZE as u64;
        match (dirty_at, key_at) {
            (Some(dirty_at), _) if !dirty.is_damaged() => {
                key.note("key tail", &mut self.findings);
                Ok(LogStart::DirtyTail(dirty_at))
            }
            // The remaining copy may be old, and its segment reused since; no segment before the key tail is reused.
            (_, Some(key_at)) => {
                let what = "a copy of the dirty tail is damaged; all data of the log from its oldest end on counts as dirty";
                self.findings.add(tail_at, length, false, what);
                Ok(LogStart::KeyTail(key_at))
            }
            (Some(dirty_at), None) => {
                let what =
                    "a copy of the dirty tail is damaged, and so is the key tail; the remaining copy is used";
                self.findings.add(tail_at, length, false, what);
                Ok(LogStart::DirtyTail(dirty_at))
            }
            (None, None) => Err(damaged("neither copy of either tail of its log is valid".to_owned())),
        }
    }
}

/// The offset of a segment in the image.
fn base(number: u32) -> u64 {
    format::SEGMENTS_AT + u64::from(number) * format::SEGMENT_SIZE
}

fn damaged(what: String) -> Error {
    Error::new(ErrorKind::Damaged, format!("a cache of dm-pcache that cannot be opened: {what}"))
}

/// The number of segments, if the superblock is valid.
fn superblock<I: Image>(image: &I, findings: &mut Findings) -> Result<Option<u32>> {
    let mut bytes = [0; format::SUPERBLOCK_SIZE];
    let length = bytes.len() as u64;
    let read = image.read(format::SUPERBLOCK_AT, &mut bytes);
    if read.is_ok() && u64_at(&bytes, 8) == format::SUPERBLOCK_MAGIC && format::has_valid_checksum(&bytes) {
        let count = u32_at(&bytes, 16);
        if u32_at(&bytes, 4) & format::BIG_ENDIAN != 0 {
            let text = "a cache of dm-pcache that a big-endian machine created; this machine cannot read it";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if count == 0 || u64::from(count) > format::SEGMENTS_MAX {
            return Err(damaged(format!("its superblock names {count} segments")));
        }
        return Ok(Some(count));
    }
    // The cache info identifies dm-pcache as well: two copies with a checksum of a special initial value.
    if copies::<{ format::INFO_SIZE }, _>(image, format::INFO_AT).newest().is_none() {
        let text = "not a cache of dm-pcache: it has neither a superblock nor a cache info of dm-pcache";
        return Err(Error::new(ErrorKind::Foreign, text));
    }
    findings.add(
        format::SUPERBLOCK_AT,
        length,
        false,
        "the superblock is damaged; the cache info replaces it",
    );
    Ok(None)
}

fn missing_info_error(info: &Copies<{ format::INFO_SIZE }>, superblock: Option<u32>) -> Error {
    if superblock.is_some() && info.copies.iter().all(|copy| *copy == CopyState::Empty) {
        damaged(
            "it has no cache info: dm-pcache was interrupted while it created the cache, or both copies are lost"
                .to_owned(),
        )
    } else {
        damaged("both copies of its cache info are damaged".to_owned())
    }
}

/// One of two copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyState<const N: usize> {
    /// Zeroes: never written.
    Empty,
    Invalid,
    Valid([u8; N]),
}

/// Both copies of an object that is updated in place: checksum, sequence number, content.
#[derive(Debug)]
struct Copies<const N: usize> {
    at: [u64; 2],
    copies: [CopyState<N>; 2],
}

fn copies<const N: usize, I: Image>(image: &I, at: [u64; 2]) -> Copies<N> {
    let copies = at.map(|at| {
        let mut bytes = [0; N];
        match image.read(at, &mut bytes) {
            Err(_) => CopyState::Invalid,
            Ok(()) if format::has_valid_checksum(&bytes) => CopyState::Valid(bytes),
            Ok(()) if bytes == [0; N] => CopyState::Empty,
            Ok(()) => CopyState::Invalid,
        }
    });
    Copies { at, copies }
}

impl<const N: usize> Copies<N> {
    /// The newest valid one. Sequence numbers have a byte and wrap around.
    fn newest(&self) -> Option<[u8; N]> {
        match self.copies {
            [CopyState::Valid(first), CopyState::Valid(second)] => {
                Some(if (second[4].wrapping_sub(first[4]) as i8) > 0 { second } else { first })
            }
            [CopyState::Valid(only), _] | [_, CopyState::Valid(only)] => Some(only),
            _ => None,
        }
    }

    /// Whether a copy was written and is not valid. Zeroes beside a copy that is not the first version have replaced
    /// data.
    fn is_damaged(&self) -> bool {
        match self.copies {
            [CopyState::Valid(_), CopyState::Valid(_)] => false,
            [CopyState::Valid(only), CopyState::Empty] | [CopyState::Empty, CopyState::Valid(only)] => {
                only[4] != 1
            }
            _ => true,
        }
    }

    /// Adds a finding, if there is damage.
    fn note(&self, what: &str, findings: &mut Findings) {
        if self.is_damaged() {
            let (first, last) = (self.at[0], self.at[1] + N as u64);
            let what = match self.newest() {
                Some(_) => format!("a copy of the {what} is damaged; the other copy is used"),
                None => format!("both copies of the {what} are damaged; it is not needed"),
            };
            findings.add(first, last - first, false, what);
        }
    }
}
