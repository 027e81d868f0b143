//! A daemon that is away, and comes back.

use super::scene::{page, read, sample, state, status};
use serde_json::json;
use std::time::Duration;

#[test]
fn a_daemon_that_is_away_is_shown_with_the_last_figures() {
    let mut state = state();
    state.failed(Duration::from_secs(6), "no daemon listens on /run/cbd/control.sock".to_owned());
    state.now = Duration::from_secs(11);
    for (width, height) in [(80, 24), (200, 60)] {
        let page = page(&state, width, height);
        let text = "daemon away for 5 s, last figures of 15:09:30: no daemon listens";
        assert!(page.contains(text) && page.contains("121M"), "{page}");
    }
    let small = page(&state, 50, 10);
    assert!(small.contains("daemon away for 5 s, last figures of 15:09:30"), "{small}");

    // It counts from the first failure.
    state.failed(Duration::from_secs(12), "it hangs".to_owned());
    let text = page(&state, 80, 24);
    assert!(text.contains("daemon away for 6 s") && text.contains("it hangs"), "{text}");

    // Back, and started again meanwhile.
    let mut status = status(1);
    (status["pid"], status["uptime_s"]) = (json!(4712), json!(1));
    state.sampled(read(&status, 7));
    let text = page(&state, 80, 24);
    assert!(!text.contains("away") && text.contains("was started again") && !text.contains("121M"), "{text}");
}

#[test]
fn a_daemon_that_answers_again_has_rates_over_the_whole_time() {
    let mut state = state();
    state.failed(Duration::from_secs(6), "it hangs".to_owned());
    state.sampled(sample(4));
    let text = page(&state, 80, 24);
    assert!(!text.contains("away") && text.contains("121M   31k"), "{text}");
}
