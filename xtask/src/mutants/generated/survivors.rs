//! `xtask/mutants/survivors.txt`: mutants that no test kills, and why that is no gap.
//!
//! A line has five fields, separated by tabs: crate, function, original text, mutated text, reason. `cargo xtask mutants
//! --generated` prints the first four of each survivor in this form. Lines that begin with `#` are comments.

use super::scratch::Mutant;
use std::collections::BTreeSet;
use std::path::Path;

const FILE: &str = "xtask/mutants/survivors.txt";

/// The explained survivors.
#[derive(Debug, Default)]
pub struct Survivors {
    lines: BTreeSet<String>,
}

impl Survivors {
    /// Reads the file.
    ///
    /// # Errors
    /// A line without five fields or without a reason.
    pub fn read(root: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(root.join(FILE))
            .map_err(|error| format!("cannot read {FILE}: {error}"))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = BTreeSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let fields: Vec<&str> = line.split('\t').collect();
            let [_, _, _, _, reason] = fields[..] else {
                return Err(format!("{FILE}: '{line}' has not five fields"));
            };
            if reason.split_whitespace().count() < 4 {
                return Err(format!("{FILE}: '{line}' has no reason"));
            }
            if !lines.insert(fields[..4].join("\t")) {
                return Err(format!("{FILE}: '{line}' is there twice"));
            }
        }
        Ok(Self { lines })
    }

    /// Whether the mutant is explained.
    pub fn explains(&self, mutant: &Mutant) -> bool {
        self.lines.contains(&line(mutant))
    }

    /// The lines that match none of these mutants.
    pub fn unmatched<'a>(&'a self, mutants: &'a [Mutant]) -> Vec<&'a str> {
        let known: BTreeSet<String> = mutants.iter().map(line).collect();
        self.lines.iter().filter(|line| !known.contains(*line)).map(String::as_str).collect()
    }
}

/// The first four fields of a mutant's line.
pub fn line(mutant: &Mutant) -> String {
    let candidate = &mutant.candidate;
    [mutant.owner(), &candidate.function, &candidate.original, &candidate.mutated].join("\t")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::generated::candidates;

    fn mutants(source: &str) -> Vec<Mutant> {
        let found = candidates::find(source).expect("it parses").into_iter();
        found
            .map(|candidate| Mutant { file: "crates/format/src/a.rs".to_owned(), candidate, id: 0 })
            .collect()
    }

    #[test]
    fn a_line_explains_the_mutant_that_it_names() {
        let mutants = mutants("fn a(b: u8) -> u8 { c(b + d) }");
        let text = "# A comment.\nformat\ta\tfn a(b: u8) -> u8 { c(b + d) }\tfn a(b: u8) -> u8 { c(b - d) }\td is zero in every caller\n";
        let survivors = Survivors::parse(text).expect("it has five fields");
        assert!(survivors.explains(&mutants[0]));
        assert!(survivors.unmatched(&mutants).is_empty());
        assert_eq!(survivors.unmatched(&[]).len(), 1);
    }

    #[test]
    fn a_line_has_five_fields_and_a_reason() {
        assert!(Survivors::parse("format\ta\tb + c\tb - c\tbecause\n").is_err());
        assert!(Survivors::parse("format\ta\tb + c\tc is zero in every caller\n").is_err());
        let twice = "format\ta\tb + c\tb - c\tc is zero in every caller\n".repeat(2);
        assert!(Survivors::parse(&twice).is_err());
    }

    #[test]
    fn the_file_in_the_tree_can_be_read() {
        Survivors::read(&crate::workspace::root()).expect("each line has five fields");
    }
}
