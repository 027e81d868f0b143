//! Verification of a range of any length: requests of a bounded size, a few of them in flight, with the results in the order of the
//! device.
//!
//! Invariants: a result is returned once, after those of all lower ranges; everything below [`Sweep::position`] was looked at.
//!
//! Elsewhere: how a request looks at the copies of its range (`cbd-device`, `cbd-engine`), when and how fast a sweep goes on (the
//! daemon).

use crate::{DeviceQueue, RunningBackend};
use cbd_engine::Environment;
use cbd_export::RequestQueue;
use cbd_types::{ByteRange, Error, ErrorKind, Result, Verified, Verify, VerifyLevel};
use std::collections::VecDeque;
use std::time::Duration;

/// Bytes of a request.
pub const VERIFY_STEP: u64 = 1 << 20;

/// Requests in flight: while one waits for the disk, the other is prepared.
const IN_FLIGHT_MAX: usize = 2;

/// A queue for requests to verify a range. It belongs to one thread.
pub trait Verifier {
    /// Submits a request of at most [`VERIFY_STEP`] bytes.
    fn submit(&mut self, id: u64, request: Verify);

    /// The requests that have completed, each once.
    fn take(&mut self) -> Vec<(u64, Result<Verified>)>;

    /// Waits until a request may have completed, for `timeout` at most.
    ///
    /// # Errors
    /// If the system refuses to wait.
    fn wait(&mut self, timeout: Duration) -> Result<()>;

    /// Cancels the requests in flight.
    fn give_up(&mut self);
}

/// What clients have requested: numbers that change whenever they make requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Load {
    /// All requests.
    pub requests: u64,
    /// Those that the backing device has to serve.
    pub disk: u64,
}

impl RunningBackend {
    /// What clients have requested until now.
    #[must_use]
    pub fn load(&self) -> Load {
        let uncached = self.device().device().uncached_requests();
        let Some(cache) = self.cache() else { return Load { requests: uncached, disk: uncached } };
        let status = cache.status();
        let bypassed = status.bypassed.each().map(|(_, bytes)| bytes);
        let past = bypassed.into_iter().fold(uncached, u64::wrapping_add);
        let disk = past.wrapping_add(status.read_missed_bytes);
        Load { requests: disk.wrapping_add(status.read_hit_bytes).wrapping_add(status.written_bytes), disk }
    }

    /// Opens a queue of its own for verification. The backend cannot be removed while it is open.
    ///
    /// # Errors
    /// If the system refuses a resource of the queue.
    pub fn verifier(&self) -> Result<Box<dyn Verifier>> {
        Ok(Box::new(self.device().device_queue()?))
    }

    /// Checks a range that is to be verified.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for a range past the end of the device, [`ErrorKind::InvalidArgument`] for one that is not of whole
    /// sectors.
    pub fn check_range(&self, offset: u64, length: Option<u64>) -> Result<ByteRange> {
        let geometry = cbd_export::BlockDevice::geometry(&**self.device());
        range_of(geometry.size, u64::from(geometry.sector), offset, length)
    }
}

impl<E: Environment> Verifier for DeviceQueue<E> {
    fn submit(&mut self, id: u64, request: Verify) {
        self.start_verification(id, request);
    }

    fn take(&mut self) -> Vec<(u64, Result<Verified>)> {
        // Only verifications are submitted to this queue, so nothing else completes.
        self.poll(&mut Vec::new());
        self.take_verified()
    }

    fn wait(&mut self, timeout: Duration) -> Result<()> {
        cbd_export::wait_any(&self.wait_descriptors(), Some(timeout)).map(drop)
    }

    fn give_up(&mut self) {
        RequestQueue::give_up(self, &mut Vec::new());
    }
}

fn range_of(size: u64, sector: u64, offset: u64, length: Option<u64>) -> Result<ByteRange> {
    let past =
        |what: &str| Error::new(ErrorKind::OutOfRange, format!("{what} the device, which has {size} bytes"));
    if offset > size {
        return Err(past(&format!("the range begins at byte {offset}, past the end of")));
    }
    let length = length.unwrap_or(size - offset);
    let end = offset.checked_add(length).filter(|end| *end <= size);
    let end = end.ok_or_else(|| {
        past(&format!("the range of {length} bytes from byte {offset} ends past the end of"))
    })?;
    if !offset.is_multiple_of(sector) || !end.is_multiple_of(sector) {
        let text = format!(
            "the range of {length} bytes from byte {offset} is not of whole sectors: give multiples of {sector} bytes"
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(ByteRange { start: offset, end })
}

/// A request in flight, or one whose result waits for those of lower ranges.
struct Step {
    id: u64,
    range: ByteRange,
    result: Option<Result<Verified>>,
}

/// A verification of a range, step by step.
pub struct Sweep {
    next: u64,
    end: u64,
    level: VerifyLevel,
    repair: bool,
    next_id: u64,
    steps: VecDeque<Step>,
}

impl Sweep {
    /// A verification of `range`, of which nothing has been looked at.
    #[must_use]
    pub fn new(range: ByteRange, level: VerifyLevel, repair: bool) -> Self {
        Self { next: range.start, end: range.end, level, repair, next_id: 0, steps: VecDeque::new() }
    }

    /// Goes on to a later end; returns whether there is more to look at.
    pub fn extend(&mut self, end: u64) -> bool {
        self.end = self.end.max(end);
        self.next < self.end
    }

    /// Everything before was looked at.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.steps.front().map_or(self.next, |step| step.range.start)
    }

    /// Whether all was looked at.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.next == self.end && self.steps.is_empty()
    }

    /// Whether requests are in flight.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.steps.iter().any(|step| step.result.is_none())
    }

    /// Whether another request may be submitted.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.next < self.end && self.steps.len() < IN_FLIGHT_MAX
    }

    /// Submits the next request, of at most `step` bytes, if there is [room](Self::has_room); returns its bytes, else 0.
    pub fn submit(&mut self, verifier: &mut dyn Verifier, step: u64) -> u64 {
        if !self.has_room() {
            return 0;
        }
        // Later requests begin at multiples of a step.
        let end = (self.next / step * step + step).min(self.end);
        let range = ByteRange { start: self.next, end };
        self.steps.push_back(Step { id: self.next_id, range, result: None });
        verifier.submit(self.next_id, Verify { range, level: self.level, repair: self.repair });
        self.next_id += 1;
        self.next = end;
        end - range.start
    }

    /// Collects what has completed; `each` receives the results in the order of the device.
    pub fn collect(
        &mut self,
        verifier: &mut dyn Verifier,
        mut each: impl FnMut(ByteRange, Result<Verified>),
    ) {
        for (id, result) in verifier.take() {
            if let Some(step) = self.steps.iter_mut().find(|step| step.id == id) {
                step.result = Some(result);
            }
        }
        while self.steps.front().is_some_and(|step| step.result.is_some()) {
            if let Some(Step { range, result: Some(result), .. }) = self.steps.pop_front() {
                each(range, result);
            }
        }
    }
}

impl std::fmt::Debug for Sweep {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Sweep({} to {})", self.position(), self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Completes the later request first.
    #[derive(Default)]
    struct Backwards(Vec<(u64, Verify)>);

    impl Verifier for Backwards {
        fn submit(&mut self, id: u64, request: Verify) {
            self.0.push((id, request));
        }

        fn take(&mut self) -> Vec<(u64, Result<Verified>)> {
            self.0.pop().into_iter().map(|(id, _)| (id, Ok(Verified::default()))).collect()
        }

        fn wait(&mut self, _: Duration) -> Result<()> {
            Ok(())
        }

        fn give_up(&mut self) {
            self.0.clear();
        }
    }

    #[test]
    fn results_come_in_the_order_of_the_device_and_the_place_is_before_all_that_are_missing() {
        let end = 3 * VERIFY_STEP + 512;
        let mut sweep = Sweep::new(ByteRange { start: 512, end }, VerifyLevel::Agree, false);
        let mut verifier = Backwards::default();
        let mut seen = Vec::new();
        assert_eq!(sweep.submit(&mut verifier, VERIFY_STEP), VERIFY_STEP - 512);
        assert_eq!(sweep.submit(&mut verifier, VERIFY_STEP), VERIFY_STEP);
        assert_eq!(
            (sweep.submit(&mut verifier, VERIFY_STEP), sweep.has_room()),
            (0, false),
            "two are in flight"
        );
        sweep.collect(&mut verifier, |range, _| seen.push(range));
        assert!(seen.is_empty(), "the second has completed, the first has not");
        assert_eq!((sweep.position(), sweep.is_waiting()), (512, true));
        while !sweep.is_done() {
            sweep.submit(&mut verifier, VERIFY_STEP);
            sweep.collect(&mut verifier, |range, _| seen.push(range));
        }
        let borders: Vec<u64> = seen.iter().map(|range| range.start).collect();
        assert_eq!(borders, [512, VERIFY_STEP, 2 * VERIFY_STEP, 3 * VERIFY_STEP]);
        assert_eq!((sweep.position(), seen[3].end), (end, end));
    }

    #[test]
    fn a_range_that_the_device_does_not_have_is_refused_with_the_reason() {
        let range = |offset, length| range_of(4096, 512, offset, length).map_err(|error| error.line());
        assert_eq!(range(512, None), Ok(ByteRange { start: 512, end: 4096 }));
        assert_eq!(range(4096, None), Ok(ByteRange { start: 4096, end: 4096 }));
        assert!(range(4608, None).unwrap_err().contains("past the end of the device, which has 4096 bytes"));
        assert!(range(0, Some(4608)).unwrap_err().contains("past the end"));
        assert!(range(512, Some(u64::MAX)).unwrap_err().contains("past the end"));
        assert!(range(100, Some(412)).unwrap_err().contains("multiples of 512 bytes"));
        assert!(range(0, Some(100)).unwrap_err().contains("multiples of 512 bytes"));
    }
}
