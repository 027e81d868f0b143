//! What hosts say of a move, and the numbers of that in the headers of their areas.
//!
//! Invariants: numbers never change; a reason that this program does not know is one that only the other host knows.

use cbd_format::shared::{ANSWER_ACCEPTED, ANSWER_HELD, ANSWER_REFUSED, ANSWER_SERVED, ANSWER_WANTED};

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
