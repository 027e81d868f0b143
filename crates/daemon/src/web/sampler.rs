//! The thread that takes a sample of the status every second, for the history of the page.
//!
//! Invariants: it runs only while the page is served; a status that comes late makes a gap in the history and delays
//! nothing else. A history that has samples is continued where it ended.
//!
//! Elsewhere: what is kept of a sample ([`crate::history`]).

use super::Source;
use crate::history::History;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// The running thread.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Its end tells the thread to end.
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Sampler {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system error.
    pub(super) fn start(source: Source, history: Arc<History>) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let (ending, ended) = channel();
        let sample = move || {
            let _ending = ending;
            sample(&source, &history, &stopped);
        };
        std::thread::Builder::new().name("cbd-history".to_owned()).spawn(sample)?;
        Ok(Self { stop: Some(stop), ended })
    }

    /// Tells the thread to end, and waits for it at most this long: a status may wait for a command.
    pub(super) fn end(&mut self, timeout: Duration) {
        self.stop = None;
        let _ = self.ended.recv_timeout(timeout);
    }
}

/// Takes samples until the other end of `stopped` is dropped.
fn sample(source: &Source, history: &History, stopped: &Receiver<()>) {
    let (began, before) = (Instant::now(), history.now());
    let mut due = Duration::ZERO;
    loop {
        // A daemon that is starting has no status yet.
        if let Ok(status) = source() {
            history.sample(Arc::new(status), before + began.elapsed());
        }
        // What was missed is not made up for.
        let now = began.elapsed();
        while due <= now {
            due += INTERVAL;
        }
        if stopped.recv_timeout(due - now) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}
