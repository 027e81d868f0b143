//! The pass over a disk that is a list of sectors.

use super::*;
use crate::expected::Image;
use cbd_types::AlignedBuffer;
use std::collections::{BTreeSet, VecDeque};

const SECTOR: u64 = 512;

/// A disk with bad sectors.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    bad: BTreeSet<u64>,
    waiting: VecDeque<(u64, Request)>,
    requests: usize,
    most_in_flight: usize,
    /// Fails all requests from this one on, as a disk that was pulled.
    gone_from: Option<usize>,
    /// The result of a comparison that fails once.
    lies: bool,
}

impl Look for Disk {
    fn submit(&mut self, token: u64, request: Request) {
        assert!(request.range.start.is_multiple_of(SECTOR) && request.range.len().is_multiple_of(SECTOR));
        assert!(request.range.len() <= UNIT && request.range.end <= self.bytes.len() as u64);
        self.requests += 1;
        self.waiting.push_back((token, request));
        self.most_in_flight = self.most_in_flight.max(self.waiting.len());
    }

    fn wait(&mut self, answers: &mut Vec<(u64, Answer)>) {
        // The last first: answers come in any order.
        let Some((token, Request { range, ask, .. })) = self.waiting.pop_back() else { return };
        let content = &self.bytes[range.start as usize..range.end as usize];
        let is_bad = self.bad.range(range.start / SECTOR..range.end / SECTOR).next().is_some();
        let is_right = |is_right| if is_right { Answer::Right } else { Answer::Differs };
        let failed = |errno| {
            let cause = std::io::Error::from_raw_os_error(errno);
            Answer::Failed(Error::new(ErrorKind::Backing, "failed").caused_by(cause))
        };
        let answer = if self.gone_from.is_some_and(|from| self.requests >= from) {
            failed(libc::ENODEV)
        } else if is_bad {
            failed(libc::EIO)
        } else if std::mem::take(&mut self.lies) {
            Answer::Differs
        } else {
            match ask {
                Ask::Readable => Answer::Right,
                Ask::Zeroes => is_right(are_zero(content)),
                Ask::Bytes(bytes) => is_right(*bytes == *content),
                Ask::Content => Answer::Content(AlignedBuffer::from_slice(content)),
            }
        };
        answers.push((token, answer));
    }

    fn depth(&self) -> usize {
        4
    }
}

fn disk(length: u64) -> Disk {
    Disk { bytes: vec![0; length as usize], ..Disk::default() }
}

fn run(disk: &mut Disk, expected: &Expected, pieces: &[Piece]) -> Seen {
    let stop = AtomicBool::new(false);
    let mut seen = Seen::default();
    let mut progress = |_| {};
    Pass { expected, sector: SECTOR, stop: &stop, progress: &mut progress }.run(disk, pieces, &mut seen);
    seen
}

fn whole(length: u64) -> [Piece; 1] {
    [Piece { logical: 0, start: 0, length }]
}

fn found(seen: &Seen) -> Vec<(u64, u64, What)> {
    seen.findings.iter().map(|(range, what)| (range.start, range.len(), what)).collect()
}

fn image(bytes: &[u8]) -> Expected {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    Expected::Image(Image::open(file.path()).unwrap())
}

#[test]
fn what_cannot_be_read_is_narrowed_to_sectors_and_the_pass_goes_on() {
    let mut disk = disk(5 * UNIT + SECTOR);
    disk.bad.extend([0, 7, 8, 3000, 10_240]);
    let seen = run(&mut disk, &Expected::Readable, &whole(5 * UNIT + SECTOR));
    let at = |sector: u64, sectors: u64| (sector * SECTOR, sectors * SECTOR, What::Unreadable);
    assert_eq!(found(&seen), [at(0, 1), at(7, 2), at(3000, 1), at(10_240, 1)]);
    assert_eq!((seen.looked, seen.changed, seen.is_coarse), (5 * UNIT + SECTOR, 0, false));
    assert!(seen.error.is_none() && disk.most_in_flight == 4);
}

#[test]
fn sectors_that_differ_are_found_exactly() {
    let mut disk = disk(2 * UNIT);
    let same = image(&disk.bytes);
    assert_eq!(found(&run(&mut disk, &same, &whole(2 * UNIT))), []);
    disk.bytes[1_000_000] = 1;
    disk.bytes[1_500_001] = 1;
    disk.bad.insert(9);
    let differs = |at: u64, what| (at / SECTOR * SECTOR, SECTOR, what);
    let expected =
        |what| [(9 * SECTOR, SECTOR, What::Unreadable), differs(1_000_000, what), differs(1_500_001, what)];
    assert_eq!(found(&run(&mut disk, &same, &whole(2 * UNIT))), expected(What::Differs));
    assert_eq!(found(&run(&mut disk, &Expected::Zeroes, &whole(2 * UNIT))), expected(What::NotZero));
}

#[test]
fn a_difference_that_is_none_when_it_is_read_counts_as_a_change() {
    let mut disk = disk(UNIT);
    disk.lies = true;
    let seen = run(&mut disk, &Expected::Zeroes, &whole(UNIT));
    assert_eq!((found(&seen), seen.looked, seen.changed), (vec![], UNIT, UNIT));
}

#[test]
fn of_the_last_sector_of_a_file_only_its_own_bytes_count() {
    let mut disk = disk(8192);
    disk.bytes[4096 + 700..].fill(9);
    let pieces = [Piece { logical: 0, start: 4096, length: 700 }];
    assert_eq!(found(&run(&mut disk, &Expected::Zeroes, &pieces)), []);
    assert_eq!(found(&run(&mut disk, &image(&[0; 700]), &pieces)), []);
    disk.bytes[4096 + 699] = 9;
    assert_eq!(found(&run(&mut disk, &Expected::Zeroes, &pieces)), [(512, 188, What::NotZero)]);
    disk.bad.insert(9);
    assert_eq!(found(&run(&mut disk, &image(&[0; 700]), &pieces)), [(512, 188, What::Unreadable)]);
}

#[test]
fn places_in_the_file_are_reported_and_not_those_on_the_disk() {
    let mut disk = disk(4 * UNIT);
    disk.bad.extend([UNIT / SECTOR]);
    let pieces = [
        Piece { logical: 8 * UNIT, start: UNIT, length: 4096 },
        Piece { logical: 0, start: 4096, length: 4096 },
    ];
    assert_eq!(found(&run(&mut disk, &Expected::Readable, &pieces)), [(8 * UNIT, 512, What::Unreadable)]);
}

#[test]
fn a_disk_that_is_gone_ends_the_pass_with_its_error() {
    let mut disk = disk(64 * UNIT);
    disk.gone_from = Some(10);
    let seen = run(&mut disk, &Expected::Readable, &whole(64 * UNIT));
    assert!(seen.error.is_some() && seen.looked < 10 * UNIT && disk.requests < 20);
    assert_eq!(found(&seen), []);
}

#[test]
fn after_very_many_errors_ranges_are_not_narrowed_any_more() {
    let mut disk = disk(64 * UNIT);
    disk.bad.extend(0..64 * UNIT / SECTOR);
    let seen = run(&mut disk, &Expected::Readable, &whole(64 * UNIT));
    assert_eq!(found(&seen), [(0, 64 * UNIT, What::Unreadable)]);
    assert!(seen.is_coarse && disk.requests < 70_000, "{}", disk.requests);
}

#[test]
fn a_signal_ends_the_pass_behind_what_is_in_flight() {
    let mut disk = disk(64 * UNIT);
    let stop = AtomicBool::new(false);
    let mut seen = Seen::default();
    let mut progress = |looked| stop.store(looked >= 3 * UNIT, Ordering::Relaxed);
    let expected = Expected::Readable;
    let mut pass = Pass { expected: &expected, sector: SECTOR, stop: &stop, progress: &mut progress };
    pass.run(&mut disk, &whole(64 * UNIT), &mut seen);
    assert!((3 * UNIT..=7 * UNIT).contains(&seen.looked) && disk.waiting.is_empty(), "{seen:?}");
}
