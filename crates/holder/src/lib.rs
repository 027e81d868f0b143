//! Files that are in use: the process that has a file locked or open, so that an error message can name it, and changes of an
//! open file ([`change`]).
//!
//! Invariants of a search: no open file of another process is queried, so a file whose server hangs (FUSE, NFS) does
//! not block a search. A search reads only data of the kernel itself: links and `fdinfo` below `/proc`, and the table
//! of mounts. It ends after [`SEARCH_LIMIT`] without a result.
//!
//! Elsewhere: messages for users. A process of another user or another container is not visible, so a search does not find
//! it.
#![forbid(unsafe_code)]

pub mod change;
mod descriptor;

use descriptor::{Descriptor, Inode, Mounts};
use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use change::Change;

/// Time limit of one search: a machine may have millions of open files.
pub const SEARCH_LIMIT: Duration = Duration::from_secs(2);

/// The process that has a lock on `file`, as "process 12 (cbdd)". `None` if the kernel does not show it: a process of
/// another user or another container.
#[must_use]
pub fn of_lock(file: BorrowedFd<'_>) -> Option<String> {
    let wanted = Inode::of(file)?;
    find(|descriptor, _| descriptor.locks().any(|locked| locked == wanted))
}

/// The process that has the block device with this number (major, minor) open.
#[must_use]
pub fn of_block_device(device: (u32, u32)) -> Option<String> {
    find(|descriptor, mounts| descriptor.block_device(mounts) == Some(device))
}

/// The process that has the file at `path` open.
#[must_use]
pub fn of_file(path: &Path) -> Option<String> {
    find(|descriptor, _| descriptor.target() == path)
}

/// The first process with a descriptor for which `is_it` returns true.
fn find(is_it: impl Fn(&Descriptor, &Mounts) -> bool) -> Option<String> {
    let (own, end) = (std::process::id().to_string(), Instant::now() + SEARCH_LIMIT);
    for process in processes() {
        for thread in with_descriptors(&process) {
            let mounts = Mounts::of(&thread);
            for entry in entries(&thread.join("fd")) {
                if Instant::now() > end {
                    return None;
                }
                let descriptor = Descriptor::new(&entry);
                if descriptor.is_some_and(|descriptor| is_it(&descriptor, &mounts)) {
                    let this = if process.ends_with(&own) { ", this one" } else { "" };
                    return Some(name_of(&process, this));
                }
            }
        }
    }
    None
}

/// The directories that list the descriptors of a process: its own directory, which is that of its first thread; or, if that
/// thread has ended or lists none, those of its other threads.
fn with_descriptors(process: &Path) -> Vec<PathBuf> {
    if entries(&process.join("fd")).next().is_some() {
        return vec![process.to_owned()];
    }
    entries(&process.join("task")).map(|thread| thread.path()).collect()
}

fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// The directories of all processes in `/proc`.
pub fn processes() -> impl Iterator<Item = PathBuf> {
    let is_process =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
    fs::read_dir("/proc").into_iter().flatten().flatten().filter(is_process).map(|entry| entry.path())
}

/// The process with this directory in `/proc`, as "process 12 (cbdd)"; `more` is appended to its name.
#[must_use]
pub fn name_of(process: &Path, more: &str) -> String {
    let number = process.file_name().unwrap_or_default().to_string_lossy();
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("process {number}"),
        name => format!("process {number} ({}{more})", name.escape_debug()),
    }
}

/// The number of this descriptor as a path in this process, for a message: `/proc/PID/fd/N`.
#[must_use]
pub fn path_of(file: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))
}

/// The current path of this descriptor's file, from the kernel, without a query to the file system. The path of a deleted
/// file ends in " (deleted)".
#[must_use]
pub fn name_now(file: BorrowedFd<'_>) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}
