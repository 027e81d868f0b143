use super::*;
use crate::mapper::Line;
use std::os::unix::fs::symlink;

const fn number(minor: u32) -> DeviceNumber {
    DeviceNumber { major: 253, minor }
}

const fn range(start: u64, end: u64) -> ByteRange {
    ByteRange { start, end }
}

/// A tree like `/sys`: mapped devices `dm-0` to `dm-12` over one disk, number 20, with a partition of it, number 21.
fn tree() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, text).expect("written");
    };
    write("devices/disk/dev", "253:20\n");
    write("devices/disk/slaves/.none", "");
    std::fs::remove_file(root.join("devices/disk/slaves/.none")).expect("removed");
    write("devices/disk/part/dev", "253:21\n");
    write("devices/disk/part/partition", "1\n");
    write("devices/disk/part/start", "2048\n");
    write("devices/disk/part/size", "2048\n");
    let node = |minor: u32, at: &str| {
        let link = root.join(format!("dev/block/253:{minor}"));
        std::fs::create_dir_all(link.parent().expect("a parent")).expect("a folder");
        symlink(root.join(at), link).expect("a link");
    };
    node(20, "devices/disk");
    node(21, "devices/disk/part");
    for minor in 0..13 {
        let name = format!("devices/dm-{minor}");
        write(&format!("{name}/dev"), &format!("253:{minor}\n"));
        write(&format!("{name}/dm/name"), "mapped\n");
        std::fs::create_dir_all(root.join(&name).join("slaves")).expect("a folder");
        symlink(root.join("devices/disk"), root.join(&name).join("slaves/disk")).expect("a link");
        node(minor, &name);
    }
    folder
}

/// The tables: 0 to 2 are linear, 1 and 2 overlap; 3 and 4 are of a type that is not known; the table of 5 cannot be
/// read; 6 and 7 are thin; 8 has two parts, before and after the bytes of 9; 10 to 12 are thin, of which 10 and 11 have
/// 0 as their external origin.
fn table(device: DeviceNumber) -> io::Result<Vec<mapper::Target>> {
    let lines: &[(u64, u64, &str, &str)] = match device.minor {
        0 => &[(0, 100, "linear", "253:20 0")],
        1 => &[(0, 100, "linear", "253:20 100")],
        2 => &[(0, 100, "linear", "253:20 150")],
        3 | 4 => &[(0, 100, "raid", "")],
        5 => return Err(io::Error::from_raw_os_error(libc::EACCES)),
        6 => &[(0, 100, "thin", "253:20 1")],
        7 => &[(0, 100, "thin", "253:20 2")],
        10 => &[(0, 50, "thin", "253:30 1 253:0")],
        11 => &[(0, 50, "thin", "253:30 2 253:0")],
        12 => &[(0, 50, "thin", "253:30 3")],
        8 => &[(0, 50, "linear", "253:20 1000"), (50, 50, "linear", "253:20 1100")],
        _ => &[(0, 50, "linear", "253:20 1050")],
    };
    let target = |(start, length, kind, parameters): &(u64, u64, &str, &str)| {
        let (kind, parameters) = ((*kind).to_owned(), (*parameters).to_owned());
        mapper::target(&Line { start: *start, length: *length, kind, parameters })
    };
    Ok(lines.iter().map(target).collect())
}

/// Claims a device of the tree.
fn claim_in(tree: &Path, minor: u32) -> Result<Vec<Claim>> {
    let owner = registry().number();
    let top = PathBuf::from(format!("/dev/dm-{minor}"));
    let sources = Sources { sys: tree.to_owned(), table };
    let mut walk = Walk::new(&top, owner, false, sources);
    walk.run(number(minor))?;
    Ok(walk.found.claims)
}

#[track_caller]
fn refused(tree: &Path, minor: u32, parts: &[&str]) {
    let error = claim_in(tree, minor).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy);
    let line = error.line();
    let process = format!("process {} (", std::process::id());
    assert!(parts.iter().all(|part| line.contains(part)) && line.contains(&process), "{line}");
}

/// Claims bytes of a file on which no lock is possible, and returns the claims and the warnings.
fn claim_without_lock(top: &str, path: &Path, bytes: ByteRange) -> Result<Beneath> {
    // `O_PATH` only names the file: a lock fails with EBADF.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).expect("it opens");
    let status = sys::status(file.as_fd()).expect("a status");
    let object = Object::File(status.device, status.inode);
    let held_object = Arc::new(HeldObject { object, exclusive: true, file: Held::new(file) });
    let owner = registry().number();
    let mut walk = Walk::new(Path::new(top), owner, false, Sources::of_this_system());
    let part = Part {
        device: number(0),
        bytes,
        chain: Chain::new(),
        mapping: None,
        only_read: false,
        unknown: None,
    };
    walk.file(Opened { held_object, status, writable: true }, path, part)?;
    Ok(walk.found)
}

#[test]
fn bytes_of_a_file_that_cannot_be_locked_have_one_user_in_this_process() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let first = claim_without_lock("/dev/loop0", file.path(), range(0, 4096)).expect("free");
    assert_eq!(first.claims.len(), 1);
    let [warning] = &first.warnings[..] else { panic!("{:?}", first.warnings) };
    assert!(warning.contains("/dev/loop0") && warning.contains("cannot be locked"), "{warning}");
    assert!(warning.contains("another process"), "{warning}");
    let error = claim_without_lock("/dev/loop1", file.path(), range(2048, 8192)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.line().contains("for /dev/loop0"), "{error}");
    let other = claim_without_lock("/dev/loop1", file.path(), range(4096, 8192)).expect("other bytes");
    drop(first);
    claim_without_lock("/dev/loop2", file.path(), range(0, 4096)).expect("free again");
    drop(other);
}

#[test]
fn bytes_that_a_backing_device_writes_and_reads_as_an_origin_are_locked_once() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let opened = |exclusive| {
        let file = File::options().read(true).write(true).open(file.path()).expect("it opens");
        let status = sys::status(file.as_fd()).expect("a status");
        let object = Object::File(status.device, status.inode);
        let held_object = Arc::new(HeldObject { object, exclusive, file: Held::new(file) });
        Opened { held_object, status, writable: true }
    };
    let owner = registry().number();
    let mut walk = Walk::new(Path::new("/dev/dm-0"), owner, false, Sources::of_this_system());
    let part = |bytes, only_read| {
        let (device, chain) = (number(0), Chain::new());
        Part { device, bytes, chain, mapping: None, only_read, unknown: None }
    };
    walk.file(opened(true), file.path(), part(range(0, 8192), false)).expect("free");
    walk.file(opened(false), file.path(), part(range(4096, 8192), true)).expect("its own");
    walk.file(opened(false), file.path(), part(range(8192, 9000), true)).expect("free");
    assert_eq!(walk.found.claims.len(), 2);
    assert!(walk.found.warnings.is_empty(), "{:?}", walk.found.warnings);
    let lock = |exclusive, bytes| opened(exclusive).held_object.file.lock(exclusive, bytes).is_ok();
    assert!(!lock(false, range(4096, 8192)));
    assert!(lock(false, range(8192, 9000)) && !lock(true, range(8192, 9000)), "it is shared");
}

/// One test, since all tests share the registry of the process.
#[test]
fn mapped_devices_exclude_each_other_where_their_tables_overlap_or_are_not_known() {
    let tree = tree();
    let tree = tree.path();
    // Disjoint devices are both claimed; overlapping ones are refused with the user.
    let (first, second) = (claim_in(tree, 0).expect("free"), claim_in(tree, 1).expect("free"));
    refused(tree, 2, &["/dev/disk", "for /dev/dm-1"]);
    // A device of an unknown type counts as using all bytes, and so does one whose table cannot be read; the message
    // says so.
    refused(tree, 3, &["for /dev/dm-0", "of type raid"]);
    refused(tree, 5, &["its table cannot be read (Permission denied"]);
    drop((first, second));
    let raid = claim_in(tree, 3).expect("free");
    refused(tree, 4, &["for /dev/dm-3", "of type raid"]);
    refused(tree, 0, &["for /dev/dm-3"]);
    drop(raid);
    // Two thin devices share their pool, and no other device does.
    let thin = [claim_in(tree, 6).expect("free"), claim_in(tree, 7).expect("free")];
    refused(tree, 6, &["for /dev/dm-6"]);
    refused(tree, 0, &["for /dev/dm-"]);
    drop(thin);
    // Thin devices share a common external origin, and no other device may write the bytes that they read.
    let thin = [claim_in(tree, 10).expect("free"), claim_in(tree, 11).expect("free")];
    refused(tree, 0, &["for /dev/dm-1"]);
    let others = [1, 12].map(|minor| claim_in(tree, minor).expect("other bytes"));
    drop((thin, others));
    let origin = claim_in(tree, 0).expect("free");
    refused(tree, 10, &["/dev/disk", "for /dev/dm-0"]);
    claim_in(tree, 12).expect("it has no origin");
    drop(origin);
    // A device of two parts does not use the bytes between them.
    let around = claim_in(tree, 8).expect("free");
    assert_eq!(around.iter().filter(|claim| claim.mapping.is_some()).count(), 2);
    let between = claim_in(tree, 9).expect("free");
    refused(tree, 8, &["for /dev/dm-8"]);
    drop((around, between));
    // A partition of the disk, and a device that is mapped to it.
    let partition = claim_in(tree, 21).expect("free");
    claim_in(tree, 0).expect("it lies before the partition");
    refused(tree, 20, &["for /dev/dm-21"]);
    drop(partition);
    claim_in(tree, 20).expect("free");
}

#[test]
fn bytes_of_a_mapped_device_are_translated_by_its_table() {
    let tree = tree();
    let sources = Sources { sys: tree.path().to_owned(), table: |_| table(number(8)) };
    let mut walk = Walk::new(Path::new("/dev/dm-8"), 0, false, sources);
    let mapping = Some(Mapping { top: WHOLE, at: 0 });
    let part = Part {
        device: number(8),
        bytes: WHOLE,
        chain: Chain::new(),
        mapping,
        only_read: false,
        unknown: None,
    };
    walk.visit(part).expect("nothing is claimed yet");
    let mut found: Vec<_> = walk.next.iter().map(|part| (part.bytes, part.mapping)).collect();
    found.sort_by_key(|(bytes, _)| bytes.start);
    let sectors = |start: u64, end: u64| range(start * 512, end * 512);
    let expected = |top, at: u64| Some(Mapping { top, at: at * 512 });
    assert_eq!(
        found,
        [
            (sectors(1000, 1050), expected(sectors(0, 50), 1000)),
            (sectors(1100, 1150), expected(sectors(50, 100), 1100)),
        ]
    );
}

#[test]
fn a_range_of_a_partition_is_translated_to_the_disk() {
    assert_eq!(within(WHOLE, 0, u64::MAX), WHOLE);
    assert_eq!(within(WHOLE, 1024, 4096), range(1024, 5120));
    // A partition of a loop device that begins in its file.
    assert_eq!(within(within(WHOLE, 512, 1024), 4096, u64::MAX), range(4608, 5632));
    // A partition that claims to be longer than its disk.
    assert_eq!(within(range(1024, 9999), 0, 2048), range(1024, 2048));
    assert_eq!(within(range(4096, 8192), 0, 2048), range(2048, 2048));
}
