//! Reads a target's parameters from bytes: any bytes give a parameter.
//!
//! Invariants: no function panics, and missing bytes read as zeroes, so each prefix of an input is an input.

/// The bytes that were not read yet.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Whether no bytes are left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Up to `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (front, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        front
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let front = self.bytes(N);
        array[..front.len()].copy_from_slice(front);
        array
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes, little-endian.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes, little-endian.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes, little-endian.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }
}

/// A 64-bit number at which code that counts, adds or compares is likely to fail.
#[must_use]
pub const fn corner(choice: u8) -> u64 {
    const CORNERS: [u64; 16] = [
        0,
        1,
        2,
        u64::MAX,
        u64::MAX - 1,
        u64::MAX / 2,
        u64::MAX / 2 + 1,
        u32::MAX as u64,
        u32::MAX as u64 + 1,
        cbd_format::COUNTER_END,
        cbd_format::COUNTER_END - 1,
        cbd_format::COUNTER_END - 2,
        4096,
        1 << 20,
        64 << 10,
        u16::MAX as u64,
    ];
    CORNERS[choice as usize % CORNERS.len()]
}
