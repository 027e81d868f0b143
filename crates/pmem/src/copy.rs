//! Copies into a region and out of it, at any alignment and length.
//!
//! Invariants: every source byte is loaded once, and checksums are computed over the bytes that were stored. After a
//! successful store, a fence by the same thread makes the bytes durable. No locked instruction is used: it would wait until
//! the earlier stores have drained.
//!
//! Elsewhere: bounds (`memory`), recording a failure (`mapping`), fences.

use crate::keys::KEYS;
use crate::memory::Memory;
use crate::methods::{Available, Methods, Sum, class_of};
use crate::routines::{BackLines, CopyBytes, Failure, fence};
use cbd_types::CHECKSUM_BLOCK;

const LINE: usize = 64;
const STEP: usize = 256;
const BLOCK: usize = CHECKSUM_BLOCK as usize;

/// The reason for a failed copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Not all bytes are inside the region.
    Outside,
    /// Memory failed.
    Failed(Failure),
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Stores `from` at `at`.
#[inline]
pub(crate) fn store(memory: &Memory, methods: &Methods, at: u64, from: &[u8]) -> Result<(), Fault> {
    let to = memory.pointer(at, from.len()).ok_or(Fault::Outside)?;
    // SAFETY: `to` has room for as many bytes as `from`; a region overlaps no Rust slice.
    unsafe {
        if (to as usize | from.len()).is_multiple_of(LINE) {
            Ok(store_lines(methods, to, from.as_ptr(), from.len())?)
        } else {
            Ok(store_ragged(methods, to, from)?)
        }
    }
}

/// # Safety
/// `length` bytes, whole lines, are readable at `from` and writable at `to`, which is aligned to a line.
#[inline]
unsafe fn store_lines(methods: &Methods, to: *mut u8, from: *const u8, length: usize) -> Result<(), Failure> {
    if length == 0 {
        return Ok(());
    }
    let store = &methods.stores[class_of(length)];
    // SAFETY: as the caller ensures; a routine is in `methods` only if the processor can run it.
    unsafe {
        (store.lines)(to, from, length / LINE).result()?;
        if !store.written_back {
            back(methods, to, length)?;
        }
    }
    Ok(())
}

/// Stores the lines in the middle as whole lines, and the bytes on both sides through the caches.
///
/// # Safety
/// `to` has room for `from`.
unsafe fn store_ragged(methods: &Methods, to: *mut u8, from: &[u8]) -> Result<(), Failure> {
    let (head, rest) = from.split_at(from.len().min(to.align_offset(LINE)));
    let (middle, tail) = rest.split_at(rest.len() / LINE * LINE);
    // SAFETY: head, middle and tail follow each other in `from` as in `to`; after the head `to` is aligned.
    unsafe {
        store_bytes(methods, to, head)?;
        let to = to.add(head.len());
        store_lines(methods, to, middle.as_ptr(), middle.len())?;
        store_bytes(methods, to.add(middle.len()), tail)
    }
}

/// # Safety
/// `to` has room for `from`.
unsafe fn store_bytes(methods: &Methods, to: *mut u8, from: &[u8]) -> Result<(), Failure> {
    // SAFETY: as the caller ensures.
    unsafe {
        (methods.bytes)(to, from.as_ptr(), from.len()).result()?;
        back(methods, to, from.len())
    }
}

/// # Safety
/// `length` bytes are mapped at `at`.
#[inline]
unsafe fn back(methods: &Methods, at: *mut u8, length: usize) -> Result<(), Failure> {
    // SAFETY: as the caller ensures; a routine is in `methods` only if the processor can run it.
    unsafe { back_with(methods.back, at, length) }
}

/// # Safety
/// `length` bytes are mapped at `at`, and the processor can run the routine.
unsafe fn back_with(routine: BackLines, at: *mut u8, length: usize) -> Result<(), Failure> {
    if length == 0 {
        return Ok(());
    }
    let skew = at as usize % LINE;
    // SAFETY: lines do not cross pages, so if one byte of a line is mapped, the whole line is mapped.
    unsafe { routine(at.sub(skew), at, (skew + length).div_ceil(LINE)).result()? };
    Ok(())
}

/// Stores `from` at `at` through the caches, and writes nothing back: no fence makes it durable. The routine that copies out of
/// the region also copies into it: it needs no start-up for a single line, which most of what is shared is.
#[inline]
pub(crate) fn share(memory: &Memory, methods: &Methods, at: u64, from: &[u8]) -> Result<(), Fault> {
    let to = memory.pointer(at, from.len()).ok_or(Fault::Outside)?;
    // SAFETY: `to` has room for as many bytes as `from`; a region overlaps no Rust slice.
    unsafe { (methods.load)(to, from.as_ptr(), from.len()).result()? };
    Ok(())
}

/// As [`share`], and returns the checksum of the stored bytes.
#[inline]
pub(crate) fn share_summed(memory: &Memory, methods: &Methods, at: u64, from: &[u8]) -> Result<u32, Fault> {
    let to = memory.pointer(at, from.len()).ok_or(Fault::Outside)?;
    // SAFETY: `to` has room for as many bytes as `from`; a region overlaps no Rust slice.
    unsafe {
        match &methods.load_sum {
            // The method stores at any alignment, through the caches.
            Some(way) => Ok(sum(way, to, from.as_ptr(), from.len(), from.len() / STEP * STEP)?),
            None => Ok(copy_over_copy(methods, methods.bytes, from.as_ptr(), to, from.len())?),
        }
    }
}

/// As [`share_summed`], but past the caches, if the method of durable stores does that. What this thread stores later is visible later.
pub(crate) fn share_summed_past_caches(
    memory: &Memory,
    methods: &Methods,
    at: u64,
    from: &[u8],
) -> Result<u32, Fault> {
    let mut sum = [0];
    store_summed(memory, methods, at, from, from.len(), &mut sum)?;
    // Stores past the caches are in no order with others.
    fence();
    Ok(sum[0])
}

/// Writes the lines of a range back.
pub(crate) fn write_back(memory: &Memory, methods: &Methods, at: u64, length: u64) -> Result<(), Fault> {
    let length = usize::try_from(length).map_err(|_| Fault::Outside)?;
    let start = memory.pointer(at, length).ok_or(Fault::Outside)?;
    // SAFETY: the bytes are mapped; a write-back changes no byte.
    Ok(unsafe { back(methods, start, length) }?)
}

/// Evicts the lines of a range from the caches, if the processor supports it.
pub(crate) fn evict(memory: &Memory, available: &Available, at: u64, length: usize) -> Result<(), Fault> {
    let start = memory.pointer(at, length).ok_or(Fault::Outside)?;
    // SAFETY: the bytes are mapped; a routine is in `available` only if the processor can run it.
    Ok(unsafe { back_with(available.evict, start, length) }?)
}

/// Stores `from` at `at`, and stores the checksum of each block in `checksums`; the first block has `first` bytes.
#[inline]
pub(crate) fn store_summed(
    memory: &Memory,
    methods: &Methods,
    at: u64,
    from: &[u8],
    first: usize,
    checksums: &mut [u32],
) -> Result<(), Fault> {
    let mut to = memory.pointer(at, from.len()).ok_or(Fault::Outside)?;
    let way = &methods.checksums[class_of(from.len())];
    let (mut block, mut rest) = from.split_at(first.min(from.len()));
    let mut checksums = checksums.iter_mut();
    loop {
        // SAFETY: the blocks follow each other in `from` as in the bytes at `to`, which has room for all.
        let sum = unsafe {
            match way {
                Some(way) => store_block(methods, way, to, block)?,
                None => store_block_over_copy(methods, to, block)?,
            }
        };
        if let Some(place) = checksums.next() {
            *place = sum;
        }
        if rest.is_empty() {
            return Ok(());
        }
        // SAFETY: more blocks follow, so the pointer stays inside.
        to = unsafe { to.add(block.len()) };
        (block, rest) = rest.split_at(rest.len().min(BLOCK));
    }
}

/// # Safety
/// `to` has room for `from`.
#[inline]
unsafe fn store_block(methods: &Methods, way: &Sum, to: *mut u8, from: &[u8]) -> Result<u32, Failure> {
    // SAFETY: as the caller ensures.
    unsafe {
        let stepped = if (to as usize).is_multiple_of(LINE) { from.len() / STEP * STEP } else { 0 };
        let sum = sum(way, to, from.as_ptr(), from.len(), stepped)?;
        // The steps write their lines back themselves; the bytes after them were stored through the caches.
        back(methods, to.add(stepped), from.len() - stepped)?;
        Ok(sum)
    }
}

/// For processors that cannot copy and compute a checksum in one pass: the checksum is that of a private copy, which no other
/// thread can change.
///
/// # Safety
/// `to` has room for `from`.
unsafe fn store_block_over_copy(methods: &Methods, mut to: *mut u8, from: &[u8]) -> Result<u32, Failure> {
    let mut copy = [0_u8; BLOCK];
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for piece in from.chunks(BLOCK) {
        let copy = &mut copy[..piece.len()];
        // SAFETY: the copy has the piece's length; `to` has room for it, by the caller.
        unsafe {
            (methods.bytes)(copy.as_mut_ptr(), piece.as_ptr(), piece.len()).result()?;
            digest.update(copy);
            if (to as usize | copy.len()).is_multiple_of(LINE) {
                store_lines(methods, to, copy.as_ptr(), copy.len())?;
            } else {
                store_ragged(methods, to, copy)?;
            }
            to = to.add(piece.len());
        }
    }
    Ok(digest.finalize() as u32)
}

/// Copies `length` bytes, the first `stepped` of them in steps, and computes the checksum of all.
///
/// # Safety
/// `length` bytes are readable at `from` and writable at `to`; `stepped` is whole steps, at most `length`,
/// and if the method stores past the caches `to` is aligned to a line or `stepped` is 0.
#[inline]
unsafe fn sum(
    way: &Sum,
    to: *mut u8,
    from: *const u8,
    length: usize,
    stepped: usize,
) -> Result<u32, Failure> {
    let mut state = u32::MAX;
    // SAFETY: as the caller ensures.
    unsafe {
        if stepped > 0 {
            state = (way.steps)(to, from, stepped / STEP, u64::from(state), &raw const KEYS).result()?;
        }
        if stepped < length {
            let seed = u64::from(state);
            state = (way.bytes)(to.add(stepped), from.add(stepped), length - stepped, seed).result()?;
        }
    }
    Ok(!state)
}

/// Copies from `at`.
#[inline]
pub(crate) fn load(memory: &Memory, methods: &Methods, at: u64, into: &mut [u8]) -> Result<(), Fault> {
    let from = memory.pointer(at, into.len()).ok_or(Fault::Outside)?;
    // SAFETY: as many bytes are mapped at `from` as `into` has; a region overlaps no Rust slice.
    unsafe { (methods.load)(into.as_mut_ptr(), from, into.len()).result()? };
    Ok(())
}

/// Copies from `at` and computes the checksum of the copied bytes.
#[inline]
pub(crate) fn load_summed(
    memory: &Memory,
    methods: &Methods,
    at: u64,
    into: &mut [u8],
) -> Result<u32, Fault> {
    let from = memory.pointer(at, into.len()).ok_or(Fault::Outside)?;
    let Some(way) = &methods.load_sum else {
        // SAFETY: as many bytes are mapped at `from` as `into` has.
        return Ok(unsafe { copy_over_copy(methods, methods.load, from, into.as_mut_ptr(), into.len())? });
    };
    // SAFETY: as many bytes are mapped at `from` as `into` has; the method stores at any alignment.
    Ok(unsafe { sum(way, into.as_mut_ptr(), from, into.len(), into.len() / STEP * STEP)? })
}

/// For processors that cannot copy and compute a checksum in one pass: the checksum is that of a private copy, which no other
/// thread can change. Clients may change what is at `from` and `to` at any time.
///
/// # Safety
/// `length` bytes are readable at `from`, which `load` can copy from, and writable at `to`.
unsafe fn copy_over_copy(
    methods: &Methods,
    load: CopyBytes,
    mut from: *const u8,
    mut to: *mut u8,
    length: usize,
) -> Result<u32, Failure> {
    let mut copy = [0_u8; BLOCK];
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    let mut left = length;
    while left > 0 {
        let copy = &mut copy[..left.min(BLOCK)];
        // SAFETY: the copy has the piece's length, and as many bytes are readable and writable, by the caller.
        unsafe {
            load(copy.as_mut_ptr(), from, copy.len()).result()?;
            digest.update(copy);
            (methods.bytes)(to, copy.as_ptr(), copy.len()).result()?;
            (from, to) = (from.add(copy.len()), to.add(copy.len()));
        }
        left -= copy.len();
    }
    Ok(digest.finalize() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::CopyMethod;
    use crate::recorder;
    use crate::routines::Outcome;
    use cbd_types::pmem::blocks_of;

    fn crc32c(bytes: &[u8]) -> u32 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
    }

    std::thread_local! {
        /// The first byte of a client's buffer, while the client changes it.
        static CLIENT: std::cell::Cell<*mut u8> = const { std::cell::Cell::new(std::ptr::null_mut()) };
    }

    /// A copy after which a client changes its buffer immediately.
    unsafe extern "C" fn load_beside_a_client(to: *mut u8, from: *const u8, length: usize) -> Outcome {
        let routine = Available::detect().bytes;
        // SAFETY: as the caller ensures.
        let outcome = unsafe { routine(to, from, length) };
        let client = CLIENT.get();
        if !client.is_null() {
            // SAFETY: it is the first byte of the destination buffer, which is valid until the read returns.
            unsafe { client.write(client.read() ^ 0xff) };
        }
        outcome
    }

    #[test]
    fn a_concurrent_change_of_the_clients_buffer_does_not_change_the_checksum() {
        let memory = Memory::scratch(1 << 16).expect("mapped").expect("registered");
        let methods = Available::detect().forced(CopyMethod::Portable).expect("every processor can");
        let methods = Methods { load: load_beside_a_client, load_sum: None, ..methods };
        let source: Vec<u8> = (0..9000_u32).map(|index| ((index * 7) >> 3) as u8).collect();
        store(&memory, &methods, 0, &source).expect("memory does not fail");
        for length in [1, 512, 4096, 9000] {
            let mut into = vec![0; length];
            CLIENT.set(into.as_mut_ptr());
            let sum = load_summed(&memory, &methods, 0, &mut into).expect("memory does not fail");
            CLIENT.set(std::ptr::null_mut());
            assert_eq!(sum, crc32c(&source[..length]), "{length} bytes: the sum is of what the region holds");
        }
        // The same where bytes of a client are stored for another host.
        let methods = Methods { bytes: load_beside_a_client, ..methods };
        for length in [1, 512, 4096, 9000] {
            let mut from = source[..length].to_vec();
            CLIENT.set(from.as_mut_ptr());
            let sum = share_summed(&memory, &methods, 0, &from).expect("memory does not fail");
            CLIENT.set(std::ptr::null_mut());
            let mut stored = vec![0; length];
            load(&memory, &Methods { load: Available::detect().load, ..methods }, 0, &mut stored)
                .expect("memory does not fail");
            assert_eq!(sum, crc32c(&stored), "{length} bytes: the sum is of what the region holds");
        }
    }

    /// The integration tests run the routines that this processor selects; this test runs those that older
    /// processors would select.
    #[test]
    fn every_routine_that_the_processor_can_run_copies_and_checksums_correctly() {
        let memory = Memory::scratch(1 << 20).expect("mapped").expect("registered");
        let source: Vec<u8> =
            (0..70_000_u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut tried = 0;
        for available in Available::detect_all() {
            for methods in CopyMethod::ALL.iter().filter_map(|&method| available.forced(method).ok()) {
                tried += 1;
                for (at, length) in
                    [(0, 64), (64, 256), (128, 4096), (192, 512), (7, 700), (64, 320), (0, 69_000)]
                {
                    let from = &source[..length];
                    let mut into = vec![0; length];
                    store(&memory, &methods, at, from).expect("memory does not fail");
                    load(&memory, &methods, at, &mut into).expect("memory does not fail");
                    assert_eq!(into, from, "{length} bytes at {at}: {methods:?}");

                    let from = &source[1000..1000 + length];
                    let first = length.min(512);
                    let mut checksums = vec![0; blocks_of(length, first)];
                    store_summed(&memory, &methods, at, from, first, &mut checksums)
                        .expect("memory does not fail");
                    let expected: Vec<_> =
                        [&from[..first]].into_iter().chain(from[first..].chunks(BLOCK)).map(crc32c).collect();
                    assert_eq!(checksums, expected, "{length} bytes at {at}: {methods:?}");
                    let sum = load_summed(&memory, &methods, at, &mut into).expect("memory does not fail");
                    assert_eq!((sum, &into[..]), (crc32c(from), from), "{length} bytes at {at}: {methods:?}");
                    evict(&memory, &available, at, length).expect("memory does not fail");

                    for (shift, summed) in [(2000, false), (3000, true)] {
                        let from = &source[shift..shift + length.min(60_000)];
                        if summed {
                            let sum =
                                share_summed(&memory, &methods, at, from).expect("memory does not fail");
                            assert_eq!(sum, crc32c(from), "{length} bytes at {at}: {methods:?}");
                        } else {
                            share(&memory, &methods, at, from).expect("memory does not fail");
                        }
                        let into = &mut into[..from.len()];
                        load(&memory, &methods, at, into).expect("memory does not fail");
                        assert_eq!(into, from, "{length} bytes at {at}: {methods:?}");
                    }
                }
            }
        }
        assert!(tried > 0);
    }

    /// Asserts that the lines of `memory` need only a fence to be durable, after a store and after a write-back. Returns
    /// them.
    fn on_the_way(memory: &Memory, length: usize) -> Vec<usize> {
        let lines = memory.base() / LINE..(memory.base() + length).div_ceil(LINE);
        let record = recorder::take();
        let stuck: Vec<_> = record.cached.into_iter().filter(|line| lines.contains(line)).collect();
        assert_eq!(stuck, [], "lines that are not written back");
        let first = lines.start;
        record.on_the_way.into_iter().filter(|line| lines.contains(line)).map(|line| line - first).collect()
    }

    #[test]
    fn what_is_stored_needs_nothing_but_a_fence() {
        let memory = Memory::scratch(1 << 16).expect("mapped").expect("registered");
        let source = vec![7; 20_000];
        for past_caches in [true, false] {
            let methods = recorder::methods(past_caches);
            for at in [0, 1, 60, 64, 4000] {
                for length in [1, 8, 63, 64, 65, 128, 255, 256, 300, 4096, 9001] {
                    let touched: Vec<_> = (at / LINE..(at + length).div_ceil(LINE)).collect();
                    let case = format!("{length} bytes at {at}, past the caches: {past_caches}");
                    recorder::take();
                    store(&memory, &methods, at as u64, &source[..length]).expect("memory does not fail");
                    assert_eq!(on_the_way(&memory, 1 << 16), touched, "{case}");
                    let first = length.min(512);
                    let mut checksums = vec![0; blocks_of(length, first)];
                    store_summed(&memory, &methods, at as u64, &source[..length], first, &mut checksums)
                        .expect("memory does not fail");
                    assert_eq!(on_the_way(&memory, 1 << 16), touched, "summed, {case}");
                }
            }
        }
    }

    #[test]
    fn a_write_back_reaches_every_line_of_its_range() {
        let memory = Memory::scratch(8192).expect("mapped").expect("registered");
        let methods = recorder::methods(true);
        for (at, length, lines) in
            [(0, 64, 0..1), (0, 65, 0..2), (60, 8, 0..2), (100, 4096, 1..66), (128, 0, 0..0)]
        {
            recorder::take();
            write_back(&memory, &methods, at, length).expect("memory does not fail");
            assert_eq!(on_the_way(&memory, 8192), lines.collect::<Vec<_>>(), "{length} bytes at {at}");
        }
    }

    #[test]
    fn accesses_outside_the_region_are_refused() {
        let memory = Memory::scratch(8192).expect("mapped").expect("registered");
        let methods = Available::detect().forced(CopyMethod::Portable).expect("always there");
        assert_eq!(store(&memory, &methods, 8192, &[1]), Err(Fault::Outside));
        assert_eq!(store_summed(&memory, &methods, 8000, &[1; 200], 200, &mut [0]), Err(Fault::Outside));
        assert_eq!(write_back(&memory, &methods, 1, u64::MAX), Err(Fault::Outside));
        assert_eq!(load_summed(&memory, &methods, u64::MAX, &mut [0]), Err(Fault::Outside));
    }
}
