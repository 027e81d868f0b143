//! A block device whose underlying device is replaced while exports have queues open.
//!
//! A backend moves from one host to another. The exports of its block devices stay open: requests are held for a
//! moment, and then go to another device of the same geometry, local or remote.
//!
//! Invariants: once [`SwitchDevice::hold`] has succeeded, no queue of the device is open until requests continue. A
//! request is executed by one device, once. Requests of a queue reach a device in the order of their submission: no
//! later one passes those that are held. The descriptor that a queue is waited on with is constant.
//!
//! Locks are taken in the order queue, state of the device; neither is held for long by `hold`.
//!
//! Elsewhere: when and to which device a backend moves (`cbd-daemon`).

use cbd_export::wake::Event;
use cbd_export::{BlockDevice, Extent, ExtentState, RequestQueue, system_error};
use cbd_sys::event::Poller;
use cbd_types::{
    ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Request, Result, Verified, Verify,
};
use parking_lot::{Condvar, Mutex};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long `hold` waits before it looks at the queues again, and how long it waits for the lock of one.
const INTERVAL: Duration = Duration::from_micros(500);

/// A block device whose underlying device can be replaced.
pub struct SwitchDevice(Arc<Switch>);

struct Switch {
    /// Changed under the lock of the state, read under the lock of a queue: see [`Switch::must_hold`].
    is_held: AtomicBool,
    state: Mutex<State>,
    /// Notified when requests continue.
    resumed: Condvar,
}

struct State {
    /// None between `release` and `resume`.
    device: Option<Arc<dyn BlockDevice>>,
    /// That of the device which was released.
    geometry: Geometry,
    held_since: Option<Instant>,
    /// The number of the last hold.
    hold: u64,
    /// No queue of the device is open.
    is_drained: bool,
    slots: Vec<Arc<Slot>>,
}

impl std::fmt::Debug for SwitchDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state.lock();
        let held = state.held_since.map(|since| since.elapsed());
        write!(out, "SwitchDevice({} queues, held for {held:?})", state.slots.len())
    }
}

impl SwitchDevice {
    /// Requests go to `device`.
    #[must_use]
    pub fn new(device: Arc<dyn BlockDevice>) -> Self {
        let state = State {
            geometry: device.geometry(),
            device: Some(device),
            held_since: None,
            hold: 0,
            is_drained: false,
            slots: Vec::new(),
        };
        Self(Arc::new(Switch {
            is_held: AtomicBool::new(false),
            state: Mutex::new(state),
            resumed: Condvar::new(),
        }))
    }

    /// Holds requests from now on, and waits until those that the device has are complete, and their verifications.
    /// Then no queue of the device is open. If requests are held already, it waits in the same way.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] after `limit`: requests stay held. [`ErrorKind::Stopped`] if requests continue before:
    /// this hold was cancelled.
    pub fn hold(&self, limit: Duration) -> Result<()> {
        let (began, switch) = (Instant::now(), &*self.0);
        let mut state = switch.state.lock();
        if state.held_since.is_none() {
            state.held_since = Some(began);
            state.hold += 1;
            // Before the locks of the queues are taken, and before the list of queues is read: see `must_hold`.
            switch.is_held.store(true, Ordering::Release);
        }
        let hold = state.hold;
        loop {
            let slots = state.slots.clone();
            drop(state);
            let busy = slots.iter().filter(|slot| !slot.close_if_idle()).count();
            state = switch.state.lock();
            if state.held_since.is_none() || state.hold != hold {
                return Err(Error::new(ErrorKind::Stopped, "requests are not held any more"));
            }
            if busy == 0 {
                // A queue that was not in the list was opened after requests were held, so it has no queue of the
                // device.
                state.is_drained = true;
                return Ok(());
            }
            let left = limit.saturating_sub(began.elapsed());
            if left.is_zero() {
                let text =
                    format!("{busy} queues have requests that did not complete within {} s", limit.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
            switch.resumed.wait_for(&mut state, INTERVAL.min(left));
        }
    }

    /// Continues with `device`, of the same geometry as the former one. Does nothing unless [`hold`](Self::hold) has
    /// succeeded.
    pub fn resume(&self, device: Arc<dyn BlockDevice>) {
        let mut state = self.0.state.lock();
        if !state.is_drained {
            return;
        }
        let former = state.device.replace(device);
        let slots = self.0.let_continue(&mut state);
        drop(state);
        // Without the lock of the state: the drop of a device may take long.
        drop(former);
        slots.iter().for_each(|slot| slot.wake_if_holding());
    }

    /// Continues with the former device, after [`hold`](Self::hold) has succeeded or failed. Does nothing if requests
    /// are not held, or if the device was [released](Self::release).
    pub fn resume_former(&self) {
        let mut state = self.0.state.lock();
        if state.held_since.is_none() || state.device.is_none() {
            return;
        }
        let slots = self.0.let_continue(&mut state);
        drop(state);
        slots.iter().for_each(|slot| slot.wake_if_holding());
    }

    /// Drops the former device: only [`resume`](Self::resume) continues then. Does nothing unless [`hold`](Self::hold)
    /// has succeeded.
    pub fn release(&self) {
        let Some(former) = self.0.device() else { return };
        let geometry = former.geometry();
        let mut state = self.0.state.lock();
        let is_same = state.device.as_ref().is_some_and(|device| Arc::ptr_eq(device, &former));
        if state.is_drained && is_same {
            state.geometry = geometry;
            state.device = None;
        }
        drop(state);
        drop(former);
    }

    /// Whether requests are held.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.state.lock().held_since.is_some()
    }

    /// How many requests are held, and for how long the oldest of them has been; `None` if there are none.
    #[must_use]
    pub fn waiting(&self) -> Option<(usize, Duration)> {
        let slots = self.0.state.lock().slots.clone();
        let (mut count, mut oldest) = (0, None);
        // Without the lock of the state, which a queue takes while it has its own.
        for slot in slots {
            let inside = slot.inside.lock();
            if !inside.held.is_empty() {
                count += inside.held.len();
                oldest = [oldest, inside.oldest].into_iter().flatten().min();
            }
        }
        Some((count, oldest?.elapsed()))
    }

    /// For how long requests have been held; `None` if they are not.
    #[must_use]
    pub fn held_for(&self) -> Option<Duration> {
        self.0.state.lock().held_since.map(|since| since.elapsed())
    }
}

impl Switch {
    /// Whether a request must wait. The caller has the lock of its queue until the device has the request.
    ///
    /// `hold` sets the flag and then takes the lock of each queue. Either the queue had the lock first: then `hold`
    /// sees what it has submitted, and the queue of the device that it has opened. Or `hold` had it first: then the
    /// lock makes the flag visible here. A queue that `hold` has not listed was listed later, under the lock of the
    /// state, which makes the flag visible as well.
    fn must_hold(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    fn device(&self) -> Option<Arc<dyn BlockDevice>> {
        self.state.lock().device.clone()
    }

    /// Ends the hold; returns the queues to wake.
    fn let_continue(&self, state: &mut State) -> Vec<Arc<Slot>> {
        (state.held_since, state.is_drained) = (None, false);
        self.is_held.store(false, Ordering::Release);
        self.resumed.notify_all();
        state.slots.clone()
    }
}

impl BlockDevice for SwitchDevice {
    fn geometry(&self) -> Geometry {
        let (device, copy) = {
            let state = self.0.state.lock();
            (state.device.clone(), state.geometry)
        };
        device.map_or(copy, |device| device.geometry())
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let failed = |error| system_error("a queue cannot wait for its descriptors", &error);
        let (event, poller) = (Event::new()?, Poller::new().map_err(failed)?);
        poller.add(event.descriptor(), 0, false).map_err(failed)?;
        let (is_awake, inside) = (AtomicBool::default(), Mutex::default());
        let slot = Arc::new(Slot { event, is_awake, poller, inside });
        // Listed before it opens a queue of the device, so that `hold` sees that.
        self.0.state.lock().slots.push(Arc::clone(&slot));
        let queue = SwitchQueue { switch: Arc::clone(&self.0), slot };
        let mut inside = queue.slot.inside.lock();
        if !self.0.must_hold() {
            inside.queue(&self.0, &queue.slot.poller)?;
        }
        drop(inside);
        Ok(Box::new(queue))
    }

    fn verifies(&self) -> bool {
        self.0.device().is_some_and(|device| device.verifies())
    }

    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        match self.0.device() {
            Some(device) => device.extents(range),
            None => Ok(vec![Extent { range, state: ExtentState::default() }]),
        }
    }
}

/// What a queue and its device share: `hold` closes the queue of the device while the thread of the queue sleeps.
struct Slot {
    event: Event,
    is_awake: AtomicBool,
    /// The event, and the descriptors of the queue of the device.
    poller: Poller,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    queue: Option<Box<dyn RequestQueue>>,
    /// Those of `queue` in the poller.
    descriptors: Vec<RawFd>,
    /// Requests that wait, in the order of their submission.
    held: Vec<Request>,
    /// When the first of them was submitted.
    oldest: Option<Instant>,
    /// Verifications that `queue` has, or whose results it has.
    verifications: usize,
}

impl Slot {
    /// Closes the queue of the device if that has nothing to complete; false if it has.
    fn close_if_idle(&self) -> bool {
        let Some(mut inside) = self.inside.try_lock_for(INTERVAL) else { return false };
        // Requests that the queue of the device holds back until `unplug` are parked there.
        let is_busy =
            inside.verifications > 0 || inside.queue.as_ref().is_some_and(|queue| queue.parked() > 0);
        if !is_busy {
            inside.close(&self.poller);
        }
        !is_busy
    }

    fn wake_if_holding(&self) {
        if !self.inside.lock().held.is_empty() && !self.is_awake.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }
}

impl Inside {
    /// The queue of the device, which is opened if it is not. Requests are not held.
    fn queue(&mut self, switch: &Switch, poller: &Poller) -> Result<&mut dyn RequestQueue> {
        if self.queue.is_none() {
            let released =
                || Error::new(ErrorKind::Stopped, "the block device is on its way to another host");
            let queue = switch.device().ok_or_else(released)?.open_queue()?;
            let mut descriptors = queue.wait_descriptors();
            descriptors.sort_unstable();
            descriptors.dedup();
            self.queue = Some(queue);
            for descriptor in descriptors {
                if let Err(error) = poller.add(descriptor, 0, false) {
                    self.close(poller);
                    return Err(system_error("a queue cannot wait for the device", &error));
                }
                self.descriptors.push(descriptor);
            }
        }
        match &mut self.queue {
            Some(queue) => Ok(&mut **queue),
            None => Err(Error::new(ErrorKind::Stopped, "the queue is closed")),
        }
    }

    /// Closes the queue of the device. The caller keeps the lock meanwhile: a queue may execute requests when it is
    /// dropped.
    fn close(&mut self, poller: &Poller) {
        // Removed while they are open: the kernel forgets a closed descriptor only with its last duplicate.
        for descriptor in self.descriptors.drain(..) {
            let _ = poller.remove(descriptor);
        }
        self.queue = None;
        self.verifications = 0;
    }

    /// Completes with an error what is held.
    fn end_held(&mut self, done: &mut Vec<Completion>) {
        for request in self.held.drain(..) {
            fail(request, Error::new(ErrorKind::Stopped, "the client has disconnected"), done);
        }
    }
}

fn fail(request: Request, error: Error, done: &mut Vec<Completion>) {
    done.push(Completion { id: request.id, result: Err(error), buffer: request.buffer });
}

/// A queue of a [`SwitchDevice`].
struct SwitchQueue {
    switch: Arc<Switch>,
    slot: Arc<Slot>,
}

impl SwitchQueue {
    /// Submits a request, or holds it.
    fn admit(&self, request: Request, is_plugged: bool, done: &mut Vec<Completion>) {
        let mut inside = self.slot.inside.lock();
        if self.switch.must_hold() {
            if inside.held.is_empty() {
                inside.oldest = Some(Instant::now());
            }
            return inside.held.push(request);
        }
        self.submit_held(&mut inside, done);
        match inside.queue(&self.switch, &self.slot.poller) {
            Ok(queue) if is_plugged => queue.submit_plugged(request, done),
            Ok(queue) => queue.submit(request, done),
            Err(error) => fail(request, error, done),
        }
    }

    /// Submits what was held, once requests continue.
    fn submit_held(&self, inside: &mut Inside, done: &mut Vec<Completion>) {
        if inside.held.is_empty() {
            return;
        }
        for request in std::mem::take(&mut inside.held) {
            match inside.queue(&self.switch, &self.slot.poller) {
                Ok(queue) => queue.submit_plugged(request, done),
                Err(error) => fail(request, error, done),
            }
        }
        if let Some(queue) = &mut inside.queue {
            queue.unplug(done);
        }
    }
}

impl RequestQueue for SwitchQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.admit(request, false, done);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.admit(request, true, done);
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        if let Some(queue) = &mut self.slot.inside.lock().queue {
            queue.unplug(done);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.slot.is_awake.load(Ordering::Acquire) {
            // Cleared first, so that the next wait sees any later signal.
            self.slot.event.clear();
            self.slot.is_awake.store(false, Ordering::Release);
        }
        let mut inside = self.slot.inside.lock();
        if !self.switch.must_hold() {
            self.submit_held(&mut inside, done);
        }
        if let Some(queue) = &mut inside.queue {
            queue.poll(done);
        }
    }

    fn parked(&self) -> usize {
        let inside = self.slot.inside.lock();
        inside.queue.as_ref().map_or(0, |queue| queue.parked()) + inside.held.len()
    }

    fn changes(&self) -> usize {
        let inside = self.slot.inside.lock();
        let is_change = |request: &&Request| !matches!(request.operation, Operation::Read | Operation::Flush);
        inside.queue.as_ref().map_or(0, |queue| queue.changes())
            + inside.held.iter().filter(is_change).count()
    }

    fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        let mut inside = self.slot.inside.lock();
        if inside.queue.is_none() && self.switch.must_hold() {
            let text = "the block device is on its way to another host; verify it later";
            return Err(Error::new(ErrorKind::Busy, text));
        }
        inside.queue(&self.switch, &self.slot.poller)?.verify(id, verify)?;
        inside.verifications += 1;
        Ok(())
    }

    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        let mut inside = self.slot.inside.lock();
        let verified = inside.queue.as_mut().map(|queue| queue.take_verified()).unwrap_or_default();
        inside.verifications = inside.verifications.saturating_sub(verified.len());
        verified
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let mut inside = self.slot.inside.lock();
        inside.end_held(done);
        if let Some(queue) = &mut inside.queue {
            queue.give_up(done);
        }
    }

    fn trim(&mut self) {
        if let Some(queue) = &mut self.slot.inside.lock().queue {
            queue.trim();
        }
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.slot.poller.as_raw_fd()]
    }
}

impl Drop for SwitchQueue {
    fn drop(&mut self) {
        // Closed before it leaves the list: until then `hold` waits for it.
        let mut inside = self.slot.inside.lock();
        inside.held.clear();
        inside.close(&self.slot.poller);
        drop(inside);
        self.switch.state.lock().slots.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
    }
}

#[cfg(test)]
mod tests;
