//! Clients that change their buffers during the copy.

use super::CrashMemory;
use crate::pattern::Content;
use cbd_types::{CHECKSUM_BLOCK, SECTOR};
use std::borrow::Cow;

impl CrashMemory {
    /// While `is_fickle` is set, the client of the write `content` changes its buffer during the copy: some
    /// of its sectors turn into [`Content::changed`] as soon as they are loaded, and a second load of them
    /// would see other bytes.
    pub fn set_fickle(&self, content: Content, is_fickle: bool) {
        let mut state = self.state.lock();
        if is_fickle {
            state.fickle.insert(content.0);
        } else {
            state.fickle.remove(&content.0);
        }
    }

    /// The bytes that a copy loop loads if it loads each byte of `source` once.
    pub(super) fn load_source<'a>(&self, source: &'a [u8]) -> Cow<'a, [u8]> {
        let mut state = self.state.lock();
        let sector_of =
            |bytes: &[u8]| bytes.get(8..16).and_then(|word| word.try_into().ok()).map(u64::from_le_bytes);
        let Some(sector) = sector_of(source).filter(|_| !state.fickle.is_empty()) else {
            return Cow::Borrowed(source);
        };
        let size = [CHECKSUM_BLOCK as usize, SECTOR as usize]
            .into_iter()
            .find(|size| source.get(..*size).and_then(|bytes| Content::of(sector, bytes)).is_some());
        let (Some(size), Some(content)) = (size, size.and_then(|size| Content::of(sector, &source[..size])))
        else {
            return Cow::Borrowed(source);
        };
        if !state.fickle.contains(&content.0) {
            return Cow::Borrowed(source);
        }
        let mut found = source.to_vec();
        for (sector, bytes) in (sector..).zip(found.chunks_exact_mut(size)) {
            if state.random_sources.chance(500) {
                content.changed().fill(sector, bytes);
            }
        }
        Cow::Owned(found)
    }
}
