//! Programs of this machine for a guest, with the libraries that they load.
//!
//! Invariants: a file has the same path in the guest as here unless the caller named another one, so that
//! loaders find it.
//!
//! Elsewhere: which programs (the caller), how they are copied (`image`). The caller names what a program
//! opens by itself, such as plugins and configuration.

use crate::packages;
use crate::shell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Files of this machine, by their path in the guest.
pub type Files = BTreeMap<PathBuf, PathBuf>;

/// The path of a program of this machine.
///
/// # Errors
/// If it does not exist.
pub fn find(name: &str) -> Result<PathBuf, String> {
    if name.contains('/') {
        let path = std::path::absolute(name).map_err(|error| format!("{name}: {error}"))?;
        return if path.is_file() {
            Ok(path)
        } else {
            Err(format!("there is no program {}", path.display()))
        };
    }
    std::env::split_paths(&packages::search_path())
        .map(|folder| folder.join(name))
        .find(|path| packages::is_executable(path))
        .ok_or_else(|| format!("neither this machine nor busybox has a program '{name}'"))
}

/// Adds a file, or all files in a folder; for a program, also the libraries that it loads.
///
/// # Errors
/// What cannot be read.
pub fn add(files: &mut Files, from: &Path, to: &Path) -> Result<(), String> {
    let looked = from.metadata().map_err(|error| format!("cannot read {}: {error}", from.display()))?;
    if looked.is_dir() {
        let entries =
            fs::read_dir(from).map_err(|error| format!("cannot read {}: {error}", from.display()))?;
        for entry in entries.flatten() {
            add(files, &entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    files.insert(to.to_owned(), from.to_owned());
    if is_program(from) {
        for library in libraries(from)? {
            files.entry(library.clone()).or_insert(library);
        }
    }
    Ok(())
}

/// Whether a file begins as programs and libraries do.
fn is_program(path: &Path) -> bool {
    use std::io::Read;
    let mut head = [0; 4];
    fs::File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok() && head == *b"\x7fELF"
}

fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    let mut said = String::new();
    let end = shell::run(Command::new("ldd").arg(program), Duration::from_secs(60), |_, line| {
        said.push_str(line);
        said.push('\n');
    });
    if end.is_success() || said.contains("not a dynamic executable") {
        libraries_of(&said).map_err(|library| {
            format!("{} needs {library}, which this machine does not have", program.display())
        })
    } else {
        Err(format!("ldd {}: {end}\n{said}", program.display()))
    }
}

/// The files in the lines of ldd: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x..)` or
/// `/lib64/ld-linux-x86-64.so.2 (0x..)`. A library that ldd did not find is the error.
fn libraries_of(ldd: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for line in ldd.lines() {
        let (name, place) = line.split_once("=>").unwrap_or(("", line));
        if place.contains("not found") {
            return Err(name.trim().to_owned());
        }
        if let Some(path) = place.split_whitespace().next().filter(|path| path.starts_with('/')) {
            found.push(path.into());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_files_that_the_loader_found() {
        let ldd = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                   \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(libraries_of(ldd), Ok(paths.to_vec()));
        assert_eq!(libraries_of("\tstatically linked\n"), Ok(Vec::new()));
        assert_eq!(libraries_of("\tlibz.so.1 => not found\n"), Err("libz.so.1".to_owned()));
    }

    #[test]
    fn a_program_brings_its_libraries_and_a_script_does_not() {
        let mut files = Files::new();
        let shell = find("sh").expect("there is a shell");
        add(&mut files, &shell, Path::new("/bin/other")).expect("it can be read");
        assert_eq!(files.get(Path::new("/bin/other")), Some(&shell));
        assert!(files.keys().any(|path| path.to_string_lossy().contains("libc.so")), "{files:?}");
        files.clear();
        add(&mut files, Path::new("/etc/passwd"), Path::new("/etc/passwd")).expect("it can be read");
        assert_eq!(files.len(), 1);
    }

    #[test]
    fn a_missing_program_is_named() {
        let text = find("no-such-program-anywhere").expect_err("it is nowhere");
        assert!(text.contains("no-such-program-anywhere"));
    }
}
