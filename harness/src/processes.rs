//! The processes that a command started, and their termination.
//!
//! Invariants: this program adopts its orphans, so a daemon that a test left running is still among its descendants, whatever its
//! session or group.

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};
use std::fs;
use std::time::{Duration, Instant};

/// A running process below this one.
#[derive(Debug)]
pub struct Process {
    /// Its id.
    pub pid: Pid,
    /// Its command line, or its name if it has none.
    pub command: String,
}

/// Makes orphans of our children our own children, so that all of them are found.
pub fn adopt_orphans() {
    if let Err(error) = set_child_subreaper(Some(getpid())) {
        eprintln!("xtask: processes that tests leave behind cannot be found: {error}");
    }
}

/// All living descendants, parents first.
pub fn descendants() -> Vec<Process> {
    descendants_of(getpid())
}

/// All living descendants of the process `ancestor`, parents first.
pub fn descendants_of(ancestor: Pid) -> Vec<Process> {
    let parents = parents();
    let mut found = Vec::new();
    let mut generation = vec![ancestor.as_raw_nonzero().get()];
    while !generation.is_empty() {
        generation =
            parents.iter().filter(|(_, parent)| generation.contains(parent)).map(|&(pid, _)| pid).collect();
        found.extend(
            generation
                .iter()
                .filter_map(|&pid| Some(Process { pid: Pid::from_raw(pid)?, command: command_of(pid) })),
        );
    }
    found
}

/// Kills all descendants, repeatedly, until none is left or a few seconds have passed. Returns those that
/// stay (processes that the kernel does not release).
pub fn kill_descendants() -> Vec<Process> {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        for process in descendants() {
            // The process may have ended meanwhile, which is the goal.
            let _ = kill_process(process.pid, Signal::KILL);
        }
        reap_orphans();
        let left = descendants();
        if left.is_empty() || Instant::now() > end {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Collects the exit status of orphans that have ended. Call it only between commands: it would take the
/// status of a command that is still waited for.
pub fn reap_orphans() {
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

/// Every living process, with its parent.
fn parents() -> Vec<(i32, i32)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (state, parent) = state_and_parent(&stat)?;
            (state != 'Z').then_some((pid, parent))
        })
        .collect()
}

/// The state and the parent in a line of `/proc/PID/stat`, whose second field may contain any text in
/// parentheses.
fn state_and_parent(stat: &str) -> Option<(char, i32)> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

fn command_of(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned();
    if text.is_empty() {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_parent() {
        assert_eq!(state_and_parent("12 (a) S) R) S 7 12 12 0"), Some(('S', 7)));
        assert_eq!(state_and_parent("12 (cut"), None);
    }

    #[test]
    fn a_child_is_among_the_descendants_with_its_command_line() {
        let mut child = Command::new("sleep").arg("30.25").spawn().expect("sleep starts");
        let id = i32::try_from(child.id()).expect("a process id fits");
        let end = Instant::now() + Duration::from_secs(10);
        let found = loop {
            let found = descendants()
                .into_iter()
                .any(|p| p.pid.as_raw_nonzero().get() == id && p.command == "sleep 30.25");
            if found || Instant::now() > end {
                break found;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        child.kill().expect("sleep can be killed");
        child.wait().expect("sleep ends");
        assert!(found);
    }
}
