//! The options of `advise`.

use super::OnTransport;
use cbd_advise::Format;
use cbd_daemon::api::NumberOrName;
use cbd_daemon::size::parse_size;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

/// Options of `advise`.
#[derive(Args, Debug)]
pub struct AdviseArguments {
    /// The trace: an iolog of fio (write_iolog), a log of fio with log_offset=1, or the text of blkparse
    /// [default: what the daemon has noted of the requests of the backend]
    #[arg(long, value_name = "FILE", required_unless_present = "backend")]
    pub trace: Option<PathBuf>,
    /// Format of the trace
    #[arg(long, default_value = "auto", value_parser = format(), requires = "trace")]
    pub format: Format,
    /// Only the requests of this device: a path, or its numbers as blkparse prints them, e.g. 8,0
    #[arg(long, value_name = "DEVICE", requires = "trace")]
    pub device: Option<String>,
    /// Size of the present cache, e.g. 4G: an eighth of it up to four times as much is tried [default: sizes up to one
    /// that holds all that the trace uses]
    #[arg(short, long, value_parser = parse_size, conflicts_with = "backend")]
    pub size: Option<u64>,
    /// The sizes to try, e.g. 2G,4G,6G
    #[arg(long, value_parser = parse_size, value_delimiter = ',', num_args = 1.., value_name = "SIZE,..")]
    pub sizes: Vec<u64>,
    /// Take the present size, the segment size and the settings of this backend: its number or name
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<NumberOrName>,
    /// Transport
    #[command(flatten)]
    pub on: OnTransport,
    /// Segment size of the region, 64K to 64M [default: by the size of the cache]
    #[arg(long, value_parser = parse_size, value_name = "SIZE", conflicts_with = "backend")]
    pub segment_size: Option<u64>,
    /// Bytes a second that the disk takes of writeback, e.g. 150M: for the dirty data and the time to full
    /// [default: a disk that takes everything at once]
    #[arg(long, value_parser = parse_size, value_name = "RATE")]
    pub disk_rate: Option<u64>,
    /// Memory for each size: 64 MiB suffice for a cache of 1.5 GiB. A larger one is simulated on a sample of its blocks
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "64M")]
    pub memory: u64,
}

fn format() -> impl TypedValueParser<Value = Format> {
    PossibleValuesParser::new(["auto", "fio", "blkparse"]).map(|text| match &*text {
        "fio" => Format::Fio,
        "blkparse" => Format::Blkparse,
        _ => Format::Auto,
    })
}
