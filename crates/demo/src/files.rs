//! Files that are saved atomically: written under another name, `fsync`, rename, `fsync` of the folder.
//!
//! Invariants: a save is acknowledged when its last `fsync` returns; from then on the file has that version or a newer
//! one, complete. A file has one writer.

use crate::block::{BLOCK, Log, Random, Verdict};
use crate::measure::Compared;
use crate::target::system;
use cbd_types::Result;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The number of files.
pub const FILES: u32 = 256;

/// The files in one folder, and the log of their versions.
#[derive(Debug)]
pub struct Files {
    log: Log,
    random: std::sync::Mutex<Random>,
}

impl Files {
    /// No files yet.
    pub fn new(seed: u64) -> Self {
        Self { log: Log::new(FILES, seed), random: std::sync::Mutex::new(Random::new(seed)) }
    }

    /// The log.
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// Saves a new version of one of the files.
    ///
    /// # Errors
    /// The system error; the save is not acknowledged then.
    pub fn save(&self, root: &Path) -> Result<()> {
        let slot = self.random.lock().unwrap_or_else(std::sync::PoisonError::into_inner).below(FILES);
        let mut block = vec![0; BLOCK];
        let version = self.log.issue(slot, &mut block);
        let folder = folder(root);
        let save = || -> std::io::Result<()> {
            fs::create_dir_all(&folder)?;
            let new = folder.join(format!("{slot}.new"));
            let mut file = File::create(&new)?;
            for _ in 0..blocks_of(version) {
                file.write_all(&block)?;
            }
            file.sync_all()?;
            fs::rename(&new, folder.join(slot.to_string()))?;
            File::open(&folder)?.sync_all()
        };
        save().map_err(|error| system(format!("saving file {slot}"), &error))?;
        self.log.acknowledge(slot);
        Ok(())
    }

    /// Compares all files with the log.
    ///
    /// # Errors
    /// The system error, if a file cannot be read.
    pub fn compare(&self, root: &Path, check: impl Fn(u32, &[u8]) -> Verdict) -> Result<Compared> {
        let folder = folder(root);
        let mut compared = Compared::default();
        for slot in 0..FILES {
            let content = match fs::read(folder.join(slot.to_string())) {
                Ok(content) => content,
                // No version was saved: version 0.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => vec![0; BLOCK],
                Err(error) => return Err(system(format!("reading file {slot}"), &error)),
            };
            compared.add(self.verdict(slot, &content, &check), self.log.acknowledged(slot));
        }
        Ok(compared)
    }

    fn verdict(&self, slot: u32, content: &[u8], check: &impl Fn(u32, &[u8]) -> Verdict) -> Verdict {
        let Some(first) = content.get(..BLOCK) else { return Verdict::Wrong };
        let Some(version) = self.log.version_of(slot, first) else { return Verdict::Wrong };
        let whole =
            content.len() == blocks_of(version) * BLOCK && content.chunks(BLOCK).all(|block| block == first);
        if whole { check(slot, first) } else { Verdict::Wrong }
    }
}

fn folder(root: &Path) -> PathBuf {
    root.join("saved")
}

/// Blocks of a version: versions differ in length, too.
const fn blocks_of(version: u32) -> usize {
    if version == 0 { 1 } else { 1 + (version % 8) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_files_are_found_and_missing_ones_are_lost() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::new(3);
        for _ in 0..20 {
            files.save(root.path()).unwrap();
        }
        let check = |slot, block: &[u8]| files.log().validate(slot, block);
        let compared = files.compare(root.path(), check).unwrap();
        assert_eq!((compared.verified, compared.lost, compared.wrong), (20, 0, 0));
        let saved = fs::read_dir(folder(root.path())).unwrap().next().unwrap().unwrap().path();
        fs::remove_file(saved).unwrap();
        assert!(files.compare(root.path(), check).unwrap().lost > 0);
    }

    #[test]
    fn a_truncated_file_is_wrong() {
        let root = tempfile::tempdir().unwrap();
        let files = Files::new(3);
        while files.log().acknowledged_total() < 3 {
            files.save(root.path()).unwrap();
        }
        let saved = fs::read_dir(folder(root.path())).unwrap().next().unwrap().unwrap().path();
        let length = fs::metadata(&saved).unwrap().len();
        File::options().write(true).open(&saved).unwrap().set_len(length - 1).unwrap();
        let compared = files.compare(root.path(), |slot, block| files.log().validate(slot, block)).unwrap();
        assert_eq!(compared.wrong, 1);
    }
}
