//! Examples of each command, for its help and its man page.
//!
//! Invariants: every command for people has one, and each is understood as it stands (a test parses them).

use clap::Command;
use std::fmt::Write;

/// What an example does, and the line.
type Example = (&'static str, &'static str);

/// The examples of the command `name`.
pub fn of(name: &str) -> &'static [Example] {
    match name {
        "tp-reg" => &[
            (
                "Make a region of 8 GiB on a DAX file system, and a transport on it:",
                "cbdctrl tp-reg --path /mnt/pmem/cbd.region --size 8G --host node0 --format",
            ),
            (
                "Come back to a region that has one, with all its backends and devices:",
                "cbdctrl tp-reg --path /mnt/pmem/cbd.region --host node0",
            ),
        ],
        "tp-unreg" => &[("Leave transport 1, whose backends were stopped:", "cbdctrl tp-unreg -t 1")],
        "tp-list" => &[("List the transports:", "cbdctrl tp-list")],
        "host-list" => &[("List the hosts of transport 0 as JSON:", "cbdctrl host-list --json")],
        "backend-start" => &[
            (
                "Cache /dev/sdb, and make a block device, whose path is printed:",
                "cbdctrl backend-start --path /dev/sdb --cache-size 4G --start-dev",
            ),
            (
                "The same, but fail rather than be reached by NBD:",
                "cbdctrl backend-start -p /dev/sdb -c 4G -D --require-kernel",
            ),
            (
                "For a virtual machine:",
                "cbdctrl backend-start -p /dev/sdb -c 4G -D -e vhost-user:/run/cbd/vm.sock",
            ),
            (
                "Start a backend again whose disk is at another path by now:",
                "cbdctrl backend-start -p /dev/sdc",
            ),
        ],
        "backend-stop" => &[
            ("Write everything to the disk, which is a plain disk then:", "cbdctrl backend-stop -b 0"),
            (
                "Give a slow disk more time between two signs of progress:",
                "cbdctrl backend-stop -b 0 --timeout 600",
            ),
            (
                "Give dirty data of a dead disk up; status shows how many bytes it is:",
                "cbdctrl backend-stop -b 0 --discard-dirty 1048576",
            ),
        ],
        "backend-list" => &[
            ("List the backends of this host:", "cbdctrl backend-list"),
            ("Those of all hosts of transport 1:", "cbdctrl backend-list -t 1 --all"),
        ],
        "dev-start" => &[
            ("Create the best block device that the machine has:", "cbdctrl dev-start -b 0"),
            ("An NBD server on a port of this machine:", "cbdctrl dev-start -b 0 -e nbd:tcp:127.0.0.1:10809"),
        ],
        "dev-stop" => &[
            ("Remove block device 0 if it is not in use:", "cbdctrl dev-stop -d 0"),
            ("Remove it even if in use; its clients see errors:", "cbdctrl dev-stop -d 0 --force"),
        ],
        "dev-list" => &[("List the block devices and their exports:", "cbdctrl dev-list")],
        "status" => &[
            ("Show everything:", "cbdctrl status"),
            ("For a program, which waits at most 2 seconds:", "cbdctrl status --json --timeout 2"),
        ],
        "set" => &[
            (
                "Let the cache be used up to 70 % before clean data is dropped:",
                "cbdctrl set -b 0 gc_percent=70",
            ),
            (
                "Let writeback write at most 100 MiB a second, many epochs in one batch:",
                "cbdctrl set -b 0 writeback_rate=100M consistency=checkpoint",
            ),
            (
                "Keep what the disk refuses in the cache, and go on with the rest:",
                "cbdctrl set -b 0 on_write_error=park write_error_after_s=30",
            ),
        ],
        "checkpoint" => &[(
            "Write what is dirty at this moment to the disk of backend 0, and wait for it:",
            "cbdctrl checkpoint -b 0 --wait",
        )],
        "drain" => &[("Write what is dirty in all caches to their disks:", "cbdctrl drain")],
        "check" => {
            &[("Check a region, the data of each record too:", "cbdctrl check /mnt/pmem/cbd.region --data")]
        }
        "dump" => &[(
            "Show the dirty records of a range of the device:",
            "cbdctrl dump /mnt/pmem/cbd.region records --dirty --range 1G+4K",
        )],
        "repair" => &[("Repair damaged second copies:", "cbdctrl repair /mnt/pmem/cbd.region")],
        "rescue" => &[
            ("Say what is dirty, and to which disk it belongs:", "cbdctrl rescue /mnt/pmem/cbd.region"),
            ("Write it:", "cbdctrl rescue /mnt/pmem/cbd.region --yes"),
            (
                "Bring the cache of Linux's dm-pcache to its disk:",
                "cbdctrl rescue --from dm-pcache /dev/pmem0 --to /dev/sdb --yes",
            ),
        ],
        "demo" => {
            &[("Show CBD at work on this machine:", "cbdctrl demo"), ("Faster:", "cbdctrl demo --quick")]
        }
        "daemon" => &[
            ("As the unit does:", "cbdd"),
            (
                "Several daemons on one machine, each with folders of its own:",
                "cbdd --state-dir /var/lib/cbd2 --run-dir /run/cbd2 --dev-dir /dev/cbd2",
            ),
        ],
        "completions" => &[(
            "For all users of bash:",
            "cbdctrl completions bash > /usr/share/bash-completion/completions/cbdctrl",
        )],
        "man" => &[("For all users of this machine:", "cbdctrl man /usr/local/share/man")],
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

/// As roff reads it: a hyphen is a hyphen, and no line begins with a request.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('-', "\\-").replace('\'', "\\(aq")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, DaemonCli};
    use clap::{CommandFactory, Parser};

    #[test]
    fn every_command_for_people_has_an_example_that_is_understood() {
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
    fn the_help_of_a_command_ends_with_its_examples_and_keeps_what_it_had() {
        let mut command = in_help(Cli::command());
        let help = command.find_subcommand_mut("set").expect("set").render_help().to_string();
        let (settings, examples) = (help.find("gc_percent=0..90"), help.find("Examples:"));
        assert!(settings.is_some() && settings < examples, "{help}");
    }
}
