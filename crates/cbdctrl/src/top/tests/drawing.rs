//! Pages of many sizes.

use super::scene::{page, read, state, status};
use crate::top::state::{Action, Looks, State};
use serde_json::json;

#[track_caller]
fn has(page: &str, parts: &[&str]) {
    for part in parts {
        assert!(page.contains(part), "{part:?} is missing:\n{page}");
    }
}

#[test]
fn a_terminal_of_80_columns_has_everything_of_each_device() {
    let page = page(&state(), 80, 24);
    has(
        &page,
        &[
            "cbdd ",
            "process 4711, up 3d",
            "every 2.0s  15:09:30 UTC",
            "DEVICE",
            "READ/s",
            "p50/p99",
            "> db-data",
            // 62,000 reads and 22,400 writes of 4 KiB in 2 s.
            "121M   31k",
            "44M   11k",
            "94.0",
            "serving, dirty 831M of 819M, age 3.1s, writeback 47M/s: holding the target",
            "!vm-images",
            "serving, full, disk busy for 1.7s, writes wait, dirty 3.8G of 410M",
            "logs",
            "dirty 0 of 102M, age 0",
            "!archive",
            "NOT SERVED, the disk does not exist any more, dirty 12M",
            "region 0: 16G, 2.5G free (15.6 %), power-fail, /mnt/pmem/cbd.region",
            "warning: transport 0: one of two copies",
            "q end  ? keys  Enter device  s order: number",
        ],
    );
    assert_eq!(page.lines().count(), 24);
}

#[test]
fn the_last_events_are_shown_the_newest_first() {
    let mut state = state();
    state.events = Some(super::scene::events());
    let page = page(&state, 80, 24);
    has(&page, &["EVENTS", "15:01:12 ERROR backend.down: /dev/sde"]);
    assert!(page.find("15:08:40") < page.find("daemon.started"), "{page}");
}

#[test]
fn a_small_terminal_has_rates_hit_ratio_and_dirty_bytes() {
    let page = page(&state(), 40, 12);
    has(
        &page,
        &[
            "DEVICE", "READ/s", "WRITE/s", "HIT%", "DIRTY", ">", "db-data", "121M", "44M", "94.0", "831M",
            "!archive", "q end",
        ],
    );
}

#[test]
fn a_large_terminal_has_one_line_for_each_device_and_the_selected_one_below() {
    let page = page(&state(), 200, 60);
    has(
        &page,
        &[
            "/dev/cbd0 db-data",
            "TARGET",
            "AGE",
            "STATE",
            "serving | writeback 47M/s: holding the target | waits: flush 4 x 9.0ms, lane 310 x 4.0us",
            // The page of the selected device.
            "hit 94.0 %, miss 4.0 %, past-sequential 2.0 % of the bytes",
            "disk read",
            "p99.9",
            "latency",
            "8.2us-16us",
            "region 0: 16G",
        ],
    );
}

#[test]
fn the_page_of_a_device_has_latencies_outcomes_waits_and_times() {
    let mut state = state();
    state.apply(Action::Enter);
    let page = page(&state, 80, 24);
    has(
        &page,
        &[
            "/dev/cbd0 db-data: ublk, serving",
            "last 2.0s",
            "read             31k   121M   14us",
            "flush",
            "disk write",
            "reads        hit 94.0 %, miss 4.0 %, past-sequential 2.0 % of the bytes",
            "writes       cached 100 % of the bytes",
            "waits        flush 4 x 9.0ms, lane 310 x 4.0us, space 0",
            "831M, target 819M, cache 8.0G; empty in 18s, full in -",
            "47M/s of 72M/s permitted: holding the target",
            "lacks the last 3.1s; consistent as of 2026-03-14 15:09:25 UTC",
            "latency",
            "Esc back",
        ],
    );
    assert!(!page.contains("discard"), "an operation without requests has a line:\n{page}");
    let larger = super::scene::page(&state, 120, 40);
    let rest = ["writeback; 44M/s written to the region; recovery took 212ms", "8.2us-16us"];
    has(&larger, &rest);
    has(&larger, &["backend 0 db-data: /dev/disk/by-id/wwn-0x5000c500a1b2c3d4, 3.6T"]);
    state.apply(Action::Move(1));
    has(&super::scene::page(&state, 80, 24), &["ATTENTION    disk busy for 1.7s", "past-full 12.0 %"]);
}

#[test]
fn a_terminal_that_is_too_small_shows_which_size_is_needed() {
    let joined = |width, height| page(&state(), width, height).replace('\n', "");
    for (width, height) in [(10, 5), (35, 40), (80, 7), (5, 1), (6, 1)] {
        let text = joined(width, height);
        assert!(text.contains("36x8"), "{width} x {height}: {text:?}");
    }
    assert_eq!(page(&state(), 10, 5), "top needs\n36x8, not\n10x5\n\n");
}

#[test]
fn no_size_is_too_small_to_draw() {
    let mut pages = vec![state(), State::default(), state(), state()];
    pages[2].apply(Action::Enter);
    pages[3].apply(Action::Help);
    for state in &mut pages {
        state.events = Some(vec!["an event".to_owned(); 9]);
        for width in 0..=30 {
            for height in 0..=12 {
                page(state, width, height);
            }
        }
        for (width, height) in
            [(36, 8), (37, 9), (75, 8), (76, 8), (77, 13), (150, 8), (151, 20), (500, 9), (60, 200)]
        {
            page(state, width, height);
        }
    }
}

#[test]
fn without_colours_and_unicode_the_page_has_the_same_meaning_in_ascii() {
    let mut state = state();
    state.apply(Action::Enter);
    state.map = Some(super::scene::map());
    let styled = page(&state, 100, 30);
    state.looks = Looks::default();
    let buffer = super::scene::buffer(&state, 100, 30);
    let plain = page(&state, 100, 30);
    assert!(plain.is_ascii(), "{plain}");
    assert!(buffer.content().iter().all(|cell| cell.style() == ratatui::buffer::Cell::EMPTY.style()));
    let signs =
        [('\u{2588}', "#"), ('\u{2026}', "~"), ('\u{2591}', "."), ('\u{2592}', ":"), ('\u{2593}', "+")];
    assert_eq!(signs.iter().fold(styled, |page, (sign, ascii)| page.replace(*sign, ascii)), plain);
    has(&plain, &["map: read", "|#", "max "]);
    state.apply(Action::Back);
    has(&page(&state, 80, 24), &["> db-data", "!vm-images"]);
}

#[test]
fn many_devices_scroll_with_the_selection() {
    let mut status = status(2);
    let backends = &mut status["transports"][0]["backends"];
    let pattern = backends[2].clone();
    let made = (0..50).map(|number| {
        let mut backend = pattern.clone();
        (backend["backend_id"], backend["uuid"]) = (json!(number), json!(number.to_string()));
        backend["blkdevs"][0]["name"] = json!(format!("volume-{number}."));
        backend["blkdevs"][0]["blkdev_id"] = json!(number);
        backend
    });
    *backends = made.collect();
    let mut state = State::new(super::scene::INTERVAL, Looks::default());
    state.sampled(read(&status, 2));
    for number in 0..50 {
        for (width, height) in [(80, 24), (40, 8), (160, 12)] {
            let page = page(&state, width, height);
            let selected = page.lines().find(|line| line.starts_with('>')).unwrap_or_default();
            assert!(selected.contains(&format!("volume-{number}.")), "{number}:\n{page}");
        }
        state.apply(Action::Move(1));
    }
    assert!(page(&state, 80, 24).contains("region 0"));
}

#[test]
fn names_control_no_terminal_and_move_no_column() {
    let mut status = status(2);
    let backend = &mut status["transports"][0]["backends"][0];
    let name = "x\n\u{1b}[2J\t\u{9b}31m";
    backend["blkdevs"][0]["name"] = json!(name);
    backend["blkdevs"][0]["dev_name"] = json!("a".repeat(500));
    backend["backend_path"] = json!("\u{6570}\u{636e}".repeat(100));
    let mut state = State::new(super::scene::INTERVAL, Looks { styled: true, unicode: true });
    state.sampled(read(&status, 2));
    for page_of in [Action::Back, Action::Enter] {
        state.apply(page_of);
        for (width, height) in [(40, 12), (80, 24), (200, 60)] {
            let buffer = super::scene::buffer(&state, width, height);
            let controls = |cell: &ratatui::buffer::Cell| cell.symbol().contains(char::is_control);
            assert!(!buffer.content().iter().any(controls));
        }
    }
    let sample = read(&status, 2);
    assert_eq!(sample.backends[0].devices[0].name.as_deref(), Some("x\\n\\u{1b}[2J\\t\\u{9b}31m"));
}

#[test]
fn the_page_of_a_device_has_the_map_of_its_own_cache_once_it_came() {
    let mut state = state();
    assert_eq!(state.wanted_map(), None, "the overview has none");
    state.apply(Action::Enter);
    let (of, map) = super::scene::map();
    assert_eq!(state.wanted_map(), Some(of));
    assert!(!page(&state, 80, 24).contains("map:"));
    state.map = Some((of, map));
    state.looks = Looks::default();
    let small = page(&state, 80, 24);
    has(&small, &["map: read", "latency"]);
    let line = small.lines().find(|line| line.starts_with("map: read")).expect("it is there");
    // 54 columns of 256 cells: the first has what is read most, the last has nothing.
    assert_eq!(line.split('|').nth(1).map(|strip| (strip.len(), &strip[..1])), Some((54, "#")), "{small}");
    assert!(line.ends_with("| max 0.6 %"), "{line}");
    has(&page(&state, 120, 40), &["map: read", "map: cached", "map: dirty"]);
    state.apply(Action::Move(1));
    assert!(!page(&state, 120, 40).contains("map:"), "that of another cache is shown");
    state.apply(Action::Move(2));
    assert_eq!(state.wanted_map(), None, "it has no cache");
}
