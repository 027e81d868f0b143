//! The script that measures a stack in its guest, the same for all stacks.
//!
//! Invariants: no memory is accessed for the first time during a measurement: every byte of a cache has been
//! written before, and every block that is written or read is in it.
//!
//! Before and after a run, a job of fio notes how much its processor has executed for tasks, by the kernel's
//! own accounting, whose clock counts instructions here. Idle time belongs to no task, so it is left out. Two
//! runs that differ only in their number of requests are subtracted: the start and end of the job, and
//! reading the accounting, cancel out.
//!
//! # Which engine For a device that may block, io_uring lets a kernel worker submit, at 2,000 to 12,000
//! instructions a request; ublk's devices never need that. Users of io_uring pay this cost, so it is
//! measured; but it says nothing about the caches, so depth 32 is also measured through libaio, which has no
//! such workers. Depth 1 is plain pread and pwrite.

use super::stacks::{Ours, REGION, Stack};
use std::fmt::Write;

/// A kind of request.
pub struct Job {
    /// Its name in the figures.
    pub name: &'static str,
    /// Its title in the report.
    pub title: &'static str,
    /// The I/O engine of fio.
    engine: &'static str,
    /// Further options of fio.
    options: &'static str,
    /// Whether the cache is full and writeback runs.
    pub is_full: bool,
}

impl Job {
    /// Whether it runs with a stack.
    pub fn is_of(&self, stack: &Stack) -> bool {
        // In process there is one engine.
        (stack.is_cache || !self.is_full) && (stack.ours != Ours::Engine || self.engine != LIBAIO)
    }
}

const LIBAIO: &str = "libaio";

const fn job(name: &'static str, title: &'static str, engine: &'static str, options: &'static str) -> Job {
    Job { name, title, engine, options, is_full: false }
}

/// All jobs, in the order of the report.
pub const JOBS: [Job; 9] = [
    job("write_1", "write, depth 1", "psync", "--rw=randwrite"),
    job("write_32", "write, depth 32", "io_uring", "--rw=randwrite --iodepth=32"),
    job("write_32_aio", "write, depth 32, libaio", LIBAIO, "--rw=randwrite --iodepth=32"),
    job("read_1", "read hit, depth 1", "psync", "--rw=randread"),
    job("read_32", "read hit, depth 32", "io_uring", "--rw=randread --iodepth=32"),
    job("read_32_aio", "read hit, depth 32, libaio", LIBAIO, "--rw=randread --iodepth=32"),
    job("dsync_1", "O_DSYNC write, depth 1", "psync", "--rw=randwrite --sync=dsync"),
    job("dsync_32", "O_DSYNC write, depth 32", "io_uring", "--rw=randwrite --iodepth=32 --sync=dsync"),
    Job {
        name: "full_32",
        title: "write, full, depth 32",
        engine: "io_uring",
        options: "--rw=randwrite --iodepth=32",
        is_full: true,
    },
];

/// The amount of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    /// The jobs that are run, by their places in [`JOBS`].
    pub jobs: [bool; JOBS.len()],
    /// Number of rounds of each figure.
    pub rounds: usize,
    /// Requests of the two runs that are compared.
    pub requests: [u64; 2],
    /// The same with a full cache: more, since reclaim and writeback come in bursts.
    pub full: [u64; 2],
}

/// The amount for the report.
pub const WHOLE: Amount =
    Amount { jobs: [true; JOBS.len()], rounds: 3, requests: [1000, 6000], full: [4000, 24_000] };
/// The amount that checks that it works; the figures mean little.
pub const QUICK: Amount = Amount { rounds: 1, requests: [200, 1200], full: [500, 4500], ..WHOLE };

impl Amount {
    /// The jobs that are run with a stack.
    pub fn jobs_of<'a>(&'a self, stack: &'a Stack) -> impl Iterator<Item = &'static Job> + 'a {
        let all = JOBS.iter().zip(self.jobs);
        all.filter(|(job, is_run)| *is_run && job.is_of(stack)).map(|(job, _)| job)
    }
}

/// The part of the device that requests access, unless the cache is to be full.
const AREA: &str = "32M";
/// The part of the device that is written once to access the whole cache, and that requests access if the
/// cache is to be full.
const LARGE: &str = "1G";

/// The functions that precede those of the stack.
const BEGIN: &str = r#"
    trap 'if [ $? != 0 ]; then cat /tmp/*.log; dmesg | tail -n 30; fi >&2' EXIT
    # At boot the kernel has work of its own. Idle time passes at once.
    sleep 20
    mount -t configfs configfs /sys/kernel/config
    mkdir /sys/kernel/config/nullb/slow
    cd /sys/kernel/config/nullb/slow
    for setting in memory_backed=1 size=1024 blocksize=512 irqmode=0 submit_queues=1 power=1; do
        echo ${setting#*=} >${setting%=*}
    done
    cd /
    disk=/dev/slow
    # Waits until a command succeeds.
    wait_until() {
        for each in $(seq 5000); do
            if "$@"; then return; fi
            sleep 0.1
        done
        echo "never: $*" >/tmp/never.log
        exit 1
    }
    load() { fio --name=load --ioengine=$engine --direct=1 $through "$@" >/tmp/fio.log 2>&1; }
    # Notes the clock of the guest, the time of its tasks, and the sectors written to the disk.
    cat >/bin/note <<'END'
#!/bin/sh
awk -v run="$*" '
    FNR == 1 { file++ }
    /^now at/ { now = $3 }
    /^cpu0 / { tasks = $8 }
    file == 3 { sectors = $7 }
    END { printf "sample %s %.0f %.0f %d\n", run, now, tasks, sectors }
' /proc/timer_list /proc/schedstat /sys/block/slow/stat >>/tmp/samples
END
    chmod +x /bin/note
    samples() {
        fio --name=global --ioengine=$engine --direct=1 --bs=4k --gtod_reduce=1 --stonewall $through "$@" >/tmp/fio.log 2>&1
        cat /tmp/samples
        rm /tmp/samples
    }
"#;

/// The script of a stack; `engine` is the path of the engine for fio.
pub fn of(stack: &Stack, amount: &Amount, engine: &str) -> String {
    let mut script = BEGIN.to_owned();
    if matches!(stack.ours, Ours::Daemon | Ours::Engine) {
        script.push_str(REGION);
    }
    let only = (stack.ours == Ours::Engine).then(|| format!("external:{engine}"));
    let engine = only.as_deref().unwrap_or("io_uring");
    // Writing to a string cannot fail.
    let _ = writeln!(script, "    engine={engine}\n{}\n    make", stack.setup);
    if stack.is_cache {
        let _ = writeln!(
            script,
            "    load --bs=256k --iodepth=4 --rw=write --size={LARGE} --end_fsync=1\n    rest"
        );
    }
    let _ = writeln!(
        script,
        "    for each in 1 2; do load --bs=4k --iodepth=32 --rw=randwrite --size={AREA} --randseed=$each; done"
    );
    let jobs = |full| amount.jobs_of(stack).filter(move |job| job.is_full == full);
    for round in 1..=amount.rounds {
        if round > 1 && stack.is_cache {
            // Overwritten data takes space in a log until it has been written back.
            script.push_str("    work\n    rest\n");
        }
        if jobs(false).next().is_some() {
            runs(&mut script, jobs(false), AREA, round, amount.requests, only.as_deref());
        }
    }
    if jobs(true).next().is_some() {
        let _ = writeln!(script, "    work\n    load --bs=256k --iodepth=4 --rw=write --size={LARGE}");
        for round in 1..=amount.rounds {
            runs(&mut script, jobs(true), LARGE, round, amount.full, only.as_deref());
        }
    }
    script
}

/// The runs of a round, in one fio.
fn runs<'a>(
    script: &mut String,
    jobs: impl Iterator<Item = &'a Job>,
    size: &str,
    round: usize,
    requests: [u64; 2],
    only: Option<&str>,
) {
    // What a process does once, in its own threads too, is over before the first note, and so is collecting what is to
    // be written back.
    let first = only.map_or(" --ioengine=psync", |_| "");
    let _ = write!(
        script,
        "    samples --size={size} \\\n        --name=warm{first} --rw=randwrite --number_ios=3000 --randseed={round} \
         --exec_postrun=\"sleep 30\""
    );
    for Job { name, engine, options, .. } in jobs {
        for requests in requests {
            let note = format!("\"/bin/note {name} {round} {requests}\"");
            // Naming an engine resets the options of the engine before.
            let engine = only.map_or_else(|| format!(" --ioengine={engine}"), |_| String::new());
            let _ = write!(
                script,
                " \\\n        --name={name}{engine} {options} --number_ios={requests} \
                 --randseed={round}{requests} --exec_prerun={note} --exec_postrun={note}"
            );
        }
    }
    script.push('\n');
}

#[cfg(test)]
mod tests {
    use super::super::stacks::STACKS;
    use super::*;
    use std::process::Command;

    /// The calls of a script after its functions, in their order, each with its size.
    fn calls(stack: &Stack, rounds: usize) -> Vec<String> {
        let script = of(stack, &Amount { rounds, ..QUICK }, "/engine");
        let (_, calls) = script.split_once("\n    make\n").expect("it makes its stack");
        let mut stubs = String::new();
        for name in ["rest", "work", "load", "samples"] {
            let _ = writeln!(stubs, "{name}() {{ echo \"{name} $*\"; }}");
        }
        let said = Command::new("sh").args(["-euc", &(stubs + calls)]).output().expect("a shell");
        assert!(said.status.success(), "{}: {}", stack.name, String::from_utf8_lossy(&said.stderr));
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let call = |line: &str| {
            let mut words = line.split_whitespace();
            let name = words.next().unwrap_or_default();
            let size = words.find(|word| word.starts_with("--size=")).unwrap_or_default();
            format!("{name} {}", size.trim_start_matches("--size=")).trim_end().to_owned()
        };
        text.lines().map(call).collect()
    }

    /// In each round the cache has written back all dirty data and is idle; a full cache works, and is filled
    /// once.
    #[test]
    fn a_cache_catches_up_between_rounds_and_rests_in_them() {
        for stack in &STACKS {
            let called = calls(stack, 3);
            let wanted: &[&str] = if stack.is_cache {
                &[
                    "load 1G",
                    "rest",
                    "load 32M",
                    "load 32M",
                    "samples 32M",
                    "work",
                    "rest",
                    "samples 32M",
                    "work",
                    "rest",
                    "samples 32M",
                    "work",
                    "load 1G",
                    "samples 1G",
                    "samples 1G",
                    "samples 1G",
                ]
            } else {
                &["load 32M", "load 32M", "samples 32M", "samples 32M", "samples 32M"]
            };
            assert_eq!(called, wanted, "{}", stack.name);
        }
    }

    /// A wait for a clean cache ends as soon as the cache is clean, and not before.
    #[test]
    fn waiting_ends_when_a_command_succeeds() {
        let (_, wait) = BEGIN.split_once("    wait_until() {").expect("a function");
        let (wait, _) = wait.split_once("\n    }\n").expect("its end");
        let script = format!(
            "wait_until() {{{wait}\n}}
            sleep() {{ rounds=$((rounds + 1)); }}
            is_clean() {{ [ $rounds = 3 ]; }}
            rounds=0
            wait_until is_clean
            echo $rounds"
        );
        let said = Command::new("sh").args(["-euc", &script]).output().expect("a shell");
        assert_eq!(String::from_utf8_lossy(&said.stdout), "3\n", "{said:?}");
    }

    #[test]
    fn jobs_that_are_not_wanted_are_not_run_and_nothing_is_filled_for_them() {
        let stack = STACKS.iter().find(|stack| stack.ours == Ours::Engine).expect("it is there");
        let amount = Amount { jobs: JOBS.map(|job| job.name.ends_with("_1")), ..WHOLE };
        let script = of(stack, &amount, "/engine");
        assert!(script.contains("--name=dsync_1 ") && !script.contains("--name=dsync_32 "));
        assert_eq!(
            script.matches(&format!("--size={LARGE}")).count(),
            1,
            "it is filled once, at the beginning"
        );
    }

    #[test]
    fn each_job_is_run_twice_a_round_with_different_numbers_of_requests() {
        for stack in &STACKS {
            let script = of(stack, &WHOLE, "/engine");
            for job in JOBS.iter().filter(|job| job.is_of(stack)) {
                let found = script.matches(&format!("--name={} ", job.name)).count();
                assert_eq!(found, 2 * WHOLE.rounds, "{} of {}", job.name, stack.name);
            }
            assert_eq!(script.contains("--name=full_32"), stack.is_cache, "{}", stack.name);
            assert_eq!(script.contains("libaio"), stack.ours != Ours::Engine, "{}", stack.name);
        }
        for amount in [WHOLE, QUICK] {
            assert!(amount.requests[0] < amount.requests[1] && amount.full[0] < amount.full[1]);
        }
    }
}
