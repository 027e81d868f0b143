//! Files and metadata of a real ext4 that are pinned: they stay in a cache that is filled with other data, also after the daemon
//! was killed. What cannot be pinned is refused with one line that says why.

mod support;

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, text_of, tool};

const TIMEOUT: Duration = Duration::from_secs(200);

fn write_file(path: &Path, bytes: u64, salt: u64) {
    let bytes: Vec<u8> = (0..bytes).map(|at| (at / 4096 * 31 + at * salt) as u8).collect();
    std::fs::write(path, bytes).expect("a file");
    File::open(path).and_then(|file| file.sync_all()).expect("synced");
}

fn drop_page_cache() {
    tool("sh", &["-c", "echo 3 > /proc/sys/vm/drop_caches"]);
}

/// Bytes that are pinned and bytes of them that are in the cache, for each pin by its kind.
fn listed(fixture: &Fixture, kind: &str) -> Vec<(u64, u64, String)> {
    let list = fixture.json(&["pin", "-b", "0", "--list", "--json"]);
    let pins = list["pins"].as_array().expect("a list").iter().filter(|pin| pin["kind"] == kind);
    let number = |pin: &serde_json::Value, name: &str| pin[name].as_u64().expect("a number");
    pins.map(|pin| {
        let name = pin["name"].as_str().expect("a name").to_owned();
        (number(pin, "bytes"), number(pin, "cached_bytes"), name)
    })
    .collect()
}

#[test]
fn pinned_files_and_metadata_of_ext4_stay_in_the_cache_also_after_a_kill() {
    let name = "pinned_files_and_metadata_of_ext4_stay_in_the_cache_also_after_a_kill";
    in_sandbox(name, TIMEOUT, |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 256 * MIB);
        let device = fixture.start_block_device(&disk, "40M");
        tool("mkfs.ext4", &["-q", "-b", "4096", "-N", "4096", &device]);
        let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
        let (index, other) = (mounted.path("index.ibd"), mounted.path("other"));
        write_file(&index, 6 * MIB, 7);
        // Behind a link: the pin has the name of the file itself.
        let link = mounted.path("link");
        std::os::unix::fs::symlink(&index, &link).expect("a link");
        assert_eq!(fixture.ok(&["pin", "-b", "0", &text_of(&link)]), "");
        fixture.ok(&["pin", "-b", "0", "-m", &text_of(&mounted.path(""))]);
        fixture.ok(&["pin", "-b", "0", "--range", "0+1M"]);
        let pins = listed(&fixture, "file");
        assert_eq!(pins, [(6 * MIB, 6 * MIB, text_of(&index))]);
        let metadata = listed(&fixture, "metadata");
        assert!(metadata[0].0 > 64 << 10, "inode tables and bitmaps: {metadata:?}");
        let text = fixture.ok(&["pin", "-b", "0", "-l"]);
        assert!(text.contains("index.ibd") && text.contains("100 %"), "{text}");
        let status = fixture.ok(&["status", "-b", "0"]);
        assert!(status.contains("pinned") && status.contains("pin -b 0 --list"), "{status}");
        for round in 0..3 {
            // Several times the cache, written and read.
            write_file(&other, 100 * MIB, round);
            drop_page_cache();
            tool("dd", &[&format!("if={}", text_of(&other)), "of=/dev/null", "bs=1M"]);
            fixture.ok(&["drain", "-b", "0"]);
            assert_eq!(listed(&fixture, "file"), [(6 * MIB, 6 * MIB, text_of(&index))], "round {round}");
            if round == 1 {
                fixture.kill();
                fixture.start();
            }
        }
        assert!(fixture.ok(&["status", "-b", "0"]).contains("pinned"));
        // Another one ends what is left of the first.
        fixture.ok(&["unpin", "-b", "0", &text_of(&index), "--range", "0+1M"]);
        assert_eq!(listed(&fixture, "file"), []);
        fixture.ok(&["unpin", "-b", "0", "--all"]);
        assert_eq!(fixture.json(&["pin", "-b", "0", "--list", "--json"])["pinned_bytes"], 0);
        drop(mounted);
    });
}

#[test]
fn what_cannot_be_pinned_is_refused_with_the_reason() {
    in_sandbox("what_cannot_be_pinned_is_refused_with_the_reason", TIMEOUT, |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 256 * MIB);
        let device = fixture.start_block_device(&disk, "40M");
        tool("mkfs.ext4", &["-q", "-O", "inline_data", "-I", "256", &device]);
        let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
        let refused = |what: &Path, arguments: &[&str]| {
            let ran = fixture.run(&[&["pin", "-b", "0"], arguments, &[&text_of(what)]].concat());
            assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{ran:?}");
            assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
            ran.stderr
        };
        let sparse = mounted.path("sparse");
        let mut file = File::create(&sparse).expect("a file");
        file.seek(SeekFrom::Start(MIB)).and_then(|_| file.write_all(&[1; 8192])).expect("written");
        assert!(refused(&sparse, &[]).contains("has a hole, bytes 0 to 1048576"));
        let inline = mounted.path("inline");
        std::fs::write(&inline, "tiny").expect("a file");
        assert!(refused(&inline, &[]).contains("inline"));
        let empty = mounted.path("empty");
        File::create(&empty).expect("a file");
        assert!(refused(&empty, &[]).contains("is empty"));
        assert!(refused(&mounted.path(""), &[]).contains("is no file"));
        assert!(refused(&mounted.path("missing"), &[]).contains("cannot be opened"));
        // No process writes to it: to open it would take forever.
        let fifo = mounted.path("fifo");
        tool("mkfifo", &[&text_of(&fifo)]);
        assert!(refused(&fifo, &[]).contains("is no file"));
        assert!(refused(&fifo, &["--metadata"]).contains("is no mount point"));
        assert!(refused(&mounted.path("no\nfile"), &[]).contains("no\\nfile cannot be opened"));
        // On another device.
        let elsewhere = fixture.path("elsewhere");
        write_file(&elsewhere, 8192, 1);
        for arguments in [&[][..], &["--metadata"]] {
            let text = refused(&elsewhere, arguments);
            assert!(text.contains(" and not on ") && text.contains(&device), "{text}");
        }
        // Too much, and nothing is pinned by a command that fails.
        let (small, large) = (mounted.path("small"), mounted.path("large"));
        write_file(&small, 64 << 10, 1);
        write_file(&large, 30 * MIB, 1);
        let text = refused(&large, &[&text_of(&small)]);
        assert!(text.contains("do not fit") && text.contains("bytes)"), "{text}");
        assert_eq!(listed(&fixture, "file"), []);
        // A cache or a share that is too small for what is pinned.
        let middle = mounted.path("middle");
        write_file(&middle, 15 * MIB, 1);
        fixture.ok(&["pin", "-b", "0", &text_of(&middle)]);
        for command in [&["cache-resize", "-b", "0", "-c", "24M"][..], &["set", "-b", "0", "pin_percent=10"]]
        {
            let ran = fixture.run(command);
            assert!(ran.code == 1 && ran.stderr.contains("do not fit"), "{ran:?}");
        }
        let ran = fixture.run(&["unpin", "-b", "0", &text_of(&small)]);
        assert!(ran.code == 1 && ran.stderr.contains("has no pin of the file"), "{ran:?}");
        let ran = fixture.run(&["pin", "-b", "0", "--range", "300M+4K"]);
        assert!(ran.code == 1 && ran.stderr.contains("the device has 268435456 bytes"), "{ran:?}");
        for arguments in [&["pin", "-b", "0"][..], &["unpin", "-b", "0"], &["pin", "-b", "0", "-l", "x"]] {
            assert_eq!(fixture.run(arguments).code, 2, "{arguments:?}");
        }
        drop(mounted);
    });
}

#[test]
fn shared_data_of_xfs_is_no_metadata_and_what_a_link_replaced_is_not_pinned_any_more() {
    let name = "shared_data_of_xfs_is_no_metadata_and_what_a_link_replaced_is_not_pinned_any_more";
    in_sandbox(name, TIMEOUT, |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 512 * MIB);
        let device = fixture.start_block_device(&disk, "40M");
        tool("mkfs.xfs", &["-q", "-m", "rmapbt=1,reflink=1", &device]);
        let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
        let (one, other) = (mounted.path("one"), mounted.path("two\nlines"));
        write_file(&one, 4 * MIB, 7);
        tool("cp", &["--reflink=always", &text_of(&one), &text_of(&other)]);
        tool("sync", &["-f", &text_of(&one)]);
        fixture.ok(&[
            "pin",
            "-b",
            "0",
            "--metadata",
            &text_of(&mounted.path("")),
            &text_of(&one),
            &text_of(&other),
        ]);
        let metadata = listed(&fixture, "metadata")[0].0;
        assert!(metadata > 0 && metadata < MIB, "{metadata} bytes, and the files have {}", 4 * MIB);
        // What both files have counts once.
        let list = fixture.json(&["pin", "-b", "0", "--list", "--json"]);
        assert_eq!(list["pinned_bytes"], metadata + 4 * MIB);
        let text = fixture.ok(&["pin", "-b", "0", "--list"]);
        assert!(text.contains("two\\nlines\n") && text.lines().count() == 5, "{text}");
        // The pin has the name of the file that was there, and the link leads to another one.
        std::fs::remove_file(&one).and_then(|()| std::os::unix::fs::symlink(&other, &one)).expect("a link");
        fixture.ok(&["unpin", "-b", "0", &text_of(&one)]);
        assert_eq!(listed(&fixture, "file"), [(4 * MIB, 4 * MIB, text_of(&other))]);
        drop(mounted);
        // Without the map of owners the file system does not know.
        tool("mkfs.xfs", &["-q", "-f", "-m", "rmapbt=0", &device]);
        let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
        let ran = fixture.run(&["pin", "-b", "0", "--metadata", &text_of(&mounted.path(""))]);
        assert!(ran.code == 1 && ran.stderr.contains("rmapbt=1"), "{ran:?}");
        drop(mounted);
    });
}
