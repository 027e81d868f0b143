//! `cbdctrl end-holders`: when the machine stops, ends what stands on the block devices while the daemon serves them, and
//! afterwards removes the devices, so that nothing waits for a daemon that does not come.
//!
//! Invariants: while the machine does not stop, nothing is changed. Every wait has a limit, and the command succeeds
//! whatever is left, since the machine is to stop. What was done is said, one line each; units bring it to the journal.
//!
//! Elsewhere: the units that run it (`packaging/cbd-holders.service`, `packaging/cbdd.service`), removing the devices of a
//! daemon that has ended ([`cbd_daemon::left`]).

mod passes;
mod system;
mod walk;

use crate::cli::EndHoldersArguments;
use crate::doctor::machine::Machine;
use cbd_daemon::left;
use cbd_daemon::paths::{PathChoices, Paths};
use cbd_types::ErrorKind;
use passes::Limits;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use walk::Holder;

/// Time for other units to stop: those with the default limit have ended by then.
const QUIET_LIMIT: Duration = Duration::from_secs(120);
/// How often systemd is asked for them: the answer may fall between two jobs, so it is asked twice.
const QUIET_INTERVAL: Duration = Duration::from_millis(100);

/// The limits of ending holders. Of the unit's limit, the rest is for other units, and for [`SYNC_LIMIT`].
const LIMITS: Limits = Limits {
    whole: Duration::from_secs(90),
    stall: Duration::from_secs(10),
    pause: Duration::from_millis(100),
};

/// Time to bring what was written to a file system that stays mounted to its device.
const SYNC_LIMIT: Duration = Duration::from_secs(15);

/// Time for a daemon that was killed to be gone.
const DAEMON_LIMIT: Duration = Duration::from_secs(5);

/// Runs the command.
#[must_use]
pub fn run(arguments: &EndHoldersArguments) -> ExitCode {
    let paths = Paths::choose(PathChoices {
        state_dir: arguments.state_dir.clone(),
        run_dir: arguments.run_dir.clone(),
        ..PathChoices::default()
    });
    let machine = Machine::at("/");
    let find = || walk::holders(&machine, &walk::devices(&machine, &paths.run_dir));
    if arguments.dry_run {
        find().iter().for_each(|holder| println!("{holder}"));
        return ExitCode::SUCCESS;
    }
    if !arguments.always && !system::is_stopping() {
        return ExitCode::SUCCESS;
    }
    if arguments.after_daemon {
        remove(&paths, DAEMON_LIMIT);
    } else if !walk::devices(&machine, &paths.run_dir).is_empty() {
        // Without a daemon everything that follows would wait for the devices.
        remove(&paths, Duration::ZERO);
        end(arguments.unit.as_deref(), find);
    }
    ExitCode::SUCCESS
}

/// Removes the devices of a daemon that has ended.
fn remove(paths: &Paths, timeout: Duration) {
    match left::remove_all(paths, timeout) {
        Ok(removed) if removed.is_empty() => {}
        Ok(removed) => println!(
            "removed {}: no daemon serves it any more, and the machine stops; data that was flushed is in the region",
            removed.join(", ")
        ),
        // The daemon runs, and removes its devices itself, or this command does after it.
        Err(error) if error.kind() == ErrorKind::Busy && timeout.is_zero() => {}
        Err(error) => println!("devices of the daemon are left, and their users may wait: {}", error.line()),
    }
}

/// Ends what `find` finds.
fn end(unit: Option<&str>, find: impl Fn() -> Vec<Holder>) {
    if find().is_empty() {
        return;
    }
    if let Some(unit) = unit {
        wait_for_other_units(unit);
    }
    let left = passes::end_all(LIMITS, find, system::end, |holder| println!("ended {holder}"));
    for (holder, why) in left {
        println!("{holder} is left, and sees errors when the daemon has ended: {why}");
        if let Holder::Mount(target) = &holder
            && let Err(error) = system::sync(target, SYNC_LIMIT)
        {
            println!("{holder} may lack what was written last: {error}");
        }
    }
}

/// Waits until systemd stops no other unit that does not wait for this one: services may still write to what is mounted.
fn wait_for_other_units(own: &str) {
    let end = Instant::now() + QUIET_LIMIT;
    let mut quiet = 0;
    while quiet < 2 {
        match system::busy_units(own) {
            Err(error) => return println!("not waiting for other units: {error}"),
            Ok(busy) if busy.is_empty() => quiet += 1,
            Ok(busy) if Instant::now() > end => {
                return println!("not waiting any longer for {}", busy.join(", "));
            }
            Ok(_) => quiet = 0,
        }
        std::thread::sleep(QUIET_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    const HOLDERS: &str = include_str!("../../../../packaging/cbd-holders.service");
    const DAEMON: &str = include_str!("../../../../packaging/cbdd.service");

    fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
        unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
    }

    fn arguments(unit: &str, key: &str) -> EndHoldersArguments {
        let line = values(unit, key)[0].trim_start_matches('-');
        match Cli::try_parse_from(line.split(' ')).expect("the command of a unit is valid").command {
            Command::EndHolders(arguments) => arguments,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_units_run_this_before_and_after_the_end_of_the_daemon() {
        let before = arguments(HOLDERS, "ExecStop");
        assert!(!before.after_daemon && !before.always && before.unit.as_deref() == Some("%n"));
        let after = arguments(DAEMON, "ExecStopPost");
        assert!(after.after_daemon && !after.always);
        assert_eq!(values(HOLDERS, "After"), ["cbdd.service"]);
        assert!(values(DAEMON, "Wants").contains(&"cbd-holders.service"));
        for unit in [HOLDERS, DAEMON] {
            assert_eq!(values(unit, "Before"), ["remote-fs-pre.target", "blk-availability.service"]);
        }
    }

    #[test]
    fn the_unit_has_time_for_all_limits() {
        let minutes = values(HOLDERS, "TimeoutStopSec")[0].strip_suffix("min").expect("minutes");
        let limit = Duration::from_secs(60 * minutes.parse::<u64>().expect("a number"));
        assert!(limit > QUIET_LIMIT + LIMITS.whole + 2 * SYNC_LIMIT);
    }

    #[test]
    fn nothing_is_removed_without_devices() {
        let folder = tempfile::tempdir().expect("a folder");
        let within = |name: &str| Some(folder.path().join(name));
        let arguments = EndHoldersArguments {
            after_daemon: false,
            always: true,
            dry_run: false,
            unit: None,
            state_dir: within("state"),
            run_dir: within("run"),
        };
        assert_eq!(run(&arguments), ExitCode::SUCCESS);
        let after = EndHoldersArguments { after_daemon: true, ..arguments };
        assert_eq!(run(&after), ExitCode::SUCCESS);
        assert_eq!(std::fs::read_dir(folder.path()).expect("it is there").count(), 0);
    }
}
