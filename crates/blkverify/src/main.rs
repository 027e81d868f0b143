//! `blkverify`: the program.

use std::process::ExitCode;

fn main() -> ExitCode {
    blkverify::run(std::env::args_os().collect())
}
