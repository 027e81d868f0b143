//! The guest's root: an archive that its kernel unpacks into memory, written for each boot.
//!
//! Invariants: a folder precedes its content, and the same content gives the same bytes.

use super::modules::Module;
use super::programs::Files;
use cpio::newc::{Builder, ModeFileType, trailer};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The first process.
const INIT: &str = include_str!("init.sh");

/// The contents of a guest's root.
#[derive(Debug)]
pub struct Content<'a> {
    /// A shell and its tools.
    pub busybox: &'a Path,
    /// The modules that are loaded at the start, in this order.
    pub modules: &'a [Module],
    /// Files of this machine, by their path in the guest.
    pub files: &'a Files,
    /// Links, with their targets.
    pub links: &'a [(PathBuf, &'a str)],
    /// The command.
    pub command: &'a [String],
}

/// Writes the archive.
///
/// # Errors
/// What cannot be read or written.
pub fn write(content: &Content<'_>, to: &Path) -> Result<(), String> {
    let file = File::create(to).map_err(|error| format!("cannot make {}: {error}", to.display()))?;
    let mut image = Image { out: BufWriter::new(file), folders: BTreeSet::new(), next: 1 };
    let cannot = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| format!("cannot put {} into the guest: {error}", path.display())
    };
    image.copy(content.busybox, Path::new("/bin/busybox")).map_err(cannot(content.busybox))?;
    let order: String = content.modules.iter().map(|module| format!("{}\n", module.name)).collect();
    let texts = [
        ("/init", 0o755, INIT.to_owned()),
        ("/job", 0o755, job(content.command)),
        ("/lib/modules/order", 0o644, order),
        ("/etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\n".to_owned()),
        ("/etc/group", 0o644, "root:x:0:\n".to_owned()),
    ];
    for (path, mode, text) in &texts {
        let path = Path::new(path);
        image.entry(path, ModeFileType::Regular, *mode, text.as_bytes()).map_err(cannot(path))?;
    }
    for module in content.modules {
        let path = PathBuf::from(format!("/lib/modules/{}.ko", module.name));
        image.entry(&path, ModeFileType::Regular, 0o644, &module.bytes).map_err(cannot(&path))?;
    }
    for (path, leads_to) in [(PathBuf::from("/bin/sh"), "busybox")].iter().chain(content.links) {
        image.entry(path, ModeFileType::Symlink, 0o777, leads_to.as_bytes()).map_err(cannot(path))?;
    }
    for (place, from) in content.files {
        image.copy(from, place).map_err(cannot(from))?;
    }
    image.end().map_err(cannot(to))
}

struct Image {
    out: BufWriter<File>,
    folders: BTreeSet<PathBuf>,
    next: u32,
}

impl Image {
    fn entry(&mut self, place: &Path, kind: ModeFileType, mode: u32, bytes: &[u8]) -> io::Result<()> {
        if let Some(folder) = place.parent() {
            self.folder(folder)?;
        }
        self.store(place, kind, mode, bytes)
    }

    fn copy(&mut self, from: &Path, place: &Path) -> io::Result<()> {
        let bytes = std::fs::read(from)?;
        let mode = from.metadata()?.permissions().mode() & 0o777;
        self.entry(place, ModeFileType::Regular, mode, &bytes)
    }

    fn folder(&mut self, folder: &Path) -> io::Result<()> {
        if folder == Path::new("/") || self.folders.contains(folder) {
            return Ok(());
        }
        if let Some(parent) = folder.parent() {
            self.folder(parent)?;
        }
        self.folders.insert(folder.to_owned());
        self.store(folder, ModeFileType::Directory, 0o755, &[])
    }

    fn store(&mut self, place: &Path, kind: ModeFileType, mode: u32, bytes: &[u8]) -> io::Result<()> {
        let name = place.strip_prefix("/").unwrap_or(place).to_string_lossy().into_owned();
        let size = u32::try_from(bytes.len()).map_err(|_| io::Error::other("it is larger than 4 GiB"))?;
        let entry = Builder::new(&name).ino(self.next).nlink(1).mode(mode).set_mode_file_type(kind);
        self.next += 1;
        let mut writer = entry.write(&mut self.out, size);
        writer.write_all(bytes)?;
        writer.finish()?;
        Ok(())
    }

    fn end(mut self) -> io::Result<()> {
        trailer(&mut self.out)?;
        self.out.flush()
    }
}

/// The command as a script that executes it.
pub fn job(command: &[String]) -> String {
    let words: Vec<_> = command.iter().map(|word| quoted(word)).collect();
    format!("#!/bin/sh\nexec {}\n", words.join(" "))
}

/// A word, quoted so that a shell reads it back unchanged.
pub fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_back_as_it_was() {
        for word in ["plain", "two words", "it's", "$HOME `x` \"q\" \\", ""] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", quoted(word))])
                .output()
                .expect("a shell starts");
            assert_eq!(String::from_utf8_lossy(&output.stdout), word);
        }
    }

    #[test]
    fn the_archive_holds_folders_before_files_and_the_same_bytes_each_time() {
        let folder = std::env::temp_dir().join(format!("cbd-image-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder can be made");
        let source = folder.join("source");
        std::fs::write(&source, b"content").expect("it can be written");
        let files = Files::from([(PathBuf::from("/usr/share/deep/file"), source.clone())]);
        let modules = [Module { name: "nd_pmem".to_owned(), bytes: b"module".to_vec() }];
        let command = ["true".to_owned()];
        let content =
            Content { busybox: &source, modules: &modules, files: &files, links: &[], command: &command };
        let written = ["one", "two"].map(|name| {
            let path = folder.join(name);
            write(&content, &path).expect("it can be written");
            std::fs::read(path).expect("it is there")
        });
        std::fs::remove_dir_all(&folder).expect("it can be removed");
        assert_eq!(written[0], written[1]);
        let text = String::from_utf8_lossy(&written[0]);
        let place =
            |name: &str| text.find(&format!("{name}\0")).unwrap_or_else(|| panic!("{name} is missing"));
        assert!(place("usr/share") < place("usr/share/deep"));
        assert!(place("usr/share/deep") < place("usr/share/deep/file"));
        assert!(text.contains("content") && text.contains("module") && text.contains("TRAILER!!!"));
    }
}
