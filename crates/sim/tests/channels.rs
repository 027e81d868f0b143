//! A channel between two hosts: each request is executed as if once, in order, whatever dies.

use cbd_sim::explorer::Tally;
use cbd_sim::{channels, from_environment};

#[test]
fn requests_complete_once_and_in_order_whatever_dies() {
    let mut all = Tally::default();
    for seed in 1..=from_environment("CBD_SEEDS", 30) {
        all.add(channels::explore(seed, None));
    }
    assert!(all.findings.is_empty(), "{:?}", all.findings);
    // The test proves nothing unless these events occur.
    let names = [
        "completed",
        "client_done",
        "client_death",
        "server_death",
        "server_stop",
        "settling",
        "error",
        "nudge",
        "damage",
    ];
    for name in names {
        let count = all.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", all.faults);
    }
}
