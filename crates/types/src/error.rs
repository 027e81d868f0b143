//! One error type: a small stable kind, a text with the object and the remedy, and the underlying error.
//!
//! The kind determines the errno that a client receives: [`ErrorKind::errno`] is the only table from kinds to the
//! numbers of NBD, FUSE, virtio and ublk. The text is for users: it names the fault, the object and the remedy.

use crate::ByteRange;
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
    /// The request extends past the end of the device.
    OutOfRange,
    /// The object is read-only.
    ReadOnly,
    /// Memory failed, or a checksum shows that its content is damaged. No data was returned.
    Media,
    /// The backing device failed.
    Backing,
    /// Metadata is damaged beyond its copies.
    Damaged,
    /// The bytes are not of this project's format.
    Foreign,
    /// This program does not support the format, a feature or an operation.
    Unsupported,
    /// Another process or host owns the object now, or the object is being stopped.
    Stopped,
    /// The caller lacks the permission.
    Permission,
    /// A timeout.
    TimedOut,
    /// The identity of an object has changed: another disk is at the path of the recorded one.
    Exchanged,
    /// The machine crashed while the object was in use, and only some of its pages reached the disk.
    Torn,
    /// The device can be read, but has other content than was expected.
    Mismatch,
    /// The operating system refused, for another reason.
    System,
}

const _: () = {
    let mut place = 0;
    while place < ErrorKind::ALL.len() {
        assert!(ErrorKind::ALL[place] as usize == place, "the list has the order of the declaration");
        place += 1;
    }
    assert!(ErrorKind::System as usize + 1 == ErrorKind::ALL.len(), "the list has all kinds");
};

impl ErrorKind {
    /// All of them, in the order of their declaration. A new kind is added at the end: hosts send each other the place in this list.
    pub const ALL: [Self; 19] = [
        Self::InvalidArgument,
        Self::NotFound,
        Self::AlreadyExists,
        Self::Busy,
        Self::NoSpace,
        Self::OutOfRange,
        Self::ReadOnly,
        Self::Media,
        Self::Backing,
        Self::Damaged,
        Self::Foreign,
        Self::Unsupported,
        Self::Stopped,
        Self::Permission,
        Self::TimedOut,
        Self::Exchanged,
        Self::Torn,
        Self::Mismatch,
        Self::System,
    ];

    /// The Linux errno that a client of an export receives.
    #[must_use]
    pub const fn errno(self) -> i32 {
        match self {
            Self::InvalidArgument => 22,                      // EINVAL
            Self::NotFound => 2,                              // ENOENT
            Self::AlreadyExists => 17,                        // EEXIST
            Self::Busy => 16,                                 // EBUSY
            Self::NoSpace => 28,                              // ENOSPC
            Self::OutOfRange => 22,                           // EINVAL, as the block layer says
            Self::ReadOnly => 30,                             // EROFS
            Self::Unsupported => 95,                          // EOPNOTSUPP
            Self::Stopped => 108,                             // ESHUTDOWN
            Self::Permission => 1,                            // EPERM
            Self::TimedOut => 110,                            // ETIMEDOUT
            Self::Media | Self::Backing | Self::Damaged => 5, // EIO
            Self::Foreign | Self::Exchanged | Self::Torn | Self::Mismatch | Self::System => 5, // EIO
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
            Self::Mismatch => "mismatch",
            Self::System => "system",
        }
    }
}

/// An error: kind, text, path and bytes concerned, and cause.
///
/// `{}` and [`line`](Self::line) print its text and those of its causes, so that every log line and message is
/// complete. `{:#}` prints only its own text, for a reporter that follows the causes through
/// [`source`](core::error::Error::source).
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    text: Cow<'static, str>,
    /// Boxed and optional: most errors have no details.
    details: Option<Box<Details>>,
}

/// The fields of an error besides its kind and text.
#[derive(Default, Debug)]
struct Details {
    path: Option<String>,
    range: Option<ByteRange>,
    source: Option<Box<dyn core::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` with `text`, which names the fault, the object and the remedy.
    pub fn new(kind: ErrorKind, text: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, text: text.into(), details: None }
    }

    /// The same error with its cause, which is printed after the text.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn core::error::Error + Send + Sync>>) -> Self {
        self.details.get_or_insert_default().source = Some(source.into());
        self
    }

    /// The same error with the path of the file or device concerned.
    #[must_use]
    pub fn at_path(mut self, path: impl Into<String>) -> Self {
        self.details.get_or_insert_default().path = Some(path.into());
        self
    }

    /// The same error with the bytes concerned.
    #[must_use]
    pub fn at_range(mut self, range: ByteRange) -> Self {
        self.details.get_or_insert_default().range = Some(range);
        self
    }

    /// The kind: that of the deepest cause, unless a caller has set another one.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The errno that a client receives.
    #[must_use]
    pub const fn errno(&self) -> i32 {
        self.kind.errno()
    }

    /// The path of the file or device concerned: that of this error, or of its nearest cause with a path.
    #[must_use]
    pub fn path(&self) -> Option<&str> {
        self.find(|details| details.path.as_deref())
    }

    /// The bytes concerned: those of this error, or of its nearest cause with a range.
    #[must_use]
    pub fn range(&self) -> Option<ByteRange> {
        self.find(|details| details.range)
    }

    /// The first value that `get` returns for the details of this error or of its causes, in this order.
    fn find<'a, T>(&'a self, get: impl Fn(&'a Details) -> Option<T>) -> Option<T> {
        let mut next = Some(self);
        while let Some(error) = next {
            let details = error.details.as_deref()?;
            if let Some(found) = get(details) {
                return Some(found);
            }
            next = details.source.as_deref().and_then(|source| source.downcast_ref::<Self>());
        }
        None
    }

    /// The same error, prefixed with the failed operation.
    #[must_use]
    pub fn while_doing(self, text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(self.kind, text).caused_by(self)
    }

    /// All texts from the outermost error to the deepest cause, in one line.
    #[must_use]
    pub fn line(&self) -> String {
        alloc::format!("{self}")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)?;
        match core::error::Error::source(self) {
            Some(source) if !out.alternate() => write!(out, ": {source}"),
            _ => Ok(()),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        let source: &(dyn core::error::Error + 'static) = self.details.as_deref()?.source.as_deref()?;
        Some(source)
    }
}

/// Adds the failed operation to an error.
pub trait Context<T> {
    /// The same result; the text of an error is prefixed with the failed operation.
    fn context(self, text: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context(self, text: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.while_doing(text()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::error::Error as _;

    fn opened() -> Error {
        let refused = Error::new(ErrorKind::Permission, "permission denied");
        let failed =
            Error::new(ErrorKind::System, "cannot open /dev/sdb").caused_by(refused).at_path("/dev/sdb");
        failed.while_doing("backend 0")
    }

    #[test]
    fn the_text_is_that_of_the_error_and_the_line_that_of_its_causes_too() {
        assert_eq!(alloc::format!("{:#}", opened()), "backend 0");
        assert_eq!(opened().line(), "backend 0: cannot open /dev/sdb: permission denied");
    }

    #[test]
    fn causes_are_found_through_source() {
        let error = opened();
        let mut texts = alloc::vec::Vec::new();
        let mut next = error.source();
        while let Some(cause) = next {
            texts.push(alloc::format!("{cause:#}"));
            next = cause.source();
        }
        assert_eq!(texts, ["cannot open /dev/sdb", "permission denied"]);
    }

    #[test]
    fn the_path_and_the_kind_of_a_cause_stay_known() {
        assert_eq!(opened().path(), Some("/dev/sdb"));
        assert_eq!((opened().kind(), opened().range()), (ErrorKind::System, None));
        let error =
            Error::new(ErrorKind::Media, "damaged").at_range(ByteRange::at(512, 512)).while_doing("a read");
        assert_eq!(error.range(), Some(ByteRange::at(512, 512)));
    }
}
