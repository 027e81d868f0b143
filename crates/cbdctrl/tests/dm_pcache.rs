//! `rescue --from dm-pcache` on images as dm-pcache leaves them.

mod support;

use cbd_testkit::pcache::Sample;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, Ran};

const BLOCK: u64 = 4096;
const DISK: u64 = 64 * MIB;

/// A cache with a write to each of some blocks, and a disk with older data; also the expected contents of the disk.
fn cache_and_disk(fixture: &Fixture) -> (Sample, String, Vec<u8>) {
    let mut sample = Sample::new(4, true);
    let disk = fixture.disk("disk", DISK);
    let mut expected = vec![0x11; DISK as usize];
    fs::write(&disk, &expected).expect("the disk");
    for number in 0..300_u64 {
        let block = number * 37 % 256;
        let data = [number as u8; BLOCK as usize];
        let key = sample.data(block * 3 * BLOCK, 1, (number * BLOCK) as u32, &data);
        sample.append(&[key]);
        expected[(block * 3 * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&data);
    }
    (sample, disk, expected)
}

fn stored(fixture: &Fixture, sample: &Sample) -> String {
    let path = fixture.path("cache");
    let file = File::create(&path).expect("a cache device");
    file.set_len(cbd_pcache::Image::size(sample)).expect("its size");
    for (at, page) in sample.pages() {
        file.write_all_at(page, at).expect("written");
    }
    fixture.text("cache")
}

fn rescue(fixture: &Fixture, arguments: &[&str]) -> Ran {
    fixture.run_at("/nonexistent/socket", &[&["rescue", "--from", "dm-pcache"], arguments].concat())
}

#[track_caller]
fn rescue_json(fixture: &Fixture, arguments: &[&str], code: i32) -> Value {
    let ran = rescue(fixture, &[arguments, &["--json"]].concat());
    assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
    serde_json::from_str(&ran.stdout).expect("JSON")
}

#[test]
fn a_dry_run_reports_dirty_data_and_changes_nothing() {
    let fixture = Fixture::new();
    let (sample, disk, _) = cache_and_disk(&fixture);
    let cache = stored(&fixture, &sample);
    let before = (fs::read(&cache).expect("the cache"), fs::read(&disk).expect("the disk"));
    for arguments in [&[cache.as_str()][..], &[&cache, "--to", &disk], &[&cache, "--to", &disk, "--dry-run"]]
    {
        let planned = rescue_json(&fixture, arguments, 1);
        assert_eq!((&planned["dry_run"], &planned["from"]), (&true.into(), &"dm-pcache".into()));
        assert_eq!(planned["dirty"]["bytes"], 256 * BLOCK);
        assert_eq!((&planned["dirty"]["count"], &planned["dirty_keys"]), (&256.into(), &300.into()));
        assert_eq!(planned["dirty"]["ranges"][1]["offset"], 3 * BLOCK);
        assert_eq!((&planned["data_crc"], &planned["segments"]), (&true.into(), &4.into()));
    }
    let said = rescue(&fixture, &[&cache]);
    assert!(
        said.stdout.contains("dirty: 1 MiB in 256 ranges") && said.stdout.contains("dry run"),
        "{said:?}"
    );
    assert!((fs::read(&cache).expect("the cache"), fs::read(&disk).expect("the disk")) == before);
}

#[test]
fn all_dirty_data_is_written_to_the_disk_and_the_cache_is_unchanged() {
    let fixture = Fixture::new();
    let (sample, disk, expected) = cache_and_disk(&fixture);
    let cache = stored(&fixture, &sample);
    let before = fs::read(&cache).expect("the cache");
    let done = rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 0);
    assert_eq!((&done["dry_run"], &done["written_bytes"]), (&false.into(), &(256 * BLOCK).into()));
    assert!(fs::read(&disk).expect("the disk") == expected);
    assert!(fs::read(&cache).expect("the cache") == before);
}

#[test]
fn an_interrupted_rescue_can_be_repeated() {
    let fixture = Fixture::new();
    let (sample, disk, expected) = cache_and_disk(&fixture);
    let cache = stored(&fixture, &sample);
    // The state of an interrupted rescue, with a torn last write.
    let file = File::options().write(true).open(&disk).expect("the disk");
    file.write_all_at(&expected[..100 * BLOCK as usize + 512], 0).expect("written");
    for _ in 0..2 {
        rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 0);
        assert!(fs::read(&disk).expect("the disk") == expected);
    }
}

#[test]
fn damaged_data_is_reported_and_not_written() {
    let fixture = Fixture::new();
    let (mut sample, disk, mut expected) = cache_and_disk(&fixture);
    // The last write of all, to block 299 * 37 % 256.
    sample.flip(Sample::data_at(1) + 299 * BLOCK + 5, 1);
    let damaged = 299 * 37 % 256 * 3 * BLOCK;
    let cache = stored(&fixture, &sample);
    assert_eq!(rescue_json(&fixture, &[&cache], 2)["damaged"]["count"], 1);
    let done = rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 2);
    let range = &done["damaged"]["ranges"][0];
    assert_eq!((&range["offset"], &range["bytes"]), (&damaged.into(), &BLOCK.into()));
    assert_eq!(range["reason"], "checksum");
    expected[damaged as usize..(damaged + BLOCK) as usize].fill(0x11);
    assert!(fs::read(&disk).expect("the disk") == expected);
    let said = rescue(&fixture, &[&cache]);
    let line = format!("damaged: device bytes {damaged}..{}", damaged + BLOCK);
    assert!(said.stdout.contains(&line), "{said:?}");
}

#[test]
fn a_damaged_part_of_the_log_is_skipped_only_on_demand() {
    let fixture = Fixture::new();
    let (mut sample, disk, expected) = cache_and_disk(&fixture);
    let first = Sample::data_at(0);
    sample.flip(first + 30, 1);
    let cache = stored(&fixture, &sample);
    let done = rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 2);
    assert_eq!((&done["written_bytes"], &done["end"]["kind"]), (&0.into(), &"damaged".into()));
    assert_eq!(done["end"]["at"], first);
    let done = rescue_json(&fixture, &[&cache, "--to", &disk, "--yes", "--past-damage"], 2);
    assert_eq!(done["passed_key_sets"], 1);
    // The ranges of the first key set were written again later.
    assert!(fs::read(&disk).expect("the disk") == expected);
}

#[test]
fn a_disk_of_another_size_or_in_use_is_not_written() {
    let fixture = Fixture::new();
    let (sample, disk, _) = cache_and_disk(&fixture);
    let cache = stored(&fixture, &sample);
    let small = fixture.disk("small", 3 * 255 * BLOCK);
    let planned = rescue_json(&fixture, &[&cache, "--to", &small], 1);
    assert!(planned["disk_error"].as_str().is_some_and(|error| error.contains("not its backing device")));
    let refused = rescue_json(&fixture, &[&cache, "--to", &small, "--yes"], 3);
    assert_eq!(refused["error"]["kind"], "out_of_range");
    assert!(fs::read(&small).expect("the disk").iter().all(|&byte| byte == 0));
    assert_eq!(rescue(&fixture, &[&cache, "--to", &fixture.text("missing"), "--yes"]).code, 3);
    let mut serving = Fixture::with_region();
    serving.start_backend(&disk);
    let refused = rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 3);
    assert_eq!(refused["error"]["kind"], "busy");
    serving.terminate();
    rescue_json(&fixture, &[&cache, "--to", &disk, "--yes"], 0);
}

#[test]
fn wrong_usage_ends_with_64_and_a_foreign_device_with_3() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", DISK);
    for arguments in [
        &["/cache", "--yes"][..],
        &["/cache", "--to", "/disk", "--backend", "0"],
        &["/cache", "--to", "/disk", "--other-disk"],
        &["/cache", "--to", "/disk", "--yes", "--dry-run"],
    ] {
        let ran = rescue(&fixture, arguments);
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.stdout.is_empty() && !ran.stderr.is_empty(), "{ran:?}");
    }
    for arguments in [&["rescue", "/cache", "--from", "bcache"][..], &["rescue", "/region", "--past-damage"]]
    {
        assert_eq!(fixture.run_at("/nonexistent/socket", arguments).code, 64, "{arguments:?}");
    }
    assert_eq!(rescue_json(&fixture, &[&disk], 3)["error"]["kind"], "foreign");
    assert_eq!(rescue_json(&fixture, &["/no/such/device"], 3)["error"]["kind"], "not_found");
}

#[test]
fn dirty_data_can_be_written_into_a_cache_of_cbd() {
    let name = "dirty_data_can_be_written_into_a_cache_of_cbd";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let (sample, disk, expected) = cache_and_disk(&fixture);
        let cache = stored(&fixture, &sample);
        let device = fixture.start_block_device(&disk, "16M");
        fixture.ok(&["set", "-b", "0", "writeback_rate=32K"]);
        rescue_json(&fixture, &[&cache, "--to", &device, "--yes"], 0);
        assert!(fixture.cache()["dirty_bytes"].as_u64() > Some(0), "it is in the cache");
        assert!(fs::read(&disk).expect("the disk") != expected, "and not all on the disk");
        assert!(fs::read(&device).expect("the device") == expected);
        fixture.ok(&["set", "-b", "0", "writeback_rate=auto"]);
        fixture.ok(&["backend-stop", "-b", "0", "--force"]);
        fixture.terminate();
        assert!(fs::read(&disk).expect("the disk") == expected);
    });
}
