//! Connecting to the address of an NBD server.

use cbd_nbd::Listen;
use cbd_types::{Error, ErrorKind, Result};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::time::Duration;

/// Timeout of an attempt to connect.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Socket buffer in each direction, in bytes: a request of usual size fits without a second wake-up.
const SOCKET_BUFFER: usize = 1 << 20;

pub(super) fn connect(listen: &Listen) -> Result<Socket> {
    reach(listen).map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => ErrorKind::Permission,
            io::ErrorKind::TimedOut => ErrorKind::TimedOut,
            _ => ErrorKind::System,
        };
        Error::new(kind, format!("cannot connect to the NBD server at {listen}: {error}"))
    })
}

fn reach(listen: &Listen) -> io::Result<Socket> {
    let (domain, address) = match listen {
        Listen::Unix(path) => (Domain::UNIX, SockAddr::unix(path)?),
        Listen::Tcp(address) => (Domain::for_address(*address), (*address).into()),
    };
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.connect_timeout(&address, TIMEOUT)?;
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    match listen {
        Listen::Unix(_) => socket.set_recv_buffer_size(SOCKET_BUFFER)?,
        Listen::Tcp(_) => socket.set_tcp_nodelay(true)?,
    }
    Ok(socket)
}
