//! The commands and options: the one source of parsing, help, completions and man pages.
//!
//! Invariants: commands and options of the original `cbdctrl` keep their long and short names.

mod advise;
mod checkpoint;
mod end_holders;
mod events;
mod live;
mod safe_to;
mod settings;
mod top;

use cbd_backing::ThrottleParameters;
use cbd_daemon::api::{CacheMode, Consistency, NumberOrName};
use cbd_daemon::logging::LogFormat;
use cbd_daemon::size::{CacheSize, parse_cache_size, parse_size};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsStr;
use std::path::PathBuf;

pub use advise::AdviseArguments;
pub use checkpoint::CheckpointArguments;
pub use end_holders::EndHoldersArguments;
pub use events::{EventArguments, Since};
pub use live::{LiveCommand, OfBackend, PinCommand, Pinned, ScrubArguments};
pub use safe_to::{Plan, SafeToArguments};
pub use top::TopArguments;

/// Controls CBD, a persistent-memory write-back cache for block devices
#[derive(Parser, Debug)]
#[command(
    name = "cbdctrl",
    version,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = EXIT_CODES
)]
pub struct Cli {
    /// Control socket of the daemon [default: the one under $XDG_RUNTIME_DIR if not root, else /run/cbd/control.sock]
    #[arg(long, global = true, value_name = "PATH", env = "CBD_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Print JSON, errors too (lists are JSON in a pipe anyway)
    #[arg(long, global = true)]
    pub json: bool,
    /// Command to execute
    #[command(subcommand)]
    pub command: Command,
}

/// The daemon of CBD, a persistent-memory write-back cache for block devices
#[derive(Parser, Debug)]
#[command(name = "cbdd", version)]
pub struct DaemonCli {
    /// Its options
    #[command(flatten)]
    pub arguments: DaemonArguments,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 refused or failed (one line on standard error says why), 2 wrong usage; check, dump, repair, \
     rescue and scrub have their own (see their help)";

/// Selects a transport.
#[derive(Args, Clone, Copy, Debug)]
pub struct OnTransport {
    /// Number of the transport
    #[arg(short, long, default_value_t = 0, value_name = "ID")]
    pub transport: u32,
}

/// Timeout of a request to the daemon.
#[derive(Args, Clone, Copy, Debug)]
pub struct RequestTimeout {
    /// Seconds to wait for the daemon's answer
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    pub timeout: u64,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Register this host on a region; with --format create a transport on it first
    TpReg {
        /// Name of this host on the transport
        #[arg(short = 'H', long, value_name = "NAME")]
        host: String,
        /// The region: a file on a DAX file system, a devdax device, or a plain file
        #[arg(short, long, value_name = "REGION")]
        path: PathBuf,
        /// Size of a region that is to be created, e.g. 8G
        #[arg(short, long, value_parser = parse_size)]
        size: Option<u64>,
        /// Segment size of a region that is formatted, 64K to 64M [default: by the region's size]
        #[arg(long, value_parser = parse_size, value_name = "SIZE")]
        segment_size: Option<u64>,
        /// Create a transport on the region, and the region if there is none
        #[arg(short, long)]
        format: bool,
        /// With --format: even if the region holds a transport, whose data is lost then
        #[arg(short = 'F', long, requires = "format")]
        force: bool,
        /// With --format: several hosts, each with a daemon, share the region
        #[arg(long, requires = "format")]
        shared: bool,
    },
    /// Unregister this host from a transport without backends
    TpUnreg {
        /// Number of the transport
        #[arg(short, long, value_name = "ID")]
        transport: u32,
    },
    /// List the transports
    TpList {
        /// Timeout
        #[command(flatten)]
        request: RequestTimeout,
    },
    /// List the hosts of a transport
    HostList {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Timeout
        #[command(flatten)]
        request: RequestTimeout,
    },
    /// Take everything from a dead host of a transport that several hosts share
    HostClear {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number of the host
        #[arg(short = 'H', long, value_name = "ID")]
        host: u32,
        /// Drop the dirty and quarantined data of its caches; BYTES must be exactly the number of these bytes
        #[arg(long, value_name = "BYTES")]
        discard_dirty: Option<u64>,
    },
    /// Start a backend: serve a backing device on a transport, with or without a cache
    BackendStart {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// The backing device: a block device or a file; its data is kept
        #[arg(short, long, value_name = "DISK")]
        path: PathBuf,
        /// Size of the cache, e.g. 4G; with 0, or without this option, there is no cache; MIN..MAX, e.g. 2G..16G: at
        /// least 2G, and up to 16G of the space that it shares with other such caches, by their loads
        #[arg(short, long, value_parser = parse_cache_size, value_name = "SIZE")]
        cache_size: Option<CacheSize>,
        /// With MIN..MAX: how much a hit of this cache counts among them [default: 1]
        #[arg(long, requires = "cache_size", value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "1..1000")]
        weight: Option<u16>,
        /// Number of queues that serve the backend
        #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=128), value_name = "1..128")]
        handlers: Option<u32>,
        /// Also create a block device on it, and print its path and nothing else
        #[arg(short = 'D', long)]
        start_dev: bool,
        /// Export of that block device: auto, kernel, ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or
        /// vhost-user:PATH
        #[arg(short, long, requires = "start_dev", value_parser = SuggestedValues(&EXPORTS), hide_possible_values = true)]
        export: Option<String>,
        /// Allow other machines to connect: NBD at an address that is not a loopback address
        #[arg(long, requires = "start_dev")]
        allow_remote: bool,
        /// Create a kernel block device or fail: no NBD server instead
        #[arg(long, requires = "start_dev")]
        require_kernel: bool,
        /// Order in which the backing device is written
        #[arg(long, value_parser = consistency())]
        consistency: Option<Consistency>,
        /// How writes go [default: writeback]
        #[arg(long, value_parser = cache_mode())]
        cache_mode: Option<CacheMode>,
        /// Whether data has checksums
        #[arg(long, value_name = "on|off", value_parser = on_or_off(), hide_possible_values = true)]
        data_crc: Option<bool>,
        /// Serve it although the log of recovery points shows that the disk is newer than the region: old dirty data
        /// then overwrites newer data
        #[arg(long)]
        older_region: bool,
        /// Serve it although its disk was written while no daemon served it: what the cache holds counts then, where it
        /// holds anything
        #[arg(long)]
        changed_disk: bool,
        /// Its name, for commands and for links
        #[arg(long, value_parser = name)]
        name: Option<String>,
        /// Writeback keeps the recovery point younger than this, e.g. 30s
        #[arg(long, value_parser = cbd_daemon::settings::parse_max_age, value_name = "TIME")]
        recovery_point_max_age: Option<u32>,
    },
    /// Write all dirty data to the backing device and remove the backend: the device is a plain disk again
    BackendStop {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number or name of the backend
        #[arg(short, long, value_name = "ID")]
        backend: NumberOrName,
        /// Even if its block devices are open or mounted: requests of their users then fail; drops no data
        #[arg(short = 'F', long)]
        force: bool,
        /// Seconds without progress after which to give up and change nothing [default: 60]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
        /// Drop the dirty and quarantined data instead; BYTES must be exactly the number of these bytes
        #[arg(long, value_name = "BYTES")]
        discard_dirty: Option<u64>,
        /// Compare the disk with the cache before the backend is removed; if they differ it is not
        #[arg(long, conflicts_with = "discard_dirty")]
        verify: bool,
    },
    /// List the backends of this host
    BackendList {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Include those of all hosts
        #[arg(short, long)]
        all: bool,
        /// Timeout
        #[command(flatten)]
        request: RequestTimeout,
    },
    /// Changes of a backend while its block devices are in use
    #[command(flatten)]
    Live(LiveCommand),
    /// Create a block device on a backend and print its path
    DevStart {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number or name of the backend
        #[arg(short, long, value_name = "ID")]
        backend: NumberOrName,
        /// Its export: auto, kernel, ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or vhost-user:PATH
        #[arg(short, long, value_parser = SuggestedValues(&EXPORTS), hide_possible_values = true)]
        export: Option<String>,
        /// Create a kernel block device or fail: no NBD server instead
        #[arg(long)]
        require_kernel: bool,
        /// Allow other machines to connect: NBD at an address that is not a loopback address
        #[arg(long)]
        allow_remote: bool,
        /// Its own name; without one it has that of its backend
        #[arg(long, value_parser = name)]
        name: Option<String>,
        /// Allow several block devices on the backend, on this host and on others, each started with this. They are the same disk: for
        /// cluster file systems and live migration
        #[arg(long)]
        shared: bool,
    },
    /// Remove a block device
    DevStop {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number or name of the block device
        #[arg(short, long, value_name = "ID")]
        dev: NumberOrName,
        /// Even if it is open or mounted: requests of its users then fail
        #[arg(short = 'F', long)]
        force: bool,
    },
    /// List the block devices of this host
    DevList {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Include those of all hosts
        #[arg(short, long)]
        all: bool,
        /// Timeout
        #[command(flatten)]
        request: RequestTimeout,
    },
    /// Show status: hit ratio, dirty bytes, recovery point, durability, errors
    Status {
        /// Only this transport [default: all; with --backend 0]
        #[arg(short, long, value_name = "ID")]
        transport: Option<u32>,
        /// Only this backend: its number or name
        #[arg(short, long, value_name = "ID")]
        backend: Option<NumberOrName>,
        /// Timeout
        #[command(flatten)]
        request: RequestTimeout,
    },
    /// Show what happened: events, each with a stable name
    Events(EventArguments),
    /// Watch every device, cache and disk: rates, latencies, hit ratio, dirty bytes, waits
    Top(TopArguments),
    /// Change settings of a backend, or the name of a block device, while it runs
    #[command(after_help = settings::HELP, group = clap::ArgGroup::new("object").required(true))]
    Set {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number or name of the backend
        #[arg(short, long, value_name = "ID", group = "object")]
        backend: Option<NumberOrName>,
        /// Number or name of the block device, whose name is the only setting
        #[arg(short, long, value_name = "ID", group = "object")]
        dev: Option<NumberOrName>,
        /// Settings and their new values, e.g. gc_percent=70
        #[arg(
            required = true,
            value_name = "NAME=VALUE",
            value_parser = SuggestedValues(&crate::completions::SETTINGS),
            hide_possible_values = true
        )]
        changes: Vec<String>,
        /// Do not wait until a new cache_mode is in force
        #[arg(long)]
        no_wait: bool,
    },
    /// Advance the recovery point: write all data that is dirty at this moment to the backing device
    Checkpoint(CheckpointArguments),
    /// Write all data that is dirty at this moment to the backing device, and wait for it
    Drain {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Number or name of the backend [default: all]
        #[arg(short, long, value_name = "ID")]
        backend: Option<NumberOrName>,
        /// Seconds without progress after which to give up [default: 60]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
        /// Compare the disk with the cache afterwards; findings are an error
        #[arg(long)]
        verify: bool,
    },
    /// Check a region that no daemon serves: every structure, every checksum, every chain; read-only
    #[command(after_help = crate::offline::CHECK_EXIT_CODES)]
    Check(crate::offline::CheckArguments),
    /// Show the content of a region that no daemon serves
    #[command(after_help = crate::offline::DUMP_EXIT_CODES)]
    Dump(crate::offline::DumpArguments),
    /// Repair damaged second copies in a region; asks first
    #[command(after_help = crate::offline::REPAIR_EXIT_CODES)]
    Repair(crate::offline::RepairArguments),
    /// Write the dirty data of a region to its backing devices, without a daemon; a dry run unless --yes is given
    #[command(after_help = crate::offline::RESCUE_EXIT_CODES)]
    Rescue(crate::offline::RescueArguments),
    /// Show what this machine has, lacks and promises for CBD, and the command that corrects each flaw; changes nothing
    #[command(after_help = crate::doctor::EXIT_CODES)]
    Doctor(crate::doctor::DoctorArguments),
    /// Look at disks or regions that may hang; doctor starts this
    #[command(hide = true)]
    DoctorLook {
        /// Of what kind they are
        kind: crate::doctor::Kind,
        /// Their paths
        #[arg(last = true)]
        paths: Vec<std::ffi::OsString>,
    },
    /// Say whether the daemon can be removed, restarted, or replaced by an older version; packages ask this
    #[command(after_help = safe_to::HELP)]
    SafeTo(SafeToArguments),
    /// End what stands on the block devices, when the machine stops; units start this
    #[command(hide = true)]
    EndHolders(EndHoldersArguments),
    /// Show what more or less cache would bring, from a trace of requests or from the last requests of a backend
    Advise(AdviseArguments),
    /// Give the disk below a cache to other programs, in an emergency, without a daemon: what is only in the region is
    /// lost to them
    Unseal(crate::offline::UnsealArguments),
    /// Show CBD at work on this machine: speed, a killed daemon, a plain disk at the end
    Demo(cbd_demo::Arguments),
    /// Run the daemon; the same as cbdd
    Daemon(DaemonArguments),
    /// Hold the descriptors of FUSE devices while no daemon runs; the daemon starts this
    #[command(hide = true)]
    StoreProcess,
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the numbers and names of transports, backends or block devices, for completions
    #[command(hide = true)]
    CompleteNumbers {
        /// Of what
        kind: Numbers,
        /// Transport
        #[command(flatten)]
        on: OnTransport,
    },
    /// Write man pages into the folders man1 and man8 of a folder
    Man {
        /// The folder, e.g. /usr/local/share/man
        folder: PathBuf,
    },
}

/// Objects that have numbers.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbers {
    /// Transports.
    Transports,
    /// Backends of a transport.
    Backends,
    /// Block devices of a transport.
    Devices,
}

/// The kinds of exports, each the beginning of an argument.
const EXPORTS: [&str; 7] = ["auto", "kernel", "ublk", "fuse-loop", "nbd:unix:", "nbd:tcp:", "vhost-user:"];

/// Any text is accepted; completions offer these values.
#[derive(Clone, Debug)]
struct SuggestedValues(&'static [&'static str]);

impl TypedValueParser for SuggestedValues {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        clap::builder::StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(PossibleValue::new)))
    }
}

/// The name of an object.
fn name(text: &str) -> Result<String, cbd_types::Error> {
    cbd_types::Name::new(text).map(|name| name.to_string())
}

fn consistency() -> impl TypedValueParser<Value = Consistency> {
    let modes = [Consistency::Strict, Consistency::Checkpoint, Consistency::None];
    PossibleValuesParser::new(modes.map(Consistency::name)).try_map(|text| text.parse::<Consistency>())
}

fn cache_mode() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::ALL.map(CacheMode::name)).try_map(|text| text.parse::<CacheMode>())
}

/// A switch; clap's other words for true and false are accepted, too.
fn on_or_off() -> impl TypedValueParser<Value = bool> {
    let words = [("on", "true"), ("off", "false")];
    let values = words.map(|(word, other)| PossibleValue::new(word).aliases([other]));
    let digits = ["1", "0"].map(|digit| PossibleValue::new(digit).hide(true));
    PossibleValuesParser::new(values.into_iter().chain(digits))
        .map(|text| ["on", "true", "1"].contains(&&*text))
}

/// Options of the daemon.
#[derive(Args, Debug, Default)]
pub struct DaemonArguments {
    /// Configuration with defaults [default: /etc/cbd/cbd.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// State that must survive a restart [default: /var/lib/cbd]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Mounts and sockets [default: /run/cbd]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Control socket [default: control.sock in the run folder]
    #[arg(long, value_name = "PATH", env = "CBD_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Folder of the links cbdN to block devices [default: /dev]
    #[arg(long, value_name = "DIR")]
    pub dev_dir: Option<PathBuf>,
    /// Folder of the rules of udev that keep other programs off cached disks [default: /etc/udev/rules.d; none if
    /// --dev-dir is given]
    #[arg(long, value_name = "DIR")]
    pub rules_dir: Option<PathBuf>,
    /// Serve no region that does not survive a power failure
    #[arg(long)]
    pub require_persistent: bool,
    /// Make backing devices as slow as a disk, for demonstrations and tests
    #[arg(long, hide = true, value_name = "PARAMETERS", value_parser = ThrottleParameters::parse)]
    pub throttle: Option<ThrottleParameters>,
    /// Put decorators of the test kit in front of backing devices
    #[cfg(feature = "testkit")]
    #[arg(long, hide = true, value_name = "SPEC", value_parser = cbd_testkit::decorator)]
    pub decorate: Option<cbd_backing::Decorator>,
    /// Format of log lines
    #[arg(long, default_value = "text", value_parser = log_format())]
    pub log_format: LogFormatArgument,
    /// Log more
    #[arg(short, long)]
    pub verbose: bool,
}

/// A log format with a default, for clap.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogFormatArgument(pub LogFormat);

impl std::str::FromStr for LogFormatArgument {
    type Err = cbd_types::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

fn log_format() -> impl TypedValueParser<Value = LogFormatArgument> {
    PossibleValuesParser::new(["text", "json"]).try_map(|text| text.parse::<LogFormatArgument>())
}

/// Whether the arguments are those of a command for offline recovery, whose wrong usage has an exit code of its own.
pub fn has_own_exit_codes(arguments: &[std::ffi::OsString]) -> bool {
    use clap::CommandFactory;
    let matches = Cli::command().ignore_errors(true).try_get_matches_from(arguments);
    let name = matches.ok().and_then(|matches| matches.subcommand_name().map(str::to_owned));
    name.is_some_and(|name| ["check", "dump", "repair", "rescue", "scrub"].contains(&name.as_str()))
}

#[cfg(test)]
mod tests;
