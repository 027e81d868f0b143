//! Fetches QEMU and the guest's kernel: Debian's packages, fetched and verified by apt, unpacked into a
//! cache.
//!
//! Invariants: this machine's packages, sources and lists stay as they are. Its configuration of apt is read,
//! so that the mirror, the proxy and the certificates of its administrator apply here, too; everything is
//! written to the cache. A cache is complete or does not exist, and one process at a time fills it.
//!
//! QEMU comes with all libraries that it needs, down to the C library, and its own loader starts it: it is
//! the same on every machine, whatever is installed there.

use crate::problem::Problem;
use crate::shell;
use crate::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Names another folder for the cache.
const CACHE: &str = "CBD_VM_CACHE";
/// Names another mirror of Debian than the one this machine uses.
const MIRROR: &str = "CBD_VM_MIRROR";
/// The mirror for a machine that does not run Debian.
const DEBIAN: &str = "http://deb.debian.org/debian/";
/// Debian's own keys, with which apt verifies packages.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// The release whose QEMU and busybox are used.
const RELEASE: &str = "trixie";
/// The suite with its newest kernels.
const KERNELS: &str = "trixie-backports";
/// The kernel's flavour for virtual machines, whose modules have a fifth of the size.
const FLAVOUR: &str = "cloud-amd64";
/// Packages beside the kernel's.
const PACKAGES: [&str; 2] = ["qemu-system-x86", "busybox-static"];
/// Raised when other packages are needed, so that an older cache is filled again.
const CONTENT: &str = "1";
/// All packages are 80 MB.
const LIMIT: Duration = Duration::from_secs(900);
/// Written last; records what the cache holds.
const STAMP: &str = "fetched";

/// Options of a fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fetch {
    /// Fetch even if there is a cache.
    again: bool,
    /// A version of the kernel instead of the newest, such as `7.1.13+deb13`.
    kernel: Option<String>,
}

impl Fetch {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option or a missing value.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut fetch = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--again" => fetch.again = true,
                "--kernel" => {
                    let version = rest.next().filter(|version| is_version(version)).ok_or_else(|| {
                        Problem::Usage("--kernel needs a version such as 7.1.13+deb13".to_owned())
                    })?;
                    fetch.kernel = Some(version.clone());
                }
                other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
            }
        }
        Ok(fetch)
    }
}

/// The contents of the cache.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    release: String,
}

impl Store {
    /// The cache, filled first if it does not exist.
    ///
    /// # Errors
    /// Why it cannot be filled, as text.
    pub fn open() -> Result<Self, String> {
        Self::fetch(&Fetch::default())
    }

    /// Fills the cache according to `fetch`, or finds it filled.
    ///
    /// # Errors
    /// What is missing, or the error of apt.
    pub fn fetch(fetch: &Fetch) -> Result<Self, String> {
        if !cfg!(target_arch = "x86_64") {
            return Err("guests run programs of this machine, and are of x86-64".to_owned());
        }
        let cache = place()?;
        make(&cache)?;
        let _lock = lock(&cache)?;
        if !fetch.again
            && let Some(store) = Self::found(&cache)
            && fetch.kernel.as_ref().is_none_or(|version| store.release.starts_with(version.as_str()))
        {
            return Ok(store);
        }
        fill(&cache, fetch.kernel.as_deref())?;
        Self::found(&cache).ok_or_else(|| format!("{} was filled and is not complete", cache.display()))
    }

    /// The folder of the cache.
    pub fn cache(&self) -> &Path {
        self.root.parent().unwrap_or(&self.root)
    }

    fn found(cache: &Path) -> Option<Self> {
        let root = cache.join("root");
        let stamp = fs::read_to_string(root.join(STAMP)).ok()?;
        let (content, release) = stamp.trim_end().split_once(' ')?;
        (content == CONTENT).then(|| Self { release: release.to_owned(), root })
    }

    /// The release of the kernel.
    pub fn kernel_release(&self) -> &str {
        &self.release
    }

    /// The kernel's image.
    pub fn kernel(&self) -> PathBuf {
        self.modules().join("vmlinuz")
    }

    /// The folder of the kernel's modules.
    pub fn modules(&self) -> PathBuf {
        self.root.join("usr/lib/modules").join(&self.release)
    }

    /// A shell and its tools in one file that needs no library.
    pub fn busybox(&self) -> PathBuf {
        self.root.join("usr/bin/busybox")
    }

    /// QEMU, started by its own loader with its own libraries.
    pub fn qemu(&self) -> Command {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        let share = self.root.join("usr/share");
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command
            .arg("--library-path")
            .arg(&libraries)
            .arg(self.root.join("usr/bin/qemu-system-x86_64"))
            .arg("-L")
            .arg(share.join("qemu"))
            .arg("-L")
            .arg(share.join("seabios"))
            .arg("-L")
            .arg(self.root.join("usr/lib/ipxe/qemu"))
            .env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }

    /// The path of a note about this machine and this cache.
    pub fn note(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

/// The folder of the cache, which may not exist yet.
fn place() -> Result<PathBuf, String> {
    match std::env::var_os(CACHE).filter(|value| !value.is_empty()) {
        Some(path) => std::path::absolute(&path).map_err(|error| format!("{CACHE}: {error}")),
        None => Ok(workspace::target_directory()?.join("vm")),
    }
}

/// Fetches and unpacks; the former content is used until everything is there.
fn fill(cache: &Path, kernel: Option<&str>) -> Result<(), String> {
    let apt = Apt::configure(cache)?;
    eprintln!("    fetching QEMU and a kernel into {}", cache.display());
    apt.run("apt-get", &["update"])?;
    let release = match kernel {
        Some(version) => format!("{version}-{FLAVOUR}"),
        None => apt.newest_kernel()?,
    };
    let image = format!("linux-binary-{release}");
    let modules = format!("linux-modules-{release}");
    let mut arguments = vec!["install", "--download-only", "--yes", "--no-install-recommends"];
    arguments.extend(PACKAGES);
    arguments.extend([image.as_str(), modules.as_str()]);
    apt.run("apt-get", &arguments)?;
    let archives = apt.archives();
    let fresh = cache.join("root.new");
    remove(&fresh)?;
    make(&fresh)?;
    unpack(&archives, &fresh)?;
    let stamp = fresh.join(STAMP);
    fs::write(&stamp, format!("{CONTENT} {release}\n"))
        .map_err(|error| format!("cannot write {}: {error}", stamp.display()))?;
    let root = cache.join("root");
    remove(&root)?;
    fs::rename(&fresh, &root).map_err(|error| format!("cannot make {}: {error}", root.display()))?;
    // Its packages may be older than those that were fetched now.
    remove(&cache.join("debian"))?;
    // The packages are not needed again; a later fetch may bring other versions.
    remove(&archives)
}

/// The lock of the process that changes the cache.
pub fn lock(cache: &Path) -> Result<fs::File, String> {
    let path = cache.join("lock");
    let file = fs::File::create(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|error| format!("cannot lock {}: {error}", path.display()))?;
    Ok(file)
}

/// Unpacks all packages of a folder into another one.
pub fn unpack(archives: &Path, into: &Path) -> Result<(), String> {
    for package in packages_in(archives)? {
        let end = shell::run(
            Command::new("dpkg-deb").arg("--extract").arg(&package).arg(into),
            LIMIT,
            |_, line| eprintln!("    {line}"),
        );
        if !end.is_success() {
            return Err(format!("dpkg-deb --extract {}: {end}", package.display()));
        }
    }
    Ok(())
}

/// A configuration of apt beside that of this machine.
pub struct Apt {
    folder: PathBuf,
    configuration: PathBuf,
}

impl Apt {
    /// Writes the configuration into the cache; nothing is fetched yet.
    pub fn configure(cache: &Path) -> Result<Self, String> {
        let folder = cache.join("apt");
        let apt = Self { configuration: folder.join("apt.conf"), folder };
        for inner in ["state/lists/partial", "preferences"] {
            make(&apt.folder.join(inner))?;
        }
        make(&apt.archives().join("partial"))?;
        let sources = [source(RELEASE)?, source(KERNELS)?];
        apt.write("sources.list", &format!("{}\n", sources.join("\n")))?;
        // No package counts as installed, so that everything that QEMU needs is fetched.
        apt.write("status", "")?;
        apt.write("apt.conf", &configuration(&apt.folder))?;
        Ok(apt)
    }

    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let file = self.folder.join(name);
        fs::write(&file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
    }

    /// The folder of fetched packages.
    pub fn archives(&self) -> PathBuf {
        self.folder.join("cache/archives")
    }

    /// Runs a command of apt and returns its output; at most three times, since networks fail at times.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        let mut said = String::new();
        let mut problem = String::new();
        for attempt in 1..=3 {
            said.clear();
            let mut errors = Vec::new();
            let mut command = Command::new(program);
            command
                .arg("-q")
                .arg("-c")
                .arg(&self.configuration)
                .args(arguments)
                .env("DEBIAN_FRONTEND", "noninteractive")
                .env("LC_ALL", "C.UTF-8");
            let end = shell::run(&mut command, LIMIT, |stream, line| match stream {
                shell::Stream::Output => {
                    said.push_str(line);
                    said.push('\n');
                }
                shell::Stream::Error => errors.push(line.to_owned()),
            });
            if end.is_success() {
                return Ok(said);
            }
            let last: Vec<_> =
                errors.iter().rev().take(12).rev().map(|line| format!("\n    {line}")).collect();
            problem = format!("{program} {}: {end}{}", arguments.join(" "), last.concat());
            if matches!(end, shell::End::NotStarted(_)) {
                break;
            }
            std::thread::sleep(Duration::from_secs(2 * attempt));
        }
        Err(format!(
            "{problem}\nQEMU and a kernel come from a mirror of Debian through apt; {MIRROR} names another one"
        ))
    }

    /// The release of the newest kernel, by the package that depends on its modules.
    fn newest_kernel(&self) -> Result<String, String> {
        let package = format!("linux-modules-{FLAVOUR}");
        let shown = self.run("apt-cache", &["depends", "--important", &format!("{package}/{KERNELS}")])?;
        newest_kernel(&shown).ok_or_else(|| {
            format!("{package} of {KERNELS} does not say which kernel is the newest:\n{shown}")
        })
    }
}

fn newest_kernel(depends: &str) -> Option<String> {
    depends
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: linux-modules-"))
        .find(|release| {
            release.starts_with(|first: char| first.is_ascii_digit()) && release.ends_with(FLAVOUR)
        })
        .map(str::to_owned)
}

fn configuration(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "Dir::Etc::SourceList \"{folder}/sources.list\";\n\
         Dir::Etc::SourceParts \"-\";\n\
         Dir::Etc::Preferences \"/dev/null\";\n\
         Dir::Etc::PreferencesParts \"{folder}/preferences\";\n\
         Dir::State \"{folder}/state\";\n\
         Dir::State::status \"{folder}/status\";\n\
         Dir::Cache \"{folder}/cache\";\n\
         Acquire::Retries \"3\";\n\
         Acquire::Languages \"none\";\n\
         APT::Keep-Downloaded-Packages \"true\";\n\
         // The user of apt's sandbox often cannot reach a folder of ours.\n\
         APT::Sandbox::User \"root\";\n\
         // What this machine does after its own updates is not for ours.\n\
         #clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n\
         #clear DPkg::Post-Invoke;\n\
         #clear Acquire::IndexTargets::deb::DEP-11;\n\
         #clear Acquire::IndexTargets::deb::DEP-11-icons-small;\n\
         #clear Acquire::IndexTargets::deb::DEP-11-icons;\n"
    )
}

/// A release as a source of packages.
///
/// # Errors
/// Why no mirror is known.
pub fn source(release: &str) -> Result<String, String> {
    let signed = if Path::new(KEYRING).is_file() { format!(" signed-by={KEYRING}") } else { String::new() };
    Ok(format!("deb [arch=amd64{signed}] {} {release} main", mirror()?))
}

/// How this machine's apt reaches mirrors, as lines of its configuration: proxies, certificates, checks of dates.
///
/// # Errors
/// The error of apt.
pub fn apt_settings() -> Result<Vec<String>, String> {
    let mut command = Command::new("apt-config");
    command.args(["dump", "--no-empty"]);
    let all = shell::output_of(&mut command, Duration::from_secs(60))
        .map_err(|end| format!("apt-config dump: {end}: guests are made of Debian's packages"))?;
    Ok(settings_of_transport(&all))
}

fn settings_of_transport(all: &str) -> Vec<String> {
    let begins = ["Acquire::http", "Acquire::Check-", "Acquire::ForceIPv", "Acquire::Retries"];
    let is_one = |line: &&str| begins.iter().any(|begin| line.starts_with(begin));
    all.lines().filter(is_one).map(str::to_owned).collect()
}

/// The mirror: the one that is named, or that of this machine, or Debian's own.
fn mirror() -> Result<String, String> {
    if let Ok(named) = std::env::var(MIRROR)
        && !named.is_empty()
    {
        return Ok(named);
    }
    let Some(codename) = codename() else { return Ok(DEBIAN.to_owned()) };
    let mut command = Command::new("apt-get");
    command.args(["indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Identifier: Packages"]);
    let targets = shell::output_of(&mut command, Duration::from_secs(60))
        .map_err(|end| format!("apt-get indextargets: {end}: guests are made of Debian's packages"))?;
    mirror_of(&targets, &codename).ok_or_else(|| {
        format!(
            "apt has no source for {codename}, which this machine runs; name a mirror of Debian in {MIRROR}"
        )
    })
}

/// The codename of this machine's release, if it runs Debian.
pub fn codename() -> Option<String> {
    codename_of_debian(&fs::read_to_string("/etc/os-release").unwrap_or_default())
}

/// The codename of the release, if the system is Debian.
fn codename_of_debian(os_release: &str) -> Option<String> {
    let value = |key: &str| {
        let line = os_release.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.trim_matches('"').to_owned())
    };
    (value("ID=")? == "debian").then(|| value("VERSION_CODENAME="))?
}

/// The mirror that serves the release; its security updates are elsewhere.
fn mirror_of(targets: &str, codename: &str) -> Option<String> {
    targets
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(release, _)| *release == codename || ["stable", "oldstable"].contains(release))
        .map(|(_, place)| place.to_owned())
}

fn packages_in(archives: &Path) -> Result<Vec<PathBuf>, String> {
    let entries =
        fs::read_dir(archives).map_err(|error| format!("cannot read {}: {error}", archives.display()))?;
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    found.sort();
    Ok(found)
}

/// Creates a folder and its parents.
pub fn make(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}

/// Removes a folder, if it exists.
pub fn remove(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn is_version(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_digit())
        && text.chars().all(|each| each.is_ascii_alphanumeric() || "+.~-".contains(each))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_that_of_this_release_and_not_its_security_updates() {
        let targets = "bookworm-security http://a/debian-security/\ncloud-sdk-bookworm https://b/apt/\n\
                       bookworm-updates http://c/debian/\nbookworm http://d/debian/\n";
        assert_eq!(mirror_of(targets, "bookworm").as_deref(), Some("http://d/debian/"));
        assert_eq!(mirror_of(targets, "trixie"), None);
    }

    #[test]
    fn settings_of_the_transport_are_taken_and_no_others() {
        let dump = "APT::Architecture \"amd64\";\nAcquire::https::Proxy \"http://p:1\";\nAcquire::Languages:: \"none\";\n\
                    Acquire::Check-Date \"false\";\n";
        let taken = ["Acquire::https::Proxy \"http://p:1\";", "Acquire::Check-Date \"false\";"];
        assert_eq!(settings_of_transport(dump), taken);
    }

    #[test]
    fn only_a_debian_has_a_mirror_of_debian() {
        let debian = "PRETTY_NAME=\"Debian\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(codename_of_debian(debian).as_deref(), Some("bookworm"));
        assert_eq!(codename_of_debian("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"), None);
    }

    #[test]
    fn the_newest_kernel_is_what_the_package_of_its_modules_depends_on() {
        let depends = "linux-modules-cloud-amd64\n  Depends: linux-base-cloud-amd64\n  Depends: linux-modules-7.3.4+deb13-cloud-amd64\n";
        assert_eq!(newest_kernel(depends).as_deref(), Some("7.3.4+deb13-cloud-amd64"));
        assert_eq!(newest_kernel("  Depends: linux-modules-amd64\n"), None);
    }

    #[test]
    fn a_version_of_a_kernel_names_no_other_package() {
        let parse = |line: &str| Fetch::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(
            parse("--again --kernel 7.1.13+deb13"),
            Ok(Fetch { again: true, kernel: Some("7.1.13+deb13".to_owned()) })
        );
        assert!(matches!(parse("--kernel -o=Debug"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--kernel"), Err(Problem::Usage(_))));
    }
}
