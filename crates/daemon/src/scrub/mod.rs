//! The scrub of a backend: a verification of its whole device in the background.
//!
//! A pass has a thread while it looks at the device, and none while it is paused or waits for its window, for the backend, or for a
//! command that changes the backend. The manager starts the threads.
//!
//! Invariants: a backend has one pass at most. The file of a scrub is written when a command changes it, when a pass ends, and every
//! `SAVE_INTERVAL` at most while it runs. A thread that is told to end cancels its requests and does so without waiting for their
//! results; what they would have found is found by the next thread.
//!
//! Elsewhere: how a range is verified (`cbd-device`, `cbd_runtime::verify`), which threads run (`manager::scrubs`).

pub mod gather;
mod pass;
mod record;
pub mod schedule;
#[cfg(test)]
mod tests;

use crate::api::{
    ScrubInfo, ScrubPass, ScrubRequest, ScrubSettings, ScrubState, SettingsChange, VerifyLevel,
};
use crate::events::EventName;
use crate::size::format_time;
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
pub use pass::Surroundings;
use record::{Pass, Record, RecordFile};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time between two writes of the file of a pass that runs.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);

/// How long a pass that failed waits before it continues.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// The scrub of one backend.
#[derive(Debug)]
pub struct Scrub {
    /// Number of the transport and of the backend.
    place: (u32, u32),
    uuid: String,
    file: RecordFile,
    state: Mutex<State>,
    /// Held while the file is written, so that an older record does not replace a newer one.
    saving: Mutex<()>,
    /// Notified at each change of the state.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    record: Record,
    /// Whether a thread has the pass.
    has_thread: bool,
    /// Whether that thread waits for idle clients.
    waits_for_load: bool,
    /// Whether that thread leaves the disk to clients.
    is_beside_clients: bool,
    /// Commands that change the backend: no thread has the pass meanwhile.
    holders: u32,
    /// No thread has the pass any more: the daemon ends, or the backend is removed.
    is_ended: bool,
    /// The backend was removed, and with it the file.
    is_removed: bool,
    /// Bytes a second at present.
    bytes_per_s: u64,
    /// When the file was written last.
    saved: Option<Instant>,
    /// When a pass that failed is continued.
    retry: Option<Instant>,
    /// Why the pass does not go on.
    failure: Option<String>,
    /// Why the file could not be written.
    file_error: Option<String>,
    /// What was lost with the file, until a user sets the settings again.
    lost: Option<String>,
    /// The number of the pass, which tells one from the next.
    number: u64,
    /// The number of the pass whose results are the last ones, if it ended since the daemon started.
    last_number: Option<u64>,
    /// Findings of the pass that were logged.
    logged: usize,
}

/// As long as it lives, no thread has the pass.
#[derive(Debug)]
pub struct Held(Arc<Scrub>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state.lock().holders -= 1;
        self.0.changed.notify_all();
    }
}

/// The permission to be the thread of a pass.
#[derive(Debug)]
pub struct Turn(Arc<Scrub>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.save();
        let mut state = self.0.state.lock();
        (state.has_thread, state.waits_for_load, state.bytes_per_s) = (false, false, 0);
        state.is_beside_clients = false;
        drop(state);
        self.0.changed.notify_all();
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// The settings in the file of the backend `uuid`; the defaults if it cannot be read, which [`Scrub::open`] reports.
#[must_use]
pub fn settings_of(state_dir: &Path, uuid: &str) -> ScrubSettings {
    RecordFile::of(state_dir, uuid).read().0.settings
}

impl Scrub {
    /// The scrub of the backend `uuid`, as its file in the state folder has it.
    #[must_use]
    pub fn open(state_dir: &Path, place: (u32, u32), uuid: String) -> Self {
        let file = RecordFile::of(state_dir, &uuid);
        let (record, lost) = file.read();
        if let Some(pass) = &record.pass {
            let (at, words) = (pass.position, if pass.is_paused { ", paused" } else { "" });
            tracing::info!(transport = place.0, backend = place.1, "its scrub is at byte {at}{words}");
        }
        if let Some(why) = &lost {
            tracing::warn!(transport = place.0, backend = place.1, "{why}");
        }
        let state = State { record, lost, ..State::default() };
        Self { place, uuid, file, state: Mutex::new(state), saving: Mutex::new(()), changed: Condvar::new() }
    }

    /// The UUID of its backend.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Writes the file. Without the lock of the state meanwhile, since a status waits for that.
    fn save(&self) {
        let _in_order = self.saving.lock();
        let record = {
            let mut state = self.state.lock();
            if state.is_removed {
                return;
            }
            state.saved = Some(Instant::now());
            state.record.clone()
        };
        let written = self.file.write(&record);
        let mut state = self.state.lock();
        let Err(why) = written else {
            state.file_error = None;
            return;
        };
        if state.file_error.as_ref() != Some(&why) {
            tracing::warn!(transport = self.place.0, backend = self.place.1, "{why}");
            state.file_error = Some(why);
        }
    }

    /// Its settings.
    #[must_use]
    pub fn settings(&self) -> ScrubSettings {
        self.state.lock().record.settings.clone()
    }

    /// Why its file could not be written, the last time.
    #[must_use]
    pub fn file_error(&self) -> Option<String> {
        self.state.lock().file_error.clone()
    }

    /// Its state, for a device of `size` bytes.
    #[must_use]
    pub fn info(&self, size: u64, now: u64) -> ScrubInfo {
        let state = self.state.lock();
        let Record { settings, pass, last, found_total, repaired_total, verified_bytes_total, .. } =
            &state.record;
        let metadata_repaired_total = state.record.metadata_repaired_total;
        let position = pass.as_ref().map_or(0, |pass| pass.position.min(size));
        let percent = if size == 0 { 0 } else { u128::from(position) * 100 / u128::from(size) };
        let next = match pass {
            Some(_) => None,
            None => settings.next(state.record.last_began(), now),
        };
        ScrubInfo {
            backend_id: self.place.1,
            state: state.words_for(now),
            position,
            size,
            percent: u32::try_from(percent).unwrap_or(100),
            bytes_per_s: state.bytes_per_s,
            rate: pass.as_ref().and_then(|pass| pass.rate).unwrap_or(settings.scrub_rate),
            level: pass.as_ref().map_or(VerifyLevel::Agree, |pass| pass.level),
            repair: pass.as_ref().is_some_and(|pass| pass.repair),
            began: pass.as_ref().map(|pass| pass.began),
            results: pass.as_ref().map(|pass| pass.results.info.clone()),
            last: last.clone(),
            next,
            method: None,
            settings: settings.clone(),
            found_total: found_total.clone(),
            repaired_total: *repaired_total,
            verified_bytes_total: *verified_bytes_total,
            metadata_repaired_total,
            error: state.failure.as_ref().or(state.file_error.as_ref()).or(state.lost.as_ref()).cloned(),
        }
    }

    /// Whether status has something to show of it.
    #[must_use]
    pub fn is_used(&self) -> bool {
        let state = self.state.lock();
        state.record != Record::default() || state.file_error.is_some() || state.lost.is_some()
    }

    /// Begins, pauses, continues or stops a pass; returns its number.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] for a start while there is a pass, [`ErrorKind::InvalidArgument`] for a rate that is too low,
    /// [`ErrorKind::NotFound`] for the other actions if there is no pass.
    pub fn change(&self, request: &ScrubRequest, size: u64, now: u64) -> Result<u64> {
        use crate::api::ScrubAction::{Pause, Resume, Start, Stop};
        if request.action != Start && (request.rate.is_some() || request.repair || request.level.is_some()) {
            return Err(invalid("a rate, a level and a repair are of the start of a scrub".to_owned()));
        }
        let id = self.place.1;
        let mut state = self.state.lock();
        match (request.action, state.record.pass.is_some()) {
            (Start, true) => {
                drop(state);
                return Err(self.runs_already(size, now));
            }
            (Start, false) => {
                request.rate.map_or(Ok(()), schedule::check_rate)?;
                let pass = Pass {
                    began: now,
                    level: request.level.unwrap_or(VerifyLevel::Agree),
                    repair: request.repair,
                    rate: request.rate,
                    ..Pass::default()
                };
                self.begin(&mut state, pass);
            }
            (_, false) => {
                let text = format!("there is no scrub of backend {id}: cbdctrl scrub -b {id} starts one");
                return Err(Error::new(ErrorKind::NotFound, text));
            }
            (Stop, true) => {
                let at = state.record.pass.take().map_or(0, |pass| pass.position);
                let event = EventName::ScrubEnded.name();
                let transport = self.place.0;
                tracing::info!(transport, backend = id, event, at, "its scrub was stopped at byte {at}");
                state.record.stopped = Some(now);
            }
            (Pause | Resume, true) => {
                let is_paused = request.action == Pause;
                if let Some(pass) = &mut state.record.pass {
                    pass.is_paused = is_paused;
                    let (words, at) = (if is_paused { "is paused" } else { "goes on" }, pass.position);
                    let event = if is_paused { EventName::ScrubEnded } else { EventName::ScrubStarted };
                    let (event, transport) = (event.name(), self.place.0);
                    tracing::info!(transport, backend = id, event, at, "its scrub {words} at byte {at}");
                }
                // A user who resumes does not wait for the next attempt.
                state.retry = None;
            }
        }
        let number = state.number;
        drop(state);
        self.changed.notify_all();
        self.save();
        Ok(number)
    }

    fn begin(&self, state: &mut State, pass: Pass) {
        let words = if pass.is_scheduled { "by its schedule" } else { "at a user's command" };
        let ((transport, backend), event) = (self.place, EventName::ScrubStarted.name());
        tracing::info!(transport, backend, event, "its scrub begins {words}");
        (state.failure, state.retry, state.logged) = (None, None, 0);
        state.number += 1;
        state.record.pass = Some(pass);
    }

    fn runs_already(&self, size: u64, now: u64) -> Error {
        let info = self.info(size, now);
        let id = self.place.1;
        let text = format!(
            "backend {id} has a scrub that began {} and is {}, at {} %: wait for it, or stop it with cbdctrl scrub -b {id} --stop",
            format_time(info.began.unwrap_or_default() * 1000),
            info.state.words(),
            info.percent
        );
        Error::new(ErrorKind::Busy, text)
    }

    /// Changes the settings, which a running pass takes at once.
    pub fn set(&self, change: &SettingsChange) {
        let mut state = self.state.lock();
        state.record.settings.apply(change);
        state.lost = None;
        let settings = crate::settings::typed_scrub(&state.record.settings);
        drop(state);
        tracing::info!(transport = self.place.0, backend = self.place.1, "settings of its scrub: {settings}");
        self.changed.notify_all();
        self.save();
    }

    /// Begins a pass if the schedule has one for `now`; then takes the turn for a thread, if there is a pass that can go on and no
    /// thread has it.
    #[must_use]
    pub fn take_turn(self: &Arc<Self>, now: u64) -> Option<Turn> {
        let mut state = self.state.lock();
        if state.has_thread || state.is_ended || state.holders > 0 {
            return None;
        }
        let due = state.record.settings.next(state.record.last_began(), now);
        if state.record.pass.is_none() && due.is_some_and(|due| due <= now) {
            let pass = Pass { began: now, level: VerifyLevel::Agree, is_scheduled: true, ..Pass::default() };
            self.begin(&mut state, pass);
        }
        if state.retry.is_some_and(|retry| Instant::now() < retry) || !state.may_run(now) {
            return None;
        }
        state.has_thread = true;
        Some(Turn(Arc::clone(self)))
    }

    /// Ends the thread of the pass until the result is dropped, and waits for it, until `end` at most.
    #[must_use]
    pub fn hold(self: &Arc<Self>, end: Instant) -> Held {
        let mut state = self.state.lock();
        state.holders += 1;
        self.changed.notify_all();
        self.wait_for_thread(&mut state, end);
        drop(state);
        Held(Arc::clone(self))
    }

    /// Whether a command changes the backend, or it ends.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let state = self.state.lock();
        state.holders > 0 || state.is_ended
    }

    /// Tells the thread to end for good; [`wait_for_end`](Self::wait_for_end) waits for it.
    pub fn begin_end(&self) {
        self.state.lock().is_ended = true;
        self.changed.notify_all();
    }

    /// Waits until no thread has the pass, until `end` at most.
    pub fn wait_for_end(&self, end: Instant) {
        self.wait_for_thread(&mut self.state.lock(), end);
    }

    fn wait_for_thread(&self, state: &mut MutexGuard<'_, State>, end: Instant) {
        self.changed.wait_while_until(state, |state| state.has_thread, end);
    }

    /// Ends it with its backend, whose file is removed.
    pub fn remove(&self) {
        self.begin_end();
        let _in_order = self.saving.lock();
        self.state.lock().is_removed = true;
        self.file.remove();
    }

    /// Waits until the pass with this number has ended; `look` is called every `interval` with the state and cancels the wait by an
    /// error.
    ///
    /// # Errors
    /// That of `look`; [`ErrorKind::Stopped`] if the pass was stopped, and the error with which it failed.
    pub fn wait(
        &self,
        number: u64,
        interval: Duration,
        size: u64,
        mut look: impl FnMut(&ScrubInfo) -> Result<()>,
    ) -> Result<ScrubPass> {
        loop {
            let mut state = self.state.lock();
            if state.record.pass.is_none() || state.number != number {
                let last = state.record.last.as_ref().filter(|_| state.last_number == Some(number));
                let stopped = || Error::new(ErrorKind::Stopped, "the scrub was stopped before its end");
                return last.cloned().ok_or_else(stopped);
            }
            if let Some(failure) = state.failure.as_ref().filter(|_| !state.has_thread) {
                return Err(Error::new(ErrorKind::System, format!("the scrub cannot go on: {failure}")));
            }
            let _ = self.changed.wait_for(&mut state, interval);
            drop(state);
            look(&self.info(size, crate::scrub::now_s()))?;
        }
    }
}

impl State {
    fn words_for(&self, now: u64) -> ScrubState {
        match &self.record.pass {
            None => ScrubState::Idle,
            Some(pass) if pass.is_paused => ScrubState::Paused,
            Some(_) if self.has_thread && self.waits_for_load => ScrubState::WaitingForLoad,
            Some(_) if self.has_thread && self.is_beside_clients => ScrubState::BesideClients,
            Some(_) if self.has_thread => ScrubState::Running,
            Some(pass) if pass.is_scheduled && !self.record.settings.is_open(now) => {
                ScrubState::WaitingForWindow
            }
            Some(_) => ScrubState::WaitingForBackend,
        }
    }

    /// Whether there is a pass that can go on at `now`.
    fn may_run(&self, now: u64) -> bool {
        let settings = &self.record.settings;
        let is_allowed = |pass: &Pass| !pass.is_paused && (!pass.is_scheduled || settings.is_open(now));
        !self.is_ended && self.holders == 0 && self.record.pass.as_ref().is_some_and(is_allowed)
    }
}

/// Seconds since 1970 UTC.
#[must_use]
pub fn now_s() -> u64 {
    cbd_runtime::wall_ms() / 1000
}
