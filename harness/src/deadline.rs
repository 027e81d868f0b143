//! The time limit of a whole task: a build machine kills a task that exceeds its own limit, and nothing of its report is seen.
//!
//! Invariants: a task with a limit ends. At its limit the running command is killed and no other one starts
//! ([`crate::shell`]), so that the report is printed; where that hangs, too, a thread ends the process with a failure.

use crate::shell;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// Time for the report after the limit.
const GRACE: Duration = Duration::from_secs(240);

static END: OnceLock<Instant> = OnceLock::new();

/// Limits the time of this task from now on. Only the first call has an effect.
pub fn set(limit: Duration) {
    let end = Instant::now() + limit;
    if END.set(end).is_ok() {
        thread::spawn(move || {
            thread::sleep(limit + GRACE);
            eprintln!("xtask: the task did not end at its time limit of {} s; it is ended:", limit.as_secs());
            shell::kill_all();
            std::process::exit(1);
        });
    }
}

/// The time that is left; without a limit a century.
pub fn left() -> Duration {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    END.get().map_or(CENTURY, |end| end.saturating_duration_since(Instant::now()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::{End, run};
    use std::process::Command;

    /// Runs in a process of its own: the limit is that of the whole process.
    #[test]
    fn at_the_limit_a_command_is_killed_and_no_other_one_starts() {
        const INSIDE: &str = "CBD_HARNESS_LIMITED";
        if std::env::var_os(INSIDE).is_none() {
            let again = Command::new(std::env::current_exe().expect("this binary"))
                .args([
                    "--exact",
                    "deadline::tests::at_the_limit_a_command_is_killed_and_no_other_one_starts",
                ])
                .env(INSIDE, "1")
                .output()
                .expect("it starts");
            let said = String::from_utf8_lossy(&again.stdout);
            assert!(again.status.success() && said.contains("1 passed"), "{again:?}");
            return;
        }
        set(Duration::from_millis(300));
        let begun = Instant::now();
        let hour = Duration::from_secs(3600);
        assert!(matches!(run(Command::new("sleep").arg("65"), hour, |_, _| {}), End::TimedOut));
        assert!(begun.elapsed() < Duration::from_secs(30));
        let second = run(&mut Command::new("true"), hour, |_, _| {});
        assert!(second.to_string().contains("the time limit of the whole task has passed"), "{second}");
    }
}
