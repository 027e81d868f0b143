//! Properties of devices in /sys.
//!
//! Invariants: a missing or malformed file means "unknown", never an error and never a panic.
//!
//! Elsewhere: the consequences (`open`, `identity`).

use cbd_sys::DeviceNumber;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The root of all paths here.
pub(crate) const SYS: &str = "/sys";

/// The first line of a file, trimmed.
pub(crate) fn read_line(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.lines().next()?.trim().to_owned())
}

/// The path of the backing file of the loop device with this directory in `/sys`. A name may contain any bytes, including
/// blanks at its end; the kernel appends one line feed.
pub(crate) fn loop_backing(directory: &Path) -> Option<PathBuf> {
    let mut path = fs::read(directory.join("loop/backing_file")).ok()?;
    if path.last() == Some(&b'\n') {
        path.pop();
    }
    (!path.is_empty()).then(|| PathBuf::from(OsString::from_vec(path)))
}

fn read_number(path: &Path) -> Option<u64> {
    let line = read_line(path)?;
    match line.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => line.parse().ok(),
    }
}

/// The directory of a character device.
pub(crate) fn of_character_device(sys: &Path, number: DeviceNumber) -> Option<PathBuf> {
    fs::canonicalize(sys.join(format!("dev/char/{number}"))).ok()
}

/// The directory of a block device.
pub(crate) fn of_block_device(sys: &Path, number: DeviceNumber) -> Option<PathBuf> {
    fs::canonicalize(sys.join(format!("dev/block/{number}"))).ok()
}

/// A device-DAX device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DeviceDax {
    /// Bytes.
    pub size: u64,
    /// The length of a mapping must be a multiple of this.
    pub align: u64,
}

/// The properties of the device, if it is a device-DAX device.
pub(crate) fn device_dax(directory: &Path) -> Option<DeviceDax> {
    let subsystem = fs::canonicalize(directory.join("subsystem")).ok()?;
    if subsystem.file_name()? != "dax" {
        return None;
    }
    let size = read_number(&directory.join("size"))?;
    let align = read_number(&directory.join("align")).filter(|align| align.is_power_of_two());
    Some(DeviceDax { size, align: align.unwrap_or(2 << 20) })
}

/// The platform's statement on the memory's content after a power failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PowerFailure {
    /// Data that has left the processor's caches is kept.
    Kept,
    /// The memory is managed as persistent, but the platform does not state that it keeps data: memory set aside with
    /// `memmap=`, a firmware table without the flags.
    NotStated,
    /// The memory is volatile.
    Lost,
}

/// The power-failure behaviour of the memory of the device in `directory`, as its NVDIMM region states it, if it has one.
pub(crate) fn power_failure(directory: &Path) -> PowerFailure {
    let mut known = PowerFailure::Lost;
    for ancestor in directory.ancestors() {
        let name = ancestor.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if read_line(&ancestor.join("devtype")).is_some_and(|kind| kind == "nd_volatile") {
            return PowerFailure::Lost;
        }
        if let Some(domain) = read_line(&ancestor.join("persistence_domain"))
            && matches!(domain.as_str(), "memory_controller" | "cpu_cache")
        {
            known = PowerFailure::Kept;
        }
        if name.starts_with("ndbus") && known == PowerFailure::Lost {
            known = PowerFailure::NotStated;
        }
    }
    known
}

/// Whether the descriptions of its pages are in a device of persistent memory (`ndctl create-namespace --map dev`) and not in ordinary
/// memory.
pub(crate) fn has_pages_in_device(directory: &Path) -> bool {
    // The devices above the one that is mapped have the mode: `pmem`, `ram` or `none`.
    let mode = directory.ancestors().skip(1).take(3).find_map(|ancestor| read_line(&ancestor.join("mode")));
    mode.is_some_and(|mode| mode == "pmem")
}

/// The name of the NVDIMM namespace under a block device.
pub(crate) fn namespace_of(directory: &Path) -> Option<String> {
    directory.ancestors().find_map(|ancestor| {
        let name = ancestor.file_name()?.to_str()?;
        name.starts_with("namespace").then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("has a parent")).expect("made");
        fs::write(path, text).expect("written");
    }

    const DEVICE: &str = "devices/LNXSYSTM:00/ndbus0/region0/dax0.0/dax/dax0.0";
    const NUMBER: DeviceNumber = DeviceNumber { major: 252, minor: 3 };

    fn with_device() -> tempfile::TempDir {
        let sys = tempfile::tempdir().expect("a directory");
        write(sys.path(), &format!("{DEVICE}/size"), "1071644672\n");
        write(sys.path(), &format!("{DEVICE}/align"), "4096\n");
        fs::create_dir_all(sys.path().join("bus/dax")).expect("made");
        fs::create_dir_all(sys.path().join("dev/char")).expect("made");
        symlink(sys.path().join("bus/dax"), sys.path().join(DEVICE).join("subsystem")).expect("linked");
        symlink(sys.path().join(DEVICE), sys.path().join("dev/char/252:3")).expect("linked");
        sys
    }

    #[test]
    fn a_device_dax_device_is_recognized_by_its_subsystem() {
        let sys = with_device();
        let directory = of_character_device(sys.path(), NUMBER).expect("found");
        assert_eq!(device_dax(&directory), Some(DeviceDax { size: 1_071_644_672, align: 4096 }));
        assert_eq!(device_dax(Path::new("/sys/dev/char/1:5")), None);
    }

    #[test]
    fn descriptions_of_pages_are_in_the_device_if_its_mode_says_so() {
        let sys = with_device();
        let directory = of_character_device(sys.path(), NUMBER).expect("found");
        assert!(!has_pages_in_device(&directory), "it is not known");
        for (mode, is_in_device) in [("pmem\n", true), ("ram\n", false), ("none\n", false)] {
            write(sys.path(), "devices/LNXSYSTM:00/ndbus0/region0/dax0.0/mode", mode);
            assert_eq!(has_pages_in_device(&directory), is_in_device, "{mode}");
        }
    }

    #[test]
    fn memory_is_kept_only_if_the_platform_states_it() {
        let sys = with_device();
        let directory = of_character_device(sys.path(), NUMBER).expect("found");
        assert_eq!(power_failure(&directory), PowerFailure::NotStated);
        write(sys.path(), "devices/LNXSYSTM:00/ndbus0/region0/persistence_domain", "memory_controller\n");
        assert_eq!(power_failure(&directory), PowerFailure::Kept);
        write(sys.path(), "devices/LNXSYSTM:00/ndbus0/region0/devtype", "nd_volatile\n");
        assert_eq!(power_failure(&directory), PowerFailure::Lost);
    }

    #[test]
    fn memory_outside_an_nvdimm_bus_is_volatile() {
        assert_eq!(power_failure(Path::new("/sys/devices/platform/hmem.0/dax0.0")), PowerFailure::Lost);
    }

    #[test]
    fn a_namespace_is_found_in_the_path_of_its_disk() {
        let disk = Path::new("/sys/devices/ndbus0/region1/namespace1.0/block/pmem1");
        assert_eq!(namespace_of(disk), Some("namespace1.0".to_owned()));
        assert_eq!(namespace_of(Path::new("/sys/devices/virtual/block/loop0")), None);
    }
}
