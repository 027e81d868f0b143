//! The permitted types of a region, its lock, and that a refusal changes nothing.

mod support;

use cbd_pmem::{CopyMethod, Kind, MINIMUM_SIZE, Mapping, OpenOptions, backing_identity};
use cbd_types::{Durability, ErrorKind, Pmem};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use support::{MIB, create, directory, existing, refusal};

#[test]
fn a_new_region_has_all_its_space_allocated() {
    let directory = directory();
    let path = directory.path().join("region");
    let mapping = Mapping::open(&path, &create(4 * MIB)).expect("made");
    assert_eq!(mapping.len(), 4 * MIB);
    let metadata = fs::metadata(&path).expect("there");
    assert_eq!(metadata.len(), 4 * MIB);
    assert!(metadata.blocks() * 512 >= 4 * MIB);
    assert_eq!(metadata.mode() & 0o777, 0o600);
}

#[test]
fn a_size_is_rounded_up_to_whole_pages() {
    let directory = directory();
    let path = directory.path().join("region");
    assert_eq!(Mapping::open(&path, &create(MIB + 1)).expect("made").len(), MIB + 4096);
    assert_eq!(Mapping::anonymous(MIB + 1).expect("memory").len(), MIB + 4096);
}

#[test]
fn what_was_stored_is_in_the_file() {
    let directory = directory();
    let path = directory.path().join("region");
    let mapping = Mapping::open(&path, &create(MIB)).expect("made");
    mapping.store(512, b"persistent");
    mapping.fence();
    drop(mapping);
    assert_eq!(&fs::read(&path).expect("read")[512..522], b"persistent");
    let mapping = Mapping::open(&path, &existing()).expect("opened again");
    let mut read = [0; 10];
    mapping.load(512, &mut read).expect("memory does not fail");
    assert_eq!(&read, b"persistent");
}

#[test]
fn a_region_without_a_size_is_as_large_as_its_file() {
    let directory = directory();
    let path = directory.path().join("region");
    File::create(&path).and_then(|file| file.set_len(2 * MIB + 100)).expect("made");
    assert_eq!(Mapping::open(&path, &existing()).expect("opened").len(), 2 * MIB);
}

#[test]
fn a_larger_file_is_mapped_whole_whatever_size_is_requested() {
    let directory = directory();
    let path = directory.path().join("region");
    drop(Mapping::open(&path, &create(4 * MIB)).expect("made"));
    assert_eq!(Mapping::open(&path, &create(MIB)).expect("opened").len(), 4 * MIB);
}

#[test]
fn the_holes_of_a_sparse_file_are_filled_and_its_bytes_kept() {
    let directory = directory();
    let path = directory.path().join("region");
    fs::write(&path, b"kept").expect("written");
    File::options().write(true).open(&path).and_then(|file| file.set_len(MIB)).expect("sized");
    drop(Mapping::open(&path, &existing()).expect("opened"));
    assert!(fs::metadata(&path).expect("there").blocks() * 512 >= MIB);
    assert_eq!(&fs::read(&path).expect("read")[..4], b"kept");
}

#[test]
fn a_smaller_file_grows_only_with_the_create_option() {
    let directory = directory();
    let path = directory.path().join("region");
    drop(Mapping::open(&path, &create(MIB)).expect("made"));
    let asked = OpenOptions { size: Some(2 * MIB), ..existing() };
    assert_eq!(refusal(&path, &asked).kind(), ErrorKind::InvalidArgument);
    assert_eq!(fs::metadata(&path).expect("there").len(), MIB);
    assert_eq!(Mapping::open(&path, &create(2 * MIB)).expect("grown").len(), 2 * MIB);
}

#[test]
fn a_region_in_use_is_busy_until_it_is_closed() {
    let directory = directory();
    let path = directory.path().join("region");
    let first = Mapping::open(&path, &create(MIB)).expect("made");
    assert_eq!(refusal(&path, &existing()).kind(), ErrorKind::Busy);
    assert_eq!(refusal(&path, &create(2 * MIB)).kind(), ErrorKind::Busy);
    assert_eq!(fs::metadata(&path).expect("still there").len(), MIB);
    drop(first);
    Mapping::open(&path, &existing()).expect("closed");
}

#[test]
fn a_region_larger_than_the_free_space_is_refused_and_not_left_behind() {
    let directory = directory();
    let path = directory.path().join("region");
    let error = refusal(&path, &create(1 << 50));
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    assert!(error.line().contains("left"), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_file_that_cannot_grow_keeps_its_size_and_bytes() {
    let directory = directory();
    let path = directory.path().join("region");
    fs::write(&path, vec![5; MINIMUM_SIZE as usize]).expect("written");
    assert_eq!(refusal(&path, &create(1 << 50)).kind(), ErrorKind::NoSpace);
    assert_eq!(fs::read(&path).expect("read"), vec![5; MINIMUM_SIZE as usize]);
}

#[test]
fn what_is_needed_of_a_file_that_became_too_large_is_mapped_until_it_can_grow() {
    let directory = directory();
    let path = directory.path().join("region");
    let mapping = Mapping::open(&path, &create(MIB)).expect("made");
    mapping.store(0, b"kept");
    drop(mapping);
    let resize = |size| File::options().write(true).open(&path).and_then(|file| file.set_len(size));
    resize(15 << 40).expect("larger than any file system of a test");
    assert_eq!(refusal(&path, &existing()).kind(), ErrorKind::NoSpace);
    let needed = OpenOptions { needed: Some(MIB), ..existing() };
    for more in [
        OpenOptions { create: true, ..needed.clone() },
        OpenOptions { size: Some(2 * MIB), ..needed.clone() },
        OpenOptions { needed: Some(16 << 40), ..needed.clone() },
    ] {
        assert_eq!(refusal(&path, &more).kind(), ErrorKind::NoSpace, "{more:?}");
    }
    let mapping = Mapping::open(&path, &needed).expect("opened");
    assert_eq!(mapping.len(), MIB);
    assert_eq!(fs::metadata(&path).expect("there").len(), 15 << 40, "it is unchanged");
    let has_warning =
        || mapping.info().warnings.iter().any(|warning| warning.contains("only its first 1048576"));
    assert!(has_warning());
    resize(2 * MIB).expect("cut back");
    mapping.grow(&path, 2 * MIB).expect("there is space");
    assert!(!has_warning());
    let mut read = [0; 4];
    mapping.load(0, &mut read).expect("memory does not fail");
    assert_eq!((mapping.len(), &read), (2 * MIB, b"kept"));
    drop(mapping);
    // Where there is space, all of it is mapped.
    assert_eq!(Mapping::open(&path, &needed).expect("opened").len(), 2 * MIB);
}

#[test]
fn a_missing_region_is_refused_without_the_create_option() {
    let directory = directory();
    let path = directory.path().join("region");
    assert_eq!(refusal(&path, &existing()).kind(), ErrorKind::NotFound);
    assert_eq!(
        refusal(&path, &OpenOptions { create: true, ..existing() }).kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(refusal(&path.join("deeper"), &create(MIB)).kind(), ErrorKind::NotFound);
    assert!(!path.exists());
}

#[test]
fn a_region_below_the_minimum_is_refused() {
    let directory = directory();
    let path = directory.path().join("region");
    let error = refusal(&path, &create(MINIMUM_SIZE - 1));
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.line().contains("at least 64 KiB"), "{error}");
    assert_eq!(MINIMUM_SIZE, 64 << 10);
    assert!(!path.exists());
    fs::write(&path, b"small").expect("written");
    assert_eq!(refusal(&path, &existing()).kind(), ErrorKind::InvalidArgument);
    assert_eq!(fs::read(&path).expect("read"), b"small");
    assert!(Mapping::anonymous(0).is_err());
}

#[test]
fn a_block_device_is_refused_with_the_alternatives() {
    let Some(device) = ["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/loop0"]
        .map(Path::new)
        .into_iter()
        .find(|path| path.exists())
    else {
        return;
    };
    let error = refusal(device, &existing());
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.line().contains("DAX") && error.line().contains("devdax"), "{error}");
}

#[test]
fn a_region_on_a_disk_has_a_warning() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("region");
    let info = Mapping::open(&path, &create(MIB)).expect("made").info();
    if info.kind == Kind::File {
        assert_eq!(info.durability, Durability::ProcessCrash);
        assert!(info.warnings.iter().any(|warning| warning.contains("page cache")), "{:?}", info.warnings);
    }
}

#[test]
fn a_region_in_shared_memory_survives_the_process_and_needs_no_warning() {
    let shared = Path::new("/dev/shm");
    if !shared.is_dir() {
        return;
    }
    let directory = tempfile::tempdir_in(shared).expect("a directory");
    let options = OpenOptions { populate: true, ..create(MIB) };
    let mapping = Mapping::open(directory.path().join("region"), &options).expect("made");
    let info = mapping.info();
    assert_eq!((info.kind, info.durability), (Kind::Tmpfs, Durability::ProcessCrash));
    assert_eq!(info.warnings, Vec::<String>::new());
    assert!(mapping.describe().contains("process-crash"), "{}", mapping.describe());
}

#[test]
fn a_calibrated_mapping_reports_its_method_for_each_size() {
    let info = Mapping::anonymous(MIB).expect("memory").info();
    assert_eq!(info.kind, Kind::Memfd);
    let sizes: Vec<_> = info.methods.iter().map(|method| method.size).collect();
    assert_eq!(sizes, [64, 512, 4096, 64 << 10, 1 << 20]);
    assert!(info.methods.iter().all(|method| method.store_ns.is_some_and(|ns| ns > 0.0)));
}

#[test]
fn a_forced_method_is_used_for_every_size() {
    let info = Mapping::anonymous_with(MIB, Some(CopyMethod::Portable)).expect("memory").info();
    assert!(info.methods.iter().all(|method| method.store == CopyMethod::Portable));
    assert!(info.methods.iter().all(|method| method.store_ns.is_none()));
}

#[test]
fn a_mapping_is_calibrated_only_on_bytes_inside_it() {
    let mut mapping = Mapping::anonymous(8 * MIB).expect("memory");
    mapping.store(0, b"kept");
    assert_eq!(mapping.calibrate(MIB..2 * MIB).expect_err("too small").kind(), ErrorKind::OutOfRange);
    assert_eq!(mapping.calibrate(MIB..9 * MIB).expect_err("outside").kind(), ErrorKind::OutOfRange);
    mapping.calibrate(MIB + 64..8 * MIB).expect("measured");
    let mut read = vec![0; MIB as usize];
    mapping.load(0, &mut read).expect("memory does not fail");
    assert_eq!(&read[..4], b"kept");
    assert!(read[4..].iter().all(|&byte| byte == 0), "nothing before the range was touched");
}

#[test]
fn two_regions_have_different_identities() {
    let directory = directory();
    let (one, other) = (directory.path().join("one"), directory.path().join("other"));
    fs::write(&one, b"").expect("written");
    fs::write(&other, b"").expect("written");
    let identity = |path: &Path| backing_identity(path).expect("known");
    assert_eq!(identity(&one), identity(&one));
    assert_ne!(identity(&one).inode, identity(&other).inode);
}
