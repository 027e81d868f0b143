//! The steps by which a host of a region notices that another machine has the region: looking, announcing, renewing, releasing.
//!
//! The lock of a region's file excludes processes of one kernel. Another machine, or another guest, that has the same memory is
//! noticed by the note in the first page, which each host renews.
//!
//! Invariants: a step takes a bounded time and waits for nothing. A note is stored only into a region with a superblock of CBD in its
//! first page, or one that was opened. A note that is known to be of another open is never stored over, except by a host that has
//! found out that the other one is gone.
//!
//! Elsewhere: clocks, waits and threads (`cbd-runtime`, `presence`); regions that several hosts share (`members`).

use alloc::{format, string::String};
use cbd_format::{OwnerNote, Superblock, Unverified, owner::OWNER_AT, record::bytes_of};
use cbd_types::{BootId, Error, ErrorKind, MutationPoint, Pmem, Region, Result};

/// Bytes of the note.
pub const NOTE_BYTES: usize = size_of::<OwnerNote>();

/// First byte of the note in the region.
pub const NOTE_AT: u64 = OWNER_AT;

/// What the note of a region says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// No host has the region: there is no note, or its host has released the region.
    Free,
    /// Bytes that begin as a note and are none: one that is being stored, or a damaged one.
    Torn,
    /// A host of this boot, against which the lock of the file protects.
    SameBoot,
    /// A host of another boot, living or not.
    Other(OwnerNote),
}

/// What these bytes of a region say to a process of the boot `boot`.
#[must_use]
pub fn seen(bytes: &[u8; NOTE_BYTES], boot: BootId) -> Seen {
    let Some(read) = OwnerNote::decode(bytes) else { return Seen::Free };
    match read.verify() {
        None if read.begins_as_one() => Seen::Torn,
        None => Seen::Free,
        Some(note) if !note.is_held() => Seen::Free,
        Some(note) if BootId(note.boot).is_same_known(boot) => Seen::SameBoot,
        Some(note) => Seen::Other(note),
    }
}

/// What the note of the region says now. Memory that cannot be read has none.
#[inline(never)]
pub fn look<P: Pmem>(region: &Region<P>) -> Seen {
    let bytes = load(region);
    bytes.map_or(Seen::Free, |bytes| seen(&bytes, region.boot()))
}

/// Whether a note may be stored before the region is opened: the first page has a valid superblock of a region with one host.
#[inline(never)]
pub fn may_announce<P: Pmem>(region: &Region<P>) -> bool {
    let mut bytes = [0; size_of::<Superblock>()];
    let is_whole = region.load(0, &mut bytes).is_ok();
    let valid = |block: Unverified<Superblock>| {
        block.verify(region.size()).is_ok_and(|found| found.1.shared_parts().is_none())
    };
    is_whole && Superblock::decode(&bytes).is_some_and(valid)
}

#[inline(never)]
fn load<P: Pmem>(region: &Region<P>) -> Option<[u8; NOTE_BYTES]> {
    let mut bytes = [0; NOTE_BYTES];
    region.observe(MutationPoint::OwnerObserve, NOTE_AT, NOTE_BYTES as u64);
    region.load(NOTE_AT, &mut bytes).ok()?;
    Some(bytes)
}

/// The result of a renewal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beat {
    /// The note is renewed.
    Renewed,
    /// There was no valid note any more; it is stored again.
    Restored,
    /// Another host has opened the region: the caller stores nothing into it any more.
    Taken(OwnerNote),
    /// The host that was gone when this one opened the region has continued, and stored its note over this one's before it looked. This
    /// one's is stored again, so that the other one finds it.
    Replaced(OwnerNote),
    /// Memory failed; nothing was stored.
    Failed,
}

/// The note of this open of a region.
#[derive(Debug)]
pub struct Ownership {
    note: OwnerNote,
    /// The note of the host that was gone when this one opened the region.
    gone: Option<OwnerNote>,
}

impl Ownership {
    /// The note of the host `name`, a process of this machine, with a random `incarnation`.
    #[must_use]
    pub fn new<P: Pmem>(region: &Region<P>, incarnation: u64, process: u32, name: &str) -> Self {
        Self { note: OwnerNote::new(region.boot(), incarnation, process, name), gone: None }
    }

    /// As this one, which takes the region of a host that is gone, with the last note of that host.
    #[must_use]
    pub const fn after(self, gone: Option<OwnerNote>) -> Self {
        Self { gone, ..self }
    }

    /// Whether the note can be read, and so stored: a store into memory that fails would count as a failed store of the region.
    pub fn is_possible<P: Pmem>(region: &Region<P>) -> bool {
        load(region).is_some()
    }

    /// Stores the note. The caller has [looked](look) before, gives another host that does the same at once time to store its own, and
    /// then calls [`confirm`](Self::confirm).
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if a store to the region has failed.
    #[inline(never)]
    pub fn announce<P: Pmem>(&self, region: &Region<P>) -> Result<()> {
        let stored = region.store(NOTE_AT, bytes_of(&self.note));
        let _ = region.publish(MutationPoint::OwnerPublish, stored, NOTE_AT, NOTE_BYTES as u64);
        region.check_stores(MutationPoint::OwnerStoreCheck)
    }

    /// Whether the note is still this one; otherwise another host has announced itself at once, and this one must not use the region.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`].
    #[inline(never)]
    pub fn confirm<P: Pmem>(&self, region: &Region<P>) -> Result<()> {
        match Self::found(region) {
            Some(Some(note)) if note.is_of_same_open(&self.note) => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Busy,
                "another machine opens the region at this moment; a region has one host: see which one has it now, and try again",
            )),
        }
    }

    /// The valid note in the region, if there is one; `None` if the memory cannot be read.
    fn found<P: Pmem>(region: &Region<P>) -> Option<Option<OwnerNote>> {
        let bytes = load(region)?;
        Some(OwnerNote::decode(&bytes).and_then(|note| note.verify()))
    }

    /// Renews the note, unless another host has stored its own.
    ///
    /// A host that is paused between the look and the store, and then taken for gone, stores its note over that of the host that has
    /// the region now. If that host gave up, the one would remain that does not know what the region has become.
    #[inline(never)]
    pub fn beat<P: Pmem>(&mut self, region: &Region<P>) -> Beat {
        if region.store_failure().is_some() {
            return Beat::Failed;
        }
        let is_gone = |note: &OwnerNote| self.gone.is_some_and(|gone| gone.is_of_same_open(note));
        let result = match Self::found(region) {
            None => return Beat::Failed,
            Some(None) => Beat::Restored,
            Some(Some(note)) if note.is_of_same_open(&self.note) => Beat::Renewed,
            Some(Some(note)) if is_gone(&note) => Beat::Replaced(note),
            Some(Some(note)) => return Beat::Taken(note),
        };
        self.note = self.note.renewed();
        if result == Beat::Renewed {
            let stored = region.store_line(NOTE_AT, &self.note.first_line());
            let _ = region.publish(MutationPoint::OwnerPublish, stored, NOTE_AT, cbd_format::LINE);
            return result;
        }
        self.announce(region).map_or(Beat::Failed, |()| result)
    }

    /// Notes that the host has closed the region, after its last store, if the note is still its own.
    #[inline(never)]
    pub fn release<P: Pmem>(self, region: &Region<P>) {
        let is_own = |note: OwnerNote| note.is_of_same_open(&self.note);
        if region.store_failure().is_none() && Self::found(region).flatten().is_some_and(is_own) {
            let stored = region.store_line(NOTE_AT, &self.note.released().first_line());
            let _ = region.publish(MutationPoint::OwnerPublish, stored, NOTE_AT, cbd_format::LINE);
        }
    }
}

/// The error of a region that a living host of another machine has.
#[must_use]
pub fn living(note: &OwnerNote, region: &str) -> Error {
    Error::new(
        ErrorKind::Busy,
        format!(
            "the region {region} is in use by {} on another machine, which renews its note in the region at this moment; a region has \
             one host: end that one, reach the data through it, or choose another region",
            host(note)
        ),
    )
}

/// The host of a note, in words.
#[must_use]
pub fn host(note: &OwnerNote) -> String {
    match note.host_name() {
        Some(name) => format!("host {name} (process {} there)", note.process),
        None => format!("process {}", note.process),
    }
}
