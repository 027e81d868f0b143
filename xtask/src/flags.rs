//! The options of tasks.

use crate::{fsstress, fsx, problem::Problem};

/// The steps of `test`, in the order in which they run.
pub const STEPS: [&str; 13] = [
    "format",
    "tidy",
    "lint",
    "doc",
    "freestanding",
    "build",
    "test",
    "fuzz",
    "sim",
    "release",
    "demo",
    "package",
    "vm",
];

/// Options of `test` and `nightly`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TestFlags {
    /// Leave out the steps that need root, without an error.
    pub no_system: bool,
    /// Run only these steps; empty means all.
    pub only: Vec<String>,
    /// Run only the tests whose name contains this.
    pub filter: Option<String>,
}

impl TestFlags {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option, an unknown step or a missing value.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut flags = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--no-system" => flags.no_system = true,
                "--only" => {
                    for step in value("--only", rest.next())?.split(',') {
                        if !STEPS.contains(&step) {
                            let known = STEPS.join(", ");
                            return Err(Problem::Usage(format!(
                                "there is no step '{step}'; the steps are {known}"
                            )));
                        }
                        flags.only.push(step.to_owned());
                    }
                }
                "--filter" => flags.filter = Some(value("--filter", rest.next())?.clone()),
                other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
            }
        }
        Ok(flags)
    }

    /// Whether a step is selected. A filter selects tests, so if only a filter is given, only the tests run.
    pub fn wants(&self, step: &str) -> bool {
        if !self.only.is_empty() {
            return self.only.iter().any(|wanted| wanted == step);
        }
        self.filter.is_none() || step == "test"
    }
}

/// Reads the options of `fsx`.
///
/// # Errors
/// [`Problem::Usage`] for an unknown option, a missing file, or a value that is not a number.
pub fn fsx_plan(arguments: &[String]) -> Result<fsx::Plan, Problem> {
    let mut plan = fsx::Plan { path: "".into(), seed: 1, operations: 10_000, size: 4 << 20, direct: None };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--seed" => plan.seed = number(argument, rest.next())?,
            "--operations" => plan.operations = number(argument, rest.next())?,
            "--size" => plan.size = number(argument, rest.next())?,
            "--direct" => plan.direct = Some(number(argument, rest.next())?),
            path if !path.starts_with('-') && plan.path.as_os_str().is_empty() => plan.path = path.into(),
            other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
        }
    }
    if plan.path.as_os_str().is_empty() {
        return Err(Problem::Usage("fsx needs a file".to_owned()));
    }
    Ok(plan)
}

/// Reads the options of `fsstress`.
///
/// # Errors
/// [`Problem::Usage`] for an unknown option, a missing directory, or a value that is not a number.
pub fn fsstress_plan(arguments: &[String]) -> Result<fsstress::Plan, Problem> {
    let mut plan = fsstress::Plan { path: "".into(), seed: 1, operations: 2_000, threads: 4 };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--seed" => plan.seed = number(argument, rest.next())?,
            "--operations" => plan.operations = number(argument, rest.next())?,
            "--threads" => plan.threads = number(argument, rest.next())?,
            path if !path.starts_with('-') && plan.path.as_os_str().is_empty() => plan.path = path.into(),
            other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
        }
    }
    if plan.path.as_os_str().is_empty() {
        return Err(Problem::Usage("fsstress needs a directory".to_owned()));
    }
    Ok(plan)
}

fn number(option: &str, given: Option<&String>) -> Result<u64, Problem> {
    value(option, given)?.parse().map_err(|_| Problem::Usage(format!("{option} needs a number")))
}

fn value<'a>(option: &str, given: Option<&'a String>) -> Result<&'a String, Problem> {
    given.ok_or_else(|| Problem::Usage(format!("{option} needs a value")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<TestFlags, Problem> {
        TestFlags::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn without_options_every_step_runs() {
        let flags = parse("").expect("no option is fine");
        assert!(STEPS.iter().all(|step| flags.wants(step)));
    }

    #[test]
    fn a_filter_runs_the_tests_alone() {
        let flags = parse("--filter torn").expect("a filter is fine");
        assert_eq!(STEPS.iter().filter(|step| flags.wants(step)).count(), 1);
        assert!(flags.wants("test"));
    }

    #[test]
    fn only_the_named_steps_run() {
        let flags = parse("--only lint,demo").expect("both steps exist");
        assert!(flags.wants("lint") && flags.wants("demo") && !flags.wants("test"));
    }

    #[test]
    fn an_unknown_step_or_option_is_wrong_usage() {
        assert!(matches!(parse("--only lintt"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--fast"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--filter"), Err(Problem::Usage(_))));
    }
}
