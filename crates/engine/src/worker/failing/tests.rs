//! When what the backing device refuses is tried again, and how it is narrowed down.

use super::*;
use crate::position::Location;
use crate::worker::writeback::Content;
use cbd_types::LaneId;

const SECTOR: u64 = 512;
const KIB: u64 = 1024;
const REQUEST_MAX: u64 = 1 << 20;

fn piece(start: u64, end: u64) -> Piece {
    data(start, end, 0)
}

/// Data of the record in `slot`.
fn data(start: u64, end: u64, slot: u32) -> Piece {
    let location = Location { segment: 0, slot };
    (ByteRange { start, end }, Content::Data { location, lane: LaneId(0), sequence: 1 })
}

fn flight(start: u64, end: u64) -> Flight {
    Flight::new(alloc::vec![piece(start, end)])
}

fn failing() -> Failing {
    Failing::new(SECTOR as u32, RangeMap::default())
}

fn park(after_s: u32) -> Settings {
    Settings { on_write_error: OnWriteError::Park, write_error_after_s: after_s, ..Settings::default() }
}

fn stop(after_s: u32) -> Settings {
    Settings { on_write_error: OnWriteError::Stop, ..park(after_s) }
}

/// The ranges of what is tried again now, up to 100 of them.
fn tried(failing: &mut Failing, settings: &Settings, now: u64) -> Vec<ByteRange> {
    (0..100).map_while(|_| failing.next(settings, now)?.range()).collect()
}

fn ranges(pieces: &[Piece]) -> Vec<ByteRange> {
    pieces.iter().map(|(range, _)| *range).collect()
}

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange { start, end }
}

#[test]
fn attempts_are_a_quarter_of_a_second_apart_at_first_and_eight_seconds_later() {
    let mut failing = failing();
    let mut now = 1000;
    for delay in [250, 500, 1000, 2000, 4000, 8000, 8000, 8000] {
        failing.note(now);
        assert_eq!(failing.retry_at_ms(), now + delay);
        // Others that fail meanwhile change nothing.
        failing.note(now + delay - 1);
        assert_eq!(failing.retry_at_ms(), now + delay);
        now += delay;
    }
    failing.recovered();
    failing.note(now);
    assert_eq!(failing.retry_at_ms(), now + 250);
}

#[test]
fn what_was_refused_is_tried_again_when_it_is_due() {
    let mut failing = failing();
    let settings = stop(0);
    failing.add(flight(0, 64 * KIB), &settings, 1000);
    assert_eq!((failing.waiting(), failing.due_ms()), (1, Some(1250)));
    assert!(failing.next(&settings, 1249).is_none());
    assert_eq!(failing.waiting(), 1, "it still waits");
    assert_eq!(tried(&mut failing, &settings, 1250), [range(0, 64 * KIB)]);
    assert_eq!((failing.waiting(), failing.due_ms()), (0, None));
}

#[test]
fn the_first_that_is_due_is_tried_first() {
    let mut failing = failing();
    let settings = stop(60);
    failing.add(flight(0, 4 * KIB), &settings, 1000);
    failing.add(flight(8 * KIB, 12 * KIB), &settings, 1250);
    assert_eq!(failing.due_ms(), Some(1250));
    assert_eq!(tried(&mut failing, &settings, 1250), [range(0, 4 * KIB)]);
    assert_eq!(failing.due_ms(), Some(1750));
    assert_eq!(tried(&mut failing, &settings, 1750), [range(8 * KIB, 12 * KIB)]);
}

#[test]
fn a_request_in_flight_comes_back_once() {
    let mut failing = failing();
    failing.submitted(OpToken(3), flight(0, 512));
    assert!(failing.returned(OpToken(4)).is_none());
    assert_eq!(failing.returned(OpToken(3)).and_then(|flight| flight.range()), Some(range(0, 512)));
    assert!(failing.returned(OpToken(3)).is_none());
}

#[test]
fn after_the_bound_a_request_is_cut_into_blocks_and_those_into_sectors() {
    let mut failing = failing();
    let settings = park(10);
    failing.add(flight(6 * KIB, 14 * KIB), &settings, 0);
    assert_eq!(tried(&mut failing, &settings, 9999), [range(6 * KIB, 14 * KIB)], "not before the bound");
    failing.add(flight(6 * KIB, 14 * KIB), &settings, 9999);
    let blocks = [range(6 * KIB, 8 * KIB), range(8 * KIB, 12 * KIB), range(12 * KIB, 14 * KIB)];
    // The parts are tried at once, whenever the request was due.
    let first = failing.next(&settings, 10_000).expect("the first block");
    assert_eq!(first.range(), Some(blocks[0]));
    failing.add(first, &settings, 10_000);
    // A block that failed is cut when it comes to its turn; the other blocks stand before it.
    let second = failing.next(&settings, 10_000).expect("cut further");
    assert_eq!(second.range(), Some(range(8 * KIB, 8 * KIB + 512)));
    assert_eq!(tried(&mut failing, &settings, 10_000).len(), 7 + 4 + 4);
    // A sector that fails is refused.
    failing.add(second, &settings, 10_000);
    assert_eq!(ranges(failing.refused()), [range(8 * KIB, 8 * KIB + 512)]);
    assert_eq!(failing.waiting(), 0);
}

#[test]
fn where_sectors_are_blocks_a_request_is_cut_once() {
    let mut failing = Failing::new(4096, RangeMap::default());
    let settings = park(0);
    failing.add(flight(0, 12 * KIB), &settings, 5);
    let first = failing.next(&settings, 5).expect("a block");
    assert_eq!(first.range(), Some(range(0, 4 * KIB)));
    failing.add(first, &settings, 5);
    assert_eq!(ranges(failing.refused()), [range(0, 4 * KIB)]);
}

#[test]
fn pieces_of_one_block_stay_together_when_a_request_is_cut() {
    let mut failing = failing();
    let settings = park(0);
    let pieces = alloc::vec![piece(0, 512), piece(512, KIB), piece(KIB, 8 * KIB)];
    failing.add(Flight::new(pieces), &settings, 0);
    let first = failing.next(&settings, 0).expect("the first block");
    assert_eq!(ranges(&first.pieces), [range(0, 512), range(512, KIB), range(KIB, 4 * KIB)]);
    let second = failing.next(&settings, 0).expect("its turn");
    assert_eq!(second.range(), Some(range(4 * KIB, 4 * KIB + 512)), "the second block is cut into sectors");
}

#[test]
fn a_device_that_stops_never_narrows_down() {
    let mut failing = failing();
    let settings = stop(0);
    failing.add(flight(0, 512), &settings, 0);
    assert!(failing.refused().is_empty());
    assert_eq!(tried(&mut failing, &settings, 250), [range(0, 512)]);
}

#[test]
fn one_sector_is_refused_only_after_the_bound() {
    let mut failing = failing();
    let settings = park(10);
    failing.add(flight(0, 512), &settings, 0);
    assert!(failing.refused().is_empty() && failing.waiting() == 1);
    failing.add(flight(512, KIB), &settings, 9_999);
    assert_eq!(failing.waiting(), 2);
    failing.add(flight(KIB, KIB + 512), &settings, 10_000);
    assert_eq!(ranges(failing.refused()), [range(KIB, KIB + 512)]);
}

#[test]
fn the_bound_counts_from_the_last_time_the_device_took_what_it_had_refused() {
    let mut failing = failing();
    let settings = park(10);
    failing.add(flight(0, 4 * KIB), &settings, 0);
    let again = failing.next(&settings, 250).expect("it is due");
    // A request that was never refused shows nothing.
    failing.taken(&flight(8 * KIB, 12 * KIB), 7000);
    assert!(failing.is_past_bound(&settings, 10_000));
    failing.taken(&again, 6000);
    assert!(!failing.is_past_bound(&settings, 15_999) && failing.is_past_bound(&settings, 16_000));
}

#[test]
fn requests_fail_only_where_nothing_else_helps() {
    let mut failing = failing();
    assert!(!failing.is_stalled(&stop(0), 99_999), "nothing has failed");
    failing.note(1000);
    assert!(!failing.is_stalled(&stop(10), 10_999) && failing.is_stalled(&stop(10), 11_000));
    assert!(!failing.is_stalled(&park(10), 99_999), "it is parked");
    failing.too_much(20_000, REQUEST_MAX);
    assert!(failing.is_stalled(&park(10), 79_999) && !failing.is_stalled(&park(10), 80_000));
    failing.recovered();
    assert!(!failing.is_stalled(&stop(0), 99_999));
}

#[test]
fn a_device_that_refuses_eight_flushes_for_long_stalls_also_where_it_parks() {
    let mut failing = failing();
    for number in 0..8 {
        assert!(!failing.is_stalled(&park(10), 99_999), "{number} flushes failed");
        failing.flush_failed(1000);
    }
    assert!(!failing.is_stalled(&park(10), 10_999) && failing.is_stalled(&park(10), 11_000));
    assert!(failing.flush_worked(), "that is news");
    assert!(!failing.flush_worked() && !failing.is_stalled(&park(10), 99_999));
}

#[test]
fn a_batch_that_is_given_up_leaves_nothing_to_be_tried() {
    let mut failing = failing();
    let settings = park(0);
    failing.add(flight(0, 4 * KIB), &settings, 0);
    failing.add(flight(8 * KIB, 8 * KIB + 512), &settings, 0);
    failing.submitted(OpToken(1), flight(0, 512));
    failing.forget_batch();
    assert!(failing.refused().is_empty() && failing.waiting() == 0 && failing.returned(OpToken(1)).is_none());
    assert!(failing.is_past_bound(&settings, 0), "the device has not recovered");
}

#[test]
fn refused_sectors_come_in_order() {
    let mut failing = failing();
    let settings = park(0);
    for start in [3, 1, 2] {
        failing.add(flight(start * KIB, start * KIB + 512), &settings, 0);
    }
    let starts: Vec<_> = failing.take_refused().iter().map(|(range, _)| range.start / KIB).collect();
    assert_eq!(starts, [1, 2, 3]);
    assert!(failing.refused().is_empty());
}

#[test]
fn what_was_parked_is_refused_at_once_until_the_device_takes_it() {
    let mut failing = failing();
    let settings = park(10);
    assert!(!failing.has_known());
    failing.parked(range(0, 512));
    failing.parked(range(512, KIB));
    assert!(failing.has_known());
    failing.add(flight(0, 512), &settings, 1000);
    assert_eq!(ranges(&failing.take_refused()), [range(0, 512)]);
    failing.add(flight(KIB, KIB + 512), &settings, 1000);
    assert!(failing.refused().is_empty(), "it was never refused before");
    failing.taken(&flight(0, 512), 1000);
    assert!(!failing.is_known(range(0, 512)) && failing.is_known(range(512, KIB)));
}

#[test]
fn a_range_is_known_if_all_of_it_is() {
    let mut known = RangeMap::default();
    known.insert(range(0, 4), (), |()| false);
    known.insert(range(4, 8), (), |()| false);
    known.insert(range(10, 12), (), |()| false);
    let failing = Failing::new(512, known);
    for (start, end) in [(0, 4), (0, 8), (2, 6), (10, 12), (3, 4)] {
        assert!(failing.is_known(range(start, end)), "{start} to {end}");
    }
    for (start, end) in [(0, 9), (8, 10), (9, 11), (6, 11), (11, 13), (12, 13)] {
        assert!(!failing.is_known(range(start, end)), "{start} to {end}");
    }
}

#[test]
fn a_piece_is_cut_at_the_borders_of_what_was_refused() {
    let mut known = RangeMap::default();
    known.insert(range(4, 6), (), |()| false);
    known.insert(range(6, 8), (), |()| false);
    known.insert(range(10, 12), (), |()| false);
    let failing = Failing::new(512, known);
    let cut = |start, end| ranges(&failing.cut_at_known(piece(start, end)));
    let expected = [(0, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 20)];
    assert_eq!(cut(0, 20), expected.map(|(start, end)| range(start, end)));
    assert_eq!(cut(5, 11), [(5, 6), (6, 8), (8, 10), (10, 11)].map(|(start, end)| range(start, end)));
    assert_eq!(cut(13, 15), [range(13, 15)]);
}

#[test]
fn the_number_of_ranges_that_are_known_has_a_limit() {
    let mut failing = failing();
    for number in 0..KNOWN_MAX as u64 + 10 {
        failing.parked(ByteRange::at(number * KIB, 512));
    }
    assert_eq!(failing.known.iter().count(), KNOWN_MAX);
}

#[test]
fn what_cannot_be_parked_is_tried_again_in_few_requests_and_not_narrowed_down_for_a_minute() {
    let mut failing = failing();
    let settings = park(0);
    failing.add(flight(4 * KIB, 8 * KIB), &settings, 0);
    for start in [2, 3] {
        failing.add(flight(start * 512, start * 512 + 512), &settings, 0);
    }
    failing.too_much(1000, REQUEST_MAX);
    assert!(failing.refused().is_empty());
    assert_eq!(failing.due_ms(), Some(1500));
    assert!(failing.next(&settings, 1499).is_none(), "not narrowed down");
    assert_eq!(tried(&mut failing, &settings, 1500), [range(KIB, 2 * KIB), range(4 * KIB, 8 * KIB)]);
    failing.add(flight(0, 512), &settings, 60_999);
    assert!(failing.refused().is_empty());
    failing.add(flight(0, 512), &settings, 61_000);
    assert_eq!(failing.refused().len(), 1);
}

#[test]
fn neighbours_join_up_to_the_longest_request_and_only_what_is_alike() {
    let put_back = |pieces: &[Piece], request_max| {
        let mut failing = failing();
        failing.put_back(pieces.to_vec(), 1000, 1250, request_max);
        tried(&mut failing, &stop(0), 2000)
    };
    assert_eq!(put_back(&[data(0, 512, 1), data(512, KIB, 2)], KIB), [range(0, KIB)]);
    assert_eq!(put_back(&[piece(0, 512), piece(512, KIB)], KIB - 1), [range(0, 512), range(512, KIB)]);
    assert_eq!(put_back(&[piece(512, KIB), piece(2048, 2560)], REQUEST_MAX).len(), 2);
    assert_eq!(put_back(&[piece(0, 512), (range(512, KIB), Content::Zeroes)], REQUEST_MAX).len(), 2);
    let many = [piece(KIB, 2048), piece(0, KIB), piece(2048, 3072)];
    assert_eq!(put_back(&many, 2048), [range(0, 2048), range(2048, 3072)]);
}

#[test]
fn neighbours_far_from_the_begin_of_the_device_join_too() {
    let mut failing = failing();
    let far = 1 << 40;
    let pieces = alloc::vec![piece(far, far + 512), piece(far + 512, far + KIB)];
    failing.put_back(pieces, 1000, 1250, KIB);
    assert_eq!(tried(&mut failing, &stop(0), 2000), [range(far, far + KIB)]);
}

#[test]
fn a_batch_that_came_through_leaves_nothing_behind() {
    let mut failing = failing();
    failing.add(flight(0, 512), &park(0), 0);
    failing.add(flight(0, 4 * KIB), &park(0), 0);
    failing.recovered();
    assert!(failing.refused().is_empty() && failing.waiting() == 0);
}

#[test]
fn pieces_of_one_block_stay_together_anywhere_on_the_device() {
    let mut failing = failing();
    let base = 8 * KIB;
    failing.add(
        Flight::new(alloc::vec![piece(base, base + 512), piece(base + 512, base + KIB)]),
        &park(0),
        0,
    );
    let block = failing.next(&park(0), 0).expect("a block");
    assert_eq!(ranges(&block.pieces), [range(base, base + 512), range(base + 512, base + KIB)]);
}

#[test]
fn after_a_batch_that_came_through_sectors_are_narrowed_down_at_once_again() {
    let mut failing = failing();
    failing.too_much(1000, REQUEST_MAX);
    failing.recovered();
    failing.add(flight(0, 512), &park(0), 1001);
    assert_eq!(failing.refused().len(), 1);
    let mut failing = self::failing();
    failing.too_much(0, REQUEST_MAX);
    failing.recovered();
    failing.add(flight(0, 512), &park(0), 0);
    assert_eq!(failing.refused().len(), 1, "at any time");
}

#[test]
fn a_flush_that_works_is_news_after_one_that_failed_and_only_then() {
    let mut failing = failing();
    failing.note(0);
    assert!(!failing.flush_worked() && failing.is_past_bound(&park(0), 0), "other failures go on");
    failing.flush_failed(0);
    assert!(failing.flush_worked() && !failing.is_past_bound(&park(0), 0));
}
