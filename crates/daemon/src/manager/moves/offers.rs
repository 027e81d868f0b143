//! What this host may do with block devices on a backend that another host moves, or has moved while this one was away.
//!
//! Elsewhere: the moves themselves (the parent module, `joining`).

use crate::manager::slots::TransportHandle;
use cbd_engine::{MoveOffer, MoveState};
use cbd_types::{BackendId, Error, ErrorKind, Result};

impl TransportHandle {
    /// Makes the rows of this host's block devices those of the hosts that have their backends, where a former process was ended between
    /// the steps of a move. Returns the backend and the number of the move in which that process took part.
    pub(in crate::manager) fn settle_blkdevs(&self) -> Option<(BackendId, u64)> {
        self.living.as_ref()?;
        let ended = self.transport.end_former_answer();
        let settled = ended.and_then(|former| self.transport.settle_blkdevs(None).map(|_has_changed| former));
        settled.unwrap_or_else(|error| {
            tracing::error!(
                transport = self.id,
                "block devices whose backends were moved are not served: {error}"
            );
            None
        })
    }

    /// Refuses a new block device on a backend that another host moves: neither host serves it before that has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]; errors of reading.
    pub(in crate::manager) fn refuse_moving(&self, id: BackendId) -> Result<()> {
        self.refuse_in(id, &[MoveState::Offered, MoveState::Hold])
    }

    /// Refuses to open a channel to a host that waits until no request is in flight.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]; errors of reading.
    pub(in crate::manager) fn refuse_held(&self, id: BackendId) -> Result<()> {
        self.refuse_in(id, &[MoveState::Hold])
    }

    fn refuse_in(&self, id: BackendId, states: &[MoveState]) -> Result<()> {
        let moves = self.transport.moves_of_others()?;
        let is_here = |offer: &MoveOffer| matches!(self.transport.has_owner(id, offer.from), Ok(true));
        let is_it =
            |offer: &&MoveOffer| offer.backend == id && states.contains(&offer.state) && is_here(offer);
        let Some(offer) = moves.iter().find(is_it) else { return Ok(()) };
        let to = self.host_name(offer.to);
        let text = format!("backend {id} is being moved to host {to}; try it again after that");
        Err(Error::new(ErrorKind::Busy, text))
    }
}
