//! A root directory into which packages can be installed: an overlay of this machine's, with a stand-in for systemd.
//!
//! Invariants: nothing outside the overlay changes. The mounts and processes are in namespaces that end with the process that
//! [`enter`] starts.

use crate::shell;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Time limit of a command in the sandbox.
const LIMIT: Duration = Duration::from_secs(60);

/// Devices of this machine that programs need.
const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];

/// What stands for systemd: it logs each call, and runs `cbdd` without any other part of its unit. A killed process without a
/// parent that waits for it has no program any more.
const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$*" >> /var/log/systemctl
runs() { readlink "/proc/$(cat /run/cbdd.pid 2>/dev/null)/exe" > /dev/null; }
start() {
	runs && return 0
	setsid cbdd < /dev/null >> /var/log/cbdd 2>&1 &
	echo $! > /run/cbdd.pid
	for _ in $(seq 200); do cbdctrl status --timeout 1 > /dev/null 2>&1 && return 0; sleep 0.05; done
	return 1
}
stop() {
	runs || return 0
	kill "$(cat /run/cbdd.pid)"
	for _ in $(seq 400); do runs || return 0; sleep 0.05; done
	return 1
}
# The other unit has nothing to do here.
case " $* " in *" cbd-holders.service "*) exit 0 ;; esac
case " $* " in
*" is-enabled "*) echo enabled ;;
*" is-active "*) runs ;;
*" start "*) start ;;
*" stop "*) stop ;;
*" restart "*) stop && start ;;
esac
"#;

/// The command that runs `command` as the first process of namespaces of its own.
pub fn enter(command: &Command) -> Command {
    let mut entered = Command::new("unshare");
    entered.args(["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "--"]);
    entered.arg(command.get_program()).args(command.get_args());
    entered
}

/// The end of a command, and all that it printed.
#[derive(Debug)]
pub struct Ran {
    pub is_success: bool,
    pub text: String,
}

/// The root directory.
#[derive(Debug)]
pub struct Sandbox {
    root: PathBuf,
}

impl Sandbox {
    /// Mounts the root directory below `folder`.
    ///
    /// # Errors
    /// The messages of mount.
    pub fn mount(folder: &Path) -> Result<Self, String> {
        let mount = |arguments: &[&str]| -> Result<(), String> {
            let ran = ran(Command::new("mount").args(arguments));
            ran.is_success.then_some(()).ok_or_else(|| format!("mount {}: {}", arguments.join(" "), ran.text))
        };
        let (memory, root) = (folder.join("memory"), folder.join("root"));
        let parts = [memory.join("upper"), memory.join("work")];
        make(&memory)?;
        make(&root)?;
        mount(&["-t", "tmpfs", "cbd", text(&memory)])?;
        parts.iter().try_for_each(|part| make(part))?;
        let options = format!("lowerdir=/,upperdir={},workdir={}", text(&parts[0]), text(&parts[1]));
        mount(&["-t", "overlay", "cbd", "-o", &options, text(&root)])?;
        for name in ["dev", "run", "tmp"] {
            mount(&["-t", "tmpfs", "cbd", text(&root.join(name))])?;
        }
        mount(&["-t", "proc", "proc", text(&root.join("proc"))])?;
        mount(&["--rbind", "/sys", text(&root.join("sys"))])?;
        for name in DEVICES {
            let place = root.join("dev").join(name);
            fs::write(&place, "").map_err(|error| format!("{}: {error}", place.display()))?;
            mount(&["--bind", &format!("/dev/{name}"), text(&place)])?;
        }
        let sandbox = Self { root };
        // Where this exists, scripts take systemd for running.
        make(&sandbox.path("/run/systemd/system"))?;
        for file in ["/usr/sbin/policy-rc.d", "/usr/bin/systemctl"] {
            let _ = fs::remove_file(sandbox.path(file));
        }
        sandbox.write("/usr/bin/systemctl", SYSTEMCTL)?;
        sandbox.ok("chmod", &["755", "/usr/bin/systemctl"])?;
        Ok(sandbox)
    }

    /// The path of a file of the sandbox, outside it.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.root.join(inside.trim_start_matches('/'))
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.root).arg(program).args(arguments).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// Runs a program in the sandbox.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Ran {
        ran(&mut self.command(program, arguments))
    }

    /// Runs a program, which must succeed; returns what it printed.
    ///
    /// # Errors
    /// What it printed, if it fails.
    pub fn ok(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        let ran = self.run(program, arguments);
        if ran.is_success {
            return Ok(ran.text);
        }
        Err(format!("{program} {} failed: {}", arguments.join(" "), ran.text))
    }

    /// Starts a program that prints a line when it is ready, and ends when its standard input does.
    ///
    /// # Errors
    /// When it ends before.
    pub fn start(&self, program: &str, arguments: &[&str]) -> Result<Child, String> {
        let mut command = self.command(program, arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or("no output")?;
        match BufReader::new(output).read_line(&mut line) {
            Ok(length) if length > 0 => Ok(child),
            _ => Err(format!("{program} ended before it was ready: {:?}", child.wait())),
        }
    }

    /// Writes a file.
    ///
    /// # Errors
    /// The system's error.
    pub fn write(&self, path: &str, contents: &str) -> Result<(), String> {
        fs::write(self.path(path), contents).map_err(|error| format!("{path}: {error}"))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// The system's error.
    pub fn read(&self, path: &str) -> Result<String, String> {
        fs::read_to_string(self.path(path)).map_err(|error| format!("{path}: {error}"))
    }
}

fn ran(command: &mut Command) -> Ran {
    let mut text = String::new();
    let end = shell::run(command, LIMIT, |_, line| {
        text.push_str(line);
        text.push('\n');
    });
    if !end.is_success() {
        text.push_str(&end.to_string());
    }
    Ran { is_success: end.is_success(), text }
}

fn make(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}
