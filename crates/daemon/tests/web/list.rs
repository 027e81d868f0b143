//! The names, types and labels of metrics stay as they are: `docs/metrics.txt` has all of them.

use crate::fixture::status;
use cbd_daemon::metrics;
use cbd_daemon::metrics::text::Format;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn text_of(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The lines `NAME TYPE LABEL,LABEL...` of a page in the text format of Prometheus.
fn lines_of(page: &str) -> BTreeSet<String> {
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut kinds = Vec::new();
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            kinds.push(kind.split_once(' ').unwrap());
        } else if !line.starts_with('#') {
            let (series, _) = line.rsplit_once(' ').unwrap();
            let (name, values) = series.split_once('{').unwrap_or((series, ""));
            let family =
                kinds.last().filter(|(family, _)| name.starts_with(family)).expect("a type before values").0;
            let names = values.split("\",").filter_map(|pair| pair.split_once("=\"").map(|(label, _)| label));
            labels.entry(family).or_default().extend(names.filter(|&label| label != "le"));
        }
    }
    let line = |(name, kind): &(&str, &str)| {
        let labels = labels.get(name).unwrap_or_else(|| panic!("status.json gives {name} no value"));
        let labels = labels.iter().copied().collect::<Vec<_>>().join(",");
        format!("{name} {kind} {}", if labels.is_empty() { "-" } else { &labels })
    };
    kinds.iter().map(line).collect()
}

fn listed() -> BTreeSet<String> {
    let text = text_of("docs/metrics.txt");
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect()
}

#[test]
fn names_types_and_labels_are_those_of_the_list() {
    let (listed, served) = (listed(), lines_of(&metrics::render(&status())));
    let gone: Vec<_> = listed.difference(&served).collect();
    assert!(
        gone.is_empty(),
        "docs/metrics.txt promises these to those who read them; give a changed meaning a new name, and keep the old \
         one: {gone:#?}"
    );
    let new: Vec<&str> = served.difference(&listed).map(String::as_str).collect();
    assert!(new.is_empty(), "add these lines to docs/metrics.txt:\n{}", new.join("\n"));
}

#[test]
fn names_end_with_a_unit_or_are_listed_as_older_than_that_rule() {
    for line in listed() {
        let mut fields = line.split(' ');
        let (name, kind) = (fields.next().unwrap(), fields.next().unwrap());
        assert!(name.starts_with("cbd_"), "{name}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        let old = ["cbd_backend_oldest_operation_ms", "cbd_cache_recovery_point_ms"];
        assert!(old.contains(&name) || !name.ends_with("_ms"), "{name}: Prometheus counts seconds");
    }
}

/// The metrics that an expression of Prometheus uses.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let words = text.split(|character: char| !is_part(character));
    words.filter(|word| word.starts_with("cbd_")).map(str::to_owned).collect()
}

/// The metrics of the list, a histogram by the names of its values.
fn known() -> BTreeSet<String> {
    let names = |line: &String| {
        let mut fields = line.split(' ');
        let (name, kind) = (fields.next().unwrap().to_owned(), fields.next().unwrap());
        match kind {
            "histogram" => ["_bucket", "_sum", "_count"].map(|suffix| format!("{name}{suffix}")).to_vec(),
            _ => vec![name],
        }
    };
    listed().iter().flat_map(names).collect()
}

#[test]
fn rules_and_board_use_metrics_of_the_list() {
    let known = known();
    for file in ["packaging/prometheus/cbd.rules.yml", "packaging/grafana/cbd.json"] {
        let used = metrics_in(&text_of(file));
        assert!(used.len() > 10, "{file}: {used:?}");
        let unknown: Vec<_> = used.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} uses what no daemon has: {unknown:?}");
    }
}

#[test]
fn each_panel_of_the_board_has_a_place_a_title_and_queries() {
    let board: serde_json::Value = serde_json::from_str(&text_of("packaging/grafana/cbd.json")).unwrap();
    assert!(board["schemaVersion"].as_u64() >= Some(36) && board["uid"].is_string());
    let panels = board["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let mut places: Vec<[u64; 4]> = Vec::new();
    for panel in panels {
        let number = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel:#}");
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()), "{panel:#}");
        let [x, y, width, height] = ["x", "y", "w", "h"].map(number);
        assert!(width > 0 && height > 0 && x + width <= 24, "{panel:#}");
        let over = |other: &[u64; 4]| {
            x < other[0] + other[2]
                && other[0] < x + width
                && y < other[1] + other[3]
                && other[1] < y + height
        };
        assert!(!places.iter().any(over), "it covers another: {panel:#}");
        places.push([x, y, width, height]);
        if panel["type"] == "row" {
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel:#}");
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{panel:#}");
        for target in targets {
            assert!(target["expr"].as_str().is_some_and(|text| text.contains("cbd_")), "{target:#}");
        }
    }
    assert!(places.len() >= 12);
}

#[test]
fn both_formats_have_the_same_values() {
    let text = |format| {
        let mut text = String::new();
        metrics::render_to(&status(), format, &mut |part| {
            text.push_str(&part);
            true
        });
        text
    };
    let values = |text: &str| {
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    let (plain, open) = (text(Format::Prometheus), text(Format::OpenMetrics));
    assert_eq!(values(&plain), values(&open));
    assert!(open.ends_with("\n# EOF\n") && !plain.contains("# EOF"));
}
