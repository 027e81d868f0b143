//! Transports whose regions grow while block devices on them are in use.
//!
//! Invariants: nothing is stored or extended before it is known that the region can grow; a region that does not grow is used as
//! before. The transport is taken meanwhile: it is not unregistered, and no other command changes its size.
//!
//! Elsewhere: how the memory becomes larger (`cbd-pmem`), and the order of the stores (`cbd-engine`).

use super::Manager;
use super::probe::answers;
use super::slots::TransportHandle;
use super::transport::{leave_unlocked, running_mut, unknown};
use crate::api::{GrowTransport, TransportGrown};
use crate::events::EventName;
use cbd_types::{Error, ErrorKind, Result, Size};
use std::path::Path;
use std::sync::atomic::Ordering;

impl Manager {
    /// Uses the region of a transport to the present end of its file or device, or extends its file before.
    pub(super) fn transport_grow(&self, id: u32, request: GrowTransport) -> Result<TransportGrown> {
        let _work = self.begin_work()?;
        let handle = self.take_transport(id)?;
        let result = self.grow_region(&handle, request.size);
        self.refresh_tables_copy(&handle);
        if let Some(slot) = self.tables.lock().get_mut(&id) {
            slot.is_taken = false;
        }
        result
    }

    fn take_transport(&self, id: u32) -> Result<TransportHandle> {
        let mut tables = self.tables()?;
        let slot = tables.get_mut(&id).ok_or_else(|| unknown(id))?;
        if slot.is_taken {
            let text = format!("transport {id} is being opened, unregistered or grown; repeat the command");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let handle = running_mut(&mut tables, id)?.handle(id);
        if let Some(slot) = tables.get_mut(&id) {
            slot.is_taken = true;
        }
        Ok(handle)
    }

    fn grow_region(&self, handle: &TransportHandle, wanted: Option<u64>) -> Result<TransportGrown> {
        let (id, path, transport) = (handle.id, &handle.path, &handle.transport);
        answers(path)?;
        let memory = transport.region().memory();
        let before = transport.info().layout;
        let size = memory.size_to_grow_to(Path::new(path), wanted)?;
        let mut grown = TransportGrown {
            transport_id: id,
            path: path.clone(),
            before: before.region_size,
            now: before.region_size,
            new_segments: 0,
            bytes_per_segment: before.segment_size,
            free_segments: transport.info().free_segments,
        };
        if size <= before.region_size {
            return Ok(grown);
        }
        transport.check_growth(size)?;
        // Not rounded: whoever has to make the superblocks again needs them.
        let (from, to) = (Size(before.region_size), Size(size));
        tracing::info!(transport = id, "its region {path} of {from} is being grown to {to}");
        let result = memory.grow(Path::new(path), size).and_then(|()| {
            if self.fixed.memory_locked {
                leave_unlocked(path);
            }
            transport.grow_region()
        });
        let layout = transport.info().layout;
        if let Err(error) = result {
            let now = Size(layout.region_size);
            tracing::error!(transport = id, "its region {path} of {from} has {now} now: {error}");
            let what = format!("the region {path} of {from} was not grown to {to}; it is used as before");
            return Err(if layout == before { error.while_doing(what) } else { error });
        }
        grown.now = layout.region_size;
        grown.new_segments = layout.segment_count - before.segment_count;
        grown.free_segments = transport.info().free_segments;
        tracing::info!(
            transport = id,
            event = EventName::TransportGrown.name(),
            bytes = grown.now,
            "its region {path} has grown from {from} to {to}: {} segments more",
            grown.new_segments
        );
        self.note_growth(handle, before.segment_count);
        Ok(grown)
    }

    /// Shows the new size, and counts the hits of larger sizes in caches that may have them now.
    fn note_growth(&self, handle: &TransportHandle, segments_before: u32) {
        let mut tables = self.tables.lock();
        let Ok(running) = running_mut(&mut tables, handle.id) else { return };
        running.mapping = handle.transport.region().memory().info();
        running.size_seen.store(running.mapping.size, Ordering::Relaxed);
        for (&id, slot) in &running.backends {
            let is_larger = slot.entry.shared.is_some_and(|bounds| bounds.max > segments_before);
            let Some(cache) = slot.run.as_ref().filter(|_| is_larger).and_then(|run| run.cache()) else {
                continue;
            };
            if let Err(error) = handle.transport.restart_hit_counts(id, &cache) {
                tracing::warn!(
                    transport = handle.id,
                    backend = id.0,
                    "the hits of its cache are counted up to its former maximum: {error}"
                );
            }
        }
    }
}
