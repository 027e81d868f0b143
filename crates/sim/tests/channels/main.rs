//! A channel between two hosts: each request is executed as if once, in order, whatever dies.

mod data;
mod recall;

use cbd_channel::{Areas, Client, Server, ServerState};
use cbd_format::{ChannelCompletion, ChannelShape, ServerHeader, Submission};
use cbd_sim::crash::until_crash;
use cbd_sim::explorer::Tally;
use cbd_sim::hosts::{HostMemory, Medium};
use cbd_sim::{channels, from_environment};
use cbd_types::{
    AlignedBuffer, BootId, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Region,
    Request,
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
        "returned",
        "given_up",
        "damage",
        "other_data",
        "former",
        "replaced_by_former",
        "held",
        "excluded",
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

fn memory(medium: &Medium, seed: u64) -> HostMemory {
    HostMemory::new(medium, false, seed).in_boot(BootId([1; 16]))
}

fn region(medium: &Medium, seed: u64) -> Arc<Region<HostMemory>> {
    Arc::new(Region::new(memory(medium, seed)))
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
            memory.observe(areas().server + shape().completion(number as u64), 64);
            memory
                .load(areas().server + shape().completion(number as u64), &mut line)
                .expect("it does not fail");
            let found = ChannelCompletion::decode(&line).verify().expect("it is complete");
            assert_eq!(found.request.get(), request, "{entry:?}");
            assert_ne!(found.status.get(), 0, "{entry:?}");
        }
    }
}

/// Ends the server's process; the next one opens with another number.
fn restart(rig: &mut Rig, session: u64) {
    rig.taken.clear();
    rig.server = server(&rig.medium, session, shape().bytes(), GEOMETRY);
}

fn ids(requests: &[Request]) -> Vec<u64> {
    requests.iter().map(|request| request.id).collect()
}

/// Stores a line without a checksum.
fn damage(rig: &Rig, at: u64) {
    let memory = HostMemory::new(&rig.medium, false, 7);
    memory.store_line(at, &[1; 64]);
    memory.publish(at, 64);
}

/// Four writes in flight, the second and the third of which have completions that the client has not seen.
fn half_complete() -> Rig {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.submit(id, Operation::Write, ByteRange::at(id * 4096, 4096));
    }
    for Request { id, buffer, .. } in rig.taken.drain(1..3) {
        rig.server.complete(Completion { id, result: Ok(()), buffer });
    }
    rig
}

#[test]
fn a_server_that_comes_back_executes_what_has_no_completion_and_nothing_else() {
    let mut rig = half_complete();
    assert!(rig.server.is_settled() && !rig.server.is_former(0));
    restart(&mut rig, 33);
    assert!(!rig.server.is_settled(), "before it has looked");
    rig.server.poll(&mut rig.taken).expect("there is memory");
    assert_eq!(ids(&rig.taken), [0, 3]);
    assert_eq!(rig.taken[1].range, ByteRange::at(3 * 4096, 4096));
    assert!(!rig.server.is_settled() && rig.server.is_former(3) && !rig.server.is_former(4));
    // The client sees completions of the former process, and submits more.
    rig.submit(4, Operation::Read, ByteRange::at(1 << 16, 512));
    assert_eq!((rig.ended(), ids(&rig.taken)), (vec![(1, None), (2, None)], vec![0, 3, 4]));
    for Request { id, buffer, .. } in rig.taken.drain(..2) {
        rig.server.complete(Completion { id, result: Ok(()), buffer });
    }
    assert!(rig.server.is_settled(), "the read is a new request");
    rig.complete();
    assert_eq!(rig.ended(), [0, 3, 4].map(|id| (id, None)));
    // All are complete: nothing is executed again.
    restart(&mut rig, 44);
    rig.poll();
    assert!(rig.taken.is_empty() && rig.server.is_settled());
    assert_eq!(rig.client.repeated(), 0);
}

#[test]
fn an_entry_stays_until_its_request_is_complete() {
    let mut rig = Rig::new();
    rig.submit(0, Operation::Write, ByteRange::at(0, 4096));
    let entries = shape().entries();
    for id in 1..entries + 3 {
        rig.submit(id, Operation::Read, ByteRange::at(8192, 512));
        for Request { id, buffer, .. } in rig.taken.drain(1..) {
            rig.server.complete(Completion { id, result: Ok(()), buffer });
        }
        rig.poll();
    }
    assert_eq!(rig.ended().len() as u64, entries - 1, "others wait for the first one");
    restart(&mut rig, 33);
    rig.poll();
    assert_eq!(ids(&rig.taken), [0]);
    rig.complete();
    rig.complete();
    assert_eq!(rig.ended().len(), 4);
}

#[test]
fn a_completion_is_known_as_long_as_its_entry_is_there() {
    let mut rig = Rig::new();
    // After the fourth request three older ones complete, and as many later ones as there can be.
    for id in 0..4 {
        rig.submit(id, Operation::Read, ByteRange::at(id * 512, 512));
    }
    let kept: Vec<Request> = rig.taken.drain(..3).collect();
    rig.complete();
    for Request { id, buffer, .. } in kept {
        rig.server.complete(Completion { id, result: Ok(()), buffer });
    }
    rig.poll();
    let last = 3 + shape().entries();
    for id in 4..last {
        rig.submit(id, Operation::Read, ByteRange::at(8192, 512));
        rig.complete();
    }
    // The place of the next completion has parts of it.
    damage(&rig, areas().server + shape().completion(last));
    restart(&mut rig, 33);
    rig.poll();
    assert!(rig.taken.is_empty(), "{:?}", ids(&rig.taken));
    rig.submit(last, Operation::Read, ByteRange::at(8192, 512));
    assert_eq!((ids(&rig.taken), rig.server.is_former(0)), (vec![last], true), "the session continues");
    assert_eq!(rig.ended().len() as u64, last);
}

/// Lets a damaged session end well, which is continued or is not.
fn check_end(rig: &mut Rig, requests: u64, what: &str) {
    for _ in 0..3 {
        rig.poll();
        rig.client.nudge();
    }
    rig.complete();
    assert_eq!(rig.ended(), (0..requests).map(|id| (id, None)).collect::<Vec<_>>(), "{what}");
    assert!(rig.server.is_settled());
}

#[test]
fn a_session_with_damaged_lines_is_not_continued() {
    let completion = |number| areas().server + shape().completion(number);
    let copy = |process, number| areas().server + ChannelShape::copy(process, number);
    for (at, is_continued) in [
        (areas().server, true),
        (areas().server + 64, true),
        (areas().client, true),
        // Both have a copy.
        (completion(0), true),
        (completion(1), true),
        (copy(0, 1), true),
        (copy(1, 1), true),
        (areas().client + shape().entry(0), false),
        (areas().client + shape().entry(1), true),
    ] {
        let mut rig = half_complete();
        damage(&rig, at);
        restart(&mut rig, 33);
        rig.server.poll(&mut rig.taken).expect("there is memory");
        assert_eq!(rig.server.is_former(0), is_continued, "{at}");
        assert_eq!(ids(&rig.taken), if is_continued { vec![0, 3] } else { Vec::new() }, "{at}");
        check_end(&mut rig, 4, &format!("{at}"));
    }
    let mut rig = half_complete();
    rig.complete();
    rig.submit(4, Operation::Write, ByteRange::at(1 << 16, 512));
    damage(&rig, completion(1));
    restart(&mut rig, 33);
    rig.server.poll(&mut rig.taken).expect("there is memory");
    assert!(rig.taken.is_empty() && !rig.server.is_former(0), "others follow the line that is missing");
    check_end(&mut rig, 5, "a line that others follow");
}

#[test]
fn a_completion_with_damage_is_stored_again_however_many_follow_it() {
    let mut rig = half_complete();
    let [first, last] = [0, 1].map(|_| rig.taken.remove(0));
    rig.server.complete(Completion { id: first.id, result: Ok(()), buffer: first.buffer });
    damage(&rig, areas().server + shape().completion(1));
    rig.server.complete(Completion { id: last.id, result: Ok(()), buffer: last.buffer });
    rig.client.poll(&mut rig.done);
    assert_eq!(rig.ended(), [(1, None)]);
    for _ in 0..2 {
        rig.client.nudge();
        rig.poll();
    }
    assert_eq!(rig.ended(), [0, 2, 3].map(|id| (id, None)));
}

#[test]
fn a_completion_with_damage_is_found_when_another_process_has_taken_over() {
    let mut rig = half_complete();
    restart(&mut rig, 33);
    rig.server.poll(&mut rig.taken).expect("there is memory");
    damage(&rig, areas().server + shape().completion(0));
    rig.poll();
    assert_eq!(rig.ended(), [(2, None)], "the client has counted past the damage");
    for _ in 0..2 {
        rig.client.nudge();
        rig.poll();
    }
    assert_eq!(rig.ended(), [(1, None)]);
}

/// All words of a line but one, and the whole line.
fn store_without(rig: &Rig, at: u64, word: usize) -> [u8; 64] {
    let whole = <[u8; 64]>::try_from(&rig.medium.bytes()[at as usize..][..64]).expect("a line");
    store_word(rig, at, word, [0xff; 8]);
    whole
}

fn store_word(rig: &Rig, at: u64, word: usize, bytes: [u8; 8]) {
    let memory = HostMemory::new(&rig.medium, false, 7);
    memory.store(at + 8 * word as u64, &bytes);
    memory.publish(at, 64);
}

#[test]
fn a_header_that_was_stored_in_part_is_never_whole_later() {
    // The process dies while it stores the first line of its header: all words but that with its session are there.
    let mut rig = half_complete();
    let whole = store_without(&rig, areas().server, 1);
    rig.client.end(&mut rig.done);
    restart(&mut rig, 33);
    rig.server.poll(&mut rig.taken).expect("there is memory");
    // That word of the next header is the first that becomes visible.
    store_word(&rig, areas().server, 1, <[u8; 8]>::try_from(&whole[8..16]).expect("a word"));
    let found = <[u8; 64]>::try_from(&rig.medium.bytes()[areas().server as usize..][..64]).expect("a line");
    assert!(ServerHeader::decode(&found).verify().is_none(), "a client would follow it");
}

#[test]
fn a_completion_that_was_stored_in_part_counts_by_its_copy() {
    let mut rig = half_complete();
    let third = rig.taken.remove(0);
    rig.server.complete(Completion { id: third.id, result: Ok(()), buffer: third.buffer });
    store_without(&rig, areas().server + shape().completion(2), 3);
    restart(&mut rig, 33);
    rig.poll();
    assert_eq!((ids(&rig.taken), rig.ended().len()), (vec![3], 3));
    rig.complete();
    assert_eq!(rig.ended(), [(3, None)]);
}

/// Lets a process that was paused complete a request when the next one has taken over.
fn late(rig: &mut Rig) -> (Server<HostMemory>, Vec<Request>) {
    let taken = std::mem::take(&mut rig.taken);
    let next = server(&rig.medium, 33, shape().bytes(), GEOMETRY);
    let former = std::mem::replace(&mut rig.server, next);
    rig.server.poll(&mut rig.taken).expect("there is memory");
    assert_eq!(ids(&rig.taken), [0, 3]);
    (former, taken)
}

#[test]
fn a_completion_that_a_former_process_stores_late_hides_none() {
    // The client sees it before it has seen that there is another process.
    let mut rig = half_complete();
    rig.client.poll(&mut rig.done);
    let (mut former, mut taken) = late(&mut rig);
    let last = taken.pop().expect("two requests");
    former.complete(Completion { id: last.id, result: Ok(()), buffer: last.buffer });
    rig.client.poll(&mut rig.done);
    rig.complete();
    assert_eq!(rig.ended(), [0, 1, 2, 3].map(|id| (id, None)));

    // The client has seen it.
    let mut rig = half_complete();
    let (mut former, mut taken) = late(&mut rig);
    rig.poll();
    assert_eq!(rig.ended(), [1, 2].map(|id| (id, None)));
    let first = rig.taken.remove(0);
    rig.server.complete(Completion { id: first.id, result: Ok(()), buffer: first.buffer });
    let last = taken.pop().expect("two requests");
    former.complete(Completion { id: last.id, result: Ok(()), buffer: last.buffer });
    rig.poll();
    assert!(rig.ended().is_empty(), "what the former process has stored does not count");
    // A third process knows what the second one has completed.
    restart(&mut rig, 44);
    rig.poll();
    assert_eq!((ids(&rig.taken), rig.ended()), (vec![3], vec![(0, None)]));
    rig.complete();
    assert_eq!(rig.ended(), [(3, None)]);
}

#[test]
fn a_process_that_ends_while_it_takes_over_hides_no_completion() {
    for operations in 0.. {
        let mut rig = Rig::new();
        for id in 0..8 {
            rig.submit(id, Operation::Write, ByteRange::at(id * 4096, 4096));
        }
        rig.complete();
        for Request { id, buffer, .. } in rig.taken.drain(1..3) {
            rig.server.complete(Completion { id, result: Ok(()), buffer });
        }
        rig.taken.clear();
        let memory = memory(&rig.medium, 9);
        memory.die_in(operations);
        let open = || {
            let region = Arc::new(Region::new(memory.clone()));
            let mut server = Server::open(region, areas(), shape().bytes(), 33, GEOMETRY);
            server.poll(&mut rig.taken).expect("there is memory");
        };
        let has_died = until_crash(open).is_err();
        for session in [44, 55] {
            restart(&mut rig, session);
            rig.server.poll(&mut rig.taken).expect("there is memory");
            assert_eq!(ids(&rig.taken), [4, 7], "after {operations} operations");
        }
        rig.poll();
        rig.complete();
        let all: Vec<_> = (0..8).map(|id| (id, None)).collect();
        assert_eq!(rig.ended(), all, "after {operations} operations");
        if !has_died {
            assert!(operations > 100, "it takes over within {operations} operations");
            return;
        }
    }
}

#[test]
fn what_another_client_has_left_is_not_executed() {
    let mut rig = half_complete();
    rig.client = Client::open(region(&rig.medium, 3), areas(), shape(), 12).expect("there is memory");
    restart(&mut rig, 33);
    rig.poll();
    assert!(rig.taken.is_empty() && rig.server.is_settled() && rig.client.geometry().is_some());

    let mut rig = half_complete();
    rig.client.end(&mut rig.done);
    restart(&mut rig, 33);
    rig.poll();
    assert!(rig.taken.is_empty() && rig.server.is_settled());
    assert_eq!(rig.server.state(), ServerState::Alone);
}

#[test]
fn a_session_is_not_continued_after_a_crash_of_the_machine() {
    // The completion of a request was stored through the caches of one machine alone, and is lost with them; the request is not.
    let mut rig = half_complete();
    for number in 0..2 {
        damage(&rig, areas().server + shape().completion(number));
        damage(&rig, areas().server + ChannelShape::copy(23, number));
    }
    for boot in [[2; 16], [0; 16]] {
        rig.taken.clear();
        let memory = HostMemory::new(&rig.medium, false, 9).in_boot(BootId(boot));
        let region = Arc::new(Region::new(memory));
        rig.server = Server::open(region, areas(), shape().bytes(), 33, GEOMETRY);
        rig.server.poll(&mut rig.taken).expect("there is memory");
        assert!(rig.taken.is_empty() && rig.server.is_settled(), "they may be complete for long");
    }
}

#[test]
fn a_client_sees_the_size_that_the_device_has_after_a_restart() {
    let mut rig = half_complete();
    rig.taken.clear();
    let larger = Geometry { size: 2 << 20, ..GEOMETRY };
    rig.server = server(&rig.medium, 33, shape().bytes(), larger);
    rig.poll();
    assert_eq!(rig.client.geometry().map(|geometry| geometry.size), Some(2 << 20));
    assert_eq!(ids(&rig.taken), [0, 3], "the session continues");
}
