//! Names of backends and blkdevs.
//!
//! Invariants: at most one backend and one blkdev of a transport have a name, and if both have it, the blkdev is the one of its
//! host that has the name of that backend: so a name leads to one device. This is checked under the lock of the tables that
//! also covers the store. A name is stored with its row in one change. A row whose field holds no valid name has none.
//!
//! Elsewhere: the rules for the text of a name (`cbd-types`).

use super::{
    Tables, Transport,
    backends::ROW as BACKEND_ROW,
    blkdevs::{ROW as BLKDEV_ROW, is_of},
    rows::{active_row, rows},
};
use crate::Environment;
use alloc::format;
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow,
    tables::{decode_name, encode_name},
};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, MutationPoint, Name, Result};

impl<E: Environment> Transport<E> {
    /// Gives a backend a name, or takes its name away.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::AlreadyExists`] if another backend, or a blkdev of another backend, has the
    /// name.
    pub fn name_backend(&self, id: BackendId, name: Option<&Name>) -> Result<()> {
        let mut tables = self.tables.lock();
        if let Some(name) = name {
            tables.refuse_backend_name(Some(id), name)?;
            self.refuse_name_of_others(name)?;
        }
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        row.keep_in_both(&self.region, BACKEND_ROW, |row| row.name = encode_name(name))?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    /// Gives a blkdev a name of its own, or takes it away: the blkdev has the name of its backend then, unless it is a
    /// [further](super::BlkdevEntry::further) one.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::AlreadyExists`] if another blkdev has the name, or a backend whose name it cannot have.
    pub fn name_blkdev(&self, id: BlkdevId, name: Option<&Name>) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.blkdevs, id.index(), |row| row.state.get(), "blkdev")?;
        let local = row.content().filter(|row| row.backend_host.get() == 0 && row.further.get() == 0);
        let backend = local.map(|row| BackendId(row.backend.get()));
        if let Some(name) = name {
            tables.refuse_blkdev_name(Some(id), backend, name)?;
            self.refuse_name_of_others(name)?;
        }
        let row = active_row(&mut tables.blkdevs, id.index(), |row| row.state.get(), "blkdev")?;
        row.keep_in_both(&self.region, BLKDEV_ROW, |row| row.name = encode_name(name))?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }
}

impl<E: Environment> Tables<E> {
    /// Refuses a name for a backend, which may not be there yet.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if another backend, or a blkdev of another backend, has it.
    pub(super) fn refuse_backend_name(&self, id: Option<BackendId>, name: &Name) -> Result<()> {
        self.refuse_name_of_backends(id, name)?;
        let is_below = |row: &BlkdevRow| {
            row.backend_host.get() == 0 && row.further.get() == 0 && Some(BackendId(row.backend.get())) == id
        };
        let mut others = self.all_blkdev_rows().filter(|(_, row)| !is_below(row));
        let taken = others.find(|(_, row)| has(&row.name, name));
        taken.map_or(Ok(()), |(id, _)| Err(taken_by(name, &format!("blkdev {id}"))))
    }

    /// Refuses a name for a blkdev of a backend; the blkdev may not be there yet.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if another blkdev, or another backend, has it.
    pub(super) fn refuse_blkdev_name(
        &self,
        id: Option<BlkdevId>,
        backend: Option<BackendId>,
        name: &Name,
    ) -> Result<()> {
        self.refuse_name_of_backends(backend, name)?;
        let mut others = self.all_blkdev_rows().filter(|(other, _)| Some(BlkdevId(*other)) != id);
        let taken = others.find(|(_, row)| has(&row.name, name));
        taken.map_or(Ok(()), |(id, _)| Err(taken_by(name, &format!("blkdev {id}"))))
    }

    /// Refuses the name of another backend than `own`.
    fn refuse_name_of_backends(&self, own: Option<BackendId>, name: &Name) -> Result<()> {
        let mut others = rows(&self.backends, |row: &BackendRow| row.state.get())
            .filter(|(id, _)| Some(BackendId(*id)) != own);
        let taken = others.find(|(_, row)| has(&row.name, name));
        taken.map_or(Ok(()), |(id, _)| Err(taken_by(name, &format!("backend {id}"))))
    }

    /// The blkdevs on backends of this host and of others.
    fn all_blkdev_rows(&self) -> impl Iterator<Item = (u32, &BlkdevRow)> {
        self.blkdev_rows().chain(self.remote_rows())
    }

    /// The blkdevs whose backend is one of this host, and still the one on which they were created.
    pub(super) fn blkdev_rows(&self) -> impl Iterator<Item = (u32, &BlkdevRow)> {
        rows(&self.blkdevs, |row: &BlkdevRow| row.state.get()).filter(|(_, row)| {
            row.backend_host.get() == 0
                && self
                    .backends
                    .get(row.backend.get() as usize)
                    .is_some_and(|backend| is_of(row, backend.content()))
        })
    }
}

fn has(field: &[u8; Name::MAX], name: &Name) -> bool {
    *field == encode_name(Some(name))
}

fn taken_by(name: &Name, who: &str) -> Error {
    let text =
        format!("{who} of this transport has the name {name} already; choose another, or rename that first");
    Error::new(ErrorKind::AlreadyExists, text)
}

/// The name in a row; none if the field holds something else, which `check` reports.
pub(super) fn name_of(field: &[u8; Name::MAX]) -> Option<Name> {
    decode_name(field).ok().flatten()
}
