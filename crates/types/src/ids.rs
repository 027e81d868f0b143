//! Newtypes for numbers that could be mixed up.

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
    /// A backing device brought onto a transport: its row in the backend table.
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
    /// The place of a segment in the history of its lane: contiguous from tail to head, never reused.
    Ordinal(u64)
);
number!(
    /// The place of a record in the history of its lane: contiguous, never reused but after a cut.
    Sequence(u64)
);
number!(
    /// The writes between two flushes.
    Epoch(u64)
);
