//! Examples of each command, for its help and its man page.
//!
//! Invariants: every command that is not hidden has one, and a test parses each.

use clap::Command;
use std::fmt::Write;

/// The purpose of an example, and the command line.
type Example = (&'static str, &'static str);

/// The examples of `set`.
const SET: &[Example] = &[
    ("Fill the cache up to 70 % before clean data is dropped:", "cbdctrl set -b 0 gc_percent=70"),
    (
        "Limit writeback to 100 MiB a second, many epochs in one batch:",
        "cbdctrl set -b 0 writeback_rate=100M consistency=checkpoint",
    ),
    (
        "Keep data that the disk refuses in the cache, and write the rest:",
        "cbdctrl set -b 0 on_write_error=park write_error_after_s=30",
    ),
    (
        "Scrub every two weeks, at night:",
        "cbdctrl set -b 0 scrub_every=14d scrub_window=22:00-06:00 scrub_rate=50M",
    ),
    ("Give a backend a name:", "cbdctrl set -b 0 name=db-data"),
    ("Give its block device another one:", "cbdctrl set -d db-data name=db-disk"),
];

/// Of `rescue`.
const RESCUE: &[Example] = &[
    ("List dirty data and the disks to which it belongs:", "cbdctrl rescue /mnt/pmem/cbd.region"),
    ("Write it:", "cbdctrl rescue /mnt/pmem/cbd.region --yes"),
    (
        "Write it over what was written to the disk without its cache:",
        "cbdctrl rescue /mnt/pmem/cbd.region -b 0 --changed-disk --yes",
    ),
    (
        "Write the dirty data of a cache of Linux's dm-pcache to its disk:",
        "cbdctrl rescue --from dm-pcache /dev/pmem0 --to /dev/sdb --yes",
    ),
];

/// The examples of `advise`.
const ADVISE: &[Example] = &[
    ("For a cache in use, from what the daemon has noted of its last requests:", "cbdctrl advise -b 0"),
    (
        "From a trace of a disk, made with blktrace -d /dev/sdb -w 600 -o - | blkparse -i - > trace:",
        "cbdctrl advise --trace trace",
    ),
    (
        "Around the size of a cache of 4 GiB, for a disk that takes 150 MiB a second:",
        "cbdctrl advise --trace trace --size 4G --disk-rate 150M",
    ),
    (
        "From an iolog of fio, for three sizes, as JSON:",
        "cbdctrl advise --trace iolog --sizes 1G,2G,6G --json",
    ),
];

/// The examples of `scrub`.
const SCRUB: &[Example] = &[
    (
        "Look at 50 MiB a second in the background, and repair the disk from the cache:",
        "cbdctrl scrub -b 0 --rate 50M --repair",
    ),
    ("Wait for the result:", "cbdctrl scrub -b 0 --wait"),
    ("Show the place and the results of all scrubs:", "cbdctrl scrub --status"),
];

/// The examples of `tp-grow`.
const TP_GROW: &[Example] = &[
    ("Extend the file of a region to 64 GiB, and use all of it:", "cbdctrl tp-grow -s 64G"),
    ("Use all of a file or device that has become larger already:", "cbdctrl tp-grow"),
];

/// The examples of `tp-reg`.
const TP_REG: &[Example] = &[
    (
        "Create a region of 8 GiB on a DAX file system, and a transport on it:",
        "cbdctrl tp-reg --path /mnt/pmem/cbd.region --size 8G --host node0 --format",
    ),
    (
        "Register on a region with a transport, and restore its backends and devices:",
        "cbdctrl tp-reg --path /mnt/pmem/cbd.region --host node0",
    ),
    (
        "Create a transport that several hosts share, on memory that all of them have mapped:",
        "cbdctrl tp-reg --path /dev/dax0.0 --host a --format --shared",
    ),
];

/// The examples of `host-clear`.
const HOST_CLEAR: &[Example] =
    &[("Take everything from host 1, which is dead, of transport 0:", "cbdctrl host-clear --host 1")];

/// The examples of the command `name`.
pub fn of(name: &str) -> &'static [Example] {
    match name {
        "tp-reg" => TP_REG,
        "tp-unreg" => {
            &[("Unregister from transport 1, whose backends were stopped:", "cbdctrl tp-unreg -t 1")]
        }
        "tp-grow" => TP_GROW,
        "scrub" => SCRUB,
        "tp-list" => &[("List the transports:", "cbdctrl tp-list")],
        "host-clear" => HOST_CLEAR,
        "host-list" => &[("List the hosts of transport 0 as JSON:", "cbdctrl host-list --json")],
        "backend-start" => &[
            (
                "Cache /dev/sdb, create a block device and print its path:",
                "cbdctrl backend-start --path /dev/sdb --cache-size 4G --start-dev",
            ),
            (
                "The same, but fail instead of an export by NBD:",
                "cbdctrl backend-start -p /dev/sdb -c 4G -D --require-kernel",
            ),
            (
                "For a virtual machine:",
                "cbdctrl backend-start -p /dev/sdb -c 4G -D -e vhost-user:/run/cbd/vm.sock",
            ),
            (
                "With a name, which also leads to its device (/dev/cbd/by-name/db-data):",
                "cbdctrl backend-start -p /dev/sdb -c 4G -D --name db-data",
            ),
            (
                "At least 2 GiB of the space that it shares with other such caches, and up to 16 GiB:",
                "cbdctrl backend-start -p /dev/sdc -c 2G..16G --weight 2",
            ),
            ("Start a backend whose disk is at another path now:", "cbdctrl backend-start -p /dev/sdc"),
        ],
        "backend-stop" => &[
            ("Write all dirty data to the disk, which is a plain disk then:", "cbdctrl backend-stop -b 0"),
            ("Allow a slow disk more time without progress:", "cbdctrl backend-stop -b 0 --timeout 600"),
            (
                "Drop the dirty data of a failed disk; status shows the number of bytes:",
                "cbdctrl backend-stop -b 0 --discard-dirty 1048576",
            ),
        ],
        "dev-start" => &[
            ("Create the best block device that the machine supports:", "cbdctrl dev-start -b 0"),
            ("An NBD server on a port of this machine:", "cbdctrl dev-start -b 0 -e nbd:tcp:127.0.0.1:10809"),
        ],
        "dev-stop" => &[
            ("Remove block device 0 if it is not in use:", "cbdctrl dev-stop -d 0"),
            ("Remove it even if in use; requests of its clients fail:", "cbdctrl dev-stop -d 0 --force"),
        ],
        "dev-list" => &[("List the block devices and their exports:", "cbdctrl dev-list")],
        "status" => &[
            ("Show everything:", "cbdctrl status"),
            ("Show one backend, by its name:", "cbdctrl status -b db-data"),
            ("For a program, with a timeout of 2 seconds:", "cbdctrl status --json --timeout 2"),
        ],
        "set" => SET,
        "checkpoint" => &[
            (
                "Write all data that is dirty at this moment to the disk of backend 0, and wait:",
                "cbdctrl checkpoint -b 0 --wait",
            ),
            (
                "Bring the disks of a database's data and log to one moment, for snapshots of both:",
                "cbdctrl checkpoint -b 0,1 --together --hold 5m",
            ),
        ],
        "drain" => &[("Write the dirty data of all caches to their disks:", "cbdctrl drain")],
        "check" => &[(
            "Check a region, including the data of each record:",
            "cbdctrl check /mnt/pmem/cbd.region --data",
        )],
        "dump" => &[(
            "Show the dirty records of a range of the device:",
            "cbdctrl dump /mnt/pmem/cbd.region records --dirty --range 1G+4K",
        )],
        "repair" => &[("Repair damaged second copies:", "cbdctrl repair /mnt/pmem/cbd.region")],
        "rescue" => RESCUE,
        "advise" => ADVISE,
        "demo" => &[
            ("Show CBD at work on this machine:", "cbdctrl demo"),
            ("Faster:", "cbdctrl demo --quick"),
            ("Two hosts on one region:", "cbdctrl demo --hosts"),
        ],
        "daemon" => &[
            ("As the systemd unit does:", "cbdd"),
            (
                "Several daemons on one machine, each with folders of its own:",
                "cbdd --state-dir /var/lib/cbd2 --run-dir /run/cbd2 --dev-dir /dev/cbd2 --rules-dir /etc/udev/rules.d",
            ),
        ],
        "completions" => &[(
            "For all users of bash:",
            "cbdctrl completions bash > /usr/share/bash-completion/completions/cbdctrl",
        )],
        "man" => &[("For all users of this machine:", "cbdctrl man /usr/local/share/man")],
        _ => of_live(name),
    }
}

/// As [`of`], for lists of backends, the commands that change one while its block devices are in use, `doctor` and `safe-to`.
fn of_live(name: &str) -> &'static [Example] {
    match name {
        "unseal" => &[
            ("List the disks that are kept from other programs:", "cbdctrl unseal"),
            ("See what is lost if a disk is used without its cache:", "cbdctrl unseal /dev/sdb"),
            ("Use it all the same:", "cbdctrl unseal /dev/sdb --discard-dirty 1048576"),
        ],
        "backend-list" => &[
            ("List the backends of this host:", "cbdctrl backend-list"),
            ("List the backends of all hosts of transport 1:", "cbdctrl backend-list -t 1 --all"),
        ],
        "top" => &[
            ("Watch all devices; q ends it, ? shows the keys:", "cbdctrl top"),
            (
                "The figures of the next 10 seconds of one backend as a table:",
                "cbdctrl top -b db-data --once -i 10",
            ),
            ("A line of JSON each second, for a program:", "cbdctrl top --json --interval 1"),
        ],
        "backend-grow" => &[(
            "Behind an extension of the disk; then let the file system on it grow, for example with resize2fs /dev/cbd0:",
            "cbdctrl backend-grow -b 0",
        )],
        "events" => &[
            ("Show what is known of this run of the daemon:", "cbdctrl events"),
            (
                "Show what happens from now on, also over restarts of the daemon:",
                "cbdctrl events --follow --since now",
            ),
            (
                "What was wrong with one disk in the last hour:",
                "cbdctrl events -b db-data --severity warning --since 1h",
            ),
            ("For a program:", "cbdctrl events --follow --json"),
        ],
        "cache-attach" => {
            &[("Put a cache of 4 GiB in front of a disk in use:", "cbdctrl cache-attach -b 0 -c 4G")]
        }
        "backend-move" => &[
            ("Move backend 0 to host b, while it is in use:", "cbdctrl backend-move -b 0 --to b"),
            (
                "Allow a slow disk more time without progress:",
                "cbdctrl backend-move -b 0 --to b --timeout 600",
            ),
        ],
        "cache-detach" => &[
            (
                "Write all dirty data to the disk, and use the disk without a cache:",
                "cbdctrl cache-detach -b 0",
            ),
            ("Allow a slow disk more time without progress:", "cbdctrl cache-detach -b 0 --timeout 600"),
        ],
        "cache-resize" => &[
            ("Let a cache grow, or shrink, to 8 GiB:", "cbdctrl cache-resize -b 0 -c 8G"),
            ("Let it share space with other such caches:", "cbdctrl cache-resize -b 0 -c 2G..16G"),
        ],
        "doctor" => &[
            ("Check this machine, and the disks of the daemon:", "cbdctrl doctor"),
            ("Which durability would a region have here?", "cbdctrl doctor /mnt/pmem/cbd.region"),
        ],
        "pin" => &[
            ("Keep an index of a data base in the cache:", "cbdctrl pin -b 0 /srv/db/index.ibd"),
            ("The first 64 MiB of the device:", "cbdctrl pin -b 0 --range 0+64M"),
            ("The metadata of the file system at /srv:", "cbdctrl pin -b 0 --metadata /srv"),
            ("Show what is pinned:", "cbdctrl pin -b 0 --list"),
        ],
        "safe-to" => &[
            ("Before the program is removed:", "cbdctrl safe-to remove"),
            ("Before the daemon is restarted while clients run:", "cbdctrl safe-to restart"),
            ("Before an older version is installed:", "cbdctrl safe-to downgrade 0.1.0"),
        ],
        "unpin" => &[
            ("Keep a file no longer:", "cbdctrl unpin -b 0 /srv/db/index.ibd"),
            ("End all pins:", "cbdctrl unpin -b 0 --all"),
        ],
        _ => &[],
    }
}

/// The command with the examples of each subcommand at the end of its help.
pub fn in_help(mut command: Command) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|each| each.get_name().to_owned()).collect();
    for name in names {
        let examples = of(&name);
        if examples.is_empty() {
            continue;
        }
        command = command.mut_subcommand(&name, |each| {
            let mut text = each.get_after_help().map_or_else(String::new, |help| format!("{help}\n\n"));
            text.push_str("Examples:");
            for (what, line) in examples {
                let _ = write!(text, "\n  {what}\n      {line}");
            }
            each.after_help(text)
        });
    }
    command
}

/// The examples of the command `name` as a section of a man page.
pub fn section(name: &str) -> String {
    let examples = of(name);
    if examples.is_empty() {
        return String::new();
    }
    let mut text = ".SH EXAMPLES\n".to_owned();
    for (what, line) in examples {
        let (what, line) = (escaped(what), escaped(line));
        let _ = write!(text, ".PP\n{what}\n.PP\n.RS 4\n.nf\n{line}\n.fi\n.RE\n");
    }
    text
}

/// Escapes text for roff: a hyphen remains a hyphen, and no line begins with a request.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('-', "\\-").replace('\'', "\\(aq")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, DaemonCli};
    use clap::{CommandFactory, Parser};

    #[test]
    fn every_visible_command_has_an_example_that_can_be_parsed() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let examples = of(command.get_name());
            assert!(!examples.is_empty(), "{}", command.get_name());
            for (_, line) in examples {
                let words = line.split(" > ").next().unwrap_or(line).split_whitespace();
                if line.starts_with("cbdd") {
                    DaemonCli::try_parse_from(words).expect(line);
                } else {
                    Cli::try_parse_from(words).expect(line);
                }
            }
        }
    }

    #[test]
    fn the_help_of_a_command_ends_with_its_examples_and_keeps_its_own_text() {
        let mut command = in_help(Cli::command());
        let help = command.find_subcommand_mut("set").expect("set").render_help().to_string();
        let (settings, examples) = (help.find("gc_percent=0..98"), help.find("Examples:"));
        assert!(settings.is_some() && settings < examples, "{help}");
    }
}
