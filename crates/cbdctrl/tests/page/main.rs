//! The page of the daemon in a real browser: it draws, follows live figures, and survives a restart.

mod board;
mod browser;
mod choice;
#[cfg(feature = "page")]
mod past;
#[path = "../support/mod.rs"]
mod support;

use browser::Browser;
use std::fmt::Write as _;
use std::fs::Permissions;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use support::prometheus::free_port;
use support::{Fixture, MIB, system_tests, until};

const TOKEN: &str = "a+token/of=the-test";

/// Tells the threads of a load to end, also when the test panics.
struct StopsAtEnd<'a>(&'a AtomicBool);

impl Drop for StopsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A daemon that will serve its page, and the port.
fn fixture(with_token: bool) -> (Fixture, u16) {
    let port = free_port();
    let fixture = Fixture::new();
    let mut config = "[daemon]\npreserve_fuse = false\n[web]\n".to_owned();
    if with_token {
        std::fs::write(fixture.path("token"), TOKEN).expect("a token");
        std::fs::set_permissions(fixture.path("token"), Permissions::from_mode(0o600)).expect("ours");
        let _ = writeln!(config, "listen = [\"0.0.0.0:{port}\"]\ntoken_file = \"{}\"", fixture.text("token"));
    } else {
        let _ = writeln!(config, "listen = [\"127.0.0.1:{port}\"]");
    }
    std::fs::write(fixture.path("cbd.toml"), config).expect("a file");
    (fixture, port)
}

/// The sum of a metric over the series with all of these labels.
fn metric(port: u16, name: &str, labels: &[&str]) -> u64 {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered");
    let is_wanted = |line: &&str| {
        line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label))
    };
    let values =
        text.lines().filter(is_wanted).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() as u64
}

/// The totals of the page: reads, bytes read, writes, bytes written.
fn totals(page: &mut Browser) -> Vec<u64> {
    let ids = "['total-reads', 'total-read-bytes', 'total-writes', 'total-written-bytes']";
    let values =
        page.value(&format!("{ids}.map((id) => Number(document.getElementById(id).dataset.value ?? -1))"));
    values.as_array().expect("values").iter().map(|value| value.as_u64().unwrap_or(u64::MAX)).collect()
}

/// Waits until the totals of the page are those of the metrics with this label; returns them.
#[track_caller]
fn agreed(page: &mut Browser, port: u16, label: &str) -> Vec<u64> {
    let of = |operation: &str| {
        ["cbd_blkdev_requests_total", "cbd_blkdev_bytes_total"]
            .map(|name| metric(port, name, &[&format!("operation=\"{operation}\""), label]))
    };
    let told = [of("read"), of("write")].concat();
    let mut seen = Vec::new();
    let end = Instant::now() + Duration::from_secs(15);
    until(&format!("the page has the totals {told:?}"), || {
        seen = totals(page);
        assert!(Instant::now() < end, "the page has the totals {seen:?}, the metrics {told:?}");
        seen == told
    });
    seen
}

fn state(page: &mut Browser) -> String {
    page.text("document.body.dataset.state")
}

/// Waits until the page is in this state.
#[track_caller]
fn until_state(page: &mut Browser, wanted: &str) {
    until(&format!("the page is {wanted}"), || state(page) == wanted);
}

/// Pixels of a canvas that nearly have a colour of the style sheet.
fn pixels_of(page: &mut Browser, canvas: &str, colour: &str) -> u64 {
    let count = format!(
        "(() => {{
            const wanted = CbdPlots.colour('{colour}').slice(1).match(/../g).map((part) => parseInt(part, 16));
            const canvas = document.querySelector('{canvas}');
            const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let at = 0; at < data.length; at += 4) {{
                const isNear = wanted.every((part, index) => Math.abs(part - data[at + index]) < 40);
                found += isNear && data[at + 3] > 200 ? 1 : 0;
            }}
            return found;
        }})()"
    );
    page.value(&count).as_u64().expect("a number")
}

/// The least number of colours of a canvas among these.
fn fewest_colours(page: &mut Browser, canvases: &str) -> u64 {
    let count = format!(
        "Math.min(...[...document.querySelectorAll('{canvases}')].map((canvas) => {{
            const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }}))"
    );
    page.value(&count).as_u64().expect("a number")
}

#[track_caller]
fn assert_fits(page: &mut Browser) {
    until("the plots have the width of the page", || {
        page.value(
            "[...document.querySelectorAll('.host')].every((host) => {
                const plot = host.querySelector('.uplot');
                return plot && plot.clientWidth === host.clientWidth;
            })",
        ) == true
    });
    let widths = page.value("[document.scrollingElement.scrollWidth, innerWidth]");
    assert!(widths[0].as_u64() <= widths[1].as_u64(), "wider than the window: {widths}");
}

/// A hidden page asks nothing, and asks again when it is seen.
#[track_caller]
fn assert_rests_while_hidden(page: &mut Browser) {
    let asked = page.value(
        "(async () => {
            const [ask, wait] = [fetch, (ms) => new Promise((done) => setTimeout(done, ms))];
            window.asked = 0;
            window.fetch = (...what) => {
                window.asked += 1;
                return ask(...what);
            };
            Object.defineProperty(document, 'hidden', { configurable: true, get: () => window.isHidden });
            window.isHidden = true;
            // What has begun ends.
            await wait(1200);
            window.asked = 0;
            await wait(1500);
            return window.asked;
        })()",
    );
    assert_eq!(asked, 0, "a hidden page asks");
    page.value("window.isHidden = false, document.dispatchEvent(new Event('visibilitychange'))");
    until("the page asks again", || page.value("window.asked > 0") == true);
}

#[track_caller]
fn assert_no_problem(page: &mut Browser, but: &[&str]) {
    let mut problems = page.problems();
    problems.retain(|problem| !but.contains(&problem.source.as_str()));
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn the_page_draws_follows_live_figures_and_survives_a_restart() {
    if !system_tests("the_page_draws_follows_live_figures_and_survives_a_restart") {
        return;
    }
    let (mut fixture, port) = fixture(false);
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 64 * MIB);
    fixture.start_backend(&disk);
    let mut page = Browser::start(&fixture.folders()[0]);
    page.resize(1600, 1000);
    page.prefer("light");
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(&mut page, "live");
    let mut client = fixture.client();
    assert_eq!(agreed(&mut page, port, "")[2..], [0, 0]);

    // It follows what is written and read, and draws it.
    for block in 0..64 {
        client.write(block * 4096, &[7; 4096], true).expect("written");
    }
    client.read(0, &mut [0; 8192]).expect("read");
    let seen = agreed(&mut page, port, "");
    assert!(seen[0] >= 1 && seen[1] >= 8192 && seen[2..] == [64, 64 * 4096], "{seen:?}");
    until("the writes are drawn", || pixels_of(&mut page, "#plot-throughput canvas", "c2") > 0);
    until("the map has what is cached", || pixels_of(&mut page, "#map", "empty") > 0);
    until("the map has it", || {
        page.value("Number(document.getElementById('map').dataset.cached) > 0") == true
    });
    assert!(fewest_colours(&mut page, "#plots canvas") >= 3, "a plot is empty");
    assert!(page.text("document.getElementById('regions').textContent").contains(&fixture.region()));
    assert!(page.text("document.getElementById('events').textContent").contains("backend.started"));

    // Narrow and wide, light and dark.
    for width in [400, 1600] {
        page.resize(width, 900);
        assert_fits(&mut page);
    }
    let background = "getComputedStyle(document.body).backgroundColor";
    let light = (page.text(background), pixels_of(&mut page, "#map", "empty"));
    page.prefer("dark");
    assert_ne!(page.text(background), light.0);
    until("the map is drawn in dark colours", || pixels_of(&mut page, "#map", "empty") > 0);
    until("the lines are drawn in dark colours", || {
        pixels_of(&mut page, "#plot-throughput canvas", "c2") > 0
    });
    page.value("document.getElementById('range-week').click()");
    until("a week is chosen", || {
        page.text("document.getElementById('range-week').getAttribute('aria-pressed')") == "true"
    });
    page.value("document.getElementById('range-hour').click()");
    until("a key shows a value of the plot", || {
        let key = "new KeyboardEvent('keydown', { key: 'ArrowLeft' })";
        page.value(&format!("document.getElementById('plot-throughput').dispatchEvent({key})"));
        page.text("document.querySelectorAll('#plot-throughput .u-value')[2].textContent").ends_with("B/s")
    });
    assert_rests_while_hidden(&mut page);
    assert_no_problem(&mut page, &[]);

    // The daemon goes and comes back: its totals begin again, and the page follows them.
    let instance = page.text("document.body.dataset.instance");
    drop(client);
    fixture.terminate();
    until_state(&mut page, "away");
    let said = page.text("document.getElementById('connection').textContent");
    assert!(said.contains("cannot be reached since"), "{said}");
    fixture.start();
    let mut client = fixture.client();
    until("it is another daemon", || page.text("document.body.dataset.instance") != instance);
    until_state(&mut page, "live");
    assert_eq!(agreed(&mut page, port, "")[2..], [0, 0]);
    client.write(MIB, &[7; 4096], true).expect("written");
    assert_eq!(agreed(&mut page, port, "")[2..], [1, 4096]);
    until("it is drawn", || pixels_of(&mut page, "#plot-throughput canvas", "c2") > 0);
    assert_no_problem(&mut page, &["network"]);
}

#[test]
fn a_page_asks_for_the_token_and_shows_any_name_as_text() {
    if !system_tests("a_page_asks_for_the_token_and_shows_any_name_as_text") {
        return;
    }
    let (mut fixture, port) = fixture(true);
    fixture.start();
    fixture.register("64M");
    let name = format!("a\"'&<script>alert(1)<b>{}", "x".repeat(200));
    let disk = fixture.disk(&name, 8 * MIB);
    fixture.start_backend(&disk);
    let mut page = Browser::start(&fixture.folders()[0]);
    page.resize(400, 900);
    let address = format!("http://127.0.0.1:{port}/");
    page.open(&address);
    until_state(&mut page, "token");
    assert_eq!(page.value("document.getElementById('main').hidden"), true);
    let give = |page: &mut Browser, token: &str| {
        page.value(&format!(
            "document.getElementById('token-input').value = '{token}';
             document.querySelector('#token button').click()"
        ));
    };
    for (wrong, error) in [("a token", "without spaces"), ("another-token-than-it", "refuses this token")] {
        give(&mut page, wrong);
        until(error, || page.text("document.getElementById('token-error').textContent").contains(error));
        assert_eq!(state(&mut page), "token");
    }
    give(&mut page, TOKEN);
    until_state(&mut page, "live");

    // The names are text.
    let shown = page.text("document.querySelector('#devices td:nth-child(3)').textContent");
    assert_eq!(shown, disk);
    assert_eq!(page.value("document.querySelectorAll('script').length"), 3);
    assert_eq!(page.value("document.querySelectorAll('main b').length"), 0);
    assert_fits(&mut page);
    page.value("sessionStorage.clear()");
    until_state(&mut page, "token");

    // The token in the address is used and does not stay there.
    page.open(&format!("{address}#token={}", TOKEN.replace('+', "%2B")));
    until_state(&mut page, "live");
    assert_eq!(page.text("location.href"), address);
    // Refused requests are in the log of the browser.
    assert_no_problem(&mut page, &["network"]);

    // A script that got into the page all the same does not run, and would have been noticed above.
    page.value(
        "(() => {
            const script = document.createElement('script');
            script.textContent = 'window.hostile = true';
            document.body.append(script);
        })()",
    );
    assert_eq!(page.value("window.hostile === undefined"), true);
    until("the policy has refused it", || {
        page.problems().iter().any(|problem| problem.text.contains("Content Security Policy"))
    });
}

/// Writes the pictures in the documentation: `CBD_SYSTEM_TESTS=1 cargo test -p cbdctrl --test page -- --ignored`.
#[test]
#[ignore = "it writes the pictures of the documentation"]
fn the_pictures_of_the_page() {
    if !system_tests("the_pictures_of_the_page") {
        return;
    }
    let (mut fixture, port) = fixture(false);
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 256 * MIB);
    fixture.start_backend(&disk);
    fixture.ok(&["set", "-b", "0", "writeback_percent=10"]);
    let (client, stop) = (fixture.client(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stops = StopsAtEnd(&stop);
        scope.spawn(|| load(client, &stop));
        let begin = Instant::now();
        support::until_within(Duration::from_secs(90), "the plots are long", || {
            begin.elapsed().as_secs() >= 70
        });
        let mut page = Browser::start(&fixture.folders()[0]);
        for (width, height, scheme) in
            [(400, 1200, "light"), (400, 1200, "dark"), (1600, 900, "light"), (1600, 900, "dark")]
        {
            let picture = picture_of(&mut page, port, (width, height), scheme);
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
            std::fs::write(folder.join(format!("page-{width}-{scheme}.png")), picture).expect("written");
        }
    });
}

/// A load that comes and goes, over a working set that nearly fits.
fn load(mut client: cbd_testkit::Client, stop: &AtomicBool) {
    let (mut random, mut block) = (support::pattern::Random(1), vec![0; 64 << 10]);
    let begin = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let second = begin.elapsed().as_secs();
        for _ in 0..20 + 12 * (second % 9) {
            let blocks = if random.percent(80) { 192 } else { 4096 };
            let at = random.below(blocks) * block.len() as u64;
            if random.percent(30) {
                client.write(at, &block, false).expect("written");
            } else {
                client.read(at, &mut block).expect("read");
            }
        }
        client.flush().expect("flushed");
        std::thread::sleep(Duration::from_millis(40));
    }
}

/// A picture of the page while a device is used.
fn picture_of(page: &mut Browser, port: u16, (width, height): (u32, u32), scheme: &str) -> Vec<u8> {
    page.resize(width, height);
    page.prefer(scheme);
    page.call("Emulation.setScrollbarsHidden", serde_json::json!({ "hidden": true }));
    page.open(&format!("http://127.0.0.1:{port}/"));
    until_state(page, "live");
    until("the map is drawn", || pixels_of(page, "#map", "empty") > 0);
    assert_fits(page);
    if (width, scheme) == (1600, "dark") {
        // This one has the lower part.
        page.value("scrollTo(0, document.body.scrollHeight)");
    }
    let picture = page.picture();
    assert!(picture.len() < 200_000, "{width} {scheme}: {} bytes", picture.len());
    picture
}
