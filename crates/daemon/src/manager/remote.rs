//! Block devices at addresses that other machines can reach: checks, records and ends their permissions.
//!
//! Invariants: no export is opened at such an address without a permission ([`crate::remote`]). A permission is
//! recorded before its export is opened, and ended before its row is removed, so a crash leaves a row without a
//! permission at most.

use super::backend::BackendSlot;
use super::slots::TransportHandle;
use super::transport::Running;
use super::{Fixed, Manager};
use crate::api::{BlkdevInfo, StartBlkdev};
use crate::exports::ExportChoice;
use crate::remote::RemoteExport;
use cbd_engine::{BackendEntry, BlkdevEntry};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, Result, uuid_text};

impl TransportHandle {
    fn uuid(&self) -> String {
        uuid_text(self.transport.info().uuid)
    }

    /// The identity of a permission.
    fn remote(&self, backend: &BackendEntry, choice: &ExportChoice) -> RemoteExport {
        RemoteExport { transport: self.uuid(), backend: uuid_text(backend.uuid), export: choice.to_string() }
    }

    /// Refuses an export at an address that other machines can reach and that no command on this machine has allowed.
    pub(super) fn refuse_unallowed(
        &self,
        fixed: &Fixed,
        backend: &BackendEntry,
        id: BlkdevId,
        choice: &ExportChoice,
    ) -> Result<()> {
        if !choice.is_remote() || fixed.remote.is_allowed(&self.remote(backend, choice)) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Permission,
            format!(
                "the region names {choice}, which other machines can reach, and no command on this machine has allowed that; NBD is not encrypted \
                 and not authenticated. dev-start -t {} -b {} -e {choice} --allow-remote allows it, dev-stop -t {} -d {} removes \
                 the block device",
                self.id, backend.id.0, self.id, id.0
            ),
        ))
    }

    /// Records that a user has allowed the export.
    pub(super) fn allow(&self, fixed: &Fixed, backend: &BackendEntry, choice: &ExportChoice) -> Result<()> {
        if choice.is_remote() { fixed.remote.allow(self.remote(backend, choice)) } else { Ok(()) }
    }

    /// Ends the permissions of a backend, or that of one block device; returns a warning if that could not be recorded.
    pub(super) fn revoke(
        &self,
        fixed: &Fixed,
        backend: &BackendEntry,
        only: Option<BlkdevId>,
    ) -> Option<String> {
        let kept = only.map_or_else(Vec::new, |id| self.exports_beside(backend.id, id));
        let error = fixed.remote.revoke(&self.uuid(), &uuid_text(backend.uuid), &kept).err()?;
        let text = format!(
            "the permission of backend {} to be reached by other machines could not be ended: {}",
            backend.id,
            error.line()
        );
        tracing::warn!(backend = backend.id.0, "{text}");
        Some(text)
    }

    /// The exports of this host's other block devices on a backend.
    fn exports_beside(&self, backend: BackendId, id: BlkdevId) -> Vec<String> {
        let remote = self.transport.remote_blkdevs().into_iter().map(|row| row.entry);
        let own = self.transport.blkdevs().into_iter().chain(remote);
        own.filter(|entry| entry.host == self.host && entry.backend == backend && entry.id != id)
            .filter_map(|entry| Some(ExportChoice::of_row(&entry.export).ok()?.to_string()))
            .collect()
    }

    /// Records the addresses that a version without permissions served on this machine.
    pub(super) fn inherit_permissions(&self, fixed: &Fixed) {
        let ours = self.transport.blkdevs().into_iter().filter(|entry| entry.host == self.host);
        let exports = ours.filter_map(|entry| {
            let choice = ExportChoice::of_row(&entry.export).ok().filter(ExportChoice::is_remote)?;
            Some(self.remote(&self.transport.backend(entry.backend).ok()?, &choice))
        });
        match fixed.remote.inherit(&self.uuid(), exports.collect()) {
            Ok(inherited) => inherited.iter().for_each(|remote| {
                tracing::warn!(
                    transport = self.id,
                    "{} can be reached by other machines: it was served before this version, which records that as allowed; dev-stop ends it",
                    remote.export
                );
            }),
            Err(error) => tracing::error!(transport = self.id, "{error}"),
        }
    }
}

impl BackendSlot {
    /// The block device that is not served and whose export is `choice`.
    fn closed_at(&self, choice: &ExportChoice) -> Option<BlkdevId> {
        let is_it = |text: &str| ExportChoice::of_row(text).is_ok_and(|export| export == *choice);
        let closed = self.blkdevs.iter().filter(|(_, slot)| slot.export.is_none());
        closed.filter(|(_, slot)| is_it(&slot.entry.export)).map(|(&id, _)| id).next()
    }

    /// Allows the address of a block device that has a row already, and opens its export; none if `request` does not
    /// ask for that.
    pub(super) fn allow_existing(
        &mut self,
        fixed: &Fixed,
        handle: &TransportHandle,
        request: &StartBlkdev,
        choice: &ExportChoice,
    ) -> Option<Result<BlkdevInfo>> {
        let id = self.closed_at(choice).filter(|_| request.allow_remote && choice.is_remote())?;
        Some(handle.allow(fixed, &self.entry, choice).and_then(|()| self.open_again(fixed, handle, id)))
    }

    /// Allows the address of the row with this export, which the user has given with the start of the backend.
    pub(super) fn allow_row(&self, fixed: &Fixed, handle: &TransportHandle, choice: &ExportChoice) {
        let rows = handle.transport.blkdevs();
        let is_it = |row: &BlkdevEntry| {
            row.backend == self.entry.id
                && ExportChoice::of_row(&row.export).is_ok_and(|export| export == *choice)
        };
        if rows.iter().any(is_it)
            && let Err(error) = handle.allow(fixed, &self.entry, choice)
        {
            tracing::error!(backend = self.entry.id.0, "{error}");
        }
    }

    fn open_again(&mut self, fixed: &Fixed, handle: &TransportHandle, id: BlkdevId) -> Result<BlkdevInfo> {
        if let Some(entry) = self.blkdevs.get(&id).map(|slot| slot.entry.clone()) {
            self.restore_blkdev(fixed, handle, &entry);
        }
        let info = self.blkdevs.get(&id).map(|slot| slot.info(id));
        let unknown = || Error::new(ErrorKind::NotFound, format!("there is no block device {id}"));
        let info = info.ok_or_else(unknown)?;
        match &info.error {
            Some(reason) => Err(Error::new(ErrorKind::System, format!("it is allowed, but {reason}"))),
            None => Ok(info),
        }
    }
}

impl Manager {
    /// Ends the permissions of a transport that was unregistered or formatted.
    pub(super) fn revoke_transport(&self, transport: u32, uuid: &str) {
        if let Err(error) = self.fixed.remote.revoke_transport(uuid) {
            tracing::warn!(
                transport,
                "its permissions to be reached by other machines could not be ended: {error}"
            );
        }
    }
}

impl Running {
    /// The block devices that are not served although their backends are, with the reasons.
    pub(super) fn unserved(&self) -> Vec<String> {
        let up = self.backends.iter().filter(|(_, slot)| slot.run.is_some());
        let closed = |(backend, slot): (&BackendId, &BackendSlot)| {
            let reasons = slot.blkdevs.iter().filter_map(|(id, blkdev)| {
                let reason = blkdev.info(*id).error?;
                Some(format!("block device {id} of backend {backend} is not served: {reason}"))
            });
            reasons.collect::<Vec<_>>()
        };
        up.flat_map(closed).collect()
    }
}
