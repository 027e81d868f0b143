//! The program over loop devices and file systems on them. As root, with `CBD_SYSTEM_TESTS`.

mod support;

use cbd_testkit::loop_devices::LoopDevice;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::{MIB, Place};

/// Whether the test can run. It says so if not.
fn is_wanted(test: &str) -> bool {
    let is_wanted = std::env::var_os("CBD_SYSTEM_TESTS").is_some();
    if !is_wanted {
        println!("not run: {test} binds loop devices; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    is_wanted
}

fn tool(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect(program);
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

/// A mounted file system, unmounted when it is dropped.
struct Mounted(String);

impl Mounted {
    fn new(device: &str, at: &str) -> Self {
        fs::create_dir(at).expect("a folder");
        tool("mount", &[device, at]);
        Self(at.to_owned())
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_disk_is_verified_while_it_is_mounted() {
    if !is_wanted("a_disk_is_verified_while_it_is_mounted") {
        return;
    }
    let place = Place::new();
    let device = LoopDevice::over(&place.file("disk", &vec![0; 16 * MIB]));
    assert_eq!(place.run(&[&device.path, "--zero"]).code, 0);
    tool("mkfs.ext4", &["-q", &device.path]);
    let mounted = Mounted::new(&device.path, &place.path("mnt"));
    let report = place.json(&[&device.path], 0);
    assert_eq!(
        (report["object"].as_str(), report["verified_bytes"].as_u64()),
        (Some("disk"), Some(16 << 20))
    );
    assert_eq!(place.run(&[&device.path, "--zero"]).code, 2);
    drop(mounted);
}

#[test]
fn sectors_that_cannot_be_read_are_found_and_what_is_behind_them_is_looked_at() {
    if !is_wanted("sectors_that_cannot_be_read_are_found_and_what_is_behind_them_is_looked_at") {
        return;
    }
    let place = Place::new();
    let path = place.file("disk", &vec![0; 4 * MIB]);
    let device = LoopDevice::over(&path);
    // The device has its size, and its file has no bytes there any more.
    File::options().write(true).open(&path).unwrap().set_len(3 * MIB as u64 - 1536).unwrap();
    let report = place.json(&[&device.path], 2);
    let findings = report["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{report}");
    let number = |name: &str| findings[0][name].as_u64().unwrap();
    assert_eq!(findings[0]["what"], "unreadable");
    assert_eq!((number("start"), number("length")), (3 * (1 << 20) - 1536, (1 << 20) + 1536));
    assert_eq!((report["complete"].as_bool(), report["done_bytes"].as_u64()), (Some(true), Some(4 << 20)));
    let text = place.run(&[&device.path]);
    assert_eq!(text.code, 2);
    assert!(text.stdout.contains("bytes 3144192 to 4194304: unreadable"), "{text:?}");
    // A range without them.
    assert_eq!(place.run(&[&device.path, "--length", "2M"]).code, 0);
}

#[test]
fn a_disk_is_compared_with_its_image() {
    if !is_wanted("a_disk_is_compared_with_its_image") {
        return;
    }
    let place = Place::new();
    let bytes: Vec<u8> = (0..3 * MIB).map(|at| (at / 512 * 7 + at) as u8).collect();
    let (disk, image) = (place.file("disk", &bytes), place.file("image", &bytes));
    let device = LoopDevice::over(&disk);
    assert_eq!(place.run(&[&device.path, "--compare", &image]).code, 0);
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[!bytes[MIB + 700]], MIB as u64 + 700).unwrap();
    let report = place.json(&[&device.path, "--compare", &image], 2);
    let expected = serde_json::json!([
        {"start": MIB + 512, "length": 512, "what": "differs", "repaired": false}
    ]);
    assert_eq!(report["findings"], expected);
    // A part of a sector, and an image that is too short.
    assert_eq!(place.run(&[&device.path, "--offset", "700"]).code, 3);
    file.set_len(MIB as u64).unwrap();
    assert_eq!(place.run(&[&device.path, "--compare", &image]).code, 3);
    assert_eq!(place.run(&[&device.path, "--compare", &image, "--length", "1M"]).code, 0);
}

#[test]
fn the_extents_of_a_file_are_looked_at_on_the_disk_and_all_kinds_are_told_apart() {
    if !is_wanted("the_extents_of_a_file_are_looked_at_on_the_disk_and_all_kinds_are_told_apart") {
        return;
    }
    let place = Place::new();
    let device = LoopDevice::over(&place.file("disk", &vec![0; 64 * MIB]));
    tool("mkfs.ext4", &["-q", "-b", "4096", "-O", "inline_data", "-I", "256", &device.path]);
    let mounted = Mounted::new(&device.path, &place.path("mnt"));
    let path = mounted.path("file");
    let mut file = File::create(&path).unwrap();
    file.write_all(&vec![5; 2 * MIB]).unwrap();
    file.sync_all().unwrap();
    tool("fallocate", &["--offset", "4M", "--length", "1M", &path]);
    file.set_len(6 * MIB as u64 + 10).unwrap();
    let report = place.json(&[&path], 0);
    let number = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(number("verified_bytes"), 2 << 20, "{report}");
    assert_eq!((number("unwritten_bytes"), number("hole_bytes")), (1 << 20, (3 << 20) + 10));
    assert_eq!((number("through_file_bytes"), number("done_bytes")), (0, (6 << 20) + 10));
    let inline = mounted.path("inline");
    fs::write(&inline, "tiny").unwrap();
    let report = place.json(&[&inline], 0);
    assert_eq!((report["inline_bytes"].as_u64(), report["verified_bytes"].as_u64()), (Some(4), Some(0)));
    assert_eq!(place.run(&[&path, "--zero", "--offset", "2M"]).code, 0);
    assert_eq!(place.run(&[&path, "--zero"]).code, 2);
}

#[test]
fn an_unreadable_place_of_a_file_is_reported_as_bytes_of_the_file() {
    if !is_wanted("an_unreadable_place_of_a_file_is_reported_as_bytes_of_the_file") {
        return;
    }
    let place = Place::new();
    let disk = place.file("disk", &vec![0; 64 * MIB]);
    let device = LoopDevice::over(&disk);
    tool("mkfs.ext4", &["-q", "-b", "4096", &device.path]);
    let mounted = Mounted::new(&device.path, &place.path("mnt"));
    let path = mounted.path("file");
    let mut file = File::create(&path).unwrap();
    // Reaches far into the disk.
    file.write_all(&vec![5; 40 * MIB]).unwrap();
    file.sync_all().unwrap();
    let length = fs::metadata(&disk).unwrap().len();
    let bytes = fs::read(&disk).unwrap();
    let last = bytes.iter().rposition(|&byte| byte == 5).unwrap() as u64;
    // The page with the last byte of the file is gone, and only that one.
    let cut = File::options().write(true).open(&disk).unwrap();
    cut.set_len(last / 4096 * 4096).unwrap();
    let report = place.json(&[&path], 2);
    cut.set_len(length).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert_eq!(findings.len(), 1, "{report}");
    assert_eq!(
        (findings[0]["length"].as_u64(), findings[0]["what"].as_str()),
        (Some(4096), Some("unreadable"))
    );
    assert_eq!(findings[0]["start"].as_u64().map(|start| start % 4096), Some(0));
    assert_eq!(place.run(&[&path]).code, 0);
}

#[test]
fn a_file_that_is_moved_and_written_meanwhile_is_not_wrong() {
    if !is_wanted("a_file_that_is_moved_and_written_meanwhile_is_not_wrong") {
        return;
    }
    let place = Place::new();
    let device = LoopDevice::over(&place.file("disk", &vec![0; 64 * MIB]));
    tool("mkfs.ext4", &["-q", "-b", "4096", &device.path]);
    let mounted = Mounted::new(&device.path, &place.path("mnt"));
    let path = mounted.path("file");
    fs::write(&path, vec![5; 16 * MIB]).unwrap();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = File::options().write(true).open(&path).unwrap();
            for round in 0.. {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let offset = format!("{}", round % 16 * MIB);
                tool("fallocate", &["--punch-hole", "--offset", &offset, "--length", "1M", &path]);
                file.write_all_at(&vec![6; MIB], (round % 16 * MIB) as u64).unwrap();
            }
        });
        let (mut runs, mut changed, begun) = (0, 0, Instant::now());
        while (runs < 20 || changed == 0) && begun.elapsed() < Duration::from_secs(60) {
            let ran = place.run(&[&path, "--json"]);
            let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap_or_default();
            if ran.code != 0 || report["found"] != 0 || report["complete"] != true {
                ends.store(true, Ordering::Relaxed);
                panic!("{ran:?}");
            }
            // More than there is: bytes were looked at again.
            let bytes = |name: &str| report[name].as_u64().unwrap_or(0);
            let looked = bytes("verified_bytes") + bytes("hole_bytes") + bytes("changed_bytes");
            (runs, changed) = (runs + 1, changed + u64::from(looked > 16 << 20));
        }
        ends.store(true, Ordering::Relaxed);
        assert!(changed > 0, "no extent moved while it was looked at");
    });
}
