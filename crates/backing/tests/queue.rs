//! Operations on files, through the ring and through plain system calls.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, BackingFile, Direct, Options, PollableQueue};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, ByteRange, ErrorKind, OpToken};
use common::*;
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

/// A small generator, so that the tests are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|index| (index * 31 + seed * 97 + index / 512) as u8).collect()
}

fn all_operations_are_returned(backing: &BackingFile) {
    const COUNT: u64 = 200;
    const PIECE: usize = 12 << 10;
    let mut queue = queue(backing, 8);
    for index in 0..COUNT {
        queue.submit(OpToken(index), write(index * PIECE as u64, &pattern(index, PIECE)));
    }
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut done);
    }
    let mut tokens: Vec<_> = done.iter().map(|one| one.token.0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..COUNT).collect::<Vec<_>>());
    assert!(done.iter().all(|one| one.result.is_ok()));
    run_ok(&mut *queue, BackingOp::Flush);

    done.clear();
    for index in 0..COUNT {
        queue.submit(OpToken(index), read(index * PIECE as u64, PIECE));
    }
    while queue.in_flight() > 0 {
        queue.wait(&mut done);
    }
    for BackingDone { token, op, result } in done {
        result.expect("read");
        let BackingOp::Read { buffer, .. } = op else { panic!("a read comes back as a read") };
        assert_eq!(&buffer[..], pattern(token.0, PIECE), "operation {}", token.0);
    }
}

#[test]
fn data_written_through_a_ring_is_read_back() {
    in_time(|| {
        let directory = directory();
        let backing = open(&file(directory.path(), "disk", 4 * MIB));
        assert!(backing.info().ring && backing.info().direct, "{}", backing.describe());
        all_operations_are_returned(&backing);
    });
}

#[test]
fn data_written_without_a_ring_is_read_back() {
    in_time(|| {
        let directory = directory();
        let backing = open_synchronous(&file(directory.path(), "disk", 4 * MIB));
        assert!(!backing.info().ring);
        all_operations_are_returned(&backing);
    });
}

#[test]
fn data_written_through_the_page_cache_is_read_back() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 4 * MIB);
        let backing =
            BackingFile::open(&path, Options { direct: Direct::Never, ..Options::default() }).expect("open");
        assert!(!backing.info().direct);
        all_operations_are_returned(&backing);
    });
}

/// Compares random batches of operations that do not overlap with a plain array.
fn agrees_with_an_array(backing: &BackingFile, seed: u64) {
    const SECTORS: u64 = 2048;
    let sector = u64::from(backing.geometry().sector);
    let mut model = vec![0_u8; (SECTORS * sector) as usize];
    let mut random = Random(seed);
    let mut queue = queue(backing, 4);
    for round in 0..60 {
        let mut taken: Vec<ByteRange> = Vec::new();
        let mut expected = HashMap::new();
        for token in 0..12 {
            let start = random.below(SECTORS);
            let count = 1 + random.below(40).min(SECTORS - start - 1);
            let range = ByteRange::at(start * sector, count * sector);
            if taken.iter().any(|other| other.overlaps(&range)) {
                continue;
            }
            taken.push(range);
            let place = range.start as usize..range.end as usize;
            let op = match random.below(5) {
                0 => {
                    expected.insert(token, model[place].to_vec());
                    read(range.start, range.len() as usize)
                }
                1 => {
                    model[place].fill(0);
                    zero(range.start, range.len())
                }
                2 => {
                    model[place].fill(0);
                    discard(range.start, range.len())
                }
                _ => {
                    let bytes = pattern(round * 100 + token, range.len() as usize);
                    model[place].copy_from_slice(&bytes);
                    write(range.start, &bytes)
                }
            };
            queue.submit(OpToken(token), op);
        }
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
        for BackingDone { token, op, result } in done {
            result.unwrap_or_else(|error| panic!("round {round}: {error}"));
            if let BackingOp::Read { buffer, .. } = op {
                assert_eq!(
                    Some(&buffer[..]),
                    expected.get(&token.0).map(|bytes| &bytes[..]),
                    "round {round}"
                );
            }
        }
    }
    run_ok(&mut *queue, BackingOp::Flush);
    let whole = run_ok(&mut *queue, read(0, model.len()));
    assert!(whole[..] == model[..], "the device holds what the array holds");
}

#[test]
fn a_ring_agrees_with_an_array() {
    in_time(|| {
        let directory = directory();
        for seed in 1..=4 {
            let path = file(directory.path(), &format!("disk{seed}"), MIB);
            agrees_with_an_array(&open(&path), seed);
        }
    });
}

#[test]
fn plain_system_calls_agree_with_an_array() {
    in_time(|| {
        let directory = directory();
        agrees_with_an_array(&open_synchronous(&file(directory.path(), "disk", MIB)), 7);
    });
}

#[test]
fn a_file_system_that_cannot_zero_ranges_agrees_with_an_array() {
    in_time(|| {
        // A tmpfs has no FALLOC_FL_ZERO_RANGE.
        let Ok(directory) = tempfile::Builder::new().prefix("cbd-backing-").tempdir_in("/dev/shm") else {
            eprintln!("not run: there is no /dev/shm");
            return;
        };
        agrees_with_an_array(&open(&file(directory.path(), "disk", MIB)), 9);
    });
}

#[test]
fn bytes_after_the_last_whole_sector_are_unchanged() {
    in_time(|| {
        let directory = directory();
        let path = directory.path().join("disk");
        let before = pattern(3, MIB as usize + 333);
        std::fs::write(&path, &before).expect("a file");
        let backing = open(&path);
        let size = backing.geometry().size;
        assert_eq!((size, backing.info().unused_tail), (MIB, 333));
        let mut queue = queue(&backing, 4);
        for op in [write(0, &vec![9; size as usize]), zero(0, size), discard(0, size), BackingOp::Flush] {
            run_ok(&mut *queue, op);
        }
        let after = std::fs::read(&path).expect("the file");
        assert_eq!(after.len(), before.len());
        assert!(after[..MIB as usize].iter().all(|byte| *byte == 0));
        assert_eq!(after[MIB as usize..], before[MIB as usize..]);
    });
}

fn wrong_operations_are_errors(queue: &mut dyn PollableQueue) {
    let past_the_end = [
        write(MIB, &[1; 512]),
        read(MIB - 512, 1024),
        zero(MIB - 512, 1024),
        discard(u64::MAX - 4095, 4096),
        read(u64::MAX - 511, 512),
        BackingOp::WriteZeroes { range: ByteRange { start: 4096, end: 512 } },
    ];
    for op in past_the_end {
        let words = format!("{op:?}");
        let error = run(queue, op).result.expect_err(&words);
        assert_eq!(error.kind(), ErrorKind::OutOfRange, "{words}");
    }
    for op in [write(100, &[1; 512]), read(0, 100), zero(0, 513), discard(1, 512)] {
        let words = format!("{op:?}");
        let error = run(queue, op).result.expect_err(&words);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{words}");
    }
    // An empty operation succeeds.
    run_ok(queue, read(0, 0));
    run_ok(queue, zero(512, 0));
}

#[test]
fn operations_that_do_not_fit_the_device_complete_with_an_error() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        wrong_operations_are_errors(&mut *queue(&open(&path), 4));
        wrong_operations_are_errors(&mut *queue(&open_synchronous(&path), 4));
        assert!(std::fs::read(&path).expect("the file").iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_device_that_is_open_for_reading_is_not_written() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let options = Options { read_only: true, ..Options::default() };
        let backing = BackingFile::open(&path, options).expect("open");
        let mut queue = queue(&backing, 4);
        for op in [write(0, &[1; 512]), zero(0, 512), discard(0, 512)] {
            assert_eq!(run(&mut *queue, op).result.expect_err("refused").kind(), ErrorKind::ReadOnly);
        }
        run_ok(&mut *queue, read(0, 512));
    });
}

#[test]
fn the_wait_descriptor_is_readable_while_an_operation_can_be_returned() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        for synchronous in [false, true] {
            let backing = if synchronous { open_synchronous(&path) } else { open(&path) };
            let mut queue = queue(&backing, 4);
            let descriptor = queue.wait_descriptor();
            assert!(!readable(descriptor, 0));
            // One executed by the kernel, and one refused without it.
            for op in [write(0, &[1; 4096]), write(1, &[1; 4096])] {
                let mut done = Vec::new();
                queue.submit(OpToken(1), op);
                while done.is_empty() {
                    // The arrival of a completion may interrupt the wait, as a signal does.
                    let _ = readable(descriptor, 1000);
                    queue.poll(&mut done);
                }
                assert!(!readable(descriptor, 0), "poll has taken all");
            }
        }
    });
}

#[test]
fn a_wait_without_operations_returns_at_once() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let mut done = Vec::new();
        queue(&open(&path), 4).wait(&mut done);
        assert!(done.is_empty());
    });
}

#[test]
fn a_dropped_queue_waits_for_the_kernel_and_releases_the_lock() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 64 * MIB);
        for round in 0..20 {
            // Fails if the file is still locked.
            let backing = open(&path);
            let mut queue = queue(&backing, 16);
            for index in 0..32 {
                queue.submit(OpToken(index), write(index * MIB, &pattern(round + index, MIB as usize)));
            }
            queue.submit(OpToken(99), zero(40 * MIB, 4 * MIB));
            drop(queue);
        }
    });
}

#[test]
fn a_queue_that_changes_its_thread_returns_all_operations() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 64 * MIB);
        let backing = open(&path);
        let mut queue = queue(&backing, 16);
        // The thread ends with its operations in flight, and the kernel cancels those that it can.
        let mut queue = std::thread::spawn(move || {
            for index in 0..32 {
                queue.submit(OpToken(index), write(index * MIB, &pattern(index, MIB as usize)));
                queue.submit(OpToken(100 + index), BackingOp::Flush);
            }
            queue
        })
        .join()
        .expect("submitted");
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
        assert_eq!(done.len(), 64);
        for one in done {
            one.result.expect("done");
        }
        for index in 0..32 {
            assert!(run_ok(&mut *queue, read(index * MIB, MIB as usize))[..] == pattern(index, MIB as usize));
        }
    });
}

#[test]
fn a_discarded_range_takes_no_space() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let backing = open(&path);
        if !backing.geometry().discard_zeroes {
            eprintln!("not run: the file system punches no holes");
            return;
        }
        let mut queue = queue(&backing, 4);
        run_ok(&mut *queue, write(0, &pattern(1, MIB as usize)));
        run_ok(&mut *queue, BackingOp::Flush);
        let before = std::fs::metadata(&path).expect("the file").blocks();
        run_ok(&mut *queue, discard(0, MIB / 2));
        let after = std::fs::metadata(&path).expect("the file").blocks();
        assert!(after <= before - MIB / 2 / 512, "{before} blocks before, {after} after");
    });
}

#[test]
fn a_read_of_a_truncated_file_is_an_error_with_range_and_path() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let mut queue = queue(&open(&path), 4);
        std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(8192))
            .expect("the file is truncated");
        let error = run(&mut *queue, read(4096, 8192)).result.expect_err("too short");
        assert_eq!(error.kind(), ErrorKind::Backing);
        let line = error.line();
        assert!(line.contains("4096..12288") && line.contains(path.to_str().expect("a name")), "{line}");
    });
}

#[test]
fn a_full_file_system_is_a_no_space_error_and_writes_succeed_once_space_is_freed() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let at = directory.path().to_path_buf();
    in_time(move || {
        own_mounts();
        mount_tmpfs(&at, 2 * MIB);
        for synchronous in [false, true] {
            let path = file(&at, "disk", 16 * MIB);
            let backing = if synchronous { open_synchronous(&path) } else { open(&path) };
            let mut queue = queue(&backing, 4);
            let error = run(&mut *queue, write(0, &vec![1; 4 << 20])).result.expect_err("no space");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            run_ok(&mut *queue, discard(0, 4 * MIB));
            run_ok(&mut *queue, write(8 * MIB, &[1; 4096]));
        }
    });
}

#[test]
fn plain_system_calls_are_used_and_reported_if_rings_are_forbidden() {
    in_time(|| {
        forbid(libc::SYS_io_uring_setup);
        let directory = directory();
        let backing = open(&file(directory.path(), "disk", 4 * MIB));
        assert!(!backing.info().ring && backing.info().synchronous_reason.is_some());
        all_operations_are_returned(&backing);
    });
}

#[test]
fn operations_are_executed_without_a_ring_that_has_failed_permanently() {
    in_time(|| {
        let directory = directory();
        let backing = open(&file(directory.path(), "disk", 4 * MIB));
        assert!(backing.info().ring);
        let mut early = queue(&backing, 4);
        run_ok(&mut *early, write(0, &[1; 4096]));
        forbid(libc::SYS_io_uring_enter);
        run_ok(&mut *early, write(0, &[2; 4096]));
        assert!(run_ok(&mut *early, read(0, 4096)).iter().all(|byte| *byte == 2));
        all_operations_are_returned(&backing);
    });
}
