//! One error type: a small stable kind, a text with the object and the remedy, and the error beneath.
//!
//! The kind determines what a client sees: [`ErrorKind::errno`] is the only table from kinds to the numbers
//! of NBD, FUSE, virtio and ublk. The text is for people: what was wrong, with which object, and what to do
//! about it.

use alloc::{borrow::Cow, boxed::Box, string::String};
use core::fmt;

/// The result of every fallible operation of the project.
pub type Result<T> = core::result::Result<T, Error>;

/// The kind of an error, for programs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is malformed or out of its range.
    InvalidArgument,
    /// No such object.
    NotFound,
    /// The object exists already.
    AlreadyExists,
    /// The object is in use: mounted, open, held by another process.
    Busy,
    /// No space: in the region, in a table, on a file system.
    NoSpace,
    /// The request reaches past the end of the device.
    OutOfRange,
    /// The object is read-only.
    ReadOnly,
    /// Memory failed, or a checksum shows that its content is damaged. Nothing was returned.
    Media,
    /// The backing device failed.
    Backing,
    /// Metadata is damaged beyond its copies.
    Damaged,
    /// The bytes are not of this project's format.
    Foreign,
    /// This program does not support the format, a feature or an operation.
    Unsupported,
    /// Another process or host owns the object now, or it is being stopped.
    Stopped,
    /// The caller lacks the permission.
    Permission,
    /// A timeout.
    TimedOut,
    /// The identity of an object has changed: another disk is at the path of the recorded one.
    Exchanged,
    /// The machine crashed while the object was in use, and only some of its pages reached the disk.
    Torn,
    /// The operating system refused, for another reason.
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

/// An error: kind, text, and cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: Cow<'static, str>,
    source: Option<Box<Error>>,
}

impl Error {
    /// An error of `kind` with `text`: what was wrong, with which object, and what to do about it.
    pub fn new(kind: ErrorKind, text: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, text: text.into(), source: None }
    }

    /// The kind; that of the deepest cause unless a caller chose another one.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The errno that a client sees.
    #[must_use]
    pub const fn errno(&self) -> i32 {
        self.kind.errno()
    }

    /// The same error with the failed operation in front.
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

// The cause is part of the text above, so that one line contains everything; `source` stays empty on purpose,
// otherwise reporters that walk the chain would print everything twice.
impl core::error::Error for Error {}

/// Adds the failed operation to an error.
pub trait Context<T> {
    /// The same result; the text of an error begins with the failed operation.
    fn context(self, text: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context(self, text: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.while_doing(text()))
    }
}
