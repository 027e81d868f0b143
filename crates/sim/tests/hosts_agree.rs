//! Several hosts of a shared region: no object has two users, and no decision two values, whatever their memory and their pauses.

use cbd_sim::explorer::Tally;
use cbd_sim::{from_environment, hosts};

#[test]
fn no_object_has_two_hosts() {
    let mut all = Tally::default();
    for seed in 1..=from_environment("CBD_SEEDS", 12) {
        all.add(hosts::explore(seed, None));
    }
    assert!(all.findings.is_empty(), "{:?}", all.findings);
    // The test proves nothing unless these events occur.
    let expected = [
        "join",
        "joined_at_once",
        "death",
        "acquired",
        "not_acquired",
        "released",
        "left",
        "cleared",
        "had_it_before",
    ];
    for name in expected {
        let count = all.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", all.faults);
    }
}
