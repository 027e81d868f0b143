//! The names in the tables of backends and blkdevs: each is valid, and leads to one device.
//!
//! Elsewhere: the same rules where a name is given (`cbd-engine`).

use super::Checker;
use super::slots::read_two_slots;
use crate::finding::{Location, Severity, Structure};
use cbd_format::{
    BackendEntry, BlkdevEntry, Layout,
    tables::{NAME_BYTES, NO_BACKEND, STATE_ACTIVE, decode_name},
};
use cbd_types::Name;
use std::collections::BTreeMap;

/// An active row with a field for a name.
struct Row {
    structure: Structure,
    noun: &'static str,
    row: u32,
    /// The backend that it is, or whose name it may have.
    backend: u32,
    at: u64,
    name: [u8; NAME_BYTES],
}

impl Checker<'_> {
    pub(super) fn names(&mut self, layout: &Layout) {
        let mut owners: BTreeMap<Name, Vec<Row>> = BTreeMap::new();
        for row in self.rows_with_names(layout) {
            match decode_name(&row.name) {
                Ok(None) => {}
                Ok(Some(name)) => owners.entry(name).or_default().push(row),
                Err(error) => {
                    let what = format!("{} {}: {}", row.noun, row.row, error.line());
                    self.name_finding(&row, what, "it is used as if it had no name");
                }
            }
        }
        for (name, rows) in owners {
            let mut rows = rows.into_iter();
            let Some(first) = rows.next() else { continue };
            for row in rows.filter(|row| row.backend != first.backend || row.noun == first.noun) {
                let what = format!(
                    "{} {} has the name {name}, which {} {} has too",
                    row.noun, row.row, first.noun, first.row
                );
                self.name_finding(&row, what, "a command with this name is refused");
            }
        }
    }

    fn name_finding(&mut self, row: &Row, what: String, cost: &str) {
        let length = NAME_BYTES as u64;
        let location =
            Location { at: Some(row.at), length: Some(length), row: Some(row.row), ..Location::default() };
        let option = if row.structure == Structure::Backend { "-b" } else { "-d" };
        let advice = format!("give it another name: cbdctrl set {option} {} name=NAME", row.row);
        self.add(Severity::Corrected, row.structure, location, what, cost, advice, None);
    }

    fn rows_with_names(&self, layout: &Layout) -> Vec<Row> {
        let mut found = Vec::new();
        let mut uuids = BTreeMap::new();
        for row in 0..layout.backend_rows {
            let at = Layout::slots::<BackendEntry>(layout.backend_area, layout.backend_rows, row);
            let slots = read_two_slots::<BackendEntry>(&*self.bytes, at, u64::from(row));
            let Some(slot) = slots.newest().filter(|slot| slot.content.state.get() == STATE_ACTIVE) else {
                continue;
            };
            uuids.insert(row, slot.content.uuid);
            let name = slot.content.name;
            found.push(Row {
                structure: Structure::Backend,
                noun: "backend",
                row,
                backend: row,
                at: at[0],
                name,
            });
        }
        for row in 0..layout.blkdev_rows {
            let at = Layout::slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows, row);
            let slots = read_two_slots::<BlkdevEntry>(&*self.bytes, at, u64::from(row));
            let Some(slot) = slots.newest().filter(|slot| slot.content.state.get() == STATE_ACTIVE) else {
                continue;
            };
            let backend = slot.content.backend.get();
            if uuids.get(&backend) != Some(&slot.content.backend_uuid) {
                continue;
            }
            let (name, is_further) = (slot.content.name, slot.content.further.get() != 0);
            let backend = if is_further { NO_BACKEND } else { backend };
            found.push(Row { structure: Structure::Blkdev, noun: "blkdev", row, backend, at: at[0], name });
        }
        found
    }
}
