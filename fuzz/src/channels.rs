//! One side of a channel between two hosts, whose other side stores anything in its own area.
//!
//! Entries and headers get their checksums: a fuzzer of plain bytes would never pass them.
//!
//! Invariants: a side stores in its own area alone, and hands out only requests that the device can execute, and completions of
//! requests that it was given, each of them once; without a panic, a hang, or more requests in flight than there are data places.

use crate::input::{Input, corner};
use cbd_channel::{Areas, Client, Server};
use cbd_format::channel::{CLIENT_MAGIC, SERVER_MAGIC};
use cbd_format::{ChannelCompletion, ChannelShape, ClientHeader, ServerHeader, Submission};
use cbd_sim::CrashMemory;
use cbd_types::{
    AlignedBuffer, BootId, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Region,
    Request,
};
use std::collections::BTreeSet;
use std::sync::Arc;

const GEOMETRY: Geometry = Geometry { size: 256 << 10, ..cbd_sim::channels::GEOMETRY };
const OPERATIONS: [Operation; 5] =
    [Operation::Read, Operation::Write, Operation::Flush, Operation::Discard, Operation::WriteZeroes];
/// Sessions of the client and of the server, while they follow the rules.
const CLIENT: u64 = 11;
const SERVER: u64 = 22;
/// The process of the server, while it follows the rules.
const PROCESS: u32 = 23;
/// Acts of one input.
const ACTS_MAX: usize = 200;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let Some(shape) = ChannelShape::new(1 + u32::from(flags >> 1 & 3), 4096) else { return };
    let ground = Ground::new(shape);
    if flags & 1 == 0 { serve(&ground, &mut input) } else { use_device(&ground, &mut input) }
}

/// The memory: the client's area, the server's, and a page that is none of theirs.
struct Ground {
    region: Arc<Region<CrashMemory>>,
    shape: ChannelShape,
    areas: Areas,
}

impl Ground {
    fn new(shape: ChannelShape) -> Self {
        let memory = CrashMemory::new(2 * shape.bytes() + 4096);
        // A server continues a session in the boot in which it began.
        memory.become_file(BootId([1; 16]));
        let region = Arc::new(Region::new(memory));
        Self { region, shape, areas: Areas { client: 0, server: shape.bytes() } }
    }

    /// The hostile side stores bytes in its area, as many as fit.
    fn forge(&self, area: u64, at: u64, bytes: &[u8]) {
        let at = at % self.shape.bytes();
        let length = bytes.len().min((self.shape.bytes() - at) as usize);
        let memory = self.region.memory();
        memory.store(area + at, &bytes[..length]);
        memory.fence();
    }

    /// The same with bytes of the input.
    fn forge_bytes(&self, area: u64, input: &mut Input<'_>) {
        let (at, length) = (u64::from(input.u16()), usize::from(input.u8()));
        self.forge(area, at, input.bytes(length));
    }

    fn bytes(&self, range: ByteRange) -> Vec<u8> {
        let mut bytes = vec![0; range.len() as usize];
        self.region.load(range.start, &mut bytes).unwrap_or_else(|error| panic!("{error}"));
        bytes
    }

    /// What an honest side with this area must not change.
    fn of_others(&self, own: u64) -> Vec<u8> {
        let (own, end) = (ByteRange::at(own, self.shape.bytes()), self.region.size());
        [self.bytes(ByteRange { start: 0, end: own.start }), self.bytes(ByteRange { start: own.end, end })]
            .concat()
    }
}

/// A number that is probably the one that is expected.
fn near(input: &mut Input<'_>, expected: u64) -> u64 {
    match input.u8() {
        choice @ 0..16 => corner(choice),
        16..32 => input.u64(),
        choice @ 32..48 => expected.wrapping_add(u64::from(choice)).wrapping_sub(40),
        _ => expected,
    }
}

/// A server whose client is hostile.
fn serve(ground: &Ground, input: &mut Input<'_>) {
    let (areas, shape) = (ground.areas, ground.shape);
    let open = |session| Server::open(Arc::clone(&ground.region), areas, shape.bytes(), session, GEOMETRY);
    let mut server = open(SERVER);
    let (mut taken, mut sequence) = (Vec::new(), 0);
    for _ in 0..ACTS_MAX {
        if input.is_empty() {
            break;
        }
        let act = input.u8();
        match act % 8 {
            0 => {
                let header = ClientHeader {
                    crc: 0.into(),
                    magic: CLIENT_MAGIC.into(),
                    session: near(input, CLIENT).into(),
                    again: u64::from(input.u8()).into(),
                    places: (near(input, u64::from(shape.places())) as u32).into(),
                    place_bytes: (near(input, 4096) as u32).into(),
                    is_closed: u32::from(input.u8() > 240).into(),
                    recalls: u32::from(input.u8() % 4).into(),
                    recalled: near(input, sequence).into(),
                    given_up: near(input, 1).into(),
                    reserved: [0; 8],
                };
                ground.forge(areas.client, 0, &header.sealed());
            }
            1..4 => {
                let entry = Submission {
                    data_crc: (near(input, 0x98f9_4189) as u32).into(),
                    client: near(input, CLIENT).into(),
                    server: near(input, SERVER).into(),
                    sequence: near(input, sequence).into(),
                    offset: near(input, 8192).into(),
                    length: near(input, 4096).into(),
                    place: (near(input, sequence % u64::from(shape.places())) as u32).into(),
                    operation: (input.u8() as u16 % 7).into(),
                    flags: u16::from(input.u8()).into(),
                    ..Submission::BLANK
                };
                ground.forge(areas.client, shape.entry(sequence), &entry.sealed());
                sequence += 1;
            }
            4 => ground.forge_bytes(areas.client, input),
            5 | 6 => {
                let before = ground.of_others(areas.server);
                let known = taken.len();
                server.poll(&mut taken).unwrap_or_else(|error| panic!("{error}"));
                taken[known..].iter().for_each(|request| check_request(request, shape.bytes()));
                assert!(server.in_flight() <= shape.places() as usize, "{} in flight", server.in_flight());
                assert_eq!(server.in_flight(), taken.len(), "each request is to be completed");
                let choice = input.u8();
                if !taken.is_empty() && choice < 200 {
                    let Request { id, mut buffer, .. } = taken.remove(usize::from(choice) % taken.len());
                    buffer.fill(0xa5);
                    let failed = || Err(Error::new(ErrorKind::Backing, "the disk fails"));
                    let result = if choice > 150 { failed() } else { Ok(()) };
                    server.complete(Completion { id, result, buffer });
                }
                answer_recall(&mut server, &mut taken, choice);
                assert!(ground.of_others(areas.server) == before, "the server stored in an area of others");
            }
            _ => {
                // It restarts: what it had in flight ends with the process. It continues the session or begins with this number again.
                taken.clear();
                server = open(SERVER);
                if act & 8 == 0 {
                    sequence = 0;
                }
            }
        }
    }
    settle(&mut server, taken, shape);
}

/// Sends back some requests if the client asks for that.
fn answer_recall(server: &mut Server<CrashMemory>, taken: &mut Vec<Request>, choice: u8) {
    for request in &*taken {
        let _ = server.is_given_up(request.id);
    }
    if server.take_recall() {
        taken.drain(..usize::from(choice) % (taken.len() + 1)).for_each(|one| server.send_back(one));
    }
}

/// What a former process has left is complete after some polls, whatever the client has stored.
fn settle(server: &mut Server<CrashMemory>, mut taken: Vec<Request>, shape: ChannelShape) {
    for _ in 0..=shape.entries() {
        server.poll(&mut taken).unwrap_or_else(|error| panic!("{error}"));
        for Request { id, buffer, .. } in taken.drain(..) {
            server.complete(Completion { id, result: Ok(()), buffer });
        }
    }
    assert!(server.is_settled(), "a client delays others");
}

/// A request that the server hands out can be executed.
fn check_request(request: &Request, area_bytes: u64) {
    let (operation, range) = (request.operation, request.range);
    assert!(range.start <= range.end && range.end <= GEOMETRY.size, "{operation:?} {range}");
    assert!(range.start.is_multiple_of(512) && range.end.is_multiple_of(512), "{operation:?} {range}");
    let has_data = matches!(operation, Operation::Read | Operation::Write);
    let length = if has_data { range.len() } else { 0 };
    assert_eq!(request.buffer.len() as u64, length, "{operation:?} {range}");
    assert!(length < area_bytes, "{operation:?} {range}");
    let can_be_fua = !matches!(operation, Operation::Read | Operation::Flush);
    assert!(can_be_fua || !request.fua, "{operation:?} is a FUA request");
}

/// A client whose server is hostile.
fn use_device(ground: &Ground, input: &mut Input<'_>) {
    let (areas, shape) = (ground.areas, ground.shape);
    let opened = Client::open(Arc::clone(&ground.region), areas, shape, CLIENT);
    let mut client = opened.unwrap_or_else(|error| panic!("{error}"));
    let mut given = BTreeSet::new();
    let (mut done, mut completions, mut next) = (Vec::new(), 0, 0);
    for _ in 0..ACTS_MAX {
        if input.is_empty() {
            break;
        }
        let before = ground.of_others(areas.client);
        match input.u8() % 8 {
            0 => forge_server(ground, input),
            1 | 2 => {
                let entry = ChannelCompletion {
                    crc: 0.into(),
                    data_crc: (near(input, 0x98f9_4189) as u32).into(),
                    client: near(input, CLIENT).into(),
                    server: near(input, SERVER).into(),
                    sequence: near(input, completions).into(),
                    request: near(input, completions).into(),
                    // The data has not arrived; the request is sent back.
                    status: match input.u8() {
                        low @ 0..8 => !u32::from(low % 4),
                        _ => near(input, 0) as u32,
                    }
                    .into(),
                    process: (near(input, u64::from(PROCESS)) as u32).into(),
                    reserved: [0; 16],
                };
                ground.forge(areas.server, shape.completion(completions), &entry.sealed());
                completions += 1;
            }
            3 => ground.forge_bytes(areas.server, input),
            4 | 5 => {
                let operation = OPERATIONS[usize::from(input.u8()) % 5];
                let range = ByteRange::at(u64::from(input.u8()) * 512, u64::from(input.u8() % 40) * 512);
                let has_data = matches!(operation, Operation::Read | Operation::Write);
                let buffer = AlignedBuffer::zeroed(if has_data { range.len() as usize } else { 0 });
                client.submit(Request::unmarked(next, operation, range, false, buffer), &mut done);
                given.insert((next, range.len() * u64::from(has_data)));
                next += 1;
            }
            6 => {
                // As many as it takes to look at the header.
                (0..40).for_each(|_| client.poll(&mut done));
                for Completion { id, buffer, .. } in done.drain(..) {
                    assert!(given.remove(&(id, buffer.len() as u64)), "request {id} is complete again");
                }
                assert_eq!(client.in_flight(), given.len(), "no request is lost");
                if let Some(geometry) = client.geometry() {
                    check_geometry(&geometry);
                }
                assert!(ground.of_others(areas.client) == before, "the client stored in an area of others");
            }
            _ => match input.u8() % 4 {
                0 => client.recall(),
                1 => client.give_up(|id| id % 2 == 0, &mut done),
                2 => drop(client.blocked_by()),
                _ => client.nudge(),
            },
        }
    }
}

fn forge_server(ground: &Ground, input: &mut Input<'_>) {
    let header = ServerHeader {
        crc: 0.into(),
        magic: SERVER_MAGIC.into(),
        session: near(input, SERVER).into(),
        client: near(input, CLIENT).into(),
        size: near(input, 256 << 10).into(),
        state: (near(input, 1) as u16).into(),
        sector: (near(input, 512) as u32).into(),
        physical_sector: (near(input, 4096) as u32).into(),
        atomic_unit: (near(input, 4096) as u32).into(),
        discard_granularity: (near(input, 4096) as u32).into(),
        flags: u16::from(input.u8()).into(),
        boot: 0.into(),
        process: (near(input, u64::from(PROCESS)) as u32).into(),
        next: (near(input, 0) as u32).into(),
    };
    ground.forge(ground.areas.server, 0, &header.sealed());
}

/// A device can have this geometry.
fn check_geometry(geometry: &Geometry) {
    let sector = geometry.sector;
    let is_possible = sector.is_power_of_two()
        && (512..=4096).contains(&sector)
        && geometry.size.is_multiple_of(u64::from(sector))
        && i64::try_from(geometry.size).is_ok()
        && geometry.physical_sector.is_power_of_two()
        && geometry.physical_sector >= sector
        && geometry.atomic_unit >= sector
        && geometry.discard_granularity >= sector
        && geometry.discard_granularity.is_multiple_of(sector);
    assert!(is_possible, "{geometry:?}");
}

/// Inputs from which mutations are productive: both sides with a peer that follows the rules, and what it may do.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    // 255 is the expected value of a field.
    let same = |count| vec![255; count];
    let hello = [&[0, 255, 0, 255, 255, 0, 1, 255, 255][..], &[5, 255]].concat();
    let submission = |operation: u8| [&[1][..], &same(7), &[operation, 0], &[5, 255]].concat();
    let served: Vec<u8> = (0..7).flat_map(submission).chain([5, 0, 5, 1, 6, 160]).collect();
    let ready = [&[0][..], &same(9), &[5], &same(2), &[6]].concat();
    let used: Vec<u8> =
        (0..5).flat_map(|operation| [4, operation, 1, 9, 6, 1].into_iter().chain(same(8))).collect();
    // One data place more than the areas have room for, and reads of it.
    let larger =
        [&[6, 0, 255, 0, 41, 255, 0, 5, 255][..], &[&[1][..], &same(6), &[41, 1, 0]].concat().repeat(4)]
            .concat();
    // More than a data place has room for.
    let longer = [&[0][..], &hello, &[1], &same(5), &[14, 255, 1, 0, 5, 0]].concat();
    let mut seeds = vec![[&larger[..], &[5, 3, 5, 2, 5, 1, 5, 0]].concat(), longer];
    for flags in [0, 2, 6] {
        seeds.push([&[flags][..], &hello, &served].concat());
        seeds.push([&[flags][..], &hello, &served, &[7], &hello, &served].concat());
        // Its session continues, with requests in flight.
        seeds.push([&[flags][..], &hello, &served, &[15], &served, &[5, 255, 15], &served].concat());
        seeds.push([&[flags][..], &hello, &[4, 0, 1, 40], &same(40), &served].concat());
        seeds.push([&[flags | 1][..], &ready, &used, &[6, 7, 0, 7, 1, 7, 2, 7, 3, 6]].concat());
        seeds
            .push([&[flags | 1][..], &ready, &used, &ready, &used, &[3, 0, 1, 40], &same(40), &[6]].concat());
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_the_device_of_a_server() {
        let ground = Ground::new(ChannelShape::new(4, 4096).expect("it is possible"));
        let input = seeds().swap_remove(14);
        serve(&ground, &mut Input(&input[1..]));
        let completion = ground.bytes(ByteRange::at(ground.areas.server + ground.shape.completion(3), 64));
        let line = completion.try_into().expect("a line");
        assert!(ChannelCompletion::decode(&line).verify().is_some(), "four requests are complete");
    }
}
