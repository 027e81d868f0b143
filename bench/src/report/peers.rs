//! The peers' part of the page: the output of `cargo xtask vm peers --json`, as a table.
//!
//! Invariants: only measured figures are shown; the cell of a job that a stack cannot run stays empty.

use super::{pointer, short};
use serde_json::Value;
use std::fmt::Write;

/// The marker before the replaced text.
pub const BEGIN: &str = "<!-- peers: what follows is written by `cargo xtask vm peers --report` -->";
/// The marker after the replaced text.
pub const END: &str = "<!-- end of peers -->";

/// The comparisons that have a limit, by their paths.
const COMPARED: [&str; 4] = [
    "vm.ublk_extra_instructions",
    "vm.write_over_bcache",
    "vm.dsync_extra_over_ublk",
    "vm.dsync_over_write_in_process",
];

/// Whether the figures include peers.
pub fn has(figures: &Value) -> bool {
    !list(figures, "stacks").is_empty()
}

/// The text between the markers.
pub fn section(figures: &Value) -> String {
    let mut text = String::new();
    let vm = &figures["vm"];
    let rounds = match vm["rounds"].as_u64() {
        Some(1) => "one round".to_owned(),
        Some(rounds) => format!("medians of {rounds} rounds"),
        None => "it is not known of how many rounds".to_owned(),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "Linux {}, one processor; instructions for a request of 4 KiB, fio included; {rounds}.\n",
        words(&vm["kernel"])
    );
    let stacks = list(figures, "stacks");
    let (jobs, left_out): (Vec<_>, Vec<_>) = list(figures, "jobs")
        .iter()
        .partition(|job| stacks.iter().any(|stack| of(stack, words(&job["name"])).is_some()));
    heading(&jobs, &mut text);
    for stack in stacks {
        row(words(&stack["what"]), &jobs, |job| of(stack, job), &mut text);
    }
    if !left_out.is_empty() {
        let left_out: Vec<_> = left_out.iter().map(|job| words(&job["what"])).collect();
        let _ = writeln!(text, "\nNot measured: {}.", left_out.join("; "));
    }
    compared(figures, &mut text);
    differences(stacks, &jobs, &mut text);
    let doubts: Vec<_> = list(figures, "doubts").iter().map(words).collect();
    if !doubts.is_empty() {
        let _ = writeln!(text, "\nUncertain: {}.", doubts.join("; "));
    }
    text
}

fn heading(jobs: &[&Value], text: &mut String) {
    let titles: String = jobs.iter().map(|job| format!(" {} |", words(&job["what"]))).collect();
    let _ = writeln!(text, "| |{titles}\n|{}", " --- |".repeat(jobs.len() + 1));
}

/// A line of a table, with the available figures of each job.
fn row(what: &str, jobs: &[&Value], figure: impl Fn(&str) -> Option<f64>, text: &mut String) {
    let figures: String = jobs
        .iter()
        .map(|job| format!(" {} |", figure(words(&job["name"])).map(thousands).unwrap_or_default()))
        .collect();
    let _ = writeln!(text, "| {what} |{figures}");
}

/// The differences to which the page refers, so that its text need not contain numbers.
fn differences(stacks: &[Value], jobs: &[&Value], text: &mut String) {
    let figure = |name: &str, job: &str| of(stacks.iter().find(|stack| words(&stack["name"]) == name)?, job);
    let between = |more: &str, less: &str, job: &str| Some(figure(more, job)? - figure(less, job)?);
    let of_dsync = |name: &str, job: &str| {
        // The difference to the same job without O_DSYNC.
        let plain = job.strip_prefix("dsync").map(|depth| format!("write{depth}"))?;
        Some(figure(name, job)? - figure(name, &plain)?)
    };
    type Difference<'a> = (&'a str, &'a dyn Fn(&str) -> Option<f64>);
    let lines: [Difference<'_>; 4] = [
        ("ublk over nothing, beside the bare device", &|job| between("ublk_null", "pmem", job)),
        ("CBD through ublk, beside ublk over nothing", &|job| between("cbd_ublk", "ublk_null", job)),
        ("O_DSYNC, beside a plain write: ublk over nothing", &|job| of_dsync("ublk_null", job)),
        ("O_DSYNC, beside a plain write: CBD through ublk", &|job| of_dsync("cbd_ublk", job)),
    ];
    let is_known = |line: &&Difference<'_>| jobs.iter().any(|job| line.1(words(&job["name"])).is_some());
    for (number, (what, difference)) in lines.iter().filter(is_known).enumerate() {
        if number == 0 {
            text.push('\n');
            heading(jobs, text);
        }
        row(what, jobs, difference, text);
    }
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

/// The name and the figure of a job for each stack that has one.
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
    fn one_round_is_not_a_median_and_unmeasured_jobs_have_no_column() {
        let mut figures = peers();
        assert!(section(&figures).contains("; medians of 3 rounds."));
        figures["vm"]["rounds"] = 1.into();
        for stack in figures["vm"]["stacks"].as_array_mut().expect("stacks") {
            stack["figures"].as_object_mut().expect("figures").remove("full_32");
        }
        let text = section(&figures);
        assert!(text.contains("fio included; one round.\n"), "{text}");
        assert!(text.contains("| | write, depth 1 |\n| --- | --- |\n| bcache | 30,000 |\n"), "{text}");
        assert!(text.contains("\nNot measured: full.\n"), "{text}");
    }

    #[test]
    fn differences_are_shown_where_both_figures_are_known() {
        let mut figures = peers();
        assert!(!section(&figures).contains("beside"), "one of each pair is missing");
        let jobs =
            ["write_1", "dsync_1", "read_1"].map(|name| serde_json::json!({"name": name, "what": name}));
        figures["vm"]["jobs"] = jobs.to_vec().into();
        let stack = |name: &str, write: u32, dsync: u32| {
            let figures =
                serde_json::json!({"write_1": {"instructions": write}, "dsync_1": {"instructions": dsync}});
            serde_json::json!({"name": name, "what": name, "figures": figures})
        };
        figures["vm"]["stacks"] = vec![
            stack("pmem", 5000, 6000),
            stack("ublk_null", 9000, 20_000),
            stack("cbd_ublk", 14_000, 23_500),
        ]
        .into();
        let text = section(&figures);
        let part =
            text.split_once("\n| | write_1 | dsync_1 |\n| --- | --- | --- |\n| ublk").expect("a table").1;
        assert_eq!(
            part.lines().take(4).collect::<Vec<_>>(),
            [
                " over nothing, beside the bare device | 4,000 | 14,000 |",
                "| CBD through ublk, beside ublk over nothing | 5,000 | 3,500 |",
                "| O_DSYNC, beside a plain write: ublk over nothing |  | 11,000 |",
                "| O_DSYNC, beside a plain write: CBD through ublk |  | 9,500 |",
            ]
        );
    }

    #[test]
    fn digits_are_grouped_by_three() {
        let texts = [0.0, 999.0, 1000.0, 1_234_567.4, -1234.0, -123.0].map(thousands);
        assert_eq!(texts, ["0", "999", "1,000", "1,234,567", "-1,234", "-123"]);
    }
}
