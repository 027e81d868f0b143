//! The owner note: which host has the region, in the first page behind the superblock.
//!
//! Invariants: one host at a time writes the note, and a note that is not valid stands for none. The first line alone decides; the
//! second line is informative.
//!
//! Elsewhere: the steps by which a host looks at the note, announces itself and renews the note (`cbd-engine`).

use crate::{Unverified, checksum::crc32c, layout::on_media};
use alloc::{borrow::ToOwned, string::String};
use cbd_types::{BootId, MutationPoint};
use zerocopy::{FromBytes, IntoBytes, little_endian::U32, little_endian::U64};

/// First bytes of a note: "CBDowner".
pub const OWNER_MAGIC: u64 = u64::from_le_bytes(*b"CBDowner");

/// First byte of the note in the region.
pub const OWNER_AT: u64 = 2048;

/// The host has the region.
pub const STATE_HELD: u32 = 1;
/// The host has closed the region.
pub const STATE_RELEASED: u32 = 2;

/// Bytes of the line that decides.
const LINE: usize = crate::LINE as usize;

on_media! {
    /// The host that has a region, or had it last. Its first line is stored with every renewal.
    pub struct OwnerNote, size 128 {
        /// [`OWNER_MAGIC`].
        0 magic: U64,
        /// CRC32C over the bytes of the first line behind this field, without a seed.
        8 crc: U32,
        /// [`STATE_HELD`] or [`STATE_RELEASED`].
        12 state: U32,
        /// The boot of the host's machine.
        16 boot: [u8; 16],
        /// Random for each open.
        32 incarnation: U64,
        /// Raised by one with every renewal.
        40 beat: U64,
        /// The host's process, on its machine.
        48 process: U32,
        /// Bytes of `name` in use.
        52 name_length: U32,
        /// Zero.
        56 reserved: [u8; 8],
        /// Name of the host, UTF-8, zero-padded; for information, and under no checksum.
        64 name: [u8; 64],
    }
}

impl OwnerNote {
    /// The first note of a host that opens a region. A name that does not fit is left out.
    #[must_use]
    pub fn new(boot: BootId, incarnation: u64, process: u32, name: &str) -> Self {
        let mut field = [0; 64];
        let length = match field.get_mut(..name.len()) {
            Some(into) => {
                into.copy_from_slice(name.as_bytes());
                name.len() as u32
            }
            None => 0,
        };
        Self {
            magic: U64::new(OWNER_MAGIC),
            crc: U32::ZERO,
            state: U32::new(STATE_HELD),
            boot: boot.0,
            incarnation: U64::new(incarnation),
            beat: U64::ZERO,
            process: U32::new(process),
            name_length: U32::new(length),
            reserved: [0; 8],
            name: field,
        }
        .sealed()
    }

    /// The next note of the same host.
    #[must_use]
    pub fn renewed(mut self) -> Self {
        self.beat = U64::new(self.beat.get().wrapping_add(1));
        self.sealed()
    }

    /// The note of the same host when it has closed the region.
    #[must_use]
    pub fn released(mut self) -> Self {
        self.state = U32::new(STATE_RELEASED);
        self.renewed()
    }

    fn sealed(mut self) -> Self {
        self.crc = U32::new(self.sum());
        self
    }

    /// The line that decides.
    #[must_use]
    pub fn first_line(&self) -> [u8; LINE] {
        let mut line = [0; LINE];
        line.copy_from_slice(&self.as_bytes()[..LINE]);
        line
    }

    /// The structure at the beginning of `bytes`; `None` if there are too few.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Unverified<Self>> {
        Some(Unverified::new(Self::read_from_prefix(bytes).ok()?.0))
    }

    /// Whether the host has the region.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.state.get() == STATE_HELD
    }

    /// Whether both are of the same open of the region.
    #[must_use]
    pub fn is_of_same_open(&self, other: &Self) -> bool {
        self.incarnation == other.incarnation && self.boot == other.boot
    }

    /// The name of the host, if it is one: the line with it has no checksum.
    #[must_use]
    pub fn host_name(&self) -> Option<String> {
        let bytes = self.name.get(..self.name_length.get() as usize).filter(|bytes| !bytes.is_empty())?;
        let is_printable = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_".contains(byte);
        let text = core::str::from_utf8(bytes).ok().filter(|_| bytes.iter().all(is_printable))?;
        Some(text.to_owned())
    }

    fn sum(&self) -> u32 {
        crc32c(&self.as_bytes()[12..LINE])
    }
}

impl Unverified<OwnerNote> {
    /// Whether the bytes begin as a note does; nothing else is checked.
    #[must_use]
    pub fn begins_as_one(&self) -> bool {
        self.claim(|note| note.magic.get() == OWNER_MAGIC)
    }

    /// The note, if its first line is valid.
    #[must_use]
    pub fn verify(&self) -> Option<OwnerNote> {
        let note = self
            .demand(MutationPoint::OwnerMagic, |note| note.magic.get() == OWNER_MAGIC)?
            .demand(MutationPoint::OwnerChecksum, |note| note.crc.get() == note.sum())?
            .accept();
        matches!(note.state.get(), STATE_HELD | STATE_RELEASED).then_some(note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> OwnerNote {
        OwnerNote::new(BootId([7; 16]), 5, 42, "node-a")
    }

    fn verify(bytes: &[u8]) -> Option<OwnerNote> {
        OwnerNote::decode(bytes)?.verify()
    }

    #[test]
    fn a_note_reads_back() {
        let read = verify(note().as_bytes()).expect("it is valid");
        assert_eq!(read, note());
        assert!(read.is_held() && read.host_name().as_deref() == Some("node-a"));
        assert_eq!(read.crc.get(), crc32c(&note().as_bytes()[12..64]));
    }

    #[test]
    fn each_renewal_changes_the_first_line_and_the_release_is_one() {
        let (renewed, released) = (note().renewed(), note().released());
        for later in [renewed, released] {
            assert_ne!(later.first_line(), note().first_line());
            assert!(verify(later.as_bytes()) == Some(later) && later.is_of_same_open(&note()));
        }
        assert!(renewed.is_held() && !released.is_held());
        let last = OwnerNote { beat: U64::new(u64::MAX), ..note() }.renewed();
        assert_eq!(verify(last.as_bytes()).map(|last| last.beat.get()), Some(0));
    }

    #[test]
    fn another_open_has_another_incarnation_or_another_boot() {
        let other = OwnerNote::new(BootId([7; 16]), 6, 42, "node-a");
        let rebooted = OwnerNote::new(BootId([8; 16]), 5, 42, "node-a");
        assert!(!note().is_of_same_open(&other) && !note().is_of_same_open(&rebooted));
    }

    #[test]
    fn every_single_bit_of_the_first_line_counts_and_none_of_the_second() {
        for bit in 0..size_of::<OwnerNote>() * 8 {
            let mut bytes = note().as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(verify(&bytes).is_none(), bit < LINE * 8, "bit {bit}");
        }
        assert_eq!(verify(&[0; 128]), None);
        assert!(OwnerNote::decode(&[0; 127]).is_none());
        let unknown = OwnerNote { state: U32::new(3), ..note() }.sealed();
        assert_eq!(verify(unknown.as_bytes()), None);
    }

    #[test]
    fn only_a_name_of_a_host_is_shown() {
        let with = |name: &[u8], length: u32| {
            let mut note = OwnerNote { name_length: U32::new(length), ..note() }.sealed();
            note.name = [0; 64];
            note.name[..name.len()].copy_from_slice(name);
            verify(note.as_bytes()).expect("the name is under no checksum").host_name()
        };
        assert_eq!(with(b"rack-3.node_7", 13).as_deref(), Some("rack-3.node_7"));
        for (name, length) in
            [(&b"a\nb"[..], 3), (b"", 0), (b"a", 2), (b"a", 65), (b"a", u32::MAX), (b"\xff", 1), (b"a b", 3)]
        {
            assert_eq!(with(name, length), None, "{name:?} {length}");
        }
        assert_eq!(OwnerNote::new(BootId::UNKNOWN, 1, 1, &"x".repeat(65)).host_name(), None);
    }
}
