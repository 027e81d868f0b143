//! Clients that disconnect with requests in flight and reconnect: no request of an ended connection takes effect
//! after a new client got a reply.

use cbd_sim::reconnect;
use std::collections::BTreeMap;

#[test]
fn no_request_of_an_ended_connection_takes_effect_after_a_new_client_got_a_reply() {
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 1..=8 {
        let tally = reconnect::explore(seed, None);
        assert!(tally.findings.is_empty(), "{:?}", tally.findings);
        for (name, count) in tally.faults {
            *faults.entry(name).or_default() += count;
        }
    }
    // The test proves nothing unless these events occur.
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
