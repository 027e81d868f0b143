//! What hosts say of a move, and the numbers of that in the headers of their areas.
//!
//! Invariants: numbers never change; a reason that this program does not know is one that only the other host knows.

use crate::Environment;
use crate::transport::Transport;
use cbd_format::AreaHeader;
use cbd_format::shared::{ANSWER_ACCEPTED, ANSWER_HELD, ANSWER_REFUSED, ANSWER_SERVED, ANSWER_WANTED};
use cbd_types::{BackendId, HostId};

/// What a host says of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveAnswer {
    /// It wants to have the backend.
    Wanted,
    /// It can have the backend, and has a row for it.
    Accepted,
    /// It has no requests in flight on it, and submits none.
    Held,
    /// It has it, and serves it.
    Served,
    /// It cannot have it; or it has it, and cannot serve it.
    Refused(MoveRefusal),
}

/// Why a host cannot have a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveRefusal {
    /// It does not reach the disk.
    NoDisk,
    /// The disk that it has at the path is another one.
    OtherDisk,
    /// The disk has nothing by which two hosts know it as the same.
    NoIdentity,
    /// A reason that only that host knows.
    Other,
    /// The disk is read-only there.
    ReadOnly,
}

impl MoveRefusal {
    const ALL: [Self; 5] = [Self::NoDisk, Self::OtherDisk, Self::NoIdentity, Self::Other, Self::ReadOnly];
}

impl MoveAnswer {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Wanted => ANSWER_WANTED,
            Self::Accepted => ANSWER_ACCEPTED,
            Self::Held => ANSWER_HELD,
            Self::Served => ANSWER_SERVED,
            Self::Refused(why) => {
                let place = MoveRefusal::ALL.iter().position(|known| *known == why);
                ANSWER_REFUSED + place.unwrap_or_default() as u32
            }
        }
    }

    pub(super) fn of(code: u32) -> Option<Self> {
        match code {
            ANSWER_WANTED => Some(Self::Wanted),
            ANSWER_ACCEPTED => Some(Self::Accepted),
            ANSWER_HELD => Some(Self::Held),
            ANSWER_SERVED => Some(Self::Served),
            _ => {
                let why = code.checked_sub(ANSWER_REFUSED)? as usize;
                Some(Self::Refused(MoveRefusal::ALL.get(why).copied().unwrap_or(MoveRefusal::Other)))
            }
        }
    }
}

impl<E: Environment> Transport<E> {
    /// The number and the backend of the move in which a host takes part, if it is not the one with this number: until that has ended it
    /// takes part in no other one.
    #[must_use]
    pub fn other_part_of(&self, host: HostId, number: u64) -> Option<(u64, BackendId)> {
        let (backend, other) = self.part_of(host)?;
        (other != number).then_some((other, backend))
    }

    /// The backend and the number of the move in which a host takes part.
    pub(super) fn part_of(&self, host: HostId) -> Option<(BackendId, u64)> {
        let (members, _) = self.members()?;
        let header = members.area_header(host).filter(takes_part)?;
        let backend = header.answer_backend.get().checked_sub(1).map(BackendId)?;
        Some((backend, header.answer_number.get()))
    }

    /// The number of the last move of which this host said something, if that was one of this backend, and it says nothing now.
    #[must_use]
    pub fn ended_answer(&self, backend: BackendId) -> Option<u64> {
        let (members, member) = self.members()?;
        let is_it = |own: &AreaHeader| own.answer.get() == 0 && own.answer_backend.get() == backend.0 + 1;
        Some(members.area_header(member.id).filter(is_it)?.answer_number.get())
    }

    /// The backend of the move in which this host takes part.
    #[must_use]
    pub fn answered_backend(&self) -> Option<BackendId> {
        let (_, member) = self.members()?;
        self.part_of(member.id).map(|(backend, _)| backend)
    }
}

/// Whether a host takes part in a move: it has accepted the backend, or holds its requests.
pub(super) fn takes_part(own: &AreaHeader) -> bool {
    matches!(MoveAnswer::of(own.answer.get()), Some(MoveAnswer::Accepted | MoveAnswer::Held))
}
