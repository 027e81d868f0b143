//! Hosts of a transport.

use super::{
    Transport,
    rows::{active_row, first_free, is_active, rows},
};
use crate::{Environment, slots::InBoth};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{
    FieldText, SlotContent,
    tables::{STATE_ACTIVE, STATE_FREE, decode_text},
};
use cbd_types::{Error, ErrorKind, HostId, MutationPoint, Result};

/// The mutation points of storing a host's row durably.
const ROW: InBoth = InBoth {
    first_fence: MutationPoint::HostRowFirstFence,
    second: MutationPoint::HostRowSecond,
    fence: MutationPoint::HostRowFence,
};

/// A host, decoded from its row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostEntry {
    /// The number of its row.
    pub id: HostId,
    /// Its name.
    pub name: String,
}

impl<E: Environment> Transport<E> {
    /// Registers a host: uses the row that has its name, the row `wanted`, or the first free one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a name that does not fit or a row that does not exist, [`ErrorKind::Busy`] if the
    /// row has another name, [`ErrorKind::NoSpace`] if the table is full.
    pub fn register_host(&self, name: &str, wanted: Option<HostId>) -> Result<HostId> {
        if name.is_empty() || name.chars().any(|c| c.is_control() || c == '/') {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "'{}' is no host name: it must not be empty and hold no '/' or control character",
                    name.escape_default()
                ),
            ));
        }
        let text = FieldText::new("host name", name)?;
        // In a shared region this process is a host already.
        let wanted = self.members().map(|(_, member)| member.id).or(wanted);
        let mut tables = self.tables.lock();
        let named = tables.hosts.iter().position(|row| {
            row.content().is_some_and(|row| {
                row.state.get() == STATE_ACTIVE
                    && decode_text("host name", row.name_length, &row.name).is_ok_and(|known| known == name)
            })
        });
        let row = match (wanted, named) {
            (Some(wanted), _) if wanted.index() >= tables.hosts.len() => {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("host id {wanted} is out of range: the table has {} rows", tables.hosts.len()),
                ));
            }
            (Some(wanted), Some(named)) if wanted.index() != named => {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!("host '{name}' is registered with id {named}"),
                ));
            }
            (_, Some(named)) => return Ok(HostId(named as u32)),
            (Some(wanted), None) => {
                if is_active(tables.hosts[wanted.index()].content(), |row| row.state.get()) {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        format!("host id {wanted} belongs to another host"),
                    ));
                }
                wanted.index()
            }
            (None, None) => first_free(&tables.hosts, |row| row.state.get(), "host", |_| true)?,
        };
        let ownership = tables.hosts[row].content().map_or(1, |old| old.ownership.get() + 1);
        let registered_ms = self.environment.wall_ms();
        tables.hosts[row].keep_in_both(&self.region, ROW, |row| {
            row.clear();
            row.state = STATE_ACTIVE.into();
            row.ownership = ownership.into();
            row.registered_ms = registered_ms.into();
            text.write(&mut row.name_length, &mut row.name);
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        Ok(HostId(row as u32))
    }

    /// Removes a host.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Busy`] while backends or blkdevs belong to it; in a shared region as
    /// [`Members::leave`](crate::Members::leave).
    pub fn unregister_host(&self, host: HostId) -> Result<()> {
        if let Some(backend) = self.backends()?.iter().find(|backend| backend.host == host) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("host {host} still has backend {}: stop it first", backend.id),
            ));
        }
        let mut tables = self.tables.lock();
        if let Some((members, member)) = self.members() {
            return members.leave(member);
        }
        let row = active_row(&mut tables.hosts, host.index(), |row| row.state.get(), "host")?;
        row.keep_in_both(&self.region, ROW, |row| row.state = STATE_FREE.into())?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    /// All hosts.
    pub fn hosts(&self) -> Vec<HostEntry> {
        if let Some((members, _)) = self.members() {
            let all = members.all().unwrap_or_default();
            return all.into_iter().map(|host| HostEntry { id: host.id, name: host.name }).collect();
        }
        let tables = self.tables.lock();
        rows(&tables.hosts, |row| row.state.get())
            .map(|(id, row)| HostEntry {
                id: HostId(id),
                // A host is listed even if its name is damaged.
                name: decode_text("host name", row.name_length, &row.name).unwrap_or_default(),
            })
            .collect()
    }
}
