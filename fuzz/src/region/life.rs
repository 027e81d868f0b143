//! Uses a region with any contents: opens it, reads all data, changes it, drains, stops, and opens the region again.
//!
//! Invariants: every loop is bounded, and reaching a bound is a failure.

use super::base::{self, DISK, SECTOR};
use super::forge::MARKER;
use crate::input::Input;
use cbd_engine::{Consistency, Environment as _, OnWriteError, Settings, Transport};
use cbd_sim::process::{Outlook, Process};
use cbd_sim::{CrashMemory, DiskFaults, Keep, SimDisk, SimEnvironment};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, CHUNK, Completion, Operation, Region, Request};
use std::sync::Arc;

/// Maximum number of acts after opening.
const ACTS_MAX: usize = 48;

/// Maximum number of steps of background work; a full drain of a base takes some hundreds.
const STEPS_MAX: usize = 20_000;

/// Maximum number of times that the clock is advanced for sleeping threads.
const SLEEPS_MAX: usize = 60;

/// Maximum number of requests that wait for space at a time, as in the exports.
const WAITING_MAX: usize = 64;

/// Large reads are split into pieces of this size.
const PIECE: u64 = 256 << 10;

/// How a region is used.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The seed of random decisions.
    pub seed: u64,
    /// Whether the power fails between the two runs; otherwise the process is killed.
    pub power_cut: bool,
    /// Whether the disks sometimes fail.
    pub shaky_disk: bool,
    /// Whether the disks always refuse writes to [`base::REFUSED`].
    pub disk_refuses: bool,
    /// Whether data that contains [`MARKER`] must not be read or written back.
    pub watch_marker: bool,
}

/// Two runs of all backends of the region; the second run opens the state that the first one left. Returns whether
/// one of them opened.
pub fn live_twice(memory: &CrashMemory, usage: Usage, acts: &[u8]) -> bool {
    let opened = live(memory, usage, Some(acts));
    let left = if usage.power_cut { memory.power_cut(usage.seed, Keep::Any) } else { memory.process_crash() };
    live(&left, usage, None) || opened
}

/// A run with acts, or without acts one that reads all data.
fn live(memory: &CrashMemory, usage: Usage, acts: Option<&[u8]>) -> bool {
    let environment = Arc::new(SimEnvironment::new(usage.seed, 0));
    let Ok(transport) = Transport::open(Arc::clone(&environment), Region::new(memory.clone())) else {
        return false;
    };
    let _ = (transport.hosts(), transport.blkdevs(), transport.backends(), transport.info());
    let backends: Vec<BackendId> = base::usable(&transport).collect();
    drop(transport);
    let mut opened = false;
    for backend in backends {
        let disk = base::disk(usage.seed);
        let (shaky, refuses) = (u64::from(usage.shaky_disk), usage.disk_refuses);
        disk.set_faults(DiskFaults {
            read_permille: 50 * shaky,
            change_permille: 200 * shaky,
            flush_permille: 200 * shaky,
            unwritable: if refuses { base::REFUSED.to_vec() } else { Vec::new() },
            ..DiskFaults::default()
        });
        let Ok(process) = Process::open(Arc::clone(&environment), memory, &disk, backend, 1, 4) else {
            continue;
        };
        // A row without a cache has nothing to recover.
        if process.cached().is_none() {
            continue;
        }
        opened = true;
        let mut living =
            Living { process, environment: &environment, done: Vec::new(), waiting: 0, next_id: 0, usage };
        living.run(acts);
        drop(living);
        check_disk(&disk, usage);
    }
    opened
}

fn check_disk(disk: &SimDisk, usage: Usage) {
    if usage.watch_marker {
        let mut bytes = vec![0; DISK as usize];
        disk.contents().read(0, &mut bytes);
        assert!(!holds_marker(&bytes), "damaged data was written to the backing device");
    }
}

fn holds_marker(bytes: &[u8]) -> bool {
    // Data is aligned to lines in a segment, and to sectors on the disk.
    bytes.chunks_exact(MARKER.len()).any(|line| line.iter().zip(&MARKER).all(|(byte, mark)| byte == mark))
}

struct Living<'a> {
    process: Process,
    environment: &'a SimEnvironment,
    done: Vec<Completion>,
    waiting: usize,
    next_id: u64,
    usage: Usage,
}

impl Living<'_> {
    fn run(&mut self, acts: Option<&[u8]>) {
        let around_border = ByteRange { start: CHUNK - (64 << 10), end: DISK };
        match acts {
            None => self.read(ByteRange::at(0, DISK)),
            Some(acts) => {
                self.read(ByteRange::at(0, 160 << 10));
                self.read(around_border);
                for act in acts.chunks_exact(4).take(ACTS_MAX) {
                    self.act(act);
                }
            }
        }
        self.process.cache().request_drain();
        self.settle();
        self.read(around_border);
        let _ = self.process.cache().status();
        self.process.cache().stop();
        self.settle();
    }

    fn read(&mut self, range: ByteRange) {
        for piece in range.split_at_multiples(PIECE) {
            self.ask(Operation::Read, piece, false);
        }
        self.settle();
    }

    fn act(&mut self, bytes: &[u8]) {
        let mut input = Input(bytes);
        let (what, place, length) = (input.u8(), u64::from(input.u16()), usize::from(input.u8()));
        // Any offset, or one around the border between the lanes, where the bases have their data.
        let start =
            if place & 0x8000 == 0 { place * SECTOR } else { CHUNK - (32 << 10) + (place & 0xff) * SECTOR };
        let start = start.min(DISK - SECTOR);
        let lengths = [SECTOR, 4096, 3 * SECTOR, 16 << 10, 64 << 10, 40 << 10, 512 << 10, DISK];
        let range = ByteRange { start, end: (start + lengths[length % lengths.len()]).min(DISK) };
        let fua = length & 0x80 != 0;
        match what % 12 {
            0..3 => self.ask(Operation::Write, range, fua),
            3 => self.ask(Operation::Read, range, false),
            4 => self.ask(Operation::Flush, ByteRange::at(0, 0), false),
            5 => self.ask(Operation::Discard, range, fua),
            6 => self.ask(Operation::WriteZeroes, range, fua),
            7 => self.steps(length),
            8 => self.settle(),
            9 => self.environment.advance(place),
            10 => {
                self.process.cache().request_drain();
            }
            _ => self.change_settings(place, length),
        }
        self.steps(3);
    }

    fn change_settings(&mut self, place: u64, length: usize) {
        let modes = [Consistency::Strict, Consistency::Checkpoint, Consistency::None];
        let settings = Settings {
            consistency: modes[length % modes.len()],
            gc_percent: (place % 91) as u8,
            dirty_target_percent: (place / 91 % 91) as u8,
            on_write_error: OnWriteError::ALL[length / 8 % 2],
            write_error_after_s: (length / 16) as u32,
            read_latency_target_us: (length / 64 % 3 * 1000) as u32,
            writeback_paused_until_ms: if length.is_multiple_of(7) {
                self.environment.wall_ms() + place
            } else {
                0
            },
            ..Settings::default()
        };
        let _ = self.process.cache().set_settings(settings);
    }

    fn ask(&mut self, operation: Operation, range: ByteRange, fua: bool) {
        if self.waiting >= WAITING_MAX {
            return;
        }
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        let buffer = AlignedBuffer::zeroed(if has_data { range.len() as usize } else { 0 });
        self.next_id += 1;
        self.waiting += 1;
        self.process.submit(
            0,
            Request::unmarked(self.next_id, operation, range, fua, buffer),
            &mut self.done,
        );
        self.take();
    }

    fn take(&mut self) {
        for completion in self.done.drain(..) {
            self.waiting -= 1;
            if self.usage.watch_marker && completion.result.is_ok() {
                assert!(!holds_marker(&completion.buffer), "damaged data was returned");
            }
        }
    }

    fn steps(&mut self, count: usize) {
        for _ in 0..count {
            self.process.maintain();
            self.process.poll(0, &mut self.done);
            self.take();
        }
    }

    /// Continues until every thread waits for an event from outside.
    fn settle(&mut self) {
        for _ in 0..SLEEPS_MAX {
            let mut steps = 0;
            while self.process.outlook() == Outlook::Work {
                self.steps(1);
                steps += 1;
                assert!(steps < STEPS_MAX, "it does not settle: {}", self.process.describe());
            }
            match self.process.outlook() {
                Outlook::Sleeps(until) if self.waiting > 0 => {
                    self.environment
                        .advance(until.saturating_sub(self.environment.clock_ms()).clamp(1, 60_000));
                }
                Outlook::Stuck if self.waiting > 0 => {
                    panic!("{} requests wait for nothing: {}", self.waiting, self.process.describe())
                }
                _ => return,
            }
        }
    }
}
