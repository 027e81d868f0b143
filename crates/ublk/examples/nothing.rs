//! A ublk device without storage: every request completes immediately, and a read returns the former content of its
//! buffer. Its cost per request is that of the export and the kernel's driver alone.
//!
//! `cargo run --release -p cbd-ublk --example nothing -- BYTES QUEUES` prints the device, and serves it until its
//! standard input ends.

use cbd_export::{BlockDevice, RequestQueue};
use cbd_types::{Completion, Error, ErrorKind, Geometry, Request, Result};
use cbd_ublk::{DEPTH, Options, StopMode, Tag, Ublk};
use std::io::Read;
use std::os::fd::RawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// A mark that no daemon uses.
const NAME: &str = "nothing";
const TIMEOUT: Duration = Duration::from_secs(10);

/// A device of this many bytes without storage.
struct Nothing(u64);

struct Queue;

impl BlockDevice for Nothing {
    fn geometry(&self) -> Geometry {
        // That of a cached device, so that the kernel treats both alike.
        Geometry {
            size: self.0,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 256 << 10,
            discard: false,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        }
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(Queue))
    }
}

impl RequestQueue for Queue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        done.push(Completion { id: request.id, result: Ok(()), buffer: request.buffer });
    }

    fn poll(&mut self, _done: &mut Vec<Completion>) {}

    fn parked(&self) -> usize {
        0
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nothing: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>().ok());
    let (Some(Some(size)), Some(Some(queues)), None) = (numbers.next(), numbers.next(), numbers.next())
    else {
        return Err(Error::new(ErrorKind::InvalidArgument, "arguments: BYTES QUEUES"));
    };
    let device: Arc<dyn BlockDevice> = Arc::new(Nothing(size / 4096 * 4096));
    let options = Options {
        name: NAME.to_owned(),
        tag: Tag::new(u64::from(std::process::id()), NAME.as_bytes()),
        link: None,
        names: None,
        queues: usize::try_from(queues).unwrap_or(usize::MAX),
        depth: DEPTH,
        thread_setup: None,
        read_only: false,
    };
    let mut export = Ublk::start(&device, &options)?;
    println!("{}", export.disk_path().display());
    // A read error ends it like the end of the input.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    export.stop(StopMode::WhenUnused, TIMEOUT)
}
