//! Damage: substitutes and losses are reported; no damaged data is passed on.

mod support;

use cbd_pcache::{LogEnd, Options, Reason};
use cbd_testkit::pcache::{Sample, SampleKey};
use cbd_types::ErrorKind;
use support::{BLOCK, Writer, read, read_with};

const B: u64 = BLOCK as u64;

fn with_two_writes(data_crc: bool) -> Writer {
    let mut writer = Writer::new(data_crc);
    writer.write(0, BLOCK, 1);
    writer.write(B, BLOCK, 2);
    writer
}

#[track_caller]
fn assert_finding(sample: &Sample, finding: &str) {
    let read = read(sample);
    assert!(read.has(0, B, 1) && read.has(B, B, 2) && read.damaged().is_empty());
    assert!(read.findings.iter().any(|found| found.contains(finding)), "{:?}", read.findings);
    assert_eq!(read.harmful, 0);
}

#[test]
fn data_with_a_wrong_checksum_and_the_data_that_it_covers_are_not_passed_on() {
    let mut writer = with_two_writes(true);
    writer.write(0, 512, 3);
    writer.sample.flip(Sample::data_at(1) + 2 * B + 100, 1);
    let read = read(&writer.sample);
    assert_eq!(read.damaged(), [(0, 512)]);
    assert_eq!(read.scanned.damaged.ranges[0].reason, Some(Reason::Checksum));
    assert!(!read.received.contains_key(&0) && read.has(512, B - 512, 1) && read.has(B, B, 2));
}

#[test]
fn unreadable_data_is_lost_page_by_page() {
    let mut writer = Writer::new(false);
    writer.write(0, 4 * BLOCK, 1);
    writer.sample.poison(Sample::data_at(1) + B);
    let read = read(&writer.sample);
    assert_eq!(read.damaged(), [(B, B)]);
    assert_eq!(read.scanned.damaged.ranges[0].reason, Some(Reason::Unreadable));
    assert!(read.has(0, B, 1) && read.has(2 * B, 2 * B, 1));
}

#[test]
fn the_cache_info_replaces_a_damaged_superblock() {
    let mut writer = with_two_writes(true);
    writer.sample.flip(4096 + 16, 1);
    assert_finding(&writer.sample, "superblock is damaged");
    let mut writer = with_two_writes(true);
    writer.sample.poison(4096);
    assert_finding(&writer.sample, "superblock is damaged");
}

#[test]
fn the_order_of_segments_replaces_a_damaged_link() {
    let mut writer = with_two_writes(true);
    writer.sample.flip(Sample::segment_at(0) + 12, 1);
    assert_finding(&writer.sample, "the link of segment 0 is damaged");
    let mut writer = with_two_writes(true);
    writer.sample.poison(Sample::segment_at(0));
    writer.sample.poison(Sample::segment_at(0) + 4096);
    assert_finding(&writer.sample, "the link of segment 0 is damaged");
}

#[test]
fn the_key_tail_replaces_a_damaged_dirty_tail() {
    let mut writer = with_two_writes(true);
    let (segment, offset) = writer.sample.head();
    writer.sample.set_dirty_tail(2, segment, offset);
    assert_eq!(read(&writer.sample).survey.keys, 0, "all was written back");
    writer.sample.flip(16416, 1);
    assert_finding(&writer.sample, "dirty tail is damaged");
}

#[test]
fn collected_data_is_not_dirty_when_the_key_tail_replaces_the_dirty_tail() {
    let mut writer = Writer::new(true);
    let collected = SampleKey { segment: 2, ..writer.key(0, BLOCK, 9) };
    writer.sample.set_generation(2, 2, 1);
    let kept = writer.key(B, BLOCK, 2);
    writer.sample.append(&[collected, kept]);
    writer.sample.flip(16432, 1);
    let read = read(&writer.sample);
    assert!(read.has(B, B, 2) && read.scanned.dirty.bytes == B && read.damaged().is_empty());
}

#[test]
fn a_lost_generation_costs_its_segment_only_without_checksums_of_data() {
    let mut writer = with_two_writes(true);
    writer.sample.poison(Sample::segment_at(1) + 8192);
    assert_finding(&writer.sample, "generation of segment 1 is damaged");
    let mut writer = with_two_writes(false);
    writer.sample.poison(Sample::segment_at(1) + 8192);
    let read = read(&writer.sample);
    assert_eq!((read.damaged(), read.harmful), (vec![(0, 2 * B)], 1));
    assert!(read.received.is_empty());
}

#[test]
fn a_damaged_key_set_ends_the_log_unless_it_is_skipped_on_request() {
    // Each field of the first set, and one field of its key.
    for byte in [0, 4, 9, 12, 30, 60] {
        let mut writer = Writer::new(true);
        let first = writer.write(0, BLOCK, 1);
        writer.write(B, BLOCK, 2);
        writer.sample.flip(first + byte, 4);
        let ended = read(&writer.sample);
        assert_eq!(ended.survey.end, Some(LogEnd::Damaged { at: first }), "byte {byte}");
        assert!(ended.received.is_empty());
        let options = Options { past_damage: true, ..Options::default() };
        let passed = read_with(&writer.sample, options).expect("it can be opened");
        assert!(passed.has(B, B, 2) && passed.scanned.dirty.bytes == B && passed.survey.passed_key_sets == 1);
    }
}

#[test]
fn a_damaged_end_of_a_segments_part_does_not_end_the_log() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    let last = writer.sample.append_last(2);
    writer.write(B, BLOCK, 2);
    writer.sample.flip(last, 1);
    assert_eq!(read(&writer.sample).survey.end, Some(LogEnd::Damaged { at: last }));
    let options = Options { past_damage: true, ..Options::default() };
    let passed = read_with(&writer.sample, options).expect("it can be opened");
    assert!(passed.has(0, B, 1) && passed.has(B, B, 2));
}

#[test]
fn an_unreadable_log_ends_there_and_reports_it() {
    let mut writer = with_two_writes(true);
    writer.sample.poison(Sample::data_at(0));
    let read = read(&writer.sample);
    let end = read.survey.end.expect("it ends");
    assert!(end.is_harmful() && end == LogEnd::Unreadable { at: Sample::data_at(0) }, "{end:?}");
}

#[test]
fn the_rest_of_a_truncated_image_is_read() {
    let mut writer = with_two_writes(true);
    let key = writer.sample.data(2 * B, 3, 0, &[3; BLOCK]);
    writer.sample.append(&[key]);
    writer.sample.truncate(Sample::data_at(3) + 2048);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.has(B, B, 2));
    assert_eq!(read.damaged(), [(2 * B, B)]);
    assert!(read.harmful == 1 && read.findings[0].contains("image ends"), "{:?}", read.findings);
}

#[test]
fn damage_without_a_substitute_is_an_error() {
    let kind =
        |sample: &Sample| read_with(sample, Options::default()).map(|_| ()).map_err(|error| error.kind());
    let mut both_infos = Sample::new(4, true);
    both_infos.poison(8192);
    both_infos.poison(12288);
    assert_eq!(kind(&both_infos), Err(ErrorKind::Damaged));
    let mut tails = Sample::new(4, true);
    tails.poison(16384);
    assert_eq!(kind(&tails), Err(ErrorKind::Damaged));
    let mut foreign = Sample::new(4, true);
    for at in [4096, 8192, 12288] {
        foreign.store(at, &[7; 64]);
    }
    assert_eq!(kind(&foreign), Err(ErrorKind::Foreign));
    assert_eq!(kind(&Sample::default()), Err(ErrorKind::Foreign));
    let mut other_order = Sample::new(4, true);
    other_order.store(4096 + 4, &[1]);
    other_order.reseal(4096, 24);
    assert_eq!(kind(&other_order), Err(ErrorKind::Unsupported));
    let mut unmade = Sample::new(4, true);
    unmade.store(12288, &[0; 24]);
    assert_eq!(kind(&unmade), Err(ErrorKind::Damaged));
}
