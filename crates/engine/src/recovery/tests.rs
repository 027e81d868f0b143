//! What recovery writes back, restores and refuses, and which headers it believes.

use super::*;
use crate::tests::rig::{Options, Rig, SECTOR, SEGMENT};
use crate::tests::{Op, Ram, WALL_MS};
use cbd_format::Slot;
use cbd_types::ByteRange;

const LANE: LaneId = LaneId(0);

/// The state block of the rig's cache.
fn state_slots(rig: &Rig) -> [[u64; 2]; 3] {
    let identity = rig.cache.base().identity();
    let state = StateShape { lanes: identity.lanes.lanes };
    [state.tail(LANE), state.mark(LANE), state.drained()]
        .map(|slots| slots.map(|at| identity.state_base + at))
}

/// The bytes at `at`.
fn bytes(rig: &Rig, at: u64) -> [u8; 64] {
    let mut line = [0; 64];
    rig.transport.region().load(at, &mut line).expect("it can be read");
    line
}

/// The operations of recovery after the backend's row was read.
fn ops_of_recovery(rig: &Rig) -> Vec<Op> {
    let region = Region::new(rig.memory());
    let transport = crate::Transport::open(Arc::clone(&rig.environment), region).expect("it opens");
    transport.region().memory().take_ops();
    transport.open_cache(rig.backend).expect("it opens");
    transport.region().memory().take_ops()
}

/// Writes of one sector, each a record in one slot.
fn write_sectors(rig: &Rig, numbers: core::ops::Range<u64>) {
    assert!(numbers.into_iter().all(|number| rig.write(ByteRange::at(number * SECTOR, SECTOR), 1)));
}

#[test]
fn all_that_recovery_relied_on_is_written_back_and_fenced_and_nothing_is_stored() {
    // The last segment holds more records than the longest one has slots, then two long ones whose data is clamped.
    for is_long in [false, true] {
        let rig = Rig::new(Options::default());
        write_sectors(&rig, 0..110);
        if is_long {
            assert!((0..3).all(|number| rig.write(ByteRange::at(number << 14, 16 << 10), 2)));
            assert!(rig.write(ByteRange::at(0, 16 << 10), 3));
        }
        rig.cache.flush().expect("it runs");
        let views = rig.cache.log().segments(LANE);
        let last = rig.cache.lane(LANE).lock().last_with_records().expect("there are records");
        let shape = rig.cache.base().shape();
        let [tail, mark, drained] = state_slots(&rig);
        let slots = [tail, mark, drained].into_iter().flatten();
        let mut expected: Vec<Op> = slots.map(|at| Op::WriteBack(at, 64)).collect();
        for view in &views {
            expected.extend([view.base, view.base + SEGMENT - PAGE].map(|at| Op::WriteBack(at, 128)));
        }
        let base = views.last().map_or(0, |view| view.base);
        for slot in last.slots.saturating_sub(SLOTS_MAX_OF_RECORD)..last.slots {
            expected.extend(shape.slot(slot).map(|at| Op::WriteBack(base + at, 64)));
        }
        let length = if is_long { (16 << 10) + PAGE } else { u64::from(SLOTS_MAX_OF_RECORD) * SECTOR };
        // Each page by itself.
        let data = ByteRange::at(base + last.data_low, length).split_at_multiples(PAGE);
        expected.extend(data.map(|page| Op::WriteBack(page.start, page.len())));
        expected.push(Op::Fence);
        let ops = ops_of_recovery(&rig);
        let begin = ops.iter().position(|op| *op == expected[0]).expect("tails are written back");
        assert_eq!(ops[begin..begin + expected.len()], expected);
        assert!(!ops.iter().any(|op| matches!(op, Op::Store(..))));
        assert_eq!(ops.last(), Some(&Op::Fence));
    }
}

#[test]
fn a_second_copy_that_a_crash_left_behind_is_restored_and_fenced() {
    let mut rig = Rig::new(Options::default());
    write_sectors(&rig, 0..3);
    rig.drain();
    assert!(rig.write(ByteRange::at(4 << 10, 16 << 10), 2));
    rig.cache.flush().expect("it runs");
    let view = rig.cache.log().segments(LANE)[0];
    let shape = rig.cache.base().shape();
    // The last record and its line; records before it are not restored.
    let mut copies: Vec<(u64, bool)> =
        (3..5).flat_map(|slot| shape.slot(slot)).map(|at| (view.base + at, true)).collect();
    copies.extend(shape.slot(2).map(|at| (view.base + at, false)));
    copies.extend([view.base, view.base + 64, view.base + SEGMENT - PAGE].map(|at| (at, true)));
    for (at, is_restored) in copies {
        let region = Region::new(rig.memory());
        let _ = region.store(at, &[0xa5; 64]);
        let recovered = rig.in_memory(region.memory().copy());
        assert_eq!(bytes(&recovered, at) == bytes(&rig, at), is_restored, "{at}");
        if is_restored {
            let ops = recovered.transport.region().memory().take_ops();
            let stored = ops
                .iter()
                .position(|op| matches!(op, Op::Store(place, _) if *place <= at && at < place + 128));
            assert!(ops[stored.expect("it is stored")..].contains(&Op::Fence));
        }
    }
    // A mark has one new copy anyway: the other one is that of the flush before.
    let [tail, _, drained] = state_slots(&rig);
    for slots in [tail, drained] {
        let newest = slots.map(|at| bytes(&rig, at)).into_iter().max_by_key(|line| line[8..16].to_vec());
        for (at, other) in [(slots[0], slots[1]), (slots[1], slots[0])] {
            let region = Region::new(rig.memory());
            // The newest content stands in the other slot.
            let _ = region.store(other, &newest.unwrap_or([0; 64]));
            let _ = region.store(at, &[0xa5; 64]);
            let recovered = rig.in_memory(region.memory().copy());
            assert_eq!(
                bytes(&recovered, at)[16..],
                bytes(&recovered, other)[16..],
                "the content is the same"
            );
        }
    }
}

#[test]
fn a_copy_that_cannot_be_read_is_left_alone() {
    let rig = Rig::new(Options::default());
    write_sectors(&rig, 0..3);
    let view = rig.cache.log().segments(LANE)[0];
    let [_, mirror] = rig.cache.base().shape().slot(2);
    for at in [view.base, view.base + SEGMENT - PAGE, view.base + mirror] {
        let memory = rig.memory();
        memory.fail(ByteRange::at(at, 64));
        let recovered = rig.in_memory(memory);
        let ops = recovered.transport.region().memory().take_ops();
        assert!(!ops.iter().any(|op| matches!(op, Op::Store(place, _) if *place == at)));
        assert_eq!(recovered.read(ByteRange::at(0, 3 * SECTOR)), [1; 3 * SECTOR as usize]);
    }
}

#[test]
fn the_next_use_of_a_free_segment_has_a_higher_generation_than_any_header_in_it_claims() {
    let rig = Rig::new(Options::default());
    let generation = |first: u32, second: u32| {
        let region = Region::new(rig.memory());
        let base = rig.cache.base().segment(3).base();
        for (at, claimed) in [(base, first), (base + SEGMENT - PAGE, second)] {
            let _ = region.store(at + 20, &claimed.to_le_bytes());
        }
        rig.in_memory(region.memory().copy()).cache.base().segment(3).generation()
    };
    assert_eq!([generation(7, 9), generation(9, 7), generation(0, 0)], [9, 9, 0]);
    // Blank flash memory claims nothing, and a forged number leaves half of all numbers.
    assert_eq!([generation(u32::MAX, 5), generation(0x4000_0001, 0)], [5, 0x4000_0001]);
    assert_eq!(generation(u32::MAX - 1, 0), 0x7fff_fffe);
}

#[test]
fn of_two_valid_headers_of_a_segment_that_of_the_later_generation_counts() {
    let rig = Rig::new(Options::default());
    write_sectors(&rig, 0..1);
    let base = rig.cache.base();
    let segment = rig.cache.lane(LANE).lock().segments().next().expect("there is one").segment;
    let at = base.segment(segment).base();
    let mut bytes = [0; 128];
    base.region().load(at, &mut bytes).expect("it can be read");
    let found = SegmentHeader::decode(&bytes).expect("long enough");
    let header = found.verify(base.segment(segment).id(), base.identity().cache_id, 1).expect("it is good");
    let read = |generations: [u32; 2], magic: u32| {
        for (number, at, generation) in
            [(1_u64, at, generations[0]), (2, at + SEGMENT - PAGE, generations[1])]
        {
            let other = SegmentHeader {
                generation: generation.into(),
                ordinal: number.into(),
                magic: magic.into(),
                ..header
            };
            let _ = base.region().store(at, bytes_of(&other.sealed()));
        }
        let read = read_header(base.region(), base.shape(), base.segment(segment), base.identity());
        read.map(|header| header.ordinal.get())
    };
    assert_eq!([read([4, 5], LOG_MAGIC), read([5, 4], LOG_MAGIC)], [Some(2), Some(1)]);
    assert_eq!(read([5, 5], LOG_MAGIC), Some(1));
    assert_eq!(read([4, 5], cbd_format::segment::STATE_MAGIC), None, "it is not one of a log");
}

#[test]
fn segments_are_ordered_by_their_ordinals_and_of_two_with_one_that_of_the_later_run_counts() {
    let segment = |segment: u32, ordinal: u64, run: u64, generation: u32| {
        let header = SegmentHeader {
            crc: 0.into(),
            magic: LOG_MAGIC.into(),
            cache_id: 1.into(),
            segment: segment.into(),
            generation: generation.into(),
            salt: 1.into(),
            lane: 0.into(),
            lanes: 1.into(),
            ordinal: ordinal.into(),
            ownership: 1.into(),
            run: run.into(),
            cut: 0.into(),
            first_sequence: 1.into(),
            epoch: 1.into(),
            reserved: [0; 40],
        };
        ChainSegment { segment, header }
    };
    let mut chain = vec![
        segment(0, 3, 1, 1),
        segment(1, 1, 1, 1),
        segment(2, 3, 2, 1),
        segment(3, 2, 1, 7),
        segment(4, 2, 1, 9),
    ];
    let others = order_chain(&mut chain);
    assert_eq!(chain.iter().map(|segment| segment.segment).collect::<Vec<_>>(), [1, 4, 2]);
    assert_eq!(others, [3, 0]);
}

/// Memory in which the mark of the first lane has counted to `sequence`.
fn marked(rig: &Rig, sequence: u64) -> Ram {
    let region = Region::new(rig.memory());
    let [_, mark, _] = state_slots(rig);
    let content = LaneMark {
        lane_sequence: sequence.into(),
        epoch: 1.into(),
        ownership: 1.into(),
        run: 1.into(),
        reserved: [0; 16],
    };
    let _ = region.store(mark[0], &Slot { sequence: 9, content }.encode_line(0));
    region.memory().copy()
}

#[test]
fn a_log_that_has_counted_to_half_of_all_numbers_is_forged() {
    let rig = Rig::new(Options::default());
    let open = |sequence| {
        let region = Region::new(marked(&rig, sequence));
        let transport = crate::Transport::open(Arc::clone(&rig.environment), region).expect("it opens");
        transport.open_cache(rig.backend).err().map(|error| error.kind())
    };
    assert_eq!(open(COUNTER_END / 2 - 1), Some(ErrorKind::Damaged));
    assert_eq!(open(COUNTER_END / 2 - 3), None);
}

#[test]
fn a_clock_that_was_set_back_dates_the_recovery_point_to_the_earlier_time() {
    let mut rig = Rig::new(Options::default());
    write_sectors(&rig, 0..1);
    rig.drain();
    let dated = |rig: &Rig| rig.cache.status().drained_wall_ms;
    assert_eq!(dated(&rig), WALL_MS);
    for (wall, expected) in [(WALL_MS, WALL_MS), (WALL_MS + 5, WALL_MS), (WALL_MS - 5, WALL_MS - 5)] {
        rig.environment.set_wall(wall);
        assert_eq!(dated(&rig.in_memory(rig.memory())), expected);
    }
}

#[test]
fn an_index_is_as_large_as_the_cache_of_its_lane() {
    for (lanes, segments) in [(1, 33), (2, 33)] {
        let rig = Rig::new(Options { device: 8 << 20, lanes, segments, ..Options::default() });
        let blocks = (segments - 1) * SEGMENT / 4096;
        let bytes = rig.cache.status().index_bytes;
        assert!((blocks * 8..blocks * 64).contains(&bytes), "{bytes} for {blocks} blocks");
    }
}
