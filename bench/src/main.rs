//! `cbd-bench`: how far CBD is from the limit that the machine itself sets.
//!
//! Always true here: what is compared runs in turns in one run on one machine, the figures are medians, and beside
//! each ratio stand the absolute figures and how much they scattered.
//!
//! Left to others: what is fast enough (ARCHITECTURE.md).

mod counting;
mod groups;
mod instant_disk;
mod machine;
mod options;
mod statistics;
mod turns;
mod window;

use options::Options;
use serde_json::{Map, Value, json};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match Options::parse(&arguments) {
        Ok(options) => options,
        Err(text) => {
            eprintln!("cbd-bench: {text}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    if options.help {
        print!("{}", options::USAGE);
        return ExitCode::SUCCESS;
    }
    let mut results = Map::new();
    results.insert("machine".to_owned(), machine::describe());
    for group in groups::GROUPS.iter().filter(|group| options.wants(group.name)) {
        let mut figures = Figures { group: group.name, json: options.json, values: Map::new() };
        if let Err(error) = (group.run)(&options, &mut figures) {
            eprintln!("cbd-bench: {}: {error}", group.name);
            return ExitCode::FAILURE;
        }
        results.insert(group.name.to_owned(), Value::Object(figures.values));
    }
    if options.json {
        println!("{:#}", Value::Object(results));
    }
    ExitCode::SUCCESS
}

/// The figures of a group; each is shown as soon as it is known.
pub struct Figures {
    group: &'static str,
    json: bool,
    values: Map<String, Value>,
}

impl Figures {
    /// Adds a figure. Without `--json` it goes to standard output, else to standard error so that one who waits
    /// sees that something happens.
    pub fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        let (name, value) = (name.into(), value.into());
        let line = format!("{}.{name} = {value}", self.group);
        if self.json {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
        self.values.insert(name, value);
    }

    /// Adds a comparison: the ratio as `{a}_over_{limit}`, what both took as `{a}_ns` and `{b}_ns`, and beside it how
    /// much all of it scattered.
    pub fn add_comparison(&mut self, a: &str, limit: &str, b: &str, found: &turns::Comparison) {
        let range = |of: statistics::Summary, digits| [rounded(of.low, digits), rounded(of.high, digits)];
        self.add(format!("{a}_ns"), rounded(found.a.median, 1));
        self.add(format!("{b}_ns"), rounded(found.b.median, 1));
        self.add(format!("{a}_over_{limit}"), rounded(found.ratio.median, 3));
        let detail = json!({
            "rounds": found.rounds,
            "disturbed": found.disturbed,
            "ratio_95_percent": [rounded(found.ratio_range.0, 3), rounded(found.ratio_range.1, 3)],
            "ratio_p10_p90": range(found.ratio, 3),
            (format!("{a}_ns_p10_p90")): range(found.a, 1),
            (format!("{b}_ns_p10_p90")): range(found.b, 1),
            "noisy": found.is_noisy(),
        });
        self.add(format!("{a}_over_{limit}_detail"), detail);
        if found.is_noisy() {
            let (low, high) = found.ratio_range;
            eprintln!(
                "cbd-bench: warning: {}.{a}_over_{limit} is somewhere from {low:.2} to {high:.2}: something else is \
                 at work on this machine",
                self.group
            );
        }
    }
}

/// A figure with as many digits as it is worth.
pub fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}
