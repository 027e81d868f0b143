//! The section `[web]` of the configuration: where metrics and the page are served, and the token of clients from elsewhere.
//!
//! Invariants: an address that other hosts reach has a token. A token is read only from a file that no other user can
//! read or write.

use crate::config::open_without_waiting;
use cbd_types::{Error, ErrorKind, Result};
use serde::Deserialize;
use std::fmt;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;

/// Most addresses.
pub const ADDRESSES_MAX: usize = 8;
/// Least characters of a token.
pub const TOKEN_MIN: usize = 16;
/// Most bytes of a token's file.
const TOKEN_FILE_MAX: usize = 4096;
/// Most bytes of the path of a unix socket.
const SOCKET_PATH_MAX: usize = 107;

/// Where metrics are served.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WebConfig {
    /// The addresses; nowhere if empty.
    pub listen: Vec<Address>,
    /// The file with the token that clients of an address send that is not a loopback address.
    pub token_file: Option<PathBuf>,
    /// Whether the page with plots is served, if the program has it.
    pub page: bool,
}

impl Default for WebConfig {
    fn default() -> Self {
        Self { listen: Vec::new(), token_file: None, page: true }
    }
}

/// An address to listen on.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    /// An IP address and a TCP port; port 0 for one that the system chooses.
    Tcp(SocketAddr),
    /// The absolute path of a unix socket.
    Unix(PathBuf),
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        let Some(path) = text.strip_prefix("unix:") else {
            return text.parse().map(Self::Tcp).map_err(|_| {
                format!(
                    "listen has \"{text}\", which is no address; give IP:PORT, as 127.0.0.1:9469 or [::1]:9469 (no name of a \
                     host), or unix:PATH"
                )
            });
        };
        if !path.starts_with('/')
            || path.len() > SOCKET_PATH_MAX
            || path.ends_with('/')
            || path.contains('\0')
        {
            return Err(format!(
                "listen has \"{text}\", and the path of a socket is absolute and has at most {SOCKET_PATH_MAX} bytes; give \
                 unix:/run/cbd/metrics.sock or the like"
            ));
        }
        Ok(Self::Unix(path.into()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Whether clients must send the token: other hosts reach the address.
    #[must_use]
    pub fn needs_token(&self) -> bool {
        match self {
            Self::Tcp(address) => !address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => false,
        }
    }
}

impl WebConfig {
    /// Checks the parts against each other.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with what does not fit.
    pub(crate) fn check(&self) -> Result<()> {
        let refused = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
        if self.listen.len() > ADDRESSES_MAX {
            let count = self.listen.len();
            return refused(format!(
                "listen of [web] has {count} addresses, and at most {ADDRESSES_MAX} are served"
            ));
        }
        for (index, address) in self.listen.iter().enumerate() {
            if self.listen[..index].contains(address) {
                return refused(format!("listen of [web] has {address} twice; leave one out"));
            }
            if address.needs_token() && self.token_file.is_none() {
                return refused(format!(
                    "listen of [web] has {address}, which other hosts reach, and there is no token_file; write a token to a \
                     file of mode 600 and name it there, or listen on 127.0.0.1, on [::1] or on a unix socket"
                ));
            }
        }
        match &self.token_file {
            Some(path) if !path.is_absolute() => {
                refused(format!("token_file is \"{}\", which is no absolute path", path.display()))
            }
            _ => Ok(()),
        }
    }
}

/// The token of clients.
#[derive(Clone)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the token from the file at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] or [`ErrorKind::Permission`] with what is wrong with the file, and what to do.
    pub fn read(path: &Path) -> Result<Self> {
        let refused = |kind, what: &str| {
            Err(Error::new(kind, format!("the token file {} (token_file of [web]) {what}", path.display())))
        };
        let file = match open_without_waiting(path) {
            Ok(Some(file)) => file,
            Ok(None) => {
                return refused(ErrorKind::InvalidArgument, "is no regular file; write the token to a file");
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let what = format!("does not exist; {HOW_TO_MAKE_ONE}");
                return refused(ErrorKind::NotFound, &what);
            }
            Err(error) => return refused(ErrorKind::System, &format!("cannot be read: {error}")),
        };
        let mut bytes = Vec::new();
        let read = file.metadata().and_then(|metadata| {
            (&file).take(TOKEN_FILE_MAX as u64 + 1).read_to_end(&mut bytes)?;
            Ok(metadata)
        });
        let metadata = match read {
            Ok(metadata) => metadata,
            Err(error) => return refused(ErrorKind::System, &format!("cannot be read: {error}")),
        };
        if metadata.mode() & 0o077 != 0 {
            let what = format!(
                "can be used by other users (mode {:o}), who may know the token now; write another token to it, and chmod 600 it",
                metadata.mode() & 0o777
            );
            return refused(ErrorKind::Permission, &what);
        }
        if ![0, crate::system::user_id()].contains(&metadata.uid()) {
            let what = format!("belongs to user {}; chown it to the user of the daemon", metadata.uid());
            return refused(ErrorKind::Permission, &what);
        }
        if bytes.len() > TOKEN_FILE_MAX {
            return refused(ErrorKind::InvalidArgument, "has more than 4096 bytes; is it the right file?");
        }
        let token = bytes.trim_ascii();
        if token.len() < TOKEN_MIN {
            let what = format!(
                "has {} characters, and a token has {TOKEN_MIN} at least; {HOW_TO_MAKE_ONE}",
                token.len()
            );
            return refused(ErrorKind::InvalidArgument, &what);
        }
        match str::from_utf8(token) {
            Ok(token) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Self(token.to_owned())),
            _ => {
                let what = format!("has other characters than ASCII's visible ones; {HOW_TO_MAKE_ONE}");
                refused(ErrorKind::InvalidArgument, &what)
            }
        }
    }

    /// Whether `authorization`, the value of that header, has this token. The time does not depend on how much of it
    /// is right.
    #[must_use]
    pub fn is_in(&self, authorization: &[u8]) -> bool {
        const SCHEME: &[u8] = b"Bearer ";
        let Some((scheme, given)) = authorization.split_at_checked(SCHEME.len()) else { return false };
        scheme.eq_ignore_ascii_case(SCHEME) && bool::from(given.trim_ascii().ct_eq(self.0.as_bytes()))
    }
}

const HOW_TO_MAKE_ONE: &str = "make one with: (umask 077; head -c 24 /dev/urandom | base64 > FILE)";

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn address(text: &str) -> Address {
        text.to_owned().try_into().unwrap()
    }

    #[test]
    fn addresses_that_other_hosts_reach_need_a_token() {
        for (text, needs) in [
            ("127.0.0.1:9469", false),
            ("127.9.9.9:1", false),
            ("[::1]:9469", false),
            ("[::ffff:127.0.0.1]:9469", false),
            ("unix:/run/cbd/metrics.sock", false),
            ("0.0.0.0:9469", true),
            ("[::]:9469", true),
            ("192.0.2.1:9469", true),
        ] {
            assert_eq!(address(text).needs_token(), needs, "{text}");
            assert_eq!(address(text).to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_examples() {
        for text in [
            "",
            "9469",
            ":9469",
            "127.0.0.1",
            "localhost:9469",
            "127.0.0.1:99999",
            "tcp:127.0.0.1:1",
            "::1:9469",
        ] {
            let error = Address::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains(text) && error.contains("127.0.0.1:9469"), "{error}");
        }
        for text in ["unix:", "unix:metrics.sock", "unix:/run/", &format!("unix:/{}", "x".repeat(107))] {
            let error = Address::try_from(text.to_owned()).unwrap_err();
            assert!(error.contains("absolute and has at most 107 bytes"), "{error}");
        }
    }

    #[test]
    fn a_token_is_accepted_in_full_and_only_as_a_bearers() {
        let token = Token("0123456789abcdef".to_owned());
        for right in ["Bearer 0123456789abcdef", "bearer  0123456789abcdef "] {
            assert!(token.is_in(right.as_bytes()), "{right}");
        }
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "0123456789abcdef",
            "Basic 0123456789abcdef",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdeg",
            "Bearer 0123456789abcdef0",
        ] {
            assert!(!token.is_in(wrong.as_bytes()), "{wrong}");
        }
        assert_eq!(format!("{token:?}"), "Token", "it reaches no log");
    }

    #[test]
    fn the_file_of_a_token_is_private_and_has_enough_characters() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let refused = |path: &Path| Token::read(path).unwrap_err().line();
        assert!(refused(&path).contains("does not exist; make one with"), "{}", refused(&path));
        for (text, mode, part) in [
            ("", 0o600, "has 0 characters, and a token has 16 at least"),
            ("0123456789abcde\n", 0o600, "has 15 characters"),
            ("0123456789 abcdefgh\n", 0o600, "other characters"),
            ("0123456789äbcdefgh\n", 0o600, "other characters"),
            ("0123456789abcdef\n", 0o640, "can be used by other users (mode 640)"),
            ("0123456789abcdef\n", 0o602, "chmod 600"),
            (&"x".repeat(4097), 0o600, "more than 4096 bytes"),
        ] {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = refused(&path);
            assert!(error.contains(part) && error.contains(&path.display().to_string()), "{part}: {error}");
        }
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(Token::read(&path).unwrap().is_in(b"Bearer 0123456789abcdef"));
        assert!(refused(folder.path()).contains("is no regular file"), "{}", refused(folder.path()));
        assert!(refused(Path::new("/dev/zero")).contains("is no regular file"));
    }
}
