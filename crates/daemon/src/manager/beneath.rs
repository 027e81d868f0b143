//! The disk below a cache: sealing it before the cache is opened, and noticing that it was written without its cache.
//!
//! Invariants: a disk that was written while no daemon served it is not served before the user has said which copy
//! counts. Nor is one whose record, or what would show it, cannot be read: records are replaced atomically, so no crash
//! leaves a damaged one. Nothing that CBD writes or reads itself is mistaken for a change: what a crash leaves counts as
//! not known.
//!
//! Elsewhere: the rules, and the record of a disk ([`crate::seal`]).

use super::Fixed;
use super::slots::TransportHandle;
use crate::events::EventName;
use crate::seal::look::{Disk, Seen};
use crate::seal::record::{Record, RecordFile};
use crate::seal::rules::Subject;
use cbd_backing::BackingFile;
use cbd_engine::{BackendEntry, Transport};
use cbd_runtime::{ProcessEnvironment, RunningBackend, wall_ms};
use cbd_types::{BackendId, Error, ErrorKind, Name, Result, uuid_text};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// What the user accepts when a backend is started.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Accepts {
    /// A region that is older than its disk (`--older-region`).
    pub older_region: bool,
    /// A disk that was written without its cache, or of which that cannot be read (`--changed-disk`).
    pub changed_disk: bool,
}

/// How the footprint of a disk is left for the next daemon when its backend ends.
#[derive(Clone)]
pub(super) struct DiskTrace {
    file: RecordFile,
    transport: Arc<Transport<ProcessEnvironment>>,
    id: BackendId,
    /// Why it could not be told whether the disk was written without its cache when it was opened.
    unchecked: Option<String>,
}

impl DiskTrace {
    pub fn of(fixed: &Fixed, handle: &TransportHandle, entry: &BackendEntry) -> Self {
        let file = RecordFile::of(fixed.state.path(), &uuid_text(entry.uuid));
        Self { file, transport: Arc::clone(&handle.transport), id: entry.id, unchecked: None }
    }

    /// Remembers, and reports as an event, why the disk could not be checked when it was opened.
    pub fn was_unchecked(&mut self, transport: u32, path: &str, why: String) {
        let event = EventName::DiskUnchecked.name();
        tracing::warn!(backend = self.id.0, event, transport, path, "{path}: {why}");
        self.unchecked = Some(why);
    }

    /// Why the disk could not be checked.
    pub fn unchecked(&self) -> Option<String> {
        self.unchecked.clone()
    }

    /// The disk has no cache any more that could be older than it.
    pub fn forget_unchecked(&mut self) {
        self.unchecked = None;
    }

    /// Records the footprint of the disk of a backend that was stopped and still holds its disk. A backend of which a
    /// thread has not ended leaves none.
    pub fn leave(&self, run: &RunningBackend) {
        if run.cache().is_none() || run.device().all_queues() > 0 || run.oldest_operation().is_some() {
            return;
        }
        // A file that has lost bytes is restored by its owner before the next start.
        if run.watch().check().is_some_and(|change| change.is_loss()) {
            return;
        }
        let Some(cache) = self.transport.state_sum(self.id) else { return };
        let left = run.file().footprint(None).map_err(|error| error.line());
        let left = left
            .and_then(|footprint| self.file.write(Record::Left { at: wall_ms() / 1000, cache, footprint }));
        if let Err(error) = left {
            tracing::warn!(
                backend = self.id.0,
                "whether its disk is written from now on will not be noticed: {error}"
            );
        }
    }

    /// The disk is served, as accepted by the user or as it was found.
    pub fn begin(&self) -> Option<String> {
        self.file.write(Record::InUse).err()
    }
}

/// A disk that is about to be served.
pub(super) struct Beneath<'a> {
    pub fixed: &'a Fixed,
    pub handle: &'a TransportHandle,
    pub entry: &'a BackendEntry,
    pub path: &'a str,
    pub accepts: Accepts,
    /// The record that the start has replaced, to be put back if the start fails.
    replaced: RefCell<Option<Record>>,
    /// Why the disk could not be checked.
    unchecked: Cell<Option<String>>,
}

impl<'a> Beneath<'a> {
    pub fn new(
        fixed: &'a Fixed,
        handle: &'a TransportHandle,
        entry: &'a BackendEntry,
        path: &'a str,
        accepts: Accepts,
    ) -> Self {
        Self { fixed, handle, entry, path, accepts, replaced: RefCell::default(), unchecked: Cell::default() }
    }

    fn record(&self) -> RecordFile {
        RecordFile::of(self.fixed.state.path(), &uuid_text(self.entry.uuid))
    }

    /// Seals the open disk, and refuses it if it was written without its cache. Returns warnings.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`], and [`ErrorKind::Damaged`] if that cannot be read.
    pub fn prepare(&self, file: &BackingFile) -> Result<Vec<String>> {
        if self.entry.cache_segments == 0 {
            // A crash at the end of a detach may have left them.
            forget(self.fixed, self.entry);
            return Ok(Vec::new());
        }
        let mut warnings = self.seal(file);
        match self.look(file, &mut warnings) {
            // The user's decision is recorded when the start has succeeded.
            Found::Changed(_) | Found::Unreadable(_) if self.accepts.changed_disk => {}
            Found::Changed(what) => return Err(self.refused(&what)),
            Found::Unreadable(why) => return Err(self.not_readable(&why)),
            Found::Served(record) => {
                warnings.extend(self.record().write(Record::InUse).err());
                *self.replaced.borrow_mut() = record;
            }
        }
        Ok(warnings)
    }

    /// Seals the open disk; returns warnings.
    pub fn seal(&self, file: &BackingFile) -> Vec<String> {
        let subject = Subject {
            backend: uuid_text(self.entry.uuid),
            number: self.entry.id.0,
            name: self.entry.name.as_ref().map(Name::to_string),
            transport: uuid_text(self.handle.transport.info().uuid),
            region: self.handle.path.clone(),
            disk: self.path.to_owned(),
            state_dir: String::new(),
        };
        self.fixed.seals.seal(file, subject)
    }

    /// The start has failed, before anything was written: what was known of the disk holds.
    pub fn failed(&self) {
        if let Some(record) = self.replaced.take() {
            let _ = self.record().write(record);
        }
    }

    /// What is known of the disk, after a look at it.
    fn look(&self, file: &BackingFile, warnings: &mut Vec<String>) -> Found {
        let (uuid, id) = (uuid_text(self.entry.uuid), self.entry.id);
        let known = self.fixed.seals.known(&uuid);
        let cache = self.handle.transport.state_sum(id);
        match known.look(&Disk { file, cache, is_copy: false }) {
            Seen::New | Seen::Unchanged => Found::Served(known.record.ok().flatten()),
            Seen::Unreadable(why) => Found::Unreadable(why),
            Seen::Unknown(why) => {
                self.cannot_tell(&why);
                Found::Served(Some(Record::InUse))
            }
            Seen::Changed(what) => {
                let changed = Record::Changed { what: what.clone() };
                if known.unsealed_at.is_some() || known.record != Ok(Some(changed.clone())) {
                    match self.record().write(changed) {
                        Ok(()) => self.fixed.seals.forget_unsealed(&uuid),
                        Err(error) => warnings.push(error),
                    }
                }
                Found::Changed(what)
            }
        }
    }

    fn cannot_tell(&self, why: &str) {
        let text = format!(
            "{why}, so whether the disk was written without its cache before this start cannot be told"
        );
        self.unchecked.set(Some(text));
    }

    /// Why the disk that was prepared could not be checked.
    pub fn unchecked(&self) -> Option<String> {
        self.unchecked.take()
    }

    fn not_readable(&self, why: &str) -> Error {
        let (id, path) = (self.entry.id, self.path);
        Error::new(
            ErrorKind::Damaged,
            format!(
                "whether {path} was written while no daemon served it is not known: {why}. If it was, its cache would give out older data, and \
                 write it over that. If nothing else has written to the disk, or the cache is right, serve it with backend-start -p {path} \
                 --changed-disk; if the disk is right, drop what the cache holds with backend-stop -b {id} --discard-dirty BYTES, and start \
                 it again"
            ),
        )
    }

    fn refused(&self, what: &[String]) -> Error {
        let (id, path) = (self.entry.id, self.path);
        Error::new(
            ErrorKind::Exchanged,
            format!(
                "{path} was written while no daemon served it: {}. Its cache does not know what was written: it would give out older data, and \
                 write it over that. If the disk is right, drop what the cache holds with backend-stop -b {id} --discard-dirty BYTES, and start \
                 it again; if the cache is right, serve it with backend-start -p {path} --changed-disk",
                what.join("; ")
            ),
        )
    }
}

/// What a look at a disk has found.
enum Found {
    /// It may be served; this was recorded of it.
    Served(Option<Record>),
    /// It was written without its cache: what was seen.
    Changed(Vec<String>),
    /// Whether it was cannot be read, for this reason.
    Unreadable(String),
}

/// Forgets a disk that has no cache any more: it is not sealed, and nothing is known of it.
pub(super) fn forget(fixed: &Fixed, entry: &BackendEntry) {
    let uuid = uuid_text(entry.uuid);
    fixed.seals.unseal(&uuid);
    RecordFile::of(fixed.state.path(), &uuid).remove();
}

/// The UUIDs of the backends with a cache.
pub(super) fn with_caches(entries: &[BackendEntry]) -> Vec<String> {
    entries.iter().filter(|entry| entry.cache_segments > 0).map(|entry| uuid_text(entry.uuid)).collect()
}
