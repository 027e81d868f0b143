//! Settings as users type them, and the limits of their values.

use crate::api::{Settings, SettingsChange};
use crate::size::{parse_size, typed_size};
use cbd_runtime::check_writeback_rate;
use cbd_types::{Error, ErrorKind, Result};

/// The largest `gc_percent`: above it reclaim would begin too late to keep writers from waiting.
pub const GC_PERCENT_MAX: i64 = 98;

/// The largest `writeback_percent`: above it writeback would begin too late to keep writers from waiting.
pub const WRITEBACK_PERCENT_MAX: i64 = 90;

/// The largest `write_error_after_s`: a day.
pub const SECONDS_MAX: u32 = 86_400;

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
            "on_write_error" => change.on_write_error.replace(value.parse()?).is_some(),
            "write_error_after_s" => {
                let seconds = value.parse().map_err(|_| {
                    invalid(format!(
                        "write_error_after_s is a whole number of seconds from 0 to {SECONDS_MAX}, not \"{value}\""
                    ))
                })?;
                change.write_error_after_s.replace(seconds).is_some()
            }
            _ => {
                return Err(invalid(format!(
                    "there is no setting \"{name}\": there are gc_percent, consistency, writeback_rate, \
                     writeback_percent, on_write_error and write_error_after_s"
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

/// `settings` as the arguments from which [`parse_changes`] makes them, separated by blanks.
#[must_use]
pub fn typed(settings: &Settings) -> String {
    let rate = match settings.writeback_rate {
        0 => "auto".to_owned(),
        rate => typed_size(rate),
    };
    format!(
        "gc_percent={} consistency={} writeback_rate={rate} writeback_percent={} on_write_error={} write_error_after_s={}",
        settings.gc_percent,
        settings.consistency.name(),
        settings.writeback_percent,
        settings.on_write_error.name(),
        settings.write_error_after_s
    )
}

fn percent(name: &str, value: &str) -> Result<i64> {
    value.parse().map_err(|_| {
        invalid(format!("{name} is a whole number from 0 to {}, not \"{value}\"", percent_max(name)))
    })
}

fn percent_max(name: &str) -> i64 {
    if name == "gc_percent" { GC_PERCENT_MAX } else { WRITEBACK_PERCENT_MAX }
}

/// Checks that the values of a change are within their limits.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the setting and its permitted values.
pub fn check(change: &SettingsChange) -> Result<()> {
    for (name, value) in [("gc_percent", change.gc_percent), ("writeback_percent", change.writeback_percent)]
    {
        let max = percent_max(name);
        if let Some(value) = value.filter(|value| !(0..=max).contains(value)) {
            return Err(invalid(format!("{name} is a whole number from 0 to {max}, not {value}")));
        }
    }
    if let Some(seconds) = change.write_error_after_s.filter(|&seconds| seconds > SECONDS_MAX) {
        return Err(invalid(format!(
            "write_error_after_s is a whole number of seconds from 0 to {SECONDS_MAX}, not {seconds}"
        )));
    }
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
