//! Requests that the cache executes: lookups, writes and zeroes, piece by piece.
//!
//! Invariants: a request that finds no space continues where it stopped.

use crate::parked::Progress;
use alloc::vec::Vec;
use cbd_engine::{Admission, Cache, Environment, Miss};
use cbd_types::{ByteRange, Operation, Request, Result};
use core::task::Waker;

/// A request that changes the device; its bytes are in its own buffer or in the caller's memory.
pub(super) struct Change<'a> {
    pub(super) operation: Operation,
    pub(super) range: ByteRange,
    pub(super) data: &'a [u8],
    pub(super) fua: bool,
}

impl<'a> Change<'a> {
    pub(super) fn of(request: &'a Request) -> Self {
        let (operation, range, fua) = (request.operation, request.range, request.fua);
        Self { operation, range, data: &request.buffer, fua }
    }
}

/// Reads the part of `range` that the cache holds, and adds the rest to `misses`, which is empty after an error.
pub(super) fn look_up<E: Environment>(
    cache: &Cache<E>,
    range: ByteRange,
    out: &mut [u8],
    misses: &mut Vec<Miss>,
) -> Result<()> {
    for piece in cache.pieces(range) {
        let out = &mut out[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
        if let Err(error) = cache.read(piece, out, misses) {
            misses.drain(..).for_each(|miss| cache.cancel_fill(miss));
            return Err(error);
        }
    }
    Ok(())
}

/// Executes a write, a discard or zeroing as far as space permits. `None` if it has to wait for space; its waker is then
/// registered.
pub(super) fn advance<E: Environment>(
    cache: &Cache<E>,
    change: &Change<'_>,
    progress: &mut Progress,
    waker: &Waker,
) -> Option<Result<()>> {
    let range = change.range;
    match progress {
        Progress::Written(written) => {
            for piece in cache.pieces(ByteRange { start: *written, end: range.end }) {
                let at = (piece.start - range.start) as usize;
                match cache.write(piece, &change.data[at..at + piece.len() as usize], waker) {
                    Ok(Admission::Done(_)) => *written = piece.end,
                    Ok(Admission::Full) => return None,
                    Err(error) => return Some(Err(error)),
                }
            }
        }
        Progress::Zeroed(zeroed) => {
            let discard = change.operation == Operation::Discard;
            match cache.zero(range, discard, zeroed, waker) {
                Ok(Admission::Done(_)) => {}
                Ok(Admission::Full) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        Progress::Reading | Progress::Forcing | Progress::Around(_) | Progress::Flushing(_) => {}
    }
    Some(if change.fua { cache.force_unit_access(&[range]) } else { Ok(()) })
}
