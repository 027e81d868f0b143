//! Verification of superblocks and rows: on memory that mixes pages, beside changes that did not end, and without a cache.

use super::*;
use crate::MetadataPlace;
use cbd_types::{DamagedCopy, Structure, VerifiedMetadata};

const SECOND: u64 = SIZE - PAGE;

fn verify(transport: &Tested, id: BackendId) -> VerifiedMetadata {
    let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
    while !place.is_at_end() {
        transport.verify_metadata(id, &mut place, &mut found).expect("it runs");
    }
    found
}

/// Changes a byte that the checksum covers.
fn damage(transport: &Tested, at: u64) {
    let mut byte = [0];
    transport.region.load(at + 20, &mut byte).expect("it can be read");
    let _ = transport.region.store(at + 20, &[byte[0] ^ 1]);
    ops(transport);
}

fn uncached(transport: &Tested) -> BackendId {
    let spec = BackendSpec { cache_bytes: None, ..spec() };
    transport.create_backend(&spec).expect("there is room")
}

fn backend_row(transport: &Tested, id: BackendId) -> [u64; 2] {
    slots::<BackendRow>(transport.layout().backend_area, 4, id.0)
}

fn copy(structure: Structure, at: u64) -> DamagedCopy {
    DamagedCopy { structure, number: 0, at, is_readable: true, is_repaired: true }
}

#[test]
fn what_is_stored_again_is_on_the_disk_of_an_ordinary_file() {
    let transport = formatted(true);
    let id = uncached(&transport);
    let row = backend_row(&transport, id);
    for which in [0, 1] {
        damage(&transport, row[which]);
        assert_eq!(verify(&transport, id).copies, [copy(Structure::BackendRow, row[which])]);
        let stored = [Op::Store(row[which], 1024), Op::Fence, Op::Sync(row[which], 1024)];
        assert_eq!(ops(&transport), stored);
    }
    for at in [0, SECOND] {
        damage(&transport, at);
        assert_eq!(verify(&transport, id).copies, [copy(Structure::Superblock, at)]);
        assert_eq!(ops(&transport), [Op::Store(at, 192), Op::Fence, Op::Sync(at, PAGE)]);
    }
}

#[test]
fn of_two_damaged_copies_one_is_on_the_disk_before_the_other_one_changes() {
    let transport = formatted(true);
    let id = uncached(&transport);
    let row = backend_row(&transport, id);
    damage(&transport, row[0]);
    damage(&transport, row[1]);
    assert_eq!(verify(&transport, id).repaired, 2);
    let stored = |at| [Op::Store(at, 1024), Op::Fence, Op::Sync(at, 1024)];
    // The second slot was the newest one.
    assert_eq!(ops(&transport), [stored(row[1]), stored(row[0])].concat());
    damage(&transport, 0);
    damage(&transport, SECOND);
    assert_eq!(verify(&transport, id).repaired, 2);
    let stored = |at| [Op::Store(at, 192), Op::Fence, Op::Sync(at, PAGE)];
    assert_eq!(ops(&transport), [stored(SECOND), stored(0)].concat());
    let reopened = reopened(&transport);
    assert_eq!(reopened.info().uuid, transport.info().uuid);
    assert!(reopened.backend(id).is_ok());
}

#[test]
fn after_a_failed_sync_nothing_is_stored_again() {
    let transport = formatted(true);
    let id = uncached(&transport);
    let row = backend_row(&transport, id);
    damage(&transport, row[0]);
    transport.region.memory().fail_syncs(1);
    let found = verify(&transport, id);
    assert_eq!((found.repaired, found.unrepaired), (0, 1), "it may not be on the disk");
    assert_eq!(found.error.map(|error| error.kind()), Some(ErrorKind::System));
    damage(&transport, row[0]);
    damage(&transport, 0);
    let found = verify(&transport, id);
    assert_eq!((found.repaired, found.unrepaired), (0, 2));
    assert!(found.error.expect("it is said").line().contains("sync of the region has failed"));
    assert_eq!(ops(&transport), [], "the other slot may be the only one on the disk");
    // The next process has synced what it read.
    let next = reopened(&transport);
    assert_eq!(verify(&next, id).copies, [copy(Structure::Superblock, 0)]);
}

#[test]
fn a_row_of_which_one_slot_is_older_on_purpose_is_left_alone() {
    let transport = formatted(true);
    let id = uncached(&transport);
    transport.region.memory().fail_syncs(1);
    assert!(transport.update_path(id, "/dev/new").is_err(), "the second slot is not stored");
    ops(&transport);
    let found = verify(&transport, id);
    assert_eq!((found.copies, found.error.is_none()), (vec![], true));
    assert_eq!(ops(&transport), []);
}

#[test]
fn a_superblock_of_a_change_that_did_not_end_is_left_alone() {
    let transport = transport();
    let id = uncached(&transport);
    let block = *transport.tables.lock().superblocks.block();
    for at in [0, SECOND] {
        let newer = block.with_incompatible(FEATURE_BYPASS);
        let _ = transport.region.store(at, bytes_of(&newer));
        ops(&transport);
        assert_eq!(verify(&transport, id).copies, []);
        // With the other one damaged it is the only valid one.
        damage(&transport, SECOND - at);
        let found = verify(&transport, id);
        assert_eq!((found.repaired, found.unrepaired), (0, 1));
        assert_eq!(ops(&transport), []);
        let _ = transport
            .region
            .store(at, bytes_of(&block))
            .and(transport.region.store(SECOND - at, bytes_of(&block)));
    }
    assert_eq!(verify(&transport, id).copies, []);
}

#[test]
fn a_superblock_that_cannot_be_read_gets_no_feature_without_the_other_one() {
    let transport = transport();
    let id = uncached(&transport);
    transport.region.memory().fail(ByteRange::at(0, PAGE));
    let found = verify(&transport, id);
    let expected = DamagedCopy { is_readable: false, is_repaired: false, ..copy(Structure::Superblock, 0) };
    assert_eq!(found.copies, [expected]);
    damage(&transport, SECOND);
    assert_eq!(verify(&transport, id).repaired, 1);
    assert_eq!(kind(transport.require_feature(FEATURE_BYPASS)), Some(ErrorKind::Media));
}

#[test]
fn a_row_that_was_lost_before_is_reported_and_counts_until_it_is_stored() {
    let first = transport();
    let host = first.register_host("a", None).expect("there is room");
    let row = slots::<HostRow>(first.layout().host_area, 4, host.0);
    damage(&first, row[0]);
    damage(&first, row[1]);
    let transport = reopened(&first);
    let found = verify(&transport, BackendId(0));
    let lost = |at| DamagedCopy { is_repaired: false, ..copy(Structure::HostRow, at) };
    assert_eq!(found.copies, row.map(lost));
    // Where no cache was opened only the tables are looked at.
    assert_eq!(found.structures, 1 + 3 * 4 + u64::from(transport.layout().segment_count));
}

#[test]
fn a_cache_that_is_not_open_cannot_be_looked_at() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("there is room");
    let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
    let error = loop {
        if let Err(error) = transport.verify_metadata(id, &mut place, &mut found) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Stopped);
    assert!(!place.is_at_end());
}
