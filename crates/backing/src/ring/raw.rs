//! The io_uring itself, with the memory that the kernel works on.
//!
//! Invariants: a job whose step the kernel has taken stays in its slot, with its buffer, until its completion
//! arrives; dropping the ring waits for that, and if it cannot wait, it leaks the buffers instead of freeing them.
//!
//! Elsewhere: processing completions, and jobs beyond the number of slots.
#![allow(unsafe_code)]

use crate::job::{Job, Step, Target, zeroes};
use cbd_types::BackingOp;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

const GET_EVENTS: u32 = 1;

/// A ring with one slot for each job in flight.
pub(crate) struct RawRing {
    // Declared before the slots, so that the ring is dropped before their buffers.
    ring: IoUring,
    slots: Vec<Option<Job>>,
    free: Vec<usize>,
    /// Slots whose entry is in the submission queue and which the kernel has not taken, in order.
    unsubmitted: VecDeque<usize>,
    /// Number of jobs in the kernel: their entries were taken and their completions have not arrived.
    in_kernel: usize,
}

/// Checks that this system allows a ring with all required operations.
pub(crate) fn available() -> io::Result<()> {
    let ring = build(2)?;
    let mut probe = io_uring::register::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    if needed.into_iter().all(|code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

fn build(entries: u32) -> io::Result<IoUring> {
    // With this flag completions do not interrupt the thread: they are processed when it enters the kernel next.
    match IoUring::builder().dontfork().setup_coop_taskrun().setup_taskrun_flag().build(entries) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().dontfork().build(entries)
        }
        other => other,
    }
}

impl RawRing {
    pub fn new(depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        Ok(Self {
            ring: build(entries)?,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            unsubmitted: VecDeque::with_capacity(depth),
            in_kernel: 0,
        })
    }

    pub fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Number of jobs in slots.
    pub fn held(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Number of jobs in the kernel.
    pub fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Queues the first step of a job; returns the job if there is no free slot.
    pub fn start(&mut self, job: Job, target: &Target) -> Result<(), Job> {
        let Some(slot) = self.free.pop() else { return Err(job) };
        self.slots[slot] = Some(job);
        self.queue(slot, target);
        Ok(())
    }

    fn queue(&mut self, slot: usize, target: &Target) {
        let Some(job) = &mut self.slots[slot] else { return };
        let entry = entry(job, target).user_data(slot as u64);
        // SAFETY: the memory that the entry names is the job's buffer or scratch buffer, which is on the heap, owned by the
        // job, and long enough for the step; or it is static. The job stays in its slot, untouched, until the completion has been
        // seen, and the ring's drop waits for it. The descriptor is the target's, which outlives the job's queue; an
        // entry of a closed one would fail and access no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are as many entries as slots and a slot has at most one, so there is room, except in a ring that has
        // failed permanently, whose entries the kernel does not take: then the caller takes these jobs out of the ring.
        let _ = pushed;
        self.unsubmitted.push_back(slot);
    }

    /// Submits the entries of the submission queue to the kernel.
    pub fn enter(&mut self) -> io::Result<()> {
        while !self.unsubmitted.is_empty() {
            match self.ring.submit() {
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::EAGAIN)),
                Ok(count) => self.count(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn count(&mut self, count: usize) {
        let count = count.min(self.unsubmitted.len());
        self.unsubmitted.drain(..count);
        self.in_kernel += count;
    }

    /// Removes and returns the jobs that the kernel refuses to take. No entry may be submitted after that.
    pub fn take_unsubmitted(&mut self) -> Vec<Job> {
        let slots: Vec<_> = self.unsubmitted.drain(..).collect();
        slots.into_iter().filter_map(|slot| self.release(slot)).collect()
    }

    fn release(&mut self, slot: usize) -> Option<Job> {
        let job = self.slots[slot].take();
        self.free.push(slot);
        job
    }

    /// Lets the kernel run pending completion work; if `sleep`, waits until there is a completion. Submits nothing.
    pub fn get_events(&mut self, sleep: bool) -> io::Result<()> {
        if self.in_kernel == 0 {
            return Ok(());
        }
        // SAFETY: no entry is submitted and no argument passed, so the kernel accesses no memory.
        let result = unsafe { self.ring.submitter().enter::<()>(0, u32::from(sleep), GET_EVENTS, None) };
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Waits until the kernel has no job; false if waiting is not possible, and the kernel may still have jobs.
    pub fn finish(&mut self) -> bool {
        while self.in_kernel > 0 {
            if self.completion().is_none() && self.get_events(true).is_err() {
                std::mem::forget(std::mem::take(&mut self.slots));
                return false;
            }
        }
        true
    }

    /// The slot of a step that has ended, and its result.
    pub fn completion(&mut self) -> Option<(usize, i32)> {
        let mut entry: Option<cqueue::Entry> = self.ring.completion().next();
        if entry.is_none() && self.in_kernel > 0 {
            let wanted = {
                let submission = self.ring.submission();
                submission.taskrun() || submission.cq_overflow()
            };
            if wanted && self.get_events(false).is_ok() {
                entry = self.ring.completion().next();
            }
        }
        let entry = entry?;
        self.in_kernel -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }

    /// Passes the result of a step to its job; returns the job after the last step.
    pub fn advance(
        &mut self,
        slot: usize,
        answer: i32,
        target: &Target,
    ) -> Option<(Job, cbd_types::Result<()>)> {
        let result = self.slots.get_mut(slot)?.as_mut()?.advance(target, answer);
        match result {
            Some(result) => self.release(slot).map(|job| (job, result)),
            None => {
                self.queue(slot, target);
                None
            }
        }
    }
}

fn entry(job: &mut Job, target: &Target) -> squeue::Entry {
    let file = types::Fd(target.file.as_raw_fd());
    match (job.step(target), &mut job.op) {
        (Step::Read { at, skip, length }, BackingOp::Read { buffer, .. }) => {
            let memory = &mut buffer[skip..skip + length];
            opcode::Read::new(file, memory.as_mut_ptr(), length as u32).offset(at).build()
        }
        (Step::Look { at, length }, _) => {
            let memory = job.scratch(length);
            opcode::Read::new(file, memory.as_mut_ptr(), length as u32).offset(at).build()
        }
        (Step::Write { at, skip, length }, BackingOp::Write { buffer, .. }) => {
            let memory = &buffer[skip..skip + length];
            opcode::Write::new(file, memory.as_ptr(), length as u32).offset(at).build()
        }
        (Step::WriteZeroes { at, length }, _) => {
            let memory = &zeroes()[..length];
            opcode::Write::new(file, memory.as_ptr(), length as u32).offset(at).build()
        }
        (Step::Allocate { mode, at, length }, _) => {
            opcode::Fallocate::new(file, length).offset(at).mode(mode).build()
        }
        // Only reads and writes have read and write steps.
        (Step::Sync | Step::Read { .. } | Step::Write { .. }, _) => {
            opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build()
        }
    }
}

impl Drop for RawRing {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
#[allow(missing_docs)]
#[path = "../../tests/common/forbid.rs"]
mod forbid;

#[cfg(test)]
mod tests {
    use super::super::RingQueue;
    use super::forbid;
    use crate::hold::hold_file;
    use crate::{BackingFile, Options};
    use cbd_types::ErrorKind;
    use std::os::fd::AsFd;
    use std::sync::Arc;

    #[test]
    fn a_queue_that_cannot_wait_for_the_kernel_leaves_the_lock_to_it() {
        // A thread that must not enter a ring any more.
        let thread = std::thread::spawn(|| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            file.as_file().set_len(1 << 20).expect("a size");
            let backing = BackingFile::open(file.path(), Options::default()).expect("free");
            let mut queue = RingQueue::new(Arc::clone(&backing.target), 4).expect("a ring");
            let of_the_kernel = backing.target.file.try_clone().expect("a copy");
            // An operation whose completion does not arrive.
            queue.raw.in_kernel = 1;
            forbid::forbid(libc::SYS_io_uring_enter);
            drop(backing);
            drop(queue);
            let again = || {
                let file =
                    std::fs::File::options().read(true).write(true).open(file.path()).expect("it opens");
                let mut file = crate::hold::Held::new(file);
                let status = crate::sys::status(file.as_fd()).expect("its status");
                hold_file(&mut file, &status, std::path::Path::new("again"), false)
                    .map_err(|error| error.kind())
            };
            assert_eq!(again(), Err(ErrorKind::Busy), "the kernel may still have the operation");
            drop(of_the_kernel);
            assert_eq!(again(), Ok(()));
        });
        thread.join().expect("the test passed");
    }
}
