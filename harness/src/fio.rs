//! Builds the engine for fio against the headers of the installed fio.
//!
//! Invariants: the engine is built for exactly the version of fio that loads it, since the structures that both share differ
//! between versions; any other version is refused. Debian has no package of fio's headers. They come from the source package of
//! the installed version, through apt, which verifies it, or from a tree that the caller names.
//!
//! Elsewhere: the engine itself (`crates/libcbd/fio`).

use crate::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's keys, with which apt verifies the sources.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The file name of the engine, by fio's convention.
pub const ENGINE: &str = "libfio_cbd.so";

/// The headers of the installed fio: in `source` if the caller gives it, otherwise fetched into a folder below `target`.
///
/// # Errors
/// A description of the missing part.
pub fn headers(source: Option<&Path>, target: &Path) -> Result<PathBuf, String> {
    let given = source.map(version_of).transpose()?;
    let version = installed_version()?;
    let headers = match source {
        Some(source) => source.to_owned(),
        None => fetched(&target.join("fio").join(&version))?,
    };
    let given = given.map_or_else(|| version_of(&headers), Ok)?;
    if given != version {
        return Err(format!(
            "{} is the source of {given}, and {version} is installed: the engine must be built for the fio that loads it",
            headers.display()
        ));
    }
    if !headers.join("config-host.h").is_file() {
        run(Command::new("sh").arg("./configure").current_dir(&headers), "fio's configure")?;
    }
    Ok(headers)
}

/// Builds the engine in `built`, beside the library, where it also finds the library when it is loaded.
///
/// # Errors
/// The compiler's messages.
pub fn build(headers: &Path, built: &Path) -> Result<PathBuf, String> {
    let engine = built.join(ENGINE);
    compile(headers, built, &engine, &["-Wl,-rpath,$ORIGIN"])?;
    Ok(engine)
}

/// Builds the engine as the file `engine`, which finds the library where the system has it.
///
/// # Errors
/// The compiler's messages.
pub fn build_for_system(headers: &Path, built: &Path, engine: &Path) -> Result<(), String> {
    // Debian's and other systems' flags that harden a program.
    compile(headers, built, engine, &["-Wl,-z,relro", "-Wl,-z,now", "-fstack-protector-strong"])
}

fn compile(headers: &Path, built: &Path, engine: &Path, flags: &[&str]) -> Result<(), String> {
    let mut compiler = Command::new("cc");
    compiler
        .args([
            "-std=gnu11",
            "-O2",
            "-g",
            "-Wall",
            "-Wextra",
            "-Wno-sign-compare",
            "-Wno-unused-parameter",
            "-Werror",
        ])
        .args(["-fPIC", "-shared", "-D_GNU_SOURCE", "-include", "config-host.h"])
        .args(flags)
        .arg("-isystem")
        .arg(headers)
        .arg("-I")
        .arg(workspace::root().join("crates/libcbd/include"))
        .arg("-o")
        .arg(engine)
        .arg(workspace::root().join("crates/libcbd/fio/fio_cbd.c"))
        .arg("-L")
        .arg(built)
        .arg("-lcbd");
    run(&mut compiler, "cc")
}

/// The version of Debian's package of fio that is installed.
///
/// # Errors
/// When it is not installed.
pub fn installed_package() -> Result<String, String> {
    output(
        Command::new("dpkg-query").args(["--show", "--showformat=${Version}", "fio"]),
        "dpkg-query --show fio",
    )
}

/// The version of the fio in `PATH`, such as `fio-3.33`.
fn installed_version() -> Result<String, String> {
    output(Command::new("fio").arg("--version"), "fio --version")
}

/// The version of a source tree.
fn version_of(source: &Path) -> Result<String, String> {
    let file = source.join("FIO-VERSION-GEN");
    let text = fs::read_to_string(&file)
        .map_err(|error| format!("{} is no source of fio: {}: {error}", source.display(), file.display()))?;
    text.lines()
        .find_map(|line| line.strip_prefix("DEF_VER="))
        .map(|version| version.trim().to_owned())
        .ok_or_else(|| format!("{} does not say its version", file.display()))
}

/// The source of the installed fio, fetched through apt unless the folder `place` already holds it.
fn fetched(place: &Path) -> Result<PathBuf, String> {
    let tree = place.join("source");
    if version_of(&tree).is_ok() {
        return Ok(tree);
    }
    let package = output(
        Command::new("dpkg-query").args([
            "--show",
            "--showformat=${source:Package}=${source:Version}",
            "fio",
        ]),
        "dpkg-query (name a source of fio with --fio-source where there is no apt)",
    )?;
    let lists = place.join("lists");
    let unpacked = place.join("unpacked");
    for folder in [lists.join("partial"), unpacked.clone()] {
        fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    }
    let list = write_sources(place)?;
    let apt = |arguments: &[&str], folder: &Path| {
        let mut command = Command::new("apt-get");
        command
            .args([
                "-q",
                "-o",
                "Acquire::Retries=3",
                "-o",
                "Dir::Etc::SourceParts=-",
                "-o",
                "APT::Sandbox::User=root",
            ])
            .arg("-o")
            .arg(format!("Dir::Etc::SourceList={}", list.display()))
            .arg("-o")
            .arg(format!("Dir::State::Lists={}", lists.display()))
            .args(["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="])
            .args(arguments)
            .current_dir(folder);
        run(&mut command, "apt-get")
    };
    apt(&["update"], place)?;
    apt(&["source", "--download-only", &package], place)?;
    let archive = fs::read_dir(place)
        .map_err(|error| format!("cannot read {}: {error}", place.display()))?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.contains(".orig.tar") && !name.ends_with(".asc")
        })
        .ok_or_else(|| format!("apt-get source {package} brought no archive"))?;
    run(
        Command::new("tar")
            .arg("--extract")
            .arg("--strip-components=1")
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .arg(&unpacked),
        "tar",
    )?;
    // The tree gets its name only when it is complete.
    fs::rename(&unpacked, &tree).map_err(|error| format!("cannot make {}: {error}", tree.display()))?;
    Ok(tree)
}

/// Writes the system's list of sources, with source packages enabled, for apt. The system's configuration does not change.
fn write_sources(place: &Path) -> Result<PathBuf, String> {
    let targets = output(
        Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Identifier: Packages",
            "Origin: Debian",
        ]),
        "apt-get indextargets",
    )?;
    let signed = if Path::new(KEYRING).is_file() { format!(" [signed-by={KEYRING}]") } else { String::new() };
    let mut sources: Vec<String> = targets.lines().map(|line| format!("deb-src{signed} {line}")).collect();
    sources.sort_unstable();
    sources.dedup();
    let list = place.join("sources.list");
    fs::write(&list, sources.join("\n") + "\n")
        .map_err(|error| format!("cannot write {}: {error}", list.display()))?;
    Ok(list)
}

/// Runs a command, and uses its output only if it fails.
fn run(command: &mut Command, what: &str) -> Result<(), String> {
    output(command, what).map(drop)
}

fn output(command: &mut Command, what: &str) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{what} cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = if said.trim().is_empty() { String::from_utf8_lossy(&output.stdout) } else { said };
    Err(format!("{what}: {}\n{}", output.status, said.trim()))
}
