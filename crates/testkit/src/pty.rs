//! A program on a pseudo terminal.
//!
//! Invariants: the program is killed with the test's thread and with [`Pty`]; each wait has a limit.
//!
//! Elsewhere: what the output looks like on a screen (crates that emulate a terminal).

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, ioctl_tiocsctty, kill_process, pidfd_open, set_parent_process_death_signal,
    setsid,
};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes of output that are kept.
const OUTPUT_MAX: usize = 16 << 20;

/// What the program has written so far.
type Output = Arc<(Mutex<Vec<u8>>, Condvar)>;

/// A program whose controlling terminal is a pseudo terminal of the test.
#[derive(Debug)]
pub struct Pty {
    child: Child,
    controller: File,
    output: Output,
}

impl Pty {
    /// Starts `command` on a new terminal of this size.
    ///
    /// # Errors
    /// Those of the system.
    pub fn spawn(command: &mut Command, columns: u16, lines: u16) -> io::Result<Self> {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&controller)?;
        unlockpt(&controller)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = open(ptsname(&controller, Vec::new())?, flags, Mode::empty())?;
        let controller = File::from(controller);
        tcsetwinsize(&controller, size(columns, lines))?;
        command.stdin(terminal.try_clone()?).stdout(terminal.try_clone()?).stderr(terminal);
        // SAFETY: between fork and exec only system calls are made that access no memory of this process.
        unsafe {
            command.pre_exec(|| {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                setsid()?;
                Ok(ioctl_tiocsctty(rustix::stdio::stdin())?)
            });
        }
        let child = command.spawn()?;
        // The command has descriptors of the terminal: without them the output ends with the program.
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let output = Output::default();
        let (mut reader, into) = (controller.try_clone()?, output.clone());
        std::thread::Builder::new().name("pty".to_owned()).spawn(move || collect(&mut reader, &into))?;
        Ok(Self { child, controller, output })
    }

    /// Types `keys`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn send(&self, keys: &[u8]) -> io::Result<()> {
        (&self.controller).write_all(keys)
    }

    /// Changes the size of the terminal.
    ///
    /// # Errors
    /// Those of the system.
    pub fn resize(&self, columns: u16, lines: u16) -> io::Result<()> {
        Ok(tcsetwinsize(&self.controller, size(columns, lines))?)
    }

    /// The modes of the terminal.
    ///
    /// # Errors
    /// Those of the system.
    pub fn modes(&self) -> io::Result<Termios> {
        Ok(tcgetattr(&self.controller)?)
    }

    /// Changes the modes of the terminal, as another process of it would.
    ///
    /// # Errors
    /// Those of the system.
    pub fn set_modes(&self, modes: &Termios) -> io::Result<()> {
        Ok(tcsetattr(&self.controller, OptionalActions::Now, modes)?)
    }

    /// Sends a signal to the program.
    ///
    /// # Errors
    /// Those of the system.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// What the program has written so far.
    #[must_use]
    pub fn output(&self) -> Vec<u8> {
        self.output.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the output is as wanted, and returns it; as an error after `limit`.
    ///
    /// # Errors
    /// The output at the end of the limit.
    pub fn wait_for(
        &self,
        limit: Duration,
        mut is_wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<u8>, Vec<u8>> {
        let end = Instant::now() + limit;
        let (output, changed) = &*self.output;
        let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if is_wanted(&output) {
                return Ok(output.clone());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(output.clone());
            }
            output = changed.wait_timeout(output, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the program ends; none after `limit`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let process = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(None),
                Ok(_) => return self.child.wait().map(Some),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const fn size(columns: u16, lines: u16) -> Winsize {
    Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// Reads until no process has the terminal.
fn collect(reader: &mut File, output: &Output) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = reader.read(&mut buffer) {
        let mut all = output.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() + count > OUTPUT_MAX {
            return;
        }
        all.extend_from_slice(&buffer[..count]);
        output.1.notify_all();
    }
}
