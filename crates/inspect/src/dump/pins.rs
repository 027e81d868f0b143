//! Lists of pins.

use super::{Dump, Field, Item, Sink};
use crate::check::StateLocation;
use crate::pins::{newest, read_lists};
use cbd_format::pins::{PinCopy, PinListHeader};
use std::ops::ControlFlow;

impl Dump<'_> {
    /// Both copies of each list of pins that was ever stored, and behind a valid copy its pins and their ranges. The pins of a copy
    /// that says the same as the first one are left out.
    pub(super) fn pins(&self, sink: &mut Sink<'_>) -> ControlFlow<()> {
        for (id, row) in self.backends() {
            let Some(state) = StateLocation::of(&row, self.layout) else { continue };
            let Some(lists) = read_lists(self.bytes, row.cache_id.get(), &state) else { continue };
            if lists.iter().all(|list| list.copy == PinCopy::Blank) {
                continue;
            }
            let counts = newest(&lists);
            for (number, list) in lists.iter().enumerate() {
                let item =
                    |structure| Item::new(structure).number("backend", id.0).number("copy", number as u64);
                sink(
                    item("pin_list")
                        .number("at", list.at)
                        .with("valid", Field::Bool(list.list().is_some()))
                        .with("newest", Field::Bool(counts == Some(number)))
                        .raw(&PinListHeader::layout(), &list.header),
                )?;
                let Some((_, pins)) = list.list().filter(|_| number == 0 || list.copy != lists[0].copy)
                else {
                    continue;
                };
                for (pin, position) in pins.iter().zip(0_u64..) {
                    let ranges = pin
                        .ranges
                        .iter()
                        .filter(|range| self.filter.range.is_none_or(|only| only.overlaps(range)));
                    let ranges: Vec<_> = ranges.collect();
                    if ranges.is_empty() && self.filter.range.is_some() {
                        continue;
                    }
                    sink(
                        item("pin")
                            .number("pin", position)
                            .with("kind", Field::Text(pin.kind.name().to_owned()))
                            .with("name", Field::Text(pin.text.clone()))
                            .number("ranges", pin.ranges.len() as u64)
                            .number("bytes", pin.bytes()),
                    )?;
                    for range in ranges {
                        let item = item("pinned_range").number("pin", position);
                        sink(item.number("offset", range.start).number("length", range.len()))?;
                    }
                }
            }
        }
        ControlFlow::Continue(())
    }
}
