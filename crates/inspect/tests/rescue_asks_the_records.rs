//! A rescue asks what is recorded of a disk outside the region before it writes, and says when it writes.

mod support;

use cbd_engine::BackendEntry;
use cbd_inspect::rescue::{DiskRecords, OpenDisk, Options, RecordedDisk, Rescued, rescue};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use support::{BLOCK, Fixture, number};

/// Records that a test can read: what was asked, and whether the disk was unchanged at that moment.
#[derive(Debug)]
struct Records {
    refuses: bool,
    disk: PathBuf,
    before: Vec<u8>,
    asked: Mutex<Vec<(String, bool)>>,
}

impl Records {
    fn of(disk: &Path, refuses: bool) -> Arc<Self> {
        let before = std::fs::read(disk).expect("a disk");
        Arc::new(Self { refuses, disk: disk.to_owned(), before, asked: Mutex::default() })
    }

    fn note(&self, what: String) {
        let is_unchanged = std::fs::read(&self.disk).expect("a disk") == self.before;
        self.asked.lock().expect("no panic").push((what, is_unchanged));
    }

    fn asked(&self) -> Vec<(String, bool)> {
        self.asked.lock().expect("no panic").clone()
    }
}

impl DiskRecords for Records {
    fn look(&self, _: &BackendEntry, disk: &OpenDisk<'_>) -> Result<Vec<String>> {
        self.note(format!("look {:?} {}", disk.cache, disk.is_copy));
        if self.refuses {
            return Err(Error::new(ErrorKind::Exchanged, "it was written without its cache"));
        }
        Ok(vec!["it was looked at".to_owned()])
    }

    fn begin(&self, _: &BackendEntry) -> Vec<String> {
        self.note("begin".to_owned());
        vec!["it began".to_owned()]
    }

    fn emptied(&self, _: &BackendEntry) -> Vec<String> {
        self.note("emptied".to_owned());
        vec!["it was emptied".to_owned()]
    }
}

fn options(records: &Arc<Records>) -> Options {
    Options { records: Some(Arc::clone(records) as Arc<dyn DiskRecords>), ..Options::default() }
}

fn rescued(fixture: &Fixture, options: &Options) -> Rescued {
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped");
    rescue(region, options, &mut |_| {}).expect("opened").remove(0)
}

/// The look that a rescue takes first: with the state of the cache as the region has it.
fn look(fixture: &Fixture, is_copy: bool) -> (String, bool) {
    let sum = fixture.transport().state_sum(BackendId(0));
    assert!(sum.is_some());
    (format!("look {sum:?} {is_copy}"), true)
}

#[test]
fn a_disk_that_the_records_refuse_is_not_written() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let records = Records::of(&fixture.disk(), true);
    let first = look(&fixture, false);
    let entry = fixture.transport().backend(BackendId(0)).expect("a backend");
    let preview = options(&records).preview_disk(&fixture.bytes(), BackendId(0), &RecordedDisk::from(&entry));
    assert_eq!(preview.expect_err("refused in the preview").kind(), ErrorKind::Exchanged);
    let done = rescued(&fixture, &options(&records));
    assert!(!done.opened && !done.complete && done.written_bytes == 0, "{done:?}");
    assert!(done.error.expect("refused").contains("without its cache"));
    assert_eq!(records.asked(), [first.clone(), first]);
    assert!(fixture.on_disk() == records.before, "the disk changed");
    // Nothing of the region has changed, either.
    assert!(rescued(&fixture, &Options::default()).complete);
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn the_records_know_before_the_first_write_and_when_the_cache_is_empty() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let records = Records::of(&fixture.disk(), false);
    let first = look(&fixture, false);
    let done = rescued(&fixture, &options(&records));
    assert!(done.complete && done.emptied, "{done:?}");
    assert_eq!(records.asked(), [first, ("begin".to_owned(), true), ("emptied".to_owned(), false)]);
    assert_eq!(done.warnings, ["it was looked at", "it began", "it was emptied"]);
    assert!(fixture.on_disk() == fixture.expected);
}

#[test]
fn the_records_are_told_of_a_copy() {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(20, 3);
    let copy = fixture.path("copy");
    std::fs::copy(fixture.disk(), &copy).expect("copied");
    let records = Records::of(&copy, false);
    let first = look(&fixture, true);
    let to = Options { backend: Some(BackendId(0)), to: Some(copy), other_disk: true, ..options(&records) };
    assert!(rescued(&fixture, &to).complete);
    assert_eq!(records.asked()[0], first);
}

#[test]
fn a_cache_that_keeps_what_is_damaged_is_not_called_empty() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, 8 * BLOCK, 1);
    fixture.write(&process, 5 << 20, BLOCK, 2);
    drop(process);
    fixture.damage(number(&fixture.records()[0], "data_at") + BLOCK + 77);
    let records = Records::of(&fixture.disk(), false);
    let done = rescued(&fixture, &options(&records));
    assert!(done.complete && !done.emptied && done.damaged.len() == 1, "{done:?}");
    assert_eq!(records.asked().last(), Some(&("begin".to_owned(), true)));
}
