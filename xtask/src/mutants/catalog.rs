//! All mutants chosen by hand: the mutation points, which are names in the product, and the written mutants, of which the
//! product knows nothing.
//!
//! Invariants: names are unique.

use super::written::{self, Written};
use cbd_types::MutationPoint;
use std::collections::BTreeSet;
use std::path::Path;

/// A mutant.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// Its name.
    pub name: String,
    /// What goes wrong.
    pub about: String,
}

/// The mutants.
#[derive(Debug)]
pub struct Catalog {
    /// All, in the order of the lists.
    pub mutants: Vec<Mutant>,
    /// Those of them that are written.
    pub written: Vec<Written>,
}

impl Catalog {
    /// Reads the written mutants.
    ///
    /// # Errors
    /// A file or an entry that cannot be read, or a name that two mutants have.
    pub fn read(root: &Path) -> Result<Self, String> {
        let written = written::read(root)?;
        let labels = MutationPoint::ALL.iter().map(|known| (known.name(), known.about().trim()));
        let others = written.iter().map(|known| (known.name.as_str(), known.about.as_str()));
        let mutants: Vec<Mutant> = labels
            .chain(others)
            .map(|(name, about)| Mutant { name: name.to_owned(), about: about.to_owned() })
            .collect();
        let mut names = BTreeSet::new();
        match mutants.iter().find(|mutant| !names.insert(&mutant.name)) {
            Some(twice) => Err(format!("two mutants have the name {}", twice.name)),
            None => Ok(Self { mutants, written }),
        }
    }

    /// Whether a mutant has this name.
    pub fn has(&self, name: &str) -> bool {
        self.mutants.iter().any(|mutant| mutant.name == name)
    }
}
