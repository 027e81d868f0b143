//! A checkpoint of two backends at one moment: where their disks are then, for how long, and what is refused.

use crate::fixture::{Fixture, MIB, Running, refused};
use cbd_daemon::api::{
    CommonCheckpoint, Consistency, Done, Drain, SettingsChange, StartBackend, StopBackend, WhenFull,
};
use cbd_daemon::control::{Control, Flow};
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::{ErrorKind, Result};
use std::time::{Duration, Instant};

/// Two disks of 8 MiB with a cache each, and their clients.
struct Two {
    fixture: Fixture,
    daemon: Running,
    disks: [String; 2],
    clients: [Client; 2],
}

impl Two {
    fn new() -> Self {
        Self::decorated(None)
    }

    fn decorated(decorate: Option<&str>) -> Self {
        let mut fixture = Fixture::new();
        fixture.decorate = decorate.map(str::to_owned);
        let daemon = fixture.daemon();
        daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
        let disks = ["disk0", "disk1"].map(|name| fixture.disk(name, 8 * MIB));
        for (number, disk) in disks.iter().enumerate() {
            let export = Some(format!("nbd:unix:{}", fixture.text(&format!("nbd{number}.sock"))));
            daemon.start_backend(0, &StartBackend { export, ..fixture.backend(disk) }).unwrap();
        }
        let clients = [0, 1].map(|number| {
            Client::connect(&Listen::Unix(fixture.path(&format!("nbd{number}.sock")))).unwrap()
        });
        Self { fixture, daemon, disks, clients }
    }

    fn write(&mut self, value: u8) {
        for client in &mut self.clients {
            client.write(0, &[value; 4096], true).unwrap();
        }
    }

    /// What the disks have of the first block.
    fn shown(&self) -> [u8; 2] {
        self.disks.each_ref().map(|disk| std::fs::read(disk).unwrap()[0])
    }

    fn together(&self, backends: &[u32], hold_s: u32) -> Result<Done> {
        let request =
            CommonCheckpoint { backends: backends.to_vec(), hold_s: Some(hold_s), timeout_s: Some(2) };
        self.daemon.checkpoint_together(0, &request, &mut |_| Flow::Continue)
    }

    fn set(&self, backend: u32, change: SettingsChange) {
        self.daemon.set(0, backend, &change).unwrap();
    }

    /// Waits until the disks have this in their first block.
    fn until_shown(&self, value: u8) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.shown() != [value; 2] {
            assert!(Instant::now() < end, "the disks have {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Ends a pause.
fn on() -> SettingsChange {
    SettingsChange { writeback_pause_s: Some(0), ..SettingsChange::default() }
}

#[test]
fn the_disks_stay_at_the_moment_until_writeback_is_on_again() {
    let mut two = Two::new();
    two.write(1);
    let done = two.together(&[0, 1], 600).unwrap();
    let moment = done.moment.expect("a moment");
    assert!((590_000..=601_000).contains(&(moment.held_until_ms - moment.at_ms)), "{moment:?}");
    assert_eq!(two.shown(), [1, 1]);
    two.write(2);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(two.shown(), [1, 1], "a second is long enough for writeback otherwise");
    refused(two.together(&[1, 0], 1), ErrorKind::Busy, "backend 1");
    (0..2).for_each(|backend| two.set(backend, on()));
    two.until_shown(2);
    two.together(&[1, 0], 600).unwrap();
}

#[test]
fn the_disks_stay_at_the_moment_as_long_as_was_requested_and_after_the_daemon() {
    let mut two = Two::new();
    two.write(1);
    two.together(&[0, 1], 600).unwrap();
    two.write(2);
    let Two { fixture, daemon, disks, clients } = two;
    drop((clients, daemon));
    let daemon = fixture.daemon();
    std::thread::sleep(Duration::from_millis(1500));
    let shown = disks.each_ref().map(|disk| std::fs::read(disk).unwrap()[0]);
    assert_eq!(shown, [1, 1], "the pause is in the region");
    for backend in 0..2 {
        daemon.set(0, backend, &on()).unwrap();
    }
    daemon.drain(0, &Drain { wait: true, ..Drain::default() }, &mut |_| Flow::Continue).unwrap();
    assert_eq!(disks.each_ref().map(|disk| std::fs::read(disk).unwrap()[0]), [2, 2]);

    let mut two = Two::new();
    two.write(1);
    two.together(&[0, 1], 1).unwrap();
    two.write(2);
    two.until_shown(2);
}

#[test]
fn a_drain_ends_the_moment_of_its_backend() {
    let mut two = Two::new();
    two.write(1);
    two.together(&[0, 1], 600).unwrap();
    two.write(2);
    let drain = Drain { backend: Some(0), wait: true, timeout_s: Some(20), ..Drain::default() };
    two.daemon.drain(0, &drain, &mut |_| Flow::Continue).unwrap();
    assert_eq!(two.shown(), [2, 1]);
}

#[test]
fn a_member_that_does_not_drain_ends_the_command_and_holds_nothing_up() {
    let mut two = Two::decorated(Some("fault:op=write"));
    two.clients[1].write(0, &[1; 4096], true).unwrap();
    let error = two.together(&[0, 1], 600).unwrap_err();
    assert!(error.line().starts_with("backend 1 could not be drained"), "{error}");
    let status = two.daemon.status().unwrap();
    let paused = status.transports[0]
        .backends
        .iter()
        .map(|backend| backend.cache.as_ref().expect("a cache").settings.writeback_paused_until_ms);
    assert_eq!(paused.collect::<Vec<_>>(), [0, 0]);
    two.clients[0].write(0, &[2; 4096], true).unwrap();
    refused(two.together(&[0, 1], 600), ErrorKind::Backing, "could not be drained");
}

#[test]
fn a_client_that_disconnects_ends_the_command() {
    let mut two = Two::decorated(Some("fault:op=write"));
    two.write(1);
    let request = CommonCheckpoint { backends: vec![0, 1], ..CommonCheckpoint::default() };
    let ended = two.daemon.checkpoint_together(0, &request, &mut |_| Flow::Cancel);
    refused(ended, ErrorKind::Stopped, "cancelled");
}

#[test]
fn backends_that_cannot_have_a_common_moment_are_refused_with_the_reason() {
    let two = Two::new();
    let invalid = ErrorKind::InvalidArgument;
    refused(two.together(&[], 1), invalid, "two backends or more");
    refused(two.together(&[0], 1), invalid, "two backends or more");
    refused(two.together(&[0, 1, 0], 1), invalid, "backend 0 is named twice");
    refused(two.together(&[0, 7], 1), ErrorKind::NotFound, "backend 7");
    refused(two.together(&[0, 1], 0), invalid, "1 to 604800 seconds");
    two.set(1, SettingsChange { consistency: Some(Consistency::None), ..SettingsChange::default() });
    refused(two.together(&[0, 1], 1), invalid, "backend 1: with consistency=none");
    two.set(1, SettingsChange { consistency: Some(Consistency::Checkpoint), ..SettingsChange::default() });
    two.set(0, SettingsChange { when_full: Some(WhenFull::Around), ..SettingsChange::default() });
    refused(two.together(&[0, 1], 1), invalid, "backend 0: its settings let writes go past the cache");
    two.set(0, SettingsChange { when_full: Some(WhenFull::Wait), ..SettingsChange::default() });
    two.set(1, SettingsChange { writeback_pause_s: Some(60), ..SettingsChange::default() });
    refused(two.together(&[0, 1], 1), ErrorKind::Busy, "cbdctrl set -b 1 writeback=on");
    two.set(1, on());
    two.together(&[0, 1], 1).unwrap();
    let plain = two.fixture.disk("disk2", 8 * MIB);
    let uncached =
        StartBackend { cache_size: None, start_dev: false, export: None, ..two.fixture.backend(&plain) };
    let id = two.daemon.start_backend(0, &uncached).unwrap();
    refused(two.together(&[2, 0], 1), invalid, "backend 2 has no cache");
    drop(id);
    two.daemon.stop_backend(0, 2, &StopBackend::default(), &mut |_| Flow::Continue).unwrap();
}
