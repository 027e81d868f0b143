//! The arguments of `top`.

use cbd_daemon::api::NumberOrName;
use clap::Args;
use std::time::Duration;

/// The shortest and the longest interval in seconds.
const INTERVAL_S: std::ops::RangeInclusive<f64> = 0.1..=3600.0;

/// Arguments of `top`.
#[derive(Args, Debug)]
pub struct TopArguments {
    /// Number of the transport [default: all; with --backend 0]
    #[arg(short, long, value_name = "ID")]
    pub transport: Option<u32>,
    /// Number or name of the backend [default: all]
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<NumberOrName>,
    /// Print the figures of one interval as a table, or with --json as a line, and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between two samples, from 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub interval: Duration,
    /// Use no colours; so do NO_COLOR and TERM=dumb
    #[arg(long, alias = "no-color")]
    pub no_colour: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| INTERVAL_S.contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        format!("the interval is {} to {} seconds, e.g. 0.5", INTERVAL_S.start(), INTERVAL_S.end())
    })
}
