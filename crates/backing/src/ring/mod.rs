//! The queue over io_uring: one ring for one thread.
//!
//! Invariants: a submitted operation is in the kernel when [`submit`](BackingQueue::submit) returns, or waits in
//! order for a slot; every operation is returned once; [`wait_descriptor`](PollableQueue::wait_descriptor) is readable
//! whenever an operation can be returned.
//!
//! Elsewhere: splitting an operation into steps (`job`), memory (`raw`), order and overlap (the engine).

pub(crate) mod raw;

use crate::PollableQueue;
use crate::job::{Job, Target};
use crate::sync::run_to_end;
use crate::threads::Threads;
use cbd_sys::event::{Poller, Signal, wait_readable};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, Error, ErrorKind, OpToken, Result};
use raw::RawRing;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Most operations of a queue in flight.
pub const DEPTH_MAX: usize = 1024;

/// A queue over its own ring.
pub struct RingQueue {
    raw: RawRing,
    target: Arc<Target>,
    depth: usize,
    waiting: VecDeque<Job>,
    /// Operations that completed without the ring; `signal` is raised while there are any.
    ended: VecDeque<BackingDone>,
    signal: Signal,
    /// Operations of blocking commands; none if the device has no commands.
    threads: Option<Threads>,
    poller: Poller,
    /// The ring has failed permanently: all further operations are executed without it.
    broken: bool,
}

impl RingQueue {
    pub(crate) fn new(target: Arc<Target>, depth: usize) -> Result<Self> {
        let depth = depth.clamp(1, DEPTH_MAX);
        let open = || -> io::Result<_> {
            let raw = RawRing::new(depth)?;
            let signal = Signal::new()?;
            let poller = Poller::new()?;
            poller.add(raw.descriptor(), 0, false)?;
            poller.add(signal.as_raw_fd(), 0, false)?;
            let threads = if target.commands().are_used() {
                let threads = Threads::new(Arc::clone(&target), depth)?;
                poller.add(threads.descriptor(), 0, false)?;
                Some(threads)
            } else {
                None
            };
            Ok((raw, signal, threads, poller))
        };
        let (raw, signal, threads, poller) = open().map_err(|error| {
            let text = format!(
                "cannot open a queue to {}: {error}; is the limit of open files (ulimit -n) too low?",
                target.path.display()
            );
            Error::new(ErrorKind::System, text)
        })?;
        let (waiting, ended) = (VecDeque::new(), VecDeque::new());
        Ok(Self { raw, target, depth, waiting, ended, signal, threads, poller, broken: false })
    }

    fn end(&mut self, done: BackingDone) {
        self.ended.push_back(done);
        self.signal.raise();
    }

    /// Starts waiting operations, as far as there are slots, and submits them to the kernel.
    fn start_waiting(&mut self) {
        while self.raw.has_room() && !self.broken {
            let Some(job) = self.waiting.pop_front() else { break };
            if let Err(job) = self.raw.start(job, &self.target) {
                self.waiting.push_front(job);
                break;
            }
        }
        self.enter();
        if self.broken {
            while let Some(job) = self.waiting.pop_front() {
                let done = run_to_end(job, &self.target);
                self.end(done);
            }
        }
    }

    fn enter(&mut self) {
        if self.broken {
            return self.run_without_ring();
        }
        match self.raw.enter() {
            Ok(()) => {}
            // The kernel is short of memory or of completion space for now. The completion of an operation in flight
            // wakes the thread, which retries.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY))
                    && self.raw.in_kernel() > 0 => {}
            Err(_) => {
                self.broken = true;
                self.run_without_ring();
            }
        }
    }

    fn run_without_ring(&mut self) {
        for job in self.raw.take_unsubmitted() {
            let done = run_to_end(job, &self.target);
            self.end(done);
        }
    }

    fn collect(&mut self, done: &mut Vec<BackingDone>) {
        while let Some((slot, answer)) = self.raw.completion() {
            if let Some((job, result)) = self.raw.advance(slot, answer, &self.target) {
                done.push(job.end(result));
            }
        }
        self.start_waiting();
        if let Some(threads) = &mut self.threads {
            threads.collect(done);
        }
        if !self.ended.is_empty() {
            done.extend(self.ended.drain(..));
            self.signal.clear();
        }
    }
}

impl BackingQueue for RingQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let mut job = Job::new(token, op, &self.target);
        if self.threads.is_none() {
            // Commands may have been permitted since the queue was opened.
            job.read_instead();
        }
        match (job.known_result(&self.target), &mut self.threads) {
            (Some(result), _) => self.end(job.end(result)),
            (None, Some(threads)) if job.blocks() => threads.submit(job),
            (None, _) => {
                self.waiting.push_back(job);
                if self.raw.has_room() {
                    self.start_waiting();
                }
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        self.collect(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        let before = done.len();
        self.collect(done);
        while done.len() == before && self.in_flight() > 0 {
            let threads = self.threads.as_ref().map_or(0, Threads::in_flight);
            // Fails only if the kernel has no ring any more; then no completion arrives.
            let waited =
                if threads > 0 { wait_readable(self.poller.as_raw_fd()) } else { self.raw.get_events(true) };
            if waited.is_err() {
                return;
            }
            self.collect(done);
        }
    }

    fn in_flight(&self) -> usize {
        let threads = self.threads.as_ref().map_or(0, Threads::in_flight);
        self.raw.held() + self.waiting.len() + self.ended.len() + threads
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl PollableQueue for RingQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.poller.as_raw_fd()
    }
}

impl Drop for RingQueue {
    fn drop(&mut self) {
        // The lock is released only when the kernel has finished; otherwise it ends with the kernel's reference.
        if !self.raw.finish() {
            self.target.file.release_on_close();
        }
    }
}
