//! Memory that is an ordinary file: the kernel caches its pages and writes them to the disk in any order.
//!
//! Invariants: a process crash loses nothing; a crash of the machine leaves in each page the content on the disk, any
//! content that the page had since, or a mix of their sectors; synced content is on the disk.
//! After a sync that failed the kernel considers the pages clean: until they are stored to again, no later
//! sync writes them, although it succeeds.

use super::{CrashMemory, Pages, State};
use crate::crash::crash_now;
use crate::random::Seeded;
use cbd_types::{BootId, Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::Range;

const PAGE: u64 = 4096;
/// The unit in bytes that a disk writes atomically.
const SECTOR: u64 = 512;

/// The state of the file.
#[derive(Clone)]
pub(super) struct File {
    boot: BootId,
    /// The contents that are certainly on the disk.
    disk: Pages,
    /// The numbers of the pages that a failed sync did not write, and that were not stored to since.
    dropped: BTreeSet<u64>,
    /// The syncs that fail, by their numbers counted from now, 0 for the next.
    failing: Range<u64>,
}

impl File {
    pub(super) const fn disk(&mut self) -> &mut Pages {
        &mut self.disk
    }

    /// Called for a store: the kernel will write the pages of these bytes again.
    pub(super) fn touch(&mut self, at: u64, length: u64) {
        for number in at / PAGE..(at + length).div_ceil(PAGE) {
            self.dropped.remove(&number);
        }
    }

    /// Counts one sync; true when it fails.
    fn fails(&mut self) -> bool {
        let Range { start, end } = self.failing;
        self.failing = start.saturating_sub(1)..end.saturating_sub(1);
        start == 0 && end > 0
    }

    /// Writes the page with this number to the disk as it is in memory.
    fn write_back(&mut self, memory: &Pages, number: u64) {
        if self.dropped.contains(&number) {
            return;
        }
        let at = number * PAGE;
        let mut page = vec![0; PAGE.min(memory.len() - at) as usize];
        memory.read(at, &mut page);
        self.disk.write(at, &page);
    }

    /// The disk loses power while it writes the page: some of its sectors are new.
    fn tear(&mut self, memory: &Pages, number: u64, random: &mut Seeded) {
        if self.dropped.contains(&number) {
            return;
        }
        let end = memory.len().min((number + 1) * PAGE);
        for at in (number * PAGE..end).step_by(SECTOR as usize) {
            if random.chance(500) {
                let mut sector = vec![0; SECTOR.min(end - at) as usize];
                memory.read(at, &mut sector);
                self.disk.write(at, &sector);
            }
        }
    }
}

impl CrashMemory {
    /// Makes the memory an ordinary file that is used in the boot `boot`. Its present contents are on the
    /// disk.
    pub fn become_file(&self, boot: BootId) {
        let mut state = self.state.lock();
        let disk = state.visible.clone();
        state.file = Some(File { boot, disk, dropped: BTreeSet::new(), failing: 0..0 });
    }

    /// Lets `number` syncs fail, the first of them the `count`-th from now (1 is the next). A sync that fails
    /// writes some of its pages, and the kernel considers the others clean. 0 ends the failures.
    pub fn fail_syncs(&self, count: u64, number: u64) {
        let mut state = self.state.lock();
        if let Some(file) = &mut state.file {
            let start = count.max(1) - 1;
            file.failing = start..start + number;
        }
    }

    pub(super) fn boot_of_file(&self) -> Option<BootId> {
        self.state.lock().file.as_ref().map(|file| file.boot)
    }

    pub(super) fn sync_file(&self, at: u64, length: u64) -> Result<()> {
        let mut state = self.state.lock();
        if state.dead || state.file.is_none() {
            return Ok(());
        }
        let is_crash = Self::event(&mut state);
        let State { file: Some(file), visible, tear, .. } = &mut *state else { return Ok(()) };
        let is_failure = !is_crash && file.fails();
        for number in at / PAGE..(at + length).div_ceil(PAGE) {
            if !(is_crash || is_failure) || tear.chance(500) {
                file.write_back(visible, number);
            } else if is_failure {
                file.dropped.insert(number);
            }
        }
        if is_crash {
            state.dead = true;
            drop(state);
            crash_now();
        }
        if is_failure {
            return Err(Error::new(ErrorKind::System, "the disk of the simulated file fails"));
        }
        Ok(())
    }

    /// The offsets of the pages of an ordinary file whose content in memory is not on the disk.
    #[must_use]
    pub fn unsynced_pages(&self) -> Vec<u64> {
        let state = self.state.lock();
        let Some(file) = &state.file else { return Vec::new() };
        let page = |pages: &Pages, at: u64| {
            let mut bytes = vec![0; PAGE.min(pages.len() - at) as usize];
            pages.read(at, &mut bytes);
            bytes
        };
        let starts = (0..state.visible.len()).step_by(PAGE as usize);
        starts.filter(|at| page(&state.visible, *at) != page(&file.disk, *at)).collect()
    }

    /// The kernel writes back some pages of the file; `seed` chooses them.
    pub fn write_back_some(&self, seed: u64) {
        let mut state = self.state.lock();
        let State { file: Some(file), visible, .. } = &mut *state else { return };
        let mut random = Seeded::new(seed);
        for number in 0..visible.len().div_ceil(PAGE) {
            if random.chance(250) {
                file.write_back(visible, number);
            }
        }
    }

    /// Crashes the machine, which then boots as `boot`. Each page of the file then has its content on the disk, its
    /// last content, or some sectors of each. This handle and all its clones are dead afterwards.
    #[must_use]
    pub fn machine_crash(&self, seed: u64, boot: BootId) -> Self {
        let mut next = self.take();
        next.pending.clear();
        let mut random = Seeded::new(seed);
        if let Some(file) = &mut next.file {
            // Some crashes lose almost everything, some almost nothing.
            let kept_permille = random.below(1001);
            let torn_permille = if random.chance(500) { random.below(500) } else { 0 };
            for number in 0..next.visible.len().div_ceil(PAGE) {
                if random.chance(kept_permille) {
                    file.write_back(&next.visible, number);
                } else if random.chance(torn_permille) {
                    file.tear(&next.visible, number, &mut random);
                }
            }
            file.boot = boot;
            (file.dropped, file.failing) = (BTreeSet::new(), 0..0);
            next.visible = file.disk.clone();
            next.durable = file.disk.clone();
        }
        Self::from_state(next)
    }
}
