//! Everything that the fuzzer has kept, on the compiler that users have: what reached something new still ends well, and what
//! once broke something no longer does.

use cbd_fuzz::{Target, store, target};
use cbd_sim::Watchdog;
use std::time::Duration;

/// One input takes milliseconds.
const LIMIT: Duration = Duration::from_secs(60);

fn replay(name: &str) {
    let target = target(name).expect("it is a target");
    for directory in store::directories(name) {
        for file in store::files(&directory).expect("it can be listed") {
            let input = std::fs::read(&file).expect("it can be read");
            run(target, &input, &file.display().to_string());
        }
    }
    for (number, seed) in (target.seeds)().iter().enumerate() {
        run(target, seed, &format!("seed {number} of {name}"));
    }
}

fn run(target: &Target, input: &[u8], what: &str) {
    println!("{what}");
    let _watchdog = Watchdog::new(LIMIT, what);
    (target.run)(input);
}

#[test]
fn recovery_survives_what_was_found() {
    replay("recovery");
}

#[test]
fn decoders_survive_what_was_found() {
    replay("decoders");
}

#[test]
fn the_nbd_server_survives_what_was_found() {
    replay("nbd");
}

#[test]
fn virtqueues_survive_what_was_found() {
    replay("virtqueue");
}

#[test]
fn tables_of_guest_memory_survive_what_was_found() {
    replay("guest_memory");
}

#[test]
fn fuse_survives_what_was_found() {
    replay("fuse");
}

#[test]
fn the_control_socket_survives_what_was_found() {
    replay("control");
}

#[test]
fn the_reader_of_dm_pcache_survives_what_was_found() {
    replay("pcache");
}
