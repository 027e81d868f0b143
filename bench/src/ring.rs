//! Many concurrent writes to one file, as an asynchronous program submits them.
//!
//! Invariants: no write is in flight when a call returns, so no buffer is freed while the kernel uses it.

use crate::scale::Sources;
use crate::turns::since;
use cbd_types::{Error, ErrorKind, Result};
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Instant;

/// Maximum number of writes in flight.
const DEPTH_MAX: u32 = 64;

/// A file with a ring of its own.
pub struct FileRing {
    ring: IoUring,
    file: File,
}

impl FileRing {
    /// Creates a ring for `file`.
    ///
    /// # Errors
    /// When the system refuses the ring.
    pub fn new(file: File) -> Result<Self> {
        let ring = IoUring::new(DEPTH_MAX).map_err(|error| system("no ring for a client", &error))?;
        Ok(Self { ring, file })
    }

    /// Writes 4 KiB to each of `places`, with at most `depth` writes in flight; records the time of each in nanoseconds.
    ///
    /// # Errors
    /// The first error of a write; the writes in flight have completed by then.
    pub fn write(
        &mut self,
        places: &[u64],
        sources: &Sources,
        depth: usize,
        taken: &mut Vec<u32>,
    ) -> Result<()> {
        let mut begun = vec![Instant::now(); places.len()];
        let mut rest = places.iter().enumerate();
        let mut in_flight = 0;
        let mut failed = None;
        loop {
            while in_flight < depth.min(DEPTH_MAX as usize)
                && failed.is_none()
                && let Some((number, &place)) = rest.next()
            {
                begun[number] = Instant::now();
                self.push(number as u64, place, sources.get(number))?;
                in_flight += 1;
            }
            if in_flight == 0 {
                return failed.map_or(Ok(()), Err);
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(system("a ring that does not go on", &error));
                }
                _ => {}
            }
            for done in self.ring.completion() {
                in_flight -= 1;
                taken.push(since(begun[done.user_data() as usize]));
                if done.result() != 4096 {
                    let error = io::Error::from_raw_os_error(-done.result().min(0));
                    failed = Some(system("a write through a ring", &error));
                }
            }
        }
    }

    fn push(&mut self, number: u64, place: u64, data: &[u8]) -> Result<()> {
        let descriptor = types::Fd(self.file.as_raw_fd());
        let entry = opcode::Write::new(descriptor, data.as_ptr(), data.len() as u32)
            .offset(place)
            .build()
            .user_data(number);
        // SAFETY: the bytes are borrowed by `write`, which returns when no write is in flight. If the ring itself fails before
        // that, the kernel only reads from pages that it has pinned.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| Error::new(ErrorKind::System, "a ring is full although it was counted"))
    }
}

fn system(text: &str, error: &io::Error) -> Error {
    Error::new(ErrorKind::System, format!("{text}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn every_write_is_made_and_timed() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(64 * 4096).expect("a size");
        let mut ring = FileRing::new(file.try_clone().expect("a descriptor")).expect("a ring");
        let places: Vec<u64> = (0..40).map(|number| number * 4096).collect();
        let (sources, mut taken) = (Sources::new(4096), Vec::new());
        ring.write(&places, &sources, 16, &mut taken).expect("written");
        assert_eq!(taken.len(), 40);
        let mut read = [0; 4096];
        for (number, &place) in places.iter().enumerate() {
            file.read_exact_at(&mut read, place).expect("read");
            assert!(read == *sources.get(number), "{number}");
        }
    }

    #[test]
    fn a_write_that_fails_is_an_error_and_the_rest_ends() {
        let file = File::open("/dev/null").expect("a file that cannot be written");
        let mut ring = FileRing::new(file).expect("a ring");
        let places = vec![0; 40];
        assert!(ring.write(&places, &Sources::new(4096), 16, &mut Vec::new()).is_err());
    }
}
