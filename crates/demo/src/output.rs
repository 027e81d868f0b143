//! Text, progress bars and the table, for people.
//!
//! Invariants: bars are shown on a terminal only, on standard error; with `--json` standard output has the object and
//! nothing else.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};

/// The destination and format of text.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    silent: bool,
    bars: bool,
    wrap: fn(&str) -> String,
}

impl Output {
    /// Text for people, or none with `json`; `wrap` wraps a text to the width of the terminal.
    pub fn new(json: bool, wrap: fn(&str) -> String) -> Self {
        Self { silent: json, bars: std::io::stderr().is_terminal(), wrap }
    }

    /// Prints a text.
    pub fn print(&self, text: &str) {
        if !self.silent {
            let page = (self.wrap)(&format!("{text}\n"));
            let mut out = std::io::stdout();
            // A closed pipe does not end the demonstration.
            let _ = out.write_all(page.as_bytes()).and_then(|()| out.flush());
        }
    }

    /// Prints the title of a step.
    pub fn title(&self, text: &str) {
        self.print(&format!("\n{text}"));
    }

    /// A bar from 0 to 1.
    pub fn bar(&self, text: &str) -> Bar {
        if !self.bars {
            return Bar(None);
        }
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("  {msg:36} {bar:32} {percent:>3} %") {
            bar.set_style(style);
        }
        bar.set_message(text.to_owned());
        Bar(Some(bar))
    }
}

const STEPS: u64 = 1000;

/// A progress bar; it is removed when this is dropped.
#[derive(Debug)]
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// Sets the completed share, 0 to 1.
    pub fn set(&self, share: f64) {
        if let Some(bar) = &self.0 {
            bar.set_position((share.clamp(0.0, 1.0) * STEPS as f64) as u64);
        }
    }

    /// Sets the text beside the bar.
    pub fn message(&self, text: String) {
        if let Some(bar) = &self.0 {
            bar.set_message(text);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// A number with separators between thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (12_345_678, "12,345,678")] {
            assert_eq!(grouped(number), text);
        }
    }
}
