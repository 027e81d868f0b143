//! Other operations run between the steps of opening a cache, in a region on an ordinary file: recovery holds
//! no lock.

use crate::meeting::{Meeting, MeetingMemory, Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, try_write};
use cbd_engine::{BackendSpec, Cache, FormatOptions, Pages, Settings, Transport};
use cbd_sim::{CrashMemory, SimEnvironment, Watchdog, act_as};
use cbd_types::{BackendId, BootId, ErrorKind, Region, Result};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const SEGMENT: u64 = 64 << 10;
const ONE: BackendId = BackendId(0);
const OTHER: BackendId = BackendId(1);
/// Records that recovery finds in a cache.
const RECORDS: u64 = 40;

const fn boot(number: u8) -> BootId {
    BootId([number; 16])
}

type OpenCache = Arc<Cache<Meeting>>;

/// A region with two backends, opened again after its process ended with records in the log of the first.
struct Tables {
    memory: CrashMemory,
    transport: Arc<Transport<Meeting>>,
    _watchdog: Watchdog,
}

impl Tables {
    fn new() -> Self {
        act_as(0);
        let memory = CrashMemory::new(21 * SEGMENT + (256 << 10));
        memory.become_file(boot(1));
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 2,
            backend_rows: 2,
            blkdev_rows: 2,
        };
        let transport =
            Transport::format(environment(), Region::new(MeetingMemory(memory.clone())), &options)
                .expect("fresh memory");
        let host = transport.register_host("host", None).expect("an empty table");
        for expected in [ONE, OTHER] {
            let made = transport.create_backend(&BackendSpec {
                host,
                path: format!("/simulated/{expected}"),
                identity: format!("simulated {expected}"),
                size: 2 * cbd_types::CHUNK,
                sector: 512,
                cache_bytes: Some(9 * SEGMENT),
                lanes_max: 1,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            });
            assert_eq!(made.expect("there is space"), expected);
        }
        let cache = transport.open_cache(ONE).expect("a new cache");
        for block in 0..RECORDS {
            assert!(try_write(&cache, block * BLOCK, 1), "there is space");
        }
        let memory = memory.process_crash();
        let transport = open(&memory);
        let _watchdog = Watchdog::new(Duration::from_secs(60), "operations while a cache is opened");
        Self { memory, transport, _watchdog }
    }

    /// Opens the first cache; `others` run at that moment.
    fn open_while(&self, moment: u32, others: impl FnOnce() + 'static) -> (Result<OpenCache>, Met) {
        act_as(0);
        meet(moment, others, || self.transport.open_cache(ONE))
    }
}

fn environment() -> Arc<Meeting> {
    Arc::new(Meeting(SimEnvironment::new(5, 0)))
}

fn open(memory: &CrashMemory) -> Arc<Transport<Meeting>> {
    Transport::open(environment(), Region::new(MeetingMemory(memory.clone()))).expect("a transport")
}

/// Runs `round` at every moment of an opening. Returns how often the others ran, and how often a lock blocked them.
fn at_every_moment(mut round: impl FnMut(u32) -> Met) -> (u64, u64) {
    let (mut came, mut blocked) = (0, 0);
    for moment in 1..MOMENTS_MAX {
        match round(moment) {
            Met::Came => came += 1,
            Met::Blocked => blocked += 1,
            Met::Never => return (came, blocked),
        }
    }
    panic!("opening a cache never ends");
}

#[test]
fn the_first_write_of_a_cache_does_not_wait_for_the_recovery_of_another() {
    let (came, blocked) = at_every_moment(|moment| {
        let tables = Tables::new();
        let other = tables.transport.open_cache(OTHER).expect("free");
        let writer = Arc::clone(&other);
        let others = move || assert!(try_write(&writer, 0, 2), "there is space");
        let (opened, met) = tables.open_while(moment, others);
        opened.expect("free");
        if met == Met::Came {
            let after = open(&tables.memory.machine_crash(1, boot(2)));
            let pages = after.pages_of(OTHER).expect("it is there");
            assert_eq!(pages, Pages::MixedDirty, "moment {moment}: the write was not noted");
        }
        met
    });
    // Recovery reads each record; the notes in the tables before and after it take few steps.
    assert!(came > RECORDS && came > blocked, "{came} moments, and {blocked} at which the lock is held");
}

#[test]
fn a_cache_that_is_being_opened_is_not_opened_again() {
    let (came, _) = at_every_moment(|moment| {
        let tables = Tables::new();
        let found = Rc::new(RefCell::new(None));
        let (transport, theirs) = (Arc::clone(&tables.transport), Rc::clone(&found));
        let others = move || *theirs.borrow_mut() = Some(transport.open_cache(ONE));
        let (ours, met) = tables.open_while(moment, others);
        if let Some(theirs) = found.take() {
            let refused: Vec<_> =
                [&ours, &theirs].into_iter().filter_map(|opened| opened.as_ref().err()).collect();
            assert_eq!(refused.len(), 1, "moment {moment}: {ours:?} {theirs:?}");
            assert_eq!(refused[0].kind(), ErrorKind::Busy);
        }
        met
    });
    assert!(came > RECORDS, "{came} moments");
}

#[test]
fn the_backend_of_a_cache_that_is_being_opened_is_not_removed() {
    let (came, _) = at_every_moment(|moment| {
        let tables = Tables::new();
        let found = Rc::new(RefCell::new(None));
        let (transport, theirs) = (Arc::clone(&tables.transport), Rc::clone(&found));
        let others = move || *theirs.borrow_mut() = Some(transport.remove_backend(ONE));
        let (ours, met) = tables.open_while(moment, others);
        if let Some(removed) = found.take() {
            assert_ne!(ours.is_ok(), removed.is_ok(), "moment {moment}: {ours:?} {removed:?}");
        }
        met
    });
    assert!(came > RECORDS, "{came} moments");
}

#[test]
fn a_cache_that_is_being_opened_is_not_noted_as_synced() {
    let (came, _) = at_every_moment(|moment| {
        let tables = Tables::new();
        let transport = Arc::clone(&tables.transport);
        let others = move || {
            transport.sync().expect("the disk takes it");
        };
        let (cache, met) = tables.open_while(moment, others);
        let cache = cache.expect("free");
        assert!(try_write(&cache, 0, 3), "there is space");
        let after = open(&tables.memory.machine_crash(1, boot(2)));
        assert_eq!(after.pages_of(ONE).expect("it is there"), Pages::MixedDirty, "moment {moment}");
        met
    });
    assert!(came > RECORDS, "{came} moments");
}
