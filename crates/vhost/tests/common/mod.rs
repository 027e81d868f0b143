//! What the tests share: devices, a server in a directory of its own, and a front end whose rings are laid by hand.
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

/// Longer than anything here takes, and shorter than anybody's timeout.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// A device over memory of `size` bytes.
pub fn memory(size: u64) -> Arc<dyn BlockDevice> {
    let region = Arc::new(Mapping::anonymous(size).expect("memory"));
    Arc::new(MemoryDevice::new(region, 512).expect("a device"))
}

/// A server in a directory of its own, and what it told.
pub struct Served {
    pub server: Server,
    pub path: PathBuf,
    pub told: Arc<Mutex<Vec<String>>>,
    _directory: TempDir,
}

pub fn serve(device: Arc<dyn BlockDevice>) -> Served {
    serve_with(device, Options::default())
}

pub fn serve_with(device: Arc<dyn BlockDevice>, options: Options) -> Served {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("vhost.sock");
    let told = Arc::new(Mutex::new(Vec::new()));
    let options = Options { name: "cbd-test".into(), observer: Some(observer(&told)), ..options };
    let server = Server::start(device, &path, options).expect("a server");
    Served { server, path, told, _directory: directory }
}

fn observer(told: &Arc<Mutex<Vec<String>>>) -> cbd_vhost::Observer {
    let told = Arc::clone(told);
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
        told.lock().expect("nobody panics in here").push(text);
    })
}

impl Served {
    /// Waits until the server tells something that has `part` in it.
    pub fn hears(&self, part: &str) -> String {
        let end = Instant::now() + TIMEOUT;
        loop {
            let told = self.told.lock().expect("nobody panics in here").clone();
            if let Some(line) = told.iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            assert!(Instant::now() < end, "nothing of \"{part}\" in {told:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Waits until `so` is.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
