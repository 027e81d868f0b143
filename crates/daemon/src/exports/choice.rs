//! The export of a block device as the user types it.

use cbd_nbd::Listen;
use cbd_types::{Error, ErrorKind, Result};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};

/// The export of a block device as the user types it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExportChoice {
    /// The best export that this machine supports.
    Auto,
    /// The best kernel block device that this machine supports: never NBD.
    Kernel,
    /// ublk, the kernel's user-space block driver.
    Ublk,
    /// A FUSE file with a loop device.
    FuseLoop,
    /// An NBD server.
    Nbd(Listen),
    /// A vhost-user-blk server at this socket.
    VhostUser(PathBuf),
}

impl ExportChoice {
    /// The path of the socket that the user chose; none for other exports.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Nbd(Listen::Unix(path)) | Self::VhostUser(path) => Some(path),
            _ => None,
        }
    }
}

impl std::str::FromStr for ExportChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let malformed = |why: &str| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "\"{text}\" is no export{why}: there are auto, kernel, ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDRESS:PORT and vhost-user:PATH"
                ),
            )
        };
        match text {
            "auto" => return Ok(Self::Auto),
            "kernel" => return Ok(Self::Kernel),
            "ublk" => return Ok(Self::Ublk),
            "fuse-loop" => return Ok(Self::FuseLoop),
            _ => {}
        }
        let socket = |path: &str| {
            // The capacity of a socket address, including the terminating zero.
            if !path.starts_with('/') {
                return Err(malformed(" (the path is not absolute)"));
            }
            if path.len() > 107 {
                return Err(malformed(" (the path of a socket has 107 bytes at most)"));
            }
            Ok(PathBuf::from(path))
        };
        if let Some(path) = text.strip_prefix("nbd:unix:") {
            return Ok(Self::Nbd(Listen::Unix(socket(path)?)));
        }
        if let Some(path) = text.strip_prefix("vhost-user:") {
            return Ok(Self::VhostUser(socket(path)?));
        }
        if let Some(address) = text.strip_prefix("nbd:tcp:") {
            let mut addresses =
                address.to_socket_addrs().map_err(|error| malformed(&format!(" ({error})")))?;
            return addresses
                .next()
                .map(|address| Self::Nbd(Listen::Tcp(address)))
                .ok_or_else(|| malformed(""));
        }
        Err(malformed(""))
    }
}

impl ExportChoice {
    /// Refuses an export that other machines can reach, unless the user has allowed it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the option that allows it.
    pub fn refuse_remote(&self, allow_remote: bool) -> Result<()> {
        if allow_remote || !self.is_remote() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{self} can be reached by other machines, and NBD is neither encrypted nor authenticated: use a loopback address, or \
                 add --allow-remote"
            ),
        ))
    }

    /// Whether other machines can reach it.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Nbd(listen) if listen.is_remote())
    }

    /// The export in a row of a region. A row that this program stored has an address in digits: a host name, which
    /// only a forged row has, is not looked up.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for text that names no export.
    pub fn of_row(text: &str) -> Result<Self> {
        match text.strip_prefix("nbd:tcp:") {
            Some(address) if address.parse::<SocketAddr>().is_err() => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "\"{}\" in the region is no export: its address is not in digits",
                    text.escape_debug()
                ),
            )),
            _ => text.parse(),
        }
    }
}

impl fmt::Display for ExportChoice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => out.write_str("auto"),
            Self::Kernel => out.write_str("kernel"),
            Self::Ublk => out.write_str("ublk"),
            Self::FuseLoop => out.write_str("fuse-loop"),
            Self::Nbd(listen) => write!(out, "nbd:{listen}"),
            Self::VhostUser(path) => write!(out, "vhost-user:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_parsed_and_displayed_as_typed() {
        for text in [
            "auto",
            "kernel",
            "ublk",
            "fuse-loop",
            "nbd:unix:/run/x.sock",
            "nbd:tcp:127.0.0.1:10809",
            "nbd:tcp:[::1]:10809",
            "vhost-user:/run/x.sock",
        ] {
            assert_eq!(text.parse::<ExportChoice>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn text_that_names_no_export_is_refused() {
        let long = format!("nbd:unix:/{}", "x".repeat(200));
        let vhost = format!("vhost-user:/{}", "x".repeat(107));
        for text in [
            "",
            "vhost-user",
            "vhost-user:",
            "vhost-user:x.sock",
            &vhost,
            "nbd",
            "nbd:unix:",
            "nbd:unix:x.sock",
            "nbd:tcp:",
            "nbd:tcp:127.0.0.1",
            "fuse",
            "ublk:0",
            &long,
        ] {
            let error = text.parse::<ExportChoice>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
        }
    }

    #[test]
    fn a_row_with_the_name_of_a_host_is_refused_without_looking_it_up() {
        assert!("nbd:tcp:localhost:10809".parse::<ExportChoice>().is_ok());
        let error = ExportChoice::of_row("nbd:tcp:localhost:10809").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        for text in ["auto", "nbd:unix:/run/x.sock", "nbd:tcp:0.0.0.0:10809", "nbd:tcp:[fe80::1%3]:10809"] {
            assert_eq!(ExportChoice::of_row(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_export_that_other_machines_can_reach_must_be_allowed() {
        for (text, is_remote) in [
            ("nbd:tcp:127.0.0.1:10809", false),
            ("nbd:tcp:127.8.8.8:10809", false),
            ("nbd:tcp:[::1]:10809", false),
            ("nbd:tcp:[::ffff:127.0.0.1]:10809", false),
            ("nbd:unix:/run/x.sock", false),
            ("auto", false),
            ("nbd:tcp:0.0.0.0:10809", true),
            ("nbd:tcp:[::]:10809", true),
            ("nbd:tcp:192.0.2.1:10809", true),
        ] {
            let choice = text.parse::<ExportChoice>().unwrap();
            assert_eq!(choice.refuse_remote(false).is_err(), is_remote, "{text}");
            assert!(choice.refuse_remote(true).is_ok(), "{text}");
        }
    }
}
