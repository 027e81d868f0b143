//! Links by name and UUID in a folder, and the properties for udev.

use super::*;
use cbd_types::Name;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        fs::create_dir(folder.dev()).unwrap();
        folder
    }

    fn dev(&self) -> PathBuf {
        self.0.path().join("dev")
    }

    fn device(&self, name: &str) {
        symlink("/dev/null", self.dev().join(name)).unwrap();
    }

    fn labels(&self, device: &str, name: Option<&str>) -> Labels {
        let blkdev = 4;
        let name = name.map(|name| Name::new(name).unwrap());
        let described = Described { transport: 0, backend: 3, blkdev, name, uuid: Some([7; 16]) };
        let mut labels = Labels {
            dev_dir: self.dev(),
            properties: self.0.path().join("run/udev").join(device),
            device: device.to_owned(),
            described,
            problem: None,
        };
        labels.problem = labels.record().err().map(|error| error.line());
        labels.publish();
        labels
    }

    fn properties(&self, device: &str) -> Option<String> {
        fs::read_to_string(self.0.path().join("run/udev").join(device)).ok()
    }

    /// The links by name, each with its target.
    fn by_name(&self) -> Vec<(String, String)> {
        self.links(BY_NAME)
    }

    fn links(&self, kind: &str) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.dev().join("cbd").join(kind)).into_iter().flatten().flatten();
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let mut links: Vec<_> = entries
            .map(|entry| {
                (text(entry.file_name().into()), fs::read_link(entry.path()).map_or("file".into(), text))
            })
            .collect();
        links.sort();
        links
    }
}

fn link(name: &str, device: &str) -> (String, String) {
    (name.to_owned(), format!("../../{device}"))
}

#[test]
fn a_device_beside_the_one_with_the_uuid_has_a_link_by_its_own_name_only() {
    let folder = Folder::new();
    folder.device("cbd4");
    let mut labels = folder.labels("cbd4", Some("backup"));
    labels.described.uuid = None;
    labels.problem = labels.record().err().map(|error| error.line());
    labels.publish();
    assert_eq!(labels.problem(), None);
    assert_eq!((folder.by_name(), folder.links(BY_UUID)), (vec![link("backup", "cbd4")], vec![]));
    let properties = folder.properties("cbd4").unwrap();
    assert!(properties.contains("CBD_NAME=backup\n") && !properties.contains("CBD_UUID"), "{properties}");
}

#[test]
fn a_device_has_links_by_name_and_uuid_that_lead_to_it_and_go_with_it() {
    let folder = Folder::new();
    folder.device("cbd4");
    let labels = folder.labels("cbd4", Some("db-data"));
    assert_eq!(labels.problem(), None);
    assert_eq!(folder.by_name(), [link("db-data", "cbd4")]);
    assert_eq!(folder.links(BY_UUID), [link("07070707-0707-0707-0707-070707070707", "cbd4")]);
    let path = folder.dev().join("cbd/by-name/db-data");
    assert_eq!(fs::canonicalize(path).unwrap(), Path::new("/dev/null"));
    // A device that another process continues keeps its labels.
    drop(labels);
    assert_eq!(folder.by_name().len(), 1);
    assert!(folder.properties("cbd4").is_some());
    let labels = folder.labels("cbd4", Some("db-data"));
    fs::remove_file(folder.dev().join("cbd4")).unwrap();
    drop(labels);
    assert!(folder.by_name().is_empty() && folder.links(BY_UUID).is_empty());
    assert_eq!(folder.properties("cbd4"), None);
}

#[test]
fn a_rename_moves_the_link_itself() {
    use std::os::unix::fs::MetadataExt;
    let folder = Folder::new();
    folder.device("cbd4");
    let mut labels = folder.labels("cbd4", Some("a"));
    let inode = |name: &str| fs::symlink_metadata(folder.dev().join("cbd/by-name").join(name)).unwrap().ino();
    let before = inode("a");
    labels.rename(Some(&Name::new("b").unwrap()));
    assert_eq!(folder.by_name(), [link("b", "cbd4")]);
    assert_eq!(inode("b"), before, "it is the same link");
    assert!(folder.properties("cbd4").unwrap().contains("CBD_NAME=b\n"));
    labels.rename(None);
    assert!(folder.by_name().is_empty());
    assert!(!folder.properties("cbd4").unwrap().contains("CBD_NAME"));
    assert_eq!(folder.links(BY_UUID).len(), 1);
}

#[test]
fn what_others_have_put_there_is_never_replaced_and_said() {
    for (name, make) in [
        ("file", (|path| fs::write(path, "").unwrap()) as fn(&Path)),
        ("foreign", |path| symlink("/dev/null", path).unwrap()),
        ("dangling", |path| symlink("../../sda", path).unwrap()),
        ("outside", |path| symlink("../../../dev/cbd9", path).unwrap()),
        ("other", |path| symlink("../../cbd9", path).unwrap()),
    ] {
        let folder = Folder::new();
        folder.device("cbd4");
        folder.device("cbd9");
        fs::create_dir_all(folder.dev().join("cbd/by-name")).unwrap();
        make(&folder.dev().join("cbd/by-name/db"));
        let before = folder.by_name();
        let mut labels = folder.labels("cbd4", Some("db"));
        assert!(labels.problem().unwrap().contains("db is no link to cbd4: it exists already"), "{name}");
        assert_eq!(folder.by_name(), before, "{name}");
        // Under another name it is found, and the foreign one stays.
        labels.rename(Some(&Name::new("free").unwrap()));
        assert_eq!(labels.problem(), None, "{name}");
        assert_eq!(folder.by_name(), [before, vec![link("free", "cbd4")]].concat(), "{name}");
        // A rename to a taken name leaves no link under the former one.
        labels.rename(Some(&Name::new("db").unwrap()));
        assert!(labels.problem().is_some() && folder.by_name().len() == 1, "{name}");
        fs::remove_file(folder.dev().join("cbd4")).unwrap();
        drop(labels);
        assert_eq!(folder.by_name().len(), 1, "{name}: only the own ones are removed");
    }
}

#[test]
fn the_link_of_a_device_that_is_gone_is_replaced() {
    let folder = Folder::new();
    folder.device("cbd4");
    fs::create_dir_all(folder.dev().join("cbd/by-name")).unwrap();
    symlink("../../cbd9", folder.dev().join("cbd/by-name/db")).unwrap();
    let labels = folder.labels("cbd4", Some("db"));
    assert_eq!(labels.problem(), None);
    assert_eq!(folder.by_name(), [link("db", "cbd4")]);
}

#[test]
fn the_properties_are_lines_that_udev_reads() {
    let folder = Folder::new();
    let _labels = folder.labels("cbd1-4", Some("db-data"));
    let text = folder.properties("cbd1-4").unwrap();
    let expected = "CBD_DEVICE=cbd1-4\nCBD_NAME=db-data\nCBD_LINK=db-data\nCBD_UUID=07070707-0707-0707-0707-070707070707\nCBD_TRANSPORT=0\n\
         CBD_BACKEND=3\nCBD_BLKDEV=4\n";
    assert_eq!(text, expected);
}

#[test]
fn names_of_other_transports_do_not_collide() {
    let name = |transport, name: &str| {
        let name = Some(Name::new(name).unwrap());
        Described { transport, backend: 0, blkdev: 0, name, uuid: Some([0; 16]) }.link_name().unwrap()
    };
    assert_eq!(name(0, "db"), "db");
    assert_eq!(name(1, "db"), "1:db");
    assert!(Name::new("1:db").is_err(), "no name on transport 0 is that");
}

#[test]
fn only_names_of_devices_are_devices() {
    for device in ["cbd0", "cbd12", "cbd1-2"] {
        assert!(is_device(device), "{device}");
    }
    for other in ["cbd", "cbd-1", "cbd1-", "cbd1-2-3", "cbdx", "sda", "", "cbd1/2"] {
        assert!(!is_device(other), "{other}");
    }
}

/// A rule that relies on a property or a file of another name would never apply, without an error.
#[test]
fn the_rules_for_udev_use_the_files_and_the_properties_that_are_written() {
    let rules = include_str!("../../../../../packaging/60-cbd.rules");
    let written =
        Described { transport: 1, backend: 3, blkdev: 4, name: Name::new("db").ok(), uuid: Some([7; 16]) };
    let written = written.properties("cbd1-4");
    let keys: Vec<&str> = written.lines().filter_map(|line| line.split('=').next()).collect();
    let mut used = 0;
    for line in rules.lines().filter(|line| !line.starts_with('#')) {
        assert_eq!(line.matches('"').count() % 2, 0, "{line}");
        for word in line.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_') {
            if word.starts_with("CBD_") {
                used += 1;
                assert!(keys.contains(&word), "{word} is not written");
            }
        }
    }
    assert!(used >= 4, "{rules}");
    let imported = format!("IMPORT{{file}}=\"/run/cbd/{UDEV}/%c\"");
    assert_eq!(rules.matches(&imported).count(), 2, "of a loop device and of a ublk device");
    assert!(rules.contains(&format!("/dev/cbd/{BY_NAME}/$env{{CBD_LINK}}")));
    assert!(rules.contains(&format!("/dev/cbd/{BY_UUID}/$env{{CBD_UUID}}")));
}
