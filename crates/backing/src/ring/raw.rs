//! The io_uring itself, with the memory that the kernel works on.
//!
//! Always true here: a job whose step the kernel has taken stays in its slot, buffer included, until the
//! completion is there; dropping the ring waits for that, and where waiting is impossible it leaks the buffers
//! rather than free them.
//!
//! Left to others: what a completion means, and jobs beyond the number of slots.
#![allow(unsafe_code)]

use crate::job::{Job, Step, Target, zeroes};
use cbd_types::BackingOp;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

const GET_EVENTS: u32 = 1;

/// A ring with one slot for each job that it works on at a time.
pub(crate) struct RawRing {
    // Before the slots, so that the ring is gone when their buffers go.
    ring: IoUring,
    slots: Vec<Option<Job>>,
    free: Vec<usize>,
    /// Slots whose entry is in the submission queue and which the kernel has not taken, in order.
    untaken: VecDeque<usize>,
    /// Jobs that the kernel works on.
    taken: usize,
}

/// Whether this system lets us have a ring with all the operations that are needed.
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
    // Completions then interrupt nobody: they are handled when the thread enters the kernel next.
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
            untaken: VecDeque::with_capacity(depth),
            taken: 0,
        })
    }

    pub fn descriptor(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Jobs in slots.
    pub fn held(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Jobs that the kernel works on.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Puts the first step of a job into the queue; the job comes back where there is no room.
    pub fn start(&mut self, job: Job, target: &Target) -> Result<(), Job> {
        let Some(slot) = self.free.pop() else { return Err(job) };
        self.slots[slot] = Some(job);
        self.queue(slot, target);
        Ok(())
    }

    fn queue(&mut self, slot: usize, target: &Target) {
        let Some(job) = &mut self.slots[slot] else { return };
        let entry = entry(job, target).user_data(slot as u64);
        // SAFETY: the memory that the entry names is the job's buffer, which is on the heap, owned by the job,
        // and long enough for the step; or it is static. The job stays in its slot, untouched, until the
        // completion has been seen, and the ring's drop keeps to that. The descriptor is the target's, which
        // outlives the job's queue; an entry of a closed one would fail and touch no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There are as many entries as slots and a slot has one at most, so there is room; but for a ring that
        // refused for good, whose entries nobody takes: then the caller takes the jobs back.
        let _ = pushed;
        self.untaken.push_back(slot);
    }

    /// Gives the kernel what is in the submission queue.
    pub fn enter(&mut self) -> io::Result<()> {
        while !self.untaken.is_empty() {
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
        let count = count.min(self.untaken.len());
        self.untaken.drain(..count);
        self.taken += count;
    }

    /// Takes the jobs back that the kernel refuses to take. No entry may be given to it after that.
    pub fn take_back(&mut self) -> Vec<Job> {
        let slots: Vec<_> = self.untaken.drain(..).collect();
        slots.into_iter().filter_map(|slot| self.release(slot)).collect()
    }

    fn release(&mut self, slot: usize) -> Option<Job> {
        let job = self.slots[slot].take();
        self.free.push(slot);
        job
    }

    /// Lets the kernel run what completions wait for, and sleeps until there is one if `sleep`. Submits nothing.
    pub fn get_events(&mut self, sleep: bool) -> io::Result<()> {
        if self.taken == 0 {
            return Ok(());
        }
        // SAFETY: no entry is submitted and no argument passed, so the kernel learns of no memory.
        let result = unsafe { self.ring.submitter().enter::<()>(0, u32::from(sleep), GET_EVENTS, None) };
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Waits until the kernel works on nothing; false where it lets nobody wait, and may still be at work.
    pub fn finish(&mut self) -> bool {
        while self.taken > 0 {
            if self.completion().is_none() && self.get_events(true).is_err() {
                std::mem::forget(std::mem::take(&mut self.slots));
                return false;
            }
        }
        true
    }

    /// The slot of a step that has ended, and its answer.
    pub fn completion(&mut self) -> Option<(usize, i32)> {
        let mut entry: Option<cqueue::Entry> = self.ring.completion().next();
        if entry.is_none() && self.taken > 0 {
            let wanted = {
                let submission = self.ring.submission();
                submission.taskrun() || submission.cq_overflow()
            };
            if wanted && self.get_events(false).is_ok() {
                entry = self.ring.completion().next();
            }
        }
        let entry = entry?;
        self.taken -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }

    /// Tells a job how its step ended; gives it back when that was the last one.
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
        // A read or write step is made from a read or write alone.
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
    fn a_queue_that_cannot_wait_for_the_kernel_leaves_it_the_hold() {
        // Of a thread that may enter no ring any more.
        let thread = std::thread::spawn(|| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            file.as_file().set_len(1 << 20).expect("a size");
            let backing = BackingFile::open(file.path(), Options::default()).expect("free");
            let mut queue = RingQueue::new(Arc::clone(&backing.target), 4).expect("a ring");
            let of_the_kernel = backing.target.file.try_clone().expect("a copy");
            // An operation whose completion does not come.
            queue.raw.taken = 1;
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
            assert_eq!(again(), Err(ErrorKind::Busy), "the kernel may still be at work");
            drop(of_the_kernel);
            assert_eq!(again(), Ok(()));
        });
        thread.join().expect("the test passed");
    }
}
