//! `cargo xtask vm`: programs in a guest with a kernel of its own, with ublk, DAX devices and power cuts.
//!
//! Invariants: a guest needs no root privileges and changes nothing on this machine but what it was given:
//! its cache, shared files, the folder for its results. It ends with its job, at its time limit, or with this
//! program.
//!
//! Elsewhere: what runs in it. A power cut loses the guest's kernel and its page cache. An emulated processor
//! has no cache that could lose stores: `cargo xtask sim` covers that.

#![forbid(unsafe_code)]

mod built;
mod debian;
mod driven;
mod guest;
mod image;
mod jobs;
mod machine;
mod modules;
mod monitor;
mod peers;
mod plan;
mod programs;
mod store;

pub use jobs::{CUTS, test};

// The modules name these as their own.
use cbd_harness::{
    deadline, install, leftovers, packages, problem, processes, random, report, shell, workspace,
};

use crate::leftovers::Scratch;
use crate::problem::Problem;
use crate::shell::Stream;
use guest::{Ended, Host, Outcome};
use plan::Plan;
use std::ops::ControlFlow;

/// The help text of `cargo xtask vm`.
pub const USAGE: &str = "\
Usage: cargo xtask vm run [OPTION].. -- COMMAND [ARGUMENT]..
                          boots a guest, runs the command in it, prints what it prints, and ends with its exit code
                          (124: time limit exceeded; 125: the guest died). The command is busybox's, or a program of this machine,
                          which is shipped with its libraries. What it leaves in /out is brought back.
       cargo xtask vm shell [OPTION]..
                          the same with a shell on the console (Ctrl-A X kills the guest)
       cargo xtask vm test [--cuts N] [NAME]..
                          the jobs that `cargo xtask test` runs in guests; those whose name contains one of the words
       cargo xtask vm peers [--json] [--report] [--rounds N] [--quick] [--only COLUMN,..] [STACK]..
                          instructions for a request to CBD and to the kernel's own caches, in guests that count them
                          (half an hour; --quick: only checks that it works); --only measures these columns alone, e.g.
                          `cbd_in_process --only write_1,dsync_1`; --report writes all into docs/performance.md
       cargo xtask vm fetch [--again] [--kernel VERSION]
                          fetches QEMU and a kernel from Debian's packages; otherwise the first guest does

Options of run and shell:
  --mode normal|counting  two processors (default), or one for which each instruction takes a nanosecond
  --accel auto|kvm|tcg    who executes instructions: the processor, QEMU, or whichever a trial selects (default)
  --memory SIZE           ordinary memory (default: 2G)
  --pmem SIZE             persistent memory at /dev/pmem0, removed with the guest
  --nvdimm FILE:SIZE      an NVDIMM whose content survives the guest, in a file
  --cxl FILE:SIZE         a CXL memory device whose content survives the guest
  --disk SIZE|FILE        /dev/vda and so on: an empty disk that is removed with the guest, or a file
  --vhost-user SOCKET     a disk that a server provides there, behind those of --disk
  --nvme SIZE|FILE        /dev/nvme0n1 and so on: an NVMe disk with the commands Verify and Compare
  --unreadable SECTOR     a sector of 512 bytes that the last NVMe disk cannot read
  --cbd                   cbdctrl, cbdd and blkverify, built for users
  --file FILE[=PLACE]     a file, a folder, or a program with its libraries
  --module NAME           a kernel module that is loaded before the command, with all that it needs;
                          dm-pcache, which Debian's kernels leave out, is built first
  --out FOLDER            where what the command left in /out goes
  --append PARAMETER      a parameter of the kernel
  --timeout SECONDS       limit of the whole run (default: 300)

CBD_VM_CACHE names the cache (default: target/vm), CBD_VM_MIRROR a mirror of Debian other than this machine's.
";

/// The exit codes of the harness itself, like those of timeout(1).
const OVER_TIME: u8 = 124;
const GUEST_DIED: u8 = 125;

/// Runs the task.
///
/// # Errors
/// Wrong usage, and why a guest could not be booted; [`Problem::Code`] for a command that failed in its
/// guest.
pub fn run(arguments: &[String]) -> Result<bool, Problem> {
    processes::adopt_orphans();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    match task {
        "run" => {
            let plan = Plan::parse(rest)?;
            if plan.command.is_empty() {
                return Err(Problem::Usage("vm run needs a command behind --".to_owned()));
            }
            execute(&plan)
        }
        "shell" => {
            let plan = Plan::parse(rest)?;
            if !plan.command.is_empty() {
                return Err(Problem::Usage("vm shell takes no command; vm run does".to_owned()));
            }
            speak(&plan).map_err(Problem::Failed)?;
            Ok(true)
        }
        "test" => jobs::run(rest),
        "peers" => peers::run(rest),
        "fetch" => {
            let store = store::Store::fetch(&store::Fetch::parse(rest)?).map_err(Problem::Failed)?;
            println!("Linux {}: {}", store.kernel_release(), store.kernel().display());
            Ok(true)
        }
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(true)
        }
        other => Err(Problem::Usage(format!("vm has no task '{other}'; cargo xtask vm help names them"))),
    }
}

fn execute(plan: &Plan) -> Result<bool, Problem> {
    let scratch = Scratch::new().map_err(Problem::Failed)?;
    let host = Host::new(scratch.path()).map_err(Problem::Failed)?;
    let outcome = host
        .boot(plan, |stream, line| {
            match stream {
                Stream::Output => println!("{line}"),
                Stream::Error => eprintln!("{line}"),
            }
            ControlFlow::Continue(())
        })
        .map_err(Problem::Failed)?;
    eprintln!("xtask: {}", times(&outcome));
    match outcome.ended {
        Ended::Exited(0) => Ok(true),
        Ended::Exited(code) => Err(Problem::Code(code)),
        Ended::TimedOut | Ended::Cut => {
            complain(&outcome, &format!("the guest was killed after {} s", plan.timeout.as_secs()));
            Err(Problem::Code(OVER_TIME))
        }
        Ended::Died => {
            complain(&outcome, "the guest died before its job ended");
            Err(Problem::Code(GUEST_DIED))
        }
    }
}

fn speak(plan: &Plan) -> Result<(), String> {
    let scratch = Scratch::new()?;
    Host::new(scratch.path())?.speak(plan)
}

fn complain(outcome: &Outcome, what: &str) {
    eprintln!("xtask: {what}; the last lines of its kernel:");
    for line in &outcome.console {
        eprintln!("xtask:   {line}");
    }
}

/// One line about the time that a guest took.
fn times(outcome: &Outcome) -> String {
    let seconds = |time: Option<std::time::Duration>| {
        time.map_or_else(|| "-".to_owned(), |time| format!("{:.1} s", time.as_secs_f64()))
    };
    format!(
        "guest ({}): boot {}, job {} by its clock; {:.1} s by ours",
        outcome.by,
        seconds(outcome.booted),
        seconds(outcome.ran),
        outcome.all.as_secs_f64()
    )
}
