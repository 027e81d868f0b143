//! Every later program can open the regions that earlier programs left.
//!
//! `images/vN` holds regions of format version N as a program of that version left them: stopped, killed, torn,
//! damaged, wrapped, with their disks and the contents that a reader must find. They are never re-created: a program
//! that cannot open one breaks the compatibility guarantee. `write_images` creates the images of a new version once.

mod histories;
mod image;

use cbd_format::{
    Layout, Superblock,
    superblock::{FEATURE_BYPASS, FEATURE_GROWN, FEATURE_USE_NOTES},
};
use cbd_sim::{Content, SimDisk, SimEnvironment, Watchdog, process::Process};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, Completion, ErrorKind, Operation, Request};
use image::{Golden, Shown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/images")
}

/// An opened image, with a process over it.
struct Opened {
    process: Process,
    environment: Arc<SimEnvironment>,
    disk: SimDisk,
}

impl Opened {
    fn new(golden: &Golden) -> Self {
        let environment = Arc::new(SimEnvironment::new(7, 1_000_000));
        let memory = golden.memory();
        let disk = golden.disk();
        let process = Process::open(Arc::clone(&environment), &memory, &disk, BackendId(0), 1, 4)
            .unwrap_or_else(|error| panic!("{} does not open: {error}", golden.name));
        Self { process, environment, disk }
    }

    /// Submits a request and runs all threads until it has completed.
    fn ask(&mut self, operation: Operation, range: ByteRange, buffer: AlignedBuffer) -> Completion {
        let mut done = Vec::new();
        self.process.submit(0, Request::unmarked(1, operation, range, false, buffer), &mut done);
        for _ in 0..100_000 {
            if let Some(completion) = done.pop() {
                return completion;
            }
            if !self.process.poll(0, &mut done) && !self.process.maintain() {
                self.environment.advance(100);
            }
        }
        panic!("{operation:?} of {range} never completes")
    }

    fn show(&mut self, sector_size: u64, sector: u64) -> Shown {
        let range = ByteRange::at(sector * sector_size, sector_size);
        let Completion { result, buffer, .. } =
            self.ask(Operation::Read, range, AlignedBuffer::zeroed(sector_size as usize));
        match result {
            Ok(()) => Content::of(sector, &buffer).map_or(Shown::Foreign, Shown::Content),
            Err(error) if error.kind() == ErrorKind::Media => Shown::Error,
            Err(error) => panic!("sector {sector}: {error}"),
        }
    }

    /// Writes all dirty data to the disk.
    fn drain(&mut self) {
        let target = self.process.cache().request_drain();
        for _ in 0..100_000 {
            if self.process.cache().is_drained(target) {
                return;
            }
            if !self.process.maintain() {
                self.environment.advance(100);
            }
        }
        panic!("a drain never ends");
    }
}

/// The images of all versions.
fn all() -> Vec<Golden> {
    let mut versions: Vec<PathBuf> =
        std::fs::read_dir(images()).expect("images").map(|entry| entry.expect("readable").path()).collect();
    versions.sort();
    let found: Vec<Golden> = versions.iter().flat_map(|directory| Golden::read_all(directory)).collect();
    assert!(!found.is_empty(), "there is at least one image");
    found
}

#[test]
fn every_image_opens_and_shows_what_its_clients_wrote() {
    for golden in all() {
        let _watchdog = Watchdog::new(Duration::from_secs(60), golden.name.clone());
        let mut opened = Opened::new(&golden);
        let status = opened.process.cache().status();
        assert_eq!(
            (status.drained_epoch.0, status.dirty_records, status.parked_bytes, status.lanes),
            (golden.drained_epoch, golden.dirty_records, golden.parked_bytes, golden.lanes),
            "{}",
            golden.name
        );
        for (sector, shown) in golden.sectors() {
            assert_eq!(opened.show(golden.sector_size, sector), shown, "{}, sector {sector}", golden.name);
        }
    }
}

#[test]
fn only_the_image_with_metadata_has_blocks_of_it() {
    for golden in all() {
        let found = Opened::new(&golden).process.cache().status().metadata_bytes / 4096;
        // Of 8, 2 and 4 blocks, 2 have other data, and one is in parts.
        let expected = if golden.name.ends_with("metadata") { 11 } else { 0 };
        assert_eq!(found, expected, "{}", golden.name);
    }
}

/// Earlier programs did not store the time at which an epoch was closed, but a later time: such a time is ignored.
#[test]
fn only_images_with_the_closing_time_of_their_epoch_have_a_recovery_point() {
    for golden in all() {
        let mut opened = Opened::new(&golden);
        let point = opened.process.cache().status().drained_wall_ms;
        assert_eq!(point > 0, golden.name.ends_with("dated"), "{}: {point}", golden.name);
        let (range, buffer) = (ByteRange::at(0, golden.sector_size), golden.sector_size as usize);
        let written = opened.ask(Operation::Write, range, AlignedBuffer::zeroed(buffer));
        assert!(written.result.is_ok() || golden.name.ends_with("parked"), "{}", golden.name);
        opened.drain();
        assert!(opened.process.cache().status().drained_wall_ms > 0, "{}", golden.name);
    }
}

/// Earlier programs refuse only the images that record a boot, those in which something went past the cache, and those of regions
/// that have grown.
#[test]
fn only_images_that_earlier_programs_would_misread_have_a_feature() {
    for golden in all() {
        let size = golden.region.len() as u64;
        let copies = [0, Layout::second_superblock(size)].map(|at| {
            let block = Superblock::decode(&golden.region[at as usize..])?.verify(size).ok()?;
            Some(block.0.incompatible.get())
        });
        let expected = match golden.boot {
            0 if golden.name.contains("past-") => FEATURE_BYPASS,
            0 if golden.name.contains("grown") => FEATURE_GROWN,
            0 => 0,
            _ => FEATURE_USE_NOTES,
        };
        assert_eq!(golden.boot > 0, golden.name.ends_with("boot-noted"), "{}", golden.name);
        assert!(copies.contains(&Some(expected)), "{}", golden.name);
        assert!(copies.into_iter().flatten().all(|features| features == expected), "{}", golden.name);
    }
}

#[test]
fn a_cache_over_every_image_accepts_writes_and_drains() {
    for golden in all() {
        let _watchdog = Watchdog::new(Duration::from_secs(60), golden.name.clone());
        let mut opened = Opened::new(&golden);
        let sector_size = golden.sector_size;
        // Every other sector of the image is written again; this repairs damage.
        let (mut expected, fresh) = (Vec::new(), Content(1 << 40));
        for (number, (sector, shown)) in golden.sectors().enumerate() {
            if number % 2 == 1 && shown != Shown::Error {
                expected.push((sector, shown));
                continue;
            }
            let mut payload = vec![0; sector_size as usize];
            fresh.fill(sector, &mut payload);
            let range = ByteRange::at(sector * sector_size, sector_size);
            let written = opened.ask(Operation::Write, range, AlignedBuffer::from_slice(&payload));
            written.result.unwrap_or_else(|error| panic!("{}: {error}", golden.name));
            expected.push((sector, Shown::Content(fresh)));
        }
        opened.drain();
        let disk = opened.disk.durable();
        for (sector, shown) in expected {
            let found = Content::of(sector, disk.sector(sector, sector_size));
            assert_eq!(
                found.map_or(Shown::Foreign, Shown::Content),
                shown,
                "{}, sector {sector}",
                golden.name
            );
        }
    }
}

#[test]
fn the_images_of_each_version_show_every_case() {
    for directory in std::fs::read_dir(images()).expect("images") {
        let directory = directory.expect("readable").path();
        let names: Vec<String> = Golden::read_all(&directory).into_iter().map(|golden| golden.name).collect();
        for history in histories::all() {
            let is_there = names.iter().any(|name| name.ends_with(history.name));
            assert!(is_there, "{} has no image of {}", directory.display(), history.name);
        }
    }
}

/// Creates the missing images of the present version. Run it for a new version or a new history, with `cargo
/// test -p cbd-sim --test golden -- --ignored`.
#[test]
#[ignore = "writes into the source tree"]
fn write_images() {
    let directory = images().join(format!("v{}", cbd_format::FORMAT_VERSION));
    std::fs::create_dir_all(&directory).expect("a directory");
    // Existing images stay as they are.
    let is_new = |history: &histories::History| !directory.join(history.name).with_extension("txt").exists();
    for history in histories::all().into_iter().filter(is_new) {
        let (mut golden, changed) = history.play();
        let mut opened = Opened::new(&golden);
        let status = opened.process.cache().status();
        golden.drained_epoch = status.drained_epoch.0;
        golden.dirty_records = status.dirty_records;
        golden.lanes = status.lanes;
        golden.parked_bytes = status.parked_bytes;
        for sector in changed {
            let shown = opened.show(golden.sector_size, sector);
            assert_ne!(shown, Shown::Foreign, "{}, sector {sector}", history.name);
            golden.note(sector, shown);
        }
        golden.write(&directory);
    }
}
