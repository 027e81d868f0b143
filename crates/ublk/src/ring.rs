//! The io_uring of a thread that serves a queue, with the slots in which the kernel delivers requests.
//!
//! Invariants: a slot is owned by the kernel from the command that offers it until its event, and by this thread from
//! then on; only a slot that this thread owns is read or answered. The kernel copies a write's data into a slot's
//! buffer before the event, and a read's data out of it at the reply, in the context of the thread that offered the
//! slot. Memory that the kernel may still write to is freed only by [`join`], which waits until that thread has ended;
//! if that cannot be ensured, the memory is leaked.
//!
//! Elsewhere: the meaning of a request ([`crate::worker`]).
#![allow(unsafe_code)]

use crate::abi::{DEPTH_MAX, Description, IoCommand, request_command};
use cbd_sys::memory::{Mapped, Sharing, release_pages};
use cbd_types::AlignedBuffer;
use io_uring::{IoUring, opcode, types};
use rustix::param::page_size;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

/// The largest useful buffer of a slot: the kernel's own limit.
pub const CAPACITY_MAX: usize = 32 << 20;
/// Event numbers from here on belong to descriptors, smaller ones to slots.
const WATCH: u64 = 1 << 32;
/// The device file of the queue, among the files that are registered with the ring.
const DEVICE: types::Fixed = types::Fixed(0);

/// Memory of slots that the kernel may write to as long as the thread that offered them lives. If it is dropped without
/// [`join`], it is leaked.
#[derive(Default)]
pub struct LentMemory(ManuallyDrop<Vec<AlignedBuffer>>);

/// Joins a thread, and frees the memory that it had lent to the kernel.
pub fn join(thread: JoinHandle<LentMemory>) {
    let Ok(mut lent) = thread.join() else { return };
    // SAFETY: it is not used after this. The kernel writes the memory only in the context of the thread that offered
    // the slot; if that thread has ended, the kernel requeues or fails the request instead.
    unsafe { ManuallyDrop::drop(&mut lent.0) };
}

/// An event of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// This thread owns a slot: with the kernel's result, 0 for a request, a negative errno for the end of the slot.
    Slot(usize, i32),
    /// A watched descriptor is readable, or in error.
    Watch(u32),
}

/// The kernel's descriptions of the requests in a queue's slots.
struct Descriptions {
    mapped: Mapped,
    depth: usize,
}

impl Descriptions {
    fn map(device: &File, queue: u16, depth: usize) -> io::Result<Self> {
        let of = |slots: usize| (slots * size_of::<Description>()).next_multiple_of(page_size());
        let offset = (usize::from(queue) * of(DEPTH_MAX)) as u64;
        let mapped = Mapped::file(device.as_fd(), offset, of(depth), Sharing::ReadOnlyPopulated, 0)?;
        Ok(Self { mapped, depth })
    }

    fn get(&self, slot: usize) -> Option<Description> {
        // SAFETY: the slot lies in the mapping, and any bytes are a description. The kernel may write it, so it is read
        // once.
        (slot < self.depth).then(|| unsafe { self.mapped.base().cast().add(slot).read_volatile() })
    }
}

/// A queue of a device; the thread that creates this value serves it.
pub struct Ring {
    // Declared first, so that it is closed first.
    ring: IoUring,
    descriptions: Descriptions,
    buffers: LentMemory,
    /// The slots that the kernel owns.
    with_kernel: Vec<bool>,
    queue: u16,
    capacity: usize,
    unsubmitted: usize,
}

/// A zeroed buffer without memory: the system provides a page when it is accessed, and most slots never hold much data.
fn buffer(capacity: usize) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::zeroed(capacity);
    release_pages(&mut buffer);
    buffer
}

impl Ring {
    /// A ring for the slots of a queue, with buffers of `capacity` bytes, that can watch `watches` descriptors. No slot
    /// is offered yet.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn new(device: &File, queue: u16, depth: usize, capacity: usize, watches: usize) -> io::Result<Self> {
        let entries = u32::try_from((depth + watches).next_power_of_two())
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // With these flags the kernel runs its work for this thread when the thread enters it, without an interruption.
        let build = |deferred: bool| {
            let mut builder = IoUring::builder();
            builder.dontfork().setup_single_issuer();
            if deferred {
                builder.setup_defer_taskrun();
            } else {
                builder.setup_coop_taskrun();
            }
            builder.build(entries)
        };
        let ring = build(true).or_else(|_| build(false))?;
        ring.submitter().register_files(&[device.as_raw_fd()])?;
        Ok(Self {
            ring,
            descriptions: Descriptions::map(device, queue, depth)?,
            buffers: LentMemory(ManuallyDrop::new((0..depth).map(|_| buffer(capacity)).collect())),
            with_kernel: vec![false; depth],
            queue,
            capacity,
            unsubmitted: 0,
        })
    }

    /// The memory that [`join`] frees.
    #[must_use]
    pub fn into_memory(self) -> LentMemory {
        self.buffers
    }

    /// The number of slots.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.with_kernel.len()
    }

    /// Bytes of a slot's buffer.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Offers all slots to the kernel for the first time.
    ///
    /// # Errors
    /// When the kernel does not take them.
    pub fn offer_all(&mut self) -> io::Result<()> {
        for slot in 0..self.depth() {
            self.push_command(request_command::FETCH, slot, 0)?;
        }
        self.submit()
    }

    /// The kernel's description of the request in a slot that this thread owns.
    #[must_use]
    pub fn description(&self, slot: usize) -> Option<Description> {
        self.is_owned(slot).then(|| self.descriptions.get(slot))?
    }

    fn is_owned(&self, slot: usize) -> bool {
        self.with_kernel.get(slot) == Some(&false)
    }

    /// Takes the buffer out of a slot that this thread owns, `length` bytes of it.
    pub fn take_buffer(&mut self, slot: usize, length: usize) -> Option<AlignedBuffer> {
        let owned = self.is_owned(slot);
        let buffer = self.buffers.0.get_mut(slot).filter(|buffer| owned && length <= buffer.capacity())?;
        let mut buffer = std::mem::take(buffer);
        buffer.resize(length);
        Some(buffer)
    }

    /// Puts a buffer into a slot that this thread owns, usually the buffer that was taken out.
    pub fn put_buffer(&mut self, slot: usize, buffer: AlignedBuffer) {
        if self.is_owned(slot)
            && buffer.capacity() >= self.capacity
            && let Some(slot_buffer) = self.buffers.0.get_mut(slot)
        {
            *slot_buffer = buffer;
        }
    }

    /// Answers the request in a slot that this thread owns with the transferred bytes or a negative errno, and offers
    /// the slot again. For a read, the data is the content of the slot's buffer. The entry is submitted later.
    ///
    /// # Errors
    /// When this thread does not own the slot, or the ring is full.
    pub fn answer(&mut self, slot: usize, result: i32) -> io::Result<()> {
        if !self.is_owned(slot) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.push_command(request_command::COMMIT_AND_FETCH, slot, result)
    }

    fn push_command(&mut self, operation: u32, slot: usize, result: i32) -> io::Result<()> {
        let slot_buffer = &mut self.buffers.0[slot];
        if slot_buffer.capacity() < self.capacity {
            // The buffer that was taken out has not been returned, and may never be.
            *slot_buffer = buffer(self.capacity);
        }
        let address = slot_buffer.as_mut_ptr().expose_provenance() as u64;
        let command = IoCommand { queue: self.queue, slot: slot as u16, result, address };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let entry = opcode::UringCmd16::new(DEVICE, operation).cmd(bytes).build().user_data(slot as u64);
        self.with_kernel[slot] = true;
        // SAFETY: the buffer that the command names is the slot's, of the size that the device was created with, not
        // accessed until the slot's event, and freed only as `LentMemory` describes.
        unsafe { self.push(&entry) }
    }

    /// # Safety
    /// The memory that the entry names must be valid until its completion.
    unsafe fn push(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: the caller guarantees it for the entry.
        if unsafe { self.ring.submission().push(entry) }.is_err() {
            self.submit()?;
            // SAFETY: as above.
            let pushed = unsafe { self.ring.submission().push(entry) };
            pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// Reports once when a descriptor is readable or in error.
    ///
    /// # Errors
    /// When the ring is full.
    pub fn watch(&mut self, descriptor: RawFd, number: u32) -> io::Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(descriptor), libc::POLLIN as u32).build();
        // SAFETY: the entry names no memory.
        unsafe { self.push(&entry.user_data(WATCH | u64::from(number))) }
    }

    /// Submits all queued entries.
    ///
    /// # Errors
    /// When the kernel refuses them.
    pub fn submit(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            self.enter(0)?;
        }
        Ok(())
    }

    /// Submits all queued entries, waits for an event, and appends the events to `events`. There may be none.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.enter(1)?;
        self.take_events(events);
        Ok(())
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        match self.ring.submitter().submit_and_wait(wanted) {
            // The kernel consumes no entry only if none is queued.
            Ok(0) => self.unsubmitted = 0,
            Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
            // Interrupted, or short of memory, which the kernel has tried to free: the call is repeated.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Appends the pending events to `events`.
    pub fn take_events(&mut self, events: &mut Vec<Event>) {
        for entry in self.ring.completion() {
            let (number, result) = (entry.user_data(), entry.result());
            if number & WATCH != 0 {
                events.push(Event::Watch(number as u32));
                continue;
            }
            let slot = number as usize;
            // An event of a slot that the kernel does not own, or that does not exist, is ignored.
            if let Some(with_kernel) = self.with_kernel.get_mut(slot).filter(|with_kernel| **with_kernel) {
                *with_kernel = false;
                events.push(Event::Slot(slot, result));
            }
        }
    }
}
