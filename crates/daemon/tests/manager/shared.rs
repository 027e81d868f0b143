//! Caches that share the space of their transport.

use crate::fixture::{Fixture, MIB, refused};
use cbd_daemon::api::{AttachCache, BackendInfo, ResizeCache, StartBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::ErrorKind;
use std::time::{Duration, Instant};

/// A backend whose cache shares the space, with a block device of its own.
fn sharing(fixture: &Fixture, name: &str, min: u64, max: u64) -> StartBackend {
    StartBackend {
        path: fixture.disk(name, 48 * MIB),
        cache_size: Some(min * MIB),
        cache_max: Some(max * MIB),
        start_dev: true,
        export: Some(format!("nbd:unix:{}", fixture.text(&format!("{name}.sock")))),
        ..StartBackend::default()
    }
}

fn sizes(daemon: &Manager) -> Vec<u64> {
    daemon.backends(0, false).unwrap().iter().map(|backend| backend.cache_size / MIB).collect()
}

fn free(daemon: &Manager) -> u64 {
    let transport = daemon.transports().unwrap().remove(0);
    transport.free_segments * transport.bytes_per_segment / MIB
}

/// Waits until `wanted` holds of the sizes, at most a minute.
#[track_caller]
fn wait_for(daemon: &Manager, wanted: impl Fn(&[u64]) -> bool) -> Vec<u64> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let now = sizes(daemon);
        if wanted(&now) {
            return now;
        }
        assert!(Instant::now() < end, "{now:?} MiB");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn resize(daemon: &Manager, backend: u32, request: ResizeCache) -> cbd_types::Result<Vec<String>> {
    daemon.resize_cache(0, backend, &request, &mut |_| Flow::Continue).map(|done| done.warnings)
}

fn bounds(backend: &BackendInfo) -> (Option<u64>, Option<u64>) {
    (backend.cache_min.map(|min| min / MIB), backend.cache_max.map(|max| max / MIB))
}

#[test]
fn space_without_an_owner_goes_to_the_caches_that_share_it_and_a_command_gets_it_back() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
    let all = free(&daemon);
    daemon.start_backend(0, &sharing(&fixture, "one", 10, 60)).unwrap();
    daemon.start_backend(0, &sharing(&fixture, "other", 10, 20)).unwrap();
    let now = wait_for(&daemon, |sizes| sizes.iter().sum::<u64>() == all);
    assert!(now[0] >= 30 && (10..=20).contains(&now[1]), "{now:?}");

    // A cache of fixed size needs what they have above their minima.
    let fixed = |size: u64| StartBackend {
        path: fixture.disk("fixed", 32 * MIB),
        cache_size: Some(size * MIB),
        ..StartBackend::default()
    };
    refused(daemon.start_backend(0, &fixed(all - 19)), ErrorKind::NoSpace, "above their minima");
    daemon.start_backend(0, &fixed(all - 20)).unwrap();
    assert_eq!(sizes(&daemon), [10, 10, all - 20]);
    assert_eq!(free(&daemon), 0);
    // Two rounds later no cache has lost anything.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(sizes(&daemon), [10, 10, all - 20]);
    // What it gives up goes to the others.
    resize(&daemon, 2, ResizeCache { cache_size: 20 * MIB, ..ResizeCache::default() }).unwrap();
    wait_for(&daemon, |sizes| sizes[2] == 20 && sizes[0] + sizes[1] == all - 20);
}

#[test]
fn the_cache_that_is_read_gets_the_space_and_the_other_keeps_its_minimum() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
    let all = free(&daemon);
    for name in ["one", "other"] {
        daemon.start_backend(0, &sharing(&fixture, name, 12, 60)).unwrap();
    }
    wait_for(&daemon, |sizes| sizes.iter().sum::<u64>() == all);
    for (reader, name) in [(0, "one"), (1, "other")] {
        let mut client = Client::connect(&Listen::Unix(fixture.path(&format!("{name}.sock")))).unwrap();
        let mut data = vec![0; 64 << 10];
        let end = Instant::now() + Duration::from_secs(60);
        // Through more than half of the space, again and again, but not in sequence.
        while sizes(&daemon)[reader] < 40 {
            for step in 0..720 {
                client.read(step * 77 % 720 * (64 << 10), &mut data).unwrap();
            }
            let now = sizes(&daemon);
            assert!(now.iter().all(|size| *size >= 12) && now.iter().sum::<u64>() <= all, "{now:?}");
            assert!(Instant::now() < end, "{now:?}");
        }
        let status = daemon.status().unwrap();
        let shared =
            |at: usize| status.transports[0].backends[at].cache.as_ref().unwrap().shared.clone().unwrap();
        assert!(shared(reader).target.unwrap() >= 38 * MIB, "{:?}", shared(reader));
        assert!(shared(reader).gain_at_max.is_some());
        assert_eq!((shared(reader).min, shared(reader).weight), (12 * MIB, 1));
    }
}

#[test]
fn bounds_are_changed_while_in_use_and_are_there_after_a_restart() {
    let fixture = Fixture::new();
    {
        let daemon = fixture.daemon();
        daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
        daemon.start_backend(0, &fixture.backend(&fixture.disk("disk", 8 * MIB))).unwrap();
        let request =
            ResizeCache { cache_size: 10 * MIB, cache_max: Some(30 * MIB), ..ResizeCache::default() };
        for (change, why) in [
            (ResizeCache { weight: Some(0), ..request }, "1 to 1000, not 0"),
            (ResizeCache { weight: Some(1001), ..request }, "1 to 1000, not 1001"),
            (ResizeCache { cache_max: Some(9 * MIB), ..request }, "above its maximum"),
            (ResizeCache { cache_max: None, weight: Some(2), ..request }, "MIN..MAX"),
            (ResizeCache { cache_size: MIB, ..request }, "lanes of the cache need"),
            (ResizeCache { cache_size: 0, ..request }, "needs a minimum"),
        ] {
            refused(resize(&daemon, 0, change), ErrorKind::InvalidArgument, why);
            assert_eq!(bounds(&daemon.backends(0, false).unwrap()[0]), (None, None));
        }
        assert_eq!(sizes(&daemon), [16]);
        let more = ResizeCache { cache_max: Some(1 << 40), weight: Some(7), ..request };
        let warnings = resize(&daemon, 0, more).unwrap();
        assert!(warnings[0].contains("more than the region has"), "{warnings:?}");
        assert_eq!(resize(&daemon, 0, ResizeCache { weight: Some(7), ..request }).unwrap(), [""; 0]);
        wait_for(&daemon, |sizes| sizes == [30]);
    }
    let daemon = fixture.daemon();
    assert_eq!(bounds(&daemon.backends(0, false).unwrap()[0]), (Some(10), Some(30)));
    let cache = daemon.status().unwrap().transports[0].backends[0].cache.clone().unwrap();
    assert_eq!(cache.shared.unwrap().weight, 7);
    // A fixed size ends it.
    resize(&daemon, 0, ResizeCache { cache_size: 20 * MIB, ..ResizeCache::default() }).unwrap();
    assert_eq!(bounds(&daemon.backends(0, false).unwrap()[0]), (None, None));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(sizes(&daemon), [20]);
}

#[test]
fn a_cache_that_is_attached_can_share_space_and_is_detached_while_it_does() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
    let bare = StartBackend { cache_size: None, ..fixture.backend(&fixture.disk("disk", 8 * MIB)) };
    daemon.start_backend(0, &bare).unwrap();
    let request = AttachCache { cache_size: 10 * MIB, cache_max: Some(20 * MIB), ..Default::default() };
    let refusal = AttachCache { cache_size: 100 * MIB, cache_max: Some(200 * MIB), ..Default::default() };
    refused(daemon.attach_cache(0, 0, &refusal), ErrorKind::NoSpace, "free space of the transport");
    daemon.attach_cache(0, 0, &request).unwrap();
    fixture.write_block();
    wait_for(&daemon, |sizes| sizes == [20]);
    daemon.detach_cache(0, 0, &Default::default(), &mut |_| Flow::Continue).unwrap();
    assert_eq!((sizes(&daemon), bounds(&daemon.backends(0, false).unwrap()[0])), (vec![0], (None, None)));
    fixture.block_is_there();
}
