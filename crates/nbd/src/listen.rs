//! Where an NBD server listens.
//!
//! Left to others: how a unix socket's file comes and goes (`cbd_export::socket`).

use cbd_export::socket::{self, SocketFile};
use cbd_types::{Error, ErrorKind, Result};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

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
        let refused = |error: io::Error| {
            let kind = match error.kind() {
                io::ErrorKind::AddrInUse => ErrorKind::Busy,
                io::ErrorKind::PermissionDenied => ErrorKind::Permission,
                _ => ErrorKind::System,
            };
            Error::new(kind, format!("cannot listen for NBD clients at {listen}: {error}"))
        };
        match listen {
            Listen::Unix(path) => {
                let (socket, file) = socket::listen(path, "NBD clients")?;
                Ok(Self { socket: socket.into(), address: listen.clone(), file: Some(file) })
            }
            Listen::Tcp(_) => {
                let (domain, address) = listen.resolve()?;
                let socket = Socket::new(domain, Type::STREAM, None).map_err(refused)?;
                socket.set_nonblocking(true).map_err(refused)?;
                socket.set_reuse_address(true).map_err(refused)?;
                socket.bind(&address).map_err(refused)?;
                socket.listen(socket::BACKLOG).map_err(refused)?;
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
    fn a_path_that_is_too_long_or_leads_nowhere_is_refused() {
        let long = Listen::Unix(PathBuf::from(format!("/tmp/{}", "x".repeat(200))));
        assert_eq!(Listener::bind(&long).expect_err("too long").kind(), ErrorKind::InvalidArgument);
        let nowhere = Listen::Unix(PathBuf::from("/nonexistent-directory/s"));
        assert_eq!(Listener::bind(&nowhere).expect_err("no directory").kind(), ErrorKind::NotFound);
    }
}
