//! One of several devices is chosen: all figures are its own, and it stays chosen.

use super::browser::Browser;
use super::support::{MIB, system_tests, until};
use super::{StopsAtEnd, agreed, fixture, metric, state, totals, until_state};
use cbd_testkit::Client;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Chooses the device at this place of the list.
pub(super) fn choose(page: &mut Browser, place: u32) {
    page.value(&format!(
        "(() => {{
            const list = document.getElementById('backend');
            list.selectedIndex = {place};
            list.dispatchEvent(new Event('change'));
        }})()"
    ));
}

/// The place in the list of the chosen device.
pub(super) fn chosen(page: &mut Browser) -> u64 {
    page.value("document.getElementById('backend').selectedIndex").as_u64().expect("a place")
}

/// The exact number of an element.
fn number(page: &mut Browser, id: &str) -> Option<u64> {
    page.value(&format!("Number(document.getElementById('{id}').dataset.value ?? NaN)")).as_u64()
}

/// How high the line of this colour comes in the plot of throughput: 0 at the lower edge, or not drawn, and 1 at the upper.
fn height(page: &mut Browser, colour: &str) -> f64 {
    let height = format!(
        "(() => {{
            const wanted = CbdPlots.colour('{colour}').slice(1).match(/../g).map((part) => parseInt(part, 16));
            const canvas = document.querySelector('#plot-throughput canvas');
            const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4) {{
                if (wanted.every((part, index) => Math.abs(part - data[at + index]) < 40) && data[at + 3] > 200) {{
                    return 1 - Math.floor(at / 4 / canvas.width) / canvas.height;
                }}
            }}
            return 0;
        }})()"
    );
    page.value(&height).as_f64().expect("a height")
}

/// Dirty bytes in the tile and in the map are those of the metrics.
#[track_caller]
fn assert_dirty(page: &mut Browser, port: u16, backend: &str) -> u64 {
    let dirty = metric(port, "cbd_cache_dirty_bytes", &[backend]);
    until("the tile has what is dirty", || number(page, "tile-dirty") == Some(dirty));
    until("the map has what is dirty", || {
        page.value("Number(document.getElementById('map').dataset.dirty)").as_u64() == Some(dirty)
    });
    dirty
}

/// The last second is that of the chosen device, while the first of two is written; chooses the second.
#[track_caller]
fn assert_last_second(page: &mut Browser, first: &mut Client) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stops = StopsAtEnd(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                first.write(0, &[8; 4096], false).expect("written");
                // The pace of the load.
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        choose(page, 0);
        until("the first one writes", || number(page, "tile-writes") > Some(0));
        choose(page, 1);
        until("the second one does not", || number(page, "tile-writes") == Some(0));
    });
}

#[test]
fn the_page_shows_the_chosen_device_which_stays_chosen() {
    if !system_tests("the_page_shows_the_chosen_device_which_stays_chosen") {
        return;
    }
    let (mut fixture, port) = fixture(false);
    fixture.start();
    fixture.register("64M");
    let disks = ["first", "second"].map(|name| fixture.disk(name, 32 * MIB));
    fixture.start_backend(&disks[0]);
    let export = format!("nbd:unix:{}", fixture.text("other.sock"));
    fixture.ok(&["backend-start", "-p", &disks[1], "-c", "16M", "-D", "-e", &export, "--name", "other"]);
    for backend in ["0", "1"] {
        // What is dirty stays so.
        fixture.ok(&["set", "-b", backend, "writeback=paused:1h"]);
    }
    let (mut first, mut second) = (fixture.client(), fixture.client_of("other.sock"));
    let mut page = Browser::start(&fixture.folders()[0]);
    page.resize(1600, 1000);
    page.prefer("light");
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(&mut page, "live");
    let names = page.value("[...document.getElementById('backend').options].map((option) => option.text)");
    assert_eq!(names, serde_json::json!([format!("0/0 {}", disks[0]), "0/1 other"]));
    assert_eq!(chosen(&mut page), 0);

    // One writes, the other reads.
    for block in 0..48 {
        first.write(block * 4096, &[7; 4096], true).expect("written");
    }
    for block in 0..5 {
        second.read(block * 65536, &mut [0; 65536]).expect("read");
    }
    assert_eq!(agreed(&mut page, port, "backend=\"0\""), [0, 0, 48, 48 * 4096]);
    assert_eq!(assert_dirty(&mut page, port, "backend=\"0\""), 48 * 4096);
    until("its writes are drawn", || height(&mut page, "c2") > 0.5 && height(&mut page, "c1") < 0.5);
    choose(&mut page, 1);
    assert_eq!(agreed(&mut page, port, "backend=\"1\""), [5, 5 * 65536, 0, 0]);
    assert_eq!(assert_dirty(&mut page, port, "backend=\"1\""), 0);
    until("its reads are drawn", || height(&mut page, "c1") > 0.5 && height(&mut page, "c2") < 0.5);

    assert_last_second(&mut page, &mut first);

    // The choice stays when the page is loaded again, as that of the range does.
    page.value("document.getElementById('range-week').click()");
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(&mut page, "live");
    assert_eq!(chosen(&mut page), 1);
    assert_eq!(page.text("document.getElementById('range-week').getAttribute('aria-pressed')"), "true");
    assert_eq!(agreed(&mut page, port, "backend=\"1\""), [5, 5 * 65536, 0, 0]);

    // And when the daemon goes. The other one can be chosen meanwhile, and shows what was known of it.
    let instance = page.text("document.body.dataset.instance");
    choose(&mut page, 0);
    let written = agreed(&mut page, port, "backend=\"0\"");
    choose(&mut page, 1);
    drop((first, second));
    fixture.terminate();
    until_state(&mut page, "away");
    choose(&mut page, 0);
    assert_eq!(totals(&mut page), written);
    choose(&mut page, 1);
    assert_eq!(totals(&mut page), [5, 5 * 65536, 0, 0]);
    fixture.start();
    until("it is another daemon", || page.text("document.body.dataset.instance") != instance);
    until("it is live", || state(&mut page) == "live");
    assert_eq!(chosen(&mut page), 1);
    assert_eq!(agreed(&mut page, port, "backend=\"1\""), [0; 4]);
    fixture.client_of("other.sock").read(0, &mut [0; 4096]).expect("read");
    assert_eq!(agreed(&mut page, port, "backend=\"1\""), [1, 4096, 0, 0]);
}
