//! `cbdctrl demo`: measures CBD on this machine, and shows that acknowledged writes survive a kill of the daemon.
//!
//! It measures a slow disk without and with a cache, and the same export over plain memory; it kills the daemon
//! during checksummed writes; at the end it compares the disk alone with the log of writes. With `--hosts` two daemons
//! share the region (`hosts`).
//!
//! Invariants: nothing is installed, and nothing is left behind, however it ends: everything is in folders, mounts
//! and processes of its own, which end with this process or are swept at the next start. The exit code is 0 only if
//! every check passed.
//!
//! Elsewhere: the objects that are measured. The daemon is the real one, started as a user would start it.

mod block;
mod files;
mod filesystem;
mod folders;
mod hosts;
mod interrupt;
mod kill;
mod measure;
mod nbd;
mod output;
mod proof;
mod report;
mod servers;
mod steps;
mod system;
mod target;
mod work;

use cbd_daemon::api::ErrorBody;
use cbd_types::Result;
use clap::Args;
use output::Output;
use report::{Conclusion, Report};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
pub use target::ExportKind;

/// Options of the demonstration.
#[derive(Args, Clone, Debug, Default)]
pub struct Arguments {
    /// Shorter, with less data: half a minute
    #[arg(long)]
    pub quick: bool,
    /// Two hosts on one region instead: a block device through the other host, the daemon of either killed, and the
    /// backend moved to and fro under load; less than a minute
    #[arg(long)]
    pub hosts: bool,
    /// The export through which the device is reached [default: fuse-loop where that is possible, else nbd]
    #[arg(long, value_enum, value_name = "PATH")]
    pub path: Option<ExportKind>,
    /// Panic while the slow disk has a cache and is in use, for the test that nothing is left behind then
    #[arg(long, hide = true)]
    pub panic: bool,
    /// Serve plain memory with its files in DIR until standard input ends: a child of the demonstration
    #[arg(long, hide = true, value_name = "DIR")]
    pub serve_memory: Option<PathBuf>,
    /// Bytes of memory to serve
    #[arg(long, hide = true, value_name = "BYTES", default_value_t = 0)]
    pub serve_bytes: u64,
}

/// The exit code of shells for a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Runs the demonstration in the process of `cbdctrl`; `wrap` wraps a text to the width of the terminal.
#[must_use]
pub fn run(arguments: &Arguments, json: bool, wrap: fn(&str) -> String) -> ExitCode {
    if let Some(folder) = &arguments.serve_memory {
        return match servers::serve_memory(folder, arguments) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("cbdctrl: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let output = Output::new(json, wrap);
    if arguments.hosts {
        let scale = if arguments.quick { hosts::QUICK } else { hosts::FULL };
        let report = hosts::Report::new(&scale);
        return conclude(output, json, report, |report| hosts::run(arguments, &scale, output, report));
    }
    let scale = if arguments.quick { steps::QUICK } else { steps::FULL };
    conclude(output, json, Report::new(&scale), |report| steps::run(arguments, &scale, output, report))
}

/// Runs the steps, and prints the report that they have filled.
fn conclude<R: Conclusion>(
    output: Output,
    json: bool,
    mut report: R,
    steps: impl FnOnce(&mut R) -> Result<()>,
) -> ExitCode {
    let begun = Instant::now();
    let result = interrupt::listen().and_then(|()| steps(&mut report));
    let duration_s = (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    report.conclude(result.as_ref().err().map(ErrorBody::from), duration_s);
    if let Err(error) = &result {
        eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
    } else {
        output.title(&report.table());
        output.print(&format!("Every check passed. It took {duration_s:.0} s, and left nothing behind."));
    }
    if json {
        match serde_json::to_string_pretty(&report) {
            Ok(text) => println!("{text}"),
            Err(error) => {
                eprintln!("cbdctrl: the result cannot be printed: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if interrupt::requested() => ExitCode::from(INTERRUPTED),
        Err(_) => ExitCode::FAILURE,
    }
}
