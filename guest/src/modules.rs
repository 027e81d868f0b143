//! Kernel modules for a guest: found, unpacked, and in the order in which they can be loaded.
//!
//! A module that this kernel does not have is built, if `built` knows it.
//!
//! Invariants: a module follows all that it depends on; what is built into the kernel is left out; a module
//! that the caller requested and this kernel does not have is an error.

use super::built;
use super::store::Store;
use crate::shell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A module, ready to be loaded.
#[derive(Debug)]
pub struct Module {
    /// With underscores, as the kernel names it.
    pub name: String,
    /// Its uncompressed content.
    pub bytes: Vec<u8>,
}

/// The modules `wanted` and all that they need, in the order of loading.
///
/// # Errors
/// A module that does not exist, or cannot be read.
pub fn collect<'a>(store: &Store, wanted: impl IntoIterator<Item = &'a str>) -> Result<Vec<Module>, String> {
    let folder = store.modules();
    let mut files = BTreeMap::new();
    find(&folder.join("kernel"), &mut files)?;
    let builtin = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
    let builtin: Vec<_> = builtin.lines().map(|line| name_of(Path::new(line))).collect();
    let mut loaded = Vec::new();
    for name in wanted {
        let name = name.replace('-', "_");
        if !files.contains_key(&name)
            && let Some(file) = built::module(store, &name)?
        {
            files.insert(name.clone(), file);
        }
        add(store, &name, &files, &builtin, &mut loaded)?;
    }
    Ok(loaded)
}

/// Dependencies have no cycles: the kernel's own build refuses them.
fn add(
    store: &Store,
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    builtin: &[String],
    loaded: &mut Vec<Module>,
) -> Result<(), String> {
    if loaded.iter().any(|module| module.name == name) || builtin.iter().any(|module| module == name) {
        return Ok(());
    }
    let file = files.get(name).ok_or_else(|| {
        format!("Linux {} has no module {name} and is not built with it", store.kernel_release())
    })?;
    let bytes = read(store, file)?;
    for needed in dependencies(&bytes) {
        add(store, &needed, files, builtin, loaded)?;
    }
    loaded.push(Module { name: name.to_owned(), bytes });
    Ok(())
}

fn find(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), String> {
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            find(&path, files)?;
        } else if path.to_string_lossy().contains(".ko") {
            files.insert(name_of(&path), path);
        }
    }
    Ok(())
}

/// `dm-writecache.ko.xz` is dm_writecache.
fn name_of(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let name = file.split_once(".ko").map_or(file.as_ref(), |(name, _)| name);
    name.replace('-', "_")
}

fn read(store: &Store, file: &Path) -> Result<Vec<u8>, String> {
    if file.extension().is_some_and(|extension| extension == "ko") {
        return fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()));
    }
    let output = Command::new(store.busybox())
        .args(["xz", "-dc"])
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start {}: {error}", store.busybox().display()))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("cannot unpack {}: {}", file.display(), shell::End::Exited(output.status)))
    }
}

/// The dependencies of a module: `depends=a,b` among the strings of its section `.modinfo`.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(value);
    text.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_lists_its_dependencies() {
        let module = b"\x7fELF..\0license=GPL\0depends=libnvdimm,nd-btt\0retpoline=Y\0";
        assert_eq!(dependencies(module), ["libnvdimm", "nd_btt"]);
        assert_eq!(dependencies(b"\0license=GPL\0depends=\0retpoline=Y\0"), [""; 0]);
        assert_eq!(dependencies(b"not a module"), [""; 0]);
    }

    #[test]
    fn a_module_has_one_name_however_its_file_is_written() {
        assert_eq!(
            name_of(Path::new("/lib/modules/7/kernel/drivers/md/dm-writecache.ko.xz")),
            "dm_writecache"
        );
        assert_eq!(name_of(Path::new("kernel/fs/ext4/ext4.ko")), "ext4");
    }
}
