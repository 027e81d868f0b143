//! Pins: ranges of a device that stay in its cache, by the names that users gave.
//!
//! Invariants: a command makes all its pins, or none; other commands that change the backend are refused meanwhile.
//!
//! Elsewhere: which ranges a file has (the tool, in the mount namespace of the user), how much may be pinned and where the list is
//! stored (`cbd-engine`).

use super::Manager;
use super::slots::TakenSlot;
use crate::api::{AddPins, PinInfo, PinKind, PinsInfo, RemovePins, printable};
use crate::size::format_size;
use cbd_engine::{Cache, Pin, Transport};
use cbd_runtime::{ProcessEnvironment, RunningBackend};
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The warning of a list of pins that is damaged.
const LOST: &str = "the list of its pins is damaged, so nothing is pinned: pin it again with cbdctrl pin";

/// Names that a log line or an error lists.
const LISTED_MAX: usize = 8;

impl Manager {
    /// The pins of the cache of a backend.
    pub(super) fn pins_of(&self, transport: u32, id: BackendId) -> Result<PinsInfo> {
        let handle = self.handle(transport)?;
        let (cache, shared) = {
            let mut tables = self.tables()?;
            let slot = super::transport::running_mut(&mut tables, transport)?.backend_mut(id)?;
            (slot.run.as_ref().and_then(|run| run.cache()), slot.entry.shared)
        };
        let cache = cache.ok_or_else(|| no_cache(id))?;
        let stored = handle.transport.pins(id)?;
        let pin = |pin: &Pin| PinInfo {
            kind: pin.kind.into(),
            name: pin.text.clone(),
            bytes: pin.bytes(),
            ranges: pin.ranges.len(),
            cached_bytes: pin.ranges.iter().map(|range| cache.cached_bytes_of(*range)).sum(),
        };
        Ok(PinsInfo {
            backend_id: id.0,
            pinned_bytes: cache.pinned_bytes(),
            limit_bytes: cache.pin_limit_with(shared),
            lost: stored.are_lost,
            pins: stored.pins.iter().map(pin).collect(),
        })
    }

    /// Makes pins.
    pub(super) fn pins_add(&self, transport: u32, id: BackendId, request: AddPins) -> Result<PinsInfo> {
        if request.pins.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument, "name what is to be pinned"));
        }
        self.with_running(transport, id, "its pins are being changed", |taken, run| {
            let mut pins = taken.handle.transport.pins(id)?.pins;
            let mut known = positions(&pins);
            let mut names = Vec::new();
            for new in request.pins {
                let range = |range: &crate::api::RangeInfo| ByteRange { start: range.start, end: range.end };
                let pin = Pin {
                    kind: new.kind.into(),
                    text: new.name,
                    ranges: new.ranges.iter().map(range).collect(),
                };
                if pin.ranges.is_empty() || pin.ranges.iter().any(|range| range.start >= range.end) {
                    let text = format!("{}: a pin has ranges, and none is empty", described(&pin));
                    return Err(Error::new(ErrorKind::InvalidArgument, text));
                }
                names.push(described(&pin));
                match known.get(&key(&pin)).and_then(|at: &usize| pins.get_mut(*at)) {
                    Some(known) => *known = pin,
                    None => {
                        known.insert(key(&pin), pins.len());
                        pins.push(pin);
                    }
                }
            }
            taken.set_pins(run, &pins, &format!("pinned: {}", listed(&names)))
        })?;
        self.pins_of(transport, id)
    }

    /// Ends pins.
    pub(super) fn pins_remove(
        &self,
        transport: u32,
        id: BackendId,
        request: &RemovePins,
    ) -> Result<PinsInfo> {
        if request.pins.is_empty() && !request.all {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "name the pins that are to end, or all of them",
            ));
        }
        self.with_running(transport, id, "its pins are being changed", |taken, run| {
            let pins = taken.handle.transport.pins(id)?.pins;
            let known = positions(&pins);
            // A pin that is named twice ends once.
            let mut ended = BTreeSet::new();
            for name in &request.pins {
                match known.get(&(name.kind.name(), name.name.clone())) {
                    Some(at) => ended.insert(*at),
                    None => return Err(unknown(id, name.kind, &name.name, &pins)),
                };
            }
            let is_ended = |at: usize| request.all || ended.contains(&at);
            let (ended, left): (Vec<_>, Vec<_>) =
                pins.into_iter().enumerate().partition(|(at, _)| is_ended(*at));
            let left: Vec<Pin> = left.into_iter().map(|(_, pin)| pin).collect();
            let names: Vec<String> = ended.iter().map(|(_, pin)| described(pin)).collect();
            taken.set_pins(run, &left, &format!("not pinned any more: {}", listed(&names)))
        })?;
        self.pins_of(transport, id)
    }
}

impl TakenSlot {
    /// Makes `pins` the pins, and logs `what`.
    fn set_pins(&mut self, run: &Arc<RunningBackend>, pins: &[Pin], what: &str) -> Result<()> {
        let Self { handle, id, slot, .. } = self;
        let cache: Arc<Cache<ProcessEnvironment>> = run.cache().ok_or_else(|| no_cache(*id))?;
        handle.transport.set_pins(*id, pins)?;
        slot.warnings.retain(|warning| warning != LOST);
        tracing::info!(
            transport = handle.id,
            backend = id.0,
            "{}: {what}; {} of at most {} are pinned",
            slot.path,
            format_size(cache.pinned_bytes()),
            format_size(cache.pin_limit_with(slot.entry.shared))
        );
        Ok(())
    }
}

/// The warning that a list of pins is damaged, if it is.
pub(super) fn lost_pins(transport: &Transport<ProcessEnvironment>, id: BackendId) -> Option<String> {
    let stored = transport.pins(id).ok()?;
    stored.are_lost.then(|| LOST.to_owned())
}

/// What no two pins of a cache have in common: the kind and the name.
fn key(pin: &Pin) -> (&'static str, String) {
    (pin.kind.name(), pin.text.clone())
}

/// Where each pin is in the list.
fn positions(pins: &[Pin]) -> HashMap<(&'static str, String), usize> {
    pins.iter().map(key).zip(0..).collect()
}

/// The pin in words.
fn described(pin: &Pin) -> String {
    let name = printable(&pin.text);
    match pin.kind {
        cbd_engine::PinKind::File => name,
        kind => format!("{} {name}", kind.name()),
    }
}

fn listed(names: &[String]) -> String {
    let shown = names[..names.len().min(LISTED_MAX)].join(", ");
    match names.len().saturating_sub(LISTED_MAX) {
        _ if names.is_empty() => "nothing".to_owned(),
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn no_cache(id: BackendId) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("backend {id} has no cache, or is not up: nothing can be pinned"),
    )
}

fn unknown(id: BackendId, kind: PinKind, name: &str, pins: &[Pin]) -> Error {
    let names: Vec<String> = pins.iter().map(described).collect();
    let known =
        if names.is_empty() { "nothing is pinned".to_owned() } else { format!("pinned: {}", listed(&names)) };
    let (kind, name) = (kind.name(), printable(name));
    Error::new(ErrorKind::NotFound, format!("backend {id} has no pin of the {kind} {name}; {known}"))
}
