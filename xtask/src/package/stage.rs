//! Lays the files of the packages where they are to be installed, below a folder that stands for the root.
//!
//! Elsewhere: which file belongs to which package (`packaging/debian/*.install`).

use super::{copy_tree, write};
use crate::install::{self, Place, copy, link};
use crate::workspace;
use cbd_harness::fio;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Where each shell looks for the completions of packages, below `/usr/share`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/cbdctrl"),
    ("zsh", "zsh/vendor-completions/_cbdctrl"),
    ("fish", "fish/vendor_completions.d/cbdctrl.fish"),
];

/// Files of the system's parts, with their places.
const SYSTEM_FILES: [(&str, &str); 4] = [
    ("cbdd.service", "usr/lib/systemd/system/cbdd.service"),
    ("cbd-holders.service", "usr/lib/systemd/system/cbd-holders.service"),
    ("60-cbd.rules", "usr/lib/udev/rules.d/60-cbd.rules"),
    ("cbd.sysusers", "usr/lib/sysusers.d/cbd.conf"),
];

/// Lays programs, library, configuration, man pages and completions below `root`; `library` is the folder of libraries below `/usr`.
///
/// # Errors
/// What is missing or cannot be written.
pub fn files(built: &Path, root: &Path, library: &str) -> Result<(), String> {
    for file in ["cbdctrl", "libcbd.so", "libcbd.a"] {
        if !built.join(file).is_file() {
            return Err(format!("{} is not there: leave --no-build out", built.join(file).display()));
        }
    }
    let programs = root.join("usr/bin");
    make(&programs)?;
    let program = programs.join("cbdctrl");
    copy(&built.join("cbdctrl"), &program)?;
    for name in ["cbdd", "blkverify"] {
        link("cbdctrl", &programs.join(name))?;
    }
    let place = Place { prefix: "/usr".into(), folder: root.join("usr"), library: library.to_owned() };
    install::place_library(built, &place)?;
    let configuration = root.join("etc/cbd");
    make(&configuration)?;
    copy(&workspace::root().join("packaging/cbd.toml"), &configuration.join("cbd.toml"))?;
    let shared = root.join("usr/share");
    printed(&program, &["man", &shared.join("man").display().to_string()])?;
    for (shell, place) in COMPLETIONS {
        let file = shared.join(place);
        make(file.parent().unwrap_or(&shared))?;
        write(&file, &printed(&program, &["completions", shell])?)?;
    }
    Ok(())
}

/// Lays the files of systemd and udev below `root`. In Debian's packages debhelper does this.
///
/// # Errors
/// What cannot be written.
pub fn system_files(root: &Path) -> Result<(), String> {
    for (file, place) in SYSTEM_FILES {
        let place = root.join(place);
        make(place.parent().unwrap_or(root))?;
        copy(&workspace::root().join("packaging").join(file), &place)?;
    }
    Ok(())
}

/// Lays what debhelper installs by itself: the same files of systemd and udev, and documents.
///
/// # Errors
/// What cannot be written.
pub fn sources_of_debhelper(source: &Path) -> Result<(), String> {
    let (root, debian) = (workspace::root(), source.join("debian"));
    let names = ["cbd.cbdd.service", "cbd.cbd-holders.service", "cbd.udev", "cbd.sysusers"];
    for ((file, _), name) in SYSTEM_FILES.iter().zip(names) {
        copy(&root.join("packaging").join(file), &debian.join(name))?;
    }
    for file in ["README.md", "CHANGELOG.md"] {
        copy(&root.join(file), &source.join(file))?;
    }
    copy_tree(&root.join("docs"), &source.join("docs"))
}

/// Builds the engine for fio into the folder of libraries. Returns the version of Debian's package of fio to which it belongs.
///
/// # Errors
/// Why it cannot be built here.
pub fn engine(built: &Path, library: &Path, work: &Path) -> Result<String, String> {
    let version = fio::installed_package()?;
    let target = work.parent().unwrap_or(work);
    let headers = fio::headers(None, target)?;
    let folder = library.join("fio");
    make(&folder)?;
    fio::build_for_system(&headers, built, &folder.join(fio::ENGINE))?;
    Ok(version)
}

/// Lays the rules for Prometheus and the board for Grafana. Returns whether there are any.
///
/// # Errors
/// What cannot be written.
pub fn monitoring(root: &Path) -> Result<bool, String> {
    let has_files = |folder: &Path| fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    let folders =
        ["prometheus", "grafana"].map(|name| (name, workspace::root().join("packaging").join(name)));
    if !folders.iter().all(|(_, folder)| has_files(folder)) {
        return Ok(false);
    }
    for (name, folder) in folders {
        let place = root.join("usr/share/cbd").join(name);
        copy_tree(&folder, &place)?;
        for entry in fs::read_dir(&place).into_iter().flatten().flatten() {
            // The tests of the rules.
            if entry.file_name().to_string_lossy().ends_with(".test.yml") {
                fs::remove_file(entry.path())
                    .map_err(|error| format!("{}: {error}", entry.path().display()))?;
            }
        }
    }
    Ok(true)
}

/// What the program prints.
fn printed(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let failed = |why: String| format!("{} {}: {why}", program.display(), arguments.join(" "));
    let output = Command::new(program).args(arguments).output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    String::from_utf8(output.stdout).map_err(|error| failed(error.to_string()))
}

fn make(folder: &Path) -> Result<(), String> {
    fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))
}
