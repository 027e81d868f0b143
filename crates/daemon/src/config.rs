//! The configuration file. It holds settings and defaults only; transports, backends and devices are never in it.
//!
//! Invariants: only the file at the default path may be missing; an unknown key, and a value that no command accepts,
//! is an error that names it.

mod events;

use crate::api::{CacheMode, Consistency};
use crate::exports::ExportChoice;
use crate::size::{format_size, parse_size, typed_size};
use crate::web::WebConfig;
use cbd_engine::CACHE_SIZE_MIN;
use cbd_pmem::Coherence;
use cbd_types::{Context, Error, ErrorKind, Result};
pub use events::EventsConfig;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::fs::File;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::ops::RangeInclusive;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Permitted numbers of queues of a backend.
pub const HANDLERS: RangeInclusive<u32> = 1..=128;

/// Most microseconds of `vhost_spin_us`: above it a thread occupies its processor for longer than most disks take for a
/// request.
pub const VHOST_SPIN_US_MAX: u32 = 10_000;

/// Most bytes of the file.
const FILE_LIMIT: u64 = 1 << 20;

/// The contents of the file.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Settings of the daemon.
    pub daemon: DaemonConfig,
    /// Defaults of commands.
    pub defaults: Defaults,
    /// Where metrics are served.
    pub web: WebConfig,
    /// The command that is run for events.
    pub events: EventsConfig,
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
    /// How hosts of shared regions see what others store.
    pub coherence: CoherenceChoice,
    /// Whether FUSE devices outlive the daemon. The option was called `keep_fuse` at first, and is still read by that
    /// name.
    #[serde(alias = "keep_fuse")]
    pub preserve_fuse: Option<bool>,
    /// Whether rules of udev keep other programs off the disks below caches; true if absent.
    pub seal: Option<bool>,
    /// Microseconds that a vhost-user ring's thread spins for the next request, at most, before it sleeps.
    #[serde(deserialize_with = "vhost_spin_us")]
    pub vhost_spin_us: Option<u32>,
    /// Bytes of memory that a virtual machine may share for one device; [`cbd_vhost::GUEST_MEMORY_MIN`] at least.
    #[serde(deserialize_with = "guest_memory_max")]
    pub guest_memory_max: Option<u64>,
    /// Bytes of memory that virtual machines may share for all devices together; not less than `guest_memory_max` if
    /// both are given.
    #[serde(deserialize_with = "guest_memory_total")]
    pub guest_memory_total: Option<u64>,
    /// Bytes of buffers that all NBD connections may allocate together; [`cbd_nbd::MEMORY_MIN`] at least.
    #[serde(deserialize_with = "nbd_memory")]
    pub nbd_memory: Option<u64>,
}

/// How hosts of shared regions see what others store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CoherenceChoice {
    /// As `hardware` in memory that only one machine can have, as `software` in other memory.
    #[default]
    Auto,
    /// The caches of all hosts are coherent.
    Hardware,
    /// They are not: what is stored for others is written back, and what others store is dropped from the cache before it is loaded.
    Software,
}

impl CoherenceChoice {
    pub(crate) const fn of_mapping(self) -> Option<Coherence> {
        match self {
            Self::Auto => None,
            Self::Hardware => Some(Coherence::Hardware),
            Self::Software => Some(Coherence::Software),
        }
    }
}

/// Defaults of commands.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Defaults {
    /// Bytes of cache of a backend: 0 for none, or [`CACHE_SIZE_MIN`] at least.
    #[serde(deserialize_with = "cache_size")]
    pub cache_size: Option<u64>,
    /// Queues of a backend.
    #[serde(deserialize_with = "handlers")]
    pub handlers: Option<u32>,
    /// Write order of writeback.
    pub consistency: Option<Consistency>,
    /// How writes go.
    pub cache_mode: Option<CacheMode>,
    /// Whether data has checksums.
    pub data_crc: Option<bool>,
    /// Export of block devices.
    #[serde(deserialize_with = "export")]
    pub export: Option<String>,
    /// Seconds without progress after which a drain fails; 1 at least.
    #[serde(deserialize_with = "drain_timeout_s")]
    pub drain_timeout_s: Option<u64>,
}

fn size<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    match Size::deserialize(input)? {
        Size::Bytes(bytes) => Ok(bytes),
        Size::Text(text) => parse_size(&text).map_err(D::Error::custom),
    }
}

/// A size of at least `least` bytes; `reason` says what needs them.
fn size_from<'de, D: Deserializer<'de>>(
    input: D,
    name: &str,
    least: u64,
    reason: &str,
) -> std::result::Result<Option<u64>, D::Error> {
    let bytes = size(input)?;
    if bytes >= least {
        return Ok(Some(bytes));
    }
    Err(D::Error::custom(format!(
        "{name} is {}, and {} is the least: {reason}; give that or more, or leave {name} out for the default",
        format_size(bytes),
        typed_size(least)
    )))
}

fn nbd_memory<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    size_from(input, "nbd_memory", cbd_nbd::MEMORY_MIN, "one NBD client needs so much")
}

fn guest_memory_max<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    size_from(input, "guest_memory_max", cbd_vhost::GUEST_MEMORY_MIN, "no virtual machine has less memory")
}

fn guest_memory_total<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    size_from(input, "guest_memory_total", cbd_vhost::GUEST_MEMORY_MIN, "no virtual machine has less memory")
}

fn cache_size<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    match size(input)? {
        bytes if bytes > 0 && bytes < CACHE_SIZE_MIN => Err(D::Error::custom(format!(
            "cache_size is {}, and no region can have a cache of less than {}; give that or more, or 0 for no cache",
            format_size(bytes),
            typed_size(CACHE_SIZE_MIN)
        ))),
        bytes => Ok(Some(bytes)),
    }
}

fn vhost_spin_us<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u32>, D::Error> {
    let number = i64::deserialize(input)?;
    let spin = u32::try_from(number).ok().filter(|&spin| spin <= VHOST_SPIN_US_MAX);
    let refused =
        || D::Error::custom(format!("vhost_spin_us is 0 to {VHOST_SPIN_US_MAX} microseconds, not {number}"));
    spin.map(Some).ok_or_else(refused)
}

fn drain_timeout_s<'de, D: Deserializer<'de>>(input: D) -> std::result::Result<Option<u64>, D::Error> {
    let number = i64::deserialize(input)?;
    let seconds = u64::try_from(number).ok().filter(|&seconds| seconds > 0);
    let refused = || {
        D::Error::custom(format!("drain_timeout_s is 1 second at least, not {number}: no drain could end"))
    };
    seconds.map(Some).ok_or_else(refused)
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
    /// [`ErrorKind::NotFound`] if it must exist, [`ErrorKind::InvalidArgument`] with the line and the key that cannot
    /// be parsed, for a file that is not regular, and for one of more than 1 MiB; or the system's error.
    pub fn read(path: &Path, may_be_missing: bool) -> Result<Self> {
        let failed = |kind, what: String| {
            Err(Error::new(kind, format!("the configuration {} {what}", path.display())))
        };
        let file = match open_without_waiting(path) {
            Err(error) if error.kind() == IoErrorKind::NotFound && may_be_missing => {
                return Ok(Self::default());
            }
            Err(error) if error.kind() == IoErrorKind::NotFound => {
                return failed(
                    ErrorKind::NotFound,
                    "does not exist; make it, or leave --config out".to_owned(),
                );
            }
            Err(error) => return failed(ErrorKind::System, format!("cannot be read: {error}")),
            Ok(None) => {
                return failed(
                    ErrorKind::InvalidArgument,
                    "is no regular file; write the settings to a file, and name that".to_owned(),
                );
            }
            Ok(Some(file)) => file,
        };
        let mut text = String::new();
        if let Err(error) = file.take(FILE_LIMIT + 1).read_to_string(&mut text) {
            return failed(ErrorKind::System, format!("cannot be read: {error}"));
        }
        if text.len() as u64 > FILE_LIMIT {
            let what = format!("has more than {}; is it the right file?", format_size(FILE_LIMIT));
            return failed(ErrorKind::InvalidArgument, what);
        }
        Self::parse(&text).context(|| format!("reading {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count() + 1);
            Error::new(ErrorKind::InvalidArgument, format!("line {line}: {}", error.message().trim()))
        })?;
        config.web.check()?;
        let DaemonConfig { guest_memory_max, guest_memory_total, .. } = &config.daemon;
        match (guest_memory_max, guest_memory_total) {
            (Some(one), Some(total)) if total < one => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "guest_memory_total is {}, less than guest_memory_max, {}, which no virtual machine could have then; \
                     give a larger total, or a smaller guest_memory_max",
                    format_size(*total),
                    format_size(*one)
                ),
            )),
            _ => Ok(config),
        }
    }
}

/// Opens a regular file for reading; `None` for a file of another kind. Neither the open nor a read waits for another
/// process, as those of a pipe would.
pub(crate) fn open_without_waiting(path: &Path) -> std::io::Result<Option<File>> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    match File::options().read(true).custom_flags(flags).open(path) {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        // A socket.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
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
    fn a_value_with_which_nothing_can_work_is_refused_with_the_limit() {
        for (line, parts) in [
            ("nbd_memory = \"1\"", ["nbd_memory is 1 B", "2304K"]),
            ("nbd_memory = 0", ["nbd_memory is 0 B", "2304K"]),
            ("nbd_memory = 2359295", ["nbd_memory", "2304K"]),
            ("guest_memory_max = \"0\"", ["guest_memory_max is 0 B", "1M"]),
            ("guest_memory_max = \"1023K\"", ["guest_memory_max is 1023 KiB", "1M"]),
            ("guest_memory_total = \"1K\"", ["guest_memory_total is 1 KiB", "1M"]),
            ("coherence = \"none\"", ["unknown variant `none`", "`auto`, `hardware`, `software`"]),
            ("vhost_spin_us = 10001", ["vhost_spin_us is 0 to 10000", "10001"]),
        ] {
            let error = Config::parse(&format!("[daemon]\n\n{line}\n")).expect_err(line).line();
            assert!(error.contains("line 3"), "{line}: {error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{line}: {error}");
        }
        for (line, part) in [
            ("cache_size = \"1K\"", "cache_size is 1 KiB"),
            ("cache_size = 1", "cache_size is 1 B"),
            ("drain_timeout_s = 0", "drain_timeout_s is 1 second at least, not 0"),
        ] {
            let error = Config::parse(&format!("[defaults]\n\n{line}\n")).expect_err(line).line();
            assert!(error.contains("line 3") && error.contains(part), "{line}: {error}");
        }
        // The former value for "no cache".
        Config::parse("[defaults]\ncache_size = 0\n").unwrap();
        let least = "[daemon]\nnbd_memory = \"2304K\"\n\
                     guest_memory_max = \"1M\"\nguest_memory_total = \"1M\"\nvhost_spin_us = 0\n";
        Config::parse(least).unwrap();
    }

    #[test]
    fn addresses_for_metrics_are_checked_with_the_token() {
        for (text, parts) in [
            ("listen = [\"localhost:9469\"]", ["line 3", "127.0.0.1:9469"]),
            ("listen = \"127.0.0.1:9469\"", ["line 3", "a sequence"]),
            ("listen = [\"127.0.0.1:1\", \"127.0.0.1:1\"]", ["127.0.0.1:1 twice", "[web]"]),
            ("listen = [\"0.0.0.0:9469\"]", ["0.0.0.0:9469, which other hosts reach", "no token_file"]),
            ("token_file = \"token\"", ["token_file is \"token\"", "absolute"]),
            ("port = 9469", ["line 3", "port"]),
        ] {
            let error = Config::parse(&format!("[web]\n\n{text}\n")).expect_err(text).line();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
        let many: Vec<String> = (1..=9).map(|port| format!("\"127.0.0.1:{port}\"")).collect();
        let error = Config::parse(&format!("[web]\nlisten = [{}]\n", many.join(","))).unwrap_err().line();
        assert!(error.contains("9 addresses, and at most 8"), "{error}");
        assert!(Config::parse("").unwrap().web.listen.is_empty(), "off by default");
    }

    #[test]
    fn the_packaged_file_is_the_default_but_for_the_group_and_its_examples_are_valid() {
        let text = include_str!("../../../packaging/cbd.toml");
        // Packages make the group; no user is in it at first.
        let daemon = DaemonConfig { group: Some("cbd".to_owned()), ..DaemonConfig::default() };
        assert_eq!(Config::parse(text).unwrap(), Config { daemon, ..Config::default() });
        let examples: String = text
            .lines()
            .map(|line| {
                line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned() + "\n"
            })
            .collect();
        let config = Config::parse(&examples).unwrap();
        assert_eq!((config.web.listen.len(), config.daemon.group.as_deref()), (2, Some("cbd")));
    }

    #[test]
    fn a_total_of_guest_memory_below_that_of_one_guest_is_refused() {
        let error = Config::parse("[daemon]\nguest_memory_max = \"2G\"\nguest_memory_total = \"1G\"\n");
        let error = error.unwrap_err().line();
        for part in ["guest_memory_total is 1 GiB", "guest_memory_max", "2 GiB"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        Config::parse("[daemon]\nguest_memory_max = \"1G\"\nguest_memory_total = \"1G\"\n").unwrap();
    }

    /// The error of reading `path`, within a time that is long for any file.
    fn error_of(path: &Path) -> String {
        let (path, (tell, told)) = (path.to_owned(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let error = Config::read(&path, false).map_err(|error| error.line()).expect_err("it is refused");
            let _ = tell.send(error);
        });
        told.recv_timeout(std::time::Duration::from_secs(30)).expect("it is refused in time")
    }

    #[test]
    fn what_is_no_regular_file_or_too_large_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for path in [pipe.as_path(), Path::new("/dev/zero"), folder.path()] {
            let error = error_of(path);
            assert!(
                error.contains("is no regular file") && error.contains(&path.display().to_string()),
                "{error}"
            );
        }
        let large = folder.path().join("large");
        std::fs::File::create(&large).unwrap().set_len(FILE_LIMIT + 1).unwrap();
        let error = error_of(&large);
        assert!(error.contains("1 MiB"), "{error}");
        std::fs::write(&large, "# fits\n").unwrap();
        assert_eq!(Config::read(&large, false).unwrap(), Config::default());
    }

    #[test]
    fn a_file_that_is_not_there_is_empty_unless_it_was_named() {
        let missing = Path::new("/nonexistent/cbd.toml");
        assert_eq!(Config::read(missing, true).unwrap(), Config::default());
        let error = Config::read(missing, false).unwrap_err();
        assert!(error.line().contains("/nonexistent/cbd.toml does not exist"), "{error}");
    }
}
