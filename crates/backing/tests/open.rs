//! Opening, locking, refusing and recognising files and devices.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, BackingFile, Direct, Identity, Kind, Options, check_writable};
use cbd_types::{BackingOp, Error, ErrorKind};
use common::*;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn refused(path: &Path) -> Error {
    BackingFile::open(path, Options::default()).map(|backing| backing.describe()).expect_err("refused")
}

#[track_caller]
fn assert_refused(path: &Path, kind: ErrorKind, words: &str) {
    let error = refused(path);
    assert_eq!(error.kind(), kind, "{error}");
    let line = error.line();
    assert!(line.contains(words) && line.contains(path.to_str().expect("a name")), "{line}");
}

#[test]
fn a_path_to_neither_a_file_nor_a_block_device_is_refused() {
    let directory = directory();
    let fifo = directory.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    assert_refused(directory.path(), ErrorKind::InvalidArgument, "a directory");
    assert_refused(&fifo, ErrorKind::InvalidArgument, "a FIFO");
    assert_refused(Path::new("/dev/null"), ErrorKind::InvalidArgument, "a character device");
}

#[test]
fn a_missing_file_is_not_found() {
    let directory = directory();
    assert_refused(&directory.path().join("none"), ErrorKind::NotFound, "does not exist");
    let inside = file(directory.path(), "disk", MIB).join("none");
    assert_refused(&inside, ErrorKind::NotFound, "does not exist");
}

#[test]
fn a_file_without_a_whole_sector_is_refused() {
    let directory = directory();
    assert_refused(&file(directory.path(), "empty", 0), ErrorKind::InvalidArgument, "0 bytes");
    assert_refused(&file(directory.path(), "small", 511), ErrorKind::InvalidArgument, "511 bytes");
}

#[test]
fn a_file_without_write_bits_is_read_only() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).expect("a mode");
    assert_refused(&path, ErrorKind::ReadOnly, "read-only");
    assert_eq!(unwritable(&path, false), Some(ErrorKind::ReadOnly));
    let options = Options { read_only: true, ..Options::default() };
    BackingFile::open(&path, options).expect("free to be read");
}

/// Why a disk that others may use cannot be written.
fn unwritable(path: &Path, is_ours: bool) -> Option<ErrorKind> {
    check_writable(path, is_ours).err().map(|error| error.kind())
}

#[test]
fn a_file_is_locked_until_the_last_queue_is_dropped() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let backing = open(&path);
    assert_refused(&path, ErrorKind::Busy, "in use");
    assert_eq!((unwritable(&path, false), unwritable(&path, true)), (None, None));
    assert_refused(&path, ErrorKind::Busy, "in use");
    let queue = queue(&backing, 4);
    drop(backing);
    assert_refused(&path, ErrorKind::Busy, "in use");
    drop(queue);
    open(&path);
}

#[test]
fn two_readers_share_a_file_and_a_writer_does_not() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let options = Options { read_only: true, ..Options::default() };
    let first = BackingFile::open(&path, options).expect("free to be read");
    let second = BackingFile::open(&path, options).expect("free to be read");
    assert_refused(&path, ErrorKind::Busy, "in use");
    drop((first, second));
    open(&path);
}

#[test]
fn geometry_of_a_file_is_whole_sectors_with_a_volatile_cache() {
    let directory = directory();
    let geometry = open(&file(directory.path(), "disk", MIB + 700)).geometry();
    assert_eq!(geometry.size % u64::from(geometry.sector), 0);
    assert!(
        geometry.size > MIB - 1 && geometry.volatile_cache && geometry.physical_sector >= geometry.sector
    );
    let buffered = Options { direct: Direct::Never, ..Options::default() };
    let path = file(directory.path(), "other", MIB + 700);
    let geometry = BackingFile::open(path, buffered).expect("free").geometry();
    assert_eq!((geometry.size, geometry.sector), (MIB + 512, 512));
}

#[test]
fn a_recorded_size_limits_a_larger_file_and_refuses_a_smaller_one() {
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let smaller = Options { size: Some(MIB), ..Options::default() };
    assert_eq!(BackingFile::open(&path, smaller).expect("large enough").geometry().size, MIB);
    let larger = Options { size: Some(4 * MIB), ..Options::default() };
    let error = BackingFile::open(&path, larger).map(|_| ()).expect_err("too small");
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
    assert!(error.line().contains("shrunk"), "{error}");
}

#[test]
fn a_file_is_recognised_after_it_was_written_moved_and_opened_again() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let before = Identity::parse(&open(&path).identity().to_token()).expect("a token");
    std::fs::write(&path, vec![1; MIB as usize]).expect("written");
    let moved = directory.path().join("moved");
    std::fs::rename(&path, &moved).expect("moved");
    let now = open(&moved).identity();
    assert_eq!(before.kind(), Kind::File);
    assert!(before.check(&now, &moved).expect("the same file").is_empty());
}

#[test]
fn a_copy_at_the_path_of_a_file_is_refused_with_both_identities() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let before = open(&path).identity();
    let copy = directory.path().join("copy");
    std::fs::copy(&path, &copy).expect("copied");
    std::fs::rename(&copy, &path).expect("exchanged");
    let now = open(&path).identity();
    let error = before.check(&now, &path).expect_err("a copy");
    assert_eq!(error.kind(), ErrorKind::Exchanged);
    let line = error.line();
    assert!(line.contains(&before.to_string()) && line.contains(&now.to_string()), "{line}");
}

#[test]
fn another_disk_is_reported_before_its_size() {
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let recorded = open(&path).identity();
    let options = Options { size: Some(2 * MIB), sector: Some(512), ..Options::default() };
    let (_, warnings) = BackingFile::open_recorded(&path, options, &recorded).expect("the same");
    assert_eq!(warnings, Vec::<String>::new());
    let other = file(directory.path(), "other", MIB);
    let error = BackingFile::open_recorded(&other, options, &recorded).map(|_| ()).expect_err("another");
    assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
    // The refused file is unlocked again.
    open(&other);
}

#[test]
fn a_recorded_sector_stays_in_use() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB + 512);
    let options = |sector| Options { sector: Some(sector), ..Options::default() };
    let geometry = BackingFile::open(&path, options(4096)).expect("larger").geometry();
    assert_eq!((geometry.sector, geometry.size), (4096, MIB));
    let error = BackingFile::open(&path, options(1000)).map(|_| ()).expect_err("no sector");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_truncated_file_is_distinguished_from_an_exchanged_one() {
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let before = open(&path).identity();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(MIB))
        .expect("the file is truncated");
    let error = before.check(&open(&path).identity(), &path).expect_err("too small");
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
}

#[test]
fn a_file_behind_a_loop_device_is_busy() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let device = LoopDevice::new(&path, 512, false);
    assert_refused(&path, ErrorKind::Busy, device.path.to_str().expect("a name"));
    // Through another name, too.
    let link = directory.path().join("link");
    std::fs::hard_link(&path, &link).expect("a link");
    assert_refused(&link, ErrorKind::Busy, "loop device");
    let name = device.path.clone();
    drop(device);
    cbd_testkit::loop_devices::wait_for_release(&name, &path);
    open_again(&path);
}

#[test]
fn a_loop_device_has_its_reported_sectors_and_the_identity_of_its_file() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 4 * MIB);
        let identity = {
            let device = LoopDevice::new(&path, 4096, false);
            let backing = open(&device.path);
            let geometry = backing.geometry();
            assert_eq!((geometry.size, geometry.sector), (4 * MIB, 4096), "{geometry:?}");
            assert_eq!(backing.info().kind, Kind::Block);
            let mut queue = queue(&backing, 8);
            run_ok(&mut *queue, write(4096, &[5; 8192]));
            run_ok(&mut *queue, zero(8192, 4096));
            run_ok(&mut *queue, BackingOp::Flush);
            assert!(run_ok(&mut *queue, read(4096, 4096)).iter().all(|byte| *byte == 5));
            assert!(run_ok(&mut *queue, read(8192, 4096)).iter().all(|byte| *byte == 0));
            assert_eq!(
                run(&mut *queue, write(512, &[5; 512])).result.expect_err("half").kind(),
                ErrorKind::InvalidArgument
            );
            run_ok(&mut *queue, discard(4096, 4096));
            assert!(run_ok(&mut *queue, read(4096, 4096)).iter().all(|byte| *byte == 0));
            backing.identity()
        };
        assert!(!identity.is_weak(), "{identity}");
        // The loop device's number may differ, but it is the same disk.
        let device = LoopDevice::new(&path, 4096, false);
        let options = Options { sector: Some(512), ..Options::default() };
        let error = BackingFile::open(&device.path, options).map(|_| ()).expect_err("other sectors");
        assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
        assert_eq!(identity.same_disk(&open_again(&device.path).identity()), Ok(()));
        let other = LoopDevice::new(&file(directory.path(), "other", 4 * MIB), 4096, false);
        assert!(identity.same_disk(&open(&other.path).identity()).is_err());
    });
}

#[test]
fn a_read_only_block_device_is_refused() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let device = LoopDevice::new(&file(directory.path(), "disk", MIB), 512, true);
    assert_refused(&device.path, ErrorKind::ReadOnly, "");
    assert_eq!(unwritable(&device.path, true), Some(ErrorKind::ReadOnly));
    let options = Options { read_only: true, ..Options::default() };
    BackingFile::open(&device.path, options).expect("free to be read");
}

#[test]
fn a_block_device_is_locked_until_the_last_queue_is_dropped() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let device = LoopDevice::new(&file(directory.path(), "disk", MIB), 512, false);
    let queue = queue(&open(&device.path), 4);
    assert_refused(&device.path, ErrorKind::Busy, "in use");
    assert_eq!(
        (unwritable(&device.path, false), unwritable(&device.path, true)),
        (None, Some(ErrorKind::Busy))
    );
    drop(queue);
    open_again(&device.path);
}

/// A mount in a private namespace, which ends with the child's standard input.
struct Mounted(Child);

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn a_mounted_block_device_is_busy() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB);
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&path).status();
    assert!(made.expect("mkfs.ext4 is installed").success());
    let device = LoopDevice::new(&path, 512, false);
    let script = r#"mount "$1" "$2" && echo mounted && read end"#;
    let mut child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"])
        .args([device.path.as_path(), directory.path()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("unshare");
    let mut answer = String::new();
    let output = child.stdout.take().expect("its output");
    let mounted = Mounted(child);
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut answer).expect("an answer");
    assert_eq!(answer.trim(), "mounted");
    assert_refused(&device.path, ErrorKind::Busy, "in use");
    assert_refused(&path, ErrorKind::Busy, "loop device");
    drop(mounted);
    drop(open_again(&device.path));
    let at = directory.path().join("mount");
    std::fs::create_dir(&at).expect("a directory");
    in_time(move || {
        // If it is mounted in this namespace, the error names the mount point.
        own_mounts();
        assert!(Command::new("mount").arg(&device.path).arg(&at).status().expect("mount").success());
        let words = format!("mounted on {}", at.display());
        assert_refused(&device.path, ErrorKind::Busy, &words);
        assert_refused(&path, ErrorKind::Busy, &words);
    });
}

#[test]
fn a_failing_block_device_is_a_backing_error_with_range_and_path() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let at = directory.path().to_path_buf();
    in_time(move || {
        // The backing file has no space for the write, which a loop device reports as an I/O error.
        own_mounts();
        mount_tmpfs(&at, MIB);
        let device = LoopDevice::new(&file(&at, "disk", 8 * MIB), 512, false);
        let mut queue = queue(&open(&device.path), 4);
        let error = run(&mut *queue, write(4096, &vec![1; 4 << 20])).result.expect_err("broken");
        assert!(matches!(error.kind(), ErrorKind::Backing | ErrorKind::NoSpace), "{error}");
        let line = error.line();
        assert!(line.contains("4096..") && line.contains(device.path.to_str().expect("a name")), "{line}");
    });
}
