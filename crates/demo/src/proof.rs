//! Comparison of the disk alone, a plain file, with the log of writes.
//!
//! Invariants: the file is read without CBD; a file system in it is mounted by the kernel.

use crate::block::{BLOCK, Log, Verdict};
use crate::filesystem::{Mounted, Tools};
use crate::measure::{Compared, read_all};
use crate::output::Bar;
use crate::report::BackingComparison;
use crate::steps::Demo;
use crate::target::{ExportKind, FILE, Io, system};
use crate::work::Logs;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::path::Path;

impl Demo {
    /// Compares the plain file with the log.
    pub(crate) fn compare_plain(&self, disk: &Path, logs: &Logs) -> Result<BackingComparison> {
        let bar = self.output.bar("comparing");
        let mut found = BackingComparison::default();
        let blocks = |slot, block: &[u8]| -> Verdict { logs.blocks.validate(slot, block) };
        let compared = if self.export == ExportKind::FuseLoop {
            found.file_system_checked = Some(Tools::find()?.check_file_system(disk)?);
            let mounted = Mounted::mount(disk, &self.folder.path().join("plain"), "ro,loop,nosuid,nodev")?;
            let mut io = Io::plain(&mounted.path().join(FILE))?;
            let compared = read_all(&mut io, &logs.blocks, &bar, blocks)?;
            drop(io);
            let files =
                logs.files.compare(mounted.path(), |slot, block| logs.files.log().validate(slot, block))?;
            mounted.unmount()?;
            compared.and(files)
        } else {
            compare_blocks(disk, &logs.blocks, &bar)?
        }
        .check(ALONE)?;
        found.add(compared);
        Ok(found)
    }
}

/// Compares a plain file that contains the blocks and nothing else with their log.
///
/// # Errors
/// [`ErrorKind::Damaged`] if it differs.
pub fn compare_file(disk: &Path, log: &Log, bar: &Bar) -> Result<BackingComparison> {
    let mut found = BackingComparison::default();
    found.add(compare_blocks(disk, log, bar)?.check(ALONE)?);
    Ok(found)
}

const ALONE: &str = "the backing file alone";

impl BackingComparison {
    const fn add(&mut self, compared: Compared) {
        self.blocks = compared.blocks;
        self.verified = compared.verified;
        self.bytes = compared.blocks * BLOCK as u64;
    }
}

fn compare_blocks(disk: &Path, log: &Log, bar: &Bar) -> Result<Compared> {
    let mut io = Io::plain(disk)?;
    let compared = read_all(&mut io, log, bar, |slot, block| log.validate(slot, block))?;
    check_rest_is_empty(disk, u64::from(log.slots()) * BLOCK as u64)?;
    Ok(compared)
}

/// Fails if there is data behind the working set, where no write went.
fn check_rest_is_empty(disk: &Path, from: u64) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let mut piece = vec![0; 1 << 20];
    let failed = |error: std::io::Error| system(disk.display().to_string(), &error);
    let file = File::open(disk).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    let mut at = from;
    while at < size {
        let length = piece.len().min(usize::try_from(size - at).unwrap_or(usize::MAX));
        let piece = &mut piece[..length];
        file.read_exact_at(piece, at).map_err(failed)?;
        if let Some(index) = piece.iter().position(|&byte| byte != 0) {
            let text = format!(
                "the backing file holds something at byte {} that was never written",
                at + index as u64
            );
            return Err(Error::new(ErrorKind::Damaged, text));
        }
        at += length as u64;
    }
    Ok(())
}
