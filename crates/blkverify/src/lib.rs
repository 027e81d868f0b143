//! `blkverify`: whether every byte of a disk, a file or a block device of CBD can be read, or is what it should be.
//!
//! Invariants: nothing is written but by the daemon, with `--repair`; the result is on standard output, an error is one line on
//! standard error; the exit code says whether all is right, and whether all was looked at ([`report`]).
//!
//! Elsewhere: the verification of what a cache holds (the daemon), commands of disks (`cbd-backing`).

mod beneath;
mod bounds;
mod cbd;
pub mod cli;
mod disk;
mod expected;
mod extents;
mod file;
mod findings;
mod interrupt;
mod look;
mod pass;
mod progress;
mod queue;
pub mod report;
mod verify;

use cbd_daemon::api::{ErrorAnswer, ErrorBody};
use clap::Parser;
use cli::Cli;
use interrupt::Interrupt;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

/// Runs the program with its arguments, of which the first is its name.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { report::USAGE } else { report::ALL_RIGHT });
        }
    };
    // Before any thread is started.
    let interrupt = Interrupt::listen();
    let (code, printed) = match verify::run(&cli, &interrupt) {
        Ok(report) => {
            if let Some(error) = &report.error {
                eprintln!("blkverify: {error}");
            }
            let text = if cli.json { json(&report) } else { Ok(report.text()) };
            (report.code(), text)
        }
        Err(error) => {
            eprintln!("blkverify: {}", error.line());
            let answer = ErrorAnswer { error: ErrorBody::from(&error) };
            (report::NOT_LOOKED, if cli.json { json(&answer) } else { Ok(String::new()) })
        }
    };
    let printed = printed.and_then(|text| io::stdout().write_all(text.as_bytes()));
    match printed {
        // The reader of a pipe may have closed it.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("blkverify: the result cannot be printed: {error}");
            ExitCode::from(report::NOT_LOOKED)
        }
        _ => ExitCode::from(code),
    }
}

fn json(value: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
