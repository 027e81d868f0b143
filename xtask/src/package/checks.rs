//! The checks of the packages: their rules, and what installation, upgrade, downgrade, removal and purge do to a daemon with data.
//!
//! Invariants: everything is installed in a [`sandbox`]; this machine keeps what it has. The steps build on one
//! another, so the first that fails is the last.

use super::sandbox::{self, Sandbox};
use super::{Symbols, make, packages_in};
use crate::leftovers::Scratch;
use crate::problem::Problem;
use crate::report::Count;
use crate::shell;
use crate::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The hidden task that runs the steps, in namespaces of its own.
pub const INSIDE: &str = "package-inside";

/// Time limit of each program that looks at packages, and of all steps together.
const LIMIT: Duration = Duration::from_secs(300);

/// The command of the packages.
const PROGRAM: &str = "cbdctrl";

/// The region, the disk and the address of the device, in the sandbox.
const REGION: &str = "/srv/cbd/region";
const DISK: &str = "/srv/cbd/disk";
const DEVICE: &str = "/run/cbd-test.sock";

/// Bytes that stay dirty.
const WRITTEN: usize = 64 << 10;
const PATTERN: u8 = 0xa5;

/// Lets a removal or a downgrade go on all the same.
const OVERRIDE: &str = "/run/cbd-allow-removal";

type Step = (&'static str, fn(&Machine) -> Result<(), String>);

const STEPS: [Step; 11] = [
    ("a fresh install starts the daemon, with a socket for the group", fresh_install),
    ("programs compile with the library, and fio loads the engine", library_and_engine),
    ("a removal is refused while data is dirty", refused_removal),
    ("an upgrade leaves the daemon to clients that would see errors", upgrade_with_a_client),
    ("an upgrade restarts the daemon, and keeps dirty data and the configuration", upgrade),
    ("a downgrade to a version that cannot open the regions is refused", refused_downgrade),
    ("a downgrade within the format is done", downgrade),
    ("a removal is refused while data is dirty and no daemon runs", removal_without_daemon),
    ("a removal without dirty data stops the daemon and keeps the data", removal),
    ("a purge removes configuration and state, and no region", purge),
    ("a purge after a forced removal keeps the list of regions", purge_after_force),
];

/// Builds the packages from the programs in `built` and checks them.
pub fn run(built: &Path) -> Count {
    let mut count = Count::default();
    let mut add = |name: &str, result: Result<(), String>| {
        let is_passed = result.is_ok();
        match result {
            Ok(()) => println!("    ok: {name}"),
            Err(why) => println!("    FAILED: {name}\n{why}"),
        }
        count.passed += u64::from(is_passed);
        count.failed += u64::from(!is_passed);
        is_passed
    };
    let scratch = match Scratch::new() {
        Ok(scratch) => scratch,
        Err(why) => {
            add("a folder", Err(why));
            return count;
        }
    };
    let (folder, output) = (scratch.path(), scratch.path().join("packages"));
    // The headers of fio stay in cargo's folder.
    let work = built.parent().unwrap_or(built).join("package-work");
    let made = make(built, &work, &output, Symbols::Dropped);
    if add("the packages are built", made.as_ref().map(drop).map_err(Clone::clone)) {
        let packages = made.unwrap_or_default();
        let (rules, stepped) = std::thread::scope(|scope| {
            let rules = scope.spawn(|| lintian(&packages));
            let stepped = steps(&output, &folder.join("sandbox"));
            (rules.join().unwrap_or_else(|_| Err("lintian's thread has panicked".to_owned())), stepped)
        });
        add("lintian finds no error", rules);
        add("the spec file for rpm is parsed, and rpmlint finds no error", spec());
        add("the steps in a sandbox", stepped);
    }
    for left in scratch.leftovers() {
        add("nothing is left behind", Err(left));
    }
    count
}

/// Runs a program, whose output is the error if it fails.
fn succeeds(command: &mut Command) -> Result<(), String> {
    let mut said = String::new();
    let end = shell::run(command, LIMIT, |_, line| {
        said.push_str(line);
        said.push('\n');
    });
    if end.is_success() { Ok(()) } else { Err(format!("{said}{end}")) }
}

fn lintian(packages: &[PathBuf]) -> Result<(), String> {
    let mut command = Command::new("lintian");
    command.args(["--fail-on", "error", "--allow-root", "--tag-display-limit", "0"]);
    // The project has no address. Whoever distributes packages sets DEBEMAIL.
    if std::env::var_os("DEBEMAIL").is_none() {
        command.args(["--suppress-tags", "bogus-mail-host,bogus-mail-host-in-debian-changelog"]);
    }
    succeeds(command.args(packages))
}

fn spec() -> Result<(), String> {
    let spec = workspace::root().join("packaging/rpm/cbd.spec");
    succeeds(Command::new("rpmspec").arg("--parse").arg(&spec))?;
    succeeds(Command::new("rpmlint").arg("--config").arg(spec.with_file_name("rpmlint.toml")).arg(&spec))
}

/// Runs the steps in namespaces of their own.
fn steps(packages: &Path, folder: &Path) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut inside = Command::new(program);
    inside.arg(INSIDE).arg(packages).arg(folder);
    let end = shell::run(&mut sandbox::enter(&inside), LIMIT, |_, line| println!("    {line}"));
    if end.is_success() { Ok(()) } else { Err(format!("    the steps: {end}")) }
}

/// The task [`INSIDE`].
///
/// # Errors
/// The step that failed, and why.
pub fn inside(arguments: &[String]) -> Result<bool, Problem> {
    let [packages, folder] = arguments else {
        return Err(Problem::Usage(format!("{INSIDE} takes two folders")));
    };
    let machine = Machine::new(Path::new(packages), Path::new(folder)).map_err(Problem::Failed)?;
    for (name, step) in STEPS {
        if let Err(why) = step(&machine) {
            let log = machine.sandbox.read("/var/log/cbdd").unwrap_or_default();
            return Err(Problem::Failed(format!("{name}: {why}\nlog of the daemon:\n{log}")));
        }
        println!("ok: {name}");
    }
    Ok(true)
}

/// A machine on which packages are installed.
struct Machine {
    sandbox: Sandbox,
}

impl Machine {
    /// The packages are in `/tmp/packages`: those of this tree, and `cbd` as a newer and as an older version.
    fn new(packages: &Path, folder: &Path) -> Result<Self, String> {
        let sandbox = Sandbox::mount(folder)?;
        let place = sandbox.path("/tmp/packages");
        fs::create_dir_all(&place).map_err(|error| error.to_string())?;
        for package in packages_in(packages)? {
            let copy = place.join(package.file_name().unwrap_or_default());
            fs::copy(&package, &copy).map_err(|error| format!("{}: {error}", copy.display()))?;
        }
        let folder = "/tmp/unpacked";
        let own = sandbox.ok("sh", &["-c", "ls /tmp/packages/cbd_*.deb"])?;
        sandbox.ok("dpkg-deb", &["--raw-extract", own.trim(), folder])?;
        let control = sandbox.read("/tmp/unpacked/DEBIAN/control")?;
        let configuration = sandbox.read("/tmp/unpacked/etc/cbd/cbd.toml")?;
        sandbox
            .write("/tmp/unpacked/etc/cbd/cbd.toml", &format!("{configuration}# of the other version\n"))?;
        for (name, version) in [("newer", "9.0.0"), ("older", "0.0.9")] {
            let lines = control.lines().map(|line| match line.starts_with("Version: ") {
                true => format!("Version: {version}\n"),
                false => format!("{line}\n"),
            });
            sandbox.write("/tmp/unpacked/DEBIAN/control", &lines.collect::<String>())?;
            sandbox.ok("dpkg-deb", &["-Znone", "--build", folder, &format!("/tmp/{name}.deb")])?;
        }
        sandbox.ok("mkdir", &["-p", "/srv/cbd"])?;
        sandbox.ok("truncate", &["--size", "64M", DISK])?;
        Ok(Self { sandbox })
    }

    fn cbdctrl(&self, arguments: &[&str]) -> Result<String, String> {
        self.sandbox.ok(PROGRAM, arguments)
    }

    /// Installs a package, keeping a configuration that was changed.
    fn install(&self, package: &str) -> Result<String, String> {
        self.sandbox.ok("dpkg", &["--force-confdef", "--force-confold", "--install", package])
    }

    /// The answer to a command of dpkg that must be refused.
    fn refused(&self, arguments: &[&str]) -> Result<String, String> {
        let ran = self.sandbox.run("dpkg", arguments);
        demand(!ran.is_success, || format!("dpkg {arguments:?} was not refused: {}", ran.text))?;
        contains(&ran.text, "REFUSED")?;
        Ok(ran.text)
    }

    /// The calls of systemctl since the last question that change the daemon.
    fn calls(&self) -> Result<Vec<String>, String> {
        let log = self.sandbox.read("/var/log/systemctl").unwrap_or_default();
        self.sandbox.write("/var/log/systemctl", "")?;
        let actions = log.lines().filter_map(|line| {
            let action = line.split_whitespace().find(|word| ["start", "stop", "restart"].contains(word))?;
            line.contains("cbdd.service").then(|| action.to_owned())
        });
        Ok(actions.collect())
    }

    fn demand_calls(&self, expected: &[&str]) -> Result<(), String> {
        let calls = self.calls()?;
        demand(calls == expected, || format!("systemctl was called for {calls:?}, not for {expected:?}"))
    }

    fn process(&self) -> Result<String, String> {
        self.sandbox.read("/run/cbdd.pid")
    }

    fn version(&self) -> Result<String, String> {
        self.sandbox.ok("dpkg-query", &["--show", "--showformat=${db:Status-Status} ${Version}", "cbd"])
    }

    fn start_backend(&self) -> Result<(), String> {
        let export = format!("nbd:unix:{DEVICE}");
        self.cbdctrl(&["backend-start", "-p", DISK, "-c", "16M", "--start-dev", "--export", &export])?;
        Ok(())
    }

    /// Writes data that stays dirty.
    fn write(&self) -> Result<(), String> {
        self.cbdctrl(&["set", "-b", "0", "writeback=paused:1h"])?;
        let (write, uri) =
            (format!("write -P {PATTERN} 0 {WRITTEN}"), format!("nbd+unix:///cbd0?socket={DEVICE}"));
        self.sandbox.ok("qemu-io", &["-f", "raw", "-c", &write, &uri])?;
        self.demand_dirty()
    }

    /// Demands that exactly what was written is dirty.
    fn demand_dirty(&self) -> Result<(), String> {
        let answer = self.sandbox.run(PROGRAM, &["safe-to", "remove"]);
        contains(&answer.text, &format!("({WRITTEN} bytes)"))
    }

    /// Whether the disk has what was written.
    fn disk_has_it(&self) -> Result<bool, String> {
        let disk = fs::read(self.sandbox.path(DISK)).map_err(|error| format!("{DISK}: {error}"))?;
        Ok(disk.iter().take(WRITTEN).all(|byte| *byte == PATTERN))
    }

    fn exists(&self, path: &str) -> bool {
        self.sandbox.path(path).symlink_metadata().is_ok()
    }
}

fn demand(is_true: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if is_true { Ok(()) } else { Err(otherwise()) }
}

fn contains(text: &str, part: &str) -> Result<(), String> {
    demand(text.contains(part), || format!("'{part}' is missing in: {text}"))
}

fn fresh_install(machine: &Machine) -> Result<(), String> {
    machine.sandbox.ok("sh", &["-c", "dpkg --install /tmp/packages/*.deb"])?;
    machine.demand_calls(&["start"])?;
    let owner = machine.sandbox.ok("stat", &["--format", "%a %U %G", "/run/cbd/control.sock"])?;
    demand(owner.trim() == "660 root cbd", || format!("the socket is {owner}"))?;
    let conffiles = machine.sandbox.ok("dpkg-query", &["--show", "--showformat=${Conffiles}", "cbd"])?;
    contains(&conffiles, "/etc/cbd/cbd.toml")?;
    contains(&machine.cbdctrl(&["status"])?, "cbdd ")?;
    for unit in ["cbdd.service", "cbd-holders.service"] {
        machine.sandbox.ok("test", &["-f", &format!("/usr/lib/systemd/system/{unit}")])?;
    }
    for file in ["man/man1/cbdctrl-status.1.gz", "man/man8/cbdd.8.gz", "bash-completion/completions/cbdctrl"]
    {
        demand(machine.exists(&format!("/usr/share/{file}")), || format!("{file} is missing"))?;
    }
    let cannot = machine
        .sandbox
        .run("setpriv", &["--reuid=65534", "--regid=65534", "--clear-groups", "cbdctrl", "status"]);
    demand(!cannot.is_success, || "a user without the group may use the socket".to_owned())?;
    let group = machine.sandbox.ok("getent", &["group", "cbd"])?;
    let group = group.split(':').nth(2).ok_or("the group has no number")?.to_owned();
    let groups = format!("--groups={group}");
    machine.sandbox.ok("setpriv", &["--reuid=65534", "--regid=65534", &groups, "cbdctrl", "status"])?;
    Ok(())
}

fn library_and_engine(machine: &Machine) -> Result<(), String> {
    let sandbox = &machine.sandbox;
    sandbox.write(
        "/tmp/version.c",
        "#include <cbd.h>\n#include <stdio.h>\nint main(void) { puts(cbd_version()); return 0; }\n",
    )?;
    sandbox.ok("sh", &["-c", "cc -o /tmp/version /tmp/version.c $(pkg-config --cflags --libs cbd)"])?;
    contains(&sandbox.ok("/tmp/version", &[])?, env!("CARGO_PKG_VERSION"))?;
    contains(&sandbox.ok("ldd", &["/tmp/version"])?, "libcbd.so.0 => /lib")?;
    let engine = sandbox.ok("dpkg-query", &["--listfiles", "cbd-fio"])?;
    let engine = engine.lines().find(|line| line.ends_with("/libfio_cbd.so")).ok_or("no engine")?;
    sandbox.ok("truncate", &["--size", "16M", "/tmp/fio.disk"])?;
    let engine = format!("--ioengine=external:{engine}");
    sandbox.ok(
        "fio",
        &[
            "--name=check",
            &engine,
            "--thread=1",
            "--region=/tmp/fio.region",
            "--region_size=64M",
            "--filename=/tmp/fio.disk",
            "--rw=randwrite",
            "--bs=4k",
            "--size=4M",
            "--verify=crc32c",
        ],
    )?;
    Ok(())
}

fn refused_removal(machine: &Machine) -> Result<(), String> {
    machine.cbdctrl(&["tp-reg", "--path", REGION, "--size", "64M", "--host", "node0", "--format"])?;
    // The region now uses a feature that not every version needs to know.
    machine.cbdctrl(&["tp-grow", "--size", "80M"])?;
    machine.start_backend()?;
    machine.write()?;
    for action in ["--remove", "--purge"] {
        let said = machine.refused(&[action, "cbd"])?;
        contains(&said, "64 KiB dirty")?;
        contains(&said, "cbdctrl backend-stop -t 0 -b 0")?;
        contains(&said, OVERRIDE)?;
    }
    contains(&machine.version()?, "installed ")?;
    machine.demand_calls(&[])?;
    machine.cbdctrl(&["status"]).map(drop)
}

fn upgrade_with_a_client(machine: &Machine) -> Result<(), String> {
    let process = machine.process()?;
    let uri = format!("nbd+unix:///cbd0?socket={DEVICE}");
    let reads =
        "h.pread(512, 0); print('connected', flush=True); import sys; sys.stdin.read(); h.pread(512, 0)";
    let mut client = machine.sandbox.start("nbdsh", &["-u", &uri, "-c", reads])?;
    let said = machine.install("/tmp/newer.deb");
    drop(client.stdin.take());
    let ended = client.wait().map_err(|error| format!("the client: {error}"))?;
    contains(&said?, "the daemon of the former version runs on")?;
    demand(ended.success(), || format!("the client saw an error: {ended}"))?;
    demand(machine.process()? == process, || "the daemon was restarted".to_owned())?;
    machine.demand_calls(&[])
}

fn upgrade(machine: &Machine) -> Result<(), String> {
    machine.sandbox.ok("sh", &["-c", "dpkg --install /tmp/packages/cbd_*.deb"])?;
    machine.demand_calls(&["restart"])?;
    let configuration = machine.sandbox.read("/etc/cbd/cbd.toml")?;
    machine.sandbox.write("/etc/cbd/cbd.toml", &format!("{configuration}# of the administrator\n"))?;
    let process = machine.process()?;
    machine.install("/tmp/newer.deb")?;
    machine.demand_calls(&["restart"])?;
    demand(machine.process()? != process, || "the daemon was not restarted".to_owned())?;
    contains(&machine.version()?, "installed 9.0.0")?;
    contains(&machine.sandbox.read("/etc/cbd/cbd.toml")?, "# of the administrator")?;
    contains(&machine.sandbox.read("/etc/cbd/cbd.toml.dpkg-dist")?, "# of the other version")?;
    machine.demand_dirty()
}

fn refused_downgrade(machine: &Machine) -> Result<(), String> {
    let said = machine.refused(&["--install", "/tmp/older.deb"])?;
    contains(&said, "version 0.0.9 would refuse")?;
    contains(&machine.version()?, "installed 9.0.0")?;
    machine.demand_calls(&[])
}

fn downgrade(machine: &Machine) -> Result<(), String> {
    let own = machine.sandbox.ok("sh", &["-c", "ls /tmp/packages/cbd_*.deb"])?;
    machine.install(own.trim())?;
    machine.demand_calls(&["restart"])?;
    contains(&machine.version()?, &format!("installed {}", env!("CARGO_PKG_VERSION")))?;
    machine.demand_dirty()
}

fn removal_without_daemon(machine: &Machine) -> Result<(), String> {
    machine.sandbox.ok("sh", &["-c", "kill -9 $(cat /run/cbdd.pid)"])?;
    let said = machine.refused(&["--remove", "cbd"])?;
    contains(&said, &format!("({WRITTEN} bytes)"))?;
    machine.demand_calls(&[])?;
    // A region that is not there may hold anything.
    let region = machine.sandbox.path(REGION);
    let hidden = region.with_extension("hidden");
    fs::rename(&region, &hidden).map_err(|error| error.to_string())?;
    let said = machine.refused(&["--remove", "cbd"])?;
    fs::rename(&hidden, &region).map_err(|error| error.to_string())?;
    contains(&said, "is not known")?;
    demand(!machine.disk_has_it()?, || "nothing was dirty".to_owned())
}

fn removal(machine: &Machine) -> Result<(), String> {
    machine.sandbox.ok("systemctl", &["start", "cbdd.service"])?;
    machine.cbdctrl(&["set", "-b", "0", "writeback=on"])?;
    machine.cbdctrl(&["drain"])?;
    machine.calls()?;
    machine.sandbox.ok("dpkg", &["--remove", "cbd"])?;
    contains(&machine.sandbox.read("/var/log/systemctl")?, "stop cbd-holders.service")?;
    machine.demand_calls(&["stop"])?;
    contains(&machine.version()?, "config-files ")?;
    demand(machine.disk_has_it()?, || "the disk lacks what was drained".to_owned())?;
    for file in [REGION, "/var/lib/cbd/transports.json", "/etc/cbd/cbd.toml"] {
        demand(machine.exists(file), || format!("{file} is gone"))?;
    }
    // Whoever installs it again finds everything as it was.
    machine.sandbox.ok("sh", &["-c", "dpkg --install /tmp/packages/cbd_*.deb"])?;
    contains(&machine.cbdctrl(&["status"])?, DISK)
}

fn purge(machine: &Machine) -> Result<(), String> {
    machine.sandbox.write("/var/lib/cbd/notes", "of the administrator")?;
    machine.sandbox.ok("dpkg", &["--purge", "cbd"])?;
    for file in ["/etc/cbd", "/var/lib/cbd/transports.json", "/var/lib/cbd/recovery-points"] {
        demand(!machine.exists(file), || format!("{file} is there"))?;
    }
    demand(machine.exists("/var/lib/cbd/notes"), || "a file of another owner was removed".to_owned())?;
    demand(machine.exists(REGION), || "the region is gone".to_owned())
}

fn purge_after_force(machine: &Machine) -> Result<(), String> {
    machine.sandbox.ok("sh", &["-c", "dpkg --install /tmp/packages/cbd_*.deb"])?;
    machine.cbdctrl(&["tp-reg", "--path", REGION, "--host", "node0"])?;
    contains(&machine.cbdctrl(&["status"])?, DISK)?;
    machine.write()?;
    machine.refused(&["--purge", "cbd"])?;
    machine.sandbox.write(OVERRIDE, "")?;
    let said = machine.sandbox.ok("dpkg", &["--purge", "cbd"])?;
    contains(&said, "is kept: data may be dirty")?;
    demand(machine.exists("/var/lib/cbd/transports.json"), || "the list of regions is gone".to_owned())
}
