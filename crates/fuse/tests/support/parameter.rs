//! The kernel's parameter that enables FUSE over io_uring, as tests set it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

const PATH: &str = "/sys/module/fuse/parameters/enable_uring";

/// The parameter with the value that this process needs. A file lock excludes other processes that use this
/// type; the drop restores the former value.
pub struct Parameter {
    file: File,
    before: u8,
}

impl Parameter {
    /// Whether this kernel has the parameter.
    pub fn exists() -> bool {
        Path::new(PATH).exists()
    }

    /// Sets it, as root.
    pub fn set(offered: bool) -> Self {
        let mut file =
            OpenOptions::new().read(true).write(true).open(PATH).expect("the kernel's parameter, as root");
        file.lock().expect("the lock");
        let mut before = [0];
        file.read_exact(&mut before).expect("what it is");
        let parameter = Self { file, before: before[0] };
        parameter.write(if offered { b'Y' } else { b'N' });
        parameter
    }

    fn write(&self, value: u8) {
        (&self.file).write_all(&[value]).expect("the kernel takes it");
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        self.write(self.before);
    }
}
