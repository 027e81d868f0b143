//! The names under which the kernel block device of a blkdev is found besides `/dev/cbdN`: links by name and by UUID, and
//! properties for udev.
//!
//! Invariants: a link here leads to `/dev/cbdN`, so it never outlives that one with a target, nor needs to follow it to
//! another kernel device. Only a symbolic link to `../../cbdN` is ever replaced or removed, and none whose `cbdN` exists and
//! is another device. A link is created, moved and replaced atomically. A link that cannot be made prevents no device.
//!
//! Elsewhere: `/dev/cbdN` itself (`cbd-export`, `link`), unique names (`cbd-engine`), the rules for udev (`packaging`).

use super::ExportContext;
use cbd_export::folders::{own_folder, own_subfolder};
use cbd_export::system_error;
use cbd_types::{Error, ErrorKind, Name, Result, uuid_text};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

/// The folder of the links by name, below the folder of links to devices.
pub const BY_NAME: &str = "by-name";
/// The folder of the links by UUID.
pub const BY_UUID: &str = "by-uuid";

/// The folder of the properties, below the run folder.
const UDEV: &str = "udev";

/// What the labels of a block device say.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Described {
    /// Number of the transport in this daemon.
    pub transport: u32,
    /// Number of the backend.
    pub backend: u32,
    /// Number of the block device.
    pub blkdev: u32,
    /// The name of the block device.
    pub name: Option<Name>,
    /// The UUID of the backend; none for a block device beside the one of this host that has it.
    pub uuid: Option<[u8; 16]>,
}

impl Described {
    /// The name of the link by name: names are unique on one transport only, and no name contains a colon.
    #[must_use]
    pub fn link_name(&self) -> Option<String> {
        let name = self.name.as_ref()?;
        Some(if self.transport == 0 { name.to_string() } else { format!("{}:{name}", self.transport) })
    }

    /// The properties for udev, one `KEY=VALUE` a line. The values need no quotes.
    fn properties(&self, device: &str) -> String {
        let name = match (&self.name, self.link_name()) {
            (Some(name), Some(link)) => format!("CBD_NAME={name}\nCBD_LINK={link}\n"),
            _ => String::new(),
        };
        let uuid = self.uuid.map_or_else(String::new, |uuid| format!("CBD_UUID={}\n", uuid_text(uuid)));
        let Self { transport, backend, blkdev, .. } = self;
        format!(
            "CBD_DEVICE={device}\n{name}{uuid}CBD_TRANSPORT={transport}\nCBD_BACKEND={backend}\nCBD_BLKDEV={blkdev}\n"
        )
    }
}

/// The labels of one device. When they are dropped and `/dev/cbdN` does not exist any more, they are removed.
#[derive(Debug)]
pub struct Labels {
    dev_dir: PathBuf,
    properties: PathBuf,
    device: String,
    described: Described,
    /// Which label could not be made, in words.
    problem: Option<String>,
}

impl Labels {
    /// Records the properties of a device that is about to be created: udev asks for them when it appears.
    #[must_use]
    pub fn announce(context: &ExportContext, device: &str, described: Described) -> Self {
        let mut labels = Self {
            dev_dir: context.dev_dir.clone(),
            properties: properties_of(context, device),
            device: device.to_owned(),
            described,
            problem: None,
        };
        labels.problem = labels.record().err().map(|error| error.line());
        labels
    }

    /// Makes the links of the device, which exists now.
    pub fn publish(&mut self) {
        let links = self.link(BY_NAME, self.described.link_name());
        let by_uuid = self.link(BY_UUID, self.described.uuid.map(uuid_text));
        self.problem = self.problem.take().or_else(|| links.and(by_uuid).err().map(|error| error.line()));
    }

    /// Changes the name: moves the link, and lets udev read the properties again.
    pub fn rename(&mut self, name: Option<&Name>) {
        if self.described.name.as_ref() == name {
            return;
        }
        self.described.name = name.cloned();
        self.problem = self.record().err().map(|error| error.line());
        self.publish();
        self.tell_udev();
    }

    /// Which label could not be made, in words.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn record(&self) -> Result<()> {
        let folder = self.properties.parent().unwrap_or(Path::new("/"));
        own_folder(folder, 0o755)?;
        let temporary = folder.join(format!(".{}", self.device));
        let text = self.described.properties(&self.device);
        // What an ended daemon may have left.
        let _ = fs::remove_file(&temporary);
        // Whatever the umask is, only the daemon may write what udev believes.
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .and_then(|()| fs::rename(&temporary, &self.properties))
            .map_err(|error| system_error(self.properties.display(), &error))
    }

    /// Makes `wanted` the only link to the device in a folder.
    fn link(&self, kind: &str, wanted: Option<String>) -> Result<()> {
        let links = LinkFolder { dev_dir: &self.dev_dir, folder: self.dev_dir.join("cbd").join(kind) };
        links.set(&self.device, wanted.as_deref())
    }

    /// Makes the kernel announce a change of the device. Without the right to do that, udev keeps what it has read.
    fn tell_udev(&self) {
        let Ok(node) = fs::read_link(self.dev_dir.join(&self.device)) else { return };
        let Some(kernel_name) = node.file_name() else { return };
        let _ = fs::write(Path::new("/sys/class/block").join(kernel_name).join("uevent"), "change");
    }
}

impl Drop for Labels {
    fn drop(&mut self) {
        if !exists(&self.dev_dir.join(&self.device)) {
            remove_at(&self.dev_dir, &self.properties, &self.device);
        }
    }
}

/// Removes the labels of a device that was removed.
pub fn remove(context: &ExportContext, device: &str) {
    remove_at(&context.dev_dir, &properties_of(context, device), device);
}

/// Removes the links of a device under other names than its present one, which a crash within a rename has left: they could
/// be those of other devices now.
pub fn remove_former(context: &ExportContext, device: &str, described: &Described) {
    let folder = context.dev_dir.join("cbd").join(BY_NAME);
    let links = LinkFolder { dev_dir: &context.dev_dir, folder };
    let wanted = described.link_name();
    links
        .to(device)
        .filter(|path| file_name(path) != wanted.as_deref())
        .for_each(|path| drop(fs::remove_file(path)));
}

/// Removes the labels of devices that do not exist any more. A link that leads to a device of another daemon is one of
/// a device that exists.
pub fn sweep(context: &ExportContext) {
    for kind in [BY_NAME, BY_UUID] {
        let links = LinkFolder { dev_dir: &context.dev_dir, folder: context.dev_dir.join("cbd").join(kind) };
        for (path, device) in links.all().filter(|(_, device)| !exists(&context.dev_dir.join(device))) {
            tracing::debug!("{} is removed: {device} does not exist any more", path.display());
            let _ = fs::remove_file(path);
        }
    }
    for entry in fs::read_dir(properties_dir(context)).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if !name.to_str().is_some_and(|device| is_device(device) && exists(&context.dev_dir.join(device))) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn properties_dir(context: &ExportContext) -> PathBuf {
    context.run_dir.join(UDEV)
}

fn properties_of(context: &ExportContext, device: &str) -> PathBuf {
    properties_dir(context).join(device)
}

fn remove_at(dev_dir: &Path, properties: &Path, device: &str) {
    for kind in [BY_NAME, BY_UUID] {
        let links = LinkFolder { dev_dir, folder: dev_dir.join("cbd").join(kind) };
        // Errors are ignored: what remains is removed by the next daemon.
        links.to(device).for_each(|path| drop(fs::remove_file(path)));
    }
    let _ = fs::remove_file(properties);
}

/// Whether something is at `path`, be it a link to nothing.
fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(OsStr::to_str)
}

/// Whether a text is the name of a block device: `cbdN` or `cbdT-N`.
fn is_device(text: &str) -> bool {
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    text.strip_prefix("cbd").is_some_and(|rest| rest.splitn(2, '-').all(is_number))
}

/// A folder of links to devices.
struct LinkFolder<'a> {
    dev_dir: &'a Path,
    folder: PathBuf,
}

impl LinkFolder<'_> {
    /// Makes `wanted` the only link to `device` in the folder; none without a name.
    fn set(&self, device: &str, wanted: Option<&str>) -> Result<()> {
        let mut former: Vec<PathBuf> = self.to(device).filter(|path| file_name(path) != wanted).collect();
        let made = wanted.map_or(Ok(()), |wanted| self.make(device, wanted, &mut former));
        // Also where the new link could not be made: the device does not have these names any more.
        former.into_iter().for_each(|path| drop(fs::remove_file(path)));
        made
    }

    /// Makes the link `wanted`, of a link in `former` if there is one.
    fn make(&self, device: &str, wanted: &str, former: &mut Vec<PathBuf>) -> Result<()> {
        let path = self.folder.join(wanted);
        let failed = |error: &io::Error| system_error(path.display(), error);
        let taken = |what: String| {
            let text = format!("{} is no link to {device}: it exists already and {what}", path.display());
            Err(Error::new(ErrorKind::AlreadyExists, text))
        };
        if let Some(kind) = self.folder.file_name() {
            own_folder(&self.dev_dir.join("cbd"), 0o755).and_then(|folder| own_subfolder(&folder, kind))?;
        }
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&error)),
            Ok(found) if !found.is_symlink() => return taken("is no symbolic link".to_owned()),
            Ok(_) => match device_of(&path) {
                Some(other) if other == device => return Ok(()),
                Some(other) if exists(&self.dev_dir.join(&other)) => {
                    return taken(format!("leads to {other}, which exists"));
                }
                Some(_) => return self.replace(device, &path).map_err(|error| failed(&error)),
                None => return taken("leads to something else".to_owned()),
            },
        }
        // Another file that appears at this moment is not replaced, either.
        if let Some(old) = former.last()
            && renameat_with(CWD, old, CWD, &path, RenameFlags::NOREPLACE).is_ok()
        {
            former.pop();
            return Ok(());
        }
        symlink(target_of(device), &path).map_err(|error| failed(&error))
    }

    /// Replaces a link to a device that does not exist.
    fn replace(&self, device: &str, path: &Path) -> io::Result<()> {
        let temporary = self.folder.join(format!(".{device}"));
        let _ = fs::remove_file(&temporary);
        symlink(target_of(device), &temporary).and_then(|()| fs::rename(&temporary, path))
    }

    /// The links to a device.
    fn to(&self, device: &str) -> impl Iterator<Item = PathBuf> {
        self.all().filter(move |(_, of)| of == device).map(|(path, _)| path)
    }

    /// All links to devices, each with its device.
    fn all(&self) -> impl Iterator<Item = (PathBuf, String)> + use<> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.path(), device_of(&entry.path())?)))
    }
}

fn target_of(device: &str) -> PathBuf {
    Path::new("../..").join(device)
}

/// The device to which a link leads; none for anything else.
fn device_of(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    let device = target.strip_prefix("../..").ok()?.to_str()?;
    is_device(device).then(|| device.to_owned())
}

#[cfg(test)]
mod tests;
