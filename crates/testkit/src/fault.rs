//! A backing device that fails operations by rules.
//!
//! [`FaultRule`]s select the operations that fail, and the kind of failure; a [`FaultHandle`] changes the rules while the device
//! is in use.
//!
//! Invariants:
//! - the first rule that matches decides; with the same rules and the same order of operations the same operations fail;
//! - a stalled operation completes only when no rule stalls it any more. A queue that is dropped waits for its stalled
//!   operations, as a queue of a disk that hangs waits for the kernel.
//!
//! Elsewhere: the reaction to errors.

use crate::ops::{OpKind, range_of, words_of};
use cbd_backing::{Backing, Identity, PollableQueue};
use cbd_export::wake::{Event, wait_any};
use cbd_types::backing::BackingDone;
use cbd_types::{
    AlignedBuffer, BackingGeometry, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, OpToken, Result,
};
use rustix::event::epoll;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The kind of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The operation is not executed, and reports an error.
    Fail,
    /// The whole operation is executed, and reports an error.
    FailAfter,
    /// The first half is executed, and the operation reports an error. Reads and flushes fail as with [`Fail`](Self::Fail).
    Partial,
    /// The operation does not complete until the rules allow it.
    Stall,
}

impl Fault {
    const ALL: [Self; 4] = [Self::Fail, Self::FailAfter, Self::Partial, Self::Stall];

    const fn name(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::FailAfter => "fail_after",
            Self::Partial => "partial",
            Self::Stall => "stall",
        }
    }
}

/// Selects the operations that fail, and the kind of failure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultRule {
    /// Kinds of operations; empty for all.
    pub kinds: Vec<OpKind>,
    /// Only operations that overlap these bytes; flushes overlap none.
    pub range: Option<ByteRange>,
    /// Number of matching operations that succeed first.
    pub after: u64,
    /// Number of operations that fail before the rule ends; `None` for all.
    pub times: Option<u64>,
    /// Percentage of matching operations that fail.
    pub percent: u8,
    /// The kind of failure.
    pub how: Fault,
    /// The error's kind.
    pub error: ErrorKind,
}

impl Default for FaultRule {
    /// All operations fail before they are executed.
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            range: None,
            after: 0,
            times: None,
            percent: 100,
            how: Fault::Fail,
            error: ErrorKind::Backing,
        }
    }
}

impl FaultRule {
    /// Parses `name=value` separated by commas: `op=write` (once for each kind), `range=FIRST-END` in bytes, `after=N`,
    /// `times=N`, `percent=N`, `how=fail|fail_after|partial|stall`, `error=backing|no_space`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an unknown name or a value out of range.
    pub fn parse(text: &str) -> Result<Self> {
        let mut rule = Self::default();
        for field in text.split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            rule.set(field).ok_or_else(|| {
                let text = format!(
                    "fault: {field:?} is not understood; there are op, range=FIRST-END, after, times, percent, \
                     how=fail|fail_after|partial|stall, error=backing|no_space"
                );
                Error::new(ErrorKind::InvalidArgument, text)
            })?;
        }
        Ok(rule)
    }

    fn set(&mut self, field: &str) -> Option<()> {
        let (name, value) = field.split_once('=')?;
        match name {
            "op" => self.kinds.push(OpKind::ALL.into_iter().find(|kind| kind.name() == value)?),
            "range" => {
                let (start, end) = value.split_once('-')?;
                let range = ByteRange { start: start.parse().ok()?, end: end.parse().ok()? };
                self.range = Some((!range.is_empty()).then_some(range)?);
            }
            "after" => self.after = value.parse().ok()?,
            "times" => self.times = Some(value.parse().ok()?),
            "percent" => self.percent = value.parse().ok().filter(|percent| *percent <= 100)?,
            "how" => self.how = Fault::ALL.into_iter().find(|how| how.name() == value)?,
            "error" => {
                self.error =
                    [ErrorKind::Backing, ErrorKind::NoSpace].into_iter().find(|kind| kind.name() == value)?;
            }
            _ => return None,
        }
        Some(())
    }

    fn fits(&self, op: &BackingOp) -> bool {
        let kind = self.kinds.is_empty() || self.kinds.contains(&OpKind::of(op));
        kind && self.range.is_none_or(|range| range.overlaps(&range_of(op)))
    }
}

impl fmt::Display for FaultRule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kind in &self.kinds {
            write!(out, "op={},", kind.name())?;
        }
        if let Some(range) = self.range {
            write!(out, "range={}-{},", range.start, range.end)?;
        }
        if let Some(times) = self.times {
            write!(out, "times={times},")?;
        }
        let Self { after, percent, how, error, .. } = self;
        write!(out, "after={after},percent={percent},how={},error={}", how.name(), error.name())
    }
}

#[derive(Debug)]
struct ActiveRule {
    rule: FaultRule,
    fitted: u64,
    failed: u64,
}

#[derive(Debug)]
struct State {
    rules: Vec<ActiveRule>,
    /// Incremented by each change of the rules.
    version: u64,
    failed: u64,
    random: u64,
    sleepers: Vec<Weak<Event>>,
}

impl State {
    fn fault_of(&mut self, op: &BackingOp) -> Option<(Fault, ErrorKind)> {
        for active in &mut self.rules {
            let rule = &active.rule;
            if rule.times.is_some_and(|times| active.failed >= times) || !rule.fits(op) {
                continue;
            }
            active.fitted += 1;
            if active.fitted <= rule.after {
                continue;
            }
            // xorshift64: the same choices in every run.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            if (self.random >> 32) % 100 >= u64::from(rule.percent) {
                continue;
            }
            active.failed += 1;
            self.failed += 1;
            return Some((rule.how, rule.error));
        }
        None
    }
}

/// Changes the rules while the device is in use.
#[derive(Clone, Debug)]
pub struct FaultHandle(Arc<Mutex<State>>);

impl FaultHandle {
    fn new() -> Self {
        let (rules, sleepers) = (Vec::new(), Vec::new());
        let state = State { rules, version: 0, failed: 0, random: 0x2545_F491_4F6C_DD1D, sleepers };
        Self(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<ActiveRule>)) {
        let mut state = self.state();
        change(&mut state.rules);
        state.version += 1;
        state.sleepers.retain(|sleeper| match sleeper.upgrade() {
            Some(signal) => {
                signal.signal();
                true
            }
            None => false,
        });
    }

    /// Replaces all rules; stalled operations are matched against the new ones.
    pub fn set(&self, rules: Vec<FaultRule>) {
        self.change(|active| {
            *active = rules.into_iter().map(|rule| ActiveRule { rule, fitted: 0, failed: 0 }).collect();
        });
    }

    /// Adds a rule after the others.
    pub fn add(&self, rule: FaultRule) {
        self.change(|active| active.push(ActiveRule { rule, fitted: 0, failed: 0 }));
    }

    /// Removes all rules; stalled operations continue.
    pub fn clear(&self) {
        self.change(Vec::clear);
    }

    /// Number of operations that failed or were stalled.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.state().failed
    }
}

/// A backing device with fault rules.
pub struct Faulty<B> {
    inner: B,
    handle: FaultHandle,
}

impl<B: Backing> Faulty<B> {
    /// `inner` with these rules; without rules no operation fails.
    pub fn new(inner: B, rules: Vec<FaultRule>) -> Self {
        let handle = FaultHandle::new();
        handle.set(rules);
        Self { inner, handle }
    }

    /// A handle that changes the rules.
    pub fn handle(&self) -> FaultHandle {
        self.handle.clone()
    }
}

impl<B: Backing> Backing for Faulty<B> {
    fn geometry(&self) -> BackingGeometry {
        self.inner.geometry()
    }

    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let inner = self.inner.open_queue(depth)?;
        let signal = Arc::new(Event::new()?);
        let gathered = gather([inner.wait_descriptor(), signal.descriptor()]).map_err(|error| {
            Error::new(ErrorKind::System, format!("cannot open a queue with faults: {error}"))
        })?;
        let version = {
            let mut state = self.handle.state();
            state.sleepers.push(Arc::downgrade(&signal));
            state.version
        };
        Ok(Box::new(FaultyQueue {
            inner,
            handle: self.handle.clone(),
            version,
            next: 0,
            beneath: HashMap::new(),
            stalled: Vec::new(),
            ended: VecDeque::new(),
            came: Vec::new(),
            signal,
            gathered,
        }))
    }

    fn describe(&self) -> String {
        let rules: Vec<_> = self.handle.state().rules.iter().map(|active| active.rule.to_string()).collect();
        format!("{}, with faults ({})", self.inner.describe(), rules.join("; "))
    }
}

/// An operation at the inner queue.
struct Beneath {
    token: OpToken,
    /// The error that replaces the result of the operation.
    error: Option<ErrorKind>,
    /// The submitted operation, if only a part of it was passed on.
    whole: Option<BackingOp>,
}

struct FaultyQueue {
    inner: Box<dyn PollableQueue>,
    handle: FaultHandle,
    version: u64,
    next: u64,
    beneath: HashMap<u64, Beneath>,
    stalled: Vec<(OpToken, BackingOp)>,
    ended: VecDeque<BackingDone>,
    came: Vec<BackingDone>,
    signal: Arc<Event>,
    /// Readable when the inner queue or `signal` is.
    gathered: OwnedFd,
}

impl FaultyQueue {
    fn pass(&mut self, op: BackingOp, beneath: Beneath) {
        let number = self.next;
        self.next += 1;
        self.beneath.insert(number, beneath);
        self.inner.submit(OpToken(number), op);
    }

    fn take(&mut self, token: OpToken, op: BackingOp) {
        let verdict = self.handle.state().fault_of(&op);
        match verdict {
            None => self.pass(op, Beneath { token, error: None, whole: None }),
            Some((Fault::Stall, _)) => self.stalled.push((token, op)),
            Some((Fault::FailAfter, error)) => {
                self.pass(op, Beneath { token, error: Some(error), whole: None })
            }
            Some((Fault::Partial, error)) if let Some(half) = first_half(&op) => {
                self.pass(half, Beneath { token, error: Some(error), whole: Some(op) });
            }
            Some((Fault::Fail | Fault::Partial, error)) => {
                let result = Err(injected(error, &op));
                self.ended.push_back(BackingDone { token, op, result });
                self.signal.signal();
            }
        }
    }
}

/// The first half of a change, in whole sectors of any size; `None` if it is too short.
fn first_half(op: &BackingOp) -> Option<BackingOp> {
    let half = |length: u64| Some(length / 2 / 4096 * 4096).filter(|half| *half > 0);
    match op {
        BackingOp::Write { offset, buffer } => {
            let length = half(buffer.len() as u64)? as usize;
            Some(BackingOp::Write { offset: *offset, buffer: AlignedBuffer::from_slice(&buffer[..length]) })
        }
        BackingOp::WriteZeroes { range } => {
            Some(BackingOp::WriteZeroes { range: ByteRange::at(range.start, half(range.len())?) })
        }
        BackingOp::Discard { range } => {
            Some(BackingOp::Discard { range: ByteRange::at(range.start, half(range.len())?) })
        }
        BackingOp::Read { .. } | BackingOp::Verify { .. } | BackingOp::Compare { .. } | BackingOp::Flush => {
            None
        }
    }
}

fn injected(kind: ErrorKind, op: &BackingOp) -> Error {
    Error::new(kind, format!("cannot {}: a fault was asked for", words_of(op)))
}

/// A descriptor that is readable when any of `descriptors` is.
fn gather(descriptors: [RawFd; 2]) -> std::io::Result<OwnedFd> {
    let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for descriptor in descriptors {
        // SAFETY: the queue and the event own the descriptors, and both live through this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        epoll::add(&all, descriptor, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(all)
}

impl Drop for FaultyQueue {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while !self.stalled.is_empty() {
            if wait_any(&[self.gathered.as_raw_fd()], None).is_err() {
                return;
            }
            self.poll(&mut done);
        }
    }
}

impl BackingQueue for FaultyQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        self.take(token, op);
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        // The signal is cleared before the version is read: a later change signals it again.
        self.signal.clear();
        let version = self.handle.state().version;
        if version != self.version {
            self.version = version;
            for (token, op) in std::mem::take(&mut self.stalled) {
                self.take(token, op);
            }
        }
        self.inner.poll(&mut self.came);
        for mut one in self.came.drain(..) {
            let Some(beneath) = self.beneath.remove(&one.token.0) else { continue };
            one.token = beneath.token;
            one.op = beneath.whole.unwrap_or(one.op);
            if let Some(error) = beneath.error {
                one.result = Err(injected(error, &one.op));
            }
            done.push(one);
        }
        done.extend(self.ended.drain(..));
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        let before = done.len();
        self.poll(done);
        while done.len() == before && self.in_flight() > 0 {
            if wait_any(&[self.gathered.as_raw_fd()], None).is_err() {
                return;
            }
            self.poll(done);
        }
    }

    fn in_flight(&self) -> usize {
        self.beneath.len() + self.stalled.len() + self.ended.len()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

impl PollableQueue for FaultyQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.gathered.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_as_they_are_printed() {
        let text = "op=write,op=flush,range=0-4096,times=2,after=3,percent=50,how=partial,error=no_space";
        let rule = FaultRule::parse(text).expect("readable");
        assert_eq!(rule.to_string(), text);
        assert_eq!(FaultRule::parse("").expect("readable"), FaultRule::default());
    }

    #[test]
    fn wrong_rules_are_refused() {
        for text in
            ["op=fly", "range=5", "range=9-3", "percent=101", "how=well", "error=x", "times", "after=-1", ","]
        {
            assert_eq!(FaultRule::parse(text).expect_err(text).kind(), ErrorKind::InvalidArgument);
        }
    }
}
