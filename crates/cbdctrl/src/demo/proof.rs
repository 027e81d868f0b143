//! The disk alone: a plain file, compared with the log of what was written.
//!
//! Always true here: nothing of ours lies between the file and who reads it; with a file system, the kernel's own.

use super::block::{self, Verdict};
use super::door::{FILE, Io, Way, system};
use super::filesystem::{Mounted, Tools};
use super::measure::read_all;
use super::report::BackingFound;
use super::story::Story;
use super::work::Logs;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::path::Path;

impl Story {
    /// Compares the plain file with the log.
    pub(super) fn compare_plain(&self, disk: &Path, logs: &Logs) -> Result<BackingFound> {
        let bar = self.show.bar("comparing");
        let mut found = BackingFound::default();
        let blocks = |slot, block: &[u8]| -> Verdict { logs.blocks.validate(slot, block) };
        let compared = if self.way == Way::FuseLoop {
            found.file_system_checked = Some(Tools::find()?.check_file_system(disk)?);
            let mounted = Mounted::mount(disk, &self.place.path().join("plain"), "ro,loop,nosuid,nodev")?;
            let mut io = Io::plain(&mounted.path().join(FILE))?;
            let compared = read_all(&mut io, &logs.blocks, &bar, blocks)?;
            drop(io);
            let files =
                logs.files.compare(mounted.path(), |slot, block| logs.files.log().validate(slot, block))?;
            mounted.unmount()?;
            compared.and(files)
        } else {
            let mut io = Io::plain(disk)?;
            let compared = read_all(&mut io, &logs.blocks, &bar, blocks)?;
            nothing_else(disk, self.scale.working_set)?;
            compared
        }
        .check("the backing file alone")?;
        found.blocks = compared.blocks;
        found.verified = compared.verified;
        found.bytes = compared.blocks * block::BLOCK as u64;
        Ok(found)
    }
}

/// Behind the working set nobody has written.
fn nothing_else(disk: &Path, from: u64) -> Result<()> {
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
            let text =
                format!("the backing file holds something at byte {} that nobody wrote", at + index as u64);
            return Err(Error::new(ErrorKind::Damaged, text));
        }
        at += length as u64;
    }
    Ok(())
}
