//! What the other hosts of a move answer: they accept the backend, hold their requests, and live.
//!
//! Invariants: no host holds its requests for a move that waits for a host in another move.
//!
//! Elsewhere: the steps of a move (the parent module).

use super::{ANSWER_LIMIT, HOLD_LIMIT, Move};
use crate::manager::tasks::poll_until;
use cbd_engine::{Beat, MoveAnswer, MoveRefusal};
use cbd_types::{BackendId, Error, ErrorKind, HostId, Result};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long a host may take to give another sign of life; it gives two each second.
const BEAT_LIMIT: Duration = Duration::from_millis(1500);
/// How long it may take until this host sees that another one, which was just started, lives.
const SEEN_LIMIT: Duration = Duration::from_secs(3);
/// How long a host may take part in another move before this one ends.
const FREE_LIMIT: Duration = Duration::from_secs(3);

fn silent(host: &str) -> Error {
    let text = format!(
        "host {host} gives no sign of life (host-list): start its daemon again, or clear it with host-clear; nothing was moved"
    );
    Error::new(ErrorKind::TimedOut, text)
}

/// What is wrong with the disk on the other host.
fn refused(host: &str, path: &str, why: MoveRefusal) -> Error {
    let (kind, text) = match why {
        MoveRefusal::NoDisk => (ErrorKind::NotFound, format!("host {host} does not reach a disk at {path}")),
        MoveRefusal::OtherDisk => {
            (ErrorKind::Exchanged, format!("the disk at {path} on host {host} is another one"))
        }
        MoveRefusal::NoIdentity => (
            ErrorKind::Unsupported,
            format!(
                "{path} has nothing by which two machines know it as the same disk (serial number, WWID, UUID of a partition)"
            ),
        ),
        MoveRefusal::ReadOnly => {
            (ErrorKind::ReadOnly, format!("host {host} may not write to the disk at {path}"))
        }
        MoveRefusal::Other => (ErrorKind::Stopped, format!("host {host} refuses {path}; its log says why")),
    };
    Error::new(kind, format!("{text}; nothing was moved"))
}

impl Move<'_> {
    /// Waits until the other host has accepted the backend.
    pub(super) fn wait_for_acceptance(&self) -> Result<()> {
        self.refuse_dead(&BTreeSet::from([self.to]))?;
        let transport = &self.handle.transport;
        let answer =
            || transport.answer_to_move(self.to, self.number).filter(|answer| *answer != MoveAnswer::Wanted);
        poll_until(Instant::now() + ANSWER_LIMIT, || answer().is_some() || self.refuse_stopping().is_err());
        self.refuse_stopping()?;
        let host = self.handle.host_name(self.to);
        match answer() {
            Some(MoveAnswer::Accepted | MoveAnswer::Held) => Ok(()),
            Some(MoveAnswer::Refused(why)) => {
                Err(refused(&host, &self.handle.transport.backend(self.id)?.path, why))
            }
            _ => {
                let to = BTreeSet::from([self.to]);
                self.refuse_busy(&to)?;
                if let Some(dead) = self.dead_host(&to)? {
                    return Err(silent(&dead));
                }
                let text = format!(
                    "host {host} is alive and did not answer within {} s; its log may say why; nothing was moved",
                    ANSWER_LIMIT.as_secs()
                );
                Err(Error::new(ErrorKind::TimedOut, text))
            }
        }
    }

    /// The other host, and those with block devices on the backend.
    pub(super) fn other_hosts(&self) -> Result<BTreeSet<HostId>> {
        let rows = self.handle.transport.remote_blkdevs_of_others()?;
        let on_it = rows.iter().filter(|row| row.entry.backend == self.id).map(|row| row.entry.host);
        Ok(on_it.chain([self.to]).collect())
    }

    /// Refuses a host that has given no sign of life for some seconds.
    pub(super) fn refuse_dead(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        poll_until(Instant::now() + SEEN_LIMIT, || !matches!(self.dead_host(hosts), Ok(Some(_))));
        self.dead_host(hosts)?.map_or(Ok(()), |dead| Err(silent(&dead)))
    }

    /// The name of a host that has given no sign of life for some seconds.
    fn dead_host(&self, hosts: &BTreeSet<HostId>) -> Result<Option<String>> {
        let mut seen = self.handle.hosts()?.into_iter();
        let dead = seen.find(|seen| hosts.contains(&HostId(seen.host_id)) && !seen.alive);
        Ok(dead.map(|dead| dead.hostname))
    }

    /// Refuses a host that gives no sign of life now: what it has answered a process may have said that was killed since.
    pub(super) fn refuse_silent(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        let beat = |host: HostId| {
            let (members, _) = self.handle.transport.members()?;
            members.host(host).ok().flatten().and_then(|host| host.beat)
        };
        let left = |host: &HostId| *host != self.to && self.has_left(*host);
        let before: Vec<_> =
            hosts.iter().filter(|host| !left(host)).map(|host| (*host, beat(*host))).collect();
        let lives =
            |(host, before): &(HostId, Option<Beat>)| beat(*host).is_some_and(|now| Some(now) != *before);
        poll_until(Instant::now() + BEAT_LIMIT, || before.iter().all(lives));
        let dead = before.iter().find(|one| !lives(one));
        dead.map_or(Ok(()), |(host, _)| Err(silent(&self.handle.host_name(*host))))
    }

    /// A host that takes part in another move, and that move.
    fn busy_host(&self, hosts: &BTreeSet<HostId>) -> Option<(HostId, u64, BackendId)> {
        let part = |host: &HostId| {
            let (number, backend) = self.handle.transport.other_part_of(*host, self.number)?;
            Some((*host, number, backend))
        };
        let busy: Vec<_> = hosts.iter().filter_map(part).collect();
        if busy.is_empty() {
            return None;
        }
        // What a dead host has said is over with it.
        let seen = self.handle.hosts().ok()?;
        let lives = |host: HostId| seen.iter().any(|seen| seen.host_id == host.0 && seen.alive);
        busy.into_iter().find(|(host, ..)| lives(*host))
    }

    fn refuse_busy(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        self.busy_host(hosts).map_or(Ok(()), |(host, _, backend)| {
            let host = self.handle.host_name(host);
            let text = format!(
                "host {host} takes part in the move of backend {backend}: try it again after that; nothing was moved"
            );
            Err(Error::new(ErrorKind::Busy, text))
        })
    }

    /// Waits until no host takes part in another move: it could not hold its requests. Of two moves that wait for each other the one with
    /// the larger number ends.
    pub(super) fn wait_until_free(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        let is_free = || self.busy_host(hosts).is_none() || self.refuse_stopping().is_err();
        poll_until(Instant::now() + FREE_LIMIT, is_free);
        if self.busy_host(hosts).is_some_and(|(_, other, _)| self.number < other) {
            poll_until(Instant::now() + FREE_LIMIT, is_free);
        }
        self.refuse_stopping()?;
        self.refuse_busy(hosts)
    }

    /// Lets the other hosts hold their requests.
    pub(super) fn hold_others(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        let transport = &self.handle.transport;
        transport.hold_for_move(self.number)?;
        let refusal = || match transport.answer_to_move(self.to, self.number) {
            Some(MoveAnswer::Refused(why)) => Some(why),
            _ => None,
        };
        let name = self.handle.host_name(self.to);
        let is_busy = || self.busy_host(hosts).is_some();
        let is_over =
            || refusal().is_some() || self.refuse_stopping().is_err() || self.has_left(self.to) || is_busy();
        let are_held = || hosts.iter().all(|host| self.need_not_hold(*host));
        poll_until(Instant::now() + HOLD_LIMIT, || are_held() || is_over());
        self.refuse_stopping()?;
        if self.has_left(self.to) {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("host {name} has left the transport; nothing was moved"),
            ));
        }
        if let Some(why) = refusal() {
            let host = self.handle.host_name(self.to);
            return Err(refused(&host, &transport.backend(self.id)?.path, why));
        }
        self.refuse_busy(hosts)?;
        self.refuse_unheld(hosts)
    }

    fn is_held(&self, host: HostId) -> bool {
        self.handle.transport.answer_to_move(host, self.number) == Some(MoveAnswer::Held)
    }

    /// Whether a host holds its requests, or has left, so that it has none.
    fn need_not_hold(&self, host: HostId) -> bool {
        self.is_held(host) || (host != self.to && self.has_left(host))
    }

    /// Whether a host was cleared, or has ended.
    pub(super) fn has_left(&self, host: HostId) -> bool {
        let members = self.handle.transport.members();
        members.is_some_and(|(members, _)| matches!(members.host(host), Ok(None)))
    }

    /// Refuses if a host does not hold its requests, or not any more: a process that has ended meanwhile holds nothing.
    pub(super) fn refuse_unheld(&self, hosts: &BTreeSet<HostId>) -> Result<()> {
        let Some(late) = hosts.iter().find(|host| !self.need_not_hold(**host)) else { return Ok(()) };
        let host = self.handle.host_name(*late);
        Err(Error::new(
            ErrorKind::TimedOut,
            format!(
                "host {host} does not hold its requests: see whether it is alive (host-list); one that has gone for good is cleared by host-clear"
            ),
        ))
    }
}
