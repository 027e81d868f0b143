//! Whether the initramfs has the rules that seal disks: it is a copy, made earlier.
//!
//! Invariants: nothing is built or changed here. Only times are compared, so a copy that was made for another reason
//! counts as well.

use std::fs;
use std::path::{Path, PathBuf};

/// The initramfs of the running kernel in `boot`, by the names that Debian and dracut give it.
#[must_use]
pub fn of_running_kernel(boot: &Path) -> Option<PathBuf> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    of_kernel(boot, release.trim())
}

fn of_kernel(boot: &Path, release: &str) -> Option<PathBuf> {
    let names = [format!("initrd.img-{release}"), format!("initramfs-{release}.img")];
    names.iter().map(|name| boot.join(name)).find(|path| path.is_file())
}

/// Whether the file `image` was written before one of `rules`.
#[must_use]
pub fn is_older(image: &Path, rules: &[PathBuf]) -> bool {
    let written = |path: &Path| fs::metadata(path).and_then(|found| found.modified()).ok();
    let Some(made) = written(image) else { return false };
    rules.iter().filter_map(|rule| written(rule)).any(|rule| rule > made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    #[test]
    fn an_image_from_before_a_rule_is_older_and_one_that_was_made_again_is_not() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(of_kernel(dir.path(), "6.1"), None);
        let image = dir.path().join("initramfs-6.1.img");
        let rule = dir.path().join("12-cbd.rules");
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let set = |path: &Path, seconds: u64| File::create(path).unwrap().set_modified(at(seconds)).unwrap();
        set(&image, 1000);
        set(&rule, 2000);
        assert_eq!(of_kernel(dir.path(), "6.1"), Some(image.clone()));
        assert!(is_older(&image, std::slice::from_ref(&rule)));
        set(&image, 3000);
        assert!(!is_older(&image, &[rule]));
        assert!(!is_older(&image, &[]) && !is_older(&dir.path().join("none"), &[image]));
    }
}
