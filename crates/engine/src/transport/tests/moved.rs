//! Backends that were moved to another disk, and caches that were emptied.

use super::*;

#[test]
fn a_moved_backend_remembers_its_former_disks_the_last_one_first() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    assert_eq!(transport.former_disk(id), None);
    let move_to = |number: u64, name: &str| {
        transport.environment.set_wall(WALL_MS + number);
        transport.move_backend(id, &format!("/dev/{name}"), name)
    };
    move_to(1, "b").expect("room");
    let entry = transport.backend(id).expect("it is good");
    assert!(entry.is_moved && entry.path == "/dev/b" && entry.identity == "b");
    let former = transport.former_disk(id).expect("it was moved");
    assert_eq!((former.path.as_str(), former.identity.as_str()), ("/dev/disk", "a disk"));
    assert_eq!(former.moved_ms, WALL_MS + 1);
    move_to(2, "c").expect("room");
    move_to(3, "d").expect("room");
    let names = |transport: &Tested| -> Vec<String> {
        transport.former_disks(id).into_iter().map(|former| former.identity).collect()
    };
    assert_eq!(names(&transport), ["c", "b", "a disk"]);
    assert_eq!(names(&reopened(&transport)), ["c", "b", "a disk"]);
    let error = move_to(4, "e").expect_err("there is no room for a fourth");
    assert!(error.kind() == ErrorKind::NoSpace && error.line().contains("/dev/c, /dev/b, /dev/disk"));
    assert_eq!(transport.backend(id).expect("it is good").identity, "d");
    assert_eq!(kind(transport.forget_former_disk(id, "/dev/x")), Some(ErrorKind::NotFound));
    transport.forget_former_disk(id, "/dev/b").expect("it is one");
    assert_eq!(names(&transport), ["c", "a disk"]);
    move_to(5, "a disk").expect("room");
    assert_eq!(names(&transport), ["d", "c"], "the present disk is none of them");
    transport.settle_backend(id).expect("it is there");
    assert!(!transport.backend(id).expect("it is good").is_moved);
    assert!(transport.former_disks(BackendId(3)).is_empty());
}

#[test]
fn a_former_disk_is_named_by_its_identity_where_several_had_its_path() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    transport.move_backend(id, "/dev/disk", "b").expect("room");
    transport.move_backend(id, "/dev/c", "c").expect("room");
    let error = transport.forget_former_disk(id, "/dev/disk").expect_err("it is not clear which");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.line().contains("2 disks") && error.line().contains("a disk, b"), "{}", error.line());
    transport.forget_former_disk(id, "b").expect("it is one");
    transport.forget_former_disk(id, "/dev/disk").expect("one is left");
    assert_eq!(transport.former_disk(id), None);
}

#[test]
fn a_move_that_is_taken_back_leaves_the_row_as_it_was() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let before = transport.backend(id).expect("it is good");
    transport.move_backend(id, "/dev/b", "b").expect("room");
    transport.move_backend_back(&before).expect("it is there");
    let after = transport.backend(id).expect("it is good");
    assert_eq!(
        (after.path.as_str(), after.identity.as_str(), after.is_moved),
        ("/dev/disk", "a disk", false)
    );
    assert_eq!(transport.former_disk(id), None, "it is the present one");
    transport.move_backend_back(&BackendEntry { is_moved: true, ..before }).expect("it is there");
    assert!(transport.backend(id).expect("it is good").is_moved);
}

#[test]
fn an_emptied_backend_goes_on_in_a_later_epoch_and_stays_moved_if_it_has_a_former_disk() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    (0..5).for_each(|_| drop(cache.flush()));
    let waker = core::task::Waker::noop();
    let _ = cache.write(ByteRange::at(0, 512), &[1; 512], waker).expect("it runs");
    cache.flush().expect("it runs");
    let epoch = cache.status().epoch.0;
    assert_eq!(kind(transport.empty_backend(id)), Some(ErrorKind::Busy));
    drop(cache);
    transport.empty_backend(id).expect("no one uses it");
    assert!(!transport.backend(id).expect("it is good").is_moved);
    assert_eq!(transport.drained(id).map(|drained| drained.0.0), Some(epoch + (1 << 32)));
    let cache = transport.open_cache(id).expect("it opens");
    assert_eq!((cache.status().records, cache.status().free_segments), (0, 8));
    drop(cache);
    transport.move_backend(id, "/dev/b", "b").expect("room");
    transport.empty_backend(id).expect("no one uses it");
    assert!(transport.backend(id).expect("it is good").is_moved);
    transport.settle_backend(id).expect("it is there");
    transport.empty_backend(id).expect("no one uses it");
    assert!(!transport.backend(id).expect("it is good").is_moved);
}

/// The numbers of a cache's state that an emptied cache continues: those of drained, and the epochs of its marks.
fn emptied_after(drained: Option<(u64, u64, u64)>, marks: [Option<u64>; 2]) -> (u64, u64) {
    let transport = transport();
    let id = transport.create_backend(&BackendSpec { cache_bytes: Some(17 * SEGMENT), ..spec() });
    let id = id.expect("room");
    let row = transport.backend_row(id).expect("it is there");
    assert_eq!(row.lanes.get(), 2);
    let (state, base) = (StateShape { lanes: 2 }, transport.layout().segment_base(SegmentId(0)));
    let at = |slots: [u64; 2]| slots.map(|at| base + at);
    let mut slots = TwoSlots::<Drained>::read(&transport.region, at(state.drained()), 0);
    match drained {
        None => drop(slots.clear(&transport.region)),
        Some((epoch, void_until, closed_ms)) => {
            let _ = slots.change(&transport.region, |slot| {
                (slot.epoch, slot.void_until) = (epoch.into(), void_until.into());
                slot.closed_ms = closed_ms.into();
            });
        }
    }
    for (lane, epoch) in (0..).map(LaneId).zip(marks) {
        let mut mark = TwoSlots::<LaneMark>::empty(at(state.mark(lane)), u64::from(lane.0));
        if let Some(epoch) = epoch {
            let mark = mark.fill(&transport.region, MutationPoint::BackendTailSecond, |mark| {
                (mark.ownership, mark.epoch) = (1.into(), epoch.into());
            });
            // The second slot alone is enough.
            let _ = mark.and(transport.region.store(at(state.mark(lane))[0], &[0; 64]));
        }
    }
    ops(&transport);
    transport.empty_backend(id).expect("no one uses it");
    let drained = TwoSlots::<Drained>::read(&transport.region, at(state.drained()), 0);
    let drained = *drained.content().expect("it is there");
    assert_eq!(drained.void_until.get(), 0);
    (drained.epoch.get(), drained.closed_ms.get())
}

#[test]
fn an_emptied_cache_goes_on_above_each_epoch_that_its_state_shows() {
    let skipped = 1 << 32;
    assert_eq!(emptied_after(Some((0, 0, 0)), [None; 2]), (skipped, 0));
    assert_eq!(emptied_after(None, [None; 2]), (skipped, 0));
    assert_eq!(emptied_after(Some((70, 50, 8)), [Some(60), None]), (skipped + 70, 8));
    assert_eq!(emptied_after(Some((50, 70, 9)), [None, Some(69)]), (skipped + 70, 9));
    assert_eq!(emptied_after(Some((1, 1, 9)), [Some(80), Some(81)]), (skipped + 81, 9));
    assert_eq!(emptied_after(None, [Some(80), Some(3)]), (skipped + 80, 0));
}

#[test]
fn an_emptied_cache_is_durable_before_its_row_says_that_it_can_be_served() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    ops(&transport);
    transport.empty_backend(id).expect("no one uses it");
    let all = ops(&transport);
    let row = kept(slots::<BackendRow>(transport.layout().backend_area, 4, 0), 1024, false);
    let headers = (1..9).flat_map(|segment| {
        let base = transport.layout().segment_base(SegmentId(segment));
        [Op::Store(base, 128), Op::Store(base + SEGMENT - PAGE, 128)]
    });
    let headers: Vec<Op> = headers.collect();
    // The row, the log, the state, and the row again.
    assert_eq!(all[..4].iter().filter(|op| **op == Op::Fence).count(), 2);
    assert_eq!((&all[4..4 + headers.len()], all.len()), (&headers[..], 4 + headers.len() + 8 + 1 + 4));
    assert_eq!(all[all.len() - 5], Op::Fence);
    assert!(row.iter().filter(|op| **op != Op::Fence).all(|op| all[..4].contains(op)));
    assert!(row.iter().filter(|op| **op != Op::Fence).all(|op| all[all.len() - 4..].contains(op)));
}

#[test]
fn a_former_disk_is_durable_in_both_slots_before_the_row_names_the_other_disk() {
    for mixes_pages in [false, true] {
        let transport = formatted(mixes_pages);
        let id = transport.create_backend(&spec()).expect("room");
        let base = transport.layout().segment_base(SegmentId(0));
        let at = StateShape { lanes: 1 }.former(0).map(|at| base + at);
        let length = size_of::<cbd_format::FormerDisk>() as u64;
        let cache_id = transport.backend_row(id).expect("it is there").cache_id.get();
        let numbers = || {
            [0, 1, 2].map(|index| {
                let at = StateShape { lanes: 1 }.former(index).map(|at| base + at);
                let slots = TwoSlots::<cbd_format::FormerDisk>::read(&transport.region, at, cache_id);
                slots.content().map(|former| former.number.get())
            })
        };
        ops(&transport);
        transport.move_backend(id, "/dev/b", "b").expect("room");
        let mut expected = at.map(|at| Op::Store(at, 1024)).to_vec();
        expected.push(Op::Fence);
        let syncs = at.map(|at| Op::Sync(at, length)).to_vec();
        expected.extend(if mixes_pages { &syncs[..] } else { &[] });
        let row = slots::<BackendRow>(transport.layout().backend_area, 4, 0).map(|at| Op::Store(at, 1024));
        let all = ops(&transport);
        assert_eq!(all[..expected.len()], expected);
        assert!(row.contains(&all[expected.len()]), "the row is next");
        assert_eq!(numbers(), [Some(1), None, None]);
        transport.move_backend(id, "/dev/c", "c").expect("room");
        assert_eq!(numbers(), [Some(1), Some(2), None]);
        // A disk that is recorded already: one slot stays as it is, whatever becomes of the other one.
        transport.move_backend(id, "/dev/disk", "a disk").expect("room");
        ops(&transport);
        transport.move_backend(id, "/dev/d", "d").expect("room");
        assert_eq!(ops(&transport)[..expected.len() - 1], [&expected[..1], &expected[2..]].concat());
        assert_eq!(numbers(), [Some(4), Some(2), Some(3)]);
    }
}
