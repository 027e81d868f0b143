//! Drawing: what [`State`] says, as a page of any size.
//!
//! Invariants: drawing depends on nothing but the state and the size, changes nothing, and never fails. No meaning is
//! in a colour alone.
//!
//! Elsewhere: what differs from the page before is found and sent by ratatui.

mod canvas;
mod device;
mod map;
mod overview;

use super::keys;
use super::state::{Page, State};
use super::text::{milliseconds, seconds, time_of_day};
use canvas::{Canvas, Kind};
pub use overview::situation;
use ratatui::buffer::Buffer;

/// The fewest columns for a page.
pub const WIDTH_MIN: u16 = 36;
/// The fewest lines for a page.
pub const HEIGHT_MIN: u16 = 8;

/// Draws the whole page.
pub fn draw(state: &State, buffer: &mut Buffer) {
    let area = buffer.area;
    buffer.reset();
    let mut canvas = Canvas::new(buffer, area, state.looks);
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        return too_small(&mut canvas);
    }
    header(&mut canvas, state);
    let notices = notices(state);
    let shown = u16::try_from(notices.len()).unwrap_or(u16::MAX).min(area.height / 4);
    for (y, (notice, kind)) in (1..).zip(notices.iter().take(usize::from(shown))) {
        canvas.line(y, notice, *kind);
    }
    let top = 1 + shown;
    let mut body = canvas.part(top, area.height - top - 1);
    match state.page {
        Page::Overview => overview::draw(&mut body, state),
        Page::Device => match state.selected_row() {
            Some(row) => device::draw(&mut body, state, row),
            None => overview::draw(&mut body, state),
        },
        Page::Help => help(&mut body),
    }
    footer(&mut canvas, state);
}

/// Says which size is needed, in what there is.
fn too_small(canvas: &mut Canvas<'_>) {
    let width = usize::from(canvas.width().max(1));
    let (wide, high) = (canvas.width(), canvas.height());
    let long = format!("top needs {WIDTH_MIN}x{HEIGHT_MIN}, not {wide}x{high}");
    let short = format!("needs {WIDTH_MIN}x{HEIGHT_MIN}");
    let fits = |text: &str| broken(text, width).len() <= usize::from(high);
    let size = format!("{WIDTH_MIN}x{HEIGHT_MIN}");
    let text = [&long, &short].into_iter().find(|text| fits(text)).unwrap_or(&size);
    for (y, line) in (0..high).zip(broken(text, width)) {
        canvas.line(y, &line, Kind::Plain);
    }
}

/// The text in lines of `width` characters, broken at blanks, and within a word that is longer than a line.
fn broken(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let mut rest: &str = word;
        while !rest.is_empty() {
            let last = lines.last().map_or(0, |line| line.chars().count());
            let gap = usize::from(last > 0 && rest.len() == word.len());
            let length = rest.chars().count();
            if last > 0 && last + gap + length > width {
                lines.push(String::new());
                continue;
            }
            let end = rest.char_indices().nth(width).map_or(rest.len(), |(at, _)| at);
            let (head, tail) = rest.split_at(end);
            if let Some(line) = lines.last_mut() {
                line.push_str(if gap > 0 { " " } else { "" });
                line.push_str(head);
            }
            rest = tail;
        }
    }
    lines
}

fn header(canvas: &mut Canvas<'_>, state: &State) {
    let rates = &state.rates;
    let width = canvas.width();
    let pause = if state.paused { "PAUSED" } else { "every" };
    let interval = milliseconds(u64::try_from(state.interval.as_millis()).unwrap_or(u64::MAX));
    let right = format!("{pause} {interval}  {} UTC", time_of_day(rates.wall_ms));
    let left = format!("cbdd {}, process {}, up {}", rates.version, rates.pid, seconds(rates.uptime_s));
    canvas.fill(0, Kind::Frame);
    let length = u16::try_from(right.len()).unwrap_or(width).min(width);
    canvas.left(0, 0, width.saturating_sub(length + 1), &left, Kind::Frame);
    canvas.right(width - length, 0, length, &right, Kind::Frame);
}

/// What stands above the figures: the daemon is away, or is of another version.
fn notices(state: &State) -> Vec<(String, Kind)> {
    let rates = &state.rates;
    let mut notices = Vec::new();
    if let Some(away) = &state.away {
        let since = state.now.saturating_sub(away.since).as_secs();
        let last = time_of_day(rates.wall_ms);
        let text = format!("daemon away for {since} s, last figures of {last}: {}", away.why);
        notices.push((text, Kind::Alarm));
    } else if rates.restarted {
        notices.push(("the daemon was started again: rates follow".to_owned(), Kind::Strong));
    } else if rates.seconds.is_none() {
        notices.push(("first sample: rates follow".to_owned(), Kind::Quiet));
    }
    notices.extend(rates.notes.iter().map(|note| (note.clone(), Kind::Strong)));
    notices
}

fn footer(canvas: &mut Canvas<'_>, state: &State) {
    let Some(y) = canvas.height().checked_sub(1) else { return };
    let pause = if state.paused { "continue" } else { "pause" };
    let text = match state.page {
        Page::Overview => {
            format!("q end  ? keys  Enter device  s order: {}  p {pause}  +- interval", state.sort.name())
        }
        Page::Device => format!("q end  ? keys  Esc back  jk other device  p {pause}  +- interval"),
        Page::Help => "q end  Esc back".to_owned(),
    };
    canvas.fill(y, Kind::Frame);
    canvas.line(y, &text, Kind::Frame);
}

/// What the keys do, and what the figures are.
fn help(canvas: &mut Canvas<'_>) {
    const FIGURES: [&str; 9] = [
        "Rates and latencies are those of the last interval; - is not known.",
        "HIT%: bytes read that came from the cache; a scan past it counts.",
        "DIRTY: bytes that the disk lacks; TARGET: what writeback leaves.",
        "AGE: how much of the past the disk alone lacks.",
        "space, lane, flush 3 x 2ms: requests waited 3 times, 2 ms on average.",
        "A row with ! needs attention. K, M, G of bytes are powers of 1024.",
        "PARKED: the disk refuses it. QUARANTINED: lost. STALLED: writes fail.",
        "VOID: the disk alone is not crash-consistent now.",
        "map: from the first byte to the last; read: since it was cached.",
    ];
    let mut y = 0;
    for (key, what) in keys::HELP {
        canvas.left(0, y, 14, key, Kind::Strong);
        canvas.left(15, y, u16::MAX, what, Kind::Plain);
        y += 1;
    }
    let width = usize::from(canvas.width());
    for line in FIGURES.iter().flat_map(|text| broken(text, width)) {
        canvas.line(y + 1, &line, Kind::Plain);
        y += 1;
    }
}
