//! The part of the configuration about events.

use crate::api::Severity;
use crate::events::EventName;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use std::path::Path;
use std::time::Duration;

/// The shortest and the longest time limit of the command, in seconds.
const TIMEOUT_S: (f64, f64) = (0.1, 600.0);

/// The command that is run for each event.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// The program, by an absolute path, and its arguments; empty for none.
    #[serde(deserialize_with = "command")]
    pub command: Vec<String>,
    /// Seconds after which it is killed.
    #[serde(deserialize_with = "timeout_s")]
    pub timeout_s: f64,
    /// The mildest events for which it is run.
    #[serde(deserialize_with = "severity")]
    pub severity: Severity,
    /// The events for which it is run; absent for all.
    #[serde(deserialize_with = "names")]
    pub names: Option<Vec<EventName>>,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self { command: Vec::new(), timeout_s: 10.0, severity: Severity::Info, names: None }
    }
}

/// Its values come from a file by way of `timeout_s`, which takes no number that is none.
impl Eq for EventsConfig {}

impl EventsConfig {
    /// The time limit of the command.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        Duration::from_secs_f64(self.timeout_s.clamp(TIMEOUT_S.0, TIMEOUT_S.1))
    }
}

fn command<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<String>, D::Error> {
    let words = Vec::<String>::deserialize(input)?;
    let refused = |text: String| Err(D::Error::custom(text));
    match words.first() {
        None => {
            refused("command is empty: give a program and its arguments, or leave command out".to_owned())
        }
        Some(program) if !Path::new(program).is_absolute() => refused(format!(
            "command begins with the program by an absolute path (e.g. [\"/usr/local/bin/notify\"]), not with \"{program}\""
        )),
        Some(_) if words.iter().any(|word| word.contains('\0')) => {
            refused("command has a NUL character, which no argument can have".to_owned())
        }
        Some(_) => Ok(words),
    }
}

fn timeout_s<'de, D: Deserializer<'de>>(input: D) -> Result<f64, D::Error> {
    /// TOML has whole numbers and others.
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Whole(i32),
        Other(f64),
    }
    let seconds = match Number::deserialize(input)? {
        Number::Whole(seconds) => f64::from(seconds),
        Number::Other(seconds) => seconds,
    };
    let (least, most) = TIMEOUT_S;
    if (least..=most).contains(&seconds) {
        return Ok(seconds);
    }
    Err(D::Error::custom(format!("timeout_s is {least} to {most} seconds, not {seconds}")))
}

fn severity<'de, D: Deserializer<'de>>(input: D) -> Result<Severity, D::Error> {
    String::deserialize(input)?.parse().map_err(|error: cbd_types::Error| D::Error::custom(error.line()))
}

fn names<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<EventName>>, D::Error> {
    let names = Vec::<String>::deserialize(input)?;
    if names.is_empty() {
        return Err(D::Error::custom("names is empty: name events, or leave names out for all of them"));
    }
    let found = names.iter().map(|name| {
        let unknown = || {
            let known = EventName::ALL.map(EventName::name).join(", ");
            D::Error::custom(format!("there is no event \"{name}\": there are {known}"))
        };
        EventName::find(name).ok_or_else(unknown)
    });
    found.collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &str) -> Result<EventsConfig, String> {
        toml::from_str(lines).map_err(|error| error.message().to_owned())
    }

    #[test]
    fn a_command_is_understood() {
        let config = parse(
            "command = [\"/bin/notify\", \"-v\"]\ntimeout_s = 2.5\nseverity = \"warning\"\nnames = [\"disk.silent\"]",
        )
        .unwrap();
        assert_eq!(config.command, ["/bin/notify", "-v"]);
        assert_eq!((config.timeout(), config.severity), (Duration::from_millis(2500), Severity::Warning));
        assert_eq!(config.names, Some(vec![EventName::DiskSilent]));
        assert_eq!(parse("").unwrap(), EventsConfig::default());
        assert_eq!(parse("timeout_s = 3").unwrap().timeout(), Duration::from_secs(3));
    }

    #[test]
    fn what_cannot_be_run_is_refused_with_what_to_do() {
        for (line, part) in [
            ("command = []", "leave command out"),
            ("command = [\"notify\"]", "absolute path"),
            ("command = [\"/bin/notify\", \"a\\u0000b\"]", "NUL"),
            ("timeout_s = 0", "timeout_s is 0.1 to 600 seconds, not 0"),
            ("timeout_s = 601", "not 601"),
            ("timeout_s = nan", "not NaN"),
            ("severity = \"bad\"", "info, warning or error, not \"bad\""),
            ("names = []", "leave names out"),
            ("names = [\"disk.slow\"]", "there is no event \"disk.slow\": there are daemon.started"),
            ("kommand = []", "kommand"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
