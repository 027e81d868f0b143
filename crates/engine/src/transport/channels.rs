//! The areas of channels: segments by which a host uses a backend of another host of a shared region.
//!
//! The host of the blkdev has the client's area, and the host of the backend the server's. Each stores its own tables and its own area
//! alone, and finds the other one by the tables of the other host.
//!
//! Invariants: a client's area belongs to its channel only while the active row of the blkdev, with the same ownership number, names the
//! segment; a server's area only while the active row of the backend has the same uuid. So a crash while one is created leaves a free
//! segment. An area holds no header of an earlier use when its channel begins.
//!
//! Elsewhere: what is in the areas (`cbd-channel`), the decisions on segments and rows (`members`).

use super::{
    BlkdevEntry, BlkdevSpec, Tables, Transport,
    blkdevs::{ROW, blkdev_entry},
    joined::RowKind,
    moves::state_of_incoming,
    rows::rows,
};
use crate::{Environment, slots::TwoSlots};
use alloc::{format, vec, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow, FieldText, Layout, Object, PAGE, SegmentEntry,
    SlotContent,
    tables::{NO_BACKEND, STATE_ACTIVE, USED_BY_CLIENT, USED_BY_SERVER, encode_name},
};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, HostId, MutationPoint, Name, Result, SegmentId};

/// One side's area of a channel: its place in the region, one whole segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChannelArea {
    /// Offset of its first byte in the region.
    pub at: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A blkdev whose backend another host has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteBlkdev {
    /// The blkdev; its `host` is the host that has the blkdev.
    pub entry: BlkdevEntry,
    /// The ownership number of its row.
    pub ownership: u64,
    /// The host that had the backend when the blkdev was created.
    pub owner: HostId,
    /// Identity of the backend.
    pub backend_uuid: [u8; 16],
    /// The client's area.
    pub area: ChannelArea,
}

/// A server's area of this host, for a blkdev of another host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServedBlkdev {
    /// The backend, which this host has.
    pub backend: BackendId,
    /// The blkdev.
    pub blkdev: BlkdevId,
    /// The host that has the blkdev.
    pub host: HostId,
    /// The ownership number of the blkdev's row.
    pub ownership: u64,
    /// The server's area.
    pub area: ChannelArea,
}

/// What the host that has the backend of a [`RemoteBlkdev`] has stored about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemoteState {
    /// It serves the blkdev, with this area.
    Served(ChannelArea),
    /// It has the backend, and does not serve the blkdev.
    NotServed,
    /// No host has the backend any more.
    Gone,
}

impl<E: Environment> Transport<E> {
    /// Creates a blkdev on a backend of another host, with the client's area of its channel.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] in a region of one host; [`ErrorKind::NotFound`] if no other host has the backend;
    /// [`ErrorKind::Busy`] if there is a blkdev on it and not both are `shared`, and while it is being moved; [`ErrorKind::NoSpace`] without a free row or segment;
    /// [`ErrorKind::AlreadyExists`] for a name that is taken; errors of reading and storing.
    pub fn create_remote_blkdev(&self, spec: &BlkdevSpec, name: Option<&Name>) -> Result<BlkdevId> {
        let (members, member) = self.members().ok_or_else(of_one_host)?;
        let not_found =
            || Error::new(ErrorKind::NotFound, format!("no other host has backend {}", spec.backend));
        let others = self.backends_of_others()?;
        let below = others.iter().find(|entry| entry.id == spec.backend).ok_or_else(not_found)?;
        let owner = members.owner(Object::Backend(spec.backend.0))?.ok_or_else(not_found)?;
        if owner == member.id {
            return Err(not_found());
        }
        if !self.is_taken_over(spec.backend)? {
            let text = format!(
                "backend {} was moved to host {}, which has not taken it over: see whether that is alive (host-list)",
                spec.backend, owner.0
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let export = FieldText::new("export", &spec.export)?;
        self.refuse_beside_others(spec, &below.uuid)?;
        let mut tables = self.tables.lock();
        let is_on = |row: &BlkdevRow| row.backend.get() == spec.backend.0 && row.backend_uuid == below.uuid;
        let is_further = spec.is_further(tables.remote_rows().filter(|(_, row)| is_on(row)))?;
        if let Some(name) = name {
            tables.refuse_blkdev_name(None, None, name)?;
            self.refuse_name_of_others(name)?;
        }
        let row =
            self.free_row(&mut tables, RowKind::Blkdev, |tables| &tables.blkdevs, |row| row.state.get())?;
        let ownership = tables.blkdevs[row].content().map_or(1, |old| old.ownership.get() + 1);
        // 1. The area, blank. 2. Its entry. It remains free until the row names it.
        let segment =
            self.take_area(&mut tables, client_area(row as u32, member.id, ownership, below.uuid))?;
        // 3. The row: from now on the blkdev exists.
        tables.blkdevs[row].keep_in_both(&self.region, ROW, |row| {
            row.clear();
            row.state = STATE_ACTIVE.into();
            row.host = spec.host.0.into();
            row.backend = spec.backend.0.into();
            row.ownership = ownership.into();
            row.backend_uuid = below.uuid;
            row.shared = u32::from(spec.shared).into();
            row.further = u32::from(is_further).into();
            row.name = encode_name(name);
            row.channel_segment = (segment.0 + 1).into();
            row.backend_host = (owner.0 + 1).into();
            export.write(&mut row.export_length, &mut row.export);
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        Ok(BlkdevId(row as u32))
    }

    /// The blkdevs of other hosts with which one on a backend of this host shares that.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if there is one that does not share it; errors of reading.
    pub(super) fn shared_with(&self, spec: &BlkdevSpec) -> Result<Vec<RemoteBlkdev>> {
        if self.members().is_none() {
            return Ok(Vec::new());
        }
        let tables = self.tables.lock();
        let below = tables.backends.get(spec.backend.index()).and_then(TwoSlots::content);
        let Some(uuid) = below.map(|below| below.uuid) else { return Ok(Vec::new()) };
        drop(tables);
        self.refuse_beside_others(spec, &uuid)?;
        self.remote_blkdevs_of_others()
    }

    fn refuse_beside_others(&self, spec: &BlkdevSpec, uuid: &[u8; 16]) -> Result<()> {
        let mut refused = Ok(());
        self.rows_of_others(RowKind::Blkdev, &mut |id, layout| {
            let slots = self.read_row::<BlkdevRow>(layout.blkdev_area, layout.blkdev_rows, id);
            let is_on = |row: &&BlkdevRow| {
                row.state.get() == STATE_ACTIVE
                    && row.backend.get() == spec.backend.0
                    && row.backend_uuid == *uuid
            };
            if let Some(row) = slots.content().filter(is_on).filter(|_| refused.is_ok()) {
                refused = spec.refuse_beside(BlkdevId(id), row);
            }
            true
        })?;
        refused
    }

    /// The blkdevs of this host on backends of other hosts.
    pub fn remote_blkdevs(&self) -> Vec<RemoteBlkdev> {
        let tables = self.tables.lock();
        tables.remote_rows().filter_map(|(id, row)| self.remote_blkdev(id, row, None)).collect()
    }

    /// The blkdevs of other hosts on backends of this one.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn remote_blkdevs_of_others(&self) -> Result<Vec<RemoteBlkdev>> {
        let mut found = Vec::new();
        self.rows_of_others(RowKind::Blkdev, &mut |id, layout| {
            let slots = self.read_row::<BlkdevRow>(layout.blkdev_area, layout.blkdev_rows, id);
            let row =
                slots.content().filter(|row| row.state.get() == STATE_ACTIVE && row.backend_host.get() != 0);
            if let Some(row) = row {
                let tables = self.tables.lock();
                if let Some(backend) = tables.own_backend(row.backend.get(), &row.backend_uuid) {
                    found.extend(self.remote_blkdev(id, row, Some(backend)));
                }
            }
            true
        })?;
        Ok(found)
    }

    /// Gives a blkdev of another host the server's area of its channel, or returns the one that it has.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if this host does not have the backend; [`ErrorKind::Busy`] if another blkdev uses it and not both are
    /// `shared`, or a former blkdev with this number; [`ErrorKind::NoSpace`] without a free segment; errors of reading and storing.
    pub fn serve_remote(&self, blkdev: &RemoteBlkdev) -> Result<ChannelArea> {
        let backend = blkdev.entry.backend;
        let others = if blkdev.entry.shared { self.remote_blkdevs_of_others()? } else { Vec::new() };
        let mut tables = self.tables.lock();
        if tables.own_backend(backend.0, &blkdev.backend_uuid).is_none() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("this host does not have backend {backend}"),
            ));
        }
        let (id, host, ownership) = (blkdev.entry.id, blkdev.entry.host, blkdev.ownership);
        let mut served = tables.served().filter(|(_, entry)| entry.backend.get() == backend.0);
        if let Some((segment, _)) = served.find(|(_, entry)| is_for(entry, blkdev)) {
            return Ok(self.area_of(segment));
        }
        drop(served);
        self.refuse_served(&tables, backend, &others)?;
        for (local, row) in tables.blkdev_rows().filter(|(_, row)| row.backend.get() == backend.0) {
            if !(blkdev.entry.shared && row.shared.get() != 0) {
                let text = format!("blkdev {local} stands on backend {backend} already");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        let segment = self.take_area(
            &mut tables,
            SegmentEntry {
                backend: backend.0.into(),
                used_by: USED_BY_SERVER.into(),
                cache_id: 0.into(),
                blkdev: id.0.into(),
                blkdev_host: host.0.into(),
                blkdev_ownership: ownership.into(),
                backend_uuid: blkdev.backend_uuid,
            },
        )?;
        Ok(self.area_of(segment))
    }

    /// The server's areas of this host.
    pub fn served_blkdevs(&self) -> Vec<ServedBlkdev> {
        let tables = self.tables.lock();
        let served = tables.served().map(|(segment, entry)| ServedBlkdev {
            backend: BackendId(entry.backend.get()),
            blkdev: BlkdevId(entry.blkdev.get()),
            host: HostId(entry.blkdev_host.get()),
            ownership: entry.blkdev_ownership.get(),
            area: self.area_of(segment),
        });
        served.collect()
    }

    /// Frees a server's area. No thread uses the area any more. Does nothing if it is free already.
    ///
    /// # Errors
    /// Errors of storing.
    pub fn end_serving(&self, served: &ServedBlkdev) -> Result<()> {
        let mut tables = self.tables.lock();
        let found = tables.served().find(|(segment, entry)| {
            self.area_of(*segment) == served.area
                && entry.backend.get() == served.backend.0
                && entry.blkdev.get() == served.blkdev.0
                && entry.blkdev_host.get() == served.host.0
                && entry.blkdev_ownership.get() == served.ownership
        });
        let Some(segment) = found.map(|(segment, _)| segment) else { return Ok(()) };
        self.store_entries(&mut tables, &[segment], SegmentEntry::of_cache(NO_BACKEND, 0))?;
        self.release_unused(&mut tables);
        Ok(())
    }

    /// The server's area for a blkdev of this host, in the tables of the host that has the backend now. Looks at `known` first.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn server_area(&self, blkdev: &RemoteBlkdev, known: Option<ChannelArea>) -> Result<RemoteState> {
        let Some((owner, layout)) = self.host_of_backend(blkdev)? else { return Ok(RemoteState::Gone) };
        let backend = blkdev.entry.backend;
        let below = self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, backend.0);
        match below.content() {
            Some(row) if row.state.get() == STATE_ACTIVE && row.uuid == blkdev.backend_uuid => {}
            Some(row) => return Ok(state_of_incoming(row, &blkdev.backend_uuid)),
            // It is being stored, or cannot be read now.
            None => return Ok(RemoteState::NotServed),
        }
        let known = known.and_then(|area| self.segment_of(area)).into_iter();
        for SegmentId(segment) in known.chain((0..layout.segment_count).map(SegmentId)) {
            let slots = self.read_row::<SegmentEntry>(layout.segment_table, layout.segment_count, segment);
            let is_area = |entry: &SegmentEntry| {
                entry.used_by.get() == USED_BY_SERVER
                    && entry.backend.get() == backend.0
                    && is_for(entry, blkdev)
            };
            if slots.content().is_some_and(is_area) && self.has_group_of(owner, segment)? {
                return Ok(RemoteState::Served(self.area_of(SegmentId(segment))));
            }
        }
        Ok(RemoteState::NotServed)
    }

    /// The host that has the backend of a blkdev now, and the layout with its tables; `None` if no host has it.
    fn host_of_backend(&self, blkdev: &RemoteBlkdev) -> Result<Option<(HostId, Layout)>> {
        let Some((members, _)) = self.members() else { return Ok(None) };
        let owner = members.owner(Object::Backend(blkdev.entry.backend.0))?;
        Ok(owner.and_then(|owner| Some((owner, self.layout().for_host(owner.0)?))))
    }

    fn has_group_of(&self, host: HostId, segment: u32) -> Result<bool> {
        let (Some((members, _)), Some(parts)) = (self.members(), self.layout().shared_parts()) else {
            return Ok(false);
        };
        Ok(members.owner(Object::Group(parts.group_of(segment)))? == Some(host))
    }

    /// Refuses a backend that is served to another host, unless that is by one of `others`, which shares it. Requests of a former blkdev,
    /// whose row is free, may still be executed.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`].
    pub(super) fn refuse_served(
        &self,
        tables: &Tables<E>,
        backend: BackendId,
        others: &[RemoteBlkdev],
    ) -> Result<()> {
        let shares = |entry: &SegmentEntry| others.iter().any(|row| row.entry.shared && is_for(entry, row));
        let mut served = tables.served().filter(|(_, entry)| entry.backend.get() == backend.0);
        let other = served.find(|(_, entry)| !shares(entry));
        other.map_or(Ok(()), |(_, entry)| Err(busy_served(backend, entry)))
    }

    /// Takes a free segment, blanks its first page, and durably stores its entry.
    pub(super) fn take_area(&self, tables: &mut Tables<E>, entry: SegmentEntry) -> Result<SegmentId> {
        self.take_segments(tables, 1)?;
        let free = tables.free_segments().first().copied();
        let Some(segment) = free else {
            // A row that was taken for it, too.
            self.release_unused(tables);
            let text = "the transport has no free segment for the channel of a blkdev";
            return Err(Error::new(ErrorKind::NoSpace, text));
        };
        let stored = self.region.store(self.segment_base(segment), &vec![0; PAGE as usize]);
        self.region.fence(MutationPoint::AreaBlankFence, stored);
        self.store_entries(tables, &[segment], entry)?;
        Ok(segment)
    }

    fn area_of(&self, segment: SegmentId) -> ChannelArea {
        ChannelArea { at: self.segment_base(segment), bytes: self.segment_size }
    }

    fn segment_of(&self, area: ChannelArea) -> Option<SegmentId> {
        let segment =
            u32::try_from(area.at.checked_sub(self.segment_base(SegmentId(0)))? / self.segment_size);
        segment.ok().map(SegmentId).filter(|segment| segment.0 < self.segment_count())
    }

    /// A blkdev on a backend of another host from its row; `None` for a row that names no segment.
    fn remote_blkdev(&self, id: u32, row: &BlkdevRow, backend: Option<&BackendRow>) -> Option<RemoteBlkdev> {
        let segment = row.channel_segment.get().checked_sub(1)?;
        (segment < self.segment_count()).then(|| RemoteBlkdev {
            entry: blkdev_entry(id, row, backend),
            ownership: row.ownership.get(),
            owner: HostId(row.backend_host.get().saturating_sub(1)),
            backend_uuid: row.backend_uuid,
            area: self.area_of(SegmentId(segment)),
        })
    }
}

impl<E: Environment> Tables<E> {
    /// The blkdevs of this host on backends of other hosts.
    pub(super) fn remote_rows(&self) -> impl Iterator<Item = (u32, &BlkdevRow)> {
        rows(&self.blkdevs, |row: &BlkdevRow| row.state.get()).filter(|(_, row)| row.backend_host.get() != 0)
    }

    /// The active row of a backend that this host has, with this identity.
    pub(super) fn own_backend(&self, backend: u32, uuid: &[u8; 16]) -> Option<&BackendRow> {
        let has = self.shares.as_ref().is_none_or(|shares| shares.has_backend(backend));
        let row = self.backends.get(backend as usize).and_then(TwoSlots::content)?;
        (has && row.state.get() == STATE_ACTIVE && row.uuid == *uuid).then_some(row)
    }

    /// The server's areas with their entries.
    fn served(&self) -> impl Iterator<Item = (SegmentId, &SegmentEntry)> {
        let entries = self.segments.iter().enumerate();
        entries.filter_map(|(segment, slots)| {
            let entry = slots.content().filter(|entry| entry.used_by.get() == USED_BY_SERVER)?;
            self.is_channel_area(segment).then_some((SegmentId(segment as u32), entry))
        })
    }

    /// Whether a segment is an area of a channel: its entry and the row of its user agree.
    pub(super) fn is_channel_area(&self, segment: usize) -> bool {
        if !self.shares.as_ref().is_none_or(|shares| shares.has_segment(segment)) {
            return false;
        }
        let Some(entry) = self.segments[segment].content() else { return false };
        match entry.used_by.get() {
            USED_BY_CLIENT => {
                let row = self.blkdevs.get(entry.blkdev.get() as usize).and_then(TwoSlots::content);
                row.is_some_and(|row| {
                    row.state.get() == STATE_ACTIVE
                        && row.ownership == entry.blkdev_ownership
                        && row.channel_segment.get().checked_sub(1) == Some(segment as u32)
                })
            }
            USED_BY_SERVER => self.own_backend(entry.backend.get(), &entry.backend_uuid).is_some(),
            _ => false,
        }
    }

    /// Whether a segment may be the area of a blkdev whose row is lost.
    pub(super) fn may_be_of_lost_blkdev(&self, segment: usize) -> bool {
        let entry = self.segments[segment].content().filter(|entry| entry.used_by.get() == USED_BY_CLIENT);
        let row = entry.and_then(|entry| self.blkdevs.get(entry.blkdev.get() as usize));
        row.is_some_and(TwoSlots::is_lost)
    }
}

/// Whether the entry of a server's area is for this blkdev.
fn is_for(entry: &SegmentEntry, blkdev: &RemoteBlkdev) -> bool {
    entry.blkdev.get() == blkdev.entry.id.0
        && entry.blkdev_host.get() == blkdev.entry.host.0
        && entry.blkdev_ownership.get() == blkdev.ownership
        && entry.backend_uuid == blkdev.backend_uuid
}

pub(super) fn of_one_host() -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        "the region is not shared by several hosts (tp-reg --format --shared)",
    )
}

/// The entry of the client's area of the channel of a blkdev.
pub(super) fn client_area(blkdev: u32, host: HostId, ownership: u64, backend_uuid: [u8; 16]) -> SegmentEntry {
    SegmentEntry {
        backend: NO_BACKEND.into(),
        used_by: USED_BY_CLIENT.into(),
        cache_id: 0.into(),
        blkdev: blkdev.into(),
        blkdev_host: host.0.into(),
        blkdev_ownership: ownership.into(),
        backend_uuid,
    }
}

fn busy_served(backend: BackendId, entry: &SegmentEntry) -> Error {
    let (blkdev, host) = (entry.blkdev, entry.blkdev_host);
    Error::new(
        ErrorKind::Busy,
        format!("blkdev {blkdev} of host {host} uses backend {backend}: stop it there first"),
    )
}
