//! A device that parks its requests until it is released, and records its operations.

use cbd_export::{BlockDevice, Event, RequestQueue, Waker};
use cbd_types::{ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Request, Result};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

/// An operation, and whether it had FUA.
pub type Recorded = (Operation, ByteRange, bool);

#[derive(Default)]
struct State {
    held: bool,
    gives_up: bool,
    operations: Vec<Recorded>,
    wakers: Vec<Waker>,
    polls: usize,
}

/// The device.
pub struct Gate {
    inner: Arc<dyn BlockDevice>,
    state: Arc<Mutex<State>>,
}

impl Gate {
    pub fn over(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self { inner, state: Arc::default() })
    }

    /// Holds requests from now on.
    pub fn hold(&self) {
        self.state.lock().expect("no thread panicked with the lock").held = true;
    }

    /// Holds requests that can be given up, like requests that wait for space.
    pub fn hold_for_space(&self) {
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        (state.held, state.gives_up) = (true, true);
    }

    /// Executes the held requests and all later ones.
    pub fn release(&self) {
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.held = false;
        state.wakers.iter().for_each(Waker::wake);
    }

    /// Wakes the queues so that they are polled, as a device with work of its own does.
    pub fn wake_queues(&self) {
        self.state.lock().expect("no thread panicked with the lock").wakers.iter().for_each(Waker::wake);
    }

    /// Number of polls.
    pub fn polls(&self) -> usize {
        self.state.lock().expect("no thread panicked with the lock").polls
    }

    /// The operations so far.
    pub fn operations(&self) -> Vec<Recorded> {
        self.state.lock().expect("no thread panicked with the lock").operations.clone()
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let event = Event::new()?;
        self.state.lock().expect("no thread panicked with the lock").wakers.push(event.waker());
        Ok(Box::new(GateQueue {
            inner: self.inner.open_queue()?,
            state: Arc::clone(&self.state),
            event,
            waiting: Vec::new(),
        }))
    }
}

struct GateQueue {
    inner: Box<dyn RequestQueue>,
    state: Arc<Mutex<State>>,
    event: Event,
    waiting: Vec<Request>,
}

impl RequestQueue for GateQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.submit_plugged(request, done);
        self.unplug(done);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.operations.push((request.operation, request.range, request.fua));
        if state.held {
            self.waiting.push(request);
        } else {
            drop(state);
            self.inner.submit_plugged(request, done);
        }
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        self.inner.unplug(done);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.event.clear();
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.polls += 1;
        let held = state.held;
        drop(state);
        if !held {
            for request in self.waiting.drain(..) {
                self.inner.submit(request, done);
            }
        }
        self.inner.poll(done);
    }

    fn parked(&self) -> usize {
        self.waiting.len() + self.inner.parked()
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        if self.state.lock().expect("no thread panicked with the lock").gives_up {
            done.extend(self.waiting.drain(..).map(|request| {
                let result = Err(Error::new(ErrorKind::Stopped, "given up"));
                Completion { id: request.id, result, buffer: request.buffer }
            }));
        }
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.event.descriptor()]
    }
}
