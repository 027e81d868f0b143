//! A PostgreSQL whose data directory is on one backend and whose write-ahead log is on another: from the two disks alone, as a
//! checkpoint of both together leaves them, it starts, and has every transaction that was acknowledged before the command.
//!
//! Invariants: the log of acknowledged transactions is in this process. A client inserts one row after the other, each when
//! the one before was acknowledged, so the rows that are there must be the first ones of each client.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::pattern::{Random, seed};
use support::sandbox::{MEMORY, Mounted, in_sandbox};
use support::{Fixture, MIB, run_for, text_of, tool, try_tool, until};

const CLIENTS: usize = 4;
/// Pause of a client between two rows.
const THINKS: Duration = Duration::from_millis(5);
/// The user as whom PostgreSQL runs, which refuses root.
const USER: &str = "postgres";

/// The folder of PostgreSQL's programs of the newest version that is installed.
fn programs() -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL is installed");
    let number = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    let newest = versions.flatten().map(|entry| entry.path()).max_by_key(number);
    newest.expect("a version of PostgreSQL").join("bin")
}

/// A program of PostgreSQL, as its user, which ends with this process.
fn as_user(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups", "--pdeathsig", "KILL", "--"]);
    command.arg(programs().join(program)).env("LC_ALL", "C").current_dir("/").stdin(Stdio::null());
    command
}

/// A running server; it is killed when this is dropped.
struct Server {
    process: Child,
    sockets: PathBuf,
}

impl Server {
    /// Starts the server on `data`, and waits until it has recovered.
    #[track_caller]
    fn start(data: &Path, sockets: &Path) -> Self {
        let log =
            std::fs::File::options().create(true).append(true).open(sockets.join("log")).expect("a log");
        let mut command = as_user("postgres");
        command.arg("-D").arg(data).args(["-k", &text_of(sockets), "-c", "listen_addresses="]);
        // Its data gets to the disk all the time, not only at its checkpoints.
        for setting in ["shared_buffers=1MB", "bgwriter_delay=10ms", "max_wal_size=32MB", "min_wal_size=32MB"]
        {
            command.args(["-c", setting]);
        }
        command.stderr(log.try_clone().expect("a log")).stdout(log);
        let mut server = Self { process: command.spawn().expect("the server"), sockets: sockets.to_owned() };
        until("the start of PostgreSQL", || {
            if let Some(status) = server.process.try_wait().expect("it is ours") {
                panic!("PostgreSQL ended: {status}\n{}", log_of(sockets));
            }
            server.try_sql("SELECT 1").is_some()
        });
        server
    }

    fn psql(&self) -> Command {
        let mut command = as_user("psql");
        command.args([
            "-h",
            &text_of(&self.sockets),
            "-U",
            USER,
            "-d",
            USER,
            "-qAtX",
            "-v",
            "ON_ERROR_STOP=1",
        ]);
        command
    }

    /// The rows of a query, if the server answers it.
    fn try_sql(&self, query: &str) -> Option<String> {
        let mut command = self.psql();
        command.args(["-c", query]);
        let ran = run_for(command, Duration::from_secs(60));
        (ran.code == 0).then_some(ran.stdout)
    }

    #[track_caller]
    fn sql(&self, query: &str) -> String {
        self.try_sql(query).unwrap_or_else(|| panic!("{query} failed\n{}", log_of(&self.sockets)))
    }

    /// For each client the number of its rows, which are the first ones.
    #[track_caller]
    fn rows(&self) -> Vec<u64> {
        let mut rows = vec![0; CLIENTS];
        let found = self.sql("SELECT client, count(*), max(number) FROM done GROUP BY client");
        for line in found.lines() {
            let fields: Vec<u64> = line.split('|').map(|field| field.parse().expect("a number")).collect();
            assert_eq!(fields[1], fields[2], "a row of client {} is missing before its last one", fields[0]);
            rows[fields[0] as usize] = fields[1];
        }
        rows
    }

    /// A checkpoint of its own, and the end.
    fn stop(mut self) {
        support::child::signal(&self.process.id().to_string(), libc::SIGINT);
        support::wait(&mut self.process, Duration::from_secs(60)).expect("it ends");
    }
}

impl Drop for Server {
    /// Kills all its processes: one that waits for a lock of another one would not notice the end of the first.
    fn drop(&mut self) {
        support::child::kill_with_children(self.process.id());
        let _ = self.process.wait();
    }
}

fn log_of(sockets: &Path) -> String {
    support::tail(&std::fs::read_to_string(sockets.join("log")).unwrap_or_default(), 30)
}

/// Inserts rows until the server is gone; `acknowledged` is the number of those that it has answered.
fn insert(server: &Server, client: usize, acknowledged: &AtomicU64, killing: &AtomicBool) {
    let mut command = server.psql();
    let mut psql =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("psql");
    let mut input = psql.stdin.take().expect("it is piped");
    let mut answers = BufReader::new(psql.stdout.take().expect("it is piped")).lines();
    loop {
        let number = acknowledged.load(Ordering::SeqCst) + 1;
        let row = format!(
            "INSERT INTO done VALUES ({client}, {number}, repeat('x', 200)) ON CONFLICT DO NOTHING; SELECT {number};\n"
        );
        let answer = input.write_all(row.as_bytes()).ok().and_then(|()| answers.next()?.ok());
        if answer != Some(number.to_string()) {
            assert!(
                killing.load(Ordering::SeqCst),
                "a row was not inserted: {answer:?}\n{}",
                log_of(&server.sockets)
            );
            break;
        }
        acknowledged.store(number, Ordering::SeqCst);
        // With `strict` the disk takes a flush for each commit.
        std::thread::sleep(THINKS);
    }
    drop((input, answers));
    let _ = psql.kill();
    psql.wait().expect("it is ours");
}

/// What is mounted: the data directory's file system and that of the write-ahead log.
struct Mounts([Mounted; 2]);

impl Mounts {
    fn new(folder: &Path, devices: &[String; 2], options: &str) -> Self {
        let places = ["data", "wal"].map(|name| folder.join(name));
        Self([Mounted::new(&devices[0], &places[0], options), Mounted::new(&devices[1], &places[1], options)])
    }

    /// Unmounts both when the last process of the server has ended.
    fn unmount(self) {
        for mounted in self.0 {
            let at = text_of(&mounted.path(""));
            until("the end of PostgreSQL's processes", || try_tool("umount", &[&at]).code == 0);
            mounted.was_unmounted();
        }
    }
}

/// A daemon with two backends on slow disks, and the devices on them.
fn two_disks(folder: &Path) -> (Fixture, [String; 2], [String; 2]) {
    let mut fixture = Fixture::under(folder);
    fixture.decorate = Some("throttle:ssd,mib_per_s=60,flush_us=300".to_owned());
    fixture.start();
    fixture.register("256M");
    let disks = ["disk0", "disk1"].map(|name| fixture.disk(name, 256 * MIB));
    for disk in &disks {
        fixture.ok(&["backend-start", "-p", disk, "-c", "64M", "--start-dev", "--export", "fuse-loop"]);
    }
    let devices = [0, 1].map(|number| text_of(&fixture.link(number)));
    for device in &devices {
        tool("mkfs.ext4", &["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device]);
    }
    (fixture, disks, devices)
}

/// Makes the cluster: its data directory on one disk, its write-ahead log on the other.
fn make_cluster(folder: &Path) {
    for place in ["data", "wal"] {
        let path = folder.join(place).join("cluster");
        std::fs::create_dir(&path).expect("a folder");
        tool("chown", &[USER, &text_of(&path)]);
    }
    let mut command = as_user("initdb");
    command.arg("-D").arg(folder.join("data/cluster")).arg("-X").arg(folder.join("wal/cluster"));
    command.args(["-A", "trust", "-U", USER, "--no-sync"]);
    let ran = run_for(command, Duration::from_secs(120));
    assert_eq!(ran.code, 0, "initdb: {}\n{}", ran.stdout, ran.stderr);
    tool("sync", &[]);
}

/// The rows that were acknowledged: when the command began, and at the end.
struct Acknowledged {
    before: Vec<u64>,
    last: Vec<u64>,
}

/// Clients insert rows, the command is given among them, and everything is killed.
fn insert_and_kill(fixture: &mut Fixture, server: Server, rows: &[u64], random: &mut Random) -> Acknowledged {
    let acknowledged: Vec<AtomicU64> = rows.iter().copied().map(AtomicU64::new).collect();
    let now = || acknowledged.iter().map(|rows| rows.load(Ordering::SeqCst)).collect::<Vec<u64>>();
    let killing = AtomicBool::new(false);
    let before = std::thread::scope(|scope| {
        for (client, acknowledged) in acknowledged.iter().enumerate() {
            let (server, killing) = (&server, &killing);
            scope.spawn(move || insert(server, client, acknowledged, killing));
        }
        std::thread::sleep(Duration::from_millis(300 + random.below(700)));
        if random.percent(50) {
            server.sql("CHECKPOINT");
        }
        let before = now();
        let begun = std::time::Instant::now();
        let printed = fixture.ok(&["checkpoint", "-b", "0,1", "--together", "--hold", "60s"]);
        println!("the command took {:.1} s", begun.elapsed().as_secs_f64());
        assert!(printed.contains("the disks are at") && printed.contains("-b 1 writeback=on"), "{printed}");
        std::thread::sleep(Duration::from_millis(200 + random.below(500)));
        killing.store(true, Ordering::SeqCst);
        fixture.kill();
        support::child::kill_with_children(server.process.id());
        before
    });
    Acknowledged { before, last: now() }
}

/// Starts the server on copies of the disks alone. Returns how many of the acknowledged rows are behind the moment.
fn check_alone(folder: &Path, disks: &[String; 2], acknowledged: &Acknowledged, round: u64) -> u64 {
    let copies = [0, 1].map(|number| text_of(&folder.join(format!("copy{number}"))));
    for (disk, copy) in disks.iter().zip(&copies) {
        tool("cp", &["--sparse=always", disk, copy]);
    }
    let mounts = Mounts::new(folder, &copies, "loop,rw");
    let server = Server::start(&folder.join("data/cluster"), &folder.join(MEMORY).join("sockets"));
    let found = server.rows();
    println!(
        "round {round}: {found:?} of {:?} before the command, {:?} at last",
        acknowledged.before, acknowledged.last
    );
    assert!(
        found.iter().zip(&acknowledged.before).all(|(found, before)| found >= before),
        "round {round}: transactions are missing that were acknowledged before the command"
    );
    // Every page of every table can be read.
    server.sql("CREATE TABLE copied AS SELECT * FROM done");
    server.stop();
    mounts.unmount();
    for copy in &copies {
        let checked = try_tool("e2fsck", &["-fn", copy]);
        assert_eq!(checked.code, 0, "round {round}: {}\n{}", checked.stdout, checked.stderr);
    }
    acknowledged.last.iter().zip(&found).map(|(last, found)| last.saturating_sub(*found)).sum()
}

#[test]
fn postgresql_starts_from_two_disks_alone_with_everything_acknowledged_before_the_command() {
    let rounds = rounds_wanted();
    let name = "postgresql_starts_from_two_disks_alone_with_everything_acknowledged_before_the_command";
    in_sandbox(name, Duration::from_secs(120 + 30 * rounds), |folder| {
        let mut random = Random(seed());
        // PostgreSQL's user reaches what is mounted, and its sockets.
        tool("chmod", &["755", &text_of(folder)]);
        let sockets = folder.join(MEMORY).join("sockets");
        std::fs::create_dir(&sockets).expect("a folder");
        tool("chown", &[USER, &text_of(&sockets)]);
        let (mut fixture, disks, devices) = two_disks(folder);
        let mut mounts = Mounts::new(folder, &devices, "rw");
        make_cluster(folder);
        let mut server = Server::start(&folder.join("data/cluster"), &sockets);
        server.sql("CREATE TABLE done (client int, number int, filler text, PRIMARY KEY (client, number))");
        let (mut rows, mut behind) = (vec![0; CLIENTS], 0);
        for round in 0..rounds {
            for backend in ["0", "1"] {
                let consistency = ["consistency=strict", "consistency=checkpoint"][round as usize % 2];
                fixture.ok(&["set", "-b", backend, consistency]);
            }
            let acknowledged = insert_and_kill(&mut fixture, server, &rows, &mut random);
            mounts.unmount();
            behind += check_alone(folder, &disks, &acknowledged, round);
            // With the region nothing at all is lost.
            fixture.start();
            mounts = Mounts::new(folder, &devices, "rw");
            server = Server::start(&folder.join("data/cluster"), &sockets);
            rows = server.rows();
            assert!(
                rows.iter().zip(&acknowledged.last).all(|(found, last)| found >= last),
                "round {round}: {rows:?}"
            );
            for backend in ["0", "1"] {
                fixture.ok(&["set", "-b", backend, "writeback=on"]);
            }
        }
        assert!(behind > 0, "the disks were never behind: the test shows nothing");
        println!(
            "{rounds} rounds: every transaction acknowledged before the command was there; {behind} later ones were not"
        );
        server.stop();
        mounts.unmount();
    });
}

/// The number of rounds, from the environment.
fn rounds_wanted() -> u64 {
    std::env::var("CBD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}
