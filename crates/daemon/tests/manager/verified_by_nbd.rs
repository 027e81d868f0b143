//! NBD's metadata context `cbd:verify`, over damaged memory and a disk with unreadable sectors.

use crate::fixture::{Fixture, MIB, stop};
use crate::quarantined::damage_block;
use cbd_daemon::api::{DetachCache, Drain, StopBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_nbd::{CONTEXT_VERIFY, Listen};
use cbd_testkit::{BlockStatus, Client, ClientOptions, Command};
use cbd_types::ErrorKind;
use std::time::{Duration, Instant};

const UNREADABLE: &str = "fault:op=read,op=verify,range=4194304-4194816";

fn client(fixture: &Fixture) -> Client {
    let options = ClientOptions { verify: true, ..ClientOptions::default() };
    Client::connect_with(&Listen::Unix(fixture.path("nbd.sock")), &options).unwrap()
}

fn verified(status: &[BlockStatus]) -> Vec<(u64, u64, u32)> {
    let chosen = status.iter().filter(|extent| extent.context == CONTEXT_VERIFY);
    chosen.map(|extent| (extent.offset, u64::from(extent.length), extent.flags)).collect()
}

/// A disk of 8 MiB. In the cache the block at 1 MiB is dirty and damaged, the one at 2 MiB clean and damaged.
fn damaged() -> Fixture {
    let mut fixture = Fixture::new();
    {
        let (_disk, daemon) = fixture.disk_and_daemon();
        fixture.client().write(2 * MIB, &[8; 4096], true).unwrap();
        let drain = Drain { wait: true, ..Drain::default() };
        daemon.drain(0, &drain, &mut |_| Flow::Continue).unwrap();
    }
    fixture.decorate = Some("fault:op=write".into());
    {
        let _daemon = fixture.daemon();
        fixture.client().write(MIB, &[9; 4096], true).unwrap();
    }
    damage_block(&fixture, &[9; 4096]);
    damage_block(&fixture, &[8; 4096]);
    fixture.decorate = Some(UNREADABLE.into());
    fixture
}

#[test]
fn block_status_finds_damaged_memory_and_unreadable_sectors() {
    let fixture = damaged();
    let _daemon = fixture.daemon();
    let mut client = client(&fixture);
    let expected = [
        (0, MIB, 1),
        (MIB, 4096, 3),
        // The copy at 2 MiB is repaired from the disk.
        (MIB + 4096, 3 * MIB - 4096, 1),
        (4 * MIB, 512, 5),
        (4 * MIB + 512, 4 * MIB - 512, 1),
    ];
    assert_eq!(verified(&client.block_status(0, 8 << 20).unwrap()), expected);
    let mut block = [0; 4096];
    client.read(2 * MIB, &mut block).unwrap();
    assert_eq!(block, [8; 4096]);
    assert!(client.read(MIB, &mut block).is_err() && client.read(4 * MIB, &mut block).is_err());
    // What is overwritten is right again.
    client.write(MIB, &[7; 4096], true).unwrap();
    client.write(4 * MIB, &[7; 512], true).unwrap();
    assert_eq!(verified(&client.block_status(0, 8 << 20).unwrap()), [(0, 8 * MIB, 1)]);
}

#[test]
fn a_device_without_a_cache_is_verified_on_its_disk() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(UNREADABLE.into());
    let (_disk, daemon) = fixture.disk_and_daemon();
    daemon.detach_cache(0, 0, &DetachCache::default(), &mut |_| Flow::Continue).unwrap();
    let status = client(&fixture).block_status(4 * MIB - 4096, 8192).unwrap();
    let at = 4 * MIB;
    assert_eq!(verified(&status), [(at - 4096, 4096, 1), (at, 512, 5), (at + 512, 3584, 1)]);
}

#[test]
fn requests_pass_a_verification_that_waits_for_a_slow_disk_and_its_client_may_leave() {
    let mut fixture = Fixture::new();
    let (_, daemon) = fixture.disk_and_daemon();
    drop(daemon);
    fixture.decorate = Some("throttle:latency_us=300000".into());
    let daemon = fixture.daemon();
    let mut client = client(&fixture);
    let verification =
        client.submit(Command::BlockStatus { offset: 0, length: 8 << 20, one: false }).unwrap();
    for number in 0..10 {
        let write = Command::Write { offset: number * 4096, data: &[7; 4096], fua: true };
        let written = client.submit(write).unwrap();
        let completed = client.complete().unwrap().unwrap();
        assert_eq!((completed.cookie, completed.result.is_ok()), (written, true));
    }
    assert_eq!(client.outstanding().collect::<Vec<_>>(), [verification]);
    drop(client);
    let mut block = [0; 4096];
    fixture.client().read(4096, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    // The connection of the client ends when the disk has answered what it was asked before.
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(error) = stop(&daemon, StopBackend::default()) {
        assert!(error.kind() == ErrorKind::Busy && Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
