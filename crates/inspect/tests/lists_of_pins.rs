//! Dump shows the pins and which copy of their list counts; check verifies both copies, and repair restores one from the other.

mod support;

use cbd_engine::{Pin, PinKind};
use cbd_format::{PAGE, StateShape, pins::encode};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::dump::{Filter, Item, What};
use cbd_inspect::repair::{apply, plan};
use cbd_inspect::{Bytes, Outcome, Severity, Structure};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::{BackendId, ByteRange, Region};
use std::sync::Arc;
use support::{BLOCK, Fixture, SEGMENT, assert_only, number, only, text};

fn pins(count: u64) -> Vec<Pin> {
    let pin = |number: u64| Pin {
        kind: PinKind::File,
        text: format!("/srv/file {number}"),
        ranges: (0..2).map(|part| ByteRange::at((4 * number + 2 * part) * BLOCK, BLOCK)).collect(),
    };
    (0..count).map(pin).collect()
}

/// A region with these lists of pins, one after the other.
fn pinned(lists: &[u64]) -> Fixture {
    let fixture = Fixture::new();
    let process = fixture.process();
    for count in lists {
        process.transport.set_pins(BackendId(0), &pins(*count)).expect("they fit");
    }
    fixture
}

/// The offsets of both copies, and the cache.
fn places(fixture: &Fixture) -> ([u64; 2], u64) {
    let transport = fixture.transport();
    let row = transport.backend_row(BackendId(0)).expect("a row");
    let (at, _) = StateShape { lanes: row.lanes.get() }.pins(SEGMENT).expect("there is room");
    let base = transport.info().layout.segment_base(cbd_types::SegmentId(row.state_segment.get()));
    (at.map(|at| base + at), row.cache_id.get())
}

fn store(fixture: &Fixture, at: u64, bytes: &[u8]) {
    fixture.change(at, bytes.len(), |old| old.copy_from_slice(bytes));
}

/// Repairs the region; the check finds nothing then, and the pins are these.
fn is_repaired(fixture: &Fixture, count: u64) {
    let region =
        Arc::new(Region::new(Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped")));
    let plan = plan(&(Arc::clone(&region) as Arc<dyn Bytes>), &mut |_| {}).expect("a plan");
    assert_eq!(plan.repairs.len(), 1);
    apply(&region, &plan.repairs[0]).expect("repaired");
    drop(region);
    assert_eq!(check(fixture.bytes(), DataChecked::None, &mut |_| {}).findings, []);
    assert_eq!(fixture.transport().pins(BackendId(0)).expect("it is there").pins, pins(count));
}

fn shown(fixture: &Fixture, filter: &Filter) -> Vec<Item> {
    fixture.dump(What::Pins, filter)
}

#[test]
fn pins_are_shown_with_their_ranges_and_the_copy_that_counts() {
    assert_eq!(shown(&pinned(&[]), &Filter::default()), []);
    let fixture = pinned(&[1, 2]);
    let items = shown(&fixture, &Filter::default());
    let names: Vec<&str> = items.iter().map(|item| item.structure).collect();
    let of_pin = ["pin", "pinned_range", "pinned_range"];
    assert_eq!(names, [&["pin_list"][..], &of_pin, &of_pin, &["pin_list"]].concat());
    let (at, _) = places(&fixture);
    assert_eq!(
        (number(&items[0], "at"), number(&items[0], "number"), number(&items[7], "at")),
        (at[0], 2, at[1])
    );
    assert_eq!((text(&items[4], "name"), text(&items[4], "kind")), ("/srv/file 1", "file"));
    assert_eq!((number(&items[6], "offset"), number(&items[6], "length")), (6 * BLOCK, BLOCK));
    let only = Filter { range: Some(ByteRange::at(6 * BLOCK, 1)), ..Filter::default() };
    assert_eq!(shown(&fixture, &only).len(), 4);
    // Each item is one line.
    assert!(items.iter().all(|item| item.to_string().lines().count() == 1));
    fixture.damage(at[0] + 60);
    let items = shown(&fixture, &Filter::default());
    let lists = items.iter().filter(|item| item.structure == "pin_list").map(ToString::to_string);
    let lists: Vec<String> = lists.collect();
    assert!(
        lists[0].contains("valid=no newest=no") && lists[1].contains("valid=yes newest=yes"),
        "{lists:?}"
    );
    assert_eq!(items.len(), 8, "the pins are those of the other copy");
}

#[test]
fn one_damaged_or_overwritten_copy_is_reported_and_repaired() {
    for copy in [0, 1] {
        let fixture = pinned(&[1, 3]);
        assert_eq!(fixture.check(DataChecked::None).findings, []);
        let at = places(&fixture).0[copy];
        fixture.damage(at + 70);
        assert_only(&fixture.check(DataChecked::None), Structure::Pins, Severity::Corrected, at, "damaged");
        is_repaired(&fixture, 3);
        store(&fixture, at, &vec![0; PAGE as usize]);
        let report = fixture.check(DataChecked::None);
        assert_only(&report, Structure::Pins, Severity::Corrected, at, "overwritten");
        is_repaired(&fixture, 3);
    }
}

#[test]
fn what_a_crash_between_the_two_stores_leaves_is_a_note() {
    let fixture = pinned(&[2]);
    let (at, cache) = places(&fixture);
    store(&fixture, at[0], &encode(cache, 2, &pins(1)));
    let report = fixture.check(DataChecked::None);
    assert_only(&report, Structure::Pins, Severity::Note, at[1], "a version older");
    is_repaired(&fixture, 1);
    // The first list.
    let fixture = pinned(&[2]);
    store(&fixture, at[1], &vec![0; PAGE as usize]);
    let report = fixture.check(DataChecked::None);
    assert_only(&report, Structure::Pins, Severity::Note, at[1], "first update");
    is_repaired(&fixture, 2);
    store(&fixture, at[1], &vec![0; PAGE as usize]);
    fixture.damage(at[0] + 70);
    let report = fixture.check(DataChecked::None);
    assert_only(&report, Structure::Pins, Severity::Note, at[0], "never written");
    assert!(!fixture.transport().pins(BackendId(0)).expect("it is there").are_lost);
}

#[test]
fn a_list_without_a_valid_copy_is_reported_and_cannot_be_repaired() {
    for is_zeroed in [false, true] {
        let fixture = pinned(&[2]);
        let at = places(&fixture).0;
        fixture.damage(at[1] + 70);
        if is_zeroed {
            store(&fixture, at[0], &vec![0; PAGE as usize]);
        } else {
            fixture.damage(at[0] + 70);
        }
        let report = fixture.check(DataChecked::None);
        assert_only(&report, Structure::Pins, Severity::Corrected, at[1], "neither of its two copies");
        assert!(only(&report).advice.contains("cbdctrl pin"), "{report:#?}");
        assert_eq!((report.outcome, report.repairs.len()), (Outcome::Corrected, 0));
        // As the engine sees it.
        assert!(fixture.transport().pins(BackendId(0)).expect("it is there").are_lost);
    }
}
