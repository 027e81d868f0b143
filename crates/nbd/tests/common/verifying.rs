//! A device whose queues verify: the findings are those of the test, and verifications return when the test allows it.

use super::until;
use cbd_export::{BlockDevice, Event, RequestQueue, Waker};
use cbd_types::{Completion, Error, ErrorKind, Finding, Flaw, Geometry, Request, Result, Verified, Verify};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

/// What happened, and what is to happen.
#[derive(Default)]
pub struct State {
    /// What verifications find.
    pub findings: Vec<Finding>,
    /// The error of verifications.
    pub error: Option<ErrorKind>,
    /// Whether verifications do not return.
    pub holds: bool,
    /// All that were submitted.
    pub submitted: Vec<Verify>,
    /// Verifications that are held, in all queues.
    pub held: usize,
    /// The most that were in one queue at a time.
    pub most: usize,
    /// Verifications that were cancelled.
    pub given_up: usize,
    queues: Vec<Waker>,
}

pub struct Verifying {
    inner: Arc<dyn BlockDevice>,
    state: Arc<Mutex<State>>,
}

impl Verifying {
    pub fn over(inner: Arc<dyn BlockDevice>, findings: &[(u64, u64, Flaw)]) -> Arc<Self> {
        let findings = findings
            .iter()
            .map(|&(start, length, flaw)| Finding {
                range: cbd_types::ByteRange::at(start, length),
                flaw,
                repaired: false,
            })
            .collect();
        Arc::new(Self { inner, state: Arc::new(Mutex::new(State { findings, ..State::default() })) })
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panicked with the lock")
    }

    pub fn hold(&self) {
        self.state().holds = true;
    }

    pub fn wait_until_held(&self, count: usize) {
        until("verifications are held", || self.state().held >= count);
    }

    pub fn release(&self) {
        let mut state = self.state();
        state.holds = false;
        state.queues.iter().for_each(Waker::wake);
    }
}

impl BlockDevice for Verifying {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let event = Event::new()?;
        self.state().queues.push(event.waker());
        let (inner, state) = (self.inner.open_queue()?, Arc::clone(&self.state));
        Ok(Box::new(VerifyingQueue { inner, state, event, held: Vec::new(), ended: Vec::new() }))
    }

    fn verifies(&self) -> bool {
        true
    }
}

struct VerifyingQueue {
    inner: Box<dyn RequestQueue>,
    state: Arc<Mutex<State>>,
    event: Event,
    held: Vec<(u64, Verify)>,
    ended: Vec<(u64, Result<Verified>)>,
}

impl RequestQueue for VerifyingQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.inner.submit(request, done);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.event.clear();
        self.inner.poll(done);
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        if state.holds {
            return;
        }
        state.held -= self.held.len();
        for (id, verify) in self.held.drain(..) {
            let inside = |found: &&Finding| found.range.intersection(&verify.range).is_some();
            let findings = state.findings.iter().filter(inside).copied().collect();
            let result = match state.error {
                Some(kind) => Err(Error::new(kind, "a fault of the test")),
                None => Ok(Verified { findings, ..Verified::default() }),
            };
            self.ended.push((id, result));
        }
    }

    fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        self.held.push((id, verify));
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.submitted.push(verify);
        state.held += 1;
        state.most = state.most.max(self.held.len());
        self.event.signal();
        Ok(())
    }

    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        std::mem::take(&mut self.ended)
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        self.inner.give_up(done);
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.held -= self.held.len();
        state.given_up += self.held.len();
        let error = || Error::new(ErrorKind::Stopped, "given up");
        self.ended.extend(self.held.drain(..).map(|(id, _)| (id, Err(error()))));
    }

    fn parked(&self) -> usize {
        self.inner.parked()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.inner.wait_descriptors();
        descriptors.push(self.event.descriptor());
        descriptors
    }
}
