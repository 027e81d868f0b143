//! The daemon is killed at random moments under a load that logs its writes; no acknowledged write may be lost.
//!
//! Invariants: the log of writes is in this process, not in the daemon. The device is divided into cells, and each cell
//! belongs to one connection. In a cell at most two requests are in flight, and two overlap: an acknowledged one must
//! be there, any other may be there, each completely or not at all.
//!
//! `CBD_KILLS` sets the number of kills (50), `CBD_SEED` the seed of the random choices.

mod support;

use cbd_testkit::{Client, Command};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use support::pattern::{Random, SECTOR, fill, seed, version_of};
use support::{Fixture, MIB};

/// Bytes of a cell: no request is larger than the atomic unit of the small cache, none crosses a chunk.
const CELL: u64 = 256 << 10;
const SECTORS: u64 = CELL / SECTOR as u64;
/// Not a multiple of a cell or a page.
const SIZE: u64 = 32 * MIB + 3 * 4096 + 512;
const CONNECTIONS: usize = 4;
const DEPTH: usize = 12;
/// The contents of the disk before it was cached.
const OLD: u64 = 1;

/// A change of a cell that is in flight, or that has completed while another one of the cell is in flight.
#[derive(Clone, Debug)]
struct Change {
    /// Sectors of the cell.
    first: usize,
    end: usize,
    /// The version that it writes; 0 for zeroes.
    version: u64,
    acknowledged: bool,
}

impl Change {
    fn apply(&self, sectors: &mut [u64]) {
        sectors[self.first..self.end].fill(self.version);
    }
}

/// A part of the device, and its logged changes.
#[derive(Debug)]
struct Cell {
    number: u64,
    /// For each sector the version of the write that it is from.
    sectors: Vec<u64>,
    changes: Vec<Change>,
}

impl Cell {
    fn new(number: u64) -> Self {
        let bytes = (SIZE - number * CELL).min(CELL);
        Self { number, sectors: vec![OLD; bytes as usize / SECTOR], changes: Vec::new() }
    }

    fn offset(&self) -> u64 {
        self.number * CELL
    }

    fn length(&self) -> u32 {
        (self.sectors.len() * SECTOR) as u32
    }

    /// Every permitted state: all acknowledged changes in any order, and any of the others.
    fn allowed(&self) -> Vec<Vec<u64>> {
        let mut orders: Vec<Vec<usize>> = vec![vec![]];
        for _ in &self.changes {
            let longer: Vec<Vec<usize>> = orders
                .iter()
                .flat_map(|order| {
                    (0..self.changes.len())
                        .filter(|index| !order.contains(index))
                        .map(|index| order.iter().copied().chain([index]).collect())
                })
                .collect();
            orders.extend(longer);
        }
        let whole = |order: &Vec<usize>| {
            (0..self.changes.len()).all(|index| !self.changes[index].acknowledged || order.contains(&index))
        };
        let state = |order: &Vec<usize>| {
            let mut sectors = self.sectors.clone();
            order.iter().for_each(|&index| self.changes[index].apply(&mut sectors));
            sectors
        };
        orders.iter().filter(|order| whole(order)).map(state).collect()
    }

    /// Compares the contents with the permitted states, and records them as the present state.
    fn compare(&mut self, bytes: &[u8]) -> Result<(), String> {
        let first = self.number * SECTORS;
        let mut found = Vec::with_capacity(self.sectors.len());
        for (index, sector) in bytes.chunks_exact(SECTOR).enumerate() {
            found.push(version_of(sector, first + index as u64)?);
        }
        let allowed = self.allowed();
        if !allowed.contains(&found) {
            let newest = allowed.last().unwrap_or(&self.sectors);
            let wrong = (0..found.len()).find(|&index| found[index] != newest[index]).unwrap_or(0);
            return Err(format!(
                "cell {} is in no state that it may be in: sector {wrong} has version {} instead of {}, changes {:?}",
                self.number, found[wrong], newest[wrong], self.changes
            ));
        }
        self.sectors = found;
        self.changes.clear();
        Ok(())
    }
}

/// Shared state of the load and the test.
struct Load {
    cells: Vec<Mutex<Vec<Cell>>>,
    next_version: AtomicU64,
    acknowledged: AtomicU64,
    /// Set when connections may break from now on.
    killing: AtomicBool,
}

/// The request of a reply.
enum Sent {
    Change { cell: usize, change: usize },
    Read { cell: usize },
    Flush,
}

/// One connection with its cells.
struct Writer<'a> {
    load: &'a Load,
    client: Client,
    cells: &'a mut [Cell],
    /// Cells with requests in flight, and the number of those requests.
    busy: HashMap<usize, usize>,
    sent: HashMap<u64, Sent>,
    random: Random,
    data: Vec<u8>,
}

/// Loads the device until the connection breaks; returns the number of requests without a reply.
fn write_until_killed(load: &Load, number: usize, client: Client, seed: u64) -> usize {
    let mut cells = load.cells[number].lock().expect("no writer panicked");
    let mut writer = Writer {
        load,
        client,
        cells: &mut cells,
        busy: HashMap::new(),
        sent: HashMap::new(),
        random: Random(seed),
        data: Vec::new(),
    };
    let error = loop {
        if let Err(error) = writer.turn() {
            break error;
        }
    };
    assert!(load.killing.load(Ordering::Relaxed), "the device failed before the kill: {error}");
    writer.client.outstanding().count()
}

impl Writer<'_> {
    fn turn(&mut self) -> cbd_types::Result<()> {
        while self.client.in_flight() < DEPTH {
            let cell = self.random.below(self.cells.len() as u64) as usize;
            if self.busy.contains_key(&cell) {
                continue;
            }
            // Two that overlap must be verified before the next change.
            if !self.cells[cell].changes.is_empty() || self.random.percent(10) {
                let (offset, length) = (self.cells[cell].offset(), self.cells[cell].length());
                let cookie = self.client.submit(Command::Read { offset, length })?;
                self.record_sent(cookie, cell, Sent::Read { cell });
            } else if self.random.percent(3) {
                let cookie = self.client.submit(Command::Flush)?;
                self.sent.insert(cookie, Sent::Flush);
            } else {
                for _ in 0..1 + self.random.below(6) / 5 {
                    self.change(cell)?;
                }
            }
        }
        let Some(completed) = self.client.complete()? else { return Ok(()) };
        if let Err(error) = completed.result {
            assert!(self.load.killing.load(Ordering::Relaxed), "a request failed before the kill: {error}");
            return Ok(());
        }
        match self.sent.remove(&completed.cookie).expect("a reply to a request") {
            Sent::Flush => {}
            Sent::Change { cell, change } => {
                self.load.acknowledged.fetch_add(1, Ordering::Relaxed);
                self.cells[cell].changes[change].acknowledged = true;
                self.answered(cell);
                if let ([only], false) = (&self.cells[cell].changes[..], self.busy.contains_key(&cell)) {
                    only.clone().apply(&mut self.cells[cell].sectors);
                    self.cells[cell].changes.clear();
                }
            }
            Sent::Read { cell } => {
                self.answered(cell);
                self.cells[cell].compare(&completed.data).unwrap_or_else(|text| panic!("read: {text}"));
            }
        }
        self.client.recycle(completed.data);
        Ok(())
    }

    /// Sends a change of a random part of the cell.
    fn change(&mut self, cell: usize) -> cbd_types::Result<()> {
        let sectors = self.cells[cell].sectors.len() as u64;
        // Sizes from a sector to a cell; most are whole pages.
        let unit = if self.random.percent(20) { 1 } else { 8.min(sectors) };
        let longest = 1 << self.random.below(1 + u64::from((sectors / unit).ilog2()));
        let length = unit * (1 + self.random.below(longest)).min(sectors / unit);
        let first = self.random.below((sectors - length) / unit + 1) * unit;
        let offset = self.cells[cell].offset() + first * SECTOR as u64;
        let bytes = length * SECTOR as u64;
        let fua = self.random.percent(10);
        let kind = self.random.below(100);
        let version = if kind < 12 { 0 } else { self.load.next_version.fetch_add(1, Ordering::Relaxed) };
        let changes = &mut self.cells[cell].changes;
        changes.push(Change {
            first: first as usize,
            end: (first + length) as usize,
            version,
            acknowledged: false,
        });
        let change = changes.len() - 1;
        let length = bytes as u32;
        let command = match kind {
            0..6 => Command::Trim { offset, length, fua },
            6..12 => Command::WriteZeroes { offset, length, fua, no_hole: kind < 9, fast: false },
            _ => {
                self.data.resize(bytes as usize, 0);
                for (index, sector) in self.data.chunks_exact_mut(SECTOR).enumerate() {
                    fill(sector, offset / SECTOR as u64 + index as u64, version);
                }
                Command::Write { offset, data: &self.data, fua }
            }
        };
        let cookie = self.client.submit(command)?;
        self.record_sent(cookie, cell, Sent::Change { cell, change });
        Ok(())
    }

    fn record_sent(&mut self, cookie: u64, cell: usize, sent: Sent) {
        self.sent.insert(cookie, sent);
        *self.busy.entry(cell).or_default() += 1;
    }

    fn answered(&mut self, cell: usize) {
        let left = self.busy.get_mut(&cell).expect("it was busy");
        *left -= 1;
        if *left == 0 {
            self.busy.remove(&cell);
        }
    }
}

/// Reads every cell and compares it with the log.
fn check(load: &Load, client: &mut Client) {
    for cells in &load.cells {
        for cell in cells.lock().expect("no writer panicked").iter_mut() {
            let mut bytes = vec![0; cell.length() as usize];
            client.read(cell.offset(), &mut bytes).expect("every byte can be read");
            cell.compare(&bytes).unwrap_or_else(|text| panic!("after the kill: {text}"));
        }
    }
}

/// The state at the moment of a kill.
#[derive(Debug)]
struct Moment {
    dirty_bytes: u64,
    free_segments: u64,
    written_back: bool,
    unanswered: usize,
}

/// Loads the device for `milliseconds` and kills the daemon.
fn load_and_kill(fixture: &mut Fixture, load: &Arc<Load>, random: &mut Random, milliseconds: u64) -> Moment {
    load.killing.store(false, Ordering::Relaxed);
    let (sender, ends) = mpsc::channel();
    let writers: Vec<_> = (0..CONNECTIONS)
        .map(|number| {
            let (load, client, sender) = (Arc::clone(load), fixture.client(), sender.clone());
            let seed = random.number();
            std::thread::spawn(move || {
                let _ = sender.send(write_until_killed(&load, number, client, seed));
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(milliseconds));
    let cache = fixture.cache();
    let number = |name: &str| cache[name].as_u64().expect("a number");
    let before = number("written_back_bytes");
    let now = fixture.cache();
    load.killing.store(true, Ordering::Relaxed);
    fixture.kill();
    drop(sender);
    let mut unanswered = 0;
    for _ in &writers {
        match ends.recv_timeout(Duration::from_secs(60)) {
            Ok(count) => unanswered += count,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("a client waits for a dead server"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    for writer in writers {
        writer.join().expect("no writer panicked");
    }
    Moment {
        dirty_bytes: now["dirty_bytes"].as_u64().expect("a number"),
        free_segments: now["free_segments"].as_u64().expect("a number"),
        written_back: now["written_back_bytes"].as_u64().is_some_and(|after| after > before),
        unanswered,
    }
}

/// The disk as it was before, with old data everywhere.
fn old_disk(fixture: &Fixture) -> String {
    let mut bytes = vec![0; SIZE as usize];
    for (number, sector) in bytes.chunks_exact_mut(SECTOR).enumerate() {
        fill(sector, number as u64, OLD);
    }
    std::fs::write(fixture.path("disk"), bytes).expect("a disk");
    fixture.text("disk")
}

#[test]
fn acknowledged_writes_are_complete_after_every_kill() {
    let kills = std::env::var("CBD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(50_u64);
    let mut random = Random(seed());
    let mut fixture = Fixture::new();
    // Slower than the clients, so that the cache is full and reclaim runs continuously.
    fixture.decorate = Some("throttle:ssd,mib_per_s=250".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = old_disk(&fixture);
    fixture.start_backend(&disk);
    let load = Arc::new(idle_load());
    let (mut working, mut full) = (0, 0);
    for round in 0..kills {
        let mode = ["strict", "checkpoint", "none"][round as usize % 3];
        fixture.ok(&["set", "--backend", "0", &format!("consistency={mode}")]);
        let milliseconds = 20 + random.below(400);
        let moment = load_and_kill(&mut fixture, &load, &mut random, milliseconds);
        println!("kill {round} ({mode}): {moment:?}");
        assert!(moment.unanswered > 0, "no request was in flight at kill {round}");
        assert!(moment.dirty_bytes > 0, "nothing was dirty at kill {round}");
        working += u64::from(moment.written_back);
        full += u64::from(moment.free_segments <= 2);
        if random.percent(25) {
            // Also during the restart.
            fixture.start_without_waiting();
            std::thread::sleep(Duration::from_millis(random.below(60)));
            fixture.kill();
        }
        fixture.start();
        check(&load, &mut fixture.client());
        let cache = fixture.cache();
        assert_eq!(cache["damage_found"], 0, "a kill is no damage: {cache}");
    }
    let acknowledged = load.acknowledged.load(Ordering::Relaxed);
    println!(
        "{kills} kills, {working} while writeback ran, {full} with a full cache, {acknowledged} changes acknowledged"
    );
    assert!(kills < 10 || (working >= kills / 4 && full >= kills / 4), "the load was too light");
    fixture.ok(&["backend-stop", "--backend", "0"]);
    check_plain(&load, &disk);
}

/// A cell whose first page was written by 2, acknowledged, and overlapped by 3, which was not.
fn cell_with_changes() -> Cell {
    let mut cell = Cell::new(0);
    cell.changes.push(Change { first: 0, end: 8, version: 2, acknowledged: true });
    cell.changes.push(Change { first: 4, end: 12, version: 3, acknowledged: false });
    cell
}

fn bytes_of(sectors: &[(usize, u64)]) -> Vec<u8> {
    let versions = sectors.iter().flat_map(|&(count, version)| std::iter::repeat_n(version, count));
    let mut bytes = vec![0; CELL as usize];
    for ((number, sector), version) in bytes.chunks_exact_mut(SECTOR).enumerate().zip(versions) {
        fill(sector, number as u64, version);
    }
    bytes
}

#[test]
fn the_log_allows_whole_changes_in_any_order() {
    for found in [[(8, 2), (4, OLD)], [(4, 2), (8, 3)], [(8, 2), (4, 3)]] {
        let bytes = bytes_of(&[found[0], found[1], (500, OLD)]);
        assert_eq!(cell_with_changes().compare(&bytes), Ok(()), "{found:?}");
    }
}

#[test]
fn the_log_detects_missing_torn_and_foreign_data() {
    // Missing; torn; torn on the other side; data that no client wrote.
    for found in [[(8, OLD), (4, OLD)], [(8, 2), (2, 3)], [(6, 2), (6, 3)], [(8, 2), (4, 9)]] {
        let rest = 512 - found[0].0 - found[1].0;
        let bytes = bytes_of(&[found[0], found[1], (rest, OLD)]);
        assert!(cell_with_changes().compare(&bytes).is_err(), "{found:?}");
    }
    let mut bytes = bytes_of(&[(8, 2), (504, OLD)]);
    bytes[3000] ^= 1;
    assert!(cell_with_changes().compare(&bytes).is_err(), "a flipped bit");
}

/// The logs of a load over a whole device, without connections.
fn idle_load() -> Load {
    let mut cells: Vec<Vec<Cell>> = (0..CONNECTIONS).map(|_| Vec::new()).collect();
    for number in 0..SIZE.div_ceil(CELL) {
        cells[number as usize % CONNECTIONS].push(Cell::new(number));
    }
    Load {
        cells: cells.into_iter().map(Mutex::new).collect(),
        next_version: AtomicU64::new(OLD + 1),
        acknowledged: AtomicU64::new(0),
        killing: AtomicBool::new(false),
    }
}

/// Reads every cell from the plain disk and compares it with the log.
fn check_plain(load: &Load, disk: &str) {
    let plain = std::fs::File::open(disk).expect("the disk");
    for cells in &load.cells {
        for cell in cells.lock().expect("no writer panicked").iter_mut() {
            let mut bytes = vec![0; cell.length() as usize];
            plain.read_exact_at(&mut bytes, cell.offset()).expect("the disk has its size");
            cell.compare(&bytes).unwrap_or_else(|text| panic!("on the plain disk: {text}"));
        }
    }
    assert_eq!(plain.metadata().expect("the disk").len(), SIZE);
}

#[test]
fn a_kill_in_the_middle_of_a_stop_loses_nothing() {
    let mut random = Random(seed());
    let mut fixture = Fixture::new();
    // 12 MiB are drained in about 100 ms.
    fixture.decorate = Some("throttle:ssd,mib_per_s=120".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = old_disk(&fixture);
    fixture.start_backend(&disk);
    let load = idle_load();
    let (mut there, mut without_device, mut gone) = (0, 0, 0);
    for round in 0..12 {
        let mut client = fixture.client();
        for cells in &load.cells {
            for cell in cells.lock().expect("no writer panicked").iter_mut().step_by(3) {
                let version = load.next_version.fetch_add(1, Ordering::Relaxed);
                let mut bytes = vec![0; cell.length() as usize];
                for (number, sector) in (cell.number * SECTORS..).zip(bytes.chunks_exact_mut(SECTOR)) {
                    fill(sector, number, version);
                }
                client.write(cell.offset(), &bytes, false).expect("written");
                cell.sectors.fill(version);
            }
        }
        drop(client);
        let mut stop = std::process::Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        stop.args(["backend-stop", "--backend", "0"]).env("CBD_SOCKET", fixture.socket());
        stop.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let mut stop = stop.spawn().expect("a stop");
        // Every third stop reaches its last steps, which begin when the export has closed.
        if round % 3 == 2 {
            let end = std::time::Instant::now() + Duration::from_secs(20);
            while fixture.path("nbd.sock").exists() && std::time::Instant::now() < end {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_micros(random.below(2000)));
        } else {
            std::thread::sleep(Duration::from_millis(random.below(60)));
        }
        fixture.kill();
        support::wait(&mut stop, Duration::from_secs(20)).expect("the stop sees the end of the daemon");
        fixture.start();
        if fixture.json(&["backend-list"])[0].is_object() {
            there += 1;
            // The block devices are closed first.
            if fixture.json(&["dev-list"]) == serde_json::json!([]) {
                without_device += 1;
                fixture.ok(&["dev-start", "--backend", "0", "--export", &fixture.nbd()]);
            }
            check(&load, &mut fixture.client());
        } else {
            gone += 1;
            check_plain(&load, &disk);
            assert_eq!(fixture.json(&["dev-list"]), serde_json::json!([]));
            fixture.start_backend(&disk);
        }
        let cache = fixture.cache();
        assert_eq!(cache["damage_found"], 0, "a kill is no damage: {cache}");
    }
    println!(
        "the backend was there {there} times, {without_device} without its device, and gone {gone} times"
    );
    assert!(there > 0, "no stop was hit in its middle");
    fixture.ok(&["backend-stop", "--backend", "0"]);
    check_plain(&load, &disk);
    // All of its space is free again.
    assert_eq!(fixture.json(&["tp-list"])[0]["free_segments"], fixture.json(&["tp-list"])[0]["segment_num"]);
}
