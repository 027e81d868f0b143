//! Block status: the state of a range, as descriptors of the contexts that a client selected.
//!
//! Invariants: descriptors are not empty, begin where the request begins, stay inside it, and adjacent ones differ;
//! their number is bounded, so a reply may cover less than the request, as the protocol allows.

use super::handshake::{ALLOCATION_ID, Contexts, STATE_ID, VERIFY_ID};
use crate::protocol::status_flag;
use cbd_export::{BlockDevice, ExtentState};
use cbd_types::{ByteRange, Result};

/// Most descriptors of one context in a reply.
const DESCRIPTORS_MAX: usize = 4096;
/// Bytes whose extents are queried at a time; this bounds the number of extents in memory.
const WINDOW: u64 = 64 << 20;

/// Block status in one context.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ContextStatus {
    /// The context's number.
    pub(super) context: u32,
    /// Lengths and flags.
    pub(super) descriptors: Vec<(u32, u32)>,
}

/// Most descriptors of one context in a reply; of `one` extent if only that is wanted.
pub(super) const fn descriptors_max(one: bool) -> usize {
    if one { 1 } else { DESCRIPTORS_MAX }
}

/// The status of `range` in the selected contexts, in order. `verified` are the descriptors of `cbd:verify`, if it is one of
/// them.
pub(super) fn describe(
    device: &dyn BlockDevice,
    range: ByteRange,
    one: bool,
    contexts: Contexts,
    verified: Option<Vec<(u32, u32)>>,
) -> Result<Vec<ContextStatus>> {
    let mut described = Vec::new();
    if contexts.allocation || contexts.state {
        extents(device, range, one, contexts, &mut described)?;
    }
    described.extend(verified.map(|descriptors| ContextStatus { context: VERIFY_ID, descriptors }));
    Ok(described)
}

/// Adds the contexts that depend on extents.
fn extents(
    device: &dyn BlockDevice,
    range: ByteRange,
    one: bool,
    contexts: Contexts,
    described: &mut Vec<ContextStatus>,
) -> Result<()> {
    let mut kinds = Vec::new();
    if contexts.allocation {
        kinds.push(OfExtents {
            context: ALLOCATION_ID,
            flags: allocation,
            runs: Runs::new(descriptors_max(one)),
        });
    }
    if contexts.state {
        kinds.push(OfExtents { context: STATE_ID, flags: state, runs: Runs::new(descriptors_max(one)) });
    }
    let mut add = |length, state| {
        kinds.iter_mut().for_each(|kind: &mut OfExtents| kind.runs.add(length, (kind.flags)(state)));
        kinds.iter().all(|kind| kind.runs.is_full())
    };
    for window in range.split_at_multiples(WINDOW) {
        let mut at = window.start;
        for extent in device.extents(window)? {
            // Bytes without an extent are data; extents are clipped to the window.
            let Some(extent_range) = extent.range.intersection(&ByteRange { start: at, end: window.end })
            else {
                continue;
            };
            add(extent_range.start - at, ExtentState::default());
            add(extent_range.len(), extent.state);
            at = extent_range.end;
        }
        if add(window.end - at, ExtentState::default()) {
            break;
        }
    }
    described.extend(
        kinds
            .into_iter()
            .map(|OfExtents { context, runs, .. }| ContextStatus { context, descriptors: runs.into_found() }),
    );
    Ok(())
}

/// A context that depends on extents.
struct OfExtents {
    context: u32,
    flags: fn(ExtentState) -> u32,
    runs: Runs,
}

/// Descriptors of one context, in order.
pub(super) struct Runs {
    most: usize,
    found: Vec<(u32, u32)>,
    full: bool,
}

impl Runs {
    /// None yet, and `most` at the end.
    pub(super) const fn new(most: usize) -> Self {
        Self { most, found: Vec::new(), full: false }
    }

    /// Whether nothing more is added.
    pub(super) const fn is_full(&self) -> bool {
        self.full
    }

    /// Lengths and flags.
    pub(super) fn into_found(self) -> Vec<(u32, u32)> {
        self.found
    }

    /// Adds `length` bytes behind those that were added before.
    pub(super) fn add(&mut self, length: u64, flags: u32) {
        if self.full || length == 0 {
            return;
        }
        // The length of a request has 32 bits, so the length of a run fits.
        let length = length as u32;
        let room = self.found.len() < self.most;
        match self.found.last_mut() {
            Some(last) if last.1 == flags => last.0 += length,
            _ if room => self.found.push((length, flags)),
            _ => self.full = true,
        }
    }
}

const fn allocation(state: ExtentState) -> u32 {
    if state.hole { status_flag::HOLE | status_flag::ZERO } else { 0 }
}

const fn state(state: ExtentState) -> u32 {
    (if state.cached { status_flag::CACHED } else { 0 }) | (if state.dirty { status_flag::DIRTY } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_export::{Extent, RequestQueue};
    use cbd_types::{Error, ErrorKind, Geometry};

    const MIB: u64 = 1 << 20;

    /// Each MiB is in turn dirty, clean, a hole, or unknown; unknown ranges have no extent.
    struct Striped;

    impl BlockDevice for Striped {
        fn geometry(&self) -> Geometry {
            unreachable!("this test does not call it")
        }

        fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
            Err(Error::new(ErrorKind::Unsupported, "this test does not call it"))
        }

        fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
            assert!(range.len() <= WINDOW);
            Ok(range
                .split_at_multiples(MIB)
                .filter_map(|range| {
                    let state = match range.start / MIB % 4 {
                        0 => ExtentState { hole: false, cached: true, dirty: true },
                        1 => ExtentState { hole: false, cached: true, dirty: false },
                        2 => ExtentState { hole: true, cached: false, dirty: false },
                        _ => return None,
                    };
                    Some(Extent { range, state })
                })
                .collect())
        }
    }

    fn described(context: u32, descriptors: &[(u32, u32)]) -> ContextStatus {
        ContextStatus { context, descriptors: descriptors.to_vec() }
    }

    const BOTH: Contexts = Contexts { allocation: true, state: true, verify: false };

    #[test]
    fn each_context_merges_extents_that_it_does_not_distinguish() {
        let found = describe(&Striped, ByteRange::at(512, 4 * MIB), false, BOTH, None).expect("it is known");
        let mib = MIB as u32;
        assert_eq!(
            found,
            [
                described(ALLOCATION_ID, &[(2 * mib - 512, 0), (mib, 3), (mib + 512, 0)]),
                described(STATE_ID, &[(mib - 512, 3), (mib, 1), (2 * mib, 0), (512, 3)]),
            ]
        );
    }

    #[test]
    fn a_request_for_one_extent_gets_one_even_across_windows() {
        let found = describe(&Striped, ByteRange::at(0, 512 * MIB), true, BOTH, None).expect("it is known");
        assert_eq!(found, [described(ALLOCATION_ID, &[(2 << 20, 0)]), described(STATE_ID, &[(1 << 20, 3)])]);
    }

    #[test]
    fn only_chosen_contexts_are_in_the_answer() {
        let chosen = Contexts { allocation: false, state: true, verify: false };
        let found = describe(&Striped, ByteRange::at(0, MIB), false, chosen, None).expect("it is known");
        assert_eq!(found, [described(STATE_ID, &[(1 << 20, 3)])]);
        let chosen = Contexts { allocation: false, state: false, verify: true };
        let verified = Some(vec![(512, 1), (512, 3)]);
        let found = describe(&Striped, ByteRange::at(0, MIB), false, chosen, verified).expect("it is known");
        assert_eq!(found, [described(VERIFY_ID, &[(512, 1), (512, 3)])]);
    }

    #[test]
    fn an_extent_across_windows_is_one_descriptor() {
        struct Plain;
        impl BlockDevice for Plain {
            fn geometry(&self) -> Geometry {
                unreachable!("this test does not call it")
            }
            fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
                Err(Error::new(ErrorKind::Unsupported, "this test does not call it"))
            }
        }
        let range = ByteRange::at(4096, u64::from(u32::MAX) / 4096 * 4096);
        let found = describe(&Plain, range, false, BOTH, None).expect("it is known");
        assert_eq!(
            found,
            [
                described(ALLOCATION_ID, &[(range.len() as u32, 0)]),
                described(STATE_ID, &[(range.len() as u32, 0)])
            ]
        );
    }
}
