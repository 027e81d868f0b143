//! `set cache_mode` waits until the mode is in force, and says so if that does not happen.

mod support;

use serde_json::Value;
use std::time::Duration;
use support::{Fixture, MIB, Ran, until};

/// A daemon whose cache holds 4 MiB of dirty data, for a disk that needs seconds to take it.
fn slow_to_drain(decorate: &str) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(decorate.to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 16 * MIB);
    fixture.start_backend(&disk);
    let mut client = fixture.client();
    for piece in 0..64 {
        client.write(piece * 65536, &[1; 65536], false).expect("the cache takes it");
    }
    client.flush().expect("flushed");
    fixture
}

/// The result of a change to writethrough, beside which `beside` runs once it has begun.
fn change_beside(fixture: &Fixture, beside: impl FnOnce()) -> Ran {
    std::thread::scope(|scope| {
        let change = scope.spawn(|| fixture.run(&["set", "-b", "0", "cache_mode=writethrough"]));
        until("the change has begun", || fixture.cache()["is_changing_mode"] == true);
        beside();
        change.join().expect("no panic")
    })
}

#[test]
fn a_change_of_the_mode_ends_when_the_disk_has_everything() {
    let fixture = slow_to_drain("throttle:mib_per_s=2");
    let ran = fixture.run(&["set", "-b", "0", "cache_mode=writethrough"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stderr.contains("of dirty data") && ran.stderr.contains("writethrough"), "{ran:?}");
    let cache = fixture.cache();
    assert_eq!(
        (&cache["is_changing_mode"], &cache["cache_mode"], &cache["dirty_bytes"]),
        (&Value::from(false), &Value::from("writethrough"), &Value::from(0))
    );
    let disk = std::fs::read(fixture.path("disk")).expect("the disk");
    assert!(disk[..4 * MIB as usize].iter().all(|byte| *byte == 1));
}

#[test]
fn without_waiting_a_change_continues_in_the_daemon() {
    let fixture = slow_to_drain("throttle:mib_per_s=2");
    fixture.ok(&["set", "-b", "0", "--no-wait", "cache_mode=writethrough"]);
    assert_eq!(fixture.cache()["is_changing_mode"], true);
    until("the mode is in force", || fixture.cache()["is_changing_mode"] == false);
    assert_eq!(fixture.cache()["dirty_bytes"], 0);
}

#[test]
fn a_change_that_another_command_replaces_is_an_error() {
    let fixture = slow_to_drain("throttle:mib_per_s=1");
    let ran = change_beside(&fixture, || {
        fixture.ok(&["set", "-b", "0", "cache_mode=writeback"]);
    });
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("another command has set cache_mode=writeback"), "{ran:?}");
}

#[test]
fn a_change_whose_backend_is_stopped_is_an_error() {
    let fixture = slow_to_drain("throttle:mib_per_s=1");
    let ran = change_beside(&fixture, || {
        fixture.ok(&["dev-stop", "--dev", "0", "--force"]);
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("backend 0 is not served any more"), "{ran:?}");
}

#[test]
fn a_change_for_which_the_disk_fails_is_an_error_and_what_is_dirty_stays() {
    let fixture = slow_to_drain("fault:op=write");
    let ran = fixture.run(&["set", "-b", "0", "cache_mode=writethrough"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("the backing device fails"), "{ran:?}");
    let cache = fixture.cache();
    assert_eq!(
        (&cache["is_changing_mode"], &cache["dirty_bytes"]),
        (&Value::from(true), &Value::from(4 * MIB))
    );
    fixture.ok(&["set", "-b", "0", "cache_mode=writeback"]);
    assert_eq!(fixture.cache()["is_changing_mode"], false);
}

#[test]
fn a_change_that_a_parked_range_delays_is_an_error_that_says_so() {
    let fixture = slow_to_drain("fault:op=write,range=0-65536");
    fixture.ok(&["set", "-b", "0", "on_write_error=park", "write_error_after_s=0"]);
    until("a parked range", || fixture.cache()["parked"].as_array().is_some_and(|ranges| !ranges.is_empty()));
    let ran = fixture.run(&["set", "-b", "0", "cache_mode=writethrough"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("parked or quarantined"), "{ran:?}");
    assert_eq!(fixture.cache()["is_changing_mode"], true);
}

#[test]
fn sigterm_ends_the_daemon_while_writes_that_went_past_the_cache_wait_for_the_disk() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write,how=stall".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 16 * MIB);
    fixture.start_backend(&disk);
    fixture.ok(&["set", "-b", "0", "cache_mode=writearound"]);
    let mut client = fixture.client();
    let writing = std::thread::spawn(move || client.write(0, &[1; 4096], false));
    // No status shows that the disk has the write; without it the test is easier, and does not fail.
    std::thread::sleep(Duration::from_millis(500));
    let took = fixture.terminate_with_a_disk_that_hangs();
    assert!(took < Duration::from_secs(60), "{took:?}");
    writing.join().expect("no panic").expect_err("the daemon is gone");
}
