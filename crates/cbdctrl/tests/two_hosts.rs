//! Two daemons share a region: one has the backend, the other one a block device on it. Either is killed under load, and comes back.
//!
//! The proof: a client of the second daemon notes each write that completed. While the first daemon is away its requests wait, and none
//! fails. If the second one is killed, the client connects again; the write that was in flight is there completely or not at all.
//!
//! `CBD_KILLS` sets the number of kills (20), `CBD_SEED` the seed of the random choices.

mod support;

use cbd_nbd::Listen;
use cbd_testkit::Client;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::pattern::{Random, seed};
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, text_of, until, wait};

const BLOCK: u64 = 4096;
const SIZE: u64 = 32 * MIB;
/// Clients, each with a part of the device.
const CLIENTS: u64 = 2;
const BLOCKS: u64 = SIZE / BLOCK / CLIENTS;
/// Timeout for all kills.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Two daemons: the first has a backend of [`SIZE`] on a slow disk, behind a cache that is smaller.
fn two_hosts(mut a: Fixture, mut b: Fixture) -> (Fixture, Fixture, String) {
    a.decorate = Some("throttle:ssd,mib_per_s=120,flush_us=1000".to_owned());
    a.start();
    b.start();
    let region = a.region();
    a.ok(&["tp-reg", "-H", "a", "-p", &region, "--size", "64M", "--format", "--shared"]);
    b.ok(&["tp-reg", "-H", "b", "-p", &region]);
    let disk = a.disk("disk", SIZE);
    a.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
    (a, b, disk)
}

/// A client with a part of the device, and what it knows of it.
struct Load {
    first: u64,
    /// The version of each block.
    versions: Vec<u64>,
    next: u64,
}

fn contents(block: u64, version: u64) -> Vec<u8> {
    [block.to_le_bytes(), version.to_le_bytes()].concat().repeat(BLOCK as usize / 16)
}

/// Connects, when there is a server.
fn connect(socket: &Path) -> Client {
    let mut client = None;
    until("the device answers", || {
        client = Client::connect(&Listen::Unix(socket.to_owned())).ok();
        client.is_some()
    });
    client.expect("it is connected")
}

impl Load {
    fn expect(&self, client: &mut Client, index: u64, also: Option<u64>) -> Result<u64, ()> {
        let mut found = vec![0; BLOCK as usize];
        client.read((self.first + index) * BLOCK, &mut found).map_err(drop)?;
        let known = self.versions[index as usize];
        let is = |version: u64| match version {
            0 => found.iter().all(|byte| *byte == 0),
            _ => found == contents(self.first + index, version),
        };
        let version = [Some(known), also].into_iter().flatten().find(|version| is(*version));
        Ok(version.unwrap_or_else(|| panic!("block {index} is not of version {known}, nor of {also:?}")))
    }

    /// Writes and reads until `is_over`. Connections may end only if `may_end` says so.
    fn run(
        &mut self,
        socket: &Path,
        is_over: &AtomicBool,
        may_end: &AtomicBool,
        done: &AtomicU64,
        seed: u64,
    ) {
        let mut random = Random(seed);
        let mut client = connect(socket);
        let mut flying = None;
        // A test that fails does not set it.
        let end = Instant::now() + TIMEOUT;
        while !is_over.load(Ordering::Relaxed) {
            assert!(Instant::now() < end, "the kills take too long");
            let index = random.below(BLOCKS);
            let is_write = random.below(3) > 0;
            let result = if is_write {
                let version = self.next;
                (self.next, flying) = (version + 1, Some((index, version)));
                let data = contents(self.first + index, version);
                client.write((self.first + index) * BLOCK, &data, random.below(8) == 0).map_err(drop)
            } else {
                self.expect(&mut client, index, None).map(drop)
            };
            if result.is_err() {
                assert!(may_end.load(Ordering::SeqCst), "a request failed while its daemon lived");
                client = self.connect_again(socket, flying);
            } else if let Some((index, version)) = flying {
                self.versions[index as usize] = version;
            }
            flying = None;
            done.fetch_add(1, Ordering::Relaxed);
        }
        for index in 0..BLOCKS {
            self.expect(&mut client, index, None).expect("both daemons live");
        }
    }

    fn connect_again(&mut self, socket: &Path, flying: Option<(u64, u64)>) -> Client {
        loop {
            let mut client = connect(socket);
            let Some((index, version)) = flying else { return client };
            // Its daemon may have been killed again.
            if let Ok(found) = self.expect(&mut client, index, Some(version)) {
                self.versions[index as usize] = found;
                return client;
            }
        }
    }
}

#[test]
fn neither_host_loses_a_write_when_it_or_the_other_one_is_killed() {
    let kills = std::env::var("CBD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_u64);
    let (mut a, mut b, disk) = two_hosts(Fixture::new(), Fixture::new());
    b.ok(&["dev-start", "-b", "0", "-e", &b.nbd()]);
    let mut random = Random(seed());
    let (is_over, may_end) = (AtomicBool::new(false), AtomicBool::new(false));
    let done: Vec<AtomicU64> = (0..CLIENTS).map(|_| AtomicU64::new(0)).collect();
    let mut loads: Vec<Load> = (0..CLIENTS)
        .map(|client| Load { first: client * BLOCKS, versions: vec![0; BLOCKS as usize], next: 1 })
        .collect();
    let socket = b.path("nbd.sock");
    std::thread::scope(|scope| {
        for (load, done) in loads.iter_mut().zip(&done) {
            let (socket, is_over, may_end, seed) = (&socket, &is_over, &may_end, random.number());
            scope.spawn(move || load.run(socket, is_over, may_end, done, seed));
        }
        for kill in 0..kills {
            let before: Vec<u64> = done.iter().map(|done| done.load(Ordering::Relaxed)).collect();
            until("all clients make progress", || {
                done.iter().zip(&before).all(|(done, before)| done.load(Ordering::Relaxed) > before + 50)
            });
            std::thread::sleep(Duration::from_millis(random.below(50)));
            if kill % 2 == 0 {
                a.kill();
                std::thread::sleep(Duration::from_millis(random.below(100)));
                a.start();
            } else {
                may_end.store(true, Ordering::SeqCst);
                b.kill();
                b.start();
                until("it is served again", || b.json(&["dev-list", "--json"])[0]["alive"] == true);
                may_end.store(false, Ordering::SeqCst);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let requests: u64 = done.iter().map(|done| done.load(Ordering::Relaxed)).sum();
    println!("{kills} kills, {requests} requests");
    b.ok(&["dev-stop", "-d", "0"]);
    until("the other host has noticed it", || a.run(&["backend-stop", "-b", "0"]).code == 0);
    let file = std::fs::File::open(&disk).expect("the disk");
    for load in &loads {
        for (index, version) in load.versions.iter().enumerate().filter(|(_, version)| **version > 0) {
            let mut found = vec![0; BLOCK as usize];
            let block = load.first + index as u64;
            file.read_exact_at(&mut found, block * BLOCK).expect("the disk");
            assert_eq!(found, contents(block, *version), "block {block} of the disk");
        }
    }
}

/// What both hosts have written to a backend that they share: the version of each block, which one client uses at a time.
struct Shared {
    versions: Vec<Mutex<u64>>,
    next: AtomicU64,
    is_over: AtomicBool,
}

impl Shared {
    /// Reads what the last client has written, whichever that was, and writes. Connections may end only if `may_end` says so.
    fn run(&self, socket: &Path, may_end: &AtomicBool, done: &AtomicU64, seed: u64) {
        let mut random = Random(seed);
        let mut client = connect(socket);
        let end = Instant::now() + TIMEOUT;
        while !self.is_over.load(Ordering::Relaxed) {
            assert!(Instant::now() < end, "the kills take too long");
            let block = random.below(self.versions.len() as u64);
            let Ok(mut known) = self.versions[block as usize].try_lock() else { continue };
            let mut also = None;
            while let Err(()) = self.use_block(&mut client, block, &mut known, &mut also, &mut random) {
                assert!(may_end.load(Ordering::SeqCst), "a request failed while its daemon lived");
                client = connect(socket);
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes the next version once the block is of version `known`, or `also` of a write that was in flight when the connection ended.
    fn use_block(
        &self,
        client: &mut Client,
        block: u64,
        known: &mut u64,
        also: &mut Option<u64>,
        random: &mut Random,
    ) -> Result<(), ()> {
        let mut found = vec![0; BLOCK as usize];
        client.read(block * BLOCK, &mut found).map_err(drop)?;
        let is = |version: u64| match version {
            0 => found.iter().all(|byte| *byte == 0),
            _ => found == contents(block, version),
        };
        let version = [Some(*known), *also].into_iter().flatten().find(|version| is(*version));
        *known =
            version.unwrap_or_else(|| panic!("block {block} is not of version {known}, nor of {also:?}"));
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        *also = Some(next);
        client.write(block * BLOCK, &contents(block, next), random.below(8) == 0).map_err(drop)?;
        *known = next;
        Ok(())
    }
}

#[test]
fn hosts_that_share_a_backend_see_what_the_other_one_has_written_whichever_is_killed() {
    play_shared(&mut |hosts, step, may_end, random| kill_one(hosts, step as usize % 2, may_end, random));
}

#[test]
fn a_backend_moves_to_and_fro_while_clients_of_both_hosts_use_it_and_daemons_are_killed() {
    let mut owner = 0;
    play_shared(&mut |hosts, step, may_end, random| {
        if step % 5 == 4 {
            return kill_one(hosts, random.below(2) as usize, may_end, random);
        }
        // The host that has it sends it, or the other one asks for it.
        let by = if step % 2 == 0 { owner } else { 1 - owner };
        let to = ["b", "a"][owner];
        hosts[by].ok(&["backend-move", "-b", "0", "--to", to]);
        owner = 1 - owner;
    });
}

#[test]
fn a_move_during_which_a_daemon_is_killed_leaves_the_backend_on_one_of_both_hosts() {
    play_shared(&mut |hosts, _, may_end, random| {
        let owner = owner_of(hosts);
        let (socket, to) = (hosts[owner].socket(), ["b", "a"][owner]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.args(["backend-move", "-b", "0", "--to", to]).env("CBD_SOCKET", socket);
        support::child::dies_with_the_test(&mut command);
        let mut moving = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("cbdctrl");
        std::thread::sleep(Duration::from_millis(random.below(2500)));
        let which = random.below(2) as usize;
        may_end[which].store(true, Ordering::SeqCst);
        hosts[which].kill();
        std::thread::sleep(Duration::from_millis(random.below(100)));
        hosts[which].start();
        wait(&mut moving, Duration::from_secs(60)).expect("the command ends");
        until("one of both has the backend, and it is served to both", || {
            let up = |host: &Fixture| host.json(&["backend-list", "--json"])[0]["alive"] == true;
            hosts.iter().filter(|host| up(host)).count() == 1 && hosts.iter().all(serves_all)
        });
        may_end[which].store(false, Ordering::SeqCst);
    });
}

/// Which of both hosts has the backend.
fn owner_of(hosts: &[Fixture; 2]) -> usize {
    let has = |host: &Fixture| {
        let list = host.json(&["backend-list", "--json"]);
        list.as_array().is_some_and(|list| !list.is_empty())
    };
    hosts.iter().position(has).expect("one has the backend")
}

/// Kills a daemon and starts it again. Connections to it may end meanwhile.
fn kill_one(hosts: &mut [Fixture; 2], which: usize, may_end: &[AtomicBool; 2], random: &mut Random) {
    let (host, may_end) = (&mut hosts[which], &may_end[which]);
    may_end.store(true, Ordering::SeqCst);
    host.kill();
    std::thread::sleep(Duration::from_millis(random.below(100)));
    host.start();
    until("they are served again", || serves_all(host));
    may_end.store(false, Ordering::SeqCst);
}

/// Whether both block devices of a host are served.
fn serves_all(host: &Fixture) -> bool {
    let list = host.json(&["dev-list", "--json"]);
    (0..2).all(|blkdev| list[blkdev]["alive"] == true)
}

/// What is done to the hosts in a step, with its number, and which connections may end.
type Step<'a> = dyn FnMut(&mut [Fixture; 2], u64, &[AtomicBool; 2], &mut Random) + 'a;

/// Two hosts that share a backend, each with two block devices on it, a client of each, and what is done to the hosts while all write.
fn play_shared(act: &mut Step<'_>) {
    let steps = std::env::var("CBD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_u64);
    let (a, b, disk) = two_hosts(Fixture::new(), Fixture::new());
    let mut hosts = [a, b];
    let sockets: Vec<(usize, PathBuf)> = ["nbd.sock", "second.sock"]
        .iter()
        .flat_map(|socket| [0, 1].map(|host: usize| (host, hosts[host].path(socket))))
        .collect();
    for (host, socket) in &sockets {
        let export = format!("nbd:unix:{}", text_of(socket));
        hosts[*host].ok(&["dev-start", "-b", "0", "--shared", "-e", &export]);
    }
    let mut random = Random(seed());
    let shared = Shared {
        versions: (0..SIZE / BLOCK / 8).map(|_| Mutex::new(0)).collect(),
        next: AtomicU64::new(1),
        is_over: AtomicBool::new(false),
    };
    let may_end = [false, false].map(AtomicBool::new);
    let done = [0; 4].map(AtomicU64::new);
    std::thread::scope(|scope| {
        for ((host, socket), done) in sockets.iter().zip(&done) {
            let (shared, may_end) = (&shared, &may_end[*host]);
            let seed = random.number();
            scope.spawn(move || shared.run(socket, may_end, done, seed));
        }
        for step in 0..steps {
            let before = done.each_ref().map(|done| done.load(Ordering::Relaxed));
            until("both clients make progress", || {
                done.iter().zip(&before).all(|(done, before)| done.load(Ordering::Relaxed) > before + 50)
            });
            std::thread::sleep(Duration::from_millis(random.below(50)));
            act(&mut hosts, step, &may_end, &mut random);
        }
        shared.is_over.store(true, Ordering::Relaxed);
    });
    println!("{steps} steps, {:?} turns", done.each_ref().map(|done| done.load(Ordering::Relaxed)));
    let owner = owner_of(&hosts);
    let other = 1 - owner;
    for blkdev in [other, other + 2] {
        hosts[other].ok(&["dev-stop", "-d", &blkdev.to_string()]);
    }
    until("the other host has noticed it", || hosts[owner].run(&["backend-stop", "-b", "0"]).code == 0);
    let file = std::fs::File::open(&disk).expect("the disk");
    for (block, version) in (0..).zip(&shared.versions) {
        let version = *version.lock().expect("no client has failed");
        let mut found = vec![0; BLOCK as usize];
        file.read_exact_at(&mut found, block * BLOCK).expect("the disk");
        assert!(version == 0 || found == contents(block, version), "block {block} of the disk");
    }
}

#[test]
fn commands_show_and_change_a_block_device_on_another_host() {
    let (mut a, b, _) = two_hosts(Fixture::new(), Fixture::new());
    a.ok(&["set", "-b", "0", "name=db"]);
    let unknown = b.run(&["dev-start", "-b", "da", "-e", &b.nbd()]);
    assert!(unknown.stderr.contains("there are db; backend-list --all shows all"), "{unknown:?}");
    b.ok(&["dev-start", "-b", "db", "-e", &b.nbd()]);
    b.ok(&["set", "-d", "0", "name=far", "class=metadata"]);
    let listed = b.json(&["dev-list", "--json"]);
    assert_eq!((&listed[0]["name"], &listed[0]["class"]), (&"far".into(), &"metadata".into()));
    let mut client = connect(&b.path("nbd.sock"));
    client.write(0, &[7; BLOCK as usize], true).expect("written");

    let status = b.ok(&["status"]);
    assert!(status.contains("blkdev 0 on backend 0 of host a"), "{status}");
    let remote = &b.json(&["status", "--json"])["transports"][0]["remote_blkdevs"][0];
    assert_eq!(
        (&remote["backend_host"], &remote["operations"]["write"]["bytes"]),
        (&"a".into(), &BLOCK.into())
    );
    assert_eq!(remote["atomic_unit"], 64 << 10);
    let top = &b.json(&["top", "--once", "--json", "-i", "0.1"])["devices"][0];
    assert_eq!((&top["name"], &top["backend_host"]), (&"far".into(), &"a".into()));

    // Whoever removes the daemon of the backend is told of it; a restart only makes it wait.
    let folders = |fixture: &Fixture| [fixture.text("state"), fixture.text("run"), fixture.text("rules.d")];
    let [state, run, rules] = folders(&a);
    let folders = ["--state-dir", &state, "--run-dir", &run, "--rules-dir", &rules];
    let removal = a.run(&[&["safe-to", "remove"][..], &folders].concat());
    assert_eq!(removal.code, 1, "{removal:?}");
    assert!(removal.stdout.contains("block device 0 is in use: host b has it on backend 0"), "{removal:?}");
    let restart = a.run(&[&["safe-to", "restart"][..], &folders].concat());
    assert_eq!((restart.code, restart.stdout.as_str()), (0, "yes\n"), "{restart:?}");

    // While the other host is away its clients wait, and whoever looks is told so.
    let count = |name: &str| b.json(&["status", "--json"])["events"]["counts"][name].as_u64().unwrap_or(0);
    a.kill();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| client.write(0, &[8; BLOCK as usize], true));
        until("the event is there", || count("blkdev.waiting") == 1);
        let status = b.ok(&["status"]);
        for part in ["requests have waited for host a for ", "1 in flight, none has completed for "] {
            assert!(status.contains(part), "{part} is missing: {status}");
        }
        until("the status says that a is away", || b.ok(&["status"]).contains("it gives no sign of life"));
        a.start();
        waits.join().expect("it ends").expect("it did not fail");
    });
    until("the wait is over", || count("blkdev.resumed") == 1);
    drop(client);
    b.ok(&["dev-stop", "-d", "far"]);
}

#[test]
fn a_block_device_whose_backend_is_gone_is_removed_without_force_once_it_is_unused() {
    let name = "a_block_device_whose_backend_is_gone_is_removed_without_force_once_it_is_unused";
    in_sandbox(name, Duration::from_secs(100), |folder| {
        let (a, b, _) = two_hosts(Fixture::under(folder), Fixture::preserving(folder));
        let device = b.ok(&["dev-start", "-b", "0", "-e", "fuse-loop"]).trim().to_owned();
        let file = std::fs::File::options().write(true).open(&device).expect("the device");
        file.write_all_at(&[1; BLOCK as usize], 0).and_then(|()| file.sync_all()).expect("written");
        // Without a flush: the kernel has it when the backend goes.
        file.write_all_at(&[2; BLOCK as usize], 0).expect("the kernel takes it");
        a.ok(&["backend-stop", "-b", "0", "--force"]);
        until("it is not served", || b.json(&["dev-list", "--json"])[0]["alive"] == false);
        file.sync_all().expect_err("the backend is gone");
        let used = b.run(&["dev-stop", "-d", "0"]);
        assert!(used.code == 1 && used.stderr.contains("is open in process"), "{used:?}");
        drop(file);
        let stopped = b.run(&["dev-stop", "-d", "0"]);
        assert_eq!(stopped.code, 0, "{stopped:?}");
        assert!(stopped.stderr.contains("what its clients had not flushed is lost"), "{stopped:?}");
        assert_eq!(b.json(&["dev-list", "--json"]).as_array().map(Vec::len), Some(0));
    });
}

#[test]
fn a_file_system_and_fio_on_another_host_see_a_pause_when_the_host_of_the_disk_is_killed() {
    let name = "a_file_system_and_fio_on_another_host_see_a_pause_when_the_host_of_the_disk_is_killed";
    in_sandbox(name, Duration::from_secs(150), |folder| {
        let (mut a, b, _) = two_hosts(Fixture::under(folder), Fixture::under(folder));
        let device = b.ok(&["dev-start", "-b", "0", "-e", "fuse-loop"]);
        let device = device.trim();
        assert_eq!(device, text_of(&b.link(0)));
        support::tool("mkfs.ext4", &["-q", device]);
        let mounted = support::sandbox::Mounted::new(device, &folder.join("mnt"), "rw");
        let mut command = fio(folder, &text_of(&mounted.path("file")));
        let mut load = command.args(["--size=20m", "--loops=20"]).spawn().expect("fio");
        let mut kills = 0;
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(400));
            if load.try_wait().expect("it is ours").is_none() {
                kills += 1;
            }
            a.kill();
            a.start();
        }
        assert!(kills >= 2, "fio was done before");
        let ended = wait(&mut load, Duration::from_secs(60)).expect("fio ends");
        assert!(ended.success(), "fio found an error: {ended}");
        mounted.unmount();
        support::tool("fsck.ext4", &["-fn", device]);
        b.ok(&["dev-stop", "-d", "0"]);
    });
}

#[test]
fn a_file_system_sees_a_pause_when_its_backend_moves() {
    let name = "a_file_system_sees_a_pause_when_its_backend_moves";
    in_sandbox(name, Duration::from_secs(300), |folder| {
        let (a, b, _) = two_hosts(Fixture::under(folder), Fixture::under(folder));
        let device = b.ok(&["dev-start", "-b", "0", "-e", "fuse-loop"]);
        let device = device.trim();
        support::tool("mkfs.ext4", &["-q", device]);
        let mounted = support::sandbox::Mounted::new(device, &folder.join("mnt"), "rw");
        let mut command = fio(folder, &text_of(&mounted.path("file")));
        let mut load = command.args(["--size=20m", "--loops=100"]).spawn().expect("fio");
        // To the host of the block device and away from it, by either.
        for (by, to) in [(&a, "b"), (&a, "a"), (&b, "b"), (&b, "a")] {
            std::thread::sleep(Duration::from_millis(300));
            assert!(load.try_wait().expect("it is ours").is_none(), "fio was done before");
            by.ok(&["backend-move", "-b", "0", "--to", to]);
        }
        let ended = wait(&mut load, Duration::from_secs(180)).expect("fio ends");
        assert!(ended.success(), "fio found an error: {ended}");
        mounted.unmount();
        support::tool("fsck.ext4", &["-fn", device]);
        b.ok(&["dev-stop", "-d", "0"]);
    });
}

#[test]
fn a_backend_moves_only_where_it_can_be() {
    let (a, mut b, _) = two_hosts(Fixture::new(), Fixture::new());
    a.ok(&["dev-start", "-b", "0", "-e", &a.nbd()]);
    let refused = |host: &Fixture, to: &str, text: &str| {
        let ran = host.run(&["backend-move", "-b", "0", "--to", to]);
        assert!(ran.code == 1 && ran.stderr.contains(text), "{ran:?}");
    };
    refused(&a, "c", "transport 0 has no host c; host-list shows which there are");
    refused(&a, "a", "backend 0 is on host a already");
    refused(&b, "a", "backend 0 is on host a already");
    let unknown = b.run(&["backend-move", "-b", "7", "--to", "b"]);
    assert!(unknown.stderr.contains("there is no backend 7"), "{unknown:?}");
    b.kill();
    refused(&a, "b", "host b gives no sign of life");
    b.start();
    // A client on a did not notice, and the next attempt succeeds.
    let mut client = connect(&a.path("nbd.sock"));
    client.write(0, &[3; BLOCK as usize], true).expect("written");
    a.ok(&["backend-move", "-b", "0", "--to", "1"]);
    let mut found = vec![0; BLOCK as usize];
    client.read(0, &mut found).expect("read");
    assert!(found.iter().all(|byte| *byte == 3));
    let events = a.ok(&["events"]);
    for event in ["backend.moving", "backend.move.failed", "backend.moved"] {
        assert!(events.contains(event), "{event} is missing: {events}");
    }
    // The other host removes it only without the block device here.
    let used = b.run(&["backend-stop", "-b", "0"]);
    assert!(
        used.code == 1 && used.stderr.contains("block device 0 of host a stands on backend 0"),
        "{used:?}"
    );
    drop(client);
    a.ok(&["dev-stop", "-d", "0"]);
    until("the other host has noticed it", || b.run(&["backend-stop", "-b", "0"]).code == 0);
}

#[test]
fn clients_of_a_daemon_that_ends_while_the_other_host_is_away_wait_for_both() {
    let name = "clients_of_a_daemon_that_ends_while_the_other_host_is_away_wait_for_both";
    in_sandbox(name, Duration::from_secs(150), |folder| {
        let (mut a, mut b, _) = two_hosts(Fixture::under(folder), Fixture::preserving(folder));
        let device = b.ok(&["dev-start", "-b", "0", "-e", "fuse-loop"]);
        let mut command = fio(folder, device.trim());
        command.args(["--size=24m", "--loops=10"]);
        let mut load = command.spawn().expect("fio");
        for _ in 0..2 {
            // It has the device open: a client that opens it while the daemon closes it is no user of it yet.
            until("fio writes", || writes_of(&b) > 0);
            std::thread::sleep(Duration::from_millis(300));
            assert!(load.try_wait().expect("it is ours").is_none(), "fio was done before");
            // Its requests are in flight, in the channel and in the kernel.
            a.kill();
            b.terminate();
            b.start();
            a.start();
            until("it is served again", || b.json(&["dev-list", "--json"])[0]["alive"] == true);
        }
        let ended = wait(&mut load, Duration::from_secs(60)).expect("fio ends");
        assert!(ended.success(), "fio found an error: {ended}");
        b.ok(&["dev-stop", "-d", "0"]);
    });
}

/// Writes of clients to the block device on the other host, since it was opened.
fn writes_of(host: &Fixture) -> u64 {
    let status = host.json(&["status", "--json"]);
    status["transports"][0]["remote_blkdevs"][0]["operations"]["write"]["requests"].as_u64().unwrap_or(0)
}

/// Fio, which writes to a file or a device and then verifies all of it.
fn fio(folder: &Path, path: &str) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=load", "--thread", "--output-format=terse", "--ioengine=libaio", "--direct=1"]);
    command.args(["--rw=randwrite", "--bsrange=4k-64k", "--iodepth=8", "--fsync=32"]);
    command.args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"]);
    command.arg(format!("--filename={path}"));
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir(folder);
    support::child::dies_with_the_test(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}
