//! The tests in guests: `cargo xtask vm test`, and the step `vm` of `cargo xtask test`.
//!
//! Invariants: jobs run one after the other, each in guests of its own with a time limit of its own; the
//! output of the guest is shown for a job that fails.

mod cuts;
mod daemon;
mod debian;
mod dm_pcache;
mod file_systems;
mod harness;
mod machines;
mod memory;
mod migration;
mod one_disk;
mod sealed;
mod shared;
mod ublk;
mod verifies;
mod volumes;

pub use memory::shipped;

use super::guest::{Ended, Host, Outcome};
use super::plan::Plan;
use crate::leftovers::Scratch;
use crate::problem::Problem;
use crate::random::Random;
use crate::report::Count;
use crate::shell::Stream;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Ten times what a guest takes on two idle processors.
const LIMIT: Duration = Duration::from_secs(150);

/// What a test gets beside the host.
struct Given {
    /// For files that are to survive its guests.
    folder: PathBuf,
    /// Number of power cuts, or kills of a daemon, in jobs that repeat them.
    cuts: usize,
}

/// A test.
type Job = fn(&Host, &Given) -> Result<(), String>;

const JOBS: &[(&str, Job)] = &[
    ("a_job_returns_its_output_its_files_and_its_exit_code", harness::returns_output),
    ("a_guest_that_exceeds_its_time_is_killed", harness::over_time),
    ("the_last_lines_of_a_guest_that_dies_are_shown", harness::last_words),
    ("instructions_are_counted_the_same_each_time", harness::counting),
    ("a_cxl_device_is_there", harness::cxl),
    ("a_dax_file_is_power_fail_and_another_is_not", memory::dax_file),
    ("a_ublk_device_is_a_disk_and_reports_its_attributes", ublk::is_a_disk),
    ("a_ublk_device_outlives_its_daemon_and_its_clients_see_a_pause", ublk::outlives_its_daemon),
    ("a_ublk_device_belongs_to_one_daemon", ublk::belongs_to_one_daemon),
    ("a_file_system_on_ublk_outlives_its_daemon", ublk::keeps_a_file_system),
    ("a_ublk_device_over_a_disk_that_hangs_is_stopped_all_the_same", ublk::stops_over_what_hangs),
    ("what_waits_for_space_on_a_ublk_device_ends_with_it", ublk::gives_up_what_waits),
    ("volumes_over_a_disk_have_one_user_for_each_byte", volumes::over_a_disk),
    ("volumes_over_a_file_belong_to_two_daemons_byte_by_byte", volumes::over_a_file),
    ("volumes_of_other_types_have_one_user_for_each_byte", volumes::of_other_types),
    ("an_nvme_disk_verifies_and_compares_in_itself", verifies::nvme),
    ("a_scsi_disk_verifies_and_compares_in_itself", verifies::scsi),
    ("ext4_on_ublk_passes_what_file_systems_are_tested_with", file_systems::ext4),
    ("xfs_on_ublk_passes_what_file_systems_are_tested_with", file_systems::xfs),
    ("ext4_on_ublk_outlives_power_cuts", file_systems::ext4_after_cuts),
    ("xfs_on_ublk_outlives_power_cuts", file_systems::xfs_after_cuts),
    ("what_lies_in_an_nvdimm_outlives_a_power_cut", cuts::synchronised),
    ("a_virtual_machines_disk_outlives_its_daemon", machines::disk),
    ("a_virtual_machine_migrates_between_two_hosts_while_it_writes", migration::between_hosts),
    ("writes_that_were_acknowledged_outlive_power_cuts", cuts::acknowledged),
    ("writes_to_a_device_that_is_memory_outlive_power_cuts", cuts::acknowledged_on_devdax),
    ("pages_of_a_region_that_the_kernel_removes_do_not_end_the_daemon", memory::failed_pages),
    ("writes_to_a_cxl_device_outlive_power_cuts", cuts::acknowledged_on_cxl),
    ("what_dm_pcache_left_is_rescued_in_its_own_guest", dm_pcache::at_home),
    ("a_log_of_dm_pcache_in_two_segments_is_rescued", dm_pcache::long_log),
    ("what_was_flushed_to_dm_pcache_is_rescued_after_power_cuts", dm_pcache::after_cuts),
    ("the_package_installs_on_a_fresh_debian", debian::install),
    ("the_package_is_upgraded_and_removed_under_load", debian::upgrade_and_removal),
    ("a_machine_with_cached_disks_comes_back_after_power_cuts", sealed::comes_back),
    ("a_machine_with_cached_disks_shuts_down_in_time", sealed::shuts_down),
    ("without_its_region_a_machine_leaves_cached_disks_alone", sealed::without_its_region),
    ("without_the_seal_a_machine_damages_cached_disks", sealed::without_the_seal),
    ("two_machines_share_a_region_and_one_loses_its_power", shared::by_two_machines),
    ("two_machines_serve_one_disk_through_kills_moves_and_power_cuts", one_disk::by_two_machines),
    ("the_peers_are_measured", |host, given| super::peers::smallest(host, &given.folder)),
];

/// The jobs that run only in long runs, or when they are named.
const LONG: &[&str] = &[
    "instructions_are_counted_the_same_each_time",
    "a_cxl_device_is_there",
    "a_ublk_device_belongs_to_one_daemon",
    "what_lies_in_an_nvdimm_outlives_a_power_cut",
    "pages_of_a_region_that_the_kernel_removes_do_not_end_the_daemon",
    "what_was_flushed_to_dm_pcache_is_rescued_after_power_cuts",
    "a_file_system_on_ublk_outlives_its_daemon",
    "a_ublk_device_over_a_disk_that_hangs_is_stopped_all_the_same",
    "what_waits_for_space_on_a_ublk_device_ends_with_it",
    "volumes_of_other_types_have_one_user_for_each_byte",
    "ext4_on_ublk_passes_what_file_systems_are_tested_with",
    "xfs_on_ublk_passes_what_file_systems_are_tested_with",
    "ext4_on_ublk_outlives_power_cuts",
    "xfs_on_ublk_outlives_power_cuts",
    "writes_to_a_device_that_is_memory_outlive_power_cuts",
    "writes_to_a_cxl_device_outlive_power_cuts",
    "what_dm_pcache_left_is_rescued_in_its_own_guest",
    "a_log_of_dm_pcache_in_two_segments_is_rescued",
    "the_package_installs_on_a_fresh_debian",
    "the_package_is_upgraded_and_removed_under_load",
    "a_machine_with_cached_disks_comes_back_after_power_cuts",
    "a_machine_with_cached_disks_shuts_down_in_time",
    "without_its_region_a_machine_leaves_cached_disks_alone",
    "without_the_seal_a_machine_damages_cached_disks",
    "two_machines_share_a_region_and_one_loses_its_power",
    "two_machines_serve_one_disk_through_kills_moves_and_power_cuts",
    "the_peers_are_measured",
];

/// Power cuts in a run before every change; with more cuts it is a long run.
pub const CUTS: usize = 2;

/// Runs the jobs whose name contains one of the words; without words, all jobs except those for long runs
/// only.
///
/// # Errors
/// For words that no name contains, and unknown options.
pub fn run(arguments: &[String]) -> Result<bool, Problem> {
    let mut words = Vec::new();
    let mut cuts = CUTS;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == "--cuts" {
            let given = rest.next().and_then(|number| number.parse().ok());
            cuts = given.ok_or_else(|| Problem::Usage("--cuts needs a number".to_owned()))?;
        } else if argument.starts_with('-') {
            return Err(Problem::Usage(format!("vm test takes names of jobs, not '{argument}'")));
        } else {
            words.push(argument.as_str());
        }
    }
    let wanted = |name: &str| {
        if words.is_empty() { belongs(name, cuts) } else { words.iter().any(|word| name.contains(word)) }
    };
    if !JOBS.iter().any(|(name, _)| wanted(name)) {
        let names: Vec<_> = JOBS.iter().map(|(name, _)| format!("\n    {name}")).collect();
        return Err(Problem::Usage(format!("no job is called so; there are{}", names.concat())));
    }
    Ok(all(wanted, cuts).failed == 0)
}

/// Runs all jobs, with `cuts` power cuts in jobs that repeat them.
pub fn test(cuts: usize) -> Count {
    all(|name| belongs(name, cuts), cuts)
}

/// Whether a job is part of a run with `cuts` cuts.
fn belongs(name: &str, cuts: usize) -> bool {
    cuts > CUTS || !LONG.contains(&name)
}

fn all(wanted: impl Fn(&str) -> bool, cuts: usize) -> Count {
    let mut count = Count::default();
    let host = Scratch::new().and_then(|scratch| Ok((Host::new(scratch.path())?, scratch)));
    let (host, scratch) = match host {
        Ok(both) => both,
        Err(text) => {
            println!("    {text}");
            return Count::one(false);
        }
    };
    for (name, job) in JOBS.iter().filter(|(name, _)| wanted(name)) {
        let begun = Instant::now();
        let given = Given { folder: scratch.path().join(name), cuts };
        let ended = std::fs::create_dir_all(&given.folder)
            .map_err(|error| format!("cannot make {}: {error}", given.folder.display()))
            .and_then(|()| job(&host, &given));
        // A disk with a Debian takes some hundred MiB. What cannot be removed is removed with its parent.
        let _ = std::fs::remove_dir_all(&given.folder);
        let word = if ended.is_ok() { "ok" } else { "FAILED" };
        println!("    {name}: {word}, {:.1} s", begun.elapsed().as_secs_f64());
        for line in ended.as_ref().err().into_iter().flat_map(|text| text.lines()) {
            println!("        {line}");
        }
        let one = Count::one(ended.is_ok());
        count.passed += one.passed;
        count.failed += one.failed;
    }
    for left in scratch.leftovers() {
        println!("    left behind: {left}");
        count.failed += 1;
    }
    count
}

/// Random numbers from a seed: CBD_SEED, or another one each time, which is printed.
fn seeded() -> Random {
    let given = std::env::var("CBD_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seed = given.unwrap_or(u64::from(now.subsec_nanos()) ^ now.as_secs());
    println!("    CBD_SEED={seed}");
    Random::new(seed)
}

/// A number in a range, both ends included.
fn between(random: &mut Random, least: u64, most: u64) -> u64 {
    least + random.below(most - least + 1)
}

/// What a guest printed, and how it ended.
pub struct Ran {
    outcome: Outcome,
    /// Its standard output.
    pub output: String,
    errors: String,
}

impl Ran {
    /// Boots a guest and records what it prints; at the line `cut` its power is cut.
    ///
    /// # Errors
    /// Why it could not be started.
    pub fn of(host: &Host, plan: &Plan, cut: Option<&str>) -> Result<Self, String> {
        Self::of_watched(host, plan, |line| cut == Some(line))
    }

    /// The same; its power is cut at the first line for which `cuts` returns true.
    fn of_watched(host: &Host, plan: &Plan, mut cuts: impl FnMut(&str) -> bool) -> Result<Self, String> {
        let (mut output, mut errors) = (String::new(), String::new());
        let outcome = host.boot(plan, |stream, line| {
            let taken = if stream == Stream::Output { &mut output } else { &mut errors };
            taken.push_str(line);
            taken.push('\n');
            if cuts(line) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(Self { outcome, output, errors })
    }

    /// Checks that it ended this way, and printed these parts.
    ///
    /// # Errors
    /// What it did instead, with all its output.
    pub fn expect(&self, ended: Ended, parts: &[&str]) -> Result<(), String> {
        if self.outcome.ended != ended {
            return Err(
                self.complaint(&format!("it ended with {:?} instead of {ended:?}", self.outcome.ended))
            );
        }
        match parts.iter().find(|part| !self.output.contains(**part)) {
            Some(part) => Err(self.complaint(&format!("it did not print '{part}'"))),
            None => Ok(()),
        }
    }

    /// The time from the end of its job until the guest was off, by this machine's clock.
    fn after_its_job(&self) -> Duration {
        let Outcome { all, booted, ran, .. } = self.outcome;
        all.saturating_sub(booted.unwrap_or_default()).saturating_sub(ran.unwrap_or_default())
    }

    /// `what`, with all the output of the guest.
    pub fn complaint(&self, what: &str) -> String {
        format!(
            "{what}; {}\nits output:\n{}its errors:\n{}its console:\n{}",
            super::times(&self.outcome),
            self.output,
            self.errors,
            self.outcome.console.join("\n")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_for_long_runs_exist_and_are_in_no_short_run() {
        for long in LONG {
            assert!(JOBS.iter().any(|(name, _)| name == long), "{long}");
            assert!(belongs(long, CUTS + 1) && !belongs(long, CUTS), "{long}");
        }
        assert!(JOBS.iter().any(|(name, _)| belongs(name, CUTS)));
    }

    #[test]
    fn a_word_without_a_job_is_wrong_usage() {
        assert!(matches!(run(&["no such job".to_owned()]), Err(Problem::Usage(_))));
        assert!(matches!(run(&["--all".to_owned()]), Err(Problem::Usage(_))));
        assert!(matches!(run(&["--cuts".to_owned()]), Err(Problem::Usage(_))));
    }
}
