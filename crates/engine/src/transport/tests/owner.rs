//! Two hosts of different machines over one memory that is not coherent between them.

use super::*;
use crate::transport::owner::{Beat, NOTE_AT, NOTE_BYTES, Ownership, Seen, living, look, may_announce};
extern crate std;

use alloc::collections::BTreeMap;
use cbd_types::{BootId, Durability, MediaError, Reach};
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex as StdMutex;

const FIRST: BootId = BootId([1; 16]);
const SECOND: BootId = BootId([2; 16]);

type Medium = Arc<StdMutex<Vec<u8>>>;
/// The content of a line in the caches of a machine, and whether the medium lacks it.
type Lines = BTreeMap<u64, ([u8; 64], bool)>;

/// The memory as one machine has it: its caches keep lines until they are observed, and stores until they are fenced.
struct OfMachine {
    medium: Medium,
    lines: StdMutex<Lines>,
    boot: BootId,
    unreadable: AtomicBool,
    gone: AtomicBool,
}

impl OfMachine {
    fn region(medium: &Medium, boot: BootId) -> Region<Self> {
        let (unreadable, gone) = (AtomicBool::new(false), AtomicBool::new(false));
        Region::new(Self { medium: Arc::clone(medium), lines: StdMutex::default(), boot, unreadable, gone })
    }

    fn line(&self, lines: &mut Lines, at: u64) -> [u8; 64] {
        let from = || {
            let mut bytes = [0; 64];
            bytes.copy_from_slice(&self.medium.lock().expect("no panic")[at as usize..][..64]);
            (bytes, false)
        };
        lines.entry(at).or_insert_with(from).0
    }
}

impl Pmem for OfMachine {
    fn len(&self) -> u64 {
        self.medium.lock().expect("no panic").len() as u64
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        if self.gone.load(Ordering::Relaxed) {
            return;
        }
        let mut lines = self.lines.lock().expect("no panic");
        for (byte, at) in from.iter().zip(at..) {
            let line = at / 64 * 64;
            let mut bytes = self.line(&mut lines, line);
            bytes[(at - line) as usize] = *byte;
            lines.insert(line, (bytes, true));
        }
    }

    fn store_summed(&self, _: u64, _: &[u8], _: usize, _: &mut [u32]) {
        unreachable!("no data is stored here")
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {
        for (at, (bytes, is_dirty)) in
            self.lines.lock().expect("no panic").iter_mut().filter(|(_, line)| line.1)
        {
            self.medium.lock().expect("no panic")[*at as usize..][..64].copy_from_slice(bytes);
            *is_dirty = false;
        }
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        if self.unreadable.load(Ordering::Relaxed) && at <= NOTE_AT && at + into.len() as u64 > NOTE_AT {
            return Err(MediaError { at: NOTE_AT });
        }
        let mut lines = self.lines.lock().expect("no panic");
        for (byte, at) in into.iter_mut().zip(at..) {
            *byte = self.line(&mut lines, at / 64 * 64)[(at % 64) as usize];
        }
        Ok(())
    }

    fn load_summed(&self, _: u64, _: &mut [u8]) -> core::result::Result<u32, MediaError> {
        unreachable!("no data is loaded here")
    }

    fn write_back(&self, _: u64, _: u64) {}

    fn observe(&self, at: u64, length: u64) {
        let is_kept = |line: &u64, is_dirty: bool| is_dirty || *line + 64 <= at || *line >= at + length;
        self.lines.lock().expect("no panic").retain(|line, (_, is_dirty)| is_kept(line, *is_dirty));
    }

    fn reach(&self) -> Reach {
        Reach::Machines
    }

    fn give_up(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }

    fn failed_at(&self) -> Option<u64> {
        self.gone.load(Ordering::Relaxed).then_some(0)
    }

    fn boot(&self) -> BootId {
        self.boot
    }
}

/// A formatted region on two machines.
fn machines() -> (Medium, Region<OfMachine>, Region<OfMachine>) {
    let superblocks = formatted(false);
    let mut bytes = vec![0; SIZE as usize];
    superblocks.region().load(0, &mut bytes).expect("it is readable");
    let medium = Arc::new(StdMutex::new(bytes));
    let regions = [FIRST, SECOND].map(|boot| OfMachine::region(&medium, boot));
    let [first, second] = regions;
    (medium, first, second)
}

fn ownership(region: &Region<OfMachine>, incarnation: u64) -> Ownership {
    Ownership::new(region, incarnation, 77, "node-a")
}

#[test]
fn another_machine_sees_a_host_that_has_announced_itself_and_each_renewal() {
    let (_, first, second) = machines();
    assert_eq!((look(&first), look(&second)), (Seen::Free, Seen::Free));
    let mut owner = ownership(&first, 1);
    owner.announce(&first).expect("it is stored");
    owner.confirm(&first).expect("no other host is there");
    let Seen::Other(before) = look(&second) else { panic!("{:?}", look(&second)) };
    assert_eq!(look(&first), Seen::SameBoot);
    assert_eq!(owner.beat(&first), Beat::Renewed);
    let Seen::Other(after) = look(&second) else { panic!("{:?}", look(&second)) };
    assert!(before != after && before.is_of_same_open(&after));
    let error = living(&after, "/dev/dax0.0");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.line().contains("host node-a (process 77 there) on another machine"), "{error}");
    owner.release(&first);
    assert_eq!((look(&first), look(&second)), (Seen::Free, Seen::Free));
}

#[test]
fn of_two_hosts_that_announce_themselves_at_once_one_is_refused() {
    let (_, first, second) = machines();
    let (one, other) = (ownership(&first, 1), ownership(&second, 2));
    assert!(matches!((look(&first), look(&second)), (Seen::Free, Seen::Free)));
    one.announce(&first).expect("it is stored");
    other.announce(&second).expect("it is stored");
    assert_eq!(one.confirm(&first).expect_err("the other one was later").kind(), ErrorKind::Busy);
    other.confirm(&second).expect("it was the last one");
    // The one that is refused leaves the note of the other one.
    one.release(&first);
    other.confirm(&second).expect("it is still there");
}

#[test]
fn a_host_whose_region_was_taken_meanwhile_notices_it_and_stores_nothing() {
    let (medium, first, second) = machines();
    let mut paused = ownership(&first, 1);
    paused.announce(&first).expect("it is stored");
    let other = Ownership::new(&second, 2, 88, "node-b");
    other.announce(&second).expect("it is stored");
    let before = medium.lock().expect("no panic").clone();
    let Beat::Taken(by) = paused.beat(&first) else { panic!("it is not noticed") };
    assert_eq!((by.host_name().as_deref(), by.process.get()), (Some("node-b"), 88));
    first.give_up_to("node-b", 88);
    let failure = first.store_failure().expect("nothing is stored any more");
    assert_eq!(failure.kind(), ErrorKind::Stopped);
    assert!(failure.line().contains("host node-b (process 88 there)"), "{failure}");
    assert_eq!(
        first.check_stores(MutationPoint::OwnerStoreCheck).expect_err("no store").kind(),
        ErrorKind::Stopped
    );
    assert_eq!(paused.beat(&first), Beat::Failed);
    assert_eq!(paused.announce(&first).expect_err("it failed").kind(), ErrorKind::Stopped);
    paused.release(&first);
    assert!(*medium.lock().expect("no panic") == before, "the memory is the other host's");
}

#[test]
fn a_host_that_stores_its_note_late_over_that_of_its_successor_finds_it_again() {
    let (_, first, second) = machines();
    let mut paused = ownership(&first, 1);
    paused.announce(&first).expect("it is stored");
    let Seen::Other(gone) = look(&second) else { panic!("{:?}", look(&second)) };
    let mut successor = Ownership::new(&second, 2, 88, "node-b").after(Some(gone));
    successor.announce(&second).expect("it is stored");
    successor.confirm(&second).expect("no other host is there");
    // It has looked at the note before the pause, and stores it now.
    paused.announce(&first).expect("it is stored");
    assert!(matches!(successor.beat(&second), Beat::Replaced(by) if by.is_of_same_open(&gone)));
    assert!(matches!(paused.beat(&first), Beat::Taken(by) if by.host_name().as_deref() == Some("node-b")));
    assert_eq!(successor.beat(&second), Beat::Renewed);
    // Only that open of the region was gone.
    let again = ownership(&first, 3);
    again.announce(&first).expect("it is stored");
    assert!(matches!(successor.beat(&second), Beat::Taken(_)));
}

#[test]
fn a_note_that_was_erased_is_stored_again() {
    let (medium, first, second) = machines();
    let mut owner = ownership(&first, 1);
    owner.announce(&first).expect("it is stored");
    medium.lock().expect("no panic")[NOTE_AT as usize..][..NOTE_BYTES].fill(0);
    assert_eq!(look(&second), Seen::Free);
    assert_eq!((owner.beat(&first), owner.beat(&first)), (Beat::Restored, Beat::Renewed));
    assert!(matches!(look(&second), Seen::Other(note) if note.host_name().as_deref() == Some("node-a")));
    // One byte of it: no note of another host is valid there.
    medium.lock().expect("no panic")[NOTE_AT as usize + 40] ^= 1;
    assert_eq!((look(&second), owner.beat(&first)), (Seen::Torn, Beat::Restored));
}

#[test]
fn a_note_that_cannot_be_read_is_left_alone() {
    let (medium, first, _) = machines();
    let mut owner = ownership(&first, 1);
    assert!(Ownership::is_possible(&first));
    first.memory().unreadable.store(true, Ordering::Relaxed);
    let before = medium.lock().expect("no panic").clone();
    assert!(!Ownership::is_possible(&first));
    assert_eq!((look(&first), owner.beat(&first)), (Seen::Free, Beat::Failed));
    owner.release(&first);
    assert!(*medium.lock().expect("no panic") == before && first.store_failure().is_none());
}

#[test]
fn a_note_is_stored_beforehand_only_behind_a_valid_superblock() {
    let (medium, first, _) = machines();
    assert!(may_announce(&first));
    medium.lock().expect("no panic")[200] ^= 1;
    first.memory().lines.lock().expect("no panic").clear();
    assert!(may_announce(&first), "the superblock ends before that byte");
    medium.lock().expect("no panic")[100] ^= 1;
    first.memory().lines.lock().expect("no panic").clear();
    assert!(!may_announce(&first));
}

#[test]
fn a_transport_that_is_abandoned_takes_no_more_requests() {
    let tested = transport();
    let host = tested.register_host("node-a", None).expect("room");
    let spec = BackendSpec {
        host,
        path: "/dev/sdz".into(),
        identity: "1".into(),
        size: 8 << 20,
        sector: 512,
        cache_bytes: Some(10 * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    };
    let backend = tested.create_backend(&spec).expect("room");
    let cache = tested.open_cache(backend).expect("a cache");
    assert!(cache.is_running());
    tested.abandon();
    assert!(cache.is_abandoned() && !cache.is_running());
}
