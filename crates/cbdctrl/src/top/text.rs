//! Quantities in few characters.
//!
//! Invariants: a rate or a size takes 6 characters at most, a duration 6; what is not known is `-`.

/// The units of bytes: powers of 1024.
const OF_BYTES: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
/// The units of other numbers: powers of 1000.
const OF_NUMBERS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];

/// With three digits, in the largest unit that leaves one before the point.
fn scaled(mut value: f64, base: f64, units: &[&str; 7]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let name = units[unit];
    match value {
        value if unit == 0 && (value.fract() == 0.0 || value >= 99.5) => format!("{value:.0}"),
        value if value < 9.95 => format!("{value:.1}{name}"),
        value => format!("{value:.0}{name}"),
    }
}

/// A number of bytes, e.g. `1.5G`.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &OF_BYTES)
}

/// Bytes a second.
pub fn byte_rate(rate: Option<f64>) -> String {
    rate.map_or_else(unknown, |rate| scaled(rate.round(), 1024.0, &OF_BYTES))
}

/// Requests a second.
pub fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(unknown, |rate| scaled(rate, 1000.0, &OF_NUMBERS))
}

/// A number.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub fn number(number: u64) -> String {
    scaled(number as f64, 1000.0, &OF_NUMBERS)
}

/// A share of 0 to 1 in percent, cut off rather than rounded, so that 100 means all.
pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(unknown, |share| match (share * 1000.0).floor() / 10.0 {
        percent if percent >= 100.0 => "100".to_owned(),
        percent => format!("{percent:.1}"),
    })
}

/// A duration of nanoseconds.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub fn nanoseconds(ns: u64) -> String {
    let (value, unit) = match ns {
        0 => return "0".to_owned(),
        1..1_000 => return format!("{ns}ns"),
        1_000..999_500 => (ns as f64 / 1e3, "us"),
        999_500..999_500_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// A duration of nanoseconds, if there is one.
pub fn latency(ns: Option<u64>) -> String {
    ns.map_or_else(unknown, nanoseconds)
}

/// A duration of milliseconds.
pub fn milliseconds(ms: u64) -> String {
    match ms {
        0..120_000 => nanoseconds(ms.saturating_mul(1_000_000)),
        _ => seconds(ms / 1000),
    }
}

/// A duration of seconds.
pub fn seconds(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}min", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", (seconds / 86_400).min(99_999)),
    }
}

/// The time of the day, in UTC.
pub fn time_of_day(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// What stands for an unknown value.
pub fn unknown() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_their_unit_and_few_characters() {
        assert_eq!(["0", "999", "1.0K", "1.5G"], [0, 999, 1000, 3 << 29].map(bytes).map(leak));
        assert_eq!(
            ["0.2", "3", "12", "1.0k", "123k"],
            [0.2, 3.0, 12.4, 999.7, 123_400.0].map(|it| leak(rate(Some(it))))
        );
        let durations = [999, 1000, 22_400, 999_999, 1_500_000, 2_000_000_000];
        assert_eq!(
            ["999ns", "1.0us", "22us", "1.0ms", "1.5ms", "2.0s"],
            durations.map(nanoseconds).map(leak)
        );
        assert_eq!(["119s", "2min", "2h", "3d"], [119, 120, 7200, 300_000].map(seconds).map(leak));
        assert_eq!(
            ["99.9", "100", "0.0", "-"],
            [Some(0.9999), Some(1.0), Some(0.0), None].map(percent).map(leak)
        );
        assert_eq!(time_of_day(86_400_000 + 3_661_000), "01:01:01");
        for shift in 0..64 {
            assert!(bytes(u64::MAX >> shift).len() <= 6 && number(u64::MAX >> shift).len() <= 6);
            assert!(milliseconds(u64::MAX >> shift).len() <= 7, "{}", milliseconds(u64::MAX >> shift));
            assert!(rate(Some((u64::MAX >> shift) as f64 / 3.0)).len() <= 6);
        }
    }

    fn leak(text: String) -> &'static str {
        text.leak()
    }
}
