//! The report of the demonstration with several hosts, as one JSON object and as a table.
//!
//! Invariants: the object has the same fields however the demonstration ends; results that were not reached are null or
//! empty. No field counts errors of clients: the first one ends the demonstration, and is its error.

use super::{DISK, Scale};
use crate::measure::Pair;
use crate::report::{Common, Conclusion, figures};
use cbd_daemon::api::HostInfo;
use cbd_daemon::size::format_size;
use serde::Serialize;
use std::fmt::Write;

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What the other one reports, too.
    #[serde(flatten)]
    pub common: Common,
    /// The hosts as each of them sees them.
    pub hosts: Vec<SeenBy>,
    /// The figures.
    pub results: Results,
    /// The comparison after the measurement, through both hosts.
    pub verified_through_both: Option<Verified>,
    /// Kills of the daemon that has the backend.
    pub kills_of_a: Vec<KillOfA>,
    /// Kills of the other daemon.
    pub kills_of_b: Vec<KillOfB>,
    /// Moves of the backend.
    pub moves: Vec<Move>,
}

/// What one host sees.
#[derive(Clone, Debug, Serialize)]
pub struct SeenBy {
    /// Its name.
    pub host: &'static str,
    /// What `host-list` shows there.
    pub hosts: Vec<HostInfo>,
}

/// The figures of each device.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Results {
    /// The slow disk without a cache.
    pub disk: Option<Pair>,
    /// The block device of host a, which has the backend.
    pub host_a: Option<Pair>,
    /// The block device of host b, through the channel to host a.
    pub host_b: Option<Pair>,
}

impl Results {
    /// The figures of a host.
    pub fn of(&mut self, host: &str) -> &mut Option<Pair> {
        if host == super::NAMES[super::A] { &mut self.host_a } else { &mut self.host_b }
    }
}

/// A comparison of all blocks with the log of writes, through both hosts.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Verified {
    /// Writes that were acknowledged until then.
    pub acknowledged: u64,
    /// Acknowledged writes that were found.
    pub verified: u64,
    /// Acknowledged writes that are lost.
    pub lost: u64,
}

/// A kill of the daemon that has the backend, while clients of host b write.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct KillOfA {
    /// Dirty bytes before the kill.
    pub dirty_bytes: u64,
    /// Time from the kill until the daemon was started again.
    pub down_ms: f64,
    /// Time from the kill until the daemon served the block device of its own host.
    pub back_ms: f64,
    /// The slowest request of clients of host b.
    pub pause_ms: f64,
    /// The comparison after the restart.
    #[serde(flatten)]
    pub compared: Verified,
}

/// A kill of the daemon of host b, while clients of both hosts write.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct KillOfB {
    /// Time from the kill until the daemon was started again.
    pub down_ms: f64,
    /// Time from the kill until each client had connected again.
    pub back_ms: f64,
    /// Clients of host b that have connected again.
    pub reconnected_clients: u32,
    /// Writes of clients of host b that were in flight, which were never acknowledged.
    pub interrupted_writes: u32,
    /// Requests of clients of host a that completed while the daemon of host b was dead.
    pub completed_on_a_while_down: u64,
    /// The slowest request of clients of host a.
    pub slowest_on_a_ms: f64,
    /// The comparison after the restart.
    #[serde(flatten)]
    pub compared: Verified,
}

/// A move of the backend while clients of both hosts write.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Move {
    /// The host that had the backend.
    pub from: &'static str,
    /// The host that has it now.
    pub to: &'static str,
    /// The host whose daemon was asked to move it.
    pub asked: &'static str,
    /// Dirty bytes before the move.
    pub dirty_bytes: u64,
    /// Duration of the command.
    pub duration_ms: f64,
    /// Time for which requests were held, of the event `backend.moved`.
    pub pause_ms: u64,
    /// The slowest request of clients of host a.
    pub slowest_on_a_ms: f64,
    /// The slowest request of clients of host b.
    pub slowest_on_b_ms: f64,
    /// Requests of clients of host a that completed during the command.
    pub completed_on_a: u64,
    /// Requests of clients of host b that completed during the command.
    pub completed_on_b: u64,
    /// The comparison after the move.
    #[serde(flatten)]
    pub compared: Verified,
}

impl Report {
    /// A report without results.
    pub fn new(scale: &Scale) -> Self {
        Self {
            common: Common::new(DISK, [scale.disk, scale.working_set, scale.cache]),
            hosts: Vec::new(),
            results: Results::default(),
            verified_through_both: None,
            kills_of_a: Vec::new(),
            kills_of_b: Vec::new(),
            moves: Vec::new(),
        }
    }
}

impl Conclusion for Report {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn pairs(&self) -> [Option<Pair>; 3] {
        [self.results.disk, self.results.host_a, self.results.host_b]
    }

    fn table(&self) -> String {
        let mut text = figures(&[
            ("disk alone", self.results.disk),
            ("host a", self.results.host_a),
            ("host b", self.results.host_b),
        ]);
        let _ = writeln!(
            text,
            "Host a has the backend; requests of host b go through the region to a. Working set {}, cache {}, all through \
             NBD on a unix socket.",
            format_size(self.common.working_set_bytes),
            format_size(self.common.cache_bytes)
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_results_has_all_fields() {
        let mut report = Report::new(&super::super::QUICK);
        report.conclude(None, 1.0);
        let value = serde_json::to_value(&report).unwrap();
        for field in
            ["results", "verified_through_both", "kills_of_a", "kills_of_b", "moves", "drain", "backing"]
        {
            assert!(value.get(field).is_some(), "{field}");
        }
        assert_eq!((&value["ok"], &value["samples"]), (&true.into(), &0.into()));
    }

    #[test]
    fn the_counts_of_a_comparison_stand_beside_the_figures_of_its_step() {
        let compared = Verified { acknowledged: 5, verified: 5, lost: 0 };
        let value = serde_json::to_value(Move { from: "a", to: "b", compared, ..Move::default() }).unwrap();
        assert_eq!((&value["verified"], &value["to"]), (&5.into(), &"b".into()));
    }
}
