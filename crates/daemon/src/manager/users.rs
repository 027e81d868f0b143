//! The block devices that are in use, for whoever is about to stop the daemon.
//!
//! Invariants: a device of which the system does not report the users counts as used, and one that a command has at this
//! moment does, too.

use super::Tables;
use super::blkdev::BlkdevSlot;
use super::slots::TransportHandle;
use crate::api::BlkdevUser;
use cbd_engine::RemoteBlkdev;
use cbd_types::Result;

/// The devices of this daemon that are in use.
pub(super) fn of(tables: &Tables) -> Vec<BlkdevUser> {
    let running = tables.iter().filter_map(|(&id, slot)| Some((id, slot.running.as_ref().ok()?)));
    let devices = running.flat_map(|(transport, running)| {
        let slots = running.backends.values().flat_map(|backend| &backend.blkdevs);
        let remotes = running.remotes.iter().map(|(id, slot)| (id, &slot.blkdev));
        slots.chain(remotes).map(move |(id, slot)| (transport, id.0, slot))
    });
    devices.filter_map(|(transport, number, slot)| user_of(transport, number, slot)).collect()
}

/// The block devices of other hosts on backends of this one. Their clients wait while no daemon runs here.
///
/// # Errors
/// Errors of reading the tables of the other hosts.
pub(super) fn of_other_hosts(handle: &TransportHandle) -> Result<Vec<BlkdevUser>> {
    let rows = handle.transport.remote_blkdevs_of_others()?;
    let user = |row: RemoteBlkdev| {
        let (id, backend, host) = (row.entry.id, row.entry.backend, handle.host_name(row.entry.host));
        BlkdevUser {
            transport_id: handle.id,
            blkdev_id: id.0,
            dev_name: format!("block device {id} of host {host}"),
            user: format!("host {host} has it on backend {backend}; dev-stop -d {id} there removes it"),
            outlives_daemon: true,
        }
    };
    Ok(rows.into_iter().map(user).collect())
}

fn user_of(transport_id: u32, blkdev_id: u32, slot: &BlkdevSlot) -> Option<BlkdevUser> {
    let (user, outlives_daemon) = match (&slot.export, &slot.left) {
        (Some(export), _) => (export.user(), export.outlives_daemon()),
        (None, _) if slot.is_taken() => (Ok(Some("a command changes it".to_owned())), false),
        // Its users wait already.
        (None, Some(left)) => (left.user(), true),
        (None, None) => return None,
    };
    let user = user.unwrap_or_else(|error| Some(format!("its users are not known: {}", error.line())))?;
    let dev_name =
        slot.export.as_ref().map_or_else(|| slot.name.clone(), |export| export.device_path.clone());
    Some(BlkdevUser { transport_id, blkdev_id, dev_name, user, outlives_daemon })
}
