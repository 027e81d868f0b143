//! The options of `end-holders`.

use clap::Args;
use std::path::PathBuf;

/// Options of `end-holders`.
#[derive(Args, Debug)]
pub struct EndHoldersArguments {
    /// The daemon has ended: remove its devices, so that nothing waits for them
    #[arg(long, conflicts_with = "dry_run")]
    pub after_daemon: bool,
    /// Even if the machine does not stop
    #[arg(long)]
    pub always: bool,
    /// Only print what would be ended, in this order
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// The unit that runs this command: wait until systemd stops no other
    #[arg(long, value_name = "UNIT")]
    pub unit: Option<String>,
    /// State of the daemon [default: /var/lib/cbd]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Mounts and sockets of the daemon [default: /run/cbd]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}
