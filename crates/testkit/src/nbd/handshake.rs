//! The client's half of the handshake, up to GO.
//!
//! Invariants: the length of an announced reply is checked before it is read, and an export size that no device can have is
//! refused.

use super::ClientOptions;
use super::protocol::{
    IHAVEOPT, NBDMAGIC, OPTION_REPLY_MAGIC, Reader, handshake_flag, info, option, option_reply,
};
use cbd_nbd::{CONTEXT_ALLOCATION, CONTEXT_STATE, CONTEXT_VERIFY};
use cbd_types::{Error, ErrorKind, Result};
use std::io::{self, Read, Write};

/// Longest reply to an option that the client accepts, in bytes.
const REPLY_MAX: u32 = 64 << 10;
/// Maximum number of replies to one option.
const REPLIES_MAX: usize = 1024;

/// The properties of an export, as the server reported them.
#[derive(Clone, Debug, Default)]
pub(super) struct Export {
    pub(super) size: u64,
    pub(super) flags: u16,
    /// Minimum, preferred and maximum block size, if the server reports them.
    pub(super) blocks: Option<[u32; 3]>,
    pub(super) description: String,
    pub(super) structured: bool,
    /// Numbers of the negotiated contexts, with their names.
    pub(super) contexts: Vec<(u32, &'static str)>,
}

/// Negotiates with a server until the transmission phase begins.
pub(super) fn negotiate<S: Read + Write>(stream: &mut S, options: &ClientOptions) -> Result<Export> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).map_err(|error| lost(&error))?;
    let mut reader = Reader(&greeting);
    if reader.u64() != Some(NBDMAGIC) || reader.u64() != Some(IHAVEOPT) {
        return Err(broken("it does not greet as a newstyle NBD server"));
    }
    let flags = reader.u16().unwrap_or(0);
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(broken("it is too old: it does not speak fixed newstyle"));
    }
    let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    stream.write_all(&u32::from(ours).to_be_bytes()).map_err(|error| lost(&error))?;

    let mut export = Export::default();
    if options.structured {
        export.structured = ask(stream, option::STRUCTURED_REPLY, &[], |_, _| Ok(()))?.is_ok();
    }
    if options.contexts && export.structured {
        choose_contexts(stream, options, &mut export)?;
    }

    let mut data = Vec::new();
    put_string(&mut data, &options.export_name);
    let wanted = [info::BLOCK_SIZE, info::DESCRIPTION];
    data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|wanted| data.extend_from_slice(&wanted.to_be_bytes()));
    let mut told = false;
    let answer = ask(stream, option::GO, &data, |kind, data| {
        if kind == option_reply::INFO {
            told |= learn(&mut export, data)?;
        }
        Ok(())
    })?;
    if let Err((code, text)) = answer {
        let text = if text.is_empty() { String::new() } else { format!(": {text}") };
        let (kind, what) = match code {
            option_reply::ERR_UNKNOWN => {
                (ErrorKind::NotFound, format!("has no export {:?}", options.export_name))
            }
            option_reply::ERR_UNSUP => (ErrorKind::Unsupported, "does not know NBD_OPT_GO".to_owned()),
            code => (ErrorKind::Permission, format!("refused with {code:#x}")),
        };
        return Err(Error::new(kind, format!("the NBD server {what}{text}")));
    }
    if !told || export.size > i64::MAX as u64 {
        return Err(broken("it does not say how large the export is"));
    }
    Ok(export)
}

fn choose_contexts<S: Read + Write>(
    stream: &mut S,
    options: &ClientOptions,
    export: &mut Export,
) -> Result<()> {
    let known = [CONTEXT_ALLOCATION, CONTEXT_STATE, CONTEXT_VERIFY];
    let known = &known[..if options.verify { 3 } else { 2 }];
    let mut data = Vec::new();
    put_string(&mut data, &options.export_name);
    data.extend_from_slice(&(known.len() as u32).to_be_bytes());
    known.iter().for_each(|context| put_string(&mut data, context));
    // If the server refuses the option, block status is not available.
    let _ = ask(stream, option::SET_META_CONTEXT, &data, |kind, data| {
        let mut reader = Reader(data);
        if kind == option_reply::META_CONTEXT
            && let Some(id) = reader.u32()
            && let Some(context) = known.iter().find(|context| context.as_bytes() == reader.0)
        {
            export.contexts.push((id, context));
        }
        Ok(())
    })?;
    Ok(())
}

/// Decodes one information reply; true if it held the size.
fn learn(export: &mut Export, data: &[u8]) -> Result<bool> {
    let malformed = || broken("a piece of information is malformed");
    let mut reader = Reader(data);
    match reader.u16().ok_or_else(malformed)? {
        info::EXPORT => {
            export.size = reader.u64().ok_or_else(malformed)?;
            export.flags = reader.u16().ok_or_else(malformed)?;
            return Ok(true);
        }
        info::BLOCK_SIZE => {
            let mut next = || reader.u32().ok_or_else(malformed);
            export.blocks = Some([next()?, next()?, next()?]);
        }
        info::DESCRIPTION => export.description = String::from_utf8_lossy(reader.0).into_owned(),
        _ => {}
    }
    Ok(false)
}

/// Result of an option: acknowledged, or refused with a code and a text.
type Answer = core::result::Result<(), (u32, String)>;

/// Sends an option and calls `each` for every reply to it.
fn ask<S: Read + Write>(
    stream: &mut S,
    code: u32,
    data: &[u8],
    mut each: impl FnMut(u32, &[u8]) -> Result<()>,
) -> Result<Answer> {
    let mut out = Vec::with_capacity(16 + data.len());
    out.extend_from_slice(&IHAVEOPT.to_be_bytes());
    out.extend_from_slice(&code.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    stream.write_all(&out).map_err(|error| lost(&error))?;
    for _ in 0..REPLIES_MAX {
        let mut head = [0; 20];
        stream.read_exact(&mut head).map_err(|error| lost(&error))?;
        let mut reader = Reader(&head);
        let (Some(magic), Some(to), Some(kind), Some(length)) =
            (reader.u64(), reader.u32(), reader.u32(), reader.u32())
        else {
            return Err(broken("a reply without a head"));
        };
        if magic != OPTION_REPLY_MAGIC || to != code || length > REPLY_MAX {
            return Err(broken("a reply that answers no option"));
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data).map_err(|error| lost(&error))?;
        match kind {
            option_reply::ACK => return Ok(Ok(())),
            kind if kind & option_reply::ERROR != 0 => {
                return Ok(Err((kind, String::from_utf8_lossy(&data).into_owned())));
            }
            kind => each(kind, &data)?,
        }
    }
    Err(broken("it does not stop replying to one option"))
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    // `Client::connect_with` has checked the length against the limit of the protocol.
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn lost(error: &io::Error) -> Error {
    let (kind, text) = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            (ErrorKind::TimedOut, "it took too long".to_owned())
        }
        _ => (ErrorKind::Stopped, error.to_string()),
    };
    Error::new(kind, format!("the handshake with the NBD server failed: {text}"))
}

fn broken(text: &'static str) -> Error {
    Error::new(ErrorKind::Foreign, format!("the peer is no NBD server that can be used: {text}"))
}
