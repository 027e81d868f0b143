//! Sizes and offsets of the parts of regions.

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
fn a_region_that_grows_keeps_its_segments_and_gets_new_ones_behind_them() {
    let sizes =
        [8 << 20, 9 << 20, (20 << 20) + 4096, 1 << 30, (1 << 30) + (192 << 10), 2 << 30, 3 << 30, 1 << 40];
    let mut layout = Layout::new(sizes[0], SEGMENT_SIZE_MIN, 4, 4, 4).expect("it fits");
    assert_eq!(layout.grown_from().count(), 0);
    for (growth, size) in sizes.into_iter().enumerate().skip(1) {
        let grown = layout.grown_to(size + 4095).expect("it fits");
        assert_eq!((grown.region_size, grown.segment_area), (size, layout.segment_area), "whole pages");
        assert!(grown.grown_from().eq(sizes[..growth].iter().copied()));
        let extents: Vec<Extent> = grown.extents().collect();
        assert!(layout.extents().eq(extents[..growth].iter().copied()), "what was there stays");
        let new = extents[growth];
        assert_eq!(
            (new.first, new.segments),
            (layout.segment_count, grown.segment_count - layout.segment_count)
        );
        assert_eq!((new.segment_table, new.segment_area % (64 << 10)), (layout.region_size, 0));
        assert!(new.table_length() >= table_bytes::<tables::SegmentEntry>(new.segments));
        let end = |segments: u32| {
            segment_area(new.segment_table, segments) + u64::from(segments) * SEGMENT_SIZE_MIN
        };
        assert!(end(new.segments) <= size - PAGE && end(new.segments + 1) > size - PAGE, "as many as fit");
        for segment in [0, layout.segment_count - 1].map(SegmentId) {
            assert_eq!(grown.segment_base(segment), layout.segment_base(segment));
            assert_eq!(grown.segment_slots(segment), layout.segment_slots(segment));
        }
        let (first, last) = (SegmentId(new.first), SegmentId(grown.segment_count - 1));
        assert_eq!(grown.segment_base(first), new.segment_area);
        assert_eq!(grown.segment_base(last) + SEGMENT_SIZE_MIN, end(new.segments));
        assert_eq!(grown.segment_slots(first)[0], new.segment_table);
        let [one, other] = grown.segment_slots(last);
        assert!(one / PAGE < other / PAGE && other + 64 <= new.segment_area);
        layout = grown;
    }
    let error = layout.grown_to(2 << 40).expect_err("once more");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn a_region_grows_by_one_segment_at_least() {
    let layout = Layout::new(8 << 20, SEGMENT_SIZE_MIN, 4, 4, 4).expect("it fits");
    let least = (8 << 20) + (64 << 10) + SEGMENT_SIZE_MIN + PAGE;
    let grown = layout.grown_to(least).expect("it fits exactly");
    assert_eq!(grown.segment_count, layout.segment_count + 1);
    let error = layout.grown_to(least - 1).expect_err("too little");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.line().contains(&format!("grows to {} at least", Size(least))), "{}", error.line());
    for size in [0, layout.region_size, layout.region_size + PAGE - 1, 1 << 63, u64::MAX] {
        let error = layout.grown_to(size).expect_err("it is not larger, or too large");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn a_region_has_no_more_segments_than_there_are_numbers() {
    let layout = Layout::new(1 << 47, SEGMENT_SIZE_MIN, 4, 4, 4).expect("it fits");
    let grown = layout.grown_to(1 << 50).expect("it fits");
    assert_eq!(grown.segment_count, u32::MAX - 1);
    assert_eq!(grown.grown_to(1 << 51).expect_err("no numbers").kind(), ErrorKind::NoSpace);
}

#[test]
fn a_region_without_room_for_a_segment_is_refused() {
    let error = Layout::new(100 << 10, 64 << 10, 16, 64, 64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
}
