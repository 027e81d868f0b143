//! Kernel modules that Debian's kernel does not have, built from the source that Debian ships with it.
//!
//! Invariants: source, headers and compiler are packages of exactly the kernel's version, fetched and
//! verified by apt, and unpacked into a root of their own, of which only the module is kept; nothing of this
//! machine changes. A module is built once for each kernel.
//!
//! Elsewhere: what a module depends on (`modules`). Nothing of the source enters this project.

use super::store::{self, Apt, Store};
use crate::shell::{self, Stream};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A module that can be built.
struct Source {
    /// With underscores, as the kernel names it.
    name: &'static str,
    /// Its folder in the kernel's source.
    folder: &'static str,
    /// The option that its makefile tests.
    option: &'static str,
}

const SOURCES: [Source; 1] =
    [Source { name: "dm_pcache", folder: "drivers/md/dm-pcache", option: "CONFIG_DM_PCACHE" }];

/// The packages needed beside source and headers; the compiler comes with the headers.
const TOOLS: [&str; 12] = [
    "make",
    "binutils",
    "bash",
    "dash",
    "coreutils",
    "sed",
    "gawk",
    "grep",
    "findutils",
    "tar",
    "xz-utils",
    "base-files",
];

/// Unpacking the source and compiling take half a minute on two processors that others use, too.
const LIMIT: Duration = Duration::from_secs(900);

/// The file of a module, if it is one that can be built; it is built first if necessary.
///
/// # Errors
/// Why it could not be built.
pub fn module(store: &Store, name: &str) -> Result<Option<PathBuf>, String> {
    let Some(source) = SOURCES.iter().find(|source| source.name == name) else { return Ok(None) };
    let file = format!("{}.ko", Path::new(source.folder).file_name().unwrap_or_default().to_string_lossy());
    let kept = store.cache().join("built").join(store.kernel_release());
    let module = kept.join(&file);
    let _lock = store::lock(store.cache())?;
    if module.is_file() {
        return Ok(Some(module));
    }
    eprintln!("    building {name} for Linux {}", store.kernel_release());
    let root = store.cache().join("build");
    store::remove(&root)?;
    store::make(&root)?;
    fetch(store, &root)?;
    build(store, &root, source)?;
    store::make(&kept)?;
    // The file appears only when it is complete.
    let built = root.join("build").join(source.folder).join(&file);
    fs::rename(&built, &module).map_err(|error| format!("cannot move {}: {error}", built.display()))?;
    store::remove(&root)?;
    Ok(Some(module))
}

/// Unpacks source, headers, compiler and tools into a root.
fn fetch(store: &Store, root: &Path) -> Result<(), String> {
    let release = store.kernel_release();
    let headers = format!("linux-headers-{release}");
    let apt = Apt::configure(store.cache())?;
    store::remove(&apt.archives())?;
    store::make(&apt.archives().join("partial"))?;
    apt.run("apt-get", &["update"])?;
    let shown = apt.run("apt-cache", &["show", "--no-all-versions", &headers]).map_err(|error| {
        format!("{error}\nthe mirror has the headers of newer kernels only, perhaps: cargo xtask vm fetch --again gets the newest")
    })?;
    let version = version_in(&shown).ok_or_else(|| format!("{headers} has no version:\n{shown}"))?;
    let sources = format!("linux-source-{}={version}", series(release));
    let mut arguments =
        vec!["install", "--download-only", "--yes", "--no-install-recommends", &headers, &sources];
    arguments.extend(TOOLS);
    apt.run("apt-get", &arguments)?;
    store::unpack(&apt.archives(), root)?;
    store::remove(&apt.archives())
}

/// Builds inside the root, as a chroot: the kernel's makefiles need the tools of their own release.
fn build(store: &Store, root: &Path, source: &Source) -> Result<(), String> {
    let release = store.kernel_release();
    let (folder, option) = (source.folder, source.option);
    let above = Path::new(folder).parent().unwrap_or(Path::new("")).display();
    let series = series(release);
    let script = format!(
        "set -e
        export PATH=/usr/bin:/usr/sbin LC_ALL=C
        ln -sf gawk /usr/bin/awk
        cd /build
        tar -x -f /usr/src/linux-source-{series}.tar.xz --strip-components=1 linux-source-{series}/{above}
        make -C /usr/lib/modules/{release}/build M=/build/{folder} {option}=m modules
        strip --strip-debug {folder}/*.ko"
    );
    store::make(&root.join("build"))?;
    for inner in ["dev", "proc", "tmp"] {
        store::make(&root.join(inner))?;
    }
    // The mounts end with their namespace, and the user namespace makes root privileges unnecessary.
    let outer = "mount --rbind /dev \"$0/dev\" && mount -t proc proc \"$0/proc\" && exec chroot \"$0\" /usr/bin/bash -c \"$1\"";
    let mut said = Vec::new();
    let end = shell::run(
        Command::new("unshare")
            .args(["--map-root-user", "--mount", "--pid", "--fork", "sh", "-c", outer])
            .arg(root)
            .arg(&script),
        LIMIT,
        |_: Stream, line| said.push(line.to_owned()),
    );
    if end.is_success() {
        return Ok(());
    }
    let last: Vec<_> = said.iter().rev().take(20).rev().map(|line| format!("\n    {line}")).collect();
    Err(format!("{} does not build: {end}{}", source.name, last.concat()))
}

/// `7.3` of `7.3.4+deb13-cloud-amd64`: the version in the name of the source package.
fn series(release: &str) -> &str {
    let mut dots = release.match_indices('.').map(|(at, _)| at);
    let _ = dots.next();
    let digits = release.find(|each: char| !each.is_ascii_digit() && each != '.').unwrap_or(release.len());
    &release[..dots.next().unwrap_or(release.len()).min(digits)]
}

fn version_in(shown: &str) -> Option<&str> {
    shown.lines().find_map(|line| line.strip_prefix("Version: ")).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_of_a_kernel_is_named_by_two_numbers() {
        assert_eq!(series("7.3.4+deb13-cloud-amd64"), "7.3");
        assert_eq!(series("7.3+deb13-cloud-amd64"), "7.3");
        assert_eq!(series("7.3"), "7.3");
    }

    #[test]
    fn the_version_of_a_package_is_what_apt_shows() {
        let shown = "Package: linux-headers-7\nSource: linux\nVersion: 7.3.4-1~bpo13+1\nInstalled-Size: 1\n";
        assert_eq!(version_in(shown), Some("7.3.4-1~bpo13+1"));
        assert_eq!(version_in("Package: x\n"), None);
    }
}
