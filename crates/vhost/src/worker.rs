//! One ring: its thread, with its own request queue.
//!
//! A request that the device completes at once is answered at once; one that it parks is answered when it completes, in
//! any order. One wait set covers the ring, the device and the pause event; before the thread waits, it polls the ring
//! for a short time (`spin`). A paused worker keeps its requests and continues with them.
//!
//! Invariants:
//! - each request that was taken gets exactly one answer, after it was executed, unless its ring has a fault;
//! - data is written only if the memory it was loaded from still existed after the last load;
//! - requests that are taken and not answered are bounded by the ring's size and by bytes; beyond that the ring waits;
//! - a ring with a fault is not accessed any more; its requests in the device are completed and not answered;
//! - after the front end disconnected no request begins: requests that wait for space are given up and not answered, so
//!   they stay recorded as in flight for the next connection; requests in the backing device are completed first.

mod idle;
mod setup;

pub(crate) use setup::{Common, PauseEvent, Setup};

use crate::chain::Chain;
use crate::config::{DeviceConfig, EVENT_INDEX, INDIRECT};
use crate::inflight;
use crate::malformed;
use crate::memory::GuestMap;
use crate::request::{self, HEAD, Status, Task};
use crate::spin::Spin;
use crate::system::Notifier;
use cbd_export::RequestQueue;
use cbd_export::buffers::Buffers;
use cbd_export::wake::{Interest, WaitSet};
use cbd_types::{ByteRange, Completion, Error, ErrorKind, Operation, Request, Result};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// Longest piece of a request that is submitted to the device, in bytes.
const PIECE: u64 = 1 << 20;
/// Requests that are taken before the guest is notified of answers.
const BATCH: usize = 8;
const NO_INTERRUPT: u16 = virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT as u16;

/// A request; its index is that of its first descriptor.
#[derive(Default)]
struct Job {
    taken: bool,
    chain: Chain,
    operation: Option<Operation>,
    /// The ranges that remain, the last one first.
    ranges: Vec<ByteRange>,
    /// Bytes of its data that were submitted.
    position: u64,
}

/// A ring and its requests.
pub(crate) struct Worker {
    setup: Setup,
    common: Common,
    queue: Queue,
    pub(crate) memory: Arc<GuestMap>,
    pub(crate) kick: Arc<File>,
    pub(crate) call: Option<Arc<Notifier>>,
    device: Box<dyn RequestQueue>,
    /// Number of the device's wait descriptors.
    descriptors: usize,
    inflight: Option<inflight::Ring>,
    /// Heads of requests that a previous server had taken.
    resumed: VecDeque<u16>,
    jobs: Vec<Job>,
    /// Number of taken jobs.
    taken: usize,
    /// Number of taken jobs in the device; all of them unless the ring has a fault.
    submitted: usize,
    /// Bytes of the buffers in the device.
    bytes: usize,
    buffers: Buffers,
    done: Vec<Completion>,
    /// Whether there are answers of which the guest was not notified.
    unnotified: bool,
    /// Notify the guest even if it suppresses notifications: a server that was killed may not have notified it of its
    /// last answers.
    notify_always: bool,
    spin: Spin,
    /// Number of kicks since the last request was taken.
    empty_kicks: u32,
    /// The front end disconnected: no further request begins.
    disconnected: bool,
    /// Why the ring is stopped.
    pub(crate) fault: Option<Error>,
}

impl Worker {
    /// A ring that continues at the index in `setup`, or after the requests that a previous server recorded in
    /// `inflight`.
    pub(crate) fn new(
        setup: Setup,
        common: Common,
        memory: Arc<GuestMap>,
        kick: Arc<File>,
        device: Box<dyn RequestQueue>,
        mut inflight: Option<inflight::Ring>,
    ) -> Result<Self> {
        let wrong = |error: virtio_queue::Error| malformed(format!("ring {}: {error}", setup.index));
        let mut queue = Queue::new(setup.size).map_err(wrong)?;
        let [descriptors, available, used] = setup.addresses;
        queue.try_set_desc_table_address(descriptors).map_err(wrong)?;
        queue.try_set_avail_ring_address(available).map_err(wrong)?;
        queue.try_set_used_ring_address(used).map_err(wrong)?;
        queue.set_event_idx(setup.features & EVENT_INDEX != 0);
        queue.set_ready(true);
        let mut worker = Self {
            jobs: std::iter::repeat_with(Job::default).take(usize::from(setup.size)).collect(),
            spin: Spin::new(common.spin_max),
            setup,
            common,
            queue,
            memory,
            kick,
            call: None,
            descriptors: device.wait_descriptors().len(),
            device,
            inflight: None,
            resumed: VecDeque::new(),
            taken: 0,
            submitted: 0,
            bytes: 0,
            buffers: Buffers::default(),
            done: Vec::new(),
            unnotified: true,
            notify_always: true,
            empty_kicks: 0,
            disconnected: false,
            fault: None,
        };
        worker.check_addresses()?;
        let used = worker.queue.used_idx(worker.memory.memory(), Ordering::Acquire).map_err(ring_error)?.0;
        let mut base = worker.setup.base;
        if let Some(ring) = &mut inflight {
            let left = ring.recover(used)?;
            // Each request that was taken is either answered or in flight; a ring has at most 32768.
            base = used.wrapping_add(left.len() as u16);
            worker.resumed = left.into();
        }
        worker.inflight = inflight;
        worker.queue.set_next_avail(base);
        worker.queue.set_next_used(used);
        Ok(worker)
    }

    /// The index at which the next server must continue.
    pub(crate) fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Fails if the ring is not inside the guest's memory.
    pub(crate) fn check_addresses(&self) -> Result<()> {
        if self.queue.is_valid(self.memory.memory()) {
            return Ok(());
        }
        let [descriptors, available, used] = self.setup.addresses.map(|address| address.0);
        Err(malformed(format!(
            "ring {} of {} (at {descriptors:#x}, {available:#x}, {used:#x}) is not in the guest's memory",
            self.setup.index, self.setup.size
        )))
    }

    /// Notifies the guest of answers again, since the call descriptor or the memory changed.
    pub(crate) fn notify_again(&mut self) {
        (self.unnotified, self.notify_always) = (true, true);
    }

    /// Serves until `pause` is signalled; an error is stored in [`fault`](Self::fault).
    pub(crate) fn run(&mut self, pause: &PauseEvent) {
        if self.fault.is_some() {
            return;
        }
        if let Err(error) = self.serve(pause) {
            // If memory was lost, that is the cause: bytes that were read from it are not those of the guest.
            let error = self.check_memory().err().unwrap_or(error);
            self.fault = Some(error);
        }
    }

    /// Executes and answers the requests in the ring, until it is empty or about `most` were taken; waits only for the
    /// device.
    pub(crate) fn run_until_empty(&mut self, most: usize) -> Result<()> {
        let mut waits = WaitSet::new();
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        let mut rounds = most.div_ceil(BATCH);
        loop {
            let taken_now = rounds > 0 && self.take_batch()?;
            rounds = rounds.saturating_sub(1);
            self.device.poll(&mut self.done);
            self.process_completions()?;
            self.notify()?;
            if !taken_now && self.submitted == 0 {
                return Ok(());
            }
            if !taken_now {
                waits.wait(None)?;
            }
        }
    }

    fn serve(&mut self, pause: &PauseEvent) -> Result<()> {
        let mut waits = WaitSet::new();
        waits.add(pause.event.descriptor(), Interest::Read);
        waits.add(self.kick.as_raw_fd(), Interest::Read);
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        self.queue.disable_notification(self.memory.memory()).map_err(ring_error)?;
        while !pause.is_signalled() {
            let taken_now = self.take_batch()?;
            if self.taken > 0 {
                self.device.poll(&mut self.done);
                self.process_completions()?;
            }
            self.notify()?;
            if !taken_now {
                self.idle(pause, &mut waits)?;
            }
        }
        Ok(())
    }

    // -- in ---------------------------------------------------------------------------------------------------

    /// Whether the bytes in the device have reached their limit.
    fn is_full(&self) -> bool {
        self.bytes >= self.common.bytes_max
    }

    /// Takes up to a batch of requests; false if none could be taken.
    fn take_batch(&mut self) -> Result<bool> {
        let mut taken_now = 0;
        let begun = loop {
            if taken_now == BATCH || self.is_full() {
                break Ok(());
            }
            match self.begin_next() {
                Ok(true) => taken_now += 1,
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // Requests before an invalid one are executed.
        let settled = self.process_completions();
        begun.and(settled)?;
        if taken_now > 0 {
            self.empty_kicks = 0;
        }
        Ok(taken_now > 0)
    }

    /// Begins the next request of the ring, if any.
    fn begin_next(&mut self) -> Result<bool> {
        let Some(head) = self.next_head()? else { return Ok(false) };
        self.begin(head)?;
        Ok(true)
    }

    fn next_head(&mut self) -> Result<Option<u16>> {
        if let Some(head) = self.resumed.pop_front() {
            return Ok(Some(head));
        }
        let mut available = self.queue.iter(self.memory.memory()).map_err(ring_error)?;
        let Some(head) = available.next().map(|chain| chain.head_index()) else { return Ok(None) };
        match self.jobs.get(usize::from(head)) {
            None => Err(malformed(format!("descriptor {head} of a ring of {} is offered", self.setup.size))),
            Some(job) if job.taken => {
                Err(malformed(format!("the request at descriptor {head} is offered twice")))
            }
            Some(_) => {
                if let Some(inflight) = &mut self.inflight {
                    inflight.mark_taken(head)?;
                }
                Ok(Some(head))
            }
        }
    }

    fn begin(&mut self, head: u16) -> Result<()> {
        let memory = self.memory.memory();
        let Some(job) = self.jobs.get_mut(usize::from(head)).filter(|job| !job.taken) else {
            return Err(malformed(format!("the request at descriptor {head} is in flight twice")));
        };
        let table = GuestAddress(self.queue.desc_table());
        let indirect = self.setup.features & INDIRECT != 0;
        job.chain.read(memory, table, self.setup.size, head, indirect)?;
        let task = request::validate(&self.common.config, memory, &job.chain, &mut job.ranges)?;
        (job.taken, job.position, job.operation) = (true, 0, None);
        self.taken += 1;
        match task {
            Task::Device(operation) => {
                job.operation = Some(operation);
                job.ranges.reverse();
                self.submit(head)
            }
            Task::Identify => {
                let identity = self.common.identity;
                let room = (job.chain.writable.len() - 1).min(identity.len() as u64) as usize;
                job.chain.writable.store(memory, 0, &identity[..room])?;
                self.answer(head, Status::Done)
            }
            Task::Answer(status) => self.answer(head, status),
        }
    }

    // -- the device -------------------------------------------------------------------------------------------

    /// Submits the next piece of a request, or answers it if none is left.
    fn submit(&mut self, head: u16) -> Result<()> {
        let job = &mut self.jobs[usize::from(head)];
        let (Some(operation), Some(left)) = (job.operation, job.ranges.pop()) else {
            return self.answer(head, Status::Done);
        };
        let mut range = left;
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        if has_data && left.len() > PIECE {
            range.end = left.start + PIECE;
            job.ranges.push(ByteRange { start: range.end, end: left.end });
        }
        // At most a piece, which fits in `usize`.
        let mut buffer = self.buffers.take(if has_data { range.len() as usize } else { 0 });
        if operation == Operation::Write {
            job.chain.readable.load(self.memory.memory(), HEAD + job.position, &mut buffer)?;
        }
        job.position += range.len();
        // After the last load and before the submission: proves that the loaded bytes are those of the guest.
        self.check_memory()?;
        let write_cache = self.common.write_cache.load(Ordering::Relaxed);
        let fua = !matches!(operation, Operation::Read | Operation::Flush)
            && DeviceConfig::writes_through(self.setup.features, write_cache);
        self.bytes += buffer.len();
        self.submitted += 1;
        let request = Request::unmarked(u64::from(head), operation, range, fua, buffer);
        self.device.submit_plugged(request, &mut self.done);
        Ok(())
    }

    /// Processes completions, and unplugs requests that the device held back, until there are no more completions.
    fn process_completions(&mut self) -> Result<()> {
        loop {
            // In the order in which they completed.
            self.done.reverse();
            while let Some(completion) = self.done.pop() {
                self.completed(completion)?;
            }
            self.device.unplug(&mut self.done);
            if self.done.is_empty() {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, completion: Completion) -> Result<()> {
        let Completion { id, result, buffer } = completion;
        self.bytes -= buffer.len().min(self.bytes);
        let head = u16::try_from(id).unwrap_or(u16::MAX);
        let Some(job) = self.jobs.get_mut(usize::from(head)).filter(|job| job.taken) else {
            debug_assert!(false, "the device completed request {id}, which it does not have");
            return Ok(());
        };
        self.submitted -= 1;
        let is_left = self.disconnected && (!job.ranges.is_empty() || was_given_up(&result));
        if self.fault.is_some() || is_left {
            job.taken = false;
            self.taken -= 1;
            return Ok(());
        }
        if result.is_ok() && job.operation == Some(Operation::Read) {
            let begin = job.position - buffer.len() as u64;
            job.chain.writable.store(self.memory.memory(), begin, &buffer)?;
        }
        self.buffers.give(buffer);
        match result {
            Ok(()) => self.submit(head),
            Err(error) if error.kind() == ErrorKind::Unsupported => self.answer(head, Status::Unsupported),
            Err(_) => self.answer(head, Status::Failed),
        }
    }

    // -- out --------------------------------------------------------------------------------------------------

    /// Answers a request, even if some of its ranges are left.
    fn answer(&mut self, head: u16, status: Status) -> Result<()> {
        let memory = self.memory.memory();
        let job = &mut self.jobs[usize::from(head)];
        let length = job.chain.writable.len();
        job.chain.writable.store(memory, length - 1, &[status.byte()])?;
        self.memory.check()?;
        if let Some(inflight) = &mut self.inflight {
            inflight.begin_answer(head)?;
        }
        // A chain is shorter than 4 GiB.
        self.queue.add_used(memory, head, length as u32).map_err(ring_error)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.finish_answer(head, self.queue.next_used())?;
        }
        job.taken = false;
        self.taken -= 1;
        self.unnotified = true;
        Ok(())
    }

    /// Notifies the guest of answers, unless it suppresses notifications.
    fn notify(&mut self) -> Result<()> {
        if !self.unnotified {
            return Ok(());
        }
        self.unnotified = false;
        let wanted = self.wants_notification()?;
        if !wanted && !self.notify_always {
            return Ok(());
        }
        let Some(call) = &self.call else { return Ok(()) };
        self.notify_always = false;
        call.signal().map_err(|error| {
            malformed(format!("the front end's call descriptor cannot be signalled: {error}"))
        })
    }

    fn wants_notification(&mut self) -> Result<bool> {
        let memory = self.memory.memory();
        if self.queue.event_idx_enabled() {
            return self.queue.needs_notification(memory).map_err(ring_error);
        }
        // The answers are stored before the flag is loaded.
        fence(Ordering::SeqCst);
        let flags = memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        Ok(u16::from_le(flags.map_err(|error| malformed(error.to_string()))?) & NO_INTERRUPT == 0)
    }

    fn check_memory(&self) -> Result<()> {
        self.memory.check()?;
        self.inflight.as_ref().map_or(Ok(()), inflight::Ring::check)
    }

    // -- the end ----------------------------------------------------------------------------------------------

    /// Handles the front end's disconnection: gives up requests that have not begun.
    pub(crate) fn disconnect(&mut self) {
        if !self.disconnected {
            self.disconnected = true;
            // Requests that a previous server had taken stay recorded.
            self.resumed.clear();
            self.device.give_up(&mut self.done);
        }
    }

    /// Completes and answers the requests in the device; takes no new ones. Waits until the device has completed them,
    /// or until `timeout` has passed after `stop` became readable, which sets `until`; when `front_end` is closed,
    /// requests that have not begun are given up. False if the device still has requests.
    pub(crate) fn drain(
        &mut self,
        stop: RawFd,
        front_end: RawFd,
        timeout: Duration,
        until: &mut Option<Instant>,
    ) -> bool {
        let mut waits = WaitSet::new();
        waits.add(stop, Interest::Read);
        let front_end =
            waits.add(front_end, if self.disconnected { Interest::Nothing } else { Interest::HangUp });
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        // Requests that a previous server had taken count as taken.
        while let Some(head) = self.resumed.pop_front().filter(|_| self.fault.is_none()) {
            self.fault = self.begin(head).err();
        }
        loop {
            self.device.poll(&mut self.done);
            if let Err(error) = self.process_completions().and_then(|()| self.notify()) {
                self.fault.get_or_insert(error);
                continue;
            }
            if self.submitted == 0 {
                return true;
            }
            let left = until.map(|until: Instant| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) || waits.wait(left).is_err() {
                return false;
            }
            if waits.readable(0) {
                until.get_or_insert_with(|| Instant::now() + timeout);
                waits.set(0, Interest::Nothing);
                // A server that stops closes the connection itself, and answers the requests that complete in time.
                waits.set(front_end, Interest::Nothing);
            } else if waits.failed(front_end) && until.is_none() {
                self.disconnect();
                waits.set(front_end, Interest::Nothing);
            }
        }
    }
}

fn was_given_up(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Stopped)
}

fn ring_error(error: virtio_queue::Error) -> Error {
    malformed(format!("the ring is invalid: {error}"))
}
