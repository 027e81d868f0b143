//! Backends whose backing device has become larger.

use crate::fixture::{Fixture, MIB};
use cbd_daemon::api::StartBackend;
use cbd_daemon::control::Control;
use cbd_types::ErrorKind;

fn set_size(disk: &str, size: u64) {
    std::fs::OpenOptions::new().write(true).open(disk).and_then(|file| file.set_len(size)).unwrap();
}

#[test]
fn clients_that_connect_behind_the_growth_see_the_new_size_and_the_others_keep_theirs() {
    for cache_size in [None, Some(16 * MIB)] {
        let fixture = Fixture::new();
        let disk = fixture.disk("disk", 8 * MIB);
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &StartBackend { cache_size, ..fixture.backend(&disk) }).unwrap();
        let mut before = fixture.client();
        before.write(0, &[1; 4096], true).unwrap();
        set_size(&disk, 24 * MIB);
        let grown = daemon.grow_backend(0, 0).unwrap();
        assert_eq!(
            (grown.before, grown.now, grown.backend_path.as_str()),
            (8 * MIB, 24 * MIB, disk.as_str())
        );
        let [blkdev] = grown.blkdevs.as_slice() else { panic!("{grown:?}") };
        assert!(
            !blkdev.is_seen && blkdev.pending.as_ref().is_some_and(|when| when.contains("connect again"))
        );
        // The client that knew the former size is served within it, and refused beyond it.
        before.write(8 * MIB - 4096, &[2; 4096], false).unwrap();
        assert_eq!(before.write(8 * MIB, &[3; 4096], false).unwrap_err().kind(), ErrorKind::NoSpace);
        let mut after = fixture.client();
        assert_eq!((before.size(), after.size()), (8 * MIB, 24 * MIB));
        after.write(24 * MIB - 4096, &[4; 4096], true).unwrap();
        assert_eq!(daemon.backends(0, false).unwrap()[0].size, 24 * MIB);
        // Nothing is larger now.
        let again = daemon.grow_backend(0, 0).unwrap();
        assert_eq!((again.before, again.now), (24 * MIB, 24 * MIB));
        assert!(again.blkdevs.iter().all(|blkdev| blkdev.is_seen), "{again:?}");
        drop((before, after, daemon));
        let daemon = fixture.daemon();
        let mut client = fixture.client();
        assert_eq!((client.size(), daemon.backends(0, false).unwrap()[0].size), (24 * MIB, 24 * MIB));
        for (at, value) in [(0, 1), (8 * MIB - 4096, 2), (24 * MIB - 4096, 4)] {
            let mut data = [0; 4096];
            client.read(at, &mut data).unwrap();
            assert_eq!(data, [value; 4096], "at {at}");
        }
    }
}

#[test]
fn a_disk_that_grew_while_no_daemon_ran_keeps_its_size_and_its_warning_until_the_command() {
    let fixture = Fixture::new();
    let disk = fixture.disk_left_with_a_block();
    set_size(&disk, 16 * MIB);
    let daemon = fixture.daemon();
    let has_warning = || {
        let status = daemon.status().unwrap();
        status.transports[0].backends[0].warnings.iter().any(|warning| warning.contains("backend-grow"))
    };
    assert!(has_warning());
    assert_eq!(fixture.client().size(), 8 * MIB);
    let grown = daemon.grow_backend(0, 0).unwrap();
    assert_eq!((grown.before, grown.now), (8 * MIB, 16 * MIB));
    assert!(!has_warning());
    assert_eq!(fixture.client().size(), 16 * MIB);
    fixture.block_is_there();
}

#[test]
fn a_disk_that_has_shrunk_or_is_not_up_or_not_there_does_not_grow() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    daemon
        .drain(0, &cbd_daemon::api::Drain { wait: true, ..Default::default() }, &mut |_| {
            cbd_daemon::control::Flow::Continue
        })
        .unwrap();
    set_size(&disk, 4 * MIB);
    let error = daemon.grow_backend(0, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
    assert!(error.line().contains(&disk) && error.line().contains("has shrunk"), "{error}");
    assert_eq!(daemon.backends(0, false).unwrap()[0].size, 8 * MIB);
    fixture.block_is_there();
    assert_eq!(daemon.grow_backend(0, 7).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(daemon.grow_backend(5, 0).unwrap_err().kind(), ErrorKind::NotFound);
    drop(daemon);
    let daemon = fixture.daemon();
    let error = daemon.grow_backend(0, 0).unwrap_err();
    assert!(error.kind() == ErrorKind::Stopped && error.line().contains("is not up"), "{error}");
}
