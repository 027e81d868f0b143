//! Names of backends and block devices.
//!
//! Invariants: a name is 1 to [`Name::MAX`] bytes, has no character that a shell, a path, a URL or a metric's label treats
//! specially, and is never taken for a number.
//!
//! Elsewhere: the field on media (`cbd-format`), uniqueness (`cbd-engine`), links to devices (`cbd-daemon`).

use crate::{Error, ErrorKind, Result};
use alloc::{borrow::ToOwned, format, string::String};
use core::{fmt, str::FromStr};

/// The name of a backend or of a block device.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// Bytes of the longest name.
    pub const MAX: usize = 32;

    /// `text`, if it is a name.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the rule that it breaks.
    pub fn new(text: &str) -> Result<Self> {
        let refused = |why: String| {
            Err(Error::new(ErrorKind::InvalidArgument, format!("{:?} is no name: {why}", shortened(text))))
        };
        let is_allowed = |letter: &char| letter.is_ascii_alphanumeric() || ".-_".contains(*letter);
        if text.is_empty() {
            return refused("it is empty".to_owned());
        }
        if text.len() > Self::MAX {
            return refused(format!("it has {} bytes, at most {} are possible", text.len(), Self::MAX));
        }
        if let Some(letter) = text.chars().find(|letter| !is_allowed(letter)) {
            return refused(format!(
                "it contains {letter:?}; letters from a to z and A to Z, digits, \".\", \"_\" and \"-\" are possible"
            ));
        }
        if let Some(first) = text.chars().next().filter(|first| ".-".contains(*first)) {
            return refused(format!("it begins with {first:?}; begin it with a letter, a digit or \"_\""));
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return refused("it would be taken for a number; add a letter".to_owned());
        }
        Ok(Self(text.to_owned()))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The beginning of a text that may be long.
fn shortened(text: &str) -> String {
    const SHOWN: usize = 40;
    if text.chars().count() <= SHOWN {
        return text.to_owned();
    }
    text.chars().take(SHOWN).chain("...".chars()).collect()
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_digits_and_three_signs_make_a_name() {
        for text in ["a", "db-data", "DB_1.old", "_", "0x", "1-2", "a.b", "x".repeat(32).as_str()] {
            let name = Name::new(text).expect(text);
            assert_eq!(name.as_str(), text);
            assert_eq!(format!("{name} {name:?}"), format!("{text} {text:?}"));
        }
    }

    #[test]
    fn what_is_no_name_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "it is empty"),
            ("x".repeat(33).as_str(), "it has 33 bytes, at most 32 are possible"),
            ("a/b", "it contains '/'"),
            ("a b", "it contains ' '"),
            ("a\n", "it contains '\\n'"),
            ("a\0", "it contains '\\0'"),
            ("\u{fc}ber", "it contains '\u{fc}'"),
            ("a:b", "it contains ':'"),
            ("a=b", "it contains '='"),
            ("-a", "it begins with '-'"),
            (".", "it begins with '.'"),
            ("..", "it begins with '.'"),
            (".a", "it begins with '.'"),
            ("0", "it would be taken for a number"),
            ("0042", "it would be taken for a number"),
        ] {
            let error = Name::new(text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.line().contains(why), "{error}");
            assert_eq!(error.line().lines().count(), 1);
        }
    }

    #[test]
    fn a_long_text_is_shown_by_its_beginning() {
        let error = Name::new(&"\u{fc}".repeat(100_000)).expect_err("too long");
        assert!(error.line().len() < 300, "{error}");
    }
}
