//! Modes of a cache: what is on the disk when a flush has completed, changes of the mode, and what a restart keeps.

use crate::fixture::{Fixture, MIB, Running, cache_of, refused};
use cbd_daemon::api::{AttachCache, CacheMode, Done, SettingsChange, StartBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_types::ErrorKind;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Far above the expected duration of each wait.
const TIMEOUT: Duration = Duration::from_secs(60);

fn block_on(disk: &str, number: u64) -> u8 {
    let mut block = [0; 4096];
    std::fs::File::open(disk).unwrap().read_exact_at(&mut block, number * 4096).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]), "block {number} is torn");
    block[0]
}

fn change(mode: CacheMode) -> SettingsChange {
    SettingsChange { cache_mode: Some(mode), ..SettingsChange::default() }
}

/// Waits until the mode of backend 0 is in force; returns it.
fn settled(daemon: &Running) -> CacheMode {
    let begun = Instant::now();
    loop {
        let status = daemon.status().unwrap();
        let cache = status.transports[0].backends[0].cache.as_ref().unwrap();
        if !cache.is_changing_mode {
            return cache.settings.cache_mode;
        }
        assert!(begun.elapsed() < TIMEOUT, "the mode is not in force: {cache:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_cache_that_is_attached_has_its_mode_from_its_first_write_on() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    let bare = StartBackend { cache_size: None, ..fixture.backend(&disk) };
    daemon.start_backend(0, &bare).unwrap();
    let request = |cache_size, cache_mode| AttachCache { cache_size, cache_mode, ..AttachCache::default() };
    let through = Some(CacheMode::Writethrough);
    refused(daemon.attach_cache(0, 0, &request(1 << 40, through)), ErrorKind::NoSpace, "free space");
    let detach = || daemon.detach_cache(0, 0, &Default::default(), &mut |_| Flow::Continue).unwrap();
    let warns = |done: Done| done.warnings.iter().any(|warning| warning.contains("cache_mode=writethrough"));
    assert!(warns(daemon.attach_cache(0, 0, &request(10 * MIB, None)).unwrap()));
    assert_eq!(cache_of(&daemon).settings.cache_mode, CacheMode::Writeback, "what was refused left nothing");
    refused(daemon.attach_cache(0, 0, &request(10 * MIB, through)), ErrorKind::AlreadyExists, "has a cache");
    assert_eq!(cache_of(&daemon).settings.cache_mode, CacheMode::Writeback);
    detach();
    assert!(!warns(daemon.attach_cache(0, 0, &request(10 * MIB, through)).unwrap()));
    let mut client = fixture.client();
    client.write(0, &[5; 4096], true).unwrap();
    assert_eq!((block_on(&disk, 0), cache_of(&daemon).dirty_bytes), (5, 0));
    drop(client);
    detach();
    daemon.attach_cache(0, 0, &request(10 * MIB, None)).unwrap();
    assert_eq!(cache_of(&daemon).settings.cache_mode, CacheMode::Writethrough, "it is the backend's");
}

#[test]
fn what_a_flush_has_covered_is_on_the_disk_and_the_mode_survives_restarts() {
    for mode in [CacheMode::Writethrough, CacheMode::Writearound, CacheMode::Passthrough] {
        let fixture = Fixture::new();
        let disk = fixture.disk("disk", 8 * MIB);
        let daemon = fixture.daemon_with_region();
        let request = StartBackend { cache_mode: Some(mode), ..fixture.backend(&disk) };
        let started = daemon.start_backend(0, &request).unwrap();
        assert!(started.warnings.iter().all(|warning| !warning.contains("writethrough")), "{started:?}");
        assert_eq!(settled(&daemon), mode);
        let mut daemon = Some(daemon);
        for round in 1..=3 {
            let mut client = fixture.client();
            for number in 0..64 {
                client.write(number * 4096, &[round; 4096], false).unwrap();
            }
            client.flush().unwrap();
            assert!((0..64).all(|number| block_on(&disk, number) == round), "{mode:?}, round {round}");
            client.write(100 * 4096, &[round; 4096], true).unwrap();
            assert_eq!(block_on(&disk, 100), round, "{mode:?}: a FUA write");
            let mut data = [0; 4096];
            client.read(7 * 4096, &mut data).unwrap();
            assert_eq!(data, [round; 4096]);
            drop(client);
            drop(daemon.take());
            daemon = Some(fixture.daemon());
            assert_eq!(daemon.as_ref().map(settled), Some(mode));
        }
    }
}

#[test]
fn what_is_not_cached_is_read_as_it_is_on_the_disk() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    let request = StartBackend { cache_mode: Some(CacheMode::Writearound), ..fixture.backend(&disk) };
    daemon.start_backend(0, &request).unwrap();
    let behind = |byte: u8| {
        let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
        file.write_all_at(&[byte; 4096], 0).unwrap();
        file.sync_all().unwrap();
    };
    let read = || {
        let mut data = [0; 4096];
        fixture.client().read(0, &mut data).unwrap();
        data[0]
    };
    fixture.client().write(0, &[1; 4096], true).unwrap();
    behind(2);
    assert_eq!(read(), 2, "written around, so not cached");
    behind(3);
    assert_eq!(read(), 2, "cached by the read");
    fixture.client().write(0, &[4; 4096], true).unwrap();
    assert_eq!(read(), 4, "the write has replaced it");
    daemon.set(0, 0, &change(CacheMode::Passthrough)).unwrap();
    behind(5);
    assert_eq!(read(), 5, "reads go past the cache, too");
}

#[test]
fn status_does_not_promise_what_no_flush_has_covered() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    let request = StartBackend { cache_mode: Some(CacheMode::Writethrough), ..fixture.backend(&disk) };
    daemon.start_backend(0, &request).unwrap();
    let mut client = fixture.client();
    let point =
        || daemon.status().unwrap().transports[0].backends[0].cache.as_ref().unwrap().recovery_point.clone();
    client.write(0, &[1; 4096], false).unwrap();
    assert_eq!(point(), "the backing device alone holds everything that a flush has covered");
    client.flush().unwrap();
    assert_eq!(point(), "the backing device alone holds everything");
}

#[test]
fn the_mode_changes_while_the_cache_is_used() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    let started = daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    assert!(
        started.warnings.iter().any(|warning| warning.contains("cache_mode=writethrough")),
        "{started:?}"
    );
    let modes = [CacheMode::Writethrough, CacheMode::Writeback, CacheMode::Writearound, CacheMode::Writeback];
    let mut client = fixture.client();
    for round in 1..=20_u8 {
        let mode = modes[usize::from(round) % 4];
        for number in 0..200 {
            client.write(number * 4096, &[round; 4096], number % 50 == 0).unwrap();
            if number == 100 {
                daemon.set(0, 0, &change(mode)).unwrap();
            }
        }
        client.flush().unwrap();
        assert_eq!(settled(&daemon), mode);
        if mode != CacheMode::Writeback {
            client.flush().unwrap();
            assert!((0..200).all(|number| block_on(&disk, number) == round), "{mode:?}, round {round}");
        }
        let mut data = [0; 4096];
        client.read(u64::from(round) * 4096, &mut data).unwrap();
        assert_eq!(data, [round; 4096]);
    }
}
