//! Backing devices that are not what they were when the daemon stopped.

use super::support::MIB;
use super::{fixture_with_backend, refused};

/// Stops the daemon, changes the disk, and restarts the daemon: until the disk is restored, the backend is not served,
/// for a reason that contains `parts`.
#[track_caller]
fn expect_not_served(swap: impl Fn(&str, &str), parts: &[&str]) {
    let (mut fixture, disk) = fixture_with_backend();
    fixture.client().write(0, &[9; 65536], true).expect("written");
    fixture.terminate();
    let aside = fixture.text("aside");
    swap(&disk, &aside);
    fixture.start();
    let backend = fixture.json(&["backend-list"])[0].clone();
    let reason = backend["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(backend["alive"], false, "{backend}");
    for part in [&[disk.as_str()], parts].concat() {
        assert!(reason.contains(part), "{part:?} is not in: {reason}");
    }
    assert!(fixture.ok(&["status"]).contains(&reason), "the status has the reason");
    refused(&fixture, &["drain", "-b", "0"], &["backend 0"], &[]);
    refused(&fixture, &["backend-stop", "-b", "0"], &["backend 0", "dirty"], &[]);
    fixture.terminate();
    let _ = std::fs::remove_file(&disk);
    std::fs::rename(&aside, &disk).expect("the disk is back");
    let file = std::fs::File::options().write(true).open(&disk).expect("the disk");
    let was_cut = file.metadata().expect("its size").len() < 32 * MIB;
    if was_cut {
        file.set_len(32 * MIB).expect("its size is back");
    }
    fixture.start();
    if was_cut {
        // That was a change of its content, and the user decides.
        let reason = fixture.json(&["backend-list"])[0]["error"].to_string();
        assert!(reason.contains("was written while no daemon served it"), "{reason}");
        fixture.ok(&["backend-start", "-p", &disk, "--changed-disk"]);
    }
    let mut data = [0; 65536];
    fixture.client().read(0, &mut data).expect("it is served again");
    assert_eq!(data, [9; 65536]);
    fixture.ok(&["backend-stop", "-b", "0"]);
}

#[test]
fn an_exchanged_backing_device_is_refused_with_both_identities() {
    let swap = |disk: &str, aside: &str| {
        std::fs::rename(disk, aside).expect("renamed");
        std::fs::write(disk, vec![0; 32 << 20]).expect("another disk");
    };
    expect_not_served(swap, &["recorded [file size=", "found [file size=", "inode"]);
}

#[test]
fn a_shrunk_backing_device_is_refused() {
    let swap = |disk: &str, aside: &str| {
        std::fs::rename(disk, aside).expect("renamed");
        std::fs::hard_link(aside, disk).expect("the same file");
        let file = std::fs::File::options().write(true).open(disk).expect("the disk");
        file.set_len(31 * MIB).expect("shrunk");
    };
    expect_not_served(swap, &[&(32 * MIB).to_string(), &(31 * MIB).to_string()]);
}

#[test]
fn a_missing_backing_device_is_refused() {
    expect_not_served(|disk, aside| std::fs::rename(disk, aside).expect("renamed"), &["does not exist"]);
}
