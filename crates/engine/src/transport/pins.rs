//! The pins of a cache: ranges of the device that stay in it. Their list is stored in the state segment, in two copies.
//!
//! Invariants: one copy is durable whenever the other one is stored, so a crash leaves the former list or the new one, and one
//! failed page takes neither. Only speed depends on the list: one that is damaged is reported, and counts as none.
//!
//! Elsewhere: the bytes (`cbd-format`), what a pin does and how much may be pinned (`cache::pins`), which ranges a file has (the
//! tools).

use super::{SharedSpace, Tables, Transport, rows::active_row, shared::read_shared};
use crate::{
    Cache, Environment,
    pins::PinnedRanges,
    slots::{Found, Object, check_repairs},
};
use alloc::{format, sync::Arc, vec, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, Pin, StateShape,
    pins::{PIN_TEXT_MAX, PinCopy, PinListHeader, claimed_length, decode, encode, encoded_length},
};
use cbd_types::{
    BackendId, Error, ErrorKind, MutationPoint, Result, SegmentId, Size, Structure, VerifiedMetadata,
};

/// The pins of a cache as they are stored.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct StoredPins {
    /// The pins, in the order in which they were made.
    pub pins: Vec<Pin>,
    /// There was a list, and neither of its copies can be read.
    pub are_lost: bool,
}

/// A list and its two copies.
struct List {
    stored: StoredPins,
    /// The copy that holds the newest list, and its number.
    newest: Option<(usize, u64)>,
    /// The copy that does not hold a list although it should, and what is there.
    flaw: Option<(usize, Found)>,
}

impl List {
    /// The flaw of the copies, if one of them holds the list.
    fn flaw_of(copies: &[(Found, PinCopy); 2], newest: Option<(usize, u64)>) -> Option<(usize, Found)> {
        let (newest, _) = newest?;
        let other = 1 - newest;
        match copies[other] {
            (Found::Unreadable, _) => Some((other, Found::Unreadable)),
            (_, PinCopy::Blank | PinCopy::Damaged) => Some((other, Found::Damaged)),
            (_, PinCopy::Valid(..)) => None,
        }
    }
}

impl<E: Environment> Transport<E> {
    /// The pins of the cache of a backend; none for a backend without a cache.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn pins(&self, id: BackendId) -> Result<StoredPins> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        Ok(row.content().and_then(|row| self.read_pins(row)).map(|list| list.stored).unwrap_or_default())
    }

    /// Makes `pins` the pins of an open cache, durably and at once. They end when the cache is detached.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a range beyond the end of the device, a text that is too long, and a backend without a
    /// cache; [`ErrorKind::NoSpace`] for more than [`Cache::pin_limit_with`], unless it is not more than is pinned now, and for a list
    /// that is too long; [`ErrorKind::Busy`] if the cache is not open; [`ErrorKind::System`] without memory, and system errors of a
    /// sync. The former pins stay in force then; after a failed sync, either list is found when the cache is opened again.
    pub fn set_pins(&self, id: BackendId, pins: &[Pin]) -> Result<()> {
        let mut tables = self.tables.lock();
        let Some(cache) = tables.open_caches(id).next() else {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is not open")));
        };
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let no_cache =
            || Error::new(ErrorKind::InvalidArgument, format!("backend {id} has no cache to pin in"));
        let Some(row) = row.content() else { return Err(no_cache()) };
        let Some((places, most)) = self.pin_places(row) else {
            let text = "the segments of this transport are too small for a list of pins";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };
        // 1. Everything that can be refused.
        let pins = &*normalised(pins)?;
        let ranges = ranges_of(pins)?;
        if ranges.end() > cache.size().next_multiple_of(cbd_types::CHECKSUM_BLOCK) {
            let (end, size) = (ranges.end(), cache.size());
            let text = format!("a range ends at byte {end}, and the device has {size} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if let Some(pin) = pins.iter().find(|pin| pin.text.len() > PIN_TEXT_MAX) {
            let text = format!("a name of {} bytes: at most {PIN_TEXT_MAX} are possible", pin.text.len());
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let length = encoded_length(pins) as u64;
        if length > most {
            let count: usize = pins.iter().map(|pin| pin.ranges.len()).sum();
            let text = format!(
                "the list of pins would have {count} ranges in {}, and the cache has room for a list of {}: pin files with fewer \
                 fragments",
                Size(length),
                Size(most)
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        if ranges.bytes() > cache.pinned_bytes() {
            let segments = least_segments(read_shared(row), &cache);
            cache.check_pinned(ranges.bytes(), segments, cache.settings().pin_percent)?;
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        // 2. The copy that is not the newest, durably; then the other one.
        let newest = self.read_pins(row).and_then(|list| list.newest);
        let (first, number) = newest.map_or((0, 1), |(newest, number)| (1 - newest, number + 1));
        let bytes = encode(row.cache_id.get(), number, pins);
        self.store_copy(places[first], &bytes, MutationPoint::PinsFirstFence)?;
        if MutationPoint::PinsSecond.is_active() {
            self.store_copy(places[1 - first], &bytes, MutationPoint::PinsFence)?;
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        // 3. The lanes.
        cache.set_pins(&ranges);
        Ok(())
    }

    /// Refuses a change with which the present pins of a backend would not fit: of the log segments of its cache, or of the share
    /// for pins. Nothing is refused for a cache that is not open.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] with the numbers.
    pub fn check_pins(
        &self,
        id: BackendId,
        log_segments: Option<u32>,
        pin_percent: Option<u8>,
    ) -> Result<()> {
        let mut tables = self.tables.lock();
        let Some(cache) = tables.open_caches(id).next() else { return Ok(()) };
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let Some(row) = row.content() else { return Ok(()) };
        let segments = log_segments.unwrap_or_else(|| least_segments(read_shared(row), &cache));
        let percent = pin_percent.unwrap_or_else(|| cache.settings().pin_percent);
        let pinned = cache.pinned_bytes();
        if pinned == 0 { Ok(()) } else { cache.check_pinned(pinned, segments, percent) }
    }

    /// Pins in a cache that is being opened what its list says.
    pub(super) fn restore_pins(&self, tables: &Tables<E>, id: BackendId, cache: &Cache<E>) -> Result<()> {
        let Some(row) = tables.backends[id.index()].content() else { return Ok(()) };
        let Some(list) = self.read_pins(row) else { return Ok(()) };
        if list.flaw.is_some_and(|(_, what)| what == Found::Damaged) {
            // A crash came between the two, or one is damaged; if it is not stored now, a verification finds it.
            let _ = self.complete_pins(row, &list);
        }
        if !list.stored.pins.is_empty() {
            cache.set_pins(&ranges_of(&list.stored.pins)?);
        }
        Ok(())
    }

    /// Durably stores the list into the copy that does not hold it.
    fn complete_pins(&self, row: &BackendRow, list: &List) -> Result<()> {
        let (Some((places, _)), Some((_, number)), Some((flawed, _))) =
            (self.pin_places(row), list.newest, list.flaw)
        else {
            return Ok(());
        };
        check_repairs(&self.region)?;
        let bytes = encode(row.cache_id.get(), number, &list.stored.pins);
        self.store_copy(places[flawed], &bytes, MutationPoint::VerifyPinsFence)?;
        self.region.check_stores(MutationPoint::VerifyStoreCheck)
    }

    /// Looks at both copies of the list of the cache that a row names, and stores a damaged one again.
    #[inline(never)]
    pub(super) fn verify_pins(&self, row: &BackendRow, found: &mut VerifiedMetadata) {
        let (Some(list), Some((places, _))) = (self.read_pins(row), self.pin_places(row)) else { return };
        let object = Object { structure: Structure::Pins, number: 0, is_synced: true };
        found.structures += 1;
        if list.stored.are_lost {
            places.into_iter().for_each(|at| object.note(found, at, Found::Damaged, false));
        }
        let Some((flawed, what)) = list.flaw else { return };
        let mut is_repaired = false;
        if what == Found::Damaged {
            match self.complete_pins(row, &list) {
                Ok(()) => is_repaired = true,
                Err(error) => drop(found.error.get_or_insert(error)),
            }
        }
        object.note(found, places[flawed], what, is_repaired);
    }

    fn store_copy(&self, at: u64, bytes: &[u8], fence: MutationPoint) -> Result<()> {
        let stored = self.region.store(at, bytes);
        self.region.fence(fence, stored);
        self.region.sync(MutationPoint::PinsSync, at, bytes.len() as u64)
    }

    /// The list of the cache that a row names, if it has one with room for a list.
    fn read_pins(&self, row: &BackendRow) -> Option<List> {
        let (places, most) = self.pin_places(row)?;
        let cache_id = row.cache_id.get();
        let copies = places.map(|at| {
            let mut bytes = vec![0; size_of::<PinListHeader>()];
            if self.region.load(at, &mut bytes).is_err() {
                return (Found::Unreadable, PinCopy::Damaged);
            }
            if let Some(length) = claimed_length(cache_id, &bytes, most) {
                bytes.resize(length, 0);
                if self.region.load(at, &mut bytes).is_err() {
                    return (Found::Unreadable, PinCopy::Damaged);
                }
            }
            (Found::Whole, decode(cache_id, &bytes))
        });
        let number = |(_, copy): &(Found, PinCopy)| match copy {
            PinCopy::Valid(number, _) => Some(*number),
            PinCopy::Blank | PinCopy::Damaged => None,
        };
        let newest = match copies.each_ref().map(number) {
            [Some(first), second] if second.is_none_or(|second| second <= first) => Some((0, first)),
            [_, Some(second)] => Some((1, second)),
            _ => None,
        };
        // The first list of a cache is stored into the first copy first: torn, it leaves the second one blank, and nothing is lost.
        // If the first one is blank, a list was in the second one only if a header says so.
        let has_header = || self.region.load(places[1], &mut [0; size_of::<PinListHeader>()]).is_ok();
        let are_lost = newest.is_none()
            && copies[1].1 == PinCopy::Damaged
            && (copies[0].1 == PinCopy::Damaged || has_header());
        let flaw = List::flaw_of(&copies, newest);
        let [(_, first), (_, second)] = copies;
        let pins = match newest.map(|(which, _)| if which == 0 { first } else { second }) {
            Some(PinCopy::Valid(_, pins)) => pins,
            _ => Vec::new(),
        };
        Some(List { stored: StoredPins { pins, are_lost }, newest, flaw })
    }

    /// The offsets of the two copies in the region, and the bytes that each may have.
    fn pin_places(&self, row: &BackendRow) -> Option<([u64; 2], u64)> {
        let segment = row.state_segment.get();
        if row.cache_id.get() == 0 || segment >= self.segment_count() {
            return None;
        }
        let base = self.segment_base(SegmentId(segment));
        let (places, most) = StateShape { lanes: row.lanes.get() }.pins(self.segment_size)?;
        Some((places.map(|at| base + at), most))
    }
}

impl<E: Environment> Cache<E> {
    /// Bytes that may be pinned in a cache with these bounds, none if it does not share its space: they must fit into its minimum.
    pub fn pin_limit_with(&self, shared: Option<SharedSpace>) -> u64 {
        self.pin_limit_of(least_segments(shared, self), self.settings().pin_percent)
    }
}

/// The log segments that a cache keeps at least: those of its minimum if it shares its space.
fn least_segments<E: Environment>(shared: Option<SharedSpace>, cache: &Cache<E>) -> u32 {
    let now = (cache.capacity() / u64::from(cache.segment_bytes())) as u32;
    shared.map_or(now, |shared| shared.min.saturating_sub(1).min(now))
}

/// The pins with ranges as they are stored: in order, disjoint, in whole checksum blocks.
fn normalised(pins: &[Pin]) -> Result<Vec<Pin>> {
    let pin = |pin: &Pin| {
        let ranges = ranges_of(core::slice::from_ref(pin))?;
        Ok(Pin { kind: pin.kind, text: pin.text.clone(), ranges: ranges.iter().collect() })
    };
    pins.iter().map(pin).collect()
}

fn ranges_of(pins: &[Pin]) -> Result<Arc<PinnedRanges>> {
    let ranges = PinnedRanges::new(pins.iter().flat_map(|pin| pin.ranges.iter().copied()));
    let no_memory = || Error::new(ErrorKind::System, "no memory for the pins");
    Ok(Arc::new(ranges.ok_or_else(no_memory)?))
}
