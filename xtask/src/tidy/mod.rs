//! `cargo xtask tidy`: rules about the tree that neither the compiler nor clippy checks.
//!
//! Each rule measures a property of a named subject: lines of a function, uses of a word, sleeps in a file. The value of a
//! subject must not exceed the limit of its rule. `xtask/tidy.txt` lists the exceptions, each with its own limit and the reason.
//!
//! Invariants: a subject beyond its limit fails the task, and so does an exception that is no longer needed. `--update` only ever
//! lowers a limit in `tidy.txt`.
//!
//! Elsewhere: format (`cargo fmt`), lints (clippy), links between items (rustdoc).

mod code;
mod documents;
mod exceptions;
mod layers;
mod modules;
pub mod tree;
mod words;

use crate::problem::Problem;
pub use code::is_for_tests;
use exceptions::Exceptions;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A rule: the property that it measures for each subject, and the largest allowed value.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name in messages and in `tidy.txt`.
    pub name: &'static str,
    /// A description of the value.
    pub about: &'static str,
    /// The largest value without an exception.
    pub limit: usize,
}

/// One measurement.
#[derive(Debug)]
pub struct Measure {
    /// The rule.
    pub rule: &'static Rule,
    /// The measured subject: a path, a function, a word.
    pub subject: String,
    /// The value.
    pub value: usize,
    /// The first locations, at most [`SHOWN`].
    pub at: Vec<String>,
}

impl Measure {
    /// A measurement of zero.
    pub fn none(rule: &'static Rule, subject: impl Into<String>) -> Self {
        Self { rule, subject: subject.into(), value: 0, at: Vec::new() }
    }

    /// Adds one occurrence at this location.
    pub fn add(&mut self, at: impl FnOnce() -> String) {
        self.value += 1;
        if self.at.len() < SHOWN {
            self.at.push(at());
        }
    }
}

/// Number of locations that are shown of one measurement.
const SHOWN: usize = 5;

/// All rules.
const RULES: [&Rule; 11] = [
    &words::WORD,
    &documents::WIDTH,
    &documents::LINK,
    &code::FUNCTION,
    &code::FILE,
    &code::HEADER,
    &code::FIELD,
    &code::SLEEP,
    &code::SYSTEM_CALL,
    &layers::LAYER,
    &modules::MODULE,
];

/// The options.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flags {
    json: bool,
    update: bool,
}

impl Flags {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut flags = Self::default();
        for argument in arguments {
            match argument.as_str() {
                "--json" => flags.json = true,
                "--update" => flags.update = true,
                other => return Err(Problem::Usage(format!("unknown option '{other}' of tidy"))),
            }
        }
        Ok(flags)
    }
}

/// Checks the tree. True if every rule holds.
///
/// # Errors
/// When the tree or the list of exceptions cannot be read.
pub fn run(flags: &Flags) -> Result<bool, Problem> {
    let files = tree::read().map_err(Problem::Failed)?;
    let code = code::measure(&files).map_err(Problem::Failed)?;
    let mut measures = code.measures;
    measures.extend(words::measure(&files));
    measures.extend(documents::measure(&files));
    measures.extend(modules::measure(&files));
    measures.extend(layers::measure().map_err(Problem::Failed)?);
    let mut exceptions = Exceptions::read().map_err(Problem::Failed)?;
    if flags.update {
        exceptions.lower(&measures);
        exceptions.write().map_err(Problem::Failed)?;
    }
    let problems = exceptions.problems(&measures);
    if flags.json {
        println!("{:#}", figures(&code.figures, &measures, &exceptions, &problems));
    } else {
        for (name, value) in &code.figures {
            println!("{name} {value}");
        }
    }
    for problem in &problems {
        eprintln!("tidy: {problem}");
    }
    Ok(problems.is_empty())
}

/// The output of `--json`: `house.*`, with the sum and the largest value of each rule.
fn figures(
    code: &BTreeMap<&'static str, usize>,
    measures: &[Measure],
    exceptions: &Exceptions,
    problems: &[String],
) -> Value {
    let mut house = serde_json::Map::new();
    for (name, value) in code {
        house.insert((*name).to_owned(), json!(value));
    }
    for rule in RULES {
        let values = || measures.iter().filter(|measure| measure.rule == rule).map(|measure| measure.value);
        house.insert(
            rule.name.to_owned(),
            json!({
                "what": rule.about,
                "limit": rule.limit,
                "over": values().filter(|value| *value > rule.limit).count(),
                "largest": values().max().unwrap_or(0),
                "sum": values().sum::<usize>(),
                "exceptions": exceptions.of(rule.name),
            }),
        );
    }
    json!({ "house": house, "problems": problems })
}
