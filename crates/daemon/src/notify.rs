//! Notifications to systemd about start and stop, by the protocol of `sd_notify(3)`.
//!
//! Invariants: without a `NOTIFY_SOCKET`, or without a listener on it, notifications are dropped.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The daemon has restored its objects and serves them.
pub fn ready(status: &str) {
    send(&format!("READY=1\nSTATUS={status}"));
}

/// The daemon is ending.
pub fn stopping() {
    send("STOPPING=1\nSTATUS=stopping; dirty data stays in the regions");
}

/// One line for `systemctl status`.
pub fn status(text: &str) {
    send(&format!("STATUS={text}"));
}

fn send(message: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let bytes = socket.as_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&socket),
    };
    if let (Ok(address), Ok(sender)) = (address, UnixDatagram::unbound()) {
        let _ = sender.send_to_addr(message.as_bytes(), &address);
    }
}
