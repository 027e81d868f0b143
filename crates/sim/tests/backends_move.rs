//! A backend that moves between hosts is on one of them, and no other one caches its disk, whatever dies at whatever moment.

use cbd_sim::explorer::Tally;
use cbd_sim::{from_environment, moves};

#[test]
fn a_backend_is_on_one_host_and_each_host_sees_it() {
    let mut all = Tally::default();
    for seed in 1..=from_environment("CBD_SEEDS", 20) {
        all.add(moves::explore(seed, None));
    }
    assert!(all.findings.is_empty(), "{:?}", all.findings);
    // The test proves nothing unless these events occur.
    let expected =
        ["death", "offered", "held", "handed_over", "not_handed_over", "given_up", "taken_over", "looked"];
    for name in expected {
        let count = all.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", all.faults);
    }
}
