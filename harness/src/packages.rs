//! The programs that the system tests run, and the Debian packages that hold them.
//!
//! Invariants: nothing is installed if nothing is missing, and a program that is still missing after the
//! installation is named. All messages go to standard error: standard output belongs to the caller.

use crate::shell;
use crate::workspace;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A program, or a module of Python by its path, and the Debian package that holds it.
struct Tool {
    program: &'static str,
    package: &'static str,
}

const TOOLS: [Tool; 49] = [
    Tool { program: "fio", package: "fio" },
    Tool { program: "gcc", package: "gcc" },
    Tool { program: "pkg-config", package: "pkg-config" },
    Tool { program: "nbdinfo", package: "libnbd-bin" },
    Tool { program: "nbdcopy", package: "libnbd-bin" },
    Tool { program: "nbdsh", package: "python3-libnbd" },
    Tool { program: "qemu-io", package: "qemu-utils" },
    Tool { program: "qemu-img", package: "qemu-utils" },
    Tool { program: "mkfs.ext4", package: "e2fsprogs" },
    Tool { program: "tune2fs", package: "e2fsprogs" },
    Tool { program: "mke2fs", package: "e2fsprogs" },
    Tool { program: "e2fsck", package: "e2fsprogs" },
    Tool { program: "fsck.ext4", package: "e2fsprogs" },
    Tool { program: "mkfs.xfs", package: "xfsprogs" },
    Tool { program: "xfs_repair", package: "xfsprogs" },
    Tool { program: "mkfs.btrfs", package: "btrfs-progs" },
    Tool { program: "btrfs", package: "btrfs-progs" },
    Tool { program: "fstrim", package: "util-linux" },
    Tool { program: "unshare", package: "util-linux" },
    Tool { program: "blkdiscard", package: "util-linux" },
    Tool { program: "addpart", package: "util-linux" },
    Tool { program: "prlimit", package: "util-linux" },
    Tool { program: "mount", package: "mount" },
    Tool { program: "umount", package: "mount" },
    Tool { program: "losetup", package: "mount" },
    Tool { program: "dmsetup", package: "dmsetup" },
    Tool { program: "udevadm", package: "udev" },
    Tool { program: "pg_ctlcluster", package: "postgresql" },
    Tool { program: "setpriv", package: "util-linux" },
    Tool { program: "blockdev", package: "util-linux" },
    Tool { program: "resizepart", package: "util-linux" },
    Tool { program: "resize2fs", package: "e2fsprogs" },
    Tool { program: "cc", package: "gcc" },
    Tool { program: "git", package: "git" },
    Tool { program: "objdump", package: "binutils" },
    Tool { program: "c++filt", package: "binutils" },
    Tool { program: "prometheus", package: "prometheus" },
    Tool { program: "promtool", package: "prometheus" },
    Tool { program: "chromium", package: "chromium" },
    Tool { program: "python3", package: "python3" },
    Tool { program: "/usr/bin/mypy", package: "mypy" },
    Tool { program: "/usr/lib/python3/dist-packages/yaml/__init__.py", package: "python3-yaml" },
    // Packages, and their checks.
    Tool { program: "dpkg-buildpackage", package: "dpkg-dev" },
    Tool { program: "dh", package: "debhelper" },
    Tool { program: "lintian", package: "lintian" },
    Tool { program: "rpmspec", package: "rpm" },
    Tool { program: "rpmlint", package: "rpmlint" },
    Tool { program: "curl", package: "curl" },
    // Guests with a Debian of their own.
    Tool { program: "mmdebstrap", package: "mmdebstrap" },
];

/// The library that the notebook of the Python package needs. It is large, so only nightly runs install it.
const PLOTS: [Tool; 1] = [Tool {
    program: "/usr/lib/python3/dist-packages/matplotlib/__init__.py",
    package: "python3-matplotlib",
}];

/// libFuzzer is built from its C++ source.
const COMPILER: [Tool; 1] = [Tool { program: "g++", package: "g++" }];

/// The programs that set up and measure the peers in guests.
const PEERS: [Tool; 4] = [
    Tool { program: "fio", package: "fio" },
    Tool { program: "mkfs.ext4", package: "e2fsprogs" },
    Tool { program: "dmsetup", package: "dmsetup" },
    Tool { program: "make-bcache", package: "bcache-tools" },
];

/// Directories of system programs that are not on the path of an ordinary login.
const SYSTEM_DIRECTORIES: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// The path on which tests find programs: that of the caller and the system directories.
pub fn search_path() -> OsString {
    let given = std::env::var_os("PATH").unwrap_or_default();
    let mut directories: Vec<_> = std::env::split_paths(&given).collect();
    directories.extend(SYSTEM_DIRECTORIES.iter().map(Into::into));
    std::env::join_paths(directories).unwrap_or(given)
}

/// Installs the missing programs that the system tests run.
///
/// # Errors
/// The programs that are still missing, and instructions for the user.
pub fn install() -> Result<(), String> {
    install_of(&TOOLS, |_| true)
}

/// Installs the programs among these that are missing, if system tests run them.
///
/// # Errors
/// The programs that are still missing, and instructions for the user.
pub fn install_programs(programs: &[&str]) -> Result<(), String> {
    install_of(&TOOLS, |tool| programs.contains(&tool.program))
}

/// Installs the missing programs that the build of the fuzzer needs.
///
/// # Errors
/// The programs that are still missing, and instructions for the user.
pub fn install_compiler() -> Result<(), String> {
    install_of(&COMPILER, |_| true)
}

/// Installs what the notebook of the Python package needs.
///
/// # Errors
/// What is still missing, and instructions for the user.
pub fn install_plots() -> Result<(), String> {
    install_of(&PLOTS, |_| true)
}

/// Installs the missing programs that the setup of the peers in guests needs.
///
/// # Errors
/// The programs that are still missing, and instructions for the user.
pub fn install_peers() -> Result<(), String> {
    install_of(&PEERS, |_| true)
}

fn install_of(tools: &'static [Tool], is_wanted: impl Fn(&Tool) -> bool) -> Result<(), String> {
    let missing_now = || missing_of(tools).into_iter().filter(|tool| is_wanted(tool)).collect::<Vec<_>>();
    let missing = missing_now();
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    packages.sort_unstable();
    packages.dedup();
    if on_path("apt-get") {
        eprintln!("    installing {}", packages.join(" "));
        let mut apt = vec!["install", "-y", "--no-install-recommends"];
        apt.extend(&packages);
        for attempt in 1..=3 {
            // The package lists are fetched only when something is needed from them.
            if apt_get(&["update"]) && apt_get(&apt) {
                break;
            }
            eprintln!("    attempt {attempt} of 3 failed");
            std::thread::sleep(Duration::from_secs(5 * attempt));
        }
    }
    let missing = missing_now();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<String> =
        missing.iter().map(|tool| format!("{} ({})", tool.program, tool.package)).collect();
    Err(format!("missing programs (Debian packages): {}", names.join(", ")))
}

fn missing_of(tools: &'static [Tool]) -> Vec<&'static Tool> {
    // A module is a file that nothing executes.
    let is_there = |tool: &&Tool| tool.program.ends_with(".py") && Path::new(tool.program).is_file();
    tools.iter().filter(|tool| !is_there(tool) && !on_path(tool.program)).collect()
}

/// Whether a program of this name can be found.
pub fn on_path(program: &str) -> bool {
    std::env::split_paths(&search_path())
        .any(|directory: std::path::PathBuf| is_executable(&directory.join(program)))
}

/// Whether it is a file that may be executed.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn apt_get(arguments: &[&str]) -> bool {
    let mut command = Command::new("apt-get");
    command
        .args(["-q", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    let mut output = Vec::new();
    let end = shell::run(&mut command, Duration::from_secs(600), |_, line| {
        if workspace::is_ci() {
            output.push(line.to_owned());
        } else {
            eprintln!("    {line}");
        }
    });
    if !end.is_success() {
        for line in output.iter().rev().take(20).rev() {
            eprintln!("    {line}");
        }
        eprintln!("    apt-get {}: {end}", arguments.join(" "));
    }
    end.is_success()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_the_system_directories() {
        let path = search_path();
        let directories: Vec<_> = std::env::split_paths(&path).collect();
        assert!(
            SYSTEM_DIRECTORIES
                .iter()
                .all(|wanted| directories.iter().any(|found| found == Path::new(wanted)))
        );
    }

    /// Runs in a process of its own, so that the output can be captured.
    #[test]
    fn standard_output_is_the_callers() {
        const TEST: &str = "packages::tests::standard_output_is_the_callers";
        const INSIDE: &str = "XTASK_TEST_INSIDE";
        const MISSING: [Tool; 1] = [Tool { program: "no-such-program-anywhere", package: "none" }];
        if std::env::var_os(INSIDE).is_some() {
            let error = install_of(&MISSING, |_| true).expect_err("there is no such package");
            return assert!(error.contains("no-such-program-anywhere (none)"), "{error}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        let fake = folder.path().join("apt-get");
        // The fake program prints a line for each list and each package, and installs nothing.
        std::fs::write(&fake, "#!/bin/sh\necho apt says $*\n").expect("a program");
        std::fs::set_permissions(&fake, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("ours");
        for is_ci in [false, true] {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(["--exact", "--nocapture", TEST]).env(INSIDE, "1");
            command.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
            command.env_remove("CI").envs(is_ci.then_some(("CI", "true")));
            let said = command.output().expect("it ran");
            let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
            assert!(said.status.success(), "{out}{err}");
            assert!(out.contains("1 passed"), "{out}");
            assert!(!out.contains("installing") && !out.contains("apt"), "{out}");
            assert!(err.contains("installing none"), "{err}");
            assert_eq!(err.contains("apt says"), !is_ci, "{err}");
        }
    }

    /// Programs of a minimal Debian (debootstrap's minbase), and those of the compiler's package.
    const BARE: [&str; 30] = [
        "apt-cache",
        "apt-get",
        "bash",
        "chmod",
        "chown",
        "chroot",
        "cmp",
        "cp",
        "date",
        "dd",
        "dpkg",
        "dpkg-deb",
        "dpkg-query",
        "fallocate",
        "false",
        "ldd",
        "mkfifo",
        "mknod",
        "nice",
        "setsid",
        "sh",
        "sha256sum",
        "sleep",
        "strip",
        "sync",
        "tail",
        "tar",
        "timeout",
        "true",
        "truncate",
    ];

    /// The programs that a source file starts by name, as far as the name is in the call.
    fn programs_of(text: &str) -> Vec<&str> {
        let mut starts = vec!["Command::new(\"", "tool(\""];
        if text.contains("Command::new(") {
            starts.extend(["run(\"", "run_with(\""]);
        }
        let behind = |start: &'static str| {
            text.match_indices(start).map(move |(at, _)| text.split_at(at + start.len()).1)
        };
        let named = starts.into_iter().flat_map(behind).filter_map(|rest| rest.split_once('"'));
        let is_name =
            |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.+".contains(&byte));
        // Other absolute paths are missing on purpose.
        let names = named.map(|(name, _)| name.trim_start_matches("/usr/bin/"));
        names.filter(|name| is_name(name)).collect()
    }

    fn add_sources(folder: &Path, files: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                add_sources(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }

    #[test]
    fn every_program_that_is_started_is_in_a_bare_debian_or_in_the_list() {
        let mut files = Vec::new();
        for folder in ["crates", "bench", "xtask/src"] {
            add_sources(&workspace::root().join(folder), &mut files);
        }
        let (mut found, mut unknown) = (0, Vec::new());
        for file in files {
            let text = std::fs::read_to_string(&file).expect("a source file");
            for program in programs_of(&text) {
                found += 1;
                let is_listed = TOOLS.iter().any(|tool| tool.program == program);
                // rustup is optional: without it, the step `freestanding` reports the checks that it skipped.
                if !(is_listed || BARE.contains(&program) || program == "rustup") {
                    unknown.push(format!("{}: {program}", file.display()));
                }
            }
        }
        assert!(found > 50, "the calls are not found: {found}");
        assert!(unknown.is_empty(), "neither in a bare Debian nor in TOOLS:\n{}", unknown.join("\n"));
    }

    #[test]
    fn a_directory_is_not_a_program() {
        assert!(!is_executable(Path::new("/usr")));
        assert!(on_path("sh"));
        assert!(!on_path("no-such-program-anywhere"));
    }
}
