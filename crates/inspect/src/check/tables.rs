//! The tables of hosts, backends, blkdevs and segments.

use super::Checker;
use super::slots::{Object, Updated, look};
use crate::finding::{Place, Severity, SlotKind, Structure};
use cbd_format::{BackendEntry, BlkdevEntry, HostEntry, Layout, SegmentEntry, SlotContent};

/// One of the tables.
struct Table {
    area: u64,
    rows: u32,
    structure: Structure,
    kind: SlotKind,
    noun: &'static str,
    if_lost: (Severity, &'static str),
}

impl Checker<'_> {
    pub(super) fn tables(&mut self, layout: &Layout) {
        self.table::<HostEntry>(&Table {
            area: layout.host_area,
            rows: layout.host_rows,
            structure: Structure::Host,
            kind: SlotKind::Host,
            noun: "host",
            if_lost: (Severity::Affected, "if the row was in use, its host has to register again"),
        });
        self.table::<BackendEntry>(&Table {
            area: layout.backend_area,
            rows: layout.backend_rows,
            structure: Structure::Backend,
            kind: SlotKind::Backend,
            noun: "backend",
            if_lost: (
                Severity::Fatal,
                "the backend cannot be opened, by a daemon neither: what only its cache held is kept but cannot be reached",
            ),
        });
        self.table::<BlkdevEntry>(&Table {
            area: layout.blkdev_area,
            rows: layout.blkdev_rows,
            structure: Structure::Blkdev,
            kind: SlotKind::Blkdev,
            noun: "blkdev",
            if_lost: (Severity::Affected, "if the row was in use, its block device has to be started again"),
        });
        self.table::<SegmentEntry>(&Table {
            area: layout.segment_table,
            rows: layout.segment_count,
            structure: Structure::SegmentEntry,
            kind: SlotKind::SegmentEntry,
            noun: "owner of segment",
            if_lost: (
                Severity::Affected,
                "if the segment was in use, its cache lacks it: what it held of the log counts as lost",
            ),
        });
    }

    fn table<T: SlotContent>(&mut self, table: &Table) {
        for row in 0..table.rows {
            if row % 4096 == 0 {
                self.progress("tables", u64::from(row), u64::from(table.rows));
            }
            let at = Layout::slots::<T>(table.area, table.rows, row);
            let found = look::<T>(&*self.bytes, at, u64::from(row));
            let place = if table.kind == SlotKind::SegmentEntry {
                Place { segment: Some(row), ..Place::default() }
            } else {
                Place { row: Some(row), ..Place::default() }
            };
            self.two_slots(
                &found,
                &Object {
                    structure: table.structure,
                    kind: table.kind,
                    seed: u64::from(row),
                    name: format!("{} {row}", table.noun),
                    place,
                    updated: Updated::Twice,
                    if_lost: table.if_lost,
                },
            );
        }
    }
}
