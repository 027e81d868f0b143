//! An NBD client: one connection, one caller, requests one by one or many in flight.
//!
//! [`Client::read`] and the similar methods wait for their reply. [`Client::submit`] does not, so any number of requests may be
//! in flight. [`Client::complete`] returns the next reply, in the order in which the server sends them.
//!
//! Invariants: a reply without a matching request, or with bytes outside of the requested range, ends the connection. After that
//! every call fails, and [`Client::outstanding`] lists the requests without a reply.

mod connect;
mod handshake;
mod protocol;
mod request;
mod wire;

pub use request::{BlockStatus, ClientOptions, Command, Completed};

use cbd_nbd::{Listen, transmission_flag};
use cbd_types::{Error, ErrorKind, Result};
use handshake::Export;
use protocol::{
    Reader, RequestHeader, SIMPLE_REPLY_MAGIC, STRING_MAX, STRUCTURED_REPLY_MAGIC, chunk, command,
    result_of_wire,
};
use request::{encode, length_of};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;
use wire::{Sent, Wire};

/// Longest chunk without data (errors, block status) that the client accepts, in bytes.
const CHUNK_MAX: usize = 1 << 20;
/// Maximum number of spare buffers.
const SPARE_MAX: usize = 256;

/// A request without its last reply.
struct Outstanding {
    command: u16,
    offset: u64,
    data: Vec<u8>,
    /// Bytes of `data` that were received.
    filled: usize,
    status: Vec<BlockStatus>,
    error: Option<Error>,
}

/// A connection to an NBD server.
pub struct Client {
    wire: Wire,
    export: Export,
    outstanding: HashMap<u64, Outstanding>,
    ready: VecDeque<Completed>,
    spare: Vec<Vec<u8>>,
    next_cookie: u64,
    broken: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Client")
            .field("size", &self.export.size)
            .field("outstanding", &self.outstanding.len())
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the default export of the server at `listen`.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with).
    pub fn connect(listen: &Listen) -> Result<Self> {
        Self::connect_with(listen, &ClientOptions::default())
    }

    /// Connects to the server at `listen`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if no server listens there or it has no such export, [`ErrorKind::Foreign`] if the peer is no NBD
    /// server, [`ErrorKind::TimedOut`], and errors of the system.
    pub fn connect_with(listen: &Listen, options: &ClientOptions) -> Result<Self> {
        if options.export_name.len() > STRING_MAX {
            let text = format!("the name of an NBD export has at most {STRING_MAX} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut socket = connect::connect(listen)?;
        // A timeout of zero would mean that the socket has no timeout.
        let timeout = options.timeout.max(Duration::from_millis(1));
        socket
            .set_read_timeout(Some(timeout))
            .and_then(|()| socket.set_write_timeout(Some(timeout)))
            .map_err(|error| Error::new(ErrorKind::System, format!("cannot set up a socket: {error}")))?;
        let export = handshake::negotiate(&mut socket, options)?;
        Ok(Self {
            wire: Wire::new(socket, timeout),
            export,
            outstanding: HashMap::new(),
            ready: VecDeque::new(),
            spare: Vec::new(),
            next_cookie: 1,
            broken: false,
        })
    }

    /// Size of the export in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.export.size
    }

    /// The features of the export: [`transmission_flag`].
    #[must_use]
    pub const fn flags(&self) -> u16 {
        self.export.flags
    }

    /// Whether the export may not be written.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.export.flags & transmission_flag::READ_ONLY != 0
    }

    /// Minimum, preferred and maximum block size in bytes, if the server reports them.
    #[must_use]
    pub const fn block_sizes(&self) -> Option<[u32; 3]> {
        self.export.blocks
    }

    /// Description of the export.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.export.description
    }

    // -- one by one -------------------------------------------------------------------------------------------

    /// Fills `into` from `offset`.
    ///
    /// # Errors
    /// The error that the server replied with, or [`ErrorKind::Stopped`] if the connection is broken.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        let length = length_of(into)?;
        let completed = self.run(Command::Read { offset, length })?;
        into.copy_from_slice(&completed.data);
        self.recycle(completed.data);
        Ok(())
    }

    /// Writes `data` to `offset`; durable when this returns if `fua`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        self.run(Command::Write { offset, data, fua }).map(drop)
    }

    /// Flush: all writes that completed before are durable when this returns.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn flush(&mut self) -> Result<()> {
        self.run(Command::Flush).map(drop)
    }

    /// Informs the server that the range's data is no longer needed.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn trim(&mut self, offset: u64, length: u32, fua: bool) -> Result<()> {
        self.run(Command::Trim { offset, length, fua }).map(drop)
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write_zeroes(&mut self, offset: u64, length: u32, fua: bool, no_hole: bool) -> Result<()> {
        self.run(Command::WriteZeroes { offset, length, fua, no_hole, fast: false }).map(drop)
    }

    /// Prefetches a range.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn cache(&mut self, offset: u64, length: u32) -> Result<()> {
        self.run(Command::Cache { offset, length }).map(drop)
    }

    /// Block status of a range, for each negotiated context; it may cover less than the range.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn block_status(&mut self, offset: u64, length: u32) -> Result<Vec<BlockStatus>> {
        self.run(Command::BlockStatus { offset, length, one: false }).map(|completed| completed.status)
    }

    /// Runs one request to its end.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn run(&mut self, command: Command<'_>) -> Result<Completed> {
        let cookie = self.submit(command)?;
        let place = loop {
            if let Some(place) = self.ready.iter().position(|completed| completed.cookie == cookie) {
                break place;
            }
            self.receive_reply()?;
        };
        match self.ready.remove(place) {
            Some(Completed { result: Err(error), .. }) => Err(error),
            Some(completed) => Ok(completed),
            None => Err(Error::new(ErrorKind::System, "a reply was lost")),
        }
    }

    // -- many in flight ---------------------------------------------------------------------------------------

    /// Sends a request and returns the number that identifies its completion. Replies that arrive meanwhile are queued for
    /// [`complete`](Self::complete).
    ///
    /// # Errors
    /// The connection is broken; the server may or may not have executed the request.
    pub fn submit(&mut self, command: Command<'_>) -> Result<u64> {
        self.check()?;
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let (header, body) = encode(command, cookie)?;
        let mut data = Vec::new();
        if let Command::Read { length, .. } = command {
            data = self.spare.pop().unwrap_or_default();
            data.resize(length as usize, 0);
        }
        let outstanding = Outstanding {
            command: header.command,
            offset: header.offset,
            data,
            filled: 0,
            status: Vec::new(),
            error: None,
        };
        self.outstanding.insert(cookie, outstanding);
        let head = header.encode();
        let mut sent = 0;
        loop {
            match self.wire.send(&head, body, sent) {
                Ok(Sent::All) => return Ok(cookie),
                Ok(Sent::ReadFirst(count)) => {
                    sent = count;
                    self.receive_reply()?;
                }
                Err(error) => return Err(self.break_off(error)),
            }
        }
    }

    /// Waits for the next reply and returns it; `None` when no request is outstanding.
    ///
    /// # Errors
    /// The connection is broken. The result of a request is in its [`Completed`].
    pub fn complete(&mut self) -> Result<Option<Completed>> {
        loop {
            if let Some(completed) = self.ready.pop_front() {
                return Ok(Some(completed));
            }
            if self.outstanding.is_empty() {
                return Ok(None);
            }
            self.receive_reply()?;
        }
    }

    /// Number of requests that were submitted and not yet returned by [`complete`](Self::complete).
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.outstanding.len() + self.ready.len()
    }

    /// Numbers of the requests without a reply, in no order.
    pub fn outstanding(&self) -> impl Iterator<Item = u64> {
        self.outstanding.keys().copied()
    }

    /// Returns the buffer of a completion to the client; a later read uses it and need not allocate one.
    pub fn recycle(&mut self, data: Vec<u8>) {
        if data.capacity() > 0 && self.spare.len() < SPARE_MAX {
            self.spare.push(data);
        }
    }

    // -- replies ----------------------------------------------------------------------------------------------

    fn check(&self) -> Result<()> {
        if self.broken {
            return Err(Error::new(ErrorKind::Stopped, "the connection to the NBD server is broken"));
        }
        Ok(())
    }

    fn break_off(&mut self, error: Error) -> Error {
        self.broken = true;
        error
    }

    /// Receives one simple reply or one chunk; a request that it completes becomes ready.
    fn receive_reply(&mut self) -> Result<()> {
        self.check()?;
        let outcome = self.try_receive_reply();
        outcome.map_err(|error| self.break_off(error))
    }

    fn try_receive_reply(&mut self) -> Result<()> {
        let head = self.wire.array::<16>()?;
        let mut reader = Reader(&head);
        match (reader.u32(), self.export.structured) {
            (Some(SIMPLE_REPLY_MAGIC), structured) => {
                let number = reader.u32().ok_or_else(strange)?;
                self.simple(reader.u64().ok_or_else(strange)?, number, structured)
            }
            (Some(STRUCTURED_REPLY_MAGIC), true) => {
                let flags = reader.u16().ok_or_else(strange)?;
                let kind = reader.u16().ok_or_else(strange)?;
                let cookie = reader.u64().ok_or_else(strange)?;
                let length = u32::from_be_bytes(self.wire.array()?) as usize;
                self.chunk(cookie, kind, length)?;
                if flags & chunk::FLAG_DONE != 0 {
                    self.finish(cookie)?;
                }
                Ok(())
            }
            _ => Err(strange()),
        }
    }

    fn simple(&mut self, cookie: u64, number: u32, structured: bool) -> Result<()> {
        let request = self.outstanding.get_mut(&cookie).ok_or_else(strange)?;
        request.error = result_of_wire(number, "").err();
        if request.command == command::READ && number == 0 {
            if structured {
                return Err(strange());
            }
            self.wire.fill(&mut request.data)?;
            request.filled = request.data.len();
        }
        self.finish(cookie)
    }

    fn chunk(&mut self, cookie: u64, kind: u16, length: usize) -> Result<()> {
        let request = self.outstanding.get_mut(&cookie).ok_or_else(strange)?;
        match kind {
            chunk::NONE if length == 0 => Ok(()),
            chunk::OFFSET_DATA if length > 8 && request.command == command::READ => {
                let offset = u64::from_be_bytes(self.wire.array()?);
                self.wire.fill(request.place(offset, length - 8)?)
            }
            chunk::OFFSET_HOLE if length == 12 && request.command == command::READ => {
                let offset = u64::from_be_bytes(self.wire.array()?);
                let hole = u32::from_be_bytes(self.wire.array()?);
                request.place(offset, hole as usize)?.fill(0);
                Ok(())
            }
            chunk::BLOCK_STATUS
                if request.command == command::BLOCK_STATUS && (12..=CHUNK_MAX).contains(&length) =>
            {
                let mut bytes = vec![0; length];
                self.wire.fill(&mut bytes)?;
                request.learn(&bytes, &self.export.contexts)
            }
            kind if kind & chunk::ERROR_BIT != 0 && (6..=CHUNK_MAX).contains(&length) => {
                let mut bytes = vec![0; length];
                self.wire.fill(&mut bytes)?;
                let mut reader = Reader(&bytes);
                let number = reader.u32().ok_or_else(strange)?;
                let text =
                    reader.u16().and_then(|length| reader.bytes(usize::from(length))).ok_or_else(strange)?;
                let error =
                    result_of_wire(number, &String::from_utf8_lossy(text)).err().ok_or_else(strange)?;
                request.error.get_or_insert(error);
                Ok(())
            }
            _ => Err(strange()),
        }
    }

    fn finish(&mut self, cookie: u64) -> Result<()> {
        let mut request = self.outstanding.remove(&cookie).ok_or_else(strange)?;
        let result = match request.error.take() {
            Some(error) => {
                let data = std::mem::take(&mut request.data);
                self.recycle(data);
                Err(error)
            }
            None if request.filled < request.data.len() => return Err(strange()),
            None => Ok(()),
        };
        let Outstanding { data, status, .. } = request;
        self.ready.push_back(Completed { cookie, result, data, status });
        Ok(())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.broken {
            let header = RequestHeader {
                flags: 0,
                command: command::DISC,
                cookie: self.next_cookie,
                offset: 0,
                length: 0,
            };
            self.wire.send_last(&header.encode());
        }
    }
}

impl Outstanding {
    /// The part of `data` that holds `length` bytes from `offset` of the device.
    fn place(&mut self, offset: u64, length: usize) -> Result<&mut [u8]> {
        let start = offset.checked_sub(self.offset).and_then(|start| usize::try_from(start).ok());
        let end = start.and_then(|start| start.checked_add(length));
        self.filled += length;
        match (start, end) {
            (Some(start), Some(end)) => self.data.get_mut(start..end).ok_or_else(strange),
            _ => Err(strange()),
        }
    }

    fn learn(&mut self, bytes: &[u8], contexts: &[(u32, &'static str)]) -> Result<()> {
        let mut reader = Reader(bytes);
        let id = reader.u32().ok_or_else(strange)?;
        let context = contexts.iter().find(|context| context.0 == id).ok_or_else(strange)?.1;
        let mut offset = self.offset;
        while !reader.is_empty() {
            let length = reader.u32().ok_or_else(strange)?;
            let flags = reader.u32().ok_or_else(strange)?;
            self.status.push(BlockStatus { context, offset, length, flags });
            offset = offset.checked_add(u64::from(length)).ok_or_else(strange)?;
        }
        Ok(())
    }
}

fn strange() -> Error {
    Error::new(ErrorKind::Foreign, "the NBD server sent a reply that answers no request of ours")
}
