//! The page of a listener whose history and status the test makes: a week, and devices that come and go.

use super::browser::Browser;
use super::choice::{choose, chosen};
use super::support::{prometheus::free_port, system_tests, until, until_within};
use super::until_state;
use cbd_daemon::api::{DeviceMap, Status};
use cbd_daemon::config::DaemonConfig;
use cbd_daemon::front_ends::FrontEnds;
use cbd_daemon::history::{History, MINUTES, SECONDS};
use cbd_daemon::web::{PageSource, Plan, Web, WebConfig};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const DAY: u64 = 24 * 3600;
const WEEK: u64 = MINUTES as u64 * 60;
/// The samples that are made begin at 0 and end here, more than a week later: a few seconds before the end of a minute.
const END: u64 = WEEK + 2 * DAY / 24 + IN_MINUTE;
const IN_MINUTE: u64 = 54;
/// Nothing is sampled in this day.
const MISSED: u64 = 3;

/// The status of two devices; clients have read so often from the first one.
fn status(reads: u64) -> Status {
    let mut status: Status =
        serde_json::from_str(include_str!("../../../daemon/tests/web/status.json")).expect("a status");
    let backends = &mut status.transports[0].backends;
    let mut other = backends[0].clone();
    let read = backends[0].info.blkdevs[0].operations.get_mut("read").expect("reads");
    (read.requests, read.bytes) = (reads, reads * 4096);
    backends[0].operations = backends[0].info.blkdevs[0].operations.clone();
    other.info.uuid = "other".to_owned();
    other.info.backend_id = 1;
    other.info.name = Some("other".to_owned());
    backends.truncate(1);
    backends.push(other);
    status
}

/// Reads of a second: more in each day.
const fn rate(second: u64) -> u64 {
    10 * (1 + second / DAY)
}

/// A week by minutes, but for a day, and the last hour by seconds.
fn history() -> Arc<History> {
    let (history, template, mut reads) = (History::default(), status(0), 0);
    let (mut second, mut before) = (0, 0);
    while second <= END {
        reads += rate(second) * (second - before);
        before = second;
        if second / DAY != MISSED {
            let mut status = template.clone();
            let backend = &mut status.transports[0].backends[0];
            let read = backend.operations.get_mut("read").expect("reads");
            (read.requests, read.bytes) = (reads, reads * 4096);
            history.sample(Arc::new(status), Duration::from_secs(second));
        }
        second += if second + u64::from(SECONDS) < END { 60 } else { 1 };
    }
    Arc::new(history)
}

/// A listener for a history and a status, and its port.
fn serve(history: Arc<History>, shown: &Arc<Mutex<Status>>) -> (Web, u16) {
    let port = free_port();
    let config = serde_json::json!({ "listen": [format!("127.0.0.1:{port}")] });
    let config: WebConfig = serde_json::from_value(config).expect("a configuration");
    let plan = Plan::new(&config, None).expect("a plan").with_history(history);
    let page = PageSource {
        map: Arc::new(|_, backend_id, _| Ok(DeviceMap { backend_id, ..DeviceMap::default() })),
        events: Arc::default(),
    };
    let shown = Arc::clone(shown);
    let source = Arc::new(move || Ok(shown.lock().expect("the status").clone()));
    let front_ends = Arc::new(FrontEnds::new(&DaemonConfig::default()));
    let web = Web::start(plan, source, page, front_ends).expect("a thread").expect("a listener");
    until("it listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    (web, port)
}

/// What the plot of requests says at this share of its width: the time in seconds since 1970, and the reads a second.
fn at(page: &mut Browser, share: f64) -> (f64, String) {
    page.value("document.getElementById('plot-requests').scrollIntoView({ block: 'center' })");
    let place = page.value(
        "(() => {
            const { x, y, width, height } = document.querySelector('#plot-requests .u-over').getBoundingClientRect();
            return [x, y + height / 2, width];
        })()",
    );
    let [left, middle, width] = [0, 1, 2].map(|index| place[index].as_f64().expect("a number"));
    // A move to the place where the mouse is already is none.
    page.point_at(left + width / 2.0, middle - 9.0);
    page.point_at(left + (width - 1.0) * share, middle);
    let mut shown = None;
    until("the values are shown", || {
        let of =
            "[...document.querySelectorAll('#plot-requests .u-value')].map((value) => value.textContent)";
        let values = page.value(&format!("(([time, reads]) => [Date.parse(time) / 1000, reads])({of})"));
        shown = values[0].as_f64().zip(values[1].as_str().map(str::to_owned));
        shown.is_some()
    });
    shown.expect("values")
}

/// Whether the plot of requests has a line of reads between these shares of its width.
fn is_drawn(page: &mut Browser, from: f64, to: f64) -> bool {
    let count = format!(
        "(() => {{
            const wanted = CbdPlots.colour('c1').slice(1).match(/../g).map((part) => parseInt(part, 16));
            const canvas = document.querySelector('#plot-requests canvas');
            const [whole, over] = [canvas, canvas.parentNode.querySelector('.u-over')]
                .map((node) => node.getBoundingClientRect());
            const left = over.x - whole.x + {from} * over.width;
            const width = ({to} - {from}) * over.width;
            const {{ data }} = canvas.getContext('2d').getImageData(left, 0, width, canvas.height);
            for (let at = 0; at < data.length; at += 4) {{
                if (wanted.every((part, index) => Math.abs(part - data[at + index]) < 40) && data[at + 3] > 200) {{
                    return true;
                }}
            }}
            return false;
        }})()"
    );
    page.value(&count) == true
}

/// What the plot of requests draws: its points, the seconds from its first to its last one, and the time of that; 0 without
/// points.
fn drawn(page: &mut Browser) -> (u64, f64, f64) {
    let data = page.value(
        "(([times]) => [times.length, times.at(-1) - times[0], times.at(-1)])(window.charts.at(-7).data)",
    );
    let [length, seconds, last] = [0, 1, 2].map(|index| data[index].as_f64().unwrap_or(0.0));
    (length as u64, seconds, last)
}

fn now_s() -> f64 {
    std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs_f64()
}

#[track_caller]
fn assert_near(seconds: f64, expected: f64, most: f64) {
    assert!((seconds - expected).abs() <= most, "{seconds} is not {expected}");
}

#[test]
fn the_page_shows_a_week_by_minutes_and_an_hour_by_seconds() {
    if !system_tests("the_page_shows_a_week_by_minutes_and_an_hour_by_seconds") {
        return;
    }
    let history = history();
    let shown = Arc::new(Mutex::new(Status::clone(&history.last().expect("a sample").0)));
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = Browser::start(folder.path());
    page.resize(1600, 1000);
    page.prefer("light");
    let (_web, port) = serve(history, &shown);
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(&mut page, "live");
    // The plots are made again in other colours, now where the test sees their data.
    page.value(
        "(() => { const Plot = uPlot; uPlot = function (...given) { const made = new Plot(...given); \
                (window.charts ??= []).push(made); return made; }; })()",
    );
    page.prefer("dark");
    until("the plots are made", || page.value("window.charts?.length === 8") == true);
    page.value("document.getElementById('range-week').click()");
    until("the week is drawn", || is_drawn(&mut page, 0.0, 0.1) && is_drawn(&mut page, 0.9, 1.0));
    // All minutes that have ended, but for the missed day, which is one point without values.
    let (points, length, last) = drawn(&mut page);
    let minutes = u64::from(MINUTES) - 1;
    let all = minutes - DAY / 60 + 1;
    // On a slow machine the minute of the last sample has ended, too.
    let ended = points - all;
    assert!(ended <= 1, "{points} points");
    assert_near(length, ((minutes - 1 + ended) * 60) as f64, 1.0);
    assert_near(last, now_s(), 70.0);
    // A pixel is half an hour.
    assert_near(at(&mut page, 0.0).0, last - length, 3600.0);
    assert_near(at(&mut page, 1.0).0, last, 3600.0);
    // Where in the plot a moment of the samples is; its right edge is the last minute that has ended.
    let place = |second: u64| 1.0 - (END - IN_MINUTE - second) as f64 / (WEEK - 60) as f64;
    for day in [0, 1, 2, 4, 5, 6] {
        let (time, reads) = at(&mut page, place(day * DAY + DAY / 2));
        assert_near(time, last - (END - day * DAY - DAY / 2) as f64, 3600.0);
        assert_eq!(reads, rate(day * DAY).to_string(), "day {day}");
        assert!(is_drawn(&mut page, place(day * DAY + DAY / 3), place(day * DAY + DAY / 2)), "day {day}");
    }
    let missed = MISSED * DAY;
    let gap = is_drawn(&mut page, place(missed + DAY / 10), place(missed + DAY * 9 / 10));
    assert!(!gap, "a line where nothing was sampled");

    // Minutes that end meanwhile are added, and those that are older than a week go.
    page.value(
        "(() => { const now = performance.now.bind(performance); performance.now = () => 20 * now(); })()",
    );
    // On a machine that was slow until here, the next minute has begun, and ends later.
    until_within(Duration::from_secs(90), "a minute is added", || drawn(&mut page).2 > last + 30.0);
    let (now, length, next) = drawn(&mut page);
    assert_near(next, last + 60.0, 5.0);
    assert_near(length, (minutes * 60) as f64, 1.0);
    assert_eq!(now, all + 1);

    // An hour is no longer than one.
    page.value("document.getElementById('range-hour').click()");
    until("the hour is drawn", || drawn(&mut page).1 <= f64::from(SECONDS) && drawn(&mut page).0 > 3000);
    let (first, reads) = at(&mut page, 0.0);
    assert_near(first, now_s() - f64::from(SECONDS), 20.0);
    assert_eq!(reads, rate(END).to_string());
    assert!(is_drawn(&mut page, 0.0, 0.1) && is_drawn(&mut page, 0.9, 1.0));
    let (_, _, last) = drawn(&mut page);
    until("seconds are added", || drawn(&mut page).2 > last + 1.5);
    let (now, length, _) = drawn(&mut page);
    assert!(now <= u64::from(SECONDS) && length <= f64::from(SECONDS - 1) + 0.1, "{now} points, {length} s");
    assert_eq!(page.problems(), []);
}

#[test]
fn a_device_that_was_away_for_a_time_is_shown_again() {
    if !system_tests("a_device_that_was_away_for_a_time_is_shown_again") {
        return;
    }
    let both = status(1);
    let mut one = both.clone();
    one.transports[0].backends.truncate(1);
    let shown = Arc::new(Mutex::new(both.clone()));
    let (_web, port) = serve(Arc::default(), &shown);
    let folder = tempfile::tempdir().expect("a folder");
    let mut page = Browser::start(folder.path());
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(&mut page, "live");
    choose(&mut page, 1);
    let is_alone = "document.getElementById('backend').options.length === 1";
    *shown.lock().expect("the status") = one;
    until("it is away", || page.value(is_alone) == true);
    assert_eq!(page.value("document.getElementById('backend-choice').hidden"), true);
    assert_eq!(
        page.value("document.getElementById('total-reads').dataset.value"),
        "1",
        "that of the other one"
    );
    *shown.lock().expect("the status") = both;
    until("it is back", || page.value(is_alone) == false);
    assert_eq!(chosen(&mut page), 1);
    assert_eq!(page.value("document.getElementById('total-reads').dataset.value"), "3");
    // The page may have asked for the map of the device just after it went away.
    let problems = page.problems().into_iter().filter(|problem| {
        !(problem.source == "network"
            && problem.text.contains("404")
            && problem.text.contains("backend=other"))
    });
    assert_eq!(problems.collect::<Vec<_>>(), []);
}
