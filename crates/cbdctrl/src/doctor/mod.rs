//! `doctor`: what this machine has, lacks and promises for CBD, and the command that corrects each flaw.
//!
//! Invariants: it changes nothing; it works without a daemon and without root, and says what it could not see; it ends
//! within some seconds, whatever hangs. All text files are read below one root (`machine`), and everything that can
//! block is done by a child process with a time limit (`look`).
//!
//! Elsewhere: the durability of a region (`cbd-pmem`), the identity of a disk (`cbd-backing`).

mod boot;
mod daemon;
mod disks;
mod finding;
mod kernel;
mod limits;
mod look;
pub(crate) mod machine;
mod memory;
mod signature;

pub use look::{Kind, run_child};

use crate::command::Output;
use crate::table::fit;
use cbd_daemon::api::Status;
use cbd_daemon::client::{Client, Timeout};
use cbd_types::{Error, ErrorKind};
use clap::Args;
use finding::{Report, Verdict};
use look::{Disk, Look, Region};
use machine::Machine;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Timeout of the daemon's answer.
const DAEMON_LIMIT: Duration = Duration::from_secs(3);

/// The exit codes, for the help.
pub const EXIT_CODES: &str = "\
Verdicts: ok, note, warning (CBD works, with less speed or a weaker promise), problem (CBD cannot work, or data is in
danger).
Exit codes: 0 no problem (there may be warnings), 1 a problem, or the report cannot be printed, 2 wrong usage";

/// The arguments of `doctor`.
#[derive(Args, Debug, Default)]
pub struct DoctorArguments {
    /// Regions and disks to check as well: files, DAX devices, block devices
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Only the disks and warnings of this transport [default: all]
    #[arg(short, long, value_name = "ID")]
    pub transport: Option<u32>,
}

/// Everything that was asked of the machine.
struct Seen {
    machine: Machine,
    daemon: Result<Status, Error>,
    ublk: Option<Look<()>>,
    disks: disks::Looks,
    regions: Vec<(String, Look<Region>)>,
}

/// Runs the command.
#[must_use]
pub fn run(arguments: &DoctorArguments, socket: &Path, json: bool) -> ExitCode {
    let output = Output { json };
    let seen = match see(arguments, socket) {
        Ok(seen) => seen,
        Err(error) => return crate::command::failed(&error, &output),
    };
    let report = report(&seen);
    let printed = if json { output.json(&report) } else { output.text(&fit(&report.text())) };
    match printed {
        Ok(()) if report.verdict < Verdict::Problem => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line());
            ExitCode::FAILURE
        }
    }
}

fn see(arguments: &DoctorArguments, socket: &Path) -> Result<Seen, Error> {
    let machine = Machine::at("/");
    let client = Client::new(socket).with_timeout(Timeout::Limit(DAEMON_LIMIT));
    let mut daemon = client.status();
    if let (Some(wanted), Ok(status)) = (arguments.transport, &mut daemon) {
        status.transports.retain(|transport| transport.info.transport_id == wanted);
        if status.transports.is_empty() {
            let text = format!("the daemon has no transport {wanted}: leave -t out, or see cbdctrl tp-list");
            return Err(Error::new(ErrorKind::NotFound, text));
        }
    }
    let ublk = machine.exists(kernel::UBLK_CONTROL).then(|| {
        let mut looks = look::look(Kind::Ublk, &[PathBuf::from(kernel::UBLK_CONTROL)]);
        looks.pop().unwrap_or(Look::NotTried)
    });
    let mut names = disks::to_read(&machine);
    let (named, regions) = named(&machine, &arguments.paths);
    names.extend(named);
    names.sort();
    names.dedup();
    let nodes: Vec<PathBuf> = names.iter().map(|name| disks::node(name).into()).collect();
    let looks: Vec<Look<Disk>> = look::look(Kind::Disks, &nodes);
    let paths: Vec<PathBuf> = regions.iter().map(|path| absolute(path)).collect();
    let shown = regions.iter().map(|path| path.display().to_string());
    let regions = shown.zip(look::look(Kind::Regions, &paths)).collect();
    Ok(Seen { machine, daemon, ublk, disks: names.into_iter().zip(looks).collect(), regions })
}

/// The block devices among the paths that the user names, and the rest, which are regions.
fn named(machine: &Machine, paths: &[PathBuf]) -> (Vec<String>, Vec<PathBuf>) {
    let (mut disks, mut regions) = (Vec::new(), Vec::new());
    for path in paths {
        match absolute(path).to_str().and_then(|path| machine.block_device(path)) {
            Some(name) => disks.push(name),
            None => regions.push(path.clone()),
        }
    }
    (disks, regions)
}

/// The child has the same working folder; only an empty path has no absolute one, and is refused there.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn report(seen: &Seen) -> Report {
    let (mut findings, mut unseen) = (Vec::new(), Vec::new());
    let machine = &seen.machine;
    memory::regions(&seen.regions, &mut findings);
    memory::check(machine, &mut findings);
    limits::processor(machine, &mut findings);
    let process = seen.daemon.as_ref().ok().map(|status| status.pid);
    limits::limits(machine, process, &mut findings, &mut unseen);
    kernel::check(machine, seen.ublk.as_ref(), &mut findings);
    daemon::check(machine, &seen.daemon, &mut findings, &mut unseen);
    let cached = seen.daemon.as_ref().map(|status| boot::cached(machine, status)).unwrap_or_default();
    let names: BTreeSet<String> = cached.keys().cloned().collect();
    disks::check(machine, &seen.disks, &names, &mut findings, &mut unseen);
    boot::check(machine, &cached, &seen.disks, &mut findings);
    Report::new(findings, unseen)
}
