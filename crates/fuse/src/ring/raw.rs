//! The io_uring of a thread that serves queues of a FUSE connection, with the memory that the kernel hands requests over in.
//!
//! Always true here: a slot is the kernel's from its registration or answer until its event, and ours from then on; only
//! a slot of ours is read or written, and its payload is answered from the very buffer that was registered. Memory that the kernel may
//! still write to is freed by nobody but [`join`], which knows that the thread is gone for whom alone the kernel writes; where
//! that cannot be known it is leaked.
//!
//! Left to others: what a message means, and what is waited for besides.
#![allow(unsafe_code)]

use crate::wire::{RingCommand, RingHeader, ring_command};
use cbd_types::AlignedBuffer;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::thread::JoinHandle;
use zerocopy::IntoBytes;

/// Numbers of events from here on are those of descriptors, the smaller ones those of slots.
const WATCH: u64 = 1 << 32;
/// Where an entry of the submission queue has its field `len`, which the builder of this command does not set.
const LEN_OFFSET: usize = 24;

const _: () = assert!(size_of::<squeue::Entry128>() == 128);

/// The header of a slot, apart from those of other slots.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Header(RingHeader);

/// The payload of a slot.
struct Payload {
    /// Empty while the device has it.
    buffer: AlignedBuffer,
    /// Where the kernel knows it to be.
    place: usize,
    capacity: usize,
    queue: u16,
    /// Whether the slot is the kernel's.
    with_kernel: bool,
}

/// Memory of slots that the kernel may write to as long as the thread lives that registered it. Dropped by itself, it is leaked.
#[derive(Default)]
pub struct Lent {
    headers: ManuallyDrop<Vec<Header>>,
    payloads: ManuallyDrop<Vec<Payload>>,
}

/// Waits until a thread is gone, and frees what it had lent to the kernel. A panic of it is in its connection's failure.
pub fn join(thread: JoinHandle<Lent>) {
    let Ok(mut lent) = thread.join() else { return };
    // SAFETY: neither is used after this. The kernel reads and writes the memory only in the context of the thread that
    // submitted the command, and a thread that ends takes its commands back before it counts as gone for whoever joins it.
    unsafe {
        ManuallyDrop::drop(&mut lent.headers);
        ManuallyDrop::drop(&mut lent.payloads);
    }
}

/// Something that has happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A slot is ours again: with a request, or with an errno, and then for good.
    Slot(usize, Result<(), i32>),
    /// A descriptor that was watched is readable, or gone.
    Watch(u32),
}

/// A ring and its slots.
pub struct RawRing {
    // Before the memory, so that the ring is closed first.
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    lent: Lent,
    unsubmitted: usize,
}

/// Gives the memory of a buffer of zeroes back to the system until it is touched again: most slots never hold much.
fn give_pages_back(zeroes: &AlignedBuffer) {
    /// Also where memory is locked (Linux 5.18).
    const MADV_DONTNEED_LOCKED: libc::c_int = 24;
    let place = zeroes.as_ptr().cast_mut().cast();
    // SAFETY: the capacity of a buffer is whole pages, which are its own, from the allocator's anonymous memory. They read as zeroes
    // after this, as they do before. Where the kernel refuses it nothing changes.
    unsafe { libc::madvise(place, zeroes.capacity(), MADV_DONTNEED_LOCKED) };
}

impl RawRing {
    /// A ring with as many slots as `queues` names queues, each of `payload` bytes, that can watch so many descriptors.
    pub fn new(queues: &[u16], payload: usize, watches: usize) -> io::Result<Self> {
        let entries = (queues.len() + watches).next_power_of_two();
        let entries = u32::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // Completions interrupt nobody: they are handled when the thread enters or leaves the kernel next, whatever for. (If only
        // its wait for this ring handled them, a request that was handed to a thread that hangs elsewhere could not be aborted.)
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

    /// Gives the memory away that is to be freed by [`join`].
    pub fn into_lent(self) -> Lent {
        self.lent
    }

    /// Gives all slots to their queues of the connection, and submits that. What is refused comes back as an event.
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
        // The kernel reads the parts while it takes the entries: all of them before this returns.
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
            // SAFETY: the field lies inside the entry, which is the kernel's structure of 128 bytes, and is a u32 there.
            unsafe {
                (&raw mut entry).cast::<u8>().add(LEN_OFFSET).cast::<u32>().write(parts.len() as u32);
            }
        }
        entry
    }

    fn push(&mut self, slot: usize, entry: &squeue::Entry128) -> io::Result<()> {
        self.lent.payloads[slot].with_kernel = true;
        // SAFETY: the memory that the command names is the slot's header and payload, on the heap, long enough, and
        // not touched until its event; it is freed only as `Lent` says. The descriptor is the connection's; an entry of a
        // closed one would fail and touch no memory.
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

    /// Tells once when a descriptor is readable or gone.
    pub fn watch(&mut self, descriptor: RawFd, number: u32) -> io::Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(descriptor), libc::POLLIN as u32).build();
        let entry = squeue::Entry128::from(entry).user_data(WATCH | u64::from(number));
        // SAFETY: the entry names no memory.
        unsafe { self.push_entry(&entry) }
    }

    /// What the kernel wrote into the header of a slot of ours.
    pub fn header(&self, slot: usize) -> Option<&RingHeader> {
        let ours = !self.lent.payloads.get(slot)?.with_kernel;
        self.lent.headers.get(slot).filter(|_| ours).map(|header| &header.0)
    }

    /// What the kernel wrote behind the arguments.
    pub fn payload(&self, slot: usize) -> Option<&[u8]> {
        let payload = self.lent.payloads.get(slot).filter(|payload| !payload.with_kernel)?;
        Some(&payload.buffer)
    }

    /// Takes the payload of a slot of ours out, `length` bytes of it.
    pub fn take_payload(&mut self, slot: usize, length: usize) -> Option<AlignedBuffer> {
        let payload = self.lent.payloads.get_mut(slot).filter(|payload| !payload.with_kernel)?;
        (length <= payload.buffer.len()).then(|| {
            let mut buffer = std::mem::take(&mut payload.buffer);
            buffer.resize(length);
            buffer
        })
    }

    /// Puts the payload of a slot of ours back. Another buffer than the one that was taken is of no use: then there can be no answer.
    pub fn put_payload(&mut self, slot: usize, mut buffer: AlignedBuffer) {
        let Some(payload) = self.lent.payloads.get_mut(slot).filter(|payload| !payload.with_kernel) else {
            return;
        };
        if buffer.as_ptr().expose_provenance() == payload.place && buffer.capacity() == payload.capacity {
            buffer.resize(payload.capacity);
            payload.buffer = buffer;
        }
    }

    /// Puts the answer into a slot of ours, with `fill` for the payload, and gives the slot back to its queue. It is submitted later.
    ///
    /// # Errors
    /// When the slot is not ours, or its payload not the one that was registered.
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

    /// Entries that the kernel has not been given yet.
    pub const fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Gives the kernel what was pushed.
    pub fn submit_all(&mut self) -> io::Result<()> {
        while self.unsubmitted > 0 {
            self.enter(0)?;
        }
        Ok(())
    }

    /// Gives the kernel what was pushed, and waits until something has happened; that is added to `events`. It may be nothing.
    pub fn wait(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.enter(1)?;
        self.look(events);
        Ok(())
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        match self.ring.submitter().submit_and_wait(wanted) {
            // None at all are taken only where there are none.
            Ok(0) => self.unsubmitted = 0,
            Ok(taken) => self.unsubmitted = self.unsubmitted.saturating_sub(taken),
            // Interrupted, or memory is short: the kernel has tried to free some, and is asked again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Adds what has happened to `events`.
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
