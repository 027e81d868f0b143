//! Names of backends and blkdevs in a region: a check reports those that break the rules, a dump shows them, and the tools
//! find a backend by its name.

mod support;

use cbd_engine::BlkdevSpec;
use cbd_format::{BackendEntry, Slot, SlotContent, tables::NAME_BYTES};
use cbd_inspect::check::DataChecked;
use cbd_inspect::dump::{Filter, What};
use cbd_inspect::names::backend_of_name;
use cbd_inspect::{Outcome, Severity, Structure};
use cbd_types::{BackendId, BlkdevId, ErrorKind, HostId, Name};
use support::{Fixture, number, only, text};

fn name(text: &str) -> Name {
    Name::new(text).expect("a name")
}

fn named(backend: &str, blkdev: &str) -> Fixture {
    let fixture = Fixture::new();
    let transport = fixture.transport();
    transport.name_backend(BackendId(0), Some(&name(backend))).expect("it is free");
    let spec = BlkdevSpec { backend: BackendId(0), host: HostId(0), export: "auto".into(), shared: false };
    transport.create_named_blkdev(&spec, Some(&name(blkdev))).expect("room");
    fixture
}

/// Stores other bytes as the name into both slots of the first backend, with correct checksums.
fn forge(fixture: &Fixture, bytes: &[u8]) {
    for item in fixture.dump(What::Tables, &Filter::default()) {
        if item.structure != "backend" || number(&item, "row") != 0 {
            continue;
        }
        fixture.change(number(&item, "at"), BackendEntry::SLOT_SIZE, |slot| {
            let mut found = Slot::<BackendEntry>::decode(0, slot).expect("a valid slot");
            found.content.name = [0; NAME_BYTES];
            found.content.name[..bytes.len()].copy_from_slice(bytes);
            slot.copy_from_slice(&found.encode(0));
        });
    }
}

#[test]
fn valid_names_are_no_finding_and_are_shown() {
    let fixture = named("db-data", "db-disk");
    let report = fixture.check(DataChecked::All);
    assert_eq!((report.outcome, report.found), (Outcome::Clean, [0; 4]), "{:#?}", report.findings);
    assert_eq!(report.backends[0].name.as_deref(), Some("db-data"));
    let items = fixture.dump(What::Tables, &Filter::default());
    let shown = |structure| {
        items.iter().filter(move |item| item.structure == structure).map(|item| text(item, "name"))
    };
    assert_eq!(shown("backend").collect::<Vec<_>>(), ["db-data"; 2]);
    assert_eq!(shown("blkdev").collect::<Vec<_>>(), ["db-disk"; 2]);
    // A blkdev may have the name of its own backend.
    fixture.transport().name_blkdev(BlkdevId(0), Some(&name("db-data"))).expect("it is its backend's");
    assert_eq!(fixture.check(DataChecked::None).found, [0; 4]);
}

#[test]
fn a_name_that_breaks_the_rules_is_reported_and_the_backend_is_usable() {
    for bytes in [b"a/b".as_slice(), b"42", b"-x", &[0xff; 32], b"a\0b"] {
        let fixture = named("db-data", "db-disk");
        forge(&fixture, bytes);
        let report = fixture.check(DataChecked::All);
        let finding = only(&report);
        assert_eq!((finding.structure, finding.severity), (Structure::Backend, Severity::Corrected));
        assert!(finding.what.starts_with("backend 0: the name in the table is not valid"), "{finding:#?}");
        assert!(finding.advice.contains("cbdctrl set -b 0 name="), "{finding:#?}");
        let backend = &report.backends[0];
        assert!(backend.error.is_none() && backend.name.is_none(), "{backend:#?}");
        drop(fixture.process());
    }
}

#[test]
fn a_blkdev_beside_the_one_with_the_name_of_the_backend_must_not_have_it_too() {
    let fixture = Fixture::new();
    let transport = fixture.transport();
    transport.name_backend(BackendId(0), Some(&name("db-data"))).expect("it is free");
    let spec = BlkdevSpec { backend: BackendId(0), host: HostId(0), export: "auto".into(), shared: true };
    transport.create_blkdev(&spec).expect("room");
    transport.create_named_blkdev(&spec, Some(&name("db-copy"))).expect("room");
    drop(transport);
    assert_eq!(fixture.check(DataChecked::None).found, [0; 4]);
    forge(&fixture, b"db-copy");
    let report = fixture.check(DataChecked::None);
    let finding = only(&report);
    assert_eq!(finding.what, "blkdev 1 has the name db-copy, which backend 0 has too");
}

#[test]
fn a_name_that_two_devices_have_is_reported() {
    let fixture = named("db-data", "db-disk");
    let transport = fixture.transport();
    let entry = transport.backend(BackendId(0)).expect("it is there");
    let spec = cbd_engine::BackendSpec {
        host: entry.host,
        path: "/other".into(),
        identity: "other".into(),
        size: entry.size,
        sector: entry.sector,
        cache_bytes: None,
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: entry.settings,
    };
    transport.create_named_backend(&spec, Some(&name("other"))).expect("room");
    drop(transport);
    forge(&fixture, b"other");
    let report = fixture.check(DataChecked::None);
    let finding = only(&report);
    assert_eq!(finding.what, "backend 1 has the name other, which backend 0 has too");
    let error = backend_of_name(&fixture.bytes(), &name("other")).expect_err("two have it");
    assert_eq!(error.kind(), ErrorKind::Damaged);
}

#[test]
fn a_backend_is_found_by_its_name() {
    let fixture = named("db-data", "db-disk");
    assert_eq!(backend_of_name(&fixture.bytes(), &name("db-data")).expect("it is there"), 0);
    let error = backend_of_name(&fixture.bytes(), &name("db-disk")).expect_err("no backend has it");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.line().contains("there are db-data"), "{error}");
}
