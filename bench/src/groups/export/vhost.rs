//! vhost-user-blk, with the client library of libblkio's driver: one ring, event indexes, and polling for answers, as a guest
//! with a polling driver does.

use super::client::{ExportClient, Exports};
use crate::scale::Sources;
use crate::turns::since;
use cbd_export::BlockDevice;
use cbd_types::{Error, ErrorKind, Result};
use cbd_vhost::{Options, Server};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf, VirtioFeatureFlags,
    VirtioTransport,
};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

/// Size in bytes of the memory that the client and the device share: the data of the writes.
const SHARED: usize = 1 << 20;
/// Descriptors of the ring.
const RING: u16 = 128;
/// An answer that takes longer counts as lost.
const TIMEOUT: Duration = Duration::from_secs(10);

type Transport = VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>;

struct Vhost {
    // In drop order: the ring uses the transport, and the device uses the memory.
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    transport: Box<Transport>,
    shared: MmapRegion,
    server: Server,
}

/// Serves `device` and connects to it.
///
/// # Errors
/// The errors of the server and of the client.
pub fn open(exports: &Exports, device: Arc<dyn BlockDevice>, name: &str) -> Result<Box<dyn ExportClient>> {
    let path = exports.path(&format!("{name}.vhost"));
    let options = Options { thread_setup: Some(exports.thread_setup()), ..Options::default() };
    let server = Server::start(device, &path, options)?;
    let (mut transport, shared) = connect(&path)?;
    let queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, RING).map_err(failed)?;
    Ok(Box::new(Vhost { queues, transport, shared, server }))
}

fn connect(path: &Path) -> Result<(Box<Transport>, MmapRegion)> {
    let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let features = features.bits() | VirtioBlkFeatureFlags::FLUSH.bits();
    let transport = Transport::new(&path.to_string_lossy(), features).map_err(failed)?;
    let mut transport = Box::new(transport);
    let file: File = memfd_create("cbd-bench-guest", MemfdFlags::CLOEXEC).map_err(failed)?.into();
    ftruncate(&file, SHARED as u64).map_err(failed)?;
    let descriptor = file.as_raw_fd();
    let shared = MmapRegion::from_file(FileOffset::new(file.try_clone().map_err(failed)?, 0), SHARED)
        .map_err(failed)?;
    transport.map_mem_region(shared.as_ptr() as usize, SHARED, descriptor, 0).map_err(failed)?;
    Ok((transport, shared))
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::System, format!("the vhost-user client: {error}"))
}

impl ExportClient for Vhost {
    fn write(&mut self, places: &[u64], sources: &Sources, depth: usize, taken: &mut Vec<u32>) -> Result<()> {
        let slots = SHARED / 4096;
        for slot in 0..slots {
            self.shared.as_volatile_slice().write_slice(sources.get(slot), slot * 4096).map_err(failed)?;
        }
        let notifier = self.transport.get_submission_notifier(0);
        let queue = self.queues.first_mut().ok_or_else(|| failed("it has no ring"))?;
        let mut begun = vec![Instant::now(); places.len()];
        let mut rest = places.iter().enumerate();
        let (mut in_flight, mut last) = (0, Instant::now());
        while taken.len() < places.len() {
            let mut has_more = false;
            while in_flight < depth
                && let Some((number, &place)) = rest.next()
            {
                begun[number] = Instant::now();
                let data = self.shared.as_ptr().wrapping_add(number % slots * 4096);
                // SAFETY: the bytes lie in the memory that is shared with the device, and stay mapped until
                // the ring is dropped.
                unsafe { queue.write_raw(place, data, 4096, number) }.map_err(failed)?;
                in_flight += 1;
                has_more = true;
            }
            if has_more && queue.avail_notif_needed() {
                notifier.notify().map_err(failed)?;
            }
            let before = taken.len();
            for done in queue.completions() {
                in_flight -= 1;
                taken.push(since(begun[done.context]));
                if done.ret != 0 {
                    return Err(failed(format_args!("a write failed with {}", done.ret)));
                }
            }
            if taken.len() > before {
                last = Instant::now();
            } else if last.elapsed() > TIMEOUT {
                return Err(failed("an answer does not come"));
            } else {
                std::hint::spin_loop();
            }
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        let Self { queues, transport, shared, server } = *self;
        drop(queues);
        drop(transport);
        drop(shared);
        server.stop()
    }
}
