//! What a lane holds when it begins, and what of it is replaced.

use super::{index::Index, overlay::Meaning, *};
use crate::position::{Location, Place};

/// What tests of other modules set and see of a lane.
impl LaneState {
    pub(crate) fn set_last_sequence(&mut self, sequence: u64) {
        self.next_sequence = sequence + 1;
    }

    pub(crate) fn set_segments<const COUNT: usize>(
        &mut self,
        sealed: [LogSegment; COUNT],
        open: Option<LogSegment>,
    ) {
        self.sealed.extend(sealed);
        self.open = open;
    }

    /// Run, cut, ordinal of the next segment, and losses that are not noted.
    pub(crate) fn recovered(&self) -> (u64, u64, u64, usize) {
        (self.run, self.cut, self.next_ordinal, self.lost.len())
    }

    /// A loss that recovery has found and had no room to note: everything up to `place` is damaged.
    pub(crate) fn set_lost(&mut self, range: ByteRange, sequence: u64, place: Place) {
        self.overlay.insert(range, Meaning::Damaged, place);
        self.lost.push(Lost { sequence, place });
    }

    /// Each block of the index, and whether several records cover it in parts.
    pub(crate) fn blocks(&self) -> alloc::collections::BTreeMap<u32, bool> {
        self.index.iter().map(|(key, found)| (key, matches!(found, index::Found::Parts(_)))).collect()
    }
}

fn state() -> LaneState {
    LaneState::new(LaneId(3), Index::new(16, 1), Admission::new(16).unwrap())
}

fn log(ordinal: u64, slots: u32) -> LogSegment {
    LogSegment {
        segment: 0,
        ordinal,
        first_sequence: 1,
        run: 1,
        slots,
        data_low: 0,
        first_unwritten_epoch: 0,
        last_unwritten_epoch: 0,
        last_dirty_epoch: 0,
        holds_dropped: false,
    }
}

#[test]
fn a_new_lane_begins_with_the_first_numbers() {
    let state = state();
    assert_eq!((state.id, state.next_sequence, state.next_ordinal), (LaneId(3), 1, 1));
    assert_eq!((state.run, state.cut, state.bypass.next_fill), (1, 0, 0));
    assert_eq!((state.segments().count(), state.bypass.fills.len(), state.lost.len()), (0, 0, 0));
    assert_eq!(state.settled, Cursor::default());
}

#[test]
fn a_reset_forgets_all_that_was_replayed() {
    let mut state = state();
    let range = ByteRange::at(0, 4096);
    let location = Location { segment: 0, slot: 0 };
    state.index.set_parts(1, 0, 1, location);
    state.overlay.insert(range, Meaning::Zeroes, (1, 1));
    state.parked.insert(range, Parked { location, sequence: 1, zeroes: true });
    state.sealed.push_back(log(1, 1));
    state.open = Some(log(2, 1));
    state.lost.push(Lost { sequence: 1, place: (1, 1) });
    state.counters.dirtied = 5;
    state.reset();
    assert_eq!((state.index.live(), state.overlay.is_empty(), state.parked.is_empty()), (0, true, true));
    assert_eq!((state.segments().count(), state.lost.len(), state.counters.dirtied), (0, 0, 0));
}

#[test]
fn the_scratch_for_checksums_is_returned_or_made_again() {
    let mut state = state();
    let of = |state: &LaneState| (state.checksums.len(), state.checksums.as_ptr());
    let first = of(&state);
    assert_eq!(first.0, MANY_BLOCKS);
    assert_eq!((state.ensure_checksums(), of(&state)), (Some(()), first), "it is there");
    let mut taken = state.take_checksums();
    taken[0] = 7;
    assert_eq!(of(&state).0, 0);
    state.return_checksums(taken);
    assert_eq!((of(&state), state.checksums[0]), (first, 7));
    // A thread that panicked has not returned it.
    let lost = state.take_checksums();
    assert_eq!(state.ensure_checksums(), Some(()));
    assert_eq!(state.checksums, [0; MANY_BLOCKS]);
    assert!(of(&state) != (lost.len(), lost.as_ptr()));
}

#[test]
fn a_commit_cancels_the_fills_that_it_overlaps() {
    let mut state = state();
    state.cancel_fills(ByteRange::at(0, 4096));
    let fills = [0, 1, 2, 3].map(|number| state.register_fill(ByteRange::at(number * 4096, 4096)));
    state.cancel_fills(ByteRange { start: 4096 + 512, end: 2 * 4096 + 512 });
    assert_eq!(fills.map(|fill| state.end_fill(fill)), [true, false, false, true]);
}

#[test]
fn a_segment_is_settled_when_all_of_its_slots_are() {
    let mut state = state();
    state.settled = Cursor { ordinal: 5, slot: 7 };
    let is_settled = |ordinal, slots| state.is_settled(&log(ordinal, slots));
    assert!(is_settled(4, 99) && is_settled(5, 7) && !is_settled(5, 8) && !is_settled(6, 0));
}

#[test]
fn a_lane_is_touched_once_until_a_pass_clears_it() {
    let lane: Lane<crate::tests::Still> = Lane::empty(LaneId(3), 16, 1);
    assert!(!lane.is_touched());
    assert_eq!([lane.touch(), lane.touch(), lane.is_touched()], [true, false, true]);
    lane.clear_touched();
    assert!(!lane.is_touched() && lane.touch());
    let held = lane.lock();
    assert!(lane.state.is_locked() && lane.state.try_lock().is_none());
    drop(held);
    assert!(!lane.state.is_locked());
}

#[test]
fn the_blocks_of_a_long_write_are_found_one_by_one_and_its_scratch_is_returned() {
    let rig = crate::tests::rig::Rig::new(Default::default());
    let scratch = || {
        let state = rig.cache.lane(LaneId(0)).lock();
        (state.checksums.len(), state.checksums.as_ptr())
    };
    let first = scratch();
    assert!(rig.write(ByteRange::at(0, 4096), 1));
    assert_eq!(scratch(), first);
    assert!(rig.write(ByteRange { start: 4096 + 512, end: 5 * 4096 }, 2));
    assert_eq!((scratch(), first.0), (first, MANY_BLOCKS));
    let (segment, _, record) = rig.newest(2 * 4096);
    for block in [2, 3, 4] {
        let range = ByteRange::at(block * 4096, 4096);
        let found = rig.cache.lane(LaneId(0)).lock().pin_block(rig.cache.base(), range).expect("it is whole");
        let at = segment.base + u64::from(record.data_offset.get()) + range.start - record.range().start;
        assert_eq!((found.at, found.checksum), (at, cbd_format::crc32c(&[2; 4096])));
    }
    let first = ByteRange::at(4096, 4096);
    assert!(rig.cache.lane(LaneId(0)).lock().pin_block(rig.cache.base(), first).is_none());
}
