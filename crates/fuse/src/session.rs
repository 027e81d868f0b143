//! The preserved session of a device, which outlives the process that serves it: the descriptors in a
//! descriptor store, and the state that the next process needs.
//!
//! Invariants: a FUSE connection lives as long as any process has a descriptor of it open, and the kernel
//! answers a request that was read through a channel and not answered with an error when that channel is
//! closed; so every channel is preserved. A session is validated before it is used, since it comes from
//! outside, and validating it sends no request to a file system without a server: such a request would never
//! return. A process that is killed while it reads a message has read it or not: the memory that messages are
//! read into was touched before, so the kernel never has to abandon a copy halfway.
//!
//! Elsewhere: the descriptor store ([`SessionStore`]), and which process may take the descriptors: only one at
//! a time, and only when no thread works on messages that a predecessor has read.

use crate::connection;
use crate::export::{QUEUES_MAX, check_name};
use crate::loop_device::{is_bound_to, loop_number, unbind};
use crate::mounts;
use cbd_export::system_error;
use cbd_export::users::{self, BlockNode};
use cbd_types::{Error, ErrorKind, Geometry, Result};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// The device number of `/dev/fuse`.
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// The descriptor store of one device: it holds descriptors beyond the life of this process.
pub trait SessionStore: Send + Sync {
    /// Stores the descriptors of a session in place of those that were stored of the device before.
    ///
    /// # Errors
    /// When no store holds them.
    fn put(&self, session: &Session) -> Result<()>;

    /// Removes the descriptors of the device from the store.
    fn remove(&self);
}

/// The state of a device that the next process needs; the kernel sends these facts only once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionState {
    /// The name of the file, such as `cbd0`.
    pub name: String,
    /// Where the file system is mounted.
    pub mount_dir: PathBuf,
    /// The link to the loop device.
    pub link: Option<PathBuf>,
    /// The number of the FUSE connection.
    pub connection: u32,
    /// N of `/dev/loopN`.
    pub loop_number: u32,
    /// Bytes of the device when the session was stored; it may have grown since.
    pub size: u64,
    /// Bytes of a sector of it.
    pub sector: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl SessionState {
    /// The file under the loop device.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.mount_dir.join(&self.name)
    }

    /// The state of a device that does not exist, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn example() -> Self {
        Self {
            name: "cbd0".into(),
            mount_dir: "/run/cbd/fuse/cbd0".into(),
            link: Some("/dev/cbd0".into()),
            connection: 45,
            loop_number: 3,
            size: 1 << 20,
            sector: 512,
            read_only: false,
        }
    }

    fn node(&self) -> BlockNode {
        let path = PathBuf::from(format!("/dev/loop{}", self.loop_number));
        let device = crate::loop_device::device_number(self.loop_number).unwrap_or_default();
        BlockNode { path, device }
    }

    fn check(&self) -> Result<()> {
        let plain = |path: &Path| {
            path.is_absolute()
                && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        };
        check_name(&self.name)?;
        if !plain(&self.mount_dir) || !self.link.as_deref().is_none_or(plain) {
            return Err(invalid("a path that is not absolute and plain"));
        }
        if loop_number(&self.node().path) != Some(self.loop_number) || self.connection == 0 {
            return Err(invalid("a device or a connection that cannot exist"));
        }
        Ok(())
    }
}

/// The preserved session of a device whose process has ended, or would end now.
#[derive(Debug)]
pub struct Session {
    /// The state.
    pub state: SessionState,
    /// The channels of the connection.
    pub channels: Vec<OwnedFd>,
}

fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::Damaged, format!("the preserved session of the device names {what}"))
}

impl Session {
    /// Validates a stored session.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if no daemon of this project can have left it.
    pub fn new(state: SessionState, channels: Vec<OwnedFd>) -> Result<Self> {
        state.check()?;
        if channels.is_empty() || channels.len() > QUEUES_MAX {
            return Err(invalid(&format!("{} descriptors", channels.len())));
        }
        let numbers =
            channels.iter().map(|channel| connection_of(channel.as_fd())).collect::<Result<Vec<_>>>()?;
        // Where the kernel reports the connection of a descriptor, its number must match the stored one.
        if numbers.into_iter().flatten().any(|number| number != state.connection) {
            return Err(invalid("descriptors of another connection"));
        }
        Ok(Self { state, channels })
    }

    /// A copy with duplicated descriptors of the same open files.
    ///
    /// # Errors
    /// When the process may not open more.
    pub fn try_clone(&self) -> Result<Self> {
        let channels = self.channels.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>();
        let channels = channels.map_err(|error| system_error("the channels of a FUSE connection", &error))?;
        Ok(Self { state: self.state.clone(), channels })
    }

    /// Whether clients can still use the device: its connection has not ended, and the loop device is bound
    /// to the file.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let ended =
            self.channels.first().is_none_or(|channel| connection::has_ended(channel).unwrap_or(false));
        !ended && is_bound_to(self.state.loop_number, &self.state.file())
    }

    /// Refuses a device whose geometry has changed, but for one that has grown.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`] with the difference.
    pub fn check_geometry(&self, geometry: &Geometry, read_only: bool) -> Result<()> {
        let SessionState { name, size, sector, read_only: before, .. } = &self.state;
        if *size <= geometry.size && (*sector, *before) == (geometry.sector, read_only) {
            return Ok(());
        }
        let text = format!(
            "{name} was handed over with {size} bytes in sectors of {sector}, read-only: {before}; now it has {} bytes \
             in sectors of {}, read-only: {read_only}; stop it with dev-stop --force and start it again",
            geometry.size, geometry.sector
        );
        Err(Error::new(ErrorKind::Exchanged, text))
    }

    /// The use of the device, as a sentence.
    ///
    /// # Errors
    /// When a query to the system fails.
    pub fn user(&self) -> Result<Option<String>> {
        if !self.is_usable() {
            return Ok(None);
        }
        let (node, link) = (self.state.node(), self.state.link.as_deref());
        if let Some(sentence) = users::mounted_or_held(&node, link)? {
            return Ok(Some(sentence));
        }
        if let Some(sentence) = users::mounted_in_another_namespace(&node, link) {
            return Ok(Some(sentence));
        }
        let name = link.unwrap_or(&node.path).display();
        if let Some(process) = users::opened_by(node.device) {
            return Ok(Some(format!("{name} is open in {process}")));
        }
        let file = self.state.file();
        Ok(users::file_opened_by(&file).map(|process| format!("{} is open in {process}", file.display())))
    }

    /// Ends a session without a server: users of the device see errors. The caller removes the descriptors
    /// from the descriptor store.
    pub fn end(self) {
        let Self { state, channels } = self;
        // 1. The link, so that it never points to a device of another owner.
        let node = state.node();
        if let Some(link) = &state.link
            && fs::read_link(link).is_ok_and(|target| target == node.path)
        {
            let _ = fs::remove_file(link);
        }
        // Checked before the unmount, after which the path of the backing file is no longer visible.
        let is_bound = is_bound_to(state.loop_number, &state.file());
        // 2. The connection, unless its number or its mount point belongs to another one by now. After this
        //    step no request waits.
        let mounted = cbd_export::mounts::at(&state.mount_dir).ok().flatten();
        if let Some(mount) =
            mounted.filter(|mount| mounts::is_ours(mount) && mounts::connection(mount) == state.connection)
        {
            mounts::abort(&mount);
        }
        let aborted = channels.iter().any(|channel| connection::has_ended(channel).unwrap_or(false));
        drop(channels);
        // 3. The loop device; a file system that is still mounted on it holds it until it is unmounted.
        if aborted && is_bound {
            let _ = unbind(state.loop_number);
        }
        let _ = fs::remove_dir(&state.mount_dir);
    }
}

/// The number of the FUSE connection behind a descriptor, where the kernel reports it.
fn connection_of(channel: BorrowedFd<'_>) -> Result<Option<u32>> {
    let failed = |error| system_error("a descriptor of a preserved session", &error);
    let found = File::from(channel.try_clone_to_owned().map_err(failed)?).metadata().map_err(failed)?;
    let number = cbd_sys::DeviceNumber::from_stat(found.rdev()).pair();
    if !found.file_type().is_char_device() || number != FUSE_DEVICE {
        return Err(invalid("a descriptor that is not of /dev/fuse"));
    }
    let lines = fs::read_to_string(format!("/proc/self/fdinfo/{}", channel.as_raw_fd())).unwrap_or_default();
    Ok(lines.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_with_foreign_paths_or_numbers_is_refused() {
        assert!(SessionState::example().check().is_ok());
        let invalid = [
            SessionState { name: "../x".into(), ..SessionState::example() },
            SessionState { name: String::new(), ..SessionState::example() },
            SessionState { mount_dir: "run".into(), ..SessionState::example() },
            SessionState { mount_dir: "/run/../etc".into(), ..SessionState::example() },
            SessionState { link: Some("dev/cbd0".into()), ..SessionState::example() },
            SessionState { connection: 0, ..SessionState::example() },
        ];
        for state in invalid {
            assert!(state.check().is_err(), "{state:?}");
        }
    }

    #[test]
    fn missing_and_foreign_descriptors_are_refused() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        for channels in [vec![], vec![null()], (0..=QUEUES_MAX).map(|_| null()).collect()] {
            let error = Session::new(SessionState::example(), channels).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn a_device_with_another_geometry_is_refused() {
        let session = Session { state: SessionState::example(), channels: Vec::new() };
        let geometry = Geometry {
            size: 1 << 20,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 4096,
            discard: true,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        };
        assert!(session.check_geometry(&geometry, false).is_ok());
        assert!(session.check_geometry(&geometry, true).is_err());
        assert!(
            session.check_geometry(&Geometry { size: 1 << 21, ..geometry }, false).is_ok(),
            "it has grown"
        );
        for other in [Geometry { size: 1 << 19, ..geometry }, Geometry { sector: 4096, ..geometry }] {
            let error = session.check_geometry(&other, false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Exchanged);
        }
    }
}
