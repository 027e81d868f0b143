//! The settings that a user chooses for a cache: the order of writeback, its rate, and the action when write errors persist.
//!
//! Invariants: settings in force are validated.

use alloc::format;
use cbd_types::{Error, ErrorKind, Result};

/// The order in which the backing device catches up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Consistency {
    /// Epoch by epoch: the backing device alone is a legal crash state at any moment.
    #[default]
    Strict,
    /// Many epochs in one batch: the backing device alone is a legal crash state between batches.
    Checkpoint,
    /// By address, at once: the backing device alone is not crash-consistent until everything is drained.
    None,
}

impl Consistency {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Strict, Self::Checkpoint, Self::None];

    /// The name in commands, status and documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Checkpoint => "checkpoint",
            Self::None => "none",
        }
    }

    /// The number on media.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Strict => 0,
            Self::Checkpoint => 1,
            Self::None => 2,
        }
    }

    /// The order with this number on media.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.code() == code)
    }
}

/// The action for a range when write errors of the backing device persist. Until then, and with either action, the write is
/// retried, its data stays in the cache, and reads are served.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnWriteError {
    /// Nothing later reaches the backing device. The cache takes writes while it has space; then they fail instead of waiting
    /// for space that may never become free.
    #[default]
    Stop,
    /// The range is kept in the cache as *parked*, and everything else continues. While anything is parked, the backing device
    /// alone is not crash-consistent. Ranges that exceed the space for parked data are treated as with [`Stop`](Self::Stop).
    Park,
}

impl OnWriteError {
    /// All values.
    pub const ALL: [Self; 2] = [Self::Stop, Self::Park];

    /// The name in commands, status and documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Park => "park",
        }
    }

    /// The number on media.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Stop => 0,
            Self::Park => 1,
        }
    }

    /// The policy with this number on media.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.code() == code)
    }
}

/// Maximum of `gc_percent`.
const GC_PERCENT_MAX: u8 = 98;
/// Maximum of `dirty_target_percent`.
const DIRTY_TARGET_PERCENT_MAX: u8 = 90;
/// Maximum of `write_error_after_s`, in seconds.
const WRITE_ERROR_AFTER_S_MAX: u32 = 86_400;

/// The settings that can be changed while a cache runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Reclaim starts when more than this share of the segments is used, an open one by half; 0 to 98 percent.
    pub gc_percent: u8,
    /// Order of writeback.
    pub consistency: Consistency,
    /// Limit of writeback in bytes a second; 0 means as fast as needed.
    pub writeback_rate: u64,
    /// Writeback runs at full speed when more than this share of the cache is dirty; 0 to 90 percent.
    pub dirty_target_percent: u8,
    /// The action when the backing device has refused a write for `write_error_after_s`.
    pub on_write_error: OnWriteError,
    /// Seconds of failed attempts after which `on_write_error` takes effect; 0 to a day.
    pub write_error_after_s: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gc_percent: 98,
            consistency: Consistency::Strict,
            writeback_rate: 0,
            dirty_target_percent: 10,
            on_write_error: OnWriteError::Stop,
            write_error_after_s: 60,
        }
    }
}

impl Settings {
    /// Returns the settings if all are in their range.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] that names the setting and its range.
    pub fn validated(self) -> Result<Self> {
        for (name, value, max) in [
            ("gc_percent", self.gc_percent, GC_PERCENT_MAX),
            ("dirty_target_percent", self.dirty_target_percent, DIRTY_TARGET_PERCENT_MAX),
        ] {
            if value > max {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("{name} is {value}: it must be 0 to {max}"),
                ));
            }
        }
        if self.write_error_after_s > WRITE_ERROR_AFTER_S_MAX {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "write_error_after_s is {}: it must be 0 to {WRITE_ERROR_AFTER_S_MAX} seconds",
                    self.write_error_after_s
                ),
            ));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests;
