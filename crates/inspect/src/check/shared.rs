//! What the hosts of a shared region have decided, and whose tables are in which area.
//!
//! Invariants: as those of the checks of other objects in two slots.
//!
//! Elsewhere: the tables of each host (`tables`).

use super::slots::{Object, Updated, read_two_slots};
use super::{Checker, PrivateTransport};
use crate::finding::{Location, Severity, SlotKind, Structure};
use cbd_format::{AreaHeader, Layout, Object as Decided, SharedLayout, Superblock, Vote};
use cbd_runtime::ProcessEnvironment;
use std::sync::Arc;

/// What the loss of a vote costs.
const VOTE_LOST: &str = "no host can find out who has it, so that no daemon opens the region: what its caches hold is kept but cannot be reached";

/// What the loss of a header costs.
const HEADER_LOST: &str = "its host cannot be opened, since the tables may be another host's: what its caches hold is kept but cannot be reached";

/// The segments that no host has: those of the groups without one. Of a group whose votes cannot be read it is not known.
pub(super) fn segments_of_no_host(transport: &PrivateTransport) -> u32 {
    let environment = Arc::new(ProcessEnvironment::new());
    let members = PrivateTransport::members_of(environment, transport.shared_region()).ok().flatten();
    let layout = transport.info().layout;
    let (Some(members), Some(parts)) = (members, layout.shared_parts()) else { return 0 };
    let free = (0..parts.groups).filter(|group| matches!(members.owner(Decided::Group(*group)), Ok(None)));
    let size_of = |group| parts.group_segments.min(layout.segment_count - group * parts.group_segments);
    free.map(size_of).sum()
}

impl Checker<'_> {
    /// The places of the parts of the region, if several hosts share it.
    fn shared_layout(&self) -> Option<SharedLayout> {
        let size = self.bytes.len();
        let places = [0, Layout::second_superblock(size)];
        let layouts = places.into_iter().filter_map(|at| {
            let bytes = self.read(at, size_of::<Superblock>())?;
            Some(Superblock::decode(&bytes)?.verify(size).ok()?.1)
        });
        layouts.into_iter().find_map(|layout| layout.shared_parts())
    }

    /// Checks the votes of all hosts, and the headers of their areas.
    pub(super) fn shared(&mut self) {
        let Some(parts) = self.shared_layout() else { return };
        let rows = (0..parts.backends).map(Decided::Backend).chain((0..parts.blkdevs).map(Decided::Blkdev));
        let areas = (0..parts.hosts).map(Decided::Area);
        for object in areas.chain(rows).chain((0..parts.groups).map(Decided::Group)) {
            for voter in 0..parts.voters(object) {
                let seed = parts.place(object, voter);
                let read = read_two_slots::<Vote>(&*self.bytes, parts.vote(object, voter), seed);
                let voter = if matches!(object, Decided::Area(_)) { "claim" } else { "host" }.to_owned()
                    + &format!(" {voter}");
                self.two_slots(
                    &read,
                    &Object {
                        structure: Structure::Vote,
                        kind: SlotKind::Vote,
                        seed,
                        name: format!("vote of {voter} on {object:?}"),
                        location: Location::default(),
                        updated: Updated::Alternately,
                        if_lost: (Severity::Fatal, VOTE_LOST),
                    },
                );
            }
        }
        for host in 0..parts.hosts {
            let seed = u64::from(host);
            let read = read_two_slots::<AreaHeader>(&*self.bytes, parts.header(host), seed);
            self.two_slots(
                &read,
                &Object {
                    structure: Structure::AreaHeader,
                    kind: SlotKind::AreaHeader,
                    seed,
                    name: format!("header of the area of host {host}"),
                    location: Location::default(),
                    updated: Updated::Both,
                    if_lost: (Severity::Fatal, HEADER_LOST),
                },
            );
        }
    }
}
