//! Ctrl-C, and the children that must end with it.
//!
//! Invariants: after a signal the demonstration ends in bounded time: a child that does not respond is killed, which
//! ends every wait for it.

use crate::system;
use cbd_types::{Error, ErrorKind, Result};
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time after a signal within which the demonstration must end before its children are killed.
const GRACE: Duration = Duration::from_secs(4);
/// Timeout for the kernel to end a killed child and its I/O.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of [`poll_until`].
const POLL_INTERVAL: Duration = Duration::from_millis(5);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static CHILDREN: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn children() -> MutexGuard<'static, Vec<u32>> {
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that waits for signals. Call it before any other thread starts.
///
/// # Errors
/// When the thread cannot be started.
pub fn listen() -> Result<()> {
    system::block_ending_signals();
    std::thread::Builder::new()
        .name("demo-signals".to_owned())
        .spawn(|| {
            system::next_ending_signal();
            INTERRUPTED.store(true, Ordering::SeqCst);
            std::thread::sleep(GRACE);
            // A thread that still blocks waits for a child, or for a device that a child serves.
            kill_children();
        })
        .map(drop)
        .map_err(|error| Error::new(ErrorKind::System, "no thread that waits for signals").caused_by(error))
}

/// Whether a signal has requested the end.
pub fn requested() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// An error if a signal has requested the end.
///
/// # Errors
/// [`ErrorKind::Stopped`].
pub fn check() -> Result<()> {
    if requested() { Err(Error::new(ErrorKind::Stopped, "interrupted")) } else { Ok(()) }
}

fn kill_children() {
    for &child in children().iter() {
        system::signal(child, libc::SIGKILL);
    }
}

/// Polls until `is_over`; false after `timeout`. For what has no event that several threads could wait for, such as the
/// end of a child.
pub fn poll_until(timeout: Duration, mut is_over: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + timeout;
    loop {
        if is_over() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Kills the children unless it is dropped before its timeout, so that every wait for a device is bounded.
pub struct Watchdog {
    done: std::sync::mpsc::Sender<()>,
}

impl Watchdog {
    /// Kills the children after `timeout`.
    pub fn new(timeout: Duration) -> Self {
        let (done, dropped) = std::sync::mpsc::channel::<()>();
        let _ = std::thread::Builder::new().name("demo-watchdog".to_owned()).spawn(move || {
            if dropped.recv_timeout(timeout) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                kill_children();
            }
        });
        Self { done }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        let _ = self.done.send(());
    }
}

/// A child process that is killed when this is dropped.
#[derive(Debug)]
pub struct Guarded {
    child: Child,
    status: Option<ExitStatus>,
}

impl Guarded {
    /// Starts `command`. The child ends with the calling thread, which must be the one that lives longest.
    ///
    /// # Errors
    /// The system error.
    pub fn start(command: &mut std::process::Command) -> std::io::Result<Self> {
        system::bind_to_parent(command);
        // With the lock held, so that a signal either finds the child or prevents its start.
        let mut children = children();
        if requested() {
            return Err(std::io::Error::from(std::io::ErrorKind::Interrupted));
        }
        let child = command.spawn()?;
        children.push(child.id());
        drop(children);
        Ok(Self { child, status: None })
    }

    /// The child, for access to its pipes.
    pub fn child_mut(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            // With the lock held: after the wait another process can get its number.
            let mut children = children();
            if let Ok(Some(status)) = self.child.try_wait() {
                children.retain(|&child| child != self.child.id());
                self.status = Some(status);
            }
        }
        self.status
    }

    /// Its exit status; none if it has not ended within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        poll_until(timeout, || self.ended().is_some());
        self.status
    }

    /// Sends it a signal unless it has ended.
    pub fn signal(&mut self, signal: libc::c_int) {
        if self.ended().is_none() {
            system::signal(self.child.id(), signal);
        }
    }

    /// Sends SIGKILL and waits for the end of the process, which takes until the kernel has ended its I/O. False after
    /// `timeout`.
    pub fn kill(&mut self, timeout: Duration) -> bool {
        self.signal(libc::SIGKILL);
        self.wait(timeout).is_some()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.kill(KILL_TIMEOUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_dropped_child_has_ended() {
        let guarded = Guarded::start(Command::new("sleep").arg("100")).unwrap();
        let process = guarded.child.id();
        assert!(children().contains(&process));
        drop(guarded);
        assert!(!children().contains(&process));
        assert!(!std::path::Path::new(&format!("/proc/{process}")).exists());
    }

    #[test]
    fn the_exit_status_of_a_child_is_reported() {
        let mut guarded = Guarded::start(&mut Command::new("false")).unwrap();
        assert!(!guarded.wait(Duration::from_secs(20)).unwrap().success());
    }
}
