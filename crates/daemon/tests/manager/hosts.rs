//! Two daemons whose hosts share a region.

use crate::fixture::{Fixture, MIB, Running, refused};
use crate::played::Played;
use cbd_daemon::api::{
    ClearHost, HostInfo, RegisterTransport, StartBackend, StopBackend, TransportRegistered,
};
use cbd_daemon::control::{Control, Flow};
use cbd_types::{ErrorKind, Result};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The region of both daemons.
pub(crate) struct Shared(tempfile::TempDir);

impl Shared {
    pub(crate) fn new() -> Self {
        Self(tempfile::Builder::new().prefix("cbd-hosts-").tempdir_in("/dev/shm").unwrap())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("region")
    }

    fn registration(&self, host: &str, format: bool) -> RegisterTransport {
        RegisterTransport {
            host: host.into(),
            path: self.path().to_str().unwrap().into(),
            size: format.then_some(64 * MIB),
            segment_size: format.then_some(MIB / 4),
            format,
            force: false,
            shared: format,
        }
    }
}

/// A daemon that is a host of the region.
pub(crate) struct Host {
    pub(crate) daemon: Running,
    pub(crate) fixture: Fixture,
}

impl Host {
    pub(crate) fn join(shared: &Shared, name: &str, format: bool) -> Self {
        let fixture = Fixture::new();
        let daemon = fixture.daemon();
        register(&daemon, &shared.registration(name, format)).unwrap();
        Self { daemon, fixture }
    }

    /// Starts a backend of 8 MiB with a cache of 16 MiB; returns its number.
    fn start(&self) -> u32 {
        let disk = self.fixture.disk("disk", 8 * MIB);
        self.daemon.start_backend(0, &self.fixture.backend(&disk)).unwrap().backend_id
    }

    fn hosts(&self) -> Vec<HostInfo> {
        self.daemon.hosts(0).unwrap()
    }

    /// The numbers of all backends, and of those whether they are this host's.
    fn backends(&self) -> Vec<(u32, bool)> {
        let own = self.daemon.backends(0, false).unwrap();
        let all = self.daemon.backends(0, true).unwrap();
        let is_own = |id: u32| own.iter().any(|backend| backend.backend_id == id);
        all.iter().map(|backend| (backend.backend_id, is_own(backend.backend_id))).collect()
    }
}

fn register(daemon: &Running, request: &RegisterTransport) -> Result<TransportRegistered> {
    daemon.register_transport(request)
}

/// Waits until `is_so`, at most twenty seconds.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn two_daemons_cache_their_disks_in_one_region() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    assert!(
        b.hosts().iter().all(|seen| seen.alive),
        "the first answer waits until signs of life can be seen"
    );
    assert_eq!((a.start(), b.start()), (0, 1), "numbers are of the whole transport");
    for host in [&a, &b] {
        host.fixture.write_block();
        host.fixture.block_is_there();
    }
    assert_eq!(a.backends(), [(0, true), (1, false)]);
    assert_eq!(b.backends(), [(0, false), (1, true)]);
    let blkdevs = b.daemon.blkdevs(0, true).unwrap();
    assert_eq!(blkdevs.iter().map(|blkdev| blkdev.backend_id).collect::<Vec<_>>(), [0, 1]);
    wait_until("each sees the other live", || {
        [&a, &b].iter().all(|host| host.hosts().iter().all(|seen| seen.alive))
    });
    let seen = &a.daemon.backends(0, true).unwrap()[1];
    assert_eq!((seen.state.as_str(), seen.alive), ("of host b", true), "whether it is served only b says");
    let seen = &a.daemon.blkdevs(0, true).unwrap()[1];
    assert_eq!((seen.note.as_deref(), seen.alive), (Some("of host b"), true));
    let names: Vec<(String, bool)> = b.hosts().into_iter().map(|host| (host.hostname, host.this)).collect();
    assert_eq!(names, [("a".to_owned(), false), ("b".to_owned(), true)]);
    let status = a.daemon.status().unwrap();
    assert_eq!(status.transports[0].backends.len(), 1, "the status is that of this daemon");
    wait_until("the status has the hosts as host-list has them", || {
        let seen = |hosts: &[HostInfo]| -> Vec<(String, bool, bool)> {
            hosts.iter().map(|host| (host.hostname.clone(), host.alive, host.this)).collect()
        };
        seen(&a.daemon.status().unwrap().transports[0].hosts) == seen(&a.hosts())
    });
}

#[test]
fn a_daemon_that_comes_back_serves_what_it_had_and_another_one_lives_on() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    a.start();
    b.start();
    a.fixture.write_block();
    let Host { daemon, fixture } = a;
    drop(daemon);
    b.fixture.write_block();
    wait_until("a is seen to be away", || b.hosts().iter().any(|host| host.hostname == "a" && !host.alive));
    let seen = &b.daemon.backends(0, true).unwrap()[0];
    assert_eq!((seen.state.as_str(), seen.alive), ("of host a, not alive", false));
    let again = Host { daemon: fixture.daemon(), fixture };
    assert_eq!(again.backends(), [(0, true), (1, false)]);
    again.fixture.block_is_there();
    b.fixture.block_is_there();
}

#[test]
fn a_host_that_is_alive_is_neither_joined_nor_cleared() {
    let shared = Shared::new();
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let daemon = fixture.daemon();
    register(&daemon, &shared.registration("a", true)).unwrap();
    let a = Host { daemon, fixture };
    let b = Host::join(&shared, "b", false);
    a.start();
    a.fixture.write_block();
    let other = Fixture::new();
    let third = other.daemon();
    refused(
        register(&third, &shared.registration("a", false)),
        ErrorKind::Busy,
        "host a is alive on this machine",
    );
    let clear = |id, dirty| b.daemon.clear_host(0, id, &ClearHost { discard_dirty: dirty });
    // Its data is not counted, and no advice is given to drop it.
    for dirty in [None, Some(0), Some(4096)] {
        let error = refused(clear(0, dirty), ErrorKind::Busy, "alive on this machine");
        assert!(!error.line().contains("discard"), "{error}");
    }
    assert_eq!(b.backends(), [(0, false)]);
    refused(clear(1, None), ErrorKind::Busy, "this daemon itself");
    refused(clear(7, None), ErrorKind::NotFound, "no host 7");
    let mut formatted = shared.registration("c", true);
    formatted.force = true;
    refused(register(&third, &formatted), ErrorKind::Busy, "in use by");
    register(&third, &shared.registration("c", false)).unwrap();
    drop(a);
}

#[test]
fn what_a_dead_host_had_is_cleared_with_its_dirty_bytes() {
    let shared = Shared::new();
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let daemon = fixture.daemon();
    register(&daemon, &shared.registration("a", true)).unwrap();
    let a = Host { daemon, fixture };
    let b = Host::join(&shared, "b", false);
    a.start();
    a.fixture.write_block();
    drop(a);
    wait_until("a is seen to be away", || b.hosts().iter().any(|host| host.hostname == "a" && !host.alive));
    let clear = |dirty| b.daemon.clear_host(0, 0, &ClearHost { discard_dirty: dirty });
    refused(clear(None), ErrorKind::Busy, "--discard-dirty 4096");
    refused(clear(Some(4095)), ErrorKind::Busy, "--discard-dirty 4096");
    assert_eq!(b.backends(), [(0, false)], "nothing was taken");
    clear(Some(4096)).unwrap();
    assert!(b.backends().is_empty() && b.hosts().len() == 1);
    let disk = b.fixture.disk("disk", 8 * MIB);
    let large = StartBackend { cache_size: Some(48 * MIB), ..b.fixture.backend(&disk) };
    let started = b.daemon.start_backend(0, &large).expect("its space is free");
    assert_eq!(started.backend_id, 0, "and so is its number");
}

#[test]
fn a_host_leaves_when_it_is_unregistered() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    b.start();
    refused(b.daemon.unregister_transport(0), ErrorKind::Busy, "backend 0");
    a.daemon.unregister_transport(0).unwrap();
    assert_eq!(b.hosts().into_iter().map(|host| host.hostname).collect::<Vec<_>>(), ["b"]);
    register(&a.daemon, &shared.registration("again", false)).unwrap();
    assert_eq!(b.hosts().len(), 2);
}

#[test]
fn only_memory_that_keeps_every_store_is_shared() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    let in_a_file = RegisterTransport { shared: true, ..fixture.region(32 * MIB) };
    refused(register(&daemon, &in_a_file), ErrorKind::Unsupported, "an ordinary file cannot be shared");
    assert!(!fixture.path("region").exists(), "nothing is left of it");
    let without_format = RegisterTransport { format: false, size: None, ..in_a_file };
    refused(register(&daemon, &without_format), ErrorKind::InvalidArgument, "format only");
    daemon.register_transport(&fixture.region(32 * MIB)).unwrap();
    refused(daemon.clear_host(0, 0, &ClearHost::default()), ErrorKind::Unsupported, "one host alone");
    let small = StartBackend { cache_size: Some(12 * MIB), ..fixture.backend(&fixture.disk("disk", MIB)) };
    daemon.start_backend(0, &small).unwrap();
}

/// Begins to cache the disk of the first backend of another host, as a process does that did not see that.
fn start_unseen(shared: &Shared, host: &str) {
    let played = Played::join(shared, host);
    let entry = played.transport().backends_of_others().unwrap().remove(0);
    played.create_backend(&entry, 8 * MIB).unwrap();
}

#[test]
fn a_disk_that_two_hosts_began_to_cache_at_the_same_moment_is_cached_by_one_of_them() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    a.start();
    let Host { daemon, fixture: of_a } = a;
    drop(daemon);
    let Host { daemon, fixture: of_b } = b;
    drop(daemon);
    start_unseen(&shared, "b");
    let (a, b) = (of_a.daemon(), of_b.daemon());
    for (daemon, other) in [(&a, "backend 1 of host b"), (&b, "backend 0 of host a")] {
        let backend = daemon.backends(0, false).unwrap().remove(0);
        let error = backend.error.unwrap_or_default();
        assert!(error.contains(other) && error.contains("as well"), "{error}");
    }
    // The user decides who has it.
    let stop = StopBackend { discard_dirty: Some(0), ..StopBackend::default() };
    b.stop_backend(0, 1, &stop, &mut |_| Flow::Continue).unwrap();
    wait_until("the other one serves it", || a.backends(0, false).unwrap()[0].alive);
    of_a.write_block();
}
