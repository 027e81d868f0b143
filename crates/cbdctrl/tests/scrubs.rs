//! A scrub beside fio, with faults in the disk and in the region: one pass finds all of them, repairs those that have a
//! good copy, and changes nothing else.

mod support;

use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::region::RegionFile;
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, until, wait};

const TIMEOUT: Duration = Duration::from_secs(100);
const BLOCK: u64 = 4096;
const SIZE: u64 = 48 * MIB;
/// What clients wrote before the load: 0 to this. All of it is cached and on the disk.
const WRITTEN: u64 = 4 * MIB;
/// What clients have read into the cache and never written.
const FILLED: [u64; 2] = [4 * MIB, 5 * MIB];
/// Where fio writes and verifies.
const LOAD: [u64; 2] = [8 * MIB, 16 * MIB];
/// Blocks that the disk cannot read: one that the cache has, and one that it has not.
const UNREADABLE: [u64; 2] = [64 * BLOCK, 32 * MIB];

/// The byte of a block, before the load and after the repair.
fn value(at: u64) -> u8 {
    (at / BLOCK % 250) as u8 + 1
}

fn contents(from: u64, to: u64) -> Vec<u8> {
    (from..to).map(value).collect()
}

struct Scene {
    fixture: Fixture,
    disk: String,
}

impl Scene {
    fn new(folder: &std::path::Path) -> Self {
        let mut fixture = Fixture::under(folder);
        let rules =
            UNREADABLE.map(|at| format!("fault:op=read,op=verify,op=compare,range={at}-{}", at + BLOCK));
        fixture.decorate = Some(rules.join(";"));
        fixture.start();
        fixture.register("96M");
        let disk = fixture.text("disk");
        std::fs::write(&disk, contents(0, SIZE)).expect("a disk");
        let export = fixture.nbd();
        fixture.ok(&["backend-start", "-p", &disk, "-c", "24M", "--handlers", "1", "-D", "-e", &export]);
        fixture.ok(&["set", "-b", "0", "read_fill=all", "readahead=off", "sequential_write_cutoff=off"]);
        let mut client = fixture.client();
        for at in (0..WRITTEN).step_by(65536) {
            client.write(at, &contents(at, at + 65536), false).expect("written");
        }
        client.flush().expect("flushed");
        for at in (FILLED[0]..FILLED[1]).step_by(65536) {
            client.read(at, &mut vec![0; 65536]).expect("read");
        }
        fixture.ok(&["drain", "-b", "0"]);
        Self { fixture, disk }
    }

    fn load(&self) -> Child {
        let mut command = Command::new("fio");
        command.args(["--name=load", "--thread", "--ioengine=nbd", &format!("--uri={}", self.fixture.uri())]);
        command.args(["--rw=randrw", "--bs=4k", "--iodepth=4", "--verify=crc32c", "--verify_backlog=64"]);
        command.args(["--time_based", "--runtime=20", "--rate=600k", "--verify_state_save=0"]);
        command.args([format!("--offset={}", LOAD[0]), format!("--size={}", LOAD[1] - LOAD[0])]);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        support::child::dies_with_the_test(&mut command);
        let output = File::create(self.fixture.path("fio.out")).expect("a file");
        let error = output.try_clone().expect("a descriptor");
        command.stdin(Stdio::null()).stdout(output).stderr(error).spawn().expect("fio")
    }

    /// Changes blocks of the disk without CBD.
    fn scribble(&self, at: u64) {
        let file = File::options().write(true).open(&self.disk).expect("the disk");
        file.write_all_at(&[0xdd; BLOCK as usize], at).and_then(|()| file.sync_all()).expect("written");
    }

    fn scrub(&self, arguments: &[&str], code: i32) -> Value {
        let all = [&["scrub", "-b", "0", "--wait", "--json"], arguments].concat();
        let ran = self.fixture.run(&all);
        assert_eq!(ran.code, code, "{ran:?}");
        let info: Value = serde_json::from_str(&ran.stdout).expect("JSON");
        info["last"]["results"].clone()
    }
}

/// What a pass has found: the first byte, the length, the flaw, and whether it is repaired.
fn findings(results: &Value) -> Vec<(u64, u64, String, bool)> {
    let list = results["findings"].as_array().expect("a list");
    let number = |finding: &Value, name: &str| finding[name].as_u64().expect("a number");
    list.iter()
        .map(|it| {
            let flaw = it["flaw"].as_str().expect("a name").to_owned();
            (number(it, "start"), number(it, "length"), flaw, it["repaired"] == true)
        })
        .collect()
}

#[test]
fn one_pass_beside_fio_finds_all_faults_and_repairs_what_has_a_good_copy() {
    let name = "one_pass_beside_fio_finds_all_faults_and_repairs_what_has_a_good_copy";
    in_sandbox(name, TIMEOUT, |folder| {
        let scene = Scene::new(folder);
        let fixture = &scene.fixture;
        let mut fio = scene.load();
        until("the load", || fixture.cache()["dirty_bytes"].as_u64() > Some(0));
        // Repaired blocks are dirty from then on: they stay so until the results are known.
        fixture.ok(&["set", "-b", "0", "writeback=paused:60s"]);
        let dirty = 20 * BLOCK;
        fixture.client().write(dirty, &contents(dirty, dirty + BLOCK), true).expect("written");
        let region = RegionFile::open(&fixture.region());
        let mut expected = Vec::new();
        let mut expect =
            |at: u64, flaw: &str, repaired| expected.push((at, BLOCK, flaw.to_owned(), repaired));
        for block in [1, 5, 9] {
            region.damage_data(block * BLOCK);
            expect(block * BLOCK, "cache_damaged", true);
        }
        for block in [11, 13] {
            scene.scribble(block * BLOCK);
            expect(block * BLOCK, "backing_differs", true);
        }
        let (both, filled) = (16 * BLOCK, FILLED[0] + 7 * BLOCK);
        region.damage_data(both);
        scene.scribble(both);
        expect(both, "both_damaged", false);
        region.damage_data(dirty);
        expect(dirty, "dirty_damaged", false);
        expect(UNREADABLE[0], "backing_unreadable", true);
        scene.scribble(filled);
        expect(filled, "backing_changed", false);
        expect(UNREADABLE[1], "unreadable", false);
        let results = scene.scrub(&["--repair"], 2);
        assert_eq!(findings(&results), expected);
        assert!(fio.try_wait().expect("a child").is_none(), "fio had ended");
        assert_eq!(results["verified_bytes"], SIZE);
        assert!(results["error"].is_null(), "{results}");

        // fio sees nothing of it.
        let ended = wait(&mut fio, Duration::from_secs(30)).expect("fio ends");
        let output = std::fs::read_to_string(fixture.path("fio.out")).unwrap_or_default();
        assert!(ended.success() && output.contains("err= 0"), "{output}");
        fixture.ok(&["set", "-b", "0", "writeback=on"]);
        until("what was repaired on the disk", || fixture.cache()["dirty_bytes"] == 0);

        // A second pass finds what could not be repaired, and nothing else.
        let left: Vec<_> = findings(&scene.scrub(&[], 2)).into_iter().map(|it| (it.0, it.2)).collect();
        let quarantined = "quarantined".to_owned();
        let still = [
            (both, quarantined.clone()),
            (dirty, quarantined),
            (UNREADABLE[0], "backing_unreadable".to_owned()),
            (filled, "backing_changed".to_owned()),
            (UNREADABLE[1], "unreadable".to_owned()),
        ];
        assert_eq!(left, still);

        // Clients read what they wrote, or an error; the disk has it where it was repaired.
        let mut client = fixture.client();
        let disk = std::fs::read(&scene.disk).expect("the disk");
        for at in (0..WRITTEN).chain(FILLED[0]..FILLED[1]).step_by(BLOCK as usize) {
            let mut read = [0; BLOCK as usize];
            let result = client.read(at, &mut read);
            if [both, dirty].contains(&at) {
                assert_eq!(result.expect_err("it is lost").errno(), 5, "at {at}");
                continue;
            }
            assert!(result.is_ok() && read == [value(at); BLOCK as usize], "read at {at}: {result:?}");
            let on_disk = &disk[at as usize..(at + BLOCK) as usize];
            assert!(at == filled || on_disk == [value(at); BLOCK as usize], "on the disk at {at}");
        }
        // Elsewhere the disk is as it was.
        let outside = |at: &u64| *at >= LOAD[1] || (FILLED[1]..LOAD[0]).contains(at);
        let changed = (0..SIZE).filter(outside).find(|at| disk[*at as usize] != value(*at));
        assert_eq!(changed, None);
    });
}

#[test]
fn a_disk_that_hangs_holds_up_neither_the_commands_about_its_scrub_nor_the_end_of_the_daemon() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(format!("fault:op=read,op=verify,range={}-{SIZE},how=stall", 32 * MIB));
    fixture.start();
    fixture.register("64M");
    fixture.start_backend(&fixture.disk("disk", SIZE));
    let state = || fixture.json(&["scrub", "-b", "0", "--status", "--json"]);
    let in_time = |arguments: &[&str]| {
        let begun = Instant::now();
        fixture.ok(&[&["scrub", "-b", "0"], arguments].concat());
        assert!(begun.elapsed() < Duration::from_secs(10), "{arguments:?} took {:?}", begun.elapsed());
    };
    in_time(&[]);
    until("the range that hangs", || state()["position"].as_u64() >= Some(31 * MIB));
    assert_eq!(state()["state"], "running");
    in_time(&["--pause"]);
    until("a pause", || state()["state"] == "paused");
    in_time(&["--resume"]);
    in_time(&["--stop"]);
    assert_eq!(state()["state"], "idle");
    assert!(state()["last"].is_null(), "nothing was looked at to its end");
    // Clients of what does not hang are served meanwhile.
    in_time(&["--rate", "1G"]);
    fixture.client().write(MIB, &[5; 4096], true).expect("written");
    let took = fixture.terminate_with_a_disk_that_hangs();
    assert!(took < Duration::from_secs(30), "{took:?}");
}
