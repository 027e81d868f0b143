//! Builds that later steps need, which run at the lowest priority while the tests run: most tests wait for something,
//! and leave processors idle.
//!
//! Invariants: nothing depends on such a build. The step that needs it runs the same command, which has nothing left
//! to do or shows what is wrong.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

/// The builds that run at present.
#[derive(Debug)]
pub struct Ahead(Option<JoinHandle<()>>);

impl Ahead {
    /// Runs `builds` one after the other.
    pub fn start(builds: Vec<Command>) -> Self {
        Self(Some(thread::spawn(move || {
            for build in &builds {
                let built = at_lowest_priority(build).status();
                if !built.is_ok_and(|status| status.success()) {
                    println!("    a build ahead of its step failed; the step repeats it");
                }
            }
        })))
    }

    /// Waits for their end.
    pub fn finish(&mut self) {
        if let Some(builds) = self.0.take() {
            // A panic there is a build that failed.
            let _ = builds.join();
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
}
