//! The figures of a run: shown as soon as they are measured, stored in a tree, and compared with their budgets.
//!
//! Invariants: a figure is at the path by which the budgets refer to it. A figure that was compared or has a budget also has
//! `{name}_detail` with its components, its spread, and the verdict.

use crate::budgets::{self, Verdict};
use crate::statistics::{Summary, rounded};
use crate::turns::Comparison;
use serde_json::{Map, Value, json};

/// The verdict of a budget on a figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Checked {
    /// The path of the figure.
    pub path: String,
    /// Its value.
    pub value: f64,
    /// Its bound, as text.
    pub bound: String,
    /// Whether it is within the bound.
    pub verdict: Verdict,
    /// Whether the machine was too noisy for a reliable verdict.
    pub is_uncertain: bool,
}

/// The certainty of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Certainty {
    /// The 95 % confidence range of the true figure.
    pub range: (f64, f64),
    /// Whether it scattered so much that other work must have run on the machine.
    pub is_noisy: bool,
}

/// The figures of all groups.
pub struct Figures {
    section: String,
    json: bool,
    values: Map<String, Value>,
    checked: Vec<Checked>,
    noisy: Vec<String>,
}

impl Figures {
    /// Creates an empty set of figures. They are shown on standard output, or with `json` on standard error: standard output then
    /// holds only the result.
    pub fn new(json: bool) -> Self {
        let (values, checked, noisy) = (Map::new(), Vec::new(), Vec::new());
        Self { section: String::new(), json, values, checked, noisy }
    }

    /// Sets the section to which the following names are relative.
    pub fn enter(&mut self, section: &str) {
        section.clone_into(&mut self.section);
    }

    /// Adds a figure.
    pub fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        self.add_detailed(&name.into(), value, Map::new(), None);
    }

    /// Adds a figure with its components, and its certainty if it was determined.
    pub fn add_detailed(
        &mut self,
        name: &str,
        value: impl Into<Value>,
        mut detail: Map<String, Value>,
        certainty: Option<Certainty>,
    ) {
        let value = value.into();
        let path = format!("{}.{name}", self.section);
        let mut line = format!("{path} = {value}");
        if let Some(checked) = check(&path, &value, certainty) {
            detail.insert("budget".to_owned(), json!(checked.bound));
            detail.insert("met".to_owned(), json!(checked.verdict == Verdict::Met));
            detail.insert("uncertain".to_owned(), json!(checked.is_uncertain));
            line.push_str(&format!(" ({})", checked.describe()));
            self.checked.push(checked);
        }
        if let Some(Certainty { range: (low, high), is_noisy }) = certainty {
            detail.insert("range_95_percent".to_owned(), json!([rounded(low, 3), rounded(high, 3)]));
            detail.insert("noisy".to_owned(), json!(is_noisy));
            if is_noisy {
                eprintln!(
                    "cbd-bench: warning: {path} scatters, it is somewhere from {low:.2} to {high:.2}: something else is \
                     at work on this machine"
                );
                self.noisy.push(path.clone());
            }
        }
        self.show(&line);
        place(&mut self.values, &path, value);
        if !detail.is_empty() {
            place(&mut self.values, &format!("{path}_detail"), Value::Object(detail));
        }
    }

    /// Adds a comparison: the ratio as `{a}_over_{limit}`, and both times as `{a}_ns` and `{b}_ns`.
    pub fn add_comparison(&mut self, a: &str, limit: &str, b: &str, found: &Comparison) {
        self.add(format!("{a}_ns"), rounded(found.a.median, 1));
        self.add(format!("{b}_ns"), rounded(found.b.median, 1));
        let mut detail = counts(found);
        detail.insert("absolute".to_owned(), in_ns(found));
        detail.insert("p10_p90".to_owned(), spread(found.ratio, 3));
        detail.insert(format!("{a}_ns_p10_p90"), spread(found.a, 1));
        detail.insert(format!("{b}_ns_p10_p90"), spread(found.b, 1));
        let name = format!("{a}_over_{limit}");
        self.add_detailed(&name, rounded(found.ratio.median, 3), detail, Some(found.certainty()));
    }

    /// Adds the ratio of a comparison under a name of its own.
    pub fn add_ratio(&mut self, name: &str, found: &Comparison) {
        let mut detail = counts(found);
        detail.insert("absolute".to_owned(), in_ns(found));
        detail.insert("p10_p90".to_owned(), spread(found.ratio, 3));
        self.add_detailed(name, rounded(found.ratio.median, 4), detail, Some(found.certainty()));
    }

    /// Adds the additional time of the first contestant, in microseconds.
    pub fn add_difference(&mut self, name: &str, a: &str, b: &str, found: &Comparison) {
        let mut detail = counts(found);
        detail.insert(format!("{a}_ns"), json!(rounded(found.a.median, 1)));
        detail.insert(format!("{b}_ns"), json!(rounded(found.b.median, 1)));
        detail.insert("absolute".to_owned(), in_ns(found));
        let in_us = |of: f64| of / 1000.0;
        let Summary { median, low, high } = found.difference;
        detail.insert("p10_p90".to_owned(), json!([rounded(in_us(low), 3), rounded(in_us(high), 3)]));
        let (low, high) = found.difference_range;
        let range = (in_us(low), in_us(high));
        let certainty = Certainty { range, is_noisy: found.is_noisy() };
        self.add_detailed(name, rounded(in_us(median), 3), detail, Some(certainty));
    }

    /// Shows the missed budgets and the uncertain figures, and adds both to the figures. Called at the end.
    pub fn summarize(&mut self) {
        self.enter("summary");
        let with = |verdict: Verdict| self.checked.iter().filter(move |checked| checked.verdict == verdict);
        let paths =
            |of: &mut dyn Iterator<Item = &Checked>| of.map(|one| one.path.clone()).collect::<Vec<_>>();
        let met = paths(&mut with(Verdict::Met));
        let missed = paths(&mut with(Verdict::Missed));
        let uncertain = paths(&mut self.checked.iter().filter(|checked| checked.is_uncertain));
        let lines: Vec<_> = with(Verdict::Missed)
            .map(|checked| format!("  {} = {} ({})", checked.path, checked.value, checked.describe()))
            .collect();
        self.show(&format!("\n{} budgets met, {} missed{}", met.len(), missed.len(), colon(&missed)));
        lines.iter().for_each(|line| self.show(line));
        if !self.noisy.is_empty() || !uncertain.is_empty() {
            let scattered = self.noisy.len();
            self.show(&format!(
                "the machine was too noisy: {scattered} figures scatter, {} verdicts are uncertain; run it again when nothing \
                 else is at work",
                uncertain.len()
            ));
        }
        let summary = json!({"met": met, "missed": missed, "uncertain": uncertain, "noisy": self.noisy});
        self.values.insert("summary".to_owned(), summary);
    }

    /// All figures, with `machine`.
    pub fn into_json(mut self, machine: Value) -> Value {
        self.values.insert("machine".to_owned(), machine);
        Value::Object(self.values)
    }

    fn show(&self, line: &str) {
        if self.json {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
    }
}

impl Checked {
    fn describe(&self) -> String {
        let verdict = if self.verdict == Verdict::Met { "met" } else { "missed" };
        let doubt = if self.is_uncertain { ", uncertain" } else { "" };
        format!("budget {}: {verdict}{doubt}", self.bound)
    }
}

fn colon(of: &[String]) -> &'static str {
    if of.is_empty() { "" } else { ":" }
}

fn check(path: &str, value: &Value, certainty: Option<Certainty>) -> Option<Checked> {
    let budget = budgets::budget(path)?;
    let value = value.as_f64()?;
    let verdict = budget.bound.check(value)?;
    let limit = budget.bound.limit()?;
    let is_uncertain =
        certainty.is_some_and(|certainty| (certainty.range.0..=certainty.range.1).contains(&limit));
    Some(Checked { path: path.to_owned(), value, bound: budget.bound.describe(), verdict, is_uncertain })
}

fn counts(found: &Comparison) -> Map<String, Value> {
    let mut detail = Map::new();
    detail.insert("rounds".to_owned(), json!(found.rounds));
    detail.insert("disturbed".to_owned(), json!(found.disturbed));
    detail
}

/// The times of both contestants, for the report.
fn in_ns(found: &Comparison) -> Value {
    json!(format!("{:.0} ns against {:.0} ns", found.a.median, found.b.median))
}

/// The range that holds most samples.
pub fn spread(of: Summary, digits: i32) -> Value {
    json!([rounded(of.low, digits), rounded(of.high, digits)])
}

/// Inserts `value` at the dotted `path`.
fn place(values: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            values.insert(path.to_owned(), value);
        }
        Some((first, rest)) => {
            let inner = values.entry(first).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                place(inner, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certainty(low: f64, high: f64) -> Option<Certainty> {
        Some(Certainty { range: (low, high), is_noisy: false })
    }

    #[test]
    fn a_figure_is_at_its_path() {
        let mut figures = Figures::new(true);
        figures.enter("export");
        figures.add("nbd.qd1_over_copy", 1.04);
        figures.add("nbd.qd16_over_copy", 1.07);
        let json = figures.into_json(Value::Null);
        assert_eq!(json["export"]["nbd"]["qd1_over_copy"], 1.04);
        assert_eq!(json["export"]["nbd"]["qd16_over_copy"], 1.07);
    }

    #[test]
    fn a_verdict_is_beside_its_figure_and_listed_at_the_end() {
        let mut figures = Figures::new(true);
        figures.enter("engine");
        figures.add_detailed("write_4k_over_copy", 1.3, Map::new(), certainty(1.28, 1.32));
        figures.add_detailed("write_512_over_copy", 1.9, Map::new(), certainty(1.8, 2.1));
        figures.summarize();
        let json = figures.into_json(Value::Null);
        let detail = &json["engine"]["write_4k_over_copy_detail"];
        assert_eq!((&detail["met"], &detail["budget"]), (&json!(false), &json!("at most 1.25")));
        assert_eq!(json["summary"]["missed"], json!(["engine.write_4k_over_copy"]));
        assert_eq!(json["summary"]["met"], json!(["engine.write_512_over_copy"]));
        assert_eq!(json["summary"]["uncertain"], json!(["engine.write_512_over_copy"]));
    }

    #[test]
    fn a_figure_without_a_budget_has_no_verdict() {
        let mut figures = Figures::new(true);
        figures.enter("engine");
        figures.add("write_4k_ns", 455.0);
        figures.summarize();
        let json = figures.into_json(Value::Null);
        assert_eq!(json["engine"], json!({"write_4k_ns": 455.0}));
        assert_eq!(json["summary"]["met"], json!([]));
    }
}
