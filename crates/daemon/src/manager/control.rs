//! The operations of the control socket, each by the module that executes it.
//!
//! Elsewhere: what each of them does ([`crate::control`]).

use super::transport::TransportSlot;
use super::{Manager, backend, drain, status, transport, users};
use crate::api::{
    AddPins, AttachCache, BackendGrown, BackendInfo, BackendStarted, BlkdevChange, BlkdevInfo, BlkdevStopped,
    BlkdevUser, ClearHost, CommonCheckpoint, DetachCache, DeviceMap, Done, Drain, GrowTransport, HostInfo,
    MoveBackend, NumberOrName, PinsInfo, RegisterTransport, RemovePins, RequestSample, ResizeCache,
    ScrubInfo, ScrubRequest, Settings, SettingsChange, StartBackend, StartBlkdev, Status, StopBackend,
    StopBlkdev, TransportGrown, TransportInfo, TransportRegistered, VerifyRange,
};
use crate::control::{Control, Report};
use crate::events::Events;
use cbd_types::{BackendId, BlkdevId, Result};
use std::sync::Arc;

impl Control for Manager {
    fn register_transport(&self, request: &RegisterTransport) -> Result<TransportRegistered> {
        self.register(request)
    }

    fn unregister_transport(&self, transport: u32) -> Result<()> {
        self.unregister(transport)
    }

    fn grow_transport(&self, transport: u32, request: GrowTransport) -> Result<TransportGrown> {
        self.transport_grow(transport, request)
    }

    fn transports(&self) -> Result<Vec<TransportInfo>> {
        Ok(self.tables()?.values().map(TransportSlot::info).collect())
    }

    fn hosts(&self, transport: u32) -> Result<Vec<HostInfo>> {
        self.handle(transport)?.hosts()
    }

    fn clear_host(&self, transport: u32, host: u32, request: &ClearHost) -> Result<()> {
        self.host_clear(transport, host, request)
    }

    fn start_backend(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted> {
        self.start_with_promise(transport, request)
    }

    fn stop_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        self.backend_stop(transport, BackendId(backend), request, report)
    }

    fn attach_cache(&self, transport: u32, backend: u32, request: &AttachCache) -> Result<Done> {
        self.cache_attach(transport, BackendId(backend), request)
    }

    fn move_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &MoveBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        self.backend_move(transport, BackendId(backend), request, report)
    }

    fn detach_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &DetachCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.cache_detach(transport, BackendId(backend), request, report)
    }

    fn resize_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &ResizeCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.cache_resize(transport, BackendId(backend), request, report)
    }

    fn pins(&self, transport: u32, backend: u32) -> Result<PinsInfo> {
        self.pins_of(transport, BackendId(backend))
    }

    fn add_pins(&self, transport: u32, backend: u32, request: AddPins) -> Result<PinsInfo> {
        self.pins_add(transport, BackendId(backend), request)
    }

    fn remove_pins(&self, transport: u32, backend: u32, request: &RemovePins) -> Result<PinsInfo> {
        self.pins_remove(transport, BackendId(backend), request)
    }

    fn map(&self, transport: u32, backend: u32, cells: Option<usize>) -> Result<DeviceMap> {
        self.map_of(transport, BackendId(backend), cells)
    }

    fn grow_backend(&self, transport: u32, backend: u32) -> Result<BackendGrown> {
        self.backend_grow(transport, BackendId(backend))
    }

    fn backends(&self, transport: u32, all: bool) -> Result<Vec<BackendInfo>> {
        let handle = self.handle(transport)?;
        let others = if all { handle.entries_of_others() } else { Vec::new() };
        let mut list = {
            let tables = self.tables()?;
            transport::running(&tables, transport)?.backend_infos(others)
        };
        if all {
            handle.tell_hosts_of_backends(&mut list)?;
        }
        Ok(list)
    }

    fn set(&self, transport: u32, backend: u32, change: &SettingsChange) -> Result<Settings> {
        self.change_settings(transport, BackendId(backend), change)
    }

    fn checkpoint(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done> {
        self.drain_backends(transport, request, drain::Goal::Checkpoint, report)
    }

    fn checkpoint_together(
        &self,
        transport: u32,
        request: &CommonCheckpoint,
        report: Report<'_>,
    ) -> Result<Done> {
        self.checkpoint_at_one_moment(transport, request, report)
    }

    fn drain(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done> {
        self.drain_backends(transport, request, drain::Goal::Drained, report)
    }

    fn verify(&self, transport: u32, backend: u32, request: VerifyRange, report: Report<'_>) -> Result<Done> {
        self.verify_once(transport, BackendId(backend), request, report)
    }

    fn sample(&self, transport: u32, backend: u32) -> Result<RequestSample> {
        self.request_sample(transport, BackendId(backend))
    }

    fn scrub(&self, transport: u32, backend: u32) -> Result<ScrubInfo> {
        self.scrub_info(transport, BackendId(backend))
    }

    fn set_scrub(
        &self,
        transport: u32,
        backend: u32,
        request: &ScrubRequest,
        report: Report<'_>,
    ) -> Result<Done> {
        self.change_scrub(transport, BackendId(backend), request, report)
    }

    fn start_blkdev(&self, transport: u32, request: &StartBlkdev) -> Result<BlkdevInfo> {
        self.blkdev_start(transport, request)
    }

    fn set_blkdev(&self, transport: u32, blkdev: u32, change: &BlkdevChange) -> Result<BlkdevInfo> {
        self.blkdev_change(transport, BlkdevId(blkdev), change)
    }

    fn backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        self.number_of_backend(transport, backend)
    }

    fn any_backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        self.number_of_any_backend(transport, backend)
    }

    fn check_object(&self, transport: u32, backend: Option<u32>) -> Result<()> {
        let tables = self.tables()?;
        let slot = tables.get(&transport).ok_or_else(|| transport::unknown(transport))?;
        match (backend, &slot.running) {
            (Some(backend), Ok(running)) if !running.backends.contains_key(&BackendId(backend)) => {
                Err(backend::unknown(BackendId(backend)))
            }
            // Of a transport that is not up, it is not known which there are.
            _ => Ok(()),
        }
    }

    fn blkdev_number(&self, transport: u32, blkdev: &NumberOrName) -> Result<u32> {
        self.number_of_blkdev(transport, blkdev)
    }

    fn stop_blkdev(&self, transport: u32, blkdev: u32, request: StopBlkdev) -> Result<BlkdevStopped> {
        self.blkdev_stop(transport, BlkdevId(blkdev), request)
    }

    fn blkdevs(&self, transport: u32, all: bool) -> Result<Vec<BlkdevInfo>> {
        let handle = self.handle(transport)?;
        let others = if all { handle.blkdevs_of_others() } else { Vec::new() };
        let mut list = {
            let tables = self.tables()?;
            transport::running(&tables, transport)?.blkdev_infos(transport, others)
        };
        if all {
            handle.tell_hosts_of_blkdevs(&mut list)?;
        }
        Ok(list)
    }

    fn events(&self) -> Arc<Events> {
        Arc::clone(&self.fixed.events)
    }

    fn blkdev_users(&self) -> Result<Vec<BlkdevUser>> {
        let tables = self.tables()?;
        let mut users = users::of(&tables);
        let running = tables.iter().filter_map(|(id, slot)| Some((*id, slot.running.as_ref().ok()?)));
        let shared = running.filter(|(_, running)| running.living.is_some());
        let shared: Vec<_> = shared.map(|(id, running)| running.handle(id)).collect();
        drop(tables);
        for handle in shared {
            users.extend(users::of_other_hosts(&handle)?);
        }
        Ok(users)
    }

    fn status(&self) -> Result<Status> {
        let tables = self.tables()?;
        Ok(status::page(&self.fixed, &self.sharing, &self.scrubs, &tables))
    }
}
