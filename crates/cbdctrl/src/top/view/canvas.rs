//! A part of the page to write into.
//!
//! Invariants: nothing is written outside of the area, whatever its size and the text's; a text that is cut ends with a
//! sign that it is.

use crate::top::state::Looks;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

/// What a text is. Colours and boldness only add to what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Kind {
    /// A value.
    #[default]
    Plain,
    /// Heads and names.
    Strong,
    /// What is of less interest.
    Quiet,
    /// What needs attention.
    Alarm,
    /// A bar of a diagram.
    Bar,
    /// The first and the last line.
    Frame,
}

/// An area of the page.
pub struct Canvas<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
    looks: Looks,
}

impl<'a> Canvas<'a> {
    /// The area of `buffer`, cut to it.
    pub fn new(buffer: &'a mut Buffer, area: Rect, looks: Looks) -> Self {
        let area = area.intersection(buffer.area);
        Self { buffer, area, looks }
    }

    /// Columns.
    pub const fn width(&self) -> u16 {
        self.area.width
    }

    /// Lines.
    pub const fn height(&self) -> u16 {
        self.area.height
    }

    /// What the terminal can show.
    pub const fn looks(&self) -> Looks {
        self.looks
    }

    /// The lines from `top` on, `height` of them.
    pub fn part(&mut self, top: u16, height: u16) -> Canvas<'_> {
        let top = top.min(self.area.height);
        let height = height.min(self.area.height - top);
        let area = Rect { y: self.area.y + top, height, ..self.area };
        Canvas { buffer: self.buffer, area, looks: self.looks }
    }

    /// Writes `text` in line `y` from the left.
    pub fn line(&mut self, y: u16, text: &str, kind: Kind) {
        self.left(0, y, self.area.width, text, kind);
    }

    /// Writes `text` in line `y` from column `x` on, in `width` columns.
    pub fn left(&mut self, x: u16, y: u16, width: u16, text: &str, kind: Kind) {
        if y >= self.area.height || x >= self.area.width {
            return;
        }
        let width = width.min(self.area.width - x);
        if width == 0 {
            return;
        }
        let (left, top, style) = (self.area.x + x, self.area.y + y, self.style(kind));
        if columns(text) > usize::from(width) {
            let cut = if self.looks.unicode { "\u{2026}" } else { "~" };
            let (end, _) = self.buffer.set_stringn(left, top, text, usize::from(width - 1), style);
            self.buffer.set_stringn(end, top, cut, 1, style);
        } else {
            self.buffer.set_stringn(left, top, text, usize::from(width), style);
        }
    }

    /// Writes `text` in line `y` so that it ends with the `width` columns from `x` on.
    pub fn right(&mut self, x: u16, y: u16, width: u16, text: &str, kind: Kind) {
        let length = u16::try_from(columns(text)).unwrap_or(u16::MAX);
        let blank = width.saturating_sub(length);
        self.left(x.saturating_add(blank), y, width - blank, text, kind);
    }

    /// A line of `length` of at most `width` columns that stands for a share.
    pub fn bar(&mut self, x: u16, y: u16, length: u16) {
        let sign = if self.looks.unicode { "\u{2588}" } else { "#" };
        self.left(x, y, length, &sign.repeat(usize::from(length)), Kind::Bar);
    }

    /// Makes a whole line of one kind.
    pub fn fill(&mut self, y: u16, kind: Kind) {
        if y < self.area.height {
            let style = self.style(kind);
            self.buffer.set_style(Rect { y: self.area.y + y, height: 1, ..self.area }, style);
        }
    }

    const fn style(&self, kind: Kind) -> Style {
        let plain = Style::new();
        if !self.looks.styled {
            return plain;
        }
        match kind {
            Kind::Plain => plain,
            Kind::Strong => plain.add_modifier(Modifier::BOLD),
            Kind::Quiet => plain.fg(Color::DarkGray),
            Kind::Alarm => plain.fg(Color::Red).add_modifier(Modifier::BOLD),
            Kind::Bar => plain.fg(Color::Cyan),
            Kind::Frame => plain.add_modifier(Modifier::REVERSED),
        }
    }
}

/// The columns that a text takes.
fn columns(text: &str) -> usize {
    ratatui::text::Span::raw(text).width()
}
