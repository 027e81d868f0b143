//! The list of all mutation points, in the order of the code that uses them.

/// Defines the mutation points: the purpose of each and what goes wrong without it, its variant, its name.
macro_rules! mutation_points {
    ($( $(#[doc = $about:literal])+ $variant:ident = $name:literal, )+) => {
        /// A step without which data would be lost or wrong, and which a test can remove. Each variant describes what
        /// goes wrong without it.
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

    /// Memory that does not hold a region is not opened as one.
    SuperblockMagic = "superblock.magic",
    /// A superblock with a flipped bit does not determine the layout.
    SuperblockChecksum = "superblock.checksum",

    // The owner note.

    /// Other bytes are not taken for the note of a host.
    OwnerMagic = "owner.magic",
    /// A note with a flipped bit is that of no host.
    OwnerChecksum = "owner.checksum",
    /// What another machine has stored in the note is seen.
    OwnerObserve = "owner.observe",
    /// A host's note is where another machine sees it before the host continues.
    OwnerPublish = "owner.publish",
    /// A host whose note could not be stored does not use the region.
    OwnerStoreCheck = "owner.store-check",

    // Creation of a transport.

    /// The erased superblocks are durable before the tables are blanked.
    FormatEraseFence = "format.erase.fence",
    /// The blank tables are durable before a superblock refers to them.
    FormatBlankFence = "format.blank.fence",
    /// A transport that was reported as created exists after a power cut.
    FormatSuperblockFence = "format.superblock.fence",

    // Features that are added to a transport later.

    /// The first copy with a new feature is durable before the other one changes.
    FeatureFirstFence = "feature.first.fence",
    /// The first copy with a new feature is on the disk of an ordinary file before the other one changes.
    FeatureFirstSync = "feature.first.sync",
    /// Both copies are durable before the feature is used.
    FeatureFence = "feature.fence",
    /// Both copies are on the disk of an ordinary file before the feature is used.
    FeatureSync = "feature.sync",

    // A region that grows.

    /// The blank segment table of new space is durable before a superblock refers to it.
    RegionTableFence = "region.table.fence",
    /// The blank segment table of new space is on the disk of an ordinary file before a superblock refers to it.
    RegionTableSync = "region.table.sync",
    /// The superblock behind the new space is durable before the first one changes.
    RegionLastFence = "region.last.fence",
    /// The superblock behind the new space is on the disk of an ordinary file before the first one changes.
    RegionLastSync = "region.last.sync",
    /// The first superblock is durable before the new space is used and the former second superblock is erased.
    RegionFirstFence = "region.first.fence",
    /// The first superblock is on the disk of an ordinary file before the new space is used.
    RegionFirstSync = "region.first.sync",

    // Two slots, of which the newest valid one counts.

    /// A slot of another kind of object does not count.
    SlotKind = "slot.kind",
    /// A torn or flipped slot does not count.
    SlotChecksum = "slot.checksum",
    /// A forged sequence number, from which the next update would overflow, does not count.
    SlotSequenceBound = "slot.sequence-bound",
    /// Impossible numbers in a slot do not count.
    SlotContent = "slot.content",

    // Tables, in the order in which a backend is created.

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
    /// A slot that was restored at opening is durable before anything relies on it.
    OpenWholeFence = "open.whole.fence",
    /// A host's row: its first slot is durable before the second is touched.
    HostRowFirstFence = "host.row.first.fence",
    /// A host's row is stored in both slots.
    HostRowSecond = "host.row.second",
    /// A host that was reported as registered exists after a power cut.
    HostRowFence = "host.row.fence",
    /// A backend's row: its first slot is durable before the second is touched.
    BackendRowFirstFence = "backend.row.first.fence",
    /// A backend's row is stored in both slots: one failed page would lose it, or restore a row that was removed.
    BackendRowSecond = "backend.row.second",
    /// A backend that was reported as created exists after a power cut.
    BackendRowFence = "backend.row.fence",
    /// The former disk of a backend that is moved is stored twice: one failed page does not lose it.
    MovedFormerSecond = "moved.former.second",
    /// The former disk is durable before the row records that the backend was moved.
    MovedFormerFence = "moved.former.fence",
    /// The former disk is on the disk of an ordinary file before the row records that the backend was moved.
    MovedFormerSync = "moved.former.sync",
    /// A former disk that was reported as forgotten stays forgotten.
    MovedForgetFence = "moved.forget.fence",
    /// A former disk that was reported as forgotten stays forgotten on the disk of an ordinary file.
    MovedForgetSync = "moved.forget.sync",
    /// A blkdev's row: its first slot is durable before the second is touched.
    BlkdevRowFirstFence = "blkdev.row.first.fence",
    /// A blkdev's row is stored in both slots.
    BlkdevRowSecond = "blkdev.row.second",
    /// A blkdev that was reported as created exists after a power cut.
    BlkdevRowFence = "blkdev.row.fence",
    /// Segments name their cache before the backend's row exists.
    BackendSegmentsFirstFence = "backend.segments.first.fence",
    /// The second slots are durable before the row.
    BackendSegmentsFence = "backend.segments.fence",
    /// A lane's first tail is stored in both slots: otherwise the tail of an older cache would count.
    BackendTailSecond = "backend.tail.second",
    /// The first drained is stored in both slots: otherwise that of an older cache would count.
    BackendDrainedSecond = "backend.drained.second",
    /// The state block is durable before the backend's row exists.
    BackendStateFence = "backend.state.fence",

    // Agreement among hosts.

    /// A vote is visible to other hosts before the voter looks at theirs.
    VotePublish = "vote.publish",
    /// A voter looks at the votes of other hosts, not at what its caches have of them.
    VoteObserve = "vote.observe",
    /// A vote that is stored while it is read is read again.
    VoteStable = "vote.stable",
    /// A voter whose decision is outdated does not decide.
    VoteVersion = "vote.version",
    /// A voter does not decide in a ballot below one that another host has promised.
    VoteBallot = "vote.ballot",
    /// A voter proposes what another host may have decided already.
    VoteAdopt = "vote.adopt",

    /// A decision survives a failed page.
    VoteSecond = "vote.second",
    // Channels between hosts.

    /// An entry or a header of which only some words have arrived does not count.
    ChannelChecksum = "channel.checksum",
    /// Data that a host has published as a whole is what the other one takes.
    ChannelDataChecksum = "channel.data.checksum",
    /// Data is visible to the other host before the entry that refers to it.
    ChannelDataPublish = "channel.data.publish",
    /// A row that is not in use any more where its owner was may be another host's by now.
    MoveLookAgain = "move.look-again",
    /// An entry is visible to the other host.
    ChannelEntryPublish = "channel.entry.publish",
    /// A header is visible to the other host.
    ChannelHeaderPublish = "channel.header.publish",
    /// A host looks at the other one's lines, not at what its caches have of them.
    ChannelObserve = "channel.observe",
    /// A host takes the other one's data, not what its caches have of the place's former data.
    ChannelDataObserve = "channel.data.observe",
    /// An entry of another session of the client is not executed.
    ChannelClientSession = "channel.client-session",
    /// An entry of another session of the server does not count.
    ChannelServerSession = "channel.server-session",
    /// An entry that is in the place of another one does not count.
    ChannelSequence = "channel.sequence",
    /// A part of a request that is to be submitted again waits before what must not overtake it.
    ChannelOrder = "channel.order",
    /// A request waits for those before it that overlap it: one that is executed again does not undo a later one.
    ChannelOverlap = "channel.overlap",
    /// Requests of a client that has ended its session do not begin.
    ChannelEnded = "channel.ended",
    /// The requests of a former session end before those of the next one begin.
    ChannelSettle = "channel.settle",
    /// A server sends back nothing while changes of a former process are outstanding.
    ChannelRecallSettled = "channel.recall.settled",
    /// After a change of the server requests in flight are submitted again.
    ChannelReplay = "channel.replay",
    /// A header of which one line is incomplete is in the other one.
    ChannelHeaderSecond = "channel.header.second",
    /// The entry of a request that is not complete is not replaced: a later process of the server finds it.
    ChannelEntryKept = "channel.entry.kept",
    /// A later process of a server continues the session of the former one.
    ChannelResume = "channel.resume",
    /// It does not do so after a crash of the machine.
    ChannelBoot = "channel.boot",
    /// A request whose completion is stored is not executed again.
    ChannelResumeCompleted = "channel.resume.completed",
    /// A session of which lines have damage is not continued.
    ChannelResumeWhole = "channel.resume.whole",
    /// Of the last completion there is a copy, which counts where its line has damage.
    ChannelCopy = "channel.copy",
    /// Completions that a former process of the server stores late do not count.
    ChannelProcess = "channel.process",
    /// A process that takes over is named before it stores, and what it has stored counts for a later one.
    ChannelTakeover = "channel.takeover",
    /// A client counts the completions of a process that has taken over from the first one on.
    ChannelCount = "channel.count",
    /// A header that a former process has stored in part is cleared before it is used.
    ChannelTornCleared = "channel.torn.cleared",
    /// Requests of several clients that overlap are not executed at the same time.
    ChannelExclusion = "channel.exclusion",

    /// A sign of life is visible to other hosts.
    BeatPublish = "beat.publish",
    /// An observer looks at the sign of life itself, not at what its caches have of it.
    BeatObserve = "beat.observe",
    /// The tables of a new host are blank before its area says so.
    AreaBlankFence = "area.blank.fence",
    /// The same on the disk of an ordinary file.
    AreaBlankSync = "area.blank.sync",
    /// One copy of an area's header is durable before the other one changes.
    AreaHeaderFirstFence = "area.header.first.fence",
    /// An area's header survives a failed page.
    AreaHeaderSecond = "area.header.second",
    /// An area's header is durable before its tables are used.
    AreaHeaderFence = "area.header.fence",

    // Ordinary files, whose old and new pages are mixed after a crash of the machine.

    /// The erased superblocks of an earlier transport are on the disk before its tables are overwritten.
    FormatEraseSync = "format.erase.sync",
    /// The blank tables are on the disk before a superblock refers to them.
    FormatBlankSync = "format.blank.sync",
    /// The superblocks that were read are on the disk before anything relies on them, and before one of them changes: a
    /// killed process may have left them in the kernel's cache only.
    OpenSuperblockSync = "open.superblock.sync",
    /// The rows that were read are on the disk before anything relies on them: a killed process may have left them in
    /// the kernel's cache only.
    OpenSync = "open.sync",
    /// After a sync that failed, pages are stored again before another sync counts: the kernel considers them clean.
    SyncAgain = "sync.again",
    /// The slot of a row that was restored at opening is on the disk before the other one changes: the disk may tear
    /// both pages.
    OpenWholeSync = "open.whole.sync",
    /// Entries of segments are on the disk before the row of the backend that they name.
    BackendSegmentsSync = "backend.segments.sync",
    /// The first slot of a row is on the disk before the second changes: the disk may tear both pages.
    RowFirstSync = "row.first.sync",
    /// A row that was reported as changed is on the disk: an older one would assign segments to a removed cache.
    RowSync = "row.sync",
    /// All pages of the region are on the disk before a row states that.
    UseSync = "use.sync",

    // Segments.

    /// A torn or flipped header does not count.
    HeaderChecksum = "header.checksum",
    /// Bytes that are not a header do not count.
    HeaderMagic = "header.magic",
    /// A header that was copied from another segment does not count.
    HeaderSegment = "header.segment",
    /// A segment of an earlier cache does not count.
    HeaderCache = "header.cache",
    /// A header with another number of lanes does not count.
    HeaderLanes = "header.lanes",
    /// A header of a lane that does not exist does not count.
    HeaderLane = "header.lane",
    /// Forged counters that would overflow later do not count.
    HeaderCounters = "header.counters",
    /// A segment's header is durable before its first record.
    HeaderFence = "header.fence",

    // Records.

    /// A torn or flipped record does not count.
    RecordChecksum = "record.checksum",
    /// A record of an earlier use of its segment does not count.
    RecordGeneration = "record.generation",
    /// A record of an unknown kind does not count.
    RecordKind = "record.kind",
    /// A record with reserved bytes that are not zero does not count.
    RecordReserved = "record.reserved",
    /// A record whose range is empty or wraps around does not count.
    RecordRange = "record.range",
    /// Forged counters that would overflow later do not count.
    RecordCounters = "record.counters",
    /// A torn or flipped line of checksums does not count.
    ChecksumLineChecksum = "checksums.checksum",
    /// A record is not taken for a line of checksums.
    ChecksumLineKind = "checksums.kind",
    /// Lines of checksums are not exchanged.
    ChecksumLineIndex = "checksums.index",
    /// A line with more checksums than it has room for does not count.
    ChecksumLineCount = "checksums.count",
    /// A line of checksums belongs to its record.
    ChecksumLineSequence = "checksums.sequence",

    // A write.

    /// Without checksums data is durable before a record can refer to it: a torn write would not be detected.
    WriteDataFence = "write.data.fence",
    /// A write is durable when it completes.
    WriteFence = "write.fence",
    /// A write stores no data but that which its sender's checksum is of.
    WriteOtherData = "write.other-data",
    /// Writes that share a fence are durable when they complete.
    WriteTogetherFence = "write.together.fence",
    /// Writes that share a fence are not stored behind a record that was not stored.
    WriteTogetherAfterFailure = "write.together.after-failure",
    /// Writes that share a fence are not acknowledged after a store has failed.
    WriteTogetherStoreCheck = "write.together.store-check",
    /// A write is not acknowledged after a store has failed.
    WriteStoreCheck = "write.store-check",
    /// A fill is durable before its lane is unlocked: at most the last record of a lane is torn.
    FillFence = "fill.fence",
    /// Zeroes are durable when the request completes.
    ZeroFence = "zero.fence",
    /// A request that covers no lane has a fence nevertheless: only a fence creates the evidence for its completion.
    ZeroNothingFence = "zero.nothing.fence",
    /// A discard is not acknowledged after a store has failed.
    ZeroStoreCheck = "zero.store-check",

    // A store that failed.

    /// No record follows one that was not stored: it would prove a write that was never acknowledged.
    RecordAfterFailure = "store-failed.record",
    /// No mark proves a record that was not stored.
    MarkStoreCheck = "store-failed.mark",
    /// Drained does not pass a record that was not stored.
    DrainedStoreCheck = "store-failed.drained",
    /// The tail does not pass a quarantine that was not stored, and a segment is not reused if its tail was not stored.
    TailStoreCheck = "store-failed.tail",
    /// A change of a table that was not stored is not reported as done.
    TableStoreCheck = "store-failed.table",


    // A flush.

    /// A flush's marks are durable when it completes.
    FlushFence = "flush.fence",
    /// A flush is not acknowledged after a store has failed.
    FlushStoreCheck = "flush.store-check",
    /// A FUA write's marks are durable when it completes.
    FuaFence = "fua.fence",
    /// A FUA write is not acknowledged after a store has failed.
    FuaStoreCheck = "fua.store-check",

    // Writeback.

    /// Drained: its first slot is durable before the second is touched.
    DrainedFirstFence = "drained.first.fence",
    /// Drained is stored in both slots: otherwise one failed page would return it to an older epoch.
    DrainedSecond = "drained.second",
    /// Drained is durable before anything later is submitted, and before anything relies on it.
    DrainedFence = "drained.fence",


    // Pins.

    /// The first copy of a list of pins is durable before the second one is touched.
    PinsFirstFence = "pins.first.fence",
    /// A list of pins is in both copies: one failed page does not take it.
    PinsSecond = "pins.second",
    /// A list of pins is durable before the change is reported.
    PinsFence = "pins.fence",
    /// On an ordinary file, a copy of a list of pins is on the disk before the other one changes, and before the change is reported.
    PinsSync = "pins.sync",
    /// A list of pins with a wrong checksum does not count.
    PinsChecksum = "pins.checksum",

    // Quarantine.

    /// A quarantine is durable before drained or the tail passes what it marks bad.
    QuarantineFence = "quarantine.fence",

    // Parked ranges.

    /// A parked record is durable before drained passes the one that it stands for.
    ParkedFence = "parked.fence",

    // Bypass.

    /// An invalidation is durable before the backing device gets what goes past the cache.
    InvalidateFence = "invalidate.fence",
    /// A write-through record is durable before its lane is unlocked.
    WriteThroughFence = "writethrough.fence",

    // Reclaim.

    /// The tail: its first slot is durable before the second is touched.
    TailFirstFence = "tail.first.fence",
    /// The tail is stored in both slots: an older tail refers to a segment that is reused.
    TailSecond = "tail.second",
    /// The new tail is durable before the segment returns to the pool.
    TailFence = "tail.fence",

    // Recovery.

    /// The dropped record is durably erased before data is stored in its place.
    RecoveryReopenEraseFence = "recovery.reopen.erase.fence",
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
    /// Data that recovery stored again is durable.
    RecoveryWholeFence = "recovery.whole.fence",
    /// A copy that was reported as repaired is intact after a power cut.
    RepairCopyFence = "repair.copy.fence",
    /// A slot that was reported as repaired is intact after a power cut.
    RepairSlotFence = "repair.slot.fence",
    /// A superblock that was stored again while the region is in use is intact after a power cut: the other one may fail next.
    VerifySuperblockFence = "verify.superblock.fence",
    /// A superblock that was stored again while the region is in use is on the disk of an ordinary file.
    VerifySuperblockSync = "verify.superblock.sync",
    /// A slot that was stored again while its object is in use is intact after a power cut: the other one may fail next.
    VerifySlotFence = "verify.slot.fence",
    /// A slot of a table that was stored again is on the disk of an ordinary file.
    VerifySlotSync = "verify.slot.sync",
    /// A header that was stored again while its segment is in use is intact after a power cut.
    VerifyHeaderFence = "verify.header.fence",
    /// A list of pins that was stored again is intact after a power cut.
    VerifyPinsFence = "verify.pins.fence",
    /// Nothing is stored again once a store has failed, and no such copy is reported as repaired.
    VerifyStoreCheck = "verify.store-check",
    /// A region whose stores failed gets no new tail and no new drained.
    BackgroundWorkerStoreCheck = "worker.store-check",
}
