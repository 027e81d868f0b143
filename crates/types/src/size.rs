//! Sizes in messages.

use core::fmt;

/// A number of bytes, printed in the largest unit of which it is a whole multiple, so that nothing is rounded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 5] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let whole = |&&(_, shift): &&(&str, u32)| self.0 > 0 && self.0.trailing_zeros() >= shift;
        match UNITS.iter().find(whole) {
            Some((unit, shift)) => write!(out, "{} {unit}", self.0 >> shift),
            None => write!(out, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_size_is_shown_in_the_largest_exact_unit() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (512, "512 bytes"),
            (1024, "1 KiB"),
            (1_000_000, "1000000 bytes"),
            (1536 << 10, "1536 KiB"),
            (9 << 20, "9 MiB"),
            (512 << 30, "512 GiB"),
            (1 << 60, "1024 PiB"),
            (u64::MAX, "18446744073709551615 bytes"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
