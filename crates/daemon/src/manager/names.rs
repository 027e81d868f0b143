//! Names of backends and block devices, and the class of a block device: who has a name, and changes while clients use the
//! device.
//!
//! Invariants: the row of the region is changed first; a crash before the links are moved leaves links of the former name,
//! which the next daemon removes before it makes any.
//!
//! Elsewhere: which names are free (`cbd-engine`), the links (`exports/labels`).

use super::backend::BackendSlot;
use super::blkdev::{self, BlkdevSlot, described};
use super::slots::{TakenSlot, TransportHandle};
use super::transport::{Running, running};
use super::{Fixed, Manager};
use crate::api::{BlkdevChange, BlkdevClass, BlkdevInfo, NumberOrName};
use crate::exports::{device_name, labels};
use crate::settings::changed_name;
use cbd_engine::BlkdevEntry;
use cbd_types::{BlkdevId, Error, ErrorKind, Name, Result};

/// Names that an error lists.
const LISTED_MAX: usize = 8;

impl Manager {
    /// The number of a backend of this host.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] with the names that exist; if the transport is not up, its error.
    pub(super) fn number_of_backend(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        let name = match backend {
            NumberOrName::Number(number) => return Ok(*number),
            NumberOrName::Name(name) => name,
        };
        let (known, handle) = {
            let tables = self.tables()?;
            let running = running(&tables, transport)?;
            (backends(running), running.living.is_some().then(|| running.handle(transport)))
        };
        let number = found("backend", "backend-list", transport, name, known);
        let (Err(error), Some(handle)) = (&number, handle) else { return number };
        // Without the lock: this reads the region.
        let others = handle.entries_of_others();
        let Some(other) = others.iter().find(|entry| entry.name.as_ref() == Some(name)) else {
            return number;
        };
        let text = format!(
            "backend {name} ({}) is on host {}: run the command there, or move the backend here (backend-move)",
            other.id,
            handle.host_name(other.host)
        );
        Err(Error::new(error.kind(), text))
    }

    /// The number of a backend of this host, or of another host of a shared region.
    ///
    /// # Errors
    /// As [`number_of_backend`](Self::number_of_backend).
    pub(super) fn number_of_any_backend(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        let name = match backend {
            NumberOrName::Number(number) => return Ok(*number),
            NumberOrName::Name(name) => name,
        };
        let (mut known, handle) = {
            let tables = self.tables()?;
            let running = running(&tables, transport)?;
            (backends(running), running.living.is_some().then(|| running.handle(transport)))
        };
        let Some(handle) = handle else { return found("backend", "backend-list", transport, name, known) };
        // Without the lock: this reads the region.
        known.extend(handle.entries_of_others().into_iter().map(|entry| (entry.id.0, entry.name)));
        found("backend", "backend-list --all", transport, name, known)
    }

    /// The number of a block device of this host.
    ///
    /// # Errors
    /// As [`number_of_backend`](Self::number_of_backend).
    pub(super) fn number_of_blkdev(&self, transport: u32, blkdev: &NumberOrName) -> Result<u32> {
        let name = match blkdev {
            NumberOrName::Number(number) => return Ok(*number),
            NumberOrName::Name(name) => name,
        };
        let tables = self.tables()?;
        found("block device", "dev-list", transport, name, blkdevs(running(&tables, transport)?))
    }

    /// Changes a block device.
    pub(super) fn blkdev_change(
        &self,
        transport: u32,
        id: BlkdevId,
        change: &BlkdevChange,
    ) -> Result<BlkdevInfo> {
        let name = changed_name(change.name.as_deref())?;
        let backend = {
            let tables = self.tables()?;
            let running = running(&tables, transport)?;
            if running.remotes.contains_key(&id) {
                drop(tables);
                return self.remote_change(transport, id, name, change.class);
            }
            let found = running.backends.iter().find(|(_, slot)| slot.blkdevs.contains_key(&id));
            *found.ok_or_else(|| blkdev::unknown(id))?.0
        };
        let mut taken = self.take_slot(transport, backend, "its block device is being changed")?;
        let result = name
            .map_or(Ok(()), |name| taken.name_blkdev(id, name.as_ref()))
            .and_then(|()| change.class.map_or(Ok(()), |class| taken.set_blkdev_class(id, class)));
        let info = taken.slot.blkdevs.get(&id).map(|slot| slot.info(id));
        self.put_back(taken);
        result?;
        info.ok_or_else(|| blkdev::unknown(id))
    }
}

impl TakenSlot {
    /// Gives the backend a name, or takes it away; a block device without a name of its own follows.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if another object of the transport has the name.
    pub(super) fn name_backend(&mut self, name: Option<&Name>) -> Result<()> {
        let Self { handle, id, slot, .. } = self;
        // 1. The row. 2. The links.
        handle.transport.name_backend(*id, name)?;
        slot.entry.name = name.cloned();
        slot.take_names(handle);
        tracing::info!(transport = handle.id, backend = id.0, "{}", renamed(name));
        Ok(())
    }

    /// Sets the class of the requests of a block device that have none, from the next request on.
    fn set_blkdev_class(&mut self, id: BlkdevId, class: BlkdevClass) -> Result<()> {
        let Self { handle, slot, .. } = self;
        if !slot.blkdevs.contains_key(&id) {
            return Err(blkdev::unknown(id));
        }
        handle.store_blkdev_class(id, class)?;
        slot.take_names(handle);
        if let Some(run) = &slot.run {
            run.device_of(id).set_class(class.into());
        }
        Ok(())
    }

    fn name_blkdev(&mut self, id: BlkdevId, name: Option<&Name>) -> Result<()> {
        let Self { handle, slot, .. } = self;
        if !slot.blkdevs.contains_key(&id) {
            return Err(blkdev::unknown(id));
        }
        // 1. The row. 2. The links.
        handle.store_blkdev_name(id, name)?;
        slot.take_names(handle);
        Ok(())
    }
}

impl BackendSlot {
    /// Reads the names and classes of its block devices from the region, and moves their links.
    fn take_names(&mut self, handle: &TransportHandle) {
        for entry in handle.transport.blkdevs() {
            if let Some(slot) = self.blkdevs.get_mut(&entry.id) {
                slot.take_entry(handle.id, entry);
            }
        }
    }
}

impl BlkdevSlot {
    /// Takes its row as it is now, and moves its links.
    pub fn take_entry(&mut self, transport: u32, entry: BlkdevEntry) {
        self.entry = entry;
        if let Some(labels) = self.export.as_mut().and_then(|export| export.labels_mut()) {
            labels.rename(self.entry.shown_name());
            if let Some(problem) = labels.problem() {
                tracing::warn!(transport, blkdev = self.entry.id.0, "{problem}");
            }
        }
    }
}

impl TransportHandle {
    pub(super) fn store_blkdev_name(&self, id: BlkdevId, name: Option<&Name>) -> Result<()> {
        self.transport.name_blkdev(id, name)?;
        tracing::info!(transport = self.id, blkdev = id.0, "{}", renamed(name));
        Ok(())
    }

    pub(super) fn store_blkdev_class(&self, id: BlkdevId, class: BlkdevClass) -> Result<()> {
        self.transport.set_blkdev_class(id, class.into())?;
        let name = class.name();
        tracing::info!(transport = self.id, blkdev = id.0, "the class of its requests is {name} now");
        Ok(())
    }
}

impl TransportHandle {
    /// Removes links of this host's block devices under names that they do not have any more.
    pub(super) fn remove_former_links(&self, fixed: &Fixed) {
        let own = self.transport.blkdevs().into_iter().filter(|entry| entry.host == self.host);
        let own = own.filter_map(|entry| Some((self.transport.backend(entry.backend).ok()?.uuid, entry)));
        let remote = self.transport.remote_blkdevs().into_iter().map(|row| (row.backend_uuid, row.entry));
        for (uuid, entry) in own.chain(remote) {
            let device = device_name(self.id, entry.id.0);
            labels::remove_former(&fixed.context, &device, &described(self.id, &uuid, &entry));
        }
    }
}

fn renamed(name: Option<&Name>) -> String {
    name.map_or_else(
        || "it has no name of its own any more".to_owned(),
        |name| format!("its name is {name} now"),
    )
}

/// The numbers of the backends, each with its name.
fn backends(running: &Running) -> Vec<(u32, Option<Name>)> {
    running.backends.iter().map(|(id, slot)| (id.0, slot.entry.name.clone())).collect()
}

/// The numbers of the block devices, each with its name.
fn blkdevs(running: &Running) -> Vec<(u32, Option<Name>)> {
    let slots = running.backends.values().flat_map(|slot| &slot.blkdevs);
    let remotes = running.remotes.iter().map(|(id, slot)| (id, &slot.blkdev));
    slots.chain(remotes).map(|(id, slot)| (id.0, slot.entry.shown_name().cloned())).collect()
}

/// The only one with this name.
fn found(
    what: &str,
    list: &str,
    transport: u32,
    name: &Name,
    objects: Vec<(u32, Option<Name>)>,
) -> Result<u32> {
    let mut numbers =
        objects.iter().filter(|(_, known)| known.as_ref() == Some(name)).map(|(number, _)| *number);
    match (numbers.next(), numbers.next()) {
        (Some(number), None) => Ok(number),
        (Some(first), Some(second)) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{what} {first} and {what} {second} of transport {transport} have the name {name}; name it by its number"
            ),
        )),
        (None, _) => {
            let names: Vec<&str> =
                objects.iter().filter_map(|(_, known)| Some(known.as_ref()?.as_str())).collect();
            let known = match names.len() {
                0 => "none has a name".to_owned(),
                count if count <= LISTED_MAX => format!("there are {}", names.join(", ")),
                count => {
                    format!("there are {} and {} more", names[..LISTED_MAX].join(", "), count - LISTED_MAX)
                }
            };
            Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "there is no {what} with the name {name} on transport {transport}: {known}; {list} shows all"
                ),
            ))
        }
    }
}
