//! A program that is killed with requests waiting and started again: the new process finds every acknowledged write, and
//! from its first answer on nothing of the former process takes effect.
//!
//! Elsewhere: requests that a slow disk still has.

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use support::{MIB, Place, version};

/// What the example of that name uses.
const BLOCKS: u64 = 320;
/// Versions of a later process are higher, so none is taken for another's.
const STEP: u64 = 1_000_000;

/// A process of the example `successor`; killed at the latest when its test ends.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a process printed.
#[derive(Default)]
struct Said {
    found: BTreeMap<u64, u64>,
    kept: BTreeMap<u64, u64>,
    /// The last acknowledged version of each block.
    wrote: BTreeMap<u64, u64>,
    /// Acknowledged writes after the drain.
    later: usize,
    waiting: usize,
}

impl Said {
    fn note(&mut self, line: &str) {
        let words: Vec<_> = line.split(' ').collect();
        // The last line of a killed process may be truncated.
        let number = |place: usize| words.get(place).and_then(|word| word.parse::<u64>().ok());
        match (words[0], number(1), number(2)) {
            ("found", Some(block), Some(version)) => drop(self.found.insert(block, version)),
            ("kept", Some(block), Some(version)) => drop(self.kept.insert(block, version)),
            ("wrote", Some(block), Some(version)) => {
                self.later += usize::from(!self.kept.is_empty());
                let last = self.wrote.entry(block).or_insert(version);
                // A truncated number is smaller.
                *last = version.max(*last);
            }
            ("waiting", Some(count), None) => self.waiting = count as usize,
            _ => {}
        }
    }
}

impl Process {
    fn start(place: &Place, first: u64, mode: &str) -> Self {
        let mut path: PathBuf = std::env::current_exe().unwrap();
        path.pop();
        path.pop();
        let mut child = Command::new(path.join("examples/successor"))
            .arg(place.region_path())
            .arg(place.disk())
            .arg(first.to_string())
            .arg(mode)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Kills it as soon as `is_enough`, and returns what it said.
    fn kill_when(mut self, is_enough: impl Fn(&Said) -> bool) -> Said {
        let mut said = Said::default();
        while !is_enough(&said) {
            said.note(&self.lines.next().expect("the process is alive").unwrap());
        }
        self.child.kill().unwrap();
        assert!(!self.child.wait().unwrap().success());
        self.lines.by_ref().map_while(Result::ok).for_each(|line| said.note(&line));
        said
    }
}

/// Runs processes one after the other, each of which is killed, and returns the acknowledged versions of the last one.
fn succession(
    place: &Place,
    processes: u64,
    mode: &str,
    is_enough: impl Fn(&Said) -> bool,
) -> BTreeMap<u64, u64> {
    let mut acknowledged: BTreeMap<u64, u64> = BTreeMap::new();
    for process in 0..processes {
        let first = 1 + STEP * process;
        let said = Process::start(place, first, mode).kill_when(&is_enough);
        for block in 0..BLOCKS {
            let (found, kept) = (said.found[&block], said.kept[&block]);
            let before = acknowledged.get(&block).copied().unwrap_or(0);
            assert!(
                found >= before,
                "process {process}: block {block} is {found}, {before} was acknowledged"
            );
            assert!(found < first, "process {process}: block {block} is {found} before it wrote anything");
            let expected = if block % 2 == 0 { first } else { found };
            assert_eq!(
                kept, expected,
                "process {process}: block {block} was {found}, and something of a former process took effect"
            );
        }
        acknowledged = said.kept;
        acknowledged.extend(said.wrote);
    }
    acknowledged
}

/// A region with the disk behind a cache that is smaller than what the processes write.
fn prepared() -> Place {
    let place = Place::new();
    let (region, device) = place.cached(MIB);
    device.close().unwrap();
    drop(region);
    place
}

/// The disk without CBD has the acknowledged writes, or later ones, and what a reader saw last.
fn check_disk(place: &Place, acknowledged: &BTreeMap<u64, u64>) {
    let region = place.open();
    let entry = region.backends().pop().unwrap();
    let device = region.open_device(entry.id).unwrap();
    device.set_settings(cbd::Settings { writeback_rate: 0, ..device.settings() }).unwrap();
    let read = |block: u64| {
        let mut bytes = vec![0; support::BLOCK];
        device.read_at(&mut bytes, block * support::BLOCK as u64).unwrap();
        version(block, &bytes)
    };
    let last: Vec<_> = (0..BLOCKS).map(read).collect();
    device.detach(cbd::DRAIN_TIMEOUT).map_err(|(_, error)| error).unwrap();
    for (block, found) in (0..BLOCKS).zip(last) {
        let number = acknowledged[&block];
        assert!(found >= number, "block {block} is {found}, and {number} was acknowledged");
        assert_eq!(version(block, &place.on_disk(block)), found, "block {block} of the disk");
    }
}

#[test]
fn what_waits_for_space_in_a_killed_program_never_takes_effect() {
    let place = prepared();
    let acknowledged = succession(&place, 4, "paused", |said| {
        // One request of writeback makes room for as much as the cache holds; two more versions of all blocks do not fit.
        assert!(said.later <= 2 * BLOCKS as usize, "nothing waits");
        said.waiting > 0
    });
    check_disk(&place, &acknowledged);
}

#[test]
fn a_program_that_is_killed_while_writeback_runs_finds_its_acknowledged_writes() {
    let place = prepared();
    let acknowledged = succession(&place, 6, "running", |said| said.later > 1500);
    check_disk(&place, &acknowledged);
}
