//! The progress bar.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A progress bar on standard error, if that is a terminal.
#[derive(Debug)]
pub struct Bar(Option<ProgressBar>);

impl Bar {
    /// A bar for `total` bytes of the object `name`; none if it is not `wanted`.
    #[must_use]
    pub fn new(wanted: bool, total: u64, name: &str) -> Self {
        if !wanted || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        let template = "{prefix}: {bar:20} {bytes}/{total_bytes}, {bytes_per_sec}, {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(Some(bar.with_prefix(name.to_owned())))
    }

    /// Updates the bar.
    pub fn show(&self, done: u64) {
        if let Some(bar) = &self.0 {
            bar.set_position(done.min(bar.length().unwrap_or(done)));
        }
    }
}

/// Clears the bar.
impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = self.0.take() {
            bar.finish_and_clear();
        }
    }
}
