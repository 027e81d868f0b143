//! The settings of scrubs, and others that the daemon stores with them, as users type them.

use super::{invalid, seconds};
use crate::api::{Offload, ScrubSettings, SettingsChange};
use crate::scrub::schedule::{Window, check_rate};
use crate::size::{parse_size, typed_size};
use cbd_types::Result;

/// Their names.
pub(super) const NAMES: [&str; 6] =
    ["scrub_every", "scrub_window", "scrub_rate", "scrub_idle_only", "offload", "recovery_point_max_age"];

/// Puts a setting into a change; returns whether it was there already.
pub(super) fn replace(change: &mut SettingsChange, name: &str, value: &str) -> Result<bool> {
    Ok(match name {
        "scrub_every" => change.scrub_every_s.replace(every(value)?).is_some(),
        "scrub_window" => {
            let window = if value == "off" { "" } else { value };
            if window.is_empty() != (value == "off") {
                return Err(invalid(
                    "scrub_window is HH:MM-HH:MM in UTC, e.g. 22:00-06:00, or off".to_owned(),
                ));
            }
            Window::parse(window)?;
            change.scrub_window.replace(window.to_owned()).is_some()
        }
        "scrub_rate" => {
            let rate = match value {
                "off" => 0,
                _ => {
                    let rate = parse_size(value).map_err(|_| {
                        invalid(format!("scrub_rate is off or bytes a second (e.g. 50M), not \"{value}\""))
                    })?;
                    check_rate(rate)?;
                    rate
                }
            };
            change.scrub_rate.replace(rate).is_some()
        }
        "recovery_point_max_age" => change.recovery_point_max_age_s.replace(parse_max_age(value)?).is_some(),
        "offload" => {
            let offload = match value {
                "auto" => Offload::Auto,
                "on" => Offload::On,
                "never" => Offload::Never,
                _ => return Err(invalid(format!("offload is auto, on or never, not \"{value}\""))),
            };
            change.offload.replace(offload).is_some()
        }
        _ => {
            let is_idle_only = match value {
                "yes" => true,
                "no" => false,
                _ => return Err(invalid(format!("scrub_idle_only is yes or no, not \"{value}\""))),
            };
            change.scrub_idle_only.replace(is_idle_only).is_some()
        }
    })
}

/// All settings of scrubs as arguments of `set`.
#[must_use]
pub fn typed_scrub(settings: &ScrubSettings) -> String {
    let every = match settings.scrub_every_s {
        0 => "never".to_owned(),
        seconds => format!("{seconds}s"),
    };
    let window = if settings.scrub_window.is_empty() { "off" } else { &settings.scrub_window };
    let rate = if settings.scrub_rate == 0 { "off".to_owned() } else { typed_size(settings.scrub_rate) };
    let idle_only = if settings.scrub_idle_only { "yes" } else { "no" };
    let offload = match settings.offload {
        Offload::Auto => "auto",
        Offload::On => "on",
        Offload::Never => "never",
    };
    let max_age = match settings.recovery_point_max_age_s {
        0 => "none".to_owned(),
        seconds => format!("{seconds}s"),
    };
    format!(
        "scrub_every={every} scrub_window={window} scrub_rate={rate} scrub_idle_only={idle_only} offload={offload} \
         recovery_point_max_age={max_age}"
    )
}

/// Seconds of the setting `recovery_point_max_age`: a time with a unit, or `none`.
///
/// # Errors
/// [`cbd_types::ErrorKind::InvalidArgument`] with the permitted values.
pub fn parse_max_age(value: &str) -> Result<u32> {
    if value == "none" {
        return Ok(0);
    }
    seconds(value).ok_or_else(|| {
        invalid(format!(
            "recovery_point_max_age is none, or a time from 1s to 7d with its unit s, m, h or d (e.g. 30s or 10m), not \"{value}\""
        ))
    })
}

/// The seconds of a time with a unit: `14d`.
fn every(value: &str) -> Result<u64> {
    if value == "never" || value == "0" {
        return Ok(0);
    }
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 7 * 86_400)];
    let seconds = units.into_iter().find_map(|(unit, seconds)| {
        let number = value.strip_suffix(unit)?;
        number.parse::<u64>().ok()?.checked_mul(seconds)
    });
    seconds.ok_or_else(|| {
        invalid(format!("scrub_every is a time from 1h on, e.g. 14d, or never, not \"{value}\""))
    })
}

#[cfg(test)]
mod tests {
    use crate::settings::parse_changes;

    fn parse(text: &str) -> Result<crate::api::SettingsChange, String> {
        let arguments: Vec<String> = text.split(' ').map(str::to_owned).collect();
        parse_changes(&arguments).map_err(|error| error.line())
    }

    #[test]
    fn the_settings_of_scrubs_are_understood() {
        let change =
            parse("scrub_every=14d scrub_window=22:00-06:00 scrub_rate=50M scrub_idle_only=yes offload=on")
                .unwrap();
        for (text, seconds) in [("1s", 1), ("30s", 30), ("10m", 600), ("7d", 604_800), ("none", 0)] {
            let change = parse(&format!("recovery_point_max_age={text}")).unwrap();
            assert_eq!(change.recovery_point_max_age_s, Some(seconds));
        }
        assert_eq!(change.scrub_every_s, Some(14 * 86_400));
        assert_eq!(change.scrub_window.as_deref(), Some("22:00-06:00"));
        assert_eq!((change.scrub_rate, change.scrub_idle_only), (Some(50 << 20), Some(true)));
        assert_eq!(change.offload, Some(crate::api::Offload::On));
        let off = parse("scrub_every=never scrub_window=off scrub_rate=off scrub_idle_only=no").unwrap();
        assert_eq!((off.scrub_every_s, off.scrub_window.as_deref()), (Some(0), Some("")));
        assert_eq!((off.scrub_rate, off.scrub_idle_only), (Some(0), Some(false)));
    }

    #[test]
    fn settings_of_scrubs_are_typed_as_they_are_understood() {
        let mut settings = crate::api::ScrubSettings::default();
        for text in [
            "scrub_every=never scrub_window=off scrub_rate=off scrub_idle_only=no offload=auto recovery_point_max_age=none",
            "scrub_every=1209600s scrub_window=22:00-06:00 scrub_rate=50M scrub_idle_only=yes offload=never recovery_point_max_age=30s",
        ] {
            settings.apply(&parse(text).unwrap());
            assert_eq!(super::typed_scrub(&settings), text);
        }
    }

    #[test]
    fn values_that_mean_nothing_are_refused_with_those_that_do() {
        for (text, part) in [
            ("scrub_every=soon", "14d"),
            ("scrub_every=10m", "1h"),
            ("scrub_every=99999d", "3650d"),
            ("scrub_window=night", "22:00-06:00"),
            ("scrub_window=", "22:00-06:00"),
            ("scrub_rate=0", "never end"),
            ("scrub_rate=1K", "64K"),
            ("scrub_rate=fast", "50M"),
            ("scrub_idle_only=maybe", "yes or no"),
            ("offload=yes", "auto, on or never"),
            ("recovery_point_max_age=0.5", "1s to 7d"),
            ("recovery_point_max_age=8d", "1s to 7d"),
            ("recovery_point_max_age=604801s", "1s to 7d"),
            ("recovery_point_max_age=30", "with its unit"),
            ("recovery_point_max_age=0", "none, or a time from 1s"),
            ("recovery_point_max_age=0s", "1s to 7d"),
            ("recovery_point_max_age=-1", "none"),
            ("scrub_rate=50M scrub_rate=60M", "twice"),
        ] {
            let line = parse(text).unwrap_err();
            assert!(line.contains(part), "{text}: {line}");
        }
    }
}
