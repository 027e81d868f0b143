//! The peers' part of the page: what `cargo xtask vm peers --json` wrote, as a table.
//!
//! Always true here: what is shown was in the figures; a job that a stack cannot have stays empty.

use super::{pointer, short};
use serde_json::Value;
use std::fmt::Write;

/// Before what is replaced.
pub const BEGIN: &str = "<!-- peers: what follows is written by `cargo xtask vm peers --report` -->";
/// Behind it.
pub const END: &str = "<!-- end of peers -->";

/// The comparisons that have a limit, by their paths.
const COMPARED: [&str; 3] =
    ["vm.ublk_extra_instructions", "vm.write_over_bcache", "vm.dsync_extra_over_ublk"];

/// Whether the figures are of peers.
pub fn has(figures: &Value) -> bool {
    !list(figures, "stacks").is_empty()
}

/// What stands between the marks.
pub fn section(figures: &Value) -> String {
    let mut text = String::new();
    let vm = &figures["vm"];
    // Writing to a string can't fail.
    let _ = writeln!(
        text,
        "Linux {}, one processor; instructions for a request of 4 KiB, fio included; medians of {} rounds.\n",
        words(&vm["kernel"]),
        vm["rounds"]
    );
    let jobs = list(figures, "jobs");
    let _ = write!(text, "| |");
    for job in jobs {
        let _ = write!(text, " {} |", words(&job["what"]));
    }
    let _ = writeln!(text, "\n|{}", " --- |".repeat(jobs.len() + 1));
    for stack in list(figures, "stacks") {
        let _ = write!(text, "| {} |", words(&stack["what"]));
        for job in jobs {
            let figure = of(stack, words(&job["name"]));
            let _ = write!(text, " {} |", figure.map(thousands).unwrap_or_default());
        }
        text.push('\n');
    }
    compared(figures, &mut text);
    let doubts: Vec<_> = list(figures, "doubts").iter().map(words).collect();
    if !doubts.is_empty() {
        let _ = writeln!(text, "\nUncertain: {}.", doubts.join("; "));
    }
    text
}

fn compared(figures: &Value, text: &mut String) {
    let mut head = "\n| what | figure | budget | | measured |\n| --- | --- | --- | --- | --- |\n";
    for path in COMPARED {
        let Some(value) = figures.pointer(&pointer(path)).and_then(Value::as_f64) else { continue };
        let detail =
            |name: &str| figures.pointer(&format!("{}_detail/{name}", pointer(path))).unwrap_or(&Value::Null);
        let verdict = if detail("met") == &Value::Bool(true) { "met" } else { "**missed**" };
        let _ = writeln!(
            text,
            "{head}| {} (`{path}`) | {} | <= {} | {verdict} | {} |",
            words(detail("what")),
            short(value),
            short(detail("limit").as_f64().unwrap_or(f64::NAN)),
            words(detail("absolute"))
        );
        head = "";
    }
}

/// For each stack its name and its figure of a job, where it has one.
pub fn figures_of<'a>(figures: &'a Value, job: &str) -> Vec<(&'a str, &'a str, f64)> {
    let stacks = list(figures, "stacks").iter();
    stacks.filter_map(|stack| Some((words(&stack["name"]), words(&stack["what"]), of(stack, job)?))).collect()
}

fn of(stack: &Value, job: &str) -> Option<f64> {
    stack["figures"][job]["instructions"].as_f64()
}

fn list<'a>(figures: &'a Value, name: &str) -> &'a [Value] {
    figures["vm"][name].as_array().map_or(&[], Vec::as_slice)
}

fn words(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

/// A whole number with a comma before each three digits.
pub fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::peers;
    use super::*;

    #[test]
    fn each_stack_has_a_line_and_each_comparison_its_verdict() {
        let text = section(&peers());
        assert!(text.contains("| | write, depth 1 | full |\n| --- | --- | --- |\n"), "{text}");
        assert!(text.contains("| bcache | 30,000 | 41,000 |\n| ublk over nothing | 9,500 |  |\n"), "{text}");
        let line = text.lines().find(|line| line.contains("`vm.write_over_bcache`")).expect("a line");
        assert!(line.contains("| 0.85 | <= 0.8 | **missed** | 25500 against 30000 |"), "{line}");
        assert!(!text.contains("vm.dsync_extra_over_ublk"), "it was not measured");
        assert!(text.contains("Uncertain: bcache write_1: the rounds are 2.0 % apart."));
    }

    #[test]
    fn three_digits_stand_together() {
        let texts = [0.0, 999.0, 1000.0, 1_234_567.4, -1234.0, -123.0].map(thousands);
        assert_eq!(texts, ["0", "999", "1,000", "1,234,567", "-1,234", "-123"]);
    }
}
