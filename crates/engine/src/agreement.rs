//! Agreement among hosts: decisions on small values, over memory in which each host writes its own blocks.
//!
//! A decision is made as in Disk Paxos (Gafni, Lamport: Disk Paxos, Distributed Computing 16, 2003), with the shared memory as the
//! one disk. Each object has a sequence of decisions; a block has the last one that its writer knows, and what the writer promised
//! and accepted for the next one. A voter
//!
//! 1. stores a promise of a ballot above all that it has seen, and then looks at the blocks of all others;
//! 2. stores that it accepts a value in this ballot: the one that was accepted in the highest ballot that it saw, or its own if it
//!    saw none; and looks at all blocks again;
//! 3. stores the decision.
//!
//! It begins again if it sees a later decision, or a promise above its ballot.
//!
//! Invariants:
//! - no two hosts know different decisions of one number, however long a host is paused between any two steps, and whenever it
//!   dies;
//! - a decision takes effect only when a block with it was published;
//! - no host waits for another one: a host that is paused or dead holds nothing.
//!
//! Elsewhere: the blocks (`cbd-format`, `shared`), which objects there are and what a host does with them (`transport::members`),
//! every order of steps in a simulated memory that is not coherent (`cbd-sim`, `hosts`).

use crate::Environment;
use alloc::format;
use cbd_format::{
    Holding, Object, SharedLayout, Slot, SlotContent, Vote,
    shared::{Decided, HOLDING_HELD},
};
use cbd_types::{Error, ErrorKind, MutationPoint, Pmem, Region, Result};

const SLOT: usize = Vote::SLOT_SIZE;

/// How often a voter begins again because of others before it gives up.
const ATTEMPTS: u32 = 400;

/// How often a block is read that is stored meanwhile.
const READS: u32 = 1000;

/// The newest content of a block, and which of its slots has it.
#[derive(Clone, Copy)]
struct Block {
    vote: Vote,
    /// The slot, and its sequence number; `None` for a blank block.
    newest: Option<(usize, u64)>,
}

impl Block {
    fn decided(&self) -> Decided {
        Decided { version: self.vote.version.get(), holding: self.vote.decided }
    }
}

/// The votes on one object.
pub(crate) struct Votes<'a, P> {
    region: &'a Region<P>,
    layout: SharedLayout,
    object: Object,
}

/// What ended an attempt.
enum Outcome {
    Decided(Decided),
    /// A later decision, or a higher ballot: the number above which the next ballot is to be.
    Again(u64),
}

impl<'a, P: Pmem> Votes<'a, P> {
    pub(crate) const fn new(region: &'a Region<P>, layout: SharedLayout, object: Object) -> Self {
        Self { region, layout, object }
    }

    /// Reads both slots of a block, until two reads agree: of a block that is stored meanwhile, a single read might have an old slot
    /// and not the one that was published before.
    #[inline(never)]
    fn read_slots(&self, voter: u32, into: &mut [[u8; SLOT]; 2]) -> Result<()> {
        self.load_slots(voter, into)?;
        if !MutationPoint::VoteStable.is_active() {
            return Ok(());
        }
        let mut again = [[0; SLOT]; 2];
        for _ in 0..READS {
            self.load_slots(voter, &mut again)?;
            if again == *into {
                return Ok(());
            }
            *into = again;
        }
        Err(busy("another host changes it without an end"))
    }

    #[inline(never)]
    fn load_slots(&self, voter: u32, into: &mut [[u8; SLOT]; 2]) -> Result<()> {
        for (at, bytes) in self.layout.vote(self.object, voter).into_iter().zip(into) {
            self.region.observe(MutationPoint::VoteObserve, at, SLOT as u64);
            self.region.load(at, bytes)?;
        }
        Ok(())
    }

    /// The block of a voter.
    #[inline(never)]
    fn block(&self, voter: u32) -> Result<Block> {
        let mut bytes = [[0; SLOT]; 2];
        self.read_slots(voter, &mut bytes)?;
        let place = self.layout.place(self.object, voter);
        let mut found: Option<(usize, Slot<&Vote>)> = None;
        for (which, bytes) in bytes.iter().enumerate() {
            if let Some(slot) = Slot::<Vote>::decode_in_place(place, bytes)
                && found.as_ref().is_none_or(|(_, newest)| slot.sequence > newest.sequence)
            {
                found = Some((which, slot));
            }
        }
        match found {
            Some((which, slot)) => Ok(Block { vote: *slot.content, newest: Some((which, slot.sequence)) }),
            // A crash in the first store of all leaves the other slot blank.
            None if bytes.contains(&[0; SLOT]) => Ok(Block { vote: Vote::BLANK, newest: None }),
            None => Err(self.lost(voter)),
        }
    }

    #[cold]
    #[inline(never)]
    fn lost(&self, voter: u32) -> Error {
        Error::new(
            ErrorKind::Damaged,
            format!("both copies of the vote of host or claim {voter} on {:?} are damaged", self.object),
        )
    }

    /// Stores a block, and makes it visible to other hosts.
    #[inline(never)]
    fn store(&self, voter: u32, block: &mut Block) -> Result<()> {
        let (which, sequence) = block.newest.map_or((0, 1), |(which, sequence)| (1 - which, sequence + 1));
        let at = self.layout.vote(self.object, voter)[which];
        let mut bytes = [0; SLOT];
        Slot::encode_into(sequence, &block.vote, self.layout.place(self.object, voter), &mut bytes);
        let stored = self.region.store(at, &bytes);
        self.region.publish(MutationPoint::VotePublish, stored, at, SLOT as u64);
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        block.newest = Some((which, sequence));
        Ok(())
    }

    /// The last decision that any host has published.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] or [`ErrorKind::Damaged`] for a block that cannot be read: it may have a later one.
    pub(crate) fn known(&self) -> Result<Decided> {
        let mut last = Decided { version: 0, holding: Holding::NONE };
        for voter in 0..self.layout.voters(self.object) {
            let found = self.block(voter)?.decided();
            if found.version > last.version {
                last = found;
            }
        }
        Ok(last)
    }

    /// Decides what `wanted` makes of the last decision, unless it makes nothing of it; `wanted` is asked again whenever another
    /// host has decided something meanwhile. Returns the last decision.
    ///
    /// `own` is the voter whose block the caller alone writes, as `incarnation`, which no other voter has.
    ///
    /// # Errors
    /// Those of `wanted` and [`known`](Self::known); [`ErrorKind::Busy`] if other hosts never let it come to a decision;
    /// [`ErrorKind::Media`] if stores to the region have failed. After an error it is not known whether the value was decided.
    pub(crate) fn decide<E: Environment<Memory = P>>(
        &self,
        environment: &E,
        (own, incarnation): (u32, u64),
        mut wanted: impl FnMut(&Decided) -> Result<Option<Holding>>,
    ) -> Result<Decided> {
        let mut above = 0;
        for attempt in 0..ATTEMPTS {
            let last = self.known()?;
            let Some(holding) = wanted(&last)? else { return Ok(last) };
            let value = Holding { incarnation: incarnation.into(), ..holding };
            match self.attempt((own, incarnation), last, value, above)? {
                Outcome::Decided(decision) if decision.holding == value => return Ok(decision),
                // It has helped another host; that host's value is the decision, and the caller looks at it.
                Outcome::Decided(_) => {}
                Outcome::Again(seen) => {
                    above = above.max(seen);
                    let most = 1u64 << attempt.min(12);
                    for _ in 0..environment.random() % most {
                        core::hint::spin_loop();
                        E::before_shared_access();
                    }
                }
            }
        }
        Err(busy("other hosts decide on it at the same time"))
    }

    /// One ballot.
    fn attempt(
        &self,
        (own, incarnation): (u32, u64),
        last: Decided,
        value: Holding,
        above: u64,
    ) -> Result<Outcome> {
        let mut mine = self.block(own)?;
        if mine.vote.version.get() != last.version {
            // What it promised and accepted was for another decision.
            (mine.vote.promised, mine.vote.accepted) = (0.into(), 0.into());
            mine.vote.proposal = Holding::NONE;
        }
        // 1. Promise.
        let ballot = next_ballot(above.max(mine.vote.promised.get()), incarnation);
        mine.vote.incarnation = incarnation.into();
        (mine.vote.version, mine.vote.decided) = (last.version.into(), last.holding);
        mine.vote.promised = ballot.into();
        self.store(own, &mut mine)?;
        let mut highest = (mine.vote.accepted.get(), mine.vote.proposal);
        let mut seen = 0;
        if let Some(again) = self.look(own, last.version, ballot, |vote| {
            seen = seen.max(vote.accepted.get());
            if vote.accepted.get() > highest.0 {
                highest = (vote.accepted.get(), vote.proposal);
            }
        })? {
            return Ok(again);
        }
        // 2. Accept.
        let value = if MutationPoint::VoteAdopt.is_active() && highest.0 > 0 { highest.1 } else { value };
        (mine.vote.accepted, mine.vote.proposal) = (ballot.into(), value);
        self.store(own, &mut mine)?;
        if let Some(again) = self.look(own, last.version, ballot, |_| {})? {
            return Ok(again);
        }
        // 3. Decided: other hosts know it once this is published.
        let decision = Decided { version: last.version + 1, holding: value };
        (mine.vote.version, mine.vote.decided) = (decision.version.into(), value);
        (mine.vote.promised, mine.vote.accepted) = (0.into(), 0.into());
        mine.vote.proposal = Holding::NONE;
        self.store(own, &mut mine)?;
        // In both copies: one failed page does not bring back what this host knew before.
        if MutationPoint::VoteSecond.is_active() {
            self.store(own, &mut mine)?;
        }
        Ok(Outcome::Decided(decision))
    }

    /// Looks at the blocks of all others during a ballot; `note` gets those that are about the same decision. Returns why the
    /// ballot cannot go on, if so.
    fn look(
        &self,
        own: u32,
        version: u64,
        ballot: u64,
        mut note: impl FnMut(&Vote),
    ) -> Result<Option<Outcome>> {
        let mut again = None;
        for voter in (0..self.layout.voters(self.object)).filter(|voter| *voter != own) {
            let vote = self.block(voter)?.vote;
            let at = vote.version.get();
            if !MutationPoint::VoteVersion.holds(at <= version) {
                return Ok(Some(Outcome::Again(0)));
            }
            if at != version {
                continue;
            }
            if !MutationPoint::VoteBallot.holds(vote.promised.get() <= ballot) {
                let seen = vote.promised.get();
                again = again.max(Some(seen));
            }
            note(&vote);
        }
        Ok(again.map(Outcome::Again))
    }

    /// A claim with which the area of a host can be voted on: the one of `former`, whose process is known to have ended, if there
    /// is one; else one that was never used; else one that is far behind. `incarnation` has it when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if no claim is free; as [`known`](Self::known).
    pub(crate) fn take_claim(&self, random: u64, incarnation: u64, former: Option<u64>) -> Result<u32> {
        let last = self.known()?;
        let claims = self.layout.voters(self.object);
        let (mut blank, mut old) = (0, None::<(u64, u32)>);
        for claim in 0..claims {
            let block = self.block(claim)?;
            let version = block.vote.version.get();
            match block.newest {
                None => blank += 1,
                Some(_) if former == Some(block.vote.incarnation.get()) => return Ok(claim),
                Some(_) if version + 1 < last.version && old.is_none_or(|old| version < old.0) => {
                    old = Some((version, claim));
                }
                Some(_) => {}
            }
        }
        let chosen = if blank > 0 { self.blank(random % blank)? } else { old.map(|(_, claim)| claim) };
        let Some(claim) = chosen else {
            let text = format!("{claims} claims are being made on {:?}", self.object);
            return Err(Error::new(ErrorKind::NoSpace, text));
        };
        let mut block = self.block(claim)?;
        block.vote.incarnation = incarnation.into();
        (block.vote.version, block.vote.decided) = (last.version.into(), last.holding);
        (block.vote.promised, block.vote.accepted) = (0.into(), 0.into());
        block.vote.proposal = Holding::NONE;
        self.store(claim, &mut block)?;
        // Another host that took it at the same moment has it if it stored last.
        match self.block(claim)?.vote.incarnation.get() == incarnation {
            true => Ok(claim),
            false => Err(busy("another host joins at the same time")),
        }
    }
}

impl<P: Pmem> Votes<'_, P> {
    /// The `nth` of the blocks that were never used, from 0.
    fn blank(&self, nth: u64) -> Result<Option<u32>> {
        let mut left = nth;
        for claim in 0..self.layout.voters(self.object) {
            if self.block(claim)?.newest.is_some() {
                continue;
            }
            if left == 0 {
                return Ok(Some(claim));
            }
            left -= 1;
        }
        Ok(None)
    }
}

/// A host has an object.
pub(crate) fn held(host: u32) -> Holding {
    Holding { state: HOLDING_HELD.into(), host: host.into(), ..Holding::NONE }
}

/// No host has an object any more; `host` had it last.
pub(crate) fn freed(host: u32) -> Holding {
    Holding { host: host.into(), ..Holding::NONE }
}

/// The smallest ballot above `above` that only this incarnation uses.
const fn next_ballot(above: u64, incarnation: u64) -> u64 {
    let round = (above >> 32) + 1;
    round << 32 | (incarnation as u32 as u64)
}

fn busy(why: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("the hosts of the region came to no decision: {why}; try again"))
}

#[cfg(test)]
mod tests;
