//! Traces of block requests in files, read as a stream.
//!
//! Invariants: a trace of any length takes the memory of one line; a line that does not have the form of the trace is an error with
//! its number, except for the last one without an end: the trace was cut there, which is noted.
//!
//! Elsewhere: what is made of the requests (`survey`, `simulation`).

mod blkparse;
mod fio;

use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};

/// The longest line.
const LINE_MAX: u64 = 64 << 10;
/// Bytes from which the format is recognized.
const HEAD: u64 = 1 << 20;
/// The devices that an error lists.
const LISTED: usize = 16;
/// The longest request: the kernel counts the bytes of one in 32 bits.
const LENGTH_MAX: u64 = 4 << 30;
/// Requests beyond this offset are no requests of a disk.
const OFFSET_MAX: u64 = 1 << 56;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// It reads.
    Read,
    /// It writes.
    Write,
    /// It discards.
    Discard,
    /// It flushes.
    Flush,
}

/// A request of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Microseconds since the trace began; 0 if the trace has no times.
    pub us: u64,
    /// What it does.
    pub action: Action,
    /// The bytes of the device; empty for a flush.
    pub range: ByteRange,
}

/// The formats.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Format {
    /// As the file says.
    #[default]
    Auto,
    /// fio's `write_iolog`, version 2 or 3, or a log of latencies or bandwidth with `log_offset=1`.
    Fio,
    /// The text that `blkparse` prints by default.
    Blkparse,
}

/// What a line says.
enum Line {
    Request {
        device: String,
        request: Request,
    },
    /// Nothing that counts here.
    Other,
    /// No line behind it is of the trace.
    End,
}

/// The parser of one format.
enum Parser {
    Iolog(fio::Iolog),
    Log(fio::Log),
    Blkparse(blkparse::Blkparse),
}

impl Parser {
    /// The line, without its end; `None` if it does not have the form.
    fn line(&mut self, line: &str) -> Option<Line> {
        match self {
            Self::Iolog(iolog) => iolog.line(line),
            Self::Log(log) => log.line(line),
            Self::Blkparse(blkparse) => blkparse.line(line),
        }
    }
}

/// A trace that is being read.
pub struct Trace {
    path: PathBuf,
    file: Box<dyn BufRead>,
    parser: Parser,
    device: Option<String>,
    /// Devices of which there are requests, as the trace names them.
    devices: BTreeSet<String>,
    line: u64,
    position: u64,
    length: u64,
    returned: u64,
    note: Option<String>,
}

impl Trace {
    /// Opens the trace at `path`. With `device` only requests of this device count.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the file cannot be read; [`ErrorKind::InvalidArgument`] if it is empty, compressed, binary, or in no
    /// known format.
    pub fn open(path: &Path, format: Format, device: Option<&str>) -> Result<Self> {
        let cannot = |error| {
            Error::new(ErrorKind::System, format!("{} cannot be read", path.display())).caused_by(error)
        };
        let mut file = File::open(path).map_err(cannot)?;
        if !file.metadata().map_err(cannot)?.is_file() {
            return Err(invalid(format!(
                "{} is no file: a trace is read twice, so save it to a file first",
                path.display()
            )));
        }
        let length = file.metadata().map_err(cannot)?.len();
        let mut head = Vec::new();
        (&mut file).take(HEAD).read_to_end(&mut head).map_err(cannot)?;
        file.rewind().map_err(cannot)?;
        let file = BufReader::with_capacity(1 << 20, file);
        Self::over(path, (&head, length), Box::new(file), format, device)
    }

    /// As [`open`](Self::open), of the content of a file.
    ///
    /// # Errors
    /// As those of `open`.
    pub fn of_bytes(bytes: Vec<u8>, format: Format, device: Option<&str>) -> Result<Self> {
        let (head, length) = (bytes[..bytes.len().min(HEAD as usize)].to_vec(), bytes.len() as u64);
        Self::over(Path::new("the trace"), (&head, length), Box::new(Cursor::new(bytes)), format, device)
    }

    /// The trace that begins with `head`, of `length` bytes.
    fn over(
        path: &Path,
        (head, length): (&[u8], u64),
        file: Box<dyn BufRead>,
        format: Format,
        device: Option<&str>,
    ) -> Result<Self> {
        refuse_binary(path, head)?;
        let parser = recognize(path, &String::from_utf8_lossy(head), format)?;
        let device = match &parser {
            Parser::Blkparse(_) => device.map(blkparse::device).transpose()?,
            _ => device.map(str::to_owned),
        };
        Ok(Self {
            path: path.to_owned(),
            file,
            parser,
            device,
            devices: BTreeSet::new(),
            line: 0,
            position: 0,
            length,
            returned: 0,
            note: None,
        })
    }

    /// The next request; `None` at the end of the trace.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a line that is none of this format, for a trace of several devices of which none was
    /// named, and for a trace without a request.
    pub fn next_request(&mut self) -> Result<Option<Request>> {
        loop {
            let mut bytes = Vec::new();
            let read = (&mut self.file).take(LINE_MAX).read_until(b'\n', &mut bytes).map_err(|error| {
                Error::new(ErrorKind::System, format!("{} cannot be read", self.path.display()))
                    .caused_by(error)
            })?;
            if read == 0 {
                return self.end();
            }
            self.line += 1;
            self.position += read as u64;
            if bytes.pop_if(|byte| *byte == b'\n').is_none() {
                if read as u64 == LINE_MAX {
                    return Err(self.malformed(&bytes));
                }
                // Whether its last number is whole is not known.
                self.note = Some(format!(
                    "line {} of {} has no end: the trace was cut there, and ends with the line before",
                    self.line,
                    self.path.display()
                ));
                return self.end();
            }
            let text = String::from_utf8_lossy(&bytes);
            match self.parser.line(text.trim_end()) {
                Some(Line::Request { device, request }) if request.range.end <= OFFSET_MAX => {
                    self.check_length(&request)?;
                    if let Some(request) = self.of_device(device, request)? {
                        return Ok(Some(request));
                    }
                }
                Some(Line::Other) => {}
                Some(Line::End) => return self.end(),
                Some(Line::Request { .. }) | None => return Err(self.malformed(&bytes)),
            }
        }
    }

    /// Refuses a request that no system sends: it would be simulated block by block.
    fn check_length(&self, request: &Request) -> Result<()> {
        let length = request.range.len();
        if length <= LENGTH_MAX {
            return Ok(());
        }
        let what = match request.action {
            Action::Read => "read",
            Action::Write => "write",
            Action::Discard => "discard",
            Action::Flush => "flush",
        };
        Err(invalid(format!(
            "{}, line {}: a {what} of {length} bytes: a request of a block device has at most 4 GiB",
            self.path.display(),
            self.line
        )))
    }

    /// Bytes of the file that were read, and all of them.
    #[must_use]
    pub const fn position(&self) -> (u64, u64) {
        (self.position, self.length)
    }

    /// Whether its requests have times.
    #[must_use]
    pub const fn has_times(&self) -> bool {
        !matches!(&self.parser, Parser::Iolog(iolog) if !iolog.has_times())
    }

    /// A note for the user, at the end of the trace.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// `request`, if it is of the wanted device.
    fn of_device(&mut self, device: String, request: Request) -> Result<Option<Request>> {
        let is_wanted = self.device.as_ref().is_none_or(|wanted| *wanted == device);
        if !self.devices.contains(&device) && self.devices.len() < LISTED {
            self.devices.insert(device);
        }
        if self.device.is_none() && self.devices.len() > 1 {
            return Err(invalid(format!(
                "{} has requests of several devices ({}, ..): name one with --device",
                self.path.display(),
                self.listed()
            )));
        }
        self.returned += u64::from(is_wanted);
        Ok(is_wanted.then_some(request))
    }

    fn end(&self) -> Result<Option<Request>> {
        let path = self.path.display();
        match &self.device {
            _ if self.returned > 0 => Ok(None),
            Some(device) if !self.devices.is_empty() => Err(invalid(format!(
                "{path} has no request of {device}: it is a trace of another device ({})",
                self.listed()
            ))),
            _ => Err(invalid(format!("{path} has no request: was anything running while it was recorded?"))),
        }
    }

    fn listed(&self) -> String {
        self.devices.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
    }

    fn malformed(&self, line: &[u8]) -> Error {
        let format = match &self.parser {
            Parser::Iolog(_) => "an iolog of fio",
            Parser::Log(_) => "a log of fio with log_offset=1",
            Parser::Blkparse(_) => "the text of blkparse",
        };
        let line = shown(&String::from_utf8_lossy(line));
        invalid(format!(
            "{}, line {}: this is no line of {format}: \"{line}\"",
            self.path.display(),
            self.line
        ))
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// The beginning of a line, printable.
fn shown(line: &str) -> String {
    line.chars().take(60).map(|char| if char.is_control() { '?' } else { char }).collect()
}

/// Refuses what is no text.
fn refuse_binary(path: &Path, head: &[u8]) -> Result<()> {
    const COMPRESSED: [(&[u8], &str); 4] = [
        (b"\x1f\x8b", "gunzip"),
        (b"\x28\xb5\x2f\xfd", "unzstd"),
        (b"\xfd7zXZ", "unxz"),
        (b"BZh", "bunzip2"),
    ];
    let path = path.display();
    if head.is_empty() {
        return Err(invalid(format!("{path} is empty")));
    }
    if let Some((_, program)) = COMPRESSED.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Err(invalid(format!("{path} is compressed: unpack it with {program} first")));
    }
    if matches!(head, [_, b't', b'a', b'e', ..] | [b'e', b'a', b't', _, ..]) && head.contains(&0) {
        return Err(invalid(format!(
            "{path} is a binary trace of blktrace: convert it to text first, with blkparse -i {path} > FILE"
        )));
    }
    if head.contains(&0) {
        return Err(invalid(format!(
            "{path} is no text: a trace is an iolog of fio, or the text of blkparse"
        )));
    }
    Ok(())
}

/// The parser for a file that begins with `head`.
fn recognize(path: &Path, head: &str, format: Format) -> Result<Parser> {
    let first = head.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let fio = || match fio::Iolog::recognize(first) {
        Some(iolog) => Some(Parser::Iolog(iolog)),
        None => fio::Log::recognize(first).then_some(Parser::Log(fio::Log)),
    };
    let blkparse = || blkparse::Blkparse::recognize(head).map(Parser::Blkparse);
    let (found, what) = match format {
        Format::Auto => (
            fio().or_else(blkparse),
            "an iolog of fio (write_iolog), a log of fio with log_offset=1, or the text of blkparse",
        ),
        Format::Fio => (fio(), "an iolog of fio (write_iolog), or a log of fio with log_offset=1"),
        Format::Blkparse => (blkparse(), "the text of blkparse in its default format"),
    };
    found.ok_or_else(|| {
        invalid(format!("{} is not {what}; it begins with \"{}\"", path.display(), shown(first)))
    })
}
