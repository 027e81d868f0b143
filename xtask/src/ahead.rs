//! Builds in advance for later steps. They run at the lowest priority while the tests run: most tests wait for an event and leave
//! processors idle.
//!
//! Invariants: no step depends on such a build. The step that needs the result runs the same command, which then has nothing to
//! do or reports the error.

use crate::deadline;
use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time limit of each build; the tests that run at the same time slow the build down.
const LIMIT: Duration = Duration::from_secs(1800);

/// The builds in progress.
#[derive(Debug)]
pub struct Ahead(Option<JoinHandle<()>>);

impl Ahead {
    /// Runs `builds` one after the other.
    pub fn start(builds: Vec<Command>) -> Self {
        Self(Some(thread::spawn(move || {
            for build in &builds {
                if !runs_within(&mut at_lowest_priority(build), LIMIT.min(deadline::left())) {
                    println!("    a build ahead of its step failed, and the step repeats it: {build:?}");
                }
            }
        })))
    }

    /// Waits until all builds have ended.
    pub fn finish(&mut self) {
        if let Some(builds) = self.0.take() {
            // A panic of the thread means that a build failed.
            let _ = builds.join();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Whether the command ends with success within `limit`. It is killed at the limit. [`crate::shell::run`] would kill all
/// descendants of this process, the tests included.
fn runs_within(command: &mut Command, limit: Duration) -> bool {
    let Ok(mut build) = command.spawn() else { return false };
    let end = Instant::now() + limit;
    loop {
        match build.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(100)),
            _ => {
                // The build may have ended meanwhile.
                let _ = build.kill();
                let _ = build.wait();
                return false;
            }
        }
    }
}

fn at_lowest_priority(command: &Command) -> Command {
    let mut lowered = Command::new("nice");
    lowered.args([OsStr::new("-n"), OsStr::new("19"), command.get_program()]).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => lowered.env(name, value),
            None => lowered.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        lowered.current_dir(directory);
    }
    lowered.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    lowered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_runs_as_given_but_at_the_lowest_priority() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut build = Command::new("sh");
        build.args(["-c", "nice > $NAME"]).env("NAME", "found").current_dir(folder.path());
        let mut ahead = Ahead::start(vec![build]);
        ahead.finish();
        let found = std::fs::read_to_string(folder.path().join("found")).expect("it ran");
        assert_eq!(found.trim(), "19");
    }

    #[test]
    fn a_build_that_hangs_is_killed_at_its_limit() {
        let begun = Instant::now();
        assert!(!runs_within(Command::new("sleep").arg("600"), Duration::from_millis(200)));
        assert!(runs_within(&mut Command::new("true"), Duration::from_secs(60)));
        assert!(begun.elapsed() < Duration::from_secs(300));
    }
}
