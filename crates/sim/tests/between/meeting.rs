//! An environment in which other operations can run at a chosen moment: before a lock is taken, after a lock was
//! released, and before memory is loaded, stored to or fenced, and where a test wants it, before the clock is read. Operations that would have to wait for a held lock do
//! not run: another schedule covers them.

use cbd_engine::Environment;
use cbd_sim::{CrashMemory, SimEnvironment};
use cbd_types::{BootId, Durability, MediaError, Pmem};
use parking_lot::RawMutex as Inner;
use parking_lot::lock_api::{GuardNoSend, RawMutex};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

type Work = Box<dyn FnOnce()>;

/// Whether the other operations ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    Came,
    /// They would have had to wait for a lock.
    Blocked,
    /// The operation has fewer moments than the chosen one.
    Never,
}

/// The panic that ends operations that would have to wait.
struct WouldBlock;

thread_local! {
    static HOOK: RefCell<Option<(u32, Work)>> = const { RefCell::new(None) };
    static IS_BETWEEN: Cell<bool> = const { Cell::new(false) };
    static AT_CLOCK: Cell<bool> = const { Cell::new(false) };
    static MET: Cell<Met> = const { Cell::new(Met::Never) };
}

/// From now on there is a moment before each look at the wall clock, too.
pub fn meet_at_clock() {
    AT_CLOCK.set(true);
}

/// Runs `operation`; runs `others` at its `moment`-th moment, counted from 1, unless they would have to wait.
pub fn meet<T>(moment: u32, others: impl FnOnce() + 'static, operation: impl FnOnce() -> T) -> (T, Met) {
    MET.set(Met::Never);
    HOOK.set(Some((moment, Box::new(others))));
    let result = operation();
    forget();
    (result, MET.get())
}

/// Cancels `others`, because the operation was interrupted.
pub fn forget() {
    HOOK.set(None);
    IS_BETWEEN.set(false);
}

fn pass() {
    let due = HOOK.with_borrow_mut(|hook| match hook {
        Some((moment, _)) if *moment > 1 => {
            *moment -= 1;
            None
        }
        _ => hook.take(),
    });
    if let Some((_, work)) = due {
        IS_BETWEEN.set(true);
        MET.set(Met::Came);
        let ended = catch_unwind(AssertUnwindSafe(work));
        IS_BETWEEN.set(false);
        match ended {
            Ok(()) => {}
            Err(payload) if payload.is::<WouldBlock>() => MET.set(Met::Blocked),
            Err(payload) => resume_unwind(payload),
        }
    }
}

/// A lock with a moment before each acquisition and after each release.
pub struct MeetingLock(Inner);

// SAFETY: the inner lock provides the exclusion; the calls before and after it do not change its state.
unsafe impl RawMutex for MeetingLock {
    const INIT: Self = Self(Inner::INIT);
    type GuardMarker = GuardNoSend;

    fn lock(&self) {
        pass();
        if !IS_BETWEEN.get() {
            self.0.lock();
        } else if !self.0.try_lock() {
            resume_unwind(Box::new(WouldBlock));
        }
    }

    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller's contract is that of the inner lock.
        unsafe { self.0.unlock() };
        pass();
    }
}

/// A memory with a moment before each load, store and fence.
#[derive(Clone, Debug)]
pub struct MeetingMemory(pub CrashMemory);

impl Pmem for MeetingMemory {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn boot(&self) -> BootId {
        self.0.boot()
    }

    fn mixes_pages(&self) -> bool {
        self.0.mixes_pages()
    }

    fn sync(&self, at: u64, length: u64) -> cbd_types::Result<()> {
        pass();
        self.0.sync(at, length)
    }

    fn store(&self, at: u64, from: &[u8]) {
        pass();
        self.0.store(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        pass();
        self.0.store_summed(at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        pass();
        self.0.store_line(at, line);
    }

    fn fence(&self) {
        pass();
        self.0.fence();
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        pass();
        self.0.load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        pass();
        self.0.load_summed(at, into)
    }

    fn write_back(&self, at: u64, length: u64) {
        self.0.write_back(at, length);
    }
}

/// The simulated environment with such locks and memory.
pub struct Meeting(pub SimEnvironment);

impl Environment for Meeting {
    type Memory = MeetingMemory;
    type Lock = MeetingLock;

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn wall_ms(&self) -> u64 {
        if AT_CLOCK.get() {
            pass();
        }
        self.0.wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.monotonic_ms()
    }
}
