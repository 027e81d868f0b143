//! A full cache keeps blocks that are read again: a scan that reads once does not evict them, and a block that is
//! missed twice is recorded.

use cbd_engine::{Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, Transport};
use cbd_sim::{CrashMemory, SimDisk, SimEnvironment, SimQueue, Watchdog, act_as};
use cbd_types::{ByteRange, Class, Region};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

const BLOCK: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
/// Including the state segment.
const SEGMENTS: u64 = 41;
/// Blocks that fit in a segment beside its header, its records and their copies.
const BLOCKS_PER_SEGMENT: u64 = 12;
/// Blocks that fit in the cache while a tenth of the segments is free.
const SPACE: u64 = 36 * BLOCKS_PER_SEGMENT;
/// Steps after which a background worker that is still busy counts as stuck.
const STEPS_MAX: usize = 50_000;

struct Rig {
    environment: Arc<SimEnvironment>,
    cache: Arc<Cache<SimEnvironment>>,
    worker: BackgroundWorker<SimEnvironment, SimQueue>,
    _watchdog: Watchdog,
}

impl Rig {
    fn new() -> Self {
        Self::with_lanes(1)
    }

    fn with_lanes(lanes_max: u32) -> Self {
        act_as(0);
        let environment = Arc::new(SimEnvironment::new(5, 0));
        let region = Region::new(CrashMemory::new((SEGMENTS + 4) * SEGMENT + (256 << 10)));
        let disk = SimDisk::new(SimDisk::ordinary(64 << 20, 512), 3);
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
            ..FormatOptions::default()
        };
        let transport = Transport::format(Arc::clone(&environment), region, &options).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host: transport.register_host("host", None).unwrap(),
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: 64 << 20,
                sector: 512,
                cache_bytes: Some(SEGMENTS * SEGMENT),
                lanes_max,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(4), disk.geometry());
        let _watchdog = Watchdog::new(Duration::from_secs(240), "what a full cache keeps");
        Self { environment, cache, worker, _watchdog }
    }

    /// Reads `count` blocks from block `first` on as a blkdev does, with background work in between; returns
    /// the number of hits.
    fn read(&mut self, first: u64, count: u64) -> u64 {
        let mut hits = 0;
        for block in first..first + count {
            let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
            self.cache.read(ByteRange::at(block * BLOCK, BLOCK), &mut bytes, &mut misses).unwrap();
            hits += u64::from(misses.is_empty());
            misses.into_iter().for_each(|miss| self.cache.complete_fill(miss, &bytes));
            self.settle();
        }
        hits
    }

    fn write(&mut self, first: u64, count: u64) {
        for block in first..first + count {
            let range = ByteRange::at(block * BLOCK, BLOCK);
            let admission = self.cache.write(range, &[1; BLOCK as usize], Waker::noop()).unwrap();
            assert!(matches!(admission, Admission::Done(_)), "there is space");
        }
        self.cache.request_drain();
        self.settle();
    }

    /// Runs the background worker until no work is left; the clock advances as the worker requests.
    fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            match self.worker.step() {
                Step::Idle { until_ms: None } => return,
                Step::Idle { until_ms: Some(until) } => {
                    self.environment.advance(until.saturating_sub(self.environment.clock_ms()).max(1));
                }
                Step::Busy | Step::WaitBacking => {}
            }
        }
        panic!("the background worker never becomes idle: {:?}", self.cache.status());
    }

    fn reclaim_at(&self, gc_percent: u8) {
        self.cache.set_settings(Settings { gc_percent, ..self.cache.settings() }).unwrap();
    }
}

#[test]
fn while_there_is_room_everything_is_recorded() {
    let mut rig = Rig::new();
    assert_eq!(rig.read(0, SPACE / 2), 0);
    assert_eq!(rig.read(0, SPACE / 2), SPACE / 2);
}

#[test]
fn a_scan_does_not_evict_blocks_that_are_read_again() {
    let mut rig = Rig::new();
    let hot = SPACE / 2;
    for _ in 0..3 {
        rig.read(0, hot);
    }
    assert_eq!(rig.read(1000, 4 * SPACE), 0);
    let left = rig.read(0, hot);
    assert!(left >= hot * 95 / 100, "{left} of {hot} hot blocks are left");
}

#[test]
fn a_block_that_is_missed_twice_is_recorded_in_a_full_cache() {
    let mut rig = Rig::new();
    rig.read(1000, 2 * SPACE);
    rig.read(0, 100);
    rig.read(0, 100);
    let hits = rig.read(0, 100);
    assert!(hits >= 75, "{hits} of 100 blocks are held");
}

#[test]
fn metadata_is_recorded_at_its_first_miss_in_a_full_cache_also_behind_the_cutoff() {
    let mut rig = Rig::new();
    rig.read(1000, 4 * SPACE);
    for block in 0..50 {
        let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
        rig.cache.read(ByteRange::at(block * BLOCK, BLOCK), &mut bytes, &mut misses).unwrap();
        for mut miss in misses {
            miss.set_class(Class::Metadata);
            rig.cache.complete_fill_behind_cutoff(miss, &bytes);
        }
        rig.settle();
    }
    let hits = rig.read(0, 50);
    assert!(hits >= 45, "{hits} of 50 blocks are held");
}

/// Writes metadata and then `passes` times what the cache holds; returns the part of the metadata in it that is left, in percent.
fn metadata_left(class: Class, passes: u64) -> u64 {
    const METADATA: u64 = 60;
    let mut rig = Rig::new();
    rig.reclaim_at(80);
    for block in 0..METADATA {
        let range = ByteRange::at(block * BLOCK, BLOCK);
        let written = rig.cache.write_marked(class, range, &[1; BLOCK as usize], Waker::noop()).unwrap();
        assert!(matches!(written, Admission::Done(_)));
    }
    rig.cache.request_drain();
    rig.settle();
    for at in 0..passes * SPACE / 12 {
        rig.write(1000 + at * 12, 12);
    }
    rig.cache.cached_bytes_of(ByteRange::at(0, METADATA * BLOCK)) / BLOCK * 100 / METADATA
}

#[test]
fn metadata_that_no_client_reads_stays_for_one_pass_more_and_then_leaves() {
    let of = |class| [1, 3].map(|halves| metadata_left(class, halves));
    let (unmarked, metadata) = (of(Class::Unmarked), of(Class::Metadata));
    println!(
        "left after one and three times the cache: {unmarked:?} % without, {metadata:?} % with the mark"
    );
    assert_eq!((unmarked[1], metadata[1]), (0, 0));
    assert!(unmarked[0] <= 20 && metadata[0] >= 70, "{unmarked:?} {metadata:?}");
}

#[test]
fn a_cyclic_scan_larger_than_the_cache_is_held_in_part() {
    let mut rig = Rig::new();
    let length = SPACE * 5 / 4;
    for _ in 0..8 {
        rig.read(0, length);
    }
    let hits = rig.read(0, length);
    assert!(hits >= length / 2, "{hits} of {length} blocks are held");
}

/// A cache half full of blocks that were all read since they were written.
fn rig_full_of_what_was_read() -> Rig {
    let mut rig = Rig::new();
    rig.write(0, SPACE / 2);
    assert_eq!(rig.read(0, SPACE / 2), SPACE / 2);
    rig
}

#[test]
fn three_quarters_of_the_blocks_read_since_their_write_outlive_their_segment() {
    let mut rig = rig_full_of_what_was_read();
    // One segment at a time, so that reclaim is never far behind.
    for gc_percent in (43..48).rev() {
        rig.reclaim_at(gc_percent);
        rig.settle();
    }
    let happened = rig.cache.status().rare;
    assert!(happened.segments_reclaimed >= 4, "{happened:?}");
    assert_eq!(happened.second_chances, happened.segments_reclaimed * BLOCKS_PER_SEGMENT * 3 / 4);
}

#[test]
fn half_of_the_blocks_read_since_their_write_outlive_their_segment_while_space_is_needed() {
    let mut rig = rig_full_of_what_was_read();
    rig.reclaim_at(20);
    for _ in 0..STEPS_MAX {
        let happened = rig.cache.status().rare;
        if happened.segments_reclaimed == 4 {
            // The first steps of the next segment may be done already.
            let half = 4 * BLOCKS_PER_SEGMENT / 2;
            let more = happened.second_chances - half;
            assert!(more <= BLOCKS_PER_SEGMENT / 2, "{happened:?}");
            return;
        }
        rig.worker.step();
    }
    panic!("reclaim does not go on: {:?}", rig.cache.status());
}

#[test]
fn a_cache_of_few_segments_a_lane_keeps_a_few_free_for_all_lanes() {
    let mut rig = Rig::with_lanes(4);
    assert_eq!(rig.cache.status().lanes, 4);
    // More blocks than fit, in all lanes, and each twice: a full cache records a range at its second miss.
    for _ in 0..2 {
        for chunk in 0..16 {
            rig.read(chunk * 1024, SPACE / 8);
        }
    }
    let status = rig.cache.status();
    assert!(status.rare.segments_reclaimed > 0, "it was full: {status:?}");
    assert!((4..6).contains(&status.free_segments), "{status:?}");
}
