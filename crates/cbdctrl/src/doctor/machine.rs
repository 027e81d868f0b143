//! The text files of a machine (`/sys`, `/proc`, `/etc`, `/dev`) below one root, which a test replaces by a folder.
//!
//! Invariants: only files of the kernel's own file systems and of the root file system are read, never one on a mount of
//! another user; each is read up to a limit. A file that is missing or unreadable is `None` or empty. Links are followed
//! by their text, inside the root.

use cbd_sys::mounts::Mount;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// Most bytes of a file that are read.
const LIMIT: u64 = 4 << 20;
/// Most links that are followed.
const LINKS_MAX: usize = 16;

/// A machine, by its files.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The machine with its files below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a file; bytes that are no UTF-8 are replaced.
    pub fn read(&self, path: &str) -> io::Result<String> {
        let place = self.place(path);
        // The open of a pipe would wait.
        if !fs::metadata(&place)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        File::open(place)?.take(LIMIT).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The text of a file; empty without one.
    pub fn text(&self, path: &str) -> String {
        self.read(path).unwrap_or_default()
    }

    /// The first line of a file, trimmed; `None` where it is empty.
    pub fn line(&self, path: &str) -> Option<String> {
        let text = self.read(path).ok()?;
        let line =
            text.lines().next()?.trim_matches(|letter: char| letter.is_whitespace() || letter.is_control());
        (!line.is_empty()).then(|| line.to_owned())
    }

    /// The number in a file.
    pub fn number(&self, path: &str) -> Option<u64> {
        let line = self.line(path)?;
        match line.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => line.parse().ok(),
        }
    }

    /// Whether there is a file, folder, device or link.
    pub fn exists(&self, path: &str) -> bool {
        fs::symlink_metadata(self.place(path)).is_ok()
    }

    /// The names in a folder, sorted; none without one. Names that are no UTF-8 are left out: no attribute of the kernel
    /// has one.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.place(folder)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name())
            .map(OsString::into_string)
            .filter_map(Result::ok)
            .collect();
        names.sort();
        names
    }

    /// The mounts in the namespace of this process.
    pub fn mounts(&self) -> Vec<Mount> {
        cbd_sys::mounts::of(&self.place("/proc/self")).unwrap_or_default()
    }

    /// The last name of the target of a link.
    pub fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.place(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// The kernel's name of the block device at a path in `/dev`, which may be a link; `None` for any other path, which is
    /// not looked at.
    pub fn block_device(&self, path: &str) -> Option<String> {
        let mut path = normal(Path::new(path));
        for _ in 0..LINKS_MAX {
            let inside = path.strip_prefix("/dev").ok()?;
            let text = path.to_str()?;
            match fs::read_link(self.place(text)) {
                Ok(target) => path = normal(&path.parent()?.join(target)),
                Err(_) => {
                    let name = inside.to_str()?.replace('/', "!");
                    return self.is_block(&name).then_some(name).or_else(|| self.mapped(inside));
                }
            }
        }
        None
    }

    fn is_block(&self, name: &str) -> bool {
        !name.is_empty() && self.exists(&format!("/sys/class/block/{name}"))
    }

    /// The device of device mapper with a node of its own in `/dev/mapper`.
    fn mapped(&self, inside: &Path) -> Option<String> {
        let wanted = inside.strip_prefix("mapper").ok()?.to_str()?;
        let mut names = self.names("/sys/class/block").into_iter();
        names.find(|name| self.line(&format!("/sys/class/block/{name}/dm/name")).as_deref() == Some(wanted))
    }
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// A made-up machine in a temporary folder.
#[cfg(test)]
pub mod made {
    use super::*;

    /// The folder, and the machine in it.
    pub struct Made {
        folder: tempfile::TempDir,
    }

    impl Made {
        /// A machine with these files, each with its text. A text that begins with `->` is the target of a link; one
        /// that is `/` a folder.
        pub fn with(files: &[(&str, &str)]) -> Self {
            let made = Self { folder: tempfile::tempdir().unwrap() };
            for (path, text) in files {
                made.add(path, text);
            }
            made
        }

        pub fn add(&self, path: &str, text: &str) {
            let place = self.machine().place(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            if let Some(target) = text.strip_prefix("->") {
                std::os::unix::fs::symlink(target, place).unwrap();
            } else if text == "/" {
                fs::create_dir_all(place).unwrap();
            } else {
                fs::write(place, text).unwrap();
            }
        }

        pub fn machine(&self) -> Machine {
            Machine::at(self.folder.path())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::made::Made;

    #[test]
    fn a_block_device_is_found_by_each_of_its_names() {
        let made = Made::with(&[
            ("/sys/class/block/sdb/size", "8"),
            ("/sys/class/block/dm-3/dm/name", "vg-lv\n"),
            ("/dev/disk/by-id/ata-1", "->../../sdb"),
            ("/dev/vg/lv", "->../mapper/vg-lv"),
            ("/dev/loop", "->loop"),
            ("/dev/null", ""),
        ]);
        let machine = made.machine();
        for (path, name) in [
            ("/dev/sdb", Some("sdb")),
            ("/dev/./disk/../sdb", Some("sdb")),
            ("/dev/disk/by-id/ata-1", Some("sdb")),
            ("/dev/vg/lv", Some("dm-3")),
            ("/dev/loop", None),
            ("/dev/null", None),
            ("/dev/../etc/passwd", None),
            ("/srv/disk", None),
        ] {
            assert_eq!(machine.block_device(path).as_deref(), name, "{path}");
        }
    }

    #[test]
    fn what_is_missing_is_empty() {
        let made = Made::with(&[("/a", " \n"), ("/b", "0x10\n"), ("/c", "/")]);
        let machine = made.machine();
        assert!(machine.names("/none").is_empty() && machine.text("/none").is_empty());
        assert_eq!((machine.line("/a"), machine.number("/b"), machine.number("/a")), (None, Some(16), None));
        assert!(machine.read("/c").is_err());
    }
}
