//! A throttled backing device: a model of a hard disk, or of a flash disk, over any other device.
//!
//! A hard disk has one arm. An operation that does not continue where the last one ended costs a seek, longer for a
//! longer distance, and on average half a rotation; a small gap forward is skipped by reading if that is faster; then
//! the bytes are transferred at the transfer rate. A flush costs a rotation. Operations are executed in the order of
//! submission: no elevator, no cache. A flash disk has a latency, several operations at a time, and a transfer rate.
//! (The model is that of Ruemmler and Wilkes, "An introduction to disk drive modeling", without the cache.)
//!
//! Invariants: an operation is executed at once on the inner device, and returned no sooner than the model allows, over
//! all queues together; results and data are unchanged. So a submitted operation may be on the inner device before the
//! model completes it, which matters for simulated power cuts.

use crate::{Backing, Identity, PollableQueue, job};
use cbd_sys::event::{Poller, Timer, wait_readable};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, OpToken, Result};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// The parameters of the model. Zero means that the step takes no time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ThrottleParameters {
    /// Average seek time in milliseconds, between two random positions.
    pub seek_ms: f64,
    /// Rotations a minute.
    pub rpm: f64,
    /// Transfer rate in MiB a second, shared by all operations.
    pub mib_per_s: f64,
    /// Latency of every operation in microseconds.
    pub latency_us: f64,
    /// Latency of writes in microseconds, if it differs from `latency_us`.
    pub write_latency_us: Option<f64>,
    /// Time of a flush in microseconds; by default one rotation, or the latency if the device does not rotate.
    pub flush_us: Option<f64>,
    /// Operations that it executes in parallel.
    pub parallel: u32,
}

impl ThrottleParameters {
    /// No delays; the base of the presets.
    pub const NONE: Self = Self {
        seek_ms: 0.0,
        rpm: 0.0,
        mib_per_s: 0.0,
        latency_us: 0.0,
        write_latency_us: None,
        flush_us: None,
        parallel: 1,
    };
    /// A hard disk of 7200 rotations a minute: about 80 random operations a second.
    pub const HARD_DISK: Self = Self { seek_ms: 8.0, rpm: 7200.0, mib_per_s: 150.0, ..Self::NONE };
    /// A SATA flash disk.
    pub const FLASH_DISK: Self = Self {
        latency_us: 90.0,
        write_latency_us: Some(50.0),
        flush_us: Some(800.0),
        mib_per_s: 520.0,
        parallel: 32,
        ..Self::NONE
    };

    /// Parses `hdd`, `ssd`, or `name=value` separated by commas, as [`Display`](fmt::Display) prints it. A preset may
    /// come first, and single values follow it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an unknown name or a number out of range.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parameters = Self::NONE;
        for (index, field) in text.split(',').map(str::trim).enumerate() {
            match field {
                "hdd" if index == 0 => parameters = Self::HARD_DISK,
                "ssd" if index == 0 => parameters = Self::FLASH_DISK,
                "" if text.trim().is_empty() => {}
                _ => parameters.set(field)?,
            }
        }
        Ok(parameters)
    }

    fn set(&mut self, field: &str) -> Result<()> {
        let (name, value) = field.split_once('=').unwrap_or((field, ""));
        let number = |max: f64| match value.parse::<f64>() {
            Ok(number) if (0.0..=max).contains(&number) => Ok(number),
            _ => Err(refused(format!("throttle: {name} must be a number from 0 to {max}, not {value:?}"))),
        };
        match name {
            "seek_ms" => self.seek_ms = number(10_000.0)?,
            "rpm" => self.rpm = number(1_000_000.0)?,
            "mib_per_s" => self.mib_per_s = number(1_000_000.0)?,
            "latency_us" => self.latency_us = number(10_000_000.0)?,
            "write_latency_us" => self.write_latency_us = Some(number(10_000_000.0)?),
            "flush_us" => self.flush_us = Some(number(10_000_000.0)?),
            "parallel" => self.parallel = number(4096.0)?.max(1.0) as u32,
            _ => {
                return Err(refused(format!(
                    "throttle: {name:?} is unknown; there are hdd, ssd, seek_ms, rpm, mib_per_s, latency_us, \
                     write_latency_us, flush_us, parallel"
                )));
            }
        }
        Ok(())
    }

    fn rotation(&self) -> Duration {
        if self.rpm > 0.0 { Duration::from_secs_f64(60.0 / self.rpm) } else { Duration::ZERO }
    }

    fn is_mechanical(&self) -> bool {
        self.seek_ms > 0.0 || self.rpm > 0.0
    }
}

fn refused(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

impl fmt::Display for ThrottleParameters {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let single = if self.parallel > 1 { Some(f64::from(self.parallel)) } else { None };
        let above_zero = |value: f64| (value > 0.0).then_some(value);
        let fields = [
            ("seek_ms", above_zero(self.seek_ms)),
            ("rpm", above_zero(self.rpm)),
            ("mib_per_s", above_zero(self.mib_per_s)),
            ("latency_us", above_zero(self.latency_us)),
            ("write_latency_us", self.write_latency_us),
            ("flush_us", self.flush_us),
            ("parallel", single),
        ];
        let mut separator = "";
        for (name, value) in fields {
            if let Some(value) = value {
                write!(out, "{separator}{name}={value}")?;
                separator = ",";
            }
        }
        Ok(())
    }
}

/// The state of the disk: when its parts become free, and the position of the arm.
#[derive(Debug)]
struct Mechanics {
    parameters: ThrottleParameters,
    size: u64,
    units: Vec<Instant>,
    bus_free: Instant,
    head: u64,
    random: u64,
}

impl Mechanics {
    fn new(parameters: ThrottleParameters, size: u64, now: Instant) -> Self {
        let units = vec![now; parameters.parallel.max(1) as usize];
        Self { parameters, size: size.max(1), units, bus_free: now, head: 0, random: 0x9E37_79B9_7F4A_7C15 }
    }

    /// The time at which an operation submitted `now` completes.
    fn serve(&mut self, now: Instant, op: &BackingOp) -> Instant {
        let range = job::range_of(op);
        let unit = (0..self.units.len()).min_by_key(|&unit| self.units[unit]).unwrap_or(0);
        let ready = now.max(self.units[unit]) + self.latency(op, range);
        let end = match op {
            BackingOp::Flush | BackingOp::Discard { .. } => ready,
            BackingOp::Read { .. }
            | BackingOp::Verify { .. }
            | BackingOp::Compare { .. }
            | BackingOp::Write { .. }
            | BackingOp::WriteZeroes { .. } => {
                self.head = range.end;
                let end = ready.max(self.bus_free) + self.transfer(range.len());
                self.bus_free = end;
                end
            }
        };
        self.units[unit] = end;
        end
    }

    fn latency(&mut self, op: &BackingOp, range: ByteRange) -> Duration {
        let parameters = self.parameters;
        let fixed = Duration::from_secs_f64(parameters.latency_us / 1e6);
        match op {
            BackingOp::Flush => match parameters.flush_us {
                Some(time) => Duration::from_secs_f64(time / 1e6),
                None if parameters.is_mechanical() => parameters.rotation(),
                None => fixed,
            },
            BackingOp::Discard { .. } => fixed,
            BackingOp::Read { .. } | BackingOp::Verify { .. } | BackingOp::Compare { .. } => {
                fixed + self.positioning(range)
            }
            BackingOp::Write { .. } | BackingOp::WriteZeroes { .. } => {
                let write = parameters.write_latency_us.map(|time| Duration::from_secs_f64(time / 1e6));
                write.unwrap_or(fixed) + self.positioning(range)
            }
        }
    }

    fn positioning(&mut self, range: ByteRange) -> Duration {
        if range.start == self.head || !self.parameters.is_mechanical() {
            return Duration::ZERO;
        }
        let distance = range.start.abs_diff(self.head) as f64 / self.size as f64;
        // The arm accelerates and decelerates: its time is proportional to the square root of the distance. The
        // shortest seek is a tenth of the average; the mean square root of the distance between two random positions is
        // 8/15, so the average is `seek_ms`.
        let seek_s = self.parameters.seek_ms / 1000.0 * (0.1 + 0.9 * (15.0 / 8.0) * distance.min(1.0).sqrt());
        let wait = self.parameters.rotation().mul_f64(self.random_share());
        let jump = Duration::from_secs_f64(seek_s) + wait;
        if range.start > self.head && self.parameters.mib_per_s > 0.0 {
            return jump.min(self.transfer(range.start - self.head));
        }
        jump
    }

    fn transfer(&self, length: u64) -> Duration {
        if self.parameters.mib_per_s > 0.0 {
            // The smallest rate and the largest device stay below the maximum of a duration.
            Duration::try_from_secs_f64(length as f64 / (self.parameters.mib_per_s * MIB))
                .unwrap_or(DAY)
                .min(DAY)
        } else {
            Duration::ZERO
        }
    }

    /// A number from 0 to 1; the same sequence in every run (xorshift64).
    fn random_share(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }
}

const DAY: Duration = Duration::from_secs(86_400);

/// A backing device behind the model of a disk.
pub struct Throttle<B> {
    inner: B,
    parameters: ThrottleParameters,
    mechanics: Arc<Mutex<Mechanics>>,
}

impl<B: Backing> Throttle<B> {
    /// `inner`, throttled by `parameters`.
    pub fn new(inner: B, parameters: ThrottleParameters) -> Self {
        let mechanics = Mechanics::new(parameters, inner.geometry().size, Instant::now());
        Self { inner, parameters, mechanics: Arc::new(Mutex::new(mechanics)) }
    }
}

impl<B: Backing> Backing for Throttle<B> {
    fn geometry(&self) -> BackingGeometry {
        BackingGeometry { rotational: self.parameters.is_mechanical(), ..self.inner.geometry() }
    }

    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let inner = self.inner.open_queue(depth)?;
        let open = || {
            let (timer, poller) = (Timer::new()?, Poller::new()?);
            poller.add(inner.wait_descriptor(), 0, false)?;
            poller.add(timer.as_raw_fd(), 0, false)?;
            std::io::Result::Ok((timer, poller))
        };
        let (timer, poller) = open().map_err(|error| {
            Error::new(ErrorKind::System, "cannot open a throttled queue").caused_by(error)
        })?;
        Ok(Box::new(ThrottledQueue {
            inner,
            mechanics: Arc::clone(&self.mechanics),
            next: 0,
            beneath: HashMap::new(),
            held: BTreeMap::new(),
            arrived: Vec::new(),
            timer,
            alarm: None,
            poller,
        }))
    }

    fn describe(&self) -> String {
        format!("{}, throttled ({})", self.inner.describe(), self.parameters)
    }
}

struct ThrottledQueue {
    inner: Box<dyn PollableQueue>,
    mechanics: Arc<Mutex<Mechanics>>,
    next: u64,
    /// Operations in the inner queue: the submitter's token, and the completion time of the model.
    beneath: HashMap<u64, (OpToken, Instant)>,
    /// Operations that are complete in the inner queue but not in the model, by time and number.
    held: BTreeMap<(Instant, u64), BackingDone>,
    arrived: Vec<BackingDone>,
    timer: Timer,
    alarm: Option<Instant>,
    poller: Poller,
}

impl ThrottledQueue {
    fn release(&mut self, done: &mut Vec<BackingDone>) {
        let now = Instant::now();
        while let Some(first) = self.held.first_entry()
            && first.key().0 <= now
        {
            done.push(first.remove());
        }
        let alarm = self.held.first_key_value().map(|((time, _), _)| *time);
        if alarm != self.alarm {
            // Fails only for a number out of range, which this delay is not.
            let _ = self.timer.set(alarm.map(|time| time.saturating_duration_since(now)));
            self.alarm = alarm;
        }
    }
}

impl BackingQueue for ThrottledQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let time = {
            let mut mechanics = self.mechanics.lock().unwrap_or_else(PoisonError::into_inner);
            mechanics.serve(Instant::now(), &op)
        };
        let number = self.next;
        self.next += 1;
        self.beneath.insert(number, (token, time));
        self.inner.submit(OpToken(number), op);
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        self.inner.poll(&mut self.arrived);
        for mut one in self.arrived.drain(..) {
            let number = one.token.0;
            if let Some((token, time)) = self.beneath.remove(&number) {
                one.token = token;
                self.held.insert((time, number), one);
            }
        }
        self.release(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        let before = done.len();
        self.poll(done);
        while done.len() == before && self.in_flight() > 0 {
            if wait_readable(self.poller.as_raw_fd()).is_err() {
                return;
            }
            self.poll(done);
        }
    }

    fn in_flight(&self) -> usize {
        self.beneath.len() + self.held.len()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

impl PollableQueue for ThrottledQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.poller.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::AlignedBuffer;

    const SIZE: u64 = 1 << 40;

    fn write(offset: u64) -> BackingOp {
        BackingOp::Write { offset, buffer: AlignedBuffer::zeroed(4096) }
    }

    fn read(offset: u64) -> BackingOp {
        BackingOp::Read { offset, buffer: AlignedBuffer::zeroed(4096) }
    }

    fn time_ms(mechanics: &mut Mechanics, now: Instant, at: u64) -> f64 {
        let end = mechanics.serve(now, &write(at));
        end.saturating_duration_since(now).as_secs_f64() * 1000.0
    }

    #[test]
    fn random_writes_to_a_hard_disk_take_an_average_seek_and_half_a_rotation() {
        let start = Instant::now();
        let mut disk = Mechanics::new(ThrottleParameters::HARD_DISK, SIZE, start);
        let mut position = 1_u64;
        let mut now = start;
        for _ in 0..20_000 {
            position =
                position.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            now = disk.serve(now, &write((position >> 24) % SIZE / 4096 * 4096));
        }
        let average_ms = (now - start).as_secs_f64() * 1000.0 / 20_000.0;
        // 8 ms + 60 s / 7200 / 2 + the transfer; and a tenth of a seek for the arm's start.
        assert!((11.9..13.5).contains(&average_ms), "{average_ms}");
    }

    #[test]
    fn a_sequential_write_takes_only_its_transfer_time() {
        let now = Instant::now();
        let mut disk = Mechanics::new(ThrottleParameters::HARD_DISK, SIZE, now);
        assert!(time_ms(&mut disk, now, 0) < 0.1);
        assert!(time_ms(&mut disk, now, 4096) < 0.1);
        assert!(time_ms(&mut disk, now, SIZE / 2) > 4.0);
    }

    #[test]
    fn one_arm_serves_one_operation_after_the_other() {
        let now = Instant::now();
        let mut disk = Mechanics::new(ThrottleParameters::HARD_DISK, SIZE, now);
        let first = disk.serve(now, &read(SIZE / 2));
        let second = disk.serve(now, &read(SIZE / 4));
        assert!(second > first);
    }

    #[test]
    fn a_flush_costs_a_rotation() {
        let now = Instant::now();
        let mut disk = Mechanics::new(ThrottleParameters::HARD_DISK, SIZE, now);
        let end = disk.serve(now, &BackingOp::Flush);
        assert_eq!((end - now).as_micros(), 8333);
    }

    #[test]
    fn a_flash_disk_executes_several_operations_in_parallel() {
        let now = Instant::now();
        let parameters = ThrottleParameters { mib_per_s: 0.0, ..ThrottleParameters::FLASH_DISK };
        let mut disk = Mechanics::new(parameters, SIZE, now);
        for index in 0..32 {
            let end = disk.serve(now, &read(index << 30));
            assert_eq!((end - now).as_micros(), 90);
        }
        assert_eq!((disk.serve(now, &read(0)) - now).as_micros(), 180);
    }

    #[test]
    fn parameters_are_read_as_they_are_printed() {
        for parameters in
            [ThrottleParameters::HARD_DISK, ThrottleParameters::FLASH_DISK, ThrottleParameters::NONE]
        {
            assert_eq!(ThrottleParameters::parse(&parameters.to_string()).expect("readable"), parameters);
        }
        let slow = ThrottleParameters::parse("hdd,rpm=5400").expect("readable");
        assert_eq!(slow, ThrottleParameters { rpm: 5400.0, ..ThrottleParameters::HARD_DISK });
    }

    #[test]
    fn invalid_parameters_are_refused() {
        for text in
            ["rpm", "rpm=-1", "rpm=NaN", "seek_ms=1e9", "colour=3", "rpm=1,hdd", "rpm=1,,", "parallel=x"]
        {
            let error = ThrottleParameters::parse(text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
}
