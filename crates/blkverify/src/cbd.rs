//! Block devices of CBD: how they are recognized, and what the daemon is asked.
//!
//! Invariants: a device of CBD is never verified by reads of it: the cache would answer, and no copy on the disk would be looked
//! at. One that no daemon is found for is an error.

use crate::beneath::{Block, node};
use cbd_daemon::api::{NumberOrName, Status, VerifiedInfo, VerifyRange};
use cbd_daemon::client::{Client, Timeout};
use cbd_sys::DeviceNumber;
use cbd_types::{Error, ErrorKind, Result};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// Time for the list of block devices.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// A part of the device of a backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cached {
    /// Number of the transport.
    pub transport: u32,
    /// Number of the backend.
    pub backend: u32,
    /// The name of the block device.
    pub name: String,
    /// Bytes of the backend in front of it: those in front of a partition.
    pub start: u64,
    /// Control socket of the daemon.
    pub socket: PathBuf,
}

/// The device of CBD that the block device `number` is, or is a partition of.
///
/// # Errors
/// It is one, and no daemon is found that serves it.
pub fn find(number: DeviceNumber, socket: &Path) -> Result<Option<Cached>> {
    let sys = Path::new("/sys");
    let Some(block) = Block::of(sys, number) else { return Ok(None) };
    if !may_be(&block.name) {
        return Ok(None);
    }
    let client = Client::new(socket).with_timeout(Timeout::Limit(STATUS_TIMEOUT));
    let status = client.status();
    let found = status.as_ref().ok().and_then(|status| listed(devices_of(status), block.disk, number_of));
    if let Some((transport, backend, name)) = found {
        let socket = socket.to_owned();
        return Ok(Some(Cached { transport, backend, name, start: block.start, socket }));
    }
    let Some(name) = sign(&block, Path::new("/run/cbd"), Path::new("/dev")) else { return Ok(None) };
    let shown = node(sys, number).unwrap_or_default();
    let text = format!(
        "{} is {name}, a block device of CBD, and the daemon that serves it is not found: start it, or name its socket with --socket; \
         reads alone would not look at the copies on the disk",
        shown.display()
    );
    let error = Error::new(ErrorKind::NotFound, text);
    Err(match status {
        Err(cause) => error.caused_by(cause),
        Ok(_) => error,
    })
}

/// The names of the devices of CBD among those that a device of device mapper or md, or a loop device, stands on.
#[must_use]
pub fn members(number: DeviceNumber, socket: &Path) -> Vec<String> {
    let sys = Path::new("/sys");
    let members = Block::of(sys, number).map(|block| block.members(sys)).unwrap_or_default();
    let names = members.iter().filter_map(|member| match find(member.disk, socket) {
        Ok(found) => found.map(|cached| cached.name),
        Err(_) => Some(format!("/dev/{}", member.name)),
    });
    names.collect()
}

/// Whether a disk with this kernel name may be of CBD.
fn may_be(name: &str) -> bool {
    ["ublkb", "loop", "cbd"].iter().any(|prefix| name.starts_with(prefix))
}

fn number_of(path: &Path) -> Option<DeviceNumber> {
    let status = fs::metadata(path).ok()?;
    status.file_type().is_block_device().then(|| DeviceNumber::from_stat(status.rdev()))
}

/// A block device in the status: transport, backend and name.
type Listed = (u32, u32, String);

/// The block devices in the status.
fn devices_of(status: &Status) -> Vec<Listed> {
    let mut devices = Vec::new();
    for transport in &status.transports {
        for backend in transport.backends.iter().map(|backend| &backend.info) {
            let of = |name: &String| (transport.info.transport_id, backend.backend_id, name.clone());
            devices.extend(backend.blkdevs.iter().map(|device| of(&device.dev_name)));
        }
    }
    devices
}

/// The one of them that has a number.
fn listed(
    devices: Vec<Listed>,
    number: DeviceNumber,
    number_of: impl Fn(&Path) -> Option<DeviceNumber>,
) -> Option<Listed> {
    devices.into_iter().find(|(_, _, name)| number_of(Path::new(name)) == Some(number))
}

/// What shows that a disk is of CBD though no daemon says so: the file of a loop device, the daemon's note of a ublk device, a
/// link to it.
fn sign(block: &Block, run: &Path, dev: &Path) -> Option<String> {
    let is_ours = |name: &str| {
        let digits = name.strip_prefix("cbd").unwrap_or_default();
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    if let Ok(file) = fs::read_to_string(block.folder.join("loop/backing_file")) {
        let file = Path::new(file.trim_end());
        let name = file.file_name().and_then(|name| name.to_str()).filter(|name| is_ours(name));
        let folder = file.parent().and_then(Path::file_name).and_then(|folder| folder.to_str());
        // The mount point has the name too; a mount that was detached has none.
        if let Some(name) = name.filter(|name| folder.is_none_or(|folder| folder == *name)) {
            return Some(name.to_owned());
        }
    }
    if let Ok(device) = fs::read_link(run.join("ublk").join(&block.name)) {
        return Some(device.display().to_string());
    }
    let entries = fs::read_dir(dev).into_iter().flatten().flatten();
    let mut names = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_ours));
    names
        .find(|entry| number_of(&entry.path()) == Some(block.disk))
        .map(|entry| entry.path().display().to_string())
}

/// News of a verification by the daemon.
#[derive(Debug)]
pub enum News {
    /// Bytes that are verified.
    Progress(u64),
    /// Its end.
    Done(Result<VerifiedInfo>),
    /// A signal: what is in progress ends with this process.
    Stop,
}

/// Asks the daemon to verify a range of `cached`, in a thread of its own; `news` gets the progress and the result.
///
/// # Errors
/// [`ErrorKind::System`] when no thread can be started.
pub fn start(cached: &Cached, request: VerifyRange, news: Sender<News>) -> Result<()> {
    let cached = cached.clone();
    let work = move || {
        let client = Client::new(&cached.socket);
        let mut progress = |bytes| {
            let _ = news.send(News::Progress(bytes));
        };
        let result = verify(&client, &cached, &request, &mut progress);
        let _ = news.send(News::Done(result));
    };
    let started = std::thread::Builder::new().name("blkverify-ask".to_owned()).spawn(work);
    started.map(drop).map_err(|error| {
        Error::new(ErrorKind::System, "no thread that asks the daemon can be started").caused_by(error)
    })
}

/// Asks the daemon, and waits for its answer. `progress` gets the number of verified bytes.
fn verify(
    client: &Client,
    cached: &Cached,
    request: &VerifyRange,
    progress: &mut dyn FnMut(u64),
) -> Result<VerifiedInfo> {
    let backend = NumberOrName::Number(cached.backend);
    client.verify(cached.transport, &backend, request, |now| progress(now.verified_bytes.unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_by_its_number_whatever_its_name() {
        let devices = || vec![(0, 1, "nbd:unix:/run/x".to_owned()), (3, 5, "/dev/cbd1".to_owned())];
        let number = DeviceNumber { major: 7, minor: 3 };
        let number_of = |path: &Path| (path == Path::new("/dev/cbd1")).then_some(number);
        assert_eq!(listed(devices(), number, number_of), Some((3, 5, "/dev/cbd1".to_owned())));
        assert_eq!(listed(devices(), DeviceNumber { major: 7, minor: 4 }, number_of), None);
    }

    #[test]
    fn loop_and_ublk_devices_of_cbd_are_known_without_a_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let (sys, run) = (folder.path().join("loop3"), folder.path().join("run"));
        fs::create_dir_all(sys.join("loop")).unwrap();
        fs::create_dir_all(run.join("ublk")).unwrap();
        std::os::unix::fs::symlink("/dev/cbd4", run.join("ublk/ublkb1")).unwrap();
        let number = DeviceNumber { major: 4000, minor: 3 };
        let block = |name: &str| Block { disk: number, name: name.to_owned(), start: 0, folder: sys.clone() };
        let sign = |name: &str| sign(&block(name), &run, folder.path());
        for (file, expected) in [
            ("/run/cbd/fuse/cbd7/cbd7\n", Some("cbd7")),
            ("/cbd7\n", Some("cbd7")),
            ("/srv/images/cbd7\n", None),
            ("/run/cbd/fuse/cbd/cbd\n", None),
            ("/run/cbd/fuse/disk.img\n", None),
        ] {
            fs::write(sys.join("loop/backing_file"), file).unwrap();
            assert_eq!(sign("loop3").as_deref(), expected, "{file}");
        }
        assert_eq!(sign("ublkb1").as_deref(), Some("/dev/cbd4"));
        assert_eq!(sign("ublkb2"), None);
        assert!(may_be("ublkb1") && may_be("loop3") && !may_be("sda") && !may_be("nvme0n1"));
    }
}
