//! The newest dirty data of each byte of the device, in ascending order, as far as it is intact.
//!
//! Invariants: data that is passed on was read without an error, and if there are checksums, they were verified
//! immediately before, over all data of the key; all other dirty data is listed.
//!
//! Elsewhere: the use of the data ([`Sink`]).

use crate::format::{self, Checksum, Key};
use crate::log::Walk;
use crate::pieces::{Data, Piece, Pieces};
use crate::report::{RangeList, Reason};
use crate::{Cache, Image, Progress, Stage};
use cbd_types::{ByteRange, Result};
use serde::Serialize;
use std::collections::HashSet;

/// Data is read and passed on in parts of at most this many bytes.
const PART: usize = 1 << 20;
/// If a part cannot be read, it is read in pages.
const PAGE: usize = 4096;

/// The receiver of the data.
pub trait Sink {
    /// Receives bytes for the device from `offset` on; calls come in ascending order and never overlap.
    ///
    /// # Errors
    /// An error ends the scan.
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()>;
}

/// No receiver: the data is only verified.
impl Sink for () {
    fn take(&mut self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// The result of a scan.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Scanned {
    /// Ranges of the device whose newest data was passed on.
    pub dirty: RangeList,
    /// Ranges whose newest data is not available.
    pub damaged: RangeList,
    /// Number of passes over the log.
    pub windows: u64,
}

impl<I: Image> Cache<I> {
    /// Passes the newest dirty data of each byte to `sink`.
    ///
    /// # Errors
    /// The sink's.
    pub fn scan(&self, sink: &mut dyn Sink, progress: Progress<'_>) -> Result<Scanned> {
        let mut scan = Scan {
            cache: self,
            sink,
            progress,
            scanned: Scanned::default(),
            part: vec![0; PART],
            held: 0,
            at: 0,
        };
        let mut from = 0;
        while from != u64::MAX {
            let pieces = scan.window(from);
            let bad = scan.verify(&pieces);
            let all = pieces.iter().map(|(range, _)| range.len()).sum::<u64>();
            let before = scan.scanned.dirty.bytes + scan.scanned.damaged.bytes;
            for (range, piece) in pieces.iter() {
                scan.pass_on(range, piece, &bad)?;
                let done = scan.scanned.dirty.bytes + scan.scanned.damaged.bytes;
                (scan.progress)(Stage::PassingOn, done, before + all);
            }
            scan.pass_held()?;
            from = pieces.end();
            scan.scanned.windows += 1;
        }
        Ok(scan.scanned)
    }
}

struct Scan<'a, I> {
    cache: &'a Cache<I>,
    sink: &'a mut dyn Sink,
    progress: Progress<'a>,
    scanned: Scanned,
    /// Data that was read and not passed on yet: `held` bytes, for the device from `at` on.
    part: Vec<u8>,
    held: usize,
    at: u64,
}

impl<I: Image> Scan<'_, I> {
    /// The newest keys of the device from `from` on, as far as memory permits.
    fn window(&mut self, from: u64) -> Pieces {
        let mut pieces = Pieces::new(from, self.cache.options.pieces_max);
        let mut walk = Walk::new(self.cache);
        while let Some(keys) = walk.next_set() {
            for logged in keys {
                if self.cache.is_settled(&logged.key) {
                    continue;
                }
                let Some(range) = Cache::<I>::range_of(&logged.key) else { continue };
                let data = match self.cache.data_of(&logged.key) {
                    Ok(at) => Data::At(at),
                    Err(reason) => Data::Lost(reason),
                };
                pieces.cover(range, logged.at, data);
            }
        }
        pieces
    }

    /// The keys whose data does not match its checksum.
    fn verify(&mut self, pieces: &Pieces) -> HashSet<u64> {
        if !self.cache.has_data_crc() {
            return HashSet::new();
        }
        let mut keys = pieces.keys();
        let (mut done, all) = (0, keys.len() as u64);
        keys.retain(|&at| {
            done += 1;
            (self.progress)(Stage::Verifying, done, all);
            !self.is_valid(at)
        });
        keys.into_iter().collect()
    }

    fn is_valid(&mut self, key_at: u64) -> bool {
        let mut entry = [0; format::KEY_SIZE];
        if self.cache.image.read(key_at, &mut entry).is_err() {
            return false;
        }
        let key = Key::read(&entry);
        let Ok(mut at) = self.cache.data_of(&key) else { return false };
        let mut left = key.length as usize;
        let mut sum = Checksum::new();
        while left > 0 {
            // The buffer is unused between windows.
            let part = &mut self.part[..left.min(PART)];
            if self.cache.image.read(at, part).is_err() {
                return false;
            }
            sum.add(part);
            at += part.len() as u64;
            left -= part.len();
        }
        sum.value() == key.data_crc
    }

    fn pass_on(&mut self, range: ByteRange, piece: &Piece, bad: &HashSet<u64>) -> Result<()> {
        let at = match piece.data {
            Data::Lost(reason) => return self.mark_lost(range, reason),
            Data::At(_) if bad.contains(&piece.key) => return self.mark_lost(range, Reason::Checksum),
            Data::At(at) => at,
        };
        let mut done = range.start;
        while done < range.end {
            if self.held == PART || self.at + self.held as u64 != done {
                self.pass_held()?;
                self.at = done;
            }
            let length = (range.end - done).min((PART - self.held) as u64);
            let part = ByteRange::at(done, length);
            self.read(part, at + (done - range.start))?;
            done += length;
        }
        Ok(())
    }

    /// Appends a part to the held data; page by page if it cannot be read as a whole.
    fn read(&mut self, range: ByteRange, at: u64) -> Result<()> {
        let end = self.held + range.len() as usize;
        if self.cache.image.read(at, &mut self.part[self.held..end]).is_ok() {
            self.held = end;
            self.scanned.dirty.add(range, None);
            return Ok(());
        }
        let mut done = range.start;
        while done < range.end {
            let from = at + (done - range.start);
            let to_border = PAGE as u64 - from % PAGE as u64;
            let page = ByteRange::at(done, to_border.min(range.end - done));
            let mut bytes = [0; PAGE];
            let bytes = &mut bytes[..page.len() as usize];
            if self.cache.image.read(from, bytes).is_ok() {
                if self.at + self.held as u64 != done {
                    self.pass_held()?;
                    self.at = done;
                }
                self.part[self.held..self.held + bytes.len()].copy_from_slice(bytes);
                self.held += bytes.len();
                self.scanned.dirty.add(page, None);
            } else {
                self.mark_lost(page, Reason::Unreadable)?;
            }
            done = page.end;
        }
        Ok(())
    }

    fn mark_lost(&mut self, range: ByteRange, reason: Reason) -> Result<()> {
        self.scanned.damaged.add(range, Some(reason));
        Ok(())
    }

    /// Passes the held data on.
    fn pass_held(&mut self) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        if held > 0 {
            self.sink.take(self.at, &self.part[..held])?;
        }
        Ok(())
    }
}
