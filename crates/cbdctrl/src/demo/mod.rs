//! `cbdctrl demo`: CBD at work on this machine.

use clap::Args;
use std::process::ExitCode;

/// Options of the demonstration.
#[derive(Args, Clone, Debug, Default)]
pub struct Arguments {}

/// Runs the demonstration.
#[must_use]
pub fn run(_arguments: &Arguments, _json: bool) -> ExitCode {
    eprintln!("cbdctrl: this build has no demonstration");
    ExitCode::FAILURE
}
