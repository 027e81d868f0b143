//! Stores that no fence has followed, and the part of them that survives a power cut.

use super::{Keep, pages::Pages};
use crate::actor::Actor;
use crate::random::Seeded;
use cbd_types::ByteRange;
use std::sync::Arc;

/// A store that is not durable yet.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) at: u64,
    pub(super) bytes: Arc<[u8]>,
    pub(super) actor: Actor,
}

impl Pending {
    pub(super) fn range(&self) -> ByteRange {
        ByteRange::at(self.at, self.bytes.len() as u64)
    }

    /// The bytes of `piece`, which lies within the store.
    pub(super) fn part(&self, piece: ByteRange) -> &[u8] {
        &self.bytes[(piece.start - self.at) as usize..(piece.end - self.at) as usize]
    }

    /// The parts of the store that remain after `newer` has replaced its bytes.
    pub(super) fn without(self, newer: ByteRange) -> Vec<Self> {
        let own = self.range();
        let Some(both) = own.intersection(&newer) else {
            return vec![self];
        };
        [ByteRange { start: own.start, end: both.start }, ByteRange { start: both.end, end: own.end }]
            .into_iter()
            .filter(|piece| !piece.is_empty())
            .map(|piece| Self { at: piece.start, bytes: self.part(piece).into(), actor: self.actor })
            .collect()
    }
}

/// The parts of a store that are done when a crash interrupts it, in whole units of `unit` bytes.
pub(super) fn torn(range: ByteRange, unit: u64, random: &mut Seeded) -> Vec<ByteRange> {
    let units: Vec<ByteRange> = range.split_at_multiples(unit).collect();
    match random.below(4) {
        0 => Vec::new(),
        1 => vec![range],
        2 => units[..random.below(units.len() as u64 + 1) as usize].to_vec(),
        _ => units.into_iter().filter(|_| random.chance(500)).collect(),
    }
}

/// Applies to `durable` the part of `pending` that survives a power cut.
pub(super) fn choose(durable: &mut Pages, pending: &[Pending], unit: u64, keep: Keep, random: &mut Seeded) {
    let keep = match keep {
        Keep::Any => {
            *random.pick(&[Keep::Nothing, Keep::Everything, Keep::Random, Keep::Random, Keep::Prefix])
        }
        chosen => chosen,
    };
    let mut apply = |store: &Pending, piece: ByteRange| durable.write(piece.start, store.part(piece));
    match keep {
        Keep::Nothing | Keep::Any => {}
        Keep::Everything => pending.iter().for_each(|store| apply(store, store.range())),
        Keep::Random => {
            for store in pending {
                torn(store.range(), unit, random).into_iter().for_each(|piece| apply(store, piece));
            }
        }
        Keep::Prefix => {
            let whole = random.below(pending.len() as u64 + 1) as usize;
            pending[..whole].iter().for_each(|store| apply(store, store.range()));
            if let Some(store) = pending.get(whole) {
                let units: Vec<ByteRange> = store.range().split_at_multiples(unit).collect();
                let kept = random.below(units.len() as u64) as usize;
                units[..kept].iter().for_each(|&piece| apply(store, piece));
            }
        }
    }
}
