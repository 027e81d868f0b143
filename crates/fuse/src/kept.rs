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
//! Elsewhere: the descriptor store ([`Keep`]), and which process may take the descriptors: only one at a
//! time, and only when no thread works on messages that a predecessor has read.

use crate::connection;
use crate::errors::system_error;
use crate::export::{QUEUES_MAX, check_name};
use crate::link::loop_number;
use crate::loop_device::{is_bound_to, let_go};
use crate::mounts;
use cbd_export::users::{self, BlockNode};
use cbd_types::{Error, ErrorKind, Geometry, Result};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// The device number of `/dev/fuse`.
const FUSE_DEVICE: (u32, u32) = (10, 229);

/// The descriptor store of one device: it holds descriptors beyond the life of this process.
pub trait Keep: Send + Sync {
    /// Stores these descriptors in place of those that were stored of the device before.
    ///
    /// # Errors
    /// When no store holds them.
    fn put(&self, remains: &Remains) -> Result<()>;

    /// Removes the descriptors of the device from the store.
    fn remove(&self);
}

/// The state of a device that the next process needs; the kernel sends these facts only once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeptState {
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
    /// Bytes of the device.
    pub size: u64,
    /// Bytes of a sector of it.
    pub sector: u32,
    /// Whether writes are refused.
    pub read_only: bool,
}

impl KeptState {
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
            return Err(wrong("a path that is not absolute and plain"));
        }
        if loop_number(&self.node().path) != Some(self.loop_number) || self.connection == 0 {
            return Err(wrong("a device or a connection that cannot be"));
        }
        Ok(())
    }
}

/// The preserved session of a device whose process has ended, or would end now.
#[derive(Debug)]
pub struct Remains {
    /// The state.
    pub state: KeptState,
    /// The channels of the connection.
    pub doors: Vec<OwnedFd>,
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::Damaged, format!("what was kept of the device names {what}"))
}

impl Remains {
    /// Validates a stored session.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if no daemon of this project can have left it.
    pub fn new(state: KeptState, doors: Vec<OwnedFd>) -> Result<Self> {
        state.check()?;
        if doors.is_empty() || doors.len() > QUEUES_MAX {
            return Err(wrong(&format!("{} descriptors", doors.len())));
        }
        let numbers = doors.iter().map(|door| connection_of(door.as_fd())).collect::<Result<Vec<_>>>()?;
        // Where the kernel reports the connection of a descriptor, its number must match the stored one.
        if numbers.into_iter().flatten().any(|number| number != state.connection) {
            return Err(wrong("descriptors of another connection"));
        }
        Ok(Self { state, doors })
    }

    /// A copy with duplicated descriptors of the same open files.
    ///
    /// # Errors
    /// When the process may not open more.
    pub fn another(&self) -> Result<Self> {
        let doors = self.doors.iter().map(OwnedFd::try_clone).collect::<std::io::Result<Vec<_>>>();
        let doors = doors.map_err(|error| system_error("the channels of a FUSE connection", &error))?;
        Ok(Self { state: self.state.clone(), doors })
    }

    /// Whether clients can still use the device: its connection has not ended, and the loop device is bound
    /// to the file.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let ended = self.doors.first().is_none_or(|door| connection::has_ended(door).unwrap_or(false));
        !ended && is_bound_to(self.state.loop_number, &self.state.file())
    }

    /// Refuses a device whose geometry has changed.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`] with the difference.
    pub fn check_geometry(&self, geometry: &Geometry, read_only: bool) -> Result<()> {
        let KeptState { name, size, sector, read_only: before, .. } = &self.state;
        if (*size, *sector, *before) == (geometry.size, geometry.sector, read_only) {
            return Ok(());
        }
        let text = format!(
            "{name} was left with {size} bytes in sectors of {sector}, and there are {} in sectors of {} now, or writes are refused now \
             and were not before, or the other way round; stop it with dev-stop --force and start it again",
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
        if let Some(who) = users::opened_by(node.device) {
            return Ok(Some(format!("{name} is open in {who}")));
        }
        let file = self.state.file();
        Ok(users::file_opened_by(&file).map(|who| format!("{} is open in {who}", file.display())))
    }

    /// Ends a session without a server: users of the device see errors. The caller removes the descriptors
    /// from the descriptor store.
    pub fn end(self) {
        let Self { state, doors } = self;
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
        let aborted = doors.iter().any(|door| connection::has_ended(door).unwrap_or(false));
        drop(doors);
        // 3. The loop device; a file system that is still mounted on it holds it until it is unmounted.
        if aborted && is_bound {
            let _ = let_go(state.loop_number);
        }
        let _ = fs::remove_dir(&state.mount_dir);
    }
}

/// The number of the FUSE connection behind a descriptor, where the kernel reports it.
fn connection_of(door: BorrowedFd<'_>) -> Result<Option<u32>> {
    let failed = |error| system_error("a descriptor that was kept", &error);
    let found = File::from(door.try_clone_to_owned().map_err(failed)?).metadata().map_err(failed)?;
    let number = (libc::major(found.rdev()), libc::minor(found.rdev()));
    if !found.file_type().is_char_device() || number != FUSE_DEVICE {
        return Err(wrong("a descriptor that is not of /dev/fuse"));
    }
    let lines = fs::read_to_string(format!("/proc/self/fdinfo/{}", door.as_raw_fd())).unwrap_or_default();
    Ok(lines.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_with_foreign_paths_or_numbers_is_refused() {
        assert!(KeptState::example().check().is_ok());
        let wrong = [
            KeptState { name: "../x".into(), ..KeptState::example() },
            KeptState { name: String::new(), ..KeptState::example() },
            KeptState { mount_dir: "run".into(), ..KeptState::example() },
            KeptState { mount_dir: "/run/../etc".into(), ..KeptState::example() },
            KeptState { link: Some("dev/cbd0".into()), ..KeptState::example() },
            KeptState { connection: 0, ..KeptState::example() },
        ];
        for state in wrong {
            assert!(state.check().is_err(), "{state:?}");
        }
    }

    #[test]
    fn missing_and_foreign_descriptors_are_refused() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        for doors in [vec![], vec![null()], (0..=QUEUES_MAX).map(|_| null()).collect()] {
            let error = Remains::new(KeptState::example(), doors).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn a_device_with_another_geometry_is_refused() {
        let remains = Remains { state: KeptState::example(), doors: Vec::new() };
        let geometry = Geometry {
            size: 1 << 20,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 4096,
            discard: true,
            discard_granularity: 4096,
            rotational: false,
        };
        assert!(remains.check_geometry(&geometry, false).is_ok());
        assert!(remains.check_geometry(&geometry, true).is_err());
        for other in [Geometry { size: 1 << 21, ..geometry }, Geometry { sector: 4096, ..geometry }] {
            let error = remains.check_geometry(&other, false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Exchanged);
        }
    }
}
