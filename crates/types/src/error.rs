//! One error type: a small stable kind, the place and what to do in words, and the error beneath.
//!
//! The kind decides what a client sees: [`ErrorKind::errno`] is the one table from kinds to the numbers
//! that NBD, FUSE, virtio and ublk carry. The text is for people: what was wrong, with which object, and
//! what to do about it.

use alloc::{borrow::Cow, boxed::Box, string::String};
use core::fmt;

/// The result of everything here that can fail.
pub type Result<T> = core::result::Result<T, Error>;

/// What went wrong, as a program needs to know it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is malformed or out of its range.
    InvalidArgument,
    /// No such object.
    NotFound,
    /// The object is there already.
    AlreadyExists,
    /// The object is in use: mounted, open, held by another process.
    Busy,
    /// Space is short: in the region, in a table, on a file system.
    NoSpace,
    /// The request reaches past the end of the device.
    OutOfRange,
    /// The object may not be written.
    ReadOnly,
    /// Memory failed, or a checksum says that what it holds is damaged. Nothing was returned.
    Media,
    /// The backing device failed.
    Backing,
    /// Metadata is damaged beyond its copies.
    Damaged,
    /// The bytes are not ours.
    Foreign,
    /// The format, a feature or an operation is not known to this program.
    Unsupported,
    /// Somebody else owns the object now, or it is being stopped.
    Stopped,
    /// The caller may not do this.
    Permission,
    /// It did not happen in the time given.
    TimedOut,
    /// The identity of an object is not what it was: another disk stands where ours stood.
    Exchanged,
    /// The machine crashed while the object was in use, and only some of its pages reached the disk.
    Torn,
    /// The operating system refused, for a reason that is none of the above.
    System,
}

impl ErrorKind {
    /// The Linux errno that a client of an export sees.
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            Self::InvalidArgument => 22,                                      // EINVAL
            Self::NotFound => 2,                                              // ENOENT
            Self::AlreadyExists => 17,                                        // EEXIST
            Self::Busy => 16,                                                 // EBUSY
            Self::NoSpace => 28,                                              // ENOSPC
            Self::OutOfRange => 22,  // EINVAL, as the block layer says
            Self::ReadOnly => 30,    // EROFS
            Self::Unsupported => 95, // EOPNOTSUPP
            Self::Stopped => 108,    // ESHUTDOWN
            Self::Permission => 1,   // EPERM
            Self::TimedOut => 110,   // ETIMEDOUT
            Self::Media | Self::Backing | Self::Damaged => 5, // EIO
            Self::Foreign | Self::Exchanged | Self::Torn | Self::System => 5, // EIO
        }
    }

    /// The stable name used in JSON and in log lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::Busy => "busy",
            Self::NoSpace => "no_space",
            Self::OutOfRange => "out_of_range",
            Self::ReadOnly => "read_only",
            Self::Media => "media",
            Self::Backing => "backing",
            Self::Damaged => "damaged",
            Self::Foreign => "foreign",
            Self::Unsupported => "unsupported",
            Self::Stopped => "stopped",
            Self::Permission => "permission",
            Self::TimedOut => "timed_out",
            Self::Exchanged => "exchanged",
            Self::Torn => "torn",
            Self::System => "system",
        }
    }
}

/// An error: kind, words, and what caused it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: Cow<'static, str>,
    source: Option<Box<Error>>,
}

impl Error {
    /// An error of `kind` that says `text`: what was wrong, with what, and what to do.
    pub fn new(kind: ErrorKind, text: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, text: text.into(), source: None }
    }

    /// The kind; it is that of the deepest cause unless a caller chose another.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The errno that a client sees.
    #[must_use]
    pub const fn errno(&self) -> i32 {
        self.kind.errno()
    }

    /// The same error with what was being done when it happened in front.
    #[must_use]
    pub fn while_doing(self, text: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: self.kind, text: text.into(), source: Some(Box::new(self)) }
    }

    /// All texts from the outermost to the cause, in one line.
    #[must_use]
    pub fn line(&self) -> String {
        alloc::format!("{self}")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)?;
        match &self.source {
            Some(source) => write!(out, ": {source}"),
            None => Ok(()),
        }
    }
}

// The cause is part of the text above, so that one line says all; `source` stays empty on purpose, or
// reporters that walk the chain would print everything twice.
impl core::error::Error for Error {}

/// Puts what was being done in front of an error.
pub trait Context<T> {
    /// The same result; an error says first what was being done.
    fn context(self, text: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context(self, text: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.while_doing(text()))
    }
}
