//! A listening unix socket, and the creation and removal of its file.
//!
//! Invariants: no client can connect before the socket's mode is 0600. The file of a server that has ended is replaced; the file
//! of a running server is never replaced. Only the file that this process created is removed.
//!
//! Elsewhere: which clients are accepted, and the protocol.

use cbd_types::{Error, ErrorKind, Result};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Maximum number of connections that wait to be accepted.
pub const BACKLOG: i32 = 128;

/// Listens at `path`; returns the non-blocking socket and its file. Errors name the expected `clients`.
///
/// # Errors
/// [`ErrorKind::Busy`] if a running server listens, [`ErrorKind::AlreadyExists`] if another file has the name,
/// [`ErrorKind::InvalidArgument`] for a path that no socket can have, and errors of the system.
pub fn listen(path: &Path, clients: &str) -> Result<(OwnedFd, SocketFile)> {
    let refused = |error: io::Error| {
        let kind = match error.kind() {
            io::ErrorKind::AddrInUse => ErrorKind::Busy,
            io::ErrorKind::PermissionDenied => ErrorKind::Permission,
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::System,
        };
        Error::new(kind, format!("cannot listen for {clients} at {}", path.display())).caused_by(error)
    };
    let address = address(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(refused)?;
    socket.set_nonblocking(true).map_err(refused)?;
    let _exclusive = Exclusive::on_directory_of(path)?;
    clear_the_way(path)?;
    socket.bind(&address).map_err(refused)?;
    let file = SocketFile::made(path).map_err(refused)?;
    // Clients cannot connect before `listen`, so none connects before the mode is set.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(refused)?;
    socket.listen(BACKLOG).map_err(refused)?;
    Ok((socket.into(), file))
}

/// Whether `accept` failed only because the client disconnected again, or because no client waited. The next client can be
/// accepted.
#[must_use]
pub fn is_momentary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

fn address(path: &Path) -> Result<SockAddr> {
    SockAddr::unix(path).map_err(|error| {
        Error::new(
            ErrorKind::InvalidArgument,
            format!("{} cannot be the path of a socket (at most 107 bytes)", path.display()),
        )
        .caused_by(error)
    })
}

/// The file of a unix socket that this process created; removed on drop unless it was replaced.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn made(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = |metadata: fs::Metadata| (metadata.dev(), metadata.ino()) == self.identity;
        if fs::symlink_metadata(&self.path).is_ok_and(ours) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the socket file of a server that has ended.
fn clear_the_way(path: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(
                Error::new(ErrorKind::System, format!("cannot look at {}", path.display())).caused_by(error)
            );
        }
    };
    if !metadata.file_type().is_socket() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{} is there already and is no socket: choose another path or remove it", path.display()),
        ));
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None).and_then(|socket| {
        // Non-blocking, since a running server may have a full backlog.
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    });
    match probe {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|error| {
                Error::new(
                    ErrorKind::Permission,
                    format!("cannot remove {}, left by a server that has ended", path.display()),
                )
                .caused_by(error)
            })
        }
        _ => Err(Error::new(
            ErrorKind::Busy,
            format!("a running server listens at {}: stop it or choose another path", path.display()),
        )),
    }
}

/// Serializes the start of servers, so that two of them do not find the same stale file and remove each other's new one. It
/// consists of a mutex in this process, and of a lock on the directory among processes, which leaves no file behind.
struct Exclusive {
    _directory: Option<File>,
    _process: std::sync::MutexGuard<'static, ()>,
}

impl Exclusive {
    fn on_directory_of(path: &Path) -> Result<Self> {
        static PROCESS: Mutex<()> = Mutex::new(());
        let process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let directory = File::open(parent).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                _ => ErrorKind::System,
            };
            Error::new(kind, format!("cannot open {}, where the socket is to be", parent.display()))
                .caused_by(error)
        })?;
        let directory = match directory.try_lock() {
            Ok(()) => Some(directory),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("another server is starting in {}: try again", parent.display()),
                ));
            }
            // A file system without locks: only the mutex of this process applies.
            Err(TryLockError::Error(_)) => None,
        };
        Ok(Self { _directory: directory, _process: process })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_for_its_owner_only_and_goes_with_its_handle() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = listen(&path, "tests").expect("it listens");
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_one_of_a_running_server_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("it listens"));
        assert!(path.exists(), "std leaves the file, as a killed server does");
        let living = listen(&path, "tests").expect("the stale file is replaced");
        assert_eq!(listen(&path, "tests").expect_err("in use").kind(), ErrorKind::Busy);
        assert!(path.exists());
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("precious");
        fs::write(&path, "data").expect("a file");
        let refused = listen(&path, "tests").expect_err("no socket");
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).expect("it is there"), b"data");
    }

    #[test]
    fn a_file_that_replaced_the_socket_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = listen(&path, "tests").expect("it listens");
        fs::remove_file(&path).expect("removed");
        let other = listen(&path, "tests").expect("another listens");
        drop(listener);
        assert!(path.exists());
        drop(other);
    }

    #[test]
    fn a_path_that_is_too_long_or_leads_nowhere_is_refused() {
        let long = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        assert_eq!(listen(&long, "tests").expect_err("too long").kind(), ErrorKind::InvalidArgument);
        let nowhere = Path::new("/nonexistent-directory/s");
        assert_eq!(listen(nowhere, "tests").expect_err("no directory").kind(), ErrorKind::NotFound);
    }
}
