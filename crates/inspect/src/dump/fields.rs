//! Fields of structures on media, unmodified.

use cbd_format::StructLayout;
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use std::fmt;

/// The value of a field.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Field {
    /// A number.
    Number(u64),
    /// A number that is a bit pattern.
    Hexadecimal(u64),
    /// A text.
    Text(String),
    /// A truth value.
    Bool(bool),
    /// A list of values.
    List(Vec<Field>),
}

impl Serialize for Field {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u64(*number),
            Self::Hexadecimal(number) => serializer.collect_str(&format_args!("{number:#x}")),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::List(list) => {
                let mut sequence = serializer.serialize_seq(Some(list.len()))?;
                for field in list {
                    sequence.serialize_element(field)?;
                }
                sequence.end()
            }
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(out, "{number}"),
            Self::Hexadecimal(number) => write!(out, "{number:#x}"),
            Self::Text(text) => write!(out, "{text:?}"),
            Self::Bool(value) => write!(out, "{}", if *value { "yes" } else { "no" }),
            Self::List(list) => {
                for (number, field) in list.iter().enumerate() {
                    write!(out, "{}{field}", if number == 0 { "" } else { "," })?;
                }
                Ok(())
            }
        }
    }
}

/// One structure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Its name.
    pub structure: &'static str,
    /// Its fields in order.
    pub fields: Vec<(&'static str, Field)>,
}

impl Item {
    /// An item without fields.
    #[must_use]
    pub const fn new(structure: &'static str) -> Self {
        Self { structure, fields: Vec::new() }
    }

    pub(super) fn number(mut self, name: &'static str, value: impl Into<u64>) -> Self {
        self.fields.push((name, Field::Number(value.into())));
        self
    }

    pub(super) fn with(mut self, name: &'static str, value: Field) -> Self {
        self.fields.push((name, value));
        self
    }

    /// Adds all fields of a structure from `bytes`; reserved ones only if they are not zero.
    pub(super) fn raw(mut self, layout: &StructLayout, bytes: &[u8]) -> Self {
        for field in &layout.fields {
            let Some(bytes) = bytes.get(field.offset..field.offset + field.size) else { continue };
            if field.name.starts_with("reserved") && bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            // A header stores the number of its segment: in a damaged header it may differ from the actual number.
            let is_known = self.fields.iter().any(|(name, _)| *name == field.name);
            let name = if is_known { "stored_segment" } else { field.name };
            self.fields.push((name, value_of(field.name, bytes)));
        }
        self
    }
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.fields.len() + 1))?;
        map.serialize_entry("structure", self.structure)?;
        for (name, value) in &self.fields {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl fmt::Display for Item {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.structure)?;
        for (name, value) in &self.fields {
            write!(out, " {name}={value}")?;
        }
        Ok(())
    }
}

/// Bit patterns and random numbers.
const PATTERNS: [&str; 10] = [
    "magic",
    "crc",
    "salt",
    "cache_id",
    "compatible",
    "read_only_compatible",
    "incompatible",
    "features",
    "first_sum",
    "flags",
];
const TEXTS: [&str; 4] = ["name", "path", "identity", "export"];

fn value_of(name: &str, bytes: &[u8]) -> Field {
    let number = || bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    match name {
        "uuid" | "backend_uuid" => match bytes.try_into() {
            Ok(uuid) => Field::Text(cbd_types::uuid_text(uuid)),
            Err(_) => hexadecimal(bytes),
        },
        "checksums" => Field::List(bytes.chunks_exact(4).map(|sum| value_of("crc", sum)).collect()),
        _ if TEXTS.contains(&name) => text(bytes),
        _ if bytes.len() > 8 => hexadecimal(bytes),
        _ if PATTERNS.contains(&name) => Field::Hexadecimal(number()),
        _ => Field::Number(number()),
    }
}

/// A text without its trailing zeroes, or, if it is not UTF-8, its bytes.
fn text(bytes: &[u8]) -> Field {
    let length = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    match std::str::from_utf8(&bytes[..length]) {
        Ok(text) => Field::Text(text.to_owned()),
        Err(_) => hexadecimal(&bytes[..length]),
    }
}

fn hexadecimal(bytes: &[u8]) -> Field {
    Field::Text(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
