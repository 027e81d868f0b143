//! Classes of block devices.

use cbd_types::Class;
use serde::{Deserialize, Serialize};

/// The class of the data of a block device, where its clients mark no request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BlkdevClass {
    /// Nothing is known of it.
    #[default]
    None,
    /// Metadata of a file system.
    Metadata,
}

impl BlkdevClass {
    /// The name in commands and in the API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Metadata => "metadata",
        }
    }
}

impl From<Class> for BlkdevClass {
    fn from(class: Class) -> Self {
        match class {
            Class::Unmarked => Self::None,
            Class::Metadata => Self::Metadata,
        }
    }
}

impl From<BlkdevClass> for Class {
    fn from(class: BlkdevClass) -> Self {
        match class {
            BlkdevClass::None => Self::Unmarked,
            BlkdevClass::Metadata => Self::Metadata,
        }
    }
}
