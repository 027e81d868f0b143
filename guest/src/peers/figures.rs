//! Computes figures from samples.
//!
//! Invariants: a figure is the median of its rounds, with their spread; large spreads are reported, and so
//! are measurements during which a cache wrote to a disk that should have been idle.

use super::script::{Amount, JOBS, Job};
use super::stacks::{BCACHE, CBD, IN_PROCESS, NULL, STACKS, Stack};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The spread of rounds, in percent of their median, above which a figure is uncertain.
const SPREAD_MAX: f64 = 1.0;

/// What was noted before or after a run of fio, or the difference of two notes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Note {
    /// Nanoseconds.
    clock: f64,
    /// Nanoseconds of it in which tasks ran: instructions.
    tasks: f64,
    /// Sectors that were written to the disk.
    sectors: f64,
}

impl std::ops::Sub for Note {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            clock: self.clock - other.clock,
            tasks: self.tasks - other.tasks,
            sectors: self.sectors - other.sectors,
        }
    }
}

/// The figure of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Instructions for a request, of each round.
    pub rounds: Vec<f64>,
    /// Nanoseconds for a request in which no task ran.
    pub idle: f64,
    /// Bytes for a request that were written to the disk meanwhile.
    pub written: f64,
}

/// The figures of a stack, by the names of jobs.
pub type Figures = BTreeMap<&'static str, Figure>;

impl Figure {
    /// Instructions for a request.
    pub fn median(&self) -> f64 {
        median(&self.rounds)
    }

    /// The spread of the rounds, in percent of the median.
    pub fn spread(&self) -> f64 {
        let most = self.rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let least = self.rounds.iter().copied().fold(f64::INFINITY, f64::min);
        100.0 * (most - least) / self.median()
    }

    fn json(&self) -> Value {
        json!({
            "instructions": rounded(self.median(), 0),
            "rounds": self.rounds.iter().map(|&value| rounded(value, 0)).collect::<Vec<_>>(),
            "spread_percent": rounded(self.spread(), 2),
            "idle_ns": rounded(self.idle, 0),
            "disk_bytes_written": rounded(self.written, 0),
        })
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        even if even % 2 == 0 => sorted[middle - 1].midpoint(sorted[middle]),
        _ => sorted[middle],
    }
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

/// The figures in what a guest printed.
///
/// # Errors
/// A job that has no sample, or an invalid sample.
pub fn read(stack: &Stack, amount: &Amount, output: &str) -> Result<Figures, String> {
    let mut notes: BTreeMap<(&str, usize, u64), Vec<Note>> = BTreeMap::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("sample ")) {
        let (run, note) =
            parse(line).ok_or_else(|| format!("{}: 'sample {line}' is no sample", stack.name))?;
        notes.entry(run).or_default().push(note);
    }
    let mut figures = Figures::new();
    for job in amount.jobs_of(stack) {
        let requests = if job.is_full { amount.full } else { amount.requests };
        let mut figure = Figure { rounds: Vec::new(), idle: 0.0, written: 0.0 };
        for round in 1..=amount.rounds {
            let run = |requests| {
                let noted = notes.get(&(job.name, round, requests)).map_or(&[][..], Vec::as_slice);
                let &[before, after] = noted else {
                    let text = format!("{} of {requests} requests in round {round}", job.name);
                    return Err(format!("{}: {text} was noted {} times, not 2", stack.name, noted.len()));
                };
                Ok(after - before)
            };
            let more = run(requests[1])? - run(requests[0])?;
            let requests = (requests[1] - requests[0]) as f64;
            figure.rounds.push(more.tasks / requests);
            figure.idle += (more.clock - more.tasks) / requests / amount.rounds as f64;
            figure.written += 512.0 * more.sectors / requests / amount.rounds as f64;
        }
        figures.insert(job.name, figure);
    }
    Ok(figures)
}

/// `NAME ROUND REQUESTS CLOCK TASKS SECTORS`.
fn parse(line: &str) -> Option<((&str, usize, u64), Note)> {
    let words: Vec<_> = line.split_whitespace().collect();
    let &[name, round, requests, clock, tasks, sectors] = &words[..] else { return None };
    let note =
        Note { clock: clock.parse().ok()?, tasks: tasks.parse().ok()?, sectors: sectors.parse().ok()? };
    Some(((name, round.parse().ok()?, requests.parse().ok()?), note))
}

impl Amount {
    /// What is uncertain about all figures.
    fn doubt(&self) -> Option<String> {
        let requests = self.requests[1] - self.requests[0];
        (self.rounds == 1).then(|| format!("all of it: one round, and {requests} requests of difference"))
    }
}

/// What is uncertain about the figures of a stack.
pub fn doubts(stack: &Stack, figures: &Figures) -> Vec<String> {
    let mut doubts = Vec::new();
    for Job { name, is_full, .. } in &JOBS {
        let Some(figure) = figures.get(name) else { continue };
        if figure.spread() > SPREAD_MAX {
            doubts.push(format!("{} {name}: the rounds are {:.1} % apart", stack.name, figure.spread()));
        }
        if !is_full && figure.written != 0.0 {
            doubts.push(format!(
                "{} {name}: {:.0} bytes a request went to the disk, which should have rested",
                stack.name, figure.written
            ));
        }
    }
    doubts
}

/// The limit of a comparison.
struct Limit {
    name: &'static str,
    what: &'static str,
    most: f64,
}

const EXTRA: Limit = Limit {
    name: "ublk_extra_instructions",
    what: "instructions that CBD adds to a 4 KiB write through ublk, depth 1",
    most: 2500.0,
};
const OVER_BCACHE: Limit = Limit {
    name: "write_over_bcache",
    what: "a 4 KiB write to CBD through ublk over one to bcache, the worst of depth 1 and 32",
    most: 0.8,
};
const DSYNC: Limit = Limit {
    name: "dsync_extra_over_ublk",
    what: "an O_DSYNC write over a plain one, against the same of ublk over nothing, the worse of depth 1 and 32",
    most: 1.05,
};

const DSYNC_IN_PROCESS: Limit = Limit {
    name: "dsync_over_write_in_process",
    what: "an O_DSYNC write in process over a plain one, depth 1",
    most: 1.1,
};

impl Limit {
    fn put(&self, into: &mut Map<String, Value>, value: f64, digits: i32, absolute: String) {
        into.insert(self.name.to_owned(), json!(rounded(value, digits)));
        let detail =
            json!({"what": self.what, "limit": self.most, "met": value <= self.most, "absolute": absolute});
        into.insert(format!("{}_detail", self.name), detail);
    }
}

/// One job over another of a stack: the median of the ratios of each round, in which reclaim has the same to do for both.
fn paired(
    all: &BTreeMap<&'static str, Figures>,
    stack: &str,
    job: &str,
    over: &str,
) -> Option<(f64, String)> {
    let figures = all.get(stack)?;
    let (job, over) = (figures.get(job)?, figures.get(over)?);
    let ratios: Vec<f64> = job.rounds.iter().zip(&over.rounds).map(|(job, over)| job / over).collect();
    let absolute = format!("{:.0} against {:.0}", job.median(), over.median());
    let each: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.3}")).collect();
    Some((median(&ratios), format!("{absolute}; by rounds {}", each.join(", "))))
}

/// All figures as one object, with the comparisons for which there are enough figures.
pub fn json(kernel: &str, amount: &Amount, all: &BTreeMap<&'static str, Figures>) -> Value {
    let mut vm = Map::new();
    vm.insert("kernel".to_owned(), json!(kernel));
    vm.insert("rounds".to_owned(), json!(amount.rounds));
    let of = |stack: &str, job: &str| all.get(stack)?.get(job).map(Figure::median);
    let extra = |job: &str| Some(of(CBD, job)? - of(NULL, job)?);
    if let (Some(extra), Some(with), Some(without)) =
        (extra("write_1"), of(CBD, "write_1"), of(NULL, "write_1"))
    {
        EXTRA.put(&mut vm, extra, 0, format!("{with:.0} against {without:.0}"));
    }
    let extras: Map<String, Value> = JOBS
        .iter()
        .filter_map(|job| Some((job.name.to_owned(), json!(rounded(extra(job.name)?, 0)))))
        .collect();
    if !extras.is_empty() {
        vm.insert("ublk_extra".to_owned(), extras.into());
    }
    let worst = |jobs: &[&'static str], ratio: &dyn Fn(&str) -> Option<(f64, String)>| {
        let found: Option<Vec<_>> = jobs.iter().map(|job| Some((*job, ratio(job)?))).collect();
        let found = found?;
        let texts: Vec<_> =
            found.iter().map(|(job, (ratio, text))| format!("{job}: {ratio:.3} ({text})")).collect();
        let worst = found.iter().map(|(_, (ratio, _))| *ratio).fold(f64::NEG_INFINITY, f64::max);
        Some((worst, texts.join("; ")))
    };
    if let Some((value, absolute)) = worst(&["write_1", "write_32", "write_32_aio"], &|job| {
        let (ours, theirs) = (of(CBD, job)?, of(BCACHE, job)?);
        Some((ours / theirs, format!("{ours:.0} against {theirs:.0}")))
    }) {
        OVER_BCACHE.put(&mut vm, value, 3, absolute);
    }
    if let Some((value, absolute)) = worst(&["dsync_1", "dsync_32"], &|dsync| {
        let plain = dsync.replace("dsync", "write");
        let ours = of(CBD, dsync)? / of(CBD, &plain)?;
        let theirs = of(NULL, dsync)? / of(NULL, &plain)?;
        Some((ours / theirs, format!("{ours:.3} against {theirs:.3}")))
    }) {
        DSYNC.put(&mut vm, value, 3, absolute);
    }
    if let Some((ratio, absolute)) = paired(all, IN_PROCESS, "dsync_1", "write_1") {
        DSYNC_IN_PROCESS.put(&mut vm, ratio, 3, absolute);
    }
    let jobs: Vec<_> = JOBS.iter().map(|job| json!({"name": job.name, "what": job.title})).collect();
    vm.insert("jobs".to_owned(), jobs.into());
    let stacks: Vec<Value> = STACKS
        .iter()
        .filter_map(|stack| {
            let figures = all.get(stack.name)?;
            let figures: Map<String, Value> =
                figures.iter().map(|(&job, figure)| (job.to_owned(), figure.json())).collect();
            Some(json!({"name": stack.name, "what": stack.title, "figures": figures}))
        })
        .collect();
    vm.insert("stacks".to_owned(), stacks.into());
    let of_stacks = STACKS.iter().filter_map(|stack| Some(doubts(stack, all.get(stack.name)?))).flatten();
    let doubts: Vec<String> = amount.doubt().into_iter().chain(of_stacks).collect();
    vm.insert("doubts".to_owned(), doubts.into());
    json!({ "vm": vm })
}

/// The figures as a table, with the comparisons.
pub fn table(figures: &Value) -> String {
    let mut text = format!("{:<24}", "instructions a request");
    for job in &JOBS {
        text += &format!("{:>14}", job.name);
    }
    let vm = &figures["vm"];
    for stack in vm["stacks"].as_array().into_iter().flatten() {
        text += &format!("\n{:<24}", stack["what"].as_str().unwrap_or_default());
        for job in &JOBS {
            let figure = stack["figures"][job.name]["instructions"].as_f64();
            text += &figure.map_or_else(|| format!("{:>14}", "-"), |figure| format!("{figure:>14.0}"));
        }
    }
    for limit in [EXTRA, OVER_BCACHE, DSYNC, DSYNC_IN_PROCESS] {
        let (Some(value), detail) = (vm[limit.name].as_f64(), &vm[format!("{}_detail", limit.name)]) else {
            continue;
        };
        let word = if detail["met"] == true { "met" } else { "MISSED" };
        text += &format!(
            "\nvm.{} = {value} (at most {}: {word}): {}",
            limit.name,
            limit.most,
            detail["absolute"].as_str().unwrap_or_default()
        );
    }
    for doubt in vm["doubts"].as_array().into_iter().flatten() {
        text += &format!("\nuncertain: {}", doubt.as_str().unwrap_or_default());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::script::{QUICK, WHOLE};
    use super::*;

    fn stack(name: &str) -> &'static Stack {
        STACKS.iter().find(|stack| stack.name == name).expect("it is there")
    }

    /// What a guest prints if requests take `cost` instructions, with other output.
    fn output(stack: &Stack, cost: impl Fn(&str) -> u64) -> String {
        let mut text = "other words\n".to_owned();
        for job in JOBS.iter().filter(|job| job.is_of(stack)) {
            for requests in if job.is_full { QUICK.full } else { QUICK.requests } {
                let tasks = 1_000_000 + requests * cost(job.name);
                let run = format!("sample {} 1 {requests}", job.name);
                text += &format!("{run} 5000 40 8\n{run} {} {} 8\n", 5000 + requests * 7 + tasks, 40 + tasks);
            }
        }
        text
    }

    #[test]
    fn a_figure_is_what_more_requests_took_without_what_was_idle() {
        let pmem = stack("pmem");
        let figures = read(pmem, &QUICK, &output(pmem, |_| 4000)).expect("all samples are there");
        let figure = &figures["write_1"];
        assert_eq!((figure.median(), figure.idle, figure.written), (4000.0, 7.0, 0.0));
        assert_eq!(figures.len(), JOBS.len() - 1, "it cannot be full");
    }

    #[test]
    fn a_job_without_samples_is_an_error_that_names_it() {
        let pmem = stack("pmem");
        let whole = output(pmem, |_| 4000);
        let part: String =
            whole.lines().filter(|line| !line.contains("read_32")).collect::<Vec<_>>().join("\n");
        assert!(read(pmem, &QUICK, &part).expect_err("it is missing").contains("read_32"));
        let half = whole.replacen("sample dsync_1 ", "other dsync_1 ", 1);
        assert!(read(pmem, &QUICK, &half).expect_err("it is half").contains("noted 1 times"));
        assert!(read(pmem, &QUICK, "sample write_1 1 x\n").is_err());
    }

    #[test]
    fn comparisons_take_the_worse_depth_and_tell_whether_they_are_met() {
        let cost = |name: &'static str| {
            move |job: &str| match (name, job) {
                (IN_PROCESS, "write_1") => 4000,
                (IN_PROCESS, "dsync_1") => 4500,
                (NULL, "dsync_1") | (CBD, "dsync_1" | "dsync_32" | "write_1") => 22_000,
                (NULL, _) => 20_000,
                (CBD, _) => 21_000,
                _ => 30_000,
            }
        };
        let all: BTreeMap<_, _> = [NULL, CBD, BCACHE, IN_PROCESS]
            .map(|name| (name, read(stack(name), &QUICK, &output(stack(name), cost(name))).expect("figures")))
            .into();
        let vm = &json("7", &QUICK, &all)["vm"];
        assert_eq!(vm["ublk_extra_instructions"], 2000.0);
        assert_eq!(vm["ublk_extra_instructions_detail"]["met"], true);
        assert_eq!(vm["write_over_bcache"], 0.733);
        // At depth 32 the null device adds nothing.
        assert_eq!(vm["dsync_extra_over_ublk"], 1.048);
        assert_eq!(vm["dsync_over_write_in_process"], 1.125);
        let rounds = |rounds: [f64; 3]| Figure { rounds: rounds.to_vec(), idle: 0.0, written: 0.0 };
        let figures =
            [("write_1", rounds([100.0, 200.0, 300.0])), ("dsync_1", rounds([110.0, 210.0, 330.0]))];
        let ratio = paired(&[(IN_PROCESS, figures.into())].into(), IN_PROCESS, "dsync_1", "write_1");
        assert_eq!(ratio.expect("both are there").1, "210 against 200; by rounds 1.100, 1.050, 1.100");
        assert_eq!(vm["dsync_over_write_in_process_detail"]["met"], false);
        assert_eq!(vm["ublk_extra"]["read_32"], 1000.0);
        let text = table(&json("7", &QUICK, &all));
        assert!(text.contains("vm.write_over_bcache = 0.733 (at most 0.8: met)"), "{text}");
    }

    #[test]
    fn large_spreads_and_a_disk_that_was_not_idle_are_reported() {
        let figure = |rounds: &[f64], written| Figure { rounds: rounds.to_vec(), idle: 0.0, written };
        let figures = Figures::from([
            ("write_1", figure(&[1000.0, 1009.0, 1004.0], 0.0)),
            ("write_32", figure(&[1000.0, 1012.0, 1000.0], 0.0)),
            ("read_1", figure(&[1000.0], 8.0)),
            ("full_32", figure(&[1000.0], 4096.0)),
        ]);
        let said = doubts(stack("cbd_ublk"), &figures);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("write_32") && said[1].contains("read_1"));
        // The spread of one round is unknown.
        let quick = &json("7", &QUICK, &[("cbd_ublk", figures.clone())].into())["vm"]["doubts"];
        assert_eq!(quick[0], "all of it: one round, and 1000 requests of difference");
        assert_eq!(
            json("7", &WHOLE, &[("cbd_ublk", figures)].into())["vm"]["doubts"].as_array().map(Vec::len),
            Some(2)
        );
    }
}
