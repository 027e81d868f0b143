//! A private copy of a region: stores stay in this process.
//!
//! Invariants: the original bytes never change. Modified pages are stored beside them, so a copy takes memory only for
//! modified pages; recovery modifies very few.

use crate::Bytes;
use cbd_format::PAGE;
use cbd_types::{BootId, Durability, MediaError, Pmem, pmem::blocks_of};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

type Page = Box<[u8; PAGE as usize]>;

struct Shared {
    beneath: Arc<dyn Bytes>,
    changed: RwLock<BTreeMap<u64, Page>>,
    /// Whether a page was ever modified: only then do loads search for modified pages.
    any: AtomicBool,
}

/// The copy; clones of it share the same content.
#[derive(Clone)]
pub struct PrivateMemory(Arc<Shared>);

impl PrivateMemory {
    /// A copy of `beneath`, without modifications.
    #[must_use]
    pub fn new(beneath: Arc<dyn Bytes>) -> Self {
        Self(Arc::new(Shared { beneath, changed: RwLock::default(), any: AtomicBool::new(false) }))
    }

    fn bounds(&self, at: u64, length: usize) -> Result<(), MediaError> {
        match at.checked_add(length as u64) {
            Some(end) if end <= self.0.beneath.len() => Ok(()),
            _ => Err(MediaError { at }),
        }
    }

    /// A page of the original; unreadable lines are zero, as in memory whose poison was cleared.
    fn page(&self, number: u64) -> Page {
        let mut page = Box::new([0; PAGE as usize]);
        let start = number * PAGE;
        let length = (self.0.beneath.len() - start).min(PAGE) as usize;
        if self.0.beneath.load(start, &mut page[..length]).is_err() {
            for (line, out) in page[..length].chunks_mut(64).enumerate() {
                if self.0.beneath.load(start + line as u64 * 64, out).is_err() {
                    out.fill(0);
                }
            }
        }
        page
    }
}

/// Splits `length` bytes at `at` at page boundaries. The items are the page, the first byte in the page, the first byte
/// of the part, and the length of the part.
fn parts(at: u64, length: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let here = at + done as u64;
        let within = (here % PAGE) as usize;
        let size = (PAGE as usize - within).min(length - done);
        let part = (here / PAGE, within, done, size);
        done += size;
        Some(part)
    })
}

impl Pmem for PrivateMemory {
    fn len(&self) -> u64 {
        self.0.beneath.len()
    }

    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }

    fn boot(&self) -> BootId {
        self.0.beneath.boot()
    }

    fn store(&self, at: u64, from: &[u8]) {
        assert!(self.bounds(at, from.len()).is_ok(), "a store of {} bytes at {at} is outside", from.len());
        let mut changed = self.0.changed.write();
        for (number, within, first, size) in parts(at, from.len()) {
            let page = changed.entry(number).or_insert_with(|| self.page(number));
            page[within..within + size].copy_from_slice(&from[first..first + size]);
        }
        self.0.any.store(true, Ordering::Release);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        debug_assert_eq!(checksums.len(), blocks_of(from.len(), first));
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(rest.chunks(cbd_types::CHECKSUM_BLOCK as usize));
        for (sum, block) in checksums.iter_mut().zip(blocks) {
            *sum = cbd_format::crc32c(block);
        }
        self.store(at, from);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {}

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.bounds(at, into.len())?;
        if !self.0.any.load(Ordering::Acquire) {
            return self.0.beneath.load(at, into);
        }
        let changed = self.0.changed.read();
        for (number, within, first, size) in parts(at, into.len()) {
            let out = &mut into[first..first + size];
            match changed.get(&number) {
                Some(page) => out.copy_from_slice(&page[within..within + size]),
                None => self.0.beneath.load(at + first as u64, out)?,
            }
        }
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        if !self.0.any.load(Ordering::Acquire) {
            self.bounds(at, into.len())?;
            return self.0.beneath.load_summed(at, into);
        }
        Pmem::load(self, at, into)?;
        Ok(cbd_format::crc32c(into))
    }

    fn write_back(&self, _at: u64, _length: u64) {}

    fn describe(&self) -> String {
        "a private copy".to_owned()
    }
}

/// A copy can be copied again: a repair is tried before it is applied.
impl Bytes for PrivateMemory {
    fn len(&self) -> u64 {
        Pmem::len(self)
    }

    fn boot(&self) -> BootId {
        Pmem::boot(self)
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        Pmem::load(self, at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        Pmem::load_summed(self, at, into)
    }
}

impl std::fmt::Debug for PrivateMemory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "PrivateMemory({} pages changed)", self.0.changed.read().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_visible_only_in_the_copy() {
        let image: Vec<u8> = (0..20_000u32).map(|byte| byte as u8).collect();
        let beneath: Arc<dyn Bytes> = Arc::new(image.clone());
        let copy = PrivateMemory::new(Arc::clone(&beneath));
        copy.store(4090, &[7; 5000]);
        let mut expected = image.clone();
        expected[4090..9090].fill(7);
        let mut read = vec![0; 20_000];
        Pmem::load(&copy, 0, &mut read).unwrap();
        assert_eq!(read, expected);
        assert_eq!(
            Pmem::load_summed(&copy, 4000, &mut read[..300]),
            Ok(cbd_format::crc32c(&expected[4000..4300]))
        );
        beneath.load(0, &mut read).unwrap();
        assert_eq!(read, image);
    }

    #[test]
    fn a_copy_of_a_copy_knows_the_boot_in_which_it_is_read() {
        struct Booted;
        impl Bytes for Booted {
            fn len(&self) -> u64 {
                0
            }
            fn boot(&self) -> BootId {
                BootId([7; 16])
            }
            fn load(&self, at: u64, _into: &mut [u8]) -> Result<(), MediaError> {
                Err(MediaError { at })
            }
        }
        let copy = PrivateMemory::new(Arc::new(Booted));
        let tried = PrivateMemory::new(Arc::new(copy));
        assert_eq!(Pmem::boot(&tried), BootId([7; 16]));
    }

    #[test]
    fn bytes_outside_cannot_be_read() {
        let copy = PrivateMemory::new(Arc::new(vec![0u8; 8192]));
        assert_eq!(Pmem::load(&copy, 8190, &mut [0; 4]), Err(MediaError { at: 8190 }));
        assert_eq!(Pmem::load(&copy, u64::MAX, &mut [0; 4]), Err(MediaError { at: u64::MAX }));
    }
}
