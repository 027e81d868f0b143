//! The configuration file. It holds settings and defaults only; transports, backends and devices are never in it.
//!
//! Invariants: only the file at the default path may be missing; an unknown key, and a value that no command accepts, is an
//! error that names it.

use crate::api::Consistency;
use crate::exports::ExportChoice;
use crate::size::parse_size;
use cbd_types::{Context, Error, ErrorKind, Result};
use serde::{Deserialize, Deserializer};
use std::ops::RangeInclusive;
use std::path::Path;

/// Permitted numbers of queues of a backend.
pub const HANDLERS: RangeInclusive<u32> = 1..=128;

/// The contents of the file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Settings of the daemon.
    pub daemon: DaemonConfig,
    /// Defaults of commands.
    pub defaults: Defaults,
}

/// Settings of the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DaemonConfig {
    /// Members of this group may use the control socket besides root and the daemon's own user: a name or a number.
    pub group: Option<String>,
    /// Serve no region that does not survive a power failure.
    pub require_persistent: bool,
    /// Also serve regions in files that another user owns or may write to.
    pub allow_shared_regions: bool,
    /// Whether FUSE devices outlive the daemon. The option was called `keep_fuse` at first, and is still read by that name.
    #[serde(alias = "keep_fuse")]
    pub preserve_fuse: Option<bool>,
    /// Microseconds that a vhost-user ring's thread spins for the next request, at most, before it sleeps.
    pub vhost_spin_us: Option<u32>,
    /// Bytes of memory that a virtual machine may share for one device.
    #[serde(deserialize_with = "size")]
    pub guest_memory_max: Option<u64>,
    /// Bytes of memory that virtual machines may share for all devices together.
    #[serde(deserialize_with = "size")]
    pub guest_memory_total: Option<u64>,
    /// Bytes of buffers that all NBD connections may allocate together.
    #[serde(deserialize_with = "size")]
    pub nbd_memory: Option<u64>,
}

/// Defaults of commands.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Bytes of cache of a backend.
    #[serde(deserialize_with = "size")]
    pub cache_size: Option<u64>,
    /// Queues of a backend.
    #[serde(deserialize_with = "handlers")]
    pub handlers: Option<u32>,
    /// Write order of writeback.
    pub consistency: Option<Consistency>,
    /// Whether data has checksums.
    pub data_crc: Option<bool>,
    /// Export of block devices.
    #[serde(deserialize_with = "export")]
    pub export: Option<String>,
    /// Seconds without progress after which a drain gives up.
    pub drain_timeout_s: Option<u64>,
}

fn size<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    match Size::deserialize(input)? {
        Size::Bytes(bytes) => Ok(Some(bytes)),
        Size::Text(text) => parse_size(&text).map(Some).map_err(serde::de::Error::custom),
    }
}

fn handlers<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u32>, D::Error> {
    let number = i64::deserialize(input)?;
    let handlers = u32::try_from(number).ok().filter(|number| HANDLERS.contains(number));
    let refused = || {
        let text = format!("handlers is {} to {}, not {number}", HANDLERS.start(), HANDLERS.end());
        serde::de::Error::custom(text)
    };
    handlers.map(Some).ok_or_else(refused)
}

fn export<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<String>, D::Error> {
    let text = String::deserialize(input)?;
    // A host name may become resolvable after the start of the daemon.
    let is_address = text.strip_prefix("nbd:tcp:").and_then(|address| address.rsplit_once(':'));
    if !is_address.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        text.parse::<ExportChoice>().map_err(serde::de::Error::custom)?;
    }
    Ok(Some(text))
}

impl Config {
    /// Reads the file at `path`; a file that may be missing is empty if it does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it must exist, [`ErrorKind::InvalidArgument`] with the line and the key that cannot be parsed, or
    /// the system's error.
    pub fn read(path: &Path, may_be_missing: bool) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).context(|| format!("reading {}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && may_be_missing => {
                Ok(Self::default())
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "the configuration {} does not exist; make it, or leave --config out",
                    path.display()
                ),
            )),
            Err(error) => Err(Error::new(
                ErrorKind::System,
                format!("the configuration {} cannot be read: {error}", path.display()),
            )),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            Error::new(ErrorKind::InvalidArgument, format!("line {line}: {}", error.message().trim()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_read() {
        let config = Config::parse(
            "[daemon]\ngroup = \"storage\"\n[defaults]\ncache_size = \"4G\"\nconsistency = \"checkpoint\"\n",
        )
        .unwrap();
        assert_eq!(config.daemon.group.as_deref(), Some("storage"));
        assert_eq!(config.defaults.cache_size, Some(4 << 30));
        assert_eq!(config.defaults.consistency, Some(Consistency::Checkpoint));
    }

    #[test]
    fn the_former_name_of_preserve_fuse_is_still_read() {
        for name in ["preserve_fuse", "keep_fuse"] {
            let config = Config::parse(&format!("[daemon]\n{name} = false\n")).unwrap();
            assert_eq!(config.daemon.preserve_fuse, Some(false), "{name}");
        }
    }

    #[test]
    fn a_key_that_is_not_known_is_an_error_with_its_line() {
        let error = Config::parse("[defaults]\nhandlers = 4\ncache_sise = 7\n").unwrap_err().line();
        assert!(error.contains("cache_sise"), "{error}");
        assert!(error.contains("line 3"), "{error}");
    }

    #[test]
    fn a_value_that_no_command_would_take_is_an_error_with_its_line() {
        for (line, part) in [
            ("handlers = 900", "handlers is 1 to 128, not 900"),
            ("handlers = 0", "not 0"),
            ("handlers = -1", "not -1"),
            ("handlers = \"many\"", "many"),
            ("export = \"nbd\"", "\"nbd\" is no export"),
            ("export = \"nbd:tcp:127.0.0.1\"", "is no export"),
            ("export = \"nbd:unix:cbd.sock\"", "not absolute"),
            ("consistency = \"maybe\"", "maybe"),
            ("cache_size = \"much\"", "much"),
            ("drain_timeout_s = -1", "-1"),
        ] {
            let error = Config::parse(&format!("[defaults]\n\n{line}\n")).expect_err(line).line();
            assert!(error.contains("line 3") && error.contains(part), "{line}: {error}");
        }
        for export in
            ["auto", "kernel", "ublk", "nbd:unix:/run/x.sock", "nbd:tcp:a-host-that-comes-later:10809"]
        {
            Config::parse(&format!("[defaults]\nexport = \"{export}\"\nhandlers = 128\n")).expect(export);
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_empty_unless_it_was_named() {
        let missing = Path::new("/nonexistent/cbd.toml");
        assert_eq!(Config::read(missing, true).unwrap(), Config::default());
        let error = Config::read(missing, false).unwrap_err();
        assert!(error.line().contains("/nonexistent/cbd.toml does not exist"), "{error}");
    }
}
