//! `cbdctrl demo`: measures CBD on this machine, and shows that acknowledged writes survive a kill of the daemon.
//!
//! It measures a slow disk without and with a cache, and the same export over plain memory; it kills the daemon
//! during checksummed writes; at the end it compares the disk alone with the log of writes.
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
use clap::Args;
use output::Output;
use report::Report;
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
    let begun = Instant::now();
    let output = Output::new(json, wrap);
    let scale = if arguments.quick { steps::QUICK } else { steps::FULL };
    let mut report = Report::new(&scale);
    let result = interrupt::listen().and_then(|()| steps::run(arguments, &scale, output, &mut report));
    report.ok = result.is_ok();
    report.samples = report.results.samples();
    report.duration_s = (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    if let Err(error) = &result {
        eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
        report.error = Some(ErrorBody::from(error));
    } else {
        output.title(&report::table(&report));
        output.print(&format!(
            "Every check passed. It took {:.0} s, and left nothing behind.",
            report.duration_s
        ));
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
