//! Blkdevs of a transport.

use super::{Transport, joined::RowKind, names::name_of, rows::active_row};
use crate::{
    Environment,
    slots::{InBoth, TwoSlots},
};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow, FieldText, SlotContent,
    tables::{CLASS_METADATA, STATE_ACTIVE, STATE_FREE, decode_text, encode_name},
};
use cbd_types::{BackendId, BlkdevId, Class, Error, ErrorKind, HostId, MutationPoint, Name, Result};

/// The mutation points of storing a blkdev's row durably.
pub(super) const ROW: InBoth = InBoth {
    first_fence: MutationPoint::BlkdevRowFirstFence,
    second: MutationPoint::BlkdevRowSecond,
    fence: MutationPoint::BlkdevRowFence,
};

/// The properties of a new blkdev.
#[derive(Clone, Debug)]
pub struct BlkdevSpec {
    /// The backend that it uses.
    pub backend: BackendId,
    /// The host that serves it.
    pub host: HostId,
    /// The export, as the user requested it.
    pub export: String,
    /// Whether there may be other blkdevs on the backend that are created with this, too: on this host and on others.
    pub shared: bool,
}

impl BlkdevSpec {
    /// Refuses a blkdev beside one on the backend that it cannot share it with.
    pub(super) fn refuse_beside(&self, id: BlkdevId, row: &BlkdevRow) -> Result<()> {
        let is_shared = row.shared.get() != 0;
        if self.shared && is_shared {
            return Ok(());
        }
        let reason = match (self.shared, is_shared) {
            (true, false) => "; it does not share it: stop it there and start it with --shared, too",
            (false, true) => "; it shares it with those that are started with --shared, too",
            _ => "",
        };
        let host = HostId(row.host.get());
        let whose = if host == self.host { "this host".into() } else { format!("host {host}") };
        let text = format!("blkdev {id} of {whose} stands on backend {} already{reason}", self.backend);
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Whether it is a [further](BlkdevEntry::further) one beside `own`, those of this host on the backend.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it cannot share the backend with one of them.
    pub(super) fn is_further<'a>(&self, own: impl Iterator<Item = (u32, &'a BlkdevRow)>) -> Result<bool> {
        let mut is_further = false;
        for (id, row) in own {
            self.refuse_beside(BlkdevId(id), row)?;
            is_further |= row.further.get() == 0;
        }
        Ok(is_further)
    }
}

/// A blkdev, decoded from its row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlkdevEntry {
    /// The number of its row.
    pub id: BlkdevId,
    /// The backend that it uses.
    pub backend: BackendId,
    /// The host that serves it.
    pub host: HostId,
    /// The export, as the user requested it.
    pub export: String,
    /// Whether there may be other blkdevs on its backend.
    pub shared: bool,
    /// Whether another blkdev of its host had the name and the UUID of the backend when it was created.
    pub further: bool,
    /// Its own name; none if it has none, or if the field in the table does not hold a valid one.
    pub name: Option<Name>,
    /// The class of its requests that have none.
    pub class: Class,
    /// The name of its backend, if it is its own, too.
    pub backend_name: Option<Name>,
}

impl BlkdevEntry {
    /// The name by which users know it: its own, else that of its backend.
    #[must_use]
    pub const fn shown_name(&self) -> Option<&Name> {
        match &self.name {
            Some(name) => Some(name),
            None => self.backend_name.as_ref(),
        }
    }
}

/// Whether `backend` is still the one on which a blkdev was created.
pub(super) fn is_of(row: &BlkdevRow, backend: Option<&BackendRow>) -> bool {
    backend.is_some_and(|backend| backend.state.get() == STATE_ACTIVE && backend.uuid == row.backend_uuid)
}

impl<E: Environment> Transport<E> {
    /// Creates a blkdev on a backend.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for the backend; [`ErrorKind::Busy`] if there is a blkdev on it and not both are `shared`;
    /// [`ErrorKind::NoSpace`] if the table is full.
    pub fn create_blkdev(&self, spec: &BlkdevSpec) -> Result<BlkdevId> {
        self.create_named_blkdev(spec, None)
    }

    /// As [`create_blkdev`](Self::create_blkdev), with a name of its own.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::AlreadyExists`] if another blkdev, or another backend, has the name.
    pub fn create_named_blkdev(&self, spec: &BlkdevSpec, name: Option<&Name>) -> Result<BlkdevId> {
        self.backend(spec.backend)?;
        let export = FieldText::new("export", &spec.export)?;
        let others = if spec.shared { self.shared_with(spec)? } else { Vec::new() };
        let mut tables = self.tables.lock();
        let is_further =
            spec.is_further(tables.blkdev_rows().filter(|(_, row)| row.backend.get() == spec.backend.0))?;
        self.refuse_served(&tables, spec.backend, &others)?;
        if let Some(name) = name {
            tables.refuse_blkdev_name(None, Some(spec.backend).filter(|_| !is_further), name)?;
            self.refuse_name_of_others(name)?;
        }
        let backend_uuid =
            tables.backends[spec.backend.index()].content().map_or([0; 16], |backend| backend.uuid);
        let row =
            self.free_row(&mut tables, RowKind::Blkdev, |tables| &tables.blkdevs, |row| row.state.get())?;
        let ownership = tables.blkdevs[row].content().map_or(1, |old| old.ownership.get() + 1);
        tables.blkdevs[row].keep_in_both(&self.region, ROW, |row| {
            row.clear();
            row.state = STATE_ACTIVE.into();
            row.host = spec.host.0.into();
            row.backend = spec.backend.0.into();
            row.ownership = ownership.into();
            row.backend_uuid = backend_uuid;
            row.shared = u32::from(spec.shared).into();
            row.further = u32::from(is_further).into();
            row.name = encode_name(name);
            export.write(&mut row.export_length, &mut row.export);
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        Ok(BlkdevId(row as u32))
    }

    /// All blkdevs whose backend is still the one on which they were created.
    pub fn blkdevs(&self) -> Vec<BlkdevEntry> {
        let tables = self.tables.lock();
        tables
            .blkdev_rows()
            .map(|(id, row)| {
                let backend = tables.backends.get(row.backend.get() as usize);
                blkdev_entry(id, row, backend.and_then(TwoSlots::content))
            })
            .collect()
    }

    /// Rows that a blkdev may have used, and of which both copies are damaged.
    pub fn lost_blkdevs(&self) -> Vec<BlkdevId> {
        let tables = self.tables.lock();
        let rows = (0..).map(BlkdevId).zip(&tables.blkdevs);
        rows.filter(|(_, row)| row.is_lost()).map(|(id, _)| id).collect()
    }

    /// Stores the class of a blkdev's requests that have none.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn set_blkdev_class(&self, id: BlkdevId, class: Class) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.blkdevs, id.index(), |row| row.state.get(), "blkdev")?;
        let class = if class == Class::Metadata { CLASS_METADATA } else { 0 };
        row.keep_in_both(&self.region, ROW, |row| row.class = class.into())?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    /// Removes a blkdev.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn remove_blkdev(&self, id: BlkdevId) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.blkdevs, id.index(), |row| row.state.get(), "blkdev")?;
        row.keep_in_both(&self.region, ROW, |row| row.state = STATE_FREE.into())?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        self.release_unused(&mut tables);
        Ok(())
    }
}

/// A blkdev from its row and that of its backend.
pub(super) fn blkdev_entry(id: u32, row: &BlkdevRow, backend: Option<&BackendRow>) -> BlkdevEntry {
    BlkdevEntry {
        id: BlkdevId(id),
        backend: BackendId(row.backend.get()),
        host: HostId(row.host.get()),
        export: decode_text("export", row.export_length, &row.export).unwrap_or_default(),
        shared: row.shared.get() != 0,
        name: name_of(&row.name),
        // A class of a later version is one that this program cannot use: only speed depends on it.
        class: if row.class.get() == CLASS_METADATA { Class::Metadata } else { Class::Unmarked },
        further: row.further.get() != 0,
        backend_name: backend.filter(|_| row.further.get() == 0).and_then(|backend| name_of(&backend.name)),
    }
}
