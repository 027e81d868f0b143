//! Backends and block devices by number or by name.

use cbd_types::{Error, ErrorKind, Name, Result};
use serde::de::{Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A backend or a block device, as the user names it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NumberOrName {
    /// Its number on the transport.
    Number(u32),
    /// Its name on the transport.
    Name(Name),
}

impl NumberOrName {
    /// Whether an object with this number and this name is it.
    #[must_use]
    pub fn is(&self, number: u32, name: Option<&str>) -> bool {
        match self {
            Self::Number(wanted) => *wanted == number,
            Self::Name(wanted) => name == Some(wanted.as_str()),
        }
    }
}

impl From<u32> for NumberOrName {
    fn from(number: u32) -> Self {
        Self::Number(number)
    }
}

impl FromStr for NumberOrName {
    type Err = Error;

    /// Digits are a number, anything else must be a name.
    fn from_str(text: &str) -> Result<Self> {
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Name::new(text).map(Self::Name);
        }
        text.parse().map(Self::Number).map_err(|_| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{text} is too large for a number: {} is the largest", u32::MAX),
            )
        })
    }
}

impl fmt::Display for NumberOrName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(out),
            Self::Name(name) => name.fmt(out),
        }
    }
}

impl Serialize for NumberOrName {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u32(*number),
            Self::Name(name) => serializer.serialize_str(name.as_str()),
        }
    }
}

impl<'de> Deserialize<'de> for NumberOrName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = NumberOrName;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a number or a name")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> std::result::Result<NumberOrName, E> {
                let wrong = |_| E::invalid_value(serde::de::Unexpected::Unsigned(number), &self);
                u32::try_from(number).map(NumberOrName::Number).map_err(wrong)
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<NumberOrName, E> {
                text.parse().map_err(|error: Error| E::custom(error.line()))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_a_number_and_anything_else_is_a_name_or_refused() {
        assert_eq!("7".parse::<NumberOrName>().unwrap(), NumberOrName::Number(7));
        assert_eq!("db-data".parse::<NumberOrName>().unwrap().to_string(), "db-data");
        for text in ["", "-1", "4294967296", "99999999999999999999", "a/b", "..", "a b"] {
            let error = text.parse::<NumberOrName>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
        }
    }

    #[test]
    fn in_json_a_number_is_a_number_and_a_name_a_text() {
        for (text, value) in [("7", NumberOrName::Number(7)), ("\"db\"", "db".parse().unwrap())] {
            assert_eq!(serde_json::from_str::<NumberOrName>(text).unwrap(), value);
            assert_eq!(serde_json::to_string(&value).unwrap(), text);
        }
        // In the path of a request everything is a text.
        assert_eq!(serde_json::from_str::<NumberOrName>("\"7\"").unwrap(), NumberOrName::Number(7));
        for text in ["-1", "4294967296", "1.5", "\"a/b\"", "null", "true", "[0]"] {
            assert!(serde_json::from_str::<NumberOrName>(text).is_err(), "{text}");
        }
    }
}
