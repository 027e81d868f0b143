//! The bound on devices that are modelled by a rate, a latency and a number of operations at a time.

extern crate std;

use super::*;
use alloc::{collections::VecDeque, vec::Vec};
use cbd_types::{AlignedBuffer, ByteRange};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const DEPTH: usize = 64;
const NO_CLIENTS: Moved = Moved { requests: 0, bytes: 0 };

fn write(bytes: u64) -> BackingOp {
    let mut buffer = AlignedBuffer::default();
    buffer.resize(bytes as usize);
    BackingOp::Write { offset: 0, buffer }
}

const DATA: Content = Content::Data {
    location: crate::position::Location { segment: 0, slot: 0 },
    lane: cbd_types::LaneId(0),
    sequence: 0,
};

/// A disk that moves so many bytes and begins so many operations in a second, one after the other.
struct Disk {
    bytes_per_s: u64,
    operations_per_s: u64,
    free_us: u64,
    /// When each operation ends, in microseconds.
    submitted: VecDeque<(u64, BackingOp)>,
}

impl Disk {
    fn new(bytes_per_s: u64, operations_per_s: u64) -> Self {
        Self { bytes_per_s, operations_per_s, free_us: 0, submitted: VecDeque::new() }
    }

    fn submit(&mut self, op: BackingOp, bytes: u64, now_us: u64) {
        let took = 1_000_000 / self.operations_per_s + bytes * 1_000_000 / self.bytes_per_s;
        self.free_us = self.free_us.max(now_us) + took;
        self.submitted.push_back((self.free_us, op));
    }
}

/// What is seen of a run.
struct Run {
    /// The longest time that all in flight needed from then on, in milliseconds, after the first second.
    backlog_ms: u64,
    bytes: u64,
    deepest: usize,
}

/// Keeps the disk busy with requests of `wanted` bytes at most for `seconds`, up to the depth of a queue.
fn run(window: &mut InFlight, disk: &mut Disk, wanted: u64, begin_us: u64, seconds: u64) -> Run {
    let mut seen = Run { backlog_ms: 0, bytes: 0, deepest: 0 };
    let mut now_us = begin_us;
    let end_us = begin_us + seconds * 1_000_000;
    while now_us < end_us {
        while disk.submitted.len() < DEPTH && window.has_room(Some(&DATA)) {
            let bytes = wanted.min(window.request_max(&DATA));
            let op = write(bytes);
            window.begin(&op, NO_CLIENTS, now_us / 1000);
            disk.submit(op, bytes, now_us);
        }
        seen.deepest = seen.deepest.max(disk.submitted.len());
        if now_us > begin_us + 1_000_000 {
            seen.backlog_ms = seen.backlog_ms.max((disk.free_us - now_us) / 1000);
        }
        let Some((ends_us, op)) = disk.submitted.pop_front() else { panic!("nothing may be in flight") };
        now_us = now_us.max(ends_us);
        if let BackingOp::Write { buffer, .. } = &op {
            seen.bytes += buffer.len() as u64;
        }
        window.end(&op);
        window.measure(NO_CLIENTS, now_us / 1000);
    }
    seen
}

#[test]
fn a_slow_disk_has_no_more_in_flight_than_it_completes_in_some_seconds() {
    for (bytes_per_s, operations_per_s) in
        [(64 * KIB, 1000), (256 * KIB, 1000), (MIB, 1000), (4 * MIB, 50), (30 * MIB, 50), (MIB, 4)]
    {
        for wanted in [4 * KIB, 64 * KIB, MIB] {
            let (mut window, mut disk) = (InFlight::new(), Disk::new(bytes_per_s, operations_per_s));
            let seen = run(&mut window, &mut disk, wanted, 0, 120);
            let case = (bytes_per_s, operations_per_s, wanted);
            assert!(seen.backlog_ms <= 5000, "{case:?}: {} ms", seen.backlog_ms);
        }
    }
}

#[test]
fn the_bound_does_not_slow_a_disk() {
    // The most that the model can do with requests of this size.
    for (bytes_per_s, operations_per_s) in
        [(MIB, 1000), (20 * MIB, 20), (150 * MIB, 80), (2000 * MIB, 100_000)]
    {
        for wanted in [4 * KIB, MIB] {
            let (mut window, mut disk) = (InFlight::new(), Disk::new(bytes_per_s, operations_per_s));
            let seen = run(&mut window, &mut disk, wanted, 0, 30);
            let request_us = 1_000_000 / operations_per_s + wanted * 1_000_000 / bytes_per_s;
            let best = 30 * 1_000_000 / request_us * wanted;
            let case = (bytes_per_s, operations_per_s, wanted);
            assert!(seen.bytes >= best / 100 * 97, "{case:?}: {} of {best} bytes", seen.bytes);
        }
    }
}

#[test]
fn a_disk_that_keeps_up_gets_the_whole_depth_after_a_moment() {
    for (bytes_per_s, operations_per_s, wanted) in [(2000 * MIB, 100_000, MIB), (150 * MIB, 80, 4 * KIB)] {
        let (mut window, mut disk) = (InFlight::new(), Disk::new(bytes_per_s, operations_per_s));
        let seen = run(&mut window, &mut disk, wanted, 0, 1);
        assert_eq!(seen.deepest, DEPTH, "{bytes_per_s} {operations_per_s}");
    }
}

#[test]
fn a_disk_that_becomes_slow_is_noticed_and_one_that_recovers_too() {
    let (mut window, mut disk) = (InFlight::new(), Disk::new(500 * MIB, 10_000));
    assert_eq!(run(&mut window, &mut disk, MIB, 0, 2).deepest, DEPTH);
    // What it has absorbed is full. What is in flight at that moment takes its time.
    (disk.bytes_per_s, disk.operations_per_s) = (2 * MIB, 100);
    run(&mut window, &mut disk, MIB, 2_000_000, 60);
    let seen = run(&mut window, &mut disk, MIB, 62_000_000, 30);
    assert!(seen.backlog_ms <= 5000, "{} ms", seen.backlog_ms);
    (disk.bytes_per_s, disk.operations_per_s) = (500 * MIB, 10_000);
    let free_us = disk.free_us;
    let seen = run(&mut window, &mut disk, MIB, free_us, 5);
    assert_eq!(seen.deepest, DEPTH);
}

#[test]
fn what_completes_at_one_time_is_measured_at_once() {
    let mut window = InFlight::new();
    window.assume_a_fast_disk();
    let ops: Vec<BackingOp> = (0..16).map(|_| write(MIB)).collect();
    ops.iter().for_each(|op| window.begin(op, NO_CLIENTS, 0));
    // 1 MiB a second. After so long the former bound counts for nothing.
    ops.iter().for_each(|op| window.end(op));
    window.measure(NO_CLIENTS, 16_000);
    assert!(window.data.bytes.present <= 4 * MIB, "{} bytes", window.data.bytes.present);
}

#[test]
fn a_pause_between_requests_is_not_the_disks() {
    let (mut window, mut disk) = (InFlight::new(), Disk::new(500 * MIB, 10_000));
    run(&mut window, &mut disk, MIB, 0, 2);
    let before = window.data.bytes.present;
    disk.submitted.drain(..).for_each(|(_, op)| window.end(&op));
    window.measure(NO_CLIENTS, 2100);
    for second in 3..60 {
        let op = write(4096);
        window.begin(&op, NO_CLIENTS, second * 1000);
        window.end(&op);
        window.measure(NO_CLIENTS, second * 1000 + 1);
    }
    assert_eq!(window.data.bytes.present, before);
}

#[test]
fn a_disk_that_is_busy_for_clients_is_not_a_slow_one() {
    let mut window = InFlight::new();
    // 16 MiB of writeback are in flight behind what clients read at 48 MiB a second.
    window.data.bytes.present = 16 * MIB;
    window.data.requests.present = 64;
    let mut others = NO_CLIENTS;
    let ops: Vec<BackingOp> = (0..16).map(|_| write(MIB)).collect();
    ops.iter().for_each(|op| window.begin(op, others, 0));
    for (number, op) in ops.iter().enumerate() {
        others.bytes += 12 * MIB;
        others.requests += 12;
        window.end(op);
        window.measure(others, 250 * (number as u64 + 1));
    }
    assert!(window.data.bytes.present >= 16 * MIB, "{} bytes", window.data.bytes.present);
    assert!(window.data.requests.present >= 64);
}

#[test]
fn zeroes_and_discards_have_a_bound_of_their_own() {
    let mut window = InFlight::new();
    assert_eq!(window.request_max(&Content::Zeroes), 128 * KIB);
    let mut in_flight = 0;
    while window.has_room(Some(&Content::Discard)) {
        let range = ByteRange::at(0, 128 * KIB);
        let op =
            if in_flight % 2 == 0 { BackingOp::Discard { range } } else { BackingOp::WriteZeroes { range } };
        window.begin(&op, NO_CLIENTS, 0);
        in_flight += 1;
    }
    assert_eq!(in_flight, 2);
    assert!(window.has_room(Some(&DATA)) && !window.has_room(Some(&Content::Zeroes)));
    assert!(!window.has_room(None));
    let mut number = 0;
    while window.request_max(&Content::Zeroes) < ZERO_MAX {
        let op = BackingOp::WriteZeroes { range: ByteRange::at(0, 128 * KIB) };
        window.end(&op);
        window.measure(NO_CLIENTS, 0);
        window.begin(&op, NO_CLIENTS, 0);
        number += 1;
        assert!(number < 10_000, "it grows while the disk keeps up");
    }
    assert_eq!(window.request_max(&DATA), 128 * KIB);
    window.end(&BackingOp::Flush);
    window.measure(NO_CLIENTS, 0);
    assert!(window.has_room(Some(&DATA)), "flushes count for nothing");
}
