//! A file system that answers nothing but that it is there.

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// One mounted on a folder, until this is dropped: then whoever waits for it is answered with an error.
pub(crate) struct Silent {
    door: Option<File>,
    folder: PathBuf,
}

impl Silent {
    pub(crate) fn over(folder: &Path) -> Self {
        let mut door = File::options().read(true).write(true).open("/dev/fuse").expect("FUSE");
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", door.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).expect("one zero");
        mount("silent", folder, "fuse", MountFlags::empty(), options).expect("a mount");
        // Its first message asks which version of the protocol it is to be: as the headers of Linux say, FUSE_INIT and its answer.
        let mut message = vec![0; 1 << 20];
        let length = door.read(&mut message).expect("a message");
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
        assert_eq!(door.write(&answer).expect("an answer"), answer.len());
        Self { door: Some(door), folder: folder.to_owned() }
    }

    /// Waits until somebody asks for something, who will wait then.
    pub(crate) fn is_asked(&self) {
        let mut message = vec![0; 1 << 20];
        let length = self.door.as_ref().expect("open").read(&mut message).expect("a message");
        assert!(length >= 40);
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // Closed, it has an end.
        self.door.take();
        unmount(&self.folder, UnmountFlags::DETACH).expect("it is mounted");
    }
}
