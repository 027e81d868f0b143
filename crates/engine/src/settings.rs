//! The settings that a user chooses for a cache: the order of writeback, its rate, and the action when write errors persist.
//!
//! Invariants: settings in force are validated.

use alloc::format;
use cbd_types::{Error, ErrorKind, Result};

/// Defines a setting with named values. Each value has a name for users and a number on media; the first one is the default.
macro_rules! choice {
    (
        $(#[$doc:meta])*
        pub enum $name:ident {
            $(#[$first_doc:meta])* $first:ident $first_name:literal,
            $($(#[$value_doc:meta])* $value:ident $value_name:literal,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub enum $name {
            $(#[$first_doc])*
            #[default]
            $first,
            $($(#[$value_doc])* $value,)*
        }

        impl $name {
            /// All values, in the order of their numbers on media.
            pub const ALL: [Self; [$name::$first, $($name::$value,)*].len()] = [Self::$first, $(Self::$value,)*];

            /// The name in commands, status and documentation.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$value => $value_name,)*
                }
            }

            /// The number on media.
            #[must_use]
            pub const fn code(self) -> u32 {
                self as u32
            }

            /// The value with this number on media.
            #[must_use]
            pub fn from_code(code: u32) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.code() == code)
            }

            /// The value with this name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.name() == name)
            }
        }
    };
}

choice! {
    /// The order in which the backing device catches up.
    pub enum Consistency {
        /// Epoch by epoch: the backing device alone is a legal crash state at any moment.
        Strict "strict",
        /// Many epochs in one batch: the backing device alone is a legal crash state between batches.
        Checkpoint "checkpoint",
        /// By address, at once: the backing device alone is not crash-consistent until everything is drained.
        None "none",
    }
}

choice! {
    /// The action for a range when write errors of the backing device persist. Until then, and with either action, the write is
    /// retried, its data stays in the cache, and reads are served.
    pub enum OnWriteError {
        /// Nothing later reaches the backing device. The cache takes writes while it has space; then they fail instead of
        /// waiting for space that may never become free.
        Stop "stop",
        /// The range is kept in the cache as *parked*, and everything else continues. While anything is parked, the backing
        /// device alone is not crash-consistent. Ranges that exceed the space for parked data are treated as with
        /// [`Stop`](Self::Stop).
        Park "park",
    }
}

choice! {
    /// How writes go.
    pub enum CacheMode {
        /// A write is complete when it is durable in the region, and reaches the backing device in the background.
        Writeback "writeback",
        /// A write is complete when the backing device has accepted it; the cache has its data too. The region alone holds
        /// nothing that a flush has covered.
        Writethrough "writethrough",
        /// As [`Writethrough`](Self::Writethrough), but the cache only forgets what it held of the range.
        Writearound "writearound",
        /// As [`Writearound`](Self::Writearound), and reads neither use nor fill the cache.
        Passthrough "passthrough",
    }
}

choice! {
    /// The misses whose data is recorded in the cache.
    pub enum ReadFill {
        /// While the cache has space all of them; in a full cache those that admission finds worth their space.
        Admit "admit",
        /// All of them, also in a full cache.
        All "all",
        /// None.
        Off "off",
    }
}

choice! {
    /// Whether sequential reads that miss are read ahead.
    pub enum Readahead {
        /// In growing steps, as long as the stream continues.
        Auto "auto",
        /// Never.
        Off "off",
    }
}

choice! {
    /// What a write does that finds no space.
    pub enum WhenFull {
        /// It waits until writeback and reclaim have freed space.
        Wait "wait",
        /// It goes to the backing device alone where that is legal and sooner; otherwise it is cached, or waits.
        Around "around",
    }
}

/// Maximum of `gc_percent`.
const GC_PERCENT_MAX: u8 = 98;
/// Maximum of `dirty_target_percent`.
const DIRTY_TARGET_PERCENT_MAX: u8 = 90;
/// Bounds of `pin_percent`. What is left must keep more segments free in turn than reclaim and the reserves need.
const PIN_PERCENT: core::ops::RangeInclusive<u8> = 1..=60;
/// Default of `metadata_max_percent`: no maximum.
pub(crate) const METADATA_MAX_PERCENT_DEFAULT: u8 = 100;
/// Default of `pin_percent`.
pub(crate) const PIN_PERCENT_DEFAULT: u8 = 50;
/// Maximum of `write_error_after_s`, in seconds.
const WRITE_ERROR_AFTER_S_MAX: u32 = 86_400;

/// Maximum of the settings that are latencies, in microseconds: a minute.
const LATENCY_US_MAX: u32 = 60_000_000;

/// Default of `sequential_read_cutoff`, in bytes. What a scan takes from a hot set grows with it: `policy.scan_loss`.
pub const SEQUENTIAL_READ_CUTOFF: u64 = 1 << 20;

/// The settings that can be changed while a cache runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Reclaim starts when more than this share of the segments is used, an open one by half; 0 to 98 percent.
    pub gc_percent: u8,
    /// Order of writeback.
    pub consistency: Consistency,
    /// Limit of writeback in bytes a second; 0 means as fast as needed.
    pub writeback_rate: u64,
    /// The share of the cache that writeback lets be dirty while data is written, 0 to 90 percent; 0 means that everything is
    /// written back at once.
    pub dirty_target_percent: u8,
    /// The action when the backing device has refused a write for `write_error_after_s`.
    pub on_write_error: OnWriteError,
    /// Seconds of failed attempts after which `on_write_error` takes effect; 0 to a day.
    pub write_error_after_s: u32,
    /// How writes go. A change to another mode takes effect when the backing device has everything.
    pub cache_mode: CacheMode,
    /// The misses that are recorded.
    pub read_fill: ReadFill,
    /// Bytes of a sequential stream of reads behind which a full cache does not record its data; 0 means never.
    pub sequential_read_cutoff: u64,
    /// Whether sequential reads that miss are read ahead.
    pub readahead: Readahead,
    /// Bytes of a sequential stream of writes behind which they go to the backing device alone; 0 means never.
    pub sequential_write_cutoff: u64,
    /// What a write does that finds no space.
    pub when_full: WhenFull,
    /// Latency in microseconds of reads of the cache itself above which misses are not recorded; 0 means never.
    pub congestion_read_us: u32,
    /// Latency in microseconds of writes of the cache itself above which writes go to the backing device alone; 0 means never.
    pub congestion_write_us: u32,
    /// Latency in microseconds of reads of the backing device above which writeback slows down; 0 means never.
    pub read_latency_target_us: u32,
    /// Until when writeback is paused, in milliseconds of the wall clock; 0 if it is not. A drain that was requested is not
    /// paused.
    pub writeback_paused_until_ms: u64,
    /// The share of the cache that pins may take, 1 to 60 percent.
    pub pin_percent: u8,
    /// The share of the cache that metadata of file systems keeps whatever else is read or written, in percent; with `pin_percent`
    /// at most 60.
    pub metadata_min_percent: u8,
    /// The share of the cache above which a full cache takes no more metadata at misses, and reclaim keeps none; at least
    /// `metadata_min_percent`, 1 to 100 percent.
    pub metadata_max_percent: u8,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gc_percent: 97,
            consistency: Consistency::Strict,
            writeback_rate: 0,
            dirty_target_percent: 10,
            on_write_error: OnWriteError::Stop,
            write_error_after_s: 60,
            cache_mode: CacheMode::Writeback,
            read_fill: ReadFill::Admit,
            sequential_read_cutoff: SEQUENTIAL_READ_CUTOFF,
            readahead: Readahead::Auto,
            sequential_write_cutoff: 0,
            when_full: WhenFull::Wait,
            congestion_read_us: 0,
            congestion_write_us: 0,
            read_latency_target_us: 0,
            writeback_paused_until_ms: 0,
            pin_percent: PIN_PERCENT_DEFAULT,
            metadata_min_percent: 0,
            metadata_max_percent: METADATA_MAX_PERCENT_DEFAULT,
        }
    }
}

impl Settings {
    /// Whether requests can go past the cache with these settings, so that the region needs the feature for it.
    #[must_use]
    pub const fn can_bypass(&self) -> bool {
        !matches!(self.cache_mode, CacheMode::Writeback) || self.may_bypass_by_choice()
    }

    /// Whether writes that the mode would cache may go past the cache.
    pub(crate) const fn may_bypass_by_choice(&self) -> bool {
        self.sequential_write_cutoff > 0
            || self.congestion_write_us > 0
            || matches!(self.when_full, WhenFull::Around)
    }

    /// The bytes that are to be dirty in a cache of `capacity` bytes.
    pub(crate) fn dirty_target(&self, capacity: u64) -> u64 {
        let percent = u64::from(self.dirty_target_percent);
        capacity / 100 * percent + capacity % 100 * percent / 100
    }

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
        if !PIN_PERCENT.contains(&self.pin_percent) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "pin_percent is {}: it must be {} to {}",
                    self.pin_percent,
                    PIN_PERCENT.start(),
                    PIN_PERCENT.end()
                ),
            ));
        }
        self.check_classes()?;
        if self.write_error_after_s > WRITE_ERROR_AFTER_S_MAX {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "write_error_after_s is {}: it must be 0 to {WRITE_ERROR_AFTER_S_MAX} seconds",
                    self.write_error_after_s
                ),
            ));
        }
        for (name, value) in [
            ("congestion_read_us", self.congestion_read_us),
            ("congestion_write_us", self.congestion_write_us),
            ("read_latency_target_us", self.read_latency_target_us),
        ] {
            if value > LATENCY_US_MAX {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("{name} is {value}: it must be 0 to {LATENCY_US_MAX} microseconds"),
                ));
            }
        }
        Ok(self)
    }

    /// Refuses bounds of classes that are out of their range or contradict each other.
    fn check_classes(&self) -> Result<()> {
        let (pins, min, max) = (self.pin_percent, self.metadata_min_percent, self.metadata_max_percent);
        let most = PIN_PERCENT.end();
        let text = if !(1..=METADATA_MAX_PERCENT_DEFAULT).contains(&max) {
            format!("metadata_max_percent is {max}: it must be 1 to {METADATA_MAX_PERCENT_DEFAULT}")
        } else if min > max {
            format!(
                "metadata_min_percent is {min}, and metadata_max_percent {max}: the minimum must not be above the maximum"
            )
        } else if min > 0 && pins.saturating_add(min) > *most {
            format!(
                "metadata_min_percent is {min}, and pin_percent {pins}: together they must be at most {most}; lower one of them"
            )
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }
}

#[cfg(test)]
mod tests;
