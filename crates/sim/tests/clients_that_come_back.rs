//! Clients that disconnect with requests in flight and reconnect: nothing of an ended connection takes effect
//! after a new client was answered.

use cbd_sim::reconnect;
use std::collections::BTreeMap;

#[test]
fn nothing_of_an_ended_connection_happens_once_a_new_client_was_answered() {
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 1..=8 {
        let tally = reconnect::explore(seed, None);
        assert!(tally.findings.is_empty(), "{:?}", tally.findings);
        for (name, count) in tally.faults {
            *faults.entry(name).or_default() += count;
        }
    }
    // Without these events the test would prove nothing.
    for name in [
        "connection_closed_with_requests_in_flight",
        "connection_closed_with_requests_unread",
        "new_client_waited",
        "change_of_ended_connection_happened",
        "change_of_ended_connection_given_up",
        "process_crash",
        "power_cut",
    ] {
        assert!(faults.get(name).is_some_and(|count| *count > 0), "{name} never happened: {faults:?}");
    }
}
