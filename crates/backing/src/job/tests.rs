//! Tests of one operation, from its checks to its result.

use super::*;
use crate::Offload;
use crate::commands::tests::Device;
use cbd_types::AlignedBuffer;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;

fn target(kind: Kind) -> Target {
    target_over(File::open("/dev/null").expect("always there"), 1 << 40, kind)
}

/// A disk with this content, without commands.
pub(crate) fn disk_with(content: &[u8]) -> Target {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(content).expect("its content");
    target_over(file, content.len() as u64, Kind::Block)
}

fn target_over(file: File, size: u64, kind: Kind) -> Target {
    let geometry = BackingGeometry {
        size,
        sector: 512,
        physical_sector: 512,
        rotational: false,
        volatile_cache: true,
        discard_zeroes: true,
        discard_granularity: 512,
    };
    let file = Held::new(file);
    let (no_zero_range, no_punch) = (AtomicBool::new(false), AtomicBool::new(false));
    Target {
        file,
        path: "/dev/sdx".into(),
        kind,
        geometry,
        size: geometry.size.into(),
        read_only: false,
        is_named: true,
        length: Length::new(geometry.size),
        no_zero_range,
        no_punch,
        buffered: None,
        commands: RwLock::new(Arc::new(Commands::none("it has none"))),
    }
}

fn write(target: &Target) -> Job {
    let op = BackingOp::Write { offset: 4096, buffer: AlignedBuffer::zeroed(8192) };
    Job::new(OpToken(1), op, target)
}

fn zero(target: &Target) -> Job {
    Job::new(OpToken(1), BackingOp::WriteZeroes { range: ByteRange::at(0, 1 << 20) }, target)
}

fn mode(job: &Job, target: &Target) -> Option<i32> {
    match job.step(target) {
        Step::Allocate { mode, .. } => Some(mode & !libc::FALLOC_FL_KEEP_SIZE),
        _ => None,
    }
}

#[test]
fn a_short_write_continues_at_the_last_whole_sector() {
    let target = target(Kind::File);
    let mut job = write(&target);
    assert!(job.advance(&target, 4096 + 700).is_none());
    assert_eq!(job.step(&target), Step::Write { at: 4096 + 4608, skip: 4608, length: 3584 });
    assert!(job.advance(&target, 3584).is_some_and(|result| result.is_ok()));
}

#[test]
fn an_interrupted_write_is_retried_a_bounded_number_of_times() {
    for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        let target = target(Kind::File);
        let mut job = write(&target);
        let result = (0..1000).find_map(|_| job.advance(&target, -errno)).expect("bounded");
        assert_eq!(result.expect_err("failed").kind(), ErrorKind::Backing);
    }
}

#[test]
fn a_write_that_transfers_no_byte_fails_after_a_bounded_number_of_attempts() {
    let target = target(Kind::File);
    let mut job = write(&target);
    let result = (0..1000).find_map(|_| job.advance(&target, 0)).expect("bounded");
    assert!(result.is_err());
}

#[test]
fn an_error_names_operation_range_device_and_cause() {
    let target = target(Kind::Block);
    let error = write(&target).advance(&target, -libc::EIO).expect("ended").expect_err("failed");
    assert_eq!(error.kind(), ErrorKind::Backing);
    assert_eq!(error.line(), "cannot write bytes 4096..12288 of /dev/sdx: Input/output error (os error 5)");
}

#[test]
fn a_full_file_system_is_a_no_space_error() {
    let target = target(Kind::File);
    for errno in [libc::ENOSPC, libc::EDQUOT] {
        let error = write(&target).advance(&target, -errno).expect("ended").expect_err("failed");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
}

#[test]
fn zeroing_a_file_falls_back_to_a_hole_and_then_to_writing_permanently() {
    let target = target(Kind::File);
    let mut job = zero(&target);
    assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_ZERO_RANGE));
    assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
    assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_PUNCH_HOLE));
    assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
    assert_eq!(job.step(&target), Step::WriteZeroes { at: 0, length: ZERO_PIECE });
    assert_eq!(mode(&zero(&target), &target), None);
}

#[test]
fn a_discard_that_a_block_device_refuses_zeroes_the_range() {
    let target = target(Kind::Block);
    let op = BackingOp::Discard { range: ByteRange::at(0, 4096) };
    let mut job = Job::new(OpToken(1), op, &target);
    assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_PUNCH_HOLE));
    assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
    assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_ZERO_RANGE));
    assert!(job.advance(&target, 0).is_some_and(|result| result.is_ok()));
}

#[test]
fn a_large_range_of_a_disk_is_zeroed_in_pieces() {
    let target = target(Kind::Block);
    let op = BackingOp::WriteZeroes { range: ByteRange::at(0, 3 * BLOCK_PIECE) };
    let mut job = Job::new(OpToken(1), op, &target);
    assert!(job.advance(&target, 0).is_none() && job.advance(&target, 0).is_none());
    assert!(job.advance(&target, 0).is_some_and(|result| result.is_ok()));
}

#[test]
fn a_verification_reads_pieces_and_continues_after_a_short_read() {
    let target = target(Kind::Block);
    let range = ByteRange::at(4096, LOOK_PIECE + 8192);
    let mut job = Job::new(OpToken(1), BackingOp::Verify { range }, &target);
    assert_eq!(job.step(&target), Step::Look { at: 4096, length: LOOK_PIECE as usize });
    assert!(job.advance(&target, 512 + 100).is_none());
    assert_eq!(job.step(&target), Step::Look { at: 4608, length: LOOK_PIECE as usize });
    assert!(job.advance(&target, LOOK_PIECE as i32).is_none());
    assert_eq!(job.step(&target), Step::Look { at: 4608 + LOOK_PIECE, length: 8192 - 512 });
    assert!(job.advance(&target, 8192 - 512).is_some_and(|result| result.is_ok()));
}

#[test]
fn a_verification_names_the_piece_that_cannot_be_read() {
    let target = target(Kind::Block);
    let range = ByteRange::at(0, 2 * LOOK_PIECE);
    let mut job = Job::new(OpToken(1), BackingOp::Verify { range }, &target);
    assert!(job.advance(&target, LOOK_PIECE as i32).is_none());
    let error = job.advance(&target, -libc::EIO).expect("ended").expect_err("failed");
    assert_eq!(error.kind(), ErrorKind::Backing);
    assert_eq!(error.range(), Some(ByteRange::at(LOOK_PIECE, LOOK_PIECE)));
}

#[test]
fn a_comparison_names_the_first_sectors_that_differ() {
    let target = target(Kind::Block);
    let range = ByteRange::at(8192, 4096);
    let expected = Expected::Bytes(AlignedBuffer::from_slice(&[7; 4096]));
    let mut job = Job::new(OpToken(1), BackingOp::Compare { range, expected }, &target);
    job.scratch(4096).fill(7);
    assert!(job.advance(&target, 1024).is_none(), "what was read is as expected");
    job.scratch(3072).fill(7);
    job.scratch(3072)[513] = 8;
    let error = job.advance(&target, 3072).expect("ended").expect_err("it differs");
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_eq!(error.range(), Some(ByteRange::at(8192 + 1024 + 512, 512)));
    assert_eq!(error.line(), "bytes 9728..10240 of /dev/sdx are not the expected content");
}

/// A disk that verifies and compares pieces of 1 MiB in itself.
fn with_commands() -> Target {
    let mut target = target(Kind::Block);
    let device = Arc::new(Device { verify_limit: Some(8), ..Device::nvme() });
    target.commands = RwLock::new(Arc::new(device.commands(&target, Offload::On, 0)));
    target
}

#[test]
fn a_device_verifies_pieces_within_its_limit() {
    let target = with_commands();
    let op = BackingOp::Verify { range: ByteRange::at(4096, (1 << 20) + 512) };
    let mut job = Job::new(OpToken(1), op, &target);
    assert!(job.blocks());
    assert_eq!(job.step(&target), Step::Command { at: 4096, skip: 0, length: 1 << 20 });
    assert!(job.advance(&target, 1 << 20).is_none());
    assert_eq!(job.step(&target), Step::Command { at: 4096 + (1 << 20), skip: 1 << 20, length: 512 });
    assert!(job.advance(&target, 512).is_some_and(|result| result.is_ok()));
}

#[test]
fn what_may_come_from_the_page_cache_is_said() {
    let target = target(Kind::File);
    assert_eq!(target.verify_method(), "reads (it has none)");
    let target = Target { buffered: Some("the file system refuses direct I/O".to_owned()), ..target };
    let text = "reads (it has none), through the page cache (the file system refuses direct I/O): what is in memory \
                is not read from the disk";
    assert_eq!(target.verify_method(), text);
    let buffered = Some("the device refuses direct I/O".to_owned());
    let text = Target { buffered, ..with_commands() }.verify_method();
    assert!(
        text.starts_with("NVMe Verify; comparisons: NVMe Compare; reads in their place go through the page"),
        "{text}"
    );
}

#[test]
fn a_media_error_of_a_device_is_the_result() {
    let target = with_commands();
    let range = ByteRange::at(4096, 8192);
    let mut job = Job::new(OpToken(1), BackingOp::Verify { range }, &target);
    let error = job.advance(&target, UNREADABLE).expect("ended").expect_err("unreadable");
    assert_eq!((error.kind(), error.range()), (ErrorKind::Backing, Some(range)));
}

#[test]
fn a_command_that_fails_is_replaced_by_a_read_from_the_same_place() {
    let target = with_commands();
    let mut job = Job::new(OpToken(1), BackingOp::Verify { range: ByteRange::at(0, 2 << 20) }, &target);
    assert!(job.advance(&target, 1 << 20).is_none());
    assert!(job.advance(&target, NOT_POSSIBLE).is_none());
    assert!(!job.blocks());
    assert_eq!(job.step(&target), Step::Look { at: 1 << 20, length: 1 << 20 });
    assert!(job.advance(&target, 1 << 20).is_some_and(|result| result.is_ok()));
}

#[test]
fn a_read_confirms_what_a_device_reports_as_different() {
    let target = with_commands();
    for (read, found) in [(0, None), (9, Some(ByteRange::at(4096, 512)))] {
        let range = ByteRange::at(4096, 512);
        let op = BackingOp::Compare { range, expected: Expected::Zeroes };
        let mut job = Job::new(OpToken(1), op, &target);
        assert!(job.advance(&target, DIFFERS).is_none());
        job.scratch(512).fill(read);
        let result = job.advance(&target, 512).expect("ended");
        assert_eq!(result.err().and_then(|error| error.range()), found);
    }
}
