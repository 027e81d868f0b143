//! Stores records with data, and records of zeroes, in crash order, while the lane is locked.
//!
//! Invariants: everything that could fail is reserved before anything changes; one fence makes the data and the record of a
//! write durable before the lane is unlocked.
//!
//! Elsewhere: which requests store what (`cache`), slots and space (`log`).

use super::{
    LaneState, blocks,
    index::{BlockData, Start},
    overlay::Meaning,
    parking::Parked,
};
use crate::{
    Environment,
    base::{Base, Lack, Requester},
    position::Location,
};
use alloc::vec::Vec;
use cbd_format::crc32c;
use cbd_format::record::{Record, RecordClass, RecordKind, blocks_in, checksum_lines};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Durable, InFlight, MutationPoint};
use core::task::Waker;

/// Blocks of a write whose checksums are on the stack.
pub(crate) const FEW_BLOCKS: usize = 2;

/// Blocks that the longest write touches: an atomic unit that starts inside a block. Their checksums are in the lane's scratch
/// buffer.
pub(crate) const MANY_BLOCKS: usize = 257;

/// What a record with data is, besides its range.
#[derive(Clone, Copy)]
pub(crate) struct Content {
    pub kind: RecordKind,
    pub class: RecordClass,
    /// The CRC32C of its data, if that is known: other data gets no record.
    pub data_crc: Option<u32>,
}

impl From<RecordKind> for Content {
    #[inline]
    fn from(kind: RecordKind) -> Self {
        Self { kind, class: RecordClass::Unmarked, data_crc: None }
    }
}

/// Copies the data of `range` to `at`, and stores the checksums of its blocks, if the cache has some, in `checksums`.
#[inline]
fn copy<E: Environment>(
    base: &Base<E>,
    range: ByteRange,
    at: u64,
    data: &[u8],
    checksums: &mut [u32],
) -> InFlight {
    if base.identity().data_crc {
        let first = (CHECKSUM_BLOCK - range.start % CHECKSUM_BLOCK).min(range.len());
        return base.region().store_summed(at, data, first as usize, checksums);
    }
    // 3. Without checksums a torn write would go undetected, so make the data durable before a record can name it. With
    //    checksums the fence of step 5 covers data and record.
    let copied = base.region().store(at, data);
    base.region().fence(MutationPoint::WriteDataFence, copied);
    base.region().nothing_in_flight()
}

/// Whether data, whose blocks have these checksums as far as they are known, has another one than it must have.
#[inline]
fn differs(data_crc: Option<u32>, data: &[u8], checksums: &[u32]) -> bool {
    let Some(data_crc) = data_crc else { return false };
    let found = match checksums {
        [whole] => *whole,
        _ => crc32c(data),
    };
    data_crc != found && MutationPoint::WriteOtherData.is_active()
}

/// What the index takes of a record with data, besides its range.
pub(super) struct Indexed {
    pub location: Location,
    /// Where its data starts, from the base of its segment, in bytes.
    pub data_offset: u64,
    pub class: RecordClass,
}

impl LaneState {
    /// Stores a record with data, durably. The caller has set the lane's touched bit.
    ///
    /// # Errors
    /// The missing resource, [`Lack::Data`] if `data` has another checksum; nothing has changed then.
    pub(crate) fn commit<E: Environment, const BLOCKS: usize>(
        &mut self,
        base: &Base<E>,
        content: Content,
        range: ByteRange,
        data: &[u8],
        requester: Requester,
        waker: Option<&Waker>,
    ) -> Result<(Durable, Location), Lack> {
        let kind = content.kind;
        let (stored, location) = self.store::<E, BLOCKS>(base, content, range, data, requester, waker)?;
        // 5. Fence. Only then may the caller unlock the lane and complete the request: another processor's fence does not drain
        //    this processor's buffers.
        let fence = match kind {
            RecordKind::Fill => MutationPoint::FillFence,
            RecordKind::ParkedWrite => MutationPoint::ParkedFence,
            RecordKind::WriteThrough => MutationPoint::WriteThroughFence,
            _ => MutationPoint::WriteFence,
        };
        Ok((base.region().fence(fence, stored), location))
    }

    /// As [`commit`](Self::commit) without its last step, the fence. The caller fences before it unlocks the lane and before it
    /// stores another record there.
    pub(crate) fn store<E: Environment, const BLOCKS: usize>(
        &mut self,
        base: &Base<E>,
        content: Content,
        range: ByteRange,
        data: &[u8],
        requester: Requester,
        waker: Option<&Waker>,
    ) -> Result<(InFlight, Location), Lack> {
        let Content { kind, class, data_crc } = content;
        debug_assert!(base.identity().lanes.is_in_one_chunk(range), "{range} is in several chunks");
        let blocks = if base.identity().data_crc { blocks_in(range) } else { 0 };
        let lines = if base.identity().data_crc { checksum_lines(range) } else { 0 };

        // 1. Reserve everything that could fail: memory for checksums, index nodes and extents, a slot for each line, data space.
        //    Prefetch the lines that step 4 will touch, so that they arrive during the copy.
        if BLOCKS > FEW_BLOCKS {
            self.ensure_checksums().ok_or(Lack::Memory)?;
        }
        self.index.reserve(blocks_in(range)).ok_or(Lack::Memory)?;
        if !self.overlay.is_empty() {
            self.overlay.reserve(range).ok_or(Lack::Memory)?;
        }
        if kind.is_parked() || !self.parked.is_empty() {
            self.parked.reserve(range).ok_or(Lack::Memory)?;
        }
        self.make_room(base, 1 + lines, range.len(), requester, waker)?;
        let keys = base.identity().lanes.keys(range);
        let start = self.index.start(*keys.start());
        if BLOCKS > FEW_BLOCKS {
            self.index.prefetch::<E>(start, keys.clone());
        }
        let data_offset = self.take_data(range.len());
        let segment = self.open.as_ref().ok_or(Lack::Space)?.segment;
        let at = base.segment(segment).base() + data_offset;

        // 2. Copy the data and compute its checksums in the same pass.
        let (mut few, mut many) = ([0; FEW_BLOCKS], Vec::new());
        let checksums = if BLOCKS <= FEW_BLOCKS {
            &mut few[..blocks]
        } else {
            many = self.take_checksums();
            &mut many[..blocks]
        };
        let copied = copy(base, range, at, data, checksums);
        if differs(data_crc, data, checksums) {
            // Nothing names the copy: the next one may take its place.
            self.return_data(range.len());
            if BLOCKS > FEW_BLOCKS {
                self.return_checksums(many);
            }
            return Err(Lack::Data);
        }

        let in_parts = !(range.start | range.end).is_multiple_of(CHECKSUM_BLOCK);
        self.index.prefetch_further::<E>(start, keys, in_parts);

        // 4. Sequence number and epoch, record, index: their order is the order of commit.
        let mut record = Record::new(kind, range).with_class(class);
        record.data_offset = (data_offset as u32).into();
        let (location, stored) = self.append(base, record, checksums);
        self.index_range(base, (start, range), Indexed { location, data_offset, class }, checksums);
        if BLOCKS > FEW_BLOCKS {
            self.return_checksums(many);
        }
        if !self.overlay.is_empty() {
            self.overlay.heal(range);
        }
        self.park_or_forget(kind, range, location);
        self.cancel_fills(range);

        if kind == RecordKind::Write {
            self.counters.written += range.len();
        }
        Ok((copied.and(stored), location))
    }

    /// Parks `range` if the record at `location`, the newest one, is parked; otherwise it parks no longer what it replaced.
    #[inline]
    fn park_or_forget(&mut self, kind: RecordKind, range: ByteRange, location: Location) {
        if kind.is_parked() {
            let sequence = self.next_sequence - 1;
            self.parked.insert(range, Parked { location, sequence, zeroes: false });
        } else if !self.parked.is_empty() {
            self.parked.forget(range);
        }
    }

    /// Points the index at `record` for the blocks of `range`, whose chunk is at `start`. `checksums` are those of its first
    /// blocks, as far as they are known.
    pub(super) fn index_range<E: Environment>(
        &mut self,
        base: &Base<E>,
        (start, range): (Start, ByteRange),
        record: Indexed,
        checksums: &[u32],
    ) {
        let Indexed { location, data_offset, class } = record;
        let (data_offset, is_metadata) = (data_offset as u32, class.is_metadata());
        let whole = ByteRange {
            start: range.start.next_multiple_of(CHECKSUM_BLOCK),
            end: range.end / CHECKSUM_BLOCK * CHECKSUM_BLOCK,
        };
        if whole.start < whole.end {
            let before = whole.start - range.start;
            let checksums = &checksums[checksums.len().min(usize::from(before > 0))..];
            let blocks = (0..whole.len() / CHECKSUM_BLOCK).map(|number| {
                let offset = data_offset + (before + number * CHECKSUM_BLOCK) as u32;
                checksums.get(number as usize).map(|sum| BlockData { offset, sum: *sum })
            });
            self.index.set_whole(
                start,
                base.identity().lanes.key(whole.start),
                location,
                is_metadata,
                blocks,
            );
        }
        let head = ByteRange { start: range.start, end: whole.start.min(range.end) };
        let tail = ByteRange { start: whole.end.max(head.end), end: range.end };
        for (block, first, end) in blocks(head).chain(blocks(tail)) {
            let key = base.identity().lanes.key(block * CHECKSUM_BLOCK);
            self.index.set_parts(key, first, end, location);
        }
    }

    /// Stores a record that makes `range` read as zeroes, durably. The caller has set the lane's touched bit.
    ///
    /// # Errors
    /// The missing resource; nothing has changed then.
    pub(crate) fn commit_zeroes<E: Environment>(
        &mut self,
        base: &Base<E>,
        kind: RecordKind,
        range: ByteRange,
        waker: &Waker,
    ) -> Result<Durable, Lack> {
        // 1. Reserve.
        self.overlay.reserve(range).ok_or(Lack::Memory)?;
        if !self.parked.is_empty() {
            self.parked.reserve(range).ok_or(Lack::Memory)?;
        }
        self.make_room(base, 1, 0, Requester::Client, Some(waker))?;
        // 4. The record names the whole range; the lane determines which part of it counts.
        let (location, stored) = self.append(base, Record::new(kind, range), &[]);
        self.overlay.insert(range, Meaning::Zeroes, base.place_of(location));
        self.parked.forget(range);
        self.cancel_fills(range);
        // 5. Fence before the lane is unlocked.
        Ok(base.region().fence(MutationPoint::ZeroFence, stored))
    }
}
