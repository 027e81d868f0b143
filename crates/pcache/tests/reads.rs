//! The content of a cache device is read as dm-pcache would read it.

mod support;

use cbd_pcache::{LogEnd, Options};
use cbd_testkit::pcache::{Sample, SampleKey};
use support::{BLOCK, Writer, read, read_with};

const B: u64 = BLOCK as u64;

#[test]
fn an_empty_cache_is_clean() {
    let read = read(&Sample::new(4, true));
    assert_eq!((read.survey.keys, read.scanned.dirty.bytes, read.harmful), (0, 0, 0));
    assert_eq!(read.survey.end, Some(LogEnd::Clean { at: Sample::data_at(0) }));
    assert!(read.findings.is_empty(), "{:?}", read.findings);
}

#[test]
fn keys_behind_the_dirty_tail_are_dirty_and_those_before_it_are_not() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    let (segment, offset) = writer.sample.head();
    writer.write(B, BLOCK, 2);
    writer.sample.set_dirty_tail(2, segment, offset);
    let read = read(&writer.sample);
    assert!(read.has(B, B, 2) && !read.received.contains_key(&0));
    assert_eq!((read.survey.key_sets, read.survey.dirty_keys, read.survey.device_end), (1, 1, 2 * B));
}

#[test]
fn the_newest_key_of_each_byte_is_used() {
    let mut writer = Writer::new(true);
    writer.write(0, 4 * BLOCK, 1);
    let keys = [writer.key(B, BLOCK, 2), writer.key(B + 512, 512, 3)];
    writer.sample.append(&keys);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.has(B, 512, 2) && read.has(B + 512, 512, 3));
    assert!(read.has(B + 1024, B - 1024, 2) && read.has(2 * B, 2 * B, 1));
    assert_eq!(
        (read.scanned.dirty.count, read.scanned.dirty.bytes, read.survey.logged_bytes),
        (1, 4 * B, 5 * B + 512)
    );
}

#[test]
fn a_clean_key_is_not_dirty_and_does_not_cover_a_dirty_one() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    let clean = SampleKey { flags: 2, ..writer.key(0, 2 * BLOCK, 9) };
    writer.sample.append(&[clean]);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.scanned.dirty.bytes == B);
    assert_eq!((read.survey.keys, read.survey.dirty_keys, read.survey.dirty_key_sets), (2, 1, 1));
}

#[test]
fn the_log_continues_in_another_segment() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    writer.sample.append_last(3);
    writer.write(B, BLOCK, 2);
    writer.sample.append_last(2);
    writer.write(2 * B, BLOCK, 3);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.has(B, B, 2) && read.has(2 * B, B, 3));
    assert_eq!(read.survey.log_segments, 3);
}

#[test]
fn a_key_set_may_have_128_keys_and_a_key_4_mib() {
    let mut writer = Writer::new(true);
    let keys: Vec<_> = (0..128).map(|number| writer.key(number * B, BLOCK, number as u8)).collect();
    writer.sample.append(&keys);
    writer.write(1 << 30, 4 << 20, 200);
    let read = read(&writer.sample);
    assert!((0..128).all(|number| read.has(number * B, B, number as u8)));
    assert!(read.has(1 << 30, 4 << 20, 200));
}

#[test]
fn the_newest_of_two_copies_is_used_even_after_a_wrap_of_its_number() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    let (segment, offset) = writer.sample.head();
    writer.write(B, BLOCK, 2);
    writer.sample.set_dirty_tail(255, 0, 0);
    writer.sample.set_dirty_tail(0, segment, offset);
    assert_eq!(read(&writer.sample).survey.keys, 1);
    writer.sample.set_dirty_tail(1, 0, 0);
    assert_eq!(read(&writer.sample).survey.keys, 2);
}

#[test]
fn without_checksums_of_data_none_are_verified() {
    let mut writer = Writer::new(false);
    let key = SampleKey { data_crc: 0x1234, ..writer.key(0, BLOCK, 1) };
    writer.sample.append(&[key]);
    let read = read(&writer.sample);
    assert!(read.has(0, B, 1) && read.damaged().is_empty());
}

#[test]
fn a_key_set_of_an_earlier_use_ends_the_log() {
    let mut writer = Writer::new(true);
    writer.write(0, BLOCK, 1);
    // As if the zeroes between them had been lost: the segment of its data was freed since then.
    let old = SampleKey { segment: 2, ..writer.key(B, BLOCK, 2) };
    writer.sample.set_generation(2, 2, 1);
    let at = writer.sample.append(&[old]);
    writer.write(2 * B, BLOCK, 3);
    let read = read(&writer.sample);
    assert_eq!(read.survey.end, Some(LogEnd::Old { at }));
    assert!(read.has(0, B, 1) && read.scanned.dirty.bytes == B && read.damaged().is_empty());
}

#[test]
fn an_interrupted_store_of_a_key_set_ends_the_log_without_a_loss() {
    for (stored, ends_cleanly) in [(0, true), (8, false), (16, false), (24, false), (40, false), (63, false)]
    {
        let mut writer = Writer::new(true);
        writer.write(0, BLOCK, 1);
        let at = writer.write(B, BLOCK, 2);
        let zeroes = vec![0; 64 - stored];
        writer.sample.store(at + stored as u64, &zeroes);
        // The last byte of a set is always zero.
        writer.sample.flip(at + 63, if stored == 63 { 1 } else { 0 });
        let read = read(&writer.sample);
        let end = if ends_cleanly { LogEnd::Clean { at } } else { LogEnd::Unfinished { at } };
        assert_eq!(read.survey.end, Some(end), "{stored} bytes stored");
        assert!(read.has(0, B, 1) && read.scanned.dirty.bytes == B);
    }
}

#[test]
fn the_result_does_not_depend_on_the_memory_limit() {
    let mut writer = Writer::new(true);
    for number in 0..300_u64 {
        let offset = number * 7919 % 512 * 1536;
        writer.write(offset, 512 * (1 + number as usize % 9), number as u8);
    }
    let much = read(&writer.sample);
    let options = Options { pieces_max: 16, ..Options::default() };
    let little = read_with(&writer.sample, options).expect("it can be opened");
    assert_eq!(much.received, little.received);
    assert_eq!(much.scanned.dirty, little.scanned.dirty);
    assert!(little.scanned.windows > 10 && much.scanned.windows == 1, "{}", little.scanned.windows);
}
