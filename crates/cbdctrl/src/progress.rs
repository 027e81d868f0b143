//! The progress of what takes long, on a terminal.

use cbd_daemon::api::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Silence that needs no word.
const SILENCE: Duration = Duration::from_secs(2);

/// A line of [`waiting`] is on the terminal.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Says on a terminal that the daemon is at it, and for how long.
pub fn waiting(elapsed: Duration) {
    if elapsed >= SILENCE && std::io::stderr().is_terminal() {
        SHOWN.store(true, Ordering::Relaxed);
        eprint!("\rthe daemon is at it: {} s ", elapsed.as_secs());
    }
}

/// Takes the line of [`waiting`] away.
pub fn end_waiting() {
    if SHOWN.swap(false, Ordering::Relaxed) {
        eprint!("\r{:40}\r", "");
    }
}

/// A bar on standard error during a drain; none if that is no terminal.
#[derive(Debug, Default)]
pub struct DrainBar {
    bar: Option<ProgressBar>,
    backend_id: Option<u32>,
}

impl DrainBar {
    /// Shows how far it is.
    pub fn show(&mut self, progress: &Progress) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        if self.backend_id != Some(progress.backend_id) {
            self.end();
            self.backend_id = Some(progress.backend_id);
        }
        let total = progress.dirty_bytes_at_start.max(progress.dirty_bytes);
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template(
                "backend {prefix}: {bar:14} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} {wide_msg}",
            );
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.with_prefix(progress.backend_id.to_string())
        });
        bar.set_length(total);
        bar.set_position((total - progress.dirty_bytes).max(progress.written_bytes).min(total));
        bar.set_message(progress.error.clone().unwrap_or_default());
    }

    /// Takes the bar away.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// A bar on standard error while a tool works; nothing where that is no terminal.
#[derive(Debug, Default)]
pub struct ToolBar {
    bar: Option<ProgressBar>,
    doing: &'static str,
}

impl ToolBar {
    /// Shows how far it is.
    pub fn show(&mut self, progress: cbd_inspect::Progress) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        if self.doing != progress.doing {
            self.end();
            self.doing = progress.doing;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(progress.of), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{prefix}: {bar:30} {percent} %, {eta}") {
                bar.set_style(style);
            }
            bar.with_prefix(progress.doing)
        });
        bar.set_length(progress.of);
        bar.set_position(progress.done.min(progress.of));
    }

    /// Takes the bar away.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
