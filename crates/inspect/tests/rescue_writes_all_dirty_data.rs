//! A rescue writes every acknowledged write to the disk, from a clean region, from a killed daemon's, from a
//! damaged one, and again after it was interrupted itself.

mod support;

use cbd_backing::{BackingFile, Options as DiskOptions};
use cbd_engine::{Admission, Settings};
use cbd_inspect::Outcome;
use cbd_inspect::check::DataChecked;
use cbd_inspect::dump::{Filter, What, dump};
use cbd_inspect::rescue::{Options, Rescued, rescue};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_runtime::{disk::Disk, moved::refuse_former};
use cbd_types::{BackendId, ByteRange, ErrorKind, Result};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::task::Waker;
use std::time::{Duration, Instant};
use support::{BLOCK, DEVICE, Fixture, number};

fn try_rescue(fixture: &Fixture, options: &Options) -> Result<Vec<Rescued>> {
    let region = Mapping::open(fixture.region(), &OpenOptions::default())?;
    rescue(region, options, &mut |_| {})
}

#[track_caller]
fn rescued(fixture: &Fixture, options: &Options) -> Rescued {
    let mut all = try_rescue(fixture, options).expect("opened");
    assert_eq!(all.len(), 1);
    all.remove(0)
}

#[test]
fn a_rescue_of_a_clean_region_writes_nothing() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    process.drain(&fixture);
    process.cache.stop();
    drop(process);
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && done.written_bytes == 0, "{done:?}");
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn every_acknowledged_write_of_a_killed_daemon_reaches_the_disk() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    assert!(fixture.on_disk() != fixture.expected);
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && done.error.is_none() && done.damaged.is_empty(), "{done:?}");
    assert_eq!(done.dirty_bytes, Some(0));
    assert!(done.backing_is_consistent && done.drained_epoch > 0);
    assert!(fixture.on_disk() == fixture.expected);
    let report = fixture.check(DataChecked::All);
    assert_eq!((report.outcome, report.backends[0].dirty_records), (Outcome::Clean, 0));
}

#[test]
fn a_limit_of_the_rate_does_not_slow_a_rescue() {
    let mut fixture = Fixture::new();
    let limited = Settings { writeback_rate: 1, ..Settings::default() };
    fixture.process().transport.update_settings(BackendId(0), limited).expect("kept");
    fixture.write_and_crash(100, 3);
    let began = Instant::now();
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete, "{done:?}");
    // With the limit, it would be one request per second.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert!(fixture.on_disk() == fixture.expected);
    let kept = fixture.process().transport.backend(BackendId(0)).expect("a backend").settings;
    assert_eq!(kept.writeback_rate, 1);
}

#[test]
fn a_rescue_needs_only_one_good_copy_of_each_structure() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    fixture.damage(60);
    for item in fixture.records() {
        fixture.damage(number(&item, "at") + 13);
    }
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && done.damaged.is_empty(), "{done:?}");
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn damaged_data_is_listed_and_everything_else_is_written() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, 8 * BLOCK, 1);
    fixture.write(&process, 5 << 20, BLOCK, 2);
    fixture.write(&process, 0, BLOCK, 3);
    drop(process);
    let at = number(&fixture.records()[0], "data_at") + BLOCK;
    fixture.damage(at + 77);
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete, "{done:?}");
    assert_eq!(done.damaged.len(), 1);
    assert_eq!((done.damaged[0].offset, done.damaged[0].bytes), (BLOCK, BLOCK));
    assert!(!done.backing_is_consistent);
    let mut expected = fixture.expected.clone();
    expected[BLOCK as usize..2 * BLOCK as usize].fill(0xd1);
    assert!(
        fixture.on_disk() == expected,
        "all but the damaged block is written, and that block is unchanged"
    );
    let again = rescued(&fixture, &Options::default());
    assert_eq!((again.written_bytes, again.damaged.len()), (0, 1), "the region records the damage");
}

#[test]
fn a_disk_other_than_the_recorded_one_is_not_written() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let other = fixture.path("other");
    std::fs::write(&other, vec![0; DEVICE as usize]).expect("a disk");
    let to = Options { backend: Some(BackendId(0)), to: Some(other.clone()), ..Options::default() };
    let done = rescued(&fixture, &to);
    assert!(!done.opened && done.error.is_some(), "{done:?}");
    assert_eq!(std::fs::read(&other).expect("a disk"), vec![0; DEVICE as usize]);
    // It is accepted if the user names it as a copy.
    std::fs::copy(fixture.disk(), &other).expect("copied");
    let done = rescued(&fixture, &Options { other_disk: true, ..to });
    assert!(done.complete, "{done:?}");
    assert!(std::fs::read(&other).expect("a disk") == fixture.expected);
}

/// A copy of the disk, and the options that name it as the replacement.
fn to_a_copy(fixture: &Fixture) -> (std::path::PathBuf, Options) {
    let copy = fixture.path("copy");
    std::fs::copy(fixture.disk(), &copy).expect("copied");
    let to = Options {
        backend: Some(BackendId(0)),
        to: Some(copy.clone()),
        other_disk: true,
        ..Options::default()
    };
    (copy, to)
}

fn moved_from(fixture: &Fixture) -> Option<String> {
    fixture.check(DataChecked::None).backends[0].moved_from.clone()
}

#[test]
fn a_rescue_to_another_disk_moves_the_backend_there() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (copy, to) = to_a_copy(&fixture);
    let done = rescued(&fixture, &to);
    let disk = fixture.disk().display().to_string();
    assert_eq!((done.complete, done.moved_from.as_ref()), (true, Some(&disk)), "{done:?}");
    let report = fixture.check(DataChecked::All);
    let backend = &report.backends[0];
    assert_eq!(
        (backend.path.clone(), backend.moved_from.as_ref()),
        (copy.display().to_string(), Some(&disk))
    );
    assert_eq!(report.outcome, Outcome::Clean);
    assert!(report.findings[0].what.contains("a rescue has moved the backend"), "{:?}", report.findings);
}

#[test]
fn the_region_records_a_move_before_the_other_disk_is_written() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (copy, to) = to_a_copy(&fixture);
    let before = std::fs::read(&copy).expect("a disk");
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped");
    let mut looks = 0;
    rescue(region, &to, &mut |_| {
        if looks < 3 && std::fs::read(&copy).expect("a disk") != before {
            looks += 1;
            // A crash here: the state that another process finds.
            let found = cbd_inspect::check::check(
                std::sync::Arc::new(fixture.image()),
                DataChecked::None,
                &mut |_| {},
            );
            assert!(found.backends[0].moved_from.is_some(), "the copy has data that the recorded disk lacks");
        }
    })
    .expect("opened");
    assert!(looks > 0, "no check ran during the writes");
}

#[test]
fn an_interrupted_rescue_to_another_disk_continues_there_without_options() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (copy, to) = to_a_copy(&fixture);
    {
        let process = fixture.process();
        let disk = BackingFile::open(&copy, DiskOptions::default()).expect("a disk");
        use cbd_backing::Backing;
        let token = disk.identity().to_token();
        process.transport.move_backend(BackendId(0), &copy.display().to_string(), &token).expect("moved");
    }
    let done = rescued(&fixture, &Options::default());
    assert!(done.complete && done.moved_from.is_some(), "{done:?}");
    assert!(std::fs::read(&copy).expect("a disk") == fixture.expected);
    // The former disk is refused.
    let back = Options { to: Some(fixture.disk()), other_disk: false, ..to };
    assert!(!rescued(&fixture, &back).opened);
}

#[test]
fn a_rescue_that_wrote_nothing_to_the_other_disk_does_not_move_the_backend() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (_, to) = to_a_copy(&fixture);
    let (_file, sealed) = sealed_copy(&fixture);
    let done = rescued(&fixture, &Options { to: Some(sealed), timeout: Duration::from_secs(1), ..to });
    assert!(!done.complete, "{done:?}");
    assert_eq!(moved_from(&fixture), None);
    assert!(rescued(&fixture, &Options::default()).complete);
}

/// A copy of the recorded disk under this name, and the options that name it as the replacement.
fn copy_named(fixture: &Fixture, name: &str) -> (PathBuf, Options) {
    let (copy, to) = to_a_copy(fixture);
    let named = fixture.path(name);
    std::fs::copy(copy, &named).expect("copied");
    (named.clone(), Options { to: Some(named), ..to })
}

/// Whether a daemon on the region refuses the disk because it lacks data.
fn is_refused(fixture: &Fixture, disk: &Path) -> bool {
    let transport = fixture.transport();
    let found = Disk::inspect(disk).expect("a disk");
    match refuse_former(&transport, &found, &disk.display().to_string()) {
        Ok(()) => false,
        Err(error) => {
            assert!(error.line().contains("lacks data"), "{error}");
            true
        }
    }
}

#[test]
fn every_disk_that_a_backend_had_is_refused_until_the_backend_is_removed() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (second, to_second) = copy_named(&fixture, "second");
    let (third, to_third) = copy_named(&fixture, "third");
    assert!(rescued(&fixture, &to_second).complete);
    assert_eq!(
        [fixture.disk(), second.clone(), third.clone()].map(|it| is_refused(&fixture, &it)),
        [true, false, false]
    );
    assert!(rescued(&fixture, &to_third).complete);
    let disks = [fixture.disk(), second.clone(), third.clone()];
    assert_eq!(disks.clone().map(|it| is_refused(&fixture, &it)), [true, true, false]);
    assert_eq!(moved_from(&fixture), Some(second.display().to_string()));
    // Serving the backend on its new disk does not update the former ones.
    fixture.transport().settle_backend(BackendId(0)).expect("stored");
    assert_eq!(disks.clone().map(|it| is_refused(&fixture, &it)), [true, true, false]);
    fixture.transport().remove_backend(BackendId(0)).expect("nothing is open");
    assert_eq!(disks.map(|it| is_refused(&fixture, &it)), [false; 3]);
}

/// A copy of the disk in memory.
fn copy_in_memory(fixture: &Fixture) -> (std::fs::File, PathBuf) {
    let memory = rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
    let mut file = std::fs::File::from(memory);
    std::io::copy(&mut std::fs::File::open(fixture.disk()).expect("a disk"), &mut file).expect("copied");
    let path = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
    (file, path)
}

fn seal(file: &std::fs::File) {
    rustix::fs::fcntl_add_seals(file, rustix::fs::SealFlags::WRITE).expect("sealed");
}

/// A copy of the disk in memory that is sealed against writes.
fn sealed_copy(fixture: &Fixture) -> (std::fs::File, PathBuf) {
    let (file, path) = copy_in_memory(fixture);
    seal(&file);
    (file, path)
}

/// Rescues to a copy that takes no more writes once `is_due`, and expects that the rescue fails and leaves the
/// backend moved. Then rescues to a copy of that copy, and returns the content of the last.
fn content_after_two_rescues(fixture: &Fixture, is_due: impl Fn(&Fixture) -> bool) -> Vec<u8> {
    let (file, first) = copy_in_memory(fixture);
    let to = |to: &Path| Options {
        backend: Some(BackendId(0)),
        to: Some(to.to_owned()),
        other_disk: true,
        timeout: Duration::from_secs(5),
        ..Options::default()
    };
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped");
    let mut is_sealed = false;
    let done = rescue(region, &to(&first), &mut |_| {
        if !is_sealed && is_due(fixture) {
            seal(&file);
            is_sealed = true;
        }
    })
    .expect("opened")
    .remove(0);
    assert!(is_sealed, "the rescue ended too early: {done:?}");
    let disk = fixture.disk().display().to_string();
    assert_eq!((done.complete, done.moved_from.as_ref()), (false, Some(&disk)), "{done:?}");
    assert_eq!(moved_from(fixture), Some(disk));
    assert!(is_refused(fixture, &fixture.disk()), "it lacks data that only the copy has");
    let second = fixture.path("second");
    std::fs::copy(&first, &second).expect("copied");
    let done = rescued(fixture, &to(&second));
    assert!(done.complete, "{done:?}");
    std::fs::read(&second).expect("a disk")
}

#[test]
fn a_rescue_that_drained_an_epoch_and_failed_leaves_the_backend_moved() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let content = content_after_two_rescues(&fixture, |fixture| {
        let image = std::sync::Arc::new(fixture.image());
        let found = cbd_inspect::check::check(image, DataChecked::None, &mut |_| {});
        found.backends[0].drained_epoch > 0
    });
    assert!(content == fixture.expected);
}

/// The first ordinal of each lane's log.
fn tails(fixture: &Fixture) -> Vec<u64> {
    let bytes: std::sync::Arc<dyn cbd_inspect::Bytes> = std::sync::Arc::new(fixture.image());
    let mut tails = Vec::new();
    dump(&bytes, What::Lanes, &Filter::default(), &mut |item| {
        if item.structure == "log" {
            tails.push(number(&item, "first_ordinal"));
        }
        ControlFlow::Continue(())
    })
    .expect("dumped");
    tails
}

/// A full cache is drained segment by segment where there is no room to note all of its damage: segments whose data
/// is on the other disk are reclaimed although their epoch is not drained.
#[test]
fn a_rescue_that_reclaimed_a_segment_and_failed_leaves_the_backend_moved() {
    let fixture = Fixture::new();
    let process = fixture.process();
    let write = |sector: u64| {
        let (range, data) = (ByteRange::at(sector * 512, 512), [sector as u8; 512]);
        let admission = process.cache.write(range, &data, Waker::noop()).expect("the cache runs");
        matches!(admission, Admission::Done(_))
    };
    let full = (0..DEVICE / 512).step_by(2).find(|sector| !write(*sector)).expect("a full cache");
    drop(process);
    let records = fixture.records();
    assert_eq!(records.len() as u64, full / 2);
    // The data of all but the first records of a lane is damaged.
    let (intact, damaged) = records.split_at(300);
    damaged.iter().for_each(|record| fixture.damage(number(record, "data_at") + 9));
    let before = tails(&fixture);
    let content = content_after_two_rescues(&fixture, |fixture| tails(fixture) != before);
    for record in intact {
        let at = number(record, "offset");
        let is_there = content[at as usize..][..512].iter().all(|byte| *byte == (at / 512) as u8);
        assert!(is_there, "the sector at {at} was acknowledged and is intact");
    }
}

#[test]
fn a_second_rescue_that_wrote_nothing_leaves_the_first_one_unchanged() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    let (second, to) = to_a_copy(&fixture);
    // As after an interrupted first rescue: the backend is moved, and everything is dirty.
    let token = Disk::inspect(&second).expect("a disk").identity.to_token();
    let second = second.display().to_string();
    fixture.transport().move_backend(BackendId(0), &second, &token).expect("stored");
    let (_file, sealed) = sealed_copy(&fixture);
    let done = rescued(&fixture, &Options { to: Some(sealed), timeout: Duration::from_secs(1), ..to });
    assert!(!done.complete, "{done:?}");
    assert_eq!(moved_from(&fixture), Some(fixture.disk().display().to_string()));
    assert_eq!([fixture.disk(), PathBuf::from(second)].map(|it| is_refused(&fixture, &it)), [true, false]);
    assert!(rescued(&fixture, &Options::default()).complete);
}

#[test]
fn a_moved_disk_is_found_at_the_given_path() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let moved = fixture.path("moved");
    std::fs::rename(fixture.disk(), &moved).expect("moved");
    let done = rescued(&fixture, &Options::default());
    assert!(!done.opened && done.error.is_some());
    let to = Options { backend: Some(BackendId(0)), to: Some(moved.clone()), ..Options::default() };
    assert!(rescued(&fixture, &to).complete);
    assert!(std::fs::read(&moved).expect("a disk") == fixture.expected);
}

#[test]
fn a_backend_that_is_not_there_is_an_error() {
    let fixture = Fixture::new();
    let options = Options { backend: Some(BackendId(7)), ..Options::default() };
    assert_eq!(try_rescue(&fixture, &options).expect_err("is not there").kind(), ErrorKind::NotFound);
}

#[test]
fn a_region_in_use_is_refused_and_a_disk_in_use_is_waited_for() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let process = fixture.process();
    assert_eq!(try_rescue(&fixture, &Options::default()).expect_err("in use").kind(), ErrorKind::Busy);
    drop(process);
    let held = BackingFile::open(fixture.disk(), DiskOptions::default()).expect("a disk");
    let before = fixture.on_disk();
    let thread = std::thread::spawn({
        let region = fixture.region();
        move || {
            let region = Mapping::open(region, &OpenOptions::default()).expect("mapped");
            rescue(region, &Options::default(), &mut |_| {}).expect("opened").remove(0)
        }
    });
    std::thread::sleep(Duration::from_millis(300));
    assert!(!thread.is_finished(), "the rescue waits for a disk that a killed process may still hold");
    assert!(fixture.on_disk() == before);
    drop(held);
    assert!(thread.join().expect("ended").complete);
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn a_second_rescue_continues_where_the_first_was_interrupted() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(100, 3);
    // Interrupted: the engine's writeback ran for some epochs, then the process ended.
    let process = fixture.process();
    let disk = BackingFile::open(fixture.disk(), DiskOptions::default()).expect("the disk");
    {
        use cbd_backing::Backing;
        let queue = disk.open_queue(4).expect("a queue");
        let mut worker =
            cbd_engine::BackgroundWorker::new(std::sync::Arc::clone(&process.cache), queue, disk.geometry());
        process.cache.request_drain();
        let begun = process.cache.drained_epoch();
        while process.cache.drained_epoch().0 < begun.0 + 3 {
            worker.step();
        }
    }
    drop((process, disk));
    assert!(fixture.on_disk() != fixture.expected);
    let report = fixture.check(DataChecked::All);
    assert!(report.backends[0].drained_epoch >= 3 && report.backends[0].dirty_records > 0);
    assert!(rescued(&fixture, &Options::default()).complete);
    assert!(fixture.on_disk() == fixture.expected);
}
