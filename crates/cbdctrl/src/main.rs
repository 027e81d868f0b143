//! `cbdctrl`, and under its other names `cbdd` and `blkverify`: one binary that is the command, the daemon and the verifier.

use std::process::ExitCode;

fn main() -> ExitCode {
    cbdctrl::run(std::env::args_os().collect())
}
