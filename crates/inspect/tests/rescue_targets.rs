//! A rescue writes to the right disk only, and leaves a cache that hides nothing of what the disk gets afterwards.

mod support;

use cbd_backing::{Backing, BackingFile, Options as DiskOptions};
use cbd_engine::{BackendSpec, Settings};
use cbd_inspect::rescue::{Options, RecordedDisk, Rescued, rescue};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::{BackendId, ByteRange, HostId};
use std::os::unix::fs::FileExt;
use std::path::Path;
use support::{BLOCK, DEVICE, Fixture, number};

fn rescued(fixture: &Fixture, options: &Options) -> Rescued {
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped");
    let mut all = rescue(region, options, &mut |_| {}).expect("opened");
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn to(disk: &Path) -> Options {
    Options { backend: Some(BackendId(0)), to: Some(disk.to_owned()), other_disk: true, ..Options::default() }
}

/// Checks that neither a rescue nor its preview accepts `disk`, for a reason that contains `why`, and that nothing
/// changes.
#[track_caller]
fn is_refused(fixture: &Fixture, options: &Options, why: &str) {
    let disk = options.to.as_deref().expect("a target");
    let before = std::fs::read(disk).expect("a disk");
    let entry = fixture.transport().backend(BackendId(0)).expect("a backend");
    let preview = options.preview_disk(&fixture.bytes(), BackendId(0), &RecordedDisk::from(&entry));
    let preview = preview.expect_err("refused in the preview").line();
    assert!(preview.contains(why), "{preview}");
    let done = rescued(fixture, options);
    let error = done.error.expect("refused");
    assert!(error.contains(why) && !done.opened && !done.complete, "{error}");
    assert!(std::fs::read(disk).expect("a disk") == before, "the disk changed");
    let after = fixture.transport().backend(BackendId(0)).expect("a backend");
    assert_eq!((after.path, after.identity, after.is_moved), (entry.path, entry.identity, entry.is_moved));
}

#[test]
fn the_disk_of_another_backend_is_refused() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let other = fixture.path("other");
    std::fs::copy(fixture.disk(), &other).expect("copied");
    let disk = BackingFile::open(&other, DiskOptions::default()).expect("a disk");
    fixture
        .transport()
        .create_backend(&BackendSpec {
            host: HostId(0),
            path: other.display().to_string(),
            identity: disk.identity().to_token(),
            size: DEVICE,
            sector: 512,
            cache_bytes: None,
            lanes_max: 1,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })
        .expect("a row");
    drop(disk);
    is_refused(&fixture, &to(&other), "is the disk of backend 1");
    let link = fixture.path("link");
    std::fs::hard_link(&other, &link).expect("linked");
    is_refused(&fixture, &to(&link), "is the disk of backend 1");
}

#[test]
fn a_disk_that_is_too_small_for_a_copy_is_refused() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let small = fixture.path("small");
    std::fs::write(&small, vec![0; (DEVICE - BLOCK) as usize]).expect("a file");
    is_refused(&fixture, &to(&small), &format!("is smaller than the {DEVICE} bytes of"));
}

#[test]
fn a_region_is_refused() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let other = fixture.path("other");
    let mut image = fixture.image();
    image.resize(DEVICE as usize, 0);
    std::fs::write(&other, image).expect("a copy");
    is_refused(&fixture, &to(&other), "holds a CBD transport");
}

#[test]
fn a_former_disk_is_refused_until_the_user_says_that_it_can_be_forgotten() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let copy = fixture.path("copy");
    std::fs::copy(fixture.disk(), &copy).expect("copied");
    assert!(rescued(&fixture, &to(&copy)).complete);
    is_refused(&fixture, &to(&fixture.disk()), "lacks data");
    // Another path to the same file.
    let link = fixture.path("link");
    std::fs::hard_link(fixture.disk(), &link).expect("linked");
    is_refused(&fixture, &to(&link), "lacks data");
    std::fs::copy(&copy, fixture.disk()).expect("the former disk is a copy of the present one now");
    let forget = Options { forget_disk: Some(fixture.disk()), ..to(&fixture.disk()) };
    let done = rescued(&fixture, &forget);
    assert!(done.complete, "{done:?}");
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn writes_to_the_disk_after_a_rescue_are_not_hidden_by_the_cache() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && done.emptied, "{done:?}");
    assert!(fixture.on_disk() == fixture.expected);
    let disk = std::fs::OpenOptions::new().write(true).open(fixture.disk()).expect("a disk");
    disk.write_all_at(&[0x77; BLOCK as usize], 0).expect("written without the cache");
    let process = fixture.process();
    let status = process.cache.status();
    assert!(status.dirty_bytes == 0 && status.damaged.is_empty(), "{status:?}");
    let mut read = vec![0; BLOCK as usize];
    let mut misses = Vec::new();
    for at in (0..DEVICE).step_by(BLOCK as usize) {
        misses.clear();
        process.cache.read(ByteRange::at(at, BLOCK), &mut read, &mut misses).expect("read");
        assert_eq!(misses.len(), 1, "the cache holds an older version of the block at {at}");
        misses.drain(..).for_each(|miss| process.cache.cancel_fill(miss));
    }
}

#[test]
fn a_cache_that_knows_of_damage_is_not_emptied() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, 8 * BLOCK, 1);
    drop(process);
    fixture.damage(number(&fixture.records()[0], "data_at") + 77);
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && !done.emptied && done.damaged.len() == 1, "{done:?}");
    assert_eq!(fixture.process().cache.status().damaged.len(), 1);
}
