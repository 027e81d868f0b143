//! Verification and comparison of what a file holds.

mod common;

use cbd_backing::{BackingFile, Engine, Options, PollableQueue};
use cbd_types::{AlignedBuffer, BackingOp, ByteRange, ErrorKind, Expected, OpToken};
use common::{MIB, compare, directory, in_time, is_zero, queue, read, run, run_ok, verify, write};

const SIZE: u64 = 4 * MIB;

/// Runs `test` on a file of `bytes` for each way to reach the kernel.
fn on_both_queues(bytes: Vec<u8>, read_only: bool, test: fn(&mut dyn PollableQueue)) {
    in_time(move || {
        let directory = directory();
        let path = directory.path().join("disk");
        std::fs::write(&path, &bytes).expect("a file");
        for engine in [Engine::Auto, Engine::Synchronous] {
            let options = Options { read_only, engine, ..Options::default() };
            test(&mut *queue(&BackingFile::open(&path, options).expect("free to be opened"), 4));
        }
        assert_eq!(std::fs::read(&path).expect("the file"), bytes, "nothing was changed");
    });
}

fn with_bytes(places: &[usize]) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    places.iter().for_each(|&at| bytes[at] = 1);
    bytes
}

fn range_of_mismatch(queue: &mut dyn PollableQueue, op: BackingOp) -> ByteRange {
    let error = run(queue, op).result.expect_err("it differs");
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Mismatch, 5));
    error.range().expect("it names the sectors")
}

#[test]
fn what_can_be_read_and_is_as_expected_is_verified_on_a_read_only_file() {
    on_both_queues(with_bytes(&[5000]), true, |queue| {
        run_ok(queue, verify(0, SIZE));
        run_ok(queue, is_zero(8192, SIZE - 8192));
        let mut expected = vec![0; 8192];
        expected[5000] = 1;
        run_ok(queue, compare(0, &expected));
        run_ok(queue, verify(512, 0));
        run_ok(queue, compare(512, &[]));
    });
}

#[test]
fn a_comparison_names_the_first_sectors_that_differ_in_any_piece() {
    on_both_queues(with_bytes(&[3 << 20, (3 << 20) + 512, (3 << 20) + 8192]), true, |queue| {
        let found = ByteRange::at(3 * MIB, 1024);
        // A device of larger sectors names whole ones.
        let named = range_of_mismatch(queue, is_zero(0, SIZE));
        assert!(named.contains(&found) && named.end < 3 * MIB + 8192, "{named}");
        assert_eq!(range_of_mismatch(queue, compare(0, &vec![0; SIZE as usize])), named);
        run_ok(queue, is_zero(0, 3 * MIB));
    });
}

#[test]
fn a_wrong_verification_is_refused() {
    on_both_queues(with_bytes(&[]), true, |queue| {
        let kind = |queue: &mut dyn PollableQueue, op| run(queue, op).result.expect_err("refused").kind();
        assert_eq!(kind(queue, verify(SIZE - 512, 1024)), ErrorKind::OutOfRange);
        assert_eq!(kind(queue, is_zero(u64::MAX - 511, 512)), ErrorKind::OutOfRange);
        assert_eq!(kind(queue, verify(1, 512)), ErrorKind::InvalidArgument);
        let expected = Expected::Bytes(AlignedBuffer::zeroed(4096));
        let too_few = BackingOp::Compare { range: ByteRange::at(0, 8192), expected };
        assert_eq!(kind(queue, too_few), ErrorKind::InvalidArgument);
        assert_eq!(kind(queue, write(0, &[1; 4096])), ErrorKind::ReadOnly);
    });
}

#[test]
fn verifications_complete_beside_other_operations() {
    on_both_queues(with_bytes(&[]), true, |queue| {
        for index in 0..16 {
            let at = index * (SIZE / 16);
            let op = match index % 4 {
                0 => verify(at, SIZE / 16),
                1 => is_zero(at, SIZE / 16),
                2 => compare(at, &vec![0; (SIZE / 16) as usize]),
                _ => read(at, 4096),
            };
            queue.submit(OpToken(index), op);
        }
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
        assert_eq!(done.len(), 16);
        assert!(done.into_iter().all(|one| one.result.is_ok()));
    });
}

#[test]
fn a_file_that_was_cut_short_is_not_verified() {
    in_time(|| {
        let directory = directory();
        let path = common::file(directory.path(), "disk", SIZE);
        let backing = common::open(&path);
        let mut queue = queue(&backing, 4);
        let file = std::fs::File::options().write(true).open(&path).expect("the file");
        file.set_len(MIB).expect("shorter");
        assert!(run(&mut *queue, verify(0, SIZE)).result.is_err());
        assert!(run(&mut *queue, is_zero(0, SIZE)).result.is_err());
    });
}
