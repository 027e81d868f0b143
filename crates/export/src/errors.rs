//! Conversion of errors of the system.

use cbd_types::{Error, ErrorKind};
use std::io;

/// An error of the system, prefixed with the operation or the object.
#[must_use]
pub fn system_error(what: impl std::fmt::Display, error: &io::Error) -> Error {
    let kind = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => ErrorKind::Permission,
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => ErrorKind::NotFound,
        Some(libc::EBUSY) => ErrorKind::Busy,
        Some(libc::EEXIST) => ErrorKind::AlreadyExists,
        Some(libc::ENOSPC | libc::EMFILE | libc::ENFILE) => ErrorKind::NoSpace,
        _ => ErrorKind::System,
    };
    Error::new(kind, what.to_string()).caused_by(cbd_sys::errors::copy_of(error))
}
