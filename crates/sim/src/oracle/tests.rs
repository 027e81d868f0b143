use super::*;

const SECTORS: u64 = 16;

fn oracle() -> Oracle {
    Oracle::new(SECTORS * 512, 512, 4096)
}

fn sectors(first: u64, count: u64) -> ByteRange {
    ByteRange::at(first * 512, count * 512)
}

fn image(contents: &[(u64, Content)]) -> DiskImage {
    let mut image = DiskImage::fresh(SECTORS * 512, 512);
    for &(sector, content) in contents {
        let mut bytes = [0; 512];
        content.fill(sector, &mut bytes);
        image.write(sectors(sector, 1), Some(&bytes));
    }
    image
}

fn read(image: &DiskImage, range: ByteRange) -> Vec<u8> {
    let mut bytes = vec![0; range.len() as usize];
    image.read(range.start, &mut bytes);
    bytes
}

fn write(oracle: &mut Oracle, first: u64, count: u64) -> Content {
    let content = oracle.fresh_content();
    let change = oracle.submit(sectors(first, count), content);
    oracle.complete(change, false);
    content
}

fn flush(oracle: &mut Oracle) {
    let submitted = oracle.now();
    oracle.flushed(submitted);
}

#[test]
fn a_completed_write_must_be_read_and_an_open_one_may() {
    let mut oracle = oracle();
    let first = write(&mut oracle, 0, 1);
    let second = oracle.fresh_content();
    oracle.submit(sectors(0, 1), second);
    let now = oracle.now();
    for (content, legal) in [(Content::INITIAL, false), (first, true), (second, true)] {
        let bytes = oracle.payload(sectors(0, 1), content);
        assert_eq!(oracle.check_read(sectors(0, 1), now, &bytes).is_ok(), legal);
    }
}

#[test]
fn a_read_may_return_what_was_there_when_it_was_submitted() {
    let mut oracle = oracle();
    let before = oracle.now();
    let written = write(&mut oracle, 0, 1);
    let after = oracle.now();
    let old = oracle.payload(sectors(0, 1), Content::INITIAL);
    let new = oracle.payload(sectors(0, 1), written);
    assert!(oracle.check_read(sectors(0, 1), before, &old).is_ok());
    assert!(oracle.check_read(sectors(0, 1), before, &new).is_ok());
    assert!(oracle.check_read(sectors(0, 1), after, &old).is_err());
}

#[test]
fn an_atomic_write_found_in_part_is_a_violation_and_a_large_one_is_not() {
    for (count, legal) in [(8, false), (9, true)] {
        let mut oracle = oracle();
        let content = oracle.fresh_content();
        oracle.submit(sectors(0, count), content);
        let torn = image(&[(3, content)]);
        let settled = oracle.settle(|range| read(&torn, range)).is_ok();
        assert_eq!(settled, legal);
    }
}

#[test]
fn what_was_dropped_by_a_crash_must_not_come_back() {
    let mut oracle = oracle();
    let content = oracle.fresh_content();
    oracle.submit(sectors(0, 1), content);
    let old = image(&[]);
    oracle.settle(|range| read(&old, range)).expect("legal");
    assert!(oracle.check_everything(&image(&[(0, content)])).is_err());
    assert!(oracle.moment_of(&image(&[(0, content)]), 0).is_err());
    assert!(oracle.check_everything(&old).is_ok());
}

#[test]
fn between_flushes_a_disk_may_show_any_subset() {
    let mut oracle = oracle();
    let first = write(&mut oracle, 0, 1);
    let second = write(&mut oracle, 1, 1);
    flush(&mut oracle);
    for shown in [vec![], vec![(0, first)], vec![(1, second)], vec![(0, first), (1, second)]] {
        assert!(oracle.moment_of(&image(&shown), 0).is_ok());
    }
}

#[test]
fn a_disk_that_shows_a_write_shows_everything_that_was_flushed_before_it() {
    let mut oracle = oracle();
    let first = write(&mut oracle, 0, 1);
    flush(&mut oracle);
    let second = write(&mut oracle, 1, 1);
    assert!(oracle.moment_of(&image(&[(1, second)]), 0).is_err());
    assert!(oracle.moment_of(&image(&[(0, first)]), 0).is_ok());
    assert!(oracle.moment_of(&image(&[(0, first), (1, second)]), 0).is_ok());
}

#[test]
fn a_flush_does_not_guarantee_a_write_that_was_open_when_it_was_submitted() {
    let mut oracle = oracle();
    let open = oracle.fresh_content();
    let change = oracle.submit(sectors(0, 1), open);
    let submitted = oracle.now();
    oracle.complete(change, false);
    oracle.flushed(submitted);
    let second = write(&mut oracle, 1, 1);
    assert!(oracle.moment_of(&image(&[(1, second)]), 0).is_ok());
}

#[test]
fn a_write_with_fua_is_there_before_anything_later() {
    let mut oracle = oracle();
    let content = oracle.fresh_content();
    let change = oracle.submit(sectors(0, 1), content);
    oracle.complete(change, true);
    let later = write(&mut oracle, 1, 1);
    assert!(oracle.moment_of(&image(&[(1, later)]), 0).is_err());
}

#[test]
fn zeroes_fit_any_of_the_zeroings() {
    let mut oracle = oracle();
    let zero = |oracle: &mut Oracle| {
        let change = oracle.submit(sectors(0, 1), Content::ZEROES);
        oracle.complete(change, false);
        flush(oracle);
    };
    zero(&mut oracle);
    let between = write(&mut oracle, 1, 1);
    flush(&mut oracle);
    let over = write(&mut oracle, 0, 1);
    flush(&mut oracle);
    assert!(oracle.moment_of(&image(&[(0, over)]), 0).is_err(), "the write between is missing");
    zero(&mut oracle);
    let last = write(&mut oracle, 2, 1);
    let shown = |more: &[(u64, Content)]| [&[(0, Content::ZEROES), (1, between)], more].concat();
    assert!(oracle.moment_of(&image(&shown(&[])), 0).is_ok());
    assert!(oracle.moment_of(&image(&shown(&[(2, last)])), 0).is_ok());
    assert!(oracle.moment_of(&image(&[(0, Content::ZEROES), (2, last)]), 0).is_err());
}

#[test]
fn a_drained_device_may_not_show_the_past() {
    let mut oracle = oracle();
    let first = write(&mut oracle, 0, 1);
    flush(&mut oracle);
    let drained = oracle.now();
    assert!(oracle.moment_of(&image(&[]), 0).is_ok());
    assert!(oracle.moment_of(&image(&[]), drained).is_err());
    assert!(oracle.moment_of(&image(&[(0, first)]), drained).is_ok());
}

#[test]
fn a_torn_sector_is_never_legal() {
    let mut oracle = oracle();
    let content = write(&mut oracle, 0, 1);
    let mut torn = image(&[(0, content)]);
    torn.write(sectors(0, 1), Some(&[1; 512]));
    assert!(oracle.moment_of(&torn, 0).is_err());
    assert!(oracle.check_everything(&torn).is_err());
}

/// Sectors 0 to 7, each written with its own content, and a write of the first four that is open.
fn with_an_open_write() -> (Oracle, Vec<u8>, Vec<u8>) {
    let mut oracle = Oracle::new(8 * 512, 512, 4096);
    let range = ByteRange { start: 0, end: 8 * 512 };
    let content = oracle.fresh_content();
    let old = oracle.payload(range, content);
    let change = oracle.submit(range, content);
    oracle.complete(change, false);
    let content = oracle.fresh_content();
    let half = ByteRange { start: 0, end: 4 * 512 };
    let mut new = old.clone();
    new[..4 * 512].copy_from_slice(&oracle.payload(half, content));
    oracle.submit(half, content);
    (oracle, old, new)
}

fn compare(oracle: &Oracle, device: &[u8]) -> Result<u64, Violation> {
    oracle.expectation(1024).compare(|range, into| {
        into.copy_from_slice(&device[range.start as usize..range.end as usize]);
        Ok(())
    })
}

#[test]
fn an_open_write_is_expected_whole_or_not_at_all() {
    let (oracle, old, new) = with_an_open_write();
    let (without, with) = (compare(&oracle, &old), compare(&oracle, &new));
    assert!(without.is_ok() && with.is_ok() && without != with);
    let mut part = old.clone();
    part[..512].copy_from_slice(&new[..512]);
    assert!(compare(&oracle, &part).is_err());
}

#[test]
fn what_was_acknowledged_is_expected() {
    let (oracle, old, _) = with_an_open_write();
    let mut lost = old.clone();
    lost[7 * 512..].copy_from_slice(&Content::fresh_disk(8 * 512, 512)[7 * 512..]);
    assert!(compare(&oracle, &lost).is_err());
    let mut torn = old;
    torn[5 * 512] ^= 1;
    assert!(compare(&oracle, &torn).is_err());
}

#[test]
fn the_same_contents_have_the_same_number() {
    let (mut oracle, old, new) = with_an_open_write();
    let expected = (compare(&oracle, &old), compare(&oracle, &new));
    let open = oracle.open.keys().copied().next().expect("one is open");
    oracle.complete(open, false);
    assert_eq!(compare(&oracle, &new), expected.1);
    assert!(compare(&oracle, &old).is_err());
}
