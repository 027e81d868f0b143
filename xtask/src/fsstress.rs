//! A stress test for file systems: several threads create, link, move and remove files and folders at random. Each thread
//! compares the result with the expected state.
//!
//! It follows the `fsstress` that SGI wrote for XFS and that has since been used to test file systems; no Debian package holds
//! it. It differs in its checks: each thread has a folder of its own and a model of it in memory, with which the folder is
//! compared.
//!
//! Invariants: the same seed gives each thread the same operations, and a difference is reported with the seed and the last
//! operations.

use crate::fsx::change_allocation;
use crate::random::Random;
use rustix::fs::FallocateFlags;
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Number of operations that are shown after a difference.
const HISTORY: usize = 40;

/// Maximum number of names of a thread, and maximum length of a file.
const NAMES: usize = 150;
const LONGEST: u64 = 192 << 10;

/// The parameters of a stress test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// A folder; each thread creates a folder of its own in it, which must not exist yet.
    pub path: PathBuf,
    /// The seed of the operations.
    pub seed: u64,
    /// Number of operations of each thread.
    pub operations: u64,
    /// Number of threads.
    pub threads: u64,
}

/// The object to which a name refers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Folder,
    /// A file; several names may refer to the same.
    File(u64),
    Link(PathBuf),
}

struct Worker {
    root: PathBuf,
    random: Random,
    /// All names, relative to the root of this thread.
    names: BTreeMap<PathBuf, Node>,
    /// The content of each file.
    contents: BTreeMap<u64, Vec<u8>>,
    /// The next number of a name or file; none is used twice.
    next: u64,
    history: VecDeque<String>,
}

/// Runs the plan. At the end, each thread compares its folder with the model, and leaves the files in place.
///
/// # Errors
/// The first difference or failed operation of any thread, as text.
pub fn run(plan: &Plan) -> Result<(), String> {
    let ended = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..plan.threads).map(|number| scope.spawn(move || one(plan, number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
            .collect::<Vec<_>>()
    });
    ended.into_iter().collect()
}

fn one(plan: &Plan, number: u64) -> Result<(), String> {
    let root = plan.path.join(format!("stress-{number}"));
    let mut worker = Worker {
        random: Random::new(plan.seed.wrapping_mul(1_000_003).wrapping_add(number)),
        root,
        names: BTreeMap::from([(PathBuf::new(), Node::Folder)]),
        contents: BTreeMap::new(),
        next: 0,
        history: VecDeque::new(),
    };
    fs::create_dir(&worker.root)
        .map_err(|error| format!("cannot make {}: {error}", worker.root.display()))?;
    for step in 0..plan.operations {
        worker.step().map_err(|text| worker.explain(step, plan.seed, &text))?;
    }
    worker.compare().map_err(|text| worker.explain(plan.operations, plan.seed, &text))
}

impl Worker {
    fn step(&mut self) -> Result<(), String> {
        let full = self.names.len() >= NAMES;
        match self.random.below(100) {
            0..14 if !full => self.make_file(),
            14..20 if !full => self.make_folder(),
            20..25 if !full => self.link(),
            25..28 if !full => self.symbolic_link(),
            0..28 => self.remove(),
            28..50 => self.write(),
            50..57 => self.truncate(),
            57..61 => self.punch(),
            61..73 => self.rename(),
            73..83 => self.remove(),
            83..88 => self.synchronise(),
            _ => self.read(),
        }
    }

    fn make_file(&mut self) -> Result<(), String> {
        let (name, id) = self.new_name();
        self.note(format!("make {}", name.display()));
        let made = OpenOptions::new().write(true).create_new(true).open(self.at(&name));
        made.map_err(|error| format!("make: {error}"))?;
        self.contents.insert(id, Vec::new());
        self.names.insert(name, Node::File(id));
        Ok(())
    }

    fn make_folder(&mut self) -> Result<(), String> {
        let (name, _) = self.new_name();
        self.note(format!("make folder {}", name.display()));
        fs::create_dir(self.at(&name)).map_err(|error| format!("make folder: {error}"))?;
        self.names.insert(name, Node::Folder);
        Ok(())
    }

    fn link(&mut self) -> Result<(), String> {
        let Some((from, id)) = self.a_file() else { return Ok(()) };
        let (name, _) = self.new_name();
        self.note(format!("link {} {}", from.display(), name.display()));
        fs::hard_link(self.at(&from), self.at(&name)).map_err(|error| format!("link: {error}"))?;
        self.names.insert(name, Node::File(id));
        Ok(())
    }

    fn symbolic_link(&mut self) -> Result<(), String> {
        let (name, number) = self.new_name();
        let target = PathBuf::from(format!("{}/{number}", "far/".repeat(self.random.index(40))));
        self.note(format!("symbolic link {}", name.display()));
        symlink(&target, self.at(&name)).map_err(|error| format!("symbolic link: {error}"))?;
        self.names.insert(name, Node::Link(target));
        Ok(())
    }

    fn write(&mut self) -> Result<(), String> {
        let Some((name, id)) = self.a_file() else { return self.make_file() };
        let (at, length) = self.span();
        self.note(format!("write {} {at:#x}..{:#x}", name.display(), at + length));
        let stamp = (self.random.below(255) + 1) as u8;
        let bytes: Vec<u8> = (at..at + length).map(|at| stamp ^ (at >> 9) as u8).collect();
        self.open(&name)?.write_all_at(&bytes, at).map_err(|error| format!("write: {error}"))?;
        let content = self.contents.entry(id).or_default();
        if content.len() < usize_of(at + length) {
            content.resize(usize_of(at + length), 0);
        }
        content[usize_of(at)..usize_of(at + length)].copy_from_slice(&bytes);
        Ok(())
    }

    fn truncate(&mut self) -> Result<(), String> {
        let Some((name, id)) = self.a_file() else { return Ok(()) };
        let size = self.random.below(LONGEST);
        self.note(format!("truncate {} {size:#x}", name.display()));
        self.open(&name)?.set_len(size).map_err(|error| format!("truncate: {error}"))?;
        self.contents.entry(id).or_default().resize(usize_of(size), 0);
        Ok(())
    }

    fn punch(&mut self) -> Result<(), String> {
        let Some((name, id)) = self.a_file() else { return Ok(()) };
        let (at, length) = self.span();
        self.note(format!("punch {} {at:#x}..{:#x}", name.display(), at + length));
        let file = self.open(&name)?;
        if change_allocation(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, length)? {
            let content = self.contents.entry(id).or_default();
            let end = usize_of(at + length).min(content.len());
            content[usize_of(at).min(end)..end].fill(0);
        }
        Ok(())
    }

    /// Renames to an unused name, or to the name of another file. A folder moves with all its contents.
    fn rename(&mut self) -> Result<(), String> {
        let Some(from) = self.a_name() else { return Ok(()) };
        let over = self.a_file().map(|(name, _)| name);
        let is_folder = self.names[&from] == Node::Folder;
        let to = match over {
            Some(name) if !is_folder && name != from && self.random.below(3) == 0 => name,
            _ => self.new_name().0,
        };
        if is_folder && to.starts_with(&from) {
            return Ok(());
        }
        self.note(format!("rename {} {}", from.display(), to.display()));
        fs::rename(self.at(&from), self.at(&to)).map_err(|error| format!("rename: {error}"))?;
        // Both names refer to one file: rename then does nothing, as POSIX specifies.
        if self.names.get(&to).is_some_and(|node| *node == self.names[&from]) {
            return Ok(());
        }
        let moved: Vec<_> = self.names.keys().filter(|name| name.starts_with(&from)).cloned().collect();
        self.names.remove(&to);
        for name in moved {
            let Some(node) = self.names.remove(&name) else { continue };
            let inside = name.strip_prefix(&from).unwrap_or(Path::new(""));
            self.names.insert(if inside.as_os_str().is_empty() { to.clone() } else { to.join(inside) }, node);
        }
        Ok(())
    }

    fn remove(&mut self) -> Result<(), String> {
        let Some(name) = self.a_name() else { return Ok(()) };
        self.note(format!("remove {}", name.display()));
        let is_empty = self.names.keys().filter(|each| each.starts_with(&name)).count() == 1;
        let path = self.at(&name);
        match (&self.names[&name], is_empty) {
            (Node::Folder, true) => {
                fs::remove_dir(path).map_err(|error| format!("remove folder: {error}"))?
            }
            (Node::Folder, false) => {
                return match fs::remove_dir(path) {
                    Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
                    ended => Err(format!("a folder with something in it was to be removed: {ended:?}")),
                };
            }
            _ => fs::remove_file(path).map_err(|error| format!("remove: {error}"))?,
        }
        self.names.remove(&name);
        Ok(())
    }

    fn synchronise(&mut self) -> Result<(), String> {
        let Some((name, _)) = self.a_file() else { return Ok(()) };
        self.note(format!("synchronise {}", name.display()));
        self.open(&name)?.sync_all().map_err(|error| format!("synchronise: {error}"))
    }

    fn read(&mut self) -> Result<(), String> {
        let Some((name, _)) = self.a_file() else { return Ok(()) };
        self.note(format!("read {}", name.display()));
        self.compare_one(&name)
    }

    /// Compares all names, kinds and contents.
    fn compare(&self) -> Result<(), String> {
        let mut found = vec![PathBuf::new()];
        let mut folders = vec![PathBuf::new()];
        while let Some(folder) = folders.pop() {
            let entries =
                fs::read_dir(self.at(&folder)).map_err(|error| format!("read a folder: {error}"))?;
            for entry in entries {
                let entry = entry.map_err(|error| format!("read a folder: {error}"))?;
                let name = folder.join(entry.file_name());
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(name.clone());
                }
                found.push(name);
            }
        }
        found.sort_unstable();
        if let Some(name) = found.iter().find(|name| !self.names.contains_key(*name)) {
            return Err(format!("{} is there and must not be", name.display()));
        }
        if let Some(name) = self.names.keys().find(|name| found.binary_search(name).is_err()) {
            return Err(format!("{} is not there", name.display()));
        }
        self.names.keys().try_for_each(|name| self.compare_one(name))
    }

    fn compare_one(&self, name: &Path) -> Result<(), String> {
        let path = self.at(name);
        let failed = |error: io::Error| format!("{}: {error}", name.display());
        match &self.names[name] {
            Node::Folder => match fs::symlink_metadata(path).map_err(failed)?.is_dir() {
                true => Ok(()),
                false => Err(format!("{} is no folder", name.display())),
            },
            Node::Link(target) => match fs::read_link(path).map_err(failed)? {
                found if found == *target => Ok(()),
                found => Err(format!(
                    "{} leads to {} instead of {}",
                    name.display(),
                    found.display(),
                    target.display()
                )),
            },
            Node::File(id) => {
                let content = &self.contents[id];
                let found = fs::read(&path).map_err(failed)?;
                if let Some(at) = (0..found.len().min(content.len())).find(|&at| found[at] != content[at]) {
                    let (found, wanted) = (found[at], content[at]);
                    return Err(format!(
                        "{}: {found:#04x} instead of {wanted:#04x} at {at:#x}",
                        name.display()
                    ));
                }
                if found.len() != content.len() {
                    return Err(format!(
                        "{} has {} bytes instead of {}",
                        name.display(),
                        found.len(),
                        content.len()
                    ));
                }
                let names = self.names.values().filter(|node| **node == Node::File(*id)).count();
                match fs::metadata(&path).map_err(failed)?.nlink() {
                    links if links == names as u64 => Ok(()),
                    links => Err(format!("{} has {links} names instead of {names}", name.display())),
                }
            }
        }
    }

    /// An unused name in a random folder, and its number.
    fn new_name(&mut self) -> (PathBuf, u64) {
        let folders: Vec<_> = self
            .names
            .iter()
            .filter(|(_, node)| **node == Node::Folder)
            .map(|(name, _)| name.clone())
            .collect();
        self.next += 1;
        let folder = &folders[self.random.index(folders.len())];
        // Long names give folders several blocks.
        let name = format!("{}{}", self.next, "-long".repeat(self.random.index(20)));
        (folder.join(name), self.next)
    }

    fn a_file(&mut self) -> Option<(PathBuf, u64)> {
        let files: Vec<_> = self
            .names
            .iter()
            .filter_map(|(name, node)| match node {
                Node::File(id) => Some((name, *id)),
                _ => None,
            })
            .collect();
        let (name, id) = *files.get(self.random.index(files.len()))?;
        Some((name.clone(), id))
    }

    /// Any name except the root.
    fn a_name(&mut self) -> Option<PathBuf> {
        let number = self.random.index(self.names.len() - 1);
        self.names.keys().nth(1 + number).cloned()
    }

    fn span(&mut self) -> (u64, u64) {
        let at = self.random.below(LONGEST);
        let longest = (LONGEST - at).min(1 << self.random.below(18));
        (at, 1 + self.random.below(longest))
    }

    fn open(&self, name: &Path) -> Result<File, String> {
        let opened = OpenOptions::new().read(true).write(true).open(self.at(name));
        opened.map_err(|error| format!("open {}: {error}", name.display()))
    }

    fn at(&self, name: &Path) -> PathBuf {
        if name.as_os_str().is_empty() { self.root.clone() } else { self.root.join(name) }
    }

    fn note(&mut self, operation: String) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(operation);
    }

    fn explain(&self, step: u64, seed: u64, text: &str) -> String {
        let lines: String = self.history.iter().map(|line| format!("\n  {line}")).collect();
        format!("{}: operation {step} of seed {seed}: {text}{lines}", self.root.display())
    }
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stressed(folder: &Path, seed: u64) -> Result<(), String> {
        run(&Plan { path: folder.to_owned(), seed, operations: 600, threads: 2 })
    }

    #[test]
    fn a_sound_file_system_shows_no_difference() {
        for seed in 1..3 {
            let folder = tempfile::tempdir().expect("a folder");
            assert_eq!(stressed(folder.path(), seed), Ok(()));
        }
    }

    #[test]
    fn the_same_seed_leaves_the_same() {
        let names = || {
            let folder = tempfile::tempdir().expect("a folder");
            stressed(folder.path(), 5).expect("no difference");
            let mut folders = vec![folder.path().join("stress-1")];
            let mut names = Vec::new();
            while let Some(each) = folders.pop() {
                for entry in fs::read_dir(each).expect("a folder") {
                    let path = entry.expect("an entry").path();
                    names.push(path.strip_prefix(folder.path()).expect("it is inside").to_owned());
                    folders.extend(path.symlink_metadata().is_ok_and(|found| found.is_dir()).then_some(path));
                }
            }
            names.sort_unstable();
            names
        };
        let first = names();
        assert!(first.len() > 20, "{first:?}");
        assert_eq!(first, names());
    }

    /// A worker with a file of one page, a link, and a folder that contains another file.
    fn worker(folder: &Path) -> Worker {
        let root = folder.join("root");
        fs::create_dir_all(root.join("b")).expect("a folder");
        fs::write(root.join("a"), [7; 4096]).expect("a file");
        fs::write(root.join("b/c"), "c").expect("a file");
        symlink("b", root.join("d")).expect("a link");
        Worker {
            root,
            random: Random::new(1),
            names: BTreeMap::from([
                (PathBuf::new(), Node::Folder),
                ("a".into(), Node::File(1)),
                ("b".into(), Node::Folder),
                ("b/c".into(), Node::File(2)),
                ("d".into(), Node::Link("b".into())),
            ]),
            contents: BTreeMap::from([(1, vec![7; 4096]), (2, b"c".to_vec())]),
            next: 9,
            history: VecDeque::new(),
        }
    }

    #[test]
    fn a_change_by_another_process_is_found() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 7] = [
            ("a: 0x00 instead of 0x07 at 0x1", |root| {
                File::options().write(true).open(root.join("a")).unwrap().write_all_at(&[0], 1).unwrap();
            }),
            ("a has 4095 bytes instead of 4096", |root| {
                File::options().write(true).open(root.join("a")).unwrap().set_len(4095).unwrap();
            }),
            ("b/c is not there", |root| fs::remove_file(root.join("b/c")).unwrap()),
            ("b/e is there and must not be", |root| fs::write(root.join("b/e"), "").unwrap()),
            ("d leads to a instead of b", |root| {
                fs::remove_file(root.join("d")).unwrap();
                symlink("a", root.join("d")).unwrap();
            }),
            ("a has 2 names instead of 1", |root| fs::hard_link(root.join("a"), root.join("../a")).unwrap()),
            ("b is no folder", |root| {
                fs::rename(root.join("b"), root.join("../b")).unwrap();
                symlink("../b", root.join("b")).unwrap();
            }),
        ];
        for (wanted, change) in changes {
            let folder = tempfile::tempdir().expect("a folder");
            let worker = worker(folder.path());
            assert_eq!(worker.compare(), Ok(()));
            change(&worker.root);
            let text = worker.compare().expect_err(wanted);
            assert!(
                text.contains(wanted) || wanted.starts_with("b is") && text.contains("b/c is not there"),
                "{text}"
            );
        }
    }
}
