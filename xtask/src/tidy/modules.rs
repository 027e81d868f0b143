//! The uses that are allowed between modules of the engine: a request passes downwards through them and never back up.

use super::tree::File;
use super::{Measure, Rule};

/// Uses point downwards.
pub const MODULE: Rule =
    Rule { name: "module", about: "uses in the engine of a module of the same or a higher layer", limit: 0 };

/// The folder of the engine's modules.
const ENGINE: &str = "crates/engine/src/";

/// The modules of the engine from the lowest layer to the highest. A module uses only modules of lower layers, and itself.
const LAYERS: [&[&str]; 9] = [
    &["bypass", "pins", "rangemap", "rare", "repair", "settings", "slots", "sync", "position", "lane_map"],
    &["context", "metadata", "agreement"],
    &["epochs", "members"],
    &["base"],
    &["lane"],
    &["cache"],
    &["worker", "recovery"],
    &["transport"],
    // The root module, which contains the exports of the crate.
    &["lib"],
];

/// The exports of the crate's root, each with the module that defines it.
const EXPORTED: [(&str, &str); 9] = [
    ("Cache", "cache"),
    ("Miss", "cache"),
    ("Admission", "cache"),
    ("CacheStatus", "cache"),
    ("BackingTrouble", "cache"),
    ("BackgroundWorker", "worker"),
    ("Transport", "transport"),
    ("BackendSpec", "transport"),
    ("BackendEntry", "transport"),
];

/// Measures the modules of the engine.
pub fn measure(files: &[File]) -> Vec<Measure> {
    let mut measures: Vec<Measure> =
        LAYERS.iter().copied().flatten().map(|module| Measure::none(&MODULE, *module)).collect();
    for file in files {
        let Some(path) = file.path.strip_prefix(ENGINE).filter(|_| !file.is_test()) else { continue };
        let module = path.split(['/', '.']).next().unwrap_or_default();
        let Some(measure) = measures.iter_mut().find(|measure| measure.subject == module) else {
            let mut measure = Measure::none(&MODULE, module);
            measure.add(|| format!("{} has no layer in xtask/src/tidy/modules.rs", file.path));
            measures.push(measure);
            continue;
        };
        for (used, line) in used_modules(&file.text) {
            if used != module && layer(used).is_some_and(|used| layer(module) <= Some(used)) {
                measure.add(|| format!("{}:{line} uses {used}", file.path));
            }
        }
    }
    measures
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// The modules that a text names after `crate::`, alone or in braces, and the line numbers.
fn used_modules(text: &str) -> Vec<(&str, usize)> {
    let mut found = Vec::new();
    for (at, path) in text.match_indices("crate::") {
        let line = text[..at].lines().count();
        let rest = &text[at + path.len()..];
        let names = match rest.strip_prefix('{') {
            Some(list) => names_of(list),
            None => vec![first_name(rest)],
        };
        found.extend(names.into_iter().map(|name| (module_of(name), line)));
    }
    found
}

/// The first names of the items of a list in braces, whose opening brace is left out.
fn names_of(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut names) = (0, 0, Vec::new());
    for (at, letter) in list.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            '}' | ',' if depth == 0 => {
                names.push(first_name(list[start..at].trim()));
                start = at + 1;
                if letter == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    names
}

fn first_name(path: &str) -> &str {
    let end = path.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(path.len());
    &path[..end]
}

fn module_of(name: &str) -> &str {
    EXPORTED.iter().find(|(exported, _)| *exported == name).map_or(name, |(_, module)| module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_that_uses_a_higher_one_is_found() {
        let text = "//! A lane.\nuse crate::{\n    Cache, Environment,\n    base::{Base, Pool},\n    slots::TwoSlots,\n};\n\
                    fn f() { crate::worker::step() }\n";
        let file = File { path: format!("{ENGINE}lane/store.rs"), text: text.to_owned() };
        let measures = measure(&[file]);
        let lane = measures.iter().find(|measure| measure.subject == "lane").expect("it has a layer");
        assert_eq!(lane.value, 2);
        assert!(
            lane.at[0].ends_with("uses cache") && lane.at[1].ends_with(":7 uses worker"),
            "{:?}",
            lane.at
        );
    }

    #[test]
    fn a_module_without_a_layer_is_found() {
        let file = File { path: format!("{ENGINE}new_module.rs"), text: String::new() };
        assert!(measure(&[file]).iter().any(|measure| measure.subject == "new_module" && measure.value == 1));
    }
}
