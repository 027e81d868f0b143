//! Rules about Markdown: width of prose, and dead links within the tree.

use super::tree::File;
use super::{Measure, Rule};
use crate::workspace;
use std::collections::{BTreeMap, BTreeSet};

/// Width of prose.
pub const WIDTH: Rule =
    Rule { name: "width", about: "lines of prose in a document that are wider than 120 columns", limit: 0 };
/// Links within the tree.
pub const LINK: Rule = Rule { name: "link", about: "dead links in a document", limit: 0 };

/// Columns of prose.
const COLUMNS: usize = 120;

/// Measures all documents.
pub fn measure(files: &[File]) -> Vec<Measure> {
    let documents: Vec<&File> = files.iter().filter(|file| file.is_document()).collect();
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        documents.iter().map(|file| (file.path.as_str(), anchors(&file.text))).collect();
    documents.iter().flat_map(|file| [width(file), links(file, &anchors)]).collect()
}

fn width(file: &File) -> Measure {
    let mut measure = Measure::none(&WIDTH, &file.path);
    for (number, line) in prose(&file.text) {
        let is_table = line.trim_start().starts_with('|');
        // A line without a space cannot be broken.
        let is_link = !line.trim_start().contains(' ');
        if !is_table && !is_link && line.chars().count() > COLUMNS {
            measure.add(|| format!("{}:{number}", file.path));
        }
    }
    measure
}

/// The lines outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
            return None;
        }
        (!in_code).then_some((index + 1, line))
    })
}

/// The anchors of a document: the fragments of links to it, as GitHub derives them from the headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'))
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect();
        let mut unique = anchor.clone();
        let mut number = 0;
        while !found.insert(unique.clone()) {
            number += 1;
            unique = format!("{anchor}-{number}");
        }
    }
    found
}

fn links(file: &File, anchors: &BTreeMap<&str, BTreeSet<String>>) -> Measure {
    let mut measure = Measure::none(&LINK, &file.path);
    for (number, line) in prose(&file.text) {
        for part in line.split("](").skip(1) {
            let Some(end) = part.find(')') else { continue };
            let link = &part[..end];
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { file.path.clone() } else { joined(&file.path, path) };
            let leads = if anchor.is_empty() || !target.ends_with(".md") {
                workspace::root().join(&target).exists()
            } else {
                anchors.get(target.as_str()).is_some_and(|known| known.contains(anchor))
            };
            if !leads {
                measure.add(|| format!("{}:{number} {link}", file.path));
            }
        }
    }
    measure
}

/// A path relative to the folder of a document, as a path from the root.
fn joined(document: &str, path: &str) -> String {
    let mut parts: Vec<&str> = document.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            other => parts.push(other),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, rule: &Rule) -> usize {
        let file = File { path: "docs/a.md".to_owned(), text: text.to_owned() };
        measure(&[file]).iter().filter(|measure| measure.rule == rule).map(|measure| measure.value).sum()
    }

    #[test]
    fn prose_is_narrow_and_tables_and_code_need_not_be() {
        let wide = "word ".repeat(30);
        assert_eq!(value(&wide, &WIDTH), 1);
        assert_eq!(value(&format!("| {wide} |"), &WIDTH), 0);
        assert_eq!(value(&format!("```\n{wide}\n```"), &WIDTH), 0);
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        assert_eq!(value("# The Day, `x`\n[a](#the-day-x)", &LINK), 0);
        assert_eq!(value("# The Day\n[a](#the-night)", &LINK), 1);
        assert_eq!(value("[a](../README.md) [b](https://example.org/)", &LINK), 0);
        assert_eq!(value("[a](nothing.md)", &LINK), 1);
    }
}
