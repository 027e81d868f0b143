//! A request in the guest's memory: a chain of descriptors, direct or in an indirect table.
//!
//! Invariants: a chain that was read is finite, in order (first what the device reads, then what it writes), inside the
//! guest's memory at that time, and shorter than 4 GiB; any other chain is refused with a reason. Each descriptor is
//! loaded once. The memory map can change afterwards, so copies check their addresses again.

use crate::malformed;
use cbd_types::Result;
use vm_memory::{Address, ByteValued, Bytes, GuestAddress, GuestMemory, Permissions};

/// Most descriptors of a chain: as many as the largest ring has. An indirect table needs no more.
const DESCRIPTORS_MAX: usize = 1024;
const NEXT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT as u16;
const WRITE: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_WRITE as u16;
const INDIRECT: u16 = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT as u16;

/// Layout in memory; all fields little-endian.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

// SAFETY: the fields are integers without padding between them: any bytes are a descriptor, and a descriptor is only
// bytes.
unsafe impl ByteValued for Descriptor {}

const DESCRIPTOR_SIZE: u64 = size_of::<Descriptor>() as u64;

/// A contiguous range of guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) address: GuestAddress,
    pub(crate) length: u32,
}

/// Consecutive ranges of guest memory that hold one piece of data.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    list: Vec<Segment>,
    length: u64,
}

impl Segments {
    /// Bytes of all segments.
    pub(crate) const fn len(&self) -> u64 {
        self.length
    }

    fn clear(&mut self) {
        self.list.clear();
        self.length = 0;
    }

    fn push(&mut self, segment: Segment) {
        self.list.push(segment);
        self.length += u64::from(segment.length);
    }

    /// Copies from guest memory, `skip` bytes into the segments, until `into` is full. Each byte is loaded once.
    pub(crate) fn load<M: GuestMemory>(&self, memory: &M, skip: u64, into: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        self.each(skip, into.len(), |address, length| {
            let piece = &mut into[filled..filled + length];
            filled += length;
            memory.read_slice(piece, address).map_err(|error| unreachable_memory(address, length, &error))
        })
    }

    /// Copies `from` to guest memory, `skip` bytes into the segments.
    pub(crate) fn store<M: GuestMemory>(&self, memory: &M, skip: u64, from: &[u8]) -> Result<()> {
        let mut stored = 0;
        self.each(skip, from.len(), |address, length| {
            let piece = &from[stored..stored + length];
            stored += length;
            memory.write_slice(piece, address).map_err(|error| unreachable_memory(address, length, &error))
        })
    }

    /// Calls `run` for the ranges of `length` bytes, `skip` bytes into the segments.
    fn each(
        &self,
        mut skip: u64,
        mut length: usize,
        mut run: impl FnMut(GuestAddress, usize) -> Result<()>,
    ) -> Result<()> {
        for segment in &self.list {
            if length == 0 {
                break;
            }
            let size = u64::from(segment.length);
            if skip >= size {
                skip -= size;
                continue;
            }
            // At most a segment's length, which fits in `usize`.
            let piece = ((size - skip) as usize).min(length);
            // The address cannot overflow: the whole segment was inside the memory when the chain was read.
            run(segment.address.unchecked_add(skip), piece)?;
            length -= piece;
            skip = 0;
        }
        if length > 0 { Err(malformed(format!("a request is {length} bytes short"))) } else { Ok(()) }
    }
}

fn unreachable_memory(
    address: GuestAddress,
    length: usize,
    why: &vm_memory::GuestMemoryError,
) -> cbd_types::Error {
    malformed(format!("{length} bytes at {:#x} are not in the guest's memory: {why}", address.0))
}

/// A chain of descriptors.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// The segments that the device reads.
    pub(crate) readable: Segments,
    /// The segments that the device writes; they follow the readable ones.
    pub(crate) writable: Segments,
}

impl Chain {
    /// Reads the chain that begins at `head` of the table at `table`, which has `size` descriptors. The memory of the
    /// lists is reused.
    pub(crate) fn read<M: GuestMemory>(
        &mut self,
        memory: &M,
        table: GuestAddress,
        size: u16,
        head: u16,
        indirect_is_negotiated: bool,
    ) -> Result<()> {
        self.readable.clear();
        self.writable.clear();
        let (mut table, mut size) = (table, u32::from(size));
        let mut index = u32::from(head);
        let mut inside_indirect = false;
        let mut seen = 0;
        loop {
            if index >= size {
                return Err(malformed(format!(
                    "a chain continues at descriptor {index} of a table of {size}"
                )));
            }
            seen += 1;
            // A chain without a loop visits each descriptor of its table at most once.
            if seen > DESCRIPTORS_MAX || seen > size as usize + 1 {
                return Err(malformed(format!("a chain has more than {} descriptors or a loop", seen - 1)));
            }
            let descriptor = load(memory, table, index)?;
            if descriptor.flags & INDIRECT != 0 {
                if inside_indirect || !indirect_is_negotiated || descriptor.flags & NEXT != 0 {
                    return Err(malformed(format!(
                        "descriptor {index} is indirect where that is not allowed (flags {:#x})",
                        descriptor.flags
                    )));
                }
                if descriptor.length == 0 || !u64::from(descriptor.length).is_multiple_of(DESCRIPTOR_SIZE) {
                    return Err(malformed(format!("a table of descriptors of {} bytes", descriptor.length)));
                }
                table = GuestAddress(descriptor.address);
                size = descriptor.length / DESCRIPTOR_SIZE as u32;
                (index, seen, inside_indirect) = (0, 0, true);
                continue;
            }
            self.add(memory, &descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = u32::from(descriptor.next);
        }
    }

    fn add<M: GuestMemory>(&mut self, memory: &M, descriptor: &Descriptor) -> Result<()> {
        let segment = Segment { address: GuestAddress(descriptor.address), length: descriptor.length };
        if segment.length == 0 {
            return Ok(());
        }
        let is_write = descriptor.flags & WRITE != 0;
        if !is_write && self.writable.len() > 0 {
            return Err(malformed("a chain has a readable descriptor behind a writable one"));
        }
        let access = if is_write { Permissions::Write } else { Permissions::Read };
        let inside = segment.address.checked_add(u64::from(segment.length)).is_some()
            && memory.check_range(segment.address, segment.length as usize, access);
        if !inside {
            return Err(malformed(format!(
                "a descriptor names {} bytes at {:#x}, which are not in the guest's memory",
                segment.length, descriptor.address
            )));
        }
        if is_write {
            self.writable.push(segment)
        } else {
            self.readable.push(segment)
        }
        if self.readable.len() + self.writable.len() > u64::from(u32::MAX) {
            return Err(malformed("a chain has 4 GiB or more"));
        }
        Ok(())
    }
}

fn load<M: GuestMemory>(memory: &M, table: GuestAddress, index: u32) -> Result<Descriptor> {
    let address = table.checked_add(u64::from(index) * DESCRIPTOR_SIZE);
    let raw = address.and_then(|address| memory.read_obj::<Descriptor>(address).ok());
    let Some(raw) = raw else {
        return Err(malformed(format!(
            "descriptor {index} of the table at {:#x} is not in the guest's memory",
            table.0
        )));
    };
    Ok(Descriptor {
        address: u64::from_le(raw.address),
        length: u32::from_le(raw.length),
        flags: u16::from_le(raw.flags),
        next: u16::from_le(raw.next),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestMemoryMmap;

    const TABLE: GuestAddress = GuestAddress(0x1000);

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000), (GuestAddress(0x2_0000), 0x1000)])
            .expect("memory")
    }

    fn write_descriptors(
        memory: &GuestMemoryMmap,
        table: GuestAddress,
        descriptors: &[(u64, u32, u16, u16)],
    ) {
        for (index, &(address, length, flags, next)) in descriptors.iter().enumerate() {
            let at = GuestAddress(table.0 + 16 * index as u64);
            memory.write_obj(Descriptor { address, length, flags, next }, at).expect("inside");
        }
    }

    fn read(memory: &GuestMemoryMmap, size: u16, head: u16) -> Result<Chain> {
        let mut chain = Chain::default();
        chain.read(memory, TABLE, size, head, true).map(|()| chain)
    }

    fn refusal(descriptors: &[(u64, u32, u16, u16)]) -> String {
        let memory = memory();
        write_descriptors(&memory, TABLE, descriptors);
        read(&memory, 8, 0).expect_err("it is malformed").line()
    }

    #[test]
    fn a_chain_is_read_in_its_order() {
        let memory = memory();
        write_descriptors(
            &memory,
            TABLE,
            &[(0x3000, 16, NEXT, 2), (0x5000, 1, WRITE, 0), (0x4000, 512, NEXT, 1)],
        );
        let chain = read(&memory, 8, 0).expect("a chain");
        assert_eq!((chain.readable.len(), chain.writable.len()), (528, 1));
        assert_eq!(chain.readable.list[1], Segment { address: GuestAddress(0x4000), length: 512 });
    }

    #[test]
    fn an_indirect_table_is_read_after_direct_descriptors() {
        let memory = memory();
        write_descriptors(&memory, TABLE, &[(0x3000, 16, NEXT, 1), (0x8000, 32, INDIRECT, 0)]);
        write_descriptors(&memory, GuestAddress(0x8000), &[(0x4000, 512, NEXT, 1), (0x5000, 1, WRITE, 0)]);
        let chain = read(&memory, 8, 0).expect("a chain");
        assert_eq!((chain.readable.len(), chain.writable.len()), (528, 1));
        let refused = Chain::default().read(&memory, TABLE, 8, 0, false).expect_err("not negotiated").line();
        assert!(refused.contains("indirect"), "{refused}");
    }

    #[test]
    fn a_chain_with_a_loop_is_refused() {
        assert!(refusal(&[(0x3000, 16, NEXT, 1), (0x3000, 16, NEXT, 0)]).contains("loop"));
        assert!(refusal(&[(0x3000, 0, NEXT, 0)]).contains("loop"));
    }

    #[test]
    fn a_table_that_refers_to_itself_is_refused() {
        let memory = memory();
        write_descriptors(&memory, TABLE, &[(TABLE.0, 128, INDIRECT, 0)]);
        assert!(read(&memory, 8, 0).expect_err("indirect twice").line().contains("indirect"));
    }

    #[test]
    fn a_table_of_no_whole_descriptors_is_refused() {
        for length in [0, 15, 17] {
            assert!(refusal(&[(0x8000, length, INDIRECT, 0)]).contains("table of descriptors"));
        }
    }

    #[test]
    fn a_descriptor_outside_of_its_table_is_refused() {
        assert!(refusal(&[(0x3000, 16, NEXT, 8)]).contains("descriptor 8 of a table of 8"));
        assert!(read(&memory(), 8, 8).is_err());
    }

    #[test]
    fn addresses_outside_the_guests_memory_are_refused() {
        for (address, length) in
            [(0x1_0000, 1), (0xFFFF, 2), (u64::MAX, 1), (u64::MAX - 15, u32::MAX), (0x2_0FFF, 2)]
        {
            let text = refusal(&[(address, length, WRITE, 0)]);
            assert!(text.contains("not in the guest's memory"), "{address:#x}: {text}");
        }
        // A hole between two pieces.
        assert!(refusal(&[(0xF000, 0x1_1000, 0, 0)]).contains("not in the guest's memory"));
        assert!(refusal(&[(0x4_0000, 16, INDIRECT, 0)]).contains("not in the guest's memory"));
    }

    #[test]
    fn a_readable_descriptor_behind_a_writable_one_is_refused() {
        assert!(refusal(&[(0x3000, 16, NEXT | WRITE, 1), (0x4000, 16, 0, 0)]).contains("behind"));
    }

    #[test]
    fn a_long_chain_of_huge_descriptors_is_refused() {
        // The guest has 64 KiB of table; the table may name the same bytes many times.
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 64 << 20)]).expect("memory");
        write_descriptors(&memory, TABLE, &[(0x10_0000, 16 * 1024, INDIRECT, 0)]);
        let table = (0..1024).map(|index| (0, 63 << 20, NEXT, index + 1)).collect::<Vec<_>>();
        write_descriptors(&memory, GuestAddress(0x10_0000), &table);
        assert!(read(&memory, 8, 0).expect_err("too long").line().contains("4 GiB"));
    }

    #[test]
    fn copies_span_several_segments() {
        let memory = memory();
        write_descriptors(&memory, TABLE, &[(0x3000, 5, NEXT, 1), (0x4000, 0, NEXT, 2), (0x5000, 7, 0, 0)]);
        let chain = read(&memory, 8, 0).expect("a chain");
        chain.readable.store(&memory, 3, b"abcdef").expect("stored");
        let mut both = [0; 4];
        chain.readable.load(&memory, 4, &mut both).expect("loaded");
        assert_eq!(&both, b"bcde");
        assert!(
            chain.readable.load(&memory, 9, &mut both).expect_err("too far").line().contains("1 bytes short")
        );
    }
}
