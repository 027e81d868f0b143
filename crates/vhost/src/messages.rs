//! The messages of the protocol, one method each: their contents are passed to the [`Session`].
//!
//! Invariants: requests for features that are not offered are refused; the session stores the reason of a refusal,
//! since the protocol transfers none.

use crate::malformed;
use crate::memory::{PIECES_MAX, Piece};
use crate::session::Session;
use cbd_types::Result;
use std::fs::File;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error as Refusal, GpuBackend, Result as Answer, VhostUserBackendReqHandlerMut};

/// Features of the protocol that are offered.
const OFFERED: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::INFLIGHT_SHMFD)
    .union(Protocol::LOG_SHMFD)
    .union(Protocol::CONFIGURE_MEM_SLOTS);

impl Session {
    fn answer<T>(&mut self, result: Result<T>) -> Answer<T> {
        result.map_err(|error| {
            let text = error.line();
            self.fault.get_or_insert(error);
            Refusal::ReqHandlerError(std::io::Error::other(text))
        })
    }

    fn not_offered<T>(&mut self, what: &str) -> Answer<T> {
        self.answer(Err(malformed(format!("the front end requests {what}, which is not offered"))))
    }
}

fn piece(region: &VhostUserMemoryRegion) -> Piece {
    Piece {
        guest: region.guest_phys_addr,
        size: region.memory_size,
        front_end: region.user_addr,
        offset: region.mmap_offset,
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Answer<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Answer<()> {
        // Deprecated because its meaning was never defined; front ends that still send it expect no effect.
        Ok(())
    }

    fn reset_device(&mut self) -> Answer<()> {
        self.not_offered("a reset")
    }

    fn get_features(&mut self) -> Answer<u64> {
        Ok(self.config().features())
    }

    fn set_features(&mut self, features: u64) -> Answer<()> {
        let result = self.negotiate(features);
        self.answer(result)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Answer<Option<Vec<VhostUserMemoryRegionBase>>> {
        let result = self.set_memory(regions.iter().map(piece).zip(files).collect());
        self.answer(result.map(|()| None))
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Answer<()> {
        let result = self.set_size(index as usize, size);
        self.answer(result)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        // Whether stores to the used ring are logged. All stores are while the log is on.
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Answer<()> {
        let result = self.set_addresses(index as usize, [descriptor, available, used]);
        self.answer(result)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Answer<()> {
        let result = self.set_base(index as usize, base);
        self.answer(result)
    }

    fn get_vring_base(&mut self, index: u32) -> Answer<VhostUserVringState> {
        let result = self.stop_ring(index as usize);
        self.answer(result.map(|base| VhostUserVringState::new(index, u32::from(base))))
    }

    fn set_vring_kick(&mut self, index: u8, descriptor: Option<File>) -> Answer<()> {
        let result = self.set_kick(usize::from(index), descriptor);
        self.answer(result)
    }

    fn set_vring_call(&mut self, index: u8, descriptor: Option<File>) -> Answer<()> {
        let result = self.set_call(usize::from(index), descriptor);
        self.answer(result)
    }

    fn set_vring_err(&mut self, index: u8, descriptor: Option<File>) -> Answer<()> {
        let result = self.set_error(usize::from(index), descriptor);
        self.answer(result)
    }

    fn get_protocol_features(&mut self) -> Answer<Protocol> {
        Ok(OFFERED)
    }

    fn set_protocol_features(&mut self, features: u64) -> Answer<()> {
        let unknown = features & !OFFERED.bits();
        if unknown != 0 {
            return self.not_offered(&format!("features {unknown:#x} of the protocol"));
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Answer<u64> {
        Ok(u64::from(self.config().queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Answer<()> {
        let result = self.enable(index as usize, enable);
        self.answer(result)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Answer<Vec<u8>> {
        Ok(self.read_config(offset, size))
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Answer<()> {
        self.write_config(offset, bytes);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Answer<()> {
        self.not_offered("a display")
    }

    fn get_shared_object(&mut self, _object: VhostUserSharedMsg) -> Answer<File> {
        self.not_offered("shared objects")
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Answer<(VhostUserInflight, File)> {
        let result = self.create_inflight(wanted.num_queues, wanted.queue_size);
        let (bytes, file) = self.answer(result)?;
        Ok((VhostUserInflight::new(bytes, 0, wanted.num_queues, wanted.queue_size), file))
    }

    fn set_inflight_fd(&mut self, preserved: &VhostUserInflight, file: File) -> Answer<()> {
        let result = self.adopt_inflight(
            file,
            preserved.mmap_offset,
            preserved.mmap_size,
            preserved.num_queues,
            preserved.queue_size,
        );
        self.answer(result)
    }

    fn get_max_mem_slots(&mut self) -> Answer<u64> {
        Ok(PIECES_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Answer<Option<VhostUserMemoryRegionBase>> {
        let result = self.add_memory(piece(region), file);
        self.answer(result.map(|()| None))
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Answer<()> {
        let result = self.remove_memory(piece(region));
        self.answer(result)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _descriptor: File,
    ) -> Answer<Option<File>> {
        self.not_offered("state to migrate")
    }

    fn check_device_state(&mut self) -> Answer<()> {
        self.not_offered("state to migrate")
    }

    fn get_shmem_config(&mut self) -> Answer<VhostUserShMemConfig> {
        self.not_offered("memory of the device's")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Answer<()> {
        let result = self.set_dirty_log(file, log.mmap_offset, log.mmap_size);
        self.answer(result)
    }
}
