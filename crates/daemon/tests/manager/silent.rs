//! A file system that is mounted and does not respond.

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Such a file system, mounted on a folder until it is dropped: threads that wait for it then get an error.
pub(crate) struct Silent {
    channel: Option<File>,
    folder: PathBuf,
}

impl Silent {
    pub(crate) fn over(folder: &Path) -> Self {
        let mut channel = File::options().read(true).write(true).open("/dev/fuse").expect("FUSE");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", channel.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).expect("one zero");
        mount("silent", folder, "fuse", MountFlags::empty(), options).expect("a mount");
        // The first message is FUSE_INIT, the negotiation of the protocol version; the layout is that of linux/fuse.h.
        let mut message = vec![0; 1 << 20];
        let length = channel.read(&mut message).expect("a message");
        let init = 26_u32.to_ne_bytes();
        assert!(length >= 40 && message[4..8] == init, "{:?}", &message[..40]);
        let mut answer = Vec::new();
        answer.extend((16_u32 + 64).to_ne_bytes());
        answer.extend(0_u32.to_ne_bytes());
        answer.extend(&message[8..16]);
        answer.extend([7_u32, 31, 4096, 0].map(u32::to_ne_bytes).concat());
        answer.extend([12_u16, 9].map(u16::to_ne_bytes).concat());
        answer.extend([4096_u32, 1].map(u32::to_ne_bytes).concat());
        answer.resize(16 + 64, 0);
        assert_eq!(channel.write(&answer).expect("an answer"), answer.len());
        Self { channel: Some(channel), folder: folder.to_owned() }
    }

    /// Waits until a thread has sent a request.
    pub(crate) fn wait_for_request(&self) {
        let mut message = vec![0; 1 << 20];
        let length = self.channel.as_ref().expect("open").read(&mut message).expect("a message");
        assert!(length >= 40);
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // Closing the channel fails all requests.
        self.channel.take();
        unmount(&self.folder, UnmountFlags::DETACH).expect("it is mounted");
    }
}

/// A file system with one file, whose open blocks until this is dropped.
pub(crate) struct SilentFile {
    folder: PathBuf,
    server: Option<std::thread::JoinHandle<()>>,
}

impl SilentFile {
    /// Bytes of the file.
    const SIZE: u64 = 32 << 20;

    /// Mounts it on a folder; every name in it is the file.
    pub(crate) fn over(folder: &Path) -> Self {
        let mut silent = Silent::over(folder);
        let channel = silent.channel.take().expect("open");
        // The result unmounts the file system.
        std::mem::forget(silent);
        let server = std::thread::spawn(move || serve(channel));
        Self { folder: folder.to_owned(), server: Some(server) }
    }
}

impl Drop for SilentFile {
    fn drop(&mut self) {
        unmount(&self.folder, UnmountFlags::FORCE | UnmountFlags::DETACH).expect("it is mounted");
        let _ = self.server.take().map(std::thread::JoinHandle::join);
    }
}

/// Replies to FUSE_LOOKUP and FUSE_GETATTR, does not reply to FUSE_OPEN, and replies to all other requests with an
/// error. The layout is that of linux/fuse.h.
fn serve(mut channel: File) {
    let mut message = vec![0; 1 << 20];
    while let Ok(length) = channel.read(&mut message) {
        let number = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().expect("eight bytes"));
        let code = u32::from_ne_bytes(message[4..8].try_into().expect("four bytes"));
        assert!(length >= 40);
        let body = match code {
            1 => [vec![2_u64, 0, 0, 0, 0], attributes(2)].concat(),
            3 => [vec![0_u64, 0], attributes(number(16))].concat(),
            // FUSE_OPEN does not get a reply; FUSE_FORGET and FUSE_BATCH_FORGET need none.
            14 | 2 | 42 => continue,
            _ => Vec::new(),
        };
        let error = if body.is_empty() { -38_i32 } else { 0 };
        let mut answer = u32::try_from(16 + body.len() * 8).expect("small").to_ne_bytes().to_vec();
        answer.extend(error.to_ne_bytes());
        answer.extend(&message[8..16]);
        answer.extend(body.into_iter().flat_map(u64::to_ne_bytes));
        let _ = channel.write(&answer);
    }
}

/// A `fuse_attr`, in words of eight bytes.
fn attributes(node: u64) -> Vec<u64> {
    let pair = |low: u32, high: u32| {
        u64::from_ne_bytes([low.to_ne_bytes(), high.to_ne_bytes()].concat().try_into().expect("eight"))
    };
    let (size, mode) = if node == 1 { (0, 0o040_755) } else { (SilentFile::SIZE, 0o100_600) };
    vec![node, size, size / 512, 0, 0, 0, pair(0, 0), pair(0, mode), pair(1, 0), pair(0, 0), pair(4096, 0)]
}
