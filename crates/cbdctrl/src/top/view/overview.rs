//! The overview: a row for each block device, and below it regions, warnings and events.

use super::canvas::{Canvas, Kind};
use super::device;
use crate::top::rates::{Rates, Row, Trouble};
use crate::top::sample::Region;
use crate::top::state::State;
use crate::top::text::{byte_rate, bytes, latency, milliseconds, percent, rate, unknown};

/// From this width on a row has two lines, in which everything is.
const MEDIUM: u16 = 76;
/// From this width on everything is in one line.
const WIDE: u16 = 150;
/// The lines from which on a selected device is shown below the rows.
const DETAILS_MIN: u16 = 14;
/// The columns before the name.
const MARKS: u16 = 2;

/// A column of the table.
struct Column {
    head: &'static str,
    width: u16,
    cell: fn(&Rates, &Row) -> String,
}

const READ_BYTES: Column =
    Column { head: "READ/s", width: 7, cell: |rates, row| byte_rate_of(rates, row, "read") };
const READ_REQUESTS: Column =
    Column { head: "req/s", width: 6, cell: |rates, row| rate_of(rates, row, "read") };
const READ_LATENCY: Column = Column { head: "p50/p99", width: 13, cell: |_, row| latencies(row, "read") };
const WRITE_BYTES: Column =
    Column { head: "WRITE/s", width: 8, cell: |rates, row| byte_rate_of(rates, row, "write") };
const WRITE_REQUESTS: Column =
    Column { head: "req/s", width: 6, cell: |rates, row| rate_of(rates, row, "write") };
const WRITE_LATENCY: Column = Column { head: "p50/p99", width: 13, cell: |_, row| latencies(row, "write") };
const HIT: Column = Column { head: "HIT%", width: 6, cell: |_, row| percent(row.hit_ratio()) };
const DIRTY: Column = Column { head: "DIRTY", width: 7, cell: |_, row| dirty(row) };
const TARGET: Column = Column { head: "TARGET", width: 7, cell: |_, row| target(row) };
const AGE: Column = Column { head: "AGE", width: 7, cell: |_, row| age(row) };

const NARROW_COLUMNS: [&Column; 4] = [&READ_BYTES, &WRITE_BYTES, &HIT, &DIRTY];
const MEDIUM_COLUMNS: [&Column; 7] =
    [&READ_BYTES, &READ_REQUESTS, &READ_LATENCY, &WRITE_BYTES, &WRITE_REQUESTS, &WRITE_LATENCY, &HIT];
const WIDE_COLUMNS: [&Column; 10] = [
    &READ_BYTES,
    &READ_REQUESTS,
    &READ_LATENCY,
    &WRITE_BYTES,
    &WRITE_REQUESTS,
    &WRITE_LATENCY,
    &HIT,
    &DIRTY,
    &TARGET,
    &AGE,
];

/// How the table is laid out.
struct Layout {
    columns: &'static [&'static Column],
    name_width: u16,
    /// Whether the state is in a line of its own.
    is_second_line: bool,
    /// Where the state begins in the first line.
    tail: Option<u16>,
}

impl Layout {
    fn of(width: u16) -> Self {
        let columns: &[&Column] = match width {
            WIDE.. => &WIDE_COLUMNS,
            MEDIUM.. => &MEDIUM_COLUMNS,
            _ => &NARROW_COLUMNS,
        };
        let taken: u16 = columns.iter().map(|column| column.width).sum();
        let name_width = if width >= WIDE { 26 } else { width.saturating_sub(MARKS + taken) };
        let tail = (width >= WIDE).then_some(MARKS + name_width + taken + 2);
        Self { columns, name_width, is_second_line: (MEDIUM..WIDE).contains(&width), tail }
    }

    const fn lines_of_row(&self) -> u16 {
        if self.is_second_line { 2 } else { 1 }
    }
}

/// Draws the overview.
pub fn draw(canvas: &mut Canvas<'_>, state: &State) {
    let layout = Layout::of(canvas.width());
    let rows = state.rows();
    if rows.is_empty() {
        let text = "no backends; start one: cbdctrl backend-start --path DISK --cache-size SIZE --start-dev";
        canvas.line(1, text, Kind::Plain);
    }
    let below = below(state);
    let height = canvas.height();
    let lines = layout.lines_of_row();
    let wanted = u16::try_from(rows.len().max(1)).unwrap_or(u16::MAX).saturating_mul(lines);
    let below_wanted = u16::try_from(below.len()).unwrap_or(u16::MAX);
    // The head, the rows, a blank line, and what is below; of both at least a part.
    let free = height.saturating_sub(2);
    let at_least = (free * 2 / 3).max(lines).min(wanted);
    let for_rows = wanted.min(free.saturating_sub(below_wanted)).max(at_least);
    let for_below = below_wanted.min(free.saturating_sub(for_rows));
    head(&mut canvas.part(0, 1), &layout);
    table(&mut canvas.part(1, for_rows), state, &rows, &layout);
    let mut y = 1 + for_rows;
    let spare = height.saturating_sub(y + for_below + 2);
    if let Some(row) = state.selected_row().filter(|_| spare >= DETAILS_MIN) {
        device::draw(&mut canvas.part(y + 1, spare), state, row);
        y += spare + 1;
    }
    for (at, (text, kind)) in (0..for_below).zip(below) {
        canvas.line(y + 1 + at, &text, kind);
    }
}

fn head(canvas: &mut Canvas<'_>, layout: &Layout) {
    canvas.left(MARKS, 0, layout.name_width, "DEVICE", Kind::Strong);
    let mut x = MARKS + layout.name_width;
    for column in layout.columns {
        canvas.right(x, 0, column.width, column.head, Kind::Strong);
        x += column.width;
    }
    if let Some(tail) = layout.tail {
        canvas.left(tail, 0, u16::MAX, "STATE", Kind::Strong);
    }
}

/// The rows, moved so that the selected one is visible.
fn table(canvas: &mut Canvas<'_>, state: &State, rows: &[&Row], layout: &Layout) {
    let visible = usize::from(canvas.height() / layout.lines_of_row()).max(1);
    let selected = rows.iter().position(|row| Some(row.key) == state.selected).unwrap_or(0);
    let first = selected.saturating_sub(visible / 2).min(rows.len().saturating_sub(visible));
    for (place, row) in (0..).zip(rows.iter().skip(first).take(visible)) {
        let y = place * layout.lines_of_row();
        draw_row(canvas, y, state, row, layout);
    }
    let rest = rows.len() - (first + visible).min(rows.len());
    if rest > 0 && selected + 1 != first + visible {
        // In the marks of the last row: there is no line to spare.
        let y = canvas.height().saturating_sub(1);
        canvas.left(0, y, 1, if canvas.looks().unicode { "\u{2193}" } else { "v" }, Kind::Strong);
    }
}

fn draw_row(canvas: &mut Canvas<'_>, y: u16, state: &State, row: &Row, layout: &Layout) {
    let is_selected = Some(row.key) == state.selected;
    let kind = if needs_attention(row) { Kind::Alarm } else { Kind::Plain };
    canvas.left(0, y, 1, if is_selected { ">" } else { " " }, Kind::Strong);
    canvas.left(1, y, 1, if kind == Kind::Alarm { "!" } else { " " }, kind);
    let name = if layout.name_width >= 24 { row.title() } else { row.short_name() };
    let name_kind = if is_selected { Kind::Strong } else { Kind::Plain };
    canvas.left(MARKS, y, layout.name_width, &name, name_kind);
    let mut x = MARKS + layout.name_width;
    for column in layout.columns {
        canvas.right(x, y, column.width, &(column.cell)(&state.rates, row), Kind::Plain);
        x += column.width;
    }
    if let Some(tail) = layout.tail {
        canvas.left(tail, y, u16::MAX, &situation(row, true), kind);
    }
    if layout.is_second_line {
        canvas.left(4, y + 1, u16::MAX, &situation(row, false), kind);
    }
}

/// Whether a row has more than waits that come with load.
fn needs_attention(row: &Row) -> bool {
    let is_down = row.device.as_ref().is_some_and(|device| !device.alive);
    is_down || row.backend.troubles.iter().any(|trouble| !trouble.is_of_load())
}

/// The state, what needs attention, what writeback does, and what requests waited for; what is in other columns is left
/// out.
pub fn situation(row: &Row, is_wide: bool) -> String {
    let backend = &row.backend.now;
    let mut parts = vec![row.state()];
    let (of_load, severe): (Vec<&Trouble>, Vec<&Trouble>) =
        row.backend.troubles.iter().partition(|trouble| trouble.is_of_load());
    parts.extend(severe.iter().map(|trouble| trouble.text.clone()));
    match (&backend.cache, backend.dirty_bytes) {
        (Some(cache), _) => {
            if !is_wide {
                parts.push(format!("dirty {} of {}", dirty(row), bytes(cache.target_bytes)));
                parts.push(format!("age {}", age(row)));
            }
            parts.push(format!("writeback {}/s: {}", bytes(cache.pace_bytes_per_s), cache.pace_reason));
        }
        (None, Some(dirty)) if !is_wide && dirty > 0 => parts.push(format!("dirty {}", bytes(dirty))),
        (None, None) if backend.alive && backend.other_host.is_none() => parts.push("no cache".to_owned()),
        _ => {}
    }
    if !of_load.is_empty() {
        let waits: Vec<&str> = of_load.iter().map(|trouble| trouble.text.as_str()).collect();
        parts.push(format!("waits: {}", waits.join(", ")));
    }
    if let Some(device) = &row.device {
        let error = device.error.as_ref().map_or_else(String::new, |error| format!(" ({error})"));
        parts.push(format!("{}{error}", device.method));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(if is_wide { " | " } else { ", " })
}

fn byte_rate_of(rates: &Rates, row: &Row, name: &str) -> String {
    byte_rate(row.operation(name).and_then(|it| rates.per_second(it.bytes)))
}

fn rate_of(rates: &Rates, row: &Row, name: &str) -> String {
    rate(row.operation(name).and_then(|it| rates.per_second(it.requests)))
}

fn latencies(row: &Row, name: &str) -> String {
    match row.operation(name).filter(|it| it.latency.count > 0) {
        Some(it) => {
            format!("{}/{}", latency(it.latency.percentile(0.5)), latency(it.latency.percentile(0.99)))
        }
        None => unknown(),
    }
}

fn dirty(row: &Row) -> String {
    row.backend.now.dirty_bytes.map_or_else(unknown, bytes)
}

fn target(row: &Row) -> String {
    row.backend.now.cache.as_ref().map_or_else(unknown, |cache| bytes(cache.target_bytes))
}

fn age(row: &Row) -> String {
    row.backend.now.recovery_point_age_ms.map_or_else(unknown, milliseconds)
}

/// Regions, warnings and the last events.
fn below(state: &State) -> Vec<(String, Kind)> {
    /// The most warnings that are shown.
    const WARNINGS_MAX: usize = 5;
    let mut lines: Vec<(String, Kind)> = state.rates.regions.iter().map(region).collect();
    let warnings = &state.rates.warnings;
    lines.extend(warnings.iter().take(WARNINGS_MAX).map(|text| (format!("warning: {text}"), Kind::Alarm)));
    if let Some(more) = warnings.len().checked_sub(WARNINGS_MAX).filter(|more| *more > 0) {
        lines.push((format!("and {more} more warnings (cbdctrl status)"), Kind::Alarm));
    }
    if let Some(events) = state.events.as_ref().filter(|events| !events.is_empty()) {
        lines.push(("EVENTS, the newest first".to_owned(), Kind::Strong));
        lines.extend(events.iter().rev().map(|event| (event.clone(), Kind::Plain)));
    }
    lines
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn region(region: &Region) -> (String, Kind) {
    let Region { transport, path, alive, size, free_bytes, durability, error } = region;
    if !alive {
        let why = error.as_deref().unwrap_or("not mapped");
        return (format!("region {transport} {path}: NOT MAPPED: {why}"), Kind::Alarm);
    }
    let share = percent((*size > 0).then(|| *free_bytes as f64 / *size as f64));
    let free = bytes(*free_bytes);
    (
        format!("region {transport}: {}, {free} free ({share} %), {durability}, {path}", bytes(*size)),
        Kind::Quiet,
    )
}
