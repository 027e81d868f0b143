//! The command line: commands, their help, completions and man pages, the daemon as `cbdd`, and `blkverify` under that name.
//!
//! Invariants: a command prints its result and nothing else on standard output, an error as one line on standard error,
//! and exits with 0 (done), 1 (refused or failed) or 2 (wrong usage). The commands for offline recovery ([`offline`]) and
//! `scrub` have exit codes of their own. Commands are matched whole, never by prefix.
//!
//! Elsewhere: the implementation of the commands (`cbd-daemon`, `cbd-inspect`, `cbd-demo`).

mod advise;
pub mod cli;
mod command;
mod completions;
mod daemon;
pub mod doctor;
mod end_holders;
mod events;
mod examples;
mod grow;
mod hosts;
mod live;
pub mod offline;
mod pages;
mod pins;
mod progress;
mod safe_to;
mod scrub;
mod status;
mod table;
mod top;

use clap::{CommandFactory, FromArgMatches, Parser};
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
    if name.is_some_and(|name| name == "blkverify") {
        return blkverify::run(arguments);
    }
    let parsed = examples::in_help(Cli::command()).try_get_matches_from(&arguments);
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && cli::has_own_exit_codes(&arguments) => {
            let _ = error.print();
            return ExitCode::from(offline::WRONG_USAGE);
        }
        Err(error) => return usage(&error),
    };
    match cli.command {
        Command::Daemon(arguments) => daemon::run(arguments),
        Command::StoreProcess => daemon::run_store_process(),
        Command::Demo(arguments) => cbd_demo::run(&arguments, cli.json, table::fit),
        Command::Check(arguments) => offline::check(&arguments, cli.json),
        Command::Dump(arguments) => offline::dump(&arguments, cli.json),
        Command::Repair(arguments) => offline::repair(&arguments, cli.json),
        Command::Rescue(arguments) => offline::rescue(&arguments, cli.json),
        Command::DoctorLook { kind, paths } => doctor::run_child(kind, &paths),
        Command::SafeTo(arguments) => safe_to::run(&arguments, cli.socket.as_deref(), cli.json),
        Command::EndHolders(arguments) => end_holders::run(&arguments),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { folder } => pages::man(&folder),
        command => {
            let socket = cli.socket.unwrap_or_else(cbd_daemon::paths::default_socket);
            match command {
                Command::Doctor(arguments) => doctor::run(&arguments, &socket, cli.json),
                Command::Advise(arguments) => advise::run(&arguments, &socket, cli.json),
                Command::Unseal(arguments) => offline::unseal(&arguments, &socket, cli.json),
                Command::CompleteNumbers { kind, on } => pages::numbers(kind, on.transport, &socket),
                Command::Top(arguments) => top::run(&arguments, &socket, cli.json),
                command => command::run(command, &socket, cli.json),
            }
        }
    }
}

/// Prints clap's message: help and version go to standard output and are no error.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
