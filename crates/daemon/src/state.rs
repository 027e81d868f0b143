//! Persistent state of a daemon outside the region: the registered transports, the recovery points, and the daemon's
//! number.
//!
//! Invariants: `transports.json` and the file of [`crate::remote`] are replaced atomically, so a crash leaves the old
//! file or the new one. The log of recovery points is append-only, and is rotated before it exceeds [`LOG_LIMIT`]. All
//! other state is in the region.
//!
//! The recovery points are here because they must outlive the region: if it is lost, the last line is a lower bound of
//! the recovery point of the backing device.

use crate::size::format_size;
use cbd_export::folders::{open_own_file, own_folder};
use cbd_types::{Context, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Bytes after which the log of recovery points is rotated; a transport has at most two logs of this size.
pub const LOG_LIMIT: u64 = 1 << 20;

/// Most bytes that are read of a file in the state folder.
const FILE_LIMIT: u64 = 16 << 20;

/// A registered transport.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TransportEntry {
    /// Its number in this daemon.
    pub transport_id: u32,
    /// Absolute path of its region.
    pub path: String,
    /// UUID of the transport: a region with another UUID at the same path is refused.
    pub uuid: String,
    /// Number of this host on it.
    pub host_id: u32,
    /// Name of this host on it.
    pub host: String,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    transports: Vec<TransportEntry>,
}

/// The recovery point of a backing device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecoveryPoint {
    /// The recovery point in words.
    pub time: String,
    /// Number of the backend.
    pub backend_id: u32,
    /// UUID of the backend, whose number is reused after its removal. Empty in lines of an older program.
    #[serde(default)]
    pub backend_uuid: String,
    /// Path of the backing device.
    pub path: String,
    /// All epochs up to this are on the backing device.
    pub drained_epoch: u64,
    /// The recovery point, milliseconds since 1970 UTC; 0 if it is not known.
    pub drained_ms: u64,
    /// Why the backing device alone was not crash-consistent when the line was written; none if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void: Option<String>,
}

/// The log of recovery points of a transport.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RecoveryLog {
    /// The points, oldest first, without a last line that a crash truncated.
    pub points: Vec<RecoveryPoint>,
    /// The unreadable parts with reasons: they may have held later points.
    pub unreadable: Vec<String>,
}

impl RecoveryLog {
    /// The last recovery point of the backend `backend_uuid`.
    #[must_use]
    pub fn last_of(&self, backend_uuid: &str) -> Option<&RecoveryPoint> {
        self.points.iter().rev().find(|point| point.backend_uuid == backend_uuid)
    }
}

/// The state folder of one daemon.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Opens the folder, and creates it if it does not exist, readable by its owner only.
    ///
    /// # Errors
    /// [`ErrorKind::System`] with the system's error.
    pub fn open(path: &Path) -> Result<Self> {
        let path = own_folder(path, 0o700).context(|| format!("the state folder {}", path.display()))?;
        Ok(Self { path })
    }

    /// The path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The registered transports by ascending number.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] when the file exists and cannot be parsed; it is not changed.
    pub fn transports(&self) -> Result<Vec<TransportEntry>> {
        let file = self.transports_file();
        let text = match read_own(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("read", &file, &error)),
        };
        let document: Document = serde_json::from_str(&text).map_err(|error| {
            Error::new(
                ErrorKind::Damaged,
                format!(
                    "{} is damaged ({error}); move it away and register the transports again with tp-reg: \
                     all else is in the regions",
                    file.display()
                ),
            )
        })?;
        if document.version != 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} is of version {}, this program knows 1", file.display(), document.version),
            ));
        }
        let mut transports = document.transports;
        transports.sort_by_key(|entry| entry.transport_id);
        Ok(transports)
    }

    /// Replaces the list of registered transports.
    ///
    /// # Errors
    /// [`ErrorKind::System`]; the old file is unchanged then.
    pub fn set_transports(&self, transports: &[TransportEntry]) -> Result<()> {
        let file = self.transports_file();
        let document = Document { version: 1, transports: transports.to_vec() };
        let text = serde_json::to_string_pretty(&document)
            .map_err(|error| Error::new(ErrorKind::System, format!("{}", file.display())).caused_by(error))?;
        replace(&file, text.as_bytes()).map_err(|error| failed("write", &file, &error))
    }

    /// The number that marks kernel devices of this daemon, constant for the life of the state folder; `random`
    /// generates it on the first call.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when it cannot be written, [`ErrorKind::Damaged`] when the file holds no number.
    pub fn daemon_id(&self, random: impl FnOnce() -> u64) -> Result<u64> {
        let file = self.path.join("daemon-id");
        match read_own(&file) {
            Ok(text) => u64::from_str_radix(text.trim(), 16).map_err(|_| {
                Error::new(
                    ErrorKind::Damaged,
                    format!(
                        "{} is damaged; remove it: ublk devices that wait for this daemon are not known then",
                        file.display()
                    ),
                )
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let id = random();
                replace(&file, format!("{id:016x}\n").as_bytes())
                    .map_err(|error| failed("write", &file, &error))?;
                Ok(id)
            }
            Err(error) => Err(failed("read", &file, &error)),
        }
    }

    fn transports_file(&self) -> PathBuf {
        self.path.join("transports.json")
    }

    /// Adds a line to the log of recovery points of the transport `uuid`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] with the system's error.
    pub fn log_recovery_point(&self, uuid: &str, point: &RecoveryPoint) -> Result<()> {
        let path = self.log_file(uuid);
        self.append(&path, point).map_err(|error| failed("write", &path, &error))
    }

    fn append(&self, path: &Path, point: &RecoveryPoint) -> std::io::Result<()> {
        let folder = path.parent().unwrap_or(&self.path);
        own_folder(folder, 0o700).map_err(std::io::Error::other)?;
        let mut log =
            open_own_file(path, OpenOptions::new().create(true).append(true).read(true).mode(0o600))?;
        let mut line = Vec::new();
        if ends_within_a_line(&mut log)? {
            line.push(b'\n');
        }
        serde_json::to_writer(&mut line, point)?;
        line.push(b'\n');
        if log.metadata()?.len() + line.len() as u64 > LOG_LIMIT {
            std::fs::rename(path, path.with_extension("log.1"))?;
            log = open_own_file(path, OpenOptions::new().create(true).append(true).mode(0o600))?;
            File::open(folder)?.sync_all()?;
        }
        log.write_all(&line)?;
        log.sync_data()
    }

    fn log_file(&self, uuid: &str) -> PathBuf {
        self.path.join("recovery-points").join(format!("{uuid}.log"))
    }

    /// The log of the transport `uuid`; empty if it does not exist.
    #[must_use]
    pub fn recovery_points(&self, uuid: &str) -> RecoveryLog {
        let path = self.log_file(uuid);
        let mut log = RecoveryLog::default();
        for file in [path.with_extension("log.1"), path] {
            match read_own(&file) {
                Ok(text) => read_lines(&text, &file, &mut log),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => log.unreadable.push(format!("{} cannot be read: {error}", file.display())),
            }
        }
        log
    }
}

/// Parses the lines of one file. A truncated last line was never acknowledged; any other line that cannot be parsed is
/// damaged.
fn read_lines(text: &str, file: &Path, log: &mut RecoveryLog) {
    let mut damaged = 0;
    for line in text.lines().filter(|line| !line.is_empty()) {
        match serde_json::from_str(line) {
            Ok(point) => log.points.push(point),
            Err(_) if line.starts_with('{') && !line.ends_with('}') => {}
            Err(_) => damaged += 1,
        }
    }
    if damaged > 0 {
        log.unreadable.push(format!("{damaged} lines of {} are damaged", file.display()));
    }
}

/// The text of a file of this user; an error if another user has replaced it, or if it has more than [`FILE_LIMIT`]
/// bytes.
pub(crate) fn read_own(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = open_own_file(path, OpenOptions::new().read(true))?;
    file.take(FILE_LIMIT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_LIMIT {
        let what = format!("it has more than {}; move it away", format_size(FILE_LIMIT));
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, what));
    }
    Ok(text)
}

/// Whether a crash truncated the last line: the next line must not be appended to it.
fn ends_within_a_line(log: &mut File) -> std::io::Result<bool> {
    if log.metadata()?.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    log.seek(SeekFrom::End(-1))?;
    log.read_exact(&mut last)?;
    Ok(last != *b"\n")
}

/// Replaces a file in crash order: after a crash it holds all of the old bytes or all of the new ones.
pub(crate) fn replace(file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace_with_mode(file, bytes, 0o600)
}

/// As [`replace`], with another mode than that of a file for its owner alone.
pub(crate) fn replace_with_mode(file: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let new = file.with_extension("new");
    // 1. The new bytes are durable under another name.
    //    Always a new file: a crash may have left a file of this name, or another user may have placed a link.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut out = OpenOptions::new().create_new(true).write(true).mode(mode).open(&new)?;
    // Whatever the umask is.
    out.set_permissions(std::fs::Permissions::from_mode(mode))?;
    out.write_all(bytes)?;
    out.sync_all()?;
    // 2. The name changes atomically.
    std::fs::rename(&new, file)?;
    // 3. The change of the folder is durable.
    File::open(folder)?.sync_all()
}

fn failed(verb: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::new(
        ErrorKind::System,
        format!(
            "{} cannot be {}",
            path.display(),
            match verb {
                "read" => "read",
                _ => "written",
            }
        ),
    )
    .caused_by(cbd_sys::errors::copy_of(error))
    .at_path(path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(transport_id: u32) -> TransportEntry {
        TransportEntry {
            transport_id,
            path: format!("/mnt/pmem/{transport_id}"),
            uuid: "u".into(),
            host_id: 0,
            host: "node0".into(),
        }
    }

    fn point(epoch: u64) -> RecoveryPoint {
        RecoveryPoint {
            time: "now".into(),
            backend_id: 0,
            backend_uuid: "b".into(),
            path: "/dev/sdb".into(),
            drained_epoch: epoch,
            drained_ms: epoch * 1000,
            void: None,
        }
    }

    #[test]
    fn transports_are_read_in_the_order_of_their_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(&dir.path().join("state")).unwrap();
        assert_eq!(state.transports().unwrap(), []);
        state.set_transports(&[entry(2), entry(0)]).unwrap();
        assert_eq!(state.transports().unwrap(), [entry(0), entry(2)]);
    }

    #[test]
    fn a_daemon_keeps_its_number_and_does_not_replace_a_damaged_one() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(state.daemon_id(|| 7).unwrap(), 7);
        assert_eq!(state.daemon_id(|| 8).unwrap(), 7);
        std::fs::write(dir.path().join("daemon-id"), "seven").unwrap();
        assert_eq!(state.daemon_id(|| 8).unwrap_err().kind(), ErrorKind::Damaged);
    }

    #[test]
    fn a_truncated_new_file_does_not_affect_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        state.set_transports(&[entry(0)]).unwrap();
        std::fs::write(dir.path().join("transports.new"), b"{\"version\": 1, \"tra").unwrap();
        assert_eq!(state.transports().unwrap(), [entry(0)]);
        state.set_transports(&[entry(1)]).unwrap();
        assert_eq!(state.transports().unwrap(), [entry(1)]);
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        state.set_transports(&[entry(0)]).unwrap();
        // A folder exists at the path of the new file.
        std::fs::create_dir(dir.path().join("transports.new")).unwrap();
        assert!(state.set_transports(&[entry(1)]).is_err());
        assert_eq!(state.transports().unwrap(), [entry(0)]);
    }

    #[test]
    fn a_damaged_file_is_an_error_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        std::fs::write(dir.path().join("transports.json"), b"\0\0\0").unwrap();
        let error = state.transports().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
        assert!(error.line().contains("tp-reg"), "{error}");
    }

    #[test]
    fn a_file_that_is_too_large_or_no_regular_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let file = dir.path().join("transports.json");
        let folder = dir.path().join("recovery-points");
        std::fs::create_dir(&folder).unwrap();
        let blank = vec![b'\n'; usize::try_from(FILE_LIMIT).unwrap()];
        state.set_transports(&[entry(0)]).unwrap();
        OpenOptions::new().append(true).open(&file).unwrap().write_all(&blank).unwrap();
        std::fs::write(folder.join("u.log"), blank).unwrap();
        state.append(&folder.join("u.log.1"), &point(1)).unwrap();
        OpenOptions::new().append(true).open(folder.join("u.log")).unwrap().write_all(b"\n").unwrap();
        assert!(state.transports().unwrap_err().line().contains("16 MiB"));
        let log = state.recovery_points("u");
        assert!(log.unreadable.len() == 1 && log.unreadable[0].contains("16 MiB"), "{:?}", log.unreadable);
        assert_eq!(log.points, [point(1)]);
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        assert!(state.transports().is_err());
    }

    #[test]
    fn a_line_that_a_crash_truncated_damages_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        state.log_recovery_point("u", &point(1)).unwrap();
        let log = dir.path().join("recovery-points/u.log");
        OpenOptions::new().append(true).open(&log).unwrap().write_all(b"{\"time\":\"no").unwrap();
        state.log_recovery_point("u", &point(2)).unwrap();
        assert_eq!(
            state.recovery_points("u"),
            RecoveryLog { points: vec![point(1), point(2)], unreadable: vec![] }
        );
    }

    #[test]
    fn a_partly_unreadable_log_gives_its_readable_points_and_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        assert_eq!(state.recovery_points("u"), RecoveryLog::default());
        state.log_recovery_point("u", &point(1)).unwrap();
        let log = dir.path().join("recovery-points/u.log");
        OpenOptions::new().append(true).open(&log).unwrap().write_all(b"\0\0\0\n").unwrap();
        let read = state.recovery_points("u");
        assert_eq!(read.points, [point(1)]);
        assert!(read.unreadable.len() == 1 && read.unreadable[0].contains("1 lines of"), "{read:?}");
        // Bytes that are not UTF-8.
        std::fs::write(&log, [0xff; 64]).unwrap();
        let read = state.recovery_points("u");
        assert!(read.points.is_empty() && read.unreadable[0].contains("cannot be read"), "{read:?}");
    }

    #[test]
    fn the_log_is_rotated_and_the_latest_point_stays() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let log = dir.path().join("recovery-points/u.log");
        state.log_recovery_point("u", &point(1)).unwrap();
        let line = std::fs::read(&log).unwrap();
        std::fs::write(&log, line.repeat(usize::try_from(LOG_LIMIT).unwrap() / line.len())).unwrap();
        state.log_recovery_point("u", &point(2)).unwrap();
        assert!(std::fs::metadata(&log).unwrap().len() < 1000);
        assert_eq!(state.recovery_points("u").points.last(), Some(&point(2)));
        assert!(state.recovery_points("u").points.len() > 1000);
    }
}
