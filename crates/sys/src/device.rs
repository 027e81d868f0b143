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

    /// From the kernel's `huge_encode_dev`, which in its 64 bits has what `new_encode_dev` has in 32.
    #[must_use]
    pub(crate) const fn decode(device: u64) -> Self {
        Self {
            major: ((device >> 8) & 0xfff) as u32,
            minor: ((device & 0xff) | ((device >> 12) & 0xf_ff00)) as u32,
        }
    }

    /// As the kernel's `huge_encode_dev`.
    #[must_use]
    pub(crate) const fn encode(self) -> u64 {
        let (major, minor) = (self.major as u64, self.minor as u64);
        (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_encoding_of_a_number_gives_the_number_again() {
        for major in [0, 1, 7, 253, 259, 0xfff] {
            for minor in [0, 1, 0xff, 0x100, 0x1_2345, 0xf_ffff] {
                let number = DeviceNumber { major, minor };
                assert_eq!(DeviceNumber::decode(number.encode()), number);
                assert_eq!(DeviceNumber::from_stat(libc::makedev(major, minor)), number);
                assert_eq!(DeviceNumber::parse(&number.to_string()), Some(number));
                // Up to these limits the C library encodes as the kernel does.
                assert_eq!(number.encode(), libc::makedev(major, minor));
            }
        }
    }
}
