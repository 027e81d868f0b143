//! Dump: the content of a region, field by field.
//!
//! Invariants: damaged structures are shown, too, unmodified and marked as damaged. The records are those that recovery
//! finds in a private copy.
//!
//! Elsewhere: printing (`cbdctrl`).

mod fields;
mod pins;
mod records;
mod structures;

pub use fields::{Field, Item};
pub use records::KINDS;

use crate::Bytes;
use crate::check::open_private;
use cbd_format::{Layout, RecordKind, Superblock};
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, Result};
use std::ops::{ControlFlow, RangeInclusive};
use std::sync::Arc;

/// The structures to dump.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum What {
    /// Both superblocks.
    Superblock,
    /// The tables of hosts, backends and blkdevs.
    Tables,
    /// The owner of each segment, and its header.
    Segments,
    /// Drained, tails, marks and the chains of segments.
    Lanes,
    /// The lists of pins.
    Pins,
    /// The records of the logs.
    Records,
}

/// Selects items; unset fields select all.
#[derive(Clone, Default, Debug)]
pub struct Filter {
    /// Of this backend.
    pub backend: Option<u32>,
    /// Of this lane.
    pub lane: Option<u32>,
    /// In this segment.
    pub segment: Option<u32>,
    /// With a sequence number in this range.
    pub sequence: Option<RangeInclusive<u64>>,
    /// That overlap this range of the device.
    pub range: Option<ByteRange>,
    /// Of this kind.
    pub kind: Option<RecordKind>,
    /// Dirty ones: the backing device does not have them.
    pub dirty: bool,
    /// Damaged ones; data is verified for this.
    pub damaged: bool,
}

impl Filter {
    fn selects_backend(&self, id: BackendId) -> bool {
        self.backend.is_none_or(|only| only == id.0)
    }
}

/// Receives items one by one; a break ends the dump.
pub type Sink<'a> = dyn FnMut(Item) -> ControlFlow<()> + 'a;

/// Dumps the selected items.
///
/// # Errors
/// When the transport cannot be opened (its superblocks are shown anyway), or, for records, when one of its caches
/// cannot be opened.
pub fn dump(bytes: &Arc<dyn Bytes>, what: What, filter: &Filter, sink: &mut Sink<'_>) -> Result<()> {
    if what == What::Superblock {
        let _ = structures::superblocks(&**bytes, sink);
        return Ok(());
    }
    let transports = open_private(bytes)?;
    let has = |transport: &Arc<crate::check::PrivateTransport>, id| {
        !transport.backend(BackendId(id)).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    if let (What::Lanes | What::Pins | What::Records, Some(id)) = (what, filter.backend)
        && !transports.iter().any(|transport| has(transport, id))
    {
        return Err(Error::new(ErrorKind::NotFound, format!("the region has no backend {id}")));
    }
    for transport in &transports {
        let layout = transport.info().layout;
        let dump = Dump { bytes: &**bytes, transport, layout: &layout, filter };
        let next = match what {
            What::Superblock => ControlFlow::Continue(()),
            What::Tables => dump.tables(sink),
            What::Segments => dump.segments(sink),
            What::Lanes => dump.lanes(sink),
            What::Pins => dump.pins(sink),
            What::Records => dump.records(sink)?,
        };
        if next.is_break() {
            break;
        }
    }
    Ok(())
}

struct Dump<'a> {
    bytes: &'a dyn Bytes,
    transport: &'a crate::check::PrivateTransport,
    layout: &'a Layout,
    filter: &'a Filter,
}

impl Dump<'_> {
    /// The selected backends, with their rows.
    fn backends(&self) -> impl Iterator<Item = (BackendId, cbd_format::BackendEntry)> {
        (0..self.layout.backend_rows).map(BackendId).filter(|id| self.filter.selects_backend(*id)).filter_map(
            |id| {
                let row = self.transport.backend_row(id)?;
                (row.state.get() == cbd_format::tables::STATE_ACTIVE && row.cache_id.get() != 0)
                    .then_some((id, row))
            },
        )
    }

    /// The cache of a backend.
    fn cache(&self, id: BackendId) -> Result<Arc<crate::check::PrivateCache>> {
        self.transport.open_cache_if(id, cbd_engine::Mixed::Look)
    }
}

/// The offsets of the two superblocks, as far as they lie inside the region.
fn superblock_places(size: u64) -> Vec<u64> {
    let length = size_of::<Superblock>() as u64;
    let second = if size >= 2 * cbd_format::PAGE { Some(Layout::second_superblock(size)) } else { None };
    std::iter::once(0).chain(second).filter(|at| at + length <= size).collect()
}
