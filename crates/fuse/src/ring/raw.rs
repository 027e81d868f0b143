//! The io_uring of a thread that serves queues of a FUSE connection, with the memory into which the kernel
//! delivers requests.
//!
//! Invariants: a slot is owned by the kernel from its registration or reply until its event, and by this
//! thread from then on. Only a slot that this thread owns is read or written, and its payload is answered
//! from the very buffer that was registered. Memory that the kernel may still write to is freed only by
//! [`join`], which waits until the thread is gone in whose context alone the kernel writes; where that cannot
//! be ensured, the memory is leaked.
//!
//! Elsewhere: the meaning of a message, and the other events of the thread.
#![allow(unsafe_code)]

use crate::wire::{RingCommand, RingHeader, ring_command};
use cbd_types::AlignedBuffer;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

/// Event numbers from here on are those of descriptors, smaller ones those of slots.
const WATCH: u64 = 1 << 32;
/// The offset of the field `len` in an entry of the submission queue; the builder of this command does not
/// set it.
const LEN_OFFSET: usize = 24;

const _: () = assert!(size_of::<squeue::Entry128>() == 128);

/// The header of a slot, in a cache line of its own.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Header(RingHeader);

/// The payload of a slot.
struct Payload {
    /// Empty while the device works on it.
    buffer: AlignedBuffer,
    /// The address that is registered with the kernel.
    place: usize,
    capacity: usize,
    queue: u16,
    /// Whether the kernel owns the slot.
    with_kernel: bool,
}

/// Memory of slots that the kernel may write to as long as the thread lives that registered it. Dropped
/// directly, it is leaked.
#[derive(Default)]
pub struct Lent {
    headers: ManuallyDrop<Vec<Header>>,
    payloads: ManuallyDrop<Vec<Payload>>,
}

/// Joins a thread, and frees the memory that it had lent to the kernel. A panic of the thread is recorded as
/// the failure of its connection.
pub fn join(thread: JoinHandle<Lent>) {
    let Ok(mut lent) = thread.join() else { return };
    // SAFETY: neither is used after this. The kernel reads and writes the memory only in the context of the
    // thread that submitted the command, and a thread that ends cancels its commands before `join` sees it as
    // ended.
    unsafe {
        ManuallyDrop::drop(&mut lent.headers);
        ManuallyDrop::drop(&mut lent.payloads);
    }
}

/// An event of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// This thread owns a slot again: with a request, or with an errno, which is permanent.
    Slot(usize, Result<(), i32>),
    /// A watched descriptor is readable, or in error.
    Watch(u32),
}

/// A ring and its slots.
pub struct RawRing {
    // Before the memory, so that the ring is closed first.
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    lent: Lent,
    unsubmitted: usize,
}

/// Returns the memory of a zeroed buffer to the system until it is touched again: most slots never hold much.
fn give_pages_back(zeroes: &AlignedBuffer) {
    /// Works on locked memory too (Linux 5.18).
    const MADV_DONTNEED_LOCKED: libc::c_int = 24;
    let place = zeroes.as_ptr().cast_mut().cast();
    // SAFETY: the capacity of a buffer is whole pages, which are its own, from the allocator's anonymous
    // memory. They read as zeroes after this, as they do before. If the kernel refuses the call, nothing
    // changes.
    unsafe { libc::madvise(place, zeroes.capacity(), MADV_DONTNEED_LOCKED) };
}

impl RawRing {
    /// A ring with one slot of `payload` bytes per entry of `queues`, that can watch `watches` descriptors.
    pub fn new(queues: &[u16], payload: usize, watches: usize) -> io::Result<Self> {
        let entries = (queues.len() + watches).next_power_of_two();
        let entries = u32::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // Completions interrupt no thread: they are handled when the thread next enters or leaves the kernel,
        // for whatever reason. (If only its wait for this ring handled them, a request that was delivered to
        // a thread that hangs elsewhere could not be aborted.)
        let ring = IoUring::builder()
            .dontfork()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .setup_single_issuer()
            .build(entries)?;
        let payload = |&queue: &u16| {
            let buffer = AlignedBuffer::zeroed(payload);
            give_pages_back(&buffer);
            let (place, capacity) = (buffer.as_ptr().expose_provenance(), buffer.capacity());
            Payload { buffer, place, capacity, queue, with_kernel: false }
        };
        let lent = Lent {
            headers: ManuallyDrop::new(vec![Header::default(); queues.len()]),
            payloads: ManuallyDrop::new(queues.iter().map(payload).collect()),
        };
        Ok(Self { ring, lent, unsubmitted: 0 })
    }

    /// Passes on the memory that [`join`] frees.
    pub fn into_lent(self) -> Lent {
        self.lent
    }

    /// Registers all slots with their queues of the connection, and submits the commands. A refused slot is
    /// reported as an event.
    pub fn register(&mut self, connection: RawFd) -> io::Result<()> {
        let part = |base: *mut libc::c_void, iov_len: usize| libc::iovec { iov_base: base, iov_len };
        let parts: Vec<_> = (self.lent.headers.iter_mut().zip(self.lent.payloads.iter_mut()))
            .map(|(header, payload)| {
                let header = (&raw mut header.0).cast();
                let buffer = payload.buffer.as_mut_ptr().cast();
                [part(header, size_of::<RingHeader>()), part(buffer, payload.capacity)]
            })
            .collect();
        for (slot, parts) in parts.iter().enumerate() {
            let entry = self.command(connection, slot, ring_command::REGISTER, 0, Some(parts));
            self.push(slot, &entry)?;
        }
        // The kernel reads the parts while it consumes the entries: all of them before this returns.
        self.submit_all()
    }

    fn command(
        &self,
        connection: RawFd,
        slot: usize,
        command: u32,
        commit_id: u64,
        parts: Option<&[libc::iovec; 2]>,
    ) -> squeue::Entry128 {
        let qid = self.lent.payloads[slot].queue;
        let request = RingCommand { commit_id, qid, ..RingCommand::default() };
        let mut bytes = [0; 80];
        bytes[..size_of::<RingCommand>()].copy_from_slice(request.as_bytes());
        let mut entry = opcode::UringCmd80::new(types::Fd(connection), command)
            .cmd(bytes)
            .addr(parts.map(|parts| parts.as_ptr().expose_provenance() as u64))
            .build()
            .user_data(slot as u64);
        if let Some(parts) = parts {
            // SAFETY: the field lies inside the entry, which is the kernel's structure of 128 bytes, and is a
            // u32 there.
            unsafe {
                (&raw mut entry).cast::<u8>().add(LEN_OFFSET).cast::<u32>().write(parts.len() as u32);
            }
        }
        entry
    }

    fn push(&mut self, slot: usize, entry: &squeue::Entry128) -> io::Result<()> {
        self.lent.payloads[slot].with_kernel = true;
        // SAFETY: the memory that the command names is the slot's header and payload, on the heap, long
        // enough, and not touched until its event; it is freed only as `Lent` says. The descriptor is the
        // connection's; an entry of a closed one would fail and touch no memory.
        unsafe { self.push_entry(entry) }
    }

    /// # Safety
    /// As for the push of the ring itself: what the entry names must be valid until its completion.
    unsafe fn push_entry(&mut self, entry: &squeue::Entry128) -> io::Result<()> {
        // SAFETY: the caller vouches for the entry.
        if unsafe { self.ring.submission().push(entry) }.is_err() {
            // There is an entry for each slot and watch, so this takes more than one watch of one descriptor.
            self.submit_all()?;
            // SAFETY: the same.
            let pushed = unsafe { self.ring.submission().push(entry) };
            pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        }
        self.unsubmitted += 1;
        Ok(())
    }

    /// Reports once when a descriptor is readable or in error.
    pub fn watch(&mut self, descriptor: RawFd, number: u32) -> io::Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(descriptor), libc::POLLIN as u32).build();
        let entry = squeue::Entry128::from(entry).user_data(WATCH | u64::from(number));
        // SAFETY: the entry names no memory.
        unsafe { self.push_entry(&entry) }
    }

    /// The header that the kernel wrote into a slot that this thread owns.
    pub fn header(&self, slot: usize) -> Option<&RingHeader> {
        let ours = !self.lent.payloads.get(slot)?.with_kernel;
        self.lent.headers.get(slot).filter(|_| ours).map(|header| &header.0)
    }

    /// The bytes that the kernel wrote behind the arguments.
    pub fn payload(&self, slot: usize) -> Option<&[u8]> {
        let payload = self.lent.payloads.get(slot).filter(|payload| !payload.with_kernel)?;
        Some(&payload.buffer)
    }

    /// Takes the payload out of a slot that this thread owns, `length` bytes of it.
    pub fn take_payload(&mut self, slot: usize, length: usize) -> Option<AlignedBuffer> {
        let payload = self.lent.payloads.get_mut(slot).filter(|payload| !payload.with_kernel)?;
        (length <= payload.buffer.len()).then(|| {
            let mut buffer = std::mem::take(&mut payload.buffer);
            buffer.resize(length);
            buffer
        })
    }

    /// Returns the payload to a slot that this thread owns. A buffer other than the registered one is
    /// dropped: the request then cannot be answered.
    pub fn put_payload(&mut self, slot: usize, mut buffer: AlignedBuffer) {
        let Some(payload) = self.lent.payloads.get_mut(slot).filter(|payload| !payload.with_kernel) else {
            return;
        };
        if buffer.as_ptr().expose_provenance() == payload.place && buffer.capacity() == payload.capacity {
            buffer.resize(payload.capacity);
            payload.buffer = buffer;
        }
    }

    /// Writes the reply into a slot that this thread owns, with `fill` for the payload, and queues the slot's
    /// return to the kernel. It is submitted later.
    ///
    /// # Errors
    /// When this thread does not own the slot, or its payload is not the registered buffer.
    pub fn answer(
        &mut self,
        connection: RawFd,
        slot: usize,
        header: &[u8],
        payload_bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        let wrong = || io::Error::from_raw_os_error(libc::EINVAL);
        let payload =
            self.lent.payloads.get_mut(slot).filter(|payload| !payload.with_kernel).ok_or_else(wrong)?;
        if payload.buffer.as_ptr().expose_provenance() != payload.place
            || payload_bytes > payload.buffer.len()
        {
            return Err(wrong());
        }
        fill(&mut payload.buffer[..payload_bytes]);
        let place = &mut self.lent.headers[slot].0;
        let commit_id = place.commit_id;
        place.in_out.as_mut_bytes()[..header.len()].copy_from_slice(header);
        place.payload_sz = payload_bytes as u32;
        let entry = self.command(connection, slot, ring_command::COMMIT_AND_FETCH, commit_id, None);
        self.push(slot, &entry)
    }

    /// Entries that are not submitted yet.
    pub const fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Submits all queued entries.
    pub fn submit_all(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            self.enter(0)?;
        }
        Ok(())
    }

    /// Submits all queued entries, waits for an event, and appends the events to `events`. There may be none.
    pub fn wait(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.enter(1)?;
        self.look(events);
        Ok(())
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        match self.ring.submitter().submit_and_wait(wanted) {
            // The kernel consumes no entry only if none is queued.
            Ok(0) => self.unsubmitted = 0,
            Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
            // Interrupted, or short of memory: the kernel has tried to free some; the call is repeated.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Appends the pending events to `events`.
    pub fn look(&mut self, events: &mut Vec<Event>) {
        let payloads = &mut self.lent.payloads;
        for entry in self.ring.completion() {
            let (number, result) = (entry.user_data(), entry.result());
            if number & WATCH != 0 {
                events.push(Event::Watch(number as u32));
                continue;
            }
            let slot = number as usize;
            if let Some(payload) = payloads.get_mut(slot) {
                payload.with_kernel = false;
            }
            events.push(Event::Slot(slot, if result < 0 { Err(-result) } else { Ok(()) }));
        }
    }
}
