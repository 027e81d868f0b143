//! Daemons of other versions.

use super::scene::{page, read, state, status};
use crate::top::state::{Action, Looks, State};
use serde_json::{Value, json};

fn shown(status: &Value) -> String {
    let mut state = State::new(super::scene::INTERVAL, Looks::default());
    state.sampled(read(status, 1));
    state.sampled(read(status, 2));
    for action in [Action::Enter, Action::Help, Action::Back, Action::Back] {
        page(&state, 80, 24);
        state.apply(action);
    }
    page(&state, 120, 30)
}

#[test]
fn an_earlier_daemon_without_figures_is_shown_with_a_note() {
    let mut status = status(2);
    status["version"] = json!("0.0.9");
    for backend in status["transports"][0]["backends"].as_array_mut().expect("a list") {
        for name in ["disk", "waits", "recovery_point_age_ms", "region_written_bytes", "uuid"] {
            backend.as_object_mut().expect("an object").remove(name);
        }
        for device in backend["blkdevs"].as_array_mut().expect("a list") {
            device.as_object_mut().expect("an object").remove("operations");
        }
    }
    let page = shown(&status);
    for part in [
        "the daemon is 0.0.9, this command",
        "does not count requests by device",
        "db-data",
        "dirty 831M of 819M",
    ] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
}

#[test]
fn a_later_daemon_with_more_or_other_fields_is_shown() {
    let mut status = status(2);
    status["version"] = json!("9.0.0");
    status["new"] = json!([{}]);
    let backend = &mut status["transports"][0]["backends"][0];
    backend["blkdevs"][0]["operations"]["copy"] = json!({ "requests": 9, "latency": { "count": "many" } });
    backend["cache"]["pace"] = json!("fast");
    backend["waits"] = json!({ "tape": { "count": 3 } });
    backend["size"] = json!(-1);
    let page = shown(&status);
    assert!(page.contains("the daemon is 9.0.0") && page.contains("db-data"), "{page}");
}

#[test]
fn an_answer_that_is_no_status_is_shown_as_not_understood() {
    for status in [
        json!(null),
        json!([1]),
        json!("x"),
        json!({ "transports": 3 }),
        json!({ "transports": [null, 1, {}] }),
    ] {
        let page = shown(&status);
        assert!(page.contains("of an unknown version"), "{status}:\n{page}");
    }
    assert!(shown(&json!({})).contains("it is not understood"));
}

#[test]
fn this_version_needs_no_note() {
    assert!(state().rates.notes.is_empty());
}
