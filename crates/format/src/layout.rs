//! The layout of a region, and the description of structures that is compared with the format page.
//!
//! A region that has grown has its new segments behind its former end, with a segment table of their own: a part of the region
//! for each growth. Segment numbers continue through the parts.
//!
//! Invariants: nothing of a layout changes when it grows, but the number of segments and the offset of the second superblock.

use crate::{
    PAGE, SegmentShape,
    shared::{HOSTS_MAX, SharedLayout},
    slot::SlotContent,
    tables,
};
use alloc::{format, vec::Vec};
use cbd_types::{Error, ErrorKind, Result, SegmentId, Size};

/// One field of a structure on media.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name, as in the code.
    pub name: &'static str,
    /// First byte within the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// A structure on media.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructLayout {
    /// Name, as in the code.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// All fields; they cover every byte.
    pub fields: Vec<Field>,
}

/// Defines a structure on media: little-endian fields at stated offsets, checked at compile time.
macro_rules! on_media {
    (
        $(#[$meta:meta])*
        pub struct $name:ident, size $size:literal {
            $( $(#[$field_meta:meta])* $offset:literal $field:ident: $type:ty, )+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout, zerocopy::Unaligned)]
        #[repr(C)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $type, )+
        }

        const _: () = {
            assert!(size_of::<$name>() == $size, "size on media");
            $(
                assert!(core::mem::offset_of!($name, $field) == $offset, "offset on media");
                // Fields of up to 8 bytes are aligned to their own size; arrays of bytes need not be.
                assert!(size_of::<$type>() > 8 || !size_of::<$type>().is_power_of_two() || $offset % size_of::<$type>() == 0, "natural alignment");
            )+
        };

        impl $name {
            /// Name, size and fields, for the format page.
            #[must_use]
            pub fn layout() -> $crate::StructLayout {
                $crate::StructLayout {
                    name: stringify!($name),
                    size: $size,
                    fields: alloc::vec![ $( $crate::layout::Field {
                        name: stringify!($field),
                        offset: $offset,
                        size: size_of::<$type>(),
                    }, )+ ],
                }
            }
        }
    };
}
pub(crate) use on_media;

/// The smallest segment size of the format, in bytes.
pub const SEGMENT_SIZE_MIN: u64 = 64 << 10;
/// The largest segment size of the format, in bytes.
pub const SEGMENT_SIZE_MAX: u64 = 64 << 20;
/// Most rows of a host, backend or blkdev table.
pub const TABLE_ROWS_MAX: u32 = 4096;
/// How often a region can grow.
pub const GROWTHS_MAX: usize = 7;
/// The segment area begins at a multiple of this.
const SEGMENT_AREA_ALIGNMENT: u64 = 64 << 10;
/// [`Layout::shared_host`] of a region of one host.
const NOT_SHARED: u32 = u32::MAX;
/// Most segments of a region: the others have no number.
const SEGMENTS_MAX: u32 = u32::MAX - 1;

/// What a region got when it grew: a segment table, and segments.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Growth {
    /// Size of the region before, and first byte of the segment table; 0 if the region has not grown so often.
    from: u64,
    /// Number of the first segment.
    first: u32,
    /// Number of segments.
    segments: u32,
}

/// Consecutive segments of a region and the table that has their rows: those of its first size, or of a growth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Number of the first segment.
    pub first: u32,
    /// Number of segments.
    pub segments: u32,
    /// First byte of the segment table.
    pub segment_table: u64,
    /// First byte of the first segment.
    pub segment_area: u64,
}

impl Extent {
    /// The number behind that of the last segment.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.first + self.segments
    }

    /// Bytes from the beginning of the segment table to the first segment.
    #[must_use]
    pub const fn table_length(&self) -> u64 {
        self.segment_area - self.segment_table
    }
}

/// The layout of a region. It is computed from five numbers and the sizes before each growth, so a superblock with other offsets
/// is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of the region that are used: whole pages.
    pub region_size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Number of segments, in all extents.
    pub segment_count: u32,
    /// Rows of the host table.
    pub host_rows: u32,
    /// Rows of the backend table.
    pub backend_rows: u32,
    /// Rows of the blkdev table.
    pub blkdev_rows: u32,
    /// First byte of the host table.
    pub host_area: u64,
    /// First byte of the backend table.
    pub backend_area: u64,
    /// First byte of the blkdev table.
    pub blkdev_area: u64,
    /// First byte of the segment table of the first extent.
    pub segment_table: u64,
    /// First byte of segment 0.
    pub segment_area: u64,
    growths: [Growth; GROWTHS_MAX],
    /// The host of a shared region whose tables these are; [`NOT_SHARED`] for a region of one host.
    shared_host: u32,
}

impl Layout {
    /// The layout of a region of `region_size` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a segment size or row count that the format does not allow, and
    /// [`ErrorKind::NoSpace`] for a region that is too small for one cache.
    pub fn new(
        region_size: u64,
        segment_size: u64,
        host_rows: u32,
        backend_rows: u32,
        blkdev_rows: u32,
    ) -> Result<Self> {
        if !segment_size.is_power_of_two() || !(SEGMENT_SIZE_MIN..=SEGMENT_SIZE_MAX).contains(&segment_size) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a segment size of {} is no power of two from 64 KiB to 64 MiB", Size(segment_size)),
            ));
        }
        for rows in [host_rows, backend_rows, blkdev_rows] {
            if rows == 0 || rows > TABLE_ROWS_MAX {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("a table of {rows} rows: 1 to {TABLE_ROWS_MAX} are possible"),
                ));
            }
        }
        let region_size = region_size / PAGE * PAGE;
        let host_area = PAGE;
        let backend_area = host_area + table_bytes::<tables::HostEntry>(host_rows);
        let blkdev_area = backend_area + table_bytes::<tables::BackendEntry>(backend_rows);
        let segment_table = blkdev_area + table_bytes::<tables::BlkdevEntry>(blkdev_rows);
        let too_small = || {
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a region of {} is too small for one segment of {}",
                    Size(region_size),
                    Size(segment_size)
                ),
            )
        };
        let segment_count =
            segments_between(segment_table, region_size, segment_size, SEGMENTS_MAX).ok_or_else(too_small)?;
        Ok(Self {
            region_size,
            segment_size,
            segment_count,
            host_rows,
            backend_rows,
            blkdev_rows,
            host_area,
            backend_area,
            blkdev_area,
            segment_table,
            segment_area: segment_area(segment_table, segment_count),
            growths: [Growth::default(); GROWTHS_MAX],
            shared_host: NOT_SHARED,
        })
    }

    /// The layout of a shared region of `region_size` bytes for `hosts` hosts, with the tables of host 0.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for more hosts than [`HOSTS_MAX`].
    pub fn shared(
        region_size: u64,
        segment_size: u64,
        hosts: u32,
        backend_rows: u32,
        blkdev_rows: u32,
    ) -> Result<Self> {
        if hosts > HOSTS_MAX {
            let text = format!("{hosts} hosts: a region can be shared by at most {HOSTS_MAX}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        // What does not depend on the areas of the hosts.
        let plain = Self::new(region_size, segment_size, hosts, backend_rows, blkdev_rows)?;
        let tables = plain.segment_table - plain.host_area;
        let parts =
            |segments: u32| SharedLayout::new([hosts, backend_rows, blkdev_rows, segments], tables, 0);
        let area_of = |segments: u32| parts(segments).area(hosts).next_multiple_of(SEGMENT_AREA_ALIGNMENT);
        let fits = |segments: u32| {
            area_of(segments) + u64::from(segments) * segment_size + PAGE <= plain.region_size
        };
        // Fewer segments have smaller tables: the largest number that fits.
        let (mut least, mut most) = (0, plain.segment_count);
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if fits(middle) { least = middle } else { most = middle - 1 }
        }
        if least == 0 {
            let (region, areas) = (Size(plain.region_size), Size(area_of(1)));
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a region of {region} is too small to be shared: the tables of {hosts} hosts take {areas}"
                ),
            ));
        }
        let shared = parts(least);
        let first = shared.area(0) + shared.head_length() - plain.host_area;
        Ok(Self {
            segment_count: least,
            host_area: plain.host_area + first,
            backend_area: plain.backend_area + first,
            blkdev_area: plain.blkdev_area + first,
            segment_table: plain.segment_table + first,
            segment_area: area_of(least),
            shared_host: 0,
            ..plain
        })
    }

    /// Where the parts of a shared region are; `None` for one that is not shared.
    #[must_use]
    pub const fn shared_parts(&self) -> Option<SharedLayout> {
        if self.shared_host == NOT_SHARED {
            return None;
        }
        let rows = [self.host_rows, self.backend_rows, self.blkdev_rows, self.segment_count];
        Some(SharedLayout::new(rows, self.segment_table - self.host_area, self.shared_host))
    }

    /// The layout of a shared region with the tables of this host; `None` if the region is not shared or has no such host.
    #[must_use]
    pub fn for_host(&self, host: u32) -> Option<Self> {
        let shared = self.shared_parts().filter(|shared| host < shared.hosts)?;
        let moved = |at: u64| at - shared.area(shared.host) + shared.area(host);
        Some(Self {
            host_area: moved(self.host_area),
            backend_area: moved(self.backend_area),
            blkdev_area: moved(self.blkdev_area),
            segment_table: moved(self.segment_table),
            shared_host: host,
            ..*self
        })
    }

    /// The layout after the region has grown to `region_size` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a size that is not larger, or that no file has, [`ErrorKind::NoSpace`] for one that has no room for one more
    /// segment, and [`ErrorKind::Unsupported`] for a region that has grown [`GROWTHS_MAX`] times.
    pub fn grown_to(&self, region_size: u64) -> Result<Self> {
        if self.shared_host != NOT_SHARED {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a region that is shared by several hosts cannot grow: format a larger one, and move the backends to it",
            ));
        }
        let region_size = region_size / PAGE * PAGE;
        if region_size <= self.region_size || region_size > i64::MAX as u64 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "the region has {}, and cannot grow to {}",
                    Size(self.region_size),
                    Size(region_size)
                ),
            ));
        }
        let mut grown = *self;
        let Some(next) = grown.growths.iter_mut().find(|growth| growth.from == 0) else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the region has grown {GROWTHS_MAX} times, and cannot grow again: format a larger region, and move the backends to it"
                ),
            ));
        };
        let from = self.region_size;
        let limit = SEGMENTS_MAX - self.segment_count;
        let Some(segments) = segments_between(from, region_size, self.segment_size, limit) else {
            let least = segment_area(from, 1) + self.segment_size + PAGE;
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a region of {} that grows to {} has no room for one more segment: it grows to {} at least",
                    Size(from),
                    Size(region_size),
                    Size(least)
                ),
            ));
        };
        *next = Growth { from, first: self.segment_count, segments };
        grown.segment_count += segments;
        grown.region_size = region_size;
        Ok(grown)
    }

    /// The sizes of the region before each growth, in their order.
    pub fn grown_from(&self) -> impl DoubleEndedIterator<Item = u64> + '_ {
        self.growths.iter().map(|growth| growth.from).filter(|from| *from != 0)
    }

    /// The extents: that of the first size, then that of each growth.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        let first = Extent {
            first: 0,
            segments: self.growths[0].first_or(self.segment_count),
            segment_table: self.segment_table,
            segment_area: self.segment_area,
        };
        let later = self.growths.iter().filter(|growth| growth.from != 0);
        core::iter::once(first).chain(later.map(Growth::extent))
    }

    /// The extent that has a segment; the caller has checked the number against `segment_count`.
    #[must_use]
    pub fn extent_of(&self, segment: SegmentId) -> Extent {
        let later = self.growths.iter().rev().filter(|growth| growth.from != 0);
        let found = later.into_iter().find(|growth| growth.first <= segment.0).map(Growth::extent);
        found.unwrap_or(Extent {
            first: 0,
            segments: self.growths[0].first_or(self.segment_count),
            segment_table: self.segment_table,
            segment_area: self.segment_area,
        })
    }

    /// The default segment size for a region.
    #[must_use]
    pub const fn default_segment_size(region_size: u64) -> u64 {
        if region_size < 1 << 30 {
            1 << 20
        } else if region_size < 16 << 30 {
            4 << 20
        } else {
            16 << 20
        }
    }

    /// Offset of the second superblock: it is the last page, so that the region's size suffices to find it.
    #[must_use]
    pub const fn second_superblock(region_size: u64) -> u64 {
        region_size / PAGE * PAGE - PAGE
    }

    /// First byte of a segment; the caller has checked the number against `segment_count`.
    #[must_use]
    pub fn segment_base(&self, segment: SegmentId) -> u64 {
        let extent = self.extent_of(segment);
        extent.segment_area + u64::from(segment.0 - extent.first) * self.segment_size
    }

    /// Offsets of the two slots of the row of a segment; the caller has checked the number against `segment_count`.
    #[must_use]
    pub fn segment_slots(&self, segment: SegmentId) -> [u64; 2] {
        let extent = self.extent_of(segment);
        let row = segment.0 - extent.first;
        Self::slots::<tables::SegmentEntry>(extent.segment_table, extent.segments, row)
    }

    /// The layout of a segment of this region.
    #[must_use]
    pub const fn segment_shape(&self) -> SegmentShape {
        SegmentShape { size: self.segment_size }
    }

    /// Offsets of the two slots of row `row` in a table of `T` that begins at `area` and has `rows` rows.
    #[must_use]
    pub const fn slots<T: SlotContent>(area: u64, rows: u32, row: u32) -> [u64; 2] {
        let size = T::SLOT_SIZE as u64;
        let copy = (rows as u64 * size).next_multiple_of(PAGE);
        let first = area + row as u64 * size;
        [first, first + copy]
    }
}

impl Growth {
    /// The number of the first segment, or `else_count` without a growth.
    const fn first_or(&self, else_count: u32) -> u32 {
        if self.from == 0 { else_count } else { self.first }
    }

    const fn extent(&self) -> Extent {
        Extent {
            first: self.first,
            segments: self.segments,
            segment_table: self.from,
            segment_area: segment_area(self.from, self.segments),
        }
    }
}

/// First byte of the segments behind a segment table that begins at `table` and has `segments` rows.
const fn segment_area(table: u64, segments: u32) -> u64 {
    (table + table_bytes::<tables::SegmentEntry>(segments)).next_multiple_of(SEGMENT_AREA_ALIGNMENT)
}

/// The number of segments between `table`, where their table begins, and the superblock before `end`; at most `limit`. `None` for
/// none.
fn segments_between(table: u64, end: u64, segment_size: u64, limit: u32) -> Option<u32> {
    // The size of the table and the number of segments depend on each other: start with the number that fits if nothing is
    // aligned, and decrease it until both fit.
    let room = end.checked_sub(table + PAGE)?;
    let each = segment_size + 2 * tables::SegmentEntry::SLOT_SIZE as u64;
    let most = u32::try_from(room / each).unwrap_or(limit).min(limit);
    (1..=most)
        .rev()
        .find(|count| segment_area(table, *count) + u64::from(*count) * segment_size + PAGE <= end)
}

/// Bytes of a table: all first slots, then all second slots from a page boundary on.
pub(crate) const fn table_bytes<T: SlotContent>(rows: u32) -> u64 {
    2 * (rows as u64 * T::SLOT_SIZE as u64).next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests;
