//! Settings as users type them, and the limits of their values.

mod scrub;

use crate::api::{BlkdevChange, BlkdevClass, Settings, SettingsChange};
use crate::scrub::schedule;
use crate::size::{parse_size, typed_size};
use cbd_runtime::check_writeback_rate;
use cbd_types::{Error, ErrorKind, Name, Result};
pub use scrub::{parse_max_age, typed_scrub};

/// The largest `gc_percent`: above it reclaim would begin too late to keep writers from waiting.
pub const GC_PERCENT_MAX: i64 = 98;

/// The largest `writeback_percent`: above it writeback would begin too late to keep writers from waiting.
pub const WRITEBACK_PERCENT_MAX: i64 = 90;

/// The smallest and the largest `pin_percent`: what is left is for everything else.
pub const PIN_PERCENT: (i64, i64) = (1, 60);

/// The smallest and the largest `metadata_min_percent`; with `pin_percent` it is at most the largest `pin_percent`.
const METADATA_MIN_PERCENT: (i64, i64) = (0, 59);

/// The smallest and the largest `metadata_max_percent`.
const METADATA_MAX_PERCENT: (i64, i64) = (1, 100);

/// The largest `write_error_after_s`: a day.
pub const SECONDS_MAX: u32 = 86_400;

/// The largest latency in microseconds: a minute.
pub const LATENCY_US_MAX: u32 = 60_000_000;

/// The longest pause of writeback in seconds: a week.
pub const PAUSE_S_MAX: u32 = 7 * 86_400;

/// Seconds for which the backing devices of several backends stay at their common moment, unless others are requested.
pub const HOLD_S: u32 = 30;

/// The names of all settings.
pub const NAMES: [&str; 26] = [
    "gc_percent",
    "consistency",
    "writeback_rate",
    "writeback_percent",
    "writeback",
    "read_latency_target_us",
    "on_write_error",
    "write_error_after_s",
    "cache_mode",
    "read_fill",
    "sequential_read_cutoff",
    "readahead",
    "sequential_write_cutoff",
    "when_full",
    "congestion_read_us",
    "congestion_write_us",
    "pin_percent",
    "metadata_min_percent",
    "metadata_max_percent",
    "scrub_every",
    "scrub_window",
    "scrub_rate",
    "scrub_idle_only",
    "offload",
    "recovery_point_max_age",
    "name",
];

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Parses `NAME=VALUE` arguments into a change of settings.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the setting and its permitted values.
pub fn parse_changes(arguments: &[String]) -> Result<SettingsChange> {
    let mut change = SettingsChange::default();
    for argument in arguments {
        let (name, value) = argument.split_once('=').ok_or_else(|| {
            invalid(format!("\"{argument}\" is no setting: write NAME=VALUE, e.g. gc_percent=70"))
        })?;
        let twice = match name {
            "gc_percent" => change.gc_percent.replace(percent(name, value)?).is_some(),
            "writeback_percent" => change.writeback_percent.replace(percent(name, value)?).is_some(),
            "consistency" => change.consistency.replace(value.parse()?).is_some(),
            "writeback_rate" => {
                let rate = match value {
                    "auto" => 0,
                    _ => parse_size(value).ok().filter(|&rate| rate > 0).ok_or_else(|| {
                        invalid(format!(
                            "writeback_rate is auto or bytes a second (e.g. 100M), not \"{value}\""
                        ))
                    })?,
                };
                change.writeback_rate.replace(rate).is_some()
            }
            "writeback" => change.writeback_pause_s.replace(pause(value)?).is_some(),
            "cache_mode" => change.cache_mode.replace(value.parse()?).is_some(),
            "read_fill" => change.read_fill.replace(value.parse()?).is_some(),
            "readahead" => change.readahead.replace(value.parse()?).is_some(),
            "when_full" => change.when_full.replace(value.parse()?).is_some(),
            "sequential_read_cutoff" => {
                change.sequential_read_cutoff.replace(size_or_off(name, value)?).is_some()
            }
            "sequential_write_cutoff" => {
                change.sequential_write_cutoff.replace(size_or_off(name, value)?).is_some()
            }
            "congestion_read_us" => change.congestion_read_us.replace(microseconds(name, value)?).is_some(),
            "congestion_write_us" => change.congestion_write_us.replace(microseconds(name, value)?).is_some(),
            "read_latency_target_us" => {
                change.read_latency_target_us.replace(microseconds(name, value)?).is_some()
            }
            "on_write_error" => change.on_write_error.replace(value.parse()?).is_some(),
            "write_error_after_s" => {
                let seconds = value.parse().map_err(|_| {
                    invalid(format!(
                        "write_error_after_s is a whole number of seconds from 0 to {SECONDS_MAX}, not \"{value}\""
                    ))
                })?;
                change.write_error_after_s.replace(seconds).is_some()
            }
            "metadata_min_percent" => change.metadata_min_percent.replace(percent(name, value)?).is_some(),
            "metadata_max_percent" => change.metadata_max_percent.replace(percent(name, value)?).is_some(),
            "pin_percent" => change.pin_percent.replace(percent(name, value)?).is_some(),
            "name" => change.name.replace(value.to_owned()).is_some(),
            name if scrub::NAMES.contains(&name) => scrub::replace(&mut change, name, value)?,
            "class" => {
                return Err(invalid(
                    "class is a setting of a block device (-d), not of a backend (-b)".to_owned(),
                ));
            }
            _ => {
                return Err(invalid(format!(
                    "there is no setting \"{name}\": there are {}",
                    NAMES.join(", ")
                )));
            }
        };
        if twice {
            return Err(invalid(format!("{name} is given twice")));
        }
    }
    check(&change)?;
    Ok(change)
}

/// Parses `NAME=VALUE` arguments into a change of a block device.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a setting of backends, and for what [`parse_changes`] refuses.
pub fn parse_blkdev_changes(arguments: &[String]) -> Result<BlkdevChange> {
    let (classes, others): (Vec<&String>, Vec<&String>) =
        arguments.iter().partition(|argument| argument.starts_with("class="));
    let class = match classes[..] {
        [] => None,
        [argument] => Some(match argument.trim_start_matches("class=") {
            "none" => BlkdevClass::None,
            "metadata" => BlkdevClass::Metadata,
            other => return Err(invalid(format!("class is none or metadata, not \"{other}\""))),
        }),
        _ => return Err(invalid("class is given twice".to_owned())),
    };
    let others: Vec<String> = others.into_iter().cloned().collect();
    let change = parse_changes(&others)?;
    if (SettingsChange { name: None, ..change.clone() }) != SettingsChange::default() {
        return Err(invalid(
            "a block device has name and class, and no other setting: set those of its backend (-b)"
                .to_owned(),
        ));
    }
    Ok(BlkdevChange { name: change.name, class })
}

/// The name in a change: `None` if it is unchanged, `Some(None)` if it is removed.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is no name.
pub fn changed_name(name: Option<&str>) -> Result<Option<Option<Name>>> {
    match name {
        None => Ok(None),
        Some("") => Ok(Some(None)),
        Some(text) => Ok(Some(Some(Name::new(text)?))),
    }
}

/// `settings` as the arguments from which [`parse_changes`] makes them, separated by blanks; without a pause of writeback,
/// which ends by itself.
#[must_use]
pub fn typed(settings: &Settings) -> String {
    let rate = match settings.writeback_rate {
        0 => "auto".to_owned(),
        rate => typed_size(rate),
    };
    let size = |size: u64| if size == 0 { "off".to_owned() } else { typed_size(size) };
    let latency = |us: u32| if us == 0 { "off".to_owned() } else { us.to_string() };
    [
        ("gc_percent", settings.gc_percent.to_string()),
        ("consistency", settings.consistency.name().to_owned()),
        ("writeback_rate", rate),
        ("writeback_percent", settings.writeback_percent.to_string()),
        ("on_write_error", settings.on_write_error.name().to_owned()),
        ("write_error_after_s", settings.write_error_after_s.to_string()),
        ("read_latency_target_us", latency(settings.read_latency_target_us)),
        ("cache_mode", settings.cache_mode.name().to_owned()),
        ("read_fill", settings.read_fill.name().to_owned()),
        ("sequential_read_cutoff", size(settings.sequential_read_cutoff)),
        ("readahead", settings.readahead.name().to_owned()),
        ("sequential_write_cutoff", size(settings.sequential_write_cutoff)),
        ("when_full", settings.when_full.name().to_owned()),
        ("congestion_read_us", latency(settings.congestion_read_us)),
        ("congestion_write_us", latency(settings.congestion_write_us)),
        ("pin_percent", settings.pin_percent.to_string()),
        ("metadata_min_percent", settings.metadata_min_percent.to_string()),
        ("metadata_max_percent", settings.metadata_max_percent.to_string()),
    ]
    .map(|(name, value)| format!("{name}={value}"))
    .join(" ")
}

/// A size in bytes, or 0 for "off".
fn size_or_off(name: &str, value: &str) -> Result<u64> {
    match value {
        "off" => Ok(0),
        _ => parse_size(value)
            .ok()
            .filter(|&size| size > 0)
            .ok_or_else(|| invalid(format!("{name} is off or a size (e.g. 4M), not \"{value}\""))),
    }
}

/// A latency, or 0 for "off".
fn microseconds(name: &str, value: &str) -> Result<u32> {
    match value {
        "off" => Ok(0),
        _ => value.parse().map_err(|_| {
            invalid(format!("{name} is off or microseconds from 0 to {LATENCY_US_MAX}, not \"{value}\""))
        }),
    }
}

/// Seconds of a pause of writeback: `paused:TIME`, with a unit of s, m, h or d; 0 for "on".
fn pause(value: &str) -> Result<u32> {
    let wrong = || {
        invalid(format!(
            "writeback is on, or paused:TIME with a time from 1s to 7d (e.g. paused:10m), not \"{value}\""
        ))
    };
    if value == "on" {
        return Ok(0);
    }
    value.strip_prefix("paused:").and_then(seconds).ok_or_else(wrong)
}

/// Seconds of a time with a unit of s, m, h or d, from a second to a week.
#[must_use]
pub fn seconds(time: &str) -> Option<u32> {
    let (at, unit) = time.char_indices().last()?;
    let unit = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let seconds = time[..at].parse::<u32>().ok()?.checked_mul(unit)?;
    (1..=PAUSE_S_MAX).contains(&seconds).then_some(seconds)
}

/// Seconds for which a common moment is held: a time with a unit of s, m, h or d.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the permitted times.
pub fn parse_hold(time: &str) -> Result<u32> {
    seconds(time).ok_or_else(|| {
        invalid(format!("the moment is held for a time from 1s to 7d (e.g. 60s or 10m), not \"{time}\""))
    })
}

/// Seconds for which a common moment is held, if so many are requested.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for none or more than a week: at a moment that is not held nothing can be done with the backing
/// devices.
pub fn check_hold(seconds: Option<u32>) -> Result<u32> {
    let seconds = seconds.unwrap_or(HOLD_S);
    if (1..=PAUSE_S_MAX).contains(&seconds) {
        return Ok(seconds);
    }
    Err(invalid(format!("the moment is held for 1 to {PAUSE_S_MAX} seconds, not {seconds}")))
}

fn percent(name: &str, value: &str) -> Result<i64> {
    value.parse().map_err(|_| {
        let (min, max) = percent_bounds(name);
        invalid(format!("{name} is a whole number from {min} to {max}, not \"{value}\""))
    })
}

fn percent_bounds(name: &str) -> (i64, i64) {
    match name {
        "gc_percent" => (0, GC_PERCENT_MAX),
        "pin_percent" => PIN_PERCENT,
        "metadata_min_percent" => METADATA_MIN_PERCENT,
        "metadata_max_percent" => METADATA_MAX_PERCENT,
        _ => (0, WRITEBACK_PERCENT_MAX),
    }
}

/// Checks that the values of a change are within their limits.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the setting and its permitted values.
pub fn check(change: &SettingsChange) -> Result<()> {
    schedule::check(change)?;
    for (name, value) in [
        ("gc_percent", change.gc_percent),
        ("writeback_percent", change.writeback_percent),
        ("pin_percent", change.pin_percent),
        ("metadata_min_percent", change.metadata_min_percent),
        ("metadata_max_percent", change.metadata_max_percent),
    ] {
        let (min, max) = percent_bounds(name);
        if let Some(value) = value.filter(|value| !(min..=max).contains(value)) {
            return Err(invalid(format!("{name} is a whole number from {min} to {max}, not {value}")));
        }
    }
    if let Some(seconds) = change.write_error_after_s.filter(|&seconds| seconds > SECONDS_MAX) {
        return Err(invalid(format!(
            "write_error_after_s is a whole number of seconds from 0 to {SECONDS_MAX}, not {seconds}"
        )));
    }
    for (name, value) in [
        ("congestion_read_us", change.congestion_read_us),
        ("congestion_write_us", change.congestion_write_us),
        ("read_latency_target_us", change.read_latency_target_us),
    ] {
        if let Some(value) = value.filter(|&value| value > LATENCY_US_MAX) {
            return Err(invalid(format!("{name} is 0 to {LATENCY_US_MAX} microseconds, not {value}")));
        }
    }
    if let Some(seconds) = change.writeback_pause_s.filter(|&seconds| seconds > PAUSE_S_MAX) {
        return Err(invalid(format!("writeback is paused for at most {PAUSE_S_MAX} seconds, not {seconds}")));
    }
    if let Some(seconds) = change.recovery_point_max_age_s.filter(|&seconds| seconds > PAUSE_S_MAX) {
        return Err(invalid(format!(
            "recovery_point_max_age is at most {PAUSE_S_MAX} seconds, not {seconds}"
        )));
    }
    changed_name(change.name.as_deref())?;
    check_writeback_rate(change.writeback_rate.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Consistency, OnWriteError};

    fn parse(arguments: &[&str]) -> Result<SettingsChange> {
        parse_changes(&arguments.iter().map(|&text| text.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn settings_are_understood() {
        let change = parse(&["gc_percent=98", "consistency=checkpoint", "writeback_rate=100M"]).unwrap();
        assert_eq!(change.gc_percent, Some(98));
        assert_eq!(change.consistency, Some(Consistency::Checkpoint));
        assert_eq!(change.writeback_rate, Some(100 << 20));
        assert_eq!(change.writeback_percent, None);
        let change = parse(&["on_write_error=park", "write_error_after_s=5"]).unwrap();
        assert_eq!((change.on_write_error, change.write_error_after_s), (Some(OnWriteError::Park), Some(5)));
        assert_eq!(parse(&["writeback_rate=auto"]).unwrap().writeback_rate, Some(0));
    }

    #[test]
    fn a_setting_that_can_be_off_is_off_or_has_a_value() {
        for name in ["sequential_read_cutoff", "sequential_write_cutoff"] {
            let bytes = |value: &str| {
                let change = parse(&[&format!("{name}={value}")])?;
                Ok::<_, Error>(change.sequential_read_cutoff.or(change.sequential_write_cutoff))
            };
            assert_eq!(bytes("off").unwrap(), Some(0));
            assert_eq!(bytes("4M").unwrap(), Some(4 << 20));
            for value in ["0", "", "x", "-1"] {
                let error = bytes(value).unwrap_err();
                assert!(error.line().starts_with(&format!("{name} is off or a size")), "{error}");
            }
        }
        for name in ["congestion_read_us", "congestion_write_us", "read_latency_target_us"] {
            assert!(
                parse(&[&format!("{name}=off")]).is_ok() && parse(&[&format!("{name}=60000000")]).is_ok()
            );
            for value in ["60000001", "", "x", "-1", "2ms"] {
                let error = parse(&[&format!("{name}={value}")]).unwrap_err();
                assert!(error.line().starts_with(name), "{error}");
            }
        }
    }

    #[test]
    fn writeback_is_paused_for_a_time_with_a_unit() {
        let seconds =
            |value: &str| parse(&[&format!("writeback={value}")]).map(|change| change.writeback_pause_s);
        for (value, expected) in
            [("on", 0), ("paused:1s", 1), ("paused:10m", 600), ("paused:2h", 7200), ("paused:7d", 604_800)]
        {
            assert_eq!(seconds(value).unwrap(), Some(expected), "{value}");
        }
        for value in
            ["", "off", "paused", "paused:", "paused:10", "paused:0s", "paused:8d", "paused:x", "paused:-1m"]
        {
            let error = seconds(value).unwrap_err();
            assert!(error.line().starts_with("writeback is on, or paused:TIME"), "{error}");
        }
    }

    #[test]
    fn a_moment_is_held_for_a_time_with_a_unit() {
        for (time, expected) in [("1s", 1), ("60s", 60), ("10m", 600), ("7d", 604_800)] {
            assert_eq!(parse_hold(time).unwrap(), expected, "{time}");
            assert_eq!(check_hold(Some(expected)).unwrap(), expected);
        }
        for time in ["", "0s", "60", "8d", "s", "-1s", "1.5m", "ä"] {
            let error = parse_hold(time).unwrap_err();
            assert!(error.line().starts_with("the moment is held for a time from 1s to 7d"), "{error}");
        }
        assert_eq!(check_hold(None).unwrap(), HOLD_S);
        assert!(check_hold(Some(0)).is_err() && check_hold(Some(PAUSE_S_MAX + 1)).is_err());
    }

    #[test]
    fn settings_are_typed_as_they_are_understood() {
        let settings: Settings = cbd_engine::Settings::default().into();
        let change =
            parse_changes(&typed(&settings).split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap();
        assert_eq!(change.sequential_read_cutoff, Some(1 << 20));
        assert_eq!(change.when_full, Some(crate::api::WhenFull::Wait));
        let names: Vec<_> = typed(&settings)
            .split(' ')
            .filter_map(|text| text.split_once('='))
            .map(|(name, _)| name.to_owned())
            .collect();
        let is_typed = |name: &&str| names.iter().any(|typed| typed == name);
        assert!(NAMES.iter().all(|name| {
            // Those of scrubs are not in the region, and are logged by the scrub.
            ["writeback", "name"].contains(name) || scrub::NAMES.contains(name) || is_typed(name)
        }));
    }

    #[test]
    fn a_name_is_given_and_removed() {
        assert_eq!(parse(&["name=db-data"]).unwrap().name.as_deref(), Some("db-data"));
        assert_eq!(parse(&["name="]).unwrap().name.as_deref(), Some(""));
        assert_eq!(changed_name(Some("")).unwrap(), Some(None));
        assert_eq!(changed_name(None).unwrap(), None);
        for name in ["7", "-a", ".a", "a/b", "a b", "a\n", &"x".repeat(33)] {
            let error = parse(&[&format!("name={name}")]).unwrap_err();
            assert!(error.line().contains("is no name: "), "{error}");
        }
    }

    #[test]
    fn a_block_device_has_a_name_and_no_other_setting() {
        let parse = |text: &str| parse_blkdev_changes(&[text.to_owned()]);
        assert_eq!(parse("name=disk").unwrap().name.as_deref(), Some("disk"));
        assert_eq!(parse("class=metadata").unwrap().class, Some(BlkdevClass::Metadata));
        assert_eq!(parse("class=none").unwrap(), BlkdevChange { name: None, class: Some(BlkdevClass::None) });
        let of_backend = parse_changes(&["class=metadata".to_owned()]).unwrap_err();
        assert!(of_backend.line().contains("block device (-d)"), "{of_backend}");
        assert!(parse("class=red").unwrap_err().line().contains("none or metadata"));
        let twice = ["class=none", "class=none"].map(str::to_owned);
        assert!(parse_blkdev_changes(&twice).unwrap_err().line().contains("twice"));
        let error = parse("gc_percent=70").unwrap_err();
        assert!(error.line().contains("set those of its backend (-b)"), "{error}");
        assert!(parse("colour=red").is_err() && parse("name").is_err() && parse("name=a/b").is_err());
    }

    #[test]
    fn a_percentage_outside_its_limits_is_refused_by_name() {
        for (name, max, above) in [("gc_percent", 98, "99"), ("writeback_percent", 90, "91")] {
            for value in [above, "-1", "", "x", "7.5", "256"] {
                let error = parse(&[&format!("{name}={value}")]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                assert!(
                    error.line().starts_with(&format!("{name} is a whole number from 0 to {max}")),
                    "{error}"
                );
                assert_eq!(error.line().lines().count(), 1);
            }
        }
    }

    #[test]
    fn an_argument_that_is_no_setting_is_refused() {
        for argument in [
            "gc_percent",
            "=70",
            "colour=red",
            "consistency=maybe",
            "writeback_rate=0",
            "writeback_rate=x",
            "on_write_error=drop",
            "write_error_after_s=-1",
            "write_error_after_s=86401",
            "write_error_after_s=99999999999",
        ] {
            assert!(parse(&[argument]).is_err(), "{argument}");
        }
        assert!(parse(&["gc_percent=1", "gc_percent=2"]).is_err());
    }

    #[test]
    fn a_rate_with_which_no_drain_could_end_is_refused_with_the_least() {
        for (value, shown) in [("1", "1"), ("4096", "4K"), ("32767", "32767")] {
            let error = parse(&[&format!("writeback_rate={value}")]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = format!("writeback_rate is {shown} (bytes a second), and 32K is the least");
            assert!(error.line().starts_with(&text), "{error}");
            assert!(error.line().contains("or auto for no limit"), "{error}");
        }
        for value in ["32K", "32768", "auto"] {
            assert!(parse(&[&format!("writeback_rate={value}")]).is_ok(), "{value}");
        }
    }
}
