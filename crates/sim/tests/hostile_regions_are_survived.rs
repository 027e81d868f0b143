//! Forged regions: any field of any structure is changed, with a valid checksum. Opening and using such a region ends
//! in an error or in a cache that works, never in a panic, a hang, or an operation outside the disk.

use cbd_engine::{Consistency, Transport};
use cbd_format::record::bytes_of;
use cbd_format::{
    BackendEntry, BlkdevEntry, Drained, HostEntry, LaneMark, LaneTail, Layout, Record, RecordPlace,
    SegmentEntry, SegmentHeader, Slot, SlotContent, StateShape, Superblock,
};
use cbd_sim::process::Process;
use cbd_sim::{
    CrashMemory, Mix, Seeded, SimDisk, SimEnvironment, Watchdog, World, WorldOptions, from_environment,
};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, LaneId, Operation, Pmem, Region, Request, SegmentId};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// Changes one aligned field after `from` to a harmful value.
fn hurt(bytes: &mut [u8], from: usize, random: &mut Seeded) {
    let width = if random.chance(600) { 8 } else { 4 };
    let places = (bytes.len() - from) / width;
    let at = from.next_multiple_of(width) + random.below(places as u64) as usize * width;
    let Some(field) = bytes.get_mut(at..at + width) else { return };
    let mut old = [0; 8];
    old[..width].copy_from_slice(field);
    let old = u64::from_le_bytes(old);
    let new = match random.below(12) {
        0 => 0,
        1 => 1,
        2 => u64::MAX,
        3 => u64::MAX / 2,
        4 => old.wrapping_add(1),
        5 => old.wrapping_sub(1),
        6 => old ^ (1 << random.below(width as u64 * 8)),
        7 => random.below(64),
        8 => random.below(1 << 20),
        9 => (1 << 62) - 1 - random.below(3),
        10 => old.wrapping_add(random.below(1 << 16)),
        _ => random.next(),
    };
    field.copy_from_slice(&new.to_le_bytes()[..width]);
}

fn load(memory: &CrashMemory, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.load(at, &mut bytes).expect("nothing is poisoned");
    bytes
}

fn store(memory: &CrashMemory, at: u64, bytes: &[u8]) {
    memory.store(at, bytes);
    memory.fence();
}

/// Forges the newer slot of an object, or both.
fn forge_slot<T: SlotContent>(memory: &CrashMemory, slots: [u64; 2], place: u64, random: &mut Seeded) {
    let read = |at| Slot::<T>::decode(place, &load(memory, at, T::SLOT_SIZE));
    let newest = Slot::newest(read(slots[0]), read(slots[1]));
    let (which, mut slot) = match newest {
        Some(found) => found,
        // A slot that was never written can be forged, too.
        None => (0, Slot { sequence: 1, content: T::new_zeroed() }),
    };
    let mut bytes = bytes_of(&slot.content).to_vec();
    hurt(&mut bytes, 0, random);
    slot.content = T::read_from_bytes(&bytes).expect("the same size");
    if random.chance(100) {
        slot.sequence = random.next();
    }
    store(memory, slots[which], &slot.encode(place));
    if random.chance(300) {
        store(memory, slots[1 - which], &slot.encode(place));
    }
}

/// The facts about the cache that a forgery needs.
struct Known {
    layout: Layout,
    backend: BackendEntry,
}

impl Known {
    fn of(memory: &CrashMemory) -> Self {
        let environment = Arc::new(SimEnvironment::new(1, 0));
        let transport = Transport::open(environment, Region::new(memory.clone())).expect("sound as yet");
        let layout = transport.info().layout;
        let slots = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, 0);
        let read = |at| Slot::<BackendEntry>::decode(0, &load(memory, at, BackendEntry::SLOT_SIZE));
        let (_, slot) = Slot::newest(read(slots[0]), read(slots[1])).expect("there is a backend");
        Self { layout, backend: slot.content }
    }

    fn header(&self, memory: &CrashMemory, segment: SegmentId) -> Option<SegmentHeader> {
        let bytes = load(memory, self.layout.segment_base(segment), size_of::<SegmentHeader>());
        SegmentHeader::decode(&bytes)?.verify(segment, self.backend.cache_id.get(), self.backend.lanes.get())
    }

    /// Makes one forgery.
    fn forge(&self, memory: &CrashMemory, random: &mut Seeded) {
        let layout = &self.layout;
        let state = StateShape { lanes: self.backend.lanes.get() };
        let base = layout.segment_base(SegmentId(self.backend.state_segment.get()));
        let absolute = |[a, b]: [u64; 2]| [base + a, base + b];
        let lane = LaneId(random.below(u64::from(state.lanes)) as u32);
        match random.below(20) {
            0 => {
                let slots = Layout::slots::<HostEntry>(layout.host_area, layout.host_rows, 0);
                forge_slot::<HostEntry>(memory, slots, 0, random);
            }
            1 => {
                let slots = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, 0);
                forge_slot::<BackendEntry>(memory, slots, 0, random);
            }
            2 => {
                let slots = Layout::slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows, 0);
                forge_slot::<BlkdevEntry>(memory, slots, 0, random);
            }
            3 => {
                let row = random.below(u64::from(layout.segment_count)) as u32;
                let slots = Layout::slots::<SegmentEntry>(layout.segment_table, layout.segment_count, row);
                forge_slot::<SegmentEntry>(memory, slots, u64::from(row), random);
            }
            4 => {
                let at = *random.pick(&[0, Layout::second_superblock(layout.region_size)]);
                let mut bytes = load(memory, at, size_of::<Superblock>());
                hurt(&mut bytes, 0, random);
                store(memory, at, &bytes);
            }
            5 | 6 => forge_slot::<Drained>(memory, absolute(state.drained()), 0, random),
            7 | 8 => forge_slot::<LaneTail>(memory, absolute(state.tail(lane)), u64::from(lane.0), random),
            9 | 10 => forge_slot::<LaneMark>(memory, absolute(state.mark(lane)), u64::from(lane.0), random),
            11..14 => self.forge_header(memory, random),
            14..19 => self.forge_record(memory, random),
            _ => {
                let at = random.below(memory.len() / 64) * 64;
                let garbage: Vec<u8> = (0..64).map(|_| random.next() as u8).collect();
                store(memory, at, &garbage);
            }
        }
    }

    fn segment(&self, random: &mut Seeded) -> SegmentId {
        SegmentId(random.below(u64::from(self.layout.segment_count)) as u32)
    }

    fn forge_header(&self, memory: &CrashMemory, random: &mut Seeded) {
        let segment = self.segment(random);
        let Some(header) = self.header(memory, segment) else { return };
        let mut bytes = bytes_of(&header).to_vec();
        hurt(&mut bytes, 8, random);
        let forged = SegmentHeader::read_from_bytes(&bytes).expect("the same size").sealed();
        let target = if random.chance(200) { self.segment(random) } else { segment };
        let base = self.layout.segment_base(target);
        let copy = base + self.layout.segment_shape().header_copy();
        match random.below(3) {
            0 => store(memory, base, bytes_of(&forged)),
            1 => store(memory, copy, bytes_of(&forged)),
            _ => [base, copy].into_iter().for_each(|at| store(memory, at, bytes_of(&forged))),
        }
    }

    fn forge_record(&self, memory: &CrashMemory, random: &mut Seeded) {
        let shape = self.layout.segment_shape();
        for _ in 0..50 {
            let segment = self.segment(random);
            let Some(header) = self.header(memory, segment) else { continue };
            let slot = random.below(24) as u32;
            let place = RecordPlace { salt: header.salt.get(), segment, slot };
            let [primary, mirror] = shape.slot(slot).map(|at| self.layout.segment_base(segment) + at);
            let line: [u8; 64] = load(memory, primary, 64).try_into().expect("a line");
            let Some(record) = Record::decode(&line).verify(&place, header.generation.get(), shape.size)
            else {
                continue;
            };
            let mut bytes = bytes_of(&record).to_vec();
            hurt(&mut bytes, 4, random);
            let forged = Record::read_from_bytes(&bytes).expect("the same size").encode(&place);
            store(memory, primary, &forged);
            if random.chance(800) {
                store(memory, mirror, &forged);
            }
            return;
        }
    }
}

/// Opens the region and uses it, ignoring errors. Returns whether it opened.
fn use_it(memory: &CrashMemory, disk: &SimDisk, random: &mut Seeded) -> bool {
    let environment = Arc::new(SimEnvironment::new(random.next(), 0));
    let Ok(transport) = Transport::open(Arc::clone(&environment), Region::new(memory.clone())) else {
        return false;
    };
    let _ = (transport.hosts(), transport.blkdevs(), transport.backends(), transport.info());
    let fits = |entry: cbd_engine::BackendEntry| {
        // The daemon compares a backend with the disk before it opens the cache.
        (entry.size, entry.sector) == (disk.geometry().size, disk.geometry().sector)
    };
    if !transport.backend(BackendId(0)).is_ok_and(fits) {
        return false;
    }
    let Ok(mut process) = Process::open(Arc::clone(&environment), memory, disk, BackendId(0), 1, 4) else {
        return false;
    };
    let size = disk.geometry().size;
    let mut done = Vec::new();
    for id in 0..40 {
        let operation = *random.pick(&[
            Operation::Read,
            Operation::Read,
            Operation::Write,
            Operation::Write,
            Operation::Flush,
            Operation::WriteZeroes,
            Operation::Discard,
        ]);
        let start = random.below(size / 512) * 512;
        let length = *random.pick(&[512, 4096, 65536, 1 << 20, 8 << 20]);
        let range = match operation {
            Operation::Flush => ByteRange::at(0, 0),
            _ => ByteRange { start, end: (start + length).min(size) },
        };
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        let buffer = AlignedBuffer::zeroed(if has_data { range.len() as usize } else { 0 });
        process.submit(0, Request::unmarked(id, operation, range, id % 7 == 0, buffer), &mut done);
        for _ in 0..20 {
            process.maintain();
            process.poll(0, &mut done);
        }
        environment.advance(300);
    }
    let _ = process.cache().status();
    process.cache().stop();
    process.poll(0, &mut done);
    true
}

#[test]
fn forged_regions_end_in_an_error_or_in_a_cache_that_works() {
    let first = from_environment("CBD_SEED", 1);
    let (mut opened, mut rounds) = (0, 0);
    for seed in first..first + from_environment("CBD_ROUNDS", 12) {
        let mut world = World::new(WorldOptions {
            mix: Mix { large_permille: 5, ..Mix::ALL },
            crash_permille: 0,
            crash_in_recovery_permille: 0,
            ..WorldOptions::small(seed, Consistency::Strict)
        });
        let mut random = Seeded::new(seed);
        world.run(random.between(10, 400));
        world.quiesce();
        let region = world.memory().image();
        for round in 0..20 {
            let _watchdog =
                Watchdog::new(Duration::from_secs(60), format!("forged, seed {seed}, round {round}"));
            println!("seed {seed}, round {round}");
            let memory = CrashMemory::from_image(region.clone());
            let known = Known::of(&memory);
            for _ in 0..random.between(1, 4) {
                known.forge(&memory, &mut random);
            }
            let disk = SimDisk::new(world.disk().geometry(), seed);
            let survived = use_it(&memory, &disk, &mut random);
            opened += u64::from(survived);
            rounds += 1;
            // The program must also survive the state that the first use left.
            let left = memory.process_crash();
            disk.process_crash(seed);
            use_it(&left, &disk, &mut random);
        }
        world.finish();
    }
    println!("{opened} of {rounds} opened");
    assert!(opened * 2 > rounds, "most forgeries are small, and most of the cache must stay usable");
}
