//! Rows of tables: active rows and free rows.

use crate::slots::TwoSlots;
use alloc::format;
use cbd_format::{SlotContent, tables::STATE_ACTIVE};
use cbd_types::{Error, ErrorKind, Result};

pub(super) fn is_active<T>(row: Option<&T>, state: impl Fn(&T) -> u32) -> bool {
    row.is_some_and(|row| state(row) == STATE_ACTIVE)
}

pub(super) fn rows<T: SlotContent>(
    table: &[TwoSlots<T>],
    state: impl Fn(&T) -> u32 + Copy,
) -> impl Iterator<Item = (u32, &T)> {
    table.iter().enumerate().filter_map(move |(id, row)| {
        Some((id as u32, row.content().filter(|row| state(row) == STATE_ACTIVE)?))
    })
}

pub(super) fn first_free<T: SlotContent>(
    table: &[TwoSlots<T>],
    state: impl Fn(&T) -> u32 + Copy,
    what: &str,
    may_use: impl Fn(usize) -> bool,
) -> Result<usize> {
    let is_free = |row: &TwoSlots<T>| !is_active(row.content(), state) && !row.is_lost();
    let mut rows = table.iter().enumerate();
    rows.find(|(row, slots)| may_use(*row) && is_free(slots)).map(|(row, _)| row).ok_or_else(|| {
        Error::new(
            ErrorKind::NoSpace,
            format!("the {what} table of the transport is full ({} rows)", table.len()),
        )
    })
}

pub(super) fn active_row<'a, T: SlotContent>(
    table: &'a mut [TwoSlots<T>],
    row: usize,
    state: impl Fn(&T) -> u32 + Copy,
    what: &str,
) -> Result<&'a mut TwoSlots<T>> {
    table.get_mut(row).filter(|row| is_active(row.content(), state)).ok_or_else(|| no_such(what, row))
}

pub(super) fn no_such(what: &str, row: usize) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no {what} {row}"))
}
