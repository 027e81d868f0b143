//! The stacks that are compared: each peer as its own documentation configures it, on the same memory and the
//! same disk.
//!
//! A setup is shell: `make` creates the device and sets `through`, by which fio finds it; `rest` writes all
//! dirty data back and stops writeback until `work`. If a peer cannot do this, they do nothing.
//!
//! Invariants: nothing of the peers' sources is in this project; they are modules of the guest's kernel, used
//! as a user uses them.

/// A peer, or CBD in one of its forms.
pub struct Stack {
    /// Its name on the command line and in the figures.
    pub name: &'static str,
    /// Its title in the report.
    pub title: &'static str,
    /// Modules beside those that all stacks have.
    pub modules: &'static [&'static str],
    /// Programs of this machine beside those that all stacks have.
    pub programs: &'static [&'static str],
    /// What it needs of this project.
    pub ours: Ours,
    /// `make`, `rest` and `work`.
    pub setup: &'static str,
    /// Whether it is a cache, which can be full.
    pub is_cache: bool,
}

/// What a stack needs of this project in its guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ours {
    /// Nothing: it is a peer.
    None,
    /// The device that does nothing.
    Nothing,
    /// The daemon.
    Daemon,
    /// The daemon, and the engine for fio.
    Engine,
}

/// The device that does nothing.
pub const NULL: &str = "ublk_null";
/// CBD as users run it.
pub const CBD: &str = "cbd_ublk";
/// The peer with a budget.
pub const BCACHE: &str = "bcache";
/// CBD in the process of fio.
pub const IN_PROCESS: &str = "cbd_in_process";

/// All stacks, in the order of the report.
pub const STACKS: [Stack; 7] = [
    Stack {
        name: "pmem",
        title: "/dev/pmem0, no cache",
        modules: &[],
        programs: &[],
        ours: Ours::None,
        setup: "
            make() { through='--filename=/dev/pmem0'; }
            rest() { :; }
            work() { :; }",
        is_cache: false,
    },
    Stack {
        name: "dm_writecache",
        title: "dm-writecache",
        modules: &["dm_writecache"],
        programs: &["dmsetup"],
        ours: Ours::None,
        // Without its watermarks it writes back only on request.
        setup: "
            size=$(cat /sys/block/slow/size)
            table() { echo \"0 $size writecache p $disk /dev/pmem0 4096 $*\"; }
            quiet='--noudevrules --noudevsync'
            make() {
                dmsetup create $quiet cache --table \"$(table 0)\"
                through='--filename=/dev/dm-0'
            }
            rest() { dmsetup message cache 0 flush; }
            work() { :; }",
        is_cache: true,
    },
    Stack {
        name: BCACHE,
        title: "bcache",
        modules: &["bcache"],
        programs: &["make-bcache"],
        ours: Ours::None,
        // Data that it bypasses by default, long runs and requests while the cache is slow, is cached as in
        // the other stacks.
        setup: "
            make() {
                make-bcache --block 4k --wipe-bcache -C /dev/pmem0 -B $disk >/dev/null
                for each in /dev/pmem0 $disk; do echo $each >/sys/fs/bcache/register; done
                wait_until [ -e /sys/block/bcache0/bcache/cache ]
                knobs=/sys/block/bcache0/bcache
                echo writeback >$knobs/cache_mode
                echo 0 >$knobs/sequential_cutoff
                echo 0 >$knobs/cache/congested_read_threshold_us
                echo 0 >$knobs/cache/congested_write_threshold_us
                through='--filename=/dev/bcache0'
            }
            rest() {
                echo 1 >$knobs/writeback_running
                echo 0 >$knobs/writeback_percent
                echo 0 >$knobs/writeback_delay
                wait_until grep -q clean $knobs/state
                echo 0 >$knobs/writeback_running
                echo 10 >$knobs/writeback_percent
            }
            work() { echo 1 >$knobs/writeback_running; }",
        is_cache: true,
    },
    Stack {
        name: "dm_pcache",
        title: "dm-pcache",
        modules: &["dm_pcache"],
        programs: &["dmsetup"],
        ours: Ours::None,
        // It has no command to stop writeback: the disk under it is suspended.
        setup: "
            size=$(cat /sys/block/slow/size)
            quiet='--noudevrules --noudevsync'
            make() {
                dmsetup create $quiet below --table \"0 $size linear $disk 0\"
                dmsetup create $quiet cache --table \"0 $size pcache /dev/pmem0 /dev/dm-0 4 cache_mode writeback data_crc false\"
                through='--filename=/dev/dm-1'
            }
            is_clean() { dmsetup status cache | awk '{ exit $(NF - 2) != $(NF - 1) }'; }
            rest() {
                wait_until is_clean
                dmsetup suspend $quiet --nolockfs below
            }
            work() { dmsetup resume $quiet below; }",
        is_cache: true,
    },
    Stack {
        name: NULL,
        title: "ublk over nothing",
        modules: &["ublk_drv"],
        programs: &[],
        ours: Ours::Nothing,
        setup: "
            make() {
                mkfifo /tmp/never
                nothing 1073741824 1 <>/tmp/never >/tmp/made &
                wait_until [ -s /tmp/made ]
                through=\"--filename=$(cat /tmp/made)\"
            }
            rest() { :; }
            work() { :; }",
        is_cache: false,
    },
    Stack {
        name: CBD,
        title: "CBD through ublk",
        modules: &["ublk_drv"],
        programs: &["mkfs.ext4"],
        ours: Ours::Daemon,
        setup: "
            make() {
                region
                through=\"--filename=$(cbdctrl backend-start --path $disk --cache-size 512M --start-dev)\"
            }
            rest() { drained; }
            work() { written_back; }",
        is_cache: true,
    },
    Stack {
        name: IN_PROCESS,
        title: "CBD in process",
        modules: &[],
        programs: &["mkfs.ext4"],
        ours: Ours::Engine,
        // The daemon creates the cache and sets it up, and does not run while fio has the region.
        setup: "
            make() {
                region
                cbdctrl backend-start --path $disk --cache-size 512M >/dev/null
                end
                through=\"--thread=1 --region=/mnt/region --filename=$disk\"
            }
            rest() { begin; drained; end; }
            work() { begin; written_back; end; }",
        is_cache: true,
    },
];

/// What stacks with a region share: `region` creates one, `begin` and `end` start and stop a daemon,
/// `drained` writes everything back and holds writeback, which `written_back` continues.
pub const REGION: &str = "
    begin() {
        cbdd --state-dir /var/lib/cbd >>/tmp/cbdd.log 2>&1 &
        daemon=$!
        wait_until cbdctrl tp-list >/dev/null 2>&1
    }
    end() {
        kill $daemon
        wait $daemon || true
    }
    region() {
        # Whole huge pages, so that the region is mapped in such pages: 5,000 page faults fall into one run of 6,000
        # writes and none into the next one where a part of the file is not.
        mkfs.ext4 -q -b 4096 -E stride=512,stripe_width=512 /dev/pmem0
        mount -t ext4 -o dax /dev/pmem0 /mnt
        begin
        cbdctrl tp-reg --path /mnt/region --size 560M --host guest --format >/dev/null
    }
    written_back() { cbdctrl set --backend 0 writeback_rate=auto writeback_percent=10 >/dev/null; }
    # The first requests, which are not counted, make 1 % dirty: then a batch is collected, which takes millions of
    # instructions, and waits for the rate while the others are counted.
    drained() {
        written_back
        cbdctrl drain --backend 0 >/dev/null 2>&1
        cbdctrl set --backend 0 writeback_rate=32K writeback_percent=1 >/dev/null
    }
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stack_has_a_name_of_its_own_and_all_that_is_called() {
        for (number, stack) in STACKS.iter().enumerate() {
            assert!(STACKS[..number].iter().all(|other| other.name != stack.name), "{}", stack.name);
            for function in ["make() {", "rest() {", "work() {"] {
                assert!(stack.setup.contains(function), "{}: {function}", stack.name);
            }
        }
    }
}
