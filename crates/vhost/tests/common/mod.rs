//! Helpers of the tests: devices, a server in a temporary directory, and a front end whose rings are written by hand.
#![allow(dead_code)]

pub mod device;
pub mod guest;

use cbd_export::{BlockDevice, MemoryDevice};
use cbd_pmem::Mapping;
use cbd_types::Error;
use cbd_vhost::{Notice, Options, Server};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than any step of a test takes, and shorter than the timeouts of test runners.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// A device over memory of `size` bytes.
pub fn memory(size: u64) -> Arc<dyn BlockDevice> {
    let region = Arc::new(Mapping::anonymous(size).expect("memory"));
    Arc::new(MemoryDevice::new(region, 512).expect("a device"))
}

/// A server in a temporary directory, and the events that it reported.
pub struct Served {
    pub server: Server,
    pub path: PathBuf,
    pub events: Arc<Mutex<Vec<String>>>,
    _directory: TempDir,
}

pub fn serve(device: Arc<dyn BlockDevice>) -> Served {
    serve_with(device, Options::default())
}

pub fn serve_with(device: Arc<dyn BlockDevice>, options: Options) -> Served {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("vhost.sock");
    let events = Arc::new(Mutex::new(Vec::new()));
    let options = Options { name: "cbd-test".into(), observer: Some(observer(&events)), ..options };
    let server = Server::start(device, &path, options).expect("a server");
    Served { server, path, events, _directory: directory }
}

fn observer(events: &Arc<Mutex<Vec<String>>>) -> cbd_vhost::Observer {
    let events = Arc::clone(events);
    Arc::new(move |notice: &Notice<'_>| {
        let line = |error: &Error| error.line();
        let text = match notice {
            Notice::Connected => "connected".into(),
            Notice::Refused => "refused".into(),
            Notice::Ended { error } => format!("ended: {}", error.map_or("in order".into(), line)),
            Notice::RingFailed { ring, error } => format!("ring {ring}: {}", line(error)),
            Notice::CannotAccept { error } => format!("cannot accept: {}", line(error)),
            other => format!("{other:?}"),
        };
        events.lock().expect("no thread panicked with the lock").push(text);
    })
}

impl Served {
    /// Waits until the server reports an event whose text contains `part`.
    pub fn reports(&self, part: &str) -> String {
        let end = Instant::now() + TIMEOUT;
        loop {
            let events = self.events.lock().expect("no thread panicked with the lock").clone();
            if let Some(line) = events.iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            assert!(Instant::now() < end, "nothing of \"{part}\" in {events:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until `so` returns true.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
