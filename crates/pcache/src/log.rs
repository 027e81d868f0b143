//! The log: consecutive key sets, from segment to segment.
//!
//! Invariants: a walk enters no segment twice and accepts no more data than the cache can hold, so it ends; a key set
//! is valid only with a correct checksum; the end of the log is reported with its reason.
//!
//! Elsewhere: the ranges of the device that the keys cover (`pieces`), and their data (`scan`).

use crate::format::{self, Key, SetHead};
use crate::open::{Cache, Position};
use crate::report::Reason;
use crate::{Image, Progress, Stage};
use cbd_types::ByteRange;
use serde::Serialize;

/// The unit of requests to the device.
pub(crate) const SECTOR: u64 = 512;

/// Where and why the log ends. With all but the first three, the content behind the end is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum LogEnd {
    /// The regular end.
    Clean {
        /// Offset in the image.
        at: u64,
    },
    /// An incomplete key set with nothing behind it: its store was interrupted, before a flush covered it. Damage of
    /// the last key set looks the same.
    Unfinished {
        /// Offset in the image.
        at: u64,
    },
    /// A complete key set of an earlier use of the segment: its keys have older generations than the segments that they
    /// refer to.
    Old {
        /// Offset in the image.
        at: u64,
    },
    /// A damaged key set; the log continues behind it.
    Damaged {
        /// Offset in the image.
        at: u64,
    },
    /// The image cannot be read there.
    Unreadable {
        /// Offset in the image.
        at: u64,
    },
    /// The log refers to a segment that does not exist, or to one that it has already entered.
    Astray {
        /// Offset in the image.
        at: u64,
        /// The segment.
        segment: u32,
    },
    /// The keys refer to more data than the cache can hold: they are forged.
    Overfull {
        /// Offset in the image.
        at: u64,
    },
}

impl LogEnd {
    /// Whether dirty data may exist behind it.
    #[must_use]
    pub const fn is_harmful(self) -> bool {
        !matches!(self, Self::Clean { .. } | Self::Unfinished { .. } | Self::Old { .. })
    }

    /// The end as text.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Self::Clean { at } => format!("the log ends at image byte {at}"),
            Self::Unfinished { at } => {
                format!(
                    "the log ends at image byte {at} in a key set that was not stored completely; no flush had covered it"
                )
            }
            Self::Old { at } => format!("the log ends at image byte {at}, before key sets of an earlier use"),
            Self::Damaged { at } => {
                format!("the key set at image byte {at} is damaged, and the log continues behind it")
            }
            Self::Unreadable { at } => {
                format!("the log cannot be read at image byte {at}; its content behind that is not known")
            }
            Self::Astray { at, segment } => {
                format!("the log continues at image byte {at} in segment {segment}, which it cannot enter")
            }
            Self::Overfull { at } => {
                format!(
                    "the log up to image byte {at} refers to more data than the cache can hold: it is forged"
                )
            }
        }
    }
}

/// A key, and the offset of its own bytes in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoggedKey {
    pub at: u64,
    pub key: Key,
}

/// What is at a position of the log.
enum LogItem {
    Set {
        keys: Vec<LoggedKey>,
        next: Position,
    },
    Last {
        segment: u32,
    },
    /// Zeroes.
    End,
    /// Anything else.
    Broken {
        head: SetHead,
    },
    Unreadable,
}

/// A walk along the log.
pub(crate) struct Walk<'a, I> {
    cache: &'a Cache<I>,
    position: Position,
    /// The segments that the log has entered: a bit for each.
    seen: Vec<u64>,
    /// Bytes of data of all keys so far.
    data_bytes: u64,
    /// Number of segments that the log has entered.
    pub entered: u32,
    /// Damaged key sets that were skipped.
    pub skipped: u64,
    pub end: Option<LogEnd>,
}

impl<'a, I: Image> Walk<'a, I> {
    pub fn new(cache: &'a Cache<I>) -> Self {
        let position = cache.start.position();
        let mut seen = vec![0; cache.segments() as usize / 64 + 1];
        seen[position.segment as usize / 64] |= 1 << (position.segment % 64);
        Self { cache, position, seen, data_bytes: 0, entered: 1, skipped: 0, end: None }
    }

    /// The keys of the next set; `None` at the end, whose reason is in `end`.
    pub fn next_set(&mut self) -> Option<Vec<LoggedKey>> {
        while self.end.is_none() {
            let at = self.image_at(self.position);
            match self.read_item(self.position) {
                LogItem::Set { keys, next } => {
                    if self.is_old(&keys) {
                        self.end = Some(LogEnd::Old { at });
                        return None;
                    }
                    self.data_bytes += keys.iter().map(|logged| u64::from(logged.key.length)).sum::<u64>();
                    if self.data_bytes > self.cache.capacity() {
                        self.end = Some(LogEnd::Overfull { at });
                        return None;
                    }
                    self.position = next;
                    return Some(keys);
                }
                LogItem::Last { segment } => self.enter(segment, at),
                LogItem::End => self.end = Some(LogEnd::Clean { at }),
                LogItem::Unreadable => self.end = Some(LogEnd::Unreadable { at }),
                LogItem::Broken { head } => match self.position_after(&head) {
                    Some(next) if self.cache.options.past_damage => {
                        self.skipped += 1;
                        if next.segment == self.position.segment {
                            self.position = next;
                        } else {
                            self.enter(next.segment, at);
                        }
                    }
                    Some(_) => self.end = Some(LogEnd::Damaged { at }),
                    None => self.end = Some(LogEnd::Unfinished { at }),
                },
            }
        }
        None
    }

    fn image_at(&self, position: Position) -> u64 {
        let data = self.cache.data_at(position.segment).unwrap_or_default();
        data.saturating_add(u64::from(position.offset))
    }

    /// Continues in another segment.
    fn enter(&mut self, segment: u32, at: u64) {
        let bit = 1 << (segment % 64);
        match self.seen.get_mut(segment as usize / 64) {
            Some(word) if segment < self.cache.segments() && *word & bit == 0 => {
                *word |= bit;
                self.entered += 1;
                self.position = Position { segment, offset: 0 };
            }
            _ => self.end = Some(LogEnd::Astray { at, segment }),
        }
    }

    /// The position at which the log continues behind an invalid set, if it does: then that set was once complete.
    /// Behind a set whose store was interrupted are zeroes, which dm-pcache stores first, and its header is stored from
    /// front to back.
    fn position_after(&self, head: &SetHead) -> Option<Position> {
        let Position { segment, offset } = self.position;
        let at = |size: usize| Position { segment, offset: offset + size as u32 };
        if head.is_set() && head.is_last() {
            let next = Position { segment: head.number, offset: 0 };
            return Some(next)
                .filter(|next| next.segment < self.cache.segments() && self.continues_at(*next));
        }
        if head.is_interrupted() {
            return None;
        }
        if let Some(size) = head.size().filter(|_| head.is_set()) {
            match self.read_item(at(size)) {
                LogItem::End => return self.size_by_checksum(head).map(at),
                _ if self.continues_at(at(size)) => return Some(at(size)),
                _ => {}
            }
        }
        let sizes = (1..=format::KEYS_MAX as usize).map(|keys| format::SET_HEAD + keys * format::KEY_SIZE);
        sizes.map(at).find(|&next| self.continues_at(next))
    }

    /// The size with which a set would be valid with another number of keys.
    fn size_by_checksum(&self, head: &SetHead) -> Option<usize> {
        let left = (format::SEGMENT_DATA - self.position.offset) as usize;
        let mut bytes = [0; format::SET_MAX];
        let bytes = &mut bytes[..left.min(format::SET_MAX)];
        self.cache.image.read(self.image_at(self.position), bytes).ok()?;
        (1..=format::KEYS_MAX).filter(|&keys| keys != head.number).find_map(|keys| {
            let size = format::SET_HEAD + format::KEY_SIZE * keys as usize;
            bytes[4..8].copy_from_slice(&keys.to_le_bytes());
            bytes.get(..size).filter(|set| format::has_valid_checksum(set)).map(|_| size)
        })
    }

    /// Whether a valid set, or a valid end of a segment's part, is at a position.
    fn continues_at(&self, position: Position) -> bool {
        match self.read_item(position) {
            LogItem::Set { keys, .. } => !self.is_old(&keys),
            LogItem::Last { segment } => segment < self.cache.segments(),
            LogItem::End | LogItem::Broken { .. } | LogItem::Unreadable => false,
        }
    }

    /// Whether a set is of an earlier use of its segment. A segment is freed, and its generation raised, only when no
    /// key of the log behind the dirty tail refers to it. Before the dirty tail a key may refer to such a segment: its
    /// set was being collected.
    fn is_old(&self, keys: &[LoggedKey]) -> bool {
        let outdated = |logged: &LoggedKey| {
            self.cache
                .generation(logged.key.segment)
                .is_some_and(|generation| logged.key.generation < generation)
        };
        !self.cache.from_key_tail() && keys.iter().any(outdated)
    }

    fn read_item(&self, position: Position) -> LogItem {
        let left = format::SEGMENT_DATA.saturating_sub(position.offset) as usize;
        let Some(data) = self.cache.data_at(position.segment).filter(|_| left >= format::SET_HEAD) else {
            return LogItem::Unreadable;
        };
        let at = data + u64::from(position.offset);
        let mut bytes = [0; format::SET_MAX];
        let mut head = [0; format::SET_HEAD];
        if self.cache.image.read(at, &mut head).is_err() {
            return LogItem::Unreadable;
        }
        if head == [0; format::SET_HEAD] {
            return LogItem::End;
        }
        let set = SetHead::read(&head);
        // Behind a set there is always room for the end of a segment's part.
        let reserve = if set.is_last() { 0 } else { format::SET_HEAD };
        let size = set.size().filter(|size| set.is_set() && size + reserve <= left);
        let Some(size) = size else { return LogItem::Broken { head: set } };
        let bytes = &mut bytes[..size];
        if self.cache.image.read(at, bytes).is_err() {
            return LogItem::Unreadable;
        }
        let next = Position { segment: position.segment, offset: position.offset + size as u32 };
        if !format::has_valid_checksum(bytes) {
            return LogItem::Broken { head: set };
        }
        if set.is_last() {
            return LogItem::Last { segment: set.number };
        }
        let offsets = (at + format::SET_HEAD as u64..).step_by(format::KEY_SIZE);
        let (entries, _) = bytes[format::SET_HEAD..].as_chunks::<{ format::KEY_SIZE }>();
        let keys =
            entries.iter().zip(offsets).map(|(entry, at)| LoggedKey { at, key: Key::read(entry) }).collect();
        LogItem::Set { keys, next }
    }
}

impl<I: Image> Cache<I> {
    /// The range of a key on the device, if it is possible.
    pub(crate) fn range_of(key: &Key) -> Option<ByteRange> {
        // The maximum size of files and devices. Damage of a part of a sector affects the sector.
        let end =
            key.offset.checked_add(u64::from(key.length)).filter(|&end| end <= i64::MAX as u64 - SECTOR)?;
        (key.length > 0)
            .then(|| ByteRange { start: key.offset - key.offset % SECTOR, end: end.next_multiple_of(SECTOR) })
    }

    /// The offset of a dirty key's data in the image, or why the data is not available.
    pub(crate) fn data_of(&self, key: &Key) -> Result<u64, Reason> {
        let numbers = key.offset | u64::from(key.length) | u64::from(key.data_offset);
        if key.flags & !format::CLEAN != 0 || !numbers.is_multiple_of(SECTOR) {
            return Err(Reason::Implausible);
        }
        let data = self.data_at(key.segment).ok_or(Reason::Outside)?;
        if u64::from(key.data_offset) + u64::from(key.length) > u64::from(format::SEGMENT_DATA) {
            return Err(Reason::Outside);
        }
        match self.generation(key.segment) {
            Some(generation) if key.generation >= generation => Ok(data + u64::from(key.data_offset)),
            // The checksum validates the data.
            None if self.has_data_crc() => Ok(data + u64::from(key.data_offset)),
            _ => Err(Reason::Replaced),
        }
    }

    /// Whether a key's data is known to be on the backing device.
    pub(crate) fn is_settled(&self, key: &Key) -> bool {
        // A collected key was written back before.
        let collected = || self.generation(key.segment).is_some_and(|generation| key.generation < generation);
        key.is_clean() || self.from_key_tail() && collected()
    }

    /// Reads the whole log, without the data.
    pub fn survey(&self, progress: Progress<'_>) -> Survey {
        let mut walk = Walk::new(self);
        let mut survey = Survey::default();
        while let Some(keys) = walk.next_set() {
            survey.key_sets += 1;
            let mut dirty = false;
            for LoggedKey { key, .. } in keys {
                survey.keys += 1;
                if self.is_settled(&key) {
                    continue;
                }
                dirty = true;
                survey.dirty_keys += 1;
                match Self::range_of(&key) {
                    Some(range) => {
                        survey.logged_bytes += range.len();
                        survey.device_end = survey.device_end.max(range.end);
                        let grain = (range.start | range.len()).trailing_zeros().min(12);
                        survey.grain = survey.grain.min(1 << grain);
                    }
                    None => survey.impossible_keys += 1,
                }
            }
            survey.dirty_key_sets += u64::from(dirty);
            progress(Stage::Surveying, u64::from(walk.entered), u64::from(self.segments()));
        }
        survey.passed_key_sets = walk.skipped;
        survey.log_segments = walk.entered;
        survey.end = walk.end;
        survey
    }
}

/// The content of the log.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Survey {
    /// Key sets.
    pub key_sets: u64,
    /// Key sets with dirty keys.
    pub dirty_key_sets: u64,
    /// Damaged key sets that were skipped.
    pub passed_key_sets: u64,
    /// Keys.
    pub keys: u64,
    /// Keys whose data the backing device does not have.
    pub dirty_keys: u64,
    /// Dirty keys with a range that no device can have.
    pub impossible_keys: u64,
    /// Bytes of all dirty keys, older versions included.
    pub logged_bytes: u64,
    /// The end of the last dirty range of the device: a smaller device is not the backing device.
    pub device_end: u64,
    /// All dirty ranges begin and end at multiples of this many bytes.
    pub grain: u32,
    /// Segments of the log.
    pub log_segments: u32,
    /// Where and why the log ends.
    pub end: Option<LogEnd>,
}

impl Default for Survey {
    fn default() -> Self {
        Self {
            key_sets: 0,
            dirty_key_sets: 0,
            passed_key_sets: 0,
            keys: 0,
            dirty_keys: 0,
            impossible_keys: 0,
            logged_bytes: 0,
            device_end: 0,
            grain: 4096,
            log_segments: 0,
            end: None,
        }
    }
}
