//! The layout of a region, and the description of structures that is compared with the format page.

use crate::{PAGE, SegmentShape, slot::SlotContent, tables};
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
/// The segment area begins at a multiple of this.
const SEGMENT_AREA_ALIGNMENT: u64 = 64 << 10;

/// The layout of a region. It is computed from five numbers, so a superblock with other offsets is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of the region that are used: whole pages.
    pub region_size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Number of segments.
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
    /// First byte of the segment table.
    pub segment_table: u64,
    /// First byte of segment 0.
    pub segment_area: u64,
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
        // The size of the table and the number of segments depend on each other: start with the number that fits without a
        // table, and decrease it until both fit.
        let room = region_size.checked_sub(segment_table + PAGE).ok_or_else(too_small)?;
        let mut count = u32::try_from(room / segment_size).unwrap_or(u32::MAX - 1);
        loop {
            if count == 0 {
                return Err(too_small());
            }
            let area = (segment_table + table_bytes::<tables::SegmentEntry>(count))
                .next_multiple_of(SEGMENT_AREA_ALIGNMENT);
            if area + u64::from(count) * segment_size + PAGE <= region_size {
                return Ok(Self {
                    region_size,
                    segment_size,
                    segment_count: count,
                    host_rows,
                    backend_rows,
                    blkdev_rows,
                    host_area,
                    backend_area,
                    blkdev_area,
                    segment_table,
                    segment_area: area,
                });
            }
            count -= 1;
        }
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
    pub const fn segment_base(&self, segment: SegmentId) -> u64 {
        self.segment_area + segment.0 as u64 * self.segment_size
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

/// Bytes of a table: all first slots, then all second slots from a page boundary on.
const fn table_bytes<T: SlotContent>(rows: u32) -> u64 {
    2 * (rows as u64 * T::SLOT_SIZE as u64).next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_segment_size_that_is_chosen_grows_with_the_region() {
        const GIB: u64 = 1 << 30;
        let mib = |region| Layout::default_segment_size(region) >> 20;
        assert_eq!([16 << 20, GIB / 2, GIB - 1].map(mib), [1; 3]);
        assert_eq!([GIB, 4 * GIB, 16 * GIB - 1].map(mib), [4; 3]);
        assert_eq!([16 * GIB, 1 << 40].map(mib), [16; 2]);
    }

    #[test]
    fn everything_fits_and_nothing_overlaps() {
        for size in [2 << 20, (64 << 20) + 12345, 1 << 30, 3 << 40] {
            for segment in [64 << 10, 1 << 20, 16 << 20] {
                let Ok(layout) = Layout::new(size, segment, 16, 64, 64) else { continue };
                let end = layout.segment_area + u64::from(layout.segment_count) * segment;
                assert!(end <= Layout::second_superblock(size));
                assert!(
                    layout.segment_table + table_bytes::<tables::SegmentEntry>(layout.segment_count)
                        <= layout.segment_area
                );
                let [a, b] = Layout::slots::<tables::HostEntry>(layout.host_area, 16, 15);
                assert!(a / PAGE != b / PAGE && b + 256 <= layout.backend_area);
            }
        }
    }

    #[test]
    fn sizes_and_rows_that_the_format_knows_are_accepted_up_to_their_limits() {
        let is_known = |segment, rows: [u32; 3]| {
            Layout::new(1 << 30, segment, rows[0], rows[1], rows[2]).map_err(|error| error.kind())
        };
        for segment in [SEGMENT_SIZE_MIN, SEGMENT_SIZE_MAX] {
            assert!(is_known(segment, [1; 3]).is_ok());
        }
        for segment in [0, SEGMENT_SIZE_MIN / 2, SEGMENT_SIZE_MIN + 4096, SEGMENT_SIZE_MAX * 2] {
            assert_eq!(is_known(segment, [1; 3]), Err(ErrorKind::InvalidArgument), "{segment}");
        }
        for table in 0..3 {
            let with = |rows| {
                let mut all = [4; 3];
                all[table] = rows;
                is_known(SEGMENT_SIZE_MIN, all)
            };
            assert!(with(1).is_ok() && with(TABLE_ROWS_MAX).is_ok());
            assert_eq!(with(0), Err(ErrorKind::InvalidArgument));
            assert_eq!(with(TABLE_ROWS_MAX + 1), Err(ErrorKind::InvalidArgument));
        }
    }

    #[test]
    fn a_region_holds_as_many_segments_as_fit() {
        // Three tables of two pages each after the first superblock; the segment table begins at page 7.
        let head = 7 * PAGE;
        let of = |size| Layout::new(size, SEGMENT_SIZE_MIN, 4, 4, 4);
        for count in [1, 2, 15, 64, 65, 4096] {
            let rows = table_bytes::<tables::SegmentEntry>(count);
            let area = (head + rows).next_multiple_of(64 << 10);
            let least = area + u64::from(count) * SEGMENT_SIZE_MIN + PAGE;
            let layout = of(least).expect("it fits exactly");
            assert_eq!((layout.segment_count, layout.segment_area), (count, area));
            assert_eq!(layout.segment_table, head);
            assert_eq!(
                [layout.host_area, layout.backend_area, layout.blkdev_area],
                [1, 3, 5].map(|at| at * PAGE)
            );
            assert_eq!(of(least + PAGE - 1).map_or(0, |layout| layout.region_size), least, "whole pages");
            assert_eq!(of(least - 1).map_or(0, |layout| layout.segment_count), count - 1);
        }
        let huge = of(1 << 50).expect("there is room");
        assert_eq!(huge.segment_count, u32::MAX - 1, "more have no number");
        for size in [0, 1, PAGE, head, head + PAGE] {
            assert_eq!(of(size).map_err(|error| error.kind()), Err(ErrorKind::NoSpace), "{size}");
        }
    }

    #[test]
    fn a_region_without_room_for_a_segment_is_refused() {
        let error = Layout::new(100 << 10, 64 << 10, 16, 64, 64).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
}
