//! Two machines, each with a kernel of its own, share a region and a disk. One has the backend, the other one a block device on it
//! with a file system in use; daemons are killed, the backend moves, and machines lose their power.
//!
//! The proof: fio and a script on machine b read back what they wrote, all the time. The script notes each file that is durable,
//! so what b had before a power cut is known from outside. In the end the file system is checked, and the whole device reads the
//! same on the host of the backend, on the other one, and from the disk alone.
//!
//! Invariants: every order to a guest has a time limit, and so has the job. A failure says which step it was, what was seen, and how
//! both guests' logs end.
//!
//! Elsewhere: caches of processors that are not coherent. Emulated processors have none: `cargo xtask sim --world channels` and
//! `hosts` have them.

use super::memory::shipped;
use super::shared::devdax;
use super::{CUTS, Given, Host, between, seeded};
use crate::driven::Driven;
use crate::plan::{Disk, GIB, MIB, Plan, SharedFile};
use crate::random::Random;
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What both guests know.
const GUEST: &str = include_str!("one_disk/guest.sh");

/// The machines, by their number.
const NAMES: [&str; 2] = ["a", "b"];
const A: usize = 0;
const B: usize = 1;

/// Limit of an order that waits for nothing but an emulated guest, whose processors others may use, too.
const SOON: Duration = Duration::from_secs(240);

/// Limit of an order that waits for a boot, a drain, a round of fio or a check of the whole device.
const LATER: Duration = Duration::from_secs(300);

/// Limit of the job: five times what its steps take on two processors that others use, too.
const LIMIT: Duration = Duration::from_secs(3600);

/// Requests of the clients on b that are to be completed after each step.
const PROGRESS: usize = 40;

/// What is done while the clients on b write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A daemon is killed and started again.
    Kill(usize),
    /// The backend moves to the host that does not have it.
    Move,
    /// A machine loses its power and boots again.
    Cut(usize),
}

/// The steps of every run: each kind, on the host of the backend and on the other one.
const SHORT: [Step; 6] = [Step::Kill(A), Step::Kill(B), Step::Cut(A), Step::Move, Step::Kill(B), Step::Move];

/// What long runs do behind these, in another order each time.
const LONG: [Step; 14] = [
    Step::Move,
    Step::Move,
    Step::Move,
    Step::Move,
    Step::Move,
    Step::Move,
    Step::Kill(A),
    Step::Kill(A),
    Step::Kill(B),
    Step::Kill(B),
    Step::Cut(A),
    Step::Cut(A),
    Step::Cut(B),
    Step::Cut(B),
];

/// The job.
pub fn by_two_machines(host: &Host, given: &Given) -> Result<(), String> {
    let mut random = seeded();
    let mut steps = SHORT.to_vec();
    if given.cuts > CUTS {
        let mut rest = LONG.to_vec();
        while !rest.is_empty() {
            steps.push(rest.swap_remove(usize::try_from(random.below(rest.len() as u64)).unwrap_or(0)));
        }
    }
    let mut machines = Machines::new(host, given)?;
    let mut done = Vec::new();
    machines.play(&steps, &mut random, &mut done).map_err(|text| {
        let last = done.last().map_or("before the first step", String::as_str);
        format!("{last}: {text}\n{}", machines.last_words())
    })
}

/// Both machines and what they share.
struct Machines<'a> {
    host: &'a Host,
    folder: PathBuf,
    end: Instant,
    running: [Option<Driven>; 2],
    /// Which has the backend.
    owner: usize,
}

impl<'a> Machines<'a> {
    fn new(host: &'a Host, given: &Given) -> Result<Self, String> {
        for (name, size) in [("disk", 96 * MIB), ("state-a", 32 * MIB), ("state-b", 32 * MIB)] {
            let path = given.folder.join(name);
            File::create(&path)
                .and_then(|file| file.set_len(size))
                .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        }
        Ok(Self {
            host,
            folder: given.folder.clone(),
            end: Instant::now() + LIMIT,
            running: [None, None],
            owner: A,
        })
    }

    fn order(&mut self, on: usize, order: &str, limit: Duration) -> Result<String, String> {
        let running = self.running[on].as_mut();
        running.ok_or_else(|| format!("machine {} is off", NAMES[on]))?.order(order, limit)
    }

    /// Boots a machine, and starts its daemon; `first` is done before, on its first boot.
    fn boot(&mut self, which: usize, first: &str) -> Result<(), String> {
        let plan = Plan {
            memory: GIB,
            nvdimm: Some(SharedFile { path: self.folder.join("memory"), size: 512 * MIB }),
            disks: vec![
                Disk::Shared(self.folder.join("disk")),
                Disk::File(self.folder.join(format!("state-{}", NAMES[which]))),
            ],
            modules: vec!["loop".to_owned(), "ublk_drv".to_owned()],
            cbd: true,
            files: shipped(&["mkfs.ext4", "e2fsck", "fio"])?,
            timeout: self.end.saturating_duration_since(Instant::now()),
            ..Plan::default()
        };
        let script = format!("{first}\n{GUEST}\nmount -t ext4 /dev/vdb /state");
        self.running[which] = Some(Driven::start(self.host, NAMES[which], plan, &script)?);
        self.order(which, "begin", LATER).map(drop)
    }

    /// One region, a backend on a, and a block device with a file system on b.
    fn set_up(&mut self) -> Result<(), String> {
        let state = "mkfs.ext4 -q /dev/vdb";
        self.boot(A, &format!("{}\n{state}", devdax()))?;
        self.order(A, "cbdctrl tp-reg --path /dev/dax0.0 --host a --format --shared", SOON)?;
        self.order(A, "cbdctrl backend-start --path /dev/vda --cache-size 48M", SOON)?;
        self.boot(B, state)?;
        self.order(B, "cbdctrl tp-reg --path /dev/dax0.0 --host b", SOON)?;
        for machine in [A, B] {
            self.order(machine, "until_so 120 both_alive", SOON)?;
            self.order(machine, "cbdctrl status | grep 'memory.*software coherence'", SOON)?;
        }
        self.order(B, "until_so 120 'cbdctrl dev-start --backend 0'", SOON)?;
        self.order(B, "mkfs.ext4 -q /dev/cbd0 && mkdir -p /fs && mount -t ext4 /dev/cbd0 /fs", LATER)?;
        self.order(B, "start_load 1", SOON).map(drop)
    }

    fn play(&mut self, steps: &[Step], random: &mut Random, done: &mut Vec<String>) -> Result<(), String> {
        self.set_up()?;
        for (number, step) in (1..).zip(steps) {
            let what = match step {
                Step::Kill(which) => format!("the daemon of {} is killed", NAMES[*which]),
                Step::Cut(which) => format!("{} loses its power", NAMES[*which]),
                Step::Move => format!("the backend moves to {}", NAMES[1 - self.owner]),
            };
            done.push(format!("step {number} of {}: {what}, which {} has", steps.len(), NAMES[self.owner]));
            self.order(B, &format!("progress {PROGRESS}"), SOON)?;
            self.order(B, "echo 0 >/tmp/pause", SOON)?;
            let begun = Instant::now();
            match step {
                Step::Kill(which) => self.kill(*which, random)?,
                Step::Cut(which) => self.cut(*which)?,
                Step::Move => self.move_it(random)?,
            }
            self.order(B, &format!("progress {PROGRESS}"), SOON)?;
            let pause: u32 = self.order(B, "cat /tmp/pause", SOON)?.trim().parse().unwrap_or(0);
            let seconds = f64::from(pause) / 100.0;
            let step = done.last().map_or("", String::as_str);
            println!("    {step}: {:.1} s, b's clients waited {seconds} s", begun.elapsed().as_secs_f64());
        }
        done.push("the end".to_owned());
        self.compare()
    }

    fn kill(&mut self, which: usize, random: &mut Random) -> Result<(), String> {
        self.order(which, "kill_daemon", SOON)?;
        self.order(B, &format!("sleep {}.{}", between(random, 0, 3), between(random, 0, 9)), SOON)?;
        self.order(which, "begin", SOON).map(drop)
    }

    /// Either machine gives the command.
    fn move_it(&mut self, random: &mut Random) -> Result<(), String> {
        let by = usize::from(random.below(2) == 1);
        let to = 1 - self.owner;
        self.order(by, "until_so 120 both_alive", SOON)?;
        let refused = self.order(by, &format!("move_to {}", NAMES[to]), LATER)?;
        for line in refused.lines() {
            println!("    {}: {line}", NAMES[by]);
        }
        self.owner = to;
        Ok(())
    }

    fn cut(&mut self, which: usize) -> Result<(), String> {
        let noted = self.running[which].take().map_or(0, Driven::cut);
        if which == A {
            self.order(B, "until_so 120 'alive a false'", SOON)?;
            if self.owner == A {
                self.order(B, "until_so 120 \"cbdctrl dev-list | grep 'have waited for host a'\"", SOON)?;
                self.order(B, "works", SOON)?;
            } else {
                // Clients do not notice the end of a host that has nothing of theirs.
                self.order(B, &format!("progress {PROGRESS}"), SOON)?;
            }
            self.boot(A, "")?;
            return self.order(B, "until_so 120 'alive a true'", SOON).map(drop);
        }
        self.order(A, "until_so 120 'alive b false'", SOON)?;
        self.boot(B, "")?;
        self.order(B, "until_so 120 '[ -b /dev/cbd0 ]'", SOON)?;
        self.order(B, "mkdir -p /fs && mount -t ext4 /dev/cbd0 /fs", LATER)?;
        self.order(B, &format!("check_copies /fs {noted}"), SOON)?;
        self.order(B, &format!("start_load {}", noted + 1), SOON).map(drop)
    }

    /// The device has the same content wherever it is read, at last the disk alone.
    fn compare(&mut self) -> Result<(), String> {
        let noted = self.running[B].as_ref().map_or(0, Driven::noted);
        self.order(B, "end_load", LATER)?;
        for machine in [A, B] {
            self.order(machine, "until_so 120 both_alive", SOON)?;
        }
        if self.owner == B {
            self.order(B, "move_to a", LATER)?;
        }
        let mut seen = vec![("b, from a", self.order(B, "checksum /dev/cbd0", LATER)?)];
        self.order(B, "move_to b", LATER)?;
        seen.push(("b, from itself", self.order(B, "checksum /dev/cbd0", LATER)?));
        self.order(B, "until_so 120 'cbdctrl dev-stop --dev 0'", SOON)?;
        self.order(A, "until_so 120 'cbdctrl dev-start --backend 0'", SOON)?;
        seen.push(("a, from b", self.order(A, "checksum /dev/cbd0", LATER)?));
        self.order(A, "until_so 120 'cbdctrl dev-stop --dev 0'", SOON)?;
        self.order(B, "until_so 120 'cbdctrl backend-stop --backend 0'", LATER)?;
        seen.push(("the disk, on a", self.order(A, "checksum /dev/vda", LATER)?));
        seen.push(("the disk, on b", self.order(B, "checksum /dev/vda", LATER)?));
        if seen.iter().any(|(_, sum)| *sum != seen[0].1) {
            return Err(format!("the device is not the same everywhere: {seen:?}"));
        }
        self.order(A, "e2fsck -f -n /dev/vda && mkdir -p /fs && mount -o ro -t ext4 /dev/vda /fs", SOON)?;
        self.order(A, &format!("check_copies /fs {noted}"), SOON)?;
        let rounds = self.order(B, "cat /tmp/rounds", SOON)?;
        println!("    {noted} files were durable, and fio verified {} rounds since b's boot", rounds.trim());
        for machine in [A, B] {
            self.order(machine, "no_kernel_errors", SOON)?;
        }
        Ok(())
    }

    /// What both machines know, and the ends of their logs.
    fn last_words(&mut self) -> String {
        let words = self.running.iter_mut().flatten().map(|running| {
            let words = running.last_words();
            // A guest that answers nothing has been waited for already.
            let report = running.order("report", Duration::from_secs(60)).unwrap_or_else(|text| text);
            format!("{words}\nwhat it reports:\n{report}")
        });
        words.collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_has_twenty_steps_with_every_kind_and_leaves_the_backend_where_it_was() {
        let all = [&SHORT[..], &LONG[..]].concat();
        assert_eq!(all.len(), 20);
        for step in [Step::Kill(A), Step::Kill(B), Step::Cut(A), Step::Cut(B), Step::Move] {
            assert!(all.contains(&step), "{step:?}");
        }
        assert_eq!(all.iter().filter(|step| **step == Step::Move).count() % 2, 0);
    }
}
