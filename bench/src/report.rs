//! The report: the figures in `docs/performance.md`, and plots beside it.
//!
//! Invariants: text that people wrote on the page stays unchanged. Only the text between the markers of a measured part is
//! replaced, and a page without markers is refused.
//!
//! Elsewhere: the meaning of the figures (the page).

mod peers;
mod plots;

use crate::budgets::{BUDGETS, Bound, Budget};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The page.
const PAGE: &str = "performance.md";
/// The directory of plots, beside the page.
const PLOTS: &str = "performance";
/// The marker before the replaced text.
const BEGIN: &str = "<!-- figures: what follows is written by `cargo xtask bench --report` -->";
/// The marker after the replaced text.
const END: &str = "<!-- end of figures -->";

/// The documentation of the project that this program was built from.
pub fn docs_of_the_project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// Reads the figures of an earlier run.
///
/// # Errors
/// A description of the problem with the file.
pub fn read(file: &Path) -> Result<Value, String> {
    let text =
        std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| {
        format!("{} holds no figures ({error}): it must be what --json wrote", file.display())
    })
}

/// Writes the report into `docs`.
///
/// # Errors
/// When the page lacks its markers, or a file cannot be written, as text.
pub fn write(figures: &Value, docs: &Path) -> Result<(), String> {
    let page = docs.join(PAGE);
    let fail =
        |what: &str, path: &Path, error: std::io::Error| format!("cannot {what} {}: {error}", path.display());
    let text = std::fs::read_to_string(&page).map_err(|error| fail("read", &page, error))?;
    let (plots, of_peers) = (plots::all(figures)?, plots::peers(figures)?);
    let lacks = |begin, end| format!("{} lacks the lines\n{begin}\n{end}", page.display());
    let mut text = text;
    if !peers::has(figures) || figures.get("machine").is_some() {
        text = replace(&text, (BEGIN, END), &section(figures, &plots)).ok_or_else(|| lacks(BEGIN, END))?;
    }
    if peers::has(figures) {
        let (begin, end) = (peers::BEGIN, peers::END);
        let section = peers::section(figures) + &shown(&of_peers);
        text = replace(&text, (begin, end), &section).ok_or_else(|| lacks(begin, end))?;
    }
    let directory = docs.join(PLOTS);
    std::fs::create_dir_all(&directory).map_err(|error| fail("make", &directory, error))?;
    for plot in plots.iter().chain(&of_peers) {
        let file = directory.join(plot.file);
        std::fs::write(&file, &plot.svg).map_err(|error| fail("write", &file, error))?;
    }
    std::fs::write(&page, text).map_err(|error| fail("write", &page, error))
}

/// The page with another section between these markers; `None` if it lacks them.
fn replace(page: &str, (begin, end): (&str, &str), section: &str) -> Option<String> {
    let (before, rest) = page.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{begin}\n\n{section}\n{end}{after}"))
}

/// Links to the plots, for the page.
fn shown(plots: &[plots::Plot]) -> String {
    plots.iter().map(|plot| format!("\n![{}]({PLOTS}/{})\n", plot.title, plot.file)).collect()
}

/// The text between the markers.
fn section(figures: &Value, plots: &[plots::Plot]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}\n", machine(figures));
    let _ = writeln!(text, "| what | figure | budget | | measured | 95 % range |");
    let _ = writeln!(text, "| --- | --- | --- | --- | --- | --- |");
    let mut left_out = Vec::new();
    for budget in &BUDGETS {
        match row(figures, budget) {
            Some(row) => text.push_str(&row),
            None => left_out.push(format!("`{}`", budget.path)),
        }
    }
    if !left_out.is_empty() {
        let _ = writeln!(text, "\nNot measured in this run: {}.", left_out.join(", "));
    }
    text + &shown(plots)
}

/// The machine of the figures.
fn machine(figures: &Value) -> String {
    let of = |path: &str| match figures.pointer(path) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => "unknown".to_owned(),
    };
    format!(
        "{} processors ({}), last-level cache {}, kernel {}; memory: {}.",
        of("/machine/processors"),
        of("/machine/processor"),
        of("/machine/last_level_cache"),
        of("/machine/kernel"),
        of("/engine/memory"),
    )
}

/// The line of one budget; `None` if its figure was not measured.
fn row(figures: &Value, budget: &Budget) -> Option<String> {
    let value = number(figures, budget.path)?;
    let detail = |name: &str| figures.pointer(&format!("{}_detail/{name}", pointer(budget.path)));
    let absolute = detail("absolute").and_then(Value::as_str).unwrap_or_default();
    let range = detail("range_95_percent").and_then(|range| {
        Some(format!("{} to {}", short(range.get(0)?.as_f64()?), short(range.get(1)?.as_f64()?)))
    });
    let is_uncertain = detail("uncertain") == Some(&Value::Bool(true));
    let verdict = match detail("met") {
        _ if is_uncertain => "uncertain",
        Some(Value::Bool(true)) => "met",
        Some(_) => "**missed**",
        None => "",
    };
    let bound = match budget.bound {
        Bound::AtMost(limit) => format!("<= {}", short(limit)),
        Bound::AtLeast(limit) => format!(">= {}", short(limit)),
        Bound::Reported => String::new(),
    };
    let (what, path, range) = (budget.what, budget.path, range.unwrap_or_default());
    let value = short(value);
    Some(format!("| {what} (`{path}`) | {value} | {bound} | {verdict} | {absolute} | {range} |\n"))
}

/// The number at `path`, names separated by dots.
fn number(figures: &Value, path: &str) -> Option<f64> {
    figures.pointer(&pointer(path))?.as_f64()
}

fn pointer(path: &str) -> String {
    format!("/{}", path.replace('.', "/"))
}

/// A number in a readable form.
fn short(value: f64) -> String {
    let (text, unit) = if value.abs() >= 1e6 {
        (format!("{:.2}", value / 1e6), " million")
    } else {
        (format!("{value:.3}"), "")
    };
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figures() -> Value {
        json!({
            "machine": {"processor": "P", "processors": 2, "last_level_cache": "8192K", "kernel": "6.1"},
            "engine": {
                "memory": "memfd",
                "write_4k_over_copy": 1.3,
                "write_4k_over_copy_detail": {
                    "met": false, "uncertain": false, "absolute": "583 ns against 448 ns",
                    "range_95_percent": [1.28, 1.32],
                },
            },
            "recovery": {
                "records_per_core_second": 12_345_678.0,
                "records_per_core_second_detail": {"met": true, "uncertain": false},
            },
            "tail": {
                "percentiles": [50.0, 99.0, 99.99, 100.0],
                "write_4k_us": [0.6, 1.2, 8.0, 900.0],
                "copy_4k_us": [0.5, 0.9, 5.0, 700.0],
            },
            "export": {"nbd": {
                "qd1_p50_us": 9.4, "qd1_copy_p50_us": 8.7, "qd16_p50_us": 85.0, "qd16_copy_p50_us": 75.0,
            }},
        })
    }

    /// The figures of two stacks.
    pub fn peers() -> Value {
        json!({"vm": {
            "kernel": "7.3.4", "rounds": 3,
            "jobs": [{"name": "write_1", "what": "write, depth 1"}, {"name": "full_32", "what": "full"}],
            "stacks": [
                {"name": "bcache", "what": "bcache",
                 "figures": {"write_1": {"instructions": 30000.0}, "full_32": {"instructions": 41000.0}}},
                {"name": "ublk_null", "what": "ublk over nothing",
                 "figures": {"write_1": {"instructions": 9500.0}}},
            ],
            "write_over_bcache": 0.85,
            "write_over_bcache_detail":
                {"what": "w", "limit": 0.8, "met": false, "absolute": "25500 against 30000"},
            "doubts": ["bcache write_1: the rounds are 2.0 % apart"],
        }})
    }

    #[test]
    fn a_figure_has_its_budget_its_verdict_and_what_it_is_made_of() {
        let text = section(&figures(), &[]);
        let line = text.lines().find(|line| line.contains("engine.write_4k_over_copy")).expect("a line");
        assert!(
            line.contains("| 1.3 | <= 1.25 | **missed** | 583 ns against 448 ns | 1.28 to 1.32 |"),
            "{line}"
        );
        assert!(text.contains("| 12.35 million | >= 10 million | met |"), "{text}");
    }

    #[test]
    fn what_was_not_measured_is_listed() {
        let text = section(&figures(), &[]);
        let line = text.lines().find(|line| line.starts_with("Not measured")).expect("a line");
        assert!(line.contains("`writeback.over_sequential`") && !line.contains("engine.write_4k_over_copy"));
    }

    #[test]
    fn text_outside_the_marks_stays() {
        let page = format!("# Page\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n");
        let once = replace(&page, (BEGIN, END), "new\n").expect("a page with marks");
        assert_eq!(once, format!("# Page\n\nBefore.\n\n{BEGIN}\n\nnew\n\n{END}\n\nAfter.\n"));
        assert_eq!(replace(&once, (BEGIN, END), "new\n").as_deref(), Some(once.as_str()));
        assert_eq!(replace("# Page\n", (BEGIN, END), "new\n"), None);
    }

    #[test]
    fn a_report_is_written_with_its_plots() {
        let docs = tempfile::tempdir().expect("a directory");
        let page = docs.path().join(PAGE);
        std::fs::write(&page, format!("Before.\n{BEGIN}\n{END}\nAfter.\n")).expect("a page");
        write(&figures(), docs.path()).expect("written");
        let text = std::fs::read_to_string(page).expect("a page");
        assert!(text.starts_with("Before.\n") && text.ends_with("After.\n"));
        for file in ["ratios.svg", "tail.svg", "exports.svg"] {
            assert!(text.contains(&format!("(performance/{file})")), "{text}");
            let svg = std::fs::read_to_string(docs.path().join(PLOTS).join(file)).expect("a plot");
            assert!(svg.starts_with("<svg") && svg.len() < 40_000, "{file}: {} bytes", svg.len());
        }
    }

    #[test]
    fn the_part_of_unmeasured_figures_stays() {
        let docs = tempfile::tempdir().expect("a directory");
        let page = docs.path().join(PAGE);
        let (begin, end) = (peers::BEGIN, peers::END);
        std::fs::write(&page, format!("{BEGIN}\nold\n{END}\n{begin}\nold peers\n{end}\n")).expect("a page");
        write(&peers(), docs.path()).expect("written");
        let text = std::fs::read_to_string(&page).expect("a page");
        assert!(text.starts_with(&format!("{BEGIN}\nold\n{END}\n")), "{text}");
        assert!(text.contains("| bcache |") && !text.contains("old peers"), "{text}");
        assert!(
            text.contains("(performance/peers.svg)") && docs.path().join(PLOTS).join("peers.svg").is_file()
        );
        write(&figures(), docs.path()).expect("written");
        let both = std::fs::read_to_string(&page).expect("a page");
        assert!(both.contains("engine.write_4k_over_copy") && both.contains("| bcache |"), "{both}");
    }

    #[test]
    fn a_page_without_marks_is_refused_and_not_changed() {
        let docs = tempfile::tempdir().expect("a directory");
        let page = docs.path().join(PAGE);
        std::fs::write(&page, "Before.\n").expect("a page");
        assert!(write(&figures(), docs.path()).is_err());
        assert_eq!(std::fs::read_to_string(page).expect("a page"), "Before.\n");
        assert!(!docs.path().join(PLOTS).exists());
    }

    #[test]
    fn the_page_of_the_project_has_its_marks() {
        let page = std::fs::read_to_string(docs_of_the_project().join(PAGE)).expect("a page");
        assert!(replace(&page, (BEGIN, END), "").is_some());
        assert!(replace(&page, (peers::BEGIN, peers::END), "").is_some());
    }
}
