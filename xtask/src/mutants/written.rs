//! Written mutants: mistakes as differences to the sources, in `xtask/mutants/written/*.diff`.
//!
//! An entry is the mutant's name, what goes wrong without the step that it leaves out, and its changes. A change begins with
//! `@@` and the file; `-` and a space begin the lines that are in the file, `+` and a space those that the mutant has there.
//! The lines of the file must be in it exactly once. An empty line ends an entry, and `#` begins a comment.
//!
//! Invariants: names are unique; of each change the lines are in the file, and a switch can enclose it.

use super::places::{self, Edit};
use super::rewrite::{self, Change};
use std::collections::BTreeMap;
use std::path::Path;

/// The directory of the entries, from the root.
const DIRECTORY: &str = "xtask/mutants/written";
/// The function that reads a switch.
const SWITCH: &str = "::cbd_types::mutation::is_mutant";
/// The file of the copy in which the names are, and the text that they replace.
const NAMES: (&str, &str) = ("crates/types/src/mutation/written.rs", "NAMES: &[&str] = &[];");

/// A written mutant.
#[derive(Debug)]
pub struct Written {
    /// Its name.
    pub name: String,
    /// What goes wrong.
    pub about: String,
    hunks: Vec<Hunk>,
}

/// Lines that are replaced.
#[derive(Debug, PartialEq, Eq)]
struct Hunk {
    /// The path of the file from the root.
    file: String,
    /// The lines that are in the file.
    old: String,
    /// The lines of them that are replaced.
    edit: Edit,
}

/// Reads all entries.
///
/// # Errors
/// A file that cannot be read, or an entry that is none.
pub fn read(root: &Path) -> Result<Vec<Written>, String> {
    let entries = std::fs::read_dir(root.join(DIRECTORY)).map_err(|error| format!("{DIRECTORY}: {error}"))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut written: Vec<Written> = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        written.extend(parse(&text).map_err(|error| format!("{}: {error}", path.display()))?);
    }
    Ok(written)
}

fn parse(text: &str) -> Result<Vec<Written>, String> {
    let mut written = Vec::new();
    for entry in text.split("\n\n") {
        let mut lines = entry.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).peekable();
        let Some(name) = lines.next() else { continue };
        let mut about = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with("@@")) {
            about.push(line);
        }
        let mut hunks = Vec::new();
        while let Some(line) = lines.next() {
            let file = line.trim_start_matches("@@").trim();
            let mut changed = Vec::new();
            while let Some(line) = lines.next_if(|line| !line.starts_with("@@")) {
                changed.push(line);
            }
            hunks.push(hunk(file, &changed).map_err(|error| format!("{name}: {error}"))?);
        }
        let about = about.join(" ");
        if about.len() < 20 || hunks.is_empty() || name.contains(' ') {
            return Err(format!("'{name}' has no name, no sentence that says what goes wrong, or no change"));
        }
        written.push(Written { name: name.to_owned(), about, hunks });
    }
    Ok(written)
}

/// The lines of a change.
fn hunk(file: &str, lines: &[&str]) -> Result<Hunk, String> {
    let is_change = |line: &&str| line.starts_with(['-', '+']);
    let first = lines.iter().position(is_change).ok_or_else(|| format!("a change of {file} is none"))?;
    let last = lines.iter().rposition(is_change).unwrap_or(first);
    let text = |lines: &[&str], signs: [char; 2]| -> String {
        let kept = lines.iter().filter(|line| line.starts_with(signs));
        kept.map(|line| format!("{}\n", &line[1..])).collect()
    };
    if let Some(line) = lines.iter().find(|line| !line.starts_with([' ', '-', '+'])) {
        return Err(format!("'{line}' begins with no sign"));
    }
    let old = text(lines, [' ', '-']);
    let start = text(&lines[..first], [' ', '-']).len();
    let end = old.len() - text(&lines[last + 1..], [' ', '-']).len();
    let edit = Edit { range: start..end, with: text(&lines[first..=last], [' ', '+']) };
    Ok(Hunk { file: file.to_owned(), old, edit })
}

impl Hunk {
    /// The change as one of the whole source.
    fn place(&self, source: &str) -> Result<Edit, String> {
        let begins_line = |at: &usize| *at == 0 || source[..*at].ends_with('\n');
        let places: Vec<usize> =
            source.match_indices(&self.old).map(|(at, _)| at).filter(begins_line).collect();
        let [at] = places[..] else {
            let text = format!("has this text {} times instead of once:\n{}", places.len(), self.old);
            return Err(format!("{} {text}", self.file));
        };
        let edit = &self.edit;
        Ok(Edit { range: at + edit.range.start..at + edit.range.end, with: edit.with.clone() })
    }
}

/// The texts of the files that the mutants change, with switches: the number of a mutant is its index. `source` gives the text
/// of a file.
///
/// # Errors
/// The mutant and the file of a change whose lines are not in the file exactly once, or that no switch can enclose.
pub fn switched(
    written: &[Written],
    source: impl Fn(&str) -> Result<String, String>,
) -> Result<BTreeMap<String, String>, String> {
    let mut files: BTreeMap<&str, BTreeMap<u32, Vec<&Hunk>>> = BTreeMap::new();
    for (number, mutant) in (0..).zip(written) {
        for hunk in &mutant.hunks {
            files.entry(&hunk.file).or_default().entry(number).or_default().push(hunk);
        }
    }
    let mut texts = BTreeMap::new();
    for (file, mutants) in files {
        let source = source(file)?;
        let mut changes: Vec<(u32, Change)> = Vec::new();
        for (number, hunks) in mutants {
            let name = &written[number as usize].name;
            let edits = hunks.iter().map(|hunk| hunk.place(&source)).collect::<Result<_, _>>();
            let found = edits.and_then(|edits| places::changes(&source, edits));
            let found = found.map_err(|error| format!("mutant {name}: {file}: {error}"))?;
            changes.extend(found.into_iter().map(|change| (number, change)));
        }
        if let Some((a, b)) = crossing(&changes) {
            let (a, b) = (&written[a as usize].name, &written[b as usize].name);
            return Err(format!("mutants {a} and {b}: {file}: they change statements in part the same"));
        }
        let numbered: Vec<(u32, &Change)> =
            changes.iter().map(|(number, change)| (*number, change)).collect();
        texts.insert(file.to_owned(), rewrite::rewrite(&source, &numbered, SWITCH).text);
    }
    let (file, before) = NAMES;
    let names: Vec<&str> = written.iter().map(|mutant| mutant.name.as_str()).collect();
    let text = source(file)?.replacen(before, &before.replace("&[]", &format!("&{names:?}")), 1);
    texts.insert(file.to_owned(), text);
    Ok(texts)
}

/// The first two changes of which neither contains the other nor is beside it.
fn crossing(changes: &[(u32, Change)]) -> Option<(u32, u32)> {
    changes.iter().find_map(|(number, Change { node: a, .. })| {
        let crosses = |(_, Change { node: b, .. }): &&(u32, Change)| {
            a.start < b.start && b.start < a.end && a.end < b.end
        };
        changes.iter().find(crosses).map(|(other, _)| (*number, *other))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: &str = "# A comment.\n\nwrite.touch\nA write says that its lane\nis touched.\n@@ a.rs\n fn a() {\n-    b();\n+    c();\n";

    fn switched_by(entries: &str, source: &str) -> Result<String, String> {
        let written = parse(entries)?;
        let read = |file: &str| Ok(if file == "a.rs" { source } else { NAMES.1 }.to_owned());
        switched(&written, read).map(|texts| texts["a.rs"].clone())
    }

    #[test]
    fn an_entry_has_a_name_a_sentence_and_changes() {
        let written = parse(ENTRY).expect("an entry");
        assert_eq!(written.len(), 1);
        assert_eq!((written[0].name.as_str(), written[0].hunks.len()), ("write.touch", 1));
        assert_eq!(written[0].about, "A write says that its lane is touched.");
        assert!(parse("write.touch\nA write says that its lane is touched.\n").is_err());
        assert!(parse(&ENTRY.replace("A write says that its lane\nis touched.\n", "")).is_err());
        assert!(parse(&ENTRY.replace("+    c();", "    c();").replace("-    b();", "     b();")).is_err());
    }

    #[test]
    fn a_switch_is_written_where_the_lines_are() {
        let source = "fn a() {\n    b();\n}\n\nfn d() {\n    b();\n}\n";
        let text = switched_by(ENTRY, source).expect("the lines are there");
        assert!(
            text.starts_with("fn a() {\n    (if ::cbd_types::mutation::is_mutant(0) { c() } else { b() });")
        );
        assert!(text.ends_with("fn d() {\n    b();\n}\n"));
    }

    #[test]
    fn lines_that_are_there_twice_or_never_are_an_error_with_name_and_file() {
        let twice = "fn a() {\n    b();\n}\n".repeat(2);
        for source in ["fn a() {\n    d();\n}\n", "fn a() {\n    b(); d();\n}\n", &twice] {
            let error = switched_by(ENTRY, source).expect_err("not once");
            assert!(error.contains("write.touch") && error.contains("a.rs"), "{error}");
        }
    }

    #[test]
    fn mutants_of_statements_that_are_in_part_the_same_are_an_error() {
        let source = "fn a() {\n    b();\n    c();\n    d();\n}\n";
        let entry = |name: &str, lines: [&str; 2]| {
            format!("{name}\nIt says what goes wrong.\n@@ a.rs\n-    {}\n-    {}\n\n", lines[0], lines[1])
        };
        let both = entry("x.one", ["b();", "c();"]) + &entry("x.two", ["c();", "d();"]);
        let error = switched_by(&both, source).expect_err("they cross");
        assert!(error.contains("x.one") && error.contains("x.two"), "{error}");
    }

    #[test]
    fn the_names_are_written_by_number() {
        let written = parse(&format!("{ENTRY}\n{}", ENTRY.replace("touch", "other"))).expect("entries");
        let read =
            |file: &str| Ok(if file == "a.rs" { "fn a() {\n    b();\n}\n" } else { NAMES.1 }.to_owned());
        let texts = switched(&written, read).expect("the lines are there");
        assert_eq!(texts[NAMES.0], "NAMES: &[&str] = &[\"write.touch\", \"write.other\"];");
    }

    #[test]
    fn the_lines_of_all_entries_are_in_the_tree_once_and_a_switch_can_enclose_them() {
        let root = crate::workspace::root();
        let written = read(&root).expect("all entries can be read");
        let source =
            |file: &str| std::fs::read_to_string(root.join(file)).map_err(|error| format!("{file}: {error}"));
        let texts = switched(&written, source).unwrap_or_else(|error| panic!("{error}"));
        assert!(texts[NAMES.0].contains(&written[0].name), "{} has no list of names", NAMES.0);
    }
}
