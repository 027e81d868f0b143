//! What a former process of a server has left of a session: which requests have a completion, and which are outstanding.
//!
//! Invariants: a request counts as outstanding only if its entry is whole and none of the completions that can be its own is missing.
//! One line with damage hides none: the last two completions have copies, and behind any other one there is a line that tells of it.
//! What is found is bounded by the rings, whatever the client has stored in its own.

use crate::Areas;
use crate::area::{observe_line, reserve};
use alloc::{collections::VecDeque, vec::Vec};
use cbd_format::channel::COPY_LINES;
use cbd_format::{ChannelCompletion, ChannelShape, LINE, ServerHeader, Submission};
use cbd_types::{Error, ErrorKind, MutationPoint, Pmem, Region, Result};

/// A line of a ring.
pub type Line = [u8; LINE as usize];

/// The header of a server's area, as a process finds it when it begins.
#[derive(Clone, Copy)]
pub struct Former {
    pub client: u64,
    pub server: u64,
    /// The process whose completions count, and the one that was taking over from it, or 0.
    pub process: u32,
    pub next: u32,
}

impl Former {
    pub const fn of(header: &ServerHeader) -> Self {
        Self {
            client: header.client.get(),
            server: header.session.get(),
            process: header.process.get(),
            next: header.next.get(),
        }
    }

    fn has_stored(&self, found: &ChannelCompletion) -> bool {
        let process = found.process.get();
        let is_next = MutationPoint::ChannelTakeover.is_active() && self.next != 0 && process == self.next;
        let is_of_process = is_next || process == self.process;
        found.client.get() == self.client
            && found.server.get() == self.server
            && MutationPoint::ChannelProcess.holds(is_of_process)
    }
}

/// A session that can be continued.
pub struct Left {
    /// The number of the first submission that the former process cannot have taken.
    pub taken: u64,
    /// Completions that were stored.
    pub completed: u64,
    /// The last completions, by their place in the ring.
    pub lines: Vec<Line>,
    /// The requests without a completion, in order.
    pub outstanding: VecDeque<Submission>,
}

/// Reads both rings of a session. `None` if lines are missing.
///
/// # Errors
/// [`ErrorKind::System`] without memory.
pub fn find<M: Pmem>(
    region: &Region<M>,
    areas: Areas,
    shape: ChannelShape,
    session: Former,
) -> Result<Option<Left>> {
    let Some(done) = find_completions(region, areas, shape, session)? else { return Ok(None) };
    let entries = shape.entries();
    let mut submissions = Vec::new();
    reserve(&mut submissions, entries as usize)?;
    submissions.extend((0..entries).map(|place| submission(region, areas, shape, session, place)));
    let numbers = submissions.iter().flatten().map(|found| found.sequence.get());
    let taken = numbers.chain(done.requests.last().copied()).max().map_or(0, |last| last.saturating_add(1));

    let mut outstanding = VecDeque::new();
    outstanding.try_reserve(entries as usize).map_err(|_| no_memory())?;
    for number in taken.saturating_sub(entries)..taken {
        let is_complete = done.requests.binary_search(&number).is_ok();
        if is_complete && MutationPoint::ChannelResumeCompleted.is_active() {
            continue;
        }
        match submissions[(number % entries) as usize].filter(|found| found.sequence.get() == number) {
            Some(found) => outstanding.push_back(found),
            // The client is storing the next one in its place: it is complete for long.
            None if number + entries == taken => {}
            None if MutationPoint::ChannelResumeWhole.is_active() => return Ok(None),
            None => {}
        }
    }
    Ok(Some(Left { taken, completed: done.completed, lines: done.lines, outstanding }))
}

struct Completions {
    completed: u64,
    lines: Vec<Line>,
    /// The requests that the lines name, sorted.
    requests: Vec<u64>,
}

fn find_completions<M: Pmem>(
    region: &Region<M>,
    areas: Areas,
    shape: ChannelShape,
    session: Former,
) -> Result<Option<Completions>> {
    let places = shape.completions();
    let (mut lines, mut requests) = (Vec::new(), Vec::new());
    reserve(&mut lines, places as usize)?;
    reserve(&mut requests, places as usize)?;
    let read = |place| observe_line(region, areas.server + shape.completion(place)).unwrap_or(BLANK);
    lines.extend((0..places).map(read));
    let decode = |place: usize, line: &Line| completion(line, session, place as u64, places);
    let mut completed = 0;
    for (place, line) in lines.iter().enumerate() {
        completed = decode(place, line).map_or(completed, |found| completed.max(found.sequence.get() + 1));
    }
    for (process, number) in
        [(session.process, 0), (session.process, 1), (session.next, 0), (session.next, 1)]
    {
        completed = take_copy(region, areas, session, (process, number), &mut lines, completed);
    }
    let mut last = 0;
    for (place, line) in lines.iter_mut().enumerate() {
        match decode(place, line).filter(|found| found.sequence.get() + places >= completed) {
            Some(found) => {
                requests.push(found.request.get());
                last += u64::from(found.sequence.get() + places > completed);
            }
            None => *line = BLANK,
        }
    }
    // The place of the next one may have parts of it.
    let is_whole = last >= completed.min(places - 1);
    requests.sort_unstable();
    let found = Completions { completed, lines, requests };
    Ok(MutationPoint::ChannelResumeWhole.holds(is_whole).then_some(found))
}

/// The line of no completion.
pub const BLANK: Line = [0; LINE as usize];

fn completion(line: &Line, session: Former, place: u64, places: u64) -> Option<ChannelCompletion> {
    let found = ChannelCompletion::decode(line).verify()?;
    (session.has_stored(&found) && found.sequence.get() % places == place).then_some(found)
}

/// Takes a copy of a completion, unless later ones have replaced that. Returns how many completions there are.
#[inline(never)]
fn take_copy<M: Pmem>(
    region: &Region<M>,
    areas: Areas,
    session: Former,
    (process, number): (u32, u64),
    lines: &mut [Line],
    completed: u64,
) -> u64 {
    let places = lines.len() as u64;
    let line = observe_line(region, areas.server + ChannelShape::copy(process, number)).unwrap_or(BLANK);
    let found = completion(&line, session, number, COPY_LINES / 2);
    match found.filter(|found| found.process.get() == process && MutationPoint::ChannelCopy.is_active()) {
        Some(found) if found.sequence.get() + places > completed => {
            let sequence = found.sequence.get();
            lines[(sequence % places) as usize] = line;
            completed.max(sequence + 1)
        }
        _ => completed,
    }
}

/// Lets the completions in kept lines be those of another process.
pub fn take_over(lines: &mut [Line], process: u32) {
    for line in lines.iter_mut().filter(|line| **line != BLANK) {
        if let Some(found) = ChannelCompletion::decode(line).verify() {
            *line = ChannelCompletion { process: process.into(), ..found }.sealed();
        }
    }
}

fn submission<M: Pmem>(
    region: &Region<M>,
    areas: Areas,
    shape: ChannelShape,
    session: Former,
    place: u64,
) -> Option<Submission> {
    let line = observe_line(region, areas.client + shape.entry(place))?;
    let found = Submission::decode(&line).verify()?;
    let is_of_session = found.client.get() == session.client && found.server.get() == session.server;
    (is_of_session && found.sequence.get() % shape.entries() == place).then_some(found)
}

fn no_memory() -> Error {
    Error::new(ErrorKind::System, "there is no memory for the channel")
}
