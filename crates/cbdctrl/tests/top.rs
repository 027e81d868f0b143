//! `cbdctrl top` on a pseudo terminal and in a pipe, with a daemon that serves, ends and comes back.

mod support;

use cbd_testkit::pty::Pty;
use rustix::process::Signal;
use rustix::termios::LocalModes;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::net::Shutdown;
use std::num::NonZero;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{Fixture, MIB, until};

const LIMIT: Duration = Duration::from_secs(40);
const SIZE: u64 = 8 * MIB;

/// A daemon with a block device that NBD clients use.
fn device() -> Fixture {
    let fixture = Fixture::with_region();
    fixture.start_backend(&fixture.disk("disk", SIZE));
    fixture
}

fn command(socket: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    command.arg("top").args(arguments).env("CBD_SOCKET", socket);
    command.env("TERM", "xterm").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
    command
}

/// `top` on a terminal that shows what it has drawn.
struct Shown {
    pty: Pty,
    size: (u16, u16),
}

impl Shown {
    fn new(mut command: Command, columns: u16, lines: u16) -> Self {
        let pty = Pty::spawn(&mut command, columns, lines).expect("a terminal");
        Self { pty, size: (lines, columns) }
    }

    fn parsed(&self, output: &[u8]) -> vt100::Parser {
        let [lines, columns] = [self.size.0, self.size.1].map(|size| NonZero::new(size).expect("a size"));
        let mut parser = vt100::Parser::new(lines, columns, 0);
        parser.process(output);
        parser
    }

    /// Waits until the screen is as wanted.
    #[track_caller]
    fn until(&self, what: &str, is_wanted: impl Fn(&vt100::Screen) -> bool) {
        if let Err(output) = self.pty.wait_for(LIMIT, |output| is_wanted(self.parsed(output).screen())) {
            panic!("{what} did not come:\n{}", self.parsed(&output).screen().contents());
        }
    }

    #[track_caller]
    fn has(&self, text: &str) {
        self.until(text, |screen| screen.contents().contains(text));
    }

    fn keys(&self, keys: &[u8]) {
        self.pty.send(keys).expect("typed");
    }

    fn resize(&mut self, columns: u16, lines: u16) {
        self.size = (lines, columns);
        self.pty.resize(columns, lines).expect("resized");
    }

    /// Whether the terminal is as a shell expects it.
    fn is_restored(&self, screen: &vt100::Screen) -> bool {
        let modes = self.pty.modes().expect("modes").local_modes;
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        !screen.alternate_screen() && !screen.hide_cursor() && modes.contains(cooked)
    }

    /// Waits for the end; returns the exit code of a terminal that is restored.
    #[track_caller]
    fn ended(&mut self) -> Option<i32> {
        let status = self.pty.wait(LIMIT).expect("it is ours").expect("it ends");
        self.until("a restored terminal", |screen| self.is_restored(screen));
        status.code()
    }
}

#[test]
fn the_page_follows_the_daemon_and_leaves_the_terminal_as_it_was() {
    let mut fixture = device();
    let mut top = Shown::new(command(&fixture.socket(), &["-i", "0.2"]), 80, 24);
    top.has("> cbd0");
    top.has("serving");
    top.has("daemon.started");
    assert!(!top.pty.modes().expect("modes").local_modes.contains(LocalModes::ICANON));
    // A rate of writes is shown while there are some.
    let rate = |screen: &vt100::Screen| {
        let rows: Vec<String> = screen.rows(0, 80).collect();
        let row = rows.iter().find(|row| row.starts_with("> cbd0"));
        let cell = row.and_then(|row| row.split_whitespace().nth(5).map(str::to_owned));
        cell.is_some_and(|rate| rate.starts_with(|first: char| first.is_ascii_digit()) && rate != "0")
    };
    let mut client = fixture.client();
    until("a rate of writes", || {
        client.write(0, &[7; 65536], false).expect("written");
        rate(top.parsed(&top.pty.output()).screen())
    });
    drop(client);

    top.keys(b"\r");
    top.has("disk alone");
    // Of the blocks that were written.
    top.has("map: read");
    top.keys(b"\x1b");
    top.has("s order");
    top.keys(b"?");
    top.has("powers of 1024");
    top.keys(b"?");
    top.has("s order");

    fixture.kill();
    top.has("daemon away for");
    top.has("last figures of");
    top.has("> cbd0");
    fixture.start();
    top.until("the daemon is back", |screen| {
        let text = screen.contents();
        !text.contains("away") && !text.contains("started again") && text.contains("serving")
    });

    top.resize(10, 5);
    top.has("36x8");
    top.resize(80, 24);
    top.has("> cbd0");
    top.keys(b"q");
    assert_eq!(top.ended(), Some(0));
}

#[test]
fn signals_end_it_with_the_terminal_restored() {
    let fixture = device();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut top = Shown::new(command(&fixture.socket(), &[]), 80, 24);
        top.has("> cbd0");
        top.pty.signal(signal).expect("sent");
        assert_eq!(top.ended(), Some(128 + signal.as_raw()), "{signal:?}");
    }
    let mut top = Shown::new(command(&fixture.socket(), &["--no-colour"]), 80, 24);
    top.has("> cbd0");
    top.keys(b"\x03");
    assert_eq!(top.ended(), Some(0), "Ctrl-C");
    // The modes of SGR: none without colours.
    let output = String::from_utf8_lossy(&top.pty.output()).into_owned();
    assert!(
        !output.contains("\x1b[1m") && !output.contains("\x1b[7m") && !output.contains("\x1b[31m"),
        "{output:?}"
    );
}

#[test]
fn a_process_that_was_stopped_from_outside_sets_its_modes_again() {
    let fixture = device();
    let mut top = Shown::new(command(&fixture.socket(), &[]), 80, 24);
    top.has("> cbd0");
    top.pty.signal(Signal::STOP).expect("sent");
    let mut modes = top.pty.modes().expect("modes");
    modes.local_modes.insert(LocalModes::ICANON | LocalModes::ECHO);
    top.pty.set_modes(&modes).expect("changed");
    top.pty.signal(Signal::CONT).expect("sent");
    until("raw input", || !top.pty.modes().expect("modes").local_modes.contains(LocalModes::ICANON));
    top.has("> cbd0");
    top.keys(b"q");
    assert_eq!(top.pty.wait(LIMIT).expect("it is ours").expect("it ends").code(), Some(0));
}

#[test]
fn a_shell_gets_its_terminal_back_while_it_is_suspended() {
    let fixture = device();
    let mut shell = Command::new("sh");
    let script = "set -m; \"$0\" top -i 0.5; echo suspended; read line; fg; echo ended";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_cbdctrl")]);
    shell.env("CBD_SOCKET", fixture.socket()).env("TERM", "xterm").env("LC_ALL", "C.UTF-8");
    let mut top = Shown::new(shell, 80, 24);
    top.has("> cbd0");
    top.keys(b"\x1a");
    top.until("the shell", |screen| screen.contents().contains("suspended") && top.is_restored(screen));
    top.keys(b"\n");
    top.until("the page", |screen| screen.alternate_screen() && screen.contents().contains("> cbd0"));
    top.keys(b"q");
    top.has("ended");
    assert_eq!(top.ended(), Some(0));
}

#[test]
fn without_a_terminal_it_says_what_to_use_instead() {
    let fixture = Fixture::new();
    let ran = fixture.run(&["top"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(
        ran.stderr.contains("no terminal") && ran.stderr.contains("--once") && ran.stderr.contains("--json"),
        "{ran:?}"
    );
    let ran = fixture.run(&["top", "--once"]);
    assert!(ran.code == 1 && ran.stderr.contains("no daemon listens"), "{ran:?}");
    for wrong in ["0", "-1", "soon", "nan", "1e9"] {
        let ran = fixture.run(&["top", "--once", &format!("--interval={wrong}")]);
        assert!(ran.code == 2 && ran.stderr.contains("0.1 to 3600 seconds"), "{ran:?}");
    }
}

/// Accepts one connection and connects it with the daemon, until its client has the answer.
fn pass_on(listener: &UnixListener, daemon: &Path) {
    let end = Instant::now() + LIMIT;
    let near = loop {
        match listener.accept() {
            Ok((near, _)) => break near,
            Err(error) => assert!(Instant::now() < end, "no client connects: {error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    near.set_nonblocking(false).expect("a socket");
    let far = UnixStream::connect(daemon).expect("the daemon");
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(LIMIT)).expect("a socket");
    }
    let (mut from, mut to) = (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"));
    let forth = std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
    });
    let _ = std::io::copy(&mut &far, &mut &near);
    let _ = near.shutdown(Shutdown::Both);
    forth.join().expect("it ends");
}

/// The figures of the only block device in a status.
fn operations(status: &Value) -> &Value {
    &status["transports"][0]["backends"][0]["blkdevs"][0]["operations"]
}

#[test]
fn counts_of_an_interval_are_the_differences_of_the_status() {
    let fixture = device();
    let socket = fixture.path("between.sock");
    let listener = UnixListener::bind(&socket).expect("a socket");
    listener.set_nonblocking(true).expect("a socket");
    let mut client = fixture.client();
    let before = fixture.json(&["status", "--json"]);

    let mut command = command(socket.to_str().expect("UTF-8"), &["--once", "--json", "-i", "0.1"]);
    let mut top = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("top");
    pass_on(&listener, &fixture.path("run/control.sock"));
    // Between its two questions.
    for number in 0..50 {
        client.write(number * 4096, &[3; 4096], false).expect("written");
    }
    for number in 0..30 {
        client.read(number * 8192, &mut [0; 8192]).expect("read");
    }
    client.flush().expect("flushed");
    let after = fixture.json(&["status", "--json"]);
    pass_on(&listener, &fixture.path("run/control.sock"));
    let mut line = String::new();
    BufReader::new(top.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert!(support::wait(&mut top, LIMIT).expect("it ends").success());

    let said: Value = serde_json::from_str(&line).expect("JSON");
    let device = &said["devices"][0];
    let seconds = said["interval_s"].as_f64().expect("seconds");
    for (name, requests, bytes) in [("write", 50, 50 * 4096), ("read", 30, 30 * 8192), ("flush", 1, 0)] {
        let shown = &device["operations"][name];
        assert_eq!(
            (&shown["requests"], &shown["bytes"]),
            (&requests.into(), &bytes.into()),
            "{name}: {line}"
        );
        for field in ["requests", "bytes", "failed"] {
            let of = |status: &Value| operations(status)[name][field].as_u64().unwrap_or(0);
            assert_eq!(shown[field], of(&after) - of(&before), "{name} {field}");
        }
        let rate = shown["requests_per_s"].as_f64().expect("a rate");
        assert!((rate - f64::from(requests) / seconds).abs() < 0.001 * rate, "{name}: {rate}");
    }
    // Not all of what was read had been written.
    let hits = device["operations"]["read"]["outcomes"]["hit"]["bytes"].as_u64().expect("hits");
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    let ratio = hits as f64 / (30.0 * 8192.0);
    assert_eq!(device["read_hit_ratio"].as_f64(), Some(ratio), "{line}");
    assert_eq!(device["dirty_bytes"], after["transports"][0]["backends"][0]["dirty_bytes"]);
}

#[test]
fn a_table_has_one_row_for_each_device() {
    let fixture = device();
    let table = fixture.ok(&["top", "--once", "-i", "0.1"]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("DEVICE") && lines[1].starts_with("cbd0"), "{table}");
    let ran = fixture.run(&["top", "--once", "-b", "nothing"]);
    assert!(ran.code == 1 && ran.stderr.contains("nothing"), "{ran:?}");
}
