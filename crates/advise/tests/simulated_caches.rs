//! The simulated caches: what they hit, and how near a sample is to the whole.

use cbd_advise::{Action, BLOCKS_MAX, CacheForm, Options, Outcome, Request, Simulation, Survey};
use cbd_engine::Settings;
use cbd_types::ByteRange;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const MIB: u64 = 1 << 20;

fn options(memory_max: u64) -> Options {
    Options {
        memory_max,
        blocks_max: BLOCKS_MAX,
        settings: Settings::default(),
        disk_rate: None,
        has_times: true,
    }
}

fn simulated(requests: &[Request], sizes: &[u64], options: &Options) -> Vec<Outcome> {
    let mut survey = Survey::new();
    requests.iter().for_each(|request| survey.add(request));
    let form = |bytes: &u64| CacheForm::new(*bytes, None, 2).expect("a size");
    let forms: Vec<CacheForm> = sizes.iter().map(form).collect();
    let mut simulation = Simulation::new(&forms, &survey, options).expect("caches");
    requests.iter().for_each(|request| simulation.feed(*request).expect("served"));
    simulation.finish().expect("served")
}

/// Requests of one block in the first `blocks` of the device, each as likely as the other.
fn uniform(count: u64, blocks: u64, write_percent: u32) -> Vec<Request> {
    let mut random = SmallRng::seed_from_u64(1);
    let mut request = |number: u64| Request {
        us: number * 100,
        action: if random.random_range(0..100) < write_percent { Action::Write } else { Action::Read },
        range: ByteRange::at(random.random_range(0..blocks) * 4096, 4096),
    };
    (0..count).map(&mut request).collect()
}

#[test]
fn a_cache_that_holds_all_misses_each_block_once() {
    let requests = uniform(20_000, 1000, 0);
    let [small, large] = simulated(&requests, &[24 * MIB, 32 * MIB], &options(64 * MIB))[..] else {
        panic!()
    };
    let expected = 1.0 - 1000.0 / 20_000.0;
    assert_eq!((small.hit, large.hit), (expected, expected));
    assert_eq!(large.disk_read_bytes, 1000 * 4096);
    assert_eq!((large.sampled_one_of, large.dirty_bytes_max), (1, 0));
}

#[test]
fn a_sample_is_near_to_the_whole() {
    // Twice of what the smaller cache holds, and less than the larger one holds.
    let requests = uniform(150_000, 24_576, 10);
    let sizes = [48 * MIB, 128 * MIB];
    let whole = simulated(&requests, &sizes, &options(u64::MAX));
    let sampled = simulated(&requests, &sizes, &options(MIB));
    for (whole, sampled) in whole.iter().zip(&sampled) {
        assert!(whole.sampled_one_of == 1 && sampled.sampled_one_of > 1, "{sampled:?}");
        assert!((whole.hit - sampled.hit).abs() < 0.02, "{whole:?} {sampled:?}");
        let dirty = sampled.dirty_bytes_max as f64 / whole.dirty_bytes_max as f64;
        assert!((0.7..1.4).contains(&dirty), "{whole:?} {sampled:?}");
    }
}

#[test]
fn a_slow_disk_leaves_more_dirty() {
    let requests = uniform(100_000, 1 << 20, 100);
    // 40 MiB a second are written for ten seconds.
    let [fast] = simulated(&requests, &[512 * MIB], &options(64 * MIB))[..] else { panic!() };
    let slow_options = Options { disk_rate: Some(10 * MIB), ..options(64 * MIB) };
    let [slow] = simulated(&requests, &[512 * MIB], &slow_options)[..] else { panic!() };
    assert!(fast.dirty_bytes_max < 110 * MIB, "{fast:?}");
    assert!(slow.dirty_bytes_max > 230 * MIB, "{slow:?}");
}

#[test]
fn writes_into_a_cache_full_of_dirty_data_wait_for_the_disk() {
    let requests = uniform(10_000, 1 << 20, 100);
    let slow = Options { disk_rate: Some(4 * MIB), ..options(64 * MIB) };
    let [full] = simulated(&requests, &[16 * MIB], &slow)[..] else { panic!() };
    assert!((4 * MIB..16 * MIB).contains(&full.dirty_bytes_max), "{full:?}");
}

#[test]
fn the_same_requests_give_the_same_figures_with_flushes_and_discards() {
    let mut requests = uniform(30_000, 10_000, 50);
    for number in (0..requests.len()).step_by(500) {
        requests[number].action = if number % 1000 == 0 { Action::Flush } else { Action::Discard };
    }
    let once = simulated(&requests, &[16 * MIB], &options(64 * MIB));
    assert_eq!(once, simulated(&requests, &[16 * MIB], &options(64 * MIB)));
}
