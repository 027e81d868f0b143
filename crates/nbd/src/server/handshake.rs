//! The server's half of the handshake: fixed newstyle, from the greeting to the first request.
//!
//! Invariants: every length is checked before it is used, no option makes the server buffer more than [`OPTION_MAX`]
//! bytes, and every input results in a reply, an error reply or an `Err`. The stream enforces the timeout: it fails
//! when the time is up.

use super::request::Rules;
use crate::protocol::{
    CONTEXT_ALLOCATION, CONTEXT_STATE, CONTEXT_VERIFY, IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, Reader,
    STRING_MAX, handshake_flag, info, option, option_reply,
};
use cbd_types::{Error, ErrorKind, Result};
use std::io::{Read, Write};

/// Longest option that is parsed, in bytes.
const OPTION_MAX: usize = 64 << 10;
/// Longest option that is read and discarded; a longer one ends the connection.
const OPTION_SKIPPED_MAX: u32 = 16 << 20;
/// Preferred size of a request, in bytes.
const PREFERRED_BLOCK: u32 = 4096;

const SERVER_FLAGS: u16 = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;

/// The number of `base:allocation` in block status.
pub(super) const ALLOCATION_ID: u32 = 1;
/// The number of `cbd:state` in block status.
pub(super) const STATE_ID: u32 = 2;
/// The number of `cbd:verify` in block status.
pub(super) const VERIFY_ID: u32 = 3;

/// The metadata contexts that a client selected.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Contexts {
    pub(super) allocation: bool,
    pub(super) state: bool,
    pub(super) verify: bool,
}

/// The negotiated protocol features.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Negotiated {
    pub(super) structured: bool,
    pub(super) contexts: Contexts,
}

/// The export that is offered.
pub(super) struct Offer<'a> {
    pub(super) name: &'a str,
    pub(super) description: &'a str,
    pub(super) rules: &'a Rules,
    /// Whether the device can verify.
    pub(super) verifies: bool,
}

impl Offer<'_> {
    /// Whether `name` selects the export: its own name, or the empty name of the default export.
    fn is_named(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// Negotiates with a client until the transmission phase begins; `None` if the client ended the handshake in order.
/// `accepted` is called before the client learns that it may send requests.
///
/// # Errors
/// When the stream fails or the client breaks the protocol.
pub(super) fn negotiate<S: Read + Write>(
    stream: &mut S,
    offer: &Offer<'_>,
    accepted: &mut dyn FnMut(),
) -> Result<Option<Negotiated>> {
    let mut greeting = Vec::with_capacity(18);
    greeting.extend_from_slice(&NBDMAGIC.to_be_bytes());
    greeting.extend_from_slice(&IHAVEOPT.to_be_bytes());
    greeting.extend_from_slice(&SERVER_FLAGS.to_be_bytes());
    send(stream, &greeting)?;

    let mut flags = [0; 4];
    receive(stream, &mut flags)?;
    let flags = u32::from_be_bytes(flags);
    if flags & !u32::from(SERVER_FLAGS) != 0 {
        return Err(violation(format!("the client sends unknown handshake flags {flags:#x}")));
    }
    let no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
    let mut handshake =
        Handshake { stream, offer, negotiated: Negotiated::default(), out: Vec::new(), no_zeroes, accepted };
    loop {
        match handshake.option()? {
            Next::Option => {}
            Next::Requests => return Ok(Some(handshake.negotiated)),
            Next::End => return Ok(None),
        }
    }
}

enum Next {
    Option,
    Requests,
    End,
}

struct Handshake<'a, S> {
    stream: &'a mut S,
    offer: &'a Offer<'a>,
    negotiated: Negotiated,
    /// Replies to the current option; sent when they are complete.
    out: Vec<u8>,
    no_zeroes: bool,
    accepted: &'a mut dyn FnMut(),
}

impl<S: Read + Write> Handshake<'_, S> {
    fn option(&mut self) -> Result<Next> {
        let mut head = [0; 16];
        receive(self.stream, &mut head)?;
        let mut reader = Reader(&head);
        let (Some(magic), Some(code), Some(length)) = (reader.u64(), reader.u32(), reader.u32()) else {
            return Err(violation("an option without a head".into()));
        };
        if magic != IHAVEOPT {
            return Err(violation(format!("an option begins with {magic:#018x}")));
        }
        if length as usize > OPTION_MAX {
            return self.too_big(code, length).map(|()| Next::Option);
        }
        let mut data = vec![0; length as usize];
        receive(self.stream, &mut data)?;

        self.out.clear();
        let next = match code {
            option::EXPORT_NAME => return self.export_name(&data),
            option::ABORT => {
                self.reply(code, option_reply::ACK, &[]);
                Next::End
            }
            option::LIST => self.list(&data),
            option::INFO | option::GO => self.information(code, &data),
            option::STRUCTURED_REPLY => {
                if data.is_empty() {
                    self.negotiated.structured = true;
                    self.reply(code, option_reply::ACK, &[]);
                } else {
                    self.refuse(code, option_reply::ERR_INVALID, "this option has no data");
                }
                Next::Option
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(code, &data),
            // STARTTLS among others: TLS is not supported; a unix socket or a tunnel replaces it.
            _ => {
                self.refuse(code, option_reply::ERR_UNSUP, "this server does not support the option");
                Next::Option
            }
        };
        if matches!(next, Next::Requests) {
            (self.accepted)();
        }
        send(self.stream, &self.out)?;
        Ok(next)
    }

    /// EXPORT_NAME, the oldest option: its reply cannot be an error, so a wrong name ends the connection.
    fn export_name(&mut self, name: &[u8]) -> Result<Next> {
        if !self.offer.is_named(name) {
            return Err(violation(format!("there is no export {:?}", String::from_utf8_lossy(name))));
        }
        let rules = self.offer.rules;
        self.out.extend_from_slice(&rules.size.to_be_bytes());
        self.out.extend_from_slice(&rules.flags(self.negotiated.structured).to_be_bytes());
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; 124]);
        }
        (self.accepted)();
        send(self.stream, &self.out)?;
        Ok(Next::Requests)
    }

    fn list(&mut self, data: &[u8]) -> Next {
        if data.is_empty() {
            let mut server = Vec::new();
            put_string(&mut server, self.offer.name);
            server.extend_from_slice(self.offer.description.as_bytes());
            self.reply(option::LIST, option_reply::SERVER, &server);
            self.reply(option::LIST, option_reply::ACK, &[]);
        } else {
            self.refuse(option::LIST, option_reply::ERR_INVALID, "this option has no data");
        }
        Next::Option
    }

    /// INFO and GO: the same replies; after GO the transmission phase begins.
    fn information(&mut self, code: u32, data: &[u8]) -> Next {
        let Some((name, wanted)) = parse_information(data) else {
            self.refuse(code, option_reply::ERR_INVALID, "the option is malformed");
            return Next::Option;
        };
        if !self.offer.is_named(name) {
            self.refuse(code, option_reply::ERR_UNKNOWN, "there is no such export");
            return Next::Option;
        }
        let rules = self.offer.rules;
        let mut export = info::EXPORT.to_be_bytes().to_vec();
        export.extend_from_slice(&rules.size.to_be_bytes());
        export.extend_from_slice(&rules.flags(self.negotiated.structured).to_be_bytes());
        self.reply(code, option_reply::INFO, &export);

        // Sent even if the client did not request it, because requests that are not whole sectors are refused.
        let mut blocks = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [rules.sector, PREFERRED_BLOCK.max(rules.sector), rules.payload_max] {
            blocks.extend_from_slice(&size.to_be_bytes());
        }
        self.reply(code, option_reply::INFO, &blocks);

        for (kind, text) in [(info::NAME, self.offer.name), (info::DESCRIPTION, self.offer.description)] {
            if wanted.chunks_exact(2).any(|wanted| wanted == kind.to_be_bytes()) {
                let mut named = kind.to_be_bytes().to_vec();
                named.extend_from_slice(text.as_bytes());
                self.reply(code, option_reply::INFO, &named);
            }
        }
        self.reply(code, option_reply::ACK, &[]);
        if code == option::GO { Next::Requests } else { Next::Option }
    }

    fn contexts(&mut self, code: u32, data: &[u8]) -> Next {
        let setting = code == option::SET_META_CONTEXT;
        if setting {
            self.negotiated.contexts = Contexts::default();
        }
        if !self.negotiated.structured {
            self.refuse(code, option_reply::ERR_INVALID, "structured replies must be negotiated first");
            return Next::Option;
        }
        let Some((name, queries)) = parse_contexts(data) else {
            self.refuse(code, option_reply::ERR_INVALID, "the option is malformed");
            return Next::Option;
        };
        if !self.offer.is_named(name) {
            self.refuse(code, option_reply::ERR_UNKNOWN, "there is no such export");
            return Next::Option;
        }
        // LIST without queries selects all contexts; a query that ends in a colon selects all contexts of that
        // namespace.
        let wants = |context: &str, namespace: &str| {
            let listed = |query: &&[u8]| !setting && *query == namespace.as_bytes();
            (!setting && queries.is_empty())
                || queries.iter().any(|query| *query == context.as_bytes() || listed(query))
        };
        let chosen = Contexts {
            allocation: wants(CONTEXT_ALLOCATION, "base:"),
            state: wants(CONTEXT_STATE, "cbd:"),
            verify: self.offer.verifies && wants(CONTEXT_VERIFY, "cbd:"),
        };
        for (chosen, id, context) in [
            (chosen.allocation, ALLOCATION_ID, CONTEXT_ALLOCATION),
            (chosen.state, STATE_ID, CONTEXT_STATE),
            (chosen.verify, VERIFY_ID, CONTEXT_VERIFY),
        ] {
            if chosen {
                let mut reply = (if setting { id } else { 0 }).to_be_bytes().to_vec();
                reply.extend_from_slice(context.as_bytes());
                self.reply(code, option_reply::META_CONTEXT, &reply);
            }
        }
        if setting {
            self.negotiated.contexts = chosen;
        }
        self.reply(code, option_reply::ACK, &[]);
        Next::Option
    }

    fn too_big(&mut self, code: u32, length: u32) -> Result<()> {
        if length > OPTION_SKIPPED_MAX || code == option::EXPORT_NAME {
            return Err(violation(format!("an option of {length} bytes")));
        }
        let mut left = length as usize;
        let mut dropped = [0; 4096];
        while left > 0 {
            let piece = left.min(dropped.len());
            receive(self.stream, &mut dropped[..piece])?;
            left -= piece;
        }
        self.out.clear();
        self.refuse(code, option_reply::ERR_TOO_BIG, "the option is too long");
        send(self.stream, &self.out)
    }

    fn refuse(&mut self, code: u32, error: u32, text: &str) {
        self.reply(code, error, text.as_bytes());
    }

    fn reply(&mut self, code: u32, kind: u32, data: &[u8]) {
        self.out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.out.extend_from_slice(&code.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        // All replies are short: the lengths of name and description are checked when the server starts.
        self.out.extend_from_slice(&(data.len() as u32).to_be_bytes());
        self.out.extend_from_slice(data);
    }
}

/// The export's name, and the requested kinds of information, two bytes each.
fn parse_information(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u16()?;
    let wanted = reader.bytes(usize::from(count) * 2)?;
    (reader.is_empty() && name.len() <= STRING_MAX).then_some((name, wanted))
}

/// The export's name, and the queries.
fn parse_contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u32()?;
    let mut queries = Vec::new();
    // Each query takes at least four bytes of an option of bounded length, which bounds the count.
    for _ in 0..count {
        let query = reader.string()?;
        (query.len() <= STRING_MAX).then_some(())?;
        queries.push(query);
    }
    (reader.is_empty() && name.len() <= STRING_MAX).then_some((name, queries))
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn receive<S: Read>(stream: &mut S, into: &mut [u8]) -> Result<()> {
    stream.read_exact(into).map_err(stream_error)
}

fn send<S: Write>(stream: &mut S, bytes: &[u8]) -> Result<()> {
    stream.write_all(bytes).map_err(stream_error)
}

fn stream_error(error: std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::TimedOut => ErrorKind::TimedOut,
        _ => ErrorKind::Stopped,
    };
    Error::new(kind, "the handshake with an NBD client ended early").caused_by(error)
}

fn violation(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("the NBD handshake failed: {text}"))
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
