//! Descriptors to wait on, and waiting for descriptors.
//!
//! Descriptors are passed by number where a set of them outlives the caller's borrow: for a number that is not open
//! the kernel reports an error.

use crate::checked;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

/// A flag with a descriptor (an eventfd) that is readable while the flag is raised.
#[derive(Debug)]
pub struct Signal(File);

impl Signal {
    /// A flag that is not raised.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into()))
    }

    /// The flag behind a descriptor that another process has passed. That process can let a call wait, if it changes the flags of the
    /// descriptor afterwards.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for what is no eventfd; the system error.
    pub fn from_descriptor(descriptor: OwnedFd) -> io::Result<Self> {
        let name = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))?;
        if name.as_os_str() != "anon_inode:[eventfd]" {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(Self(descriptor.into()))
    }

    /// Raises the flag.
    pub fn raise(&self) {
        // It fails only for a full counter, and then the flag is raised already.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Clears the flag; returns whether it was raised.
    pub fn clear(&self) -> bool {
        matches!((&self.0).read(&mut [0; 8]), Ok(8))
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Signal {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A descriptor (a timerfd) that is readable after a delay.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not set.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Readable after `delay`, and not before; never if it is `None`.
    ///
    /// # Errors
    /// The system error.
    pub fn set(&self, delay: Option<Duration>) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = delay.map_or(zero, |delay| Timespec {
            tv_sec: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
            // All zeroes would disarm it.
            tv_nsec: delay.subsec_nanos().max(u32::from(delay.as_secs() == 0)).into(),
        });
        let new = Itimerspec { it_interval: zero, it_value: value };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &new)?;
        Ok(())
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A set of descriptors to wait on, each with a number; itself a descriptor (an epoll) that is readable while one of
/// them is.
#[derive(Debug)]
pub struct Poller(OwnedFd);

impl Poller {
    /// An empty set.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds `descriptor`, for readability. Where several pollers wait exclusively for one descriptor, an event wakes
    /// one of them that is waiting.
    ///
    /// # Errors
    /// The system error; EBADF for a descriptor that is not open.
    pub fn add(&self, descriptor: RawFd, number: u64, exclusive: bool) -> io::Result<()> {
        let events = if exclusive { libc::EPOLLIN | libc::EPOLLEXCLUSIVE } else { libc::EPOLLIN };
        self.control(
            libc::EPOLL_CTL_ADD,
            descriptor,
            libc::epoll_event { events: events as u32, u64: number },
        )
    }

    /// Removes `descriptor`.
    ///
    /// # Errors
    /// The system error; ENOENT for a descriptor that is not in the set.
    pub fn remove(&self, descriptor: RawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, descriptor, libc::epoll_event { events: 0, u64: 0 })
    }

    fn control(
        &self,
        operation: libc::c_int,
        descriptor: RawFd,
        mut event: libc::epoll_event,
    ) -> io::Result<()> {
        // SAFETY: the kernel reads one epoll_event through the pointer.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), operation, descriptor, &raw mut event) })?;
        Ok(())
    }

    /// Waits until a descriptor is readable or in error, at most `timeout_ms` if that is not negative; calls `ready`
    /// with the number of each. Returns without any when a signal interrupts it.
    ///
    /// # Errors
    /// The system error.
    pub fn wait(&self, timeout_ms: libc::c_int, mut ready: impl FnMut(u64)) -> io::Result<()> {
        let mut events = [MaybeUninit::uninit(); 8];
        let timeout = u32::try_from(timeout_ms).ok().map(|milliseconds| Timespec {
            tv_sec: i64::from(milliseconds / 1000),
            tv_nsec: i64::from(milliseconds % 1000 * 1_000_000),
        });
        match epoll::wait(&self.0, &mut events, timeout.as_ref()) {
            Ok((events, _)) => events.iter().for_each(|event| ready(event.data.u64())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl AsRawFd for Poller {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// `poll(2)`: waits for one of `entries`, at most `timeout_ms` if that is not negative. Returns the number of entries with
/// an event.
///
/// # Errors
/// The system error; [`io::ErrorKind::Interrupted`] when a signal ended the wait.
pub fn poll(entries: &mut [libc::pollfd], timeout_ms: libc::c_int) -> io::Result<usize> {
    // SAFETY: the pointer and the length are those of a slice that lives through the call.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, timeout_ms) };
    checked(ready).map(|ready| ready as usize)
}

/// Sleeps until `descriptor` is readable.
///
/// # Errors
/// The system error.
pub fn wait_readable(descriptor: RawFd) -> io::Result<()> {
    let mut entry = [libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 }];
    loop {
        match poll(&mut entry, -1) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_of_another_process_is_an_eventfd() {
        let one = Signal::new().unwrap();
        let other = Signal::from_descriptor(one.as_fd().try_clone_to_owned().unwrap()).unwrap();
        one.raise();
        assert!(other.clear() && !one.clear());
        let file = File::open("/dev/null").unwrap();
        assert_eq!(Signal::from_descriptor(file.into()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_poller_reports_the_number_of_what_is_readable_until_it_is_removed() {
        let (poller, one, other) = (Poller::new().unwrap(), Signal::new().unwrap(), Signal::new().unwrap());
        poller.add(one.as_raw_fd(), 7, false).unwrap();
        poller.add(other.as_raw_fd(), u64::MAX, true).unwrap();
        other.raise();
        let ready = || {
            let mut numbers = Vec::new();
            poller.wait(0, |number| numbers.push(number)).unwrap();
            numbers
        };
        assert_eq!(ready(), [u64::MAX]);
        wait_readable(poller.as_raw_fd()).unwrap();
        poller.remove(other.as_raw_fd()).unwrap();
        assert_eq!(ready(), []);
        assert_eq!(poller.remove(other.as_raw_fd()).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        assert_eq!(poller.add(-1, 0, false).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_timer_is_readable_after_its_delay_even_of_nothing_and_not_when_disarmed() {
        let timer = Timer::new().unwrap();
        let readable = |timeout_ms| {
            let mut entry = [libc::pollfd { fd: timer.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            poll(&mut entry, timeout_ms).unwrap() == 1
        };
        assert!(!readable(0));
        timer.set(Some(Duration::ZERO)).unwrap();
        assert!(readable(30_000));
        timer.set(Some(Duration::from_secs(u64::MAX))).unwrap();
        assert!(!readable(0));
        timer.set(Some(Duration::from_nanos(1))).unwrap();
        assert!(readable(30_000));
        timer.set(None).unwrap();
        assert!(!readable(0));
    }
}
