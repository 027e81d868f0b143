//! Registry of the byte ranges beneath the backing devices of this process.
//!
//! A backing device has a [`Chain`] for each contiguous range that it consists of: from the device itself down to a
//! disk or a file, with the bytes at each step. Two chains with a common object overlap, unless their bytes in some
//! common object are disjoint: then the bytes beneath it are disjoint, too.
//!
//! A file is locked, and a block device beneath a loop device is opened exclusively, once in the process, as a
//! [`HeldObject`]. Its users share it, each with its own bytes.
//!
//! Invariants: if one user of a byte writes, the byte has no other user; a lock covers exactly the bytes of its users.
//! Within this process this holds even if a file system refuses the lock.
//!
//! Elsewhere: finding the chains (`beneath`); the exclusion of other processes (the locks).

use crate::hold::Held;
use crate::length::Length;
use crate::sys;
use cbd_sys::DeviceNumber;
use cbd_types::ByteRange;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// An object that contains bytes of a backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Object {
    /// A block device or partition.
    Device(DeviceNumber),
    /// A file by its file system and inode.
    File(DeviceNumber, u64),
    /// A device whose driver separates its users (a thin pool, a snapshot). Its "bytes" are the numbers of those users.
    Shared(DeviceNumber),
}

/// Bytes of an object beneath a backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    pub object: Object,
    pub bytes: ByteRange,
}

/// The steps from a backing device down to a disk or file.
pub(crate) type Chain = Vec<Step>;

/// A file that is locked, or a block device that is opened exclusively.
#[derive(Debug)]
pub(crate) struct HeldObject {
    pub object: Object,
    pub exclusive: bool,
    pub file: Held,
}

/// Maps a contiguous range of a backing device to the object beneath it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapping {
    /// The bytes of the backing device.
    pub top: ByteRange,
    pub at: u64,
}

impl Mapping {
    /// The end of `range` of the backing device in the object beneath; 0 if no byte of it is there.
    pub fn end_of(&self, range: ByteRange) -> u64 {
        range.intersection(&self.top).map_or(0, |both| self.at.saturating_add(both.end - self.top.start))
    }
}

/// A claim on an object beneath a backing device; dropping it releases the claim.
#[derive(Debug)]
pub(crate) struct Claim {
    id: u64,
    process: u32,
    kept: AtomicBool,
    pub held_object: Option<Arc<HeldObject>>,
    pub path: PathBuf,
    /// The required length, of a file with a name.
    pub length: Option<Length>,
    /// The mapping from the backing device; `None` if it is not known.
    pub mapping: Option<Mapping>,
}

impl Claim {
    /// Keeps the claim until the process ends, since the kernel still has operations in flight. A claim without an open
    /// file is one that the kernel holds itself as long as the operations last.
    pub fn keep_until_exit(&self) {
        if let Some(held_object) = &self.held_object {
            self.kept.store(true, Ordering::SeqCst);
            std::mem::forget(Arc::clone(held_object));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A forked child drops a copy, which is no claim of its own.
        if *self.kept.get_mut() || self.process != std::process::id() {
            return;
        }
        let mut registry = registry();
        let Some(at) = registry.users.iter().position(|user| user.id == self.id) else { return };
        let gone = registry.users.swap_remove(at);
        if let (Some(held_object), Some(last)) = (&self.held_object, gone.chain.last())
            && matches!(held_object.object, Object::File(..))
        {
            let others = registry.users.iter().filter_map(|user| {
                let shares = user.held_object.as_ptr() == Arc::as_ptr(held_object);
                user.chain.last().filter(|_| shares).map(|step| step.bytes)
            });
            for bytes in uncovered(last.bytes, others.collect()) {
                // A lock that cannot be released explicitly ends with the descriptor.
                let _ = sys::unlock_range(held_object.file.as_fd(), bytes);
            }
        }
    }
}

/// The claims beneath a backing device. Claims are added when it grows, and none is released before the device is
/// closed, so operations read the list without a lock.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    list: Vec<Claim>,
    added: OnceLock<Box<Claims>>,
}

impl Claims {
    pub(crate) const fn new(list: Vec<Claim>) -> Self {
        Self { list, added: OnceLock::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.added.get().is_none()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Claim> {
        std::iter::successors(Some(self), |claims| claims.added.get().map(Box::as_ref))
            .flat_map(|claims| claims.list.iter())
    }

    /// Adds the claims of a device that has grown, but for those that it has already.
    pub(crate) fn add(&self, mut new: Vec<Claim>) {
        let same: Vec<bool> = {
            let registry = registry();
            new.iter().map(|claim| self.iter().any(|known| registry.is_same(claim, known))).collect()
        };
        let mut same = same.into_iter();
        // Without the lock of the registry, which the drop of a claim takes.
        new.retain(|_| same.next() == Some(false));
        let Some(mut more) = (!new.is_empty()).then(|| Box::new(Self::new(new))) else { return };
        let mut last = self;
        // Another thread may add claims meanwhile.
        while let Err(refused) = last.added.set(more) {
            more = refused;
            if let Some(next) = last.added.get() {
                last = next;
            }
        }
    }
}

/// A user of bytes.
#[derive(Debug)]
struct User {
    id: u64,
    /// All claims of one backing device have the same number.
    owner: u64,
    top: PathBuf,
    chain: Chain,
    exclusive: bool,
    held_object: Weak<HeldObject>,
}

/// All users of this process.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    last: u64,
    users: Vec<User>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { last: 0, users: Vec::new() });

/// The registry of this process. Its lock covers a search for a held object and the claim of it.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The parameters of a claim.
pub(crate) struct ClaimRequest<'a> {
    pub owner: u64,
    pub top: &'a Path,
    pub chain: Chain,
    pub exclusive: bool,
    pub held_object: Option<Arc<HeldObject>>,
    pub path: PathBuf,
    pub length: Option<Length>,
    pub mapping: Option<Mapping>,
}

impl Registry {
    /// A number that was never returned before.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The object that this process holds already.
    pub fn held_object(&self, object: Object, exclusive: bool) -> Option<Arc<HeldObject>> {
        let held_objects = self.users.iter().filter_map(|user| user.held_object.upgrade());
        held_objects.into_iter().find(|held_object| {
            let is_file = matches!(object, Object::File(..));
            held_object.object == object && (held_object.exclusive == exclusive || !is_file)
        })
    }

    /// Another backing device of this process that uses bytes of this chain.
    pub fn other(&self, owner: u64, chain: &Chain, exclusive: bool) -> Option<&Path> {
        let user = self.users.iter().find(|user| {
            user.owner != owner && (user.exclusive || exclusive) && may_overlap(&user.chain, chain)
        })?;
        Some(&user.top)
    }

    /// The number that all claims of the backing device of `claim` have.
    pub fn owner_of(&self, claim: &Claim) -> Option<u64> {
        self.users.iter().find(|user| user.id == claim.id).map(|user| user.owner)
    }

    /// Whether two claims are of the same bytes.
    fn is_same(&self, one: &Claim, other: &Claim) -> bool {
        let chain =
            |claim: &Claim| self.users.iter().find(|user| user.id == claim.id).map(|user| &user.chain);
        chain(one) == chain(other) && one.mapping == other.mapping
    }

    /// Whether a backing device has claimed these bytes of the object for writing already.
    pub fn has(&self, owner: u64, step: &Step) -> bool {
        self.users.iter().filter(|user| user.owner == owner && user.exclusive).any(|user| {
            user.chain.last().is_some_and(|own| own.object == step.object && own.bytes.contains(&step.bytes))
        })
    }

    /// Registers a claim, and locks its bytes if the object is a file. The error beside the claim is the reason why
    /// they are not locked: then only users in this process exclude each other.
    ///
    /// # Errors
    /// The error of the lock if another open description has it ([`is_locked`]); then no claim is registered.
    pub fn claim(&mut self, request: ClaimRequest<'_>) -> io::Result<(Claim, Option<io::Error>)> {
        let ClaimRequest { owner, top, chain, exclusive, held_object, path, length, mapping } = request;
        let mut unlocked = None;
        if let (Some(held_object), Some(last)) = (&held_object, chain.last())
            && matches!(held_object.object, Object::File(..))
            && let Err(error) = held_object.file.lock(held_object.exclusive, last.bytes)
        {
            if is_locked(&error) {
                return Err(error);
            }
            unlocked = Some(error);
        }
        let id = self.number();
        let weak = held_object.as_ref().map_or_else(Weak::new, Arc::downgrade);
        self.users.push(User { id, owner, top: top.to_owned(), chain, exclusive, held_object: weak });
        let (process, kept) = (std::process::id(), AtomicBool::new(false));
        Ok((Claim { id, process, kept, held_object, path, length, mapping }, unlocked))
    }
}

/// Whether a lock failed because another open description has one, and not because the file system has no locks.
pub(crate) fn is_locked(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// Whether two chains may have a byte in common.
fn may_overlap(one: &Chain, other: &Chain) -> bool {
    let mut is_shared = false;
    for step in one {
        for same in other.iter().filter(|same| same.object == step.object) {
            is_shared = true;
            if step.bytes.intersection(&same.bytes).is_none() {
                return false;
            }
        }
    }
    is_shared
}

/// The parts of a range that are in none of the others.
fn uncovered(range: ByteRange, mut others: Vec<ByteRange>) -> Vec<ByteRange> {
    others.sort_by_key(|other| other.start);
    let (mut at, mut left) = (range.start, Vec::new());
    for other in others.into_iter().filter(|other| range.intersection(other).is_some()) {
        if at < other.start {
            left.push(ByteRange { start: at, end: other.start });
        }
        at = at.max(other.end);
    }
    if at < range.end {
        left.push(ByteRange { start: at, end: range.end });
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end }
    }

    fn chain(steps: &[(u32, ByteRange)]) -> Chain {
        let object = |minor| Object::Device(DeviceNumber { major: 7, minor });
        steps.iter().map(|(minor, bytes)| Step { object: object(*minor), bytes: *bytes }).collect()
    }

    const ALL: ByteRange = range(0, u64::MAX);

    #[test]
    fn chains_that_are_disjoint_in_one_layer_do_not_overlap_below_it() {
        let first = chain(&[(9, range(0, 10)), (1, ALL)]);
        let second = chain(&[(9, range(10, 20)), (1, ALL)]);
        let through_another = chain(&[(8, range(10, 20)), (1, ALL)]);
        assert!(!may_overlap(&first, &second));
        assert!(may_overlap(&first, &through_another) && may_overlap(&second, &through_another));
        assert!(!may_overlap(&first, &chain(&[(2, ALL)])));
        assert!(!may_overlap(&chain(&[(1, range(0, 8))]), &chain(&[(2, ALL), (1, range(8, 9))])));
    }

    #[test]
    fn an_empty_range_overlaps_nothing() {
        assert!(!may_overlap(&chain(&[(1, range(5, 5))]), &chain(&[(1, ALL)])));
    }

    #[test]
    fn bytes_of_other_users_are_not_unlocked() {
        let whole = range(10, 20);
        assert_eq!(uncovered(whole, vec![]), [whole]);
        assert_eq!(uncovered(whole, vec![range(0, 5), range(20, 30)]), [whole]);
        assert_eq!(uncovered(whole, vec![range(14, 16), range(0, 12)]), [range(12, 14), range(16, 20)]);
        assert_eq!(uncovered(whole, vec![range(0, 100)]), []);
        assert_eq!(uncovered(whole, vec![range(11, 19), range(12, 13)]), [range(10, 11), range(19, 20)]);
        assert_eq!(uncovered(range(0, u64::MAX), vec![range(5, 6)]), [range(0, 5), range(6, u64::MAX)]);
    }

    #[test]
    fn ends_of_ranges_are_mapped_to_the_object_beneath() {
        let mapping = Mapping { top: range(100, 200), at: 5000 };
        assert_eq!(mapping.end_of(range(0, 100)), 0);
        assert_eq!(mapping.end_of(range(0, 101)), 5001);
        assert_eq!(mapping.end_of(range(150, 160)), 5060);
        assert_eq!(mapping.end_of(range(150, 900)), 5100);
        assert_eq!(mapping.end_of(range(200, 900)), 0);
    }

    #[test]
    fn a_lock_lasts_as_long_as_the_last_user_of_its_bytes() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || std::fs::File::options().read(true).write(true).open(file.path()).expect("it opens");
        let object = Object::File(DeviceNumber { major: 0, minor: 0 }, 0x7777);
        let held_object = Arc::new(HeldObject { object, exclusive: true, file: Held::new(open()) });
        let claim = |owner, bytes| {
            let mut registry = registry();
            let held_object = registry.held_object(object, true).unwrap_or_else(|| Arc::clone(&held_object));
            let step = Step { object, bytes };
            assert_eq!(registry.other(owner, &vec![step], true), None);
            let request = ClaimRequest {
                owner,
                top: Path::new("/dev/top"),
                chain: vec![step],
                exclusive: true,
                held_object: Some(held_object),
                path: file.path().to_owned(),
                length: None,
                mapping: None,
            };
            let (claim, unlocked) = registry.claim(request).expect("free");
            assert!(unlocked.is_none(), "{unlocked:?}");
            claim
        };
        let is_locked = |bytes| {
            let other = Held::new(open());
            other.lock(true, bytes).is_err()
        };
        let first = claim(u64::MAX, range(0, 100));
        let second = claim(u64::MAX - 1, range(100, 200));
        let met = registry()
            .other(u64::MAX - 2, &vec![Step { object, bytes: range(99, 101) }], true)
            .map(Path::to_owned);
        assert_eq!(met.as_deref(), Some(Path::new("/dev/top")));
        assert!(is_locked(range(99, 100)) && is_locked(range(100, 101)) && !is_locked(range(200, 300)));
        drop(first);
        assert!(!is_locked(range(0, 100)) && is_locked(range(100, 200)));
        drop(second);
        assert!(!is_locked(range(0, 300)));
    }
}
