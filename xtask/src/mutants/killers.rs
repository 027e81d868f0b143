//! The test that catches each mutant, as far as it is known, and the mutants that change nothing.
//!
//! Invariants: the files name only existing mutants; the written file is sorted, so that a change is a changed
//! line.

use super::catalog::Catalog;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::path::Path;

/// The path of the known killers, from the root.
const FILE: &str = "xtask/killers.txt";
/// The path of the page with the proofs, from the root, and the heading below which each mutant that changes
/// nothing has a heading of its own.
const PAGE: &str = "docs/mutants.md";
const HEADING: &str = "## Mutants that change nothing";

/// A test.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Killer {
    /// The package and the name of the program, such as `cbd-sim/damage`.
    pub program: String,
    /// The path of the test.
    pub test: String,
}

impl fmt::Display for Killer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.program, self.test)
    }
}

/// What is known of mutants.
pub struct Killers {
    killers: BTreeMap<String, Killer>,
    equivalent: BTreeSet<String>,
}

impl Killers {
    /// Reads both files.
    ///
    /// # Errors
    /// What cannot be read, or does not name a mutant.
    pub fn read(root: &Path, catalog: &Catalog) -> Result<Self, String> {
        let read = |file: &str| {
            std::fs::read_to_string(root.join(file)).map_err(|error| format!("cannot read {file}: {error}"))
        };
        let killers = parse_killers(&read(FILE)?, catalog)?;
        let equivalent = parse_page(&read(PAGE)?, catalog)?;
        Ok(Self { killers, equivalent })
    }

    /// The test to begin with.
    pub fn killer(&self, mutant: &str) -> Option<&Killer> {
        self.killers.get(mutant)
    }

    /// Whether there is a proof that the mutant changes nothing.
    pub fn is_equivalent(&self, mutant: &str) -> bool {
        self.equivalent.contains(mutant)
    }

    /// Writes what was learned, together with what was known.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, root: &Path, learned: impl Iterator<Item = (String, Killer)>) -> Result<(), String> {
        let mut killers = self.killers.clone();
        killers.extend(learned);
        killers.retain(|mutant, _| !self.equivalent.contains(mutant));
        let mut text = String::from(
            "# Mutant, program, test: where `cargo xtask mutants` begins. Written by --learn.\n",
        );
        for (mutant, killer) in killers {
            let _ = writeln!(text, "{mutant} {killer}");
        }
        std::fs::write(root.join(FILE), text).map_err(|error| format!("cannot write {FILE}: {error}"))
    }
}

fn parse_killers(text: &str, catalog: &Catalog) -> Result<BTreeMap<String, Killer>, String> {
    let mut killers = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, program, test] = words[..] else {
            return Err(format!("{FILE}: '{line}' is not a mutant, a program and a test"));
        };
        if !catalog.has(name) {
            return Err(format!("{FILE}: '{name}' is no mutant"));
        }
        killers.insert(name.to_owned(), Killer { program: program.to_owned(), test: test.to_owned() });
    }
    Ok(killers)
}

fn parse_page(text: &str, catalog: &Catalog) -> Result<BTreeSet<String>, String> {
    let section = text.split(HEADING).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut equivalent = BTreeSet::new();
    for part in section.split("\n### ").skip(1) {
        let (names, proof) = part.split_once('\n').unwrap_or((part, ""));
        if proof.split_whitespace().count() < 15 {
            return Err(format!("{PAGE}: '{names}' has no proof"));
        }
        for name in names.split(", ") {
            let name = name.trim().trim_matches('`');
            if !catalog.has(name) {
                return Err(format!("{PAGE}: '{name}' is no mutant"));
            }
            equivalent.insert(name.to_owned());
        }
    }
    Ok(equivalent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn catalog() -> Catalog {
        Catalog::read(&crate::workspace::root()).expect("the lists are in the tree")
    }

    #[test]
    fn a_mutant_that_changes_nothing_needs_a_proof() {
        let page =
            |proof: &str| format!("# Mutants\n{HEADING}\n\n### `write.fence`\n{proof}\n## Next\n### x\n");
        assert!(parse_page(&page("because"), &catalog()).is_err());
        let proof = "a fence that follows at once, in the same hold of the lock and by the same thread, serves it as well";
        let equivalent = parse_page(&page(proof), &catalog()).expect("it has a proof");
        assert_eq!(equivalent, BTreeSet::from(["write.fence".to_owned()]));
    }

    #[test]
    fn a_name_without_a_mutant_has_no_proof() {
        let page = format!("{HEADING}\n\n### `write.fonce`\n{}", "word ".repeat(20));
        assert!(parse_page(&page, &catalog()).is_err());
    }

    #[test]
    fn a_name_without_a_mutant_has_no_killer() {
        let line = |name: &str| format!("{name} cbd-sim/damage a_test\n");
        assert_eq!(parse_killers(&line("write.fence"), &catalog()).expect("a mutant").len(), 1);
        assert!(parse_killers(&line("write.fonce"), &catalog()).is_err());
    }

    #[test]
    fn the_written_files_can_be_read_and_contradict_nothing() {
        let known = Killers::read(&crate::workspace::root(), &catalog()).expect("both files are in the tree");
        for mutant in catalog().mutants {
            let is_caught = known.killer(&mutant.name).is_some();
            assert!(!(is_caught && known.is_equivalent(&mutant.name)), "{} is caught", mutant.name);
        }
    }
}
