//! Addresses of NBD servers and the sockets that listen at them.
//!
//! Elsewhere: creation and removal of a unix socket's file (`cbd_export::socket`).

use cbd_export::socket::{self, SocketFile};
use cbd_types::{Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Size of a socket's send and receive buffers in bytes: a request of usual size is transferred without a second
/// wake-up.
const SOCKET_BUFFER: usize = 1 << 20;

/// The address of a server.
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
    /// Whether other machines can reach it.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp(address) => !address.ip().to_canonical().is_loopback(),
        }
    }

    /// The NBD URI of the export `name`. If the server listens at all addresses of the machine, the URI names the
    /// address that the machine uses for outgoing connections.
    #[must_use]
    pub fn uri(&self, name: &str) -> String {
        match self {
            Self::Unix(path) => {
                let path = percent_encoded(path.as_os_str().as_bytes(), b"/");
                format!("nbd+unix:///{}?socket={path}", percent_encoded(name.as_bytes(), b""))
            }
            Self::Tcp(address) => {
                let reached = reachable(*address).to_string();
                // The zone of an IPv6 address follows a percent sign, which is escaped in a URI.
                format!("nbd://{}/{}", reached.replace('%', "%25"), percent_encoded(name.as_bytes(), b""))
            }
        }
    }
}

/// An address at which clients reach a server that listens at `address`.
fn reachable(address: SocketAddr) -> SocketAddr {
    if !address.ip().is_unspecified() {
        return address;
    }
    // Addresses reserved for documentation: no packet is sent, but the kernel selects the local address of the route.
    let local_address = |any: &str, other: &str| {
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(other).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
    };
    let (v4, v6) =
        (|| local_address("0.0.0.0:0", "192.0.2.1:9"), || local_address("[::]:0", "[2001:db8::1]:9"));
    let ip = if address.is_ipv4() {
        v4().unwrap_or(Ipv4Addr::LOCALHOST.into())
    } else {
        v6().or_else(v4).unwrap_or(Ipv6Addr::LOCALHOST.into())
    };
    SocketAddr::new(ip, address.port())
}

/// Percent-encodes all bytes except those that a URI allows unescaped and those in `unescaped`.
fn percent_encoded(text: &[u8], unescaped: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for &byte in text {
        let plain = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || unescaped.contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Sets socket options for throughput and for the detection of a dead peer. The connection works without them, so
/// errors are ignored.
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

/// A listening socket. Dropping it closes the socket and removes its file.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: Socket,
    /// Its address, with the port that the system chose.
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
            Error::new(kind, format!("cannot listen for NBD clients at {listen}")).caused_by(error)
        };
        match listen {
            Listen::Unix(path) => {
                let (socket, file) = socket::listen(path, "NBD clients")?;
                Ok(Self { socket: socket.into(), address: listen.clone(), file: Some(file) })
            }
            Listen::Tcp(address) => {
                let socket =
                    Socket::new(Domain::for_address(*address), Type::STREAM, None).map_err(refused)?;
                socket.set_nonblocking(true).map_err(refused)?;
                socket.set_reuse_address(true).map_err(refused)?;
                socket.bind(&(*address).into()).map_err(refused)?;
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
        // The file is removed before the socket is closed: a client that connects meanwhile gets ENOENT, not
        // ECONNREFUSED.
        self.file = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uri_of_a_unix_socket_is_percent_encoded() {
        let listen = Listen::Unix(PathBuf::from("/run/c b/x.sock"));
        assert_eq!(listen.uri("cbd 0/ü"), "nbd+unix:///cbd%200%2F%C3%BC?socket=/run/c%20b/x.sock");
        let listen = Listen::Tcp("[::1]:10809".parse().expect("an address"));
        assert_eq!(listen.uri(""), "nbd://[::1]:10809/");
        let bytes = std::ffi::OsStr::from_bytes(b"/run/\xFF%.sock");
        assert_eq!(Listen::Unix(PathBuf::from(bytes)).uri("a"), "nbd+unix:///a?socket=/run/%FF%25.sock");
        let zone = Listen::Tcp("[fe80::1%3]:10809".parse().expect("an address"));
        assert_eq!(zone.uri(""), "nbd://[fe80::1%253]:10809/");
    }

    #[test]
    fn the_uri_of_a_server_at_all_addresses_names_a_reachable_one() {
        for any in ["0.0.0.0:0", "[::]:0"] {
            let listener =
                Listener::bind(&Listen::Tcp(any.parse().expect("an address"))).expect("it listens");
            let uri = listener.address.uri("disk");
            let address =
                uri.strip_prefix("nbd://").and_then(|rest| rest.strip_suffix("/disk")).expect("a URI");
            let address: SocketAddr = address.parse().expect("an address and a port");
            assert!(!address.ip().is_unspecified(), "{uri}");
            std::net::TcpStream::connect(address).expect("a client can use it");
        }
    }

    #[test]
    fn only_loopback_addresses_and_unix_sockets_are_not_remote() {
        let is_remote = |text: &str| Listen::Tcp(text.parse().expect("an address")).is_remote();
        assert!(!is_remote("127.0.0.1:1") && !is_remote("[::1]:1") && !is_remote("[::ffff:127.0.0.1]:1"));
        assert!(is_remote("0.0.0.0:1") && is_remote("[::]:1") && is_remote("192.0.2.1:1"));
        assert!(!Listen::Unix(PathBuf::from("/s")).is_remote());
    }

    #[test]
    fn a_path_that_is_too_long_or_has_no_directory_is_refused() {
        let long = Listen::Unix(PathBuf::from(format!("/tmp/{}", "x".repeat(200))));
        assert_eq!(Listener::bind(&long).expect_err("too long").kind(), ErrorKind::InvalidArgument);
        let nowhere = Listen::Unix(PathBuf::from("/nonexistent-directory/s"));
        assert_eq!(Listener::bind(&nowhere).expect_err("no directory").kind(), ErrorKind::NotFound);
    }
}
