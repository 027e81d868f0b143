//! The queue for systems that forbid io_uring: each operation is executed when it is submitted.
//!
//! Invariants: an operation is finished before `submit` returns, and returned by the next `poll`. Parallelism needs
//! several queues, each with its own thread.

use crate::PollableQueue;
use crate::job::{Job, Step, Target, zeroes};
use crate::sys::fallocate;
use cbd_sys::event::Signal;
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, Error, ErrorKind, OpToken, Result};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A queue without a ring.
pub(crate) struct SyncQueue {
    target: Arc<Target>,
    ended: VecDeque<BackingDone>,
    signal: Signal,
}

impl SyncQueue {
    pub fn new(target: Arc<Target>) -> Result<Self> {
        let signal = Signal::new().map_err(|error| {
            let text = format!("cannot open a queue to {}: {error}", target.path.display());
            Error::new(ErrorKind::System, text)
        })?;
        Ok(Self { target, ended: VecDeque::new(), signal })
    }
}

/// Runs a job to its end with plain system calls.
pub(crate) fn run_to_end(mut job: Job, target: &Target) -> BackingDone {
    loop {
        let answer = match (job.step(target), &mut job.op) {
            (Step::Read { at, skip, length }, BackingOp::Read { buffer, .. }) => {
                target.file.read_at(&mut buffer[skip..skip + length], at)
            }
            (Step::Command { at, skip, length }, op) => {
                let answer = target.commands().run(target, op, at, skip, length as u64);
                if let Some(result) = job.advance(target, answer) {
                    return job.end(result);
                }
                continue;
            }
            (Step::Look { at, length }, _) => target.file.read_at(job.scratch(length), at),
            (Step::Write { at, skip, length }, BackingOp::Write { buffer, .. }) => {
                target.file.write_at(&buffer[skip..skip + length], at)
            }
            (Step::WriteZeroes { at, length }, _) => target.file.write_at(&zeroes()[..length], at),
            (Step::Allocate { mode, at, length }, _) => {
                fallocate(target.file.as_fd(), mode, at, length).map(|()| 0)
            }
            // Only reads and writes have read and write steps.
            (Step::Sync | Step::Read { .. } | Step::Write { .. }, _) => target.file.sync_data().map(|()| 0),
        };
        if let Some(result) = job.advance(target, answer_of(answer)) {
            return job.end(result);
        }
    }
}

fn answer_of(result: io::Result<usize>) -> i32 {
    match result {
        Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

impl BackingQueue for SyncQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let job = Job::new(token, op, &self.target);
        let done = match job.known_result(&self.target) {
            Some(result) => job.end(result),
            None => run_to_end(job, &self.target),
        };
        self.ended.push_back(done);
        self.signal.raise();
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        if !self.ended.is_empty() {
            done.extend(self.ended.drain(..));
            self.signal.clear();
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.ended.len()
    }

    fn depth(&self) -> usize {
        1
    }
}

impl PollableQueue for SyncQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.signal.as_raw_fd()
    }
}
