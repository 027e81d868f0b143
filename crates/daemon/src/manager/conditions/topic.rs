//! What conditions are about: how severe each is, when it is reported, and its events.

use crate::events::EventName;
use std::time::Duration;

/// What a condition is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::manager) enum Topic {
    /// Data in the cache is damaged and lost.
    Damage,
    /// Data in the cache is damaged and was read from the backing device.
    Healed,
    /// Writeback fails.
    Writeback,
    /// The backing device does not answer.
    Silent,
    /// Writeback has failed for long, and writes that find no space fail.
    Stalled,
    /// The backing device refuses ranges, and the cache keeps them.
    Parked,
    /// Requests of clients fail.
    Clients,
    /// The region takes no stores.
    Region,
    /// Hosts that share the region give no sign of life.
    Hosts,
    /// Requests to a block device on a backend of another host wait for that host.
    RemoteBlkdev,
    /// Recovery points are not logged outside the region.
    RecoveryPoints,
    /// `cache_mode` is not in force.
    Mode,
    /// Writeback is paused.
    Paused,
    /// The backing device alone is not crash-consistent.
    Void,
    /// Writes wait for space in the cache.
    Waiting,
    /// The recovery point is older than `recovery_point_max_age`.
    Late,
}

impl Topic {
    /// Whether data is lost, or will be without action by the user.
    pub(super) const fn is_error(self) -> bool {
        let is_warning = matches!(self, Self::Healed | Self::Parked | Self::RecoveryPoints | Self::Silent);
        !(is_warning
            || matches!(
                self,
                Self::Hosts
                    | Self::RemoteBlkdev
                    | Self::Mode
                    | Self::Paused
                    | Self::Void
                    | Self::Waiting
                    | Self::Late
            ))
    }

    /// How long an error must last until it is reported. A checkpoint of many epochs is no error, and a writer that
    /// waits for a moment neither.
    pub(super) const fn delay(self) -> Duration {
        match self {
            Self::Void => Duration::from_secs(10),
            Self::Waiting => Duration::from_secs(1),
            _ => Duration::ZERO,
        }
    }

    /// The events of its beginning, or change, and of its end.
    pub(super) const fn events(self) -> (EventName, EventName) {
        match self {
            Self::Damage => (EventName::RangeQuarantined, EventName::RangeReleased),
            Self::Healed => (EventName::CacheHealingBegan, EventName::CacheHealingEnded),
            Self::Writeback => (EventName::DiskFailing, EventName::DiskRecovered),
            Self::Silent => (EventName::DiskSilent, EventName::DiskAnswers),
            Self::Stalled => (EventName::WritebackStalled, EventName::WritebackRecovered),
            Self::Parked => (EventName::RangeParked, EventName::RangeUnparked),
            Self::Clients => (EventName::RequestsFailing, EventName::RequestsRecovered),
            Self::Region => (EventName::RegionFailing, EventName::RegionRecovered),
            Self::Hosts => (EventName::HostSilent, EventName::HostAnswers),
            Self::RemoteBlkdev => (EventName::BlkdevWaiting, EventName::BlkdevResumed),
            Self::RecoveryPoints => (EventName::RecoveryLogFailing, EventName::RecoveryLogRecovered),
            Self::Mode => (EventName::ModeChanging, EventName::ModeChanged),
            Self::Paused => (EventName::WritebackPaused, EventName::WritebackResumed),
            Self::Void => (EventName::CacheVoidBegan, EventName::CacheVoidEnded),
            Self::Waiting => (EventName::WritersWaitingBegan, EventName::WritersWaitingEnded),
            Self::Late => (EventName::RecoveryPointLate, EventName::RecoveryPointKept),
        }
    }

    pub(super) const fn end_text(self) -> &'static str {
        match self {
            Self::Damage => "nothing is damaged any more: all of it was overwritten",
            Self::Healed => "no more damaged data was found in the cache",
            Self::Writeback => "writeback works again",
            Self::Silent => "the backing device answers again",
            Self::Stalled => "no longer STALLED: the backing device takes writes again",
            Self::Parked => "nothing is parked any more: the backing device has it, or it was overwritten",
            Self::Clients => "requests of clients no longer fail",
            Self::Region => "the region's memory takes stores again",
            Self::Hosts => "all hosts of the region give signs of life again, have left, or were cleared",
            Self::RemoteBlkdev => "requests to the block device wait for the other host no longer",
            Self::RecoveryPoints => "recovery points are logged again",
            Self::Mode => "the cache mode is in force",
            Self::Paused => "writeback is no longer paused",
            Self::Void => "the backing device alone is crash-consistent again",
            Self::Waiting => "writes no longer wait for space in the cache",
            Self::Late => {
                "the recovery point is within recovery_point_max_age again, or that promises nothing any more"
            }
        }
    }
}
