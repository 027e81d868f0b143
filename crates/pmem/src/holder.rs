//! Who holds a file: the process that has a lock on it, as far as this one may look.
//!
//! Left to others: what to say about it (`open`).

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The process that has a lock on `file`, as "process 12 (cbdd)". None where the system does not tell: another user's process,
/// another container's.
pub(crate) fn holder_of(file: &File) -> Option<String> {
    let wanted = file.metadata().ok()?;
    let own = std::process::id();
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let process = entry.path();
        let Ok(descriptors) = fs::read_dir(process.join("fd")) else { continue };
        for descriptor in descriptors.flatten() {
            let same = fs::metadata(descriptor.path())
                .is_ok_and(|found| found.dev() == wanted.dev() && found.ino() == wanted.ino());
            if same && holds_lock(&process.join("fdinfo").join(descriptor.file_name())) {
                let this = if id == own { ", this one" } else { "" };
                return Some(format!("process {id} ({}{this})", name_of(&process)));
            }
        }
    }
    None
}

/// Whether a description of an open file lists a lock of its own.
fn holds_lock(information: &Path) -> bool {
    fs::read_to_string(information).is_ok_and(|text| text.lines().any(|line| line.starts_with("lock:")))
}

fn name_of(process: &Path) -> String {
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "?".to_owned() } else { name.escape_debug().to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_lock_is_found_and_who_merely_has_the_file_open_is_not() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert_eq!(holder_of(file.as_file()), None);
        let again = File::options().write(true).open(file.path()).expect("it opens");
        let _held = crate::file::Locked::take(again).expect("asked").expect("free");
        let found = holder_of(file.as_file()).expect("the holder");
        assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
        assert!(found.ends_with(", this one)"), "{found}");
    }
}
