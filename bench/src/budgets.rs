//! The budgets of the figures: one table that the benchmarks check and the report shows.
//!
//! Invariants: a missed budget is no evidence of incorrect behaviour; a figure from a noisy machine decides nothing.

/// The bound of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Bound {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
    /// No bound: the figure is measured and shown.
    Reported,
}

/// The budget of one figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Budget {
    /// The path of the figure in the JSON, names separated by dots.
    pub path: &'static str,
    /// A description of the figure.
    pub what: &'static str,
    /// Its bound.
    pub bound: Bound,
}

const fn at_most(path: &'static str, limit: f64, what: &'static str) -> Budget {
    Budget { path, what, bound: Bound::AtMost(limit) }
}

const fn at_least(path: &'static str, limit: f64, what: &'static str) -> Budget {
    Budget { path, what, bound: Bound::AtLeast(limit) }
}

const fn reported(path: &'static str, what: &'static str) -> Budget {
    Budget { path, what, bound: Bound::Reported }
}

/// All budgets, in the order of the report.
pub const BUDGETS: [Budget; 60] = [
    at_most("engine.write_4k_over_copy", 1.25, "4 KiB random write over the bare persistent copy"),
    at_most("engine.write_512_over_copy", 2.0, "512 B random write over the copy"),
    at_most("engine.write_64k_over_copy", 1.10, "64 KiB random write over the copy"),
    at_most("engine.read_4k_over_copy_crc", 1.5, "4 KiB random read hit, verified, over plain copy and CRC"),
    at_least("engine.scale_2_over_copy", 0.95, "scaling from one thread to two over the copy's own"),
    at_most("engine.flush_extra_us", 0.6, "flush after a write, over the write, 16 lanes, us"),
    at_most("engine.fua_extra_us", 0.6, "FUA write over the plain write, 16 lanes, us"),
    at_most("engine.write_amplification", 1.04, "region bytes over user bytes, 4 KiB writes, reclaim apart"),
    at_most("engine.index_bytes_per_block", 32.0, "memory for a cached 4 KiB block, bytes"),
    at_most(
        "daemon.rss_over_index_mib",
        64.0,
        "memory of a daemon over its indexes after mixed requests, MiB",
    ),
    at_most(
        "daemon.rss_after_stop_mib",
        32.0,
        "memory of a daemon when all of its backends are stopped, MiB",
    ),
    at_least("recovery.records_per_core_second", 10e6, "recovery, records a second and core"),
    at_most(
        "restart.serve_ms",
        500.0,
        "a killed daemon's region of 10 GiB in shared memory served again, ms",
    ),
    at_least(
        "writeback.over_sequential",
        0.95,
        "drain of adjacent blocks, share of the disk's sequential rate",
    ),
    at_most(
        "tail.p9999_over_copy",
        3.0,
        "p99.99 of 4 KiB writes beside writeback and reclaim, over the copy's",
    ),
    reported("tail.max_ms", "the longest of these writes, ms"),
    at_most(
        "cockpit.cost",
        1.01,
        "4 KiB write or read hit with its request counted, over one that is not, the worse of both",
    ),
    at_most("export.nbd.qd1_over_copy", 1.10, "NBD, 4 KiB write, depth 1, over the export on a bare copy"),
    at_most("export.nbd.qd16_over_copy", 1.10, "NBD, depth 16"),
    at_most("export.fuse.qd1_over_copy", 1.10, "FUSE file, depth 1"),
    at_most("export.fuse.qd16_over_copy", 1.10, "FUSE file, depth 16"),
    at_most("export.loop.qd1_over_copy", 1.10, "FUSE and loop device, depth 1"),
    at_most("export.loop.qd16_over_copy", 1.10, "FUSE and loop device, depth 16"),
    at_most("export.vhost.qd1_over_copy", 1.10, "vhost-user-blk, depth 1"),
    at_most("export.vhost.qd16_over_copy", 1.10, "vhost-user-blk, depth 16"),
    reported("export.vhost.write_4k_p50_us", "vhost-user-blk, 4 KiB write, depth 1, p50, us"),
    at_least("policy.worst_over_lru", 0.92, "hit ratio over LRU's, the worst of the traces, 256 MiB"),
    at_least("policy.large.worst_over_lru", 0.94, "the same in 4 GiB"),
    at_least(
        "policy.same_blocks.worst_over_lru",
        0.99,
        "the same over LRU with as many blocks as the cache held",
    ),
    at_least("policy.zipf_over_arc", 1.0, "hit ratio over that of ARC with as many blocks, zipf"),
    reported("policy.worst_over_arc", "the same over ARC's"),
    reported("policy.worst_over_s3fifo", "the same over S3-FIFO's"),
    at_most(
        "policy.scan_loss",
        0.01,
        "what a scan of ten times the cache takes from the hit ratio of a hot set",
    ),
    at_least(
        "policy.readahead_over_sequential",
        0.95,
        "sequential reads that miss, depth 1, share of the disk's own rate",
    ),
    at_most(
        "policy.readahead_waste",
        0.02,
        "bytes that readahead adds to those that random reads cost the disk",
    ),
    at_most("policy.dirty_error", 0.05, "largest distance of the dirty share from its target, changing load"),
    at_most("policy.rate_deviation", 0.2, "standard deviation of the rate of writeback over its mean"),
    at_most(
        "policy.writeback_bytes",
        0.6,
        "bytes of a Zipf load on the disk, checkpoint, over the former rule's",
    ),
    at_most(
        "cockpit.advice_error",
        0.02,
        "largest error of the hit ratio that advise foretells, on the traces of policy and a mixed one",
    ),
    reported(
        "cockpit.advice_sampled_error",
        "the same where caches are simulated on the sparsest sample of their blocks",
    ),
    reported("cockpit.advice_live_error", "the same of what it foretells by the sample that a device keeps"),
    at_most(
        "hosts.channel_extra_us",
        3.0,
        "4 KiB write or read hit through a channel, both sides polling, over the cache itself, us",
    ),
    at_least(
        "hosts.channel_throughput",
        0.7,
        "the same with 32 in flight: requests a second, over those of one thread with the cache itself",
    ),
    reported(
        "hosts.software_channel_extra_us",
        "channel_extra_us in memory that is used as if it were not coherent",
    ),
    reported(
        "hosts.software_channel_throughput",
        "channel_throughput in memory that is used as if it were not coherent",
    ),
    at_most(
        "hosts.shared_write_cost",
        1.15,
        "4 KiB write on a region that four hosts share, over one on a region of one host",
    ),
    at_most(
        "hosts.idle_cpu_percent",
        1.0,
        "processor time of the host of the backend or of the other one for an idle channel between two kernels, the larger, percent",
    ),
    reported("hosts.woken_idle_cpu_percent", "the same of two hosts of one kernel, which wake each other"),
    reported(
        "hosts.channel_over_nbd",
        "times as fast a channel is as NBD on a unix socket to the host of the backend, 4 KiB, the least",
    ),
    reported(
        "hosts.shared_device_cost",
        "4 KiB write at the host of a backend on a block device started with --shared, over one without, depth 1 or 32",
    ),
    reported("hosts.channel_polled_over_nbd", "the same where the client of the channel polls"),
    reported("hosts.looking_channel_over_nbd", "channel_over_nbd of hosts that do not wake each other"),
    at_most(
        "live.stall_ms_max",
        20.0,
        "ms of the longest request while a cache is attached, resized, detached",
    ),
    at_least(
        "live.shared_over_fixed",
        0.98,
        "hits of three caches that share space, over those of the best fixed division",
    ),
    at_least("live.min_kept", 1.0, "least size of a cache that shares space, over its minimum"),
    at_least("verify.region_over_read", 0.8, "rate at which a cache is checked, over a copy with checksums"),
    at_least("verify.over_read", 1.5, "rate at which a cached range is verified, over reading it"),
    at_least(
        "verify.over_sequential",
        0.9,
        "rate at which a device is verified, over its disk's sequential rate",
    ),
    at_most(
        "verify.p99_over_idle",
        1.1,
        "p99 of 4 KiB requests beside a verification, over that without one",
    ),
    at_most("live.follow_s", 60.0, "time until the shares have followed a load that moves, s"),
];

/// The budget of the figure at `path`, if it has one.
pub fn budget(path: &str) -> Option<&'static Budget> {
    BUDGETS.iter().find(|budget| budget.path == path)
}

/// The result of a figure with a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is within its bound.
    Met,
    /// It is outside its bound.
    Missed,
}

impl Bound {
    /// Whether `value` is within the bound; `None` without a bound.
    pub fn check(self, value: f64) -> Option<Verdict> {
        let met = match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
            Self::Reported => return None,
        };
        Some(if met { Verdict::Met } else { Verdict::Missed })
    }

    /// The number of the bound.
    pub const fn limit(self) -> Option<f64> {
        match self {
            Self::AtMost(limit) | Self::AtLeast(limit) => Some(limit),
            Self::Reported => None,
        }
    }

    /// The bound as text.
    pub fn describe(self) -> String {
        match self {
            Self::AtMost(limit) => format!("at most {limit}"),
            Self::AtLeast(limit) => format!("at least {limit}"),
            Self::Reported => "reported".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_at_its_bound_meets_it() {
        assert_eq!(Bound::AtMost(1.25).check(1.25), Some(Verdict::Met));
        assert_eq!(Bound::AtLeast(0.95).check(0.95), Some(Verdict::Met));
    }

    #[test]
    fn a_figure_on_the_wrong_side_misses() {
        assert_eq!(Bound::AtMost(1.25).check(1.26), Some(Verdict::Missed));
        assert_eq!(Bound::AtLeast(0.95).check(0.94), Some(Verdict::Missed));
        assert_eq!(Bound::Reported.check(1e9), None);
    }

    #[test]
    fn no_figure_has_two_budgets() {
        for (number, budget) in BUDGETS.iter().enumerate() {
            assert!(BUDGETS[..number].iter().all(|other| other.path != budget.path), "{}", budget.path);
        }
    }
}
