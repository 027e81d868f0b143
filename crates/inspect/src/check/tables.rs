//! The tables of hosts, backends, blkdevs and segments.

use super::Checker;
use super::slots::{Object, Updated, read_two_slots};
use crate::finding::{Location, Severity, SlotKind, Structure};
use cbd_format::{
    BackendEntry, BlkdevEntry, HostEntry, Layout, SegmentEntry, SlotContent, tables::STATE_ACTIVE,
};
use cbd_types::SegmentId;
use std::collections::{BTreeMap, BTreeSet};

/// One of the tables.
struct Table<'a> {
    /// The offsets of both slots of a row.
    slots: &'a dyn Fn(u32) -> [u64; 2],
    rows: u32,
    structure: Structure,
    kind: SlotKind,
    noun: &'static str,
    /// The severity and the cost of losing both slots of a row that was in use.
    if_lost: (Severity, &'static str),
    /// The cost if no evidence indicates that the row was in use.
    if_unused: &'static str,
}

/// Segments of the smallest cache.
const CACHE_SEGMENTS_MIN: u32 = 9;

/// Conclusions from readable rows about unreadable ones.
#[derive(Default)]
struct Used {
    /// Hosts that an active row references.
    hosts: BTreeSet<u32>,
    /// Backends that a segment or a block device references.
    backends: BTreeSet<u32>,
    /// Enough rows of segments are lost that all segments of a cache may be among them.
    may_have_lost_cache: bool,
    /// A cache has fewer segments than its row states, or the row of a backend is lost.
    is_short_of_segments: bool,
    /// A backend has no block device.
    is_without_blkdev: bool,
}

impl Used {
    fn of(checker: &Checker<'_>, layout: &Layout) -> Self {
        let mut used = Self::default();
        let (mut caches, mut served) = (Vec::new(), BTreeSet::new());
        let (mut lost_backends, mut lost_segments) = (Vec::new(), 0);
        for row in 0..layout.blkdev_rows {
            let at = Layout::slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows, row);
            let found = found::<BlkdevEntry>(checker, at, row);
            if let Some(found) = found.0.filter(|found| found.state.get() == STATE_ACTIVE) {
                used.hosts.insert(found.host.get());
                // Others have rows in the tables of another host.
                if found.backend_host.get() == 0 {
                    used.backends.insert(found.backend.get());
                    served.insert(found.backend.get());
                }
            }
        }
        for row in 0..layout.backend_rows {
            let (content, is_lost) = found::<BackendEntry>(
                checker,
                Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, row),
                row,
            );
            lost_backends.extend(is_lost.then_some(row));
            if let Some(content) = content.filter(|content| content.state.get() == STATE_ACTIVE) {
                used.hosts.insert(content.host.get());
                used.is_without_blkdev |= !served.contains(&row);
                caches.push((row, content.cache_id.get(), content.segments.get()));
            }
        }
        let mut counts = BTreeMap::new();
        for row in 0..layout.segment_count {
            let (content, is_lost) =
                found::<SegmentEntry>(checker, layout.segment_slots(SegmentId(row)), row);
            lost_segments += u32::from(is_lost);
            if let Some(content) = content.filter(|content| content.cache_id.get() != 0) {
                used.backends.insert(content.backend.get());
                *counts.entry((content.backend.get(), content.cache_id.get())).or_insert(0_u32) += 1;
            }
        }
        let is_short = |(row, cache, segments): &(u32, u64, u32)| {
            *cache != 0 && counts.get(&(*row, *cache)).copied().unwrap_or(0) < *segments
        };
        used.may_have_lost_cache = lost_segments >= CACHE_SEGMENTS_MIN;
        let is_used_lost = lost_backends.iter().any(|row| used.backends.contains(row));
        used.is_short_of_segments = caches.iter().any(is_short) || is_used_lost || used.may_have_lost_cache;
        used.is_without_blkdev |= is_used_lost;
        used
    }
}

/// The newest content of a row, and whether both its slots are lost.
fn found<T: SlotContent>(checker: &Checker<'_>, at: [u64; 2], row: u32) -> (Option<T>, bool) {
    let found = read_two_slots::<T>(&*checker.bytes, at, u64::from(row));
    let newest = found.newest();
    let is_lost = newest.is_none() && found.blank == [false; 2];
    (newest.map(|slot| slot.content), is_lost)
}

impl Checker<'_> {
    pub(super) fn tables(&mut self, layout: &Layout) {
        let used = Used::of(self, layout);
        self.table::<HostEntry>(
            &Table {
                slots: &|row| Layout::slots::<HostEntry>(layout.host_area, layout.host_rows, row),
                rows: layout.host_rows,
                structure: Structure::Host,
                kind: SlotKind::Host,
                noun: "host",
                if_lost: (Severity::Affected, "its host has to register again"),
                if_unused: "no backend and no block device names the row: if it was in use, its host has to register again",
            },
            &|row| used.hosts.contains(&row),
        );
        self.table::<BackendEntry>(
            &Table {
                slots: &|row| Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, row),
                rows: layout.backend_rows,
                structure: Structure::Backend,
                kind: SlotKind::Backend,
                noun: "backend",
                if_lost: (
                    Severity::Fatal,
                    "the backend cannot be opened, not by a daemon either: data that only its cache has is kept but cannot be reached",
                ),
                if_unused: "no segment and no block device names the row: it had no cache, if it was in use",
            },
            &|row| used.may_have_lost_cache || used.backends.contains(&row),
        );
        self.table::<BlkdevEntry>(
            &Table {
                slots: &|row| Layout::slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows, row),
                rows: layout.blkdev_rows,
                structure: Structure::Blkdev,
                kind: SlotKind::Blkdev,
                noun: "blkdev",
                if_lost: (
                    Severity::Affected,
                    "if the row was in use, its block device has to be started again",
                ),
                if_unused: "every backend has a block device: nothing is missing",
            },
            &|_| used.is_without_blkdev,
        );
        self.table::<SegmentEntry>(
            &Table {
                slots: &|row| layout.segment_slots(SegmentId(row)),
                rows: layout.segment_count,
                structure: Structure::SegmentEntry,
                kind: SlotKind::SegmentEntry,
                noun: "owner of segment",
                if_lost: (
                    Severity::Affected,
                    "if the segment was in use, its cache lacks it: its part of the log counts as lost",
                ),
                if_unused: "every cache has all its segments: this one was free",
            },
            &|_| used.is_short_of_segments,
        );
    }

    /// Checks a table. `is_used` returns whether a row that lost both slots was in use, according to the other rows.
    fn table<T: SlotContent>(&mut self, table: &Table<'_>, is_used: &dyn Fn(u32) -> bool) {
        for row in 0..table.rows {
            if row % 4096 == 0 {
                self.progress("tables", u64::from(row), u64::from(table.rows));
            }
            let found = read_two_slots::<T>(&*self.bytes, (table.slots)(row), u64::from(row));
            let location = if table.kind == SlotKind::SegmentEntry {
                Location { segment: Some(row), ..Location::default() }
            } else {
                Location { row: Some(row), ..Location::default() }
            };
            self.two_slots(
                &found,
                &Object {
                    structure: table.structure,
                    kind: table.kind,
                    seed: u64::from(row),
                    name: format!("{} {row}", table.noun),
                    location,
                    updated: Updated::Both,
                    if_lost: if is_used(row) {
                        table.if_lost
                    } else {
                        (Severity::Corrected, table.if_unused)
                    },
                },
            );
        }
    }
}
