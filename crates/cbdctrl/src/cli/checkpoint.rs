//! The arguments of `checkpoint`.

use super::OnTransport;
use cbd_daemon::api::NumberOrName;
use cbd_daemon::settings::parse_hold;
use clap::Args;

/// Arguments of `checkpoint`.
#[derive(Args, Debug)]
pub struct CheckpointArguments {
    /// Transport
    #[command(flatten)]
    pub on: OnTransport,
    /// Number or name of the backend, or several with --together, e.g. 0,1 [default: all]
    #[arg(short, long, value_name = "ID", value_delimiter = ',')]
    pub backend: Vec<NumberOrName>,
    /// Return when the recovery point is reached
    #[arg(short, long)]
    pub wait: bool,
    /// Bring the disks of the backends to one common moment, and leave them there for a time: for snapshots of all of them
    #[arg(long)]
    pub together: bool,
    /// How long nothing else is written to the disks then, from 1s to 7d [default: 30s]
    #[arg(long, value_name = "TIME", requires = "together", value_parser = parse_hold)]
    pub hold: Option<u32>,
    /// Seconds without progress after which to give up waiting [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
}
