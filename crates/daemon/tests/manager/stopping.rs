//! Stopping a daemon and its backends while a disk hangs: in bounded time, and at nobody else's expense.

use crate::place::{MIB, Place, refused, stop};
use cbd_daemon::api::{StartBackend, StopBackend};
use cbd_daemon::control::Control;
use cbd_daemon::manager::Manager;
use cbd_nbd::{Client, Listen};
use cbd_types::{BootId, ErrorKind};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Writes to these bytes of a disk do not return.
const HANGS: &str = "fault:op=write,range=4194304-8388608,how=stall";

/// Longest that anything here may take: far more than it does.
const LIMIT: Duration = Duration::from_secs(120);

/// Starts the backends 0 and 1 over the disks "hung" and "disk"; a block of each is dirty or written, and writeback of the first hangs.
fn beside_a_disk_that_hangs(place: &Place, daemon: &Manager) -> String {
    let (hung, disk) = (place.disk("hung", 8 * MIB), place.disk("disk", 8 * MIB));
    let small = |path| StartBackend { cache_size: Some(12 * MIB), ..place.backend(path) };
    let export = Some(format!("nbd:unix:{}", place.text("hung.sock")));
    daemon.start_backend(0, &StartBackend { export, ..small(&hung) }).unwrap();
    daemon.start_backend(0, &small(&disk)).unwrap();
    let mut client = Client::connect(&Listen::Unix(place.path("hung.sock"))).unwrap();
    client.write(5 * MIB, &[7; 4096], true).unwrap();
    place.write_block();
    // When nothing has moved for a second the disk has the write.
    refused(
        stop(daemon, StopBackend { force: true, timeout_s: Some(1), ..StopBackend::default() }),
        ErrorKind::TimedOut,
        "nothing moved",
    );
    hung
}

#[test]
fn a_disk_that_hangs_keeps_no_other_cache_from_being_synced_when_the_daemon_ends() {
    let mut place = Place::new();
    place.boot = Some(BootId([1; 16]));
    place.decorate = Some(HANGS.into());
    let daemon = place.daemon_with_region();
    let hung = beside_a_disk_that_hangs(&place, &daemon);
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(daemon.end().sync()).unwrap());
    let late = told.recv_timeout(LIMIT).expect("it ends in bounded time");
    assert!(late.len() == 1 && late[0].contains("backend 0") && late[0].contains(&hung), "{late:?}");
    // The thread that hangs has the region and its disk as long as this process lives: what the next boot finds are copies.
    for name in ["region", "hung"] {
        std::fs::copy(place.path(name), place.path("copy")).unwrap();
        std::fs::rename(place.path("copy"), place.path(name)).unwrap();
    }
    place.boot = Some(BootId([2; 16]));
    place.decorate = None;
    let daemon = place.daemon();
    let backends = daemon.backends(0, false).unwrap();
    assert_eq!((backends[0].alive, backends[1].alive), (false, true), "{backends:?}");
    place.block_is_there();
}
