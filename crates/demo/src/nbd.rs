//! An NBD connection that reads and writes, one request at a time, for the demonstration where it cannot use a kernel
//! block device.
//!
//! Source: the specification in the NetworkBlockDevice/nbd repository, `doc/proto.md`: fixed newstyle handshake,
//! simple replies. All numbers are big-endian.
//!
//! Invariants: after an error of the connection every later request fails; no call waits longer than the timeout for
//! bytes of the server.

use cbd_types::{Error, ErrorKind, Result};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The first word that a server sends.
const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The second word that a server sends, and the first word of an option.
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
/// Flags of the client: fixed newstyle, no padding.
const CLIENT_FLAGS: u32 = 3;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// The longest reply to an option, in bytes.
const OPTION_REPLY_MAX: u64 = 4096;
const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const FLAG_FUA: u16 = 1;

/// A connection to the default export of a server.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// The number of the next request.
    cookie: u64,
    /// The head and the data of a request.
    request: Vec<u8>,
}

impl Connection {
    /// Connects to the server at `path`; `timeout` limits each read and write of the socket.
    ///
    /// # Errors
    /// [`ErrorKind::System`] with the system error, [`ErrorKind::Foreign`] if the peer is no NBD server.
    pub fn open(path: &Path, timeout: Duration) -> Result<Self> {
        let reach = || -> io::Result<UnixStream> {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Ok(stream)
        };
        let stream = reach().map_err(|error| lost("the connection", &error))?;
        let mut connection = Self { stream, cookie: 0, request: Vec::new() };
        connection.handshake()?;
        Ok(connection)
    }

    fn handshake(&mut self) -> Result<()> {
        let greeting: [u8; 18] = self.receive()?;
        if greeting[..16] != [SERVER_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat() {
            return Err(foreign("its greeting is unknown"));
        }
        let mut option = CLIENT_FLAGS.to_be_bytes().to_vec();
        option.extend(OPTION_MAGIC.to_be_bytes());
        option.extend(OPTION_GO.to_be_bytes());
        // The data: an empty name, for the default export, and no kind of information.
        option.extend([4 + 2, 0].map(u32::to_be_bytes).concat());
        option.extend(0_u16.to_be_bytes());
        self.send(&option)?;
        loop {
            let reply: [u8; 20] = self.receive()?;
            let (magic, kind, length) = (number(&reply[..8]), number(&reply[12..16]), number(&reply[16..20]));
            if magic != OPTION_REPLY_MAGIC || length > OPTION_REPLY_MAX {
                return Err(foreign("its reply to an option is malformed"));
            }
            self.fill(&mut vec![0; length as usize])?;
            match kind as u32 {
                REPLY_ACK => return Ok(()),
                REPLY_INFO => {}
                kind => return Err(foreign(&format!("it refused the export with {kind:#x}"))),
            }
        }
    }

    /// Fills `into` from `offset`, in bytes.
    ///
    /// # Errors
    /// The server's error, or a lost connection.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.begin(COMMAND_READ, 0, offset, into.len());
        self.run()?;
        self.fill(into)
    }

    /// Writes `data` at `offset`, in bytes; with `fua` the write is durable when this returns.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self, offset: u64, data: &[u8], fua: bool) -> Result<()> {
        self.begin(COMMAND_WRITE, if fua { FLAG_FUA } else { 0 }, offset, data.len());
        self.request.extend_from_slice(data);
        self.run()
    }

    fn begin(&mut self, command: u16, flags: u16, offset: u64, length: usize) {
        self.cookie += 1;
        self.request.clear();
        self.request.extend(REQUEST_MAGIC.to_be_bytes());
        self.request.extend(flags.to_be_bytes());
        self.request.extend(command.to_be_bytes());
        self.request.extend(self.cookie.to_be_bytes());
        self.request.extend(offset.to_be_bytes());
        self.request.extend((length as u32).to_be_bytes());
    }

    /// Sends the request and receives the head of its reply.
    fn run(&mut self) -> Result<()> {
        let sent = self.stream.write_all(&self.request);
        sent.map_err(|error| lost("sending a request", &error))?;
        let reply: [u8; 16] = self.receive()?;
        if number(&reply[..4]) != u64::from(REPLY_MAGIC) || number(&reply[8..]) != self.cookie {
            // The bytes that follow cannot be interpreted.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
            return Err(foreign("its reply answers no request"));
        }
        match number(&reply[4..8]) {
            0 => Ok(()),
            code => Err(Error::new(ErrorKind::Backing, format!("the NBD server answered error {code}"))),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(|error| lost("sending", &error))
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<()> {
        self.stream.read_exact(into).map_err(|error| lost("receiving", &error))
    }

    fn receive<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }
}

/// At most eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn lost(what: &str, error: &io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ErrorKind::TimedOut,
        _ => ErrorKind::System,
    };
    Error::new(kind, format!("NBD: {what}")).caused_by(cbd_sys::errors::copy_of(error))
}

fn foreign(text: &str) -> Error {
    Error::new(ErrorKind::Foreign, format!("the peer is no NBD server that can be used: {text}"))
}
