//! What of a scrub survives restarts of the daemon: its settings, the place of the pass, and the results of the last one. One file
//! for each backend, by its UUID, in the folder `scrub` of the state folder.
//!
//! Invariants: a file is replaced atomically; one that is damaged is as none, and that is said.

use super::gather::Gathered;
use crate::api::{ScrubPass, ScrubSettings, VerifyLevel};
use crate::state::{read_own, replace};
use cbd_export::folders::own_folder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The version of the file.
const VERSION: u32 = 1;

/// A pass that has not ended.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Pass {
    /// When it began, in seconds since 1970 UTC.
    pub began: u64,
    /// Which copies it looks at.
    pub level: VerifyLevel,
    /// Whether it repairs copies on the backing device.
    pub repair: bool,
    /// Its own rate in bytes a second.
    pub rate: Option<u64>,
    /// Whether the schedule began it: it runs in the window only.
    pub is_scheduled: bool,
    /// Whether a user has paused it.
    pub is_paused: bool,
    /// Everything before was looked at.
    pub position: u64,
    /// What was found.
    pub results: Gathered,
}

/// The content of a file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The settings.
    pub settings: ScrubSettings,
    /// The pass that has not ended.
    pub pass: Option<Pass>,
    /// The last complete pass.
    pub last: Option<ScrubPass>,
    /// When a user last stopped a pass: the schedule counts from then on.
    pub stopped: Option<u64>,
    /// Findings of all passes by the name of the flaw.
    pub found_total: BTreeMap<String, u64>,
    /// The part of them that was repaired.
    pub repaired_total: u64,
    /// Bytes that all passes have looked at.
    pub verified_bytes_total: u64,
    /// Copies of structures of the region that all passes have repaired.
    #[serde(default)]
    pub metadata_repaired_total: u64,
}

impl Record {
    /// When the last pass began or was stopped.
    pub fn last_began(&self) -> Option<u64> {
        self.last.as_ref().map(|last| last.began).max(self.stopped)
    }
}

/// The file of a backend.
#[derive(Clone, Debug)]
pub struct RecordFile(PathBuf);

impl RecordFile {
    /// The file of the backend `uuid` in the state folder.
    pub fn of(state_dir: &Path, uuid: &str) -> Self {
        Self(state_dir.join("scrub").join(format!("{uuid}.json")))
    }

    /// Its content, and why it is not what was written.
    pub fn read(&self) -> (Record, Option<String>) {
        let lost = |why: String| {
            let text = format!(
                "{} {why}: the scrub begins at 0, and its settings and results are lost; set them again",
                self.0.display()
            );
            (Record::default(), Some(text))
        };
        match read_own(&self.0) {
            Ok(text) => match serde_json::from_str::<Record>(&text) {
                Ok(record) if record.version == VERSION => (record, None),
                Ok(record) => lost(format!("is of version {}, this program knows {VERSION}", record.version)),
                Err(error) => lost(format!("is damaged ({error})")),
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => (Record::default(), None),
            Err(error) => lost(format!("cannot be read ({error})")),
        }
    }

    /// Replaces it.
    pub fn write(&self, record: &Record) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| {
            format!(
                "{} cannot be written, so the place of the scrub is lost at a restart: {error}",
                self.0.display()
            )
        };
        let folder = self.0.parent().unwrap_or(Path::new("."));
        own_folder(folder, 0o700).map_err(|error| failed(&error))?;
        let record = Record { version: VERSION, ..record.clone() };
        let text = serde_json::to_string_pretty(&record).map_err(|error| failed(&error))?;
        replace(&self.0, text.as_bytes()).map_err(|error| failed(&error))
    }

    /// Removes it, with its backend.
    pub fn remove(&self) {
        // A file that stays is of a backend that will not come back.
        let _ = std::fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = RecordFile::of(dir.path(), "u");
        assert_eq!(file.read(), (Record::default(), None), "there is none yet");
        let pass = Pass { position: 5 << 20, rate: Some(1 << 20), ..Pass::default() };
        let record = Record { version: VERSION, pass: Some(pass), stopped: Some(7), ..Record::default() };
        file.write(&record).unwrap();
        assert_eq!(file.read(), (record, None));
        file.remove();
        assert_eq!(file.read().0, Record::default());
    }

    #[test]
    fn a_damaged_file_is_as_none_and_that_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let file = RecordFile::of(dir.path(), "u");
        file.write(&Record { pass: Some(Pass::default()), ..Record::default() }).unwrap();
        for text in ["{\"version\": 1, \"set", "\0\0\0", "{\"version\": 9}"] {
            std::fs::write(dir.path().join("scrub/u.json"), text).unwrap();
            let (record, why) = file.read();
            assert_eq!(record, Record::default());
            assert!(why.unwrap().contains("begins at 0"), "{text}");
        }
    }
}
