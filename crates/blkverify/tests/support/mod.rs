//! Runs the program in a folder of its own.
#![allow(dead_code, reason = "each program of tests uses a part")]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Bytes of a MiB.
pub const MIB: usize = 1 << 20;

/// What the program has printed, and its exit code.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code().expect("no signal ended it");
        Self { code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// A folder.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        // Not in memory, where there is no direct I/O.
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder"))
    }

    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    pub fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("a file");
        path
    }

    /// The program, which finds no daemon.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blkverify"));
        command.args(arguments).env("CBD_SOCKET", self.path("no-socket"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().expect("it runs"))
    }

    #[track_caller]
    pub fn json(&self, arguments: &[&str], code: i32) -> serde_json::Value {
        let ran = self.run(&[arguments, &["--json"]].concat());
        assert_eq!(ran.code, code, "{ran:?}");
        serde_json::from_str(&ran.stdout).expect("JSON")
    }
}

/// Waits until a process has `file` open.
pub fn wait_for_open(process: u32, file: &str) {
    let begun = Instant::now();
    let is_open = || {
        let entries = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let mut targets = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        targets.any(|target| target == Path::new(file))
    };
    while !is_open() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{file} is not opened");
        std::thread::sleep(Duration::from_millis(1));
    }
}
