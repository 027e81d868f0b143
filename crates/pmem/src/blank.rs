//! Checks whether a region that will be formatted holds data.
//!
//! Invariants: nothing is changed. Holes are not read. Both ends, where partition tables and many file systems have their
//! signatures, are always read. Samples all over the region, and then the rest, are read as far as the timeout permits, so a
//! huge region costs seconds.
//!
//! Elsewhere: the reaction to data that was found.

use crate::mapping::Mapping;
use cbd_types::Pmem;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes at both ends that are read first.
const END: u64 = 1 << 20;
/// Number of samples.
const SAMPLES: u64 = 16384;
/// Bytes of a sample, and of one read.
const SAMPLE: u64 = 4096;
const PIECE: u64 = 1 << 20;
/// Timeout of the samples, and of the full read after them.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a search for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Look {
    /// The offset of the first byte found that is not zero.
    pub data_at: Option<u64>,
    /// Whether the whole region was read.
    pub whole: bool,
}

impl Mapping {
    /// Searches the region for data.
    #[must_use]
    pub fn look_for_data(&self) -> Look {
        let length = self.len();
        let ends = [0..END.min(length), length.saturating_sub(END)..length];
        let found = |at| Look { data_at: Some(at), whole: false };
        for end in ends {
            if let Some(at) = self.data_in(end) {
                return found(at);
            }
        }
        let Some(extents) = self.extents() else {
            // A file with very many holes: the bytes between them are only sampled.
            return self.sample(0..length).map_or(Look { data_at: None, whole: false }, found);
        };
        for extent in &extents {
            if let Some(at) = self.sample(extent.clone()) {
                return found(at);
            }
        }
        let end = Instant::now() + TIMEOUT;
        for extent in extents {
            let mut at = extent.start;
            while at < extent.end {
                if Instant::now() > end {
                    return Look { data_at: None, whole: false };
                }
                let next = (at + PIECE).min(extent.end);
                if let Some(at) = self.data_in(at..next) {
                    return found(at);
                }
                at = next;
            }
        }
        Look { data_at: None, whole: true }
    }

    /// Reads pages all over the range, evenly distributed, distant ones first.
    fn sample(&self, range: Range<u64>) -> Option<u64> {
        let pages = (range.end - range.start).div_ceil(SAMPLE);
        // This range's share of the samples, and a minimum for a small range.
        let due =
            (SAMPLES as u128 * pages as u128 * u128::from(SAMPLE) / u128::from(self.len().max(1))) as u64;
        let count = due.max(16).min(pages).next_power_of_two();
        let bits = count.trailing_zeros();
        let end = Instant::now() + TIMEOUT;
        for number in 0..count {
            if number % 64 == 0 && Instant::now() > end {
                return None;
            }
            // Bit reversal: 0, 1/2, 1/4, 3/4, 1/8 ...
            let place = if bits == 0 { 0 } else { number.reverse_bits() >> (64 - bits) };
            let page = (u128::from(place) * u128::from(pages) / u128::from(count)) as u64;
            let at = range.start + page * SAMPLE;
            let data = self.data_in(at..(at + SAMPLE).min(range.end));
            if data.is_some() {
                return data;
            }
        }
        None
    }

    /// The offset of the first byte in the range that is not zero. Unreadable memory counts as empty: it holds nothing that
    /// formatting could destroy.
    fn data_in(&self, range: Range<u64>) -> Option<u64> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.load(range.start, &mut bytes).ok()?;
        bytes.iter().position(|byte| *byte != 0).map(|at| range.start + at as u64)
    }

    /// The extents of the file that hold data; the whole file if the file system does not report them. `None` for a file with
    /// very many extents.
    fn extents(&self) -> Option<Vec<Range<u64>>> {
        const MOST: usize = 65536;
        let all = || Some(std::iter::once(0..self.len()).collect());
        let Some(file) = self.file() else { return all() };
        let (mut extents, mut at) = (Vec::new(), 0);
        while at < self.len() {
            let start = match seek(&**file, SeekFrom::Data(at)) {
                Ok(start) => start,
                // The file has no more data.
                Err(Errno::NXIO) => break,
                Err(_) => return all(),
            };
            let Ok(end) = seek(&**file, SeekFrom::Hole(start)) else { return all() };
            if start >= self.len() || end <= start {
                break;
            }
            if extents.len() == MOST {
                return None;
            }
            extents.push(start..end.min(self.len()));
            at = end;
        }
        Some(extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenOptions;
    use std::os::unix::fs::FileExt;

    const LENGTH: u64 = 64 << 20;

    fn look(write: &[(u64, &[u8])]) -> Look {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(LENGTH).expect("its size");
        for (at, bytes) in write {
            file.as_file().write_all_at(bytes, *at).expect("written");
        }
        Mapping::open(file.path(), &OpenOptions::default()).expect("opened").look_for_data()
    }

    #[test]
    fn a_region_of_zeroes_and_holes_holds_no_data() {
        assert_eq!(look(&[]), Look { data_at: None, whole: true });
        assert_eq!(look(&[(20 << 20, &[0; 1 << 20])]), Look { data_at: None, whole: true });
    }

    #[test]
    fn one_byte_anywhere_is_found() {
        for at in [0, 5000, (11 << 20) + 7, (33 << 20) + 4097, LENGTH - 512, LENGTH - 1] {
            assert_eq!(look(&[(at, b"x")]).data_at, Some(at), "byte {at}");
            // Also in the middle of written zeroes, where no hole is adjacent.
            let zeroes = vec![0; LENGTH as usize];
            assert_eq!(look(&[(0, &zeroes), (at, b"x")]).data_at, Some(at), "byte {at}");
        }
    }

    #[test]
    fn memory_without_a_file_is_read_completely() {
        let memory = Mapping::anonymous(4 << 20).expect("memory");
        assert_eq!(memory.look_for_data(), Look { data_at: None, whole: true });
        memory.store((3 << 20) + 1, b"x");
        assert_eq!(memory.look_for_data().data_at, Some((3 << 20) + 1));
    }
}
