//! Writes, in crash order, under one hold of the lane's lock.

use crate::{
    Cache, Environment,
    index::{BlockData, Location, blocks},
    lane::LaneState,
    parking::Parked,
    pool::Asker,
};
use alloc::vec::Vec;
use cbd_format::record::{Record, RecordKind, blocks_in, checksum_lines};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Durable, Error, ErrorKind, InFlight, MutationPoint, Result};
use core::{ops::RangeInclusive, task::Waker};

/// Blocks of a write whose checksums are kept on the stack.
pub(crate) const FEW_BLOCKS: usize = 2;

/// Blocks that the longest write touches: an atomic unit that begins inside a block. Their checksums are kept in the lane.
pub(crate) const MANY_BLOCKS: usize = 257;

/// Whether a request was given space.
#[derive(Debug)]
pub enum Admission {
    /// It is done, and durable.
    Done(Durable),
    /// There was no space; nothing has changed. The request's waker is on the wait list, and is called when reclaim has
    /// made space.
    Full,
}

/// The error of a long write for whose checksums there is no memory. It does not wait: memory that is there again wakes no request.
#[cold]
#[inline(never)]
pub(crate) fn no_memory() -> Result<Admission> {
    Err(Error::new(ErrorKind::System, "there is no memory for the checksums of a long write"))
}

impl<E: Environment> Cache<E> {
    /// Writes `data` to `range`, which lies in one chunk and is at most an atomic unit. Durable, and recovered
    /// whole or not at all.
    ///
    /// # Errors
    /// When the cache was stopped; [`ErrorKind::Backing`] when there is no space and the backing device has refused for long what
    /// must go there first; [`ErrorKind::System`] when there is no memory for the checksums, and nothing has changed.
    pub fn write(&self, range: ByteRange, data: &[u8], waker: &Waker) -> Result<Admission> {
        debug_assert_eq!(range.len(), data.len() as u64);
        self.check_writable()?;
        // Most writes touch one or two blocks: their checksums need no kilobyte of scratch.
        if blocks_in(range) <= FEW_BLOCKS {
            self.commit_data::<FEW_BLOCKS>(RecordKind::Write, range, data, Asker::Client, Some(waker))
        } else {
            self.commit_data::<MANY_BLOCKS>(RecordKind::Write, range, data, Asker::Client, Some(waker))
        }
    }

    fn commit_data<const BLOCKS: usize>(
        &self,
        kind: RecordKind,
        range: ByteRange,
        data: &[u8],
        asker: Asker,
        waker: Option<&Waker>,
    ) -> Result<Admission> {
        let lane = self.approach(range);
        let mut state = lane.lock();
        // A store that failed may have been the lane's last record: nothing may come behind it that would prove it.
        self.region().check_stores(MutationPoint::RecordAfterFailure)?;
        if BLOCKS > FEW_BLOCKS && state.ensure_checksums().is_none() {
            return no_memory();
        }
        if MutationPoint::WriteTouch.is_active() {
            self.announce(lane);
        }
        Ok(match self.commit_locked::<BLOCKS>(&mut state, kind, range, data, asker, waker) {
            Some((durable, _)) => {
                self.region().check_stores(MutationPoint::WriteStoreCheck)?;
                Admission::Done(durable)
            }
            None => {
                self.backing().check_not_stalled()?;
                Admission::Full
            }
        })
    }

    /// The write itself, with the lane's lock held and its touched bit set. `None` when there is no space, and for a long one without
    /// the scratch for its checksums, which the writes of clients make sure of first; then nothing has changed.
    pub(crate) fn commit_locked<const BLOCKS: usize>(
        &self,
        lane: &mut LaneState,
        kind: RecordKind,
        range: ByteRange,
        data: &[u8],
        asker: Asker,
        waker: Option<&Waker>,
    ) -> Option<(Durable, Location)> {
        let (stored, location) = self.store_locked::<BLOCKS>(lane, kind, range, data, asker, waker)?;
        // 5. Fence, and only then may the caller let the lane go and complete: another processor's fence does
        //    not drain this one's buffers.
        let fence = match kind {
            RecordKind::Fill => MutationPoint::FillFence,
            RecordKind::ParkedWrite => MutationPoint::ParkedFence,
            _ => MutationPoint::WriteFence,
        };
        Some((self.region().fence(fence, stored), location))
    }

    /// As [`commit_locked`](Self::commit_locked) without its last step, the fence: the caller does it before it lets the lane go,
    /// and before it stores another record there.
    pub(crate) fn store_locked<const BLOCKS: usize>(
        &self,
        lane: &mut LaneState,
        kind: RecordKind,
        range: ByteRange,
        data: &[u8],
        asker: Asker,
        waker: Option<&Waker>,
    ) -> Option<(InFlight, Location)> {
        let blocks = if self.identity().data_crc { blocks_in(range) } else { 0 };
        let lines = if self.identity().data_crc { checksum_lines(range) } else { 0 };

        // 1. Reserve everything that could fail: a slot for each line, data space, nodes of the index. The
        //    lines that step 4 will touch come while the data is copied.
        if !self.make_room(lane, 1 + lines, range.len(), asker, waker) {
            return None;
        }
        if BLOCKS > FEW_BLOCKS {
            lane.ensure_checksums()?;
        }
        lane.index.reserve(blocks_in(range));
        let keys = self.keys(range);
        lane.index.ask::<E>(keys.clone());
        let data_offset = self.take_data(lane, range.len());
        let segment = lane.open.as_ref()?.segment;
        let at = self.segments[segment as usize].base + data_offset;

        // 2. Copy the data, summing it in the same pass.
        let (mut few, mut many) = ([0; FEW_BLOCKS], Vec::new());
        let checksums = if BLOCKS <= FEW_BLOCKS {
            &mut few[..blocks]
        } else {
            many = lane.take_checksums();
            &mut many[..blocks]
        };
        let copied = if self.identity().data_crc {
            let first = (CHECKSUM_BLOCK - range.start % CHECKSUM_BLOCK).min(range.len());
            self.region().store_summed(at, data, first as usize, checksums)
        } else {
            // 3. Without checksums a torn write would not show, so the data is durable before a record can name it.
            //    With them the fence of step 5 serves data and record.
            let copied = self.region().store(at, data);
            self.region().fence(MutationPoint::WriteDataFence, copied);
            self.region().nothing_in_flight()
        };

        let in_parts = !(range.start | range.end).is_multiple_of(CHECKSUM_BLOCK);
        lane.index.ask_further::<E>(keys, in_parts);

        // 4. Sequence number and epoch, index, record: their order is the order of commit.
        let mut record = Record::new(kind, range);
        record.data_offset = (data_offset as u32).into();
        let (location, stored) = self.append(lane, record, checksums);
        self.index_range(lane, range, location, data_offset as u32, checksums);
        if BLOCKS > FEW_BLOCKS {
            lane.return_checksums(many);
        }
        if !lane.overlay.is_empty() && MutationPoint::WriteHeals.is_active() {
            lane.overlay.heal(range);
        }
        if kind.is_parked() {
            let sequence = lane.next_sequence - 1;
            lane.parked.insert(range, Parked { location, sequence, zeroes: false });
        } else if !lane.parked.is_empty() && MutationPoint::ParkedSuperseded.is_active() {
            lane.parked.forget(range);
        }
        if MutationPoint::WriteCancelsFills.is_active() {
            lane.cancel_fills(range);
        }

        match kind {
            RecordKind::Fill => lane.counters.filled += range.len(),
            RecordKind::ParkedWrite => {}
            _ => lane.counters.written += range.len(),
        }
        Some((copied.and(stored), location))
    }

    /// The numbers in their lane of the blocks that `range`, which lies in one chunk, touches.
    pub(crate) const fn keys(&self, range: ByteRange) -> RangeInclusive<u32> {
        self.identity().lanes.key(range.start)..=self.identity().lanes.key(range.end - 1)
    }

    /// Points the blocks of `range` at the record at `location`, whose data begin at `data_offset` of its segment; `checksums` are
    /// those of its first blocks, as far as they are known.
    pub(crate) fn index_range(
        &self,
        lane: &mut LaneState,
        range: ByteRange,
        location: Location,
        data_offset: u32,
        checksums: &[u32],
    ) {
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
            lane.index.set_whole(self.identity().lanes.key(whole.start), location, blocks);
        }
        let head = ByteRange { start: range.start, end: whole.start.min(range.end) };
        let tail = ByteRange { start: whole.end.max(head.end), end: range.end };
        for (block, first, end) in blocks(head).chain(blocks(tail)) {
            let key = self.identity().lanes.key(block * CHECKSUM_BLOCK);
            lane.index.set_parts(key, first, end, location);
        }
    }
}
