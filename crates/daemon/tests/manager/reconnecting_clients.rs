//! Clients that disconnect and reconnect: writes of their former connections do not overwrite later ones.

use crate::fixture::{Fixture, MIB, cache_of};
use cbd_daemon::api::{StartBackend, StopBlkdev};
use cbd_daemon::control::Control;
use cbd_testkit::Command;
use std::time::{Duration, Instant};

const LARGE: usize = 256 << 10;

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_write_of_an_ended_connection_does_not_overwrite_one_that_was_acknowledged_since() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    // Slow enough that there is no space while the client reconnects.
    fixture.decorate = Some("throttle:latency_us=1000000".into());
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();

    // The client fills the cache, until a write of it waits for space.
    let mut first = fixture.client();
    let mut written: u64 = 0;
    loop {
        let data = vec![written as u8 % 100 + 1; LARGE];
        first.submit(Command::Write { offset: 0, data: &data, fua: false }).unwrap();
        let mut waits = false;
        until("the write completes or waits", || {
            let cache = cache_of(&daemon);
            waits = cache.writers_waiting;
            waits || cache.written_bytes > written * LARGE as u64
        });
        if waits {
            break;
        }
        first.complete().unwrap().unwrap().result.unwrap();
        written += 1;
    }
    let full = cache_of(&daemon).free_segments;
    // It disconnects, reconnects, and writes newer data.
    drop(first);
    let mut second = fixture.client();
    let mut seen = vec![0; LARGE];
    second.read(0, &mut seen).unwrap();
    let before = seen.clone();
    assert!(!cache_of(&daemon).writers_waiting, "a request of an ended connection waits for space");
    second.write(LARGE as u64, &[200; 4096], true).unwrap();
    second.flush().unwrap();

    // Space is free again.
    until("there is space", || cache_of(&daemon).free_segments > full);
    second.read(0, &mut seen).unwrap();
    assert!(seen == before, "a write of the ended connection took effect after a reply to the new one");
    let mut newer = [0; 4096];
    second.read(LARGE as u64, &mut newer).unwrap();
    assert_eq!(newer, [200; 4096]);
}

#[test]
fn a_client_that_waits_for_requests_of_its_last_connection_is_reported_and_a_forced_stop_ends_its_wait() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    // A disk that completes no write.
    fixture.decorate = Some("fault:op=write,how=stall".into());
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &StartBackend { cache_size: None, ..fixture.backend(&disk) }).unwrap();
    let mut old = fixture.client();
    old.submit(Command::Write { offset: 0, data: &[1; 4096], fua: false }).unwrap();
    // After this reply the disk has received the write.
    old.read(8192, &mut [0; 4096]).unwrap();
    drop(old);
    let mut new = fixture.client();
    new.submit(Command::Read { offset: 0, length: 4096 }).unwrap();
    let note = || daemon.blkdevs(0, false).unwrap()[0].note.clone().unwrap_or_default();
    until("it is shown", || note().contains("an NBD client waits until the backing device"));
    let began = Instant::now();
    daemon.stop_blkdev(0, 0, StopBlkdev { force: true }).unwrap();
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert!(
        new.complete().is_err(),
        "it was answered although the write of the ended connection could still happen"
    );
    assert_eq!(std::fs::read(&disk).unwrap()[..4096], [0; 4096]);
}
