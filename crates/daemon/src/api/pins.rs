//! Pins: ranges of a device that stay in its cache.

use super::RangeInfo;
use serde::{Deserialize, Serialize};

/// What a pin names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PinKind {
    /// A file, by its path.
    File,
    /// A range of the device.
    Range,
    /// The metadata of a file system, by its mount point.
    Metadata,
}

impl PinKind {
    /// The name in commands and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        cbd_engine::PinKind::from(self).name()
    }
}

impl From<PinKind> for cbd_engine::PinKind {
    fn from(kind: PinKind) -> Self {
        match kind {
            PinKind::File => Self::File,
            PinKind::Range => Self::Range,
            PinKind::Metadata => Self::Metadata,
        }
    }
}

impl From<cbd_engine::PinKind> for PinKind {
    fn from(kind: cbd_engine::PinKind) -> Self {
        match kind {
            cbd_engine::PinKind::File => Self::File,
            cbd_engine::PinKind::Range => Self::Range,
            cbd_engine::PinKind::Metadata => Self::Metadata,
        }
    }
}

/// The name of a pin: no two of a cache have the same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinName {
    /// What it names.
    pub kind: PinKind,
    /// The path, the range or the mount point.
    pub name: String,
}

/// One pin that is to be made; a pin with the same name is replaced.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewPin {
    /// What it names.
    pub kind: PinKind,
    /// The path, the range or the mount point.
    pub name: String,
    /// The ranges of the device, which are widened to blocks of 4 KiB.
    pub ranges: Vec<RangeInfo>,
}

/// Pins that are to be made, all or none.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddPins {
    /// The pins.
    pub pins: Vec<NewPin>,
}

/// Pins that are to end, all or none.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemovePins {
    /// Their names.
    #[serde(default)]
    pub pins: Vec<PinName>,
    /// All pins of the cache.
    #[serde(default)]
    pub all: bool,
}

/// The pins of a cache.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PinsInfo {
    /// Number of the backend.
    pub backend_id: u32,
    /// Bytes that are pinned; what several pins have in common counts once.
    pub pinned_bytes: u64,
    /// Bytes that may be pinned.
    pub limit_bytes: u64,
    /// There was a list of pins, and both its copies are damaged: nothing is pinned until it is pinned again.
    #[serde(default)]
    pub lost: bool,
    /// The pins.
    pub pins: Vec<PinInfo>,
}

/// A pin.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PinInfo {
    /// What it names.
    pub kind: PinKind,
    /// The path, the range or the mount point.
    pub name: String,
    /// Bytes of its ranges.
    pub bytes: u64,
    /// The number of its ranges.
    pub ranges: usize,
    /// Bytes of them that are in the cache.
    pub cached_bytes: u64,
}

/// The name of a pin in a text: a character that would end the line or control a terminal is escaped. A file can have any name.
#[must_use]
pub fn printable(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for letter in name.chars() {
        if letter.is_control() { text.extend(letter.escape_default()) } else { text.push(letter) }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn a_name_in_a_text_ends_no_line_and_controls_no_terminal() {
        assert_eq!(printable("/srv/d\u{fc}nn \"x\""), "/srv/d\u{fc}nn \"x\"");
        assert_eq!(printable("a\nb\u{1b}[31mc\0\u{9b}"), "a\\nb\\u{1b}[31mc\\u{0}\\u{9b}");
    }
}
