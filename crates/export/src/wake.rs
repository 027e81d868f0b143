//! Waiting: an event that one thread signals and another waits for, and a wait for any of several descriptors.
//!
//! Always true here: a signal is never lost (it stays until it is cleared), a wait that was interrupted goes on
//! for what was left of its time, and nothing here allocates once a [`WaitSet`] has its descriptors.
//!
//! Left to others: what the descriptors mean.

use cbd_sys::event::{Signal, poll};
use cbd_types::{Error, ErrorKind, Result};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Something that happens, with a descriptor to wait on (an eventfd). It stays signalled until it is cleared.
#[derive(Debug)]
pub struct Event(Arc<Signal>);

/// The other end of an [`Event`]: signals it from any thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Signal>);

impl Event {
    /// An event that has not been signalled.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> Result<Self> {
        let failed = |error| system("cannot make an event descriptor (the limit of open files?)", &error);
        Ok(Self(Arc::new(Signal::new().map_err(failed)?)))
    }

    /// What to wait on: readable while the event is signalled.
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

    /// Takes the signal back; says whether there was one.
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

/// What is waited for on a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interest {
    /// Nothing, not even that the other end went away.
    Nothing,
    /// Only that the other end went away: see [`WaitSet::failed`].
    HangUp,
    /// That something can be read.
    Read,
    /// That something can be written.
    Write,
    /// Either.
    ReadWrite,
}

/// Descriptors that are waited on together, again and again.
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

    /// Adds a descriptor; its place in the set is returned. The set does not own it: while a closed one stands in
    /// it, a wait says that it failed.
    pub fn add(&mut self, descriptor: RawFd, interest: Interest) -> usize {
        self.0.push(libc::pollfd { fd: descriptor, events: 0, revents: 0 });
        let place = self.0.len() - 1;
        self.set(place, interest);
        place
    }

    /// Changes what is waited for at `place`.
    pub fn set(&mut self, place: usize, interest: Interest) {
        let entry = &mut self.0[place];
        // A negative descriptor is passed over by poll; its complement is what it was.
        let descriptor = if entry.fd < 0 { !entry.fd } else { entry.fd };
        (entry.fd, entry.events) = match interest {
            Interest::Nothing => (!descriptor, 0),
            Interest::HangUp => (descriptor, 0),
            Interest::Read => (descriptor, libc::POLLIN),
            Interest::Write => (descriptor, libc::POLLOUT),
            Interest::ReadWrite => (descriptor, libc::POLLIN | libc::POLLOUT),
        };
    }

    /// Waits until something is ready, at most for `timeout`. Returns how many descriptors are; 0 when the time is up.
    ///
    /// # Errors
    /// When the system refuses to wait.
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

    /// Whether the last wait found nothing: its time was up.
    #[must_use]
    pub fn none_ready(&self) -> bool {
        self.0.iter().all(|entry| entry.revents == 0)
    }

    /// Whether the last wait found something to read at `place`, an end of file or an error included.
    #[must_use]
    pub fn readable(&self, place: usize) -> bool {
        self.0[place].revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR) != 0
    }

    /// Whether the last wait found that `place` can be written.
    #[must_use]
    pub fn writable(&self, place: usize) -> bool {
        self.0[place].revents & libc::POLLOUT != 0
    }

    /// Whether the last wait found that the other end of `place` is gone, or that there is no such descriptor.
    #[must_use]
    pub fn failed(&self, place: usize) -> bool {
        self.0[place].revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0
    }
}

/// Waits until one of `descriptors` is readable, at most for `timeout`; which one is returned.
///
/// # Errors
/// When the system refuses to wait.
pub fn wait_any(descriptors: &[RawFd], timeout: Option<Duration>) -> Result<Option<usize>> {
    let mut set = WaitSet::new();
    for &descriptor in descriptors {
        set.add(descriptor, Interest::Read);
    }
    set.wait(timeout)?;
    Ok((0..descriptors.len()).find(|&place| set.readable(place) || set.failed(place)))
}

/// Whether the other end of a socket has closed it, at least for what it sends.
#[must_use]
pub fn is_closed_by_peer(socket: RawFd) -> bool {
    let mut entry = [libc::pollfd { fd: socket, events: libc::POLLRDHUP, revents: 0 }];
    poll(&mut entry, 0).is_ok() && entry[0].revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
}

/// Rounded up, so that nobody wakes just before the time and waits again for nothing.
fn milliseconds(timeout: Option<Duration>) -> i32 {
    timeout.map_or(-1, |timeout| i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX))
}

fn system(text: &str, error: &io::Error) -> Error {
    Error::new(ErrorKind::System, format!("{text}: {error}"))
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
    fn a_place_without_interest_is_passed_over() {
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
    fn a_wait_ends_when_its_time_is_up_and_not_before() {
        let event = Event::new().expect("an eventfd");
        let began = Instant::now();
        assert_eq!(
            wait_any(&[event.descriptor()], Some(Duration::from_micros(20_500))).expect("a wait"),
            None
        );
        assert!(began.elapsed() >= Duration::from_micros(20_500));
    }
}
