//! The offline tools on a region that two hosts share: what both left is checked and rescued, and damage is found where no host looks.

use cbd_engine::{Admission, BackendSpec, FormatOptions, Settings, Transport};
use cbd_format::{HostBeat, Layout, Object, SharedLayout, Slot};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::open::{announce, to_change, to_read};
use cbd_inspect::repair::{apply, plan};
use cbd_inspect::rescue::{Options, rescue};
use cbd_inspect::{Bytes, Outcome, Report, Severity, Structure};
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_runtime::region::{Format, open_transport};
use cbd_runtime::{Disk, ProcessEnvironment};
use cbd_types::{ByteRange, ErrorKind, Region, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

const SEGMENT: u64 = 64 << 10;
const DEVICE: u64 = 1 << 20;
const BLOCK: u64 = 4096;

struct Fixture(tempfile::TempDir);

impl Fixture {
    /// A region in which each of two hosts was killed with a dirty block.
    fn new() -> Self {
        let fixture = Self(tempfile::tempdir_in("/dev/shm").expect("a folder"));
        File::create(fixture.region()).and_then(|file| file.set_len(4 << 20)).expect("a region");
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 2,
            backend_rows: 2,
            blkdev_rows: 1,
        };
        let environment = Arc::new(ProcessEnvironment::new());
        drop(Transport::format_shared(&environment, fixture.map(), &options).expect("formatted"));
        for (name, value) in [("a", 7), ("b", 9)] {
            fixture.write_as(name, value);
        }
        fixture
    }

    fn region(&self) -> PathBuf {
        self.0.path().join("region")
    }

    fn disk(&self, host: &str) -> PathBuf {
        self.0.path().join(format!("disk-{host}"))
    }

    fn map(&self) -> Region<Mapping> {
        Region::new(Mapping::open(self.region(), &OpenOptions::default()).expect("mapped"))
    }

    fn write_as(&self, name: &str, value: u8) {
        std::fs::write(self.disk(name), vec![0; DEVICE as usize]).expect("a disk");
        let disk = self.disk(name).display().to_string();
        let environment = Arc::new(ProcessEnvironment::new());
        let transport =
            Transport::open_shared(environment, self.map(), name, &mut |_, _, _| Ok(())).expect("joined");
        let id = transport
            .create_backend(&BackendSpec {
                host: transport.register_host(name, None).expect("registered"),
                identity: Disk::inspect(&disk).expect("a disk").identity.to_token(),
                path: disk,
                size: DEVICE,
                sector: 512,
                cache_bytes: Some(9 * SEGMENT),
                lanes_max: 1,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .expect("there is room");
        let cache = transport.open_cache(id).expect("it is empty");
        let written = cache.write(ByteRange::at(0, BLOCK), &[value; BLOCK as usize], Waker::noop());
        assert!(matches!(written, Ok(Admission::Done(_))));
    }

    fn parts(&self) -> SharedLayout {
        let size = std::fs::metadata(self.region()).expect("it is there").len();
        Layout::shared(size, SEGMENT, 2, 2, 1).expect("it fits").shared_parts().expect("it is shared")
    }

    fn damage(&self, at: u64) {
        let file = File::options().read(true).write(true).open(self.region()).expect("the region");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("read");
        file.write_all_at(&[byte[0] ^ 0x5a], at).expect("written");
    }

    fn check(&self) -> Report {
        check(Arc::new(Reader::open(self.region()).expect("opened")), DataChecked::Dirty, &mut |_| {})
    }
}

#[test]
fn segments_that_no_host_has_are_free() {
    let summary = Fixture::new().check().transport.expect("it opens");
    assert_eq!(
        summary.segments - summary.free_segments,
        2 * 9,
        "each of two hosts has a cache of 9 segments"
    );
    assert!(summary.free_segments > 0);
}

#[test]
fn what_both_hosts_left_dirty_reaches_their_disks() {
    let fixture = Fixture::new();
    let report = fixture.check();
    assert_eq!((report.outcome, report.backends.len()), (Outcome::Clean, 2), "{:?}", report.findings);
    assert_eq!(report.transport.expect("it is one").hosts, ["a", "b"]);
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped");
    let done = rescue(region, &Options::default(), &mut |_| {}).expect("opened");
    assert!(done.len() == 2 && done.iter().all(|rescued| rescued.complete), "{done:?}");
    for (host, value) in [("a", 7), ("b", 9)] {
        let disk = std::fs::read(fixture.disk(host)).expect("the disk");
        assert!(disk[..BLOCK as usize].iter().all(|byte| *byte == value), "the disk of {host}");
    }
    assert!(fixture.check().backends.iter().all(|backend| backend.dirty_records == 0));
}

#[test]
fn a_damaged_copy_of_a_vote_or_a_header_is_found_and_repaired() {
    for (structure, at) in [
        (Structure::Vote, |parts: &SharedLayout| parts.vote(Object::Group(0), 0)),
        (Structure::Vote, |parts: &SharedLayout| parts.vote(Object::Backend(1), 1)),
        (Structure::AreaHeader, |parts: &SharedLayout| parts.header(1)),
    ] as [(Structure, fn(&SharedLayout) -> [u64; 2]); 3]
    {
        for copy in 0..2 {
            let fixture = Fixture::new();
            fixture.damage(at(&fixture.parts())[copy] + 40);
            let report = fixture.check();
            assert_eq!(report.outcome, Outcome::Corrected, "{structure:?} {copy}: {:?}", report.findings);
            assert_eq!((report.findings.len(), report.findings[0].structure), (1, structure));
            let region = Arc::new(fixture.map());
            let steps = plan(&(Arc::clone(&region) as Arc<dyn Bytes>), &mut |_| {}).expect("a plan");
            steps.repairs.iter().for_each(|repair| apply(&region, repair).expect("repaired"));
            drop(region);
            assert_eq!(fixture.check().outcome, Outcome::Clean, "{structure:?} {copy}");
        }
    }
}

#[test]
fn a_vote_or_a_header_of_which_both_copies_are_damaged_is_fatal() {
    for at in [|parts: &SharedLayout| parts.vote(Object::Group(0), 0), |parts: &SharedLayout| parts.header(0)]
        as [fn(&SharedLayout) -> [u64; 2]; 2]
    {
        let fixture = Fixture::new();
        at(&fixture.parts()).into_iter().for_each(|at| fixture.damage(at + 40));
        let report = fixture.check();
        assert!(
            report.findings.iter().any(|finding| finding.severity == Severity::Fatal),
            "{:?}",
            report.findings
        );
    }
}

/// A daemon on another machine that is host 1: it gives signs of life.
struct Elsewhere {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Elsewhere {
    fn of(fixture: &Fixture) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let file = File::options().write(true).open(fixture.region()).expect("the region");
        let (at, stopped) = (fixture.parts().beat(1), Arc::clone(&stop));
        let give = move |number: u64| {
            let content = HostBeat {
                incarnation: 5.into(),
                beat: number.into(),
                boot: [0xb0; 16],
                process: 4242.into(),
                reserved: [0; 12],
            };
            let line = Slot { sequence: number, content }.encode_line(1);
            file.write_all_at(&line, at).expect("written");
        };
        give(1);
        let thread = std::thread::spawn(move || {
            for number in 2.. {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                give(number);
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

#[track_caller]
fn refused<T>(result: Result<T>) {
    let error = result.err().expect("a host elsewhere lives");
    assert!(error.kind() == ErrorKind::Busy && error.line().contains("alive on another machine"), "{error}");
    assert!(error.line().contains("host 1 (b)"), "{error}");
}

#[test]
fn no_tool_opens_a_region_of_which_a_host_elsewhere_lives() {
    let fixture = Fixture::new();
    let path = fixture.region();
    let elsewhere = Elsewhere::of(&fixture);
    let before = std::fs::read(fixture.disk("b")).expect("the disk");
    refused(to_read(&path));
    refused(rescue(to_change(&path).expect("no process here has it"), &Options::default(), &mut |_| {}));
    let region = Arc::new(Region::new(to_change(&path).expect("no process here has it")));
    refused(announce(&region, &path));
    drop(region);
    let options = FormatOptions { segment_size: Some(SEGMENT), force: true, ..FormatOptions::default() };
    let format = Format { options, shared: true };
    let environment = Arc::new(ProcessEnvironment::new());
    refused(open_transport(environment, fixture.map(), "the region", "c", Some(&format)));
    assert!(std::fs::read(fixture.disk("b")).expect("the disk") == before, "its disk is its own");
    drop(elsewhere);
    to_read(&path).expect("it gives no sign of life any more");
    assert_eq!(fixture.check().transport.expect("it is one").hosts, ["a", "b"]);
}

#[test]
fn damage_to_the_claims_of_one_host_hides_no_other_host() {
    let fixture = Fixture::new();
    let parts = fixture.parts();
    for claim in 0..parts.voters(Object::Area(0)) {
        parts.vote(Object::Area(0), claim).into_iter().for_each(|at| fixture.damage(at + 40));
    }
    let _elsewhere = Elsewhere::of(&fixture);
    refused(to_read(&fixture.region()));
}
