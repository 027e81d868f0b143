//! A repair restores damaged second copies, does not change the result of recovery, and leaves damage alone
//! that cannot be repaired.

mod support;

use cbd_format::{Layout, PAGE, superblock::FEATURE_USE_NOTES};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::dump::{Filter, What};
use cbd_inspect::repair::{Plan, apply, plan};
use cbd_inspect::{Bytes, Outcome, PrivateMemory, Repair, Severity, Structure};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::{Region, SegmentId};
use std::sync::Arc;
use support::{Fixture, assert_only, number, text};

fn used() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(60, 1);
    fixture
}

/// Repairs the region.
fn repaired(fixture: &Fixture) -> Plan {
    let region =
        Arc::new(Region::new(Mapping::open(fixture.region(), &OpenOptions::default()).expect("mapped")));
    let plan = plan(&(Arc::clone(&region) as Arc<dyn Bytes>), &mut |_| {}).expect("a plan");
    for repair in &plan.repairs {
        apply(&region, repair).expect("repaired");
    }
    plan
}

/// Damages one copy of every structure.
fn damage_one_copy_of_everything(fixture: &Fixture) {
    let mut offsets = vec![60];
    let mut seen = std::collections::BTreeSet::new();
    for item in fixture.dump(What::Tables, &Filter::default()) {
        if seen.insert((item.structure, number(&item, "row"))) {
            offsets.push(number(&item, "at") + 40);
        }
    }
    for item in fixture.dump(What::Lanes, &Filter::default()) {
        if item.structure != "log" && number(&item, "slot") == 0 {
            offsets.push(number(&item, "at") + 20);
        }
    }
    for item in fixture.dump(What::Segments, &Filter::default()) {
        if ["log", "state"].contains(&text(&item, "use")) {
            offsets.push(number(&item, "at") + 9);
        }
    }
    for (count, item) in fixture.records().iter().enumerate() {
        let mirror = if count % 2 == 0 { 0 } else { PAGE };
        for line in 0..=number(item, "lines") {
            // Here, only short records do not span two pairs of pages.
            offsets.push(number(item, "at") + line * 64 + mirror + 11);
        }
    }
    for at in offsets {
        fixture.damage(at);
    }
}

#[test]
fn an_intact_region_needs_no_repair() {
    let fixture = used();
    let before = fixture.image();
    let plan = repaired(&fixture);
    assert!(plan.repairs.is_empty() && plan.not_repaired().next().is_none());
    assert!(fixture.image() == before);
}

#[test]
fn every_structure_with_one_damaged_copy_is_repaired() {
    let fixture = used();
    let whole = fixture.check(DataChecked::All);
    damage_one_copy_of_everything(&fixture);
    let damaged = fixture.check(DataChecked::All);
    assert_eq!(damaged.outcome, Outcome::Corrected, "{:#?}", damaged.findings);
    assert_eq!(damaged.fingerprint, whole.fingerprint, "recovery needs only one copy");
    let plan = repaired(&fixture);
    assert!(plan.repairs.len() > 75, "{}", plan.repairs.len());
    let after = fixture.check(DataChecked::All);
    assert_eq!(after.found, [0; 4], "{:#?}", after.findings);
    assert_eq!(after.fingerprint, whole.fingerprint);
}

#[test]
fn a_repair_restores_every_byte() {
    let fixture = used();
    let before = fixture.image();
    let record = number(&fixture.records()[5], "at");
    let segments = fixture.dump(What::Segments, &Filter::default());
    let header = number(segments.iter().find(|item| text(item, "use") == "log").expect("a log"), "at");
    for at in [60, record + 5, header + 50] {
        fixture.damage(at);
    }
    repaired(&fixture);
    assert!(fixture.image() == before);
}

#[test]
fn a_repair_can_be_interrupted_after_every_step() {
    let fixture = used();
    let whole = fixture.check(DataChecked::All);
    damage_one_copy_of_everything(&fixture);
    let bytes: Arc<dyn Bytes> = Arc::new(fixture.image());
    let plan = plan(&bytes, &mut |_| {}).expect("a plan");
    let copy = PrivateMemory::new(Arc::clone(&bytes));
    for (step, repair) in plan.repairs.iter().enumerate() {
        apply(&Region::new(copy.clone()), repair).expect("repaired");
        if step % 16 != 0 {
            continue;
        }
        let cut_off = check(Arc::new(copy.clone()), DataChecked::None, &mut |_| {});
        assert_eq!(cut_off.fingerprint, whole.fingerprint, "behind step {step}: {repair}");
    }
}

#[test]
fn a_torn_store_of_a_repair_does_not_change_the_result_of_recovery() {
    let fixture = used();
    let whole = fixture.check(DataChecked::All);
    damage_one_copy_of_everything(&fixture);
    let image = fixture.image();
    let bytes: Arc<dyn Bytes> = Arc::new(image.clone());
    let plan = plan(&bytes, &mut |_| {}).expect("a plan");
    for (number, repair) in plan.repairs.iter().enumerate().step_by(5) {
        let copy = PrivateMemory::new(Arc::clone(&bytes));
        apply(&Region::new(copy.clone()), repair).expect("repaired");
        let (at, length) = match repair {
            Repair::Copy { to, length, .. } => (*to, *length as usize),
            // One of the two was written.
            Repair::Slot { at: [first, second], .. } => {
                let mut now = [0; 64];
                Bytes::load(&copy, *first, &mut now).expect("read");
                let first_differs = now != image[*first as usize..*first as usize + 64];
                (if first_differs { *first } else { *second }, 64)
            }
        };
        // Every second word reached the medium.
        let mut torn = image.clone();
        let mut stored = vec![0; length];
        Bytes::load(&copy, at, &mut stored).expect("read");
        for (word, bytes) in stored.chunks(8).enumerate().filter(|(word, _)| (word + number) % 2 == 0) {
            let start = at as usize + word * 8;
            torn[start..start + bytes.len()].copy_from_slice(bytes);
        }
        let report = check(Arc::new(torn), DataChecked::None, &mut |_| {});
        assert_eq!(report.fingerprint, whole.fingerprint, "{repair}");
    }
}

/// A crash while a feature was added: the copy that names the feature is valid, whichever it is.
#[test]
fn a_feature_that_one_superblock_names_is_not_removed() {
    for which in [0, 1] {
        let fixture = used();
        let superblocks = fixture.superblocks();
        superblocks.iter().for_each(|at| fixture.set_features(*at, 0));
        fixture.set_features(superblocks[which], FEATURE_USE_NOTES);
        let before = fixture.check(DataChecked::None);
        let lacks_it = superblocks[1 - which];
        assert_only(&before, Structure::Superblock, Severity::Corrected, lacks_it, "feature");
        let plan = repaired(&fixture);
        assert_eq!(plan.repairs.len(), 1);
        let image = fixture.image();
        let copies = superblocks.map(|at| image[at as usize..at as usize + 192].to_vec());
        assert_eq!(copies[0], copies[1]);
        assert_eq!(copies[0][32], 1, "the feature stays");
        let after = fixture.check(DataChecked::None);
        assert_eq!((after.found, after.fingerprint), ([0; 4], before.fingerprint));
    }
}

#[test]
fn structures_without_a_valid_copy_are_reported_and_not_repaired() {
    let fixture = used();
    let record = number(&fixture.records()[3], "at");
    fixture.damage(record + 17);
    fixture.damage(record + PAGE + 17);
    fixture.damage(60);
    let before = fixture.check(DataChecked::None);
    let plan = repaired(&fixture);
    assert_eq!(plan.repairs.len(), 1, "the superblock only");
    assert!(plan.not_repaired().any(|finding| finding.location.at == Some(record)));
    let after = fixture.check(DataChecked::None);
    assert_eq!((after.outcome, after.fingerprint), (Outcome::Affected, before.fingerprint));
}

#[test]
fn a_torn_last_write_stays_dropped() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, 4096, 1);
    fixture.write(&process, 4096, 4096, 2);
    drop(process);
    let last = fixture.records()[1].clone();
    fixture.damage(number(&last, "data_at") + 9);
    fixture.damage(number(&last, "at") + PAGE + 9);
    let before = fixture.image();
    let plan = repaired(&fixture);
    assert!(plan.repairs.is_empty());
    assert!(fixture.image() == before);
}

#[test]
fn rows_that_a_crash_left_in_one_slot_are_restored_in_both() {
    let fixture = used();
    let rows = fixture.dump(What::Tables, &Filter::default());
    let backend =
        rows.iter().find(|item| item.structure == "backend" && number(item, "slot") == 1).expect("a row");
    // As before the second of its stores.
    fixture.change(number(backend, "at"), 1024, |slot| slot.fill(0));
    let report = fixture.check(DataChecked::None);
    assert!(report.repairs.len() == 1 || report.found[0] + report.found[1] == 1, "{:#?}", report.findings);
    repaired(&fixture);
    assert_eq!(fixture.check(DataChecked::None).found, [0; 4]);
}

#[test]
fn a_region_that_has_grown_is_checked_dumped_and_repaired_to_its_end() {
    let mut fixture = Fixture::new();
    fixture.grow(9 << 20);
    fixture.write_and_crash(400, 1);
    fixture.grow(12 << 20);
    fixture.write_and_crash(700, 2);
    assert_eq!(fixture.check(DataChecked::All).found, [0; 4]);
    let layout = fixture.transport().info().layout;
    let extents: Vec<_> = layout.extents().collect();
    assert_eq!(extents.len(), 3);
    // The tools see records in segments behind the first extent, and every data block is right.
    let is_behind = |item| number(item, "segment") >= u64::from(extents[1].first);
    assert!(fixture.records().iter().any(is_behind));
    let last = SegmentId(layout.segment_count - 1);
    for at in [layout.segment_slots(last)[0] + 20, Layout::second_superblock(layout.region_size) + 60] {
        fixture.damage(at);
    }
    let damaged = fixture.check(DataChecked::None);
    assert_eq!(damaged.repairs.len(), 2, "{:#?}", damaged.findings);
    assert!(damaged.findings.iter().any(|finding| finding.location.segment == Some(last.0)));
    assert_eq!(repaired(&fixture).repairs.len(), 2);
    assert_eq!(fixture.check(DataChecked::All).found, [0; 4]);
}

#[test]
fn the_second_superblock_of_a_file_that_was_extended_and_not_grown_is_found_and_restored() {
    let fixture = used();
    let size = fixture.image().len() as u64;
    fixture.damage(60);
    let file = std::fs::File::options().write(true).open(fixture.region()).expect("the region");
    file.set_len(2 * size).expect("extended");
    let plan = repaired(&fixture);
    assert_eq!(plan.repairs.len(), 1, "{:#?}", plan.before.findings);
    let report = fixture.check(DataChecked::None);
    assert_only(&report, Structure::Superblock, Severity::Note, size, "its transport uses");
}

#[test]
fn a_region_without_superblocks_has_no_repair() {
    let fixture = used();
    fixture.damage(60);
    fixture.damage(Layout::second_superblock(fixture.image().len() as u64) + 60);
    let plan = repaired(&fixture);
    assert!(plan.repairs.is_empty() && plan.before.transport.is_none());
}
