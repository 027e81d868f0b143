//! Queues in C: many requests at a time from one thread.
//!
//! Invariants: only `cbd_queue_read` itself, or the poll or wait that returns its completion, writes the buffer of a read. A
//! queue that two threads use at once refuses the second call.

use super::border::{
    bytes, bytes_mut, call, check_flags, checked_length, give, invalid, note, shared, wanted,
};
use super::device::{CBD_FUA, CbdDevice};
use super::verify::{CbdVerified, CbdVerifyRequest, Destination, parse};
use crate::{
    AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Operation, Queue, Request, Result, Verified,
};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::time::Duration;

/// A queue of a device. It may move between threads; one thread at a time may use it.
pub struct CbdQueue(Mutex<Inside>);

struct Inside {
    queue: Queue,
    /// Requests by their number in the queue.
    requests: Vec<Pending>,
    free: Vec<usize>,
    /// Completions that did not fit into the caller's array.
    ready: VecDeque<Ready>,
    done: Vec<Completion>,
}

/// A request of the caller.
#[derive(Clone, Copy)]
struct Pending {
    user_data: u64,
    /// The destination of a read that did not complete at once.
    into: *mut u8,
    length: usize,
    /// The destination of the result of a verification.
    verified: Option<Destination>,
}

impl Pending {
    /// A request whose completion has no data.
    const fn plain(user_data: u64) -> Self {
        Self { user_data, into: std::ptr::null_mut(), length: 0, verified: None }
    }
}

impl Pending {
    /// Writes what the request returns to the memory of the caller.
    ///
    /// # Safety
    /// The buffer of a read and the destination of a verification are valid.
    unsafe fn complete(&self, ready: Ready) -> Result<()> {
        match (ready, &self.verified) {
            (Ready::Request(Completion { result, buffer, .. }), _) => {
                if result.is_ok() && !self.into.is_null() && buffer.len() == self.length {
                    // SAFETY: the caller lent that many bytes to the request until its completion; the queue's buffer is
                    // separate memory.
                    unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), self.into, self.length) };
                }
                result
            }
            (Ready::Verified(_, result), Some(destination)) => {
                let verified = result?;
                // SAFETY: the caller lent the destination to the request until its completion.
                unsafe { destination.give(&verified) }?;
                verified.error.map_or(Ok(()), Err)
            }
            (Ready::Verified(_, result), None) => result.map(drop),
        }
    }
}

/// What has completed.
enum Ready {
    Request(Completion),
    Verified(u64, Result<Verified>),
}

// SAFETY: the pointers point to memory that the caller has lent to the queue until the request completes, whichever thread uses
// the queue.
unsafe impl Send for Inside {}

/// The completion of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdCompletion {
    /// The value that the request was submitted with.
    pub user_data: u64,
    /// 0 or a negative errno. The text of the last failed one is in `cbd_last_error`.
    pub result: i32,
    /// 0.
    pub reserved: u32,
}

impl CbdQueue {
    fn inside(&self) -> Result<MutexGuard<'_, Inside>> {
        self.0.try_lock().ok_or_else(|| {
            Error::new(ErrorKind::Busy, "another thread uses this queue: give each thread a queue of its own")
        })
    }
}

impl Inside {
    fn add(&mut self, pending: Pending) -> u64 {
        match self.free.pop() {
            Some(place) => {
                self.requests[place] = pending;
                place as u64
            }
            None => {
                self.requests.push(pending);
                self.requests.len() as u64 - 1
            }
        }
    }

    fn take_back(&mut self, id: u64) {
        self.free.push(id as usize);
    }

    /// Converts completions to the caller's structures; as many as fit.
    ///
    /// # Safety
    /// `capacity` elements at `completions` can be written, and the buffers of reads are valid.
    unsafe fn give_out(&mut self, completions: *mut CbdCompletion, capacity: usize) -> Result<c_int> {
        let mut count = 0;
        while count < capacity {
            let Some(ready) = self.ready.pop_front() else { break };
            let (Ready::Request(Completion { id, .. }) | Ready::Verified(id, _)) = ready;
            let Some(pending) = self.requests.get(id as usize).copied() else { continue };
            self.take_back(id);
            // SAFETY: the caller guarantees it.
            let result = unsafe { pending.complete(ready) }.err().map_or(0, |error| note(&error));
            let answer = CbdCompletion { user_data: pending.user_data, result, reserved: 0 };
            // SAFETY: `count` is below `capacity`.
            unsafe { give(completions.add(count), "completions", answer) }?;
            count += 1;
        }
        c_int::try_from(count).map_err(|_| invalid("too many completions".to_owned()))
    }

    fn submit(&mut self, user_data: u64, operation: Operation, range: ByteRange, fua: bool) -> Result<c_int> {
        let id = self.add(Pending::plain(user_data));
        let buffer = AlignedBuffer::default();
        let taken = self.queue.submit(Request::unmarked(id, operation, range, fua, buffer));
        self.taken(id, taken)
    }

    fn taken(&mut self, id: u64, taken: Result<()>) -> Result<c_int> {
        if taken.is_err() {
            self.take_back(id);
        }
        taken.map(|()| 0)
    }
}

/// Opens a queue of the device; the queue keeps the device open.
///
/// # Safety
/// `device` is open or NULL; `queue` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_open(device: *const CbdDevice, queue: *mut *mut CbdQueue) -> c_int {
    call(|| {
        wanted(queue, "queue")?;
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        let inside = Inside {
            queue: device.0.queue()?,
            requests: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            done: Vec::new(),
        };
        let opened = Box::into_raw(Box::new(CbdQueue(Mutex::new(inside))));
        // SAFETY: the caller guarantees it.
        unsafe { give(queue, "queue", opened) }?;
        Ok(0)
    })
}

/// Closes the queue and cancels the requests in flight: such a write may or may not have happened, and the
/// buffer of such a read belongs to the caller again. NULL is ignored.
///
/// # Safety
/// `queue` is open or NULL, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_close(queue: *mut CbdQueue) -> c_int {
    call(|| {
        if !queue.is_null() {
            // SAFETY: the pointer came from `Box::into_raw`, and the caller does not use it any more.
            drop(unsafe { Box::from_raw(queue) });
        }
        Ok(0)
    })
}

/// Submits a read of `length` bytes from `offset` to `buffer`, which the caller must not use until the
/// completion was returned.
///
/// # Safety
/// `queue` is open or NULL; `length` bytes at `buffer` can be written until then, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_read(
    queue: *const CbdQueue,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
    user_data: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        let into = buffer.cast::<u8>();
        // SAFETY: the caller guarantees it.
        let bytes = unsafe { bytes_mut(into, length, "buffer") }?;
        let id = inside.add(Pending { user_data, into, length, verified: None });
        let taken = inside.queue.read_at(id, bytes, offset);
        inside.taken(id, taken)
    })
}

/// Submits a write of `length` bytes at `data` to `offset`. The caller may reuse `data` when this returns.
/// `flags`: 0 or `CBD_FUA`.
///
/// # Safety
/// `queue` is open or NULL; `length` bytes at `data` can be read, or it is NULL; no thread changes them
/// meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_write(
    queue: *const CbdQueue,
    data: *const c_void,
    length: usize,
    offset: u64,
    flags: u32,
    user_data: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        check_flags(flags, CBD_FUA, &[])?;
        // SAFETY: the caller guarantees it.
        let data = unsafe { bytes(data.cast(), length, "data") }?;
        let id = inside.add(Pending::plain(user_data));
        let taken = inside.queue.write_at(id, data, offset, flags & CBD_FUA != 0);
        inside.taken(id, taken)
    })
}

/// Submits a flush. It covers the writes that completed before.
///
/// # Safety
/// `queue` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_flush(queue: *const CbdQueue, user_data: u64) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        inside.submit(user_data, Operation::Flush, ByteRange::at(0, 0), false)
    })
}

/// Submits a discard.
///
/// # Safety
/// `queue` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_discard(
    queue: *const CbdQueue,
    offset: u64,
    length: u64,
    user_data: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        inside.submit(user_data, Operation::Discard, ByteRange::at(offset, length), false)
    })
}

/// Submits a write of zeroes. `flags`: 0 or `CBD_FUA`.
///
/// # Safety
/// `queue` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_write_zeroes(
    queue: *const CbdQueue,
    offset: u64,
    length: u64,
    flags: u32,
    user_data: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        check_flags(flags, CBD_FUA, &[])?;
        let range = ByteRange::at(offset, length);
        inside.submit(user_data, Operation::WriteZeroes, range, flags & CBD_FUA != 0)
    })
}

/// Submits a verification as `cbd_verify`, of 4 MiB at most. It yields to the other requests of the queue. `result` and
/// `request->findings` are written when the completion is returned, and belong to the queue until then; `request` itself may be
/// reused when this returns.
///
/// # Safety
/// `queue` is open or NULL; `request` can be read or is NULL; until the completion was returned `result` can be written or is
/// NULL, and `request->capacity` elements at `request->findings` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_verify(
    queue: *const CbdQueue,
    request: *const CbdVerifyRequest,
    result: *mut CbdVerified,
    user_data: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        // SAFETY: the caller guarantees it.
        let (verify, destination) = unsafe { parse(request, result) }?;
        let id = inside.add(Pending { verified: Some(destination), ..Pending::plain(user_data) });
        let taken = inside.queue.verify(id, verify);
        inside.taken(id, taken)
    })
}

/// Returns completions: at most `capacity` of them in `completions`; the result is their number. Does not
/// block.
///
/// # Safety
/// `queue` is open or NULL; `capacity` elements at `completions` can be written, or it is NULL; the buffers
/// of reads and the destinations of verifications are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_poll(
    queue: *const CbdQueue,
    completions: *mut CbdCompletion,
    capacity: usize,
) -> c_int {
    // SAFETY: the caller guarantees it.
    unsafe { cbd_queue_wait(queue, completions, capacity, 0, 0) }
}

/// As `cbd_queue_poll`, but waits until at least `least` requests have completed, or all that are in flight,
/// or until `timeout_ms` have passed (-1: no timeout).
///
/// # Safety
/// As `cbd_queue_poll`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_wait(
    queue: *const CbdQueue,
    completions: *mut CbdCompletion,
    capacity: usize,
    least: usize,
    timeout_ms: i64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let mut inside = unsafe { shared(queue, "queue") }?.inside()?;
        checked_length(completions, capacity, "completions")?;
        if least > capacity {
            return Err(invalid(format!(
                "{least} completions are waited for, and there is room for {capacity}"
            )));
        }
        let Inside { queue, ready, done, .. } = &mut *inside;
        let least = least.saturating_sub(ready.len());
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let waited = if least == 0 { queue.poll(done) } else { queue.wait(done, least, timeout) };
        ready.extend(done.drain(..).map(Ready::Request));
        ready.extend(queue.take_verified().into_iter().map(|(id, result)| Ready::Verified(id, result)));
        waited?;
        // SAFETY: the caller guarantees it.
        unsafe { inside.give_out(completions, capacity) }
    })
}

/// The number of submitted requests whose completion was not returned yet.
///
/// # Safety
/// `queue` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_in_flight(queue: *const CbdQueue) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let inside = unsafe { shared(queue, "queue") }?.inside()?;
        let count = inside.queue.in_flight() + inside.ready.len();
        c_int::try_from(count).map_err(|_| invalid("too many requests".to_owned()))
    })
}

/// Descriptors for the program's own event loop: one of them is readable when `cbd_queue_poll` may have
/// completions. At most `capacity` of them are in `descriptors`; the result is their total number. They
/// belong to the queue: do not read or close them. A request that completes at its submission is not
/// signalled: poll once after submitting.
///
/// # Safety
/// `queue` is open or NULL; `capacity` elements at `descriptors` can be written, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_queue_descriptors(
    queue: *const CbdQueue,
    descriptors: *mut c_int,
    capacity: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let inside = unsafe { shared(queue, "queue") }?.inside()?;
        checked_length(descriptors, capacity, "descriptors")?;
        let known = inside.queue.wait_descriptors();
        for (place, descriptor) in known.iter().take(capacity).enumerate() {
            // SAFETY: `place` is below `capacity`, and the caller guarantees the rest.
            unsafe { give(descriptors.add(place), "descriptors", *descriptor) }?;
        }
        c_int::try_from(known.len()).map_err(|_| invalid("too many descriptors".to_owned()))
    })
}
