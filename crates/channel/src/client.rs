//! The side of a channel that submits requests.

mod recall;

use crate::Areas;
use crate::area::{
    observe_data, observe_header, observe_line, publish_data, publish_header, publish_line, reserve,
};
use crate::places::{Places, Submitted};
use crate::wire::{STATUS_AGAIN, STATUS_RETURNED, changes, geometry_of, has_data, kind_of, number_of};
use alloc::{collections::VecDeque, format, sync::Arc, vec::Vec};
use cbd_format::channel::{CLIENT_MAGIC, FLAG_FUA, FLAG_METADATA, SERVER_READY};
use cbd_format::{ChannelCompletion, ChannelShape, ClientHeader, ServerHeader, Submission, crc32c};
use cbd_types::{
    ByteRange, Class, Completion, Error, ErrorKind, Geometry, MutationPoint, Operation, Pmem, Region,
    Request, Result,
};

/// Polls without a completion between two looks at the server's header.
const IDLE_POLLS: u32 = 32;
/// How often a part is submitted because its data has not arrived as it was.
const TRIES: u32 = 4;

/// A request of the user of the channel, until all its parts are complete.
struct Whole {
    request: Request,
    parts_left: u32,
    error: Option<Error>,
    is_given_up: bool,
}

/// What one entry asks for: a request, or a piece of one whose data is longer than a data place.
#[derive(Clone, Copy)]
struct Part {
    /// Its request, in [`Client::wholes`].
    whole: usize,
    operation: Operation,
    range: ByteRange,
    /// Its number among all parts.
    order: u64,
    /// The number under which it was submitted last; parts in flight were submitted in the order of these numbers.
    sequence: u64,
    tries: u32,
    /// The server has sent it back.
    is_returned: bool,
}

impl Part {
    const fn changes(&self) -> bool {
        changes(self.operation)
    }

    /// Whether it must not be in flight together with an earlier one.
    fn waits_for(&self, earlier: &Self) -> bool {
        let waits = (self.changes() || earlier.changes()) && self.range.overlaps(&earlier.range);
        MutationPoint::ChannelOverlap.is_active() && waits
    }
}

impl Submitted for Part {
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// The session of a server, the process that has it now, and the geometry of the device.
#[derive(Clone, Copy)]
struct Served {
    session: u64,
    /// The process whose completions count.
    process: u32,
    geometry: Geometry,
}

/// The side that submits requests; used by one thread.
pub struct Client<M: Pmem> {
    region: Arc<Region<M>>,
    areas: Areas,
    shape: ChannelShape,
    session: u64,
    served: Option<Served>,
    is_closed: bool,
    /// Submissions and completions of the present sessions.
    submitted: u64,
    completed: u64,
    /// The number in the header by which all completions are asked for again.
    again: u64,
    /// The numbers in the header by which the server is asked for what it has not begun.
    recalls: u32,
    recalled: u64,
    /// The data places whose requests were given up then, one bit for each.
    given_up: u64,
    /// Requests that were given up and are not complete.
    given_up_left: usize,
    /// Whether all completions that are there are to be counted again.
    is_recounting: bool,
    idle: u32,
    /// Whether the next poll looks at the server's header in any case.
    looks_closely: bool,
    /// How often it has stored something that the server is to see.
    stores: u64,
    repeated: u64,
    /// What is in flight.
    places: Places<Part>,
    /// What is not in flight, in the order of its submission by the user.
    waiting: VecDeque<Part>,
    /// Parts that wait and that the server has sent back.
    returned: usize,
    /// Parts so far.
    parts: u64,
    wholes: Vec<Option<Whole>>,
    /// The empty places in `wholes`; there is memory for all.
    free: Vec<usize>,
}

impl<M: Pmem> Client<M> {
    /// Begins a session, with a random number that was never used before. No other process stores in its area.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without memory.
    pub fn open(region: Arc<Region<M>>, areas: Areas, shape: ChannelShape, session: u64) -> Result<Self> {
        let client = Self {
            region,
            areas,
            shape,
            session: session.max(1),
            served: None,
            is_closed: false,
            submitted: 0,
            completed: 0,
            again: 0,
            recalls: 0,
            recalled: 0,
            given_up: 0,
            given_up_left: 0,
            is_recounting: false,
            idle: 0,
            looks_closely: false,
            stores: 0,
            repeated: 0,
            places: Places::new(&shape)?,
            waiting: VecDeque::new(),
            returned: 0,
            parts: 0,
            wholes: Vec::new(),
            free: Vec::new(),
        };
        client.store_header(false);
        Ok(client)
    }

    fn store_header(&self, is_closed: bool) {
        let header = ClientHeader {
            crc: 0.into(),
            magic: CLIENT_MAGIC.into(),
            session: self.session.into(),
            again: self.again.into(),
            places: self.shape.places().into(),
            place_bytes: self.shape.place_bytes().into(),
            is_closed: u32::from(is_closed).into(),
            recalls: self.recalls.into(),
            recalled: self.recalled.into(),
            given_up: self.given_up.into(),
            reserved: [0; 8],
        };
        publish_header(&self.region, self.areas.client, &header.sealed());
    }

    /// The geometry of the device, once a server has accepted the session.
    #[must_use]
    pub fn geometry(&self) -> Option<Geometry> {
        self.served.map(|served| served.geometry)
    }

    /// Requests that were submitted and are not complete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.wholes.len() - self.free.len()
    }

    /// How often data did not come through the region as it was sent, and was asked for again: memory that keeps its promises never
    /// needs that.
    #[must_use]
    pub const fn repeated(&self) -> u64 {
        self.repeated
    }

    /// How often something was stored that the server is to see.
    #[must_use]
    pub const fn stores(&self) -> u64 {
        self.stores
    }

    /// Lets the next [poll](Self::poll) look at all that the server can have stored, also without a completion.
    pub const fn look_closely(&mut self) {
        self.looks_closely = true;
    }

    /// Submits a request. It is always accepted; what cannot be executed completes with an error. It waits while there is no server,
    /// no data place, or one before it that it must not overtake.
    pub fn submit(&mut self, mut request: Request, done: &mut Vec<Completion>) {
        let intact = request.check_data(crc32c);
        match intact.and_then(|()| self.check(&request)).and_then(|()| self.reserve_for(&request)) {
            Err(error) => done.push(completion(request, Err(error))),
            Ok(()) => self.accept(request, done),
        }
        self.send_waiting();
    }

    fn check(&self, request: &Request) -> Result<()> {
        let wanted = if has_data(request.operation) { request.range.len() } else { 0 };
        let given = request.buffer.len() as u64;
        if wanted != given {
            let text = format!("a request for {wanted} bytes came with a buffer of {given}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if self.is_closed { Err(closed()) } else { Ok(()) }
    }

    /// Pieces of a request that are submitted one by one.
    fn pieces(&self, request: &Request) -> impl Iterator<Item = ByteRange> + use<M> {
        let (range, step) = (request.range, u64::from(self.shape.place_bytes()));
        let step = if has_data(request.operation) { step } else { range.len().max(1) };
        let count = range.len().div_ceil(step).max(1);
        (0..count).map(move |number| {
            let start = range.start + number * step;
            ByteRange { start, end: range.end.min(start + step) }
        })
    }

    fn reserve_for(&mut self, request: &Request) -> Result<()> {
        let pieces = self.pieces(request).count();
        // What is in flight may have to wait again.
        self.waiting.try_reserve(pieces + self.places.count()).map_err(|_| no_memory())?;
        let taken = self.in_flight() + 1;
        reserve(&mut self.free, taken)?;
        reserve(&mut self.wholes, 1)
    }

    /// Lets the pieces of a request wait for their turn. There is memory for them.
    fn accept(&mut self, request: Request, done: &mut Vec<Completion>) {
        let is_empty = request.range.is_empty() && request.operation != Operation::Flush;
        if is_empty {
            return done.push(completion(request, Ok(())));
        }
        let operation = request.operation;
        let pieces = self.pieces(&request);
        let whole = self.free.pop().unwrap_or(self.wholes.len());
        let before = self.waiting.len();
        let part = |(range, order)| Part {
            whole,
            operation,
            range,
            order,
            sequence: 0,
            tries: 0,
            is_returned: false,
        };
        self.waiting.extend(pieces.zip(self.parts..).map(part));
        let parts_left = (self.waiting.len() - before) as u32;
        self.parts += u64::from(parts_left);
        let item = Some(Whole { request, parts_left, error: None, is_given_up: false });
        match self.wholes.get_mut(whole) {
            Some(place) => *place = item,
            None => self.wholes.push(item),
        }
    }

    /// Submits what waits and need not wait any longer. While parts wait that the server has sent back, changes get a quarter of the
    /// places: the server has no space, and other requests need none.
    fn send_waiting(&mut self) {
        if self.served.is_none() {
            return;
        }
        let changes_max = self.changes_max();
        let mut index = 0;
        while index < self.waiting.len() && self.is_entry_free() {
            let Some(place) = self.places.free() else { return };
            let part = self.waiting[index];
            let is_limited = self.returned > 0 && part.changes() && self.changes_in_flight() >= changes_max;
            if is_limited || self.has_to_wait(&part, index) {
                index += 1;
                continue;
            }
            self.waiting.remove(index);
            self.returned -= usize::from(part.is_returned);
            self.send(part, place);
        }
    }

    /// The places that changes have while the server has no space for them.
    const fn changes_max(&self) -> usize {
        self.places.count().div_ceil(4)
    }

    fn changes_in_flight(&self) -> usize {
        self.places.iter().filter(|(_, part)| part.changes()).count()
    }

    /// Whether something is in flight, or before this part in the line, that it must not overtake.
    fn has_to_wait(&self, part: &Part, index: usize) -> bool {
        let in_flight = self.places.latest().any(|earlier| part.waits_for(earlier));
        in_flight || self.waiting.range(..index).any(|earlier| part.waits_for(earlier))
    }

    /// Whether the request whose entry the next one replaces is complete. A later process of the server finds what is outstanding in
    /// the ring.
    fn is_entry_free(&self) -> bool {
        let is_used = self.places.replaced_by(self.submitted).is_some();
        !(is_used && MutationPoint::ChannelEntryKept.is_active())
    }

    /// Stores the data and the entry of a part under the next number.
    fn send(&mut self, part: Part, place: usize) {
        let part = Part { sequence: self.submitted, is_returned: false, ..part };
        self.submitted += 1;
        self.stores += 1;
        self.places.put(place, part);
        self.store_part(&part, place);
    }

    fn store_part(&self, part: &Part, place: usize) {
        let Some((served, whole)) = self.served.zip(self.wholes.get(part.whole).and_then(Option::as_ref))
        else {
            return;
        };
        let mut data_crc = 0;
        if part.operation == Operation::Write {
            let data = piece_of(&whole.request, part.range).unwrap_or_default();
            let at = self.areas.client + self.shape.data(place as u32);
            data_crc = publish_data(&self.region, at, data);
        }
        let fua = if whole.request.fua { FLAG_FUA } else { 0 };
        let metadata = if whole.request.class == Class::Metadata { FLAG_METADATA } else { 0 };
        let entry = Submission {
            data_crc: data_crc.into(),
            client: self.session.into(),
            server: served.session.into(),
            sequence: part.sequence.into(),
            offset: part.range.start.into(),
            length: part.range.len().into(),
            place: (place as u32).into(),
            operation: number_of(part.operation).into(),
            flags: (fua | metadata).into(),
            ..Submission::BLANK
        };
        let at = self.areas.client + self.shape.entry(part.sequence);
        publish_line(&self.region, MutationPoint::ChannelEntryPublish, at, &entry.sealed());
    }

    /// Moves completed requests to `done`, and submits what has waited for them. Does not block.
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut has_completed = false;
        // Bounded, whatever the server stores.
        for _ in 0..self.places.count() {
            let Some(found) = self.next_completion() else { break };
            self.completed += 1;
            has_completed = true;
            self.take(&found, done);
        }
        self.idle = if has_completed { 0 } else { self.idle + 1 };
        // The end of a session is final: a later server serves the next one.
        let looks = core::mem::take(&mut self.looks_closely) || self.idle >= IDLE_POLLS;
        if !self.is_closed && (self.served.is_none() || looks) {
            self.idle = 0;
            self.look_at_server(done);
        }
        self.send_waiting();
    }

    fn next_completion(&self) -> Option<ChannelCompletion> {
        if self.completed == self.submitted {
            return None;
        }
        let found = self.completion_at(self.completed)?;
        MutationPoint::ChannelSequence.holds(found.sequence.get() == self.completed).then_some(found)
    }

    /// The completion in the place of this number, if it counts.
    fn completion_at(&self, number: u64) -> Option<ChannelCompletion> {
        let served = self.served?;
        let line = observe_line(&self.region, self.areas.server + self.shape.completion(number))?;
        let found = ChannelCompletion::decode(&line).verify()?;
        let is_ours = found.client.get() == self.session
            && MutationPoint::ChannelServerSession.holds(found.server.get() == served.session)
            && MutationPoint::ChannelProcess.holds(found.process.get() == served.process);
        is_ours.then_some(found)
    }

    /// Another process has taken over: the client may have seen completions that a former process has stored late, in the places of others,
    /// and counts as the new one does from now on. Those that were stored by now count again: what they complete, is in flight or not.
    fn count_again(&mut self, done: &mut Vec<Completion>) {
        if !MutationPoint::ChannelCount.is_active() {
            return;
        }
        let places = self.shape.completions();
        let at = |client: &Self, place| {
            let found = client.completion_at(place)?;
            (found.sequence.get() % places == place).then_some(found)
        };
        let last = (0..places).filter_map(|place| at(self, place)).map(|found| found.sequence.get()).max();
        self.completed = last.map_or(0, |last| last + 1);
        // All up to the last one that was seen are there, if the line has no damage.
        for place in 0..places {
            if let Some(found) = at(self, place).filter(|found| Some(found.sequence.get()) <= last) {
                self.take(&found, done);
            }
        }
    }

    /// A part is complete. A completion of nothing in flight changes nothing.
    fn take(&mut self, found: &ChannelCompletion, done: &mut Vec<Completion>) {
        let Some(place) = self.places.find(found.request.get()) else { return };
        let Some(part) = self.places.take(place) else { return };
        let result = match found.status.get() {
            0 if part.operation == Operation::Read => self.copy_data(&part, place, found.data_crc.get()),
            0 => Ok(true),
            STATUS_AGAIN => Ok(false),
            STATUS_RETURNED => return self.wait_again(Part { is_returned: true, ..part }, done),
            status => Err(Error::new(kind_of(status), "the host that serves the device reported this error")),
        };
        match result {
            Ok(true) => self.end_part(&part, Ok(()), done),
            Ok(false) if part.tries + 1 < TRIES => {
                self.repeated += 1;
                self.wait_again(Part { tries: part.tries + 1, ..part }, done);
            }
            Ok(false) => {
                let text = format!("data did not come through the region as it was sent, {TRIES} times");
                self.end_part(&part, Err(Error::new(ErrorKind::Media, text).at_range(part.range)), done);
            }
            Err(error) => self.end_part(&part, Err(error), done),
        }
    }

    /// Copies the data of a read; false if it is not as the server stored it.
    fn copy_data(&mut self, part: &Part, place: usize, checksum: u32) -> Result<bool> {
        let at = self.areas.server + self.shape.data(place as u32);
        let whole = self.wholes.get_mut(part.whole).and_then(Option::as_mut);
        let into = whole.and_then(|whole| {
            let start = (part.range.start - whole.request.range.start) as usize;
            whole.request.buffer.get_mut(start..start + part.range.len() as usize)
        });
        into.map_or(Ok(true), |into| observe_data(&self.region, at, into, checksum))
    }

    fn end_part(&mut self, part: &Part, result: Result<()>, done: &mut Vec<Completion>) {
        let Some(place) = self.wholes.get_mut(part.whole) else { return };
        let Some(whole) = place else { return };
        whole.parts_left -= 1;
        whole.error = whole.error.take().or(result.err());
        if whole.parts_left == 0
            && let Some(whole) = place.take()
        {
            self.free.push(part.whole);
            self.given_up_left -= usize::from(whole.is_given_up);
            done.push(completion(whole.request, whole.error.map_or(Ok(()), Err)));
        }
    }

    /// Notices a server that has accepted the session, one that has followed it, another size of the device, and the end of the channel.
    fn look_at_server(&mut self, done: &mut Vec<Completion>) {
        let verify = |line: &_| ServerHeader::decode(line).verify();
        let Some(header) = observe_header(&self.region, self.areas.server, verify) else { return };
        if header.client.get() != self.session {
            return;
        }
        if header.state.get() != SERVER_READY {
            return self.end_all(done);
        }
        let session = header.session.get();
        let Some(geometry) = geometry_of(&header, self.shape) else { return };
        let process = header.process.get();
        let before = self.served.replace(Served { session, process, geometry });
        if let Some(before) = before.filter(|before| before.session == session) {
            if before.process != process || core::mem::take(&mut self.is_recounting) {
                self.count_again(done);
            }
            return;
        }
        (self.submitted, self.completed) = (0, 0);
        if MutationPoint::ChannelReplay.is_active() {
            self.submit_again();
        }
        if self.recalls > 0 {
            // The number of submissions was that of the former session.
            self.recall();
        }
    }

    /// Submits to a new server what its predecessor has not completed, in the same order.
    fn submit_again(&mut self) {
        let mut last = None;
        loop {
            let later = |part: &Part| last.is_none_or(|last| part.sequence > last);
            let later = self.places.iter().filter(|(_, part)| later(part));
            let Some((place, &part)) = later.min_by_key(|(_, part)| part.sequence) else { return };
            last = Some(part.sequence);
            // The numbers that are given here are not larger than any that is still to come.
            self.send(Part { tries: 0, ..part }, place);
        }
    }

    fn end_all(&mut self, done: &mut Vec<Completion>) {
        self.is_closed = true;
        self.served = None;
        self.waiting.clear();
        (self.returned, self.given_up_left) = (0, 0);
        self.places.clear();
        self.free.clear();
        for whole in self.wholes.drain(..).flatten() {
            done.push(completion(whole.request, Err(closed())));
        }
    }

    /// Stores everything again that is in flight, and asks for all completions again: for a client whose requests do not complete for
    /// long. It heals lines that failed, and costs little.
    pub fn nudge(&mut self) {
        for (place, part) in self.places.iter() {
            self.store_part(part, place);
        }
        self.again += 1;
        self.stores += 1;
        self.is_recounting = true;
        self.store_header(self.is_closed);
    }

    /// Whether the session has ended: each request completes with an error.
    #[must_use]
    pub const fn is_ended(&self) -> bool {
        self.is_closed
    }

    /// Whether no request of this session, which has ended, is executed any more. Requests that the server had begun then may have been.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let verify = |line: &_| ServerHeader::decode(line).verify();
        let header = observe_header(&self.region, self.areas.server, verify);
        header.is_some_and(|header| header.client.get() != self.session || header.state.get() != SERVER_READY)
    }

    /// Uses another area of the server from now on. No server uses the former one any more; what the one in the new area has not
    /// completed is submitted again to it.
    pub const fn follow(&mut self, server: u64) {
        self.areas.server = server;
    }

    /// Ends the session. What is in flight may still be executed until it [is over](Self::is_over), and completes with an error, as each
    /// later request does.
    pub fn end(&mut self, done: &mut Vec<Completion>) {
        self.store_header(true);
        self.end_all(done);
    }

    /// As [`end`](Self::end), for a process that may store in its area no more.
    pub fn abandon(mut self, done: &mut Vec<Completion>) {
        self.end_all(done);
    }

    /// Ends the session. What is in flight may still be executed, and has no completion.
    pub fn close(self) {
        self.store_header(true);
    }
}

/// The data of a piece of a request.
fn piece_of(request: &Request, piece: ByteRange) -> Option<&[u8]> {
    let start = (piece.start - request.range.start) as usize;
    request.buffer.get(start..start + piece.len() as usize)
}

fn completion(request: Request, result: Result<()>) -> Completion {
    Completion { id: request.id, result, buffer: request.buffer }
}

fn closed() -> Error {
    Error::new(ErrorKind::Stopped, "the host that served the device has ended that")
}

fn no_memory() -> Error {
    Error::new(ErrorKind::System, "there is no memory for the request")
}
