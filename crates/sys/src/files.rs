//! Files that are opened only if they are of the wanted type.

use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens `path` for reading, with more `flags` of `open`, if its type `is_wanted`. Nothing else is opened: that of a FIFO would
/// wait for a writer, that of a device could change it.
///
/// # Errors
/// The system error.
pub fn open_if(
    path: &Path,
    flags: libc::c_int,
    is_wanted: impl Fn(&FileType) -> bool,
) -> io::Result<Option<(File, Metadata)>> {
    if !is_wanted(&fs::metadata(path)?.file_type()) {
        return Ok(None);
    }
    // It may have been replaced meanwhile.
    let flags = flags | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let status = file.metadata()?;
    Ok(is_wanted(&status.file_type()).then_some((file, status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_wanted_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let opened = open_if(&file, 0, FileType::is_file).unwrap().expect("a file");
        assert_eq!(opened.1.len(), 1);
        assert!(open_if(&file, 0, FileType::is_dir).unwrap().is_none());
        assert!(open_if(Path::new("/dev/null"), 0, FileType::is_file).unwrap().is_none());
        assert_eq!(
            open_if(&folder.path().join("none"), 0, |_| true).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
