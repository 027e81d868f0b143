//! Names of hosts: two processes that join under one name at one moment do not both become that host.
//!
//! A host's name is *settled* once its area has a header with it. A process that got an area looks through all others before it
//! settles: of two that join at once, at least one sees the other. The one that sees a settled host of its name, or one that is about
//! to settle in an area with a smaller number, leaves. The one with the smaller number waits for a moment whether the other one
//! leaves, too, since that one may have looked earlier and settle. What a process has left that died while it joined is freed by the
//! next one that joins under the name.
//!
//! Invariants: no area is settled while another one is settled under the same name; an area that is settled is never freed here.
//!
//! Elsewhere: the decisions (`agreement`), the header (`members`).

use super::{Host, Member, Members, Proof};
use crate::{Environment, agreement::freed};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{Holding, Object};
use cbd_types::{Error, ErrorKind, HostId, Result};

/// How often a process that joins looks whether another one of its name leaves.
const LOOKS: u32 = 32;

/// A host that has, or may have, a name.
pub(super) struct Namesake {
    pub host: Host,
    pub holding: Holding,
    pub is_settled: bool,
}

impl<E: Environment> Members<E> {
    /// The hosts that have a name, whose number is `number`, and those with this number that are not settled.
    fn namesakes(&self, name: &str, number: u64) -> Result<Vec<Namesake>> {
        let mut found = Vec::new();
        for id in self.ids() {
            found.extend(self.namesake(id, name, number)?);
        }
        Ok(found)
    }

    fn namesake(&self, id: HostId, name: &str, number: u64) -> Result<Option<Namesake>> {
        let holding = self.votes(Object::Area(id.0)).known()?.holding;
        if !holding.is_held() || holding.name.get() != number {
            return Ok(None);
        }
        let host = self.host_of(id, &holding);
        // Two names can have one number.
        if !host.name.is_empty() && host.name != name {
            return Ok(None);
        }
        // Whose the tables are that have no readable header is not known: they may be this host's.
        let header = self.header(id);
        let has_tables = header.content().is_some_and(|header| header.granted == holding.granted);
        let is_settled = has_tables || header.is_lost();
        Ok(Some(Namesake { host, holding, is_settled }))
    }

    /// The host of this name that there is: one that is settled, or one that has not come to it.
    pub(super) fn former(&self, name: &str, number: u64) -> Result<Option<Namesake>> {
        for _ in 0..LOOKS {
            let mut found = self.namesakes(name, number)?;
            let mut settled = found.iter().filter(|found| found.is_settled);
            let (one, other) = (settled.next(), settled.next());
            if let (Some(one), Some(other)) = (one, other) {
                // A host that left one area and joined with another one between the two looks has been seen in both.
                if self.votes(Object::Area(one.host.id.0)).known()?.holding != one.holding {
                    continue;
                }
                return Err(two_hosts(name, one.host.id, other.host.id));
            }
            // The first one if none is settled.
            let position = found.iter().position(|found| found.is_settled).unwrap_or(0);
            return Ok((!found.is_empty()).then(|| found.swap_remove(position)));
        }
        Err(Error::new(ErrorKind::Busy, format!("host {name} leaves and joins without an end: try again")))
    }

    /// Returns once no other host has, or can get, the name of `member`, whose area is not settled. Otherwise `member` leaves.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the other one; errors of `prove`, of reading and of storing.
    pub(super) fn settle_name(
        &self,
        member: &Member,
        claim: u32,
        number: u64,
        prove: &mut Proof<'_>,
    ) -> Result<()> {
        for id in self.ids().filter(|id| *id != member.id) {
            if let Err(error) = self.outlast(member, id, number, prove) {
                self.decide_free(member.id, claim, member.incarnation)?;
                return Err(error);
            }
        }
        // A process with a smaller number may have taken this one for dead.
        self.check_member(member)
    }

    /// Returns once the area `id` has no host of the name of `member`.
    fn outlast(&self, member: &Member, id: HostId, number: u64, prove: &mut Proof<'_>) -> Result<()> {
        let mut proved = None;
        for look in 0..=LOOKS {
            let Some(other) = self.namesake(id, &member.name, number)? else { return Ok(()) };
            if other.is_settled || id < member.id {
                return Err(joined_elsewhere(member, &other));
            }
            if proved == Some(other.host.incarnation) {
                return self.free_remains(member, &other);
            }
            if look + 1 >= LOOKS && proved.is_none() {
                prove(id, Some(&other.host), &|| self.beat_of(id)).map_err(|error| {
                    if error.kind() == ErrorKind::Busy { joined_elsewhere(member, &other) } else { error }
                })?;
                proved = Some(other.host.incarnation);
            }
            E::before_shared_access();
        }
        Err(Error::new(
            ErrorKind::Busy,
            format!("other processes join as host {} without an end", member.name),
        ))
    }

    /// Frees the area of a process that died while it joined.
    fn free_remains(&self, member: &Member, other: &Namesake) -> Result<()> {
        let id = other.host.id;
        let votes = self.votes(Object::Area(id.0));
        let former = other.host.incarnation;
        let claim = votes.take_claim(self.environment.random(), member.incarnation, Some(former))?;
        votes
            .decide(&*self.environment, (claim, member.incarnation), |last| {
                Ok((last.holding == other.holding).then(|| freed(id.0)))
            })
            .map(drop)
    }
}

#[cold]
fn two_hosts(name: &str, one: HostId, other: HostId) -> Error {
    let text =
        format!("hosts {one} and {other} both have the name {name}: clear one of them, from another host");
    Error::new(ErrorKind::AlreadyExists, text)
}

#[cold]
fn joined_elsewhere(member: &Member, other: &Namesake) -> Error {
    let process = match &other.host.beat {
        Some(beat) => format!(" (process {})", beat.process),
        None => String::new(),
    };
    Error::new(
        ErrorKind::Busy,
        format!(
            "another process{process} joined as host {} at the same time, with number {}: a name belongs to one host",
            member.name, other.host.id
        ),
    )
}
