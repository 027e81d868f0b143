//! What goes wrong while a backend moves between hosts: other commands at the same moment, a host that dies after it has agreed, a disk that
//! is gone by then.
//!
//! Three hosts share a region. The third one is stopped by SIGSTOP, so that a move waits for it while the other two hold their requests.

mod support;

use cbd_nbd::Listen;
use cbd_testkit::Client;
use rustix::fs::{FlockOperation, fcntl_lock};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::{Fixture, MIB, Ran, text_of, until, wait};

const BLOCK: u64 = 4096;

/// Hosts a, b and c with a shared block device each on backend 0 of a, and backend 1 of a.
struct Rig {
    hosts: [Fixture; 3],
    disk: String,
}

/// A command that runs beside others.
struct Running(Child);

impl Running {
    fn end(mut self) -> Ran {
        let status = wait(&mut self.0, Duration::from_secs(60)).expect("the command ends");
        let output = self.0.wait_with_output().expect("its output");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ran { code: status.code().unwrap_or(-1), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

fn connect(socket: &Path) -> Client {
    Client::connect(&Listen::Unix(socket.to_owned())).expect("the device answers")
}

fn block(client: &mut Client, number: u64) -> u8 {
    let mut found = vec![0; BLOCK as usize];
    client.read(number * BLOCK, &mut found).expect("read");
    assert!(found.iter().all(|byte| *byte == found[0]));
    found[0]
}

impl Rig {
    fn new() -> Self {
        let mut hosts = [Fixture::new(), Fixture::new(), Fixture::new()];
        hosts.iter_mut().for_each(Fixture::start);
        let [a, b, c] = &hosts;
        let region = a.region();
        a.ok(&["tp-reg", "-H", "a", "-p", &region, "--size", "128M", "--format", "--shared"]);
        b.ok(&["tp-reg", "-H", "b", "-p", &region]);
        c.ok(&["tp-reg", "-H", "c", "-p", &region]);
        let disk = a.disk("disk", 16 * MIB);
        a.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
        a.ok(&["backend-start", "-p", &a.disk("other", 16 * MIB), "-c", "16M"]);
        for host in &hosts {
            host.ok(&["dev-start", "-b", "0", "--shared", "-e", &host.nbd()]);
        }
        Self { hosts, disk }
    }

    /// Begins to move the backend to b, and waits until b holds its requests while c does not answer.
    fn hold(&self) -> Running {
        let [a, b, c] = &self.hosts;
        c.pause();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.args(["backend-move", "-b", "0", "--to", "b"]).env("CBD_SOCKET", a.socket());
        support::child::dies_with_the_test(&mut command);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let running = Running(command.spawn().expect("cbdctrl"));
        until("b holds its requests", || {
            let error = b.json(&["dev-list", "--json"])[0]["error"].to_string();
            error.contains("requests have been held for ")
        });
        let state = a.json(&["backend-list", "--json"])[0]["state"].to_string();
        assert!(state.contains("moving to host b"), "{state}");
        running
    }

    /// Whether clients on these hosts read and write, and see what the others wrote.
    fn works(&self, hosts: &[usize]) {
        for &writer in hosts {
            let mut client = connect(&self.hosts[writer].path("nbd.sock"));
            client.write(BLOCK, &[writer as u8 + 10; BLOCK as usize], true).expect("written");
            for &reader in hosts {
                let mut client = connect(&self.hosts[reader].path("nbd.sock"));
                assert_eq!(block(&mut client, 1), writer as u8 + 10);
            }
        }
    }
}

#[test]
fn commands_beside_a_move_are_refused_and_do_not_end_it() {
    let rig = Rig::new();
    let [a, b, c] = &rig.hosts;
    let moving = rig.hold();
    let refused = |host: &Fixture, command: &[&str], text: &str| {
        let ran = host.run(command);
        assert!(ran.code == 1 && ran.stderr.contains(text), "{command:?}: {ran:?}");
    };
    // The other host has a copy of the settings already.
    refused(a, &["set", "-b", "0", "cache_mode=writethrough"], "backend 0 is being moved to host b");
    refused(a, &["set", "-b", "0", "name=db"], "backend 0 is being moved to host b");
    refused(a, &["backend-move", "-b", "1", "--to", "b"], "this host moves backend 0 to host b already");
    refused(a, &["backend-move", "-b", "0", "--to", "b"], "backend 0 is being stopped or moved already");
    let failed = || {
        let counts = &a.json(&["status", "--json"])["events"]["counts"];
        counts["backend.move.failed"].as_u64().unwrap_or(0)
    };
    let before = failed();
    refused(b, &["backend-move", "-b", "1", "--to", "b"], "host a moves backend 0 to host b already");
    assert_eq!(failed(), before, "a move that has not begun has not failed");
    refused(a, &["backend-stop", "-b", "0", "--force"], "is being moved to host b already");
    for host in [a, b] {
        let another = format!("nbd:unix:{}", text_of(&host.path("another.sock")));
        refused(host, &["dev-start", "-b", "0", "--shared", "-e", &another], "is being ");
        refused(host, &["tp-unreg", "-t", "0"], "transport 0 is in use");
    }
    c.resume();
    let moved = moving.end();
    assert_eq!(moved.code, 0, "{moved:?}");
    until("all serve it", || {
        rig.hosts.iter().all(|host| host.json(&["dev-list", "--json"])[0]["alive"] == true)
    });
    rig.works(&[0, 1, 2]);
    b.ok(&["set", "-b", "0", "name=db"]);
    a.ok(&["backend-move", "-b", "1", "--to", "b"]);
}

#[test]
fn a_block_device_that_is_stopped_while_its_backend_moves_is_gone_and_the_others_move() {
    let rig = Rig::new();
    let [a, b, c] = &rig.hosts;
    for host in [a, b] {
        let second = format!("nbd:unix:{}", text_of(&host.path("second.sock")));
        host.ok(&["dev-start", "-b", "0", "--shared", "-e", &second]);
    }
    let moving = rig.hold();
    a.ok(&["dev-stop", "-d", "3"]);
    b.ok(&["dev-stop", "-d", "4"]);
    c.resume();
    let moved = moving.end();
    assert_eq!(moved.code, 0, "{moved:?}");
    rig.works(&[0, 1, 2]);
    for host in [a, b] {
        assert_eq!(host.json(&["dev-list", "--json"]).as_array().map(Vec::len), Some(1));
    }
    b.ok(&["backend-move", "-b", "0", "--to", "a"]);
    rig.works(&[0, 1, 2]);
}

#[test]
fn a_backend_is_not_moved_to_a_host_that_was_killed_after_it_had_agreed() {
    let mut rig = Rig::new();
    let moving = rig.hold();
    rig.hosts[1].kill();
    rig.hosts[2].resume();
    let moved = moving.end();
    assert!(moved.code == 1 && moved.stderr.contains("host b gives no sign of life"), "{moved:?}");
    rig.works(&[0, 2]);
    // The next attempt says so without a pause.
    until("b counts as dead", || rig.hosts[0].json(&["host-list", "--json"])[1]["alive"] == false);
    let again = rig.hosts[0].run(&["backend-move", "-b", "0", "--to", "b"]);
    assert!(again.code == 1 && again.stderr.contains("host b gives no sign of life"), "{again:?}");
    rig.hosts[1].start();
    until("b has it again", || rig.hosts[1].json(&["dev-list", "--json"])[0]["alive"] == true);
    rig.works(&[0, 1, 2]);
    rig.hosts[0].ok(&["backend-move", "-b", "0", "--to", "b"]);
    rig.works(&[0, 1, 2]);
}

/// Kills a host, and clears it from host a once it counts as dead.
fn kill_and_clear(rig: &mut Rig, host: usize) {
    rig.hosts[host].kill();
    let a = &rig.hosts[0];
    let host_id = host.to_string();
    until("it can be cleared", || a.run(&["host-clear", "-H", &host_id]).code == 0);
}

#[test]
fn a_move_does_not_wait_for_a_host_that_was_cleared_and_ends_when_the_receiving_one_was() {
    let mut rig = Rig::new();
    let moving = rig.hold();
    kill_and_clear(&mut rig, 2);
    let moved = moving.end();
    assert_eq!(moved.code, 0, "{moved:?}");
    rig.works(&[0, 1]);

    let mut rig = Rig::new();
    let moving = rig.hold();
    kill_and_clear(&mut rig, 1);
    let moved = moving.end();
    let text = "host b has left the transport; nothing was moved";
    assert!(moved.code == 1 && moved.stderr.contains(text), "{moved:?}");
    rig.hosts[2].resume();
    rig.works(&[0, 2]);
}

#[test]
fn requests_of_a_block_device_that_was_stopped_are_not_executed_when_their_host_goes_on() {
    let rig = Rig::new();
    let [a, b, _] = &rig.hosts;
    let mut local = connect(&a.path("nbd.sock"));
    local.write(0, &[1; BLOCK as usize], true).expect("written");
    a.pause();
    std::thread::scope(|scope| {
        let mut client = connect(&b.path("nbd.sock"));
        let writes = scope.spawn(move || client.write(0, &[2; BLOCK as usize], true));
        until("it is in flight", || {
            b.json(&["status", "--json"])["transports"][0]["remote_blkdevs"][0]["in_flight"] == 1
        });
        let stopped = b.run(&["dev-stop", "-d", "1", "--force"]);
        let text = "host a has not said that it executes no more requests";
        assert!(stopped.code == 0 && stopped.stderr.contains(text), "{stopped:?}");
        assert!(b.log().contains(text));
        writes.join().expect("no panic").expect_err("it was cut off");
        // A later one of the host that was paused.
        let later = scope.spawn(|| local.write(0, &[3; BLOCK as usize], true));
        std::thread::sleep(Duration::from_millis(200));
        a.resume();
        // It was away itself.
        let hosts = a.json(&["host-list", "--json"]);
        assert!((0..3).all(|host| hosts[host]["alive"] == true), "{hosts}");
        later.join().expect("no panic").expect("written");
    });
    assert_eq!(block(&mut local, 0), 3);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(block(&mut local, 0), 3, "the earlier one is not executed any more");
    assert!(!a.ok(&["events"]).contains("host.silent"));
    // A host that goes on says so at once.
    let stopped = rig.hosts[2].run(&["dev-stop", "-d", "2", "--force"]);
    assert!(stopped.code == 0 && !stopped.stderr.contains("has not said"), "{stopped:?}");
}

#[test]
fn a_disk_that_has_grown_is_larger_on_all_hosts() {
    let rig = Rig::new();
    let file = std::fs::File::options().write(true).open(&rig.disk).expect("the disk");
    file.set_len(32 * MIB).expect("larger");
    rig.hosts[0].ok(&["backend-grow", "-b", "0"]);
    for host in &rig.hosts {
        // Without a request between.
        until("its clients see that", || connect(&host.path("nbd.sock")).size() == 32 * MIB);
    }
    let device = "cbd1?socket=";
    until("the export was told", || {
        let log = rig.hosts[1].log();
        log.lines().any(|line| line.contains(device) && line.contains("has grown to 33554432 bytes"))
    });
    let last = 32 * MIB - BLOCK;
    connect(&rig.hosts[2].path("nbd.sock")).write(last, &[5; BLOCK as usize], true).expect("written");
    assert_eq!(block(&mut connect(&rig.hosts[1].path("nbd.sock")), last / BLOCK), 5);
}

#[test]
fn a_backend_is_not_moved_to_a_host_that_does_not_reach_its_disk_any_more() {
    let rig = Rig::new();
    let [a, _, c] = &rig.hosts;
    // Here the disk is away before b looks for it again.
    c.pause();
    let away = format!("{}.away", rig.disk);
    std::fs::rename(&rig.disk, &away).expect("renamed");
    let moved = a.run(&["backend-move", "-b", "0", "--to", "b"]);
    assert!(moved.code == 1 && moved.stderr.contains("host b does not reach a disk at"), "{moved:?}");
    std::fs::rename(&away, &rig.disk).expect("renamed");
    c.resume();
    rig.works(&[0, 1, 2]);
}

#[test]
fn a_backend_without_a_block_device_is_moved_only_if_its_new_host_serves_it() {
    let rig = Rig::new();
    let [a, b, _] = &rig.hosts;
    let path = a.path("other");
    let set_mode =
        |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
    let move_it = || a.run(&["backend-move", "-b", "1", "--to", "b"]);
    set_mode(0o444);
    let moved = move_it();
    assert!(moved.code == 1 && moved.stderr.contains("host b may not write to the disk"), "{moved:?}");
    assert!(moved.stderr.contains("nothing was moved") && b.log().contains("no write bit"), "{moved:?}");
    // The reason is this host's own.
    let fetched = b.run(&["backend-move", "-b", "1", "--to", "b"]);
    assert!(fetched.code == 1 && fetched.stderr.contains("no write bit"), "{fetched:?}");
    set_mode(0o644);
    // It gets the lock when a closes the disk, and b does not get it.
    let disk = std::fs::File::options().write(true).open(&path).expect("the disk");
    std::thread::scope(|scope| {
        let locking = scope.spawn(|| fcntl_lock(&disk, FlockOperation::LockExclusive));
        std::thread::sleep(Duration::from_millis(200));
        let moved = move_it();
        assert!(moved.code == 1 && moved.stderr.contains("does not serve it yet"), "{moved:?}");
        locking.join().expect("it ends").expect("the lock is free");
    });
    fcntl_lock(&disk, FlockOperation::Unlock).expect("it was ours");
    until("b serves it", || b.json(&["backend-list", "--json"])[0]["alive"] == true);
    // A command right after a move finds it.
    for _ in 0..3 {
        b.ok(&["backend-move", "-b", "1", "--to", "a"]);
        a.ok(&["set", "-b", "1", "writeback_percent=20"]);
        a.ok(&["backend-move", "-b", "1", "--to", "b"]);
        b.ok(&["dev-start", "-b", "1", "-e", &format!("nbd:unix:{}", b.text("second.sock"))]);
        b.ok(&["dev-stop", "-d", "3"]);
        a.ok(&["backend-move", "-b", "1", "--to", "a"]);
        a.ok(&["backend-move", "-b", "1", "--to", "b"]);
    }
}

#[test]
fn a_backend_that_its_new_host_cannot_open_fails_the_command_and_requests_wait() {
    let mut rig = Rig::new();
    let moving = rig.hold();
    // It gets the lock when a closes the disk, and b does not get it.
    let disk = std::fs::File::options().write(true).open(&rig.disk).expect("the disk");
    let locked = std::thread::scope(|scope| {
        let locking = scope.spawn(|| fcntl_lock(&disk, FlockOperation::LockExclusive));
        rig.hosts[2].resume();
        let moved = moving.end();
        assert!(moved.code == 1 && moved.stderr.contains("does not serve it yet"), "{moved:?}");
        locking.join().expect("it ends")
    });
    locked.expect("the lock is free");
    assert!(rig.hosts[0].ok(&["events"]).contains("backend.moved"));
    let mut client = connect(&rig.hosts[0].path("nbd.sock"));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| client.write(0, &[9; BLOCK as usize], true));
        std::thread::sleep(Duration::from_secs(3));
        assert!(!waits.is_finished(), "its requests wait");
        let status = rig.hosts[0].json(&["status", "--json"]);
        let remote = &status["transports"][0]["remote_blkdevs"][0];
        let waiting_ms = remote["waiting_ms"].as_u64().expect("a number");
        assert!(remote["in_flight"] == 1 && (1000..10_000).contains(&waiting_ms), "{remote:#}");
        fcntl_lock(&disk, FlockOperation::Unlock).expect("it was ours");
        waits.join().expect("it ends").expect("b serves it now");
    });
    rig.works(&[0, 1, 2]);

    // The same with a host that does not come back.
    rig.hosts[1].ok(&["backend-move", "-b", "0", "--to", "a"]);
    let moving = rig.hold();
    std::thread::scope(|scope| {
        scope.spawn(|| fcntl_lock(&disk, FlockOperation::LockExclusive));
        rig.hosts[2].resume();
        assert_eq!(moving.end().code, 1);
    });
    rig.hosts[1].kill();
    until("b counts as dead", || rig.hosts[0].json(&["host-list", "--json"])[1]["alive"] == false);
    rig.hosts[0].ok(&["host-clear", "-H", "1"]);
    client.write(0, &[9; BLOCK as usize], true).expect_err("the backend is gone");
    drop((client, disk));
    rig.hosts[0].ok(&["dev-stop", "-d", "0"]);
    rig.hosts[2].ok(&["dev-stop", "-d", "2"]);
    rig.hosts[0].ok(&["backend-start", "-p", &rig.disk, "-c", "16M"]);
}
