//! The source of the bytes.
//!
//! Invariants: no read reaches outside the image.

use std::fmt;

/// Bytes of an image that cannot be read: its medium fails there, or it is shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unreadable {
    /// First requested byte.
    pub at: u64,
    /// Requested bytes.
    pub length: u64,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} bytes at byte {} cannot be read", self.length, self.at)
    }
}

/// A cache device, or a copy of one.
pub trait Image {
    /// Bytes.
    fn size(&self) -> u64;

    /// Reads the bytes from `at` on into `into`.
    ///
    /// # Errors
    /// [`Unreadable`] if not all of them are available; the content of `into` is undefined then.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreadable>;
}

impl Image for [u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let failed = Unreadable { at, length: into.len() as u64 };
        let begin = usize::try_from(at).map_err(|_| failed)?;
        let end = begin.checked_add(into.len()).ok_or(failed)?;
        into.copy_from_slice(self.get(begin..end).ok_or(failed)?);
        Ok(())
    }
}

impl<I: Image + ?Sized> Image for &I {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        (**self).read(at, into)
    }
}
