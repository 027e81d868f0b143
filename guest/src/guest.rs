//! Boots a guest, and reports how it ended.
//!
//! Invariants: a guest ends at its time limit or at the line that its host waits for; for a guest that ends
//! without a result, the last messages of its kernel are shown.

use super::debian;
use super::image::{self, Content};
use super::machine::{self, Paths};
use super::modules;
use super::plan::{Accelerator, Mode, Plan};
use super::programs::{self, Files};
use super::store::Store;
use crate::shell::{self, End, Stream};
use crate::workspace::{self, cargo_with_lock};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Number of the kernel's last lines that are shown: a panic with its registers and backtrace.
const LAST_LINES: usize = 60;

/// Maximum boot time of a guest if the processor executes its instructions: a hundred times the usual time.
const TRIAL: Duration = Duration::from_secs(20);

/// The note of a successful trial.
const BOOTS: &str = "boots";

/// Why a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The job ended with this exit code, and the guest powered off.
    Exited(u8),
    /// The host killed it as requested: its memory and its kernel's state are lost, the contents of its
    /// devices remain.
    Cut,
    /// It was killed at its time limit.
    TimedOut,
    /// It ended before its job did: its kernel panicked, or QEMU failed.
    Died,
}

/// How a guest ended.
#[derive(Debug)]
pub struct Outcome {
    /// Why.
    pub ended: Ended,
    /// By the guest's clock: the time from power on until the job began.
    pub booted: Option<Duration>,
    /// By the guest's clock: the time that the job took.
    pub ran: Option<Duration>,
    /// By the host's clock: the whole time.
    pub all: Duration,
    /// The last messages of its kernel.
    pub console: Vec<String>,
    /// What executed its instructions.
    pub by: &'static str,
}

/// Boots guests, one after the other.
#[derive(Debug)]
pub struct Host {
    store: Store,
    folder: PathBuf,
    boots: AtomicU32,
}

impl Host {
    /// Fetches whatever a guest needs and the cache does not have; `folder` is for the files of a boot.
    ///
    /// # Errors
    /// What cannot be fetched.
    pub fn new(folder: &Path) -> Result<Self, String> {
        Ok(Self { store: Store::open()?, folder: folder.to_owned(), boots: AtomicU32::new(0) })
    }

    /// The folder for the files of its boots.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The cache.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The release of the guests' kernel.
    pub fn kernel_release(&self) -> &str {
        self.store.kernel_release()
    }

    /// Boots a guest, passes every line of its job to `line`, and ends with it; if `line` breaks, the guest's
    /// power is cut.
    ///
    /// # Errors
    /// Why it could not be started.
    pub fn boot(
        &self,
        plan: &Plan,
        line: impl FnMut(Stream, &str) -> ControlFlow<()>,
    ) -> Result<Outcome, String> {
        let kvm = self.uses_kvm(plan)?;
        self.start(plan, kvm, line)
    }

    /// Boots a guest whose console is this program's.
    ///
    /// # Errors
    /// Why it could not be started.
    pub fn speak(&self, plan: &Plan) -> Result<(), String> {
        let kvm = self.uses_kvm(plan)?;
        let (paths, mut qemu) = self.prepare(plan, kvm)?;
        // The ports of a job are not connected here.
        let status = qemu.status().map_err(|error| format!("QEMU cannot be started: {error}"));
        drop(paths);
        status.map(drop)
    }

    fn start(
        &self,
        plan: &Plan,
        kvm: bool,
        line: impl FnMut(Stream, &str) -> ControlFlow<()>,
    ) -> Result<Outcome, String> {
        let (paths, mut qemu) = self.prepare(plan, kvm)?;
        let begun = Instant::now();
        let end = shell::run_until(&mut qemu, plan.timeout, line);
        let result = Said::parse(&fs::read_to_string(paths.result()).unwrap_or_default());
        let ended = match (end, result.code) {
            (End::NotStarted(error), _) => return Err(format!("QEMU cannot be started: {error}")),
            (End::TimedOut, _) => Ended::TimedOut,
            (End::Stopped, _) => Ended::Cut,
            (End::Exited(_), Some(code)) => Ended::Exited(code),
            (End::Exited(_), None) => Ended::Died,
        };
        // A guest whose power was cut may have sent its files before.
        let sent = fs::metadata(paths.files()).is_ok_and(|file| file.len() > 0);
        if let (Some(out), true) = (&plan.out, matches!(ended, Ended::Exited(_)) || sent) {
            self.unpack(&paths.files(), out)?;
        }
        let outcome = Outcome {
            ended,
            booted: result.begun,
            ran: result.ended.zip(result.begun).map(|(ended, begun)| ended.saturating_sub(begun)),
            all: begun.elapsed(),
            console: last_lines(&paths.console()),
            by: if kvm { "kvm" } else { "tcg" },
        };
        // The disks of a guest are removed with the folder; a folder that cannot be removed is removed with
        // its parent.
        let _ = fs::remove_dir_all(paths.folder());
        Ok(outcome)
    }

    /// The guest's root and devices, and the command that boots it.
    ///
    /// # Errors
    /// What cannot be read or written.
    pub fn prepare(&self, plan: &Plan, kvm: bool) -> Result<(Paths, Command), String> {
        let number = self.boots.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(format!("guest{number}"));
        fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let paths = Paths::new(&folder);
        if plan.system.is_some() {
            debian::write_job(plan, &paths)?;
        } else {
            self.write_root(plan, &paths)?;
        }
        machine::prepare(plan, &paths)?;
        let mut qemu = self.store.qemu();
        qemu.args(machine::arguments(plan, &paths, &self.store.kernel(), kvm));
        Ok((paths, qemu))
    }

    /// The root that the guest's kernel unpacks.
    fn write_root(&self, plan: &Plan, paths: &Paths) -> Result<(), String> {
        let modules = modules::collect(&self.store, machine::modules(plan))?;
        let mut files = Files::new();
        for file in &plan.files {
            programs::add(&mut files, &file.from, &file.to)?;
        }
        let mut links = Vec::new();
        if plan.cbd {
            programs::add(&mut files, &small(&cbdctrl()?, paths.folder()), Path::new("/usr/bin/cbdctrl"))?;
            links
                .extend(["/usr/bin/cbdd", "/usr/bin/blkverify"].map(|name| (PathBuf::from(name), "cbdctrl")));
        }
        let command = self.command(plan, &mut files)?;
        let content = Content {
            busybox: &self.store.busybox(),
            modules: &modules,
            files: &files,
            links: &links,
            command: &command,
        };
        image::write(&content, &paths.image())
    }

    /// The command, with the program shipped if it is one of this machine; a shell without a command.
    fn command(&self, plan: &Plan, files: &mut Files) -> Result<Vec<String>, String> {
        let Some((program, arguments)) = plan.command.split_first() else { return Ok(vec!["sh".to_owned()]) };
        let mut command = vec![program.clone()];
        command.extend_from_slice(arguments);
        let is_shipped = plan.cbd && ["cbdctrl", "cbdd"].contains(&program.as_str())
            || plan.files.iter().any(|file| file.to.as_os_str() == program.as_str());
        if !is_shipped && !self.is_applet(program)? {
            let found = programs::find(program)?;
            programs::add(files, &found, &found)?;
            command[0] = found.to_string_lossy().into_owned();
        }
        Ok(command)
    }

    fn is_applet(&self, program: &str) -> Result<bool, String> {
        let applets = shell::output_of(Command::new(self.store.busybox()).arg("--list"), TRIAL)
            .map_err(|end| format!("{}: {end}", self.store.busybox().display()))?;
        Ok(applets.lines().any(|applet| applet == program))
    }

    fn unpack(&self, archive: &Path, out: &Path) -> Result<(), String> {
        fs::create_dir_all(out).map_err(|error| format!("cannot make {}: {error}", out.display()))?;
        let status = Command::new(self.store.busybox())
            .args(["tar", "-x", "-o", "-f"])
            .arg(archive)
            .arg("-C")
            .arg(out)
            .stdin(Stdio::null())
            .status()
            .map_err(|error| format!("cannot start {}: {error}", self.store.busybox().display()))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("what the guest left in /out cannot be unpacked into {}: {status}", out.display()))
        }
    }

    /// Whether the processor executes the guest's instructions. On some machines /dev/kvm does not boot a
    /// stock kernel, and QEMU does not end then: a trial decides, once for each boot of this machine.
    pub fn uses_kvm(&self, plan: &Plan) -> Result<bool, String> {
        let device = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
        match (plan.mode, plan.accelerator, device) {
            (Mode::Counting, ..) | (_, Accelerator::Tcg, _) | (_, Accelerator::Auto, Err(_)) => Ok(false),
            (_, Accelerator::Kvm, Ok(_)) => Ok(true),
            (_, Accelerator::Kvm, Err(error)) => Err(format!("--accel kvm: /dev/kvm: {error}")),
            (_, Accelerator::Auto, Ok(_)) => self.try_kvm(),
        }
    }

    fn try_kvm(&self) -> Result<bool, String> {
        let machine = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let note = self.store.note("kvm");
        let known = fs::read_to_string(&note).unwrap_or_default();
        if let Some(answer) = known.strip_prefix(machine.trim()).filter(|_| !machine.is_empty()) {
            return Ok(answer.trim() == BOOTS);
        }
        let plan = Plan { timeout: TRIAL, ..Plan::of_script("true") };
        let outcome = self.start(&plan, true, |stream, line| {
            // QEMU then stops the guest, and waits for a debugger.
            if stream == Stream::Error && line.contains("KVM internal error") {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        let boots = outcome.ended == Ended::Exited(0);
        let answer = if boots { BOOTS } else { "does not boot" };
        eprintln!(
            "    a stock kernel {answer} on this machine's /dev/kvm ({:.1} s)",
            outcome.all.as_secs_f64()
        );
        fs::write(&note, format!("{} {answer}\n", machine.trim()))
            .map_err(|error| format!("cannot write {}: {error}", note.display()))?;
        Ok(boots)
    }
}

/// cbdctrl as users build it.
pub fn cbdctrl() -> Result<PathBuf, String> {
    let mut build = cargo_with_lock(["build", "--quiet", "--release", "--package", "cbdctrl"]);
    let status = build.status().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !status.success() {
        return Err("cbdctrl does not build".to_owned());
    }
    Ok(workspace::target_directory()?.join("release/cbdctrl"))
}

/// A copy of a program without debug information, if `strip` works, since a guest unpacks it at every boot.
pub fn small(built: &Path, folder: &Path) -> PathBuf {
    let small = folder.join(built.file_name().unwrap_or_default());
    let stripped = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .arg(&small)
        .arg(built)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if stripped.is_ok_and(|status| status.success()) { small } else { built.to_owned() }
}

/// What a guest reports about its job.
#[derive(Debug, Default, PartialEq)]
struct Said {
    begun: Option<Duration>,
    ended: Option<Duration>,
    code: Option<u8>,
}

impl Said {
    /// Parses `begun SECONDS` and `ended SECONDS CODE`; an incomplete line is ignored.
    fn parse(text: &str) -> Self {
        let mut said = Self::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let mut words = line.split(' ');
            let word = words.next();
            let seconds = words.next().and_then(|text| text.parse().ok());
            let at = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            match word {
                Some("begun") => said.begun = at,
                Some("ended") => {
                    said.ended = at;
                    said.code = words.next().and_then(|code| code.parse().ok());
                }
                _ => {}
            }
        }
        said
    }
}

/// The last messages of a guest's kernel.
pub fn last_lines(console: &Path) -> Vec<String> {
    let bytes = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_reports_when_its_job_began_and_how_it_ended() {
        let said = Said::parse("begun 4.50\nended 6.00 7\n");
        assert_eq!(said.begun, Some(Duration::from_millis(4500)));
        assert_eq!((said.ended, said.code), (Some(Duration::from_secs(6)), Some(7)));
    }

    #[test]
    fn an_incomplete_line_is_not_an_end() {
        assert_eq!(Said::parse("begun 4.50\nended 6.00 1").code, None);
        assert_eq!(Said::parse("ended 6.00\n").code, None);
        assert_eq!(Said::parse("ended x 300\n"), Said::default());
    }
}
