//! Progress of long operations, on a terminal.

use cbd_daemon::api::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Waiting time after which [`waiting`] shows a line.
const SHOW_AFTER: Duration = Duration::from_secs(2);

/// Whether a line of [`waiting`] is on the terminal.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Shows on a terminal how long the command has waited for the daemon.
pub fn waiting(elapsed: Duration) {
    if elapsed >= SHOW_AFTER && std::io::stderr().is_terminal() {
        SHOWN.store(true, Ordering::Relaxed);
        eprint!("\rwaiting for the daemon: {} s ", elapsed.as_secs());
    }
}

/// Clears the line of [`waiting`].
pub fn end_waiting() {
    if SHOWN.swap(false, Ordering::Relaxed) {
        eprint!("\r{:40}\r", "");
    }
}

/// A progress bar on standard error during a drain, if standard error is a terminal.
#[derive(Debug, Default)]
pub struct DrainBar {
    bar: Option<ProgressBar>,
    backend_id: Option<u32>,
}

impl DrainBar {
    /// Updates the bar.
    pub fn show(&mut self, progress: &Progress) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        if self.backend_id != Some(progress.backend_id) {
            self.end();
            self.backend_id = Some(progress.backend_id);
        }
        let verified = progress.to_verify_bytes.zip(progress.verified_bytes);
        let (total, done) = match progress.to_give_up_bytes.zip(progress.given_up_bytes).or(verified) {
            Some((total, done)) => (total, done.min(total)),
            None => {
                let total = progress.dirty_bytes_at_start.max(progress.dirty_bytes);
                (total, (total - progress.dirty_bytes).max(progress.written_bytes).min(total))
            }
        };
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
        bar.set_position(done);
        let found = progress.found.filter(|found| *found > 0).map(|found| format!("{found} found"));
        bar.set_message(progress.error.clone().or(found).unwrap_or_default());
    }

    /// Clears the bar.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// A progress bar on standard error for offline tools, if standard error is a terminal.
#[derive(Debug, Default)]
pub struct ToolBar {
    bar: Option<ProgressBar>,
    doing: &'static str,
}

impl ToolBar {
    /// Updates the bar.
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

    /// Clears the bar.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
