//! Two slots on memory: which one is stored, what is read, and in which order stores and fences come.

use super::*;
use crate::tests::{Op, Ram};
use cbd_format::{FormerDisk, LaneTail};
use cbd_types::ByteRange;

const AT: [u64; 2] = [4096, 8192];
const PLACE: u64 = 5;
const PAGE: u64 = 4096;
const NAMES: InBoth = InBoth {
    first_fence: MutationPoint::TailFirstFence,
    second: MutationPoint::TailSecond,
    fence: MutationPoint::TailFence,
};

fn tail(ordinal: u64) -> LaneTail {
    LaneTail { ordinal: ordinal.into(), ownership: 1.into(), first_sequence: 1.into(), reserved: [0; 24] }
}

/// A region in which slot `which` of the object has `content` with this sequence number.
fn with(slots: [Option<(u64, LaneTail)>; 2]) -> Region<Ram> {
    let region = Ram::region(16 << 10);
    for (at, slot) in AT.into_iter().zip(slots) {
        if let Some((sequence, content)) = slot {
            let _ = region.store(at, &Slot { sequence, content }.encode(PLACE));
        }
    }
    region.memory().take_ops();
    region
}

fn read(region: &Region<Ram>) -> TwoSlots<LaneTail> {
    TwoSlots::read(region, AT, PLACE)
}

fn ordinal(slots: &TwoSlots<LaneTail>) -> Option<u64> {
    slots.content().map(|tail| tail.ordinal.get())
}

/// Sequence number and ordinal of a slot.
fn slot(region: &Region<Ram>, which: usize) -> Option<(u64, u64)> {
    let mut bytes = [0; 64];
    region.load(AT[which], &mut bytes).expect("it can be read");
    Slot::<LaneTail>::decode(PLACE, &bytes).map(|slot| (slot.sequence, slot.content.ordinal.get()))
}

fn store_of(which: usize) -> Op {
    Op::Store(AT[which], 64)
}

#[test]
fn stores_alternate_and_number_the_contents() {
    let region = Ram::region(16 << 10);
    let mut slots = TwoSlots::empty(AT, PLACE);
    assert!(slots.content().is_none() && !slots.is_lost() && !slots.is_behind());
    for (number, which) in [(1, 0), (2, 1), (3, 0), (4, 1)] {
        let _ = slots.store(&region, tail(10 * number));
        assert_eq!(region.memory().take_ops(), [store_of(which)]);
        assert_eq!(slot(&region, which), Some((number, 10 * number)));
        assert_eq!(ordinal(&slots), Some(10 * number));
        assert_eq!(ordinal(&read(&region)), Some(10 * number));
    }
}

#[test]
fn the_newest_valid_slot_counts_and_the_other_one_is_stored() {
    for (slots, newest, next) in [
        ([Some((1, tail(7))), None], 7, (1, 2)),
        ([None, Some((1, tail(7)))], 7, (0, 2)),
        ([Some((5, tail(7))), Some((4, tail(8)))], 7, (1, 6)),
        ([Some((5, tail(7))), Some((6, tail(8)))], 8, (0, 7)),
    ] {
        let region = with(slots);
        let mut slots = read(&region);
        assert_eq!(ordinal(&slots), Some(newest));
        let _ = slots.store(&region, tail(99));
        assert_eq!(slot(&region, next.0), Some((next.1, 99)));
    }
}

#[test]
fn a_slot_of_another_place_does_not_count() {
    let region = with([Some((1, tail(7))), None]);
    assert!(TwoSlots::<LaneTail>::read(&region, AT, PLACE + 1).content().is_none());
}

#[test]
fn the_other_slot_is_behind_if_it_can_be_read_and_says_something_else() {
    let both_say = |first: Option<(u64, LaneTail)>, second| read(&with([first, second])).is_behind();
    assert!(!both_say(None, None));
    assert!(!both_say(Some((1, tail(7))), Some((2, tail(7)))));
    assert!(!both_say(Some((2, tail(7))), Some((1, tail(7)))));
    assert!(both_say(Some((1, tail(7))), Some((2, tail(8)))));
    assert!(both_say(Some((2, tail(7))), Some((1, tail(8)))));
    assert!(both_say(Some((1, tail(7))), None));
    assert!(both_say(None, Some((1, tail(7)))));
    for (which, slots) in [(1, [Some((2, tail(7))), None]), (0, [None, Some((2, tail(7)))])] {
        let region = with(slots);
        region.memory().fail(ByteRange::at(AT[which], 64));
        let slots = read(&region);
        assert_eq!(ordinal(&slots), Some(7));
        assert!(!slots.is_behind(), "a store to failed memory may fail as well");
    }
}

#[test]
fn an_object_is_lost_if_neither_slot_is_valid_or_blank() {
    let damaged = |first: bool, second: bool| {
        let region = with([Some((1, tail(7))), Some((2, tail(8)))]);
        for (at, is_damaged) in AT.into_iter().zip([first, second]) {
            let _ = region.store(at + 20, if is_damaged { &[0xff; 4] } else { &[] });
        }
        read(&region).is_lost()
    };
    assert!(damaged(true, true));
    assert!(!damaged(true, false) && !damaged(false, true) && !damaged(false, false));
    let torn = |which: usize, other_fails: bool| {
        let region = Ram::region(16 << 10);
        let _ = region.store(AT[which], &[1]);
        if other_fails {
            region.memory().fail(ByteRange::at(AT[1 - which], 64));
        }
        read(&region).is_lost()
    };
    for which in 0..2 {
        assert!(!torn(which, false), "a first store that was torn leaves the other slot blank");
        assert!(torn(which, true), "failed memory is not blank");
    }
    assert!(!read(&Ram::region(16 << 10)).is_lost());
}

#[test]
fn a_store_ends_what_was_lost_or_behind() {
    let region = with([Some((1, tail(7))), Some((2, tail(8)))]);
    for at in AT {
        let _ = region.store(at + 20, &[0xff; 4]);
    }
    let mut lost = read(&region);
    let _ = lost.store(&region, tail(9));
    assert!(!lost.is_lost());
    let mut behind = read(&with([Some((1, tail(7))), None]));
    let _ = behind.store(&region, tail(9));
    assert!(!behind.is_behind());
}

#[test]
fn both_slots_are_written_back_if_one_of_them_is_valid() {
    let region = with([None, Some((1, tail(7)))]);
    let _ = read(&region).write_back(&region, MutationPoint::RecoveryTailWriteBack);
    assert_eq!(region.memory().take_ops(), AT.map(|at| Op::WriteBack(at, 64)));
    let blank = Ram::region(16 << 10);
    let _ = read(&blank).write_back(&blank, MutationPoint::RecoveryTailWriteBack);
    assert_eq!(blank.memory().take_ops(), []);
}

#[test]
fn a_content_for_both_slots_is_durable_in_the_first_before_the_second_is_stored() {
    let region = with([Some((1, tail(7))), None]);
    let mut slots = read(&region);
    slots.store_in_both(&region, NAMES, tail(8));
    assert_eq!(region.memory().take_ops(), [store_of(1), Op::Fence, store_of(0), Op::Fence]);
    assert_eq!([slot(&region, 0), slot(&region, 1)], [Some((3, 8)), Some((2, 8))]);
}

#[test]
fn what_is_kept_in_both_is_on_the_disk_before_the_other_slot_changes() {
    let region = Region::new(Ram::new(16 << 10, true));
    let mut slots = TwoSlots::empty(AT, PLACE);
    slots.keep_in_both(&region, NAMES, |it| *it = tail(8)).expect("no sync fails");
    let sync = |which: usize| Op::Sync(AT[which], 64);
    let kept = [store_of(0), Op::Fence, sync(0), store_of(1), Op::Fence, sync(1)];
    assert_eq!(region.memory().take_ops(), kept);
    // A page that the kernel believes to be clean is stored and synced again first.
    region.memory().fail_syncs(1);
    assert!(slots.keep_in_both(&region, NAMES, |it| *it = tail(9)).is_err());
    assert_eq!(region.memory().take_ops(), [store_of(0), Op::Fence, sync(0)]);
    slots.keep_in_both(&region, NAMES, |it| *it = tail(10)).expect("no sync fails");
    let again = [store_of(0), Op::Fence, sync(0), store_of(1), Op::Fence, sync(1)];
    assert_eq!(region.memory().take_ops(), [&again[..], &[store_of(0), Op::Fence, sync(0)]].concat());
}

#[test]
fn an_object_without_content_has_no_page_to_sync_again() {
    let region = Region::new(Ram::new(16 << 10, true));
    region.memory().fail_syncs(1);
    assert!(region.sync(MutationPoint::RowSync, 0, 64).is_err());
    region.memory().take_ops();
    let mut slots = TwoSlots::empty(AT, PLACE);
    slots.keep_in_both(&region, NAMES, |it| *it = tail(8)).expect("no sync fails");
    assert_eq!(region.memory().take_ops()[0], store_of(0));
}

#[test]
fn only_a_slot_that_is_behind_is_completed() {
    let region = with([Some((2, tail(7))), Some((1, tail(6)))]);
    let _ = read(&region).complete(&region);
    assert_eq!(region.memory().take_ops(), [store_of(1)]);
    assert_eq!(slot(&region, 1), Some((3, 7)));
    let _ = read(&region).complete(&region);
    let blank = Ram::region(16 << 10);
    let _ = read(&blank).complete(&blank);
    assert_eq!([region.memory().take_ops(), blank.memory().take_ops()].concat(), []);
}

#[test]
fn what_the_newest_slot_says_is_stored_again_durably() {
    let region = with([Some((2, tail(7))), None]);
    assert!(read(&region).store_again(&region));
    assert_eq!(region.memory().take_ops(), [store_of(1), Op::Fence]);
    assert_eq!(slot(&region, 1), Some((3, 7)));
    let blank = Ram::region(16 << 10);
    assert!(!read(&blank).store_again(&blank));
    assert_eq!(blank.memory().take_ops(), []);
}

#[test]
fn an_object_is_filled_without_a_fence_and_cleared_in_both_slots() {
    let region = with([Some((2, tail(7))), None]);
    let mut slots = read(&region);
    let _ = slots.fill(&region, MutationPoint::TailSecond, |it| *it = tail(8));
    assert_eq!(region.memory().take_ops(), [store_of(1), store_of(0)]);
    assert_eq!([slot(&region, 0), slot(&region, 1)], [Some((4, 8)), Some((3, 8))]);
    let _ = slots.clear(&region);
    assert_eq!(region.memory().take_ops(), [store_of(0), store_of(1)]);
    assert!(slots.content().is_none());
    assert_eq!([slot(&region, 0), slot(&region, 1)], [None, None]);
    let _ = slots.store(&region, tail(9));
    assert_eq!(slot(&region, 0), Some((1, 9)), "it begins again");
}

#[test]
fn a_long_content_is_stored_whole() {
    let region = Ram::region(16 << 10);
    let mut slots = TwoSlots::empty(AT, PLACE);
    let content = FormerDisk {
        path_length: 0.into(),
        identity_length: 0.into(),
        moved_ms: 1.into(),
        path: [2; 512],
        identity: [3; 256],
        number: 3.into(),
        reserved: [0; 216],
    };
    let _ = slots.store(&region, content);
    assert_eq!(region.memory().take_ops(), [Op::Store(AT[0], 1024)]);
    assert_eq!(TwoSlots::<FormerDisk>::read(&region, AT, PLACE).content(), Some(&content));
}

#[test]
fn only_the_page_of_the_newest_slot_is_stored_again() {
    let region = Region::new(Ram::new(16 << 10, true));
    let at = [PAGE - 64, 3 * PAGE - 64];
    let _ = region.store(PAGE, &[1; 64]);
    let mut slots = TwoSlots::empty(at, PLACE);
    let _ = slots.store(&region, tail(8));
    region.memory().fail_syncs(1);
    assert!(region.sync(MutationPoint::RowSync, 0, 64).is_err());
    region.memory().take_ops();
    slots.keep_in_both(&region, NAMES, |it| *it = tail(9)).expect("no sync fails");
    let ops = region.memory().take_ops();
    assert_eq!(ops[..3], [Op::Store(at[0], 64), Op::Fence, Op::Sync(at[0], 64)]);
}

#[test]
fn a_change_begins_with_the_present_content_or_with_zeroes() {
    let region = Ram::region(16 << 10);
    let mut slots = TwoSlots::<LaneTail>::empty(AT, PLACE);
    let next = |it: &mut LaneTail| {
        it.ordinal = (it.ordinal.get() + 1).into();
        it.first_sequence = 1.into();
    };
    for ordinal in 1..4 {
        let _ = slots.change(&region, next);
        assert_eq!(slots.content().map(|it| it.ordinal.get()), Some(ordinal));
        slots = read(&region);
    }
    let _ = slots.clear(&region);
    assert!(slots.content().is_none());
    let _ = slots.change(&region, next);
    assert_eq!(slots.content().map(|it| it.ordinal.get()), Some(1));
}
