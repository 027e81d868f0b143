//! What a queue counts and times, against what its client counts and times.

use cbd_backing::{Backing, BackingFile, Options};
use cbd_device::{Device, Outcome, Queue};
use cbd_engine::{FormatOptions, Transport};
use cbd_pmem::Mapping;
use cbd_runtime::environment::monotonic_ns;
use cbd_runtime::{Disk, NewBackend, ProcessEnvironment};
use cbd_types::figures::{HistogramCounts, shortest_of};
use cbd_types::{ByteRange, HostId, Operation, Region};
use std::sync::Arc;
use std::task::Waker;

const BLOCK: u64 = 4096;

/// The bounds of the bucket in which the share `q` of the durations ends.
fn percentile(counts: &HistogramCounts, q: f64) -> (f64, f64) {
    let total: u64 = counts.buckets.iter().sum();
    let mut counted = 0;
    let bucket = counts.buckets.iter().position(|count| {
        counted += count;
        counted as f64 >= q * total as f64
    });
    let bucket = bucket.expect("something was timed");
    (shortest_of(bucket) as f64, shortest_of(bucket + 1) as f64)
}

/// The requests of a client that times each of them.
#[derive(Default)]
struct Timed(Vec<u64>);

impl Timed {
    fn request<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begun = monotonic_ns();
        let result = work();
        self.0.push(monotonic_ns() - begun);
        result
    }

    fn assert_agrees(mut self, what: &str, counts: &HistogramCounts, shares: &[f64]) {
        self.0.sort_unstable();
        let exact = |q: f64| self.0[(q.clamp(0.0, 1.0) * (self.0.len() - 1) as f64) as usize] as f64;
        let timed: u64 = counts.buckets.iter().sum();
        // More of the tail would be a matter of how few of the slowest are timed.
        for &q in shares {
            // What so few of the requests can say of all, in 999 of 1000 cases.
            let slack = 3.3 * (q * (1.0 - q) / timed as f64).sqrt();
            let (least, most) = (exact(q - slack), exact(q + slack));
            let (from, to) = percentile(counts, q);
            // The client's own looks at the clock are not in what the queue has timed.
            let own = 60.0;
            assert!(
                (least - own) / 1.125 <= to && from <= most * 1.125,
                "{what}: {q} of the requests took {least} to {most} ns, and by the figures of {timed} of them {from} to {to} ns"
            );
        }
    }
}

#[test]
fn what_a_client_in_process_counts_and_times_is_what_the_figures_say() {
    const REQUESTS: u64 = 100_000;
    let environment = Arc::new(ProcessEnvironment::new());
    let region = Region::new(Mapping::anonymous(64 << 20).expect("memory"));
    let transport = Transport::format(environment, region, &FormatOptions::default()).expect("a transport");
    let file = tempfile::NamedTempFile::new().expect("a file");
    file.as_file().set_len(16 << 20).expect("it grows");
    let disk = Disk::inspect(file.path()).expect("a disk");
    let new = NewBackend {
        host: HostId(0),
        path: file.path().display().to_string(),
        cache_bytes: Some(32 << 20),
        handlers: 1,
        data_crc: true,
        settings: cbd_engine::Settings::default(),
        name: None,
    };
    let cache = transport.open_cache(new.create(&transport, &disk).expect("a row")).expect("a cache");
    let backing = BackingFile::open(file.path(), Options::default()).expect("opened");
    let device = Arc::new(Device::cached(cache, backing.geometry()).with_clock(monotonic_ns));
    let queue = backing.open_queue(8).expect("a queue");
    let mut queue = Queue::new(Arc::clone(&device), queue, Waker::noop().clone());

    let (mut writes, mut reads) = (Timed::default(), Timed::default());
    let mut block = [7; BLOCK as usize];
    // Without a background worker the cache takes about 24 MiB of writes.
    const BLOCKS: u64 = 4000;
    for number in 0..BLOCKS {
        let range = ByteRange::at(number * 37 % BLOCKS * BLOCK, BLOCK);
        writes.request(|| queue.write_from(0, range, &block, false)).expect("space").expect("written");
    }
    for number in 0..REQUESTS {
        let range = ByteRange::at(number * 101 % BLOCKS * BLOCK, BLOCK);
        reads.request(|| queue.read_into(0, range, &mut block)).expect("a hit").expect("read");
    }
    let figures = device.figures();
    let written = figures.of(Operation::Write).expect("a queue").of(Outcome::Cached);
    assert_eq!((written.count, written.sum), (BLOCKS, BLOCKS * BLOCK));
    let read = figures.of(Operation::Read).expect("a queue").of(Outcome::Cached);
    assert_eq!((read.count, read.sum), (REQUESTS, REQUESTS * BLOCK));
    let timed = |operation| figures.of(operation).expect("a queue").latency.clone();
    reads.assert_agrees("reads", &timed(Operation::Read), &[0.25, 0.5, 0.75]);
    writes.assert_agrees("writes", &timed(Operation::Write), &[0.5]);
}
