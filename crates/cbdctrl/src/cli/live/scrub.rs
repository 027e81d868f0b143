//! The command for scrubs.

use super::super::OnTransport;
use cbd_daemon::api::{NumberOrName, VerifyLevel};
use cbd_daemon::size::parse_size;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};

/// The exit codes of `scrub`.
pub const SCRUB_EXIT_CODES: &str = "\
Without --wait and --status the exit code is 0 when the daemon has done what was requested.
Exit codes of --wait, and of --status for the last complete pass: 0 nothing was found, 1 all that was found is repaired, 2 something was
found that is not repaired, 3 a part could not be looked at, or the daemon refused; 64 wrong usage";

/// Arguments of `scrub`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("action").args(["status", "pause", "resume", "stop"]))]
pub struct ScrubArguments {
    /// Transport
    #[command(flatten)]
    pub on: OnTransport,
    /// Number or name of the backend [default with --status: all]
    #[arg(short, long, value_name = "ID", required_unless_present = "status")]
    pub backend: Option<NumberOrName>,
    /// Bytes a second, e.g. 50M, from 64K [default: the setting scrub_rate]
    #[arg(long, value_parser = rate, value_name = "SIZE", conflicts_with = "action")]
    pub rate: Option<u64>,
    /// Make blocks dirty again whose copy on the disk is lost and that the cache has, so that writeback repairs the disk
    #[arg(long, conflicts_with = "action")]
    pub repair: bool,
    /// Which copies are looked at: what a read returns, each copy, or each copy and whether they agree [default: agree]
    #[arg(long, value_parser = level(), conflicts_with = "action")]
    pub level: Option<VerifyLevel>,
    /// Wait until the pass has ended, with a progress bar; it continues if the command is ended
    #[arg(long, conflicts_with = "action")]
    pub wait: bool,
    /// Show the scrub instead of starting one
    #[arg(long)]
    pub status: bool,
    /// Pause it
    #[arg(long)]
    pub pause: bool,
    /// Continue a paused one
    #[arg(long)]
    pub resume: bool,
    /// Stop it
    #[arg(long)]
    pub stop: bool,
}

/// A rate with which a scrub ends.
fn rate(text: &str) -> Result<u64, cbd_types::Error> {
    let rate = parse_size(text)?;
    cbd_daemon::scrub::schedule::check_rate(rate).map(|()| rate)
}

fn level() -> impl TypedValueParser<Value = VerifyLevel> {
    PossibleValuesParser::new(["newest", "all", "agree"]).map(|text| match text.as_str() {
        "newest" => VerifyLevel::Newest,
        "all" => VerifyLevel::All,
        _ => VerifyLevel::Agree,
    })
}
