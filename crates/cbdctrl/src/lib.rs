//! What a person types: the commands, their help, completions and man pages, and the daemon under its other name.
//!
//! Always true here: a command prints its result and nothing else on standard output, one line about what went wrong on
//! standard error, and exits with 0 (done), 1 (refused or failed) or 2 (wrong usage). The commands for the day after have exit
//! codes of their own ([`offline`]). Commands are matched whole, never by prefix.
//!
//! Left to others: what the commands do (`cbd-daemon`, `cbd-inspect`).

pub mod cli;
mod command;
mod daemon;
pub mod demo;
pub mod offline;
mod pages;
mod progress;
mod status;
mod table;

use clap::Parser;
use cli::{Cli, Command, DaemonCli};
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// Runs the program that the first argument names, with the rest as its arguments.
#[must_use]
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let name = arguments.first().and_then(|first| Path::new(first).file_name());
    if name.is_some_and(|name| name == "cbdd") {
        return match DaemonCli::try_parse_from(arguments) {
            Ok(cli) => daemon::run(cli.arguments),
            Err(error) => usage(&error),
        };
    }
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && cli::is_offline(&arguments) => {
            let _ = error.print();
            return ExitCode::from(offline::WRONG_USAGE);
        }
        Err(error) => return usage(&error),
    };
    match cli.command {
        Command::Daemon(arguments) => daemon::run(arguments),
        Command::Keeper => daemon::run_keeper(),
        Command::Demo(arguments) => demo::run(&arguments, cli.json),
        Command::Check(arguments) => offline::check(&arguments, cli.json),
        Command::Dump(arguments) => offline::dump(&arguments, cli.json),
        Command::Repair(arguments) => offline::repair(&arguments, cli.json),
        Command::Rescue(arguments) => offline::rescue(&arguments, cli.json),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { folder } => pages::man(&folder),
        command => {
            command::run(command, &cli.socket.unwrap_or_else(cbd_daemon::paths::default_socket), cli.json)
        }
    }
}

/// What clap has to say: help and version go to standard output and are no failure.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
