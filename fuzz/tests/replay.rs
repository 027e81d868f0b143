//! Replays the inputs that the fuzzer has kept, on the compiler that users have: inputs that reached
//! something new still pass, and those that once broke something no longer do.

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
fn recovery_survives_the_corpus() {
    replay("recovery");
}

#[test]
fn decoders_survive_the_corpus() {
    replay("decoders");
}

#[test]
fn the_nbd_server_survives_the_corpus() {
    replay("nbd");
}

#[test]
fn virtqueues_survive_the_corpus() {
    replay("virtqueue");
}

#[test]
fn tables_of_guest_memory_survive_the_corpus() {
    replay("guest_memory");
}

#[test]
fn fuse_survives_the_corpus() {
    replay("fuse");
}

#[test]
fn the_control_socket_survives_the_corpus() {
    replay("control");
}

#[test]
fn the_reader_of_dm_pcache_survives_the_corpus() {
    replay("pcache");
}

#[test]
fn channels_survive_the_corpus() {
    replay("channels");
}

#[test]
fn traces_of_requests_survive_the_corpus() {
    replay("traces");
}
