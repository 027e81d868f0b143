//! The command for events.

use cbd_daemon::api::{NumberOrName, Severity};
use cbd_daemon::settings::seconds;
use cbd_daemon::size::parse_time;
use cbd_types::{Error, ErrorKind};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::str::FromStr;

/// Arguments of `events`.
#[derive(Args, Debug)]
pub struct EventArguments {
    /// Only of this transport [default: all; with --backend 0]
    #[arg(short, long, value_name = "ID")]
    pub transport: Option<u32>,
    /// Only of this backend: its number or name
    #[arg(short, long, value_name = "ID")]
    pub backend: Option<NumberOrName>,
    /// Go on with those that come, also over restarts of the daemon
    #[arg(short, long)]
    pub follow: bool,
    /// Only those behind the event with this number, or from a time on: 10m (s, m, h or d ago), now, or a UTC time as
    /// in the output [default: all that are kept]
    #[arg(long, value_name = "NUMBER|TIME")]
    pub since: Option<Since>,
    /// The mildest ones that are shown
    #[arg(long, default_value = "info", value_parser = severity())]
    pub severity: Severity,
}

/// From where on events are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Since {
    /// Behind this one.
    Sequence(u64),
    /// From so many seconds ago on.
    Ago(u32),
    /// From this time on, in milliseconds since 1970 UTC.
    Time(u64),
}

impl FromStr for Since {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let text = format!(
                "it is the number of an event, a time from 1s to 7d ago (e.g. 10m), now, or a time as 2026-01-31 12:00:00 UTC, not \"{text}\""
            );
            Error::new(ErrorKind::InvalidArgument, text)
        };
        if text == "now" {
            return Ok(Self::Ago(0));
        }
        if let Ok(number) = text.parse() {
            return Ok(Self::Sequence(number));
        }
        match seconds(text) {
            Some(seconds) => Ok(Self::Ago(seconds)),
            None => parse_time(text).map(Self::Time).map_err(|_| wrong()),
        }
    }
}

fn severity() -> impl TypedValueParser<Value = Severity> {
    PossibleValuesParser::new(Severity::ALL.map(Severity::name)).try_map(|text| text.parse::<Severity>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_number_or_a_time() {
        for (text, since) in [
            ("12", Since::Sequence(12)),
            ("now", Since::Ago(0)),
            ("10m", Since::Ago(600)),
            ("1970-01-01 00:00:10 UTC", Since::Time(10_000)),
            ("1970-01-01T00:00:10Z", Since::Time(10_000)),
        ] {
            assert_eq!(text.parse::<Since>().map_err(|error| error.line()), Ok(since), "{text}");
        }
        for text in ["", "-1", "10x", "8d", "yesterday", "99999999999999999999"] {
            assert!(text.parse::<Since>().is_err(), "{text}");
        }
    }
}
