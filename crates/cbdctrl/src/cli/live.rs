//! The commands that change a backend while its block devices are in use.

mod pins;
mod scrub;

use super::{OnTransport, cache_mode};
use cbd_daemon::api::{CacheMode, NumberOrName};
use cbd_daemon::size::{CacheSize, parse_cache_size, parse_size};
use clap::{Args, Subcommand};
pub use pins::{PinCommand, Pinned};
pub use scrub::{SCRUB_EXIT_CODES, ScrubArguments};

/// The backend of a command.
#[derive(Args, Debug)]
pub struct OfBackend {
    /// Transport
    #[command(flatten)]
    pub on: OnTransport,
    /// Number or name of the backend
    #[arg(short, long, value_name = "ID")]
    pub backend: NumberOrName,
}

/// The size that a cache is to have.
#[derive(Args, Debug)]
pub struct SizeOfCache {
    /// Size of the cache, e.g. 4G, or MIN..MAX, e.g. 2G..16G: at least 2G, and up to 16G of the space that it shares
    /// with other such caches, by their loads
    #[arg(short, long, value_parser = parse_cache_size, value_name = "SIZE")]
    pub cache_size: CacheSize,
    /// With MIN..MAX: how much a hit of this cache counts among them [default: 1]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "1..1000")]
    pub weight: Option<u16>,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum LiveCommand {
    /// Use a region whose file or device has become larger to its end, or extend its file, while the transport is in use
    TpGrow {
        /// Transport
        #[command(flatten)]
        on: OnTransport,
        /// Size that the region is to have, e.g. 64G: its file is extended to it [default: that of the file or device]
        #[arg(short, long, value_parser = parse_size)]
        size: Option<u64>,
    },
    /// Pins
    #[command(flatten)]
    Pins(PinCommand),
    /// Verify the whole device of a backend in the background: each copy of its data, and whether they agree
    #[command(after_help = SCRUB_EXIT_CODES)]
    Scrub(ScrubArguments),
    /// Use a backing device that has become larger to its end, while it is in use: its cache and block device grow with it
    BackendGrow {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
    },
    /// Give a backend without a cache one, while its block devices are in use
    CacheAttach {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// Size
        #[command(flatten)]
        size: SizeOfCache,
        /// How writes go [default: as stored for the backend, at first writeback]
        #[arg(long, value_parser = cache_mode())]
        cache_mode: Option<CacheMode>,
    },
    /// Move a backend to another host of a transport that several share, while its block devices are in use: they see a pause and no
    /// error. The command runs on the host that has the backend, or on the one that gets it
    BackendMove {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// Name or number of the host that gets it
        #[arg(long, value_name = "HOST")]
        to: String,
        /// Seconds without progress of writing back after which it stays where it is [default: 60]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Write everything in the cache of a backend to its backing device, and take the cache away, while its block
    /// devices are in use
    CacheDetach {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// Seconds without progress after which to give up and keep the cache [default: 60]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
    /// Change the size of the cache of a backend, while its block devices are in use
    CacheResize {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// Size
        #[command(flatten)]
        size: SizeOfCache,
        /// Seconds without progress after which a cache that shrinks keeps its size [default: 60]
        #[arg(long, value_name = "SECONDS")]
        timeout: Option<u64>,
    },
}
