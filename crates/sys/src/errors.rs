//! Errors of the system.

use std::io;

/// A copy of an error, to be kept as the cause of another one.
#[must_use]
pub fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(number) => io::Error::from_raw_os_error(number),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_number_the_kind_and_the_text() {
        for error in [io::Error::from_raw_os_error(libc::ENOENT), io::Error::other("the disk is gone")] {
            let copy = copy_of(&error);
            assert_eq!((copy.raw_os_error(), copy.kind()), (error.raw_os_error(), error.kind()));
            assert_eq!(copy.to_string(), error.to_string());
        }
    }
}
