//! Where an NBD server listens, and how its socket comes and goes.
//!
//! Always true here: a unix socket is reachable by nobody before its mode is 0600; the file of a server that is
//! gone is replaced and that of a living one never; only the file that we made is removed.

use cbd_types::{Error, ErrorKind, Result};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fmt;
use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// How long an attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// What a socket may hold in each direction, in bytes: large enough that a request of usual size goes through
/// without a second wake-up.
const SOCKET_BUFFER: usize = 1 << 20;

/// Where a server listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Listen {
    /// A unix socket with this path.
    Unix(PathBuf),
    /// A TCP address; port 0 lets the system choose.
    Tcp(SocketAddr),
}

impl fmt::Display for Listen {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
            Self::Tcp(address) => write!(out, "tcp:{address}"),
        }
    }
}

impl Listen {
    /// The address of the export `name` there, as NBD clients take it.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        match self {
            Self::Unix(path) => {
                format!("nbd+unix:///{}?socket={}", percent(name, ""), percent(&path.to_string_lossy(), "/"))
            }
            Self::Tcp(address) => format!("nbd://{address}/{}", percent(name, "")),
        }
    }

    /// Connects to the server there.
    pub(crate) fn connect(&self) -> Result<Socket> {
        let (domain, address) = self.resolve()?;
        let reach = || -> io::Result<Socket> {
            let socket = Socket::new(domain, Type::STREAM, None)?;
            socket.connect_timeout(&address, CONNECT_TIMEOUT)?;
            tune(&socket, self);
            Ok(socket)
        };
        reach().map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::NotFound,
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                io::ErrorKind::TimedOut => ErrorKind::TimedOut,
                _ => ErrorKind::System,
            };
            Error::new(kind, format!("cannot connect to the NBD server at {self}: {error}"))
        })
    }

    fn resolve(&self) -> Result<(Domain, SockAddr)> {
        match self {
            Self::Unix(path) => {
                let address = SockAddr::unix(path).map_err(|error| {
                    Error::new(
                        ErrorKind::InvalidArgument,
                        format!(
                            "{} cannot be the path of a socket (at most 107 bytes): {error}",
                            path.display()
                        ),
                    )
                })?;
                Ok((Domain::UNIX, address))
            }
            Self::Tcp(address) => Ok((Domain::for_address(*address), (*address).into())),
        }
    }
}

/// Everything but what may stand in a URI unescaped, and `kept`, is escaped.
fn percent(text: &str, kept: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain =
            byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || kept.as_bytes().contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Sets what makes a connection fast and lets a dead peer be noticed; each is a wish, none is needed.
pub(crate) fn tune(socket: &Socket, listen: &Listen) {
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    match listen {
        Listen::Unix(_) => {
            let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
        }
        Listen::Tcp(_) => {
            let _ = socket.set_tcp_nodelay(true);
            let _ = socket.set_keepalive(true);
        }
    }
}

/// A socket that listens. Dropping it closes it and removes its file.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: Socket,
    /// Where it listens, with the port that was chosen.
    pub(crate) address: Listen,
    file: Option<SocketFile>,
}

impl Listener {
    pub(crate) fn bind(listen: &Listen) -> Result<Self> {
        let (domain, address) = listen.resolve()?;
        let refused = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::AddrInUse => ErrorKind::Busy,
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::System,
            };
            Error::new(kind, format!("cannot listen for NBD clients at {listen}: {error}"))
        };
        let socket = Socket::new(domain, Type::STREAM, None).map_err(refused)?;
        socket.set_nonblocking(true).map_err(refused)?;
        match listen {
            Listen::Unix(path) => {
                let _exclusive = Exclusive::on_directory_of(path)?;
                clear_the_way(path)?;
                socket.bind(&address).map_err(refused)?;
                let file = SocketFile::made(path).map_err(refused)?;
                // Before `listen` nobody gets in, so no one slips through between the two.
                fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(refused)?;
                socket.listen(BACKLOG).map_err(refused)?;
                Ok(Self { socket, address: listen.clone(), file: Some(file) })
            }
            Listen::Tcp(_) => {
                socket.set_reuse_address(true).map_err(refused)?;
                socket.bind(&address).map_err(refused)?;
                socket.listen(BACKLOG).map_err(refused)?;
                let chosen = socket.local_addr().map_err(refused)?.as_socket();
                let address = chosen.map_or_else(|| listen.clone(), Listen::Tcp);
                Ok(Self { socket, address, file: None })
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file goes before the socket is closed: whoever looks meanwhile finds nobody, not a refusal.
        self.file = None;
    }
}

/// The file of a unix socket that we made; removed on drop, if it is still ours.
#[derive(Debug)]
struct SocketFile {
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

/// Removes the socket file of a server that is gone.
fn clear_the_way(path: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(Error::new(ErrorKind::System, format!("cannot look at {}: {error}", path.display())));
        }
    };
    if !metadata.file_type().is_socket() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{} is there already and is no socket: choose another path or remove it", path.display()),
        ));
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None).and_then(|socket| {
        // A living server with a full backlog must not make us wait.
        socket.set_nonblocking(true)?;
        socket.connect(&SockAddr::unix(path)?)
    });
    match probe {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|error| {
                Error::new(
                    ErrorKind::Permission,
                    format!("cannot remove {}, left by a server that is gone: {error}", path.display()),
                )
            })
        }
        _ => Err(Error::new(
            ErrorKind::Busy,
            format!("a running server listens at {}: stop it or choose another path", path.display()),
        )),
    }
}

/// Two servers that start at once must not both find the same stale file and remove each other's new one: one at a
/// time in this process, and one at a time among processes by a lock on the directory, which leaves nothing behind.
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
            Error::new(kind, format!("cannot open {}, where the socket is to be: {error}", parent.display()))
        })?;
        let directory = match directory.try_lock() {
            Ok(()) => Some(directory),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("another server is starting in {}: try again", parent.display()),
                ));
            }
            // A file system without locks: then there is only the lock of this process.
            Err(TryLockError::Error(_)) => None,
        };
        Ok(Self { _directory: directory, _process: process })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uri_of_a_unix_socket_escapes_what_must_be() {
        let listen = Listen::Unix(PathBuf::from("/run/c b/x.sock"));
        assert_eq!(listen.uri("cbd 0/ü"), "nbd+unix:///cbd%200%2F%C3%BC?socket=/run/c%20b/x.sock");
        let listen = Listen::Tcp("[::1]:10809".parse().expect("an address"));
        assert_eq!(listen.uri(""), "nbd://[::1]:10809/");
    }

    #[test]
    fn the_socket_is_for_its_owner_only_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = Listener::bind(&Listen::Unix(path.clone())).expect("it listens");
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listen = Listen::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).expect("it listens"));
        assert!(path.exists(), "std leaves the file, as a killed server does");
        let living = Listener::bind(&listen).expect("the stale file is replaced");
        assert_eq!(Listener::bind(&listen).expect_err("in use").kind(), ErrorKind::Busy);
        assert!(path.exists());
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("precious");
        fs::write(&path, "data").expect("a file");
        let refused = Listener::bind(&Listen::Unix(path.clone())).expect_err("no socket");
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).expect("it is there"), b"data");
    }

    #[test]
    fn a_file_that_took_our_place_is_not_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = Listener::bind(&Listen::Unix(path.clone())).expect("it listens");
        fs::remove_file(&path).expect("removed");
        let other = Listener::bind(&Listen::Unix(path.clone())).expect("another listens");
        drop(listener);
        assert!(path.exists());
        drop(other);
    }

    #[test]
    fn a_path_that_is_too_long_or_leads_nowhere_is_refused() {
        let long = Listen::Unix(PathBuf::from(format!("/tmp/{}", "x".repeat(200))));
        assert_eq!(Listener::bind(&long).expect_err("too long").kind(), ErrorKind::InvalidArgument);
        let nowhere = Listen::Unix(PathBuf::from("/nonexistent-directory/s"));
        assert_eq!(Listener::bind(&nowhere).expect_err("no directory").kind(), ErrorKind::NotFound);
    }
}
