//! What daemons have recorded of the disks to which `rescue` writes: a disk that was written without its cache is refused
//! as the daemon refuses it.
//!
//! Invariants: a record that cannot be read refuses the disk, as one of a change does. The user's word is recorded before
//! the first write, as the daemon does it; after a rescue that has emptied the cache nothing is recorded, since there is
//! nothing in it that could be older than the disk. Where there is no record, a warning says so.
//!
//! Elsewhere: what a record and a disk show ([`cbd_daemon::seal::look`]).

use super::RescueArguments;
use cbd_daemon::paths::{PathChoices, Paths};
use cbd_daemon::seal::look::{Disk, Known, Seen};
use cbd_daemon::seal::record::{Record, RecordFile};
use cbd_daemon::seal::rules;
use cbd_engine::BackendEntry;
use cbd_inspect::rescue::{DiskRecords, OpenDisk};
use cbd_types::{Error, ErrorKind, Result, uuid_text};
use std::io::ErrorKind as SystemError;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// The records in the folders of a daemon.
#[derive(Debug)]
pub struct Records {
    /// The state folder that the user has named.
    named: Option<PathBuf>,
    /// That of this user's daemon.
    usual: PathBuf,
    rules: Option<PathBuf>,
    /// The user's word that the cache is right where the disk was written without it.
    accepts: bool,
    /// Whether a state folder was missing.
    lacks_some: AtomicBool,
}

impl Records {
    /// Those that the arguments name, or those of the daemon that this user would start.
    pub fn new(arguments: &RescueArguments) -> Self {
        let paths =
            Paths::choose(PathChoices { rules_dir: arguments.rules_dir.clone(), ..PathChoices::default() });
        Self {
            named: arguments.state_dir.clone(),
            usual: paths.state_dir,
            rules: paths.rules_dir,
            accepts: arguments.changed_disk,
            lacks_some: AtomicBool::new(false),
        }
    }

    /// Whether the records of all disks that were looked at were there.
    pub fn were_found(&self) -> bool {
        !self.lacks_some.load(Ordering::Relaxed)
    }

    /// The state folder with the record of a backend: the named one, that of the daemon that has sealed its disk, or the
    /// usual one.
    fn state_dir(&self, uuid: &str) -> PathBuf {
        let sealed = || {
            let subject = rules::read(&rules::file_of(self.rules.as_deref()?, uuid))?;
            Some(PathBuf::from(subject.state_dir)).filter(|folder| folder.is_absolute())
        };
        self.named.clone().or_else(sealed).unwrap_or_else(|| self.usual.clone())
    }

    /// Why a disk is refused for which `what` is known.
    fn refused(&self, kind: ErrorKind, what: &str) -> Error {
        Error::new(
            kind,
            format!(
                "{what}. What the region has would replace what was written there since. If the region is right, --changed-disk writes it all the \
                 same; if the disk is right, drop what the cache holds with backend-stop -b ID --discard-dirty BYTES of a daemon, or use \
                 the disk without it (cbdctrl unseal)"
            ),
        )
    }
}

impl DiskRecords for Records {
    fn look(&self, backend: &BackendEntry, disk: &OpenDisk<'_>) -> Result<Vec<String>> {
        let (uuid, path) = (uuid_text(backend.uuid), backend.path.as_str());
        let state = self.state_dir(&uuid);
        let mut known = Known::of(&state, self.rules.as_deref(), &uuid);
        let is_there = exists(&state);
        if let Err(why) = &is_there {
            known.record = Err(why.clone());
        }
        let untold = |why: &str| {
            vec![format!("{path}: {why}, so whether it was written without its cache is not known")]
        };
        match known.look(&Disk { file: disk.file, cache: disk.cache, is_copy: disk.is_copy }) {
            Seen::Unchanged => Ok(Vec::new()),
            Seen::New if is_there == Ok(false) => {
                self.lacks_some.store(true, Ordering::Relaxed);
                Ok(untold(&format!(
                    "the state folder {} of its daemon does not exist here (--state-dir)",
                    state.display()
                )))
            }
            Seen::New => Ok(untold(&format!("no daemon has recorded anything of it in {}", state.display()))),
            Seen::Unknown(why) => Ok(untold(&why)),
            Seen::Changed(what) => {
                let what = format!("{path} was written while no daemon served it: {}", what.join("; "));
                if self.accepts { Ok(vec![what]) } else { Err(self.refused(ErrorKind::Exchanged, &what)) }
            }
            Seen::Unreadable(why) => {
                let what = format!("whether {path} was written without its cache is not known: {why}");
                if self.accepts { Ok(vec![what]) } else { Err(self.refused(ErrorKind::Damaged, &what)) }
            }
        }
    }

    fn begin(&self, backend: &BackendEntry) -> Vec<String> {
        let uuid = uuid_text(backend.uuid);
        let record = RecordFile::of(&self.state_dir(&uuid), &uuid);
        // 1. What was recorded is over. 2. So is the mark of an unsealed disk, which asks again until then.
        let written = match record.read() {
            Ok(None) => Ok(()),
            _ => record.write(Record::InUse),
        };
        written.err().into_iter().chain(self.forget_mark(&uuid)).collect()
    }

    fn emptied(&self, backend: &BackendEntry) -> Vec<String> {
        let uuid = uuid_text(backend.uuid);
        RecordFile::of(&self.state_dir(&uuid), &uuid).remove();
        Vec::new()
    }
}

impl Records {
    /// Removes the mark that a user has unsealed the disk; returns a warning if it stays.
    fn forget_mark(&self, uuid: &str) -> Option<String> {
        let marker = rules::marker_of(self.rules.as_deref()?, uuid);
        match std::fs::remove_file(&marker) {
            Err(error) if !matches!(error.kind(), SystemError::NotFound | SystemError::NotADirectory) => {
                let marker = marker.display();
                Some(format!(
                    "{marker} cannot be removed, so the next daemon asks about the disk again: {error}"
                ))
            }
            _ => None,
        }
    }
}

/// Whether the folder is there, or why that is not known.
fn exists(folder: &Path) -> std::result::Result<bool, String> {
    folder.try_exists().map_err(|error| format!("{} cannot be looked at ({error})", folder.display()))
}
