//! The side of a channel that executes requests.

use crate::Areas;
use crate::area::{
    clear_torn, observe_data, observe_header, observe_line, observe_unverified, publish_data, publish_header,
    publish_line, reserve,
};
use crate::places::{Places, Submitted};
use crate::resume::{self, BLANK, Former, Left, Line};
use crate::wire::{STATUS_AGAIN, STATUS_RETURNED, changes, has_data, header_of, operation_of, status_of};
use alloc::{collections::VecDeque, format, sync::Arc, vec::Vec};
use cbd_format::channel::{FLAG_FUA, FLAG_METADATA, SERVER_CLOSED, SERVER_READY, boot_number};
use cbd_format::{ChannelCompletion, ChannelShape, ClientHeader, LINE, ServerHeader, Submission};
use cbd_types::{
    ByteRange, CHECKSUM_BLOCK, Class, Completion, Error, ErrorKind, Geometry, MutationPoint, Operation, Pmem,
    Region, Request, Result, SpareBuffers,
};

/// Polls without a submission between two looks at the client's header.
const IDLE_POLLS: u32 = 32;
/// Bytes of buffers that are kept for later requests.
const SPARE_BYTES: usize = 4 << 20;

/// Whom a server serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ServerState {
    /// There is no client yet.
    Alone,
    /// A client has a session.
    Serving,
    /// The client's session has ended, or another one is to begin, and requests of the former one are in flight.
    Settling,
}

/// The session of a client, with the shape that it chose.
struct Session {
    client: u64,
    shape: ChannelShape,
    /// Submissions that were taken, and completions that were stored.
    taken: u64,
    completed: u64,
    /// [`ClientHeader::again`], as it was last answered.
    again: u64,
    /// [`ClientHeader::recalls`], as it was last answered.
    recalls: u32,
    /// [`ClientHeader::recalled`] of a recall that was not answered.
    recalled: Option<u64>,
    /// [`ClientHeader::given_up`], and the number of submissions then.
    given_up: (u64, u64),
    is_ending: bool,
    /// What was handed out and is not complete.
    places: Places<InFlight>,
    /// The last completions, by their place in the ring.
    lines: Vec<Line>,
    /// Requests without a completion that a former process has left and that are still to be handed out, in order.
    outstanding: VecDeque<Submission>,
    /// The number of the first submission that a former process cannot have taken.
    resumed: u64,
}

#[derive(Clone, Copy)]
struct InFlight {
    sequence: u64,
    operation: Operation,
}

impl Submitted for InFlight {
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Session {
    fn new(header: &ClientHeader, shape: ChannelShape) -> Result<Self> {
        let mut lines = Vec::new();
        reserve(&mut lines, shape.completions() as usize)?;
        lines.resize(shape.completions() as usize, [0; LINE as usize]);
        let left = Left { taken: 0, completed: 0, lines, outstanding: VecDeque::new() };
        // Numbers of submissions in the header are of another session.
        Ok(Self { recalled: None, given_up: (0, 0), ..Self::from(header, shape, left)? })
    }

    /// A session that continues.
    fn from(header: &ClientHeader, shape: ChannelShape, left: Left) -> Result<Self> {
        Ok(Self {
            client: header.session.get(),
            shape,
            taken: left.taken,
            completed: left.completed,
            again: header.again.get(),
            recalls: header.recalls.get(),
            // It may have asked a former process.
            recalled: (header.recalls.get() > 0).then(|| header.recalled.get()),
            given_up: (header.given_up.get(), header.recalled.get()),
            is_ending: false,
            places: Places::new(&shape)?,
            lines: left.lines,
            outstanding: left.outstanding,
            resumed: left.taken,
        })
    }

    /// Notices that the client asks for its requests.
    fn note_recall(&mut self, header: &ClientHeader) {
        let recalls = header.recalls.get();
        if core::mem::replace(&mut self.recalls, recalls) != recalls {
            self.recalled = Some(header.recalled.get());
            self.given_up = (header.given_up.get(), header.recalled.get());
        }
    }

    /// Whether a change of a former process is still to be handed out or in flight.
    fn has_former(&self) -> bool {
        let mut to_come = self.outstanding.iter().filter(|_| !self.is_ending);
        let mut in_flight = self.places.iter().filter(|(_, one)| one.sequence < self.resumed);
        to_come.any(|found| operation_of(found.operation.get()).is_none_or(changes))
            || in_flight.any(|(_, one)| changes(one.operation))
    }
}

/// The side that executes requests; used by one thread. The identifier of a request that it hands out is that of the submission.
pub struct Server<M: Pmem> {
    region: Arc<Region<M>>,
    areas: Areas,
    /// Bytes of each area.
    area_bytes: u64,
    session: u64,
    /// The number of this process in completions, and the one that it takes over from.
    process: u32,
    from: Option<u32>,
    geometry: Geometry,
    serving: Option<Session>,
    /// The session of the former process, until it is known whether it continues.
    former: Option<Former>,
    /// Whether lines that a former process has stored in part were cleared.
    has_cleared: bool,
    /// The client whose session has ended last. It does not begin again: its requests would be executed twice.
    ended: u64,
    /// The client that was told last that its session, which it has ended, is over.
    closed: u64,
    idle: u32,
    /// How often it has stored something that the client is to see.
    stores: u64,
    /// Buffers of completed requests.
    spare: SpareBuffers,
}

impl<M: Pmem> Server<M> {
    /// Begins with areas of `area_bytes` bytes. It accepts a client when it [polls](Self::poll). The first poll continues the session of
    /// a former process of the same boot of the machine if that can be; otherwise the session has this random number, which was never used before.
    ///
    /// No other process serves the device from now on. What a former one, which was paused, stores in the server's area late, costs time.
    #[must_use]
    pub fn open(
        region: Arc<Region<M>>,
        areas: Areas,
        area_bytes: u64,
        session: u64,
        geometry: Geometry,
    ) -> Self {
        let (session, process) = (session.max(1), process_of(session));
        let header = observe_header(&region, areas.server, |line| ServerHeader::decode(line).verify());
        let former = header.filter(|header| header.state.get() == SERVER_READY);
        let former = former.filter(|_| MutationPoint::ChannelResume.is_active());
        // After a crash of the machine each line is of another moment: a request without a completion may be complete for long.
        let boot = boot_number(region.boot());
        let former =
            former.filter(|header| MutationPoint::ChannelBoot.holds(boot != 0 && header.boot.get() == boot));
        Self {
            region,
            areas,
            area_bytes,
            session,
            process,
            from: None,
            geometry,
            serving: None,
            former: former.map(|header| Former::of(&header)),
            has_cleared: false,
            ended: 0,
            closed: 0,
            idle: 0,
            stores: 0,
            spare: SpareBuffers::new(SPARE_BYTES),
        }
    }

    /// Whom it serves.
    #[must_use]
    pub fn state(&self) -> ServerState {
        match &self.serving {
            None => ServerState::Alone,
            Some(session) if session.is_ending => ServerState::Settling,
            Some(_) => ServerState::Serving,
        }
    }

    /// Whether no change is outstanding any more that was so when a former process ended. Until then other requests wait: such a change may
    /// be executed a second time. It waits for nothing that a client has to do.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.former.is_none() && !self.serving.as_ref().is_some_and(Session::has_former)
    }

    /// Whether a request that was handed out was outstanding when a former process ended.
    #[must_use]
    pub fn is_former(&self, request: u64) -> bool {
        self.serving.as_ref().is_some_and(|session| request < session.resumed)
    }

    /// Requests that were handed out and are not complete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.serving.as_ref().map_or(0, |session| session.places.in_flight())
    }

    /// The session of the client that is served.
    #[must_use]
    pub fn client(&self) -> Option<u64> {
        self.serving.as_ref().map(|session| session.client)
    }

    /// How often something was stored that the client is to see.
    #[must_use]
    pub const fn stores(&self) -> u64 {
        self.stores
    }

    /// Lets the next [poll](Self::poll) look at all that the client can have stored, also without a submission.
    pub const fn look_closely(&mut self) {
        self.idle = IDLE_POLLS;
    }

    /// Moves new requests to `requests`; the data of some writes is still to be compared with
    /// [its checksum](Request::data_crc). Each is to be [completed](Self::complete). Does not block. The first call has all requests that
    /// a former process has left, if the client follows the rules.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without memory for a client: it can be tried again.
    pub fn poll(&mut self, requests: &mut Vec<Request>) -> Result<()> {
        if !self.has_cleared {
            self.has_cleared = true;
            for line in [0, LINE] {
                let is_whole = |line: &_| ServerHeader::decode(line).verify().is_some();
                clear_torn(&self.region, self.areas.server + line, is_whole);
            }
        }
        if self.former.is_some() {
            self.look_at_client()?;
            self.former = None;
        }
        let (mut has_taken, before) = (false, requests.len());
        // Bounded, whatever the client stores.
        for _ in 0..self.serving.as_ref().map_or(0, |session| session.places.count()) {
            let Some(found) = self.next_submission() else { break };
            has_taken = true;
            self.take(&found, requests);
        }
        if has_taken && self.has_client_left() {
            self.return_requests(requests.drain(before..));
            self.look_closely();
        } else {
            self.idle = if has_taken { 0 } else { self.idle + 1 };
        }
        let is_serving = self.state() == ServerState::Serving;
        if !is_serving || self.idle >= IDLE_POLLS {
            self.idle = 0;
            self.look_at_client()?;
        }
        Ok(())
    }

    /// Whether the client has ended the session, or another one is to follow: this process may have been paused since then.
    fn has_client_left(&mut self) -> bool {
        let header =
            observe_header(&self.region, self.areas.client, |line| ClientHeader::decode(line).verify());
        let Some(session) = &mut self.serving else { return true };
        let Some(header) = header else { return false };
        let has_left = header.is_closed.get() != 0 || header.session.get() != session.client;
        if !has_left {
            session.note_recall(&header);
        }
        has_left && MutationPoint::ChannelEnded.is_active()
    }

    /// Forgets requests that were taken and not handed out.
    fn return_requests(&mut self, requests: impl Iterator<Item = Request>) {
        for request in requests {
            if let Some(session) = &mut self.serving
                && let Some(place) = session.places.find(request.id)
            {
                session.places.take(place);
            }
            self.spare.give(request.buffer);
        }
    }

    fn next_submission(&mut self) -> Option<Submission> {
        let session = self.serving.as_mut().filter(|session| !session.is_ending)?;
        // A client that follows the rules has no more.
        if session.places.in_flight() == session.places.count() {
            return None;
        }
        if let Some(found) = session.outstanding.pop_front() {
            return Some(found);
        }
        let line = observe_line(&self.region, self.areas.client + session.shape.entry(session.taken))?;
        let found = Submission::decode(&line).verify()?;
        let is_ours = MutationPoint::ChannelClientSession.holds(found.client.get() == session.client)
            && MutationPoint::ChannelServerSession.holds(found.server.get() == self.session)
            && MutationPoint::ChannelSequence.holds(found.sequence.get() == session.taken);
        if !is_ours {
            return None;
        }
        session.taken += 1;
        Some(found)
    }

    fn take(&mut self, found: &Submission, requests: &mut Vec<Request>) {
        let (sequence, place) = (found.sequence.get(), found.place.get() as usize);
        let operation = match self.check(found) {
            Ok(operation) => operation,
            Err(error) => return self.store_completion(sequence, status_of(error.kind()), 0),
        };
        let range = ByteRange::at(found.offset.get(), found.length.get());
        let length = if has_data(operation) { range.len() as usize } else { 0 };
        let Some(mut buffer) = self.spare.try_take(length) else {
            return self.store_completion(sequence, status_of(ErrorKind::System), 0);
        };
        let mut data_crc = None;
        if operation == Operation::Write {
            let Some(session) = &self.serving else { return };
            let at = self.areas.client + session.shape.data(found.place.get());
            let sum = found.data_crc.get();
            // The store of a whole block computes this checksum in any case.
            let arrived = if range.len() == CHECKSUM_BLOCK && range.start.is_multiple_of(CHECKSUM_BLOCK) {
                data_crc = MutationPoint::ChannelDataChecksum.is_active().then_some(sum);
                observe_unverified(&self.region, at, &mut buffer).map(|()| true)
            } else {
                observe_data(&self.region, at, &mut buffer, sum)
            };
            if !matches!(arrived, Ok(true)) {
                return self.store_completion(sequence, STATUS_AGAIN, 0);
            }
        }
        let Some(session) = &mut self.serving else { return };
        session.places.put(place, InFlight { sequence, operation });
        let flags = found.flags.get();
        let class = if flags & FLAG_METADATA != 0 { Class::Metadata } else { Class::Unmarked };
        // Only changes can be FUA requests, whatever the entry says.
        let fua = flags & FLAG_FUA != 0 && changes(operation);
        requests.push(Request { id: sequence, operation, range, fua, class, data_crc, buffer });
    }

    /// The operation of an entry that can be executed.
    fn check(&self, found: &Submission) -> Result<Operation> {
        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        let number = found.operation.get();
        let Some(operation) = operation_of(number) else {
            return invalid(format!("operation {number} is not known"));
        };
        let Some(session) = &self.serving else { return invalid("there is no client".into()) };
        let place = found.place.get() as usize;
        if place >= session.places.count() {
            return invalid(format!("data place {place} does not exist"));
        }
        if session.places.get(place).is_some() {
            return invalid(format!("data place {place} is in use"));
        }
        let (offset, length) = (found.offset.get(), found.length.get());
        let limit = if has_data(operation) { u64::from(session.shape.place_bytes()) } else { u64::MAX };
        let end = offset.checked_add(length).filter(|end| *end <= self.geometry.size);
        let sector = u64::from(self.geometry.sector).max(1);
        if end.is_none() {
            let text = format!("{length} bytes at {offset} are beyond the device's {}", self.geometry.size);
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
        if length > limit || offset % sector != 0 || length % sector != 0 {
            return invalid(format!("{length} bytes at {offset} are not whole sectors, or too many"));
        }
        if operation == Operation::Flush && length > 0 {
            return invalid(format!("a flush has no range, this one has {length} bytes"));
        }
        Ok(operation)
    }

    /// Reports the result of a request. Its buffer is reused.
    pub fn complete(&mut self, completion: Completion) {
        let Some(session) = &mut self.serving else { return };
        let Some(place) = session.places.find(completion.id) else { return };
        let Some(InFlight { sequence, operation }) = session.places.take(place) else { return };
        let mut data_crc = 0;
        if operation == Operation::Read && completion.result.is_ok() {
            let at = self.areas.server + session.shape.data(place as u32);
            data_crc = publish_data(&self.region, at, &completion.buffer);
        }
        let status = match &completion.result {
            Ok(()) => 0,
            // The data is not what the client has sent.
            Err(error) if operation == Operation::Write && error.kind() == ErrorKind::Mismatch => {
                STATUS_AGAIN
            }
            Err(error) => status_of(error.kind()),
        };
        self.spare.give(completion.buffer);
        self.store_completion(sequence, status, data_crc);
    }

    /// Whether the client has asked, since the last call, for the requests of which nothing was done yet: they are to be
    /// [sent back](Self::send_back). True once all that it had submitted before was handed out, and all changes that a former process has
    /// left are complete: those may have been executed.
    pub fn take_recall(&mut self) -> bool {
        let is_settled = MutationPoint::ChannelRecallSettled.holds(self.is_settled());
        let Some(session) = self.serving.as_mut().filter(|_| is_settled) else { return false };
        session.recalled.take_if(|submissions| *submissions <= session.taken).is_some()
    }

    /// Whether the client has given up a request. It is to be sent back also if it was executed in part.
    #[must_use]
    pub fn is_given_up(&self, request: u64) -> bool {
        let Some(session) = &self.serving else { return false };
        let (places, submissions) = session.given_up;
        let bit = session.places.find(request).and_then(|place| 1_u64.checked_shl(place as u32));
        request < submissions && places & bit.unwrap_or(0) != 0
    }

    /// Returns a request to the client, as if it had not been submitted.
    pub fn send_back(&mut self, request: Request) {
        let Some(session) = &mut self.serving else { return };
        if let Some(place) = session.places.find(request.id) {
            session.places.take(place);
            self.store_completion(request.id, STATUS_RETURNED, 0);
        }
        self.spare.give(request.buffer);
    }

    fn store_completion(&mut self, request: u64, status: u32, data_crc: u32) {
        let Some(session) = &mut self.serving else { return };
        let entry = ChannelCompletion {
            crc: 0.into(),
            data_crc: data_crc.into(),
            client: session.client.into(),
            server: self.session.into(),
            sequence: session.completed.into(),
            request: request.into(),
            status: status.into(),
            process: self.process.into(),
            reserved: [0; 16],
        };
        let (line, number) = (entry.sealed(), session.completed);
        let kept = number % session.shape.completions();
        if let Some(kept) = session.lines.get_mut(kept as usize) {
            *kept = line;
        }
        session.completed += 1;
        self.stores += 1;
        let shape = session.shape;
        self.publish_completion(shape, number, &line);
    }

    /// Notices a client, one that has followed it, and one that misses completions.
    fn look_at_client(&mut self) -> Result<()> {
        let verify = |line: &_| ClientHeader::decode(line).verify();
        let Some(header) = observe_header(&self.region, self.areas.client, verify) else { return Ok(()) };
        let is_closed = header.is_closed.get() != 0;
        if let Some(session) = &mut self.serving {
            let is_same = session.client == header.session.get();
            if is_same && !is_closed {
                session.note_recall(&header);
                return self.answer_again(header.again.get());
            }
            session.is_ending = true;
            if session.places.in_flight() > 0 && MutationPoint::ChannelSettle.is_active() {
                return Ok(());
            }
            self.ended = session.client;
            self.serving = None;
        }
        let client = header.session.get();
        if is_closed && self.closed != client {
            // The client waits until none of its requests is executed any more.
            self.closed = client;
            self.store_header(SERVER_CLOSED, client);
        }
        let is_new = !is_closed && client != self.ended;
        if is_new { self.begin(&header) } else { Ok(()) }
    }

    /// Stores all completions again if the client has asked for that.
    fn answer_again(&mut self, again: u64) -> Result<()> {
        let Some(session) = &mut self.serving else { return Ok(()) };
        if session.again != again {
            session.again = again;
            self.store_header(SERVER_READY, session_of(&self.serving));
            self.store_completions();
        }
        Ok(())
    }

    /// Stores the last completions again, each first as a copy: the line in the ring may have been another process's, and whole.
    fn store_completions(&self) {
        let Some(session) = &self.serving else { return };
        let (shape, lines) = (session.shape, &session.lines);
        for number in session.completed.saturating_sub(shape.completions())..session.completed {
            let line = &lines[(number % shape.completions()) as usize];
            if *line != BLANK {
                self.publish_completion(shape, number, line);
            }
        }
    }

    fn publish_completion(&self, shape: ChannelShape, number: u64, line: &Line) {
        let (area, point) = (self.areas.server, MutationPoint::ChannelEntryPublish);
        for at in [ChannelShape::copy(self.process, number), shape.completion(number)] {
            publish_line(&self.region, point, area + at, line);
        }
    }

    fn begin(&mut self, header: &ClientHeader) -> Result<()> {
        let shape = ChannelShape::new(header.places.get(), header.place_bytes.get());
        let Some(shape) = shape.filter(|shape| shape.bytes() <= self.area_bytes) else {
            self.store_header(SERVER_CLOSED, header.session.get());
            return Ok(());
        };
        if !self.resume(header, shape)? {
            self.serving = Some(Session::new(header, shape)?);
        }
        self.store_header(SERVER_READY, header.session.get());
        Ok(())
    }

    /// Continues the session of the former process; false if that cannot be.
    fn resume(&mut self, header: &ClientHeader, shape: ChannelShape) -> Result<bool> {
        let Some(former) = self.former.filter(|former| former.client == header.session.get()) else {
            return Ok(false);
        };
        let Some(left) = resume::find(&self.region, self.areas, shape, former)? else { return Ok(false) };
        self.serving = Some(Session::from(header, shape, left)?);
        self.session = former.server;
        self.take_over(former);
        Ok(true)
    }

    /// Stores the completions that count under the number of this process: what a former one, which was paused, stores from now on does
    /// not count. At each moment the header names all processes whose completions there are.
    fn take_over(&mut self, former: Former) {
        let last = if former.next == 0 { former.process } else { former.next };
        let own = (self.process & !1) | (!last & 1);
        let own = if own == former.process || own == 0 { own.wrapping_add(2).max(2) } else { own };
        let mut from = former.process;
        for process in [former.next, own].into_iter().filter(|process| *process != 0) {
            (self.process, self.from) = (process, Some(from));
            self.store_header(SERVER_READY, former.client);
            if let Some(session) = &mut self.serving {
                resume::take_over(&mut session.lines, process);
            }
            self.store_completions();
            from = process;
        }
        self.from = None;
    }

    fn store_header(&mut self, state: u16, client: u64) {
        self.stores += 1;
        let header = ServerHeader {
            boot: boot_number(self.region.boot()).into(),
            process: self.from.unwrap_or(self.process).into(),
            next: self.from.map_or(0, |_| self.process).into(),
            ..header_of(self.session, state, client, &self.geometry)
        };
        publish_header(&self.region, self.areas.server, &header.sealed());
    }

    /// Ends the session: the client's requests, those in flight too, complete with an error there.
    pub fn close(mut self) {
        if self.serving.is_some() {
            self.store_header(SERVER_CLOSED, session_of(&self.serving));
        }
    }
}

/// The number of the process that begins with a random number.
const fn process_of(random: u64) -> u32 {
    (random ^ (random >> 32)) as u32 | 1
}

fn session_of(serving: &Option<Session>) -> u64 {
    serving.as_ref().map_or(0, |session| session.client)
}
