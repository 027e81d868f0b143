//! Runs a command under a time limit and passes its output on line by line.
//!
//! Invariants: a command that exceeds its time limit is killed with all its descendants, after these have been listed. A pipe
//! that an orphaned grandchild holds open delays nothing. After the end of the whole task ([`crate::deadline`]) no command
//! starts, and none goes on.

use crate::{deadline, processes};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Interval of the lines which show that a quiet command is alive.
const QUIET: Duration = Duration::from_secs(60);

/// Time in which the output of an ended command may still arrive.
const DRAIN: Duration = Duration::from_secs(2);

/// How a command ended.
#[derive(Debug)]
pub enum End {
    /// By itself.
    Exited(ExitStatus),
    /// It was killed at its time limit.
    TimedOut,
    /// It was killed because of a line that it printed, as the caller requested.
    Stopped,
    /// It could not be started.
    NotStarted(String),
}

impl End {
    /// Whether it ended by itself with success.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Exited(status) if status.success())
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(out, "{status}"),
            Self::TimedOut => out.write_str("it exceeded its time limit and was killed"),
            Self::Stopped => out.write_str("it was killed at the requested line of output"),
            Self::NotStarted(error) => write!(out, "it could not be started: {error}"),
        }
    }
}

/// The stream of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// The processes that are killed when a command exceeds its time limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Killed {
    /// All descendants of this process, orphans included.
    All,
    /// Those that descend from the command at that moment.
    OfCommand,
}

/// Runs `command` for at most `limit` and passes every line that it prints to `line`.
pub fn run(command: &mut Command, limit: Duration, mut line: impl FnMut(Stream, &str)) -> End {
    run_until(command, limit, |stream, text| {
        line(stream, text);
        ControlFlow::Continue(())
    })
}

/// As [`run`], for a command that runs beside others: at its limit these are not killed, nor are orphans that it has left.
pub fn run_beside(command: &mut Command, limit: Duration, mut line: impl FnMut(Stream, &str)) -> End {
    run_and_kill(command, limit, Killed::OfCommand, |stream, text| {
        line(stream, text);
        ControlFlow::Continue(())
    })
}

/// As [`run`]; if `line` breaks, only the command is killed at once, and not the processes that it started.
pub fn run_until(
    command: &mut Command,
    limit: Duration,
    line: impl FnMut(Stream, &str) -> ControlFlow<()>,
) -> End {
    run_and_kill(command, limit, Killed::All, line)
}

fn run_and_kill(
    command: &mut Command,
    limit: Duration,
    killed: Killed,
    mut line: impl FnMut(Stream, &str) -> ControlFlow<()>,
) -> End {
    let begun = Instant::now();
    let limit = limit.min(deadline::left());
    if limit.is_zero() {
        return End::NotStarted("the time limit of the whole task has passed".to_owned());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return End::NotStarted(error.to_string()),
    };
    let (sender, lines) = channel();
    if let Some(output) = child.stdout.take() {
        forward(output, Stream::Output, sender.clone());
    }
    if let Some(error) = child.stderr.take() {
        forward(error, Stream::Error, sender.clone());
    }
    drop(sender);

    let mut spoke = Instant::now();
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok((stream, text)) => {
                spoke = Instant::now();
                if line(stream, &text).is_break() {
                    kill(&mut child);
                    return End::Stopped;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            // Both pipes are closed: only the end of the command is left to wait for.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(20)),
        }
        if let Ok(Some(status)) = child.try_wait() {
            drain(&lines, &mut line);
            return End::Exited(status);
        }
        if begun.elapsed() > limit {
            eprintln!("xtask: exceeded its time limit of {} s; these processes are killed:", limit.as_secs());
            match killed {
                Killed::All => kill_all(),
                Killed::OfCommand => kill_tree(&mut child),
            }
            drain(&lines, &mut line);
            return End::TimedOut;
        }
        if spoke.elapsed() > QUIET {
            spoke = Instant::now();
            // Printed to standard error, since the output of the command may go to standard output.
            eprintln!("    .. still running after {} s", begun.elapsed().as_secs());
        }
    }
}

/// Runs `command` and returns its standard output; the lines of standard error are passed through.
///
/// # Errors
/// The end of the command, if it is not a success.
pub fn output_of(command: &mut Command, limit: Duration) -> Result<String, End> {
    let mut output = String::new();
    let end = run(command, limit, |stream, line| match stream {
        Stream::Output => {
            output.push_str(line);
            output.push('\n');
        }
        Stream::Error => eprintln!("{line}"),
    });
    if end.is_success() { Ok(output) } else { Err(end) }
}

fn forward(from: impl Read + Send + 'static, stream: Stream, to: Sender<(Stream, String)>) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            match from.read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&bytes);
            if to.send((stream, text.trim_end_matches(['\n', '\r']).to_owned())).is_err() {
                return;
            }
        }
    });
}

/// Lists and kills all descendants of this process.
pub(crate) fn kill_all() {
    list(&processes::descendants());
    for process in processes::kill_descendants() {
        eprintln!("xtask: cannot be killed: {} {}", process.pid.as_raw_nonzero(), process.command);
    }
}

/// Lists and kills a command with what descends from it.
fn kill_tree(child: &mut Child) {
    let tree = Pid::from_raw(child.id().cast_signed()).map(processes::descendants_of).unwrap_or_default();
    list(&tree);
    let _ = child.kill();
    for process in &tree {
        // The process may have ended meanwhile, which is the goal.
        let _ = kill_process(process.pid, Signal::KILL);
    }
    // A process that the kernel does not release would be waited for without end.
    let end = Instant::now() + DRAIN;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
}

fn list(processes: &[processes::Process]) {
    for process in processes {
        eprintln!("xtask:   {} {}", process.pid.as_raw_nonzero(), process.command);
    }
}

/// Lines that arrive after the end cannot stop the command any more.
fn drain(lines: &Receiver<(Stream, String)>, line: &mut impl FnMut(Stream, &str) -> ControlFlow<()>) {
    let end = Instant::now() + DRAIN;
    while let Ok((stream, text)) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        let _ = line(stream, &text);
    }
}

fn kill(child: &mut Child) {
    // The command may have ended meanwhile, which is the goal.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_streams_arrive_line_by_line() {
        let mut seen = Vec::new();
        let end = run(&mut shell("echo one; echo two >&2"), Duration::from_secs(20), |stream, line| {
            seen.push((stream, line.to_owned()));
        });
        assert!(end.is_success());
        seen.sort_by_key(|(stream, _)| *stream == Stream::Error);
        assert_eq!(seen, [(Stream::Output, "one".to_owned()), (Stream::Error, "two".to_owned())]);
    }

    #[test]
    fn a_stray_process_that_holds_the_pipe_does_not_delay_the_end() {
        let begun = Instant::now();
        let mut stray = String::new();
        let script = "sleep 60 & echo $!";
        let end = run(&mut shell(script), Duration::from_secs(30), |_, line| stray.push_str(line));
        let waited = begun.elapsed();
        shell(&format!("kill {stray}")).status().expect("a shell starts");
        assert!(end.is_success());
        assert!(waited < Duration::from_secs(25), "{waited:?}");
    }

    /// Runs in a process of its own: the test kills all descendants of its process, and other tests start programs, too.
    #[test]
    fn a_command_that_exceeds_its_time_is_killed_with_what_it_started() {
        const INSIDE: &str = "CBD_XTASK_ALONE";
        if std::env::var_os(INSIDE).is_none() {
            let again = Command::new(std::env::current_exe().expect("this binary"))
                .args([
                    "--exact",
                    "shell::tests::a_command_that_exceeds_its_time_is_killed_with_what_it_started",
                ])
                .env(INSIDE, "1")
                .output()
                .expect("it starts");
            let said = String::from_utf8_lossy(&again.stdout);
            assert!(again.status.success() && said.contains("1 passed"), "{again:?}");
            return;
        }
        processes::adopt_orphans();
        let begun = Instant::now();
        // The daemon leaves its parent, its session and its group.
        let end = run(&mut shell("setsid sleep 61 & setsid sleep 61"), Duration::from_millis(300), |_, _| {});
        assert!(matches!(end, End::TimedOut), "{end}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(!processes::descendants().iter().any(|process| process.command == "sleep 61"));
    }

    #[test]
    fn a_command_beside_others_is_killed_alone() {
        let mut other = Command::new("sleep").arg("63").spawn().expect("sleep starts");
        let begun = Instant::now();
        let end = run_beside(&mut shell("setsid sleep 64 & wait"), Duration::from_millis(300), |_, _| {});
        assert!(matches!(end, End::TimedOut), "{end}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(matches!(other.try_wait(), Ok(None)), "the other command goes on");
        other.kill().and_then(|()| other.wait()).expect("it can be killed");
        let is_left = || processes::descendants().iter().any(|process| process.command == "sleep 64");
        while is_left() {
            assert!(begun.elapsed() < Duration::from_secs(30), "what it started has ended");
            thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn a_command_is_killed_at_the_requested_line() {
        let begun = Instant::now();
        let mut seen = Vec::new();
        let end =
            run_until(&mut shell("echo one; echo two; exec sleep 62"), Duration::from_secs(50), |_, line| {
                seen.push(line.to_owned());
                if line == "two" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
        assert!(matches!(end, End::Stopped), "{end}");
        assert_eq!(seen, ["one", "two"]);
        assert!(begun.elapsed() < Duration::from_secs(25));
        assert!(!processes::descendants().iter().any(|process| process.command == "sleep 62"));
    }

    #[test]
    fn a_command_that_fails_gives_no_output() {
        assert!(matches!(
            output_of(&mut shell("echo half; exit 3"), Duration::from_secs(20)),
            Err(End::Exited(status)) if status.code() == Some(3)
        ));
    }

    #[test]
    fn a_missing_command_is_distinguished_from_one_that_failed() {
        let end = run(&mut Command::new("/nonexistent/program"), Duration::from_secs(20), |_, _| {});
        assert!(matches!(end, End::NotStarted(_)));
    }
}
