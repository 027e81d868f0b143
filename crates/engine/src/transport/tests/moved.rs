//! Backends that were moved to another disk, and caches that were emptied.

use super::*;

#[test]
fn a_moved_backend_remembers_its_former_disks_the_last_one_first() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    assert_eq!(transport.former_disk(id), None);
    let move_to = |number: u64, name: &str| {
        transport.environment.set_wall(WALL_MS + number);
        transport.move_backend(id, &format!("/dev/{name}"), name)
    };
    move_to(1, "b").expect("room");
    let entry = transport.backend(id).expect("it is good");
    assert!(entry.is_moved && entry.path == "/dev/b" && entry.identity == "b");
    let former = transport.former_disk(id).expect("it was moved");
    assert_eq!((former.path.as_str(), former.identity.as_str()), ("/dev/disk", "a disk"));
    assert_eq!(former.moved_ms, WALL_MS + 1);
    move_to(2, "c").expect("room");
    move_to(3, "d").expect("room");
    let names = |transport: &Tested| -> Vec<String> {
        transport.former_disks(id).into_iter().map(|former| former.identity).collect()
    };
    assert_eq!(names(&transport), ["c", "b", "a disk"]);
    assert_eq!(names(&reopened(&transport)), ["c", "b", "a disk"]);
    let error = move_to(4, "e").expect_err("there is no room for a fourth");
    assert!(error.kind() == ErrorKind::NoSpace && error.line().contains("/dev/c, /dev/b, /dev/disk"));
    assert_eq!(transport.backend(id).expect("it is good").identity, "d");
    assert_eq!(kind(transport.forget_former_disk(id, "/dev/x")), Some(ErrorKind::NotFound));
    transport.forget_former_disk(id, "/dev/b").expect("it is one");
    assert_eq!(names(&transport), ["c", "a disk"]);
    move_to(5, "a disk").expect("room");
    assert_eq!(names(&transport), ["d", "c"], "the present disk is none of them");
    transport.settle_backend(id).expect("it is there");
    assert!(!transport.backend(id).expect("it is good").is_moved);
    assert!(transport.former_disks(BackendId(3)).is_empty());
}

#[test]
fn a_former_disk_is_named_by_its_identity_where_several_had_its_path() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    transport.move_backend(id, "/dev/disk", "b").expect("room");
    transport.move_backend(id, "/dev/c", "c").expect("room");
    let error = transport.forget_former_disk(id, "/dev/disk").expect_err("it is not clear which");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.line().contains("2 disks") && error.line().contains("a disk, b"), "{}", error.line());
    transport.forget_former_disk(id, "b").expect("it is one");
    transport.forget_former_disk(id, "/dev/disk").expect("one is left");
    assert_eq!(transport.former_disk(id), None);
}

#[test]
fn a_move_that_is_taken_back_leaves_the_row_as_it_was() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let before = transport.backend(id).expect("it is good");
    transport.move_backend(id, "/dev/b", "b").expect("room");
    transport.move_backend_back(&before).expect("it is there");
    let after = transport.backend(id).expect("it is good");
    assert_eq!(
        (after.path.as_str(), after.identity.as_str(), after.is_moved),
        ("/dev/disk", "a disk", false)
    );
    assert_eq!(transport.former_disk(id), None, "it is the present one");
    transport.move_backend_back(&BackendEntry { is_moved: true, ..before }).expect("it is there");
    assert!(transport.backend(id).expect("it is good").is_moved);
}

#[test]
fn an_emptied_backend_goes_on_in_a_later_epoch_and_stays_moved_if_it_has_a_former_disk() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("room");
    let cache = transport.open_cache(id).expect("it opens");
    (0..5).for_each(|_| drop(cache.flush()));
    let waker = core::task::Waker::noop();
    let _ = cache.write(ByteRange::at(0, 512), &[1; 512], waker).expect("it runs");
    cache.flush().expect("it runs");
    let epoch = cache.status().epoch.0;
    assert_eq!(kind(transport.empty_backend(id)), Some(ErrorKind::Busy));
    drop(cache);
    transport.empty_backend(id).expect("no one uses it");
    assert!(!transport.backend(id).expect("it is good").is_moved);
    assert_eq!(transport.drained(id).map(|drained| drained.0.0), Some(epoch + (1 << 32)));
    let cache = transport.open_cache(id).expect("it opens");
    assert_eq!((cache.status().records, cache.status().free_segments), (0, 8));
    drop(cache);
    transport.move_backend(id, "/dev/b", "b").expect("room");
    transport.empty_backend(id).expect("no one uses it");
    assert!(transport.backend(id).expect("it is good").is_moved);
    transport.settle_backend(id).expect("it is there");
    transport.empty_backend(id).expect("no one uses it");
    assert!(!transport.backend(id).expect("it is good").is_moved);
}
