//! One ring: its thread, with a request queue of its own.
//!
//! What the device completes at once is answered at once; what it parks is answered when it comes back, in any order. The
//! thread waits in one place, for the ring, the device and the order to pause; before that it looks at the ring for a short
//! while (`spin`). A worker that is paused keeps what it has, and goes on where it was.
//!
//! Always true here:
//! - each request that was taken gets exactly one answer, after it was done, unless its ring is at fault;
//! - data that is written was loaded from memory that was still there when all of it was loaded;
//! - what is taken and not answered is bounded by the ring, and by bytes; beyond those the ring waits;
//! - a ring at fault is not touched any more; what the device still has of it is completed and not answered;
//! - when the front end is gone, nothing more is begun: what waits for space is given up and not answered, so that it stays noted as in
//!   flight for the next connection; what the backing device has is completed first.

mod idle;
mod setup;

pub(crate) use setup::{Common, Halt, Setup};

use crate::chain::Chain;
use crate::config::{DeviceConfig, EVENT_INDEX, INDIRECT};
use crate::inflight;
use crate::malformed;
use crate::memory::GuestMap;
use crate::request::{self, HEAD, Status, Task};
use crate::spin::Spin;
use crate::system::Bell;
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

/// Longest piece of a request that the device gets at once, in bytes.
const PIECE: u64 = 1 << 20;
/// Requests that are taken before the guest is told of answers.
const BATCH: usize = 8;
const NO_INTERRUPT: u16 = virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT as u16;

/// A request that was taken, at the place of its first descriptor.
#[derive(Default)]
struct Job {
    taken: bool,
    chain: Chain,
    operation: Option<Operation>,
    /// What is left, the last first.
    ranges: Vec<ByteRange>,
    /// Bytes of its data that are done.
    position: u64,
}

/// A ring and what is going on in it.
pub(crate) struct Worker {
    setup: Setup,
    common: Common,
    queue: Queue,
    pub(crate) memory: Arc<GuestMap>,
    pub(crate) kick: Arc<File>,
    pub(crate) call: Option<Arc<Bell>>,
    device: Box<dyn RequestQueue>,
    /// How many descriptors it is waited for by.
    descriptors: usize,
    inflight: Option<inflight::Ring>,
    /// What a predecessor had taken.
    resumed: VecDeque<u16>,
    jobs: Vec<Job>,
    /// Jobs that are taken.
    taken: usize,
    /// Those of them that the device has; all, unless the ring is at fault.
    submitted: usize,
    /// Bytes of buffers that the device has.
    bytes: usize,
    buffers: Buffers,
    done: Vec<Completion>,
    /// Answers that the guest may have to be told of.
    unsaid: bool,
    /// It is told in any case: somebody may have been killed before he could.
    say_in_any_case: bool,
    spin: Spin,
    /// Kicks since the last request that was taken.
    empty_kicks: u32,
    /// The front end is gone: nothing more is begun.
    deserted: bool,
    /// Why it does not go on.
    pub(crate) fault: Option<Error>,
}

impl Worker {
    /// A ring that goes on where `setup`, or what a predecessor noted in `inflight`, says.
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
        let [descriptors, available, used] = setup.places;
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
            unsaid: true,
            say_in_any_case: true,
            empty_kicks: 0,
            deserted: false,
            fault: None,
        };
        worker.check_places()?;
        let used = worker.queue.used_idx(worker.memory.memory(), Ordering::Acquire).map_err(ring_error)?.0;
        let mut base = worker.setup.base;
        if let Some(ring) = &mut inflight {
            let left = ring.recover(used)?;
            // Each one that was ever taken is either answered or in flight; a ring has at most 32768.
            base = used.wrapping_add(left.len() as u16);
            worker.resumed = left.into();
        }
        worker.inflight = inflight;
        worker.queue.set_next_avail(base);
        worker.queue.set_next_used(used);
        Ok(worker)
    }

    /// Where the next server has to go on.
    pub(crate) fn base(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Fails if the ring is not inside the guest's memory (any more).
    pub(crate) fn check_places(&self) -> Result<()> {
        if self.queue.is_valid(self.memory.memory()) {
            return Ok(());
        }
        let [descriptors, available, used] = self.setup.places.map(|place| place.0);
        Err(malformed(format!(
            "ring {} of {} (at {descriptors:#x}, {available:#x}, {used:#x}) is not in the guest's memory",
            self.setup.index, self.setup.size
        )))
    }

    /// The guest is told of answers again, by whatever it handed over meanwhile.
    pub(crate) fn speak_up(&mut self) {
        (self.unsaid, self.say_in_any_case) = (true, true);
    }

    /// Serves until `halt` is ordered; a fault stays in [`fault`](Self::fault).
    pub(crate) fn run(&mut self, halt: &Halt) {
        if self.fault.is_some() {
            return;
        }
        if let Err(error) = self.serve(halt) {
            // Where memory is gone, what was read from it is beside the point.
            let error = self.check_memory().err().unwrap_or(error);
            self.fault = Some(error);
        }
    }

    /// Takes and answers what the ring has, until nothing is left or about `most` were taken; waits for the device alone.
    pub(crate) fn run_dry(&mut self, most: usize) -> Result<()> {
        let mut waits = WaitSet::new();
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        let mut rounds = most.div_ceil(BATCH);
        loop {
            let took = rounds > 0 && self.take()?;
            rounds = rounds.saturating_sub(1);
            self.device.poll(&mut self.done);
            self.settle()?;
            self.say()?;
            if !took && self.submitted == 0 {
                return Ok(());
            }
            if !took {
                waits.wait(None)?;
            }
        }
    }

    fn serve(&mut self, halt: &Halt) -> Result<()> {
        let mut waits = WaitSet::new();
        waits.add(halt.event.descriptor(), Interest::Read);
        waits.add(self.kick.as_raw_fd(), Interest::Read);
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        self.queue.disable_notification(self.memory.memory()).map_err(ring_error)?;
        while !halt.is_ordered() {
            let took = self.take()?;
            if self.taken > 0 {
                self.device.poll(&mut self.done);
                self.settle()?;
            }
            self.say()?;
            if !took {
                self.idle(halt, &mut waits)?;
            }
        }
        Ok(())
    }

    // -- in ---------------------------------------------------------------------------------------------------

    /// Whether the device has as much as it may.
    fn is_full(&self) -> bool {
        self.bytes >= self.common.bytes_max
    }

    /// Takes some requests; false if there was none that could be taken.
    fn take(&mut self) -> Result<bool> {
        let mut took = 0;
        let begun = loop {
            if took == BATCH || self.is_full() {
                break Ok(());
            }
            match self.begin_next() {
                Ok(true) => took += 1,
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // What was offered before something that makes no sense is done.
        let settled = self.settle();
        begun.and(settled)?;
        if took > 0 {
            self.empty_kicks = 0;
        }
        Ok(took > 0)
    }

    /// Begins what the ring has next, if anything.
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
                    inflight.take(head)?;
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

    /// Submits the next piece of a request that has one.
    fn submit(&mut self, head: u16) -> Result<()> {
        let job = &mut self.jobs[usize::from(head)];
        let (Some(operation), Some(left)) = (job.operation, job.ranges.pop()) else {
            return self.answer(head, Status::Done);
        };
        let mut range = left;
        let carries = matches!(operation, Operation::Read | Operation::Write);
        if carries && left.len() > PIECE {
            range.end = left.start + PIECE;
            job.ranges.push(ByteRange { start: range.end, end: left.end });
        }
        // At most a piece, which fits.
        let mut buffer = self.buffers.take(if carries { range.len() as usize } else { 0 });
        if operation == Operation::Write {
            job.chain.readable.load(self.memory.memory(), HEAD + job.position, &mut buffer)?;
        }
        job.position += range.len();
        // Behind the last load and before anything is done: what was loaded is the guest's.
        self.check_memory()?;
        let write_cache = self.common.write_cache.load(Ordering::Relaxed);
        let fua = !matches!(operation, Operation::Read | Operation::Flush)
            && DeviceConfig::writes_through(self.setup.features, write_cache);
        self.bytes += buffer.len();
        self.submitted += 1;
        let request = Request { id: u64::from(head), operation, range, fua, buffer };
        self.device.submit_plugged(request, &mut self.done);
        Ok(())
    }

    /// Goes on with what the device has completed, and has it take what it kept back.
    fn settle(&mut self) -> Result<()> {
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
        let is_left = self.deserted && (!job.ranges.is_empty() || was_given_up(&result));
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

    /// Answers a request, whatever is left of it.
    fn answer(&mut self, head: u16, status: Status) -> Result<()> {
        let memory = self.memory.memory();
        let job = &mut self.jobs[usize::from(head)];
        let length = job.chain.writable.len();
        job.chain.writable.store(memory, length - 1, &[status.byte()])?;
        self.memory.check()?;
        if let Some(inflight) = &mut self.inflight {
            inflight.answer(head)?;
        }
        // A chain has less than 4 GiB.
        self.queue.add_used(memory, head, length as u32).map_err(ring_error)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.answered(head, self.queue.next_used())?;
        }
        job.taken = false;
        self.taken -= 1;
        self.unsaid = true;
        Ok(())
    }

    /// Tells the guest of answers, if it wants to be told.
    fn say(&mut self) -> Result<()> {
        if !self.unsaid {
            return Ok(());
        }
        self.unsaid = false;
        let wanted = self.wants_to_be_told()?;
        if !wanted && !self.say_in_any_case {
            return Ok(());
        }
        let Some(call) = &self.call else { return Ok(()) };
        self.say_in_any_case = false;
        call.ring().map_err(|error| {
            malformed(format!("the front end's call descriptor cannot be signalled: {error}"))
        })
    }

    fn wants_to_be_told(&mut self) -> Result<bool> {
        let memory = self.memory.memory();
        if self.queue.event_idx_enabled() {
            return self.queue.needs_notification(memory).map_err(ring_error);
        }
        // The answers are out before the flag is looked at.
        fence(Ordering::SeqCst);
        let flags = memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        Ok(u16::from_le(flags.map_err(|error| malformed(error.to_string()))?) & NO_INTERRUPT == 0)
    }

    fn check_memory(&self) -> Result<()> {
        self.memory.check()?;
        self.inflight.as_ref().map_or(Ok(()), inflight::Ring::check)
    }

    // -- the end ----------------------------------------------------------------------------------------------

    /// The front end is gone.
    pub(crate) fn desert(&mut self) {
        if !self.deserted {
            self.deserted = true;
            // What a predecessor had taken stays noted.
            self.resumed.clear();
            self.device.give_up(&mut self.done);
        }
    }

    /// Completes and answers what the device has; nothing new is taken. Waits until the device is done, or until
    /// `timeout` is over after `stop` became readable, which sets `until`; when `front_end` is closed, what has not begun is given up. False
    /// if the device still has something.
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
            waits.add(front_end, if self.deserted { Interest::Nothing } else { Interest::HangUp });
        for descriptor in self.device.wait_descriptors() {
            waits.add(descriptor, Interest::Read);
        }
        // What a predecessor had taken counts as taken.
        while let Some(head) = self.resumed.pop_front().filter(|_| self.fault.is_none()) {
            self.fault = self.begin(head).err();
        }
        loop {
            self.device.poll(&mut self.done);
            if let Err(error) = self.settle().and_then(|()| self.say()) {
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
                // A server that stops closes the connection itself, and answers what is done in time.
                waits.set(front_end, Interest::Nothing);
            } else if waits.failed(front_end) && until.is_none() {
                self.desert();
                waits.set(front_end, Interest::Nothing);
            }
        }
    }
}

fn was_given_up(result: &Result<()>) -> bool {
    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Stopped)
}

fn ring_error(error: virtio_queue::Error) -> Error {
    malformed(format!("the ring makes no sense: {error}"))
}
