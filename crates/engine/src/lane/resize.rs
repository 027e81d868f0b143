//! A lane gets an index and an admission of another size, while it serves requests.
//!
//! Invariants: the lane's lock is held for one bounded step at a time, which gets its memory from a [`Resize`], and leaves there
//! what it frees.
//!
//! Elsewhere: how the entries move (`index`), and the loop over steps and lanes (`cache`).

use super::{
    Lane,
    admission::{Admission, FormerNames},
    index::{Memory, Stepped},
};
use crate::Environment;

/// Memory for the resize of a lane, and afterwards the memory that the resize has freed. Create and drop it without the lane's
/// lock.
pub(crate) struct Resize {
    index: Memory,
    /// That of the new size, and when the resize has begun that of the old one.
    admission: Option<Admission>,
    /// The names of the old admission, when the resize is done.
    names: FormerNames,
}

impl Resize {
    /// Memory to resize a lane to `blocks` blocks. `None` if an allocation fails.
    pub(crate) fn new(blocks: usize) -> Option<Self> {
        Some(Self {
            index: Memory::new(blocks)?,
            admission: Some(Admission::for_resize(blocks)?),
            names: FormerNames::default(),
        })
    }

    /// Memory for further steps of a resize that has begun.
    pub(crate) fn of_begun() -> Self {
        Self { index: Memory::without_table(), admission: None, names: FormerNames::default() }
    }

    /// Ensures that it has memory for a step that moves `blocks` blocks. `None` if an allocation fails.
    pub(crate) fn add(&mut self, blocks: usize) -> Option<()> {
        self.index.add(blocks)
    }
}

impl<E: Environment> Lane<E> {
    /// Whether the index has, or will have at the end of a resize that is on its way, the size for `blocks` blocks.
    pub(crate) fn is_sized_for(&self, blocks: usize) -> bool {
        self.lock().index.is_sized_for(blocks)
    }

    /// Begins a resize to the blocks for which `resize` was allocated. `false` if one is on its way, or if `resize` has begun one
    /// already; nothing has changed then.
    pub(crate) fn begin_resize(&self, resize: &mut Resize) -> bool {
        let Some(admission) = &mut resize.admission else { return false };
        let mut state = self.lock();
        let has_begun = state.index.begin_resize(&mut resize.index);
        if has_begun {
            state.admission.begin_resize(admission);
        }
        has_begun
    }

    /// Takes a step of a resize, in bounded time; see `index`. When it is done, `resize` has what was freed.
    pub(crate) fn resize_step(&self, resize: &mut Resize) -> Stepped {
        let mut state = self.lock();
        let stepped = state.index.resize_step(&mut resize.index);
        let resized = state.index.resized();
        let freed = state.admission.resize_step(resized);
        // Not dropped here: the lane is locked.
        let before = core::mem::replace(&mut resize.names, freed);
        debug_assert!(before.is_none(), "a resize frees once");
        self.lines.store(state.index.lines());
        stepped
    }
}
