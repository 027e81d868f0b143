//! Each kind of damage at a known structure: a check reports exactly that damage, its location and its cost.

mod support;

use cbd_format::{Layout, PAGE, SegmentShape};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::dump::{Filter, Item, What};
use cbd_inspect::{Outcome, Severity, Structure};
use std::sync::Arc;
use support::{BLOCK, Fixture, SEGMENT, assert_only, number, of, only, text};

const SHAPE: SegmentShape = SegmentShape { size: SEGMENT };

fn used() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(60, 1);
    fixture
}

/// The item of this structure whose fields have these numbers.
#[track_caller]
fn find(items: &[Item], structure: &str, fields: &[(&str, u64)]) -> Item {
    let fits = |item: &&Item| {
        item.structure == structure && fields.iter().all(|(name, value)| number(item, name) == *value)
    };
    items.iter().find(fits).unwrap_or_else(|| panic!("no {structure} with {fields:?}")).clone()
}

#[test]
fn a_fresh_region_is_clean() {
    let fixture = Fixture::new();
    let report = fixture.check(DataChecked::All);
    assert_eq!((report.outcome, report.exit_code, report.found), (Outcome::Clean, 0, [0; 4]));
    let backend = &report.backends[0];
    assert_eq!((backend.lanes, backend.records, backend.dirty_records), (2, 0, 0));
    assert!(backend.backing_is_consistent && backend.error.is_none());
}

#[test]
fn a_killed_daemons_region_is_clean_and_its_dirty_bytes_are_counted() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    fixture.write(&process, 0, BLOCK, 2);
    fixture.write(&process, 5 << 20, 2 * BLOCK, 3);
    drop(process);
    let report = fixture.check(DataChecked::All);
    assert_eq!(report.found, [0; 4], "{:#?}", report.findings);
    let backend = &report.backends[0];
    assert_eq!((backend.records, backend.dirty_records), (3, 3));
    assert_eq!((backend.dirty_bytes, backend.dirty_device_bytes), (4 * BLOCK, 3 * BLOCK));
    assert_eq!(report.counted.verified_bytes, 4 * BLOCK);
}

#[test]
fn a_drained_region_has_nothing_dirty() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    process.drain(&fixture);
    drop(process);
    let report = fixture.check(DataChecked::All);
    assert_eq!(report.found, [0; 4], "{:#?}", report.findings);
    assert_eq!((report.backends[0].records, report.backends[0].dirty_records), (1, 0));
    assert!(report.backends[0].drained_epoch > 0);
}

#[test]
fn a_damaged_superblock_is_identified() {
    for second in [false, true] {
        let fixture = used();
        let at = if second { Layout::second_superblock(fixture.image().len() as u64) } else { 0 };
        fixture.damage(at + 60);
        let report = fixture.check(DataChecked::None);
        assert_only(&report, Structure::Superblock, Severity::Corrected, at, "checksum");
        assert_eq!(report.exit_code, 1);
    }
}

/// Such a copy is newer than the other one, whichever it is, and the named feature may be in use.
#[test]
fn a_superblock_of_a_newer_program_overrides_the_other() {
    for which in [0, 1] {
        let fixture = used();
        fixture.set_features(fixture.superblocks()[which], 1 << 40);
        let report = fixture.check(DataChecked::None);
        assert_eq!((report.outcome, report.exit_code), (Outcome::Unopenable, 3));
        let finding = only(&report);
        assert_eq!(finding.structure, Structure::Superblock);
        assert_eq!(finding.location.at, Some(fixture.superblocks()[which]));
        assert!(finding.what.contains("newer CBD") && finding.what.contains("feature 40"), "{finding:#?}");
        assert!(finding.advice.contains("do not format") && report.repairs.is_empty(), "{report:#?}");
    }
}

#[test]
fn a_region_without_superblocks_cannot_be_opened() {
    let fixture = used();
    fixture.damage(60);
    fixture.damage(Layout::second_superblock(fixture.image().len() as u64) + 60);
    let report = fixture.check(DataChecked::None);
    assert_eq!((report.outcome, report.exit_code), (Outcome::Unopenable, 3));
    assert!(report.transport.is_none());
    assert_eq!(of(&report, Structure::Superblock).len(), 2);
}

#[test]
fn a_region_with_wiped_superblocks_is_distinguished_from_foreign_data() {
    let wiped = |fixture: &Fixture| {
        let mut image = fixture.image();
        let second = Layout::second_superblock(image.len() as u64) as usize;
        image[..4096].fill(0);
        image[second..second + 4096].fill(0);
        image
    };
    let report = |image: Vec<u8>| check(Arc::new(image), DataChecked::None, &mut |_| {});
    let was_one = report(wiped(&used()));
    assert_eq!((was_one.exit_code, was_one.findings.len()), (3, 2));
    for finding in &was_one.findings {
        assert!(finding.what.contains("tables of a CBD transport stand"), "{finding:#?}");
        assert!(finding.advice.contains("keep a copy"), "{finding:#?}");
    }
    let foreign = report(vec![0; 1 << 20]);
    assert_eq!((foreign.exit_code, foreign.findings.len()), (3, 2));
    for finding in &foreign.findings {
        assert!(finding.what.contains("does not hold a CBD transport"), "{finding:#?}");
        assert!(finding.advice.contains("if it should be one"), "{finding:#?}");
    }
}

#[test]
fn a_damaged_slot_of_a_row_is_reported_with_table_and_offset() {
    let tables = [("host", Structure::Host, "host 0"), ("backend", Structure::Backend, "backend 0")];
    for (table, structure, words) in tables {
        for slot in [0, 1] {
            let fixture = used();
            let at = number(
                &find(&fixture.dump(What::Tables, &Filter::default()), table, &[("slot", slot)]),
                "at",
            );
            fixture.damage(at + 100);
            assert_only(&fixture.check(DataChecked::None), structure, Severity::Corrected, at, words);
        }
    }
}

#[test]
fn a_backend_whose_row_is_lost_cannot_be_opened() {
    let fixture = used();
    for slot in [0, 1] {
        let rows = fixture.dump(What::Tables, &Filter::default());
        fixture.damage(number(&find(&rows, "backend", &[("slot", slot)]), "at") + 100);
    }
    let report = fixture.check(DataChecked::None);
    let finding = only(&report);
    assert_eq!((finding.structure, finding.severity), (Structure::Backend, Severity::Fatal));
    assert!(finding.cost.contains("cannot be reached"), "{finding:#?}");
    assert_eq!(report.exit_code, 3);
}

/// The offsets of a lane's state lines.
fn state_line(fixture: &Fixture, structure: &str, slot: u64) -> u64 {
    let lanes = fixture.dump(What::Lanes, &Filter::default());
    number(&find(&lanes, structure, &[("slot", slot)]), "at")
}

#[test]
fn a_damaged_state_line_is_reported() {
    let lines = [
        ("drained", Structure::Drained, "drained of backend 0"),
        ("tail", Structure::Tail, "tail of lane 0"),
        ("mark", Structure::Mark, "mark of lane"),
    ];
    for (line, structure, words) in lines {
        for slot in [0, 1] {
            let fixture = used();
            let at = state_line(&fixture, line, slot);
            fixture.damage(at + 20);
            assert_only(&fixture.check(DataChecked::None), structure, Severity::Corrected, at, words);
        }
    }
}

#[test]
fn a_lost_drained_epoch_makes_everything_dirty_again() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    process.drain(&fixture);
    drop(process);
    for slot in [0, 1] {
        fixture.damage(state_line(&fixture, "drained", slot) + 20);
    }
    let report = fixture.check(DataChecked::None);
    let finding = only(&report);
    assert_eq!((finding.structure, finding.severity), (Structure::Drained, Severity::Affected));
    assert_eq!((report.exit_code, report.backends[0].dirty_records), (2, 1));
}

#[test]
fn a_damaged_copy_of_a_segment_header_is_identified() {
    for copy in [0, SHAPE.header_copy()] {
        let fixture = used();
        let segments = fixture.dump(What::Segments, &Filter::default());
        let log = segments.iter().find(|item| item.structure == "segment" && has_log(item)).expect("a log");
        let at = number(log, "at") + copy;
        fixture.damage(at + 30);
        assert_only(
            &fixture.check(DataChecked::None),
            Structure::SegmentHeader,
            Severity::Corrected,
            at,
            "header",
        );
    }
}

fn has_log(item: &Item) -> bool {
    text(item, "use") == "log"
}

#[test]
fn a_damaged_copy_of_the_state_segments_header_is_reported() {
    let fixture = used();
    let segments = fixture.dump(What::Segments, &Filter::default());
    let state = segments.iter().find(|item| text(item, "use") == "state").expect("a state");
    let at = number(state, "at");
    fixture.damage(at + 30);
    assert_only(&fixture.check(DataChecked::None), Structure::StateHeader, Severity::Corrected, at, "header");
}

#[test]
fn a_segment_without_header_is_missing_in_its_chain() {
    let fixture = used();
    let segments = fixture.dump(What::Segments, &Filter::default());
    let log = segments.iter().find(|item| has_log(item) && number(item, "ordinal") == 1).expect("a log");
    for copy in [0, SHAPE.header_copy()] {
        fixture.damage(number(log, "at") + copy + 30);
    }
    let report = fixture.check(DataChecked::None);
    assert_eq!(report.exit_code, 2);
    let [chain] = of(&report, Structure::Chain)[..] else { panic!("{:#?}", report.findings) };
    assert_eq!(chain.severity, Severity::Affected);
    assert!(chain.what.contains(&format!("segment {}", number(log, "segment"))), "{chain:#?}");
    assert!(!of(&report, Structure::Range).is_empty(), "unreadable ranges are listed");
    assert!(!report.backends[0].damaged.is_empty());
}

#[test]
fn a_damaged_copy_of_a_record_is_identified() {
    for mirror in [0, PAGE] {
        let fixture = used();
        let record = &fixture.records()[3];
        let at = number(record, "at") + mirror;
        fixture.damage(at + 17);
        let report = fixture.check(DataChecked::All);
        let words = if mirror == 0 { "primary" } else { "mirror" };
        assert_only(&report, Structure::Record, Severity::Corrected, at, words);
        let finding = only(&report);
        assert_eq!(finding.location.sequence, Some(number(record, "sequence")));
        assert_eq!(finding.location.offset, Some(number(record, "offset")));
    }
}

#[test]
fn a_record_without_copies_leaves_a_gap_and_unreadable_ranges() {
    let fixture = used();
    let record = &fixture.records()[3];
    let at = number(record, "at");
    fixture.damage(at + 17);
    fixture.damage(at + PAGE + 17);
    let report = fixture.check(DataChecked::None);
    let [lost] = of(&report, Structure::Record)[..] else { panic!("{:#?}", report.findings) };
    assert_eq!((lost.severity, lost.location.at), (Severity::Affected, Some(at)));
    assert_eq!(lost.location.slot, Some(number(record, "slot") as u32));
    assert!(!of(&report, Structure::Range).is_empty());
    assert_eq!(report.exit_code, 2);
}

/// The first record with checksum lines behind it.
fn long_record(fixture: &Fixture) -> Item {
    fixture.records().into_iter().find(|item| number(item, "lines") > 0).expect("a long record")
}

#[test]
fn a_damaged_copy_of_a_checksum_line_is_identified() {
    for mirror in [0, PAGE] {
        let fixture = used();
        let [primary, _] = SHAPE.slot(number(&long_record(&fixture), "slot") as u32 + 1);
        let [record, _] = SHAPE.slot(number(&long_record(&fixture), "slot") as u32);
        let at = number(&long_record(&fixture), "at") - record + primary + mirror;
        fixture.damage(at + 17);
        assert_only(
            &fixture.check(DataChecked::None),
            Structure::ChecksumLine,
            Severity::Corrected,
            at,
            "line",
        );
    }
}

#[test]
fn blocks_without_checksums_are_unreadable() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, BLOCK, 4 * BLOCK, 9);
    // The record stays the newest of its range but is not the last: it is known to be complete.
    fixture.write(&process, 0, 512, 1);
    drop(process);
    let at = number(&long_record(&fixture), "at") + 64;
    fixture.damage(at + 17);
    fixture.damage(at + PAGE + 17);
    let report = fixture.check(DataChecked::None);
    let finding = only(&report);
    assert_eq!((finding.structure, finding.severity), (Structure::ChecksumLine, Severity::Affected));
    assert_eq!((finding.location.offset, finding.location.bytes), (Some(2 * BLOCK), Some(3 * BLOCK)));
}

#[test]
fn damaged_dirty_data_is_lost_and_its_block_is_reported() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, BLOCK, 4 * BLOCK, 9);
    fixture.write(&process, 0, 512, 1);
    drop(process);
    let at = number(&long_record(&fixture), "data_at") + 2 * BLOCK;
    fixture.damage(at + 5);
    assert_eq!(fixture.check(DataChecked::None).exit_code, 0, "data is not verified");
    for data in [DataChecked::Dirty, DataChecked::All] {
        let report = fixture.check(data);
        assert_only(&report, Structure::Data, Severity::Affected, at, "checksum");
        let range = &report.backends[0].damaged[0];
        assert_eq!((range.offset, range.bytes), (3 * BLOCK, BLOCK));
        assert_eq!(report.exit_code, 2);
    }
}

#[test]
fn findings_of_damaged_data_have_the_segment_of_the_transport() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, BLOCK, BLOCK, 9);
    fixture.write(&process, 0, 512, 1);
    drop(process);
    let record = &fixture.records()[0];
    fixture.damage(number(record, "data_at") + 5);
    let report = fixture.check(DataChecked::All);
    let words = format!("in segment {} does", number(record, "segment"));
    assert!(only(&report).what.contains(&words), "{:#?}", report.findings);
}

#[test]
fn damaged_clean_data_costs_nothing() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, BLOCK, BLOCK, 9);
    process.drain(&fixture);
    drop(process);
    let at = number(&fixture.records()[0], "data_at");
    fixture.damage(at + 5);
    let report = fixture.check(DataChecked::All);
    assert_only(&report, Structure::Data, Severity::Corrected, at, "checksum");
    assert!(only(&report).cost.contains("backing device has it"));
    assert_eq!(fixture.check(DataChecked::Dirty).exit_code, 0);
}

#[test]
fn damaged_data_under_a_later_write_is_not_lost() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, BLOCK, BLOCK, 9);
    fixture.write(&process, BLOCK, BLOCK, 10);
    drop(process);
    let at = number(&fixture.records()[0], "data_at");
    fixture.damage(at + 5);
    let report = fixture.check(DataChecked::All);
    assert_only(&report, Structure::Data, Severity::Corrected, at, "checksum");
    assert!(only(&report).cost.contains("later write"));
}

#[test]
fn a_torn_last_write_is_a_note() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    fixture.write(&process, BLOCK, BLOCK, 2);
    drop(process);
    let data_at = number(&fixture.records()[1], "data_at");
    fixture.damage(data_at + 100);
    let report = fixture.check(DataChecked::All);
    let finding = only(&report);
    assert_eq!((finding.structure, finding.severity), (Structure::Record, Severity::Note));
    assert!(finding.what.contains("torn"), "{finding:#?}");
    assert_eq!((report.exit_code, report.backends[0].records), (0, 1));
}

#[test]
fn a_mark_above_the_end_of_the_log_reveals_a_loss() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    fixture.write(&process, BLOCK, BLOCK, 2);
    process.cache.flush().expect("flushed");
    drop(process);
    let at = number(&fixture.records()[1], "at");
    fixture.damage(at + 17);
    fixture.damage(at + PAGE + 17);
    let report = fixture.check(DataChecked::None);
    assert_eq!(report.exit_code, 2);
    assert!(
        report
            .findings
            .iter()
            .any(|it| it.severity == Severity::Affected && it.structure == Structure::Record)
    );
}

#[test]
fn a_segment_without_owner_is_reported_missing_in_its_chain() {
    let fixture = used();
    let segments = fixture.dump(What::Segments, &Filter::default());
    let log = segments.iter().find(|item| has_log(item) && number(item, "ordinal") == 1).expect("a log");
    let row = number(log, "segment") as u32;
    let image = fixture.image();
    let block = cbd_format::Superblock::decode(&image).expect("a superblock");
    let (_, layout) = *block.verify(image.len() as u64).expect("valid");
    for at in Layout::slots::<cbd_format::SegmentEntry>(layout.segment_table, layout.segment_count, row) {
        fixture.damage(at + 20);
    }
    let report = fixture.check(DataChecked::None);
    assert_eq!(of(&report, Structure::SegmentEntry).len(), 1);
    assert_eq!(of(&report, Structure::Chain).len(), 1);
    assert_eq!(report.exit_code, 2);
}

#[test]
fn a_state_segment_without_owner_makes_the_cache_unopenable() {
    let fixture = used();
    let segments = fixture.dump(What::Segments, &Filter::default());
    let state = segments.iter().find(|item| text(item, "use") == "state").expect("a state");
    let row = number(state, "segment") as u32;
    let image = fixture.image();
    let block = cbd_format::Superblock::decode(&image).expect("a superblock");
    let (_, layout) = *block.verify(image.len() as u64).expect("valid");
    for at in Layout::slots::<cbd_format::SegmentEntry>(layout.segment_table, layout.segment_count, row) {
        fixture.damage(at + 20);
    }
    let report = fixture.check(DataChecked::None);
    assert_eq!(report.exit_code, 3);
    assert!(report.backends[0].error.is_some());
    assert_eq!(of(&report, Structure::Cache).len(), 1);
}

#[test]
fn the_json_of_a_report_matches_its_fields() {
    let fixture = used();
    fixture.damage(60);
    let report = fixture.check(DataChecked::None);
    let json = serde_json::to_value(&report).expect("JSON");
    assert_eq!(json["outcome"], "corrected");
    assert_eq!(json["exit_code"], 1);
    assert_eq!(json["findings"][0]["structure"], "superblock");
    assert_eq!(json["findings"][0]["at"], 0);
    assert_eq!(json["backends"][0]["backend"], 0);
}
