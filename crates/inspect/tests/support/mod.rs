//! A region with a cache in a file, created by the engine, a disk that it caches, and functions that damage
//! the region.
#![allow(dead_code, missing_docs)]

use cbd_backing::{Backing, BackingFile, Options};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, Environment, FormatOptions, Settings, Step, Transport,
};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::dump::{Field, Filter, Item, What, dump};
use cbd_inspect::{Bytes, Finding, Report, Severity, Structure};
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, BackingQueue, ByteRange, Region};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

pub const SEGMENT: u64 = 64 << 10;
pub const DEVICE: u64 = 16 << 20;
pub const BLOCK: u64 = 4096;

type ProcessTransport = Transport<ProcessEnvironment>;
pub type ProcessCache = Cache<ProcessEnvironment>;

/// The files.
pub struct Fixture {
    folder: tempfile::TempDir,
    /// The expected content of the disk, according to the acknowledged writes.
    pub expected: Vec<u8>,
}

/// A process that has the region open, as a daemon does.
pub struct Process {
    pub transport: Arc<ProcessTransport>,
    pub cache: Arc<ProcessCache>,
    environment: Arc<ProcessEnvironment>,
}

impl Fixture {
    pub fn new() -> Self {
        Self::with_region_of(6 << 20)
    }

    pub fn with_region_of(size: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let fixture = Self { folder, expected: vec![0xd1; DEVICE as usize] };
        std::fs::write(fixture.disk(), &fixture.expected).expect("a disk");
        let file = File::create(fixture.region()).expect("a region");
        file.set_len(size).expect("its size");
        let environment = Arc::new(ProcessEnvironment::new());
        let options = FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() };
        let transport = Transport::format(environment, fixture.map(), &options).expect("formatted");
        let host = transport.register_host("node0", None).expect("registered");
        let disk = BackingFile::open(fixture.disk(), Options::default()).expect("a disk");
        transport
            .create_backend(&BackendSpec {
                host,
                path: fixture.disk().display().to_string(),
                identity: disk.identity().to_token(),
                size: DEVICE,
                sector: 512,
                cache_bytes: Some(size / 2),
                lanes_max: 2,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .expect("a backend");
        fixture
    }

    pub fn region(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    pub fn disk(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn map(&self) -> Region<Mapping> {
        Region::new(Mapping::open(self.region(), &OpenOptions::default()).expect("mapped"))
    }

    /// The tables, without an open cache.
    pub fn transport(&self) -> Arc<ProcessTransport> {
        Transport::open(Arc::new(ProcessEnvironment::new()), self.map()).expect("opened")
    }

    /// Lets the region and its cache grow to `size` bytes.
    pub fn grow(&self, size: u64) {
        let process = self.process();
        process.transport.region().memory().grow(&self.region(), size).expect("extended");
        process.transport.grow_region().expect("grown");
        let free = process.transport.info().free_segments;
        process.transport.grow_cache(BackendId(0), &process.cache, free).expect("they are free");
    }

    /// Opens the region as a daemon would; dropped, it was killed.
    pub fn process(&self) -> Process {
        let environment = Arc::new(ProcessEnvironment::new());
        let transport = Transport::open(Arc::clone(&environment), self.map()).expect("opened");
        let cache = transport.open_cache(BackendId(0)).expect("recovered");
        Process { transport, cache, environment }
    }

    /// Writes `count` blocks of a pattern all over the device, with an occasional flush, and ends as if
    /// killed.
    pub fn write_and_crash(&mut self, count: u64, seed: u8) {
        let process = self.process();
        for number in 0..count {
            let at = number * 7 % 37 * 3 * BLOCK + number % 5 * (4 << 20) / 2;
            let length = if number % 11 == 10 { 4 * BLOCK } else { BLOCK };
            let at = at % (DEVICE - length);
            self.write(&process, at, length, seed.wrapping_add(number as u8));
            if number % 9 == 8 {
                process.cache.flush().expect("flushed");
            }
        }
        self.write_zeroes(&process, 9 << 20, 3 * BLOCK);
    }

    pub fn write(&mut self, process: &Process, at: u64, length: u64, value: u8) {
        let data: Vec<u8> = (0..length).map(|byte| value.wrapping_add((byte / 512) as u8)).collect();
        let range = ByteRange::at(at, length);
        for piece in process.cache.pieces(range) {
            let bytes = &data[(piece.start - at) as usize..(piece.end - at) as usize];
            let admission = process.cache.write(piece, bytes, Waker::noop()).expect("written");
            assert!(matches!(admission, Admission::Done(_)), "no space at {at}");
        }
        self.expected[at as usize..(at + length) as usize].copy_from_slice(&data);
    }

    pub fn write_zeroes(&mut self, process: &Process, at: u64, length: u64) {
        let mut progress = cbd_engine::ZeroProgress::default();
        let range = ByteRange::at(at, length);
        let done = process.cache.zero(range, false, &mut progress, Waker::noop());
        assert!(matches!(done, Ok(Admission::Done(_))), "zeroed");
        self.expected[at as usize..(at + length) as usize].fill(0);
    }

    pub fn image(&self) -> Vec<u8> {
        std::fs::read(self.region()).expect("the region")
    }

    pub fn on_disk(&self) -> Vec<u8> {
        std::fs::read(self.disk()).expect("the disk")
    }

    /// Changes bytes of the region.
    pub fn change(&self, at: u64, length: usize, change: impl Fn(&mut [u8])) {
        let file = File::options().read(true).write(true).open(self.region()).expect("the region");
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at).expect("read");
        change(&mut bytes);
        file.write_all_at(&bytes, at).expect("written");
    }

    /// Damages the byte at `at`.
    pub fn damage(&self, at: u64) {
        self.change(at, 1, |byte| byte[0] ^= 0x5a);
    }

    /// Gives the superblock at `at` these incompatible features, with a correct checksum.
    pub fn set_features(&self, at: u64, features: u64) {
        self.change(at, 192, |block| {
            block[32..40].copy_from_slice(&features.to_le_bytes());
            let sum = cbd_format::crc32c(&block[12..]);
            block[8..12].copy_from_slice(&sum.to_le_bytes());
        });
    }

    /// The offsets of the superblocks.
    pub fn superblocks(&self) -> [u64; 2] {
        [0, cbd_format::Layout::second_superblock(self.image().len() as u64)]
    }

    pub fn bytes(&self) -> Arc<dyn Bytes> {
        Arc::new(Reader::open(self.region()).expect("opened"))
    }

    /// The report of a check; asserts that the check changes nothing.
    pub fn check(&self, data: DataChecked) -> Report {
        let before = self.image();
        let report = check(self.bytes(), data, &mut |_| {});
        assert!(self.image() == before, "a check changed the region");
        report
    }

    pub fn dump(&self, what: What, filter: &Filter) -> Vec<Item> {
        let mut items = Vec::new();
        let give = &mut |item| {
            items.push(item);
            ControlFlow::Continue(())
        };
        dump(&self.bytes(), what, filter, give).expect("dumped");
        items
    }

    pub fn records(&self) -> Vec<Item> {
        self.dump(What::Records, &Filter::default())
    }
}

impl Process {
    /// Writes back until everything is on the disk.
    pub fn drain(&self, fixture: &Fixture) {
        let disk = BackingFile::open(fixture.disk(), Options::default()).expect("the disk");
        let queue = disk.open_queue(8).expect("a queue");
        let mut worker = BackgroundWorker::new(Arc::clone(&self.cache), queue, disk.geometry());
        let target = self.cache.request_drain();
        let end = Instant::now() + Duration::from_secs(60);
        while !self.cache.is_drained(target) {
            assert!(Instant::now() < end, "it is not drained: {:?}", self.cache.status());
            match worker.step() {
                Step::Busy => {}
                Step::WaitBacking | Step::Idle { .. } => std::thread::sleep(Duration::from_micros(200)),
            }
        }
        while worker.queue().in_flight() > 0 {
            worker.step();
        }
    }

    pub fn now_ms(&self) -> u64 {
        self.environment.monotonic_ms()
    }
}

/// The number in a field.
#[track_caller]
pub fn number(item: &Item, name: &str) -> u64 {
    match item.fields.iter().find(|(known, _)| *known == name) {
        Some((_, Field::Number(number))) => *number,
        other => panic!("{name} is {other:?} in {item}"),
    }
}

#[track_caller]
pub fn text<'a>(item: &'a Item, name: &str) -> &'a str {
    match item.fields.iter().find(|(known, _)| *known == name) {
        Some((_, Field::Text(text))) => text,
        other => panic!("{name} is {other:?} in {item}"),
    }
}

/// The only finding.
#[track_caller]
pub fn only(report: &Report) -> &Finding {
    assert_eq!(report.findings.len(), 1, "{:#?}", report.findings);
    &report.findings[0]
}

/// Asserts the only finding: its structure, severity, offset, and a part of its text.
#[track_caller]
pub fn assert_only(report: &Report, structure: Structure, severity: Severity, at: u64, words: &str) {
    let finding = only(report);
    assert_eq!((finding.structure, finding.severity), (structure, severity), "{finding:#?}");
    assert_eq!(finding.location.at, Some(at), "{finding:#?}");
    assert!(finding.what.contains(words), "{finding:#?}");
}

/// The findings of a structure.
pub fn of(report: &Report, structure: Structure) -> Vec<&Finding> {
    report.findings.iter().filter(|finding| finding.structure == structure).collect()
}
