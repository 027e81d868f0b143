//! Signals that end a verification.
//!
//! Invariants: the first signal ends it cleanly, with a report; a second one ends the process at once, which matters when a disk
//! does not answer.

use crate::cbd::News;
use cbd_sys::process::Signals;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Tells of a signal.
#[derive(Clone, Default, Debug)]
pub struct Interrupt {
    stop: Arc<AtomicBool>,
    listener: Arc<Mutex<Option<Sender<News>>>>,
}

impl Interrupt {
    /// Waits for signals in a thread of its own. Called before any other thread is started, since threads inherit what is blocked.
    #[must_use]
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let signals = Signals::of(&[libc::SIGINT, libc::SIGTERM]);
        signals.block();
        let told = interrupt.clone();
        let work = move || {
            let signals = Signals::of(&[libc::SIGINT, libc::SIGTERM]);
            let _ = signals.wait();
            told.stop.store(true, Ordering::Relaxed);
            if let Some(listener) = &*told.listener.lock().unwrap_or_else(PoisonError::into_inner) {
                let _ = listener.send(News::Stop);
            }
            // The next one has its default action.
            signals.unblock();
            loop {
                std::thread::park();
            }
        };
        if std::thread::Builder::new().name("blkverify-signal".to_owned()).spawn(work).is_err() {
            signals.unblock();
        }
        interrupt
    }

    /// Set by a signal.
    #[must_use]
    pub fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    /// Whether there was a signal.
    #[must_use]
    pub fn has_come(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Has a signal sent to `listener` too.
    pub fn tell(&self, listener: &Sender<News>) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(listener.clone());
        if self.has_come() {
            let _ = listener.send(News::Stop);
        }
    }
}
