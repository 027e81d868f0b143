//! How long clients wait while backends move: not for another move, nor for a channel that is opened only once the move has ended.

mod support;

use cbd_nbd::Listen;
use cbd_testkit::Client;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{Fixture, MIB};

const BLOCK: u64 = 4096;
/// Less than any timeout of a move.
const SOON: Duration = Duration::from_secs(10);

/// Hosts with these names on one region.
fn hosts<const N: usize>(names: [&str; N]) -> [Fixture; N] {
    let mut hosts = names.map(|_| Fixture::new());
    hosts.iter_mut().for_each(Fixture::start);
    let region = hosts[0].region();
    for (number, (host, name)) in hosts.iter().zip(names).enumerate() {
        let format: &[&str] = if number == 0 { &["--size", "256M", "--format", "--shared"] } else { &[] };
        host.ok(&[&["tp-reg", "-H", name, "-p", &region][..], format].concat());
    }
    hosts
}

/// Starts a backend that `host` has, with shared block devices on these hosts, whose sockets have this name.
fn start(host: &Fixture, disk: &str, backend: &str, devices: &[&Fixture], socket: &str) {
    host.ok(&["backend-start", "-p", &host.disk(disk, 16 * MIB), "-c", "16M"]);
    for on in devices {
        on.ok(&["dev-start", "-b", backend, "--shared", "-e", &format!("nbd:unix:{}", on.text(socket))]);
    }
}

/// Writes blocks until `is_over`; the longest time that one has taken.
fn longest_write(socket: &Path, is_over: &AtomicBool) -> Duration {
    let mut client = Client::connect(&Listen::Unix(socket.to_owned())).expect("the device answers");
    let mut longest = Duration::ZERO;
    for number in 0_u64.. {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let begun = Instant::now();
        let data = [number as u8; BLOCK as usize];
        client.write(number % 256 * BLOCK, &data, number.is_multiple_of(4)).expect("written");
        longest = longest.max(begun.elapsed());
        std::thread::sleep(Duration::from_millis(1));
    }
    longest
}

/// Does `act` while clients write; the longest write of each.
fn beside<const N: usize>(sockets: [&Path; N], act: impl FnOnce()) -> [Duration; N] {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients = sockets.map(|socket| scope.spawn(|| longest_write(socket, &is_over)));
        std::thread::sleep(Duration::from_millis(300));
        act();
        is_over.store(true, Ordering::Relaxed);
        clients.map(|client| client.join().expect("no panic"))
    })
}

#[test]
fn a_move_that_is_asked_for_right_after_a_restart_waits_for_the_channels() {
    let [mut a, b] = hosts(["a", "b"]);
    start(&a, "disk", "0", &[&b], "nbd.sock");
    let socket = b.path("nbd.sock");
    let [longest] = beside([&socket], || {
        a.kill();
        a.start();
        let begun = Instant::now();
        b.ok(&["backend-move", "-b", "0", "--to", "b"]);
        a.ok(&["backend-move", "-b", "0", "--to", "a"]);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    });
    assert!(longest < SOON, "{longest:?}");
}

#[test]
fn moves_that_need_each_others_hosts_hold_no_client_for_each_other() {
    let [a, b, c, d] = &hosts(["a", "b", "c", "d"]);
    start(a, "first", "0", &[a, d], "first.sock");
    start(b, "second", "1", &[b, c], "second.sock");
    let sockets = [a.path("first.sock"), d.path("first.sock"), b.path("second.sock"), c.path("second.sock")];
    let longest = beside(sockets.each_ref().map(|path| path.as_path()), || {
        for (hosts, to) in [([a, b], ["c", "d"]), ([c, d], ["a", "b"])] {
            let moved = std::thread::scope(|scope| {
                let moves = [0, 1].map(|number| {
                    let backend = ["0", "1"][number];
                    scope.spawn(move || {
                        hosts[number].run(&["backend-move", "-b", backend, "--to", to[number]])
                    })
                });
                moves.map(|moving| moving.join().expect("no panic"))
            });
            for (number, moved) in moved.iter().enumerate() {
                if moved.code != 0 {
                    assert!(moved.stderr.contains("takes part in the move of backend"), "{moved:?}");
                    hosts[number].ok(&["backend-move", "-b", ["0", "1"][number], "--to", to[number]]);
                }
            }
            assert!(moved.iter().any(|moved| moved.code == 0), "{moved:?}");
        }
    });
    assert!(longest.iter().all(|longest| *longest < SOON / 2), "{longest:?}");
}

#[test]
fn a_backend_that_comes_back_is_served_and_takes_block_devices_at_once() {
    let [a, b, c] = &hosts(["a", "b", "c"]);
    start(a, "disk", "0", &[a, b, c], "nbd.sock");
    let names = ["a", "b", "c"];
    let sockets = [a, b, c].map(|host| host.path("nbd.sock"));
    let longest = beside(sockets.each_ref().map(|path| path.as_path()), || {
        for round in 0..12 {
            let (from, to) = ([a, b, c][round % 3], names[(round + 1) % 3]);
            from.ok(&["backend-move", "-b", "0", "--to", to]);
        }
    });
    assert!(longest.iter().all(|longest| *longest < SOON / 2), "{longest:?}");
    for round in 0..6 {
        let (from, to) = ([a, b][round % 2], [b, a][round % 2]);
        from.ok(&["backend-move", "-b", "0", "--to", names[(round + 1) % 2]]);
        for host in [from, c, to] {
            let export = format!("nbd:unix:{}", host.text("further.sock"));
            host.ok(&["dev-start", "-b", "0", "--shared", "-e", &export]);
        }
        // In another order: each is refused by none that was stopped.
        for (host, device) in [(from, 3), (c, 4), (to, 5)] {
            host.ok(&["dev-stop", "-d", &device.to_string()]);
        }
    }
}
