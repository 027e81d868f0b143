//! Regions by path: opening and formatting a transport, and the error messages for users.
//!
//! Invariants: a region that could not be formatted is unchanged, including its file.
//!
//! Elsewhere: locks and durability of a region (`cbd-pmem`); its tables (`cbd-engine`).

use crate::ProcessEnvironment;
use crate::hosts::{self, Living};
use crate::presence::{self, Presence, Timing, refuse_living_in};
use cbd_engine::{Environment, FormatOptions, Transport};
use cbd_format::Superblock;
use cbd_pmem::{Info, Look, Mapping};
use cbd_types::{Context, Durability, Error, ErrorKind, Region, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait for a region that a terminating process holds: the kernel releases its locks one after the other.
pub const REGION_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes that the transport in the file at `path` uses, which may have become larger since. `None` for a device, and if the first
/// superblock does not say it.
#[must_use]
pub fn bytes_used(path: &Path) -> Option<u64> {
    // The open of another object could have effects, or block.
    let length = path.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    let mut bytes = [0; size_of::<Superblock>()];
    File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0)).ok()?;
    let (block, _) = *Superblock::decode(&bytes)?.verify(length).ok()?;
    Some(block.region_size.get())
}

/// How a region is formatted.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The sizes of its parts.
    pub options: FormatOptions,
    /// Whether several hosts share it.
    pub shared: bool,
}

/// An open transport, and what keeps its region this process's: drop that before the transport.
pub struct OpenTransport {
    /// This process as a host of a region that several share; `None` for a region of one host.
    pub living: Option<Living>,
    /// This process as the host of a region of one host.
    pub presence: Option<Presence>,
    /// The transport.
    pub transport: Arc<Transport<ProcessEnvironment>>,
}

impl std::fmt::Debug for OpenTransport {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "OpenTransport({:?}, {:?})", self.living, self.presence)
    }
}

impl OpenTransport {
    fn alone((transport, presence): (Arc<Transport<ProcessEnvironment>>, Presence)) -> Self {
        Self { living: None, presence: Some(presence), transport }
    }
}

/// Formats the region at `path` if `format` is given, else opens the transport in it, as the host `host`.
///
/// # Errors
/// Those of [`Transport::format`], [`Transport::format_shared`], [`presence::open`] and [`hosts::join`], with the region's path.
pub fn open_transport(
    environment: Arc<ProcessEnvironment>,
    region: Region<Mapping>,
    path: &str,
    host: &str,
    format: Option<&Format>,
) -> Result<OpenTransport> {
    let formatting = || format!("formatting {path}");
    let timing = Timing::default();
    let Some(format) = format else {
        return open_existing(environment, region, path, host)
            .map_err(|error| with_tools(error, path))
            .context(|| format!("opening {path}"));
    };
    let region = hosts::refuse_living_owned(&environment, region).context(formatting)?;
    let check = |region: &Region<Mapping>| if format.options.force { Ok(()) } else { refuse_used(region) };
    if format.shared {
        refuse_living_in(&region, path, &timing).context(formatting)?;
        check(&region).context(formatting)?;
        let region = Transport::format_shared(&environment, region, &format.options).context(formatting)?;
        return hosts::join(environment, region, host).context(formatting);
    }
    let format = Box::new(|environment, region| {
        check(&region)?;
        Transport::format(environment, region, &format.options)
    });
    presence::open(environment, region, (path, host), &timing, Some(format))
        .context(formatting)
        .map(OpenTransport::alone)
}

/// Opens the transport in a region that was not formatted just now, as the host `host`; the errors have no advice.
///
/// # Errors
/// Those of [`presence::open`] and [`hosts::join`].
pub fn open_existing(
    environment: Arc<ProcessEnvironment>,
    region: Region<Mapping>,
    path: &str,
    host: &str,
) -> Result<OpenTransport> {
    if Transport::<ProcessEnvironment>::is_shared(&region).is_ok_and(|is_shared| is_shared) {
        return hosts::join(environment, region, host);
    }
    presence::open(environment, region, (path, host), &Timing::default(), None).map(OpenTransport::alone)
}

/// Refuses a region that holds any data.
fn refuse_used(region: &Region<Mapping>) -> Result<()> {
    // Data of CBD is recognized by its own magic numbers.
    Transport::<ProcessEnvironment>::refuse_used(region)?;
    match region.memory().look_for_data() {
        Look { data_at: Some(at), .. } => Err(Error::new(
            ErrorKind::Foreign,
            format!(
                "it holds data that is not CBD's (a byte that is not zero at {at}); to destroy it, format with --force"
            ),
        )),
        Look { whole: false, .. } => {
            tracing::info!("the region is large: it was looked at in samples, and they hold nothing");
            Ok(())
        }
        Look { .. } => Ok(()),
    }
}

/// Refuses a region that does not survive a power failure.
///
/// # Errors
/// [`ErrorKind::Unsupported`].
pub fn require_persistent(path: &str, info: &Info) -> Result<()> {
    if info.durability == Durability::PowerFail {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "the region {path} does not survive a power failure ({}), and require_persistent is set; \
             put it on a DAX file system or a devdax device, or do without require_persistent",
            info.kind.name()
        ),
    ))
}

/// How long to wait for threads that still use a stopped cache.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Syncs the pages of a region in an ordinary file to its disk and records that, so that its caches are recovered after a
/// restart of the machine. The caller has stopped all caches; the function waits some seconds for threads that still use one.
///
/// # Errors
/// Errors of the disk, or [`ErrorKind::Busy`], each with the consequence for the user.
pub fn sync_region<E: Environment>(transport: &Transport<E>, path: &str) -> Result<()> {
    let what_follows = || {
        format!(
            "the region {path} was not brought to its disk, and will not be recovered once the machine has been restarted"
        )
    };
    let end = Instant::now() + RELEASE_TIMEOUT;
    loop {
        match transport.sync().context(what_follows)? {
            0 => return Ok(()),
            open if Instant::now() > end => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "{open} caches in the region {path} are still in use, and will not be recovered once the machine has been restarted; \
                         the others were synced"
                    ),
                ));
            }
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// As [`sync_region`], for callers that can only log an error.
pub fn sync_region_at_end<E: Environment>(transport: &Transport<E>, path: &str) {
    let begun = Instant::now();
    if let Err(error) = sync_region(transport, path) {
        tracing::error!("{}", error.line());
    } else if begun.elapsed() > Duration::from_secs(1) {
        tracing::info!("{path} was brought to its disk in {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// Adds to the error of a damaged region the commands that can help.
#[must_use]
pub fn with_tools(error: Error, region: &str) -> Error {
    match error.kind() {
        ErrorKind::Damaged | ErrorKind::Media => Error::new(
            error.kind(),
            format!(
                "{}; with no daemon on the region, cbdctrl check {region} says what is wrong, what it costs and what to do, \
                 cbdctrl repair corrects what it can, and cbdctrl rescue writes what is dirty to its disks",
                error.line()
            ),
        ),
        ErrorKind::Torn => Error::new(
            error.kind(),
            format!(
                "{}; or, with no daemon on the region, write what stands in it all the same with cbdctrl rescue {region} --after-crash --yes; \
                 cbdctrl check {region} says what that is",
                error.line()
            ),
        ),
        ErrorKind::Foreign => Error::new(
            error.kind(),
            format!(
                "{}; if it ought to hold one, cbdctrl check {region} says what stands there, and cbdctrl rescue writes what is \
                 dirty to its disks once it can be opened; tp-reg --format makes a new one",
                error.line()
            ),
        ),
        _ => error,
    }
}

/// Validates a host's name: it must fit in the table and be printable in a log line.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`], with the rules for names.
pub fn check_host_name(name: &str) -> Result<()> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if name.is_empty() || name.len() > 63 || !name.bytes().all(allowed) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("\"{}\" is no host name: 1 to 63 letters, digits, '.', '-' and '_'", name.escape_debug()),
        ));
    }
    Ok(())
}

/// The state of a region's file before it was opened to be formatted.
#[derive(Debug)]
pub struct Before(Option<std::fs::Metadata>);

impl Before {
    /// Reads the metadata of `path`.
    #[must_use]
    pub fn look(path: &str) -> Self {
        Self(std::fs::metadata(path).ok())
    }

    /// Size of the existing file in bytes.
    #[must_use]
    pub fn length(&self) -> Option<u64> {
        self.0.as_ref().filter(|before| before.is_file()).map(std::fs::Metadata::len)
    }

    /// Reverts the change that opening for a format made to the region's file: removes the file if it was created, or
    /// truncates it if it was extended.
    pub fn restore(&self, path: &str) {
        let result = match &self.0 {
            None if Path::new(path).exists() => std::fs::remove_file(path),
            Some(before)
                if before.is_file() && std::fs::metadata(path).is_ok_and(|now| now.len() > before.len()) =>
            {
                std::fs::OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(before.len()))
            }
            _ => Ok(()),
        };
        if let Err(error) = result {
            tracing::warn!("cannot restore the former size of {path}: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_are_printable_in_a_log_line() {
        for name in ["node0", "a", "rack-3.node_7"] {
            assert!(check_host_name(name).is_ok(), "{name}");
        }
        for name in ["", " ", "a b", "a\n", "é", "a/b", &"x".repeat(64)] {
            assert_eq!(check_host_name(name).unwrap_err().kind(), ErrorKind::InvalidArgument, "{name}");
        }
    }
}
