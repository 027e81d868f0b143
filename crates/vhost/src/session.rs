//! The state that one front end has set up: features, memory, rings; and its changes by messages.
//!
//! A ring runs as soon as its setup is complete. A message pauses the rings that it concerns and resumes them after the
//! change, so no ring runs during a change: when the front end has its reply, no thread uses the previous state.
//!
//! Invariants: the contents of a message are checked before anything is changed; an invalid message ends the session
//! with a reason ([`Session::fault`]).
//!
//! Elsewhere: the bytes of messages (`messages`), requests (`worker`).

use crate::config::{DeviceConfig, LOG_ALL, PROTOCOL_FEATURES, WRITE_CACHE};
use crate::dirty_log::{DirtyLog, Pages};
use crate::inflight::{self, Area};
use crate::malformed;
use crate::memory::{GuestMap, Piece};
use crate::server::{Notice, Options};
use crate::system::{self, Notifier};
use crate::threads::Threads;
use crate::worker::{Common, PauseEvent, Setup, Worker};
use cbd_export::BlockDevice;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;
use vm_memory::GuestAddress;

/// Most descriptors of a ring.
pub(crate) const RING_MAX: u16 = 1024;

/// The setup of a ring, and its worker once it has run.
#[derive(Default)]
struct Slot {
    size: u16,
    addresses: Option<[GuestAddress; 3]>,
    base: u16,
    kick: Option<Arc<File>>,
    call: Option<Arc<Notifier>>,
    error: Option<Arc<Notifier>>,
    enabled: bool,
    state: State,
}

#[derive(Default)]
enum State {
    /// Not started since it was set up.
    #[default]
    NotStarted,
    Paused(Box<Worker>),
    Running(thread::JoinHandle<Box<Worker>>, Arc<PauseEvent>),
}

/// The state of one front end.
pub(crate) struct Session {
    device: Arc<dyn BlockDevice>,
    options: Arc<Options>,
    common: Common,
    features: u64,
    memory: Arc<GuestMap>,
    dirty: Arc<DirtyLog>,
    inflight: Option<Arc<Area>>,
    slots: Vec<Slot>,
    threads: Arc<Threads>,
    /// Readable when the server stops.
    stop: RawFd,
    /// The front end's socket.
    front_end: RawFd,
    /// When the rings must have ended, once the server stops.
    until: Option<Instant>,
    /// The error in the message that ended the session.
    pub(crate) fault: Option<Error>,
}

impl Session {
    /// The session of a front end that has sent no message yet. `size` is that of the device in bytes; `stop` is readable when the server stops; `front_end`
    /// is its socket, which stays open as long as the session.
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        options: Arc<Options>,
        threads: Arc<Threads>,
        size: Arc<AtomicU64>,
        stop: RawFd,
        front_end: RawFd,
    ) -> Self {
        let (common, dirty) = (Common::of(&*device, &options, size), Arc::default());
        let slots = std::iter::repeat_with(Slot::default).take(usize::from(options.queues_max)).collect();
        Self {
            device,
            options,
            common,
            features: 0,
            memory: Arc::new(GuestMap::empty(&dirty)),
            dirty,
            inflight: None,
            slots,
            threads,
            stop,
            front_end,
            until: None,
            fault: None,
        }
    }

    /// Completes the requests in flight and releases all resources. If the front end has disconnected, requests that
    /// have not begun are given up: they stay recorded as in flight for the next front end.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the server stops and the device does not complete its requests in time;
    /// they stay recorded as in flight, and are executed when the front end reconnects.
    pub(crate) fn end(&mut self, is_disconnected: bool) -> Result<()> {
        // All rings, whatever the result of one: a ring that continues would execute requests of a disconnected front
        // end.
        let (mut left, mut failed) = (0, Ok(()));
        for index in 0..self.slots.len() {
            if let Err(error) = self.pause(index) {
                failed = failed.and(Err(error));
            }
            if let State::Paused(worker) = &mut self.slots[index].state
                && is_disconnected
            {
                worker.disconnect();
            }
        }
        for index in 0..self.slots.len() {
            match self.drain_ring(index) {
                Ok(is_done) => left += usize::from(!is_done),
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        failed?;
        if left > 0 {
            return Err(Error::new(
                ErrorKind::TimedOut,
                format!("{left} rings have requests that the device did not complete in time"),
            ));
        }
        Ok(())
    }

    // -- features and configuration ---------------------------------------------------------------------------

    pub(crate) fn config(&self) -> &DeviceConfig {
        &self.common.config
    }

    pub(crate) fn negotiate(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.common.config.features();
        if unknown != 0 {
            return Err(malformed(format!(
                "the front end accepts features that were not offered: {unknown:#x}"
            )));
        }
        let changes = self.features ^ features;
        if changes & !LOG_ALL != 0 && self.has_rings() {
            return Err(malformed("the front end changes features while rings are running"));
        }
        if changes & LOG_ALL != 0 {
            self.pause_all()?;
            let on = features & LOG_ALL != 0;
            self.dirty.turn(on, self.memory.end());
            self.options.notify(&Notice::DirtyLog { on });
        }
        self.features = features;
        // Without the bit that lets a front end enable rings, they are enabled from the start.
        self.start_all()
    }

    pub(crate) fn read_config(&self, offset: u32, size: u32) -> Vec<u8> {
        self.common.config.read(offset, size, self.common.write_cache.load(Ordering::Relaxed))
    }

    /// Only the cache mode can be written; other writes have no effect.
    pub(crate) fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        let at = WRITE_CACHE.checked_sub(offset).map(|at| at as usize);
        if let Some(mode) = at.and_then(|at| bytes.get(at)) {
            self.common.write_cache.store(*mode != 0, Ordering::Relaxed);
        }
    }

    // -- memory -----------------------------------------------------------------------------------------------

    pub(crate) fn set_memory(&mut self, pieces: Vec<(Piece, File)>) -> Result<()> {
        let memory = GuestMap::new(pieces, &self.options.memory_limits(), &self.dirty)?;
        self.change_memory(memory)
    }

    pub(crate) fn add_memory(&mut self, piece: Piece, file: File) -> Result<()> {
        let memory = self.memory.with(piece, file, &self.options.memory_limits())?;
        self.change_memory(memory)
    }

    pub(crate) fn remove_memory(&mut self, piece: Piece) -> Result<()> {
        let memory = self.memory.without(piece)?;
        self.change_memory(memory)
    }

    /// Every ring continues with the new memory, or stops if it is not inside the new memory.
    fn change_memory(&mut self, memory: GuestMap) -> Result<()> {
        self.dirty.check_memory(memory.end(), self.has_rings())?;
        self.pause_all()?;
        self.memory = Arc::new(memory);
        self.threads.set_files(self.memory.files());
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if let State::Paused(worker) = &mut slot.state {
                worker.memory = Arc::clone(&self.memory);
                if worker.fault.is_none() {
                    worker.fault = worker.check_addresses().err();
                    report(&self.options, index, worker, slot.error.as_deref());
                }
            }
        }
        self.start_all()
    }

    /// Continues with another bitmap of dirty pages.
    pub(crate) fn set_dirty_log(&mut self, file: File, offset: u64, size: u64) -> Result<()> {
        let limits = self.options.memory_limits();
        self.memory.check_log(size, &limits)?;
        let pages = Pages::open(file, offset, size, &limits)?;
        self.pause_all()?;
        self.dirty.replace(pages, self.memory.pieces())?;
        self.threads.set_files(self.memory.files());
        self.start_all()
    }

    // -- requests in flight -----------------------------------------------------------------------------------

    pub(crate) fn create_inflight(&mut self, queues: u16, size: u16) -> Result<(u64, File)> {
        if queues == 0 || usize::from(queues) > self.slots.len() || size == 0 || size > RING_MAX {
            return Err(malformed(format!(
                "the front end requests records of requests in flight for {queues} rings of {size}"
            )));
        }
        let (area, file) = Area::create(queues)?;
        self.inflight = Some(Arc::new(area));
        Ok((inflight::bytes(queues), file))
    }

    pub(crate) fn adopt_inflight(
        &mut self,
        file: File,
        offset: u64,
        bytes: u64,
        queues: u16,
        size: u16,
    ) -> Result<()> {
        if usize::from(queues) > self.slots.len() || size > RING_MAX {
            return Err(malformed(format!(
                "the front end hands over records of requests in flight for {queues} rings of {size}"
            )));
        }
        self.inflight = Some(Arc::new(Area::open(file, offset, bytes, queues, size)?));
        Ok(())
    }

    // -- rings ------------------------------------------------------------------------------------------------

    /// The slot of a ring that has not started.
    fn idle_slot(&mut self, index: usize) -> Result<&mut Slot> {
        let queues = self.slots.len();
        let slot = self.slots.get_mut(index);
        let slot = slot.ok_or_else(|| malformed(format!("ring {index} of a device with {queues}")))?;
        if matches!(slot.state, State::NotStarted) {
            Ok(slot)
        } else {
            Err(malformed(format!("the front end changes ring {index} while it runs")))
        }
    }

    pub(crate) fn set_size(&mut self, index: usize, size: u32) -> Result<()> {
        let slot = self.idle_slot(index)?;
        match u16::try_from(size) {
            Ok(size) if size.is_power_of_two() && size <= RING_MAX => {
                slot.size = size;
                Ok(())
            }
            _ => Err(malformed(format!(
                "ring {index} cannot have {size} descriptors: the number must be a power of two of at most {RING_MAX}"
            ))),
        }
    }

    pub(crate) fn set_addresses(&mut self, index: usize, addresses: [u64; 3]) -> Result<()> {
        let memory = Arc::clone(&self.memory);
        let mut found = [GuestAddress(0); 3];
        for (found, address) in found.iter_mut().zip(addresses) {
            *found = memory.translate(address).ok_or_else(|| {
                malformed(format!(
                    "ring {index} has the address {address:#x}, which is not in memory that was handed over"
                ))
            })?;
        }
        // A front end that turns the log of dirty pages on or off repeats the addresses.
        if self.slots.get(index).is_some_and(|slot| slot.addresses == Some(found)) {
            return Ok(());
        }
        self.idle_slot(index)?.addresses = Some(found);
        self.start(index)
    }

    pub(crate) fn set_base(&mut self, index: usize, base: u32) -> Result<()> {
        let slot = self.idle_slot(index)?;
        slot.base = u16::try_from(base)
            .map_err(|_| malformed(format!("ring {index} cannot begin at {base}: that is not an index")))?;
        Ok(())
    }

    /// Stops a ring and returns the index at which it has to continue.
    pub(crate) fn stop_ring(&mut self, index: usize) -> Result<u16> {
        if index >= self.slots.len() {
            return Err(malformed(format!("ring {index} of a device with {}", self.slots.len())));
        }
        if !self.drain_ring(index)? {
            return Err(Error::new(ErrorKind::TimedOut, format!("ring {index} cannot be stopped in time")));
        }
        let slot = &mut self.slots[index];
        (slot.kick, slot.call, slot.error, slot.addresses) = (None, None, None, None);
        Ok(slot.base)
    }

    pub(crate) fn set_kick(&mut self, index: usize, kick: Option<File>) -> Result<()> {
        let Some(kick) = kick else {
            return Err(malformed(format!(
                "ring {index} has no kick descriptor, and cannot be served without one"
            )));
        };
        system::set_nonblocking(&kick)?;
        self.idle_slot(index)?.kick = Some(Arc::new(kick));
        self.start(index)
    }

    pub(crate) fn set_call(&mut self, index: usize, call: Option<File>) -> Result<()> {
        let call = call.map(Notifier::new).transpose()?.map(Arc::new);
        self.pause(index)?;
        self.slots[index].call.clone_from(&call);
        if let State::Paused(worker) = &mut self.slots[index].state {
            worker.call = call;
            worker.notify_again();
        }
        self.start(index)
    }

    pub(crate) fn set_error(&mut self, index: usize, error: Option<File>) -> Result<()> {
        let error = error.map(Notifier::new).transpose()?.map(Arc::new);
        self.pause(index)?;
        self.slots[index].error = error;
        self.start(index)
    }

    pub(crate) fn enable(&mut self, index: usize, enabled: bool) -> Result<()> {
        self.pause(index)?;
        self.slots[index].enabled = enabled;
        self.start(index)
    }

    /// Whether a ring has started since it was set up.
    fn has_rings(&self) -> bool {
        self.slots.iter().any(|slot| !matches!(slot.state, State::NotStarted))
    }

    fn pause_all(&mut self) -> Result<()> {
        (0..self.slots.len()).try_for_each(|index| self.pause(index))
    }

    fn start_all(&mut self) -> Result<()> {
        (0..self.slots.len()).try_for_each(|index| self.start(index))
    }

    /// Starts a ring if its setup is complete.
    fn start(&mut self, index: usize) -> Result<()> {
        let slot = &mut self.slots[index];
        if !slot.enabled && self.features & PROTOCOL_FEATURES != 0 {
            return Ok(());
        }
        let mut worker = match (std::mem::take(&mut slot.state), &slot.kick, slot.addresses) {
            (State::Paused(worker), ..) => worker,
            (State::NotStarted, Some(kick), Some(addresses)) if slot.size > 0 => {
                let record = self.inflight.as_ref().map(|area| inflight::Ring::new(area, index, slot.size));
                let setup =
                    Setup { index, size: slot.size, addresses, base: slot.base, features: self.features };
                Box::new(Worker::new(
                    setup,
                    self.common.clone(),
                    Arc::clone(&self.memory),
                    Arc::clone(kick),
                    self.device.open_queue()?,
                    record.transpose()?,
                )?)
            }
            (state, ..) => {
                slot.state = state;
                return Ok(());
            }
        };
        if worker.fault.is_some() {
            slot.state = State::Paused(worker);
            return Ok(());
        }
        worker.call.clone_from(&slot.call);
        let pause = Arc::new(PauseEvent::new()?);
        let (pause_event, options, error) =
            (Arc::clone(&pause), Arc::clone(&self.options), slot.error.clone());
        let threads = Arc::clone(&self.threads);
        let thread = cbd_export::start_thread(format!("vhost-{index}"), move || {
            let _running = threads.register(format!("ring {index}"));
            if let Some(setup) = &options.thread_setup {
                setup();
            }
            worker.run(&pause_event);
            report(&options, index, &worker, error.as_deref());
            worker
        })?;
        slot.state = State::Running(thread, pause);
        Ok(())
    }

    /// Ends a ring's thread and takes its worker with all its requests.
    fn pause(&mut self, index: usize) -> Result<()> {
        let queues = self.slots.len();
        let slot = self.slots.get_mut(index);
        let slot = slot.ok_or_else(|| malformed(format!("ring {index} of a device with {queues}")))?;
        match std::mem::take(&mut slot.state) {
            State::Running(thread, pause) => {
                pause.signal();
                let worker = thread.join().map_err(|_| {
                    Error::new(ErrorKind::System, format!("the thread of ring {index} failed"))
                })?;
                slot.state = State::Paused(worker);
            }
            state => slot.state = state,
        }
        Ok(())
    }

    /// Completes a ring's requests and removes its worker; false if the device did not complete them in time.
    fn drain_ring(&mut self, index: usize) -> Result<bool> {
        self.pause(index)?;
        let slot = &mut self.slots[index];
        let State::Paused(mut worker) = std::mem::take(&mut slot.state) else { return Ok(true) };
        let drained = worker.drain(self.stop, self.front_end, self.options.stop_timeout, &mut self.until);
        slot.base = worker.base();
        Ok(drained)
    }
}

/// Reports a ring's fault to the observer and to the front end.
fn report(options: &Options, index: usize, worker: &Worker, notifier: Option<&Notifier>) {
    let Some(error) = &worker.fault else { return };
    options.notify(&Notice::RingFailed { ring: index, error });
    if let Some(notifier) = notifier {
        // A front end that does not read the event does not learn of it.
        let _ = notifier.signal();
    }
}
