//! `cbdctrl demo`: CBD at work on this machine, and the proof that it keeps what it promises.
//!
//! A slow disk, with and without a cache, and the export over plain memory are measured; the daemon is killed in the middle of
//! checksummed writes; at the end the disk alone is compared with the log of what was written.
//!
//! Always true here: nothing is installed, and nothing is left behind, however it ends: everything lies in folders, mounts and
//! processes of our own, which end with this process or are swept at the next start. The exit code is 0 only if every check
//! passed.
//!
//! Left to others: everything that is shown. The daemon is the real one, started as a user would start it.

mod block;
mod door;
mod files;
mod filesystem;
mod interrupt;
mod kill;
mod measure;
mod nbd;
mod places;
mod proof;
mod report;
mod servers;
mod show;
mod story;
mod system;
mod work;

use cbd_daemon::api::ErrorBody;
use clap::Args;
pub use door::Way;
use report::Report;
use show::Show;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Options of the demonstration.
#[derive(Args, Clone, Debug, Default)]
pub struct Arguments {
    /// Shorter, with less data: half a minute
    #[arg(long)]
    pub quick: bool,
    /// How the device is to be reached [default: fuse-loop where that is possible, else nbd]
    #[arg(long, value_enum, value_name = "PATH")]
    pub path: Option<Way>,
    /// Panic while the slow disk has a cache and is in use, for the test that nothing is left behind then
    #[arg(long, hide = true)]
    pub panic: bool,
    /// Serve plain memory with things in DIR until the input ends: what the demonstration starts for itself
    #[arg(long, hide = true, value_name = "DIR")]
    pub serve_memory: Option<PathBuf>,
    /// How much of it
    #[arg(long, hide = true, value_name = "BYTES", default_value_t = 0)]
    pub serve_bytes: u64,
}

/// What a shell shows for a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Runs the demonstration.
#[must_use]
pub fn run(arguments: &Arguments, json: bool) -> ExitCode {
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
    let show = Show::new(json);
    let scale = if arguments.quick { story::QUICK } else { story::FULL };
    let mut report = Report::new(&scale);
    let result = interrupt::listen().and_then(|()| story::tell(arguments, &scale, show, &mut report));
    report.ok = result.is_ok();
    report.samples = report.results.samples();
    report.duration_s = (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    if let Err(error) = &result {
        eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
        report.error = Some(ErrorBody::from(error));
    } else {
        show.title(&report::table(&report));
        show.say(&format!(
            "Every check passed. It took {:.0} s, and nothing of it is left.",
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
