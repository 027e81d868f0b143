//! A hostile guest: a small memory with descriptors, rings, heads and data at offsets that the input chooses, and a ring that is
//! served from it.
//!
//! Invariants, for any contents of the guest's memory: the ring ends; no memory outside the guest's changes; the device receives
//! only requests for whole sectors of its own, which are durable at completion if the guest cannot flush. If the device's answers
//! cannot change the requests, the target also checks (`Expected`): only the requests change the device, in their order; bytes of
//! the guest change only in its buffers for answers and in the used ring; and each request is answered once.

mod watched;

use crate::input::{Input, corner};
use crate::wires::{Model, SECTOR, SIZE, device};
use cbd_types::{ByteRange, Completion, Operation, Request};
use cbd_vhost::{GuestPiece, GuestRing, Options, serve_ring};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use watched::{Change, Watched};

/// The address and the size of the guest's memory.
const BASE: u64 = 0x1_0000;
const MEMORY: usize = 64 << 10;

/// Bytes of the file before and after the guest's memory, which do not belong to the guest.
const AROUND: usize = 4096;
const UNTOUCHED: u8 = 0xa5;

// Offsets in the memory, unless an input changes them.
const TABLE: usize = 0;
const AVAILABLE: usize = 0x400;
const USED: usize = 0x800;
const TABLES: usize = 0x1000;
const HEADS: usize = 0x3000;
const ANSWERS: usize = 0x3800;
const DATA: usize = 0x4000;

/// Descriptors that fit in an indirect table.
const INDIRECT_ROOM: usize = 32;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const FLUSH: u64 = 1 << 9;
const INDIRECT_AGREED: u64 = 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// Maximum number of requests of one input.
const REQUESTS_MAX: usize = 256;

/// The memory of the guest, and the setup of its ring.
struct Guest {
    memory: Vec<u8>,
    ring: GuestRing,
}

impl Guest {
    fn read(data: &[u8]) -> Self {
        let mut input = Input(data);
        let (shape, features) = (input.u8(), input.u8());
        let place = |at: usize| BASE + at as u64;
        let agreed = [FLUSH, INDIRECT_AGREED, EVENT_INDEX]
            .into_iter()
            .enumerate()
            .filter(|(bit, _)| features >> bit & 1 == 1)
            .fold(VERSION_1, |all, (_, feature)| all | feature);
        let ring = GuestRing {
            size: 1 << (shape % 6),
            descriptors: place(TABLE),
            available: place(AVAILABLE),
            used: place(USED),
            features: agreed,
        };
        let mut guest = Self { memory: vec![0; MEMORY], ring };
        if features & 0x80 != 0 {
            // Rings at any offset, overlapping, or outside the memory.
            guest.ring.size = input.u16();
            guest.ring.descriptors = address(&mut input, features & 0x40 != 0);
            guest.ring.available = address(&mut input, features & 0x20 != 0);
            guest.ring.used = address(&mut input, features & 0x10 != 0);
        }
        while !input.is_empty() {
            guest.lay(&mut input);
        }
        guest
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        let end = (at + bytes.len()).min(MEMORY);
        if at < end {
            self.memory[at..end].copy_from_slice(&bytes[..end - at]);
        }
    }

    fn descriptor(&mut self, at: usize, address: u64, length: u32, flags: u16, next: u16) {
        self.put(at, &address.to_le_bytes());
        self.put(at + 8, &length.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
        self.put(at + 14, &next.to_le_bytes());
    }

    fn offer(&mut self, head: u16) {
        let index = word(&self.memory, AVAILABLE + 2);
        let slot = usize::from(index % self.ring.size.max(1));
        self.put(AVAILABLE + 4 + 2 * slot, &head.to_le_bytes());
        self.put(AVAILABLE + 2, &index.wrapping_add(1).to_le_bytes());
    }

    /// Stores one object in the memory.
    fn lay(&mut self, input: &mut Input<'_>) {
        match input.u8() % 8 {
            // A descriptor, of the ring's table or of an indirect one.
            0 => {
                let index = usize::from(input.u8());
                self.free_descriptor(TABLE + 16 * (index % 64), input);
            }
            1 => {
                let index = usize::from(input.u8());
                self.free_descriptor(TABLES + 16 * index, input);
            }
            // A head, and a range of a discard or zeroing.
            2 => {
                let (slot, kind, sector) = (usize::from(input.u8()), u32::from(input.u8()), input.u16());
                self.head(HEADS + 16 * (slot % 64), kind % 15, sector.into());
            }
            3 => {
                let (slot, sector) = (usize::from(input.u8()), u64::from(input.u8()));
                let (count, flags) = (u32::from(input.u8()), u32::from(input.u8() & 3));
                self.range(DATA + 16 * slot, sector, count, flags);
            }
            4 => {
                let head = input.u8();
                self.offer(head.into());
            }
            5 => self.request(input),
            // Arbitrary bytes at any offset.
            6 => {
                let (at, length) = (usize::from(input.u16()), usize::from(input.u8()));
                let bytes = input.bytes(length).to_vec();
                self.put(at, &bytes);
            }
            _ => {
                let index = input.u16();
                self.put(AVAILABLE + 2, &index.to_le_bytes());
            }
        }
    }

    fn free_descriptor(&mut self, at: usize, input: &mut Input<'_>) {
        let choice = input.u8();
        let address = address(input, choice & 0x80 != 0);
        let length = if choice & 0x40 != 0 { corner(input.u8()) as u32 } else { u32::from(input.u16()) >> 3 };
        let next = u16::from(input.u8());
        self.descriptor(at, address, length, u16::from(choice & 7), next);
    }

    fn head(&mut self, at: usize, kind: u32, sector: u64) {
        self.put(at, &kind.to_le_bytes());
        self.put(at + 8, &sector.to_le_bytes());
    }

    fn range(&mut self, at: usize, sector: u64, count: u32, flags: u32) {
        self.put(at, &sector.to_le_bytes());
        self.put(at + 8, &count.to_le_bytes());
        self.put(at + 12, &flags.to_le_bytes());
    }

    /// A request of three descriptors as a driver builds it, in the ring's table or in an indirect one.
    fn request(&mut self, input: &mut Input<'_>) {
        let (slot, kind, sector) = (usize::from(input.u8() % 8), u32::from(input.u8() % 15), input.u8());
        let (sectors, fill, choice) = (usize::from(input.u8() % 9), input.u8(), input.u8());
        let (head, answer) = (HEADS + 16 * slot, ANSWERS + slot);
        let data = DATA + 4096 * slot;
        self.head(head, kind, sector.into());
        let length = match kind {
            11 | 13 => {
                let flags = u32::from(choice >> 6);
                self.range(data, sector.into(), sectors as u32, flags & 1);
                16
            }
            _ => sectors * SECTOR as usize,
        };
        if kind == 1 {
            self.put(data, &vec![fill; length]);
        }
        let place = |at: usize| BASE + at as u64;
        let into = if matches!(kind, 0 | 8) { WRITE } else { 0 };
        let pieces =
            [(place(head), 16, NEXT), (place(data), length as u32, into | NEXT), (place(answer), 1, WRITE)];
        let first =
            if choice & 1 == 1 { TABLES + 16 * INDIRECT_ROOM * (slot % 8) } else { TABLE + 48 * slot };
        let number = if choice & 1 == 1 { 0 } else { 3 * slot as u16 };
        for (index, (address, length, flags)) in (0_u16..).zip(pieces) {
            let at = first + 16 * usize::from(index);
            self.descriptor(at, address, length, flags, number + index + 1);
        }
        if choice & 1 == 1 {
            self.descriptor(TABLE + 48 * slot, place(first), 48, INDIRECT, 0);
        }
        self.offer(3 * slot as u16);
    }
}

fn address(input: &mut Input<'_>, anywhere: bool) -> u64 {
    if anywhere {
        corner(input.u8()).wrapping_add(u64::from(input.u8()))
    } else {
        BASE + u64::from(input.u16())
    }
}

fn word(memory: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([memory[at], memory[at + 1]])
}

fn long(memory: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&memory[at..at + 8]);
    u64::from_le_bytes(bytes)
}

/// A range of the guest's memory, from its beginning.
type Run = std::ops::Range<usize>;

/// The requests of a guest, parsed from its memory before the server runs; only for a guest in which no memory is
/// both read and written by the device.
struct Expected {
    /// The heads, up to the first request that violates the rules.
    heads: Vec<u16>,
    /// The changes of each request.
    changes: Vec<Vec<Change>>,
    /// The used ring.
    used: Run,
    /// Other memory that the device may write.
    writable: Vec<Run>,
    /// The memory that it reads: tables, rings and data.
    readable: Vec<Run>,
}

/// A chain: the memory that the device reads, and the memory that it writes.
type Chain = (Vec<Run>, Vec<Run>);

impl Expected {
    /// `None` if the rings are not at their usual offsets.
    fn of(guest: &Guest, discards: bool) -> Option<Self> {
        let size = usize::from(guest.ring.size);
        let usual = (BASE + TABLE as u64, BASE + AVAILABLE as u64, BASE + USED as u64);
        if (guest.ring.descriptors, guest.ring.available, guest.ring.used) != usual || size > 64 {
            return None;
        }
        let mut asked = Self {
            heads: Vec::new(),
            changes: Vec::new(),
            used: USED..USED + 6 + 8 * size,
            writable: Vec::new(),
            readable: vec![TABLE..TABLE + 16 * size, AVAILABLE..AVAILABLE + 6 + 2 * size],
        };
        let offered = usize::from(word(&guest.memory, AVAILABLE + 2));
        if offered > size {
            return Some(asked);
        }
        for slot in 0..offered {
            let head = word(&guest.memory, AVAILABLE + 4 + 2 * slot);
            let Some((read, written)) = asked.chain(guest, head) else { break };
            let bytes: Vec<u8> = read.iter().flat_map(|run| &guest.memory[run.clone()]).copied().collect();
            let room: usize = written.iter().map(std::iter::ExactSizeIterator::len).sum();
            asked.readable.extend(read);
            asked.writable.extend(written);
            if bytes.len() < 16 || room == 0 {
                break;
            }
            asked.changes.push(changes(&bytes, discards));
            asked.heads.push(head);
        }
        Some(asked)
    }

    /// The chain that begins at `head`; `None` if it violates the rules.
    fn chain(&mut self, guest: &Guest, head: u16) -> Option<Chain> {
        let (mut table, mut size) =
            (TABLE..TABLE + 16 * usize::from(guest.ring.size), usize::from(guest.ring.size));
        let (mut index, mut steps, mut inside) = (usize::from(head), 0, false);
        let (mut read, mut written) = (Vec::new(), Vec::new());
        loop {
            steps += 1;
            if index >= size || steps > size.min(1024) + 1 {
                return None;
            }
            let at = table.start + 16 * index;
            let descriptor = guest.memory.get(at..at + 16)?;
            let (address, length) = (long(descriptor, 0), long(descriptor, 8) as u32 as usize);
            let (flags, next) = (word(descriptor, 12), word(descriptor, 14));
            if flags & INDIRECT != 0 {
                let agreed = guest.ring.features & INDIRECT_AGREED != 0;
                if inside || !agreed || flags & NEXT != 0 || length == 0 || !length.is_multiple_of(16) {
                    return None;
                }
                let start = usize::try_from(address.checked_sub(BASE)?).ok().filter(|at| *at < MEMORY)?;
                table = start..(start + length).min(MEMORY);
                self.readable.push(table.clone());
                (index, size, steps, inside) = (0, length / 16, 0, true);
                continue;
            }
            if length > 0 {
                let start = usize::try_from(address.checked_sub(BASE)?).ok()?;
                let run = start..start.checked_add(length).filter(|end| *end <= MEMORY)?;
                if flags & WRITE != 0 {
                    written.push(run);
                } else if written.is_empty() {
                    read.push(run);
                } else {
                    return None;
                }
            }
            if flags & NEXT == 0 {
                return Some((read, written));
            }
            index = usize::from(next);
        }
    }

    /// Whether no write of the device can change the bytes that it reads.
    fn is_fixed(&self) -> bool {
        let meet = |one: &Run, other: &Run| one.start < other.end && other.start < one.end;
        let apart = |run: &Run| !self.readable.iter().any(|read| meet(run, read));
        apart(&self.used) && self.writable.iter().all(|run| apart(run) && !meet(run, &self.used))
    }
}

/// The changes of a request with these bytes on a device with or without discards.
fn changes(request: &[u8], discards: bool) -> Vec<Change> {
    let (kind, sector, data) = (long(request, 0) as u32, long(request, 8), &request[16..]);
    match kind {
        1 => place(sector, data.len() as u64)
            .filter(|range| !range.is_empty())
            .map(|range| Change::Write(range.start, data.to_vec()))
            .into_iter()
            .collect(),
        11 | 13 if data.len().is_multiple_of(16) && data.len() <= 32 * 16 && (kind == 13 || discards) => {
            // The unmap flag exists only for zeroing. One invalid range fails the whole request.
            let range = |bytes: &[u8]| {
                let (count, flags) = (long(bytes, 8) as u32, long(bytes, 8) >> 32);
                place(long(bytes, 0), u64::from(count) * 512)
                    .filter(|_| flags == 0 || (flags == 1 && kind == 13))
            };
            let ranges: Option<Vec<_>> = data.chunks(16).map(range).collect();
            let ranges = ranges.into_iter().flatten().filter(|range| !range.is_empty());
            ranges.map(Change::Zero).collect()
        }
        _ => Vec::new(),
    }
}

fn place(sector: u64, length: u64) -> Option<ByteRange> {
    let start = sector.checked_mul(512)?;
    let end = start.checked_add(length)?;
    (end <= SIZE && length.is_multiple_of(u64::from(SECTOR))).then_some(ByteRange { start, end })
}

/// A file with the guest's memory and its surroundings.
fn file_of(memory: &[u8]) -> File {
    let around = [UNTOUCHED; AROUND];
    // In `/dev/shm`, if possible.
    let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).expect("a file");
    file.write_all_at(&[&around[..], memory, &around].concat(), 0).expect("the file can be written");
    file
}

/// Runs one guest.
///
/// # Panics
/// When the guest violates an invariant.
pub fn run(data: &[u8]) {
    let guest = Guest::read(data);
    let device = device();
    let asked = Expected::of(&guest, device.geometry().discard).filter(Expected::is_fixed);
    let file = file_of(&guest.memory);
    let piece = GuestPiece {
        file: file.try_clone().expect("a descriptor"),
        offset: AROUND as u64,
        address: BASE,
        size: MEMORY as u64,
    };
    let noted = Arc::new(Mutex::new(Vec::new()));
    let can_flush = guest.ring.features & FLUSH != 0;
    let watched = Watched { device, noted: Arc::clone(&noted), can_flush };
    let options = Options { name: "disk".to_owned(), spin_max: Duration::ZERO, ..Options::default() };
    let ended = serve_ring(&watched, vec![piece], guest.ring, REQUESTS_MAX, &options);
    let mut after = vec![0; MEMORY + 2 * AROUND];
    file.read_exact_at(&mut after, 0).expect("the file is there");
    let (before, rest) = after.split_at(AROUND);
    let (memory, behind) = rest.split_at(MEMORY);
    assert!(
        before.iter().chain(behind).all(|byte| *byte == UNTOUCHED),
        "what is not the guest's was changed"
    );
    let noted = std::mem::take(&mut *noted.lock().unwrap_or_else(PoisonError::into_inner));
    let content = content_of(&watched);
    let mut model = Model::new();
    for change in &noted {
        apply(&mut model, change);
    }
    let whole = ByteRange::at(0, SIZE);
    assert!(model.get(whole).is_some_and(|model| *model == content), "the device holds other data");
    if let Some(asked) = asked {
        check(&guest, &asked, memory, &noted, ended.is_ok());
    }
}

fn apply(model: &mut Model, change: &Change) {
    match change {
        Change::Write(start, data) => {
            let there = model.get(ByteRange::at(*start, data.len() as u64)).expect("it is inside");
            there.copy_from_slice(data);
        }
        Change::Zero(range) => model.get(*range).expect("it is inside").fill(0),
    }
}

fn content_of(watched: &Watched) -> Vec<u8> {
    let mut queue = watched.device.open_queue().expect("a queue");
    let buffer = cbd_types::AlignedBuffer::zeroed(SIZE as usize);
    let mut done = Vec::new();
    let range = ByteRange::at(0, SIZE);
    queue.submit(Request::unmarked(0, Operation::Read, range, false, buffer), &mut done);
    let Completion { result, buffer, .. } = done.pop().expect("it completes at once");
    result.expect("it is inside");
    buffer.to_vec()
}

/// Compares the recorded changes and the guest's memory with the requests.
fn check(guest: &Guest, asked: &Expected, memory: &[u8], noted: &[Change], went_well: bool) {
    assert!(is_interleaved(noted, &asked.changes), "{noted:?} came of {:?}", asked.changes);
    // A guest may start at any ring index.
    let first = word(&guest.memory, USED + 2);
    let answered = usize::from(word(memory, USED + 2).wrapping_sub(first));
    assert!(answered <= asked.heads.len(), "{answered} answers to {:?}", asked.heads);
    if went_well {
        assert_eq!(
            (noted.len(), answered),
            (asked.changes.iter().flatten().count(), asked.heads.len()),
            "a request is left out"
        );
    }
    // Answers may have any order: a request that the device parks is answered later than a request that needs no device.
    let mut heads = asked.heads.clone();
    for slot in 0..answered as u16 {
        let at = USED + 4 + 8 * usize::from(first.wrapping_add(slot) % guest.ring.size);
        let head = long(memory, at) as u32;
        let place = heads.iter().position(|asked| u32::from(*asked) == head);
        heads.swap_remove(place.unwrap_or_else(|| panic!("answer {slot} is to {head}, not a request")));
    }
    let changed = (0..MEMORY).filter(|&at| memory[at] != guest.memory[at]);
    for at in changed {
        assert!(
            asked.used.contains(&at) || asked.writable.iter().any(|run| run.contains(&at)),
            "{at:#x} was changed, which is not to be written"
        );
    }
}

/// Whether the changes `noted` can come from requests that began in their order, each making its own changes in order. A request
/// with several ranges executes one range after the other, and later requests begin meanwhile: a queue does not order requests in
/// flight.
fn is_interleaved(noted: &[Change], requests: &[Vec<Change>]) -> bool {
    let requests: Vec<&[Change]> = requests.iter().map(Vec::as_slice).filter(|one| !one.is_empty()).collect();
    // The possible numbers of completed changes of each request: equal changes give several possibilities.
    let mut states = BTreeSet::from([vec![0; requests.len()]]);
    for change in noted {
        let mut next = BTreeSet::new();
        for state in &states {
            let begun = state.iter().take_while(|done| **done > 0).count();
            for (index, request) in requests.iter().enumerate().take(begun + 1) {
                if request.get(state[index]) == Some(change) {
                    let mut further = state.clone();
                    further[index] += 1;
                    next.insert(further);
                }
            }
        }
        states = next;
    }
    !states.is_empty()
}

/// Requests of each kind, and one violation of each rule.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    // Slot, kind, sector, sectors, fill, choice.
    let request = |slot: u8, kind: u8, choice: u8| [5, slot, kind, 4 * slot, 1 + slot, 7 + slot, choice];
    let all: Vec<u8> = [1, 0, 4, 8, 11, 13, 14, 1]
        .iter()
        .zip(0..)
        .flat_map(|(&kind, slot)| request(slot, kind, slot))
        .collect();
    let mut seeds: Vec<Vec<u8>> = (0..8).map(|features| [&[5, features], &all[..]].concat()).collect();
    let two = [request(0, 1, 0), request(1, 0, 1)].concat();
    let broken: [&[u8]; 8] = [
        // A chain with a cycle, one past the table, an indirect table in itself, and one with partial
        // descriptors.
        &[0, 0, NEXT as u8, 0, 0x30, 128, 0, 0, 4, 0],
        &[0, 0, NEXT as u8, 0, 0x30, 128, 0, 200, 4, 0],
        &[0, 0, INDIRECT as u8, 0, 0, 128, 0, 0, 4, 0],
        &[0, 0, INDIRECT as u8, 0, 0x10, 129, 0, 0, 4, 0],
        // Memory outside the guest, an index offered twice, more indexes than the ring has, a head that does not exist.
        &[0, 1, 0x80 | 2, 3, 0, 0, 2, 4, 1],
        &[4, 0, 4, 0],
        &[7, 0, 9],
        &[4, 99],
    ];
    seeds.extend(broken.iter().map(|broken| [&[5, 7], &two[..], *broken].concat()));
    // Overlapping rings, and data over the rings.
    seeds.push([&[5, 0x87, 32, 0, 0, 0, 0, 4, 0, 4][..], &two].concat());
    seeds.push([&[5, 7][..], &two, &[0, 4, WRITE as u8 | NEXT as u8, 0, 0, 0, 64, 5]].concat());
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_several_ranges_does_not_delay_later_ones_and_keeps_its_own_order() {
        let zero = |sector: u64| Change::Zero(ByteRange::at(sector * 512, 512));
        let requests = [vec![zero(1), zero(2)], vec![], vec![zero(3)], vec![zero(4)]];
        let can =
            |order: &[u64]| is_interleaved(&order.iter().map(|at| zero(*at)).collect::<Vec<_>>(), &requests);
        assert!(can(&[1, 2, 3, 4]) && can(&[1, 3, 2, 4]) && can(&[1, 3, 4, 2]) && can(&[1, 3]) && can(&[]));
        assert!(!can(&[2]) && !can(&[3]), "a request begins behind those before it, with its first range");
        assert!(!can(&[1, 4]), "the request between has not begun");
        assert!(!can(&[1, 1]) && !can(&[1, 2, 2]), "each range once");
    }

    #[test]
    fn requests_of_guests_are_parsed_where_no_memory_is_both_read_and_written() {
        let mut changes = 0;
        for seed in seeds().iter().take(8) {
            let asked = Expected::of(&Guest::read(seed), true).filter(Expected::is_fixed);
            changes += asked.expect("the usual rings").changes.iter().flatten().count();
        }
        // Two writes, a discard and a zeroing; requests with indirect tables only if that feature was negotiated.
        assert!(changes >= 16, "{changes} changes are too few for a test");
        let over = &[5, 7, 0, 4, WRITE as u8, 0, 0, 0, 64, 5, 4, 4];
        assert!(!Expected::of(&Guest::read(over), true).expect("the usual rings").is_fixed());
    }
}
