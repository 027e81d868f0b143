//! FUSE requests: messages as `/dev/fuse` would deliver them, over a pair of sockets that preserves message
//! boundaries.
//!
//! Invariants: each message that requires an answer has exactly one, with the right length in its header; written
//! data is read back, and no other data changes.

use crate::input::Input;
use crate::wires::{Model, SIZE, device};
use cbd_types::ByteRange;
use socket2::{Domain, Socket, Type};
use std::io::{ErrorKind, Read};

/// Maximum number of messages of one input.
const MESSAGES_MAX: usize = 64;

/// Longest data that a message carries.
const PAYLOAD_MAX: usize = 4096;

/// Buffer size of a socket in bytes: for all messages, or all answers.
const SOCKET_BUFFER: usize = 1 << 20;

/// Bytes of the header of a message, and of an answer.
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;

const READ: u32 = 15;
const WRITE: u32 = 16;
const FALLOCATE: u32 = 43;

/// Existing calls, and some that do not exist.
const CALLS: [u32; 24] = [
    READ,
    WRITE,
    FALLOCATE,
    20,
    1,
    3,
    4,
    14,
    27,
    28,
    18,
    29,
    30,
    17,
    26,
    38,
    2,
    36,
    42,
    25,
    0,
    39,
    4096,
    u32::MAX,
];

/// A message as it was sent.
#[derive(Debug)]
struct Message {
    bytes: Vec<u8>,
    opcode: u32,
    offset: u64,
    size: u64,
    fill: u8,
    orderly: bool,
}

impl Message {
    fn read(input: &mut Input<'_>, unique: u64) -> Self {
        let opcode = CALLS[usize::from(input.u8()) % CALLS.len()];
        let (flags, node, fill) = (input.u8(), u64::from(input.u8()), input.u8());
        let offset = u64::from(input.u16());
        let size = u64::from(input.u16());
        let more = input.u32();
        let offset = if flags & 1 != 0 { offset << 48 | offset } else { offset << 7 & !511 };
        let size = if flags & 2 != 0 { size << 16 | size } else { size << 7 & !511 };
        let mut arguments = Vec::new();
        match opcode {
            READ | WRITE | 28 => {
                arguments.extend_from_slice(&[0; 8]);
                arguments.extend_from_slice(&offset.to_ne_bytes());
                arguments.extend_from_slice(&(size as u32).to_ne_bytes());
                arguments.extend_from_slice(&[0; 12]);
                arguments.extend_from_slice(&more.to_ne_bytes());
                arguments.extend_from_slice(&[0; 4]);
                if opcode == WRITE {
                    arguments.resize(arguments.len() + (size as usize).min(PAYLOAD_MAX), fill);
                }
            }
            FALLOCATE => {
                arguments.extend_from_slice(&[0; 8]);
                arguments.extend_from_slice(&offset.to_ne_bytes());
                arguments.extend_from_slice(&size.to_ne_bytes());
                arguments.extend_from_slice(&more.to_ne_bytes());
                arguments.extend_from_slice(&[0; 4]);
            }
            _ => {}
        }
        let length = usize::from(fill);
        let own = if flags & 4 != 0 { input.bytes(length) } else { &[] };
        arguments.extend_from_slice(own);
        let total = (IN_HEADER + arguments.len()) as u32;
        let said = if flags & 8 != 0 { more } else { total };
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&said.to_ne_bytes());
        bytes.extend_from_slice(&opcode.to_ne_bytes());
        bytes.extend_from_slice(&unique.to_ne_bytes());
        bytes.extend_from_slice(&(node % 4).to_ne_bytes());
        bytes.extend_from_slice(&[0; 16]);
        bytes.extend_from_slice(&arguments);
        if flags & 16 != 0 {
            bytes.truncate(usize::from(fill).max(1));
        }
        let orderly = flags & !3 == 0;
        Self { bytes, opcode, offset, size: u64::from(size as u32), fill, orderly }
    }

    /// Checks an answer without an error, as far as the model can predict it.
    fn check(&self, body: &[u8], model: &mut Model) {
        let whole = ByteRange::at(0, SIZE);
        match self.opcode {
            READ => {
                let there = ByteRange { start: self.offset, end: self.offset.saturating_add(self.size) };
                let there = there.intersection(&whole).unwrap_or(ByteRange::at(0, 0));
                let expected = model.get(there).expect("it is inside");
                assert!(body == expected, "{self:?} reads other data");
            }
            WRITE => {
                let range = ByteRange::at(self.offset, self.size);
                model.get(range).expect("a write past the end").fill(self.fill);
                assert_eq!(body.get(..4), Some(&(self.size as u32).to_ne_bytes()[..]));
            }
            FALLOCATE => {
                let range = ByteRange::at(self.offset, self.size);
                model.get(range).expect("zeroes past the end").fill(0);
            }
            _ => {}
        }
    }
}

/// Runs one connection with all its messages.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let read_only = input.u8() & 0x81 == 0x81;
    let pair = Socket::pair(Domain::UNIX, Type::SEQPACKET, None);
    let (ours, theirs) = pair.unwrap_or_else(|error| panic!("no sockets: {error}"));
    for socket in [&ours, &theirs] {
        let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
        let _ = socket.set_nonblocking(true);
    }
    let mut messages = Vec::new();
    while !input.is_empty() && messages.len() < MESSAGES_MAX {
        let message = Message::read(&mut input, messages.len() as u64 + 1);
        // Messages that do not fit into the socket are not sent.
        if ours.send(&message.bytes).is_err() {
            break;
        }
        messages.push(message);
    }
    let _ = ours.shutdown(std::net::Shutdown::Write);
    let served = cbd_fuse::serve_connection(&*device(), theirs.into(), "cbd0", read_only);
    served.unwrap_or_else(|error| panic!("the connection was not served to its end: {error}"));
    check(&messages, &ours);
}

/// The answer to a message: its error, and the bytes after its header.
struct Answer {
    error: i32,
    body: Vec<u8>,
}

/// Compares the answers with a model. All messages are sent before the first answer is read, so the order of the answers is not
/// the order of the effects: a write that waits for the fence of its batch is answered after a read that saw its data. One thread
/// accepts the messages in the order in which they were sent, and the device in memory executes each one when it is submitted.
/// The model does the same.
fn check(messages: &[Message], socket: &Socket) {
    let answers = read_answers(messages, socket);
    for (message, answer) in messages.iter().zip(&answers) {
        let silent = matches!(message.opcode, 2 | 36 | 42) || message.bytes.len() < IN_HEADER;
        assert!(answer.is_some() || silent || !message.orderly, "no answer to {message:?}");
    }
    let mut model = Model::new();
    for (message, answer) in messages.iter().zip(&answers) {
        let Some(Answer { error: 0, body }) = answer else { continue };
        if message.orderly {
            message.check(body, &mut model);
        } else if matches!(message.opcode, WRITE | FALLOCATE) {
            // The message changed data in a way that the model cannot predict.
            return;
        }
    }
}

/// The answers in the order of their messages.
fn read_answers(messages: &[Message], mut socket: &Socket) -> Vec<Option<Answer>> {
    let mut answers: Vec<Option<Answer>> = messages.iter().map(|_| None).collect();
    let mut room = vec![0; SIZE as usize + OUT_HEADER];
    loop {
        let length = match socket.read(&mut room) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("the answers end with {error}"),
        };
        let answer = &room[..length];
        let number =
            |at: usize| u32::from_ne_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]);
        assert!(length >= OUT_HEADER && number(0) as usize == length, "an answer of another length");
        let (error, unique) = (number(4).cast_signed(), number(8) as usize);
        assert!((-4095..=0).contains(&error), "error {error}");
        let slot = unique.checked_sub(1).and_then(|at| answers.get_mut(at)).expect("an answer to no message");
        let body = answer[OUT_HEADER..].to_vec();
        let earlier = slot.replace(Answer { error, body });
        assert!(earlier.is_none(), "two answers to {:?}", messages[unique - 1]);
    }
    answers
}

/// A message of each kind, alone and all in one connection.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut all = vec![0];
    let mut seeds = Vec::new();
    for call in 0..CALLS.len() as u8 {
        let mut message = vec![call, 0, 2, 9, 4, 0, 16, 0, 0, 0, 0, 0];
        if CALLS[usize::from(call)] == FALLOCATE {
            message[8] = 16;
        }
        if call > 3 {
            // Arguments that are long enough for any call, including a name.
            message[1] = 4;
            message[3] = 90;
            let mut own = vec![0; 90];
            own[..5].copy_from_slice(if CALLS[usize::from(call)] == 26 {
                &[7, 0, 0, 0, 38]
            } else {
                b"cbd0\0"
            });
            message.extend_from_slice(&own);
        }
        all.extend_from_slice(&message);
        seeds.push([&[0], &message[..]].concat());
    }
    seeds.push(all.clone());
    all[0] = 0x81;
    seeds.push(all);
    seeds
}
