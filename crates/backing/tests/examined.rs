//! Disks and files that are verified while others use them.

mod common;

use cbd_backing::{Backing, BackingFile, Direct, Examined, Offload, Options, identity_of};
use cbd_types::ErrorKind;
use common::{
    LoopDevice, MIB, directory, file, in_time, is_root, is_zero, open, read, run, run_ok, verify, write, zero,
};

#[test]
fn a_file_is_verified_while_it_is_the_backing_device_of_another() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 4 * MIB);
        let backing = open(&path);
        let examined = Examined::open(&path, Offload::Auto).expect("no lock is needed");
        let mut queue = examined.open_queue(4).expect("a queue");
        run_ok(&mut *queue, verify(0, 4 * MIB));
        run_ok(&mut *queue, is_zero(0, 4 * MIB));
        run_ok(&mut *common::queue(&backing, 4), write(MIB, &[1; 4096]));
        let error = run(&mut *queue, is_zero(0, 4 * MIB)).result.expect_err("it differs");
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(run_ok(&mut *queue, read(MIB, 4096))[..], [1; 4096]);
        assert_eq!(examined.method(), "reads (it is a file)");
        drop(backing);
        open(&path);
    });
}

#[test]
fn the_identity_of_a_file_in_use_is_that_of_the_backing_device() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let backing = open(&path);
        assert_eq!(identity_of(&path).expect("it is known"), backing.identity());
        let missing = identity_of(&directory.path().join("none")).expect_err("there is none");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    });
}

#[test]
fn what_the_page_cache_may_answer_is_in_the_method() {
    in_time(|| {
        // sysfs has no direct I/O.
        let examined = Examined::open("/sys/kernel/uevent_seqnum", Offload::Auto).expect("it opens");
        let text = "reads (it is a file), through the page cache (the file system refuses direct I/O): what is in \
                    memory is not read from the disk";
        assert_eq!(examined.method(), text);
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let options = Options { direct: Direct::Never, ..Options::default() };
        let backing = BackingFile::open(&path, options).expect("free to be opened");
        let text = "reads (it is a file), through the page cache (direct I/O is not wanted): what is in memory is not \
                    read from the disk";
        assert_eq!(backing.verify_method(), text);
        drop(backing);
        assert_eq!(open(&path).verify_method(), "reads (it is a file)");
    });
}

#[test]
fn what_is_verified_is_not_changed() {
    in_time(|| {
        let directory = directory();
        let path = directory.path().join("disk");
        std::fs::write(&path, vec![7; MIB as usize + 100]).expect("a file");
        let examined = Examined::open(&path, Offload::On).expect("it opens");
        assert_eq!((examined.geometry().size, examined.unused_tail()), (MIB, 100));
        let mut queue = examined.open_queue(4).expect("a queue");
        for op in [write(0, &[1; 4096]), zero(0, 4096), common::discard(0, 4096)] {
            assert_eq!(run(&mut *queue, op).result.expect_err("refused").kind(), ErrorKind::ReadOnly);
        }
        assert!(std::fs::read(&path).expect("the file").iter().all(|&byte| byte == 7));
    });
}

#[test]
fn what_cannot_be_verified_is_refused_with_the_reason() {
    in_time(|| {
        let directory = directory();
        let pipe = directory.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        let empty = file(directory.path(), "empty", 0);
        let short = file(directory.path(), "short", 100);
        let missing = directory.path().join("missing");
        let cases = [
            (&directory.path().to_path_buf(), ErrorKind::InvalidArgument, "is a directory"),
            (&pipe, ErrorKind::InvalidArgument, "is a FIFO"),
            (&empty, ErrorKind::InvalidArgument, "is empty"),
            (&short, ErrorKind::InvalidArgument, "less than one sector"),
            (&missing, ErrorKind::NotFound, "does not exist"),
        ];
        for (path, kind, text) in cases {
            let error = Examined::open(path, Offload::Auto).expect_err(text);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.line().contains(text), "{error}");
        }
    });
}

#[test]
fn a_block_device_is_verified_while_another_holds_it_exclusively() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let disk = LoopDevice::new(&file(directory.path(), "disk", 4 * MIB), 512, false);
        let backing = open(&disk.path);
        let examined = Examined::open(&disk.path, Offload::On).expect("no claim is needed");
        let mut queue = examined.open_queue(4).expect("a queue");
        run_ok(&mut *queue, verify(0, 4 * MIB));
        run_ok(&mut *queue, is_zero(0, 4 * MIB));
        assert_eq!(examined.method(), "reads (the device is neither an NVMe nor a SCSI disk)");
        drop(backing);
    });
}

#[test]
fn the_permission_for_commands_changes_while_the_device_is_open() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let disk = LoopDevice::new(&file(directory.path(), "disk", 4 * MIB), 512, false);
        let backing = open(&disk.path);
        let mut former = backing.open_queue(4).expect("a queue");
        backing.set_offload(Offload::Never).expect("a device");
        assert_eq!(backing.verify_method(), "reads (the setting offload is never)");
        run_ok(&mut *former, verify(0, 4 * MIB));
        backing.set_offload(Offload::On).expect("a device");
        assert_eq!(backing.verify_method(), "reads (the device is neither an NVMe nor a SCSI disk)");
        run_ok(&mut *backing.open_queue(4).expect("a queue"), verify(0, 4 * MIB));
    });
}
