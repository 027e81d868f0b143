//! Shared regions: the parts that several hosts use, each written by one host alone.
//!
//! A shared region has an *area* for each host that it can have, with all tables of that host, and no table that two hosts
//! write. Which host a row, or a group of segments, belongs to is decided by votes: each host has a block of its own for each
//! object, with what it knows to be decided and what it proposes. The decision who has an area is made with the blocks of a
//! table of *claims*, since a host that joins has no area yet.
//!
//! Invariants: no structure here has two writers; each is complete or not there (a checksum over its place and its content).
//!
//! Elsewhere: how hosts decide with these blocks (`cbd-engine`, `agreement`), where they are (`layout`).

use crate::{
    layout::{on_media, table_bytes},
    slot::SlotContent,
};
use zerocopy::little_endian::{U32, U64};

/// Hosts of a shared region, at most.
pub const HOSTS_MAX: u32 = 16;

/// Claims to the area of one host, for each host that a region can have.
const CLAIMS_PER_HOST: u32 = 4;

/// Groups of segments of a shared region, at most.
pub const GROUPS_MAX: u32 = 256;

/// [`Holding::state`]: no host has the object.
pub const HOLDING_FREE: u32 = 0;
/// [`Holding::state`]: a host has the object.
pub const HOLDING_HELD: u32 = 1;
/// [`Holding::state`]: a host had the area, and what it held is being taken from it. It is not the host's any more, and no
/// other host's yet.
pub const HOLDING_CLEARED: u32 = 2;

on_media! {
    /// Who has an object: the value of a decision.
    pub struct Holding, size 32 {
        /// [`HOLDING_FREE`], [`HOLDING_HELD`] or [`HOLDING_CLEARED`].
        0 state: U32,
        /// The host that has it, or that had it last.
        4 host: U32,
        /// The incarnation of the host that proposed this.
        8 incarnation: U64,
        /// For the area of a host: the decision by which this host got it. Later decisions about a host that comes back have the
        /// same number.
        16 granted: U64,
        /// For the area of a host: a number made of its name.
        24 name: U64,
    }
}

on_media! {
    /// What one host knows of the decisions on an object, and proposes as the next one.
    pub struct Vote, size 112 {
        /// The incarnation of the writer.
        0 incarnation: U64,
        /// Number of the last decision that the writer knows; 0 for none.
        8 version: U64,
        /// The number up to which the writer takes part in no smaller ballot on the next decision; 0 for none.
        16 promised: U64,
        /// The ballot in which the writer has accepted `proposal`; 0 for none.
        24 accepted: U64,
        /// The last decision that the writer knows.
        32 decided: Holding,
        /// What the writer has accepted as the next decision.
        64 proposal: Holding,
        /// Zero.
        96 reserved: [u8; 16],
    }
}

on_media! {
    /// A sign of life of a host.
    pub struct HostBeat, size 48 {
        /// The incarnation of the writer; 0 once it has left.
        0 incarnation: U64,
        /// Raised with each sign of life.
        8 beat: U64,
        /// The boot of the writer's machine.
        16 boot: [u8; 16],
        /// The process.
        32 process: U32,
        /// Zero.
        36 reserved: [u8; 12],
    }
}

/// [`AreaHeader::move_state`]: the host that the backend is offered to looks whether it can have it.
pub const MOVE_OFFERED: u32 = 1;
/// [`AreaHeader::move_state`]: hosts with blkdevs on the backend submit no requests, and have none in flight.
pub const MOVE_HOLD: u32 = 2;
/// [`AreaHeader::move_state`]: a move that another host asked for was refused, or has failed.
pub const MOVE_REFUSED: u32 = 3;

/// [`AreaHeader::answer`]: the host asks for the backend.
pub const ANSWER_WANTED: u32 = 1;
/// [`AreaHeader::answer`]: the host can have the backend, and has a row for it.
pub const ANSWER_ACCEPTED: u32 = 2;
/// [`AreaHeader::answer`]: the host has no requests in flight on the backend, and submits none.
pub const ANSWER_HELD: u32 = 3;
/// [`AreaHeader::answer`]: the host has the backend, and serves it.
pub const ANSWER_SERVED: u32 = 4;
/// [`AreaHeader::answer`]: the first of the reasons for which a host refuses a backend.
pub const ANSWER_REFUSED: u32 = 16;

on_media! {
    /// Describes the area of a host, and what the host does to move a backend to another host. It is stored first when the tables in the
    /// area are blank.
    pub struct AreaHeader, size 112 {
        /// [`Holding::granted`] of the host whose tables are in the area.
        0 granted: U64,
        /// Bytes of `name` in use.
        8 name_length: U32,
        /// Row of the backend that the host offers to another one, plus 1; 0 if it offers none.
        12 move_backend: U32,
        /// Name of the host in UTF-8, zero-padded.
        16 name: [u8; 64],
        /// Random number of the move that the host offers, or has refused.
        80 move_number: U64,
        /// The host that the backend is offered to, plus 1.
        88 move_to: U32,
        /// [`MOVE_OFFERED`], [`MOVE_HOLD`] or [`MOVE_REFUSED`]; 0 if the host offers no move.
        92 move_state: U32,
        /// Random number of the move that the host asks for, or answers.
        96 answer_number: U64,
        /// Row of the backend that it is about, plus 1.
        104 answer_backend: U32,
        /// [`ANSWER_WANTED`], [`ANSWER_ACCEPTED`], [`ANSWER_HELD`], [`ANSWER_SERVED`], or a reason to refuse from [`ANSWER_REFUSED`] on; 0 without an answer.
        108 answer: U32,
    }
}

impl SlotContent for Vote {
    const KIND: u32 = 32;
    const SLOT_SIZE: usize = 128;

    fn is_plausible(&self) -> bool {
        let counters = [self.version, self.promised, self.accepted];
        counters.iter().all(|counter| counter.get() < crate::COUNTER_END)
            && self.decided.is_possible()
            && self.proposal.is_possible()
    }
}

impl SlotContent for HostBeat {
    const KIND: u32 = 33;
    const SLOT_SIZE: usize = 64;
}

impl SlotContent for AreaHeader {
    const KIND: u32 = 34;
    const SLOT_SIZE: usize = 128;
}

impl Vote {
    /// The vote of one who has never voted.
    pub const BLANK: Self = Self {
        incarnation: U64::ZERO,
        version: U64::ZERO,
        promised: U64::ZERO,
        accepted: U64::ZERO,
        decided: Holding::NONE,
        proposal: Holding::NONE,
        reserved: [0; 16],
    };
}

impl Holding {
    /// No host has it, and none had it.
    pub const NONE: Self = Self {
        state: U32::ZERO,
        host: U32::ZERO,
        incarnation: U64::ZERO,
        granted: U64::ZERO,
        name: U64::ZERO,
    };

    /// Whether a host has the object.
    #[must_use]
    pub const fn is_held(&self) -> bool {
        self.state.get() == HOLDING_HELD
    }

    /// Whether this host has the object.
    #[must_use]
    pub const fn is_of(&self, host: u32) -> bool {
        self.is_held() && self.host.get() == host
    }

    const fn is_possible(&self) -> bool {
        self.state.get() <= HOLDING_CLEARED && self.host.get() < HOSTS_MAX
    }
}

/// A decision, and its number among those on its object; 0: none was made yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decided {
    /// Its number.
    pub version: u64,
    /// Who has the object.
    pub holding: Holding,
}

/// An object that hosts decide on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Object {
    /// The area of a host.
    Area(u32),
    /// A row of the tables of backends.
    Backend(u32),
    /// A row of the tables of blkdevs.
    Blkdev(u32),
    /// A group of segments.
    Group(u32),
}

/// The place of the parts of a shared region. All follows from the sizes in the superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedLayout {
    /// First byte of the claims.
    pub claims: u64,
    /// First byte of the area of host 0.
    pub areas: u64,
    /// Bytes of an area.
    pub stride: u64,
    /// The host whose tables the layout has.
    pub host: u32,
    /// Hosts that the region can have.
    pub hosts: u32,
    /// Rows of the table of backends.
    pub backends: u32,
    /// Rows of the table of blkdevs.
    pub blkdevs: u32,
    /// Groups of segments.
    pub groups: u32,
    /// Segments of a group; the last one may have fewer.
    pub group_segments: u32,
}

/// The two slots of `row` in a table.
const fn slots<T: SlotContent>(first: u64, rows: u32, row: u32) -> [u64; 2] {
    crate::Layout::slots::<T>(first, rows, row)
}

impl SharedLayout {
    /// Segments of a group in a region of so many.
    #[must_use]
    pub const fn group_segments_of(segments: u32) -> u32 {
        segments.div_ceil(GROUPS_MAX).next_power_of_two()
    }

    /// Claims that can be made to the area of one host.
    #[must_use]
    pub const fn claims_to_one(hosts: u32) -> u32 {
        CLAIMS_PER_HOST * hosts
    }

    /// Bytes of the claims in a region for so many hosts.
    #[must_use]
    pub const fn claims_length(hosts: u32) -> u64 {
        table_bytes::<Vote>(hosts * Self::claims_to_one(hosts))
    }

    /// The places of the parts of a region with so many hosts, rows of backends and blkdevs, and segments. `tables` is the length of the
    /// tables of hosts, backends and blkdevs of one host, `host` the host whose tables the layout has.
    pub(crate) const fn new([hosts, backends, blkdevs, segments]: [u32; 4], tables: u64, host: u32) -> Self {
        let group_segments = Self::group_segments_of(segments);
        let groups = segments.div_ceil(group_segments);
        let mut parts = Self {
            claims: crate::PAGE,
            areas: crate::PAGE + Self::claims_length(hosts),
            stride: 0,
            host,
            hosts,
            backends,
            blkdevs,
            groups,
            group_segments,
        };
        parts.stride = parts.head_length() + tables + table_bytes::<crate::SegmentEntry>(segments);
        parts
    }

    /// Bytes at the beginning of an area before its tables of hosts, backends, blkdevs and segments: sign of life, header and
    /// votes.
    #[must_use]
    pub const fn head_length(&self) -> u64 {
        crate::PAGE + 2 * crate::PAGE + table_bytes::<Vote>(self.objects())
    }

    /// Objects on which hosts vote with the blocks in their areas.
    #[must_use]
    pub const fn objects(&self) -> u32 {
        self.backends + self.blkdevs + self.groups
    }

    /// First byte of the area of a host.
    #[must_use]
    pub const fn area(&self, host: u32) -> u64 {
        self.areas + host as u64 * self.stride
    }

    /// The line with the sign of life of a host.
    #[must_use]
    pub const fn beat(&self, host: u32) -> u64 {
        self.area(host)
    }

    /// The two slots of the header of an area.
    #[must_use]
    pub const fn header(&self, host: u32) -> [u64; 2] {
        slots::<AreaHeader>(self.area(host) + crate::PAGE, 1, 0)
    }

    /// The number of an object among those with blocks in the areas; `None` for an area.
    const fn number(&self, object: Object) -> Option<u32> {
        match object {
            Object::Area(_) => None,
            Object::Backend(row) => Some(row),
            Object::Blkdev(row) => Some(self.backends + row),
            Object::Group(group) => Some(self.backends + self.blkdevs + group),
        }
    }

    /// Number of blocks with which hosts vote on an object.
    #[must_use]
    pub const fn voters(&self, object: Object) -> u32 {
        match object {
            Object::Area(_) => Self::claims_to_one(self.hosts),
            _ => self.hosts,
        }
    }

    /// The two slots of a block on an object: of this claim for the area of a host, of this host for others.
    #[must_use]
    pub const fn vote(&self, object: Object, voter: u32) -> [u64; 2] {
        let claims = Self::claims_to_one(self.hosts);
        match (object, self.number(object)) {
            (Object::Area(host), _) => slots::<Vote>(self.claims, self.hosts * claims, host * claims + voter),
            (_, Some(number)) => slots::<Vote>(self.area(voter) + 3 * crate::PAGE, self.objects(), number),
            (_, None) => [0; 2],
        }
    }

    /// The seed of the checksums of the blocks on an object.
    #[must_use]
    pub const fn place(&self, object: Object, voter: u32) -> u64 {
        let (kind, number) = match object {
            Object::Area(host) => (1, host),
            Object::Backend(row) => (2, row),
            Object::Blkdev(row) => (3, row),
            Object::Group(group) => (4, group),
        };
        kind << 56 | (voter as u64) << 32 | number as u64
    }

    /// The group of a segment.
    #[must_use]
    pub const fn group_of(&self, segment: u32) -> u32 {
        segment / self.group_segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, PAGE};

    fn layout() -> Layout {
        Layout::shared(256 << 20, 1 << 20, HOSTS_MAX, 64, 64).expect("it fits")
    }

    #[test]
    fn no_two_structures_of_a_shared_region_overlap() {
        let whole = layout();
        let shared = whole.shared_parts().expect("it is shared");
        let mut taken: alloc::vec::Vec<(u64, u64)> = alloc::vec![(0, PAGE)];
        let objects = (0..HOSTS_MAX)
            .map(Object::Area)
            .chain((0..shared.backends).map(Object::Backend))
            .chain((0..shared.blkdevs).map(Object::Blkdev))
            .chain((0..shared.groups).map(Object::Group));
        for object in objects {
            for voter in 0..shared.voters(object) {
                let [one, other] = shared.vote(object, voter);
                assert_ne!(one / PAGE, other / PAGE, "copies are in pages of their own");
                taken.extend([(one, 128), (other, 128)]);
            }
        }
        for host in 0..HOSTS_MAX {
            let own = whole.for_host(host).expect("there is such a host");
            taken.push((shared.beat(host), PAGE));
            taken.extend(shared.header(host).map(|at| (at, PAGE)));
            taken.push((own.host_area, own.backend_area - own.host_area));
            taken.push((own.backend_area, own.blkdev_area - own.backend_area));
            taken.push((own.blkdev_area, own.segment_table - own.blkdev_area));
            taken.push((own.segment_table, u64::from(own.segment_count) * 128));
            assert!(
                own.segment_table + u64::from(own.segment_count) * 128 <= shared.area(host) + shared.stride
            );
            assert_eq!(own.segment_area, whole.segment_area, "segments are where they are for all");
        }
        taken.push((whole.segment_area, u64::from(whole.segment_count) << 20));
        taken.push((Layout::second_superblock(whole.region_size), PAGE));
        taken.sort_unstable();
        for pair in taken.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        let last = taken.last().expect("there are some");
        assert_eq!(last.0 + last.1, whole.region_size);
    }

    #[test]
    fn groups_cover_all_segments() {
        for (segments, each) in
            [(1, 1), (9, 1), (256, 1), (257, 2), (512, 2), (513, 4), (4096, 16), (65_537, 512)]
        {
            assert_eq!(SharedLayout::group_segments_of(segments), each, "{segments}");
        }
        let shared = layout().shared_parts().expect("it is shared");
        let last = layout().segment_count - 1;
        assert_eq!(shared.group_of(last) + 1, shared.groups);
        assert!(shared.groups <= GROUPS_MAX);
    }

    #[test]
    fn a_block_counts_only_for_its_object_and_voter() {
        let shared = layout().shared_parts().expect("it is shared");
        let mut seen = alloc::collections::BTreeSet::new();
        for object in [Object::Area(3), Object::Backend(3), Object::Blkdev(3), Object::Group(3)] {
            for voter in 0..2 {
                assert!(seen.insert(shared.place(object, voter)));
            }
        }
    }

    #[test]
    fn a_holding_of_a_host_that_cannot_be_does_not_count() {
        let vote = |host: u32, state: u32| {
            let held = Holding { state: state.into(), host: host.into(), ..Holding::NONE };
            Vote { decided: held, ..Vote::BLANK }.is_plausible()
        };
        assert!(vote(15, 1) && vote(0, 0));
        assert!(!vote(16, 1) && !vote(0, 3));
        // A ballot behind the end of counters would be above all that a host can make.
        let end = crate::COUNTER_END;
        assert!(
            Vote { promised: (end - 1).into(), accepted: (end - 1).into(), ..Vote::BLANK }.is_plausible()
        );
        assert!(!Vote { promised: end.into(), ..Vote::BLANK }.is_plausible());
        assert!(!Vote { accepted: end.into(), ..Vote::BLANK }.is_plausible());
    }
}
