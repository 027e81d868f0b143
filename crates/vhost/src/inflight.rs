//! Requests in flight, recorded in memory that outlives the server: the front end preserves it and passes it to the
//! next server.
//!
//! The layout is the protocol's for split rings ("Inflight I/O tracking" in QEMU's vhost-user specification): for each
//! ring a head of 16 bytes and 16 for each descriptor. A front end requests memory for rings of the size that it
//! offers, but a guest may choose a larger ring (the BIOS of QEMU's machines does), so there is always room for the
//! largest. The order of the stores makes it safe to kill the server at any point:
//!
//! 1. a request is taken: its counter is stored, then its mark;
//! 2. it is answered: it is recorded as the last answered, its answer is stored in the used ring, the ring's index is
//!    incremented;
//! 3. its mark is cleared, and the used index is recorded here.
//!
//! If the server is killed before step 2 incremented the index, the request is still marked and is executed again. That
//! has the effect of one execution, since the guest has seen no answer. If it is killed before the end of step 3, the
//! index recorded here is behind the ring's, and recovery clears the mark of the last answered request.
//!
//! Invariants: recorded values are checked against their bounds; the used ring's own index is authoritative.

use crate::mapped::MappedFile;
use crate::session::RING_MAX;
use crate::{malformed, system};
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{AtomicAccess, Bytes};

const HEAD: usize = 16;
const ENTRY: usize = 16;
/// Rings begin at multiples of this.
const ALIGNMENT: usize = 64;
const VERSION: u16 = 1;

// Offsets in a ring's head.
const VERSION_AT: usize = 8;
const COUNT_AT: usize = 10;
const LAST_ANSWERED_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
// Offsets in an entry.
const MARK_AT: usize = 0;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// What the memory is in errors.
const WHAT: &str = "the memory for requests in flight";

/// The memory for all rings of a device.
#[derive(Debug)]
pub(crate) struct Area {
    file: MappedFile,
    queues: u16,
    /// Bytes of each ring's part.
    part_bytes: usize,
}

const fn ring_bytes(queue_size: u16) -> usize {
    (HEAD + ENTRY * queue_size as usize).next_multiple_of(ALIGNMENT)
}

/// Bytes of new memory for this many rings.
pub(crate) const fn bytes(queues: u16) -> u64 {
    queues as u64 * ring_bytes(RING_MAX) as u64
}

impl Area {
    /// New memory, and the file that the front end is to preserve.
    pub(crate) fn create(queues: u16) -> Result<(Self, File)> {
        let size = bytes(queues);
        let file = system::sealed_memory(size)?;
        let kept = file.try_clone().map_err(|error| {
            Error::new(ErrorKind::System, "cannot pass the memory for requests in flight to the front end")
                .caused_by(error)
        })?;
        Ok((Self::open(file, 0, size, queues, RING_MAX)?, kept))
    }

    /// Memory that a front end preserved, with room for rings of at least `queue_size`; each ring has an equal part.
    pub(crate) fn open(file: File, offset: u64, size: u64, queues: u16, queue_size: u16) -> Result<Self> {
        let share = size.checked_div(u64::from(queues)).unwrap_or(0);
        // Bytes beyond those that the largest ring needs are not used.
        let part_bytes = share.min(ring_bytes(RING_MAX) as u64) as usize / ALIGNMENT * ALIGNMENT;
        if part_bytes < ring_bytes(queue_size.max(1)) {
            return Err(malformed(format!(
                "{WHAT} cannot be used: {size} bytes for {queues} rings of {queue_size}"
            )));
        }
        let bytes = usize::from(queues) * part_bytes;
        Ok(Self { file: MappedFile::open(file, offset, bytes as u64, WHAT)?, queues, part_bytes })
    }
}

/// The part of one ring.
#[derive(Debug)]
pub(crate) struct Ring {
    area: Arc<Area>,
    begin: usize,
    size: u16,
    counter: u64,
}

impl Ring {
    /// The part of ring `index`, whose size is `size`.
    pub(crate) fn new(area: &Arc<Area>, index: usize, size: u16) -> Result<Self> {
        if index >= usize::from(area.queues) || ring_bytes(size) > area.part_bytes {
            return Err(malformed(format!(
                "ring {index} of {size} has no room among requests in flight of {} rings with {} bytes each",
                area.queues, area.part_bytes
            )));
        }
        let begin = index * area.part_bytes;
        Ok(Self { area: Arc::clone(area), begin, size, counter: 0 })
    }

    /// Heads of the requests that a previous server left in flight, in the order of submission; `used` is the index of
    /// the used ring.
    pub(crate) fn recover(&mut self, used: u16) -> Result<Vec<u16>> {
        match self.load::<u16>(VERSION_AT)? {
            0 => {
                for head in 0..self.size {
                    self.store(self.entry(head) + MARK_AT, 0_u8)?;
                }
                self.store(COUNT_AT, self.size)?;
                self.store(USED_INDEX_AT, used)?;
                self.store(VERSION_AT, VERSION)?;
            }
            VERSION if self.load::<u16>(COUNT_AT)? == self.size => {}
            VERSION => {
                return Err(malformed(format!(
                    "the requests in flight are those of a ring of {}, not of {}",
                    self.load::<u16>(COUNT_AT)?,
                    self.size
                )));
            }
            version => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "the requests in flight are recorded in version {version}; this server supports {VERSION}"
                    ),
                ));
            }
        }
        if self.load::<u16>(USED_INDEX_AT)? != used {
            let last = self.load::<u16>(LAST_ANSWERED_AT)?;
            if last < self.size {
                self.store(self.entry(last) + MARK_AT, 0_u8)?;
            }
            self.store(USED_INDEX_AT, used)?;
        }
        let mut left = Vec::new();
        for head in 0..self.size {
            if self.load::<u8>(self.entry(head) + MARK_AT)? == 1 {
                left.push((self.load::<u64>(self.entry(head) + COUNTER_AT)?, head));
            }
        }
        left.sort_unstable();
        self.counter = left.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(left.into_iter().map(|(_, head)| head).collect())
    }

    /// Step 1: the request is taken.
    pub(crate) fn mark_taken(&mut self, head: u16) -> Result<()> {
        let entry = self.entry(head);
        self.store(entry + COUNTER_AT, self.counter)?;
        self.counter = self.counter.wrapping_add(1);
        self.store(entry + MARK_AT, 1_u8)
    }

    /// Step 2: its answer is about to be stored in the used ring.
    pub(crate) fn begin_answer(&mut self, head: u16) -> Result<()> {
        let last = self.load::<u16>(LAST_ANSWERED_AT)?;
        self.store(self.entry(head) + NEXT_AT, last)?;
        self.store(LAST_ANSWERED_AT, head)
    }

    /// Step 3: its answer is stored, and the used ring's index is `used` now.
    pub(crate) fn finish_answer(&mut self, head: u16, used: u16) -> Result<()> {
        self.store(self.entry(head) + MARK_AT, 0_u8)?;
        self.store(USED_INDEX_AT, used)
    }

    /// Fails if the memory's file was truncated.
    pub(crate) fn check(&self) -> Result<()> {
        if self.area.file.is_lost() {
            return Err(Error::new(
                ErrorKind::Media,
                "the memory for requests in flight was removed: its file was truncated",
            ));
        }
        Ok(())
    }

    fn entry(&self, head: u16) -> usize {
        HEAD + ENTRY * usize::from(head)
    }

    fn load<T: AtomicAccess>(&self, at: usize) -> Result<T> {
        self.area.file.bytes().load(self.begin + at, Ordering::Acquire).map_err(outside)
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) -> Result<()> {
        self.area.file.bytes().store(value, self.begin + at, Ordering::Release).map_err(outside)
    }
}

fn outside(error: vm_memory::VolatileMemoryError) -> Error {
    Error::new(ErrorKind::System, "requests in flight cannot be recorded").caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Ring {
        let (area, _file) = Area::create(2).expect("an area");
        let mut ring = Ring::new(&Arc::new(area), 1, 8).expect("its ring");
        assert!(ring.recover(65_535).expect("fresh").is_empty());
        ring
    }

    /// The state that the next server reads.
    fn successor(ring: &Ring) -> Ring {
        Ring { area: Arc::clone(&ring.area), begin: ring.begin, size: ring.size, counter: 0 }
    }

    #[test]
    fn unanswered_requests_are_found_in_the_order_of_submission() {
        let mut ring = ring();
        for head in [5, 2, 7, 0] {
            ring.mark_taken(head).expect("recorded");
        }
        ring.begin_answer(2).expect("recorded");
        ring.finish_answer(2, 0).expect("recorded");
        let mut next = successor(&ring);
        assert_eq!(next.recover(0).expect("found"), [5, 7, 0]);
        // New requests follow them.
        next.mark_taken(1).expect("recorded");
        assert_eq!(successor(&ring).recover(0).expect("found"), [5, 7, 0, 1]);
    }

    #[test]
    fn a_server_killed_before_it_published_an_answer_executes_the_request_again() {
        let mut ring = ring();
        ring.mark_taken(3).expect("recorded");
        ring.begin_answer(3).expect("recorded");
        assert_eq!(successor(&ring).recover(65_535).expect("found"), [3]);
    }

    #[test]
    fn a_server_killed_after_it_published_an_answer_does_not_execute_the_request_again() {
        let mut ring = ring();
        ring.mark_taken(3).expect("recorded");
        ring.mark_taken(4).expect("recorded");
        ring.begin_answer(3).expect("recorded");
        assert_eq!(successor(&ring).recover(0).expect("found"), [4]);
        // The next recovery finds the same.
        assert_eq!(successor(&ring).recover(0).expect("found"), [4]);
    }

    #[test]
    fn parts_of_rings_do_not_overlap() {
        let (area, _file) = Area::create(2).expect("an area");
        let area = Arc::new(area);
        let mut rings = [0, 1].map(|index| Ring::new(&area, index, 8).expect("its ring"));
        for ring in &mut rings {
            ring.recover(0).expect("fresh");
        }
        rings[0].mark_taken(7).expect("recorded");
        assert!(successor(&rings[1]).recover(0).expect("found").is_empty());
        assert!(Ring::new(&area, 2, 8).is_err());
        assert!(Ring::new(&area, 0, RING_MAX).is_ok());
        assert!(Ring::new(&area, 0, 2 * RING_MAX).is_err());
    }

    #[test]
    fn the_size_of_a_rings_part_follows_from_the_size_of_the_memory() {
        let (_, file) = Area::create(2).expect("an area");
        let open = |bytes| Area::open(file.try_clone().expect("a file"), 0, bytes, 2, 8).map(Arc::new);
        // The size that a server allocates for exactly the announced rings: 16 bytes and 8 times 16, rounded up to a
        // multiple of 64.
        let small = open(2 * 192).expect("room for rings of 8");
        assert!(Ring::new(&small, 1, 8).is_ok());
        assert!(Ring::new(&small, 1, 16).is_err());
        let large = open(2 * 320).expect("more");
        assert!(Ring::new(&large, 1, 16).is_ok());
    }

    #[test]
    fn invalid_records_are_refused_or_bounded() {
        let ring = ring();
        ring.store(LAST_ANSWERED_AT, 60_000_u16).expect("stored");
        assert!(successor(&ring).recover(9).expect("found").is_empty());
        ring.store(COUNT_AT, 4_u16).expect("stored");
        assert!(successor(&ring).recover(9).expect_err("another size").line().contains("ring of 4"));
        ring.store(VERSION_AT, 2_u16).expect("stored");
        assert_eq!(successor(&ring).recover(9).expect_err("another version").kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn memory_that_is_too_small_is_refused() {
        let (_, file) = Area::create(1).expect("an area");
        for (offset, size, queues) in
            [(0, 192, 2), (1 << 20, 192, 1), (0, 100, 1), (u64::MAX, 192, 1), (0, 192, 0)]
        {
            let again = file.try_clone().expect("a file");
            assert!(Area::open(again, offset, size, queues, 8).is_err(), "{offset} {size} {queues}");
        }
    }
}
