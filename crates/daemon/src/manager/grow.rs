//! Backends whose backing device has become larger.
//!
//! Invariants: a backend that fails to grow is served as before; an export that cannot tell its clients now does not keep the others
//! from growing.
//!
//! Elsewhere: the order of the steps (`cbd_runtime::grow`), and what clients see ([`crate::exports`]).

use super::Manager;
use super::probe::answers;
use super::slots::TakenSlot;
use crate::api::{BackendGrown, BlkdevGrown};
use crate::events::EventName;
use cbd_backing::identity::HAS_GROWN;
use cbd_types::{BackendId, Error, ErrorKind, Result};

impl Manager {
    /// Uses the backing device of a backend to its present end.
    pub(super) fn backend_grow(&self, transport: u32, id: BackendId) -> Result<BackendGrown> {
        let mut taken = self.take_slot(transport, id, "its size is being changed")?;
        let result = taken.grow();
        self.put_back(taken);
        result
    }
}

impl TakenSlot {
    fn grow(&mut self) -> Result<BackendGrown> {
        let Self { handle, id, slot, .. } = self;
        let id = *id;
        let Some(run) = slot.run.clone() else {
            let why = slot.error.as_deref().unwrap_or("stopped");
            return Err(Error::new(
                ErrorKind::Stopped,
                format!("backend {id} is not up ({why}); correct that and start it again with backend-start"),
            ));
        };
        if slot.stopping {
            return Err(slot.being_stopped());
        }
        answers(&slot.path)?;
        let grown = run.grow(&handle.transport);
        // Also after an error: the row can have the new size.
        if let Ok(entry) = handle.transport.backend(id) {
            (slot.entry.size, slot.entry.identity) = (entry.size, entry.identity);
        }
        let grown = grown?;
        slot.warnings.retain(|warning| !warning.contains(HAS_GROWN));
        let is_larger = grown.now > grown.before;
        if is_larger {
            tracing::info!(
                transport = handle.id,
                backend = id.0,
                event = EventName::BackendGrown.name(),
                bytes = grown.now,
                "{} has grown from {} to {} bytes",
                slot.path,
                grown.before,
                grown.now
            );
        }
        for warning in &grown.warnings {
            tracing::warn!(backend = id.0, "{warning}");
        }
        let mut warnings = grown.warnings;
        let mut blkdevs = Vec::new();
        for (blkdev, device) in &slot.blkdevs {
            let Some(export) = &device.export else { continue };
            let seen = export.grow(grown.now, is_larger);
            let pending = match seen {
                Ok(pending) => pending,
                Err(error) => {
                    let text =
                        format!("its users see the former size: {}; repeat backend-grow", error.line());
                    tracing::warn!(transport = handle.id, blkdev = blkdev.0, "{text}");
                    warnings.push(format!("{}: {text}", export.device_path));
                    Some(text)
                }
            };
            let dev_name = export.device_path.clone();
            blkdevs.push(BlkdevGrown { blkdev_id: blkdev.0, dev_name, is_seen: pending.is_none(), pending });
        }
        Ok(BackendGrown {
            backend_id: id.0,
            backend_path: slot.path.clone(),
            before: grown.before,
            now: grown.now,
            blkdevs,
            warnings,
        })
    }
}
