//! Errors in the format of the control socket.

use cbd_types::{ByteRange, Error, ErrorKind};
use serde::{Deserialize, Serialize};

/// An error: a kind for programs, and one line for people.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A stable word; see [`ErrorKind::name`].
    pub kind: String,
    /// The problem, the object, and the user's options.
    pub message: String,
    /// The path of the file or device that it is about, if it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The first byte that it is about, if it is about bytes of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The number of bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
}

/// The body of an answer that is an error.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ErrorAnswer {
    /// The error.
    pub error: ErrorBody,
}

impl From<&Error> for ErrorBody {
    fn from(error: &Error) -> Self {
        Self {
            kind: error.kind().name().to_owned(),
            message: error.line().replace('\n', " "),
            path: error.path().map(str::to_owned),
            offset: error.range().map(|range| range.start),
            length: error.range().map(|range| range.len()),
        }
    }
}

impl From<ErrorBody> for Error {
    fn from(body: ErrorBody) -> Self {
        let mut error = Self::new(kind_of(&body.kind), body.message);
        if let Some(path) = body.path {
            error = error.at_path(path);
        }
        if let (Some(offset), Some(length)) = (body.offset, body.length) {
            error = error.at_range(ByteRange { start: offset, end: offset.saturating_add(length) });
        }
        error
    }
}

/// The kind with this name; an unknown name is [`ErrorKind::System`].
#[must_use]
pub fn kind_of(name: &str) -> ErrorKind {
    ErrorKind::ALL.into_iter().find(|kind| kind.name() == name).unwrap_or(ErrorKind::System)
}
