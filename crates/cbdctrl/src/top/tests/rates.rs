//! Rates between two samples.

use super::scene::{self, operation, read, sample, status};
use crate::top::rates::{Key, Rates, Row};
use crate::top::sample::Sample;
use serde_json::{Value, json};
use std::time::Duration;

const FIRST: Key = Key { transport: 0, backend: 0, device: Some(0) };

fn row(rates: &Rates, key: Key) -> Option<&Row> {
    rates.rows.iter().find(|row| row.key == key)
}

fn requests(rates: &Rates, key: Key, name: &str) -> Option<u64> {
    row(rates, key).and_then(|row| row.operation(name)).map(|it| it.requests)
}

#[test]
fn counts_are_those_of_the_interval() {
    let rates = Rates::between(Some(&sample(1)), &sample(3));
    assert_eq!(rates.seconds, Some(4.0));
    assert_eq!(requests(&rates, FIRST, "read"), Some(124_000));
    assert_eq!(rates.per_second(124_000), Some(31_000.0));
    let row = row(&rates, FIRST).expect("a row");
    assert_eq!(row.hit_ratio(), Some(0.94));
    let reads = row.operation("read").expect("reads");
    let median = reads.latency.percentile(0.5).expect("latencies");
    assert!(median.abs_diff(14_000) * 8 <= 14_000, "{median}");
    let disk = row.backend.disk.as_ref().expect("a disk");
    assert_eq!((disk["read"].operations, disk["write"].bytes), (7_400, 3_000 * 65536));
    assert_eq!(row.backend.waits.as_ref().expect("waits")["lane"].count, 620);
    assert_eq!(row.backend.region_written_bytes, Some(186_000_000));
}

#[test]
fn the_first_sample_has_no_rates() {
    let rates = Rates::between(None, &sample(1));
    assert!(rates.seconds.is_none() && !rates.restarted);
    assert!(rates.rows.iter().all(|row| row.operations.is_none() && row.hit_ratio().is_none()));
}

#[test]
fn an_operation_without_a_count_has_not_happened() {
    let mut earlier = status(1);
    of_first(&mut earlier, "blkdevs")[0].as_object_mut().expect("an object").remove("operations");
    let rates = Rates::between(Some(&read(&earlier, 1)), &sample(2));
    assert_eq!(requests(&rates, FIRST, "read"), Some(124_000));
    let rates = Rates::between(Some(&read(&earlier, 1)), &read(&earlier, 2));
    assert_eq!(requests(&rates, FIRST, "read"), Some(0));
}

#[test]
fn an_interval_of_no_time_has_no_rates() {
    let earlier = sample(1);
    let mut later = sample(2);
    later.at = earlier.at;
    let rates = Rates::between(Some(&earlier), &later);
    assert_eq!((rates.seconds, rates.per_second(7)), (None, None));
    assert_eq!(requests(&rates, FIRST, "read"), None);
    // Neither has a clock that went back.
    later.at = Duration::ZERO;
    assert_eq!(Rates::between(Some(&earlier), &later).seconds, None);
}

#[test]
fn a_daemon_that_was_started_again_has_no_rates_until_the_next_sample() {
    let mut after = status(1);
    (after["pid"], after["uptime_s"]) = (json!(4712), json!(1));
    let restarted = Rates::between(Some(&sample(5)), &read(&after, 6));
    assert!(restarted.restarted);
    assert!(restarted.rows.iter().all(|row| row.operations.is_none() && row.backend.disk.is_none()));
    let mut next = status(2);
    (next["pid"], next["uptime_s"]) = (json!(4712), json!(3));
    let rates = Rates::between(Some(&read(&after, 6)), &read(&next, 7));
    assert!(!rates.restarted);
    assert_eq!(requests(&rates, FIRST, "read"), Some(62_000));
    // A process can have the number of its predecessor.
    after["pid"] = json!(4711);
    assert!(Rates::between(Some(&sample(5)), &read(&after, 6)).restarted);
}

fn of_first<'a>(status: &'a mut Value, name: &str) -> &'a mut Value {
    &mut status["transports"][0]["backends"][0][name]
}

#[test]
fn a_counter_that_falls_gives_no_rate() {
    // The device was removed and created again: its disk goes on.
    let mut later = status(6);
    of_first(&mut later, "blkdevs")[0]["operations"] = json!({ "read": operation(10, 1000, &[]) });
    let rates = Rates::between(Some(&sample(5)), &read(&later, 6));
    let first = row(&rates, FIRST).expect("a row");
    assert!(first.operations.is_none() && first.backend.disk.is_some());
    // The backend was stopped and started again.
    let mut later = status(6);
    *of_first(&mut later, "disk") = json!({});
    let rates = Rates::between(Some(&sample(5)), &read(&later, 6));
    let first = row(&rates, FIRST).expect("a row");
    assert!(first.operations.is_none() && first.backend.disk.is_none() && first.backend.waits.is_none());
    // Others have theirs.
    let second = Key { backend: 1, device: Some(1), ..FIRST };
    assert_eq!(requests(&rates, second, "write"), Some(5_100));
}

#[test]
fn another_backend_with_the_same_number_is_another() {
    let mut later = status(6);
    *of_first(&mut later, "uuid") = json!("another");
    let rates = Rates::between(Some(&sample(5)), &read(&later, 6));
    assert!(row(&rates, FIRST).expect("a row").operations.is_none());
}

/// A status with a block device on a backend of another host.
fn with_remote(steps: u64, waiting_ms: u64) -> Value {
    let mut status = status(steps);
    let writes = operation(50 * steps, 90_000, &[("remote", 100)]);
    let reads = operation(10 * steps, 90_000, &[("remote", 100)]);
    status["transports"][0]["remote_blkdevs"] = json!([{
        "blkdev_id": 7, "host_id": 0, "backend_id": 9, "name": "far", "dev_name": "/dev/cbd7", "alive": true, "export": "auto",
        "method": "ublk", "operations": { "read": reads, "write": writes },
        "backend_host_id": 1, "backend_host": "b", "in_flight": 3, "waiting_ms": waiting_ms,
    }]);
    status
}

#[test]
fn a_block_device_on_another_host_has_a_row_and_its_wait_needs_attention() {
    let key = Key { transport: 0, backend: 9, device: Some(7) };
    let rates = Rates::between(Some(&read(&with_remote(1, 0), 1)), &read(&with_remote(3, 0), 3));
    assert_eq!((requests(&rates, key, "write"), requests(&rates, key, "read")), (Some(100), Some(20)));
    let far = row(&rates, key).expect("a row");
    assert_eq!((far.hit_ratio(), far.state().as_str()), (None, "on host b"));
    assert!(far.backend.troubles.is_empty());

    let rates = Rates::between(None, &read(&with_remote(3, 4500), 3));
    let troubles = &row(&rates, key).expect("a row").backend.troubles;
    assert_eq!(troubles.len(), 1);
    assert_eq!((troubles[0].word, troubles[0].is_of_load()), ("host_silent", false));
    assert!(troubles[0].text.starts_with("3 requests wait for host b for 4"), "{troubles:?}");
    let line: Value = serde_json::from_str(&crate::top::json::line(&rates)).expect("JSON");
    let of = |device: &&Value| device["backend_id"] == 9;
    let device = line["devices"].as_array().and_then(|list| list.iter().find(of)).expect("it is there");
    assert_eq!((&device["backend_host"], &device["in_flight"]), (&json!("b"), &json!(3)));
    assert_eq!((&device["waiting_ms"], &device["read_hit_ratio"]), (&json!(4500), &Value::Null));
}

#[test]
fn devices_come_and_go() {
    let all = sample(2);
    let without = Sample { backends: all.backends[1..].to_vec(), ..sample(1) };
    let come = Rates::between(Some(&without), &all);
    assert!(row(&come, FIRST).expect("a row").operations.is_none());
    let gone =
        Rates::between(Some(&all), &Sample { backends: sample(3).backends[1..].to_vec(), ..sample(3) });
    assert!(row(&gone, FIRST).is_none());
    assert!(row(&gone, Key { backend: 1, device: Some(1), ..FIRST }).expect("a row").operations.is_some());
}

#[test]
fn the_selection_moves_on_when_its_device_goes() {
    use crate::top::state::{Action, Page};
    let mut state = scene::state();
    assert_eq!(state.selected, Some(FIRST));
    state.apply(Action::Enter);
    assert_eq!(state.page, Page::Device);
    let later = sample(3);
    state.sampled(Sample { backends: later.backends[1..].to_vec(), ..later });
    assert_eq!((state.page, state.selected.expect("another").backend), (Page::Overview, 1));
    state.sampled(Sample { backends: Vec::new(), ..sample(4) });
    assert_eq!(state.selected, None);
    for action in [Action::Move(1), Action::Move(i64::MIN), Action::Enter, Action::Sort, Action::Back] {
        state.apply(action);
    }
    assert_eq!(state.page, Page::Overview);
}

#[test]
fn actions_move_sort_and_change_the_interval() {
    use crate::top::state::{Action, Page, Sort};
    let mut state = scene::state();
    state.apply(Action::Move(1));
    assert_eq!(state.selected.expect("a row").backend, 1);
    state.apply(Action::Move(i64::MAX));
    assert_eq!(state.selected.expect("a row").backend, 3);
    state.apply(Action::Move(-100));
    assert_eq!(state.selected, Some(FIRST));
    let first = |state: &crate::top::state::State| state.rows()[0].key.backend;
    state.apply(Action::Sort);
    assert_eq!((state.sort, first(&state)), (Sort::Load, 0));
    state.apply(Action::Sort);
    assert_eq!((state.sort, first(&state)), (Sort::Dirty, 1));
    state.apply(Action::Sort);
    assert_eq!((state.sort, first(&state)), (Sort::Latency, 1));
    for (action, seconds) in [(Action::Slower, 5), (Action::Faster, 2), (Action::Faster, 1)] {
        state.apply(action);
        assert_eq!(state.interval, Duration::from_secs(seconds));
    }
    for _ in 0..20 {
        state.apply(Action::Slower);
    }
    assert_eq!(state.interval, Duration::from_secs(60));
    state.apply(Action::Enter);
    state.apply(Action::Help);
    assert_eq!(state.page, Page::Help);
    state.apply(Action::Back);
    assert_eq!(state.page, Page::Device);
    state.apply(Action::Pause);
    assert!(state.paused);
}
