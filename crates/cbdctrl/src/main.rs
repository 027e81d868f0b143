//! `cbdctrl`, and under its other name `cbdd`: one binary that is the command and the daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    cbdctrl::run(std::env::args_os().collect())
}
