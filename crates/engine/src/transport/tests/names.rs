//! Names of backends and blkdevs: kept with the row, and each of one backend and one blkdev at most.

use super::*;
use cbd_types::Name;

fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

fn bare() -> BackendSpec {
    BackendSpec { cache_bytes: None, ..spec() }
}

fn blkdev_on(backend: u32) -> BlkdevSpec {
    BlkdevSpec { backend: BackendId(backend), host: HostId(0), export: "nbd".into(), shared: false }
}

/// Two backends, each with a blkdev.
fn two() -> Tested {
    let transport = transport();
    for row in 0..2 {
        transport.create_backend(&bare()).expect("room");
        transport.create_blkdev(&blkdev_on(row)).expect("room");
    }
    transport
}

fn backend_name(transport: &Tested, id: u32) -> Option<String> {
    transport.backend(BackendId(id)).expect("it is there").name.map(|name| name.as_str().into())
}

fn blkdev_name(transport: &Tested, id: usize) -> Option<String> {
    transport.blkdevs()[id].name.as_ref().map(|name| name.as_str().into())
}

#[test]
fn names_are_kept_in_both_slots_for_the_next_process() {
    let transport = two();
    ops(&transport);
    transport.name_backend(BackendId(1), Some(&name("db-data"))).expect("it is free");
    let places = slots::<BackendRow>(transport.layout().backend_area, 4, 1);
    assert_eq!(ops(&transport), kept(places, 1024, false));
    transport.name_blkdev(BlkdevId(0), Some(&name(&"x".repeat(32)))).expect("it is free");
    let places = slots::<BlkdevRow>(transport.layout().blkdev_area, 4, 0);
    assert_eq!(ops(&transport), kept(places, 512, false));
    let found = reopened(&transport);
    assert_eq!((backend_name(&found, 0), backend_name(&found, 1)), (None, Some("db-data".into())));
    assert_eq!((blkdev_name(&found, 0), blkdev_name(&found, 1)), (Some("x".repeat(32)), None));
    let shown: Vec<_> = found.blkdevs().iter().map(|entry| entry.shown_name().cloned()).collect();
    assert_eq!(
        shown,
        [Some(name(&"x".repeat(32))), Some(name("db-data"))],
        "its own, else that of its backend"
    );
    found.name_backend(BackendId(1), Some(&name("db"))).expect("a shorter one");
    assert_eq!(backend_name(&reopened(&found), 1), Some("db".into()), "nothing of the former name is left");
    found.name_backend(BackendId(1), None).expect("it is there");
    found.name_blkdev(BlkdevId(0), None).expect("it is there");
    let found = reopened(&found);
    assert_eq!((backend_name(&found, 1), blkdev_name(&found, 0)), (None, None));
}

#[test]
fn a_backend_and_a_blkdev_are_created_with_their_names() {
    let transport = transport();
    let id = transport.create_named_backend(&spec(), Some(&name("data"))).expect("room");
    let blkdev = transport.create_named_blkdev(&blkdev_on(id.0), Some(&name("disk"))).expect("room");
    let found = reopened(&transport);
    assert_eq!(
        (backend_name(&found, 0), blkdev_name(&found, blkdev.index())),
        (Some("data".into()), Some("disk".into()))
    );
    // Nothing of a removed row is left in the next one.
    found.remove_blkdev(blkdev).expect("it is there");
    found.remove_backend(id).expect("it is there");
    assert_eq!(found.create_backend(&bare()).expect("room"), id);
    found.create_blkdev(&blkdev_on(id.0)).expect("room");
    assert_eq!((backend_name(&found, 0), blkdev_name(&found, 0)), (None, None));
}

#[test]
fn no_two_backends_have_a_name() {
    let transport = two();
    transport.name_backend(BackendId(0), Some(&name("data"))).expect("it is free");
    transport.name_backend(BackendId(0), Some(&name("data"))).expect("it is its own");
    ops(&transport);
    assert_eq!(
        kind(transport.name_backend(BackendId(1), Some(&name("data")))),
        Some(ErrorKind::AlreadyExists)
    );
    assert_eq!(
        kind(transport.create_named_backend(&bare(), Some(&name("data")))),
        Some(ErrorKind::AlreadyExists)
    );
    assert!(ops(&transport).is_empty(), "nothing was stored");
    // The name is free again when its backend has another one, or is gone.
    transport.name_backend(BackendId(0), Some(&name("old"))).expect("it is free");
    transport.name_backend(BackendId(1), Some(&name("data"))).expect("it is free");
    transport.remove_blkdev(BlkdevId(0)).expect("it is there");
    transport.remove_backend(BackendId(0)).expect("it is there");
    transport.name_backend(BackendId(1), Some(&name("old"))).expect("it is free");
    assert_eq!(kind(transport.name_backend(BackendId(0), None)), Some(ErrorKind::NotFound));
}

#[test]
fn no_two_blkdevs_have_a_name() {
    let transport = two();
    transport.create_backend(&bare()).expect("room");
    transport.name_blkdev(BlkdevId(0), Some(&name("disk"))).expect("it is free");
    transport.name_blkdev(BlkdevId(0), Some(&name("disk"))).expect("it is its own");
    ops(&transport);
    let taken = Some(ErrorKind::AlreadyExists);
    assert_eq!(kind(transport.name_blkdev(BlkdevId(1), Some(&name("disk")))), taken);
    assert_eq!(kind(transport.create_named_blkdev(&blkdev_on(2), Some(&name("disk")))), taken);
    assert!(ops(&transport).is_empty(), "nothing was stored");
    assert_eq!(kind(transport.name_blkdev(BlkdevId(3), None)), Some(ErrorKind::NotFound));
    // A blkdev whose backend's row was reused is stale, and has no name any more.
    transport.update_backend(BackendId(0), |row| row.uuid = [9; 16]).expect("it is there");
    transport.name_blkdev(BlkdevId(1), Some(&name("disk"))).expect("it is free");
}

#[test]
fn a_blkdev_can_have_the_name_of_its_own_backend_only() {
    let transport = two();
    transport.name_backend(BackendId(0), Some(&name("data"))).expect("it is free");
    transport.name_blkdev(BlkdevId(0), Some(&name("data"))).expect("it is its backend's");
    let taken = Some(ErrorKind::AlreadyExists);
    assert_eq!(kind(transport.name_blkdev(BlkdevId(1), Some(&name("data")))), taken);
    transport.name_blkdev(BlkdevId(1), Some(&name("disk"))).expect("it is free");
    assert_eq!(kind(transport.name_backend(BackendId(0), Some(&name("disk")))), taken);
    assert_eq!(kind(transport.create_named_backend(&bare(), Some(&name("disk")))), taken);
    transport.name_backend(BackendId(1), Some(&name("disk"))).expect("it is its blkdev's");
    let error = transport.name_backend(BackendId(0), Some(&name("disk"))).expect_err("taken");
    assert!(error.line().contains("backend 1 of this transport has the name disk already"), "{error}");
}

#[test]
fn of_several_blkdevs_on_a_backend_the_first_has_its_name() {
    let transport = two();
    transport.name_backend(BackendId(0), Some(&name("data"))).expect("it is free");
    transport.remove_blkdev(BlkdevId(0)).expect("it is there");
    let shared = BlkdevSpec { shared: true, ..blkdev_on(0) };
    let busy = Some(ErrorKind::Busy);
    let first = transport.create_blkdev(&shared).expect("room");
    assert_eq!(kind(transport.create_blkdev(&blkdev_on(0))), busy, "all of them share it");
    assert_eq!(kind(transport.create_blkdev(&BlkdevSpec { shared: true, ..blkdev_on(1) })), busy);
    let second = transport.create_blkdev(&shared).expect("room");
    assert_eq!((first, second), (BlkdevId(0), BlkdevId(2)));
    let shown = |transport: &Tested| -> Vec<(u32, bool, Option<String>)> {
        let on_it = transport.blkdevs().into_iter().filter(|entry| entry.backend == BackendId(0));
        let text = |entry: &BlkdevEntry| entry.shown_name().map(|name| name.as_str().into());
        on_it.map(|entry| (entry.id.0, entry.further, text(&entry))).collect()
    };
    let data = || Some("data".into());
    assert_eq!(shown(&reopened(&transport)), [(0, false, data()), (2, true, None)]);
    // A name leads to one device.
    let taken = Some(ErrorKind::AlreadyExists);
    assert_eq!(kind(transport.name_blkdev(second, Some(&name("data")))), taken);
    assert_eq!(kind(transport.create_named_blkdev(&shared, Some(&name("data")))), taken);
    transport.name_blkdev(second, Some(&name("disk"))).expect("it is free");
    assert_eq!(kind(transport.name_backend(BackendId(0), Some(&name("disk")))), taken);
    // The next one gets it, whatever its number is.
    transport.remove_blkdev(first).expect("it is there");
    assert_eq!(shown(&transport), [(2, true, Some("disk".into()))]);
    assert_eq!(transport.create_named_blkdev(&shared, Some(&name("data"))).expect("room"), first);
    transport.name_blkdev(first, None).expect("it is there");
    assert_eq!(shown(&reopened(&transport)), [(0, false, data()), (2, true, Some("disk".into()))]);
}

#[test]
fn a_field_that_holds_no_name_is_a_row_without_one_and_can_be_replaced() {
    let transport = two();
    for field in [[0xff; 32], [b'7'; 32], [b'/'; 32]] {
        transport.update_backend(BackendId(0), |row| row.name = field).expect("it is there");
        let found = reopened(&transport);
        assert_eq!(backend_name(&found, 0), None);
        assert_eq!(found.backends().expect("the rows are good").len(), 2);
        found.name_backend(BackendId(0), Some(&name("data"))).expect("it is free");
        assert_eq!(backend_name(&reopened(&found), 0), Some("data".into()));
    }
}
