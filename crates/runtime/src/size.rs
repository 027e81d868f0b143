//! Parsing and formatting of sizes and times for users.

use cbd_types::{Error, ErrorKind, Result};

const UNITS: [(&str, u32); 5] = [("K", 10), ("M", 20), ("G", 30), ("T", 40), ("P", 50)];

/// Parses a size in bytes: a whole number, optionally followed by K, M, G, T or P (powers of 1024) with an optional
/// `iB` or `B`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with the accepted forms.
pub fn parse_size(text: &str) -> Result<u64> {
    let malformed = || {
        Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "\"{text}\" is no size: write bytes, or a whole number with K, M, G or T (e.g. 512M, 4GiB)"
            ),
        )
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(malformed());
    }
    let upper = unit.to_ascii_uppercase();
    let shift = if upper.is_empty() || upper == "B" {
        0
    } else {
        let letter = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        UNITS.iter().find(|(name, _)| *name == letter).ok_or_else(malformed)?.1
    };
    let too_large = || Error::new(ErrorKind::InvalidArgument, format!("the size \"{text}\" exceeds 64 bits"));
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

/// The size of a cache: a fixed one, or the bounds of one that shares space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSize {
    /// The fixed size, or the minimum, in bytes.
    pub bytes: u64,
    /// The maximum in bytes of a cache that shares space.
    pub max: Option<u64>,
}

/// Parses the size of a cache: a [size](parse_size), or two sizes as MIN..MAX.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] with what is wrong.
pub fn parse_cache_size(text: &str) -> Result<CacheSize> {
    let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
    let Some((min, max)) = text.split_once("..") else {
        return Ok(CacheSize { bytes: parse_size(text)?, max: None });
    };
    for (side, name) in [(min, "minimum"), (max, "maximum")] {
        if side.is_empty() {
            let text = format!(
                "\"{text}\" has no {name}: write both, MIN..MAX, as in 2G..16G; or one size, for a cache of that size"
            );
            return invalid(text);
        }
    }
    let (bytes, max) = (parse_size(min)?, parse_size(max)?);
    if bytes == 0 {
        return invalid(format!("\"{text}\" has the minimum 0: a cache that shares space needs a minimum"));
    }
    if bytes > max {
        return invalid(format!("\"{text}\" has a minimum above its maximum: write MIN..MAX, as in 2G..16G"));
    }
    Ok(CacheSize { bytes, max: Some(max) })
}

/// `bytes` in the largest unit in which the number is at least 1, with one decimal if it is not whole.
#[must_use]
pub fn format_size(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, shift)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((name, shift)) if bytes.is_multiple_of(1 << shift) => format!("{} {name}iB", bytes >> shift),
        #[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
        Some((name, shift)) => format!("{:.1} {name}iB", bytes as f64 / (1u64 << shift) as f64),
    }
}

/// `bytes` as [`parse_size`] reads it, exact: in the largest unit of which it is a whole number (`100M`, `2304K`, `7`).
#[must_use]
pub fn typed_size(bytes: u64) -> String {
    let unit = UNITS.iter().rev().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(name, shift)| format!("{}{name}", bytes >> shift))
}

/// Milliseconds since 1970 as a date and time in UTC, to the second.
#[must_use]
pub fn format_time(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Civil date from a count of days, after Howard Hinnant's "chrono-compatible low-level date algorithms".
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

/// The time that [`format_time`] writes as `text`, in milliseconds since 1970 UTC; ` UTC` may be missing, and the form of
/// RFC 3339 in UTC is read, too.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for another text, and for a time before 1970 or after 9999.
pub fn parse_time(text: &str) -> Result<u64> {
    let wrong = || {
        let text = format!("a time is written as 2026-01-31 12:00:00 UTC, not \"{text}\"");
        Error::new(ErrorKind::InvalidArgument, text)
    };
    let plain = text.strip_suffix(" UTC").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let mut parts = [0_u64; 6];
    let form = b"0000-00-00 00:00:00";
    let fits = |(byte, form): (u8, &u8)| match form {
        b'0' => byte.is_ascii_digit(),
        b' ' => byte == b' ' || byte == b'T',
        other => byte == *other,
    };
    if plain.len() != form.len() || !plain.bytes().zip(form).all(fits) {
        return Err(wrong());
    }
    for (part, digits) in parts.iter_mut().zip(plain.split(['-', ' ', 'T', ':'])) {
        *part = digits.parse().map_err(|_| wrong())?;
    }
    let [year, month, day, hour, minute, second] = parts;
    if year < 1970 || !(1..=12).contains(&month) || day == 0 || hour > 23 || minute > 59 || second > 59 {
        return Err(wrong());
    }
    // The same algorithms, the other way round.
    let year_from_march = year - u64::from(month <= 2);
    let (era, year_of_era) = (year_from_march / 400, year_from_march % 400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    let at_ms = (days * 86_400 + hour * 3600 + minute * 60 + second) * 1000;
    // A day that the month does not have.
    if format_time(at_ms).get(..19) == Some(&plain.replace('T', " ")) { Ok(at_ms) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_read_as_it_is_written_and_what_is_none_is_refused() {
        for at_ms in [0, 951_782_399_000, 951_782_400_000, 1_767_225_599_000, 4_102_444_800_000] {
            let text = format_time(at_ms);
            assert_eq!(parse_time(&text).map_err(|error| error.line()), Ok(at_ms), "{text}");
        }
        let same = ["2026-11-28 00:46:45 UTC", "2026-11-28 00:46:45", "2026-11-28T00:46:45Z"];
        let [first, others @ ..] = same.map(|text| parse_time(text).map_err(|error| error.line()));
        assert!(first.is_ok() && others.iter().all(|other| *other == first), "{first:?} {others:?}");
        for text in [
            "",
            "2026-11-28",
            "2026-13-01 00:00:00",
            "2026-02-29 00:00:00",
            "2026-11-00 00:00:00",
            "2026-11-28 24:00:00",
            "1969-12-31 23:59:59",
            "2026-11-28 00:46:4",
            "+026-11-28 00:46:45",
            "\u{e4}026-11-28 0:46:45",
        ] {
            let error = parse_time(text).expect_err(text).line();
            assert!(error.contains("2026-01-31 12:00:00 UTC"), "{text}: {error}");
        }
    }

    #[test]
    fn a_typed_size_is_read_as_the_same_number() {
        for (bytes, text) in [
            (0, "0"),
            (7, "7"),
            (1 << 10, "1K"),
            (2304 << 10, "2304K"),
            (100 << 20, "100M"),
            ((100 << 20) + 1, "104857601"),
            (u64::MAX, "18446744073709551615"),
            (1 << 63, "8192P"),
        ] {
            assert_eq!(typed_size(bytes), text);
            assert_eq!(parse_size(text).map_err(|error| error.line()), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_bare_number_is_bytes_and_units_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("200M", 200 << 20),
            ("200mib", 200 << 20),
            ("8G", 8 << 30),
            ("8GB", 8 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_size(text).map_err(|error| error.line()), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_text_that_is_no_size_is_refused() {
        for text in
            ["", "x", "-1", "1.5G", "G", "4 G", "4X", "4iB", "99999999999999999999", "20000000T", "0x10"]
        {
            assert_eq!(
                parse_size(text).map_err(|error| error.kind()),
                Err(ErrorKind::InvalidArgument),
                "{text}"
            );
        }
    }

    #[test]
    fn the_size_of_a_cache_is_one_size_or_two_with_points_between() {
        let parsed = |text: &str| parse_cache_size(text).map(|size| (size.bytes, size.max));
        assert_eq!(parsed("4G").expect("a size"), (4 << 30, None));
        assert_eq!(parsed("0").expect("a size"), (0, None));
        assert_eq!(parsed("2G..16G").expect("sizes"), (2 << 30, Some(16 << 30)));
        assert_eq!(parsed("5..5").expect("sizes"), (5, Some(5)));
        for (text, why) in [
            ("..16G", "has no minimum"),
            ("2G..", "has no maximum"),
            ("..", "has no minimum"),
            ("16G..2G", "minimum above its maximum"),
            ("0..2G", "needs a minimum"),
            ("2G...4G", "is no size"),
            ("2G-4G", "is no size"),
            ("2G..x", "is no size"),
            ("2G..4G..6G", "is no size"),
        ] {
            let error = parsed(text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.line().contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_size_is_shown_in_its_largest_unit() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1023), "1023 B");
        assert_eq!(format_size(4 << 30), "4 GiB");
        assert_eq!(format_size(1536), "1.5 KiB");
    }

    #[test]
    fn a_time_is_shown_as_a_date() {
        assert_eq!(format_time(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(format_time(951_827_696_000), "2000-02-29 12:34:56 UTC");
        assert_eq!(format_time(1_767_225_599_999), "2025-12-31 23:59:59 UTC");
    }
}
