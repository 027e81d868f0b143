//! A running backend grows with its backing device, while clients use it.
//!
//! The file was extended, or the block device was resized, by its owner. The order is that of the engine (`transport::grow`): the
//! backing device is used to its new end, the row has the new size durably, the cache accepts requests up to there, and then the
//! device for clients shows it.
//!
//! Invariants: nothing is sent beyond the former end before the row has the new size; whatever fails, and wherever the process ends,
//! the backend has its former size or the new one, and the command can be repeated.
//!
//! Elsewhere: reading the size (`cbd-backing`), and how clients learn of it (the exports).

use crate::{ProcessEnvironment, RunningBackend, disk, moved};
use cbd_backing::{Backing, Identity};
use cbd_engine::Transport;
use cbd_types::{Error, ErrorKind, Result};

/// The result of [`RunningBackend::grow`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grown {
    /// The size in bytes that clients could see.
    pub before: u64,
    /// The size in bytes that they can see now; the same if the backing device has not become larger.
    pub now: u64,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

impl RunningBackend {
    /// Reads the size of the backing device again, and uses all of it. May block on its file system.
    ///
    /// # Errors
    /// Those of [`BackingFile::grow`](cbd_backing::BackingFile::grow) and [`Transport::grow_backend`];
    /// [`ErrorKind::Exchanged`] for a backend that a rescue has moved; [`ErrorKind::Busy`] if the backing device has got bytes of
    /// another backend of the region. Clients see the former size then.
    pub fn grow(&self, transport: &Transport<ProcessEnvironment>) -> Result<Grown> {
        let entry = transport.backend(self.id)?;
        moved::refuse_moved(transport, &entry)?;
        let growth = self.file.grow()?;
        let (before, now) = (self.device.device().geometry().size, growth.now);
        let grown = Grown { before, now, warnings: growth.warnings };
        // The row can be larger than the device: an earlier call may have failed behind it.
        if now == before && now == entry.size {
            return Ok(grown);
        }
        let identity = Identity::parse(&entry.identity)?.with_size(self.file.identity().size());
        let others = disk::entries(transport).0.into_iter().filter(|other| other.id != self.id);
        let overlaps =
            |recorded: &str| Identity::parse(recorded).is_ok_and(|other| other.overlaps(&identity));
        if let Some(other) = { others }.find(|other| overlaps(&other.identity)) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "{} has grown to {now} bytes, into bytes of {}, which is backend {}; give it other bytes, or stop that backend first",
                    entry.path, other.path, other.id
                ),
            ));
        }
        // 1. The row, durably; then the cache.
        transport.grow_backend(self.id, now, &identity.to_token())?;
        // 2. What clients see.
        self.device.device().grow(now);
        Ok(grown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;
    use crate::{NewBackend, RunOptions};
    use cbd_engine::{BackendEntry, FormatOptions, Settings};
    use cbd_export::{BlockDevice, RequestQueue};
    use cbd_pmem::Mapping;
    use cbd_types::{AlignedBuffer, BackendId, ByteRange, Completion, HostId, Operation, Region, Request};
    use std::fs::File;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    const MIB: u64 = 1 << 20;

    struct Rig {
        environment: Arc<ProcessEnvironment>,
        transport: Arc<Transport<ProcessEnvironment>>,
        folder: tempfile::TempDir,
    }

    fn set_size(path: &Path, size: u64) {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        file.and_then(|file| file.set_len(size)).expect("a file of that size");
    }

    impl Rig {
        fn new() -> Self {
            let environment = Arc::new(ProcessEnvironment::new());
            let region = Region::new(Mapping::anonymous(16 << 20).expect("memory"));
            let options = FormatOptions { segment_size: Some(64 << 10), ..FormatOptions::default() };
            let transport = Transport::format(Arc::clone(&environment), region, &options).expect("room");
            transport.register_host("host", None).expect("room");
            Self { environment, transport, folder: tempfile::tempdir().expect("a folder") }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn create(&self, name: &str, cache_bytes: Option<u64>) -> BackendId {
            let path = self.path(name);
            set_size(&path, MIB);
            let path = path.to_str().expect("a name").to_owned();
            let disk = Disk::inspect(&path).expect("a disk");
            let (host, handlers, data_crc, settings) = (HostId(0), 1, true, Settings::default());
            let new = NewBackend { host, path, name: None, cache_bytes, handlers, data_crc, settings };
            new.create(&self.transport, &disk).expect("room")
        }

        fn entry(&self, id: BackendId) -> BackendEntry {
            self.transport.backend(id).expect("it is there")
        }

        fn start(&self, id: BackendId) -> Result<(RunningBackend, Vec<String>)> {
            let entry = self.entry(id);
            let options = RunOptions::plain("region");
            RunningBackend::start(&self.transport, &self.environment, &entry, &entry.path, options)
        }
    }

    fn run(queue: &mut dyn RequestQueue, operation: Operation, at: u64, value: u8) -> Completion {
        let mut buffer = AlignedBuffer::zeroed(4096);
        buffer.fill(value);
        let mut done = Vec::new();
        queue.submit(Request::unmarked(1, operation, ByteRange::at(at, 4096), false, buffer), &mut done);
        while done.is_empty() {
            assert!(cbd_export::wait_any(&queue.wait_descriptors(), None).is_ok());
            queue.poll(&mut done);
        }
        done.remove(0)
    }

    #[test]
    fn a_backend_grows_with_its_file_with_a_cache_and_without_one_and_keeps_its_size_at_the_next_start() {
        for cache in [None, Some(MIB)] {
            let rig = Rig::new();
            let id = rig.create("disk", cache);
            let path = rig.path("disk");
            let (running, _) = rig.start(id).expect("it starts");
            let mut queue = running.device().open_queue().expect("a queue");
            let geometry = running.device().geometry();
            for size in [3 * MIB, 4 * MIB] {
                set_size(&path, size);
                let before = running.device().geometry().size;
                assert!(run(&mut *queue, Operation::Write, before, 1).result.is_err());
                let grown = running.grow(&rig.transport).expect("it is larger");
                assert_eq!((grown.before, grown.now), (before, size));
                run(&mut *queue, Operation::Write, size - 4096, size as u8 | 7)
                    .result
                    .expect("it reaches so far");
                let read = run(&mut *queue, Operation::Read, size - 4096, 0);
                read.result.expect("it reaches so far");
                assert!(read.buffer.iter().all(|byte| *byte == size as u8 | 7));
                assert!(run(&mut *queue, Operation::Read, size, 0).result.is_err());
            }
            let again = running.grow(&rig.transport).expect("nothing is larger");
            assert_eq!((again.before, again.now), (4 * MIB, 4 * MIB));
            // All the rest of what clients see is as before.
            assert_eq!(cbd_types::Geometry { size: geometry.size, ..running.device().geometry() }, geometry);
            drop(queue);
            running.stop();
            drop(running);
            assert_eq!(rig.entry(id).size, 4 * MIB);
            let (running, warnings) = rig.start(id).expect("it starts");
            assert!(!warnings.iter().any(|warning| warning.contains("grown")), "{warnings:?}");
            let mut queue = running.device().open_queue().expect("a queue");
            let read = run(&mut *queue, Operation::Read, 4 * MIB - 4096, 0);
            assert!(read.result.is_ok() && read.buffer.iter().all(|byte| *byte == 7));
            drop(queue);
            running.stop();
        }
    }

    #[test]
    fn a_growth_that_was_recorded_but_not_used_is_used_by_the_next_command() {
        let rig = Rig::new();
        let id = rig.create("disk", Some(MIB));
        let (running, _) = rig.start(id).expect("it starts");
        set_size(&rig.path("disk"), 2 * MIB);
        // As far as a command gets that fails behind the row.
        running.file.grow().expect("it is larger");
        let identity = running.file.identity().to_token();
        rig.transport.grow_backend(id, 2 * MIB, &identity).expect("it is larger");
        let grown = running.grow(&rig.transport).expect("the rest of it");
        assert_eq!((grown.before, grown.now), (MIB, 2 * MIB));
        assert_eq!(running.device().geometry().size, 2 * MIB);
        running.stop();
    }

    #[test]
    fn a_backend_does_not_shrink_nor_grow_into_bytes_of_another_one_of_the_region() {
        let rig = Rig::new();
        let (id, other) = (rig.create("disk", Some(MIB)), rig.create("other", None));
        let (running, _) = rig.start(id).expect("it starts");
        set_size(&rig.path("disk"), MIB / 2);
        let error = running.grow(&rig.transport).expect_err("it has shrunk");
        assert!(error.kind() == ErrorKind::OutOfRange && error.line().contains("has shrunk"), "{error}");
        assert_eq!((rig.entry(id).size, running.device().geometry().size), (MIB, MIB));
        running.stop();
        drop(running);
        // A row that is not up, of bytes that are free when the file is MIB long.
        let token = rig.entry(id).identity.replace("file;", "block;") + ";offset=1048576";
        rig.transport.grow_backend(other, MIB, &token).expect("the same size");
        set_size(&rig.path("disk"), MIB);
        let (running, _) = rig.start(id).expect("it starts");
        set_size(&rig.path("disk"), 2 * MIB);
        let error = running.grow(&rig.transport).expect_err("the bytes are another one's");
        assert!(error.kind() == ErrorKind::Busy && error.line().contains("backend 1"), "{error}");
        assert_eq!((rig.entry(id).size, running.device().geometry().size), (MIB, MIB));
        running.stop();
    }

    #[test]
    fn a_backend_that_was_moved_does_not_grow() {
        let rig = Rig::new();
        let id = rig.create("disk", Some(MIB));
        let (running, _) = rig.start(id).expect("it starts");
        rig.transport.move_backend(id, "/elsewhere", "file;size=1048576;inode=1").expect("room");
        set_size(&rig.path("disk"), 2 * MIB);
        assert_eq!(running.grow(&rig.transport).expect_err("it was moved").kind(), ErrorKind::Exchanged);
        assert_eq!(running.device().geometry().size, MIB);
        running.stop();
    }
}
