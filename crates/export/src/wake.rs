//! An event that one thread signals and another waits for, and a wait for any of several descriptors.
//!
//! Invariants: a signal is never lost (it stays until it is cleared), an interrupted wait continues for the rest of its time, and
//! no call allocates once a [`WaitSet`] has its descriptors.
//!
//! Elsewhere: the meaning of the descriptors.

use cbd_sys::event::{Signal, poll};
use cbd_types::{Error, ErrorKind, Result};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An event with a descriptor to wait on (an eventfd). It stays signalled until it is cleared.
#[derive(Debug)]
pub struct Event(Arc<Signal>);

/// Signals an [`Event`] from any thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Signal>);

impl Event {
    /// An event that has not been signalled.
    ///
    /// # Errors
    /// The process cannot open another descriptor.
    pub fn new() -> Result<Self> {
        let failed = |error| system("cannot make an event descriptor (the limit of open files?)", &error);
        Ok(Self(Arc::new(Signal::new().map_err(failed)?)))
    }

    /// The descriptor; it is readable while the event is signalled.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// A handle that signals this event.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.0))
    }

    /// Signals the event.
    pub fn signal(&self) {
        self.0.raise();
    }

    /// Clears the event; true if it was signalled.
    pub fn clear(&self) -> bool {
        self.0.clear()
    }
}

impl Waker {
    /// Signals the event.
    pub fn wake(&self) {
        self.0.raise();
    }
}

/// The condition that is waited for on a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// None; the wait does not even report that the peer closed its end.
    Nothing,
    /// Only that the peer closed its end: see [`WaitSet::failed`].
    HangUp,
    /// Readable.
    Read,
    /// Writable.
    Write,
    /// Readable or writable.
    ReadWrite,
}

/// Descriptors that are waited on together repeatedly.
#[derive(Default)]
pub struct WaitSet(Vec<libc::pollfd>);

impl fmt::Debug for WaitSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_list().entries(self.0.iter().map(|entry| entry.fd)).finish()
    }
}

impl WaitSet {
    /// A set without descriptors.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a descriptor and returns its index in the set. The set does not own it: if the descriptor is closed while it is in
    /// the set, waits report that it failed.
    pub fn add(&mut self, descriptor: RawFd, interest: Interest) -> usize {
        self.0.push(libc::pollfd { fd: descriptor, events: 0, revents: 0 });
        let index = self.0.len() - 1;
        self.set(index, interest);
        index
    }

    /// Changes the interest at `index`.
    pub fn set(&mut self, index: usize, interest: Interest) {
        let entry = &mut self.0[index];
        // poll ignores negative descriptors; the complement restores the descriptor.
        let descriptor = if entry.fd < 0 { !entry.fd } else { entry.fd };
        (entry.fd, entry.events) = match interest {
            Interest::Nothing => (!descriptor, 0),
            Interest::HangUp => (descriptor, 0),
            Interest::Read => (descriptor, libc::POLLIN),
            Interest::Write => (descriptor, libc::POLLOUT),
            Interest::ReadWrite => (descriptor, libc::POLLIN | libc::POLLOUT),
        };
    }

    /// Waits until a descriptor is ready, for at most `timeout`. Returns the number of ready descriptors; 0 on timeout.
    ///
    /// # Errors
    /// The system call failed.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<usize> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        let mut left = timeout;
        loop {
            match poll(&mut self.0, milliseconds(left)) {
                Ok(ready) => return Ok(ready),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(system("cannot wait for descriptors", &error)),
            }
            left = end.map(|end| end.saturating_duration_since(Instant::now()));
        }
    }

    /// Whether the last wait ended by its timeout.
    #[must_use]
    pub fn none_ready(&self) -> bool {
        self.0.iter().all(|entry| entry.revents == 0)
    }

    /// Whether `index` was readable after the last wait, including end of file and errors.
    #[must_use]
    pub fn readable(&self, index: usize) -> bool {
        self.0[index].revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR) != 0
    }

    /// Whether `index` was writable after the last wait.
    #[must_use]
    pub fn writable(&self, index: usize) -> bool {
        self.0[index].revents & libc::POLLOUT != 0
    }

    /// Whether the peer had closed its end of `index` at the last wait, or the descriptor is invalid.
    #[must_use]
    pub fn failed(&self, index: usize) -> bool {
        self.0[index].revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
    }
}

/// Waits until one of `descriptors` is readable, for at most `timeout`; returns its index.
///
/// # Errors
/// The system call failed.
pub fn wait_any(descriptors: &[RawFd], timeout: Option<Duration>) -> Result<Option<usize>> {
    let mut set = WaitSet::new();
    for &descriptor in descriptors {
        set.add(descriptor, Interest::Read);
    }
    set.wait(timeout)?;
    Ok((0..descriptors.len()).find(|&index| set.readable(index) || set.failed(index)))
}

/// Whether the peer of a socket has closed it, or at least shut down its sending half.
#[must_use]
pub fn is_closed_by_peer(socket: RawFd) -> bool {
    let mut entry = [libc::pollfd { fd: socket, events: libc::POLLRDHUP, revents: 0 }];
    poll(&mut entry, 0).is_ok() && entry[0].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// The timeout in milliseconds, rounded up, so that no thread wakes just before its deadline and waits again.
fn milliseconds(timeout: Option<Duration>) -> i32 {
    timeout.map_or(-1, |timeout| i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX))
}

fn system(text: &str, error: &io::Error) -> Error {
    Error::new(ErrorKind::System, text.to_owned()).caused_by(cbd_sys::errors::copy_of(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_signal_stays_until_it_is_cleared() {
        let event = Event::new().expect("an eventfd");
        assert_eq!(wait_any(&[event.descriptor()], Some(Duration::ZERO)).expect("a wait"), None);
        event.signal();
        event.signal();
        for _ in 0..2 {
            assert_eq!(wait_any(&[event.descriptor()], Some(Duration::ZERO)).expect("a wait"), Some(0));
        }
        assert!(event.clear());
        assert!(!event.clear());
        assert_eq!(wait_any(&[event.descriptor()], Some(Duration::ZERO)).expect("a wait"), None);
    }

    #[test]
    fn a_waker_wakes_another_thread() {
        let (one, other) = (Event::new().expect("an eventfd"), Event::new().expect("an eventfd"));
        let waker = other.waker();
        let signaller = thread::spawn(move || waker.wake());
        let which = wait_any(&[one.descriptor(), other.descriptor()], Some(Duration::from_secs(10)));
        assert_eq!(which.expect("a wait"), Some(1));
        signaller.join().expect("the signaller ends");
    }

    #[test]
    fn a_descriptor_without_interest_is_ignored() {
        let event = Event::new().expect("an eventfd");
        event.signal();
        let mut set = WaitSet::new();
        let place = set.add(event.descriptor(), Interest::Nothing);
        assert_eq!(set.wait(Some(Duration::ZERO)).expect("a wait"), 0);
        set.set(place, Interest::ReadWrite);
        assert_eq!(set.wait(Some(Duration::ZERO)).expect("a wait"), 1);
        assert!(set.readable(place) && set.writable(place) && !set.failed(place));
    }

    #[test]
    fn a_wait_ends_at_its_timeout_and_not_before() {
        let event = Event::new().expect("an eventfd");
        let began = Instant::now();
        assert_eq!(
            wait_any(&[event.descriptor()], Some(Duration::from_micros(20_500))).expect("a wait"),
            None
        );
        assert!(began.elapsed() >= Duration::from_micros(20_500));
    }
}
