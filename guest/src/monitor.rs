//! QEMU's monitor (QMP): the migration of a guest to another QEMU.
//!
//! Invariants: every command has a time limit, and so has the migration.

use crate::machine;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limit of the answer to a command.
const ANSWER: Duration = Duration::from_secs(30);

/// Bytes in a second that a migration transfers at first, so that the guest runs for a while meanwhile.
const SLOW: u64 = 40 << 20;

/// When it has taken this long, it transfers as fast as it can: a guest may change its memory as fast.
const ENOUGH: Duration = Duration::from_secs(6);

/// Milliseconds for which the guest may be stopped at the end.
const DOWN: u64 = 300;

/// A connection to a QEMU.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

/// What a migration took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The whole time in milliseconds.
    pub total: u64,
    /// The time in milliseconds in which the guest did not run.
    pub down: u64,
    /// How often QEMU asked which pages were dirty.
    pub rounds: u64,
}

impl Monitor {
    /// Connects; QEMU may have begun just now.
    ///
    /// # Errors
    /// There is no QEMU, or it does not answer in time.
    pub fn connect(socket: &Path) -> Result<Self, String> {
        let end = Instant::now() + ANSWER;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => {
                    return Err(format!("QEMU's monitor at {}: {error}", socket.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        stream.set_read_timeout(Some(ANSWER)).map_err(|error| format!("QEMU's monitor: {error}"))?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.line()?;
        monitor.execute("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Executes a command, and returns its result.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let said = |what: String| format!("QEMU's monitor, {command}: {what}");
        let sent = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{sent}").map_err(|error| said(error.to_string()))?;
        loop {
            let mut line = self.line().map_err(said)?;
            if let Some(error) = line.get("error") {
                return Err(said(error.to_string()));
            }
            // Everything else is an event.
            if let Some(result) = line.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(0) => Err("QEMU has ended".to_owned()),
            Ok(_) => serde_json::from_str(&line).map_err(|error| format!("'{line}' is not JSON: {error}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Migrates the guest to the QEMU that waits at `socket`, while it runs.
    ///
    /// # Errors
    /// QEMU refuses that, the migration fails, or it takes longer than `limit`.
    pub fn migrate(&mut self, socket: &Path, limit: Duration) -> Result<Migrated, String> {
        let parameters = json!({ "max-bandwidth": SLOW, "downtime-limit": DOWN });
        self.execute("migrate-set-parameters", parameters)?;
        self.execute("migrate", json!({ "uri": machine::uri(socket) }))?;
        let begun = Instant::now();
        let (end, mut is_slow) = (begun + limit, true);
        loop {
            if begun.elapsed() > ENOUGH && std::mem::take(&mut is_slow) {
                self.execute("migrate-set-parameters", json!({ "max-bandwidth": 1_u64 << 40 }))?;
            }
            let state = self.execute("query-migrate", json!({}))?;
            let number = |value: &Value| value.as_u64().unwrap_or(0);
            match state["status"].as_str() {
                Some("completed") => {
                    return Ok(Migrated {
                        total: number(&state["total-time"]),
                        down: number(&state["downtime"]),
                        rounds: number(&state["ram"]["dirty-sync-count"]),
                    });
                }
                Some("failed" | "cancelled") => return Err(format!("the migration failed: {state}")),
                _ if Instant::now() > end => {
                    return Err(format!("the migration takes longer than {} s: {state}", limit.as_secs()));
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    /// A QEMU that answers one command after the other with these lines.
    fn qemu(folder: &Path, answers: &'static [&'static str]) -> (Monitor, JoinHandle<Vec<String>>) {
        let socket = folder.join("monitor");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let thread = std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("connected");
            let mut stream = BufReader::new(stream);
            writeln!(stream.get_mut(), "{{\"QMP\": {{}}}}").expect("greeted");
            let mut commands = Vec::new();
            for answer in [r#"{"return": {}}"#].iter().chain(answers) {
                let mut line = String::new();
                stream.read_line(&mut line).expect("a command");
                commands.push(line);
                writeln!(stream.get_mut(), "{answer}").expect("answered");
            }
            commands
        });
        (Monitor::connect(&socket).expect("connected"), thread)
    }

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    #[test]
    fn a_migration_ends_when_qemu_says_that_it_is_complete() {
        let folder = folder();
        let (mut monitor, qemu) = qemu(
            folder.path(),
            &[
                r#"{"return": {}}"#,
                "{\"event\": \"MIGRATION\"}\n{\"return\": {}}",
                r#"{"return": {"status": "active"}}"#,
                r#"{"return": {"status": "completed", "total-time": 9, "downtime": 2, "ram": {"dirty-sync-count": 4}}}"#,
            ],
        );
        let migrated = monitor.migrate(Path::new("/to"), Duration::from_secs(20)).expect("complete");
        assert_eq!(migrated, Migrated { total: 9, down: 2, rounds: 4 });
        let commands = qemu.join().expect("it ends");
        assert!(commands[2].contains(r#""uri":"unix:/to""#), "{commands:?}");
    }

    #[test]
    fn what_qemu_refuses_or_does_not_finish_is_an_error() {
        let refusal = r#"{"error": {"class": "GenericError", "desc": "Migration disabled"}}"#;
        for answers in [
            &[refusal][..],
            &[r#"{"return": {}}"#, r#"{"return": {}}"#, r#"{"return": {"status": "failed"}}"#],
        ] {
            let folder = folder();
            let (mut monitor, qemu) = qemu(folder.path(), answers.to_vec().leak());
            let text = monitor.migrate(Path::new("/to"), Duration::from_secs(20)).expect_err("refused");
            assert!(text.contains("Migration disabled") || text.contains("failed"), "{text}");
            qemu.join().expect("it ends");
        }
    }
}
