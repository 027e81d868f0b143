//! The board for Grafana: Prometheus answers each of its queries, and the answers are drawn where the board has its panels.
//!
//! Invariants: variables are replaced as Grafana replaces them. The drawing is by `board/board.js`, not by Grafana. The
//! picture in the documentation is written with `CBD_PICTURES=write` alone.

use super::browser::Browser;
use super::support::pattern::Random;
use super::support::prometheus::{Prometheus, packaged};
use super::support::{Fixture, MIB, system_tests, until_within};
use super::{StopsAtEnd, fixture};
use cbd_testkit::Client;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The seconds between two reads of the metrics, which is also the shortest step of a plot.
const INTERVAL_S: u64 = 1;
/// Bytes of each read.
const READ: usize = 16 << 10;
/// Queries whose answer is empty while all is well: by panel and reference.
const EMPTY: [(&str, &str); 1] = [("Disks not served", "A")];
/// A panel of what is known only at times: nothing is full while what is dirty does not grow.
const AT_TIMES: &str = "Time until empty, and until full";
/// Panels that have more than zeros under this load.
const ABOVE_ZERO: [&str; 15] = [
    "Daemons",
    "Dirty",
    "Requests",
    "Throughput",
    "Hit ratio of reads",
    "Latency of reads",
    "Latency of writes",
    "Past the cache",
    "Dirty, and its target",
    "Written by clients and to disks",
    "Space",
    "Operations of disks",
    "Latency of disks",
    "Scrubs",
    "Clients of metrics",
];

/// What stands for the variables in queries, by name.
type Variables = Vec<(String, String)>;

/// A value in a regular expression in a string of a query, as Grafana writes it.
fn escaped(value: &str) -> String {
    let is_special = |character: char| "$^*{}[]'+?.()|".contains(character);
    let escape = |character: char| match character {
        '\\' => "\\\\\\\\".to_owned(),
        _ if is_special(character) => format!("\\\\{character}"),
        _ => character.to_string(),
    };
    value.chars().map(escape).collect()
}

fn replaced(text: &str, variables: &Variables) -> String {
    variables.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("${name}"), value))
}

/// The variables of the board where all of their values are chosen.
fn variables(board: &Value, prometheus: &Prometheus) -> Variables {
    // Four intervals: the larger of that and of the step and an interval.
    let mut variables = vec![("__rate_interval".to_owned(), format!("{}s", 4 * INTERVAL_S))];
    let list = board["templating"]["list"].as_array().expect("variables");
    for variable in list.iter().filter(|variable| variable["type"] == "query") {
        assert_eq!(variable["current"]["value"], json!(["$__all"]));
        let query = replaced(variable["query"]["query"].as_str().expect("a query"), &variables);
        let inner =
            query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).expect("labels");
        let (series, label) = inner.rsplit_once(", ").expect("series and a label");
        let values = prometheus.query("query", &format!("group by ({label}) ({series})"), "");
        let values = values.iter().map(|value| escaped(value["metric"][label].as_str().expect("a label")));
        let values = values.collect::<Vec<_>>();
        assert!(!values.is_empty(), "{query} has no values");
        let text = if values.len() == 1 { values[0].clone() } else { format!("({})", values.join("|")) };
        variables.push((variable["name"].as_str().expect("a name").to_owned(), text));
    }
    variables
}

/// The name of a series in a legend. Its labels must be there.
#[track_caller]
fn legend(format: &str, metric: &Value) -> String {
    let mut parts = format.split("{{");
    let mut text = parts.next().expect("a part").to_owned();
    for part in parts {
        let (label, rest) = part.split_once("}}").expect("the end of a label");
        let value = metric[label].as_str().unwrap_or_else(|| panic!("{format} of {metric} has no {label}"));
        text = text + value + rest;
    }
    text
}

/// Points that are numbers: their times and values.
fn points(series: &Value) -> Vec<(f64, f64)> {
    let single = std::slice::from_ref(&series["value"]);
    let points = series["values"].as_array().map_or(single, Vec::as_slice).iter();
    let number = |point: &Value| {
        (point[0].as_f64().expect("a time"), point[1].as_str().expect("a value").parse::<f64>())
    };
    points
        .map(number)
        .filter_map(|(time, value)| Some((time, value.ok()?)))
        .filter(|point| point.1.is_finite())
        .collect()
}

/// A series of a panel.
struct Series {
    legend: String,
    points: Vec<(f64, f64)>,
}

/// The series of each panel by its number, in the seconds `from` to `to`.
fn answers(board: &Value, prometheus: &Prometheus, from: f64, to: f64) -> BTreeMap<u64, Vec<Series>> {
    let variables = variables(board, prometheus);
    let mut answers = BTreeMap::new();
    for panel in board["panels"].as_array().expect("panels") {
        let title = panel["title"].as_str().expect("a title");
        let mut found: Vec<Series> = Vec::new();
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = replaced(target["expr"].as_str().expect("an expression"), &variables);
            let series = if target["instant"] == true {
                prometheus.query("query", &expression, &format!("&time={to}"))
            } else {
                let span = format!("&start={from}&end={to}&step={INTERVAL_S}");
                prometheus.query("query_range", &expression, &span)
            };
            let format = target["legendFormat"].as_str().expect("a legend");
            let is_empty = EMPTY.contains(&(title, target["refId"].as_str().expect("a name")));
            let known = series.iter().map(points).filter(|points| !points.is_empty()).count();
            assert!((known == 0) == is_empty || title == AT_TIMES, "{title}: {expression} gave {series:?}");
            let named = series
                .iter()
                .map(|one| Series { legend: legend(format, &one["metric"]), points: points(one) });
            found.extend(named);
        }
        let legends: BTreeSet<&str> = found.iter().map(|series| series.legend.as_str()).collect();
        assert_eq!(legends.len(), found.len(), "{title} has lines of the same name: {legends:?}");
        let largest = found.iter().flat_map(|series| &series.points).map(|point| point.1).fold(0.0, f64::max);
        assert!(largest > 0.0 || !ABOVE_ZERO.contains(&title), "{title} has nothing but zeros");
        answers.insert(panel["id"].as_u64().expect("a number"), found);
    }
    answers
}

/// The values of a series of the panel with this title.
#[track_caller]
fn values(board: &Value, answers: &BTreeMap<u64, Vec<Series>>, title: &str, legend: &str) -> Vec<(f64, f64)> {
    let panels = board["panels"].as_array().expect("panels");
    let panel = panels.iter().find(|panel| panel["title"] == title).expect("a panel");
    let series = answers[&panel["id"].as_u64().expect("a number")].iter();
    series.clone().find(|series| series.legend == legend).expect("a series").points.clone()
}

/// Two regions with a disk each, so that both disks have the same number.
fn two_disks(fixture: &Fixture) -> [Client; 2] {
    fixture.register("64M");
    let region = fixture.in_memory("other");
    fixture.ok(&["tp-reg", "--path", &region, "--size", "64M", "--host", "node0", "--format"]);
    ["0", "1"].map(|transport| {
        let (disk, socket) =
            (fixture.disk(&format!("disk{transport}"), 256 * MIB), format!("{transport}.sock"));
        let export = format!("nbd:unix:{}", fixture.text(&socket));
        fixture.ok(&["backend-start", "-t", transport, "-p", &disk, "-c", "32M", "-D", "-e", &export]);
        let settings = ["writeback_percent=10", "sequential_write_cutoff=1M"];
        fixture.ok(&[["set", "-t", transport, "-b", "0"].as_slice(), &settings].concat());
        // A scrub that has ended, and one that does not end.
        let scrub = ["scrub", "-t", transport, "-b", "0"];
        fixture.ok(&[scrub.as_slice(), &["--wait"]].concat());
        fixture.ok(&[scrub.as_slice(), &["--rate", "2M"]].concat());
        fixture.client_of(&socket)
    })
}

/// A load that comes and goes, over a working set that nearly fits.
fn load(mut client: Client, seed: u64, stop: &AtomicBool) {
    let (mut random, mut block, mut round, mut next) = (Random(seed), vec![0; READ], 0, 0);
    let large = vec![1; 512 << 10];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..10 + 4 * ((round / 20) % 9) {
            let blocks = if random.percent(80) { 1000 } else { 16384 };
            let at = random.below(blocks) * READ as u64;
            if random.percent(30) {
                client.write(at, &block, false).expect("written");
            } else {
                client.read(at, &mut block).expect("read");
            }
        }
        // A long sequential write in between goes past the cache.
        client.write(next % (200 * MIB), &large, false).expect("written");
        next += large.len() as u64;
        client.flush().expect("flushed");
        round += 1;
        // The pace of the load.
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn prometheus_answers_each_query_of_the_board_and_the_answers_are_drawn() {
    if !system_tests("prometheus_answers_each_query_of_the_board_and_the_answers_are_drawn") {
        return;
    }
    // The picture has more time in it than the test needs.
    let writes = std::env::var_os("CBD_PICTURES").is_some_and(|wanted| wanted == "write");
    let length = if writes { 90.0 } else { 6.0 };
    let text = std::fs::read_to_string(packaged("../grafana/cbd.json")).expect("a file");
    let board: Value = serde_json::from_str(&text).expect("JSON");
    let (mut fixture, port) = fixture(true);
    fixture.start();
    let prometheus = Prometheus::start(&fixture, port, &format!("{INTERVAL_S}s"));
    let clients = two_disks(&fixture);
    let stop = AtomicBool::new(false);
    let (from, to) = std::thread::scope(|scope| {
        let _stops = StopsAtEnd(&stop);
        for (client, seed) in clients.into_iter().zip(1..) {
            let stop = &stop;
            scope.spawn(move || load(client, seed, stop));
        }
        // The time of the last read of the metrics.
        let last = || {
            let path = "/api/v1/query?query=timestamp(cbd_build_info)";
            let answer = prometheus.get(path)?;
            points(answer["result"].as_array()?.first()?).first().map(|point| point.1)
        };
        let (mut from, mut to) = (None, None);
        until_within(Duration::from_secs(140), "the metrics are read", || {
            to = last();
            from = from.or(to);
            to.zip(from).is_some_and(|(to, from)| to >= from + length)
        });
        (from.expect("a time"), to.expect("a time"))
    });
    let answers = answers(&board, &prometheus, from, to);

    // The figures fit each other.
    let requests = values(&board, &answers, "Requests", "read");
    let bytes = values(&board, &answers, "Throughput", "read");
    assert_eq!(requests.len(), bytes.len());
    for ((_, requests), (_, bytes)) in requests.iter().zip(&bytes).filter(|(requests, _)| requests.1 > 0.0) {
        assert!((bytes / requests - READ as f64).abs() < 1.0, "{bytes} bytes in {requests} reads");
    }
    draw(&fixture, &board, &answers, (from, to), writes);
}

/// Draws the answers, and writes the picture if `writes`.
fn draw(
    fixture: &Fixture,
    board: &Value,
    answers: &BTreeMap<u64, Vec<Series>>,
    span: (f64, f64),
    writes: bool,
) {
    let mut page = Browser::start(&fixture.folders()[0]);
    page.resize(1400, 1000);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page/board/board.html");
    page.open(&format!("file://{}", file.display()));
    let series = |found: &Vec<Series>| {
        let of = |series: &Series| json!({ "legend": series.legend, "points": series.points });
        found.iter().map(of).collect::<Vec<_>>()
    };
    let results: BTreeMap<_, _> = answers.iter().map(|(id, found)| (id, series(found))).collect();
    let note =
        "drawn by a test from packaging/grafana/cbd.json and the answers of Prometheus, not by Grafana";
    let given = json!([board, results, [span.0, span.1], note]);
    let height = page.value(&format!("CbdBoard.draw(...{given})")).as_u64().expect("a height");
    page.resize(1400, u32::try_from(height).expect("a height"));
    let shown = page.value(
        "[...document.querySelectorAll('.panel')].map((panel) => panel.querySelector('h2').textContent)",
    );
    let titles: Vec<&Value> =
        board["panels"].as_array().expect("panels").iter().map(|panel| &panel["title"]).collect();
    assert_eq!(shown, json!(titles));
    assert!(super::fewest_colours(&mut page, "#board canvas") >= 3, "a plot is empty");
    for (id, found) in answers {
        let names = page.value(&format!(
            "[...document.querySelectorAll('#panel-{id} li')].map((name) => name.textContent)"
        ));
        let is_plot = names != json!([]);
        let expected: Vec<&str> = found.iter().map(|series| series.legend.as_str()).collect();
        assert!(!is_plot || names == json!(expected), "panel {id}: {names}");
    }
    assert_eq!(page.problems(), []);
    if writes {
        let picture = page.picture();
        assert!(picture.len() < 450_000, "{} bytes", picture.len());
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
        std::fs::write(folder.join("board.png"), picture).expect("written");
    }
}

#[test]
fn values_of_variables_are_escaped_as_grafana_escapes_them() {
    assert_eq!(escaped(r"/dev/a.b+c"), r"/dev/a\\.b\\+c");
    assert_eq!(escaped(r"a\b"), r"a\\\\b");
    let metric = json!({ "path": "/dev/sdb", "instance": "node0" });
    assert_eq!(legend("{{instance}} {{path}} dirty", &metric), "node0 /dev/sdb dirty");
}
