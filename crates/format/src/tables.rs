//! Rows of the tables of hosts, backends, blkdevs and segments. Each row has two slots.

use crate::{layout::on_media, slot::SlotContent};
use alloc::{borrow::ToOwned, format, string::String};
use cbd_types::{Error, ErrorKind, Name, Result};
use zerocopy::little_endian::{U16, U32, U64};

/// A row that is in use.
pub const STATE_ACTIVE: u32 = 1;
/// A row that is free.
pub const STATE_FREE: u32 = 0;
/// A row of a backend that another host moves to this one. Once this host has the row, the backend is its own, without a cache yet.
pub const STATE_INCOMING: u32 = 2;

/// Class of a blkdev whose requests are of metadata.
pub const CLASS_METADATA: u32 = 1;

/// Writeback: the backing device is updated after the cache.
pub const MODE_WRITEBACK: u32 = 0;
/// As [`MODE_WRITEBACK`], and a rescue has moved the backend to another backing device: `path` and `identity` are those of
/// that device, the former one is recorded in the state block ([`FormerDisk`](crate::FormerDisk)), and the backend is not
/// served before the user confirms it.
pub const MODE_MOVED: u32 = 1;

/// Bytes of the field of a name: the longest name fills it.
pub const NAME_BYTES: usize = Name::MAX;

/// [`SegmentEntry::used_by`]: a cache.
pub const USED_BY_CACHE: u32 = 0;
/// [`SegmentEntry::used_by`]: the channel of a block device of this host on a backend of another one. It is the client's area while the
/// row of the block device names it.
pub const USED_BY_CLIENT: u32 = 1;
/// [`SegmentEntry::used_by`]: the channel of a block device of another host on a backend of this one. It is the server's area while the
/// row of the backend has `backend_uuid`.
pub const USED_BY_SERVER: u32 = 2;

/// Row of a segment without an owner.
pub const NO_BACKEND: u32 = u32::MAX;

/// [`BackendEntry::use_state`]: nothing is recorded. The memory is persistent, or is lost with the machine, or an
/// earlier program used it last.
pub const USE_UNKNOWN: u32 = 0;
/// [`BackendEntry::use_state`]: all pages of the cache were synced to the disk after its last use.
pub const USE_SYNCED: u32 = 1;
/// [`BackendEntry::use_state`]: in use in `use_boot`, and nothing in the cache can be dirty.
pub const USE_CLEAN: u32 = 2;
/// [`BackendEntry::use_state`]: in use in `use_boot`; the cache can hold dirty data.
pub const USE_DIRTY: u32 = 3;
/// As [`USE_DIRTY`], and a sync has failed: pages may be missing on the disk that the kernel considers clean.
pub const USE_UNSURE: u32 = 4;

on_media! {
    /// A host registered on the transport.
    pub struct HostEntry, size 240 {
        /// [`STATE_ACTIVE`] or [`STATE_FREE`].
        0 state: U32,
        /// Bytes of `name` in use.
        4 name_length: U32,
        /// Incremented whenever the row is registered again.
        8 ownership: U64,
        /// Name in UTF-8, zero-padded.
        16 name: [u8; 64],
        /// Time of registration, in milliseconds since 1970 UTC; for information.
        80 registered_ms: U64,
        /// Zero.
        88 reserved: [u8; 152],
    }
}

on_media! {
    /// A backing device of the transport, and the cache in front of it.
    pub struct BackendEntry, size 1008 {
        /// [`STATE_ACTIVE`], [`STATE_FREE`] or [`STATE_INCOMING`].
        0 state: U32,
        /// Row of the host that owns it.
        4 host: U32,
        /// Incremented by every takeover.
        8 ownership: U64,
        /// Random identity of the cache; segments with another identity are not part of it. 0 without a cache.
        16 cache_id: U64,
        /// Size of the backing device in bytes, as it was recorded.
        24 size: U64,
        /// Logical sector in bytes.
        32 sector: U32,
        /// Number of lanes; 0 without a cache.
        36 lanes: U32,
        /// Number of segments of the cache, the state segment included.
        40 segments: U32,
        /// The segment that holds the state block.
        44 state_segment: U32,
        /// Queues that serve it.
        48 handlers: U32,
        /// Percentage of used segments above which reclaim begins.
        52 gc_percent: U32,
        /// 0 strict, 1 checkpoint, 2 none.
        56 consistency: U32,
        /// Target share of dirty data in percent.
        60 dirty_target_percent: U32,
        /// Limit of writeback in bytes a second; 0 is automatic.
        64 writeback_rate: U64,
        /// Bit 0: data checksums.
        72 features: U32,
        /// [`MODE_WRITEBACK`] or [`MODE_MOVED`]; a program refuses a backend with a mode that it does not support.
        76 cache_mode: U32,
        /// Bytes of `path` in use.
        80 path_length: U32,
        /// Bytes of `identity` in use.
        84 identity_length: U32,
        /// Random identity of the backend, for display and links.
        88 uuid: [u8; 16],
        /// Time of its first start, in milliseconds since 1970 UTC.
        104 created_ms: U64,
        /// Path of the backing device, UTF-8, zero-padded.
        112 path: [u8; 512],
        /// Identity of the backing device, UTF-8, zero-padded.
        624 identity: [u8; 256],
        /// The action for a range that the backing device refuses: 0 stop, 1 park.
        880 on_write_error: U32,
        /// Seconds of failed attempts after which the action is taken.
        884 write_error_after_s: U32,
        /// The use of a cache in memory in which a crash of the machine mixes old and new pages: one of
        /// [`USE_UNKNOWN`], [`USE_SYNCED`], [`USE_CLEAN`], [`USE_DIRTY`] and [`USE_UNSURE`].
        888 use_state: U32,
        /// The share of the cache that metadata of file systems keeps, in percent.
        892 metadata_min_percent: U16,
        /// The share of the cache above which metadata gets no preference, in percent; 0 stands for 100.
        894 metadata_max_percent: U16,
        /// The boot of the machine in which the cache is used.
        896 use_boot: [u8; 16],
        /// Bytes of a sequential stream of reads above which it is not recorded: 0 is the default, `u64::MAX` never.
        912 sequential_read_cutoff: U64,
        /// Wall clock time in milliseconds until which writeback is paused; 0 if it is not.
        920 writeback_paused_until_ms: U64,
        /// Misses that are recorded: 0 those worth their space, 1 all, 2 none.
        928 read_fill: U32,
        /// 0 automatic, 1 off.
        932 readahead: U32,
        /// Latency in microseconds of reads of the backing device above which writeback slows down; 0 never.
        936 read_latency_target_us: U32,
        /// 0 writeback, 1 writethrough, 2 writearound, 3 passthrough.
        940 write_mode: U32,
        /// Bytes of a sequential stream of writes behind which they go to the backing device alone; 0 never.
        944 sequential_write_cutoff: U64,
        /// What a write does that finds no space: 0 it waits, 1 it goes to the backing device alone where that is legal.
        952 when_full: U32,
        /// Latency of the cache in microseconds above which reads go past it; 0 never.
        956 congestion_read_us: U32,
        /// The same for writes.
        960 congestion_write_us: U32,
        /// Name in UTF-8, zero-padded; zeroes: it has none. What is no name counts as none.
        964 name: [u8; NAME_BYTES],
        /// Segments that a cache of shared size keeps, the state segment included.
        996 cache_min: U32,
        /// Segments up to which it grows, the state segment included; 0 for a cache of fixed size.
        1000 cache_max: U32,
        /// Its weight among the caches of shared size; 0 stands for 1.
        1004 weight: U16,
        /// The share of the cache that pins may take, in percent; 0 stands for 50.
        1006 pin_percent: U16,
    }
}

on_media! {
    /// A block device that clients use.
    pub struct BlkdevEntry, size 496 {
        /// [`STATE_ACTIVE`] or [`STATE_FREE`].
        0 state: U32,
        /// Row of the host that serves it.
        4 host: U32,
        /// Row of the backend below it.
        8 backend: U32,
        /// Bytes of `export` in use.
        12 export_length: U32,
        /// Raised whenever the row is reused.
        16 ownership: U64,
        /// `uuid` of the backend below it: a row with another one is stale.
        24 backend_uuid: [u8; 16],
        /// The export, as the user requested it, UTF-8, zero-padded.
        40 export: [u8; 256],
        /// Name in UTF-8, zero-padded; zeroes: it has the name of its backend. What is no name counts as none.
        296 name: [u8; NAME_BYTES],
        /// The class of its requests that have none: 0 is none, 1 metadata of a file system.
        328 class: U32,
        /// On a backend of another host, the number of the segment with the client's area of its channel, plus 1; else 0.
        332 channel_segment: U32,
        /// The host that has the backend below it, plus 1; 0 if that is the host of this row.
        336 backend_host: U32,
        /// 1 if there may be other blkdevs on the backend that have 1, too; else 0.
        340 shared: U32,
        /// 1 if its host had another blkdev on the backend when it was created: the name and the UUID of the backend are not its own; else 0.
        344 further: U32,
        /// Zero.
        348 reserved: [u8; 148],
    }
}

on_media! {
    /// The owner of a segment.
    pub struct SegmentEntry, size 48 {
        /// Row of the backend, or [`NO_BACKEND`].
        0 backend: U32,
        /// [`USED_BY_CACHE`], [`USED_BY_CLIENT`] or [`USED_BY_SERVER`].
        4 used_by: U32,
        /// `cache_id` of the cache that owns it; valid only while the backend's row has the same. 0 in a channel.
        8 cache_id: U64,
        /// In a channel: row of the block device. It and the fields behind it are zero in a cache.
        16 blkdev: U32,
        /// The host that has the block device.
        20 blkdev_host: U32,
        /// `ownership` of the row of the block device.
        24 blkdev_ownership: U64,
        /// `uuid` of the backend below it.
        32 backend_uuid: [u8; 16],
    }
}

impl SegmentEntry {
    /// The entry of a segment that a cache owns, or with [`NO_BACKEND`] of one that nothing owns.
    #[must_use]
    pub const fn of_cache(backend: u32, cache_id: u64) -> Self {
        Self {
            backend: U32::new(backend),
            used_by: U32::new(USED_BY_CACHE),
            cache_id: U64::new(cache_id),
            blkdev: U32::ZERO,
            blkdev_host: U32::ZERO,
            blkdev_ownership: U64::ZERO,
            backend_uuid: [0; 16],
        }
    }
}

impl SlotContent for HostEntry {
    const KIND: u32 = 1;
    const SLOT_SIZE: usize = 256;
}

impl SlotContent for BackendEntry {
    const KIND: u32 = 2;
    const SLOT_SIZE: usize = 1024;
}

impl SlotContent for BlkdevEntry {
    const KIND: u32 = 3;
    const SLOT_SIZE: usize = 512;
}

impl SlotContent for SegmentEntry {
    const KIND: u32 = 4;
    const SLOT_SIZE: usize = 64;
}

/// Bit of [`BackendEntry::features`]: data is checksummed.
pub const FEATURE_DATA_CRC: u32 = 1;

/// A text that fits into a field of `N` bytes.
#[derive(Clone, Copy, Debug)]
pub struct FieldText<'a, const N: usize>(&'a str);

impl<'a, const N: usize> FieldText<'a, N> {
    /// `text`, if it fits.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if it does not; the error names the text as `what`.
    pub fn new(what: &str, text: &'a str) -> Result<Self> {
        if text.len() > N {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("the {what} has {} bytes, at most {N} are possible", text.len()),
            ));
        }
        Ok(Self(text))
    }

    /// Writes the text and its length into a row. The rest of the field becomes zero.
    pub fn write(self, length: &mut U32, field: &mut [u8; N]) {
        *length = U32::new(self.0.len() as u32);
        let (text, rest) = field.split_at_mut(self.0.len());
        text.copy_from_slice(self.0.as_bytes());
        rest.fill(0);
    }
}

/// Decodes the text of a fixed field, if its length and its bytes are valid.
///
/// # Errors
/// [`ErrorKind::Damaged`]; the error names the text as `what`.
pub fn decode_text(what: &str, length: U32, field: &[u8]) -> Result<String> {
    field
        .get(..length.get() as usize)
        .and_then(|bytes| core::str::from_utf8(bytes).ok())
        .map(ToOwned::to_owned)
        .ok_or_else(|| Error::new(ErrorKind::Damaged, format!("the {what} in the table is not a text")))
}

/// The field of a name; zeroes for none.
#[must_use]
pub fn encode_name(name: Option<&Name>) -> [u8; NAME_BYTES] {
    let mut field = [0; NAME_BYTES];
    let bytes = name.map_or(&[] as &[u8], |name| name.as_str().as_bytes());
    field.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    field
}

/// Decodes the field of a name; `None` if there is none.
///
/// # Errors
/// [`ErrorKind::Damaged`] if the field holds something else. Nothing but display and look-up relies on a name, so a row with
/// such a field is used as one without a name.
pub fn decode_name(field: &[u8; NAME_BYTES]) -> Result<Option<Name>> {
    let (text, rest) = field.split_at(field.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES));
    if text.is_empty() && rest.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let damaged =
        |why: &str| Error::new(ErrorKind::Damaged, format!("the name in the table is not valid: {why}"));
    if rest.iter().any(|byte| *byte != 0) {
        return Err(damaged("it has bytes behind its end"));
    }
    let text = core::str::from_utf8(text).map_err(|_| damaged("it is not UTF-8"))?;
    Name::new(text).map(Some).map_err(|error| damaged(&error.line()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_and_zeroes_are_none() {
        for text in ["a", "db-data", "x".repeat(NAME_BYTES).as_str()] {
            let name = Name::new(text).expect("it is one");
            assert_eq!(decode_name(&encode_name(Some(&name))).expect("it is valid"), Some(name));
        }
        assert_eq!(encode_name(None), [0; NAME_BYTES]);
        assert_eq!(decode_name(&[0; NAME_BYTES]).expect("it is valid"), None);
    }

    #[test]
    fn a_field_that_holds_no_name_is_damaged() {
        let mut behind = encode_name(Name::new("a").ok().as_ref());
        behind[NAME_BYTES - 1] = b'b';
        let mut only_behind = [0; NAME_BYTES];
        only_behind[1] = b'a';
        let mut number = [0; NAME_BYTES];
        number[0] = b'7';
        for field in [behind, only_behind, number, [0xff; NAME_BYTES], [b'/'; NAME_BYTES]] {
            let error = decode_name(&field).expect_err("it is no name");
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
        }
    }

    #[test]
    fn a_text_reads_back_and_one_that_is_too_long_is_refused() {
        for text in ["", "disk", "12345678"] {
            let (mut length, mut field) = (U32::ZERO, [7; 8]);
            FieldText::new("name", text).expect("it fits").write(&mut length, &mut field);
            assert_eq!(field[..text.len()], *text.as_bytes());
            assert!(field[text.len()..].iter().all(|byte| *byte == 0));
            assert_eq!(decode_text("name", length, &field).expect("it is valid"), text);
        }
        let kind = FieldText::<8>::new("name", "123456789").map_err(|error| error.kind());
        assert_eq!(kind.err(), Some(ErrorKind::InvalidArgument));
    }
}
