//! Memory that is an ordinary file: the kernel caches its pages and writes them to the disk in any order.
//!
//! Invariants: a process crash loses nothing; a crash of the machine leaves of each page what was on the
//! disk, or any content that the page had since, or a mix of their sectors; what was synced is on the disk.

use super::{CrashMemory, Pages, State};
use crate::crash::crash_now;
use crate::random::Seeded;
use cbd_types::BootId;

const PAGE: u64 = 4096;
/// The unit that a disk writes whole.
const SECTOR: u64 = 512;

/// The state of the file.
#[derive(Clone)]
pub(super) struct File {
    boot: BootId,
    /// The contents that are certainly on the disk.
    disk: Pages,
}

impl File {
    /// Writes the page with this number to the disk as it is in memory.
    fn write_back(&mut self, memory: &Pages, number: u64) {
        let at = number * PAGE;
        let mut page = vec![0; PAGE.min(memory.len() - at) as usize];
        memory.read(at, &mut page);
        self.disk.write(at, &page);
    }

    /// The disk loses power while it writes the page: some of its sectors are new.
    fn tear(&mut self, memory: &Pages, number: u64, random: &mut Seeded) {
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
        state.file = Some(File { boot, disk: state.visible.clone() });
    }

    pub(super) fn boot_of_file(&self) -> Option<BootId> {
        self.state.lock().file.as_ref().map(|file| file.boot)
    }

    pub(super) fn sync_file(&self, at: u64, length: u64) {
        let mut state = self.state.lock();
        if state.dead || state.file.is_none() {
            return;
        }
        let is_crash = Self::event(&mut state);
        let State { file: Some(file), visible, tear, .. } = &mut *state else { return };
        for number in at / PAGE..(at + length).div_ceil(PAGE) {
            if !is_crash || tear.chance(500) {
                file.write_back(visible, number);
            }
        }
        if is_crash {
            state.dead = true;
            drop(state);
            crash_now();
        }
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

    /// Crashes the machine, which then boots as `boot`. Of each page of the file either the content on the
    /// disk is left, or its last content, or some sectors of each. This handle and all its clones are dead
    /// afterwards.
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
            next.visible = file.disk.clone();
            next.durable = file.disk.clone();
        }
        Self::from_state(next)
    }
}
