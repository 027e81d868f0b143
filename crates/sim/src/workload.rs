//! The requests of simulated clients: ranges where caches break (borders of chunks, the ends of the device,
//! the same few blocks repeatedly), in sizes from one sector to a megabyte.

use crate::random::Seeded;
use cbd_types::{ByteRange, CHUNK, Operation};

/// The weight of each operation.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Writes.
    pub write: u64,
    /// Reads.
    pub read: u64,
    /// Flushes.
    pub flush: u64,
    /// Discards.
    pub discard: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Changes out of a thousand that are FUA.
    pub fua_permille: u64,
    /// Requests out of a thousand that are larger than the atomic unit.
    pub large_permille: u64,
}

impl Mix {
    /// All operations, mostly writes.
    pub const ALL: Self = Self {
        write: 50,
        read: 25,
        flush: 8,
        discard: 4,
        write_zeroes: 5,
        fua_permille: 80,
        large_permille: 30,
    };
}

/// Makes requests for a device.
#[derive(Clone, Debug)]
pub struct Workload {
    size: u64,
    sector: u64,
    atomic_unit: u64,
    mix: Mix,
    hot: Vec<ByteRange>,
    /// The sequential reads that clients continue now and then.
    streams: [Stream; 2],
    /// Writes out of a thousand that continue a stream, and these streams.
    sequential_writes_permille: u64,
    written: [Stream; 2],
}

/// Sequential requests: where the next one begins, and the length of each.
#[derive(Clone, Copy, Default, Debug)]
struct Stream {
    next: u64,
    length: u64,
}

/// A request to submit: an operation and its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    /// The operation.
    pub operation: Operation,
    /// Its range; empty for flushes.
    pub range: ByteRange,
    /// Whether it is FUA.
    pub fua: bool,
}

impl Workload {
    /// Reads out of a thousand that continue a stream.
    const SEQUENTIAL_PERMILLE: u64 = 400;
    /// Bytes around each hot offset.
    const HOT: u64 = 96 << 10;

    /// Requests for a device of `size` bytes.
    #[must_use]
    pub fn new(size: u64, sector: u32, atomic_unit: u64, mix: Mix) -> Self {
        let around = |offset: u64| ByteRange {
            start: offset.saturating_sub(Self::HOT / 2),
            end: (offset + Self::HOT / 2).min(size),
        };
        let borders = (0..=size / CHUNK).map(|chunk| around(chunk * CHUNK));
        let hot = borders.chain([around(size)]).filter(|hot| !hot.is_empty()).collect();
        Self {
            size,
            sector: u64::from(sector),
            atomic_unit,
            mix,
            hot,
            streams: [Stream::default(); 2],
            sequential_writes_permille: 0,
            written: [Stream::default(); 2],
        }
    }

    /// The same with sequential writes.
    #[must_use]
    pub fn with_sequential_writes(self, permille: u64) -> Self {
        Self { sequential_writes_permille: permille, ..self }
    }

    /// The next request.
    pub fn next(&mut self, random: &mut Seeded) -> Wish {
        let mix = &self.mix;
        let weights = [
            (mix.write, Operation::Write),
            (mix.read, Operation::Read),
            (mix.flush, Operation::Flush),
            (mix.discard, Operation::Discard),
            (mix.write_zeroes, Operation::WriteZeroes),
        ];
        let mut left = random.below(weights.iter().map(|(weight, _)| weight).sum());
        let mut operation = Operation::Write;
        for (weight, candidate) in weights {
            if left < weight {
                operation = candidate;
                break;
            }
            left -= weight;
        }
        if operation == Operation::Flush {
            return Wish { operation, range: ByteRange::at(0, 0), fua: false };
        }
        if operation == Operation::Read && random.chance(Self::SEQUENTIAL_PERMILLE) {
            let mut streams = self.streams;
            let range = self.sequential(&mut streams, random);
            self.streams = streams;
            return Wish { operation, range, fua: false };
        }
        if operation == Operation::Write
            && self.sequential_writes_permille > 0
            && random.chance(self.sequential_writes_permille)
        {
            let mut streams = self.written;
            let range = self.sequential(&mut streams, random);
            self.written = streams;
            return Wish { operation, range, fua: false };
        }
        let range = self.range(random);
        Wish { operation, range, fua: operation != Operation::Read && random.chance(mix.fua_permille) }
    }

    /// The next request of a stream. A stream ends by chance and at the end of the device; another one begins anywhere.
    fn sequential(&self, streams: &mut [Stream], random: &mut Seeded) -> ByteRange {
        let number = random.below(streams.len() as u64) as usize;
        let mut stream = streams[number];
        if stream.next >= self.size || stream.length == 0 || random.chance(20) {
            stream.next = self.range(random).start;
            stream.length = *random.pick(&[self.sector, 4096, 16 << 10, 64 << 10]);
            stream.length = stream.length.next_multiple_of(self.sector);
        }
        let range = ByteRange { start: stream.next, end: (stream.next + stream.length).min(self.size) };
        stream.next = range.end;
        streams[number] = stream;
        range
    }

    fn range(&self, random: &mut Seeded) -> ByteRange {
        let whole = ByteRange { start: 0, end: self.size };
        let window = if random.chance(40) { whole } else { *random.pick(&self.hot) };
        let sectors = window.len() / self.sector;
        let start = window.start / self.sector * self.sector + random.below(sectors) * self.sector;
        let start = if random.chance(300) { start & !4095 } else { start };
        let length = self.length(random);
        ByteRange { start, end: (start + length).min(self.size) }
    }

    fn length(&self, random: &mut Seeded) -> u64 {
        if random.chance(self.mix.large_permille) {
            let limit = *random.pick(&[64 << 10, 256 << 10, 1 << 20]);
            return random.between(1, limit / self.sector) * self.sector;
        }
        let sectors = match random.below(10) {
            0..3 => 1,
            3..6 => random.between(1, 8),
            6..8 => (4096 / self.sector).max(1),
            8 => random.between(1, self.atomic_unit / self.sector),
            _ => self.atomic_unit / self.sector,
        };
        sectors * self.sector
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_lies_on_the_device_in_whole_sectors() {
        let size = 2 * CHUNK + 777 * 512;
        let mut workload = Workload::new(size, 512, 16 << 10, Mix::ALL);
        let mut random = Seeded::new(3);
        for _ in 0..10_000 {
            let wish = workload.next(&mut random);
            assert!(
                wish.range.end <= size
                    && wish.range.start.is_multiple_of(512)
                    && wish.range.end.is_multiple_of(512)
            );
            assert_eq!(wish.range.is_empty(), wish.operation == Operation::Flush);
        }
    }
}
