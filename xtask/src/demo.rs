//! Checks the demo: `cbdctrl demo --json`, and with `--hosts`, must end within its time limit, and its JSON must be complete and
//! report success.

use crate::shell::{self, Stream};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The maximum duration that the documentation promises to users.
const PROMISED: Duration = Duration::from_secs(120);

/// After this time the demo counts as hanging.
const LIMIT: Duration = Duration::from_secs(240);

/// Runs the demo, and the one with several hosts, with their files in `directory`. Returns the problems, one line each.
pub fn run(program: &Path, directory: &Path) -> Vec<String> {
    let mut problems = one(program, directory, &[], check);
    problems.extend(one(program, directory, &["--hosts", "--quick"], check_hosts));
    problems
}

/// Runs the demo with these options; `check` finds what its JSON lacks.
fn one(program: &Path, directory: &Path, options: &[&str], check: fn(&Value) -> Vec<String>) -> Vec<String> {
    let begun = Instant::now();
    let mut text = String::new();
    let mut errors = Vec::new();
    let mut command = Command::new(program);
    command.args(["demo", "--json"]).args(options).env("TMPDIR", directory);
    let end = shell::run(&mut command, LIMIT, |stream, line| match stream {
        Stream::Output => {
            text.push_str(line);
            text.push('\n');
        }
        Stream::Error => errors.push(line.to_owned()),
    });
    let mut problems = Vec::new();
    if !end.is_success() {
        problems.push(format!("the demo failed: {end}"));
        problems.extend(errors);
    }
    if begun.elapsed() > PROMISED {
        problems.push(format!(
            "the demo took {} s, promised are {}",
            begun.elapsed().as_secs(),
            PROMISED.as_secs()
        ));
    }
    match serde_json::from_str(&text) {
        Ok(shown) => problems.extend(check(&shown)),
        Err(error) => problems.push(format!("the demo's output is not JSON: {error}: {text}")),
    }
    problems
}

fn shown_text(shown: &Value, field: &str) -> String {
    shown.get(field).map_or_else(|| "(missing)".to_owned(), Value::to_string)
}

/// The fields that the JSON lacks, and the failures that it reports.
fn check(shown: &Value) -> Vec<String> {
    println!("    path: {}", shown_text(shown, "path"));
    let mut problems = Vec::new();
    if !shown.get("path").is_some_and(Value::is_string) {
        problems.push("`path` does not name the transport of the device".to_owned());
    }
    match shown.get("fallback_reason") {
        None => problems.push("`fallback_reason` is missing; it is null without a fallback".to_owned()),
        Some(reason) if !reason.is_null() => println!("    fallback_reason: {reason}"),
        Some(_) => {}
    }
    problems
}

/// As [`check`], for several hosts.
fn check_hosts(shown: &Value) -> Vec<String> {
    println!("    hosts: done in {} s", shown_text(shown, "duration_s"));
    let mut problems = Vec::new();
    for (step, count) in [("hosts", 2), ("kills_of_a", 1), ("kills_of_b", 1), ("moves", 2)] {
        if shown.get(step).and_then(Value::as_array).map(Vec::len) != Some(count) {
            problems.push(format!("`{step}` does not have {count} results"));
        }
    }
    if shown.get("backing_verified") != Some(&Value::Bool(true)) {
        problems.push("the disk was not compared with the log of writes".to_owned());
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_demo_that_reports_how_it_ran_is_accepted() {
        assert_eq!(check(&json!({"path": "/dev/cbd0", "fallback_reason": null})), Vec::<String>::new());
    }

    #[test]
    fn a_demo_that_does_not_report_how_it_ran_is_refused() {
        assert_eq!(check(&json!({"results": []})).len(), 2);
    }

    #[test]
    fn a_demo_of_hosts_without_one_of_its_steps_is_refused() {
        let steps = json!({
            "hosts": [{}, {}], "kills_of_a": [{}], "kills_of_b": [{}], "moves": [{}, {}], "backing_verified": true
        });
        assert_eq!(check_hosts(&steps), Vec::<String>::new());
        for step in ["hosts", "kills_of_a", "kills_of_b", "moves", "backing_verified"] {
            let mut without = steps.clone();
            without.as_object_mut().expect("an object").remove(step);
            assert_eq!(check_hosts(&without).len(), 1, "{step}");
        }
    }
}
