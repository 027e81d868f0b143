//! Verifications of the metadata of the region beside the clients.

use super::World;
use crate::crash::until_crash;
use cbd_engine::MetadataPlace;
use cbd_format::{
    BackendEntry, HostEntry, Layout, SegmentHeader, SlotContent, StateShape, Superblock, pins::PinListHeader,
};
use cbd_types::{ByteRange, DamagedCopy, ErrorKind, LaneId, Result, SegmentId, Structure, VerifiedMetadata};

/// A structure, and the place of its two copies.
pub type Copies = (Structure, [ByteRange; 2]);

impl World {
    /// Verifies the metadata, beside the requests of clients. Without damage nothing is found.
    pub(super) fn verify_metadata_somewhere(&mut self) {
        match self.try_verify_metadata() {
            Ok(found) => {
                self.happened.verified_structures += found.structures;
                // A crash tears a superblock that gets a feature, and recovery leaves that to the next use of one.
                let is_torn =
                    |copy: &DamagedCopy| copy.is_repaired && copy.structure == Structure::Superblock;
                if !self.is_damaged && !found.copies.iter().all(is_torn) {
                    self.fail(format!("a false alarm: {found:?}"));
                }
            }
            // The cache is being detached.
            Err(error) if error.kind() == ErrorKind::Stopped => {}
            Err(error) => self.fail(format!("a verification of metadata: {error}")),
        }
    }

    /// Verifies the metadata. If the process crashes at the `crash_at`-th store or fence, the next one is started, and there is no
    /// result.
    ///
    /// # Panics
    /// If the verification fails as a whole.
    pub fn verify_metadata(&mut self, crash_at: Option<u64>) -> Option<VerifiedMetadata> {
        if let Some(event) = crash_at {
            let seed = self.random.next();
            self.memory.crash_after(event, seed);
        }
        match until_crash(|| self.try_verify_metadata()) {
            Ok(Ok(found)) => {
                self.memory.never_crash();
                Some(found)
            }
            Ok(Err(error)) => self.fail(format!("the verification of the metadata: {error}")),
            Err(_) => {
                self.crash();
                None
            }
        }
    }

    fn try_verify_metadata(&mut self) -> Result<VerifiedMetadata> {
        let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
        let backend = self.backend;
        while !place.is_at_end() {
            self.process().transport().verify_metadata(backend, &mut place, &mut found)?;
        }
        Ok(found)
    }

    /// The structures of the region that are in use and have two copies.
    ///
    /// # Panics
    /// If the backend has no cache.
    pub fn metadata_copies(&mut self) -> Vec<Copies> {
        let backend = self.backend;
        let transport = self.process().transport();
        let layout = transport.info().layout;
        let row = transport.backend_row(backend).expect("it is there");
        let segments = transport.segments_of(backend);
        let second = Layout::second_superblock(layout.region_size);
        let mut all = vec![(Structure::Superblock, [0, second].map(|at| range(at, size_of::<Superblock>())))];
        let mut add = |structure, at: [u64; 2], length| all.push((structure, at.map(|at| range(at, length))));
        let hosts = Layout::slots::<HostEntry>(layout.host_area, layout.host_rows, 0);
        add(Structure::HostRow, hosts, HostEntry::SLOT_SIZE);
        let backends = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, backend.0);
        add(Structure::BackendRow, backends, BackendEntry::SLOT_SIZE);
        for segment in &segments {
            add(Structure::SegmentRow, layout.segment_slots(*segment), 64);
        }
        let base = layout.segment_base(SegmentId(row.state_segment.get()));
        let within = |[first, second]: [u64; 2]| [base + first, base + second];
        let header = |at: u64| [at, at + layout.segment_shape().header_copy()];
        add(Structure::StateHeader, header(base), size_of::<SegmentHeader>());
        let shape = StateShape { lanes: row.lanes.get() };
        add(Structure::Drained, within(shape.drained()), 64);
        let has_pins = !transport.pins(backend).expect("it is there").pins.is_empty();
        if let Some((at, _)) = shape.pins(layout.segment_size).filter(|_| has_pins) {
            add(Structure::Pins, within(at), size_of::<PinListHeader>());
        }
        let log = self.process.as_ref().expect("it runs").cache().log();
        for lane in (0..row.lanes.get()).map(LaneId) {
            add(Structure::Tail, within(shape.tail(lane)), 64);
            add(Structure::Mark, within(shape.mark(lane)), 64);
            for segment in log.segments(lane) {
                add(Structure::SegmentHeader, header(segment.base), size_of::<SegmentHeader>());
            }
        }
        all
    }
}

fn range(at: u64, length: usize) -> ByteRange {
    ByteRange::at(at, length as u64)
}
