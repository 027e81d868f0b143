//! Writes: one lane, one record, one fence.

use super::Cache;
use crate::{
    Environment,
    base::{Lack, Requester},
    lane::{Content, FEW_BLOCKS, MANY_BLOCKS},
};
use cbd_format::record::{RecordClass, RecordKind, blocks_in};
use cbd_types::{ByteRange, Class, Durable, Error, ErrorKind, MutationPoint, Result};
use core::task::Waker;

/// Whether a request got space.
#[derive(Debug)]
pub enum Admission {
    /// The request is complete, and durable.
    Done(Durable),
    /// There was no space, or a bypass that the request overlaps is on its way to the backing device, or the mode has changed and
    /// the request is to go past the cache; nothing has changed. The request's waker is called when reclaim has freed space, when
    /// the bypass has ended, or at once.
    Full,
}

impl<E: Environment> Cache<E> {
    /// Writes `data` to `range`, which lies in one chunk and is at most an atomic unit. Durable on [`Admission::Done`], and
    /// recovered whole or not at all.
    ///
    /// # Errors
    /// If the cache was stopped; [`ErrorKind::Backing`] if there is no space and the backing device has long refused the data
    /// that must be written back first; [`ErrorKind::System`] if there is no memory, and nothing has changed.
    pub fn write(&self, range: ByteRange, data: &[u8], waker: &Waker) -> Result<Admission> {
        self.write_marked(Class::Unmarked, range, data, waker)
    }

    /// As [`write`](Self::write), for data of this class.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    #[inline]
    pub fn write_marked(
        &self,
        class: Class,
        range: ByteRange,
        data: &[u8],
        waker: &Waker,
    ) -> Result<Admission> {
        debug_assert_eq!(range.len(), data.len() as u64);
        debug_assert!(self.is_piece(range), "{range} is no piece");
        self.base().gate().check_writable()?;
        // Most writes touch one or two blocks: their checksums need no kilobyte of scratch.
        if blocks_in(range) <= FEW_BLOCKS {
            self.commit_write::<FEW_BLOCKS>(class, range, data, waker)
        } else {
            self.commit_write::<MANY_BLOCKS>(class, range, data, waker)
        }
    }

    fn commit_write<const BLOCKS: usize>(
        &self,
        class: Class,
        range: ByteRange,
        data: &[u8],
        waker: &Waker,
    ) -> Result<Admission> {
        let base = self.base();
        let lane = self.prefetched_lane(range);
        let mut state = lane.lock_for_request(base);
        if base.mode().refuses_dirty() {
            drop(state);
            return Self::goes_past(waker);
        }
        if let Some(outcome) = Self::waits_for_bypass(&mut state, range, waker) {
            return outcome;
        }
        // A failed store may have been the lane's last record: a later record would prove that one, so none may follow.
        base.region().check_stores(MutationPoint::RecordAfterFailure)?;
        lane.announce(base);
        let content = Content { class: class_of(class), ..RecordKind::Write.into() };
        let requester = Requester::Client;
        Ok(match state.commit::<E, BLOCKS>(base, content, range, data, requester, Some(waker)) {
            Ok((durable, _)) => {
                base.region().check_stores(MutationPoint::WriteStoreCheck)?;
                Admission::Done(durable)
            }
            Err(Lack::Space) => {
                self.backing().check_not_stalled()?;
                Admission::Full
            }
            Err(Lack::Memory) => return no_memory(),
            Err(Lack::Data) => return other_data(),
        })
    }
}

/// The class of a record whose data is of this class.
#[inline]
pub(super) const fn class_of(class: Class) -> RecordClass {
    match class {
        Class::Unmarked => RecordClass::Unmarked,
        Class::Metadata => RecordClass::Metadata,
    }
}

/// The error of a write whose data is not what the checksum is of that has come with it.
#[cold]
#[inline(never)]
pub(super) fn other_data<T>() -> Result<T> {
    Err(cbd_types::Request::other_data())
}

/// The error of a request for which there is no memory. The request does not wait: no request is woken when memory becomes
/// available.
#[cold]
#[inline(never)]
pub(super) fn no_memory() -> Result<Admission> {
    Err(Error::new(ErrorKind::System, "there is no memory for the request; nothing was written"))
}
