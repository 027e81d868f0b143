//! The mark that a device carries in the kernel: it identifies the daemon and the device.
//!
//! Invariants: two marks are equal only for the same device of the same daemon, as far as 32 bits of each can
//! distinguish them; the daemon's half is never zero, as it is in a device without a mark.

/// The mark of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Tag(u64);

impl Tag {
    /// The mark of the device with this `identity`, of the daemon with this random number.
    #[must_use]
    pub fn new(daemon: u64, identity: &[u8]) -> Self {
        Self(u64::from(daemon_half(daemon)) << 32 | u64::from(fold(hash(identity))))
    }

    /// The value in the kernel.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }

    /// Whether a device that carries `value` belongs to the daemon.
    #[must_use]
    pub fn is_of(value: u64, daemon: u64) -> bool {
        value >> 32 == u64::from(daemon_half(daemon))
    }
}

fn daemon_half(daemon: u64) -> u32 {
    fold(hash(&daemon.to_le_bytes())).max(1)
}

/// FNV-1a: the same in every version of the daemon, which the standard library's hash need not be.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Combines both halves.
const fn fold(hash: u64) -> u32 {
    (hash ^ hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_identifies_the_daemon_and_the_device() {
        let tag = Tag::new(7, b"one");
        assert_eq!(tag, Tag::new(7, b"one"));
        assert_ne!(tag, Tag::new(7, b"two"));
        assert_ne!(tag, Tag::new(8, b"one"));
        assert!(Tag::is_of(tag.value(), 7) && !Tag::is_of(tag.value(), 8));
    }

    #[test]
    fn a_device_without_a_mark_belongs_to_no_daemon() {
        for daemon in 0..1000 {
            assert!(!Tag::is_of(0, daemon));
        }
    }

    /// A newer version of the daemon must recognize a device of an older one.
    #[test]
    fn marks_are_the_same_in_every_version() {
        assert_eq!(Tag::new(1, b"a").value(), 0x94e7_de8d_2962_30c0);
    }
}
