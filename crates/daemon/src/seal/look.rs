//! Whether a disk was written without its cache: what is recorded of it, and what it shows now.
//!
//! Invariants: nothing is changed. What is not certain counts as not known, and never as unchanged. The daemon and
//! `cbdctrl rescue` ask here before either writes to a disk, so that both refuse the same disks.
//!
//! Elsewhere: the record ([`super::record`]), the mark of a disk that a user has unsealed ([`super::rules`]), footprints
//! (`cbd-backing`), and what follows (`manager`, `cbdctrl`).

use super::record::{Record, RecordFile};
use super::rules;
use crate::size::format_time;
use cbd_backing::{BackingFile, Footprint};
use std::fs;
use std::path::Path;

/// What is known of a disk from before.
#[derive(Clone, Debug)]
pub struct Known {
    /// Its record; `None` if there is none, or why it cannot be read.
    pub record: Result<Option<Record>, String>,
    /// When a user has unsealed it by hand, in seconds since 1970 UTC; 0 if the time is not known.
    pub unsealed_at: Option<u64>,
}

/// An open disk, before its cache is opened.
#[derive(Clone, Copy, Debug)]
pub struct Disk<'a> {
    /// The disk.
    pub file: &'a BackingFile,
    /// Checksum of the state of its cache in the region.
    pub cache: Option<u64>,
    /// It is not the disk of the record, but a copy of it.
    pub is_copy: bool,
}

/// What a look at a disk shows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// Nothing is recorded of it.
    New,
    /// It is as it was left.
    Unchanged,
    /// Whether it was written cannot be told, for this reason.
    Unknown(String),
    /// What would tell cannot be read, for this reason: the disk is refused as a changed one is.
    Unreadable(String),
    /// It was written without its cache: what was seen.
    Changed(Vec<String>),
}

impl Known {
    /// What is known of the disk of the backend `uuid`, in a state folder and in a folder of rules of udev.
    #[must_use]
    pub fn of(state_dir: &Path, rules: Option<&Path>, uuid: &str) -> Self {
        let unsealed_at = rules.and_then(|folder| unsealed_at(folder, uuid));
        Self { record: RecordFile::of(state_dir, uuid).read(), unsealed_at }
    }

    /// Whether a change was noticed already, or a user has unsealed the disk.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        self.unsealed_at.is_some() || matches!(self.record, Ok(Some(Record::Changed { .. })))
    }

    /// Compares that with what the disk shows now, which reads about a megabyte of it and syncs it.
    #[must_use]
    pub fn look(&self, disk: &Disk<'_>) -> Seen {
        if let Some(at) = self.unsealed_at {
            let when = if at == 0 { String::new() } else { format!(" at {}", format_time(at * 1000)) };
            return Seen::Changed(vec![format!("cbdctrl unseal has given it to others{when}")]);
        }
        match &self.record {
            Err(why) => Seen::Unreadable(why.clone()),
            Ok(None) => Seen::New,
            Ok(Some(Record::Changed { what })) => Seen::Changed(what.clone()),
            Ok(Some(Record::InUse)) => Seen::Unknown("its last daemon was not stopped".to_owned()),
            Ok(Some(Record::Left { at, cache, footprint })) => {
                compare(disk, &format_time(at * 1000), *cache, footprint)
            }
        }
    }
}

/// When a user has unsealed the disk of the backend `uuid` by hand; 0 if it is there and its time is not known.
fn unsealed_at(folder: &Path, uuid: &str) -> Option<u64> {
    let marker = rules::marker_of(folder, uuid);
    match fs::read_to_string(&marker) {
        Ok(text) => Some(rules::time_in_marker(&text)),
        Err(_) => marker.is_file().then_some(0),
    }
}

fn compare(disk: &Disk<'_>, at: &str, cache: u64, before: &Footprint) -> Seen {
    if disk.cache != Some(cache) {
        return Seen::Unknown(format!("another program has used its cache since {at}"));
    }
    let mut before = before.clone();
    if disk.is_copy {
        // Times and counters are those of the other disk.
        before = Footprint { areas: before.areas, ..Footprint::default() };
        if before.areas.is_empty() {
            return Seen::Unknown("a copy of a file shows nothing of writes to it".to_owned());
        }
    }
    match disk.file.footprint(Some(&before.areas)) {
        Err(error) => Seen::Unreadable(error.line()),
        Ok(now) if !disk.is_copy && now.size > before.size => {
            Seen::Unknown(format!("it has grown since {at}"))
        }
        Ok(now) => {
            let mut what = now.changes_since(&before);
            if what.is_empty() {
                return Seen::Unchanged;
            }
            what.push(format!("it was left at {at}"));
            Seen::Changed(what)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_backing::Options;
    use std::path::PathBuf;

    /// A disk in a file, and a state folder and a folder of rules beside it.
    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            let place = Self(tempfile::tempdir().unwrap());
            fs::write(place.path("disk"), [0; 8192]).unwrap();
            fs::create_dir(place.path("rules")).unwrap();
            place
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn record(&self) -> RecordFile {
            RecordFile::of(&self.path("state"), "a-1")
        }

        fn disk(&self) -> BackingFile {
            BackingFile::open(self.path("disk"), Options::default()).unwrap()
        }

        fn seen(&self, cache: Option<u64>, is_copy: bool) -> Seen {
            let file = self.disk();
            let known = Known::of(&self.path("state"), Some(&self.path("rules")), "a-1");
            known.look(&Disk { file: &file, cache, is_copy })
        }
    }

    #[test]
    fn only_a_disk_that_is_as_it_was_left_is_unchanged() {
        let place = Place::new();
        assert_eq!(place.seen(Some(7), false), Seen::New);
        place.record().write(Record::InUse).unwrap();
        assert!(matches!(place.seen(Some(7), false), Seen::Unknown(_)));
        let footprint = place.disk().footprint(None).unwrap();
        place.record().write(Record::Left { at: 1, cache: 7, footprint: footprint.clone() }).unwrap();
        assert_eq!(place.seen(Some(7), false), Seen::Unchanged);
        for (cache, is_copy) in [(Some(8), false), (None, false), (Some(7), true)] {
            assert!(matches!(place.seen(cache, is_copy), Seen::Unknown(_)), "{cache:?} {is_copy}");
        }
        let smaller = Footprint { size: Some(4096), ..footprint.clone() };
        place.record().write(Record::Left { at: 1, cache: 7, footprint: smaller }).unwrap();
        assert!(matches!(place.seen(Some(7), false), Seen::Unknown(_)), "it has grown");
        let larger = Footprint { size: Some(16384), ..footprint };
        place.record().write(Record::Left { at: 1, cache: 7, footprint: larger }).unwrap();
        assert!(matches!(place.seen(Some(7), false), Seen::Changed(_)));
        fs::write(place.path("state/disks/a-1.json"), "{").unwrap();
        assert!(matches!(place.seen(Some(7), false), Seen::Unreadable(_)));
    }

    #[test]
    fn what_was_noticed_and_what_a_user_has_unsealed_stays_changed() {
        let place = Place::new();
        place.record().write(Record::Changed { what: vec!["it was written".into()] }).unwrap();
        for is_copy in [false, true] {
            assert_eq!(place.seen(None, is_copy), Seen::Changed(vec!["it was written".into()]));
        }
        for text in [&b"77\n"[..], b"\xff\xff"] {
            fs::write(rules::marker_of(&place.path("rules"), "a-1"), text).unwrap();
            let Seen::Changed(what) = place.seen(None, false) else { panic!("it was unsealed") };
            assert!(what[0].contains("cbdctrl unseal"), "{what:?}");
        }
        place.record().remove();
        assert!(matches!(place.seen(Some(7), false), Seen::Changed(_)), "without a record, too");
    }
}
