//! The options.

use crate::groups::GROUPS;
use std::path::PathBuf;

const USAGE: &str = "\
Usage: cbd-bench [GROUP..] [--json] [--report] [--rounds N] [--quick] [--seed N] [--write-percent N]

Measures CBD and its limit, or its peer, in turns. Missed budgets are listed at the end; they are no failure.

  --json       one JSON object on standard output; progress goes to standard error
  --report     writes the figures and plots into docs/performance.md and docs/performance/
  --from FILE  with --report: the figures of an earlier run with --json, instead of measuring
  --docs DIR   with --report: where performance.md is (default: the project's docs)
  --rounds N   turns of each side of a comparison (default 400)
  --quick      small regions and few turns: a test of the benchmarks, the figures mean little
  --seed N     seed of the traces of the group policy (default 1)
  --write-percent N  how many of their requests write (default 0)

Groups (default: all, about eight minutes; with --quick half a minute):
";

/// The help text.
pub fn usage() -> String {
    let groups = GROUPS.iter().map(|group| format!("  {:<12} {}\n", group.name, group.what));
    groups.fold(USAGE.to_owned(), |text, line| text + &line)
}

/// The options.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// Groups to run; empty means all.
    pub groups: Vec<String>,
    /// One JSON object instead of lines.
    pub json: bool,
    /// Small and fast, to try the benchmark itself.
    pub quick: bool,
    /// Turns of each side, if given.
    pub rounds: Option<usize>,
    /// Write the report.
    pub report: bool,
    /// Figures of an earlier run.
    pub from: Option<PathBuf>,
    /// The folder of the report, if it is not in the project.
    pub docs: Option<PathBuf>,
    /// The seed of the traces.
    pub seed: u64,
    /// Percentage of writes among the requests of a trace.
    pub write_percent: u8,
    /// Only open this region, and print the duration. The group `recovery` starts a process with this option.
    pub restart_of: Option<PathBuf>,
    /// Show the usage.
    pub help: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            json: false,
            quick: false,
            rounds: None,
            report: false,
            from: None,
            docs: None,
            seed: 1,
            write_percent: 0,
            restart_of: None,
            help: false,
        }
    }
}

impl Options {
    /// Reads the options.
    ///
    /// # Errors
    /// A description of the error, as text.
    pub fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--json" => options.json = true,
                "--quick" => options.quick = true,
                "--report" => options.report = true,
                "--from" => options.from = Some(rest.next().ok_or("--from needs a file")?.into()),
                "--docs" => options.docs = Some(rest.next().ok_or("--docs needs a directory")?.into()),
                "--restart-of" => {
                    options.restart_of = Some(rest.next().ok_or("--restart-of needs a file")?.into());
                }
                "--help" | "-h" => options.help = true,
                "--rounds" => {
                    let rounds =
                        rest.next().and_then(|number| number.parse().ok()).filter(|&number| number > 0);
                    options.rounds = Some(rounds.ok_or("--rounds needs a number above 0")?);
                }
                "--seed" => {
                    let seed = rest.next().and_then(|number| number.parse().ok());
                    options.seed = seed.ok_or("--seed needs a number")?;
                }
                "--write-percent" => {
                    let percent = rest.next().and_then(|number| number.parse().ok());
                    options.write_percent = percent
                        .filter(|&percent| percent < 100)
                        .ok_or("--write-percent needs a number below 100")?;
                }
                name if GROUPS.iter().any(|group| group.name == name) => options.groups.push(name.to_owned()),
                other => return Err(format!("there is no group or option '{other}'")),
            }
        }
        if !options.report && (options.from.is_some() || options.docs.is_some()) {
            return Err("--from and --docs belong to --report".to_owned());
        }
        Ok(options)
    }

    /// Whether a group is selected.
    pub fn wants(&self, group: &str) -> bool {
        self.groups.is_empty() || self.groups.iter().any(|wanted| wanted == group)
    }

    /// Number of turns of each side.
    pub fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 20 } else { 400 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_group_and_options_in_any_order() {
        let options = parse("--json engine --rounds 4").expect("all of it is known");
        assert!(options.json && options.wants("engine") && !options.wants("exports"));
        assert_eq!(options.rounds(), 4);
    }

    #[test]
    fn what_is_unknown_is_refused() {
        assert!(parse("motor").is_err());
        assert!(parse("--rounds 0").is_err());
        assert!(parse("--rounds").is_err());
        assert!(parse("--from figures.json").is_err());
        assert!(parse("--report --from").is_err());
        assert!(parse("--seed early").is_err());
        assert!(parse("--write-percent 100").is_err());
    }
}
