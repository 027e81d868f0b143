//! What a verification says of each copy of each structure of a region in use, and how it repairs damaged ones.

use super::rig::{Options, Rig, SEGMENT};
use super::{Op, Ram};
use crate::{BlkdevSpec, MetadataPlace, Pin, PinKind, lane_map::LaneMap};
use alloc::{vec, vec::Vec};
use cbd_format::{
    BackendEntry, BlkdevEntry, HostEntry, Layout, SegmentHeader, StateShape, Superblock, pins::encoded_length,
};
use cbd_types::{ByteRange, DamagedCopy, ErrorKind, HostId, LaneId, SegmentId, Structure, VerifiedMetadata};

const BLOCK: u64 = 4096;
const LANES: u32 = 2;

/// Two copies of a structure.
#[derive(Clone, Copy, Debug)]
struct Copies {
    structure: Structure,
    number: u64,
    at: [u64; 2],
    /// Bytes of each.
    length: u64,
}

/// Does all steps of a verification.
fn verify(rig: &Rig) -> VerifiedMetadata {
    let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
    while !place.is_at_end() {
        let before = found.structures;
        rig.transport.verify_metadata(rig.backend, &mut place, &mut found).expect("it runs");
        assert!(found.structures - before <= 70, "a step is bounded");
    }
    found
}

fn repaired(copies: &Copies, which: usize) -> DamagedCopy {
    let Copies { structure, number, at, .. } = *copies;
    DamagedCopy { structure, number, at: at[which], is_readable: true, is_repaired: true }
}

fn pins() -> Vec<Pin> {
    vec![Pin { kind: PinKind::Range, text: "a range".into(), ranges: vec![ByteRange::at(0, 2 * BLOCK)] }]
}

/// A cache that has stored something in each structure, in both copies.
fn used() -> Rig {
    let mut rig =
        Rig::new(Options { device: 8 << 20, lanes: LANES, segments: 2 * 8 + 1, ..Options::default() });
    let (id, transport) = (rig.backend, &rig.transport);
    transport.set_pins(id, &pins()).expect("there is room");
    let entry = transport.backend(id).expect("it is there");
    transport.move_backend(id, "/dev/other", "other").expect("there is room");
    transport.settle_backend(id).expect("it is there");
    transport
        .create_blkdev(&BlkdevSpec { backend: id, host: HostId(0), export: entry.path, shared: false })
        .expect("room");
    for round in 0..60 {
        for block in 0..16 {
            for chunk in [0, 4 << 20] {
                while !rig.write(ByteRange::at(chunk + block * BLOCK, BLOCK), round) {
                    rig.drain();
                }
            }
        }
        rig.cache.flush().expect("it runs");
        rig.drain();
    }
    assert!(rig.write(ByteRange::at(0, BLOCK), 99), "it is dirty");
    rig.transport.region().memory().take_ops();
    rig
}

/// All structures of [`used`].
fn all(rig: &Rig) -> Vec<Copies> {
    let layout = rig.transport.info().layout;
    let copies = |structure, number, at, length| Copies { structure, number, at, length };
    let row = rig.transport.backend_row(rig.backend).expect("it is there");
    let state_segment = SegmentId(row.state_segment.get());
    let base = layout.segment_base(state_segment);
    let header = |at: u64| [at, at + SEGMENT - 4096];
    let within = |[first, second]: [u64; 2]| [base + first, base + second];
    let shape = StateShape { lanes: LANES };
    let header_length = size_of::<SegmentHeader>() as u64;
    let mut all = vec![
        copies(
            Structure::Superblock,
            0,
            [0, Layout::second_superblock(layout.region_size)],
            size_of::<Superblock>() as u64,
        ),
        copies(Structure::HostRow, 0, Layout::slots::<HostEntry>(layout.host_area, 4, 0), 256),
        copies(Structure::BackendRow, 0, Layout::slots::<BackendEntry>(layout.backend_area, 4, 0), 1024),
        copies(Structure::BlkdevRow, 0, Layout::slots::<BlkdevEntry>(layout.blkdev_area, 4, 0), 512),
        copies(Structure::SegmentRow, 3, layout.segment_slots(SegmentId(3)), 64),
        copies(Structure::StateHeader, u64::from(state_segment.0), header(base), header_length),
        copies(Structure::Drained, 0, within(shape.drained()), 64),
        copies(Structure::FormerDisk, 0, within(shape.former(0)), 1024),
        copies(
            Structure::Pins,
            0,
            within(shape.pins(SEGMENT).expect("there is room").0),
            encoded_length(&pins()) as u64,
        ),
    ];
    for lane in (0..LANES).map(LaneId) {
        all.push(copies(Structure::Tail, u64::from(lane.0), within(shape.tail(lane)), 64));
        all.push(copies(Structure::Mark, u64::from(lane.0), within(shape.mark(lane)), 64));
        for segment in rig.cache.log().segments(lane) {
            let number = (segment.base - layout.segment_base(SegmentId(0))) / SEGMENT;
            all.push(copies(Structure::SegmentHeader, number, header(segment.base), header_length));
        }
    }
    all
}

fn bytes(memory: &Ram, copies: &Copies, which: usize) -> Vec<u8> {
    let mut bytes = vec![0; copies.length as usize];
    cbd_types::Pmem::load(memory, copies.at[which], &mut bytes).expect("it can be read");
    bytes
}

/// Memory in which a copy is overwritten.
fn without(rig: &Rig, copies: &Copies, which: usize) -> Ram {
    let memory = rig.memory();
    cbd_types::Pmem::store(&memory, copies.at[which], &vec![0xa5; copies.length as usize]);
    memory
}

/// What a process says that opens the memory.
fn recovered(rig: &Rig, memory: Ram) -> (Vec<u8>, u64, Vec<Pin>, Vec<crate::FormerDisk>, usize) {
    let rig = rig.in_memory(memory);
    let (transport, id) = (&rig.transport, rig.backend);
    (
        [rig.read(ByteRange::at(0, 16 * BLOCK)), rig.read(ByteRange::at(4 << 20, 16 * BLOCK))].concat(),
        rig.cache.status().drained_epoch.0,
        transport.pins(id).expect("it is there").pins,
        transport.former_disks(id),
        transport.hosts().len() + transport.blkdevs().len() + rig.cache.status().damaged.len(),
    )
}

#[test]
fn a_region_without_damage_is_found_whole_and_nothing_is_stored() {
    let rig = used();
    let found = verify(&rig);
    assert_eq!((found.repaired, found.unrepaired, found.error.is_none()), (0, 0, true), "{found:?}");
    assert_eq!(rig.transport.region().memory().take_ops(), []);
    // Superblock, 3 tables of 4 rows, rows of segments, header, drained, one former disk, pins, tails and marks, and the logs.
    let segments = u64::from(rig.transport.info().layout.segment_count);
    let logs: usize = (0..LANES).map(|lane| rig.cache.log().segments(LaneId(lane)).len()).sum();
    assert_eq!(found.structures, 1 + 3 * 4 + segments + 4 + 2 * 2 + logs as u64);
    assert!(all(&rig).iter().any(|copies| copies.structure == Structure::SegmentHeader && logs > 2));
}

#[test]
fn a_damaged_copy_of_each_structure_is_repaired_and_is_enough_then() {
    let rig = used();
    let expected = recovered(&rig, rig.memory());
    for copies in all(&rig) {
        for which in [0, 1] {
            // In the checksum, in the middle and at the end: each is of another field.
            for at in [1, 30, copies.length - 1] {
                rig.flip(copies.at[which] + at);
            }
            let found = verify(&rig);
            assert_eq!(found.copies, [repaired(&copies, which)], "{copies:?}");
            assert_eq!((found.repaired, found.unrepaired, found.error.is_none()), (1, 0, true));
            let again = verify(&rig);
            assert_eq!((again.copies, again.structures), (vec![], found.structures), "{copies:?}");
            for other in [0, 1] {
                assert_eq!(recovered(&rig, without(&rig, &copies, other)), expected, "{copies:?} {other}");
            }
        }
    }
}

#[test]
fn a_copy_that_became_blank_is_repaired_too() {
    let rig = used();
    for copies in all(&rig) {
        for which in [0, 1] {
            let _ = rig.transport.region().store(copies.at[which], &vec![0; copies.length as usize]);
            assert_eq!(verify(&rig).copies, [repaired(&copies, which)], "{copies:?}");
        }
    }
}

#[test]
fn a_copy_of_an_earlier_time_is_damage_where_the_newest_one_should_be() {
    let mut rig = used();
    let former = rig.memory();
    for round in 0..20 {
        for block in 0..16 {
            while !rig.write(ByteRange::at(block * BLOCK, BLOCK), round) {
                rig.drain();
            }
        }
        rig.cache.flush().expect("it runs");
        rig.drain();
    }
    let mut found = [0; 2];
    for copies in all(&rig) {
        let now = [0, 1].map(|which| bytes(&rig.memory(), &copies, which));
        for which in [0, 1] {
            let old = bytes(&former, &copies, which);
            if old == now[which] {
                continue;
            }
            // The sequence numbers of slots. The two copies of a header are equal.
            let is_older =
                copies.structure != Structure::SegmentHeader && now[which][8..] < now[1 - which][8..];
            let _ = rig.transport.region().store(copies.at[which], &old);
            let expected = if is_older { vec![] } else { vec![repaired(&copies, which)] };
            assert_eq!(verify(&rig).copies, expected, "{copies:?}");
            found[usize::from(is_older)] += 1;
        }
    }
    assert!(found[0] > 8 && found[1] > 2, "{found:?}");
}

#[test]
fn what_memory_has_is_stored_again_if_both_copies_are_damaged() {
    let rig = used();
    let expected = recovered(&rig, rig.memory());
    for copies in all(&rig) {
        for which in [0, 1] {
            rig.flip(copies.at[which] + 30);
        }
        let found = verify(&rig);
        let is_in_memory = !matches!(
            copies.structure,
            Structure::StateHeader | Structure::FormerDisk | Structure::Pins | Structure::SegmentHeader
        );
        match (is_in_memory, copies.structure) {
            (true, _) => {
                assert_eq!((found.repaired, found.unrepaired), (2, 0), "{copies:?}");
                for other in [0, 1] {
                    let after = recovered(&rig, without(&rig, &copies, other));
                    assert_eq!(after, expected, "{copies:?} {other}");
                }
            }
            // A slot that is not valid is that of an earlier cache, or of none.
            (_, Structure::FormerDisk) => assert_eq!((found.repaired, found.unrepaired), (0, 0)),
            _ => {
                assert_eq!((found.repaired, found.unrepaired), (0, 2), "{copies:?}");
                assert!(found.copies.iter().all(|copy| copy.is_readable && !copy.is_repaired));
            }
        }
        if !is_in_memory {
            for which in [0, 1] {
                rig.flip(copies.at[which] + 30);
            }
            assert_eq!(verify(&rig).copies, [], "the test has put it right");
        }
    }
}

#[test]
fn memory_that_cannot_be_read_is_reported_and_not_touched() {
    for index in 0..all(&used()).len() {
        for which in [0, 1] {
            let rig = used();
            let copies = all(&rig)[index];
            rig.transport.region().memory().fail(ByteRange::at(copies.at[which], copies.length));
            let found = verify(&rig);
            let expected = DamagedCopy { is_readable: false, is_repaired: false, ..repaired(&copies, which) };
            assert_eq!(found.copies, [expected], "{copies:?}");
            assert_eq!(rig.transport.region().memory().take_ops(), [], "{copies:?}");
            // The other one is damaged: it gets what memory has, if that has it.
            rig.flip(copies.at[1 - which] + 30);
            let found = verify(&rig);
            let is_in_memory = !matches!(
                copies.structure,
                Structure::StateHeader | Structure::FormerDisk | Structure::Pins | Structure::SegmentHeader
            );
            let is_repaired = found.copies.iter().any(|copy| copy.is_repaired);
            assert_eq!(is_repaired, is_in_memory, "{copies:?} {found:?}");
            let stored = rig.transport.region().memory().take_ops();
            let lost = ByteRange::at(copies.at[which], copies.length);
            assert!(
                !stored
                    .iter()
                    .any(|op| matches!(op, Op::Store(at, _) if lost.contains(&ByteRange::at(*at, 1))))
            );
        }
    }
}

#[test]
fn the_good_copy_is_not_touched_and_the_store_is_fenced() {
    let rig = used();
    for copies in all(&rig) {
        for which in [0, 1] {
            rig.flip(copies.at[which] + 30);
            rig.transport.region().memory().take_ops();
            verify(&rig);
            let ops = rig.transport.region().memory().take_ops();
            assert_eq!(ops, [Op::Store(copies.at[which], copies.length), Op::Fence], "{copies:?}");
        }
    }
}

#[test]
fn nothing_is_stored_again_once_a_store_has_failed() {
    let rig = used();
    let copies = all(&rig);
    rig.transport.region().memory().fail_stores_after(0);
    let _ = rig.transport.region().store(rig.options.device.min(1 << 16), &[0]);
    rig.transport.region().memory().fail_stores_after(usize::MAX);
    for copies in &copies {
        rig.flip(copies.at[0] + 30);
    }
    rig.transport.region().memory().take_ops();
    let found = verify(&rig);
    assert_eq!((found.repaired, found.unrepaired), (0, copies.len() as u64));
    assert_eq!(found.error.map(|error| error.kind()), Some(ErrorKind::Media));
    assert_eq!(rig.transport.region().memory().take_ops(), []);
}

#[test]
fn a_copy_whose_store_fails_is_not_reported_as_repaired() {
    let first = used();
    for index in 0..all(&first).len() {
        let rig = used();
        let copies = all(&rig)[index];
        rig.flip(copies.at[0] + 30);
        rig.transport.region().memory().fail_stores_after(0);
        let found = verify(&rig);
        assert_eq!((found.repaired, found.unrepaired), (0, 1), "{copies:?}");
        assert_eq!(found.error.map(|error| error.kind()), Some(ErrorKind::Media));
    }
}

#[test]
fn clients_that_open_segments_meanwhile_do_not_keep_a_verification_from_its_end() {
    let rig = used();
    let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
    let mut steps = 0;
    while !place.is_at_end() {
        rig.transport.verify_metadata(rig.backend, &mut place, &mut found).expect("it runs");
        for block in 0..15 {
            rig.write(ByteRange::at(block * BLOCK, BLOCK), 1);
        }
        steps += 1;
    }
    assert!(steps < 20 && found.copies.is_empty(), "{steps} steps: {found:?}");
}

#[test]
fn a_cache_that_was_stopped_is_not_touched_and_reported_as_stopped() {
    let rig = used();
    let row = all(&rig).into_iter().find(|copies| copies.structure == Structure::Tail).expect("a tail");
    rig.flip(row.at[0] + 30);
    rig.cache.stop();
    rig.transport.region().memory().take_ops();
    let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
    let error = loop {
        match rig.transport.verify_metadata(rig.backend, &mut place, &mut found) {
            Ok(()) => assert!(!place.is_at_end()),
            Err(error) => break error,
        }
    };
    assert_eq!((error.kind(), found.copies.len()), (ErrorKind::Stopped, 0));
    assert_eq!(rig.transport.region().memory().take_ops(), []);
}

#[test]
fn a_slot_that_was_not_used_yet_is_no_damage() {
    let rig = Rig::new(Options { lanes: LANES, segments: 17, ..Options::default() });
    assert_eq!(verify(&rig).copies, []);
    assert!(rig.write(ByteRange::at(0, BLOCK), 1));
    rig.cache.flush().expect("it runs");
    // One slot of the mark was stored, and none of a tail.
    let found = verify(&rig);
    assert_eq!((found.copies, found.error.is_none()), (vec![], true));
    let lane = LaneMap { lanes: LANES }.lane_of(0);
    let state = rig.cache.base().identity().state_base;
    let mark = (StateShape { lanes: LANES }).mark(lane).map(|at| state + at);
    rig.flip(mark[1] + 7);
    assert_eq!(verify(&rig).repaired, 1, "it is not blank");
}

#[test]
fn what_a_crash_has_torn_is_whole_when_the_next_process_verifies() {
    let rig = used();
    for copies in all(&rig) {
        for which in [0, 1] {
            let next = rig.in_memory(without(&rig, &copies, which));
            let found = verify(&next);
            // These are not completed when a cache is opened.
            let is_left = matches!(copies.structure, Structure::StateHeader | Structure::FormerDisk);
            let is_superblock = copies.structure == Structure::Superblock;
            let expected = if is_left || is_superblock { vec![repaired(&copies, which)] } else { vec![] };
            assert_eq!(found.copies, expected, "{copies:?}");
            assert_eq!(verify(&next).copies, []);
        }
    }
}
