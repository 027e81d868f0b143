//! Moving a backend, drained, from the host that has it to another host of a shared region.
//!
//! The host that has the backend *offers* it. The other one accepts with a row of its own, in which all is but the cache. Hosts with
//! blkdevs on the backend hold their requests. Then one decision makes the row, and with it the backend, the other host's; that is the
//! commit point. `docs/format.md` has the steps.
//!
//! Invariants:
//! - only when the decision is made does a backend change its host, and then there is a row of the new host for it;
//! - a row with [`STATE_INCOMING`] counts only while its host has it; it is stored while another host offers the backend with the number
//!   that the row's host answers, and freed before the host takes the row for anything else;
//! - the disk is drained and closed before the decision: the new host needs nothing of the former cache.
//!
//! Elsewhere: requests and disks (`cbd-daemon`, `moves`), decisions (`members`), areas of channels (`channels`); backends that a rescue
//! has moved to another disk (`moved`).

mod answers;
mod settle;

use super::{
    RemoteState, Tables, Transport,
    attach::{Named, write_cache},
    backends::{BackendEntry, DiskTexts, ROW as BACKEND_ROW, backend_entry},
    caches::CachePlan,
    channels::of_one_host,
    rows::{active_row, no_such},
    shared::read_shared,
};
use crate::{Environment, Member, Members, slots::TwoSlots};
use alloc::{format, sync::Arc, vec::Vec};
use answers::takes_part;
pub use answers::{MoveAnswer, MoveRefusal};
use cbd_format::{
    AreaHeader, BackendEntry as BackendRow, Object,
    shared::{ANSWER_WANTED, MOVE_HOLD, MOVE_OFFERED, MOVE_REFUSED},
    tables::{STATE_ACTIVE, STATE_FREE, STATE_INCOMING},
};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, HostId, MutationPoint, Result};

/// Segments that a new cache leaves for the channels of blkdevs of other hosts.
const SPARE_SEGMENTS: u32 = 2;

/// A backend that a host offers to another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveOffer {
    /// The backend.
    pub backend: BackendId,
    /// The host that has it.
    pub from: HostId,
    /// The host that it is offered to.
    pub to: HostId,
    /// Number of the move.
    pub number: u64,
    /// How far it is.
    pub state: MoveState,
}

/// How far the host that has the backend is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveState {
    /// The other host looks whether it can have the backend.
    Offered,
    /// Hosts with blkdevs on the backend hold their requests.
    Hold,
    /// It was refused, or has failed.
    Refused,
}

/// A host that asks for a backend of this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoveWish {
    /// The backend.
    pub backend: BackendId,
    /// The host that wants it.
    pub to: HostId,
    /// The number that the move is to have.
    pub number: u64,
}

fn offer_of(from: HostId, header: &AreaHeader) -> Option<MoveOffer> {
    let state = match header.move_state.get() {
        MOVE_OFFERED => MoveState::Offered,
        MOVE_HOLD => MoveState::Hold,
        MOVE_REFUSED => MoveState::Refused,
        _ => return None,
    };
    Some(MoveOffer {
        backend: BackendId(header.move_backend.get().checked_sub(1)?),
        from,
        to: HostId(header.move_to.get().checked_sub(1)?),
        number: header.move_number.get(),
        state,
    })
}

impl<E: Environment> Transport<E> {
    fn joined_members(&self) -> Result<(&Arc<Members<E>>, &Member)> {
        self.members().ok_or_else(of_one_host)
    }

    /// Changes the header of this host's area. The lock of the tables orders the changes of several threads.
    fn change_header(&self, _tables: &Tables<E>, change: impl FnOnce(&mut AreaHeader)) -> Result<()> {
        let (members, member) = self.joined_members()?;
        members.change_header(member, change)
    }

    /// Offers a backend of this host to another one, which has then accepted, refused, or does not answer. With `number` it does what that
    /// host has asked for. Returns the number of the move.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] without the backend or the host; [`ErrorKind::Busy`] while this host offers another one; errors of
    /// reading and storing.
    pub fn offer_move(&self, backend: BackendId, to: HostId, number: Option<u64>) -> Result<u64> {
        let (members, member) = self.joined_members()?;
        members.check_member(member)?;
        if to == member.id || members.host(to)?.is_none() {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no other host {to}")));
        }
        let mut tables = self.tables.lock();
        active_row(&mut tables.backends, backend.index(), |row| row.state.get(), "backend")?;
        let own = members.area_header(member.id).and_then(|header| offer_of(member.id, &header));
        if let Some(other) = own.filter(|own| own.state != MoveState::Refused) {
            let name = members.host(other.to)?.map_or_else(|| format!("{}", other.to), |host| host.name);
            let text = format!(
                "this host moves backend {} to host {name} already: try it again after that",
                other.backend
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let number = number.unwrap_or_else(|| self.environment.random() | 1);
        self.change_header(&tables, |header| {
            header.move_backend = (backend.0 + 1).into();
            header.move_to = (to.0 + 1).into();
            header.move_number = number.into();
            header.move_state = MOVE_OFFERED.into();
        })?;
        Ok(number)
    }

    /// Asks the hosts with blkdevs on the backend that this host moves to hold their requests.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`] if this host does not offer the move with this number any more; errors of storing.
    pub fn hold_for_move(&self, number: u64) -> Result<()> {
        let tables = self.tables.lock();
        if self.own_move().is_none_or(|own| own.number != number || own.state == MoveState::Refused) {
            return Err(Error::new(ErrorKind::Stopped, "the move has been ended"));
        }
        self.change_header(&tables, |header| header.move_state = MOVE_HOLD.into())
    }

    /// Ends the move with this number, if this host offers it. Requests continue where they were, unless the backend has been
    /// [handed over](Self::hand_over_backend). With `is_refused` a host that has asked for the move is told that it has failed.
    ///
    /// # Errors
    /// Errors of storing.
    pub fn end_move(&self, number: u64, is_refused: bool) -> Result<()> {
        let tables = self.tables.lock();
        if self.own_move().is_none_or(|own| own.number != number) {
            return Ok(());
        }
        self.change_header(&tables, |header| {
            header.move_state = if is_refused { MOVE_REFUSED } else { 0 }.into();
            if !is_refused {
                (header.move_backend, header.move_to) = (0.into(), 0.into());
            }
        })
    }

    /// Whether a host still asks for what it wished: it has neither got an offer nor ended the wish.
    #[must_use]
    pub fn is_wished(&self, to: HostId, number: u64) -> bool {
        self.answer_to_move(to, number) == Some(MoveAnswer::Wanted)
    }

    /// Tells the host `wish.to` that it does not get what it asked for, if it still asks for it.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while this host offers a backend; errors of storing.
    pub fn refuse_wish(&self, wish: &MoveWish) -> Result<()> {
        if !self.is_wished(wish.to, wish.number) {
            return Ok(());
        }
        self.offer_move(wish.backend, wish.to, Some(wish.number))
            .and_then(|number| self.end_move(number, true))
    }

    /// What this host offers.
    #[must_use]
    pub fn own_move(&self) -> Option<MoveOffer> {
        let (members, member) = self.members()?;
        members.area_header(member.id).and_then(|header| offer_of(member.id, &header))
    }

    /// What the other hosts offer.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn moves_of_others(&self) -> Result<Vec<MoveOffer>> {
        let Some((members, member)) = self.members() else { return Ok(Vec::new()) };
        let others = members.all()?.into_iter().filter(|host| host.id != member.id);
        Ok(others.filter_map(|host| offer_of(host.id, &members.area_header(host.id)?)).collect())
    }

    /// What another host offers now.
    #[must_use]
    pub fn move_of(&self, from: HostId) -> Option<MoveOffer> {
        let (members, _) = self.members()?;
        offer_of(from, &members.area_header(from)?)
    }

    /// What a host says of the move with this number.
    #[must_use]
    pub fn answer_to_move(&self, host: HostId, number: u64) -> Option<MoveAnswer> {
        let (members, _) = self.members()?;
        let header = members.area_header(host).filter(|header| header.answer_number.get() == number)?;
        MoveAnswer::of(header.answer.get())
    }

    /// Backends of this host that others ask for.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn move_wishes(&self) -> Result<Vec<MoveWish>> {
        let Some((members, member)) = self.members() else { return Ok(Vec::new()) };
        let mut wishes = Vec::new();
        for host in members.all()?.into_iter().filter(|host| host.id != member.id) {
            let Some(header) = members.area_header(host.id) else { continue };
            let Some(row) = header.answer_backend.get().checked_sub(1) else { continue };
            let is_wish = header.answer.get() == ANSWER_WANTED && self.tables.lock().has_active_backend(row);
            if is_wish {
                let number = header.answer_number.get();
                wishes.push(MoveWish { backend: BackendId(row), to: host.id, number });
            }
        }
        Ok(wishes)
    }

    /// Stores what this host says of a move, or that it asks for one.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while it takes part in another move, which relies on what it has said of that; errors of storing.
    pub fn answer_move(&self, backend: BackendId, number: u64, answer: MoveAnswer) -> Result<()> {
        let (members, member) = self.joined_members()?;
        let tables = self.tables.lock();
        let is_in_other = |own: &AreaHeader| own.answer_number.get() != number && takes_part(own);
        if let Some(own) = members.area_header(member.id).filter(is_in_other) {
            let other = own.answer_backend.get().saturating_sub(1);
            let text =
                format!("this host takes part in the move of backend {other}; try it again after that");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.change_header(&tables, |header| {
            header.answer_number = number.into();
            header.answer_backend = (backend.0 + 1).into();
            header.answer = answer.code().into();
        })
    }

    /// Ends what this host says of the move with this number.
    ///
    /// # Errors
    /// Errors of storing.
    pub fn end_answer(&self, number: u64) -> Result<()> {
        self.end_answer_if(|own| own.answer_number.get() == number)
    }

    fn end_answer_if(&self, is_it: impl FnOnce(&AreaHeader) -> bool) -> Result<()> {
        let (members, member) = self.joined_members()?;
        let tables = self.tables.lock();
        let own = members.area_header(member.id);
        if !own.is_some_and(|own| own.answer.get() != 0 && is_it(&own)) {
            return Ok(());
        }
        // Number and backend stay: `ended_answer`.
        self.change_header(&tables, |header| header.answer = 0.into())
    }

    /// Ends what a former process of this host has said of a move: what that held, clients of this one may have submitted again. Called
    /// before a channel is opened. Returns the backend and the number of the move in which it took part.
    ///
    /// # Errors
    /// Errors of storing.
    pub fn end_former_answer(&self) -> Result<Option<(BackendId, u64)>> {
        let former = self.members().and_then(|(_, member)| self.part_of(member.id));
        self.end_answer_if(|_| true)?;
        Ok(former)
    }

    /// The backend that is offered to this host, as the host that has it has stored it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it cannot be read, or is not there; errors of reading.
    pub fn offered_backend(&self, offer: &MoveOffer) -> Result<BackendEntry> {
        self.with_offered(offer, |row| backend_entry(offer.backend.0, row))?
    }

    fn with_offered<T>(&self, offer: &MoveOffer, look: impl FnOnce(&BackendRow) -> T) -> Result<T> {
        let (members, _) = self.joined_members()?;
        let gone = || no_such("backend", offer.backend.index());
        if members.owner(Object::Backend(offer.backend.0))? != Some(offer.from) {
            return Err(gone());
        }
        let layout = self.layout().for_host(offer.from.0).ok_or_else(gone)?;
        let row = self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, offer.backend.0);
        row.content().filter(|row| row.state.get() == STATE_ACTIVE).map(look).ok_or_else(gone)
    }

    /// Accepts a backend that is offered to this host, which has its disk at `path`: stores a row for it, and then says so.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it is not offered any more; [`ErrorKind::Damaged`] if the row of this host is lost; errors of reading and
    /// storing.
    pub fn accept_move(&self, offer: &MoveOffer, path: &str, identity: &str) -> Result<()> {
        let texts = DiskTexts::new(path, identity)?;
        let (_, member) = self.joined_members()?;
        let host = member.id;
        let mut tables = self.tables.lock();
        let row = offer.backend.index();
        if tables.backends.get(row).is_none_or(TwoSlots::is_lost) {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!("row {row} of the backends of this host is damaged: repair the region first"),
            ));
        }
        let is_it = |now: &MoveOffer| {
            (now.number, now.backend, now.to) == (offer.number, offer.backend, offer.to)
                && now.state != MoveState::Refused
        };
        if !self.move_of(offer.from).as_ref().is_some_and(is_it) {
            let text = format!("backend {} is not offered any more", offer.backend);
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let content = self.with_offered(offer, |row| alloc::boxed::Box::new(*row))?;
        let ownership = tables.backends[row].content().map_or(0, |old| old.ownership.get());
        let ownership = ownership.max(content.ownership.get()) + 1;
        tables.backends[row].keep_in_both(&self.region, BACKEND_ROW, |row| {
            *row = *content;
            texts.write(row);
            // Its size is that of the cache to come.
            let (segments, shared) = (row.segments, (row.cache_min, row.cache_max, row.weight));
            write_cache(row, None);
            (row.segments, (row.cache_min, row.cache_max, row.weight)) = (segments, shared);
            row.host = host.0.into();
            row.ownership = ownership.into();
            row.state = STATE_INCOMING.into();
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        drop(tables);
        self.answer_move(offer.backend, offer.number, MoveAnswer::Accepted)
    }

    /// Makes a backend of this host that of another one, which has accepted it and holds its requests. The backend is drained, its cache is
    /// not open, and its disk is closed. From then on it is the other host's, also if this returns an error of the steps that follow; those
    /// are repeated when the region is opened.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while its cache is open; [`ErrorKind::Stopped`] if this process is its host no more, or the other host has
    /// not accepted this move; errors of reading and storing: [`has_backend`](Self::has_backend) says then whether it is this host's.
    pub fn hand_over_backend(&self, backend: BackendId, to: HostId, number: u64) -> Result<()> {
        let (members, member) = self.joined_members()?;
        members.check_member(member)?;
        let mut tables = self.tables.lock();
        if tables.is_open(backend) {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {backend} is open")));
        }
        active_row(&mut tables.backends, backend.index(), |row| row.state.get(), "backend")?;
        let is_held = self.answer_to_move(to, number) == Some(MoveAnswer::Held);
        let offers = |own: &MoveOffer| {
            (own.backend, own.number, own.state) == (backend, number, MoveState::Hold) && own.to == to
        };
        if members.host(to)?.is_none() || !is_held || !self.own_move().as_ref().is_some_and(offers) {
            let text = format!("host {to} does not take backend {backend} any more");
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        // The commit point.
        members.pass_on(member, Object::Backend(backend.0), to)?;
        if let Some(shares) = &mut tables.shares {
            shares.lose_backend(backend.0);
        }
        self.free_lost_backends(&mut tables)
    }

    /// Whether this host has the row of a backend. Without an answer it may be another one's.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn has_backend(&self, backend: BackendId) -> Result<bool> {
        let (_, member) = self.joined_members()?;
        self.has_owner(backend, member.id)
    }

    /// Whether a host has the row of a backend.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn has_owner(&self, backend: BackendId, host: HostId) -> Result<bool> {
        let (members, _) = self.joined_members()?;
        Ok(members.owner(Object::Backend(backend.0))? == Some(host))
    }

    /// Whether no other host has an active row of a backend: the host that had it has freed its segments.
    #[must_use]
    pub fn is_released_by_others(&self, backend: BackendId) -> bool {
        let Some((members, member)) = self.members() else { return true };
        let layout = self.layout();
        let others = members.all().unwrap_or_default().into_iter().filter(|host| host.id != member.id);
        let is_active = |layout: cbd_format::Layout| {
            let row = self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, backend.0);
            row.content().is_some_and(|row| row.state.get() == STATE_ACTIVE)
        };
        !others.filter_map(|host| layout.for_host(host.id.0)).any(is_active)
    }

    /// A random number for a move that this host asks for.
    #[must_use]
    pub fn new_move_number(&self) -> u64 {
        self.environment.random() | 1
    }

    /// Frees the rows of backends that were handed over, and with them the segments of their caches. Rows of moves to this host that did not
    /// end are free, too.
    pub(super) fn free_lost_backends(&self, tables: &mut Tables<E>) -> Result<()> {
        let Some(shares) = &tables.shares else { return Ok(()) };
        let rows = tables.backends.iter().enumerate();
        let is_lost = |(row, slots): &(usize, &TwoSlots<BackendRow>)| {
            slots.content().is_some_and(|content| content.state.get() == STATE_ACTIVE)
                && !shares.has_backend(*row as u32)
        };
        let lost: Vec<usize> = rows.filter(is_lost).map(|(row, _)| row).collect();
        if lost.is_empty() {
            return Ok(());
        }
        for row in lost {
            let free = |row: &mut BackendRow| row.state = STATE_FREE.into();
            tables.backends[row].keep_in_both(&self.region, BACKEND_ROW, free)?;
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        self.release_unused(tables);
        Ok(())
    }

    /// Backends that were moved to this host and that it has not [taken over](Self::take_over_backend) yet. Frees rows of moves that did not
    /// end; `is_answered` says of a backend whether this host still answers its move. Each with its uuid.
    ///
    /// # Errors
    /// Errors of reading and storing.
    pub fn incoming_backends(
        &self,
        is_answered: &dyn Fn(BackendId) -> bool,
    ) -> Result<Vec<(BackendId, [u8; 16])>> {
        let Ok((members, member)) = self.joined_members() else { return Ok(Vec::new()) };
        let mut tables = self.tables.lock();
        let incoming = |slots: &TwoSlots<BackendRow>| {
            slots.content().filter(|row| row.state.get() == STATE_INCOMING).map(|row| row.uuid)
        };
        let mut found = Vec::new();
        for row in 0..tables.backends.len() as u32 {
            let Some(uuid) = incoming(&tables.backends[row as usize]) else { continue };
            if members.owner(Object::Backend(row))? == Some(member.id) {
                if let Some(shares) = &mut tables.shares {
                    shares.get_backend(row);
                }
                found.push((BackendId(row), uuid));
            } else if !is_answered(BackendId(row)) {
                let free = |row: &mut BackendRow| row.state = STATE_FREE.into();
                tables.backends[row as usize].keep_in_both(&self.region, BACKEND_ROW, free)?;
            }
        }
        Ok(found)
    }

    /// Frees the row of a move that did not end, so that it does not count when this host gets its number for another backend. `false` for a
    /// row of a move that may still end here.
    pub(super) fn free_incoming(&self, tables: &mut Tables<E>, row: usize) -> Result<bool> {
        let content = tables.backends[row].content();
        if content.is_none_or(|content| content.state.get() != STATE_INCOMING) {
            return Ok(true);
        }
        let (members, member) = self.joined_members()?;
        let backend = BackendId(row as u32);
        // In this order: a backend is moved here only while it is offered.
        let is_it = |offer: &MoveOffer| {
            (offer.backend, offer.to) == (backend, member.id) && offer.state != MoveState::Refused
        };
        if self.moves_of_others()?.iter().any(is_it)
            || members.owner(Object::Backend(backend.0))? == Some(member.id)
        {
            return Ok(false);
        }
        let free = |row: &mut BackendRow| row.state = STATE_FREE.into();
        tables.backends[row].keep_in_both(&self.region, BACKEND_ROW, free)?;
        Ok(true)
    }

    /// Takes over a backend that was moved to this host: gives it a cache of the size that it had; with `accepts_less` of what is free if
    /// that is less, and none if that is too small. Its epochs begin above `after`, the last one that an earlier cache of the backend is
    /// known to have drained.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such backend; [`ErrorKind::NoSpace`] if less is free and that is not accepted; errors of
    /// reading and storing. It can be repeated.
    pub fn take_over_backend(
        &self,
        id: BackendId,
        after: Epoch,
        lanes_max: &dyn Fn(u32) -> u32,
        accepts_less: bool,
    ) -> Result<BackendEntry> {
        let mut tables = self.tables.lock();
        let is_own = tables.shares.as_ref().is_some_and(|shares| shares.has_backend(id.0));
        let row = tables.backends.get(id.index()).and_then(TwoSlots::content);
        let row = row.filter(|row| is_own && row.state.get() == STATE_INCOMING);
        let row = row.ok_or_else(|| no_such("backend", id.index()))?;
        let (wanted, size, shared) = (row.segments.get(), row.size.get(), read_shared(row));
        // Another host may have freed some just now.
        self.take_segments(&mut tables, (wanted + SPARE_SEGMENTS) as usize)?;
        let free = tables.free_segments().len() as u32;
        let mut segments = wanted.min(free.saturating_sub(SPARE_SEGMENTS));
        if segments < wanted && !accepts_less {
            self.release_unused(&mut tables);
            let text = format!("the transport has {free} free segments for a cache of {wanted}");
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        let plan = loop {
            if segments == 0 {
                break None;
            }
            let bytes = u64::from(segments) * self.segment_size;
            match self.plan_cache(&mut tables, bytes, size, lanes_max(segments)) {
                Ok(plan) => break Some(plan),
                // Others may take space at the same time; what is too small at the end is no cache.
                Err(error) if error.kind() == ErrorKind::NoSpace && accepts_less => segments /= 2,
                Err(error) if error.kind() == ErrorKind::InvalidArgument => break None,
                Err(error) => return Err(error),
            }
        };
        let cache_id = self.environment.random() | 1;
        let used = self.first_use(&mut tables, plan.is_some())?;
        if let Some(plan) = &plan {
            self.place_cache(&mut tables, id.0, plan, cache_id, after)?;
        }
        let fits =
            |plan: &CachePlan| self.check_shared(shared, plan.segments.len() as u32, plan.lanes).is_ok();
        let shared = shared.filter(|_| plan.as_ref().is_some_and(fits));
        tables.backends[id.index()].keep_in_both(&self.region, BACKEND_ROW, |row| {
            row.state = STATE_ACTIVE.into();
            write_cache(row, plan.as_ref().map(|plan| Named { plan, cache_id, used, shared }).as_ref());
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        // Groups that were taken for a larger cache.
        self.release_unused(&mut tables);
        let row = tables.backends[id.index()].content();
        row.map_or_else(|| Err(no_such("backend", id.index())), |row| backend_entry(id.0, row))
    }
}

impl<E: Environment> Tables<E> {
    fn has_active_backend(&self, row: u32) -> bool {
        let content = self.backends.get(row as usize).and_then(TwoSlots::content);
        content.is_some_and(|content| content.state.get() == STATE_ACTIVE)
    }
}

/// What is known of a backend whose row is one of a move.
pub(super) fn state_of_incoming(row: &BackendRow, uuid: &[u8; 16]) -> RemoteState {
    let is_coming = row.state.get() == STATE_INCOMING && row.uuid == *uuid;
    if is_coming { RemoteState::NotServed } else { RemoteState::Gone }
}
