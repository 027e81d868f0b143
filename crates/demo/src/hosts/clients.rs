//! Clients of both hosts, which write and read checksummed blocks while another thread kills daemons and moves the
//! backend.
//!
//! Invariants: each client has blocks of its own and one request in flight, so it knows what each of its reads must
//! return. No request fails, but those of clients that may connect again; such a client first finds out whether the
//! block that it was writing is the old one or the new one, and no other one.
//!
//! Elsewhere: the log of writes (`block`), the counters (`work`).

use super::untrue;
use crate::block::{BLOCK, Log, Random, Verdict};
use crate::interrupt;
use crate::target::{Io, Sync, Target};
use crate::work::{Gauge, repeat};
use cbd_types::{AlignedBuffer, Context, Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Clients of each host.
pub const CLIENTS: u32 = 2;
/// Clients of both hosts, each of which has every so many-th block.
const ALL_CLIENTS: u32 = 2 * CLIENTS;
/// Timeout of a client that connects again, and of progress.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The clients of one host.
#[derive(Debug)]
pub struct Clients {
    host: &'static str,
    target: Target,
    /// Another block device of the same disk, through which every other read goes.
    other: Option<Target>,
    /// The number of the first one among the clients of both hosts.
    first: u32,
    may_reconnect: bool,
    gauge: Gauge,
    reconnected: AtomicU32,
    /// Writes that were in flight when a connection ended.
    interrupted: AtomicU32,
}

impl Clients {
    /// Clients of host number `index`, named `host`, which end with the first error of their connections.
    pub fn new(index: u32, host: &'static str, target: Target) -> Self {
        Self {
            host,
            target,
            other: None,
            first: index * CLIENTS,
            may_reconnect: false,
            gauge: Gauge::default(),
            reconnected: AtomicU32::new(0),
            interrupted: AtomicU32::new(0),
        }
    }

    /// The same, but every other read goes through `other`.
    pub fn reading_through(mut self, other: Target) -> Self {
        self.other = Some(other);
        self
    }

    /// The same, but they connect again when a connection has ended.
    pub const fn that_reconnect(mut self) -> Self {
        self.may_reconnect = true;
        self
    }

    /// Requests that have completed.
    pub fn completed(&self) -> u64 {
        self.gauge.acknowledged()
    }

    /// The slowest request that has completed since the last call, in milliseconds.
    pub fn take_slowest_ms(&self) -> f64 {
        (self.gauge.take_slowest().as_secs_f64() * 10_000.0).round() / 10.0
    }

    /// Clients that have connected again.
    pub fn reconnected(&self) -> u32 {
        self.reconnected.load(Ordering::SeqCst)
    }

    /// Writes that were in flight when a connection ended.
    pub fn interrupted(&self) -> u32 {
        self.interrupted.load(Ordering::SeqCst)
    }

    /// An error as soon as a client has ended with one. [`play`] returns that client's own error instead.
    fn check(&self) -> Result<()> {
        interrupt::check()?;
        if self.gauge.failed() > 0 {
            return Err(untrue(format!("a client of host {} saw an error", self.host)));
        }
        Ok(())
    }

    /// Waits until `is_over`.
    ///
    /// # Errors
    /// When a client has ended, and when it takes too long.
    pub fn until(&self, what: &str, mut is_over: impl FnMut() -> bool) -> Result<()> {
        let mut result = Ok(());
        let over = interrupt::poll_until(TIMEOUT, || {
            result = self.check();
            result.is_err() || is_over()
        });
        result?;
        if over {
            return Ok(());
        }
        Err(Error::new(ErrorKind::TimedOut, format!("host {}: {what} did not happen within 20 s", self.host)))
    }

    /// Waits until `count` more requests have completed.
    ///
    /// # Errors
    /// As [`until`](Self::until).
    pub fn until_progress(&self, count: u64) -> Result<()> {
        let before = self.completed();
        self.until(&format!("progress by {count} requests"), || self.completed() >= before + count)
    }

    /// Waits until a request is in flight.
    ///
    /// # Errors
    /// As [`until`](Self::until).
    pub fn until_in_flight(&self) -> Result<()> {
        self.until("a request in flight", || self.gauge.in_flight() > 0)
    }
}

/// Lets all clients write and read until `watch` returns.
///
/// # Errors
/// The first error of a client, unless `watch` failed before; else that of `watch`.
pub fn play<T>(groups: &[&Clients], log: &Log, seed: u64, watch: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut clients = Vec::new();
    for group in groups {
        for number in group.first..group.first + CLIENTS {
            clients.push(Client::new(group, log, seed, number)?);
        }
    }
    std::thread::scope(|scope| {
        // Stops the threads also if `watch` panics: the scope would wait for them forever.
        let stop: Vec<_> = groups.iter().map(|group| group.gauge.stop_on_drop()).collect();
        let threads: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                (client.of.host, scope.spawn(move || repeat(&client.of.gauge, || client.step())))
            })
            .collect();
        let watched = watch();
        // Otherwise an error of `watch` is the reason, such as that of a daemon that does not start again.
        let is_of_client = watched.is_ok() || groups.iter().any(|group| group.gauge.failed() > 0);
        drop(stop);
        let mut failed = None;
        for (host, thread) in threads {
            let ended = thread
                .join()
                .map_err(|_| Error::new(ErrorKind::System, "a thread of the demonstration panicked"))?;
            if let Some((_, error)) = ended.unacknowledged {
                failed.get_or_insert((host, error));
            }
        }
        // A client that sees an error because the demonstration was interrupted is not the reason.
        interrupt::check()?;
        match failed {
            Some((host, error)) if is_of_client => Err(error).context(|| format!("a client of host {host}")),
            _ => watched,
        }
    })
}

/// Writes and waits for `duration`, which a bar shows.
///
/// # Errors
/// When a client has ended.
pub fn go_on(groups: &[&Clients], duration: Duration, bar: &crate::output::Bar) -> Result<()> {
    let begun = Instant::now();
    let mut result = Ok(());
    interrupt::poll_until(duration, || {
        bar.set(begun.elapsed().as_secs_f64() / duration.as_secs_f64());
        result = groups.iter().try_for_each(|group| group.check());
        result.is_err()
    });
    result
}

/// One client, with a connection.
struct Client<'a> {
    of: &'a Clients,
    log: &'a Log,
    /// Its number among the clients of both hosts.
    number: u32,
    random: Random,
    io: Io,
    other: Option<Io>,
    buffer: AlignedBuffer,
}

impl<'a> Client<'a> {
    fn new(of: &'a Clients, log: &'a Log, seed: u64, number: u32) -> Result<Self> {
        Ok(Self {
            of,
            log,
            number,
            random: Random::new(seed.wrapping_add(u64::from(number) << 40)),
            io: of.target.open(Sync::Durable)?,
            other: of.other.as_ref().map(|other| other.open(Sync::Durable)).transpose()?,
            buffer: AlignedBuffer::zeroed(BLOCK),
        })
    }

    /// Writes one of its blocks, or reads and compares one.
    fn step(&mut self) -> Result<()> {
        let slot = self.random.below(self.log.slots() / ALL_CLIENTS) * ALL_CLIENTS + self.number;
        let is_write = self.random.below(3) > 0;
        let result = if is_write { self.write(slot) } else { self.read(slot) };
        match result {
            Err(error) if self.of.may_reconnect && error.kind() != ErrorKind::Damaged => {
                if is_write {
                    self.of.interrupted.fetch_add(1, Ordering::SeqCst);
                }
                self.reconnect(slot)
            }
            result => result,
        }
    }

    fn write(&mut self, slot: u32) -> Result<()> {
        self.log.issue(slot, &mut self.buffer);
        self.io.write(slot, &self.buffer)?;
        self.log.acknowledge(slot);
        Ok(())
    }

    fn read(&mut self, slot: u32) -> Result<()> {
        let io = match &mut self.other {
            Some(other) if self.random.below(2) == 0 => other,
            _ => &mut self.io,
        };
        io.read(slot, &mut self.buffer)?;
        compared(slot, self.log.validate(slot, &self.buffer))
    }

    /// Connects again, and finds out what has become of `slot`, which was in flight.
    fn reconnect(&mut self, slot: u32) -> Result<()> {
        let mut result = Ok(());
        let over = interrupt::poll_until(TIMEOUT, || {
            result = self.of.target.open(Sync::Durable).and_then(|mut io| {
                io.read(slot, &mut self.buffer)?;
                self.io = io;
                Ok(())
            });
            result.is_ok() || interrupt::requested()
        });
        if !over {
            return result.context(|| "no connection again within 20 s".to_owned());
        }
        result?;
        compared(slot, self.log.validate_and_record(slot, &self.buffer))?;
        self.of.reconnected.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn compared(slot: u32, verdict: Verdict) -> Result<()> {
    match verdict {
        Verdict::Right => Ok(()),
        Verdict::Older(lost) => Err(untrue(format!("block {slot}: {lost} acknowledged writes are lost"))),
        Verdict::Wrong => Err(untrue(format!("block {slot} contains data that was never written there"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_and_foreign_blocks_are_errors() {
        compared(3, Verdict::Right).unwrap();
        for verdict in [Verdict::Older(2), Verdict::Wrong] {
            assert_eq!(compared(3, verdict).unwrap_err().kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn clients_without_a_device_do_not_begin() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::new(ALL_CLIENTS, 1);
        let clients = Clients::new(0, "a", Target::Nbd(folder.path().join("none.sock")));
        play(&[&clients], &log, 1, || -> Result<()> { panic!("it must not begin") }).unwrap_err();
        assert_eq!(log.acknowledged_total(), 0);
    }
}
