//! The list of all mutation points, by the place where they are used.

/// Defines the mutation points: what each is for and what goes wrong without it, its variant, its name.
macro_rules! mutation_points {
    ($( $(#[doc = $about:literal])+ $variant:ident = $name:literal, )+) => {
        /// A step without which data would be lost or wrong, and which a test can remove. Each variant says what goes wrong without it.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum MutationPoint {
            $( $(#[doc = $about])+ $variant, )+
        }

        impl MutationPoint {
            /// All of them, in the order of the list.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The name in `CBD_MUTANT`, in reports and in documentation.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// What it is for.
            #[must_use]
            pub const fn about(self) -> &'static str {
                match self { $( Self::$variant => concat!($($about),+), )+ }
            }
        }
    };
}

mutation_points! {
    // The superblock.

    /// A region that is not ours is not opened as one.
    SuperblockMagic = "superblock.magic",
    /// A superblock with a flipped bit does not say where anything lies.
    SuperblockChecksum = "superblock.checksum",
    /// A newer format is refused, not misread.
    SuperblockVersion = "superblock.version",
    /// A region that uses an unknown feature is refused, not misread.
    SuperblockFeatures = "superblock.features",
    /// A region that was cut short is not addressed past its end.
    SuperblockSize = "superblock.size",
    /// Offsets that contradict the geometry would make two structures overlap.
    SuperblockGeometry = "superblock.geometry",
    /// A feature that only one copy names counts: the other copy is older, and what it lacks may be in use.
    SuperblockFeaturesOfBoth = "superblock.features.of-both",
    /// The second superblock is stored: without it one failed page takes the transport.
    SuperblockSecondStore = "superblock.second.store",
    /// The second superblock is read where the first fails.
    SuperblockSecondRead = "superblock.second.read",

    // Making a transport.

    /// Old superblocks are gone before the tables are blanked: a crash between would open a transport without rows.
    FormatErase = "format.erase",
    /// The erased superblocks are durable before the tables are blanked.
    FormatEraseFence = "format.erase.fence",
    /// Rows of an earlier transport do not come back in the new one.
    FormatBlank = "format.blank",
    /// The blank tables are durable before a superblock says that they are tables.
    FormatBlankFence = "format.blank.fence",
    /// A transport that was reported as made is there after a power cut.
    FormatSuperblockFence = "format.superblock.fence",
    /// A region that holds a transport or other data is formatted only by force.
    FormatRefusesUsed = "format.refuses-used",

    // Features that a transport gets later.

    /// A feature is in the superblocks before anything that only programs with this feature understand is in the region: an earlier
    /// program would open the region and ignore it.
    FeatureRequired = "feature.required",
    /// The copy that is whole for certain is changed last: a crash while it changes would leave no valid copy.
    FeatureOtherFirst = "feature.other-first",
    /// The first copy with a new feature is durable before the other one changes.
    FeatureFirstFence = "feature.first.fence",
    /// The first copy with a new feature is on the disk of an ordinary file before the other one changes.
    FeatureFirstSync = "feature.first.sync",
    /// Both copies name the feature: an earlier program would open the region by the copy that does not.
    FeatureBoth = "feature.both",
    /// Both copies are durable before the feature is used.
    FeatureFence = "feature.fence",
    /// Both copies are on the disk of an ordinary file before the feature is used.
    FeatureSync = "feature.sync",
    /// A copy that cannot be read is no reason to change the only other one, of which a crash could leave nothing.
    FeatureUnreadable = "feature.unreadable",

    // Two slots, newest valid wins.

    /// A slot of another kind of object does not count.
    SlotKind = "slot.kind",
    /// A torn or flipped slot does not count.
    SlotChecksum = "slot.checksum",
    /// A slot of another row or lane does not count: its checksum is seeded with its place.
    SlotPlace = "slot.place",
    /// A forged sequence number, from which the next update would overflow, does not count.
    SlotSequenceBound = "slot.sequence-bound",
    /// Impossible numbers in a slot do not count.
    SlotContent = "slot.content",
    /// The newer of two valid slots counts.
    SlotNewest = "slot.newest",
    /// The slot that holds the newest content is never the one that is written: a crash would leave neither.
    SlotOther = "slot.other",
    /// An update raises the sequence number, so that it is found to be the newer one.
    SlotSequence = "slot.sequence",

    // Tables, in the order in which a backend is made.

    /// What was read of the superblocks is durable before anything relies on it, after a mere process crash.
    OpenSuperblockWriteBack = "open.superblock.write-back",
    /// Rows of hosts that were read are durable before anything relies on them, after a mere process crash.
    OpenHostsWriteBack = "open.hosts.write-back",
    /// Rows of backends that were read are durable before their caches acknowledge writes, after a mere process crash.
    OpenBackendsWriteBack = "open.backends.write-back",
    /// Rows of blkdevs that were read are durable before anything relies on them, after a mere process crash.
    OpenBlkdevsWriteBack = "open.blkdevs.write-back",
    /// Entries of segments that were read are durable before a cache uses the segments, after a mere process crash.
    OpenSegmentsWriteBack = "open.segments.write-back",
    /// Completes the write-backs at opening.
    OpenFence = "open.fence",
    /// A row of which a crash left one slot gets the other back: a page that fails later would take it.
    OpenWhole = "open.whole",
    /// The slot that was released is durable before anything relies on it.
    OpenWholeFence = "open.whole.fence",
    /// A host's row: its first slot is durable before the second is touched.
    HostRowFirstFence = "host.row.first.fence",
    /// A host's row stands in both slots.
    HostRowSecond = "host.row.second",
    /// A host that was reported as registered is there after a power cut.
    HostRowFence = "host.row.fence",
    /// A backend's row: its first slot is durable before the second is touched.
    BackendRowFirstFence = "backend.row.first.fence",
    /// A backend's row stands in both slots: one failed page would take it, or bring back one that was removed.
    BackendRowSecond = "backend.row.second",
    /// A backend that was reported as made is there after a power cut.
    BackendRowFence = "backend.row.fence",
    /// The former disk of a backend that is moved stands twice: one failed page does not take it.
    MovedFormerSecond = "moved.former.second",
    /// The former disk is durable before the row says that the backend was moved.
    MovedFormerFence = "moved.former.fence",
    /// The former disk is on the disk of an ordinary file before the row says that the backend was moved.
    MovedFormerSync = "moved.former.sync",
    /// A disk that lacks data since an earlier move is not forgotten for a later one: it would be served as if it were complete.
    MovedFormerKept = "moved.former.kept",
    /// A former disk that was reported as forgotten stays forgotten.
    MovedForgetFence = "moved.forget.fence",
    /// A former disk that was reported as forgotten stays forgotten on the disk of an ordinary file.
    MovedForgetSync = "moved.forget.sync",
    /// The region says that a backend is moved before its other disk gets data: the recorded disk would be served without it.
    RescueMoves = "rescue.moves",
    /// A failed rescue moves a backend back only if it drained no epoch: nothing would write that to the recorded disk.
    RescueDrained = "rescue.drained",
    /// A failed rescue moves a backend back only if it reclaimed no segment: only the other disk has what that held.
    RescueReclaimed = "rescue.reclaimed",
    /// A rescue empties the cache, so that data which the disk gets without it is not hidden by older data.
    RescueEmpties = "rescue.empties",
    /// A cache that is emptied counts as moved until all of it is empty.
    EmptiedMoved = "emptied.moved",
    /// A blkdev's row: its first slot is durable before the second is touched.
    BlkdevRowFirstFence = "blkdev.row.first.fence",
    /// A blkdev's row stands in both slots.
    BlkdevRowSecond = "blkdev.row.second",
    /// A blkdev that was reported as made is there after a power cut.
    BlkdevRowFence = "blkdev.row.fence",
    /// A blkdev whose backend's row was reused is stale.
    BlkdevBackendIdentity = "blkdev.backend-identity",
    /// Segments name their cache before the backend's row says that it is there.
    BackendSegmentsFirstFence = "backend.segments.first.fence",
    /// Entries of segments stand in both slots: one failed page would give a segment back to an earlier cache.
    BackendSegmentsSecond = "backend.segments.second",
    /// The second slots are durable before the row.
    BackendSegmentsFence = "backend.segments.fence",
    /// A row of which both copies are lost is not reused: what it named may be dirty.
    RowLostKept = "row.lost.kept",
    /// A backend whose row is lost is reported, not taken for one that never was.
    RowLostSaid = "row.lost.said",
    /// Segments of a lost row, and those whose own entry is lost, are not given to another cache.
    SegmentLostKept = "segment.lost.kept",
    /// Marks of an earlier cache are gone: they would say that records are missing.
    BackendMarksErase = "backend.marks.erase",
    /// A lane's first tail stands in both slots: an older cache's would count.
    BackendTailSecond = "backend.tail.second",
    /// The first drained stands in both slots: an older cache's would count.
    BackendDrainedSecond = "backend.drained.second",
    /// The state block is durable before the backend's row says that it is there.
    BackendStateFence = "backend.state.fence",
    /// A segment belongs to a cache only while the backend's row is in use.
    SegmentOwnerActive = "segment.owner.active",
    /// A segment belongs to a cache only while the backend's row names the same cache.
    SegmentOwnerCache = "segment.owner.cache",
    /// A cache that is open is not opened again, nor removed.
    BackendOpenOnce = "backend.open-once",
    /// A cache that recovery is at work on counts as open.
    BackendOpening = "backend.opening",

    // Ordinary files, of which a crash of the machine mixes old and new pages.

    /// The erased superblocks of an earlier transport are on the disk before its tables are overwritten.
    FormatEraseSync = "format.erase.sync",
    /// The blank tables are on the disk before a superblock says that they are tables.
    FormatBlankSync = "format.blank.sync",
    /// The superblocks that were read are on the disk before anything relies on them, and before one of them changes: a killed process
    /// may have left them in the kernel's cache only.
    OpenSuperblockSync = "open.superblock.sync",
    /// The rows that were read are on the disk before anything relies on them: a killed process may have left them in the kernel's
    /// cache only.
    OpenSync = "open.sync",
    /// After a sync that failed, pages are stored again before another sync counts: the kernel considers them clean.
    SyncAgain = "sync.again",
    /// After a sync that failed, the next process knows of it, and stores the pages of the cache again before its sync counts.
    UseUnsure = "use.unsure",
    /// The slot of a row that was restored at opening is on the disk before the other one changes: the disk may tear both pages.
    OpenWholeSync = "open.whole.sync",
    /// Entries of segments are on the disk before the row of the backend that they name.
    BackendSegmentsSync = "backend.segments.sync",
    /// The first slot of a row is on the disk before the second changes: the disk may tear both pages.
    RowFirstSync = "row.first.sync",
    /// A row that was reported as changed is on the disk: an older one would give segments to a cache that is gone.
    RowSync = "row.sync",
    /// A cache that was in use in another boot and was not synced is not recovered: old data would be written over newer.
    UseRefused = "use.refused",
    /// That a cache is in use is on the disk before its first store.
    UseNoted = "use.noted",
    /// That a cache can hold dirty data is on the disk before the first write is acknowledged.
    UseDirtyNoted = "use.dirty.noted",
    /// A cache that can hold dirty data is not noted as one that holds none.
    UseCleanChecked = "use.clean.checked",
    /// All pages of the region are on the disk before a row says so.
    UseSync = "use.sync",
    /// A cache that is still open is not noted as synced: it can change later.
    UseSyncedClosed = "use.synced.closed",

    // Segments.

    /// A torn or flipped header does not count.
    HeaderChecksum = "header.checksum",
    /// What is no header does not count.
    HeaderMagic = "header.magic",
    /// A header that was copied from another segment does not count.
    HeaderSegment = "header.segment",
    /// A segment of an earlier cache does not count.
    HeaderCache = "header.cache",
    /// A header with another number of lanes does not count.
    HeaderLanes = "header.lanes",
    /// A header of a lane that does not exist does not count.
    HeaderLane = "header.lane",
    /// Forged counters, from which counting on would overflow, do not count.
    HeaderCounters = "header.counters",
    /// The state segment is not replayed as a log.
    HeaderLog = "header.log",
    /// The copy of a header is stored: one failed page would take a segment.
    HeaderCopyStore = "header.copy.store",
    /// The copy of a header is read where the first fails.
    HeaderCopyRead = "header.copy.read",
    /// The newer of two valid headers counts: a crash may leave the copy of an earlier life.
    HeaderNewest = "header.newest",
    /// A segment's header is durable before its first record.
    HeaderFence = "header.fence",
    /// Each life of a segment has a generation of its own: records of an earlier one do not count.
    GenerationRaised = "generation.raised",
    /// The next life's generation is above what any header claims, a damaged one included.
    GenerationAboveClaimed = "generation.above-claimed",
    /// Each use of a segment has its own salt, so that client data cannot contain forged records.
    SaltFresh = "salt.fresh",

    // Records.

    /// A torn or flipped record does not count.
    RecordChecksum = "record.checksum",
    /// A record of an earlier life of its segment does not count.
    RecordGeneration = "record.generation",
    /// A record of a kind that is not known does not count.
    RecordKind = "record.kind",
    /// Bytes that are to be zero are.
    RecordReserved = "record.reserved",
    /// A record's checksum is seeded with the salt: a record of an earlier life, or one in a client's data, does not count.
    RecordSalt = "record.salt",
    /// A record's checksum is seeded with the segment: one copied from another segment does not count.
    RecordSegment = "record.segment",
    /// A record's checksum is seeded with the slot: one copied from another slot does not count.
    RecordSlot = "record.slot",
    /// A record's range is neither empty nor wraps.
    RecordRange = "record.range",
    /// Forged counters, from which counting on would overflow, do not count.
    RecordCounters = "record.counters",
    /// A record's data lies inside its segment.
    RecordDataInside = "record.data-inside",
    /// A record has as many continuation lines as its blocks need.
    RecordLines = "record.lines",
    /// A record's range lies on the device, in whole sectors.
    RecordOnDevice = "record.on-device",
    /// A record with data lies in one chunk and is at most an atomic unit long.
    RecordInUnit = "record.in-unit",
    /// Each record is stored twice: one failed page would take it.
    RecordMirrorStore = "record.mirror.store",
    /// The mirror is read where the primary fails.
    RecordMirrorRead = "record.mirror.read",
    /// A torn or flipped line of checksums does not count.
    ChecksumLineChecksum = "checksums.checksum",
    /// A record is not taken for a line of checksums.
    ChecksumLineKind = "checksums.kind",
    /// Lines of checksums are not exchanged.
    ChecksumLineIndex = "checksums.index",
    /// A line holds at most as many checksums as it has places.
    ChecksumLineCount = "checksums.count",
    /// A line of checksums belongs to its record.
    ChecksumLineSequence = "checksums.sequence",
    /// A line of checksums is read from its mirror where the primary fails.
    ChecksumLineMirrorRead = "checksums.mirror.read",
    /// Data is what was written: what is not is never returned and never written back.
    DataChecksum = "data.checksum",
    /// What failed its checksum does not stay in the reader's memory.
    DataErased = "data.erased",

    // A write.

    /// A write says that its lane is touched: no flush would mark it, and the background worker would sleep over it.
    WriteTouch = "write.touch",
    /// Without checksums data is durable before a record can name it: a torn write would not show.
    WriteDataFence = "write.data.fence",
    /// A write is durable when it completes.
    WriteFence = "write.fence",
    /// Writes that share a fence are durable when they complete.
    WriteTogetherFence = "write.together.fence",
    /// Each lane of writes that share a fence says that it is touched, before its epoch is loaded: a flush would take that for complete.
    WriteTogetherTouch = "write.together.touch",
    /// Nothing comes together with others behind a record that was not stored.
    WriteTogetherAfterFailure = "write.together.after-failure",
    /// Writes that share a fence are not acknowledged after a store has failed.
    WriteTogetherStoreCheck = "write.together.store-check",
    /// What is overwritten in full is not damaged any more.
    WriteHeals = "write.heals",
    /// A pending fill that a write overlaps does not become a record: it would bring old data back.
    WriteCancelsFills = "write.cancels-fills",
    /// A write is not acknowledged after a store has failed.
    WriteStoreCheck = "write.store-check",
    /// A fill takes room only where the pool has more than the reserve, and not while a writer waits.
    FillIsOptional = "fill.is-optional",
    /// A fill is durable before its lane is unlocked: at most the last record of a lane is torn.
    FillFence = "fill.fence",
    /// A fill that was cancelled is not recorded.
    FillCancelled = "fill.cancelled",
    /// Zeroes and discards set the touched bit of their lane before their epoch is loaded: a flush that finds it clear takes the epoch
    /// for complete.
    ZeroTouch = "zero.touch-first",
    /// Zeroes are durable when the request completes.
    ZeroFence = "zero.fence",
    /// A request that covers no lane has a fence all the same: its evidence is made of one.
    ZeroNothingFence = "zero.nothing.fence",
    /// A pending fill that zeroes overlap does not become a record.
    ZeroCancelsFills = "zero.cancels-fills",
    /// A discard is not acknowledged after a store has failed.
    ZeroStoreCheck = "zero.store-check",
    /// The later of a record and of zeroes counts.
    ZeroesByPlace = "zeroes.by-place",
    /// Older zeroes do not replace newer ones.
    OverlayKeepsLater = "overlay.keeps-later",

    // A store that failed.

    /// Nothing comes behind a record that was not stored: it would prove a write that was never acknowledged.
    RecordAfterFailure = "store-failed.record",
    /// No mark proves a record that was not stored.
    MarkStoreCheck = "store-failed.mark",
    /// Drained does not pass what was not stored.
    DrainedStoreCheck = "store-failed.drained",
    /// The tail does not pass a quarantine that was not stored, nor is a segment reused whose tail was not.
    TailStoreCheck = "store-failed.tail",
    /// A change of a table that was not stored is not reported as done.
    TableStoreCheck = "store-failed.table",

    // A read.

    /// A segment that a reader copies from is not reused.
    ReadPins = "read.pins",
    /// Clean data that is damaged is read from the backing device only if it is clean.
    RereadClean = "reread.clean",
    /// A lost record is read from the backing device only if its segment is clean.
    RereadCleanSegment = "reread.clean-segment",
    /// A record that turned out damaged is looked up again: it may have been overwritten or marked bad meanwhile.
    RereadNewest = "reread.newest",
    /// The record that the index names holds what is asked for.
    ReadInRecord = "read.in-record",

    // A flush.

    /// The epoch is closed before the pass over the lanes.
    FlushEpoch = "flush.epoch",
    /// Only a pass that began after a flush's own addition serves it.
    FlushPass = "flush.pass",
    /// The touched bit is cleared under the lane's lock: nothing of the closed epoch is still to come.
    FlushClear = "flush.clear-under-lock",
    /// A flush leaves durable marks: without one the last record of a lane may be dropped as if it had been torn.
    FlushMark = "flush.mark",
    /// A flush's marks are durable when it completes.
    FlushFence = "flush.fence",
    /// A flush is not acknowledged after a store has failed.
    FlushStoreCheck = "flush.store-check",
    /// A FUA write ends its epoch.
    FuaEpoch = "fua.epoch",
    /// A FUA write marks its lanes.
    FuaMark = "fua.mark",
    /// FUA writes that share a fence mark each lane once: a second mark would overwrite the last durable one.
    FuaMarkOnce = "fua.mark.once",
    /// A FUA write's marks are durable when it completes.
    FuaFence = "fua.fence",
    /// A FUA write is not acknowledged after a store has failed.
    FuaStoreCheck = "fua.store-check",
    /// Lanes that were written and then left alone are marked soon.
    IdleMark = "idle.mark",
    /// A clean stop marks all lanes.
    StopMark = "stop.mark",

    // Writeback.

    /// What is closed is looked up before the log is scanned: an older record may appear behind the scan's back.
    WritebackClosedFirst = "writeback.closed-first",
    /// An epoch is collected only when a pass has seen all its lanes.
    WritebackComplete = "writeback.complete",
    /// In strict order the oldest epoch goes alone.
    WritebackOldest = "writeback.oldest",
    /// Before a batch of several epochs it is durable that the backing device alone is no crash state.
    WritebackVoid = "writeback.void",
    /// Nothing of an epoch behind the batch is written.
    WritebackTarget = "writeback.target",
    /// Of several versions of a block the newest of the batch is written.
    WritebackNewest = "writeback.newest",
    /// The next part of a batch is issued when the operations of this one have returned.
    WritebackParts = "writeback.parts",
    /// A batch begins when nothing of one that was given up is in flight.
    WritebackGivenUp = "writeback.given-up",
    /// The backing device is flushed when all writes have returned.
    WritebackFlushLast = "writeback.flush-last",
    /// The backing device is flushed before its data counts as durable.
    WritebackFlush = "writeback.flush",
    /// A failed operation is tried again: its data stays dirty.
    WritebackRetry = "writeback.retry",
    /// After a failed flush everything since the last good one is dirty again.
    WritebackFlushFailed = "writeback.flush-failed",
    /// Damage that writeback finds is quarantined, durably, before drained passes it.
    WritebackQuarantine = "writeback.quarantine",
    /// A lost record that writeback meets is quarantined before drained passes it.
    WritebackLost = "writeback.lost",
    /// Without space for a quarantine nothing is declared clean.
    WritebackGiveUp = "writeback.give-up",
    /// What batches note leaves the segments that are kept back, until a batch goes segment by segment: its notes could take
    /// them all before any segment can be reclaimed.
    WritebackNotesFrugal = "writeback.notes-frugal",
    /// A batch whose damage does not find room goes segment by segment: it would begin again for ever.
    WritebackSettles = "writeback.settles",
    /// The backing device is flushed before a segment of an epoch that is not drained is reclaimed.
    WritebackSettleFlush = "writeback.settle.flush",
    /// A skipped version makes the backing device no crash state, durably, before anything later is written.
    WritebackDamageVoid = "writeback.damage.void",
    /// While damage is not healed on the backing device, it is recorded as not crash-consistent.
    WritebackDamageStays = "writeback.damage.stays",
    /// The backing device is no crash state until nothing is damaged any more.
    WritebackRestDamage = "writeback.rest.damage",
    /// Zeroes are written where the device does not promise them from a discard.
    WritebackZeroes = "writeback.zeroes",
    /// Drained: its first slot is durable before the second is touched.
    DrainedFirstFence = "drained.first.fence",
    /// Drained stands in both slots: one failed page would take the backing device back to an older epoch.
    DrainedSecond = "drained.second",
    /// Drained is durable before anything later is submitted, and before anybody relies on it.
    DrainedFence = "drained.fence",
    /// Others see drained only when it is durable.
    DrainedVisible = "drained.visible-last",
    /// The closing of its epoch dates the recovery point: the backing device lacks what was flushed since.
    DrainedDated = "drained.dated-by-closing",

    // When epochs were closed.

    /// The clock is read before the epoch is closed: a write of the next one may complete in between.
    ClosingReadFirst = "closing.read-first",
    /// Where the clock was set back, times that are later than it are set back too.
    ClosingsClockSetBack = "closing.clock-set-back",
    /// Of epochs that were closed before a restart it is not said that they were closed as late as that.
    ClosingsAfterRestart = "closing.after-restart",

    // Quarantine.

    /// A quarantine is durable before drained or the tail passes what it marks bad.
    QuarantineFence = "quarantine.fence",
    /// A lost quarantine does not look like a write that was never acknowledged, once drained or the tail relies on it.
    QuarantineMark = "quarantine.mark",
    /// Damage that is noted is not noted again: a batch that is tried again and again would fill the log with it.
    QuarantineOnce = "quarantine.once",
    /// A quarantine record names only damage that no record notes: each retry would take space for all of it.
    QuarantineOnlyNew = "quarantine.only-new",
    /// Damage that a later record spans without naming it stays noted by its own record, with which it must be carried.
    QuarantineKeepsNote = "quarantine.keeps-note",
    /// What is newer than the damage is not marked bad.
    QuarantineNewer = "quarantine.newer",
    /// A pending fill of a damaged range does not become a record: it would hide the damage.
    QuarantineCancelsFills = "quarantine.cancels-fills",
    /// What a lane has lost damages its own chunks: others' are never healed by an overwrite in this lane.
    DamageOwnChunks = "damage.own-chunks",
    /// A backing device that lacks quarantined data is not taken for complete.
    DrainQuarantined = "drain.quarantined",
    /// Damage covers the record that it marks bad and what is older.
    DamageByPlace = "damage.by-place",

    // Parked ranges.

    /// A parked record is durable before drained passes the one that it stands for.
    ParkedFence = "parked.fence",
    /// A lost parked record does not look like a write that was never acknowledged, once drained or the tail relies on it.
    ParkedMark = "parked.mark",
    /// Only what is still the newest of its range is parked: it would hide newer data.
    ParkedNewest = "parked.newest",
    /// Zeroes that are parked are not parked again: a batch that is tried again and again would fill the log with them.
    ParkedZeroesOnce = "parked.zeroes.once",
    /// What is written or zeroed over a parked range ends it.
    ParkedSuperseded = "parked.superseded",
    /// Only what is still parked, and where it was, is tried again: its segment may be reused, and what is missed there
    /// would be taken for damage that marks newer data bad.
    ParkedStill = "parked.still",
    /// A batch of what was refused is drained only when that is parked.
    WritebackParks = "writeback.parks",
    /// What is parked is known after a restart.
    RecoveryParked = "recovery.parked",
    /// What is parked is recorded again before its segment is reclaimed.
    ReclaimCarryParked = "reclaim.carry-parked",
    /// No more is parked than reclaim can carry.
    ParkedLimit = "parked.limit",
    /// What is parked is not clean: where it is damaged, the backing device has older data.
    ParkedIsDirty = "parked.is-dirty",

    // Reclaim.

    /// Only a segment that the backing device has is reclaimed.
    ReclaimClean = "reclaim.clean",
    /// A record leaves the index only where it is still the newest.
    ReclaimOwn = "reclaim.own",
    /// Zeroes leave the overlay only where they are the victim's own.
    ReclaimOwnZeroes = "reclaim.own-zeroes",
    /// A quarantine that is still needed is recorded again at the head.
    ReclaimCarry = "reclaim.carry",
    /// Damage that a later segment notes is not recorded again: that would take the room that reclaim is to make.
    ReclaimCarryOnce = "reclaim.carry-once",
    /// A segment whose quarantines found no space stays.
    ReclaimStuck = "reclaim.stuck",
    /// The tail: its first slot is durable before the second is touched.
    TailFirstFence = "tail.first.fence",
    /// The tail stands in both slots: an older one names a segment that is reused.
    TailSecond = "tail.second",
    /// The new tail is durable before the segment returns to the pool.
    TailFence = "tail.fence",
    /// The segment returns to the pool after the tail was stored.
    TailBeforeRelease = "tail.before-release",
    /// The tail says with which sequence number the log begins.
    TailSequence = "tail.sequence",
    /// A second chance is given only to what is still the newest when it was copied.
    ChanceStillCurrent = "second-chance.still-current",
    /// A segment with readers goes to the pool when the last of them is done.
    RetireWaits = "retire.waits-for-readers",
    /// As many segments as there are lanes are kept back for what must make progress.
    PoolReserve = "pool.reserve",
    /// What is left of a segment that was taken from the reserve is for quarantines.
    PoolOpenFromReserve = "pool.open-from-reserve",
    /// Who waits for space is woken when there is some.
    PoolWakes = "pool.wakes",
    /// Who comes to wait for space when a stop has woken all who waited is told to go on, too.
    PoolWakesAfterStop = "pool.wakes-after-stop",

    // Recovery.

    /// Segments before the tail are free, whatever their headers say.
    RecoveryTail = "recovery.tail",
    /// Of two segments with one place in the log that of the later run counts.
    RecoveryLaterRun = "recovery.later-run",
    /// A gap before a segment, in the ordinals or in the sequence numbers, is damage.
    RecoveryGap = "recovery.gap",
    /// A record counts only with the sequence number that is expected.
    RecoverySequence = "recovery.sequence",
    /// A successor's header ends what its predecessor holds: a dropped record does not come back.
    RecoveryLimit = "recovery.limit",
    /// A record that fails before one that can be read is damage.
    RecoveryLater = "recovery.later-record",
    /// A record that fails and has a mark is damage.
    RecoveryMark = "recovery.mark",
    /// A mark names the run of the record that it proves.
    MarkNamesRun = "mark.names-run",
    /// A mark proves nothing of an earlier run: a dropped record with the same sequence number would come back, and what the mark
    /// proves be forgotten.
    RecoveryMarkOfRun = "recovery.mark.of-run",
    /// A lane whose head segment is gone, by the evidence of its mark, is damaged.
    RecoveryHeadLost = "recovery.head-lost",
    /// The last record is applied only if its data is whole: it may be torn.
    RecoveryWhole = "recovery.whole",
    /// A quarantine has effect at the place of the record that it marks bad.
    RecoveryMarkedBad = "recovery.marked-bad",
    /// A quarantine whose record was reclaimed has effect before everything that is left.
    RecoveryMarkedBadBefore = "recovery.marked-bad-before",
    /// What a lost record may have held is damaged.
    RecoveryLost = "recovery.lost",
    /// A lost record is clean only where what stands behind it is on the backing device.
    RecoveryLostBehind = "recovery.lost.behind",
    /// A lost record is clean only while nothing is marked bad: else it may be what says so.
    RecoveryLostVoid = "recovery.lost.void",
    /// Data that is older than a clean record that was lost does not come back.
    RecoveryLostForgetsData = "recovery.lost.forgets-data",
    /// Zeroes that are older than a clean record that was lost do not come back.
    RecoveryLostForgetsZeroes = "recovery.lost.forgets-zeroes",
    /// A loss that nothing on media notes yet is noted.
    RecoveryLostNoted = "recovery.lost.noted",
    /// What a quarantine on media says is known to be noted after a restart.
    RecoveryKnowsNoted = "recovery.knows-noted",
    /// A write after recovery heals damage that it overwrites, in replay too.
    RecoveryHeals = "recovery.heals",
    /// New records have sequence numbers above the lane's mark.
    RecoverySequenceAboveMark = "recovery.sequence-above-mark",
    /// New segments have ordinals above that of a lost head.
    RecoveryOrdinalAboveLost = "recovery.ordinal-above-lost",
    /// Each recovery begins a run of its own.
    RecoveryRun = "recovery.run",
    /// After a recovery a lane writes into a new segment: a dropped record can't come back when later stores fall around it.
    RecoveryNewSegment = "recovery.new-segment",
    /// A dropped record is erased before data is stored that could make it whole.
    RecoveryReopenErase = "recovery.reopen.erase",
    /// The dropped record is gone, durably, before that data is stored.
    RecoveryReopenEraseFence = "recovery.reopen.erase.fence",
    /// A full cache goes on in its last segments, so that quarantines can be carried.
    RecoveryReopen = "recovery.reopen",
    /// New epochs are above drained, and above what a batch under way may have written: they would count as clean.
    EpochAboveDrained = "epoch.above-drained",
    /// New epochs are above those of marks.
    EpochAboveMarks = "epoch.above-marks",
    /// New epochs are above all in the log, dropped records included: an old record would be written back with new ones.
    EpochAboveLog = "epoch.above-log",
    /// Counters that no machine reaches are not counted on from.
    RecoveryCounters = "recovery.counters",
    /// Tails that recovery relied on are durable before anything is served, after a mere process crash.
    RecoveryTailWriteBack = "recovery.tail.write-back",
    /// Marks that recovery relied on are durable before anything is served, after a mere process crash.
    RecoveryMarkWriteBack = "recovery.mark.write-back",
    /// Drained is durable before anything relies on it, after a mere process crash.
    RecoveryDrainedWriteBack = "recovery.drained.write-back",
    /// Headers that recovery relied on are durable before anything is served, after a mere process crash.
    RecoveryHeaderWriteBack = "recovery.header.write-back",
    /// Copies of headers that recovery relied on are durable before anything is served, after a mere process crash.
    RecoveryHeaderCopyWriteBack = "recovery.header-copy.write-back",
    /// The last records of each lane are durable before they are served, after a mere process crash.
    RecoveryRecordWriteBack = "recovery.record.write-back",
    /// The data of the last records is durable before it is served, after a mere process crash.
    RecoveryDataWriteBack = "recovery.data.write-back",
    /// Completes the write-backs of recovery.
    RecoveryFence = "recovery.fence",
    /// Drained and tails of which a crash left one slot get the other back: a page that fails later would bring an older one.
    RecoveryWholeState = "recovery.whole.state",
    /// A header of which a crash left one copy gets the other back: a page that fails later would take the segment.
    RecoveryWholeHeader = "recovery.whole.header",
    /// A last record of which a crash left one copy gets the other back: a page that fails later would take it.
    RecoveryWholeRecord = "recovery.whole.record",
    /// What recovery stored again is durable.
    RecoveryWholeFence = "recovery.whole.fence",
    /// What recovery accepted without a mark is marked by the next flush: it may be dropped as if it had been torn otherwise.
    RecoveryUnmarked = "recovery.unmarked",
    /// The backing device lacks what recovery found damaged, even when it is overwritten before writeback looks.
    RecoveryDamageVoid = "recovery.damage.void",
    /// Without drained old epochs are written over newer ones: the backing device is no crash state meanwhile.
    RecoveryDrainedLost = "recovery.drained-lost.void",
    /// A copy that was reported as repaired is whole after a power cut.
    RepairCopyFence = "repair.copy.fence",
    /// A slot that was reported as repaired is whole after a power cut.
    RepairSlotFence = "repair.slot.fence",
    /// A region whose stores failed takes no new tail and no new drained.
    BackgroundWorkerStoreCheck = "worker.store-check",
    /// A background worker that sleeps until something parked is due is woken by the first write.
    BackgroundWorkerSleepsLong = "worker.sleeps-long",
    /// A background worker that has announced its sleep checks again whether a thread wrote before that.
    BackgroundWorkerLooksAgain = "worker.looks-again",

    // Clients that come back.

    /// A new client is answered only when no request of a client that was gone before can change the device any more.
    ClientWaits = "client.waits",
    /// A client whose connection is closed counts as gone even if no thread has noticed that yet.
    ClientGoneUnnoticed = "client.gone-unnoticed",
    /// A client is gone for good only when what it changes has come to its end.
    ClientSettled = "client.settled",

    // Real memory.

    /// What a thread stored past the caches, or wrote back, is in the persistence domain when its fence returns.
    PmemFence = "pmem.fence",
    /// Lines that were stored through the caches are written back.
    PmemLinesBack = "pmem.lines.back",
    /// What is left on both sides of whole lines goes through the caches, and is written back.
    PmemRaggedBack = "pmem.ragged.back",
    /// What a summing copy leaves behind its steps goes through the caches, and is written back.
    PmemSummedBack = "pmem.summed.back",
    /// A range that begins inside a line touches one line more than its length says.
    PmemFirstLine = "pmem.first-line",
    /// Recovery's write-backs reach the processor.
    PmemWriteBack = "pmem.write-back",
    /// A store that failed is remembered: no later fence proves anything.
    PmemFailedStore = "pmem.failed-store",
}
