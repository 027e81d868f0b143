//! Changes to a region by an attacker with knowledge of the format: any field of any structure, under a valid checksum, or damage
//! that a checksum must detect.
//!
//! Invariants: whatever the region holds, an edit changes only bytes inside it, or no bytes.

use crate::input::{Input, corner};
use cbd_format::record::{FLAG_DATA_CRC, blocks_in, bytes_of, checksum_lines};
use cbd_format::segment::LOG_MAGIC;
use cbd_format::{
    BackendEntry, BlkdevEntry, CHECKSUMS_PER_LINE, ChecksumLine, Drained, HostEntry, LaneMark, LaneTail,
    Layout, PAGE, Record, RecordPlace, SegmentEntry, SegmentHeader, Slot, SlotContent, StateShape,
    StructLayout, Superblock, crc32c,
};
use cbd_sim::CrashMemory;
use cbd_types::{ByteRange, LaneId, Pmem, SegmentId};
use zerocopy::FromBytes;

/// The content of damaged data; no client writes it.
pub const MARKER: [u8; 64] = [0xd5; 64];

/// The structure that an edit changes.
const TARGETS: [Target; 18] = [
    Target::Record,
    Target::Record,
    Target::Record,
    Target::Header,
    Target::Header,
    Target::Tail,
    Target::Mark,
    Target::Drained,
    Target::Checksums,
    Target::CopyRecord,
    Target::CopySegment,
    Target::Data,
    Target::Raw,
    Target::Poison,
    Target::Superblock,
    Target::Host,
    Target::Backend,
    Target::Segment,
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    Record,
    Header,
    Tail,
    Mark,
    Drained,
    Checksums,
    CopyRecord,
    CopySegment,
    Data,
    Raw,
    Poison,
    Superblock,
    Host,
    Backend,
    Segment,
}

/// One change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Edit {
    target: Target,
    /// The segment, lane or row.
    which: u8,
    /// The record of the segment; the number after the last record stands for a new record at the end.
    slot: u8,
    /// The field of the structure.
    field: u8,
    /// The kind of change.
    how: u8,
    /// The copies that are changed, and the other fields that are adapted.
    more: u8,
    value: u64,
}

impl Edit {
    /// Bytes of an input for one edit.
    pub const SIZE: usize = 16;

    /// The edit in the next bytes.
    pub fn read(input: &mut Input<'_>) -> Self {
        let mut own = Input(input.bytes(Self::SIZE));
        let target = TARGETS[usize::from(own.u8()) % TARGETS.len()];
        let (which, slot, field, how, more) = (own.u8(), own.u8(), own.u8(), own.u8(), own.u8());
        let _spare = own.u16();
        Self { target, which, slot, field, how, more, value: own.u64() }
    }

    /// The same edit, applied to another record.
    #[cfg(test)]
    pub(super) const fn at(self, which: u8, slot: u8) -> Self {
        Self { which, slot, ..self }
    }

    /// Whether the edit is damage that checksums must detect, and not a forgery under a valid checksum.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self.target, Target::Data | Target::Poison)
    }

    /// Changes the region.
    pub fn apply(&self, memory: &CrashMemory, layout: &Layout) {
        match self.target {
            Target::Record => self.record(memory, layout),
            Target::Header => self.header(memory, layout),
            Target::Checksums => self.checksums(memory, layout),
            Target::CopyRecord => self.copy_record(memory, layout),
            Target::CopySegment => self.copy_segment(memory, layout),
            Target::Data => self.data(memory, layout),
            Target::Raw => store(memory, self.value % memory.len() / 8 * 8, &self.pattern()),
            Target::Poison => {
                let at = self.value % memory.len();
                memory.poison(ByteRange { start: at, end: (at + 64).min(memory.len()) });
            }
            Target::Superblock => self.superblock(memory, layout),
            Target::Host => self.row::<HostEntry>(memory, layout.host_area, layout.host_rows),
            Target::Backend if self.more & 0x40 != 0 => {
                self.row::<BlkdevEntry>(memory, layout.blkdev_area, layout.blkdev_rows);
            }
            Target::Backend => self.row::<BackendEntry>(memory, layout.backend_area, layout.backend_rows),
            Target::Segment => self.row::<SegmentEntry>(memory, layout.segment_table, layout.segment_count),
            Target::Tail | Target::Mark | Target::Drained => self.state(memory, layout),
        }
    }

    fn pattern(&self) -> [u8; 8] {
        (u64::from(self.slot) << 32 | u64::from(self.which) << 8 | u64::from(self.field)).to_le_bytes()
    }

    /// Changes the chosen field.
    fn change(&self, bytes: &mut [u8], structure: &StructLayout) {
        let Some(field) = structure.fields.get(usize::from(self.field) % structure.fields.len()) else {
            return;
        };
        let Some(field) = bytes.get_mut(field.offset..field.offset + field.size) else { return };
        let width = field.len().min(8);
        // A long field is a text or padding: the change covers eight bytes of it.
        let at = if field.len() > 8 { usize::from(self.slot) % (field.len() - 7) } else { 0 };
        let field = &mut field[at..at + width];
        let mut old = [0; 8];
        old[..width].copy_from_slice(field);
        let old = u64::from_le_bytes(old);
        let new = match self.how % 6 {
            0 => self.value,
            1 => old.wrapping_add(self.value),
            2 => old ^ self.value,
            3 => old.wrapping_sub(self.value & 0xff),
            4 => old ^ (1 << (self.value % 64)),
            _ => corner(self.value as u8),
        };
        field.copy_from_slice(&new.to_le_bytes()[..width]);
    }

    /// The primary copy, the other one, or both.
    fn copies(&self, both: [u64; 2]) -> impl Iterator<Item = u64> {
        let chosen = match self.more % 4 {
            1 => [true, false],
            2 => [false, true],
            _ => [true, true],
        };
        both.into_iter().zip(chosen).filter_map(|(at, chosen)| chosen.then_some(at))
    }

    fn superblock(&self, memory: &CrashMemory, layout: &Layout) {
        for at in self.copies([0, Layout::second_superblock(layout.region_size)]) {
            let mut bytes = load(memory, at, size_of::<Superblock>());
            self.change(&mut bytes, &Superblock::layout());
            if self.more & 0x80 == 0 {
                let sum = crc32c(&bytes[12..]);
                bytes[8..12].copy_from_slice(&sum.to_le_bytes());
            }
            store(memory, at, &bytes);
        }
    }

    fn row<T: SlotContent + Described>(&self, memory: &CrashMemory, area: u64, rows: u32) {
        let row = u32::from(self.which) % rows.max(1);
        self.slots::<T>(memory, Layout::slots::<T>(area, rows, row), u64::from(row));
    }

    fn state(&self, memory: &CrashMemory, layout: &Layout) {
        // The state of the backend that the edit names, at the segment in its row.
        let row = u32::from(self.slot) % layout.backend_rows;
        let slots = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, row);
        let Some((_, Slot { content: backend, .. })) = newest::<BackendEntry>(memory, slots, u64::from(row))
        else {
            return;
        };
        let state = StateShape { lanes: backend.lanes.get().clamp(1, 64) };
        let segment = SegmentId(backend.state_segment.get() % layout.segment_count);
        let base = layout.segment_base(segment);
        let absolute = |[first, second]: [u64; 2]| [base + first, base + second];
        let lane = LaneId(u32::from(self.which) % state.lanes);
        let place = u64::from(lane.0);
        match self.target {
            Target::Tail => self.slots::<LaneTail>(memory, absolute(state.tail(lane)), place),
            Target::Mark => self.slots::<LaneMark>(memory, absolute(state.mark(lane)), place),
            _ => self.slots::<Drained>(memory, absolute(state.drained()), 0),
        }
    }

    /// Forges the newer slot of an object, or both slots, or makes the older slot the newer one.
    fn slots<T: SlotContent + Described>(&self, memory: &CrashMemory, slots: [u64; 2], place: u64) {
        let (which, mut slot) = newest::<T>(memory, slots, place)
            .unwrap_or_else(|| (0, Slot { sequence: 1, content: T::new_zeroed() }));
        let mut bytes = slot.content.as_bytes().to_vec();
        self.change(&mut bytes, &T::described());
        let Ok(content) = T::read_from_bytes(&bytes) else { return };
        slot.content = content;
        if self.more & 0x10 != 0 {
            slot.sequence = slot.sequence.wrapping_add(self.value >> 32);
        }
        let mut encoded = slot.encode(place);
        if self.more & 0x80 != 0 {
            encoded[0] ^= 1;
        }
        let targets = match self.more % 4 {
            0 => &[which][..],
            1 => &[1 - which],
            _ => &[0, 1],
        };
        for &target in targets {
            store(memory, slots[target], &encoded);
        }
    }

    /// A segment of a log, or with `any` any segment with a header, chosen by number.
    fn segment(
        &self,
        memory: &CrashMemory,
        layout: &Layout,
        any: bool,
    ) -> Option<(SegmentId, SegmentHeader)> {
        let wanted = |(_, header): &(_, SegmentHeader)| any || header.magic.get() == LOG_MAGIC;
        let mut all: Vec<_> = segments(memory, layout).filter(wanted).collect();
        let count = all.len().max(1);
        (!all.is_empty()).then(|| all.swap_remove(usize::from(self.which) % count))
    }

    fn header(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((segment, header)) = self.segment(memory, layout, true) else { return };
        let mut bytes = bytes_of(&header).to_vec();
        self.change(&mut bytes, &SegmentHeader::layout());
        let Ok(forged) = SegmentHeader::read_from_bytes(&bytes) else { return };
        let forged = if self.more & 0x80 == 0 { forged.sealed() } else { forged };
        // Records that stay valid under the changed header.
        let kept = if self.more & 0x10 != 0 { records(memory, layout, segment, &header) } else { Vec::new() };
        let base = layout.segment_base(segment);
        for at in self.copies([base, base + layout.segment_shape().header_copy()]) {
            store(memory, at, bytes_of(&forged));
        }
        for (place, mut record) in kept {
            record.generation = forged.generation;
            let place = RecordPlace { salt: forged.salt.get(), ..place };
            put_line(memory, layout, segment, place.slot, &record.encode(&place), 0);
        }
    }

    /// The slot and content of the chosen record, or of a new record after the last one with the next sequence number.
    fn chosen(&self, memory: &CrashMemory, layout: &Layout) -> Option<(SegmentHeader, RecordPlace, Record)> {
        let (segment, header) = self.segment(memory, layout, false)?;
        let records = records(memory, layout, segment, &header);
        let at = usize::from(self.slot) % (records.len() + 1);
        if let Some(&(place, record)) = records.get(at) {
            return Some((header, place, record));
        }
        let &(last, mut record) = records.last()?;
        let place = RecordPlace { slot: last.slot + record.slots(), ..last };
        record.sequence = (record.sequence.get() + 1).into();
        (place.slot < layout.segment_shape().slots_max()).then_some((header, place, record))
    }

    fn record(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((_, place, record)) = self.chosen(memory, layout) else { return };
        let mut bytes = bytes_of(&record).to_vec();
        self.change(&mut bytes, &Record::layout());
        let Ok(mut forged) = Record::read_from_bytes(&bytes) else { return };
        if self.more & 0x10 != 0 {
            sum_again(memory, layout, place, &mut forged);
        }
        let mut line = forged.encode(&place);
        if self.more & 0x80 != 0 {
            line[0] ^= 1;
        }
        put_line(memory, layout, place.segment, place.slot, &line, self.more % 4);
    }

    fn checksums(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((_, place, record)) = self.chosen(memory, layout) else { return };
        if record.lines == 0 {
            return;
        }
        let place =
            RecordPlace { slot: place.slot + 1 + u32::from(self.slot) % u32::from(record.lines), ..place };
        if place.slot >= layout.segment_shape().slots_max() {
            return;
        }
        let at = layout.segment_base(place.segment) + layout.segment_shape().slot(place.slot)[0];
        let mut bytes = load(memory, at, 64);
        self.change(&mut bytes, &ChecksumLine::layout());
        let Ok(checksums) = ChecksumLine::read_from_bytes(&bytes) else { return };
        put_line(memory, layout, place.segment, place.slot, &checksums.encode(&place), self.more % 4);
    }

    /// Copies a record over another one, or to the slot after the last record, of the same segment or another.
    fn copy_record(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((_, _, mut record)) = self.chosen(memory, layout) else { return };
        let other = Self { which: self.field, slot: self.how, ..*self };
        let Some((header, place, there)) = other.chosen(memory, layout) else { return };
        record.generation = header.generation;
        if self.more & 0x20 == 0 {
            record.sequence = there.sequence;
        }
        if self.more & 0x10 != 0 {
            sum_again(memory, layout, place, &mut record);
        }
        put_line(memory, layout, place.segment, place.slot, &record.encode(&place), self.more % 4);
    }

    /// Copies a whole segment to another number, with another ordinal.
    fn copy_segment(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((from, header)) = self.segment(memory, layout, true) else { return };
        let to = SegmentId(u32::from(self.slot) % layout.segment_count);
        let kept = records(memory, layout, from, &header);
        let bytes = load(memory, layout.segment_base(from), layout.segment_size as usize);
        let mut header = header;
        header.segment = to.0.into();
        header.ordinal = header.ordinal.get().wrapping_add(self.value).into();
        let header = header.sealed();
        let base = layout.segment_base(to);
        store(memory, base, &bytes);
        for at in self.copies([base, base + layout.segment_shape().header_copy()]) {
            store(memory, at, bytes_of(&header));
        }
        for (place, record) in kept {
            let place = RecordPlace { segment: to, ..place };
            put_line(memory, layout, to, place.slot, &record.encode(&place), 0);
        }
    }

    /// Damages data, but not its checksums.
    fn data(&self, memory: &CrashMemory, layout: &Layout) {
        let Some((_, place, record)) = self.chosen(memory, layout) else { return };
        if !record.kind().has_data() {
            return;
        }
        let lines = (record.length.get() / 64).max(1);
        let within = u64::from(record.data_offset.get()) + self.value % lines * 64;
        if within + 64 <= layout.segment_shape().data_top() {
            store(memory, layout.segment_base(place.segment) + within, &MARKER);
        }
    }
}

/// Names, offsets and sizes of a content's fields.
pub trait Described {
    /// See [`StructLayout`].
    fn described() -> StructLayout;
}

macro_rules! described {
    ($($name:ident)+) => { $(impl Described for $name {
        fn described() -> StructLayout { $name::layout() }
    })+ };
}
described!(HostEntry BackendEntry BlkdevEntry SegmentEntry Drained LaneTail LaneMark);

fn newest<T: SlotContent>(memory: &CrashMemory, slots: [u64; 2], place: u64) -> Option<(usize, Slot<T>)> {
    let read = |at| Slot::<T>::decode(place, &load(memory, at, T::SLOT_SIZE));
    Slot::newest(read(slots[0]), read(slots[1]))
}

/// Bytes of the region; zeroes where they cannot be read.
pub fn load(memory: &CrashMemory, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    // The load may fail because of poison; the forger then reads zeroes.
    let _ = memory.load(at, &mut bytes);
    bytes
}

/// Changes bytes of the region durably.
pub fn store(memory: &CrashMemory, at: u64, bytes: &[u8]) {
    let length = memory.len().saturating_sub(at).min(bytes.len() as u64);
    memory.store(at, &bytes[..length as usize]);
    memory.fence();
}

/// All segments with a header, of any cache.
pub fn segments<'a>(
    memory: &'a CrashMemory,
    layout: &'a Layout,
) -> impl Iterator<Item = (SegmentId, SegmentHeader)> + 'a {
    (0..layout.segment_count).map(SegmentId).filter_map(move |segment| {
        let bytes = load(memory, layout.segment_base(segment), size_of::<SegmentHeader>());
        let (claimed, _) = SegmentHeader::read_from_prefix(&bytes).ok()?;
        let header =
            SegmentHeader::decode(&bytes)?.verify(segment, claimed.cache_id.get(), claimed.lanes.get())?;
        Some((segment, header))
    })
}

/// The records of a segment, up to the first slot without one.
pub fn records(
    memory: &CrashMemory,
    layout: &Layout,
    segment: SegmentId,
    header: &SegmentHeader,
) -> Vec<(RecordPlace, Record)> {
    let shape = layout.segment_shape();
    let mut found = Vec::new();
    let mut slot = 0;
    while slot < shape.slots_max() {
        let place = RecordPlace { salt: header.salt.get(), segment, slot };
        let bytes = load(memory, layout.segment_base(segment) + shape.slot(slot)[0], 64);
        let Ok(line) = bytes.as_slice().try_into() else { break };
        let Some(record) = Record::decode(line).verify(&place, header.generation.get(), shape.size) else {
            break;
        };
        slot += record.slots();
        found.push((place, record));
    }
    found
}

/// Stores a line in its primary slot (1), its mirror (2), or both.
fn put_line(
    memory: &CrashMemory,
    layout: &Layout,
    segment: SegmentId,
    slot: u32,
    line: &[u8; 64],
    copies: u8,
) {
    let [primary, mirror] = layout.segment_shape().slot(slot).map(|at| layout.segment_base(segment) + at);
    if copies != 2 {
        store(memory, primary, line);
    }
    if copies != 1 {
        store(memory, mirror, line);
    }
}

/// Computes the checksums of a record from the bytes that it refers to, with the number of continuation lines that it needs for
/// them.
fn sum_again(memory: &CrashMemory, layout: &Layout, place: RecordPlace, record: &mut Record) {
    let shape = layout.segment_shape();
    let (start, length) = (record.offset.get(), record.length.get());
    let inside = u64::from(record.data_offset.get()).checked_add(length);
    if record.flags & FLAG_DATA_CRC == 0
        || start.checked_add(length).is_none()
        || length == 0
        || inside.is_none_or(|end| end > shape.size - PAGE)
    {
        return;
    }
    let base = layout.segment_base(place.segment) + u64::from(record.data_offset.get());
    let checksums: Vec<u32> = (0..blocks_in(record.range()))
        .map(|block| {
            let covered = record.block_range(block);
            crc32c(&load(memory, base + covered.start - start, covered.len() as usize))
        })
        .collect();
    let Some((&first, rest)) = checksums.split_first() else { return };
    record.first_sum = first.into();
    record.lines = checksum_lines(record.range()).min(255) as u8;
    for (index, checksums) in rest.chunks(CHECKSUMS_PER_LINE).enumerate().take(255) {
        let place = RecordPlace { slot: place.slot + 1 + index as u32, ..place };
        if place.slot >= shape.slots_max() {
            return;
        }
        let line = ChecksumLine::new(index as u8, record.sequence.get(), checksums).encode(&place);
        put_line(memory, layout, place.segment, place.slot, &line, 0);
    }
}
