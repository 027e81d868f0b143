//! What the backing devices of this process stand on, as ranges of bytes.
//!
//! A backing device has a [`Chain`] for each run of bytes that it is made of: from the device itself down to a disk or a file, at each
//! step the bytes of it. Two chains that meet in an object show the same bytes unless they are apart in one that both have: from there
//! on down the same layer keeps them apart, however it does that.
//!
//! A file is locked, and a block device beneath a loop device is opened exclusively, once for the process: a [`Ground`]. Its users share
//! it, each with its own bytes.
//!
//! Always true here: no byte has two users of which one writes; a lock covers what its users have, and nothing else. A file system that
//! refuses a lock changes nothing of that within this process.
//!
//! Left to others: finding the chains (`beneath`); other processes (the locks).

use crate::hold::Held;
use crate::length::Length;
use crate::sys;
use cbd_sys::DeviceNumber;
use cbd_types::ByteRange;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What has bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Object {
    /// A block device or partition.
    Device(DeviceNumber),
    /// A file by its file system and number there.
    File(DeviceNumber, u64),
    /// A device that others share without a byte in common, as its driver sees to. Its "bytes" are the numbers of those others.
    Shared(DeviceNumber),
}

/// Bytes of an object that a backing device is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    pub object: Object,
    pub bytes: ByteRange,
}

/// From a backing device down to a disk or file.
pub(crate) type Chain = Vec<Step>;

/// A file that is locked, or a block device that is opened exclusively.
#[derive(Debug)]
pub(crate) struct Ground {
    pub object: Object,
    pub exclusive: bool,
    pub held: Held,
}

/// Where a run of bytes of a backing device begins in what it is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shown {
    /// The bytes of the backing device.
    pub top: ByteRange,
    pub at: u64,
}

impl Shown {
    /// Where `range` of the backing device ends in what it is made of; 0 where no byte of it lies there.
    pub fn end_of(&self, range: ByteRange) -> u64 {
        range.intersection(&self.top).map_or(0, |both| self.at.saturating_add(both.end - self.top.start))
    }
}

/// Something that a backing device stands on, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    id: u64,
    process: u32,
    left: AtomicBool,
    pub ground: Option<Arc<Ground>>,
    pub path: PathBuf,
    /// Of a file with a name, how long it has to be.
    pub length: Option<Length>,
    /// Which bytes of the backing device are where; none where that is not known.
    pub shown: Option<Shown>,
}

impl Claim {
    /// Leaves it to the end of the process: the kernel still has operations in flight. Where nothing is open there is nothing to leave:
    /// the kernel's own claims last as long as the operations.
    pub fn leave(&self) {
        if let Some(ground) = &self.ground {
            self.left.store(true, Ordering::SeqCst);
            std::mem::forget(Arc::clone(ground));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What a forked child drops is a copy.
        if *self.left.get_mut() || self.process != std::process::id() {
            return;
        }
        let mut registry = registry();
        let Some(at) = registry.users.iter().position(|user| user.id == self.id) else { return };
        let gone = registry.users.swap_remove(at);
        if let (Some(ground), Some(last)) = (&self.ground, gone.chain.last())
            && matches!(ground.object, Object::File(..))
        {
            let others = registry.users.iter().filter_map(|user| {
                let shares = user.ground.as_ptr() == Arc::as_ptr(ground);
                user.chain.last().filter(|_| shares).map(|step| step.bytes)
            });
            for bytes in uncovered(last.bytes, others.collect()) {
                // What can't be unlocked ends with the descriptor.
                let _ = sys::unlock_range(ground.held.as_fd(), bytes);
            }
        }
    }
}

/// A user of bytes.
#[derive(Debug)]
struct User {
    id: u64,
    /// The same for all that one backing device stands on.
    owner: u64,
    top: PathBuf,
    chain: Chain,
    exclusive: bool,
    ground: Weak<Ground>,
}

/// All of this process.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    last: u64,
    users: Vec<User>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { last: 0, users: Vec::new() });

/// The registry of this process. Its lock covers a search for a ground and the claim of it.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A claim to be.
pub(crate) struct Wanted<'a> {
    pub owner: u64,
    pub top: &'a Path,
    pub chain: Chain,
    pub exclusive: bool,
    pub ground: Option<Arc<Ground>>,
    pub path: PathBuf,
    pub length: Option<Length>,
    pub shown: Option<Shown>,
}

impl Registry {
    /// A number that was never given.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The ground that this process has already.
    pub fn ground(&self, object: Object, exclusive: bool) -> Option<Arc<Ground>> {
        let grounds = self.users.iter().filter_map(|user| user.ground.upgrade());
        grounds.into_iter().find(|ground| {
            let is_file = matches!(object, Object::File(..));
            ground.object == object && (ground.exclusive == exclusive || !is_file)
        })
    }

    /// Another backing device of this process that has bytes of this chain.
    pub fn other(&self, owner: u64, chain: &Chain, exclusive: bool) -> Option<&Path> {
        let user = self
            .users
            .iter()
            .find(|user| user.owner != owner && (user.exclusive || exclusive) && meet(&user.chain, chain))?;
        Some(&user.top)
    }

    /// Whether a backing device has these bytes of the object for writing already.
    pub fn has(&self, owner: u64, step: &Step) -> bool {
        self.users.iter().filter(|user| user.owner == owner && user.exclusive).any(|user| {
            user.chain.last().is_some_and(|own| own.object == step.object && own.bytes.contains(&step.bytes))
        })
    }

    /// Notes a claim; its bytes are locked where its ground is a file. The error beside the claim says why they are not locked: only the
    /// users in this process exclude each other then.
    ///
    /// # Errors
    /// That of the lock where another open description has it ([`is_locked`]); nothing is noted then.
    pub fn claim(&mut self, wanted: Wanted<'_>) -> io::Result<(Claim, Option<io::Error>)> {
        let Wanted { owner, top, chain, exclusive, ground, path, length, shown } = wanted;
        let mut unlocked = None;
        if let (Some(ground), Some(last)) = (&ground, chain.last())
            && matches!(ground.object, Object::File(..))
            && let Err(error) = ground.held.lock(ground.exclusive, last.bytes)
        {
            if is_locked(&error) {
                return Err(error);
            }
            unlocked = Some(error);
        }
        let id = self.number();
        let weak = ground.as_ref().map_or_else(Weak::new, Arc::downgrade);
        self.users.push(User { id, owner, top: top.to_owned(), chain, exclusive, ground: weak });
        let (process, left) = (std::process::id(), AtomicBool::new(false));
        Ok((Claim { id, process, left, ground, path, length, shown }, unlocked))
    }
}

/// Whether a lock failed because another open description has one, and not because there are none.
pub(crate) fn is_locked(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// Whether two chains show a byte in common, for all that is known.
fn meet(one: &Chain, other: &Chain) -> bool {
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

/// What is left of a range without others.
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
    fn chains_that_are_apart_in_one_layer_do_not_meet_below_it() {
        let first = chain(&[(9, range(0, 10)), (1, ALL)]);
        let second = chain(&[(9, range(10, 20)), (1, ALL)]);
        let by_another = chain(&[(8, range(10, 20)), (1, ALL)]);
        assert!(!meet(&first, &second));
        assert!(meet(&first, &by_another) && meet(&second, &by_another));
        assert!(!meet(&first, &chain(&[(2, ALL)])));
        assert!(!meet(&chain(&[(1, range(0, 8))]), &chain(&[(2, ALL), (1, range(8, 9))])));
    }

    #[test]
    fn an_empty_range_meets_nothing() {
        assert!(!meet(&chain(&[(1, range(5, 5))]), &chain(&[(1, ALL)])));
    }

    #[test]
    fn what_others_have_is_not_unlocked() {
        let whole = range(10, 20);
        assert_eq!(uncovered(whole, vec![]), [whole]);
        assert_eq!(uncovered(whole, vec![range(0, 5), range(20, 30)]), [whole]);
        assert_eq!(uncovered(whole, vec![range(14, 16), range(0, 12)]), [range(12, 14), range(16, 20)]);
        assert_eq!(uncovered(whole, vec![range(0, 100)]), []);
        assert_eq!(uncovered(whole, vec![range(11, 19), range(12, 13)]), [range(10, 11), range(19, 20)]);
        assert_eq!(uncovered(range(0, u64::MAX), vec![range(5, 6)]), [range(0, 5), range(6, u64::MAX)]);
    }

    #[test]
    fn bytes_of_a_backing_device_end_where_they_lie() {
        let shown = Shown { top: range(100, 200), at: 5000 };
        assert_eq!(shown.end_of(range(0, 100)), 0);
        assert_eq!(shown.end_of(range(0, 101)), 5001);
        assert_eq!(shown.end_of(range(150, 160)), 5060);
        assert_eq!(shown.end_of(range(150, 900)), 5100);
        assert_eq!(shown.end_of(range(200, 900)), 0);
    }

    #[test]
    fn a_lock_lasts_as_long_as_the_last_user_of_its_bytes() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || std::fs::File::options().read(true).write(true).open(file.path()).expect("it opens");
        let object = Object::File(DeviceNumber { major: 0, minor: 0 }, 0x7777);
        let ground = Arc::new(Ground { object, exclusive: true, held: Held::new(open()) });
        let claim = |owner, bytes| {
            let mut registry = registry();
            let ground = registry.ground(object, true).unwrap_or_else(|| Arc::clone(&ground));
            let step = Step { object, bytes };
            assert_eq!(registry.other(owner, &vec![step], true), None);
            let wanted = Wanted {
                owner,
                top: Path::new("/dev/top"),
                chain: vec![step],
                exclusive: true,
                ground: Some(ground),
                path: file.path().to_owned(),
                length: None,
                shown: None,
            };
            let (claim, unlocked) = registry.claim(wanted).expect("free");
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
