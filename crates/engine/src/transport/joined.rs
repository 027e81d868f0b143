//! A transport whose region several hosts share: the tables of this host, and what it has of the region.
//!
//! Each host has tables of its own, in its area, with the numbers of rows and segments that all hosts use. A host uses a row, or a
//! segment, of its tables only while it has that row, or the group of the segment; it takes more of them when it needs them, and
//! releases those that it uses no more.
//!
//! Invariants: a row of the tables of this host is active, and a segment in them names a cache, only while the host has the row or the
//! group. A name belongs to one backend or blkdev of all hosts, as far as their tables were stored when it was given.
//!
//! Elsewhere: decisions (`members`), tables (the other modules of `transport`).

use super::{
    Superblocks, Tables, Transport, backends::backend_entry, blkdevs::blkdev_entry, rows::first_free,
};
use crate::{BackendEntry, BlkdevEntry, Environment, Member, Members, Mutex, Proof, slots::TwoSlots};
use alloc::{boxed::Box, format, string::String, sync::Arc, vec, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow, Layout, Object, SharedLayout, SlotContent,
    tables::{STATE_ACTIVE, STATE_INCOMING},
};
use cbd_types::{BackendId, Error, ErrorKind, HostId, MutationPoint, Name, Region, Result};

/// How long the number of groups that no host has is used before it is looked up again.
const FREE_GROUPS_MS: u64 = 5000;

/// Looks at a row whose owner changes meanwhile.
const LOOKS: u32 = 4;

/// This process as a host of the region.
pub(super) struct Joined<E: Environment> {
    pub members: Arc<Members<E>>,
    pub member: Member,
}

/// What this host has of a shared region.
#[derive(Debug)]
pub(super) struct Shares {
    parts: SharedLayout,
    backends: Vec<bool>,
    blkdevs: Vec<bool>,
    groups: Vec<bool>,
    /// Segments in groups that no host has, and when they were counted.
    free: Option<(u64, u32)>,
}

impl Shares {
    fn read<E: Environment>(members: &Members<E>, host: HostId, parts: SharedLayout) -> Result<Self> {
        let has = |object: Object| Ok(members.decided(object)?.holding.is_of(host.0));
        Ok(Self {
            parts,
            backends: (0..parts.backends).map(|row| has(Object::Backend(row))).collect::<Result<_>>()?,
            blkdevs: (0..parts.blkdevs).map(|row| has(Object::Blkdev(row))).collect::<Result<_>>()?,
            groups: (0..parts.groups).map(|group| has(Object::Group(group))).collect::<Result<_>>()?,
            free: None,
        })
    }

    /// Whether the host has the row of a backend.
    pub(super) fn has_backend(&self, backend: u32) -> bool {
        self.backends.get(backend as usize).is_some_and(|has| *has)
    }

    /// Whether the host has the group of a segment.
    pub(super) fn has_segment(&self, segment: usize) -> bool {
        let group = self.parts.group_of(segment as u32);
        self.groups.get(group as usize).is_some_and(|has| *has)
    }

    /// The row of a backend is another host's now.
    pub(super) fn lose_backend(&mut self, backend: u32) {
        if let Some(has) = self.backends.get_mut(backend as usize) {
            *has = false;
        }
    }

    /// The row of a backend is this host's now.
    pub(super) fn get_backend(&mut self, backend: u32) {
        if let Some(has) = self.backends.get_mut(backend as usize) {
            *has = true;
        }
    }

    fn rows(&mut self, kind: RowKind) -> &mut Vec<bool> {
        match kind {
            RowKind::Backend => &mut self.backends,
            RowKind::Blkdev => &mut self.blkdevs,
        }
    }
}

/// A table whose rows hosts take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RowKind {
    Backend,
    Blkdev,
}

impl RowKind {
    const fn object(self, row: u32) -> Object {
        match self {
            Self::Backend => Object::Backend(row),
            Self::Blkdev => Object::Blkdev(row),
        }
    }
}

impl<E: Environment> Transport<E> {
    /// Whether a region is shared by several hosts, and needs [`open_shared`](Self::open_shared).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn is_shared(region: &Region<E::Memory>) -> Result<bool> {
        Ok(Superblocks::read(region)?.layout().shared_parts().is_some())
    }

    /// Opens the transport of a shared region as the host `name`, which this process becomes as [`Members::join`] says.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`Members::join`]; [`ErrorKind::InvalidArgument`] for a region that is not shared.
    pub fn open_shared(
        environment: Arc<E>,
        region: Region<E::Memory>,
        name: &str,
        prove: &mut Proof<'_>,
    ) -> Result<Arc<Self>> {
        let region = Arc::new(region);
        let members =
            Self::members_of(Arc::clone(&environment), Arc::clone(&region))?.ok_or_else(not_shared)?;
        let member = members.join(name, prove)?;
        let joined = Joined { members: Arc::new(members), member };
        let (members, id) = (Arc::clone(&joined.members), joined.member.id);
        Self::with_tables_of(environment, region, (&members, id), Some(joined))
    }

    /// Opens the tables of a host.
    fn with_tables_of(
        environment: Arc<E>,
        region: Arc<Region<E::Memory>>,
        (members, host): (&Members<E>, HostId),
        joined: Option<Joined<E>>,
    ) -> Result<Arc<Self>> {
        let mut superblocks = Superblocks::read(&region)?;
        let own = superblocks.layout().for_host(host.0).ok_or_else(not_shared)?;
        superblocks.use_tables_of(own);
        let tables = Tables::read(superblocks, &region)?;
        if let Some(parts) = own.shared_parts() {
            tables.lock().shares = Some(Shares::read(members, host, parts)?);
        }
        let transport = Arc::new(Self {
            environment,
            region,
            segment_size: own.segment_size,
            layout: Mutex::<E, _>::new(Box::new(own)),
            tables,
            joined,
        });
        if transport.joined.is_some() {
            // A crash between the two steps of a move to another host.
            transport.free_lost_backends(&mut transport.tables.lock())?;
        }
        Ok(transport)
    }

    /// The hosts of a region, if several share it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn members_of(environment: Arc<E>, region: Arc<Region<E::Memory>>) -> Result<Option<Members<E>>> {
        let layout = Superblocks::read(&region)?.layout();
        Ok(Members::new(environment, region, layout))
    }

    /// Opens all tables of a region, for tools, while no process uses it: those of each host of a shared one.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`open_of_host`](Self::open_of_host).
    pub fn open_each(environment: &Arc<E>, region: Arc<Region<E::Memory>>) -> Result<Vec<Arc<Self>>> {
        let members = Self::members_of(Arc::clone(environment), Arc::clone(&region));
        let Ok(Some(members)) = members else {
            return Self::open_held(Arc::clone(environment), region).map(|transport| vec![transport]);
        };
        let hosts = members.all()?.into_iter();
        hosts.map(|host| Self::open_of_host(Arc::clone(environment), Arc::clone(&region), host.id)).collect()
    }

    /// Opens the tables of a host of a shared region without being that host: for tools, while no process is that host. What is
    /// stored is that host's.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`ErrorKind::NotFound`] if there is no such host; [`ErrorKind::InvalidArgument`] for a region that is
    /// not shared.
    pub fn open_of_host(
        environment: Arc<E>,
        region: Arc<Region<E::Memory>>,
        host: HostId,
    ) -> Result<Arc<Self>> {
        let members =
            Self::members_of(Arc::clone(&environment), Arc::clone(&region))?.ok_or_else(not_shared)?;
        if members.host(host)?.is_none() {
            return Err(Error::new(ErrorKind::NotFound, format!("the region has no host {host}")));
        }
        Self::with_tables_of(environment, region, (&members, host), None)
    }

    /// The hosts of a shared region, and which of them this process is; `None` for a region of one host.
    pub fn members(&self) -> Option<(&Arc<Members<E>>, &Member)> {
        self.joined.as_ref().map(|joined| (&joined.members, &joined.member))
    }

    /// A free row: of those that this host has, or one that it gets now.
    pub(super) fn free_row<T: SlotContent>(
        &self,
        tables: &mut Tables<E>,
        kind: RowKind,
        table: impl Fn(&Tables<E>) -> &Vec<TwoSlots<T>>,
        state: impl Fn(&T) -> u32 + Copy,
    ) -> Result<usize> {
        let what = match kind {
            RowKind::Backend => "backend",
            RowKind::Blkdev => "blkdev",
        };
        let (Some(joined), Some(shares)) = (&self.joined, &tables.shares) else {
            return first_free(table(tables), state, what, |_| true);
        };
        let has = match kind {
            RowKind::Backend => &shares.backends,
            RowKind::Blkdev => &shares.blkdevs,
        };
        let is_incoming = |row: usize| {
            table(tables).get(row).and_then(TwoSlots::content).is_some_and(|row| state(row) == STATE_INCOMING)
        };
        let may_use = |row: usize| has.get(row).is_some_and(|has| *has) && !is_incoming(row);
        match first_free(table(tables), state, what, may_use) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            found => return found,
        }
        for row in 0..has.len() as u32 {
            let is_usable = !table(tables).get(row as usize).is_none_or(TwoSlots::is_lost);
            let is_own = tables.shares.as_mut().is_some_and(|shares| shares.rows(kind)[row as usize]);
            if is_own || !is_usable {
                continue;
            }
            if kind == RowKind::Backend && !self.free_incoming(tables, row as usize)? {
                continue;
            }
            if !joined.members.acquire(&joined.member, kind.object(row))? {
                continue;
            }
            if let Some(shares) = &mut tables.shares {
                shares.rows(kind)[row as usize] = true;
            }
            return Ok(row as usize);
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "the {what} tables of the transport are full: its hosts use all {} rows",
                table(tables).len()
            ),
        ))
    }

    /// Takes groups until this host has `wanted` free segments, as far as there are so many. Does nothing in a region of one host.
    ///
    /// # Errors
    /// As [`Members::acquire`].
    pub(super) fn take_segments(&self, tables: &mut Tables<E>, wanted: usize) -> Result<()> {
        let Some(joined) = &self.joined else { return Ok(()) };
        let groups = tables.shares.as_ref().map_or(0, |shares| shares.parts.groups);
        for group in 0..groups {
            if tables.free_segments().len() >= wanted {
                break;
            }
            let is_own = tables.shares.as_ref().is_some_and(|shares| shares.groups[group as usize]);
            if is_own || !joined.members.acquire(&joined.member, Object::Group(group))? {
                continue;
            }
            if let Some(shares) = &mut tables.shares {
                (shares.groups[group as usize], shares.free) = (true, None);
            }
        }
        Ok(())
    }

    /// Releases rows and groups of which this host uses nothing. What cannot be released now stays this host's.
    pub(super) fn release_unused(&self, tables: &mut Tables<E>) {
        let Some(joined) = &self.joined else { return };
        let Some(mut shares) = tables.shares.take() else { return };
        shares.free = None;
        let give = |object: Object| joined.members.release(&joined.member, object).is_ok();
        let is_active =
            |row: Option<u32>, is_lost: bool| matches!(row, Some(STATE_ACTIVE | STATE_INCOMING)) || is_lost;
        for (row, has) in shares.backends.iter_mut().enumerate().filter(|(_, has)| **has) {
            let slots = &tables.backends[row];
            if !is_active(slots.content().map(|row| row.state.get()), slots.is_lost()) {
                *has = !give(Object::Backend(row as u32));
            }
        }
        for (row, has) in shares.blkdevs.iter_mut().enumerate().filter(|(_, has)| **has) {
            let slots = &tables.blkdevs[row];
            if !is_active(slots.content().map(|row| row.state.get()), slots.is_lost()) {
                *has = !give(Object::Blkdev(row as u32));
            }
        }
        let mut used = vec![false; shares.groups.len()];
        for segment in 0..tables.segments.len() {
            if tables.is_used(segment) || tables.may_be_of_lost_row(segment) {
                used[shares.parts.group_of(segment as u32) as usize] = true;
            }
        }
        for (group, has) in shares.groups.iter_mut().enumerate().filter(|(_, has)| **has) {
            *has = used[group] || !give(Object::Group(group as u32));
        }
        tables.shares = Some(shares);
    }

    /// Segments that this host can get: those that are free in its groups, and those of groups that no host has.
    pub(super) fn free_for_this_host(&self, tables: &mut Tables<E>) -> u32 {
        let own = tables.free_segments().len() as u32;
        let (Some(joined), Some(shares)) = (&self.joined, &mut tables.shares) else { return own };
        let now = self.environment.monotonic_ms();
        if let Some((at, free)) = shares.free
            && now.saturating_sub(at) < FREE_GROUPS_MS
        {
            return own + free;
        }
        let segments = tables.segments.len() as u32;
        let free = (0..shares.parts.groups)
            .filter(|group| matches!(joined.members.owner(Object::Group(*group)), Ok(None)))
            .map(|group| {
                let first = group * shares.parts.group_segments;
                shares.parts.group_segments.min(segments - first)
            })
            .sum();
        shares.free = Some((now, free));
        own + free
    }

    /// The backends of the other hosts of the region, as they have stored them, also those that were moved to a host that has not taken
    /// them over.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn backends_of_others(&self) -> Result<Vec<BackendEntry>> {
        let mut found = Vec::new();
        self.rows_of_others(RowKind::Backend, &mut |id, layout| {
            let row = self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, id);
            // A row that is being stored, or that cannot be: it is shown the next time.
            let is_there = |row: &&BackendRow| matches!(row.state.get(), STATE_ACTIVE | STATE_INCOMING);
            let row = row.content().filter(is_there);
            found.extend(row.and_then(|row| backend_entry(id, row).ok()));
            row.is_some()
        })?;
        Ok(found)
    }

    /// The backends that were moved to this host and that it has not taken over yet.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn arriving_backends(&self) -> Result<Vec<BackendEntry>> {
        let Some(joined) = &self.joined else { return Ok(Vec::new()) };
        let rows: Vec<(u32, BackendRow)> = {
            let tables = self.tables.lock();
            let rows = (0..).zip(&tables.backends);
            let incoming = rows.filter_map(|(id, slots)| Some((id, *slots.content()?)));
            incoming.filter(|(_, row)| row.state.get() == STATE_INCOMING).collect()
        };
        let mut found = Vec::new();
        for (id, row) in rows {
            if joined.members.owner(Object::Backend(id))? == Some(joined.member.id) {
                found.push(backend_entry(id, &row)?);
            }
        }
        Ok(found)
    }

    /// Whether another host has a backend, and has taken it over if it was moved there.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn is_taken_over(&self, backend: BackendId) -> Result<bool> {
        let mut is_taken_over = false;
        self.rows_of_others(RowKind::Backend, &mut |id, layout| {
            if id == backend.0 {
                let row = self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, id);
                is_taken_over = row.content().is_some_and(|row| row.state.get() == STATE_ACTIVE);
            }
            true
        })?;
        Ok(is_taken_over)
    }

    /// The blkdevs of the other hosts of the region, as they have stored them.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn blkdevs_of_others(&self) -> Result<Vec<BlkdevEntry>> {
        let mut found = Vec::new();
        self.rows_of_others(RowKind::Blkdev, &mut |id, layout| {
            let row = self.read_row::<BlkdevRow>(layout.blkdev_area, layout.blkdev_rows, id);
            if let Some(row) = row.content().filter(|row| row.state.get() == STATE_ACTIVE) {
                let backend = row.backend.get();
                let layout = match row.backend_host.get() {
                    0 => Some(*layout),
                    host => layout.for_host(host - 1),
                };
                let below = layout.filter(|layout| backend < layout.backend_rows).map(|layout| {
                    self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, backend)
                });
                found.push(blkdev_entry(id, row, below.as_ref().and_then(TwoSlots::content)));
            }
            true
        })?;
        Ok(found)
    }

    /// Calls `each` with the rows that other hosts have, and the layout with the tables of their host. It returns whether the row is in
    /// use: one that is not may have been passed on between the look at its owner and that at the row, and is looked at again.
    pub(super) fn rows_of_others(
        &self,
        kind: RowKind,
        each: &mut dyn FnMut(u32, &Layout) -> bool,
    ) -> Result<()> {
        let Some(joined) = &self.joined else { return Ok(()) };
        let layout = self.layout();
        let Some(parts) = layout.shared_parts() else { return Ok(()) };
        let rows = if kind == RowKind::Backend { parts.backends } else { parts.blkdevs };
        let owner_of = |row| -> Result<Option<HostId>> {
            let owner = joined.members.owner(kind.object(row))?;
            Ok(owner.filter(|owner| *owner != joined.member.id))
        };
        for row in 0..rows {
            let mut owner = owner_of(row)?;
            for _ in 0..LOOKS {
                let Some(layout) = owner.and_then(|HostId(owner)| layout.for_host(owner)) else { break };
                if each(row, &layout) || !MutationPoint::MoveLookAgain.is_active() {
                    break;
                }
                let now = owner_of(row)?;
                if now == core::mem::replace(&mut owner, now) {
                    break;
                }
            }
        }
        Ok(())
    }

    pub(super) fn read_row<T: SlotContent>(&self, area: u64, rows: u32, row: u32) -> TwoSlots<T> {
        let at = Layout::slots::<T>(area, rows, row);
        for at in at {
            self.region.observe(MutationPoint::VoteObserve, at, T::SLOT_SIZE as u64);
        }
        TwoSlots::read(&self.region, at, u64::from(row))
    }

    /// Refuses a name that a backend or a blkdev of another host has.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`]; errors of reading.
    pub(super) fn refuse_name_of_others(&self, name: &Name) -> Result<()> {
        if self.joined.is_none() {
            return Ok(());
        }
        let taken = |who: String| {
            let text = format!(
                "{who} of another host of this transport has the name {name} already; choose another"
            );
            Err(Error::new(ErrorKind::AlreadyExists, text))
        };
        if let Some(other) = self.backends_of_others()?.iter().find(|other| other.name.as_ref() == Some(name))
        {
            return taken(format!("backend {}", other.id));
        }
        if let Some(other) = self.blkdevs_of_others()?.iter().find(|other| other.name.as_ref() == Some(name))
        {
            return taken(format!("blkdev {}", other.id));
        }
        Ok(())
    }
}

impl<E: Environment> Tables<E> {
    /// Whether a segment names a cache, or a channel, that a row of this host has.
    pub(super) fn is_used(&self, segment: usize) -> bool {
        self.owner(segment).is_some() || self.is_channel_area(segment)
    }
}

fn not_shared() -> Error {
    Error::new(ErrorKind::InvalidArgument, "the region is not shared by several hosts")
}
