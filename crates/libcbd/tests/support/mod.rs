//! A folder with a region and a disk for tests.
#![allow(dead_code, reason = "each test program uses what it needs")]

use cbd::{Device, DeviceOptions, Format, Region, RegionOptions};
use cbd_daemon::api::{RegisterTransport, StopBackend};
use cbd_daemon::config::Config;
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_daemon::run::Options;
use cbd_daemon::state::StateDir;
use std::path::PathBuf;
use std::sync::Arc;

pub const MIB: u64 = 1 << 20;
pub const BLOCK: usize = 4096;

/// The host name of library and daemon.
pub const HOST: &str = "node0";

pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        std::fs::File::create(place.disk()).unwrap().set_len(16 * MIB).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn region_path(&self) -> PathBuf {
        self.path("region")
    }

    /// A disk of 16 MiB.
    pub fn disk(&self) -> PathBuf {
        self.path("disk")
    }

    /// Creates a region of 32 MiB with segments of 64 KiB.
    pub fn format(&self) -> Region {
        let options = RegionOptions {
            format: Some(Format { segment_size: Some(64 << 10), force: false }),
            size: Some(32 * MIB),
            host: Some(HOST.to_owned()),
            ..RegionOptions::default()
        };
        Region::open(self.region_path(), &options).unwrap()
    }

    pub fn open(&self) -> Region {
        Region::open(self.region_path(), &RegionOptions::default()).unwrap()
    }

    /// A new region with the disk behind a cache of `cache_size` bytes.
    pub fn cached(&self, cache_size: u64) -> (Region, Device) {
        let region = self.format();
        let options = DeviceOptions { cache_size: Some(cache_size), ..DeviceOptions::default() };
        let device = region.attach(self.disk(), &options).unwrap();
        (region, device)
    }

    /// The block, read from the disk itself.
    pub fn on_disk(&self, block: u64) -> Vec<u8> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; BLOCK];
        let disk = std::fs::File::open(self.disk()).unwrap();
        disk.read_exact_at(&mut bytes, block * BLOCK as u64).unwrap();
        bytes
    }

    /// A daemon whose state is in this folder.
    pub fn daemon(&self) -> Daemon {
        std::fs::create_dir_all(self.path("dev")).unwrap();
        let options = Options::below(self.0.path());
        let state = StateDir::open(&options.paths.state_dir).unwrap();
        let manager = Arc::new(Manager::new(&options, Config::default(), state).unwrap());
        manager.restore().unwrap();
        Daemon(manager)
    }

    /// The request of `tp-reg`.
    pub fn registration(&self, format: bool) -> RegisterTransport {
        RegisterTransport {
            host: HOST.to_owned(),
            path: self.region_path().to_str().unwrap().to_owned(),
            size: format.then_some(32 * MIB),
            segment_size: format.then_some(MIB),
            format,
            force: false,
            shared: false,
        }
    }
}

/// A daemon that ends with its test.
pub struct Daemon(Arc<Manager>);

impl std::ops::Deref for Daemon {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        &self.0
    }
}

impl Daemon {
    /// The operation of `backend-stop`: drains, and the disk is a plain disk again.
    pub fn take_off(&self, backend: u32) {
        self.0.stop_backend(0, backend, &StopBackend::default(), &mut |_| Flow::Continue).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// The bytes of a block in its version `number`.
pub fn pattern(block: u64, number: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for (place, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match place {
            0 => block,
            1 => number,
            _ => (block << 40 ^ number << 8 ^ place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The version of a block with these bytes; 0 for a block that was never written.
#[track_caller]
pub fn version(block: u64, bytes: &[u8]) -> u64 {
    if bytes.iter().all(|&byte| byte == 0) {
        return 0;
    }
    let number = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    assert!(bytes == pattern(block, number), "block {block} has no valid version (its number is {number})");
    number
}
