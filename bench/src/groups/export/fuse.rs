//! The FUSE file, and the loop device over it. Both use direct I/O: synchronous writes at depth 1, a ring at higher depths.

use super::client::{ExportClient, Exports};
use crate::ring::FileRing;
use crate::scale::Sources;
use crate::turns::since;
use cbd_export::BlockDevice;
use cbd_fuse::{FuseLoop, Options, StopMode};
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time within which an export must end.
const TIMEOUT: Duration = Duration::from_secs(10);

struct Fuse {
    export: FuseLoop,
    file: File,
    ring: FileRing,
}

/// Exports `device` and opens its file.
///
/// # Errors
/// When the system refuses it.
pub fn open_file(
    exports: &Exports,
    device: Arc<dyn BlockDevice>,
    name: &str,
) -> Result<Box<dyn ExportClient>> {
    let export = start(exports, device, name)?;
    let path = export.file_path();
    open(export, &path)
}

/// Exports `device` and opens its loop device.
///
/// # Errors
/// When the system refuses it.
pub fn open_loop(
    exports: &Exports,
    device: Arc<dyn BlockDevice>,
    name: &str,
) -> Result<Box<dyn ExportClient>> {
    let export = start(exports, device, name)?;
    let path = export.loop_path().to_owned();
    open(export, &path)
}

fn start(exports: &Exports, device: Arc<dyn BlockDevice>, name: &str) -> Result<FuseLoop> {
    let options = Options {
        name: name.to_owned(),
        mount_dir: exports.path(name),
        link: None,
        queues: std::thread::available_parallelism().map_or(1, usize::from),
        thread_setup: Some(exports.thread_setup()),
        read_only: false,
        store: None,
    };
    FuseLoop::start(device, options)
}

fn open(export: FuseLoop, path: &Path) -> Result<Box<dyn ExportClient>> {
    let refused = |error| Error::new(ErrorKind::System, format!("cannot open {}: {error}", path.display()));
    let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).map_err(refused)?;
    let ring = FileRing::new(file.try_clone().map_err(refused)?)?;
    Ok(Box::new(Fuse { export, file, ring }))
}

impl ExportClient for Fuse {
    fn write(&mut self, places: &[u64], sources: &Sources, depth: usize, taken: &mut Vec<u32>) -> Result<()> {
        if depth > 1 {
            return self.ring.write(places, sources, depth, taken);
        }
        for (number, &place) in places.iter().enumerate() {
            let begun = Instant::now();
            self.file
                .write_all_at(sources.get(number), place)
                .map_err(|error| Error::new(ErrorKind::System, format!("a write at {place}: {error}")))?;
            taken.push(since(begun));
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        let Self { mut export, file, ring } = *self;
        drop((file, ring));
        export.stop(StopMode::WhenUnused, TIMEOUT)
    }
}
