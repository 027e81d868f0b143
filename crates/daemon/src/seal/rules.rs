//! The rules of udev that seal disks: one file for each backend, and one that all have in common.
//!
//! A file for a backend sorts before all rules that look at what is on a disk, and says by attributes in `/sys` which disk
//! it means. It sets the properties by which those rules leave the disk alone. The common file sorts behind the rules of
//! md and device mapper, which look at the disk whatever was set, and takes back what they have found.
//!
//! Invariants: nothing in an identity, a path or a name can end a string of a rule or begin another rule: what is not a
//! plain letter matches anything there, and descriptions are JSON in a comment. A file is replaced atomically and is
//! durable when it is in place.

use crate::state::replace_with_mode;
use cbd_backing::Lasting;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The begin of the names of the files for backends; the UUID of the backend follows.
const PREFIX: &str = "12-cbd-sealed-";
/// The end of their names, without which udev does not read them.
const SUFFIX: &str = ".rules";
/// What follows in the name of a file whose disk a user has unsealed by hand.
const UNSEALED: &str = ".unsealed";
/// The common file.
const COMMON: &str = "63-zz-cbd-sealed.rules";
/// The begin of the line that describes the disk.
const SUBJECT: &str = "# cbd-sealed: ";
/// Most bytes of an attribute that a rule compares.
const PATTERN_MAX: usize = 1024;
/// Most bytes of a file that is read.
const FILE_MAX: u64 = 64 << 10;

/// What the common file holds.
const COMMON_TEXT: &str = include_str!("../../../../packaging/63-zz-cbd-sealed.rules");

/// What a file says of its disk, for people and for commands that have no daemon to ask.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Subject {
    /// UUID of the backend.
    pub backend: String,
    /// Its number on its transport.
    pub number: u32,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// UUID of the transport.
    pub transport: String,
    /// Path of the region.
    pub region: String,
    /// Path of the disk.
    pub disk: String,
    /// The state folder of the daemon.
    pub state_dir: String,
}

/// The rule of one disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    subject: Subject,
    matches: String,
    /// A link to the disk that the rules for disks make from its content, and by which the daemon finds it.
    link: Option<String>,
}

impl Rule {
    /// The rule for a disk; none if nothing distinguishes it from other disks.
    #[must_use]
    pub fn of(subject: Subject, lasting: &Lasting) -> Option<Self> {
        let mut matches = match lasting.attributes.as_slice() {
            [] => {
                // A partition lies below its disk there, too.
                format!("DEVPATH==\"/devices/{}/block/*\"", pattern(lasting.port.as_ref()?.as_bytes())?)
            }
            attributes => {
                let mut all = Vec::new();
                for (name, value) in attributes {
                    all.push(format!("ATTRS{{{name}}}==\"{}\"", pattern(value)?));
                }
                all.join(", ")
            }
        };
        if let Some(partition) = &lasting.partition {
            let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.to_owned());
            let (number, start) = (plain(&partition.number)?, plain(&partition.start)?);
            let of_it = format!(
                "ENV{{DEVTYPE}}==\"partition\", ATTR{{partition}}==\"{number}\", ATTR{{start}}==\"{start}\""
            );
            matches = format!("{of_it}, {matches}");
        }
        let link =
            subject.disk.strip_prefix("/dev/").filter(|link| is_link_by_content(link)).map(str::to_owned);
        Some(Self { subject, matches, link })
    }

    /// The text of the file.
    ///
    /// # Errors
    /// If the description cannot be encoded.
    pub fn text(&self) -> io::Result<String> {
        let subject = serde_json::to_string(&self.subject)?;
        let mut text = format!(
            "# A disk below a cache of CBD. Newer data than on it is in the region, with and without a daemon, so nothing else may use it.\n\
             # Written by cbdd, and removed by backend-stop and cache-detach. In an emergency: cbdctrl unseal.\n\
             {SUBJECT}{subject}\n"
        );
        let uuid = &self.subject.backend;
        let link = self
            .link
            .as_ref()
            .map_or_else(String::new, |link| format!(", ENV{{CBD_SEALED_LINK}}=\"{link}\""));
        // Writing to a string can't fail.
        let _ = write!(
            text,
            "ACTION==\"remove\", GOTO=\"cbd_sealed_end\"\n\
             SUBSYSTEM!=\"block\", GOTO=\"cbd_sealed_end\"\n\
             {}, GOTO=\"cbd_sealed\"\n\
             GOTO=\"cbd_sealed_end\"\n\
             LABEL=\"cbd_sealed\"\n\
             ENV{{CBD_SEALED}}=\"{uuid}\", ENV{{UDEV_DISABLE_PERSISTENT_STORAGE_BLKID_FLAG}}=\"1\", ENV{{ID_FS_TYPE}}=\"cbd_member\", \
             ENV{{ID_FS_USAGE}}=\"raid\", ENV{{SYSTEMD_READY}}=\"0\", ENV{{UDISKS_IGNORE}}=\"1\"{link}\n\
             LABEL=\"cbd_sealed_end\"\n",
            self.matches
        );
        Ok(text)
    }

    /// Writes the rule into `folder`, which is created if its parent exists; false if it was there already.
    ///
    /// # Errors
    /// The system's error; no file is changed by halves.
    pub fn write(&self, folder: &Path) -> io::Result<bool> {
        let file = file_of(folder, &self.subject.backend);
        if !is_plain(&self.subject.backend) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "its UUID is none"));
        }
        if !folder.exists() {
            fs::create_dir(folder)?;
        }
        // The common file first: the other one alone would leave gaps.
        let common = write_if_other(&folder.join(COMMON), COMMON_TEXT)?;
        let own = write_if_other(&file, &self.text()?)?;
        Ok(common || own)
    }
}

fn write_if_other(file: &Path, text: &str) -> io::Result<bool> {
    if fs::read_to_string(file).is_ok_and(|present| present == text) {
        return Ok(false);
    }
    // udev reads rules whatever their mode is; people shall read them, too.
    replace_with_mode(file, text.as_bytes(), 0o644).map(|()| true)
}

/// The file for the disk of the backend `uuid`.
#[must_use]
pub fn file_of(folder: &Path, uuid: &str) -> PathBuf {
    folder.join(format!("{PREFIX}{uuid}{SUFFIX}"))
}

/// The file that says that a user has unsealed the disk of the backend `uuid`.
#[must_use]
pub fn marker_of(folder: &Path, uuid: &str) -> PathBuf {
    folder.join(format!("{PREFIX}{uuid}{SUFFIX}{UNSEALED}"))
}

/// The time in such a file, in seconds since 1970 UTC; 0 if it is not known.
#[must_use]
pub fn time_in_marker(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// Removes the rule of a backend, and the common file with the last one; false if there was none.
///
/// # Errors
/// The system's error, if a rule is there and stays.
pub fn remove(folder: &Path, uuid: &str) -> io::Result<bool> {
    match fs::remove_file(file_of(folder, uuid)) {
        Err(error) if is_absent(&error) => return Ok(false),
        other => other?,
    }
    if files(folder).is_empty() {
        let _ = fs::remove_file(folder.join(COMMON));
    }
    fs::File::open(folder)?.sync_all()?;
    Ok(true)
}

/// Whether the error means that there is no such file, and no such folder.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Removes the rule of a backend for a user, and leaves a file that the daemon finds.
///
/// # Errors
/// The system's error; the disk is still sealed then.
pub fn unseal_by_hand(folder: &Path, uuid: &str, now: u64) -> io::Result<()> {
    // 1. The daemon knows it. 2. The rule is gone.
    replace_with_mode(&marker_of(folder, uuid), format!("{now}\n").as_bytes(), 0o644)?;
    remove(folder, uuid).map(drop)
}

/// The files for backends in `folder`.
#[must_use]
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_one = |name: &str| name.starts_with(PREFIX) && name.ends_with(SUFFIX);
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(is_one))
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files
}

/// What the file of a rule says of its disk.
#[must_use]
pub fn read(file: &Path) -> Option<Subject> {
    if fs::metadata(file).ok()?.len() > FILE_MAX {
        return None;
    }
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(SUBJECT))?;
    serde_json::from_str::<Subject>(line).ok().filter(|subject| is_plain(&subject.backend))
}

/// The disks that rules in `folder` seal.
#[must_use]
pub fn all(folder: &Path) -> Vec<Subject> {
    files(folder).iter().filter_map(|file| read(file)).collect()
}

/// Whether a UUID can be part of a file's name and of a rule.
fn is_plain(uuid: &str) -> bool {
    !uuid.is_empty() && uuid.len() <= 64 && uuid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// A pattern that matches `value`: plain letters stand for themselves, a run of others is matched by `*`. None if it has
/// no letter or digit to tell disks apart.
fn pattern(value: &[u8]) -> Option<String> {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || b" ._:/@+,=~-".contains(&byte);
    let mut pattern = String::new();
    for &byte in value {
        if is_kept(byte) && pattern.len() < PATTERN_MAX {
            pattern.push(char::from(byte));
        } else if !pattern.ends_with('*') {
            pattern.push('*');
        }
    }
    pattern.bytes().any(|byte| byte.is_ascii_alphanumeric()).then_some(pattern)
}

/// Whether the rules for disks make this link, below `/dev`, from what is on the disk, so that a sealed disk loses it.
fn is_link_by_content(link: &str) -> bool {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/@+,=-".contains(&byte);
    let folders = ["disk/by-uuid/", "disk/by-label/", "disk/by-partuuid/", "disk/by-partlabel/"];
    folders.iter().any(|folder| link.starts_with(folder)) && !link.contains("..") && link.bytes().all(is_kept)
}

/// A warning about a path that the cached device has, too.
#[must_use]
pub fn unstable_link(disk: &str) -> Option<String> {
    let is_one = ["/dev/disk/by-uuid/", "/dev/disk/by-label/"].iter().any(|folder| disk.starts_with(folder));
    is_one.then(|| {
        format!(
            "{disk} is a link that the cached device gets, too, so it may lead to the one or the other: stop the backend and start it by a \
             path in /dev/disk/by-id"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_backing::Partition;

    fn subject(backend: &str) -> Subject {
        Subject { backend: backend.into(), disk: "/dev/sdb".into(), ..Subject::default() }
    }

    fn lasting(attributes: &[(&'static str, &str)], port: Option<&str>) -> Lasting {
        Lasting {
            attributes: attributes.iter().map(|(name, value)| (*name, value.as_bytes().to_vec())).collect(),
            port: port.map(Into::into),
            partition: None,
            folder: PathBuf::new(),
        }
    }

    fn text_of(subject: Subject, lasting: &Lasting) -> String {
        Rule::of(subject, lasting).unwrap().text().unwrap()
    }

    #[test]
    fn a_rule_matches_by_the_mark_or_else_by_the_port() {
        let text = text_of(subject("aa-1"), &lasting(&[("device/wwid", "naa.5000c5")], Some("pci0/ata1")));
        assert!(text.contains("\nATTRS{device/wwid}==\"naa.5000c5\", GOTO=\"cbd_sealed\"\n"), "{text}");
        let text = text_of(subject("aa-1"), &lasting(&[], Some("pci0/virtio3")));
        assert!(text.contains("\nDEVPATH==\"/devices/pci0/virtio3/block/*\", GOTO"), "{text}");
        assert_eq!(Rule::of(subject("aa-1"), &lasting(&[], None)), None);
    }

    #[test]
    fn a_partition_is_sealed_alone() {
        let mut of = lasting(&[("wwid", "eui.1")], None);
        of.partition = Some(Partition { number: "2".into(), start: "2048".into() });
        let text = text_of(subject("aa-1"), &of);
        let wanted = "ENV{DEVTYPE}==\"partition\", ATTR{partition}==\"2\", ATTR{start}==\"2048\", ATTRS{wwid}==\"eui.1\", GOTO";
        assert!(text.contains(wanted), "{text}");
        of.partition = Some(Partition { number: "2\"".into(), start: "2048".into() });
        assert_eq!(Rule::of(subject("aa-1"), &of), None);
    }

    #[test]
    fn no_identity_path_or_name_injects_a_rule() {
        let bad = "S\"1\", RUN+=\"/bin/sh\n*[x]?|\\$env{A}%k'`\u{e4}\u{0}{}#end";
        let hostile = Subject {
            disk: "/dev/disk/by-partuuid/a\", RUN+=\"x".into(),
            region: "/r\nRUN+=\"x\"\\".into(),
            name: Some("n\n\"".into()),
            ..subject("aa-1")
        };
        let text = text_of(hostile.clone(), &lasting(&[("device/serial", bad)], None));
        let rules: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(rules.len(), 7, "{text}");
        assert_eq!(
            rules[2],
            "ATTRS{device/serial}==\"S*1*, RUN+=*/bin/sh*x*env*A*k*end\", GOTO=\"cbd_sealed\""
        );
        assert!(!rules.iter().any(|rule| rule.contains("CBD_SEALED_LINK")), "{text}");
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("rules.d");
        let rule = Rule::of(hostile.clone(), &lasting(&[("device/serial", bad)], None)).unwrap();
        assert!(rule.write(&folder).unwrap());
        assert_eq!(all(&folder), [hostile], "it is read as it was written");
    }

    #[test]
    fn a_mark_without_a_letter_or_digit_is_none() {
        for value in ["", "\"\"", "****", "- -"] {
            assert_eq!(Rule::of(subject("aa-1"), &lasting(&[("serial", value)], None)), None, "{value}");
        }
        let long = "7".repeat(5000);
        let text = text_of(subject("aa-1"), &lasting(&[("serial", &long)], None));
        assert!(text.len() < 3000 && text.contains("7*\""), "{} bytes", text.len());
    }

    #[test]
    fn a_link_by_which_the_daemon_finds_the_disk_stays() {
        let by_link = |disk: &str| Subject { disk: disk.into(), ..subject("aa-1") };
        let of = lasting(&[("wwid", "eui.1")], None);
        let text = text_of(by_link("/dev/disk/by-partuuid/1234-5"), &of);
        assert!(text.contains("ENV{CBD_SEALED_LINK}=\"disk/by-partuuid/1234-5\""), "{text}");
        for disk in ["/dev/sdb", "/dev/disk/by-id/x", "/dev/disk/by-uuid/../../x", "/dev/disk/by-label/$a"] {
            assert!(!text_of(by_link(disk), &of).contains("SEALED_LINK"), "{disk}");
        }
        assert!(unstable_link("/dev/disk/by-uuid/1").is_some() && unstable_link("/dev/sdb").is_none());
    }

    #[test]
    fn a_rule_is_written_once_and_the_last_one_takes_the_common_file_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("rules.d");
        let rule = |uuid: &str| Rule::of(subject(uuid), &lasting(&[("wwid", "eui.1")], None)).unwrap();
        assert!(rule("aa-1").write(&folder).unwrap());
        assert!(!rule("aa-1").write(&folder).unwrap(), "it is there already");
        assert!(rule("aa-2").write(&folder).unwrap());
        assert!(rule("../x").write(&folder).is_err());
        assert_eq!(all(&folder).len(), 2);
        assert!(remove(&folder, "aa-1").unwrap() && !remove(&folder, "aa-1").unwrap());
        assert!(folder.join(COMMON).exists());
        unseal_by_hand(&folder, "aa-2", 77).unwrap();
        let left: Vec<_> = fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.path()).collect();
        assert_eq!(left, [marker_of(&folder, "aa-2")]);
        assert_eq!(time_in_marker(&fs::read_to_string(&left[0]).unwrap()), 77);
    }

    #[test]
    fn a_file_that_is_no_rule_of_ours_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        file("12-cbd-sealed-x.rules", "# cbd-sealed: {\"backend\": \"../../etc\"}\n");
        file("12-cbd-sealed-y.rules", "# cbd-sealed: {");
        file("12-cbd-sealed-z.rules", &" ".repeat(100 << 10));
        file("60-other.rules", "");
        assert_eq!(all(dir.path()), []);
        assert_eq!(files(dir.path()).len(), 3);
    }
}
