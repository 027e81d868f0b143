//! The blkdevs on a backend that was moved: their channels follow it.
//!
//! Invariants: a row names the client's area of a channel while another host has the backend, and none while this host has it.
//!
//! Elsewhere: the move (the parent module), the areas (`channels`).

use crate::Environment;
use crate::transport::{Tables, Transport, blkdevs::ROW, channels::client_area};
use cbd_format::{
    BackendEntry as BackendRow, Object,
    tables::{STATE_ACTIVE, STATE_FREE},
};
use cbd_types::{BackendId, HostId, MutationPoint, Result};

impl<E: Environment> Transport<E> {
    /// Makes the rows of this host's blkdevs those of the hosts that have their backends now: of a backend that another host has got, a
    /// blkdev gets the client's area of a channel; of one that this host has got, it has none any more. No session uses such an area.
    /// With `only`, those on one backend. Returns whether a row has changed.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`](cbd_types::ErrorKind::NoSpace) without a segment for an area; errors of reading and storing. It can be repeated.
    pub fn settle_blkdevs(&self, only: Option<BackendId>) -> Result<bool> {
        let (members, member) = self.joined_members()?;
        let mut tables = self.tables.lock();
        let mut has_changed = false;
        for row in 0..tables.blkdevs.len() {
            let Some(content) = tables.blkdevs[row].content() else { continue };
            let (backend, uuid) = (content.backend.get(), content.backend_uuid);
            if content.state.get() != STATE_ACTIVE || only.is_some_and(|only| only.0 != backend) {
                continue;
            }
            let (former, ownership) = (content.backend_host.get(), content.ownership.get() + 1);
            let Some(owner) = members.owner(Object::Backend(backend))? else { continue };
            let is_own = owner == member.id;
            let now = if is_own { 0 } else { owner.0 + 1 };
            if now == former || !self.is_backend_of(&tables, owner, backend, &uuid) {
                continue;
            }
            let area = if is_own {
                None
            } else {
                let entry = client_area(row as u32, member.id, ownership, uuid);
                let segment = self.take_area(&mut tables, entry)?;
                Some(segment)
            };
            tables.blkdevs[row].keep_in_both(&self.region, ROW, |row| {
                row.ownership = ownership.into();
                row.channel_segment = area.map_or(0, |segment| segment.0 + 1).into();
                row.backend_host = now.into();
            })?;
            has_changed = true;
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        if has_changed {
            self.release_unused(&mut tables);
        }
        Ok(has_changed)
    }

    /// Whether a host has stored a row of this backend: this one an active one, another one also of a move that has ended.
    fn is_backend_of(&self, tables: &Tables<E>, owner: HostId, backend: u32, uuid: &[u8; 16]) -> bool {
        let is_it = |row: Option<&BackendRow>| {
            row.is_some_and(|row| row.state.get() != STATE_FREE && row.uuid == *uuid)
        };
        if self.members().is_some_and(|(_, member)| member.id == owner) {
            return tables.own_backend(backend, uuid).is_some();
        }
        let layout = self.layout().for_host(owner.0).filter(|layout| backend < layout.backend_rows);
        layout.is_some_and(|layout| {
            is_it(self.read_row::<BackendRow>(layout.backend_area, layout.backend_rows, backend).content())
        })
    }
}
