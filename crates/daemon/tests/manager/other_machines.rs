//! Regions that another machine has, too: a file in shared memory, into which the test writes the other one's note.

use crate::fixture::{Fixture, MIB, refused};
use cbd_daemon::api::{RegisterTransport, StartBackend};
use cbd_daemon::control::Control;
use cbd_testkit::other_machine::OtherMachine;
use cbd_types::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

const WHO: &str = "host node-elsewhere (process 4242 there)";

/// A file of shared memory for a region.
fn file() -> tempfile::NamedTempFile {
    tempfile::Builder::new().prefix("cbd-test-").tempfile_in("/dev/shm").unwrap()
}

fn request(fixture: &Fixture, path: &Path) -> RegisterTransport {
    RegisterTransport { path: path.to_str().unwrap().to_owned(), ..fixture.region(32 * MIB) }
}

fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_there() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_region_that_a_machine_elsewhere_has_is_refused_until_it_is_released() {
    let (fixture, region) = (Fixture::new(), file());
    let formatted = request(&fixture, region.path());
    drop({
        let daemon = fixture.daemon();
        daemon.register_transport(&formatted).unwrap();
        daemon
    });
    let other = OtherMachine::take(region.path()).unwrap();
    let outside_note = || {
        let mut bytes = std::fs::read(region.path()).unwrap();
        bytes[2048..2048 + 128].fill(0);
        bytes
    };
    let before = outside_note();
    // At the start, by a command, and by a format that would destroy what the other one has.
    let daemon = fixture.daemon();
    let error = || daemon.transports().unwrap()[0].error.clone();
    assert!(error().is_some_and(|error| error.contains(WHO)), "{:?}", error());
    let open = RegisterTransport { format: false, size: None, ..formatted.clone() };
    refused(daemon.register_transport(&open), ErrorKind::Busy, WHO);
    let forced = RegisterTransport { force: true, ..formatted };
    refused(daemon.register_transport(&forced), ErrorKind::Busy, WHO);
    assert!(outside_note() == before, "the region is the other machine's");
    other.release().unwrap();
    daemon.register_transport(&open).unwrap();
    assert_eq!(error(), None);
}

#[test]
fn a_daemon_whose_region_was_taken_meanwhile_stores_nothing_more() {
    let (fixture, region) = (Fixture::new(), file());
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon();
    daemon.register_transport(&request(&fixture, region.path())).unwrap();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    fixture.write_block();
    let mut client = fixture.client();
    let other = OtherMachine::take(region.path()).unwrap();
    let error = || daemon.transports().unwrap()[0].error.clone();
    wait_for("it does not notice that the region was taken", || {
        error().is_some_and(|error| error.contains("another machine has taken the region"))
    });
    assert!(error().is_some_and(|error| error.contains(WHO)), "{:?}", error());
    // The note is renewed by the other one.
    drop(other);
    let before = std::fs::read(region.path()).unwrap();
    let mut data = [0; 4096];
    let (written, read) = (client.write(0, &[7; 4096], true), client.read(0, &mut data));
    assert!(written.is_err() && read.is_err(), "{written:?} {read:?}");
    let other_disk =
        StartBackend { start_dev: false, export: None, ..fixture.backend(&fixture.disk("other", 8 * MIB)) };
    let refused =
        daemon.start_backend(0, &StartBackend { cache_size: Some(9 * MIB), ..other_disk }).unwrap_err();
    assert!(refused.line().contains("another machine has taken the region"), "{refused}");
    drop(daemon);
    assert!(std::fs::read(region.path()).unwrap() == before, "the region is the other machine's");
}
