//! When scrubs run by themselves: every so many seconds, within a window of the day.
//!
//! Times are seconds since 1970 UTC, and the window is in UTC, as all times that the daemon prints.

use crate::api::{ScrubSettings, SettingsChange};
use cbd_types::{Error, ErrorKind, Result};

/// Seconds of a day.
const DAY: u64 = 86_400;

/// The least `scrub_every`, in seconds: an hour.
const EVERY_MIN_S: u64 = 3600;

/// The largest, in seconds: ten years.
const EVERY_MAX_S: u64 = 3650 * DAY;

/// The least rate in bytes a second. A request takes 16 s then; a lower rate would keep requests waiting for minutes.
pub const RATE_MIN: u64 = 64 << 10;

/// A window of the day, in seconds of it. It ends on the next day if its end is not after its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    from: u64,
    to: u64,
}

impl Window {
    /// Reads `HH:MM-HH:MM`; none for an empty text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for anything else, and for a window without length.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        if text.is_empty() {
            return Ok(None);
        }
        let refused = || {
            let text = format!(
                "scrub_window is HH:MM-HH:MM in UTC, e.g. 22:00-06:00, or off for the whole day, not \"{text}\""
            );
            Error::new(ErrorKind::InvalidArgument, text)
        };
        let (from, to) = text.split_once('-').ok_or_else(refused)?;
        let window =
            Self { from: second_of(from).ok_or_else(refused)?, to: second_of(to).ok_or_else(refused)? };
        if window.from == window.to { Err(refused()) } else { Ok(Some(window)) }
    }

    /// Whether the window is open at `now`.
    #[must_use]
    pub const fn is_open(self, now: u64) -> bool {
        let second = now % DAY;
        if self.from < self.to {
            self.from <= second && second < self.to
        } else {
            self.from <= second || second < self.to
        }
    }

    /// The first moment from `now` on at which it is open.
    #[must_use]
    pub const fn next(self, now: u64) -> u64 {
        if self.is_open(now) {
            return now;
        }
        let opens = now - now % DAY + self.from;
        if opens < now { opens + DAY } else { opens }
    }
}

/// The second of the day of `HH:MM`.
fn second_of(text: &str) -> Option<u64> {
    let (hour, minute) = text.split_once(':')?;
    let number = |text: &str, limit: u64| {
        let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|value| is_number && *value < limit)
    };
    Some(number(hour, 24)? * 3600 + number(minute, 60)? * 60)
}

/// Checks a rate in bytes a second.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for 0 and for rates below [`RATE_MIN`].
pub fn check_rate(rate: u64) -> Result<()> {
    match rate {
        0 => {
            let text = "a scrub with a rate of 0 would never end: leave the rate out for one without a limit, or pause the scrub";
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
        rate if rate < RATE_MIN => {
            let text = format!(
                "the rate of a scrub is 64K bytes a second or more, not {rate}: pause the scrub instead"
            );
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
        _ => Ok(()),
    }
}

/// Checks the settings of scrubs in a change.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the setting and its permitted values.
pub fn check(change: &SettingsChange) -> Result<()> {
    let every = change.scrub_every_s.filter(|every| *every > 0);
    if every.is_some_and(|every| !(EVERY_MIN_S..=EVERY_MAX_S).contains(&every)) {
        let text = "scrub_every is never, or 1h to 3650d, e.g. 14d";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    if let Some(window) = &change.scrub_window {
        Window::parse(window)?;
    }
    // 0 is no limit here, which the command spells as off.
    change.scrub_rate.filter(|rate| *rate > 0).map_or(Ok(()), check_rate)
}

/// Whether a change has settings of scrubs, or others that are stored with them.
#[must_use]
pub const fn has_any(change: &SettingsChange) -> bool {
    change.scrub_every_s.is_some()
        || change.scrub_window.is_some()
        || change.scrub_rate.is_some()
        || change.scrub_idle_only.is_some()
        || change.offload.is_some()
        || change.recovery_point_max_age_s.is_some()
}

/// Separates the settings of scrubs from the others.
#[must_use]
pub fn others(change: &SettingsChange) -> SettingsChange {
    SettingsChange {
        scrub_every_s: None,
        scrub_window: None,
        scrub_rate: None,
        scrub_idle_only: None,
        offload: None,
        recovery_point_max_age_s: None,
        ..change.clone()
    }
}

impl ScrubSettings {
    /// Takes what a change has of them.
    pub fn apply(&mut self, change: &SettingsChange) {
        self.scrub_every_s = change.scrub_every_s.unwrap_or(self.scrub_every_s);
        if let Some(window) = &change.scrub_window {
            self.scrub_window.clone_from(window);
        }
        self.scrub_rate = change.scrub_rate.unwrap_or(self.scrub_rate);
        self.scrub_idle_only = change.scrub_idle_only.unwrap_or(self.scrub_idle_only);
        self.offload = change.offload.unwrap_or(self.offload);
        let max_age = change.recovery_point_max_age_s;
        self.recovery_point_max_age_s = max_age.unwrap_or(self.recovery_point_max_age_s);
    }

    /// Whether scheduled scrubs run at `now`.
    #[must_use]
    pub fn is_open(&self, now: u64) -> bool {
        self.window().is_none_or(|window| window.is_open(now))
    }

    /// When the next scrub begins after one at `last`; none if there is no schedule.
    #[must_use]
    pub fn next(&self, last: Option<u64>, now: u64) -> Option<u64> {
        if self.scrub_every_s == 0 {
            return None;
        }
        let due = last.map_or(now, |last| last.saturating_add(self.scrub_every_s)).max(now);
        Some(self.window().map_or(due, |window| window.next(due)))
    }

    fn window(&self) -> Option<Window> {
        // A text that is no window was refused when it was set.
        Window::parse(&self.scrub_window).ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_may_end_on_the_next_day() {
        let night = Window::parse("22:00-06:00").unwrap().unwrap();
        let at = |hour: u64, minute: u64| 20_000 * DAY + hour * 3600 + minute * 60;
        for (hour, minute, is_open) in
            [(21, 59, false), (22, 0, true), (23, 59, true), (0, 0, true), (5, 59, true), (6, 0, false)]
        {
            assert_eq!(night.is_open(at(hour, minute)), is_open, "{hour}:{minute}");
        }
        assert_eq!(night.next(at(12, 0)), at(22, 0));
        assert_eq!(night.next(at(3, 0)), at(3, 0));
        let noon = Window::parse("12:00-13:30").unwrap().unwrap();
        assert_eq!(noon.next(at(13, 30)), at(36, 0));
        assert_eq!(noon.next(at(11, 0)), at(12, 0));
        assert!(Window::parse("").unwrap().is_none());
        for text in
            ["22-6", "22:00", "24:00-06:00", "22:60-06:00", "22:00-22:00", "+2:00-03:00", "22:00-06:00-07:00"]
        {
            assert!(Window::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_scrub_is_due_so_long_after_the_last_one_and_in_its_window() {
        let now = 20_000 * DAY + 12 * 3600;
        let mut settings = ScrubSettings::default();
        assert_eq!(settings.next(Some(0), now), None, "there is no schedule");
        settings.scrub_every_s = 14 * DAY;
        assert_eq!(settings.next(None, now), Some(now), "there was none yet");
        assert_eq!(settings.next(Some(now - DAY), now), Some(now + 13 * DAY));
        assert_eq!(settings.next(Some(0), now), Some(now), "it is overdue");
        settings.scrub_window = "22:00-06:00".to_owned();
        assert_eq!(settings.next(Some(0), now), Some(now + 10 * 3600));
    }

    #[test]
    fn a_rate_with_which_no_scrub_would_end_is_refused_with_what_to_do() {
        let line = |rate| check_rate(rate).unwrap_err().line();
        assert!(line(0).contains("leave the rate out"));
        assert!(line(1000).contains("64K"));
        check_rate(RATE_MIN).unwrap();
        check_rate(u64::MAX).unwrap();
    }
}
