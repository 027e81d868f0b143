//! The NBD server's protocol: a whole connection, from the greeting on, over a pair of connected sockets.
//!
//! Invariants: a connection ends after its client has sent everything; each valid request has one reply, and each
//! reply is correct: written data is read back, and no other data changes.

use crate::input::Input;
use crate::wires::{Model, SIZE, device};
use cbd_nbd::{Options, serve_connected};
use cbd_types::ByteRange;
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::time::Duration;

/// Longest payload of a request from this target.
const PAYLOAD_MAX: usize = 8 << 10;

/// Time limit for the end of a connection, which takes microseconds; a connection that takes longer counts as hanging.
const TIMEOUT: Duration = Duration::from_secs(20);

const OPTION_MAGIC: &[u8] = b"IHAVEOPT";
const REQUEST_MAGIC: [u8; 4] = 0x2560_9513_u32.to_be_bytes();
const OPTION_GO: u32 = 7;

/// A request as the client sent it.
#[derive(Clone, Copy, Debug)]
struct SentRequest {
    command: u16,
    offset: u64,
    length: u32,
    fill: u8,
}

/// The bytes that a client sends, and the requests that require replies.
#[derive(Default)]
struct Script {
    says: Vec<u8>,
    asked: Vec<SentRequest>,
    /// All bytes so far were well-formed, and in the expected state.
    orderly: bool,
}

impl Script {
    fn number(&mut self, bytes: &[u8]) {
        self.says.extend_from_slice(bytes);
    }

    fn option(&mut self, code: u32, data: &[u8]) {
        self.number(OPTION_MAGIC);
        self.number(&code.to_be_bytes());
        self.number(&(data.len() as u32).to_be_bytes());
        self.number(data);
    }

    /// A handshake that succeeds; the bits of `choice` select the negotiated features.
    fn handshake(&mut self, choice: u8) {
        self.number(&3_u32.to_be_bytes());
        if choice & 1 != 0 {
            self.option(8, &[]);
        }
        if choice & 2 != 0 {
            let mut contexts = [0, 0, 0, 0, 0, 0, 0, 3].to_vec();
            for name in ["base:allocation", "cbd:state", "cbd:verify"] {
                contexts.extend_from_slice(&(name.len() as u32).to_be_bytes());
                contexts.extend_from_slice(name.as_bytes());
            }
            self.option(10, &contexts);
        }
        self.option(OPTION_GO, &[0; 6]);
    }

    /// Options with data from the input.
    fn options(&mut self, input: &mut Input<'_>, count: u8) {
        for _ in 0..count % 8 {
            let (code, length) = (input.u8(), usize::from(input.u8()));
            let lie = if code & 0x80 != 0 { input.u32() } else { 0 };
            let data = input.bytes(length);
            self.number(OPTION_MAGIC);
            self.number(&u32::from(code & 0x0f).to_be_bytes());
            self.number(&(data.len() as u32 ^ lie).to_be_bytes());
            self.number(data);
        }
    }

    fn requests(&mut self, input: &mut Input<'_>) {
        while !input.is_empty() {
            let (command, flags, fill) = (input.u8(), u16::from(input.u8()), input.u8());
            let (offset, length) = (u64::from(input.u16()), u32::from(input.u16()));
            // Usually whole sectors, sometimes offsets past the end and extreme numbers.
            let offset = if command & 0x40 != 0 { offset << 48 | offset } else { offset << 7 & !511 };
            let length = if command & 0x80 != 0 { length << 17 | length } else { length << 7 & !511 };
            let command = u16::from(command & 0x0f);
            self.number(&REQUEST_MAGIC);
            self.number(&flags.to_be_bytes());
            self.number(&command.to_be_bytes());
            self.number(&(self.asked.len() as u64).to_be_bytes());
            self.number(&offset.to_be_bytes());
            self.number(&length.to_be_bytes());
            if command == 1 {
                let payload = (length as usize).min(PAYLOAD_MAX);
                self.says.resize(self.says.len() + payload, fill);
                self.orderly &= payload == length as usize;
            }
            if command == 2 || !self.orderly {
                // The server reads no further requests, or takes the remaining bytes for a payload.
                self.number(input.rest());
                return;
            }
            self.asked.push(SentRequest { command, offset, length, fill });
        }
    }

    fn read(data: &[u8]) -> Self {
        let mut input = Input(data);
        let mut script = Self { orderly: true, ..Self::default() };
        let (mode, choice) = (input.u8(), input.u8());
        match mode % 4 {
            0 => {
                script.orderly = false;
                script.number(input.rest());
            }
            1 => {
                script.handshake(choice);
                script.requests(&mut input);
            }
            2 => {
                script.orderly = false;
                script.number(&u32::from(mode >> 2 & 3).to_be_bytes());
                script.options(&mut input, choice);
                script.option(OPTION_GO, &[0; 6]);
                script.requests(&mut input);
            }
            _ => {
                script.orderly = false;
                script.handshake(choice);
                script.number(input.rest());
            }
        }
        script
    }
}

/// Runs one connection.
pub fn run(data: &[u8]) {
    let script = Script::read(data);
    let (served, heard) = converse(&script.says);
    if script.orderly {
        served.unwrap_or_else(|error| panic!("a correct client was disconnected: {error}"));
        let replies = replies(&heard).expect("the replies violate the protocol");
        check(&script.asked, &replies);
    }
}

/// Sends all bytes to a server; returns the result of the server, and the received bytes.
fn converse(says: &[u8]) -> (cbd_types::Result<()>, Vec<u8>) {
    let pair = Socket::pair(Domain::UNIX, Type::STREAM, None);
    let (ours, theirs) = pair.unwrap_or_else(|error| panic!("no sockets: {error}"));
    let _ = ours.set_read_timeout(Some(TIMEOUT));
    let _ = ours.set_write_timeout(Some(TIMEOUT));
    std::thread::scope(|scope| {
        let listener = scope.spawn(|| {
            let mut heard = Vec::new();
            let ended = (&ours).read_to_end(&mut heard);
            ended.map(|_| heard)
        });
        let speaker = scope.spawn(|| {
            // A server may close the connection before it has read everything.
            let _ = (&ours).write_all(says);
            let _ = ours.shutdown(std::net::Shutdown::Write);
        });
        let options = Options {
            export_name: "disk".to_owned(),
            description: "a disk".to_owned(),
            handshake_timeout: TIMEOUT,
            stop_timeout: TIMEOUT,
            ..Options::default()
        };
        let served = serve_connected(device(), theirs.into(), options);
        let heard = listener.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        speaker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // A connection that the server closes with unread bytes is reset; the received bytes are not checked in that case.
        (served, heard.unwrap_or_default())
    })
}

/// One reply: its request, an errno, and data with its offset.
#[derive(Debug, PartialEq, Eq)]
struct Reply<'a> {
    cookie: u64,
    error: u32,
    data: &'a [u8],
}

/// Reads big-endian numbers from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn number(&mut self, width: usize) -> Option<u64> {
        Some(self.bytes(width)?.iter().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }
}

/// Parses the greeting and the options of a server; `None` if they violate the protocol. The returned reader is at the first
/// reply: the data of simple replies ends where the next reply begins, so only a caller that has the requests can parse them.
fn replies(heard: &[u8]) -> Option<Reader<'_>> {
    let mut reader = Reader(heard);
    (reader.bytes(16)? == b"NBDMAGICIHAVEOPT").then_some(())?;
    reader.number(2)?;
    loop {
        (reader.number(8)? == 0x0003_e889_0455_65a9).then_some(())?;
        let (option, kind, length) = (reader.number(4)?, reader.number(4)?, reader.number(4)?);
        reader.bytes(usize::try_from(length).ok()?)?;
        if option == u64::from(OPTION_GO) && kind == 1 {
            return Some(reader);
        }
    }
}

impl<'a> Reader<'a> {
    /// The next reply, parsed with the lengths of the requests.
    fn reply(&mut self, asked: &[SentRequest]) -> Option<Reply<'a>> {
        match self.number(4)? {
            0x6744_6698 => {
                let (error, cookie) = (self.number(4)? as u32, self.number(8)?);
                let request = asked.get(usize::try_from(cookie).ok()?)?;
                let length = if request.command == 0 && error == 0 { request.length as usize } else { 0 };
                Some(Reply { cookie, error, data: self.bytes(length)? })
            }
            0x668e_33ef => self.chunks(asked),
            _ => None,
        }
    }

    fn chunks(&mut self, asked: &[SentRequest]) -> Option<Reply<'a>> {
        loop {
            let (flags, kind) = (self.number(2)?, self.number(2)?);
            let (cookie, length) = (self.number(8)?, self.number(4)? as usize);
            let request = asked.get(usize::try_from(cookie).ok()?)?;
            let mut payload = Reader(self.bytes(length)?);
            let reply = match kind {
                0 => Reply { cookie, error: 0, data: &[] },
                1 => {
                    (payload.number(8)? == request.offset && request.command == 0).then_some(())?;
                    Reply { cookie, error: 0, data: payload.0 }
                }
                5 => {
                    let whole = length > 4 && (length - 4).is_multiple_of(8);
                    (request.command == 7 && whole).then_some(())?;
                    Reply { cookie, error: 0, data: &[] }
                }
                0x8001 => {
                    let (error, text) = (payload.number(4)? as u32, payload.number(2)? as usize);
                    (error != 0 && text == payload.0.len()).then_some(())?;
                    Reply { cookie, error, data: &[] }
                }
                _ => return None,
            };
            if flags & 1 != 0 {
                return Some(reply);
            }
            (self.number(4)? == 0x668e_33ef).then_some(())?;
        }
    }
}

/// Compares the replies with the requests. The device completes each request when it is submitted, so the changes
/// were made in the order of the requests.
fn check(asked: &[SentRequest], reader: &Reader<'_>) {
    let mut reader = Reader(reader.0);
    let mut answers: Vec<Option<Reply<'_>>> = asked.iter().map(|_| None).collect();
    while !reader.0.is_empty() {
        let reply = reader.reply(asked).expect("a reply that violates the protocol, or without a request");
        assert!([0, 1, 5, 12, 22, 28, 75, 95, 108].contains(&reply.error), "error {}", reply.error);
        let place = reply.cookie as usize;
        assert!(answers[place].replace(reply).is_none(), "two replies to one request");
    }
    let mut model = Model::new();
    for (request, answer) in asked.iter().zip(&answers) {
        let reply = answer.as_ref().unwrap_or_else(|| panic!("no reply to {request:?}"));
        if reply.error != 0 {
            continue;
        }
        let range = ByteRange::at(request.offset, u64::from(request.length));
        assert!(range.end <= SIZE, "{request:?} succeeded past the end");
        let there = model.get(range).expect("it is inside");
        match request.command {
            0 => assert!(reply.data == there, "{request:?} reads other data"),
            1 => there.fill(request.fill),
            4 | 6 => there.fill(0),
            _ => {}
        }
    }
}

/// Connections without errors, one of each kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    // Command, flags, fill, offset, length: write, read, flush, trim, cache, zeroes, status.
    let requests: [[u8; 7]; 8] = [
        [1, 0, 7, 0, 0, 16, 0],
        [0, 0, 0, 0, 0, 32, 0],
        [3, 0, 0, 0, 0, 0, 0],
        [4, 0, 0, 8, 0, 4, 0],
        [5, 0, 0, 0, 0, 255, 0],
        [6, 2, 0, 4, 0, 4, 0],
        [7, 0, 0, 0, 0, 128, 0],
        [0, 0, 0, 0, 0, 255, 1],
    ];
    let requests = requests.concat();
    let mut seeds: Vec<Vec<u8>> = (0..4).map(|choice| [&[1, choice], &requests[..]].concat()).collect();
    for code in 1..11 {
        let option = [&[2 + 12, 1, code, 10, 0, 0, 0, 4][..], b"disk\0\0", &requests].concat();
        seeds.push(option);
    }
    let mut raw = Script::default();
    raw.handshake(3);
    raw.requests(&mut Input(&requests));
    seeds.push([&[0, 0], &raw.says[..]].concat());
    seeds.push([&[3, 3], &raw.says[100..]].concat());
    seeds.push([&[1, 1], &requests[..7], &[2, 0, 0, 0, 0, 0, 0]].concat());
    seeds
}
