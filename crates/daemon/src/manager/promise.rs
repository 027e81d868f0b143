//! The promise `recovery_point_max_age`: writeback keeps the recovery point of a backend younger than that.
//!
//! Invariants: it is stored with the settings of scrubs in the state folder, and set in each cache that the backend
//! gets.
//!
//! Elsewhere: how writeback keeps it (`cbd-engine`), the report that it is not kept ([`super::conditions`]).

use super::transport::running;
use super::{Manager, backend};
use crate::api::{BackendStarted, Consistency, SettingsChange, StartBackend};
use crate::scrub;
use cbd_engine::BackendEntry;
use cbd_runtime::RunningBackend;
use cbd_types::{BackendId, Error, ErrorKind, Result, uuid_text};
use std::path::Path;

/// Has writeback keep the recovery point younger than `seconds`; 0 for no promise.
pub(super) fn set(run: &RunningBackend, seconds: u32) {
    if let Some(cache) = run.cache() {
        cache.set_recovery_point_max_ms(u64::from(seconds) * 1000);
    }
}

/// Has a cache keep what is stored for the backend `uuid`.
pub(super) fn restore(run: &RunningBackend, state_dir: &Path, uuid: [u8; 16]) {
    set(run, scrub::settings_of(state_dir, &uuid_text(uuid)).recovery_point_max_age_s);
}

/// Refuses a promise that has no meaning.
fn check(seconds: u32, consistency: Consistency, has_cache: bool) -> Result<()> {
    let refused = |text: &'static str| Err(Error::new(ErrorKind::InvalidArgument, text));
    match seconds {
        0 => Ok(()),
        _ if !has_cache => refused(
            "recovery_point_max_age is of a cache: without one the disk has every write; leave it out, or give the backend a cache",
        ),
        _ if consistency == Consistency::None => refused(
            "recovery_point_max_age has no meaning with consistency=none, by which the disk alone is at no point in time; set \
             consistency=strict or checkpoint, or recovery_point_max_age=none",
        ),
        _ => Ok(()),
    }
}

impl Manager {
    /// Refuses a change after which the promise has no meaning.
    pub(super) fn check_promise(&self, transport: u32, id: BackendId, change: &SettingsChange) -> Result<()> {
        if change.recovery_point_max_age_s.is_none() && change.consistency.is_none() {
            return Ok(());
        }
        let (consistency, has_cache, uuid) = {
            let tables = self.tables()?;
            let slots = &running(&tables, transport)?.backends;
            let entry = &slots.get(&id).ok_or_else(|| backend::unknown(id))?.entry;
            (entry.settings.consistency, entry.cache_segments > 0, uuid_text(entry.uuid))
        };
        let stored = || scrub::settings_of(self.fixed.state.path(), &uuid).recovery_point_max_age_s;
        let seconds = change.recovery_point_max_age_s.unwrap_or_else(stored);
        check(seconds, change.consistency.unwrap_or(consistency.into()), has_cache)
    }

    /// Has a cache that was attached keep the promise of its backend.
    pub(super) fn restore_promise(&self, transport: u32, entry: &BackendEntry, run: &RunningBackend) {
        let place = (transport, entry.id.0);
        let scrub = self.scrubs.of(self.fixed.state.path(), place, uuid_text(entry.uuid));
        set(run, scrub.settings().recovery_point_max_age_s);
    }

    /// Ends the promise of a backend whose cache was detached. Returns a warning if that could not be stored.
    pub(super) fn forget_promise(&self, transport: u32, entry: &BackendEntry) -> Option<String> {
        let id = entry.id;
        let scrub = self.scrubs.of(self.fixed.state.path(), (transport, id.0), uuid_text(entry.uuid));
        if scrub.settings().recovery_point_max_age_s == 0 {
            return None;
        }
        let change = SettingsChange { recovery_point_max_age_s: Some(0), ..SettingsChange::default() };
        scrub.set(&change);
        scrub.file_error().map(|why| {
            format!(
                "recovery_point_max_age of backend {id} has ended with its cache, and that could not be stored ({why}): a cache that is                  attached after a restart of the daemon has it again"
            )
        })
    }

    /// Starts a backend, with the promise that the request has.
    pub(super) fn start_with_promise(
        &self,
        transport: u32,
        request: &StartBackend,
    ) -> Result<BackendStarted> {
        let Some(seconds) = request.recovery_point_max_age_s else {
            return self.backend_start(transport, request);
        };
        let change = SettingsChange { recovery_point_max_age_s: Some(seconds), ..SettingsChange::default() };
        crate::settings::check(&change)?;
        let default = &self.fixed.config.defaults;
        let cache_size = request.cache_size.or(default.cache_size).unwrap_or(0);
        let consistency = request.consistency.or(default.consistency).unwrap_or(Consistency::Strict);
        check(seconds, consistency, cache_size > 0)?;
        let started = self.backend_start(transport, request)?;
        self.set_scrub_settings(transport, BackendId(started.backend_id), &change)?;
        Ok(started)
    }
}
