//! A socket with blocking reads and writes that fail after a deadline and when the server stops.
//!
//! Invariants: no call waits past the deadline or past the server's stop.

use cbd_export::wake::{Interest, WaitSet};
use socket2::Socket;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

pub(super) struct BoundedStream<'a> {
    socket: &'a Socket,
    waits: WaitSet,
    until: Instant,
}

impl<'a> BoundedStream<'a> {
    /// `socket` does not block; `stop` is readable when the server stops.
    pub(super) fn new(socket: &'a Socket, stop: RawFd, until: Instant) -> Self {
        let mut waits = WaitSet::new();
        waits.add(socket.as_raw_fd(), Interest::Read);
        waits.add(stop, Interest::Read);
        Self { socket, waits, until }
    }

    fn when_ready(
        &mut self,
        interest: Interest,
        mut run: impl FnMut(&Socket) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match run(self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "the timeout has passed"));
            }
            self.waits.set(0, interest);
            self.waits.wait(Some(left)).map_err(|error| io::Error::other(error.line()))?;
            if self.waits.readable(1) {
                return Err(io::Error::other("the server stops"));
            }
        }
    }
}

impl Read for BoundedStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        // The deadline holds also while data arrives in small pieces.
        if Instant::now() >= self.until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the timeout has passed"));
        }
        self.when_ready(Interest::Read, |mut socket| socket.read(into))
    }
}

impl Write for BoundedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.when_ready(Interest::Write, |socket| socket.send_with_flags(bytes, libc::MSG_NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
