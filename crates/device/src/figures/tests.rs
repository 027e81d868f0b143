//! Sampling: which requests are timed, and what they count for.

use super::*;
use alloc::sync::Arc;
use core::cell::Cell;
use std::thread_local;

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(1) };
}

fn clock() -> u64 {
    NOW.get()
}

fn meter(number: u32) -> (Arc<Cells>, Meter<true>) {
    let cells = Arc::new(Cells::new());
    (Arc::clone(&cells), Meter::new(cells, Some(clock), number))
}

fn read(cells: &Cells) -> DeviceFigures {
    let mut figures = DeviceFigures::default();
    cells.read(&mut figures);
    figures
}

/// A request that ends at once after so many nanoseconds. Returns whether it was timed.
fn once(meter: &mut Meter<true>, took: u64) -> bool {
    let begun = meter.begin(Operation::Read);
    NOW.set(NOW.get() + took);
    meter.count_at_once(Operation::Read, 4096, begun);
    begun > 0
}

#[test]
fn one_of_many_is_timed_and_counts_for_those_before_it() {
    const REQUESTS: u64 = 1_000_000;
    let (cells, mut meter) = meter(3);
    let timed = (0..REQUESTS).filter(|_| once(&mut meter, 300)).count();
    assert!((REQUESTS / 580..REQUESTS / 440).contains(&(timed as u64)), "{timed} are timed");
    let figures = read(&cells);
    let reads = figures.of(Operation::Read).expect("it has a queue");
    assert_eq!(reads.of(Outcome::Cached), Counted { count: REQUESTS, sum: REQUESTS * 4096 });
    let counted = reads.latency.buckets.iter().sum::<u64>();
    assert!(counted <= REQUESTS && counted > REQUESTS - 1024, "{counted} of {REQUESTS}");
    assert_eq!(reads.latency.sum_ns, counted * 300);
}

#[test]
fn where_there_are_few_requests_all_are_timed_again() {
    let (cells, mut meter) = meter(5);
    for _ in 0..10_000 {
        once(&mut meter, 300);
    }
    // The last gap, and those that become shorter.
    for _ in 0..4000 {
        NOW.set(NOW.get() + LATE_NS);
        once(&mut meter, 300);
    }
    for _ in 0..100 {
        NOW.set(NOW.get() + LATE_NS);
        assert!(once(&mut meter, 300));
    }
    let figures = read(&cells);
    let reads = figures.of(Operation::Read).expect("it has a queue");
    assert_eq!(reads.latency.buckets.iter().sum::<u64>(), 14_100);
}

#[test]
fn a_pattern_of_requests_is_not_mistaken_for_another_one() {
    // Every 64th request, and every 16th, takes longer: timing each 64th would see all of them or none.
    const REQUESTS: u64 = 4_000_000;
    for number in 0..4 {
        let (cells, mut meter) = meter(number);
        for request in 0..REQUESTS {
            let took = match request {
                _ if request % 64 == 5 => 100_000,
                _ if request % 16 == 3 => 2_000,
                _ => 200,
            };
            once(&mut meter, took);
        }
        let buckets = read(&cells).of(Operation::Read).expect("it has a queue").latency.buckets.clone();
        for (took, one_in) in [(100_000, 64), (2_000, 16)] {
            let counted = buckets[cbd_types::figures::bucket_of(took)] as f64;
            let exact = (REQUESTS / one_in) as f64;
            assert!((counted / exact - 1.0).abs() < 0.15, "{counted} instead of {exact} took {took} ns");
        }
    }
}

#[test]
fn a_batch_counts_for_all_its_requests() {
    let (cells, mut meter) = meter(1);
    let mut requests = 0;
    for batch in 0..100_000_u32 {
        let count = 1 + batch % 16;
        let begun = meter.begin_together(Operation::Write, count);
        NOW.set(NOW.get() + 1000);
        // The last one of some batches has to wait, and is counted elsewhere.
        let ended = count - u32::from(batch % 5 == 0);
        meter.count_together(Operation::Write, u64::from(ended) * 512, ended, begun);
        requests += u64::from(ended);
    }
    let figures = read(&cells);
    let writes = figures.of(Operation::Write).expect("it has a queue");
    assert_eq!(writes.total(), Counted { count: requests, sum: requests * 512 });
    let counted = writes.latency.buckets.iter().sum::<u64>();
    assert!(counted <= requests && counted > requests - 1024, "{counted} of {requests}");
}

#[test]
fn without_a_clock_requests_are_counted_and_not_timed() {
    let cells = Arc::new(Cells::new());
    let mut meter = Meter::<true>::new(Arc::clone(&cells), None, 0);
    for _ in 0..1000 {
        assert!(!once(&mut meter, 1));
    }
    let figures = read(&cells);
    let reads = figures.of(Operation::Read).expect("it has a queue");
    assert_eq!((reads.total().count, reads.latency.sum_ns), (1000, 0));
}

#[test]
fn each_outcome_has_a_cell_and_a_name_of_its_own() {
    for operation in Operation::ALL {
        let names: Vec<_> = Outcome::all().map(|outcome| outcome.name(operation)).collect();
        assert!(names.iter().enumerate().all(|(at, name)| !names[..at].contains(name)), "{names:?}");
    }
    assert!(Outcome::all().map(Outcome::cell).eq(0..OUTCOMES));
}

#[test]
fn the_cells_of_a_queue_take_a_bounded_memory() {
    let cells = Cells::new();
    let histogram = (1 + cbd_types::figures::BUCKETS) * size_of::<u64>();
    let bytes = size_of_val(&cells) + cells.operations.len() * (size_of::<OfOperation>() + histogram);
    assert!(bytes <= 14 << 10, "{bytes}");
    let meter = Meter::<true>::new(Arc::new(cells), Some(clock), 0);
    assert!(size_of_val(&meter) + size_of_val(&*meter.sampling) <= 256);
}
