//! The programs that end a holder, and what systemd says of the machine.
//!
//! Invariants: each program runs with a time limit, also one that the kernel does not let die: it is left behind then.
//! Programs are found in the folders of the system.
//!
//! Elsewhere: which holders there are ([`super::walk`]), and how often they are tried ([`super::passes`]).

use super::walk::Holder;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Where the programs are.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// How often the end of a program is looked for: the standard library has no wait with a limit.
const POLL: Duration = Duration::from_millis(10);
/// Time that a killed program has to end.
const KILL_LIMIT: Duration = Duration::from_millis(200);
/// Time that systemd has to answer.
const SYSTEMD_LIMIT: Duration = Duration::from_secs(10);
/// Most bytes that are read of what a program says.
const SAID_MAX: u64 = 64 << 10;

/// Time that a device of device mapper or md has to end. A file system and swap space may have much to write.
const DEVICE_LIMIT: Duration = Duration::from_secs(10);

/// The program that ends a holder, with its arguments; none if there is none.
pub fn command(holder: &Holder) -> Option<Vec<String>> {
    let words = |words: &[&str]| Some(words.iter().map(|&word| word.to_owned()).collect());
    match holder {
        // The mount point is not looked at first: its file system may not answer.
        Holder::Mount(target) => words(&["umount", "--no-canonicalize", target.to_str()?]),
        Holder::Swap(path) => words(&["swapoff", path]),
        Holder::Loop(name) => words(&["losetup", "--detach", &format!("/dev/{name}")]),
        // Without waiting for udev, which may stop at the same time.
        Holder::Mapped { name, .. } => words(&["dmsetup", "remove", "--noudevsync", name]),
        Holder::Array(name) => words(&["mdadm", "--stop", &format!("/dev/{name}")]),
        Holder::Other(_) => None,
    }
}

/// Ends a holder within `limit`.
///
/// # Errors
/// What the program said, or that it is not there.
pub fn end(holder: &Holder, limit: Duration) -> Result<(), String> {
    let words = command(holder).ok_or("no program ends it")?;
    let limit = match holder {
        Holder::Mount(_) | Holder::Swap(_) => limit,
        _ => limit.min(DEVICE_LIMIT),
    };
    run(&words, limit).map(drop)
}

/// Brings what was written to a file system to its device, within `limit`.
///
/// # Errors
/// As [`end`].
pub fn sync(target: &Path, limit: Duration) -> Result<(), String> {
    let target = target.to_str().ok_or("its name is not text")?;
    run(&["sync".to_owned(), "--file-system".to_owned(), target.to_owned()], limit).map(drop)
}

/// Whether the machine stops: it powers off, halts, reboots or starts another kernel.
pub fn is_stopping() -> bool {
    // Without systemd there is no such state.
    Path::new("/run/systemd/system").exists() && {
        let words = ["systemctl", "is-system-running"].map(str::to_owned);
        // It does not succeed for any state but "running".
        said(&words, SYSTEMD_LIMIT).is_ok_and(|(_, text)| text.trim() == "stopping")
    }
}

/// The units that systemd starts or stops at this moment, besides `own`.
///
/// # Errors
/// If systemd does not say.
pub fn busy_units(own: &str) -> Result<Vec<String>, String> {
    let words =
        ["systemctl", "list-jobs", "--no-legend", "--plain", "--no-pager", "--full"].map(str::to_owned);
    run(&words, SYSTEMD_LIMIT).map(|text| busy_in(&text, own))
}

/// The units in a list of jobs that run; others wait for them, or for `own`.
fn busy_in(jobs: &str, own: &str) -> Vec<String> {
    let unit = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [_, unit, _, "running"] if *unit != own => Some((*unit).to_owned()),
            _ => None,
        }
    };
    jobs.lines().filter_map(unit).collect()
}

/// Runs a program that must succeed; returns what it printed.
fn run(words: &[String], limit: Duration) -> Result<String, String> {
    match said(words, limit)? {
        (status, text) if status.success() => Ok(text),
        (status, text) => {
            let line = text.lines().map(str::trim).find(|line| !line.is_empty());
            Err(line.map_or_else(|| format!("{}: {status}", words.join(" ")), str::to_owned))
        }
    }
}

/// Runs a program; returns how it ended, and its output and errors together.
fn said(words: &[String], limit: Duration) -> Result<(ExitStatus, String), String> {
    let program = words.first().ok_or("no program")?;
    let failed = |error: std::io::Error| format!("{program}: {error}");
    let (mut reader, writer) = std::io::pipe().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(&words[1..]).env("PATH", PATH).env("LC_ALL", "C").stdin(Stdio::null());
    command.stdout(writer.try_clone().map_err(failed)?).stderr(writer);
    let mut child = command.spawn().map_err(failed)?;
    // Its copies of the pipe's end.
    drop(command);
    let (done, result) = std::sync::mpsc::channel();
    // The pipe ends with the last process that has it, which may be one that the program has started.
    let reading = std::thread::Builder::new().spawn(move || {
        let mut bytes = Vec::new();
        let _ = Read::by_ref(&mut reader).take(SAID_MAX).read_to_end(&mut bytes);
        let _ = done.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    if let Err(error) = reading {
        let _ = child.kill();
        return Err(failed(error));
    }
    match wait(&mut child, limit).map_err(failed)? {
        Some(status) => Ok((status, result.recv_timeout(KILL_LIMIT).unwrap_or_default())),
        None => {
            let _ = child.kill();
            let _ = wait(&mut child, KILL_LIMIT);
            Err(format!("{} has not ended after {:.0} s", words.join(" "), limit.as_secs_f64().ceil()))
        }
    }
}

fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            None if Instant::now() < end => std::thread::sleep(POLL),
            status => return Ok(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn each_holder_has_its_program() {
        let mapped = Holder::Mapped { name: "vg-lv".to_owned(), node: "dm-0".to_owned() };
        for (holder, expected) in [
            (Holder::Mount("/srv".into()), Some("umount --no-canonicalize /srv")),
            (Holder::Swap("/dev/dm-1".to_owned()), Some("swapoff /dev/dm-1")),
            (Holder::Loop("loop3".to_owned()), Some("losetup --detach /dev/loop3")),
            (mapped, Some("dmsetup remove --noudevsync vg-lv")),
            (Holder::Array("md0".to_owned()), Some("mdadm --stop /dev/md0")),
            (Holder::Other("bcache0".to_owned()), None),
        ] {
            assert_eq!(command(&holder), expected.map(words), "{holder}");
        }
    }

    #[test]
    fn a_program_ends_at_its_limit_and_its_error_is_reported() {
        assert_eq!(run(&words("echo a"), Duration::from_secs(60)).as_deref(), Ok("a\n"));
        let error = run(&words("ls /no/such/place"), Duration::from_secs(60)).expect_err("it is not there");
        assert!(error.contains("/no/such/place"), "{error}");
        let error = run(&words("/no/such/program"), Duration::from_secs(60)).expect_err("it is not there");
        assert!(error.contains("/no/such/program"), "{error}");
        let error = run(&words("sleep 600"), Duration::from_millis(20)).expect_err("it takes longer");
        assert_eq!(error, "sleep 600 has not ended after 1 s");
    }

    #[test]
    fn a_unit_is_busy_while_its_own_job_runs() {
        let jobs = "101 poweroff.target start waiting\n\
            102 cbd-holders.service stop running\n\
            103 database.service stop running\n\
            104 cbdd.service stop waiting\n\
            No jobs running.\n";
        assert_eq!(busy_in(jobs, "cbd-holders.service"), ["database.service"]);
        assert_eq!(busy_in("", "x"), [""; 0]);
    }
}
