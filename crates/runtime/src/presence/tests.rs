//! Hosts of machines with other boots over one memory.

use super::*;
use cbd_engine::{Admission, BackendSpec, Cache, FormatOptions, Settings};
use cbd_types::{BackendId, BootId, ByteRange, Durability, MediaError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

/// Short enough for a test, and long enough for a machine with other load.
const TIMING: Timing = Timing {
    beat: Duration::from_millis(20),
    limit: Duration::from_millis(2000),
    poll: Duration::from_millis(5),
    settle: Duration::from_millis(5),
};
/// A host that is paused: it renews nothing during the test.
const PAUSED: Timing = Timing { beat: Duration::from_secs(3600), ..TIMING };
/// One that opens a region whose host is known to be gone.
const SHORT_LIMIT: Timing = Timing { limit: Duration::from_millis(50), ..TIMING };

const SIZE: usize = 8 << 20;

type Bytes = Arc<Mutex<Vec<u8>>>;

/// The memory as a machine has it.
struct OfMachine {
    bytes: Bytes,
    boot: u8,
    gone: AtomicBool,
}

impl Pmem for OfMachine {
    fn len(&self) -> u64 {
        self.bytes.lock().len() as u64
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        if !self.gone.load(Ordering::SeqCst) {
            self.bytes.lock()[at as usize..][..from.len()].copy_from_slice(from);
        }
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.store(at, from);
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(rest.chunks(4096));
        checksums.iter_mut().zip(blocks).for_each(|(sum, block)| *sum = cbd_format::crc32c(block));
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {}

    fn load(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), MediaError> {
        if self.gone.load(Ordering::SeqCst) {
            return Err(MediaError { at });
        }
        into.copy_from_slice(&self.bytes.lock()[at as usize..][..into.len()]);
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> std::result::Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(cbd_format::crc32c(into))
    }

    fn write_back(&self, _: u64, _: u64) {}

    fn reach(&self) -> Reach {
        Reach::Machines
    }

    fn give_up(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    fn failed_at(&self) -> Option<u64> {
        self.gone.load(Ordering::SeqCst).then_some(0)
    }

    fn boot(&self) -> BootId {
        BootId([self.boot; 16])
    }
}

type Opened = (Arc<Transport<ProcessEnvironment<OfMachine>>>, Presence);

fn region(bytes: &Bytes, boot: u8) -> Region<OfMachine> {
    Region::new(OfMachine { bytes: Arc::clone(bytes), boot, gone: AtomicBool::new(false) })
}

fn opened(bytes: &Bytes, boot: u8, timing: &Timing) -> Result<Opened> {
    let name = format!("node-{boot}");
    open(Arc::new(ProcessEnvironment::new()), region(bytes, boot), ("/dev/dax0.0", &name), timing, None)
}

fn formatted(bytes: &Bytes, boot: u8, timing: &Timing) -> Result<Opened> {
    let options = FormatOptions { segment_size: Some(64 << 10), force: true, ..FormatOptions::default() };
    let format = Box::new(move |environment, region| Transport::format(environment, region, &options));
    let names = ("/dev/dax0.0", "node-f");
    open(Arc::new(ProcessEnvironment::new()), region(bytes, boot), names, timing, Some(format))
}

/// The memory of a region that was formatted and released.
fn memory() -> Bytes {
    let bytes = Bytes::new(Mutex::new(vec![0; SIZE]));
    let (transport, presence) = formatted(&bytes, 9, &TIMING).expect("no host has it");
    drop(presence);
    drop(transport);
    bytes
}

fn cache(transport: &Transport<ProcessEnvironment<OfMachine>>) -> Arc<Cache<ProcessEnvironment<OfMachine>>> {
    let spec = BackendSpec {
        host: transport.register_host("node", None).expect("room"),
        path: "/dev/sdz".into(),
        identity: "1".into(),
        size: 8 << 20,
        sector: 512,
        cache_bytes: Some(2 << 20),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    };
    let id: BackendId = transport.create_backend(&spec).expect("room");
    transport.open_cache(id).expect("a cache")
}

fn close((transport, presence): Opened) {
    drop(presence);
    drop(transport);
}

#[test]
fn a_second_machine_is_refused_while_the_first_lives_and_opens_when_it_has_closed_the_region() {
    let memory = memory();
    let first = opened(&memory, 1, &TIMING).expect("no host has it");
    let before = Instant::now();
    for refused in [opened(&memory, 2, &TIMING), formatted(&memory, 2, &TIMING)] {
        let error = refused.err().expect("the first one lives");
        assert_eq!(error.kind(), ErrorKind::Busy);
        let who = format!("host node-1 (process {} there) on another machine", std::process::id());
        assert!(error.line().contains(&who), "{error}");
    }
    assert!(before.elapsed() < 2 * TIMING.limit, "it knows that when the note is renewed");
    assert!(first.0.region().store_failure().is_none());
    close(first);
    let begun = Instant::now();
    close(opened(&memory, 2, &PAUSED).expect("it was released"));
    assert!(begun.elapsed() < PAUSED.limit, "there is no host to wait for");
}

#[test]
fn a_host_that_is_gone_is_waited_for_and_then_the_region_is_taken() {
    let memory = memory();
    let gone = opened(&memory, 1, &PAUSED).expect("no host has it");
    let begun = Instant::now();
    let timing = Timing { limit: Duration::from_millis(300), ..TIMING };
    close(opened(&memory, 2, &timing).expect("the first one gives no sign of life"));
    assert!(begun.elapsed() >= timing.limit);
    close(gone);
}

#[test]
fn a_restart_of_the_same_machine_waits_for_nothing() {
    let memory = memory();
    let killed = opened(&memory, 1, &PAUSED).expect("no host has it");
    let begun = Instant::now();
    close(opened(&memory, 1, &PAUSED).expect("the lock of the file protects against a living one"));
    assert!(begun.elapsed() < PAUSED.limit);
    close(killed);
}

#[test]
fn a_host_that_was_paused_while_another_took_the_region_neither_reads_nor_stores() {
    let memory = memory();
    let timing = Timing { beat: Duration::from_millis(400), ..TIMING };
    let (transport, presence) = opened(&memory, 1, &timing).expect("no host has it");
    let cache = cache(&transport);
    let written = cache.write(ByteRange::at(0, 4096), &[7; 4096], Waker::noop());
    assert!(matches!(written, Ok(Admission::Done(_))), "{written:?}");
    let other = opened(&memory, 2, &SHORT_LIMIT).expect("the first one gives no sign of life in this time");
    let end = Instant::now() + Duration::from_secs(20);
    while cache.is_running() {
        assert!(Instant::now() < end, "it does not notice that the region was taken");
        std::thread::sleep(Duration::from_millis(5));
    }
    let taken = transport.region().store_failure().expect("it stores nothing");
    assert!(taken.kind() == ErrorKind::Stopped && taken.line().contains("host node-2"), "{taken}");
    // Nothing of the second host changes the memory from here on.
    drop(other.1);
    let before = memory.lock().clone();
    assert!(cache.write(ByteRange::at(0, 4096), &[8; 4096], Waker::noop()).is_err());
    assert!(transport.register_host("more", None).is_err());
    assert!(transport.open_cache(BackendId(0)).is_err());
    cache.stop();
    drop(cache);
    drop(presence);
    drop(transport);
    assert!(*memory.lock() == before, "the region is the other host's");
}

#[test]
fn a_region_that_is_still_in_use_in_this_process_is_not_released() {
    let memory = memory();
    let (transport, presence) = opened(&memory, 1, &TIMING).expect("no host has it");
    let user = Arc::clone(&transport);
    drop(presence);
    assert!(matches!(look(&region(&memory, 2)), Seen::Other(_)));
    drop((transport, user));
}

#[test]
fn a_region_that_does_not_open_is_released_and_foreign_data_stays() {
    let memory = memory();
    {
        let mut bytes = memory.lock();
        let tables = bytes[4096..].len();
        bytes[..4096].fill(0xa5);
        bytes[4096..][..tables].fill(0xa5);
    }
    let before = memory.lock().clone();
    let error = opened(&memory, 1, &TIMING).err().expect("there is no region");
    assert_eq!(error.kind(), ErrorKind::Foreign);
    assert!(*memory.lock() == before);
}

#[test]
fn a_note_that_is_torn_is_looked_at_again() {
    let memory = memory();
    let first = opened(&memory, 1, &TIMING).expect("no host has it");
    let whole = look(&region(&memory, 2));
    let looks = Mutex::new(0);
    let see = || {
        *looks.lock() += 1;
        if *looks.lock() == 1 { Seen::Torn } else { look(&region(&memory, 2)) }
    };
    assert!(matches!(whole, Seen::Other(_)));
    assert_eq!(refuse_living("r", &TIMING, &see).expect_err("it lives").kind(), ErrorKind::Busy);
    assert_eq!(refuse_living("r", &SHORT_LIMIT, &|| Seen::Torn).expect("it is no note"), None);
    close(first);
}
