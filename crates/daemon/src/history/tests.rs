//! What a history keeps, and what it costs.

use super::*;
use crate::api::{Bucket, Histogram, OperationFigures, Outcome};

const UUID: &str = "6a0a4ff4-6d7c-4b9f-90c2-2e94b4b8f5c5";

fn status() -> Status {
    serde_json::from_str(include_str!("../../tests/web/status.json")).unwrap()
}

/// A status with `count` backends, whose clients have read `reads` times 4 KiB, half of them hits.
fn status_of(count: u32, reads: u64) -> Arc<Status> {
    let mut status = status();
    let backends = &mut status.transports[0].backends;
    let backend = backends.remove(0);
    for number in 0..count {
        let mut backend = backend.clone();
        if number > 0 {
            backend.info.uuid = format!("{number}");
        }
        let latency = Histogram {
            count: reads,
            sum_ns: reads * 9000,
            buckets: vec![Bucket { upper_ns: 9216, count: reads }],
        };
        let hit = Outcome { requests: reads / 2, bytes: reads / 2 * 4096 };
        let figures = OperationFigures {
            requests: reads,
            bytes: reads * 4096,
            failed: 0,
            outcomes: [("hit".to_owned(), hit)].into(),
            latency,
        };
        backend.operations = [("read".to_owned(), figures)].into();
        backends.push(backend);
    }
    Arc::new(status)
}

const fn second(number: u64) -> Duration {
    Duration::from_millis(number * 1000 + 3)
}

fn sum(answer: &HistoryAnswer, column: &str) -> u64 {
    answer.columns[column].iter().flatten().sum()
}

#[test]
fn the_sum_of_a_history_is_what_the_status_counted() {
    let history = History::default();
    for number in 0..=150 {
        history.sample(status_of(1, number * number), second(number));
    }
    let hour = history.answer(0, UUID, Range::Hour, 0).unwrap();
    assert_eq!((hour.ticks.len(), hour.next, hour.more), (151, 151, false));
    assert_eq!(hour.columns["reads"][0], None, "what was before the first sample is not known");
    assert_eq!(sum(&hour, "reads"), 150 * 150);
    assert_eq!(sum(&hour, "read_bytes"), 150 * 150 * 4096);
    assert_eq!(hour.columns["reads"][100], Some(100 * 100 - 99 * 99));
    assert_eq!(hour.columns["span_ms"][100], Some(1000));
    let week = history.answer(0, UUID, Range::Week, 0).unwrap();
    assert_eq!(week.ticks, [1, 2], "the third minute has not ended");
    assert_eq!(sum(&week, "reads"), 119 * 119);
    let expected = status_of(1, 7).transports[0].backends[0].operations["read"].latency.percentile(0.99);
    assert_eq!(week.columns["read_p99_ns"], [expected, expected]);
    assert_eq!(hour.columns["read_p99_ns"][100], expected);
    assert_eq!(hour.columns["write_p99_ns"][100], None, "nothing was written");
}

/// A status has the operations of a device from the moment on when a client opens it.
#[test]
fn the_first_requests_of_a_device_are_counted() {
    let history = History::default();
    let mut quiet = Status::clone(&status_of(1, 0));
    quiet.transports[0].backends[0].operations.clear();
    let mut without_device = quiet.clone();
    without_device.transports[0].backends[0].info.blkdevs.clear();
    history.sample(Arc::new(without_device), second(0));
    history.sample(Arc::new(quiet), second(1));
    history.sample(status_of(1, 40), second(2));
    let answer = history.answer(0, UUID, Range::Hour, 0).unwrap();
    assert_eq!(answer.columns["reads"], [None, None, Some(40)]);
    assert_eq!(answer.columns["read_bytes"], [None, None, Some(40 * 4096)]);
    assert_eq!(answer.columns["writes"], [None, None, Some(0)]);
}

#[test]
fn an_answer_continues_behind_a_tick_and_is_bounded() {
    let history = History::default();
    (0..3700).for_each(|number| history.sample(status_of(1, number), second(number)));
    let all = history.answer(0, UUID, Range::Hour, 0).unwrap();
    assert_eq!((all.ticks.len(), all.ticks[0], all.next), (3600, 101, 3700), "an hour is kept");
    let last = history.answer(0, UUID, Range::Hour, 3698).unwrap();
    assert_eq!((last.ticks.as_slice(), last.next), ([3699, 3700].as_slice(), 3700));
    assert_eq!(history.answer(0, UUID, Range::Hour, 3700).unwrap().ticks, [0; 0]);
    assert_eq!(
        history.answer(0, UUID, Range::Hour, 9999).unwrap().ticks.len(),
        3600,
        "a tick of another run"
    );
    assert_eq!(history.answer(1, UUID, Range::Hour, 0), None);
    assert_eq!(history.answer(0, "<script>", Range::Hour, 0), None);
}

#[test]
fn a_week_is_kept_by_minutes_in_bounded_memory() {
    let history = History::default();
    // A sample each minute fills the minutes, not the seconds.
    let status = status_of(1, 5);
    (0..u64::from(MINUTES) + 100).for_each(|minute| history.sample(Arc::clone(&status), second(minute * 60)));
    let first = history.answer(0, UUID, Range::Week, 0).unwrap();
    assert_eq!((first.ticks.len(), first.more), (POINTS_MAX, true));
    let (mut count, mut since) = (0, 0);
    loop {
        let answer = history.answer(0, UUID, Range::Week, since).unwrap();
        (count, since) = (count + answer.ticks.len(), answer.next);
        if !answer.more {
            break;
        }
    }
    assert_eq!(count, MINUTES as usize - 1, "the present minute has not ended");
    assert!(history.bytes() <= BYTES_PER_SERIES, "{}", history.bytes());
}

/// All that figures, events, samples and history take in a daemon with ten devices and a client each, behind a week with the page.
#[test]
fn a_daemon_with_ten_devices_keeps_within_16_mib() {
    const DEVICES: usize = 10;
    // What the tests of the counters allow, in cbd-device and cbd-backing: a queue of the client, two of the disk, and the totals of
    // those that have ended.
    const COUNTERS: usize = 2 * (14 << 10) + 3 * (19 << 10);
    const SAMPLE: usize = cbd_device::SAMPLE_BYTES
        + cbd_runtime::sampled::earlier::BYTES_MAX
        + cbd_runtime::sampled::MOMENTS_BYTES;
    // What tests/figures_memory.rs of cbdctrl allows whoever watches.
    const WATCHED: usize = 1 << 20;
    const ALL: usize =
        DEVICES * (BYTES_PER_SERIES + COUNTERS + SAMPLE) + crate::events::KEPT_BYTES_MAX + WATCHED;
    const { assert!(ALL <= 16 << 20) };
}

#[test]
fn ten_backends_stay_within_their_memory() {
    let history = History::default();
    for number in 0..u64::from(SECONDS) {
        history.sample(status_of(10, 5), second(number));
    }
    let status = status_of(10, 5);
    (60..u64::from(MINUTES) + 60).for_each(|minute| history.sample(Arc::clone(&status), second(minute * 60)));
    assert!(history.bytes() <= 10 * BYTES_PER_SERIES);
    assert!(history.bytes() > 9 * BYTES_PER_SERIES, "{} of {BYTES_PER_SERIES}", history.bytes());
    const { assert!(10 * BYTES_PER_SERIES <= 17 << 19) };
}

#[test]
fn counters_that_begin_again_and_gaps_count_nothing_that_was_not() {
    let history = History::default();
    history.sample(status_of(1, 1000), second(0));
    history.sample(status_of(1, 10), second(1));
    history.sample(status_of(1, 12), second(5));
    history.sample(status_of(1, 99), second(5) + Duration::from_millis(1));
    history.sample(status_of(1, 99), second(4));
    let answer = history.answer(0, UUID, Range::Hour, 0).unwrap();
    assert_eq!(answer.ticks, [1, 2, 6], "a second has one sample, and time goes on");
    assert_eq!(answer.columns["reads"], [None, None, Some(2)]);
    assert_eq!(answer.columns["dirty_bytes"], [Some(4096); 3], "a state needs no earlier one");
    assert_eq!(answer.columns["span_ms"][2], Some(4000));
}

#[test]
fn a_backend_that_has_disappeared_is_kept_for_a_time() {
    let history = History::default();
    (0..10).for_each(|number| history.sample(status_of(2, number), second(number)));
    (10..20).for_each(|number| history.sample(status_of(1, number), second(number)));
    assert_eq!(history.answer(0, "1", Range::Hour, 0).unwrap().ticks.len(), 10);
    assert_eq!(history.latest(0, "1"), None);
    assert_eq!(history.latest(0, UUID).unwrap()["reads"], Some(1));
    history.sample(status_of(1, 20), second(20) + ABSENT_MAX);
    assert_eq!(history.answer(0, "1", Range::Hour, 0), None);
}

#[test]
fn the_number_of_backends_is_bounded_and_new_ones_replace_absent_ones() {
    let history = History::default();
    let most = u32::try_from(SERIES_MAX).unwrap();
    history.sample(status_of(most + 5, 0), second(0));
    assert_eq!(history.answer(0, &format!("{most}"), Range::Hour, 0), None, "there is no place");
    let mut others = Status::clone(&status_of(most + 5, 0));
    others.transports[0].backends.retain(|backend| backend.info.uuid != "3");
    let others = Arc::new(others);
    (1..130).for_each(|number| history.sample(Arc::clone(&others), second(number)));
    assert!(history.answer(0, "3", Range::Hour, 0).is_none(), "it made way");
    assert!(history.answer(0, &format!("{most}"), Range::Hour, 0).is_some());
    assert!(history.answer(0, UUID, Range::Hour, 0).is_some());
}

#[test]
fn labels_come_from_the_clock_of_the_day_and_order_from_the_other() {
    let history = History::default();
    (0..5).for_each(|number| history.sample(status_of(1, number), second(number)));
    let answer = history.answer(0, UUID, Range::Hour, 0).unwrap();
    let label_ms = answer.origin_ms + 1000 * u64::from(answer.next);
    assert!(label_ms.abs_diff(cbd_runtime::wall_ms()) < 10_000, "{label_ms}");
}
