//! The copy of the workspace with switches, and its build.
//!
//! Invariants: a file of the copy is written only when it changes, so that cargo builds only what depends on it; the
//! build ends without errors, or with one that no mutant explains.

use super::candidates::{self, Candidate};
use crate::mutants::copy::{self, Copy};
use crate::mutants::rewrite::{self, Change, Place};
use crate::mutants::suite::{self, Program};
use crate::tidy::tree;
use crate::workspace;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;

/// The crates whose sources are changed.
pub const CRATES: [&str; 4] = ["engine", "format", "device", "lock"];

/// The packages whose tests run on the mutants.
const PACKAGES: [&str; 8] = [
    "cbd-types",
    "cbd-format",
    "cbd-engine",
    "cbd-device",
    "cbd-lock",
    "cbd-sim",
    "cbd-inspect",
    "cbd-models",
];

/// The environment of all tests: models play fewer schedules, since most mutants need none that is rare.
pub const SHORT: (&str, &str) = ("CBD_SCHEDULES", "100");

/// The function that reads a switch.
const SWITCH: &str = "::cbd_types::mutation::generated";

/// More builds than mutants of one kind can spoil one after the other.
const ROUNDS: usize = 40;

/// A mutant of the workspace.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The path of its file from the root.
    pub file: String,
    /// What it changes.
    pub candidate: Candidate,
    /// A name that depends only on its file, function and text.
    pub id: u64,
}

impl Mutant {
    /// The crate, as its directory is named.
    pub fn owner(&self) -> &str {
        self.file.split('/').nth(1).unwrap_or_default()
    }
}

/// The copy.
pub struct Scratch {
    /// The directory with everything of generated mutants.
    pub directory: PathBuf,
    copy: Copy,
    /// All mutants that can be written; the index is the number of the switch.
    pub mutants: Vec<Mutant>,
    /// Those that do not compile.
    pub rejected: BTreeSet<u32>,
    /// A number that differs when a source, a test or the set of mutants differs.
    pub version: u64,
    /// The sources that are changed.
    sources: BTreeMap<String, String>,
}

impl Scratch {
    /// Copies the workspace and finds the mutants.
    ///
    /// # Errors
    /// A file that cannot be read, written or parsed.
    pub fn new() -> Result<Self, String> {
        let directory = workspace::target_directory()?.join("mutants/generated");
        let mut scratch = Self {
            copy: Copy::new(&directory),
            directory,
            mutants: Vec::new(),
            rejected: BTreeSet::new(),
            version: 0,
            sources: BTreeMap::new(),
        };
        let mut version = DefaultHasher::new();
        let paths = tree::paths()?;
        for path in &paths {
            let bytes = copy::read(path)?;
            if path.starts_with("crates/") || path.starts_with("Cargo.") {
                (path, &bytes).hash(&mut version);
            }
            if is_changed(path) {
                let text = String::from_utf8(bytes).map_err(|error| format!("{path}: {error}"))?;
                scratch.sources.insert(path.clone(), text);
            } else {
                scratch.copy.write(path, &adapted(path, bytes))?;
            }
        }
        scratch.copy.remove_others(&paths)?;
        scratch.find()?;
        (scratch.mutants.iter().map(|mutant| mutant.id).collect::<Vec<_>>(), SHORT).hash(&mut version);
        scratch.version = version.finish();
        scratch.read_rejected();
        Ok(scratch)
    }

    fn find(&mut self) -> Result<(), String> {
        let mut copies: BTreeMap<u64, u64> = BTreeMap::new();
        for (file, source) in &self.sources {
            for candidate in candidates::find(source).map_err(|error| format!("{file}: {error}"))? {
                let mut id = DefaultHasher::new();
                (file, &candidate.function, candidate.kind.name()).hash(&mut id);
                (&candidate.original, &candidate.mutated).hash(&mut id);
                let copy = copies.entry(id.finish()).or_default();
                copy.hash(&mut id);
                *copy += 1;
                self.mutants.push(Mutant { file: file.clone(), candidate, id: id.finish() });
            }
        }
        if self.mutants.len() > cbd_types::mutation::generated::NUMBERS {
            return Err(format!("{} mutants are more than there are numbers", self.mutants.len()));
        }
        Ok(())
    }

    /// Writes the sources with the switches of all mutants that are not rejected.
    fn write_sources(&self) -> Result<BTreeMap<String, Vec<Place>>, String> {
        let mut places = BTreeMap::new();
        for (file, source) in &self.sources {
            let mutants: Vec<(u32, &Change)> = (0..)
                .zip(&self.mutants)
                .filter(|(number, mutant)| mutant.file == *file && !self.rejected.contains(number))
                .map(|(number, mutant)| (number, &mutant.candidate.change))
                .collect();
            let rewritten = rewrite::rewrite(source, &mutants, SWITCH);
            self.copy.write(file, rewritten.text.as_bytes())?;
            places.insert(file.clone(), rewritten.places);
        }
        Ok(places)
    }

    /// Builds the tests. Mutants that do not compile are rejected.
    ///
    /// # Errors
    /// An error of the compiler that no mutant explains.
    pub fn build(&mut self) -> Result<Vec<Program>, String> {
        let mut is_checked = false;
        for _ in 0..ROUNDS {
            let places = self.write_sources()?;
            let mut command = if is_checked { self.tests() } else { self.check() };
            let (is_success, messages) = self.copy.run(&mut command);
            if is_success && !is_checked {
                is_checked = true;
                continue;
            }
            if is_success {
                self.write_rejected()?;
                let programs: Vec<Program> =
                    messages.iter().filter_map(|line| suite::program(line)).collect();
                return if programs.is_empty() {
                    Err("cargo built no test".to_owned())
                } else {
                    Ok(programs)
                };
            }
            let found = rejected(&messages, &places)?;
            eprintln!("{} mutants do not compile; building again", found.len());
            self.rejected.extend(found);
        }
        Err(format!("{ROUNDS} builds were not enough to find all mutants that do not compile"))
    }

    fn check(&self) -> Command {
        let mut command =
            workspace::cargo(["check", "--keep-going", "--message-format", "json", "--package", "cbd-types"]);
        for name in CRATES {
            command.args(["--package", &format!("cbd-{name}")]);
        }
        command.args(["--features", "cbd-types/mutants", "--target-dir"]).arg(&self.copy.target);
        command
    }

    fn tests(&self) -> Command {
        suite::build_command(&self.copy.target, &PACKAGES)
    }

    /// The mutants that did not compile in the last build of the same sources.
    fn read_rejected(&mut self) {
        let Ok(text) = std::fs::read_to_string(self.directory.join("rejected")) else { return };
        let ids: BTreeSet<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        self.rejected =
            (0..).zip(&self.mutants).filter(|(_, mutant)| ids.contains(&mutant.id)).map(|(n, _)| n).collect();
    }

    fn write_rejected(&self) -> Result<(), String> {
        let ids: Vec<String> =
            self.rejected.iter().map(|number| self.mutants[*number as usize].id.to_string()).collect();
        copy::write(&self.directory.join("rejected"), ids.join("\n").as_bytes())
    }
}

/// Whether the file gets switches.
fn is_changed(path: &str) -> bool {
    let file = tree::File { path: path.to_owned(), text: String::new() };
    file.is_rust()
        && !file.is_test()
        && CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/src/")))
}

/// A manifest whose crate can call the switches; any other file as it is.
fn adapted(path: &str, bytes: Vec<u8>) -> Vec<u8> {
    let is_manifest = CRATES.iter().any(|name| path == format!("crates/{name}/Cargo.toml"));
    match String::from_utf8(bytes) {
        Ok(text) if is_manifest && !text.contains("\ncbd-types ") => {
            let depends = "[dependencies]\ncbd-types = { workspace = true }\n";
            text.replacen("[dependencies]\n", depends, 1).into_bytes()
        }
        Ok(text) => text.into_bytes(),
        Err(error) => error.into_bytes(),
    }
}

/// The mutants to which the compiler's errors lead: those in whose copy an error is, or to whose copy it refers, or else
/// all of the switch in which it is, or else those between the error's places that leave out a `drop`: what is dropped
/// only if a switch is off is borrowed to the end of its block.
///
/// # Errors
/// The text of an error that leads to none.
fn rejected(messages: &[String], places: &BTreeMap<String, Vec<Place>>) -> Result<BTreeSet<u32>, String> {
    let mut found = BTreeSet::new();
    let mut unexplained = None;
    for line in messages {
        let Ok(value) = serde_json::from_str::<Value>(line) else {
            unexplained.get_or_insert(line.clone());
            continue;
        };
        let message = &value["message"];
        if value["reason"] != "compiler-message" || message["level"] != "error" {
            continue;
        }
        let mut spans: Vec<&Value> = message["spans"].as_array().into_iter().flatten().collect();
        for child in message["children"].as_array().into_iter().flatten() {
            spans.extend(child["spans"].as_array().into_iter().flatten());
        }
        // Spans of the error itself first.
        spans.sort_by_key(|span| span["is_primary"] != true);
        let smallest = |of: fn(&Place) -> &std::ops::Range<usize>| {
            spans.iter().find_map(|span| {
                let at = usize::try_from(span["byte_start"].as_u64()?).ok()?;
                let file = places.get(span["file_name"].as_str()?)?;
                let within = file.iter().filter(|place| of(place).contains(&at));
                within.min_by_key(|place| of(place).len()).map(|place| (file, place))
            })
        };
        if let Some((_, place)) = smallest(|place| &place.copy) {
            found.insert(place.number);
        } else if let Some((file, place)) = smallest(|place| &place.whole) {
            found.extend(file.iter().filter(|other| other.whole == place.whole).map(|other| other.number));
        } else if let Some(drops) = drops_between(&spans, places) {
            found.extend(drops);
        } else if !spans.is_empty() {
            unexplained.get_or_insert(message["rendered"].as_str().unwrap_or(line).to_owned());
        }
    }
    match unexplained {
        Some(text) if found.is_empty() => Err(text),
        _ if found.is_empty() => Err("cargo failed without an error of the compiler".to_owned()),
        _ => Ok(found),
    }
}

/// The mutants between the first and the last of an error's places that leave out a `drop`; `None` if there is none.
fn drops_between(spans: &[&Value], places: &BTreeMap<String, Vec<Place>>) -> Option<Vec<u32>> {
    let file = spans.iter().find_map(|span| span["file_name"].as_str())?;
    let at = |span: &&Value| {
        let is_here = span["file_name"].as_str() == Some(file);
        span["byte_start"].as_u64().filter(|_| is_here).and_then(|at| usize::try_from(at).ok())
    };
    let (first, last) = (spans.iter().filter_map(at).min()?, spans.iter().filter_map(at).max()?);
    let between = |place: &&Place| place.is_drop && (first..last).contains(&place.whole.start);
    let drops: Vec<u32> = places.get(file)?.iter().filter(between).map(|place| place.number).collect();
    (!drops.is_empty()).then_some(drops)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn places() -> BTreeMap<String, Vec<Place>> {
        let place = |number, copy, whole| Place { number, copy, whole, is_drop: false };
        BTreeMap::from([(
            "a.rs".to_owned(),
            vec![place(0, 10..20, 0..90), place(1, 40..50, 30..80), place(2, 55..60, 30..80)],
        )])
    }

    fn error(spans: &[(u32, bool)]) -> String {
        let spans: Vec<Value> = spans
            .iter()
            .map(|(at, primary)| json!({ "file_name": "a.rs", "byte_start": at, "is_primary": primary }))
            .collect();
        json!({ "reason": "compiler-message", "message": { "level": "error", "rendered": "E", "spans": spans } })
            .to_string()
    }

    #[test]
    fn an_error_in_a_copy_rejects_its_mutant() {
        assert_eq!(rejected(&[error(&[(45, true)])], &places()), Ok(BTreeSet::from([1])));
    }

    #[test]
    fn an_error_that_refers_to_a_copy_rejects_its_mutant() {
        assert_eq!(rejected(&[error(&[(57, false), (70, true)])], &places()), Ok(BTreeSet::from([2])));
    }

    #[test]
    fn an_error_elsewhere_in_a_switch_rejects_all_mutants_of_it() {
        assert_eq!(rejected(&[error(&[(70, true)])], &places()), Ok(BTreeSet::from([1, 2])));
    }

    #[test]
    fn an_error_around_a_drop_that_is_left_out_rejects_its_mutant() {
        let mut places = places();
        let drop = Place { number: 7, copy: 110..110, whole: 105..120, is_drop: true };
        places.get_mut("a.rs").expect("it is there").push(drop);
        assert_eq!(rejected(&[error(&[(130, true), (95, false)])], &places), Ok(BTreeSet::from([7])));
        assert!(rejected(&[error(&[(100, true), (95, false)])], &places).is_err());
    }

    #[test]
    fn an_error_that_no_mutant_explains_ends_the_build() {
        assert_eq!(rejected(&[error(&[(95, true)])], &places()), Err("E".to_owned()));
        assert!(rejected(&[], &places()).is_err());
    }

    #[test]
    fn a_crate_that_gets_switches_depends_on_them() {
        let manifest = b"[package]\n[dependencies]\nlock_api = { workspace = true }\n".to_vec();
        let text = adapted("crates/lock/Cargo.toml", manifest.clone());
        assert!(String::from_utf8(text).expect("text").contains("[dependencies]\ncbd-types ="));
        assert_eq!(adapted("crates/nbd/Cargo.toml", manifest.clone()), manifest);
        assert!(is_changed("crates/lock/src/lib.rs") && !is_changed("crates/lock/src/protocol/tests.rs"));
    }
}
