//! A host of another machine that has a region: it writes its note into the region's file, past the lock of this kernel.

use cbd_format::{OwnerNote, owner::OWNER_AT, record::bytes_of};
use cbd_types::BootId;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// The name of the host.
pub const NAME: &str = "node-elsewhere";
/// Its process, on its machine.
pub const PROCESS: u32 = 4242;

/// Between two renewals; shorter than those of a real host, so that tests take less time.
const BEAT: Duration = Duration::from_millis(50);

/// The other machine. It lives until this is dropped, and leaves the note as one of a host that is gone.
#[derive(Debug)]
pub struct OtherMachine {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<io::Result<OwnerNote>>>,
    file: File,
}

impl OtherMachine {
    /// It takes the region in the file at `path`, and gives signs of life.
    ///
    /// # Errors
    /// The system error.
    pub fn take(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let mut note = OwnerNote::new(BootId([0xee; 16]), 5, PROCESS, NAME);
        file.write_all_at(bytes_of(&note), OWNER_AT)?;
        let (stop, stopped) = channel();
        let writer = file.try_clone()?;
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                note = note.renewed();
                writer.write_all_at(&note.first_line(), OWNER_AT)?;
            }
            Ok(note)
        });
        Ok(Self { stop: Some(stop), thread: Some(thread), file })
    }

    /// It closes the region.
    ///
    /// # Errors
    /// The system error.
    pub fn release(mut self) -> io::Result<()> {
        let note = self.end().unwrap_or_else(|| Err(io::ErrorKind::Other.into()))?;
        self.file.write_all_at(&note.released().first_line(), OWNER_AT)
    }

    fn end(&mut self) -> Option<io::Result<OwnerNote>> {
        drop(self.stop.take());
        self.thread.take()?.join().ok()
    }
}

impl Drop for OtherMachine {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
