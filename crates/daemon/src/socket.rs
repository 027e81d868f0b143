//! The control socket, and the locks that exclude a second daemon.
//!
//! Invariants: the holder of a [`Lock`] is the only daemon on the object that it protects, and the kernel releases the
//! lock when the process ends; a socket is replaced only if it has no listener.

use cbd_export::folders::{open_own_file, reach_folder};
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Timeout for a killed daemon to exit: the kernel releases its mappings and rings first.
pub const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for a running daemon to respond.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A lock file that one process at a time holds.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock file at `path`, which protects `what`; waits at most `timeout` for its holder to end.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the process that holds it.
    pub fn take(path: &Path, what: &str, timeout: Duration) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::System, format!("the lock file {} cannot be used", path.display()))
                .caused_by(error)
        };
        let mut how = OpenOptions::new();
        how.create(true).truncate(false).read(true).write(true).mode(0o600);
        let mut file = open_own_file(path, &mut how).map_err(failed)?;
        refuse_other_file(&file).map_err(failed)?;
        let end = Instant::now() + timeout;
        while !crate::system::try_lock(&file).map_err(failed)? {
            if Instant::now() < end {
                std::thread::sleep(RETRY_INTERVAL);
                continue;
            }
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            return Err(Error::new(
                ErrorKind::Busy,
                format!("another daemon (process {}) uses {what}; stop it first", holder.trim()),
            ));
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(failed)?;
        file.write_all(std::process::id().to_string().as_bytes()).map_err(failed)?;
        Ok(Self { _file: file })
    }
}

/// Refuses a file with other contents than the number of a process: it is not a lock file and must not be overwritten.
fn refuse_other_file(file: &File) -> std::io::Result<()> {
    const TIMEOUT_MAX: usize = 20;
    let mut text = [0; TIMEOUT_MAX + 1];
    let length = file.read_at(&mut text, 0)?;
    if length <= TIMEOUT_MAX && text[..length].iter().all(u8::is_ascii_digit) {
        return Ok(());
    }
    Err(std::io::Error::other("it holds something else than the number of a process; move it away"))
}

/// The listening control socket; its file is removed on drop.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    listener: Option<UnixListener>,
    _lock: Lock,
}

impl ControlSocket {
    /// Listens at `path`. `group` may use it besides the owner.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when a daemon listens there already.
    pub fn listen(path: &Path, group: Option<u32>) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::System, format!("the control socket {} cannot be created", path.display()))
                .caused_by(error)
        };
        if let Some(folder) = path.parent() {
            reach_folder(folder)?;
        }
        // Before the lock file is created beside it.
        refuse_other_than_socket(path)?;
        let mut lock_path = path.as_os_str().to_owned();
        lock_path.push(".lock");
        let what = format!("the control socket {}", path.display());
        let lock = Lock::take(Path::new(&lock_path), &what, Duration::ZERO).or_else(|error| {
            if error.kind() != ErrorKind::Busy || answers(path) {
                return Err(error);
            }
            Lock::take(Path::new(&lock_path), &what, PREDECESSOR_TIMEOUT)
        })?;
        match UnixStream::connect(path) {
            Ok(_) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "another process listens on {} already; stop it or choose another --socket",
                        path.display()
                    ),
                ));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                // The kernel refuses a connection to a file, too.
                refuse_other_than_socket(path)?;
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        // The server also checks the credentials of each client; the mode prevents other users from filling the
        // backlog.
        let mode = if group.is_some() { 0o660 } else { 0o600 };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        if let Some(group) = group {
            crate::system::set_group(path, group)?;
        }
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self { path: path.to_owned(), listener: Some(listener), _lock: lock })
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The listener; none after the first call.
    pub fn take_listener(&mut self) -> Option<UnixListener> {
        self.listener.take()
    }
}

/// Refuses a file at the path of the control socket that is not a socket: it must not be removed.
fn refuse_other_than_socket(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => Err(Error::new(
            ErrorKind::AlreadyExists,
            format!(
                "{} is there and is no socket; it is left as it is: move it away, or choose another --socket",
                path.display()
            ),
        )),
        _ => Ok(()),
    }
}

/// Whether a running daemon listens at `path`: the kernel also accepts connections for one that is being killed.
fn answers(path: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(path) else { return false };
    stream.set_read_timeout(Some(ANSWER_TIMEOUT)).is_ok()
        // A path whose response needs no state of the daemon.
        && stream.write_all(b"GET / HTTP/1.1\r\nhost: cbd\r\n\r\n").is_ok()
        && stream.read(&mut [0; 16]).is_ok_and(|length| length > 0)
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_on_the_same_socket_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/control.sock");
        let first = ControlSocket::listen(&path, None).unwrap();
        let error = ControlSocket::listen(&path, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.line().contains(&std::process::id().to_string()), "{error}");
        assert!(error.line().contains("control.sock"), "{error}");
        drop(first);
        assert!(ControlSocket::listen(&path, None).is_ok());
    }

    #[test]
    fn taking_a_lock_waits_while_its_holder_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = Lock::take(&path, "it", Duration::ZERO).unwrap();
        assert_eq!(Lock::take(&path, "it", Duration::from_millis(30)).unwrap_err().kind(), ErrorKind::Busy);
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(first);
        });
        assert!(Lock::take(&path, "it", Duration::from_secs(20)).is_ok());
        ending.join().unwrap();
    }

    #[test]
    fn a_socket_that_a_killed_daemon_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        assert!(ControlSocket::listen(&path, None).is_ok());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("letter");
        std::fs::write(&path, "a letter").unwrap();
        let error = ControlSocket::listen(&path, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.line().contains("letter is there and is no socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a letter");
        assert!(!dir.path().join("letter.lock").exists());
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        assert!(ControlSocket::listen(&dir.path().join("link"), None).is_err());
        std::fs::write(dir.path().join("s.lock"), "a letter").unwrap();
        let error = ControlSocket::listen(&dir.path().join("s"), None).unwrap_err();
        assert!(error.line().contains("something else than the number of a process"), "{error}");
        assert_eq!(std::fs::read_to_string(dir.path().join("s.lock")).unwrap(), "a letter");
    }

    #[test]
    fn a_socket_on_which_another_process_listens_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _other = UnixListener::bind(&path).unwrap();
        assert_eq!(ControlSocket::listen(&path, None).unwrap_err().kind(), ErrorKind::Busy);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn the_socket_is_accessible_to_its_owner_only_and_removed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let socket = ControlSocket::listen(&path, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }
}
