//! Wake-up between this host and others that are processes of the same kernel: who listens, and who connects.
//!
//! Invariants: a host that cannot be reached, or not yet, is served all the same: both sides look from time to time then. Nothing here
//! waits for another host.
//!
//! Elsewhere: the connections, and what they do (`cbd-remote`, `wake`).

use super::Manager;
use super::slots::TransportHandle;
use super::transport::{Running, running_mut};
use cbd_engine::RemoteBlkdev;
use cbd_pmem::Mapping;
use cbd_remote::{RemoteDevice, ServerWake, WakeAddress, WakeListener};
use cbd_types::HostId;
use std::sync::Arc;

impl TransportHandle {
    fn wake_address(&self, host: HostId) -> WakeAddress {
        WakeAddress { region: self.transport.info().uuid, host }
    }

    /// Connects a device of this host to the host that has its backend, unless it is connected.
    pub(super) fn connect_wake(&self, row: &RemoteBlkdev, device: &RemoteDevice<Mapping>) {
        let id = row.entry.id;
        if let Err(error) = device.connect_wake(&self.wake_address(row.owner), id) {
            tracing::debug!(transport = self.id, blkdev = id.0, "it is not woken by the other host: {error}");
        }
    }
}

impl Running {
    /// Gives a connection to the service of its block device. Without one it is closed, and the other host tries again.
    fn give_wake(&self, wake: ServerWake) {
        let service = self.backends.values().find_map(|slot| slot.services.get(&wake.blkdev()));
        if let Some(service) = service {
            service.attach(wake);
        }
    }
}

impl Manager {
    /// Lets other hosts that use backends of this one connect. If a command holds the tables, the next pass does it.
    pub(super) fn accept_wakes(&self) {
        for handle in self.shared_handles() {
            let Some(mut tables) = self.tables_to_retry() else { return };
            let Ok(running) = running_mut(&mut tables, handle.id) else { continue };
            let listener = running.wakes.take();
            drop(tables);
            if handle.is_lost() {
                // The address is that of the process that is this host now.
                continue;
            }
            // Without the lock: to close what another process has passed can take time. While a former process of this host ends, the
            // address is in use: the next pass tries again.
            let listener = listener.or_else(|| WakeListener::bind(&handle.wake_address(handle.host)).ok());
            let Some(mut listener) = listener else { continue };
            let wakes = listener.accept();
            let mut tables = self.tables.lock();
            let Ok(running) = running_mut(&mut tables, handle.id) else { continue };
            // Another transport may have got the number meanwhile.
            if !Arc::ptr_eq(&running.transport, &handle.transport) {
                continue;
            }
            running.wakes = Some(listener);
            wakes.into_iter().for_each(|wake| running.give_wake(wake));
        }
    }
}
