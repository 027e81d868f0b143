//! A panic while the page is shown.

use super::scene::state;
use crate::top::terminal::Screen;
use cbd_testkit::pty::Pty;
use rustix::termios::LocalModes;
use std::process::Command;
use std::time::Duration;

/// Set in the process that panics.
const VARIABLE: &str = "CBD_TOP_TEST_PANICS";
const LIMIT: Duration = Duration::from_secs(40);

#[test]
fn a_panic_of_any_thread_restores_the_terminal_before_its_message() {
    if std::env::var_os(VARIABLE).is_some() {
        let mut screen = Screen::enter().expect("a terminal");
        screen.draw(&state()).expect("drawn");
        let ended = std::thread::spawn(|| panic!("as the test wants it")).join();
        unreachable!("{ended:?}: the process goes on");
    }
    let name = "top::tests::panics::a_panic_of_any_thread_restores_the_terminal_before_its_message";
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([name, "--exact", "--nocapture"]).env(VARIABLE, "1").env("TERM", "xterm");
    let mut pty = Pty::spawn(&mut command, 80, 24).expect("a terminal");
    let status = pty.wait(LIMIT).expect("it is ours").expect("it ends");
    assert_eq!(status.code(), Some(101));
    let find =
        |output: &[u8], what: &str| output.windows(what.len()).position(|part| part == what.as_bytes());
    let output =
        pty.wait_for(LIMIT, |output| find(output, "as the test wants it").is_some()).expect("a message");
    let at = |what: &str| {
        find(&output, what).unwrap_or_else(|| panic!("{what:?}: {}", String::from_utf8_lossy(&output)))
    };
    let (entered, left) = (at("\x1b[?1049h"), at("\x1b[?1049l"));
    assert!(entered < at("db-data") && at("db-data") < left && left < at("as the test wants it"));
    assert!(at("\x1b[?25h") < at("as the test wants it"), "the cursor");
    let modes = pty.modes().expect("modes").local_modes;
    assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{modes:?}");
}
