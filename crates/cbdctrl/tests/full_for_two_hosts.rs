//! A cache that is full, because its disk completes no write, and clients of another host: their writes wait for space, and nothing else
//! does.

mod support;

use cbd_nbd::Listen;
use cbd_testkit::{Client, Command};
use std::time::{Duration, Instant};
use support::{Fixture, MIB, until};

const BLOCK: u64 = 4096;
const LARGE: u64 = 256 << 10;
const SIZE: u64 = 64 * MIB;
/// More than a channel has places.
const WRITES: u64 = 200;
/// Far more than what takes milliseconds, and less than what waits for the disk.
const SOON: Duration = Duration::from_secs(10);

fn connect(host: &Fixture) -> Client {
    Client::connect(&Listen::Unix(host.path("nbd.sock"))).expect("the device answers")
}

/// Hosts a and b, with a full cache on a, and how many blocks from the beginning were written.
fn full() -> (Fixture, Fixture, u64) {
    let (mut a, mut b) = (Fixture::new(), Fixture::new());
    a.decorate = Some("fault:op=write,how=stall".to_owned());
    a.start();
    b.start();
    let region = a.region();
    a.ok(&["tp-reg", "-H", "a", "-p", &region, "--size", "64M", "--format", "--shared"]);
    b.ok(&["tp-reg", "-H", "b", "-p", &region]);
    a.ok(&["backend-start", "-p", &a.disk("disk", SIZE), "-c", "16M"]);
    b.ok(&["dev-start", "-b", "0", "-e", &b.nbd()]);
    let mut client = connect(&b);
    let data = vec![1; LARGE as usize];
    for offset in (0..).step_by(LARGE as usize) {
        client.submit(Command::Write { offset, data: &data, fua: false }).expect("it is sent");
        let mut waits = false;
        until("the write completes or waits for space", || {
            waits = a.cache()["writers_waiting"] == true;
            waits || b.json(&["status", "--json"])["transports"][0]["remote_blkdevs"][0]["in_flight"] == 0
        });
        if waits {
            return (a, b, offset / BLOCK);
        }
        client.complete().expect("a reply").expect("one").result.expect("written");
    }
    unreachable!("the cache is smaller than the device")
}

#[test]
fn reads_and_flushes_of_another_host_do_not_wait_for_space_and_a_client_that_breaks_off_is_given_up() {
    let (a, b, written) = full();
    let mut writer = connect(&b);
    for block in 0..WRITES {
        let offset = SIZE / 2 + block * BLOCK;
        writer.submit(Command::Write { offset, data: &[2; BLOCK as usize], fua: false }).expect("it is sent");
    }
    until("they wait", || {
        b.json(&["status", "--json"])["transports"][0]["remote_blkdevs"][0]["in_flight"].as_u64() > Some(100)
    });
    let mut reader = connect(&b);
    let begun = Instant::now();
    let mut found = [0; BLOCK as usize];
    for block in 0..500 {
        reader.read(block % written * BLOCK, &mut found).expect("read");
        assert!(found == [1; BLOCK as usize], "block {block}");
        reader.flush().expect("all that is complete is durable");
    }
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    until("the status says where to look", || {
        let status = b.ok(&["status"]);
        status.contains("requests have waited for host a for ")
            && status.contains("it is alive: its status says why")
    });

    // The same client comes back, and reads what was there before its writes.
    drop(writer);
    let begun = Instant::now();
    let mut writer = connect(&b);
    writer.read(SIZE / 2 + (WRITES - 1) * BLOCK, &mut found).expect("read");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert!(found == [0; BLOCK as usize], "its last write, which was given up");
    until("no request waits for space", || a.cache()["writers_waiting"] == false);
}
