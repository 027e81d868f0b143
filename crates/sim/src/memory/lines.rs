//! The crash states of one moment, line by line: the possible contents of a cache line after a power cut.

use super::{CrashMemory, LINE, State};
use cbd_types::{ByteRange, Pmem};
use std::collections::{BTreeMap, BTreeSet};

/// The bytes of one line.
pub type Line = [u8; LINE as usize];

/// A line with more than one possible content after a power cut at this moment.
#[derive(Clone, Debug)]
pub struct OpenLine {
    /// The offset of the line.
    pub at: u64,
    /// The content if nothing newer has reached the medium.
    pub old: Line,
    /// The content after each store since then, in order, each different from the one before; the last is the content
    /// that a program loads.
    pub versions: Vec<Line>,
}

impl OpenLine {
    /// The content that a program loads.
    #[must_use]
    pub fn newest(&self) -> &Line {
        self.versions.last().unwrap_or(&self.old)
    }

    /// The line with the words in `mask` from the newest version, the others from the old one.
    #[must_use]
    pub fn torn(&self, mask: u8) -> Line {
        let mut line = self.old;
        let words = line.chunks_exact_mut(8).zip(self.newest().chunks_exact(8));
        for (_, (word, new)) in words.enumerate().filter(|(at, _)| mask & (1 << at) != 0) {
            word.copy_from_slice(new);
        }
        line
    }
}

impl CrashMemory {
    /// The lines whose content a power cut at this moment decides. A line that was stored with its old
    /// content is not among them.
    #[must_use]
    pub fn open_lines(&self) -> Vec<OpenLine> {
        let state = self.state.lock();
        let mut lines: BTreeMap<u64, OpenLine> = BTreeMap::new();
        for store in &state.pending {
            let lines_of_store = store.range().start / LINE..store.range().end.div_ceil(LINE);
            for at in lines_of_store.map(|line| line * LINE) {
                let line = lines.entry(at).or_insert_with(|| {
                    let mut old = [0; LINE as usize];
                    state.durable.read(at, &mut old);
                    OpenLine { at, old, versions: Vec::new() }
                });
                let Some(both) = store.range().intersection(&ByteRange::at(at, LINE)) else { continue };
                let mut next = *line.newest();
                next[(both.start - at) as usize..(both.end - at) as usize].copy_from_slice(store.part(both));
                if next != *line.newest() {
                    line.versions.push(next);
                }
            }
        }
        lines.into_values().filter(|line| !line.versions.is_empty()).collect()
    }

    /// The memory after a power cut at this moment that leaves these lines with these contents, and all other
    /// open lines with their old ones. This handle stays alive, to try several ends of one history.
    #[must_use]
    pub fn cut_to<'a>(&self, lines: impl IntoIterator<Item = (u64, &'a Line)>) -> Self {
        let mut next = self.state.lock().successor();
        for (at, line) in lines {
            next.durable.write(at, line);
        }
        next.visible = next.durable.clone();
        Self::from_state(next)
    }

    /// Starts to trace the lines that loads access.
    pub fn trace_loads(&self) {
        self.state.lock().loaded = Some(vec![false; self.len().div_ceil(LINE) as usize]);
    }

    /// The offsets of the lines that were loaded since [`trace_loads`](Self::trace_loads).
    #[must_use]
    pub fn loaded_lines(&self) -> BTreeSet<u64> {
        let state = self.state.lock();
        let lines = (0..).zip(state.loaded.iter().flatten());
        lines.filter(|(_, loaded)| **loaded).map(|(line, _): (u64, _)| line * LINE).collect()
    }

    /// Whether the line at `at` was loaded since [`trace_loads`](Self::trace_loads).
    #[must_use]
    pub fn was_loaded(&self, at: u64) -> bool {
        self.state.lock().loaded.as_ref().is_none_or(|loaded| loaded[(at / LINE) as usize])
    }
}

impl State {
    /// The state of a later process on the same medium, with nothing pending.
    fn successor(&self) -> Self {
        Self {
            visible: self.durable.clone(),
            durable: self.durable.clone(),
            pending: Vec::new(),
            poisoned: self.poisoned.clone(),
            kind: self.kind,
            ..Self::new(0)
        }
    }
}
