//! A channel between two hosts: each request is executed as if once, in order, whatever dies.

use cbd_channel::{Areas, Client, Server, ServerState};
use cbd_format::{ChannelCompletion, ChannelShape, Submission};
use cbd_sim::explorer::Tally;
use cbd_sim::hosts::{HostMemory, Medium};
use cbd_sim::{channels, from_environment};
use cbd_types::{
    AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Region, Request,
};
use std::sync::Arc;

#[test]
fn requests_complete_once_and_in_order_whatever_dies() {
    let mut all = Tally::default();
    for seed in 1..=from_environment("CBD_SEEDS", 30) {
        all.add(channels::explore(seed, None));
    }
    assert!(all.findings.is_empty(), "{:?}", all.findings);
    // The test proves nothing unless these events occur.
    let names = [
        "completed",
        "client_done",
        "client_death",
        "server_death",
        "server_stop",
        "settling",
        "error",
        "nudge",
        "damage",
    ];
    for name in names {
        let count = all.faults.get(name);
        assert!(count.is_some_and(|count| *count > 0), "{name} never happened: {:?}", all.faults);
    }
}

const GEOMETRY: Geometry = Geometry { size: 1 << 20, ..channels::GEOMETRY };

/// A channel with four places of 4 KiB, and what its sides see.
struct Rig {
    medium: Medium,
    client: Client<HostMemory>,
    server: Server<HostMemory>,
    taken: Vec<Request>,
    done: Vec<Completion>,
}

fn shape() -> ChannelShape {
    ChannelShape::new(4, 4096).expect("it is possible")
}

fn areas() -> Areas {
    Areas { client: 0, server: shape().bytes() }
}

fn region(medium: &Medium, seed: u64) -> Arc<Region<HostMemory>> {
    Arc::new(Region::new(HostMemory::new(medium, false, seed)))
}

fn server(medium: &Medium, session: u64, area_bytes: u64, geometry: Geometry) -> Server<HostMemory> {
    Server::open(region(medium, session), areas(), area_bytes, session, geometry)
}

impl Rig {
    fn new() -> Self {
        Self::with(shape().bytes(), GEOMETRY)
    }

    fn with(area_bytes: u64, geometry: Geometry) -> Self {
        let medium = Medium::new(2 * shape().bytes());
        let client = Client::open(region(&medium, 1), areas(), shape(), 11).expect("there is memory");
        let server = server(&medium, 22, area_bytes, geometry);
        let mut rig = Self { medium, client, server, taken: Vec::new(), done: Vec::new() };
        rig.poll();
        rig
    }

    /// Lets both sides look at all that the other one has stored.
    fn poll(&mut self) {
        for _ in 0..100 {
            self.server.poll(&mut self.taken).expect("there is memory");
            self.client.poll(&mut self.done);
        }
    }

    fn submit(&mut self, id: u64, operation: Operation, range: ByteRange) {
        let has_data = matches!(operation, Operation::Read | Operation::Write);
        let buffer = AlignedBuffer::zeroed(if has_data { range.len() as usize } else { 0 });
        self.client.submit(Request::unmarked(id, operation, range, false, buffer), &mut self.done);
        self.poll();
    }

    /// Completes all that the server has taken.
    fn complete(&mut self) {
        for Request { id, buffer, .. } in self.taken.drain(..) {
            self.server.complete(Completion { id, result: Ok(()), buffer });
        }
        self.poll();
    }

    /// The requests that are complete, with the kinds of their errors.
    fn ended(&mut self) -> Vec<(u64, Option<ErrorKind>)> {
        let mut ended: Vec<_> =
            self.done.drain(..).map(|done| (done.id, done.result.err().map(|error| error.kind()))).collect();
        ended.sort_by_key(|(id, _)| *id);
        ended
    }
}

#[test]
fn a_server_that_ends_ends_its_clients_requests_and_takes_no_more() {
    let mut rig = Rig::new();
    for id in 0..6 {
        rig.submit(id, Operation::Write, ByteRange::at(id * 4096, 4096));
    }
    assert_eq!((rig.taken.len(), rig.client.in_flight()), (4, 6), "two wait for a data place");
    let next = server(&rig.medium, 33, shape().bytes(), GEOMETRY);
    std::mem::replace(&mut rig.server, next).close();
    for _ in 0..100 {
        rig.client.poll(&mut rig.done);
    }
    let stopped = |id| (id, Some(ErrorKind::Stopped));
    assert_eq!(rig.ended(), (0..6).map(stopped).collect::<Vec<_>>());
    rig.submit(6, Operation::Read, ByteRange::at(0, 512));
    assert_eq!((rig.ended(), rig.client.geometry()), (vec![stopped(6)], None));
}

#[test]
fn a_server_is_alone_when_its_client_has_ended() {
    let mut rig = Rig::new();
    assert_eq!(rig.server.state(), ServerState::Serving);
    rig.submit(0, Operation::Flush, ByteRange::at(0, 0));
    rig.client.close();
    for _ in 0..100 {
        rig.server.poll(&mut rig.taken).expect("there is memory");
    }
    assert_eq!((rig.server.state(), rig.server.in_flight()), (ServerState::Settling, 1));
    rig.server.complete(Completion { id: rig.taken[0].id, result: Ok(()), buffer: AlignedBuffer::default() });
    rig.server.poll(&mut rig.taken).expect("there is memory");
    assert_eq!(rig.server.state(), ServerState::Alone);
}

#[test]
fn a_client_whose_area_is_larger_than_the_servers_is_refused() {
    let mut rig = Rig::with(shape().bytes() - 4096, GEOMETRY);
    assert_eq!((rig.client.geometry(), rig.server.state()), (None, ServerState::Alone));
    rig.submit(0, Operation::Read, ByteRange::at(0, 512));
    assert_eq!(rig.ended(), [(0, Some(ErrorKind::Stopped))]);
}

#[test]
fn a_geometry_that_no_device_has_is_not_served() {
    let mut rig = Rig::with(shape().bytes(), Geometry { sector: 0, ..GEOMETRY });
    assert_eq!(rig.client.geometry(), None);
    rig.submit(0, Operation::Read, ByteRange::at(0, 512));
    assert!(rig.ended().is_empty() && rig.taken.is_empty(), "it waits for a server");
}

#[test]
fn a_long_request_is_complete_with_its_last_piece_and_has_the_error_of_any() {
    let mut rig = Rig::new();
    assert_eq!(rig.client.geometry(), Some(Geometry { atomic_unit: 4096, ..GEOMETRY }));
    rig.submit(7, Operation::Read, ByteRange::at(512, 9000 / 512 * 512));
    assert_eq!(rig.taken.iter().map(|piece| piece.range.len()).collect::<Vec<_>>(), [4096, 4096, 512]);
    let first = rig.taken.remove(0);
    let error = Err(Error::new(ErrorKind::Backing, "the disk fails"));
    rig.server.complete(Completion { id: first.id, result: error, buffer: first.buffer });
    rig.poll();
    assert!(rig.ended().is_empty());
    rig.complete();
    assert_eq!(rig.ended(), [(7, Some(ErrorKind::Backing))]);
    // Neither whole sectors nor the right buffer are up to the client's user alone.
    rig.submit(8, Operation::Write, ByteRange::at(1, 512));
    let short =
        Request::unmarked(9, Operation::Write, ByteRange::at(0, 512), false, AlignedBuffer::zeroed(511));
    rig.client.submit(short, &mut rig.done);
    rig.submit(10, Operation::Discard, ByteRange::at(1 << 20, 512));
    let refused =
        [(8, ErrorKind::InvalidArgument), (9, ErrorKind::InvalidArgument), (10, ErrorKind::OutOfRange)];
    assert_eq!(rig.ended(), refused.map(|(id, kind)| (id, Some(kind))));
}

#[test]
fn an_entry_that_makes_no_sense_fails_alone() {
    let good = Submission {
        client: 11.into(),
        server: 22.into(),
        operation: 1.into(),
        length: 512.into(),
        ..Submission::BLANK
    };
    let bad = [
        Submission { operation: 0.into(), ..good },
        Submission { operation: 6.into(), ..good },
        Submission { place: 4.into(), ..good },
        Submission { place: u32::MAX.into(), ..good },
        Submission { length: 8192.into(), ..good },
        Submission { length: 511.into(), ..good },
        Submission { offset: 1.into(), ..good },
        Submission { offset: (1 << 20).into(), ..good },
        Submission { offset: u64::MAX.into(), length: u64::MAX.into(), ..good },
        Submission { operation: 3.into(), ..good },
    ];
    for entry in bad {
        let mut rig = Rig::new();
        let memory = HostMemory::new(&rig.medium, false, 5);
        let second = Submission { sequence: 1.into(), ..good };
        let third = Submission { sequence: 2.into(), ..good };
        for (number, entry) in [entry, second, third].into_iter().enumerate() {
            let at = shape().entry(number as u64);
            memory.store_line(at, &entry.sealed());
            memory.publish(at, 64);
        }
        for _ in 0..10 {
            rig.server.poll(&mut rig.taken).expect("there is memory");
        }
        assert_eq!(rig.taken.iter().map(|request| request.id).collect::<Vec<_>>(), [1], "{entry:?}");
        // The third one has the data place of the second.
        for (number, request) in [0, 2].into_iter().enumerate() {
            let mut line = [0; 64];
            memory.observe(areas().server + shape().entry(number as u64), 64);
            memory.load(areas().server + shape().entry(number as u64), &mut line).expect("it does not fail");
            let found = ChannelCompletion::decode(&line).verify().expect("it is complete");
            assert_eq!(found.request.get(), request, "{entry:?}");
            assert_ne!(found.status.get(), 0, "{entry:?}");
        }
    }
}
