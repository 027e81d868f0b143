//! The names of events, and what each means.
//!
//! Invariants: a name never changes its meaning and is never used again; a test holds the list, and another compares it
//! with `docs/events.md`.

/// Defines the names.
macro_rules! names {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal,)*) => {
        /// The name of an event.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum EventName {
            $($(#[doc = $doc])+ $variant,)*
        }

        impl EventName {
            /// All names.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// The name in the log, in JSON, in metrics and in the configuration.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

names! {
    /// The daemon has restored everything that can be restored, and serves it.
    DaemonStarted = "daemon.started",
    /// The daemon ends.
    DaemonStopping = "daemon.stopping",
    /// This host was registered on a region.
    TransportRegistered = "transport.registered",
    /// This host was unregistered from a region.
    TransportUnregistered = "transport.unregistered",
    /// A registered region is not served.
    TransportFailed = "transport.failed",
    /// A region that was not served is served again.
    TransportUp = "transport.up",
    /// What a dead host had on a transport that several hosts share was taken from it.
    HostCleared = "host.cleared",
    /// A host of a transport that several hosts share gives no sign of life.
    HostSilent = "host.silent",
    /// It gives signs of life again, has left, or was cleared.
    HostAnswers = "host.answers",
    /// A region has grown.
    TransportGrown = "transport.grown",
    /// The memory of a region takes no stores.
    RegionFailing = "region.failing",
    /// The memory of a region takes stores again.
    RegionRecovered = "region.recovered",
    /// A backend was started, or restored with the daemon.
    BackendStarted = "backend.started",
    /// A backend has stopped. Conditions of it that were in force are over.
    BackendStopped = "backend.stopped",
    /// A backend is being moved to another host.
    BackendMoving = "backend.moving",
    /// A backend was moved to another host.
    BackendMoved = "backend.moved",
    /// A backend was not moved to another host: it is served where it was, or is gone with that host.
    BackendMoveFailed = "backend.move.failed",
    /// A backend was removed: its disk is a plain disk again.
    BackendRemoved = "backend.removed",
    /// A backend is not served.
    BackendDown = "backend.down",
    /// A backend that was not served is served again.
    BackendUp = "backend.up",
    /// A backing device has grown.
    BackendGrown = "backend.grown",
    /// Settings of a backend were changed.
    SettingsChanged = "settings.changed",
    /// A block device is served.
    BlkdevStarted = "blkdev.started",
    /// A block device was removed.
    BlkdevStopped = "blkdev.stopped",
    /// A block device is not served.
    BlkdevFailed = "blkdev.failed",
    /// Requests to a block device on a backend of another host wait for that host.
    BlkdevWaiting = "blkdev.waiting",
    /// They no longer wait.
    BlkdevResumed = "blkdev.resumed",
    /// A cache was recovered from its region.
    CacheRecovered = "cache.recovered",
    /// A backend was given a cache.
    CacheAttached = "cache.attached",
    /// A backend has no cache any more: it was detached.
    CacheDetached = "cache.detached",
    /// A cache has another size.
    CacheResized = "cache.resized",
    /// For ten seconds the backing device alone has not been crash-consistent.
    CacheVoidBegan = "cache.void.began",
    /// The backing device alone is crash-consistent again.
    CacheVoidEnded = "cache.void.ended",
    /// Damaged data in the cache was read from the backing device instead.
    CacheHealingBegan = "cache.healing.began",
    /// No more damaged data was found for some seconds.
    CacheHealingEnded = "cache.healing.ended",
    /// Another cache mode was set that is not in force yet.
    ModeChanging = "mode.changing",
    /// The cache mode that was set is in force.
    ModeChanged = "mode.changed",
    /// Writeback is paused.
    WritebackPaused = "writeback.paused",
    /// Writeback is no longer paused.
    WritebackResumed = "writeback.resumed",
    /// The backing device has refused writes for so long that writes which find no space fail.
    WritebackStalled = "writeback.stalled",
    /// The backing device takes writes again after a stall.
    WritebackRecovered = "writeback.recovered",
    /// The backing device refuses ranges, and the cache keeps them; again when the ranges change.
    RangeParked = "range.parked",
    /// No range is parked any more.
    RangeUnparked = "range.unparked",
    /// Data in the cache is damaged and lost; again when the ranges change.
    RangeQuarantined = "range.quarantined",
    /// No range is quarantined any more.
    RangeReleased = "range.released",
    /// Whether the disk was written without its cache before the start cannot be told.
    DiskUnchecked = "disk.unchecked",
    /// An operation of the backing device has had no answer for long.
    DiskSilent = "disk.silent",
    /// The backing device answers again.
    DiskAnswers = "disk.answers",
    /// Writeback fails; again when it fails with another error.
    DiskFailing = "disk.failing",
    /// Writeback works again.
    DiskRecovered = "disk.recovered",
    /// Requests of clients fail; again when they fail with another error.
    RequestsFailing = "requests.failing",
    /// Requests of clients have not failed for some seconds.
    RequestsRecovered = "requests.recovered",
    /// For a second writes have been waiting for space in the cache.
    WritersWaitingBegan = "writers.waiting.began",
    /// Writes no longer wait for space in the cache.
    WritersWaitingEnded = "writers.waiting.ended",
    /// A scrub began, or went on after a pause.
    ScrubStarted = "scrub.started",
    /// A scrub has ended, was paused or was stopped.
    ScrubEnded = "scrub.ended",
    /// A scrub cannot go on, and is tried again.
    ScrubFailed = "scrub.failed",
    /// A drain or a checkpoint began.
    DrainStarted = "drain.started",
    /// A drain, or a checkpoint that a client waits for, has ended or failed.
    DrainEnded = "drain.ended",
    /// A client of an export was refused, or its connection failed.
    ExportClientFailed = "export.client.failed",
    /// The file of a region, a backing device or an export was deleted, moved, cut short or replaced.
    FileChanged = "file.changed",
    /// A file is again where it was.
    FileRestored = "file.restored",
    /// The recovery point is older than `recovery_point_max_age`.
    RecoveryPointLate = "recovery_point.late",
    /// The recovery point is younger than `recovery_point_max_age` again.
    RecoveryPointKept = "recovery_point.kept",
    /// Recovery points cannot be logged outside the region.
    RecoveryLogFailing = "recovery_log.failing",
    /// Recovery points are logged again.
    RecoveryLogRecovered = "recovery_log.recovered",
}

impl EventName {
    /// The event with this name.
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }
}
