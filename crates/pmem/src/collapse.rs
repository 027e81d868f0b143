//! Huge pages for memory that is already in use.
//!
//! The content of a memory file is in small pages. After they are collapsed into huge pages, such as a DAX device uses
//! without this, the page walk of a random access takes a fraction of the time. The hint alone does not collapse them: it
//! affects neither pages that were allocated before it, nor any pages if the administrator left huge pages of shared memory
//! at `never`, their default.
//!
//! Invariants: only the end of the mapping waits for the thread, for one piece at most. (The synchronous variant,
//! `collapse_now`, has a timeout.) The thread changes no byte, and the kernel reports failing memory as an error, not as a
//! signal.
//!
//! Elsewhere: the choice of the memory.

use crate::memory::Memory;
use cbd_sys::memory::collapse;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes collapsed at a time: some 25 ms of work.
const PIECE: usize = 8 << 20;
/// Delay before the first piece: the process that has just opened the region reads it first.
const HEAD_START: Duration = Duration::from_secs(1);
/// After this time the remaining pages stay small.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Lower priority than every thread for which clients wait.
const NICE: i32 = 10;

/// The timeout of `collapse_now`, for which the opening thread waits.
const TIMEOUT_NOW: Duration = Duration::from_secs(3);

/// Collapses the memory synchronously: for memory that is used immediately, such as that of a benchmark. It stops at the
/// timeout.
pub(crate) fn collapse_now(memory: &Memory) {
    let begun = Instant::now();
    for start in (0..memory.len()).step_by(PIECE) {
        let end = memory.len().min(start + PIECE);
        if collapse(memory.base() + start, end - start).is_err() || begun.elapsed() > TIMEOUT_NOW {
            return;
        }
    }
}

/// The handle of the thread; dropping it ends the thread. The memory must outlive it.
#[derive(Debug)]
pub(crate) struct Collapse {
    shared: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
    /// The process that started the thread: a forked child has a copy of the handle, but no thread.
    process: u32,
}

impl Collapse {
    /// Starts the thread for `memory`; the caller drops the returned handle before it unmaps the memory. If no thread can be
    /// started, the pages stay small.
    pub fn begin(memory: &Memory) -> Self {
        Self::begin_from(memory, 0)
    }

    /// As [`begin`](Self::begin), for the memory from byte `from` on, which begins a page.
    pub fn begin_from(memory: &Memory, from: usize) -> Self {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let theirs = Arc::clone(&shared);
        let (base, length) = (memory.base() + from, memory.len() - from);
        let work = move || {
            let _ = rustix::process::setpriority_process(None, NICE);
            let begun = Instant::now();
            if is_over(&theirs, HEAD_START) {
                return;
            }
            for start in (0..length).step_by(PIECE) {
                let piece = PIECE.min(length - start);
                // The range stays mapped while this thread runs: its owner drops the `Collapse` before it unmaps the range.
                // If the kernel has no huge page, this piece and the remaining ones stay small.
                if is_over(&theirs, Duration::ZERO)
                    || collapse(base + start, piece).is_err()
                    || begun.elapsed() > TIMEOUT
                {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("cbd-huge-pages".to_owned()).spawn(work).ok();
        Self { shared, thread, process: std::process::id() }
    }

    #[cfg(test)]
    fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Collapse {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return std::mem::forget(self.thread.take());
        }
        let (is_over, changed) = &*self.shared;
        *is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether the end of the mapping was requested, now or within `timeout`.
fn is_over((is_over, changed): &(Mutex<bool>, Condvar), timeout: Duration) -> bool {
    let is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
    if timeout.is_zero() {
        return *is_over;
    }
    let waited = changed.wait_timeout_while(is_over, timeout, |is_over| !*is_over);
    *waited.unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, OpenOptions};
    use cbd_types::Pmem;

    fn file_in_memory(length: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in memory");
        file.as_file().set_len(length).expect("its size");
        file
    }

    #[test]
    fn a_mapping_that_ends_early_does_not_wait_for_its_huge_pages() {
        let file = file_in_memory(64 << 20);
        let begun = Instant::now();
        for _ in 0..20 {
            drop(Mapping::open(file.path(), &OpenOptions::default()).expect("opened"));
        }
        assert!(begun.elapsed() < 20 * HEAD_START, "{:?}", begun.elapsed());
    }

    #[test]
    fn concurrent_stores_and_loads_keep_their_bytes_while_pages_are_collapsed() {
        let mapping = Mapping::anonymous(32 << 20).expect("memory");
        let collapse = Collapse::begin(mapping.memory());
        let mut round = 0u8;
        while !collapse.is_finished() {
            round = round.wrapping_add(1);
            for page in 0..mapping.len() / 4096 {
                mapping.store(page * 4096, &[round; 64]);
                mapping.fence();
                let mut read = [0; 64];
                mapping.load(page * 4096, &mut read).expect("it does not fail");
                assert_eq!(read, [round; 64], "page {page}");
            }
        }
        drop(collapse);
        assert_eq!(mapping.failed(), None);
    }

    #[test]
    fn a_file_truncated_during_a_collapse_ends_no_process() {
        let file = file_in_memory(32 << 20);
        let mapping = Mapping::open(file.path(), &OpenOptions::default()).expect("opened");
        let collapse = Collapse::begin(mapping.memory());
        file.as_file().set_len(64 << 10).expect("cut");
        drop(collapse);
        assert!(mapping.load(16 << 20, &mut [0; 64]).is_err());
    }
}
