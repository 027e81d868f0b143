//! The options of `safe-to`.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Its exit codes and its meaning, for its help.
pub const HELP: &str = "\
remove     no data is dirty in a cache or damaged in it, and no block device is in use
restart    every block device that is in use waits for the next daemon; users of others would see errors
downgrade  the version VERSION can open every registered region

It asks the daemon. If none runs, it reads the registered regions themselves, as check does. remove also looks at the disks that are sealed,
and at those that the state folder records, whose region is not registered. What it cannot find out is not safe.

Exit codes: 0 yes, 1 no (each line says why), 2 wrong usage";

/// A plan for the program and its daemon.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plan {
    /// Stop the daemon and remove the program.
    Remove,
    /// Restart the daemon.
    Restart,
    /// Replace the program by an older version.
    Downgrade,
}

/// Options of `safe-to`.
#[derive(Args, Debug)]
pub struct SafeToArguments {
    /// The plan
    pub plan: Plan,
    /// With downgrade: the version that comes, e.g. 0.1.0
    #[arg(required_if_eq("plan", "downgrade"), value_name = "VERSION")]
    pub version: Option<String>,
    /// With remove: a daemon that still runs is a reason against it
    #[arg(long)]
    pub stopped: bool,
    /// State of the daemon [default: /var/lib/cbd]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Folder of the rules that seal disks [default: /etc/udev/rules.d]
    #[arg(long, value_name = "DIR")]
    pub rules_dir: Option<PathBuf>,
    /// Mounts and sockets of the daemon [default: /run/cbd]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}
