//! Converts system errors to the project's errors.
//!
//! Invariants: the errno alone determines the kind, in one function.

use cbd_types::{Error, ErrorKind};
use std::io;

/// Converts `error`; `text` names the failed operation and its object.
pub(crate) fn from_io(error: &io::Error, text: impl core::fmt::Display) -> Error {
    let kind = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENXIO | libc::ENODEV) => ErrorKind::NotFound,
        Some(libc::EACCES | libc::EPERM) => ErrorKind::Permission,
        Some(libc::EROFS) => ErrorKind::ReadOnly,
        Some(libc::EEXIST) => ErrorKind::AlreadyExists,
        Some(libc::ENOSPC | libc::EDQUOT | libc::ENOMEM | libc::EFBIG) => ErrorKind::NoSpace,
        Some(libc::EBUSY | libc::ETXTBSY) => ErrorKind::Busy,
        Some(libc::EINVAL | libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG) => ErrorKind::InvalidArgument,
        Some(libc::EOPNOTSUPP) => ErrorKind::Unsupported,
        _ => ErrorKind::System,
    };
    Error::new(kind, text.to_string()).caused_by(cbd_sys::errors::copy_of(error))
}
