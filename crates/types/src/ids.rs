//! Newtypes for numbers that could be confused with each other, and the text form of a UUID.

use alloc::{format, string::String};
use core::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, out)
            }
        }

        impl $name {
            /// The number after this one.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }

            /// The number as an index into a table.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

number!(
    /// A machine, or a process acting as one, registered on a transport: its row in the host table.
    HostId(u32)
);
number!(
    /// A backing device attached to a transport: its row in the backend table.
    BackendId(u32)
);
number!(
    /// A block device that clients use: its row in the blkdev table.
    BlkdevId(u32)
);
number!(
    /// A segment of a transport, counted from the first byte of the segment area.
    SegmentId(u32)
);
number!(
    /// A lane of a cache.
    LaneId(u32)
);
number!(
    /// The position of a segment in the history of its lane: contiguous from tail to head, never reused.
    Ordinal(u64)
);
number!(
    /// The position of a record in the history of its lane: contiguous, reused only after a truncation of the log.
    Sequence(u64)
);
number!(
    /// The writes between two flushes.
    Epoch(u64)
);

/// A boot of a machine, as the kernel's random identifier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BootId(pub [u8; 16]);

impl BootId {
    /// The boot is not known.
    pub const UNKNOWN: Self = Self([0; 16]);

    /// Whether both are the same known boot.
    #[must_use]
    pub fn is_same_known(self, other: Self) -> bool {
        self == other && self != Self::UNKNOWN
    }

    /// The boot with this UUID in text form.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits: alloc::vec::Vec<u8> = text.trim().bytes().filter(|byte| *byte != b'-').collect();
        let mut id = [0; 16];
        if digits.len() != 2 * id.len() || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
            *byte = u8::from_str_radix(core::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(id))
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&uuid_text(self.0))
    }
}

/// A UUID in its usual text form.
#[must_use]
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_has_its_usual_form() {
        let bytes: [u8; 16] = core::array::from_fn(|index| index as u8);
        assert_eq!(uuid_text(bytes), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn a_boot_identifier_is_parsed_from_the_kernels_text() {
        let boot = BootId::parse("00010203-0405-0607-0809-0a0b0c0d0e0f\n").expect("well formed");
        assert_eq!(boot, BootId(core::array::from_fn(|index| index as u8)));
        assert_eq!(BootId::parse(&format!("{boot}")), Some(boot));
        assert!(boot.is_same_known(boot) && !BootId::UNKNOWN.is_same_known(BootId::UNKNOWN));
        for text in
            ["", "00010203", "zz010203-0405-0607-0809-0a0b0c0d0e0f", "+0010203-0405-0607-0809-0a0b0c0d0e0f0"]
        {
            assert_eq!(BootId::parse(text), None, "{text}");
        }
    }
}
