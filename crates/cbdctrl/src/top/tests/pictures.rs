//! The pictures in the documentation are what `top` draws: this test draws them, and compares the checked-in files.
//!
//! After a change of a page: `CBD_PICTURES=write cargo test -p cbdctrl pictures`.

use super::scene::{buffer, events, map, state};
use crate::top::state::{Action, State};
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};
use std::fmt::Write;
use std::path::Path;

/// The columns of a character in pixels.
const WIDE: usize = 8;
/// The lines of a character in pixels.
const HIGH: usize = 17;
/// The margin in pixels.
const MARGIN: usize = 8;
const INK: &str = "#d8dee9";
const PAPER: &str = "#1c1f26";

/// A page as an image.
fn svg(buffer: &Buffer) -> String {
    let (columns, lines) = (usize::from(buffer.area.width), usize::from(buffer.area.height));
    let (width, height) = (columns * WIDE + 2 * MARGIN, lines * HIGH + 2 * MARGIN);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"DejaVu Sans Mono, Consolas, monospace\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"{PAPER}\"/>\n"
    );
    for (y, line) in buffer.content().chunks(columns).enumerate() {
        let mut x = 0;
        for run in line.chunk_by(|first, second| first.style() == second.style()) {
            add_run(&mut text, x, y, run);
            x += run.len();
        }
    }
    text.push_str("</svg>\n");
    text
}

/// Adds characters of one style.
fn add_run(text: &mut String, x: usize, y: usize, run: &[Cell]) {
    let symbols: String = run.iter().map(Cell::symbol).collect();
    let style = run[0].style();
    let modifier = style.add_modifier;
    let mut ink = match style.fg {
        Some(Color::DarkGray) => "#8a93a3",
        Some(Color::Red) => "#ff7b72",
        Some(Color::Cyan) => "#56b6c2",
        _ => INK,
    };
    let (left, top) = (MARGIN + x * WIDE, MARGIN + y * HIGH);
    if modifier.contains(Modifier::REVERSED) {
        let width = run.len() * WIDE;
        let _ = writeln!(
            text,
            "<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{HIGH}\" fill=\"{INK}\"/>"
        );
        ink = PAPER;
    }
    let weight = if modifier.contains(Modifier::BOLD) { " font-weight=\"bold\"" } else { "" };
    // Each word has a place of its own, whatever font there is.
    let mut at = 0;
    for word in symbols.split(' ') {
        if !word.is_empty() {
            let (left, base) = (left + at * WIDE, top + 13);
            let length = word.chars().count() * WIDE;
            let word = word.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            let _ = writeln!(
                text,
                "<text x=\"{left}\" y=\"{base}\" textLength=\"{length}\" lengthAdjust=\"spacingAndGlyphs\" fill=\"{ink}\"{weight}>{word}</text>"
            );
        }
        at += word.chars().count() + 1;
    }
}

#[test]
fn the_checked_in_pictures_are_what_is_drawn() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    let mut overview: State = state();
    overview.events = Some(events());
    let mut device = overview.clone();
    device.apply(Action::Enter);
    device.map = Some(map());
    let pictures = [
        ("top-80x24.svg", &overview, 80, 24),
        ("top-120x40.svg", &device, 120, 40),
        ("top-200x60.svg", &overview, 200, 60),
    ];
    let writes = std::env::var_os("CBD_PICTURES").is_some_and(|wish| wish == "write");
    for (name, state, width, height) in pictures {
        let picture = svg(&buffer(state, width, height));
        let file = folder.join(name);
        if writes {
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&file, &picture)).expect("written");
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            kept == picture,
            "docs/pictures/{name} differs; draw it again with CBD_PICTURES=write cargo test -p cbdctrl pictures"
        );
    }
}
