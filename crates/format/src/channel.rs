//! The channel between a host that uses a block device and the host that serves it: two areas of memory with one writer each.
//!
//! An area has a header in its first two lines, a ring of entries of one line each from its seventh line on, and a data place for each
//! request that can be in flight, from the next page on. The client's area has submissions, the server's completions; the data places
//! are at the same offsets in both, and a request has the same one in both.
//!
//! Between them a server's area has copies of the last two completions, each stored before its line in the ring: where the line of the
//! last one has damage, a later process of the server would take its request for outstanding. A process and its predecessor have other
//! lines for them.
//!
//! The second line of a header is stored first: whoever finds the first one incomplete has the new header in the second.
//!
//! A submission is replaced only once its request is complete. The ring of completions has room for all that can follow the completion
//! of a request whose submission is still there: a later process of the server finds in both rings what is outstanding.
//!
//! Invariants: each structure is one line with a checksum, complete or not there; an entry names both sessions and its number among
//! theirs, so that no entry of another time or place counts.
//!
//! Elsewhere: who stores what and when (`cbd-channel`).

use crate::{LINE, PAGE, Unverified, checksum::crc32c, layout::on_media};
use cbd_types::{BootId, MutationPoint};
use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U16, U32, U64},
};

/// First bytes of the header of a client's area behind its checksum.
pub const CLIENT_MAGIC: u32 = u32::from_le_bytes(*b"CBr2");
/// The same of a server's area.
pub const SERVER_MAGIC: u32 = u32::from_le_bytes(*b"CBs2");

/// [`ServerHeader::state`]: the server executes requests of the client's session.
pub const SERVER_READY: u16 = 1;
/// [`ServerHeader::state`]: it does not, and will not.
pub const SERVER_CLOSED: u16 = 2;

/// Lines of the header at the beginning of an area.
const HEADER_LINES: u64 = 2;
/// Lines behind the header for copies of the last completions: two of each of two processes.
pub const COPY_LINES: u64 = 4;
/// Lines of the ring of submissions for each request that can be in flight: so far can others get ahead of a slow one.
const ENTRIES_PER_PLACE: u64 = 4;

/// Requests in flight on one channel, at most.
pub const PLACES_MAX: u32 = 256;
/// Bytes of a data place, at most.
pub const PLACE_BYTES_MAX: u32 = 1 << 20;

/// Bit of [`ServerHeader::flags`]: the device supports discards.
pub const FLAG_DISCARD: u16 = 1;
/// Bit of [`ServerHeader::flags`]: seeks are expensive.
pub const FLAG_ROTATIONAL: u16 = 2;
/// Bit of [`ServerHeader::flags`]: zeroing a range of any length costs no more than writing one block.
pub const FLAG_FAST_ZEROES: u16 = 4;

/// Bit of [`Submission::flags`]: a FUA request.
pub const FLAG_FUA: u16 = 1;
/// Bit of [`Submission::flags`]: the data is metadata of a file system.
pub const FLAG_METADATA: u16 = 2;

on_media! {
    /// The header of a client's area.
    pub struct ClientHeader, size 64 {
        /// CRC32C over all bytes behind this field.
        0 crc: U32,
        /// [`CLIENT_MAGIC`].
        4 magic: U32,
        /// Random number of the client's session, not 0.
        8 session: U64,
        /// Raised when the client asks to have all completions stored again.
        16 again: U64,
        /// Requests that can be in flight.
        24 places: U32,
        /// Bytes of a data place.
        28 place_bytes: U32,
        /// 1 once the client has ended the session.
        32 is_closed: U32,
        /// Raised when the client asks for the requests of which nothing was done yet.
        36 recalls: U32,
        /// Submissions before it asked.
        40 recalled: U64,
        /// Bit n: the request that had data place n then is given up.
        48 given_up: U64,
        /// Zero.
        56 reserved: [u8; 8],
    }
}

on_media! {
    /// The header of a server's area, with the geometry of the device.
    pub struct ServerHeader, size 64 {
        /// CRC32C over all bytes behind this field.
        0 crc: U32,
        /// [`SERVER_MAGIC`].
        4 magic: U32,
        /// Random number of the server's session, not 0.
        8 session: U64,
        /// The client's session that it serves.
        16 client: U64,
        /// Bytes of the device.
        24 size: U64,
        /// [`SERVER_READY`] or [`SERVER_CLOSED`].
        32 state: U16,
        /// [`FLAG_DISCARD`], [`FLAG_ROTATIONAL`] and [`FLAG_FAST_ZEROES`].
        34 flags: U16,
        /// Bytes of a logical sector.
        36 sector: U32,
        /// Bytes of a physical sector.
        40 physical_sector: U32,
        /// Bytes that are written completely or not at all.
        44 atomic_unit: U32,
        /// Granularity of discards in bytes.
        48 discard_granularity: U32,
        /// Number of the boot of the server's machine ([`boot_number`]); 0 if that is not known.
        52 boot: U32,
        /// The process of the server whose completions count, not 0.
        56 process: U32,
        /// The process that takes over, and stores the kept completions under its own number; else 0. Both count for a later one.
        60 next: U32,
    }
}

on_media! {
    /// A request in the client's ring.
    pub struct Submission, size 64 {
        /// CRC32C over all bytes behind this field.
        0 crc: U32,
        /// CRC32C of the data of a write.
        4 data_crc: U32,
        /// The client's session.
        8 client: U64,
        /// The server's session.
        16 server: U64,
        /// Number among the submissions of these sessions, from 0; its place in the ring is the remainder by its lines.
        24 sequence: U64,
        /// First byte on the device.
        32 offset: U64,
        /// Bytes.
        40 length: U64,
        /// The data place.
        48 place: U32,
        /// 1 read, 2 write, 3 flush, 4 discard, 5 write zeroes.
        52 operation: U16,
        /// [`FLAG_FUA`] and [`FLAG_METADATA`].
        54 flags: U16,
        /// Zero.
        56 reserved: [u8; 8],
    }
}

on_media! {
    /// A completion in the server's ring.
    pub struct ChannelCompletion, size 64 {
        /// CRC32C over all bytes behind this field.
        0 crc: U32,
        /// CRC32C of the data of a read.
        4 data_crc: U32,
        /// The client's session.
        8 client: U64,
        /// The server's session.
        16 server: U64,
        /// Number among the completions of these sessions, from 0; its place in the ring is the remainder by its lines.
        24 sequence: U64,
        /// [`Submission::sequence`] of the request.
        32 request: U64,
        /// 0 for success, or the number of the kind of the error.
        40 status: U32,
        /// The process of the server that has stored the line.
        44 process: U32,
        /// Zero.
        48 reserved: [u8; 16],
    }
}

/// The number of a boot of a machine in a [`ServerHeader`]: the CRC32C of its identifier, 0 if that is not known.
#[must_use]
pub fn boot_number(boot: BootId) -> u32 {
    if boot == BootId::UNKNOWN { 0 } else { crc32c(&boot.0).max(1) }
}

/// A structure of one line with a checksum in its first bytes.
macro_rules! line {
    ($name:ident, $check:expr) => {
        impl $name {
            /// The same with its checksum, as bytes.
            #[must_use]
            pub fn sealed(mut self) -> [u8; LINE as usize] {
                self.crc = U32::new(crc32c(&self.as_bytes()[4..]));
                zerocopy::transmute!(self)
            }

            /// The structure in a line; nothing of it is checked.
            #[must_use]
            pub fn decode(line: &[u8; LINE as usize]) -> Unverified<Self> {
                Unverified::new(
                    Self::read_from_bytes(line).unwrap_or_else(|_| unreachable!("the sizes are equal")),
                )
            }
        }

        impl Unverified<$name> {
            /// The structure, if it is complete.
            #[must_use]
            pub fn verify(&self) -> Option<$name> {
                let check: fn(&$name) -> bool = $check;
                let sum = |found: &$name| crc32c(&found.as_bytes()[4..]);
                let found = self
                    .demand(MutationPoint::ChannelChecksum, |found| found.crc.get() == sum(found))?
                    .accept();
                check(&found).then_some(found)
            }
        }
    };
}

line!(ClientHeader, |found| found.magic.get() == CLIENT_MAGIC
    && found.session.get() != 0
    && ChannelShape::new(found.places.get(), found.place_bytes.get()).is_some());
line!(ServerHeader, |found| found.magic.get() == SERVER_MAGIC
    && found.session.get() != 0
    && found.process.get() != 0);
line!(Submission, |found| found.sequence.get() < crate::COUNTER_END);
line!(ChannelCompletion, |found| found.sequence.get() < crate::COUNTER_END);

/// The shape of both areas of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelShape {
    places: u32,
    place_bytes: u32,
}

impl ChannelShape {
    /// A shape with so many data places of so many bytes, if it is possible.
    #[must_use]
    pub const fn new(places: u32, place_bytes: u32) -> Option<Self> {
        let is_possible = places > 0
            && places <= PLACES_MAX
            && place_bytes > 0
            && place_bytes <= PLACE_BYTES_MAX
            && place_bytes.is_multiple_of(PAGE as u32);
        if is_possible { Some(Self { places, place_bytes }) } else { None }
    }

    /// Requests that can be in flight.
    #[must_use]
    pub const fn places(&self) -> u32 {
        self.places
    }

    /// Bytes of a data place.
    #[must_use]
    pub const fn place_bytes(&self) -> u32 {
        self.place_bytes
    }

    /// Lines of the ring of submissions.
    #[must_use]
    pub const fn entries(&self) -> u64 {
        self.places as u64 * ENTRIES_PER_PLACE
    }

    /// Lines of the ring of completions: those that may follow the completion of a request while its submission is there, are this
    /// number less 1 at most, and one more line may be incomplete.
    #[must_use]
    pub const fn completions(&self) -> u64 {
        self.entries() + self.places as u64
    }

    /// Offset of the line of a submission from the beginning of the client's area.
    #[must_use]
    pub const fn entry(&self, sequence: u64) -> u64 {
        (HEADER_LINES + COPY_LINES + sequence % self.entries()) * LINE
    }

    /// Offset of the line of a completion from the beginning of the server's area.
    #[must_use]
    pub const fn completion(&self, sequence: u64) -> u64 {
        (HEADER_LINES + COPY_LINES + sequence % self.completions()) * LINE
    }

    /// Offset of the copy of a completion, one of the last two of a process, from the beginning of the server's area. Odd processes
    /// follow even ones.
    #[must_use]
    pub const fn copy(process: u32, sequence: u64) -> u64 {
        (HEADER_LINES + process as u64 % 2 * (COPY_LINES / 2) + sequence % (COPY_LINES / 2)) * LINE
    }

    /// Offset of a data place from the beginning of its area.
    #[must_use]
    pub const fn data(&self, place: u32) -> u64 {
        let rings = (HEADER_LINES + COPY_LINES + self.completions()) * LINE;
        rings.next_multiple_of(PAGE) + place as u64 * self.place_bytes as u64
    }

    /// Bytes of an area.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.data(self.places)
    }
}

impl Submission {
    /// The number of a request that has no range and no data, and what all others begin with.
    pub const BLANK: Self = Self {
        crc: U32::ZERO,
        data_crc: U32::ZERO,
        client: U64::ZERO,
        server: U64::ZERO,
        sequence: U64::ZERO,
        offset: U64::ZERO,
        length: U64::ZERO,
        place: U32::ZERO,
        operation: U16::ZERO,
        flags: U16::ZERO,
        reserved: [0; 8],
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_counts_only_with_every_bit() {
        let line = Submission { sequence: U64::new(5), ..Submission::BLANK }.sealed();
        assert!(Submission::decode(&line).verify().is_some());
        for bit in 0..line.len() * 8 {
            let mut other = line;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(Submission::decode(&other).verify().is_none(), "bit {bit}");
        }
        assert!(Submission::decode(&[0; 64]).verify().is_none(), "blank memory is no entry");
    }

    #[test]
    fn the_parts_of_an_area_are_apart() {
        for (places, bytes) in [(1, 4096), (64, 65536), (63, 4096), (PLACES_MAX, PLACE_BYTES_MAX)] {
            let shape = ChannelShape::new(places, bytes).expect("it is possible");
            let places_wide = u64::from(places);
            assert_eq!((shape.entries(), shape.completions()), (4 * places_wide, 5 * places_wide));
            assert_eq!([shape.entry(0), shape.completion(0)], [6 * LINE; 2]);
            let last = shape.completion(shape.completions() - 1);
            assert!(shape.entry(shape.entries() - 1) < last && last + LINE <= shape.data(0));
            assert!(shape.data(0).is_multiple_of(PAGE));
            assert_eq!(shape.entry(shape.entries()), shape.entry(0));
            assert_eq!(shape.completion(shape.completions()), shape.completion(0));
            assert_eq!(shape.bytes(), shape.data(places - 1) + u64::from(bytes));
        }
        for (places, bytes) in
            [(0, 4096), (1, 0), (1, 4095), (PLACES_MAX + 1, 4096), (1, PLACE_BYTES_MAX + 4096)]
        {
            assert_eq!(ChannelShape::new(places, bytes), None);
        }
    }

    #[test]
    fn boots_have_numbers_of_their_own_and_an_unknown_one_has_none() {
        let numbers = [0, 1, 2].map(|byte| boot_number(BootId([byte; 16])));
        assert!(numbers[0] == 0 && numbers[1] != 0 && numbers[2] != 0 && numbers[1] != numbers[2]);
    }

    #[test]
    fn the_last_two_completions_of_two_processes_have_copies() {
        let copies = [(4, 0), (4, 1), (4, 2), (7, 0), (7, 1)];
        let lines = [2, 3, 2, 4, 5].map(|line| line * LINE);
        assert_eq!(copies.map(|(process, number)| ChannelShape::copy(process, number)), lines);
    }

    #[test]
    fn a_header_with_an_impossible_shape_or_no_session_does_not_count() {
        let header = |session: u64, places: u32| ClientHeader {
            crc: U32::ZERO,
            magic: U32::new(CLIENT_MAGIC),
            session: U64::new(session),
            again: U64::ZERO,
            places: U32::new(places),
            place_bytes: U32::new(4096),
            is_closed: U32::ZERO,
            recalls: U32::ZERO,
            recalled: U64::ZERO,
            given_up: U64::ZERO,
            reserved: [0; 8],
        };
        let counts = |header: ClientHeader| ClientHeader::decode(&header.sealed()).verify().is_some();
        assert!(counts(header(1, 4)));
        assert!(!counts(header(0, 4)) && !counts(header(1, 0)) && !counts(header(1, PLACES_MAX + 1)));
        assert!(!counts(ClientHeader { magic: U32::new(SERVER_MAGIC), ..header(1, 4) }));
    }
}
