//! Device numbers.

use std::fmt;

/// The two halves of a device number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceNumber {
    /// The number of the driver.
    pub major: u32,
    /// The number within the driver.
    pub minor: u32,
}

impl DeviceNumber {
    /// From the encoding of `stat`.
    #[must_use]
    pub fn from_stat(number: u64) -> Self {
        Self { major: libc::major(number), minor: libc::minor(number) }
    }

    /// From `major:minor`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.trim().split_once(':')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    /// (major, minor).
    #[must_use]
    pub const fn pair(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}", self.major, self.minor)
    }
}
