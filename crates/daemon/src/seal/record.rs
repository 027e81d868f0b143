//! What is known of a disk when no daemon serves it, so that the next one notices if the disk was written meanwhile. One
//! file for each backend, by its UUID, in the folder `disks` of the state folder.
//!
//! Invariants: a footprint is in the file only from a stop, after the last operation of this daemon, until the next
//! start, before its first: then no write of CBD can be mistaken for one of another program. It counts only while the
//! cache in the region is as it was left, since a rescue or another program of CBD writes to the disk, too. A change that
//! was noticed stays in the file until the user has decided. A file is replaced atomically and is durable then, so no
//! crash leaves a damaged one.
//!
//! Elsewhere: footprints (`cbd-backing`), and who asks (`manager`).

use crate::state::{read_own, replace};
use cbd_backing::{Area, Footprint, Written};
use cbd_export::folders::own_folder;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The version of the file.
const VERSION: u32 = 1;

/// Where a disk is between the daemons.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Record {
    /// A daemon serves it, or one was killed: what it wrote last is not known.
    InUse,
    /// A daemon has stopped and left it like this.
    Left {
        /// When, in seconds since 1970 UTC.
        at: u64,
        /// Checksum of the state of the cache in the region.
        cache: u64,
        /// Its footprint.
        #[serde(with = "Stored")]
        footprint: Footprint,
    },
    /// It was written without its cache, and the user has not decided yet which copy counts.
    Changed {
        /// What was seen.
        what: Vec<String>,
    },
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    #[serde(flatten)]
    record: Record,
}

/// The form of a footprint in the file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Footprint")]
struct Stored {
    size: Option<u64>,
    #[serde(with = "nanoseconds")]
    modified_ns: Option<i128>,
    #[serde(with = "written")]
    written: Option<Written>,
    #[serde(with = "areas")]
    areas: Vec<Area>,
}

/// 64 bits, as many as serde takes in an enum; they suffice until the year 2262.
mod nanoseconds {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(at: &Option<i128>, to: S) -> Result<S::Ok, S::Error> {
        at.and_then(|at| i64::try_from(at).ok()).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<i128>, D::Error> {
        Ok(Option::<i64>::deserialize(from)?.map(i128::from))
    }
}

mod written {
    use super::Written;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(written: &Option<Written>, to: S) -> Result<S::Ok, S::Error> {
        written.as_ref().map(|written| (&written.boot, &written.disk, written.sectors)).serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Written>, D::Error> {
        let found = Option::<(String, String, u64)>::deserialize(from)?;
        Ok(found.map(|(boot, disk, sectors)| Written { boot, disk, sectors }))
    }
}

mod areas {
    use super::Area;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(areas: &[Area], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(areas.iter().map(|area| (area.offset, area.length, area.sum)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Area>, D::Error> {
        let found = Vec::<(u64, u64, u64)>::deserialize(from)?;
        Ok(found.into_iter().map(|(offset, length, sum)| Area { offset, length, sum }).collect())
    }
}

/// The file of a backend.
#[derive(Clone, Debug)]
pub struct RecordFile(PathBuf);

impl RecordFile {
    /// The file of the backend `uuid` in the state folder.
    #[must_use]
    pub fn of(state_dir: &Path, uuid: &str) -> Self {
        Self(state_dir.join("disks").join(format!("{uuid}.json")))
    }

    /// Its content; `None` if there is none.
    ///
    /// # Errors
    /// Why it cannot be read, in words: then nothing is known of the disk.
    pub fn read(&self) -> Result<Option<Record>, String> {
        let text = match read_own(&self.0) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{} cannot be read ({error})", self.0.display())),
        };
        let document: Document = serde_json::from_str(&text)
            .map_err(|error| format!("{} is damaged ({error})", self.0.display()))?;
        if document.version != VERSION {
            return Err(format!("{} is of version {}", self.0.display(), document.version));
        }
        Ok(Some(document.record))
    }

    /// Replaces it.
    ///
    /// # Errors
    /// Why it could not be replaced, in words. The old content is gone then, too, unless the folder can neither be written
    /// nor emptied: an old footprint must not outlive the first write of this daemon.
    pub fn write(&self, record: Record) -> Result<(), String> {
        let replaced = || -> Result<(), String> {
            let folder = self.0.parent().unwrap_or(Path::new("."));
            let is_new = !folder.exists();
            own_folder(folder, 0o700).map_err(|error| error.line())?;
            if is_new && let Some(parent) = folder.parent() {
                File::open(parent).and_then(|parent| parent.sync_all()).map_err(|error| error.to_string())?;
            }
            let document = Document { version: VERSION, record };
            let text = serde_json::to_string_pretty(&document).map_err(|error| error.to_string())?;
            replace(&self.0, text.as_bytes()).map_err(|error| error.to_string())
        };
        replaced().map_err(|error| {
            self.remove();
            format!(
                "{} cannot be written, so a disk that is written without its cache will not be noticed: {error}",
                self.0.display()
            )
        })
    }

    /// Removes it, with its backend or its cache.
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
        assert_eq!(file.read(), Ok(None));
        let written = Written { boot: "b".into(), disk: "7".into(), sectors: 9 };
        let areas = vec![Area { offset: 0, length: 1 << 20, sum: u64::MAX }];
        let block = Footprint { written: Some(written), areas, ..Footprint::default() };
        let modified_ns = Some(1_795_827_998_925_232_436);
        let plain = Footprint { size: Some(4096), modified_ns, ..Footprint::default() };
        for footprint in [block, plain] {
            let left = Record::Left { at: 7, cache: u64::MAX, footprint };
            file.write(left.clone()).unwrap();
            assert_eq!(file.read(), Ok(Some(left)));
        }
        for record in [Record::InUse, Record::Changed { what: vec!["\"x\"\n".into()] }] {
            file.write(record.clone()).unwrap();
            assert_eq!(file.read(), Ok(Some(record)));
        }
        file.remove();
        assert_eq!(file.read(), Ok(None));
    }

    #[test]
    fn a_damaged_file_says_nothing_and_a_write_that_fails_leaves_no_old_footprint() {
        let dir = tempfile::tempdir().unwrap();
        let file = RecordFile::of(dir.path(), "u");
        file.write(Record::InUse).unwrap();
        for text in ["{\"version\": 1, \"sta", "\0\0", "{\"version\": 9, \"state\": \"in_use\"}", "{}"] {
            std::fs::write(dir.path().join("disks/u.json"), text).unwrap();
            assert!(file.read().is_err(), "{text}");
        }
        let left = Record::Left { at: 7, cache: 8, footprint: Footprint::default() };
        file.write(left).unwrap();
        // A folder is at the path of the new file.
        std::fs::create_dir(dir.path().join("disks/u.new")).unwrap();
        assert!(file.write(Record::InUse).is_err());
        assert_eq!(file.read(), Ok(None));
    }
}
