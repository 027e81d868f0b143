//! Rows of tables that lost both copies: they are reported as lost, and the segments and numbers that they named are
//! not allocated again.

use crate::outside::RigEnvironment;
use crate::rig::{Rig, SECTOR};
use cbd_engine::{BackendSpec, Settings, Transport};
use cbd_format::{BackendEntry, Layout, SegmentEntry};
use cbd_sim::{CrashMemory, Keep};
use cbd_types::{BackendId, ByteRange, ErrorKind, HostId, Region};
use std::sync::Arc;

const SEGMENTS: u64 = 9;

/// Both slots of the backend's row.
fn row_of_backend(rig: &Rig) -> [u64; 2] {
    let layout = rig.transport.info().layout;
    Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, 0)
}

/// The transport of the region after a power cut.
fn reopened(rig: Rig) -> (CrashMemory, Arc<Transport<RigEnvironment>>) {
    let memory = rig.memory.power_cut(11, Keep::Nothing);
    let transport = Transport::open(Arc::clone(&rig.environment), Region::new(memory.clone())).unwrap();
    (memory, transport)
}

fn another_backend(segments: u64) -> BackendSpec {
    BackendSpec {
        host: HostId(0),
        path: "/dev/another".into(),
        identity: "another".into(),
        size: 1 << 20,
        sector: 512,
        cache_bytes: Some(segments * (64 << 10)),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    }
}

#[test]
fn a_backend_whose_row_is_lost_is_reported_and_its_segments_are_not_allocated() {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    let free = rig.transport.info().free_segments;
    row_of_backend(&rig).into_iter().for_each(|at| rig.poison(at, 1024));
    let (_, transport) = reopened(rig);
    let error = transport.backend(BackendId(0)).expect_err("its row is lost");
    assert_eq!(error.kind(), ErrorKind::Damaged, "{}", error.line());
    assert!(error.line().contains("backend 0"), "{}", error.line());
    assert_eq!(transport.info().free_segments, free, "its segments are not free");
    let error =
        transport.create_backend(&another_backend(SEGMENTS)).expect_err("there is no space for another");
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.line());
    let uncached = BackendSpec { cache_bytes: None, ..another_backend(0) };
    assert_eq!(transport.create_backend(&uncached).unwrap(), BackendId(1), "its number is not used again");
}

#[test]
fn a_segment_whose_entry_is_lost_is_not_allocated() {
    let rig = Rig::new();
    let layout = rig.transport.info().layout;
    let free = rig.transport.info().free_segments;
    let last = layout.segment_count - 1;
    let slots = Layout::slots::<SegmentEntry>(layout.segment_table, layout.segment_count, last);
    slots.into_iter().for_each(|at| rig.poison(at, 64));
    let (_, transport) = reopened(rig);
    assert_eq!(transport.info().free_segments, free - 1);
}

#[test]
fn a_row_whose_first_store_was_torn_is_free() {
    let rig = Rig::new();
    let layout = rig.transport.info().layout;
    let [first, _] = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, 1);
    rig.memory.flip(first + 100, 3);
    let (_, transport) = reopened(rig);
    assert_eq!(transport.backend(BackendId(1)).err().map(|error| error.kind()), Some(ErrorKind::NotFound));
    let uncached = BackendSpec { cache_bytes: None, ..another_backend(0) };
    assert_eq!(transport.create_backend(&uncached).unwrap(), BackendId(1));
}

#[test]
fn a_lost_row_whose_memory_can_be_read_again_is_there_again() {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    let slots = row_of_backend(&rig);
    slots.into_iter().for_each(|at| rig.memory.flip(at + 100, 3));
    let environment = Arc::clone(&rig.environment);
    let (memory, transport) = reopened(rig);
    assert!(transport.open_cache(BackendId(0)).is_err());
    drop(transport);
    slots.into_iter().for_each(|at| memory.flip(at + 100, 3));
    let transport = Transport::open(environment, Region::new(memory)).unwrap();
    let cache = transport.open_cache(BackendId(0)).unwrap();
    let (mut bytes, mut misses) = ([0; SECTOR as usize], Vec::new());
    cache.read(ByteRange::at(SECTOR, SECTOR), &mut bytes, &mut misses).unwrap();
    assert_eq!((bytes[0], misses.len()), (crate::rig::value_of(1), 0));
}
