//! A dump shows every structure unmodified, damaged or not, and filters select items.

mod support;

use cbd_format::{PAGE, RecordKind};
use cbd_inspect::dump::{Field, Filter, Item, What, dump};
use cbd_types::{ByteRange, ErrorKind};
use std::ops::ControlFlow;
use support::{BLOCK, Fixture, number, text};

fn yes(item: &Item, name: &str) -> bool {
    item.fields.iter().any(|(known, value)| *known == name && *value == Field::Bool(true))
}

fn used() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.write_and_crash(60, 1);
    fixture
}

#[test]
fn both_superblocks_are_shown_even_if_damaged() {
    let fixture = used();
    fixture.damage(60);
    let [first, second] = &fixture.dump(What::Superblock, &Filter::default())[..] else { panic!("two") };
    assert!(!yes(first, "valid") && yes(second, "valid"));
    assert!(text(first, "error").contains("checksum"));
    assert_eq!(number(first, "segment_size"), number(second, "segment_size"));
    assert_ne!(number(first, "region_size"), number(second, "region_size"));
}

#[test]
fn both_slots_of_a_row_are_shown_and_the_newest_is_marked() {
    let fixture = used();
    let rows = fixture.dump(What::Tables, &Filter::default());
    let backends: Vec<_> = rows.iter().filter(|item| item.structure == "backend").collect();
    assert_eq!(backends.len(), 2);
    assert!(yes(backends[0], "newest") != yes(backends[1], "newest"));
    assert!(text(backends[0], "path").ends_with("/disk"));
    assert!(rows.iter().any(|item| item.structure == "host" && text(item, "name") == "node0"));
}

#[test]
fn segments_are_shown_with_owner_and_use() {
    let fixture = used();
    let segments = fixture.dump(What::Segments, &Filter::default());
    let count = |role: &str| segments.iter().filter(|item| text(item, "use") == role).count();
    assert_eq!(count("state"), 1);
    assert!(count("log") >= 2 && count("free") > 0 && count("none") > 0);
    let of_lane = fixture.dump(What::Segments, &Filter { lane: Some(1), ..Filter::default() });
    assert!(!of_lane.is_empty() && of_lane.iter().all(|item| number(item, "lane") == 1));
    let one = fixture.dump(What::Segments, &Filter { segment: Some(3), ..Filter::default() });
    assert_eq!(one.len(), 1);
}

#[test]
fn lanes_show_their_state_lines_and_their_chain() {
    let fixture = used();
    let lanes = fixture.dump(What::Lanes, &Filter { lane: Some(0), ..Filter::default() });
    let of = |structure: &str| lanes.iter().filter(|item| item.structure == structure).count();
    assert_eq!((of("drained"), of("tail"), of("mark"), of("log")), (2, 2, 2, 1));
    let log = lanes.iter().find(|item| item.structure == "log").expect("a log");
    assert!(number(log, "next_sequence") > 1 && number(log, "segments") > 0);
}

#[test]
fn records_are_shown_in_order_of_their_sequence_numbers() {
    let fixture = used();
    for lane in [0, 1] {
        let records = fixture.dump(What::Records, &Filter { lane: Some(lane), ..Filter::default() });
        let sequences: Vec<u64> = records.iter().map(|item| number(item, "sequence")).collect();
        assert!(!sequences.is_empty());
        assert_eq!(sequences, (1..=sequences.len() as u64).collect::<Vec<_>>());
    }
}

#[test]
fn records_are_filtered_by_range_kind_sequence_segment_and_dirtiness() {
    let mut fixture = Fixture::new();
    let process = fixture.process();
    fixture.write(&process, 0, BLOCK, 1);
    process.drain(&fixture);
    fixture.write(&process, 0, BLOCK, 2);
    fixture.write(&process, 3 * BLOCK, 512, 3);
    fixture.write_zeroes(&process, 2 * BLOCK, BLOCK);
    drop(process);
    let pick = |filter: Filter| fixture.dump(What::Records, &filter).len();
    assert_eq!(pick(Filter::default()), 4);
    assert_eq!(pick(Filter { dirty: true, ..Filter::default() }), 3);
    assert_eq!(pick(Filter { range: Some(ByteRange::at(BLOCK - 1, 2)), ..Filter::default() }), 2);
    assert_eq!(pick(Filter { kind: Some(RecordKind::WriteZeroes), ..Filter::default() }), 1);
    assert_eq!(pick(Filter { sequence: Some(2..=3), ..Filter::default() }), 2);
    assert_eq!(pick(Filter { backend: Some(0), ..Filter::default() }), 4);
    let segment = number(&fixture.records()[0], "segment") as u32;
    assert_eq!(pick(Filter { segment: Some(segment), ..Filter::default() }), 4);
}

#[test]
fn damaged_records_are_those_of_which_a_copy_or_a_block_is_damaged() {
    let fixture = used();
    let records = fixture.records();
    let damaged = || fixture.dump(What::Records, &Filter { damaged: true, ..Filter::default() });
    assert_eq!(damaged(), []);
    fixture.damage(number(&records[2], "at") + PAGE + 7);
    fixture.damage(number(&records[4], "data_at") + 7);
    let found = damaged();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(yes(&found[0], "primary_valid") && !yes(&found[0], "mirror_valid"));
    let Some((_, Field::List(blocks))) = found[1].fields.iter().find(|(name, _)| *name == "damaged_blocks")
    else {
        panic!("{:?}", found[1]);
    };
    assert_eq!(blocks.len(), 1);
}

#[test]
fn records_that_cannot_be_read_are_shown_as_lost() {
    let fixture = used();
    let records = fixture.records();
    let at = number(&records[2], "at");
    fixture.damage(at + 7);
    fixture.damage(at + PAGE + 7);
    let after = fixture.records();
    let lost: Vec<_> = after.iter().filter(|item| item.structure == "lost").collect();
    assert_eq!(lost.len(), 1);
    assert_eq!((number(lost[0], "at"), number(lost[0], "slots")), (at, 1));
    assert_eq!(after.len(), records.len(), "records that recovery would add are not shown");
}

#[test]
fn an_item_is_one_line_of_text_and_one_json_object() {
    let fixture = used();
    for what in [What::Superblock, What::Tables, What::Segments, What::Lanes, What::Pins, What::Records] {
        for item in fixture.dump(what, &Filter::default()) {
            assert_eq!(item.to_string().lines().count(), 1);
            let json = serde_json::to_value(&item).expect("JSON");
            assert_eq!(json["structure"], item.structure);
            assert_eq!(json.as_object().expect("an object").len(), item.fields.len() + 1, "{item}");
        }
    }
}

#[test]
fn a_backend_that_is_not_there_is_an_error() {
    let fixture = used();
    let filter = Filter { backend: Some(1), ..Filter::default() };
    let given = &mut |_| ControlFlow::Continue(());
    let error = dump(&fixture.bytes(), What::Records, &filter, given).expect_err("there is no such backend");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}
