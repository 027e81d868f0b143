//! Whatever a region contains, each tool returns a result, in bounded time, and only reads.

mod support;

use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::dump::{Filter, What, dump};
use cbd_inspect::repair::plan;
use cbd_inspect::{Bytes, Outcome, Report};
use cbd_pmem::Reader;
use cbd_types::ErrorKind;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::Fixture;

/// Longest run of a tool for a region of a few MiB.
const TIME_MAX: Duration = Duration::from_secs(20);

/// Runs every read-only tool.
fn run_all_tools(image: Vec<u8>) -> Report {
    let begun = Instant::now();
    let bytes: Arc<dyn Bytes> = Arc::new(image);
    let report = check(Arc::clone(&bytes), DataChecked::All, &mut |_| {});
    for what in [What::Superblock, What::Tables, What::Segments, What::Lanes, What::Pins, What::Records] {
        let filter = Filter { damaged: what == What::Records, ..Filter::default() };
        let _ = dump(&bytes, what, &filter, &mut |item| {
            assert!(!item.to_string().is_empty());
            ControlFlow::Continue(())
        });
    }
    let repaired = plan(&bytes, &mut |_| {}).expect("a repair does not change the result of recovery");
    assert_eq!(repaired.before.fingerprint, report.fingerprint);
    assert!(begun.elapsed() < TIME_MAX, "took {:?}", begun.elapsed());
    report
}

fn used_image() -> Vec<u8> {
    let mut fixture = Fixture::with_region_of(3 << 20);
    fixture.write_and_crash(40, 1);
    fixture.image()
}

#[test]
fn files_that_are_no_region_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    for length in [0, 1, 4095, 4096, 65535] {
        std::fs::write(&path, vec![7; length]).expect("a file");
        assert_eq!(Reader::open(&path).expect_err("too small").kind(), ErrorKind::InvalidArgument);
    }
    std::fs::write(&path, "some other text\n".repeat(1 << 16)).expect("a file");
    let reader = Reader::open(&path).expect("large enough");
    let report = check(Arc::new(reader), DataChecked::All, &mut |_| {});
    assert_eq!(report.outcome, Outcome::Unopenable);
    assert!(report.findings.iter().all(|finding| finding.what.contains("does not hold a CBD transport")));
}

#[test]
fn truncated_regions_are_reported_as_truncated() {
    let image = used_image();
    for length in [64 << 10, 1 << 20, image.len() - 4096] {
        let report = run_all_tools(image[..length].to_vec());
        assert_eq!(report.outcome, Outcome::Unopenable);
        assert!(report.findings[0].what.contains("cut short"), "{:?}", report.findings[0]);
    }
}

#[test]
fn a_region_in_a_larger_file_opens_by_its_first_superblock() {
    let mut image = used_image();
    image.resize(image.len() + (1 << 20), 0);
    let report = run_all_tools(image);
    assert_eq!((report.outcome, report.found[0]), (Outcome::Clean, 1), "{:?}", report.findings);
    assert!(report.findings[0].what.contains("uses"), "{:?}", report.findings[0]);
}

#[test]
fn random_bytes_are_foreign() {
    let mut random = SmallRng::seed_from_u64(5);
    for _ in 0..50 {
        let mut image = vec![0; 256 << 10];
        random.fill(&mut image[..]);
        assert_eq!(run_all_tools(image).outcome, Outcome::Unopenable);
    }
}

#[test]
fn random_bytes_behind_a_superblock_give_a_report() {
    let image = used_image();
    let mut random = SmallRng::seed_from_u64(6);
    for _ in 0..30 {
        let mut image = image.clone();
        random.fill(&mut image[4096..]);
        run_all_tools(image);
    }
}

#[test]
fn thousands_of_flipped_bits_give_a_report() {
    let image = used_image();
    let whole = run_all_tools(image.clone());
    assert_eq!(whole.found, [0; 4], "{:?}", whole.findings);
    let mut random = SmallRng::seed_from_u64(7);
    for round in 0..400 {
        let mut image = image.clone();
        let flips = if round % 2 == 0 { 10 } else { 200 };
        for _ in 0..flips {
            // Half of them where the structures are dense.
            let at = if random.random_bool(0.5) {
                random.random_range(0..image.len())
            } else {
                let segment = random.random_range(0..image.len() / (64 << 10));
                segment * (64 << 10) + random.random_range(0..12 << 10)
            };
            image[at] ^= 1 << random.random_range(0..8);
        }
        run_all_tools(image);
    }
}

#[test]
fn copied_pages_give_a_report() {
    let image = used_image();
    let mut random = SmallRng::seed_from_u64(8);
    for _ in 0..150 {
        let mut image = image.clone();
        for _ in 0..3 {
            let pages = image.len() / 4096;
            let (from, to) = (random.random_range(0..pages), random.random_range(0..pages));
            image.copy_within(from * 4096..from * 4096 + 4096, to * 4096);
        }
        run_all_tools(image);
    }
}
