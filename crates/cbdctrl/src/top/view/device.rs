//! A device's page: latencies, outcomes, waits, the cache and its disk, and the histogram.

use super::canvas::{Canvas, Kind};
use super::map;
use crate::top::rates::{Rates, Row, octaves};
use crate::top::state::State;
use crate::top::text::{
    byte_rate, bytes, latency, milliseconds, nanoseconds, number, percent, rate, seconds, unknown,
};
use cbd_daemon::api::{DiskFigures, Histogram, OperationFigures};
use std::collections::{BTreeMap, BTreeSet};

/// The columns of the names of operations.
const NAMES: u16 = 13;
/// The columns of the bounds in the histogram.
const BOUNDS: u16 = 12;
/// The fewest columns of one histogram.
const SERIES_MIN: u16 = 16;
/// The fewest lines of the histogram, its head included.
const HISTOGRAM_MIN: u16 = 4;
/// The lines of the histogram for which what is of less interest makes room.
const HISTOGRAM_GOOD: u16 = 9;

/// An operation of clients or of the disk.
struct Line {
    name: String,
    requests: u64,
    bytes: u64,
    failed: u64,
    latency: Histogram,
}

/// A name, a text, what it is, and whether it makes room for the histogram.
type Fact = (&'static str, String, Kind, bool);

/// Draws the page of `row`.
pub fn draw(canvas: &mut Canvas<'_>, state: &State, row: &Row) {
    let now = &row.backend.now;
    let what = match &row.device {
        Some(device) => format!("{}: {}", row.title(), device.method),
        None => format!("backend {} without a block device", now.id),
    };
    canvas.line(0, &format!("{what}, {}", row.state()), Kind::Strong);
    let lines = lines_of(row);
    let mut y = operations(canvas, 1, &state.rates, &lines);
    let mut facts = facts(state, row, canvas);
    let lines_left = |facts: &[Fact]| {
        canvas.height().saturating_sub(y + 1).saturating_sub(u16::try_from(facts.len()).unwrap_or(u16::MAX))
    };
    while lines_left(&facts) < HISTOGRAM_GOOD
        && let Some(least) = facts.iter().rposition(|fact| fact.3)
    {
        facts.remove(least);
    }
    for (name, text, kind, _) in facts {
        canvas.left(0, y, NAMES - 1, name, Kind::Strong);
        canvas.left(NAMES, y, u16::MAX, &text, kind);
        y += 1;
    }
    let rest = canvas.height().saturating_sub(y + 1);
    if rest >= HISTOGRAM_MIN {
        histogram(&mut canvas.part(y + 1, rest), &lines);
    }
}

/// The operations of clients and of the disk that are worth a line.
fn lines_of(row: &Row) -> Vec<Line> {
    let nothing = BTreeMap::new();
    let operations = row.operations.as_ref().unwrap_or(&nothing);
    let mut lines = Vec::new();
    let named =
        |name: &str| OperationFigures::clone(operations.get(name).unwrap_or(&OperationFigures::default()));
    for name in ordered(operations, |it| it.requests > 0) {
        let it = named(&name);
        lines.push(Line {
            name: shown(&name),
            requests: it.requests,
            bytes: it.bytes,
            failed: it.failed,
            latency: it.latency,
        });
    }
    let nothing = BTreeMap::new();
    let disk = row.backend.disk.as_ref().unwrap_or(&nothing);
    for name in ordered(disk, |it| it.operations > 0) {
        let DiskFigures { operations, bytes, failed, latency, .. } =
            disk.get(&name).cloned().unwrap_or_default();
        lines.push(Line {
            name: format!("disk {}", shown(&name)),
            requests: operations,
            bytes,
            failed,
            latency,
        });
    }
    lines
}

/// The name of an operation in few characters.
fn shown(name: &str) -> String {
    name.replace("write_zeroes", "zeroes").replace('_', " ")
}

/// Reads and writes, and the others with a count.
fn ordered<T>(map: &BTreeMap<String, T>, has_some: fn(&T) -> bool) -> Vec<String> {
    let first = ["read", "write", "flush"];
    let others = map.iter().filter(|(name, it)| !first.contains(&name.as_str()) && has_some(it));
    let first = first.iter().filter(|name| **name != "flush" || map.get(**name).is_some_and(has_some));
    first.map(|name| (*name).to_owned()).chain(others.map(|(name, _)| name.clone())).collect()
}

/// The table of operations from line `y` on; returns the line after it.
fn operations(canvas: &mut Canvas<'_>, mut y: u16, rates: &Rates, lines: &[Line]) -> u16 {
    const HEADS: [&str; 8] = ["req/s", "B/s", "p50", "p99", "p90", "p99.9", "mean", "failed"];
    const WIDTH: u16 = 7;
    let places = usize::from(canvas.width().saturating_sub(NAMES) / WIDTH).min(HEADS.len());
    let mut cells = |y: u16, name: &str, cells: &[String; 8], kind: Kind| {
        canvas.left(0, y, NAMES - 1, name, Kind::Strong);
        for (x, cell) in (0..).zip(&cells[..places]) {
            canvas.right(NAMES + x * WIDTH, y, WIDTH, cell, kind);
        }
    };
    let seconds = rates.seconds.map_or_else(unknown, |seconds| format!("last {seconds:.1}s"));
    cells(y, &seconds, &HEADS.map(str::to_owned), Kind::Strong);
    for line in lines {
        y += 1;
        let at = |share: f64| latency(line.latency.percentile(share));
        let per_second = |count: u64| rates.per_second(count);
        let failed = if line.failed > 0 { format!("{}!", number(line.failed)) } else { "0".to_owned() };
        let row = [
            rate(per_second(line.requests)),
            byte_rate(per_second(line.bytes)),
            at(0.5),
            at(0.99),
            at(0.9),
            at(0.999),
            latency(line.latency.mean()),
            failed,
        ];
        cells(y, &line.name, &row, if line.failed > 0 { Kind::Alarm } else { Kind::Plain });
    }
    y + 1
}

/// Everything that is a sentence.
fn facts(state: &State, row: &Row, canvas: &Canvas<'_>) -> Vec<Fact> {
    let (backend, now) = (&row.backend, &row.backend.now);
    let mut facts = Vec::new();
    for trouble in &backend.troubles {
        if !trouble.is_of_load() {
            facts.push(("ATTENTION", trouble.text.clone(), Kind::Alarm, false));
        }
    }
    for (name, title) in [("read", "reads"), ("write", "writes")] {
        if let Some(text) = row.operation(name).and_then(|it| outcomes(&it)) {
            facts.push((title, text, Kind::Plain, false));
        }
    }
    if let Some(waits) = &backend.waits {
        let each = waits.iter().map(|(name, wait)| match wait.total_ns.checked_div(wait.count) {
            Some(mean) => format!("{name} {} x {}", number(wait.count), nanoseconds(mean)),
            None => format!("{name} 0"),
        });
        facts.push(("waits", each.collect::<Vec<_>>().join(", "), Kind::Plain, false));
    }
    let time = |time: Option<u64>| time.map_or_else(unknown, seconds);
    if let Some(cache) = &now.cache {
        let dirty = now.dirty_bytes.map_or_else(unknown, bytes);
        let (target, size) = (bytes(cache.target_bytes), bytes(cache.size));
        let (empty, full) = (time(now.time_to_empty_s), time(now.time_to_full_s));
        let text = format!("{dirty}, target {target}, cache {size}; empty in {empty}, full in {full}");
        facts.push(("dirty", text, Kind::Plain, false));
        let permitted = cache
            .permitted_bytes_per_s
            .map_or_else(String::new, |permitted| format!(" of {}/s permitted", bytes(permitted)));
        let pace = bytes(cache.pace_bytes_per_s);
        facts.push(("writeback", format!("{pace}/s{permitted}: {}", cache.pace_reason), Kind::Plain, false));
        let age = now.recovery_point_age_ms.map_or_else(unknown, milliseconds);
        facts.push((
            "disk alone",
            format!("lacks the last {age}; {}", cache.recovery_point),
            Kind::Plain,
            false,
        ));
        if let Some(map) = state.map_of(row) {
            let columns = usize::from(canvas.width().saturating_sub(NAMES));
            let lines = map::lines(map, columns, canvas.looks().unicode);
            facts.extend((0..).zip(lines).map(|(at, (name, text))| (name, text, Kind::Plain, at > 0)));
        }
        let took = now.recovery_ms.map_or_else(unknown, milliseconds);
        let written = backend.region_written_bytes.and_then(|bytes| state.rates.per_second(bytes));
        let (mode, written) = (&cache.mode, byte_rate(written));
        let text = format!("{mode}; {written}/s written to the region; recovery took {took}");
        facts.push(("cache", text, Kind::Plain, true));
    } else if let Some(dirty) = now.dirty_bytes.filter(|dirty| *dirty > 0) {
        facts.push(("dirty", bytes(dirty), Kind::Plain, false));
    }
    let name = now.name.as_ref().map_or_else(String::new, |name| format!(" {name}"));
    let text = match &now.other_host {
        Some(host) => format!("{}; {} requests in flight", now.path, host.in_flight),
        None => format!("backend {}{name}: {}, {}", now.id, now.path, bytes(now.size)),
    };
    facts.push(("disk", text, Kind::Plain, true));
    if let Some(error) = row.device.as_ref().and_then(|device| device.error.as_ref()) {
        facts.push(("note", error.clone(), Kind::Plain, false));
    }
    facts
}

/// The outcomes with their shares of the bytes, the largest first; none without requests.
fn outcomes(operation: &OperationFigures) -> Option<String> {
    let mut shares: Vec<(&String, f64)> =
        operation.outcomes.keys().filter_map(|name| Some((name, operation.share_of(name)?))).collect();
    shares.retain(|(_, share)| *share > 0.0);
    shares.sort_by(|first, second| second.1.total_cmp(&first.1));
    let texts: Vec<String> =
        shares.iter().map(|(name, share)| format!("{name} {} %", percent(Some(*share)))).collect();
    (!texts.is_empty()).then(|| format!("{} of the bytes", texts.join(", ")))
}

/// The latencies of each operation by power of two, as bars.
fn histogram(canvas: &mut Canvas<'_>, lines: &[Line]) {
    let counted: Vec<(&Line, BTreeMap<u32, u64>)> = lines
        .iter()
        .filter(|line| line.latency.count > 0)
        .map(|line| (line, octaves(&line.latency)))
        .collect();
    let places = canvas.width().saturating_sub(BOUNDS) / SERIES_MIN;
    let shown = &counted[..counted.len().min(usize::from(places))];
    let all: BTreeSet<u32> = shown.iter().flat_map(|(_, counts)| counts.keys().copied()).collect();
    let (Some(first), Some(last)) = (all.first().copied(), all.last().copied()) else {
        return canvas.line(0, "no latencies in the last interval", Kind::Quiet);
    };
    let series = u16::try_from(shown.len()).unwrap_or(1).max(1);
    let width = (canvas.width() - BOUNDS) / series;
    canvas.left(0, 0, BOUNDS, "latency", Kind::Strong);
    for (place, (line, _)) in (0..series).zip(shown) {
        canvas.left(BOUNDS + place * width, 0, width - 1, &line.name, Kind::Strong);
    }
    // Several powers of two share a line if there are more of them than lines.
    let height = u32::from(canvas.height().saturating_sub(1)).max(1);
    let group = (last - first + 1).div_ceil(height).max(1);
    let groups = (last - first + 1).div_ceil(group);
    for (y, at) in (1..).zip(0..groups) {
        let from = first + at * group;
        let range = from..from + group;
        let bounds = format!("{}-{}", nanoseconds(1 << range.start), nanoseconds(1 << range.end.min(63)));
        canvas.left(0, y, BOUNDS - 1, &bounds, Kind::Plain);
        for (place, (line, counts)) in (0..series).zip(shown) {
            let of = |range: std::ops::Range<u32>| counts.range(range).map(|(_, count)| *count).sum::<u64>();
            let count = of(range.clone());
            let largest = (0..groups).map(|at| of(first + at * group..first + (at + 1) * group)).max();
            bar(canvas, BOUNDS + place * width, y, width, count, largest.unwrap_or(1), line.latency.count);
        }
    }
}

/// A bar of `count`, and its share of `all`; the largest count has the whole width.
#[expect(clippy::cast_precision_loss, reason = "a share")]
fn bar(canvas: &mut Canvas<'_>, x: u16, y: u16, width: u16, count: u64, largest: u64, all: u64) {
    /// The columns of the share.
    const SHARE: u16 = 6;
    if count == 0 {
        return;
    }
    let share = percent(Some(count as f64 / all.max(1) as f64));
    canvas.right(x, y, SHARE - 1, &share, Kind::Plain);
    let room = width.saturating_sub(SHARE + 2).max(1);
    let length = (u128::from(count) * u128::from(room)).div_ceil(u128::from(largest.max(1)));
    canvas.bar(x + SHARE, y, u16::try_from(length).unwrap_or(room).min(room));
}
