//! Every mutation point is used, and no code fences, writes back or validates without one.

use cbd_types::MutationPoint;
use std::path::{Path, PathBuf};

fn collect(directory: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(directory).expect("the crates stand side by side").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("source is text");
            found.push((path, text));
        }
    }
}

fn sources_of(names: &[&str]) -> Vec<(PathBuf, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    names.iter().for_each(|name| collect(&crates.join(name).join("src"), &mut found));
    found
}

#[test]
fn every_mutation_point_is_used() {
    let mut sources = Vec::new();
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut sources);
    // The list itself does not count.
    sources.retain(|(path, _)| !path.components().any(|part| part.as_os_str() == "mutation"));
    for known in MutationPoint::ALL {
        let word = format!("MutationPoint::{known:?}");
        let is_used = sources.iter().any(|(_, text)| {
            text.match_indices(&word)
                .any(|(at, _)| !text[at + word.len()..].starts_with(|next: char| next.is_alphanumeric()))
        });
        assert!(is_used, "{} ({known:?}) is not used", known.name());
    }
}

/// [`cbd_types::Region`] requires a name; the memory beneath it does not.
#[test]
fn the_engine_accesses_memory_through_a_region_only() {
    // Unit tests change the memory themselves.
    let is_test = |path: &Path| {
        path.ends_with("tests.rs") || path.parent().is_some_and(|folder| folder.ends_with("tests"))
    };
    for (path, text) in sources_of(&["engine"]).into_iter().filter(|(path, _)| !is_test(path)) {
        assert!(!text.contains(".memory()"), "{} bypasses the names of fences", path.display());
    }
}

/// Data that was read is `Unverified`, and each validation of it has a name.
#[test]
fn every_checksum_comparison_of_the_format_has_a_name() {
    for (path, text) in sources_of(&["format"]) {
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (number, line) in code.lines().enumerate() {
            let compares = line.contains("sum(") && (line.contains("==") || line.contains("!="));
            let is_named = line.contains("MutationPoint::") || line.contains("line[..4] == self.sum(line)");
            assert!(
                !compares || is_named,
                "{}:{}: a checksum is compared without a name",
                path.display(),
                number + 1
            );
        }
    }
}
