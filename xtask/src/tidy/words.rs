//! Words that the project does not use, because the field has a standard term for their meaning here.
//!
//! Identifiers count, too: `NodeKeeper` and `node_keeper` contain the word "keeper". A phrase is found across line breaks.

use super::tree::File;
use super::{Measure, Rule};

/// How often a word is used.
pub const WORD: Rule = Rule { name: "word", about: "uses of a word that has a standard term", limit: 0 };

/// Phrases, all forms of each, and the standard terms to use instead.
const WORDS: [(&[&str], &str); 29] = [
    (&["door", "doors"], "export, channel, importer"),
    (&["forced write", "forced writes"], "FUA write"),
    (&["let go", "lets go", "letting go"], "release, unlock, close"),
    (&["give back", "gives back", "given back", "gave back", "giving back"], "free, release, return"),
    (&["take away", "takes away", "taken away", "took away"], "remove"),
    (&["ask for a line", "asks for a line"], "prefetch"),
    (&["sums"], "checksums"),
    (&["further line", "further lines"], "continuation lines"),
    (&["upkeep"], "background worker"),
    (&["maintainer", "maintainers"], "background worker"),
    (&["chore", "chores"], "background worker"),
    (&["patience", "patient", "patiently"], "timeout, limit, delay"),
    (&["mend", "mends", "mended", "mending"], "repair, re-replicate"),
    (&["make whole", "makes whole", "made whole"], "repair, complete"),
    (&["put right", "puts right"], "repair, correct"),
    (&["judge", "judges", "judged", "judging"], "validate, check"),
    (&["condemn", "condemns", "condemned", "condemning"], "mark bad"),
    (&["anew"], "again; re-create"),
    (&["keeper", "keepers"], "store process, descriptor store"),
    (&["shelf", "shelves"], "preserved session"),
    (&["the day after"], "offline recovery"),
    (&["dear", "dearer"], "expensive"),
    (&["cheap", "cheaper", "cheaply"], "inexpensive"),
    (&["somebody"], "the thread, the client, the daemon: the actor by name"),
    (&["nobody"], "no thread, no client: the actor by name"),
    (&["as of when", "as of now"], "recovery point; at this moment"),
    (&["safeguard", "safeguards"], "mutation point"),
    (&["said to be"], "listed as, reported as"),
    (&["is void", "are void", "be void"], "not crash-consistent"),
];

/// Files that must name the words: this one, and the changelog, which lists the former names of renamed items. `tidy.txt` names
/// the words, too, but this rule does not read it.
const NAMES_THEM: [&str; 2] = ["xtask/src/tidy/words.rs", "CHANGELOG.md"];

/// Counts each word over the tree.
pub fn measure(files: &[File]) -> Vec<Measure> {
    let mut measures: Vec<Measure> =
        WORDS.iter().map(|(forms, _)| Measure::none(&WORD, forms[0].replace(' ', "-"))).collect();
    for file in files.iter().filter(|file| !NAMES_THEM.contains(&file.path.as_str())) {
        let tokens = tokens(&file.text);
        for (measure, (forms, standard)) in measures.iter_mut().zip(WORDS) {
            for form in forms {
                let form: Vec<&str> = form.split(' ').collect();
                for found in tokens.windows(form.len()).filter(|window| {
                    window.iter().zip(&form).all(|(token, wanted)| token.word.eq_ignore_ascii_case(wanted))
                }) {
                    measure.add(|| format!("{}:{} (use: {standard})", file.path, found[0].line));
                }
            }
        }
    }
    measures
}

/// A word and the number of its line.
struct Token<'a> {
    word: &'a str,
    line: usize,
}

/// The words of a text. Identifiers are split at underscores and capital letters.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut begun: Option<usize> = None;
        let mut before = ' ';
        for (at, letter) in line.char_indices() {
            let splits = before.is_ascii_lowercase() && letter.is_ascii_uppercase();
            if let Some(start) = begun.filter(|_| splits || !letter.is_alphabetic()) {
                found.push(Token { word: &line[start..at], line: index + 1 });
                begun = None;
            }
            if letter.is_alphabetic() && begun.is_none() {
                begun = Some(at);
            }
            before = letter;
        }
        if let Some(start) = begun {
            found.push(Token { word: &line[start..], line: index + 1 });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str, word: &str) -> usize {
        let file = File { path: "a.rs".to_owned(), text: text.to_owned() };
        let measures = measure(&[file]);
        measures.iter().find(|measure| measure.subject == word).expect("the word is in the list").value
    }

    #[test]
    fn identifiers_and_all_forms_are_found() {
        assert_eq!(count("struct NodeKeeper; let the_keepers = 1; // Keeper", "keeper"), 3);
    }

    #[test]
    fn parts_of_words_are_not() {
        assert_eq!(count("indoors amend bookkeeper", "door"), 0);
        assert_eq!(count("indoors amend bookkeeper", "mend"), 0);
    }

    #[test]
    fn phrases_are_found_across_lines() {
        assert_eq!(count("// what it let\n    // go of", "let-go"), 1);
    }
}
