//! The death of the daemon in the middle of work, and what is there after it.
//!
//! Always true here: what was acknowledged before the kill is compared with the log before anything else is written.

use super::block::Log;
use super::door::{self, Door};
use super::interrupt;
use super::measure::{Compared, read_all};
use super::report::{Kill, Report};
use super::servers::{Daemon, Started};
use super::show::{Bar, grouped};
use super::story::{Story, seed};
use super::work::{self, Ended, Gauge, Logs};
use cbd_daemon::size::format_size;
use cbd_types::{Context, Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// Kills until one finds requests in flight and dirty data: the first, unless the machine is very busy.
const ATTEMPTS: u32 = 5;
/// How long whoever waits for a dead daemon's device gets.
const DEATH_TIMEOUT: Duration = Duration::from_secs(20);

/// The moment of the kill.
struct Moment {
    at: Instant,
    dirty_bytes: u64,
    /// Frees whoever waits for the dead daemon's device.
    _watchdog: interrupt::Watchdog,
}

impl Story {
    /// Kills the daemon until it was caught in the act, and goes on writing after that.
    pub(super) fn kill(
        &self,
        mut door: Door,
        logs: &Logs,
        daemon: &mut Daemon,
        started: &Started,
        report: &mut Report,
    ) -> Result<Door> {
        logs.count_from_here();
        for attempt in 1..=ATTEMPTS {
            let (kill, compared);
            (door, kill, compared) = self.kill_once(door, logs, daemon, started, attempt)?;
            report.kill = Some(kill);
            compared.check("after the kill")?;
            if kill.in_flight > 0 && kill.dirty_bytes > 0 {
                break;
            }
            self.show.say("   Nothing was in flight at that moment: once more.");
        }
        let Some(kill) = &mut report.kill else { return Ok(door) };
        if kill.acknowledged == 0 || kill.in_flight == 0 || kill.dirty_bytes == 0 {
            let text = "the daemon could not be killed with requests in flight and dirty data: is this machine busy?";
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        self.show.say(&format!(
            "   Killed with {} requests in flight and {} in the cache only; back after {} ms.",
            kill.in_flight,
            format_size(kill.dirty_bytes),
            kill.recovery_ms
        ));
        self.show.say(&format!(
            "   {} writes had been acknowledged; {} were checked and are there, {} are lost.",
            grouped(kill.acknowledged),
            grouped(kill.verified),
            kill.lost
        ));
        let bar = self.show.bar("going on");
        let (_, ended) =
            work::write_while(&door, logs, seed(), |gauge| self.watch(gauge, self.scale.after, &bar))?;
        first_failure(ended)?;
        kill.acknowledged_after = logs.acknowledged() - kill.acknowledged;
        self.show.say(&format!("   Work went on: {} writes more.", grouped(kill.acknowledged_after)));
        Ok(door)
    }

    fn kill_once(
        &self,
        door: Door,
        logs: &Logs,
        daemon: &mut Daemon,
        started: &Started,
        attempt: u32,
    ) -> Result<(Door, Kill, Compared)> {
        let bar = self.show.bar("checksummed writes");
        let (moment, ended) = work::write_while(&door, logs, seed(), |gauge| {
            if self.watch(gauge, self.scale.before, &bar)? {
                pull_the_plug(gauge, daemon, started.backend).map(Some)
            } else {
                Ok(None)
            }
        })?;
        let Some(moment) = moment else {
            first_failure(ended)?;
            return Err(Error::new(ErrorKind::System, "writes ended before the kill"));
        };
        let caught = ended
            .iter()
            .filter_map(|ended| ended.unacknowledged.as_ref())
            .filter(|(issued, _)| *issued < moment.at);
        let in_flight = caught.count() as u64;
        // Its device is dead, but it lets itself be unmounted.
        door.close().context(|| "after the kill".to_owned())?;
        bar.message("starting it again".to_owned());
        daemon.restart().context(|| "after the kill".to_owned())?;
        let dirty_bytes_recovered = daemon.dirty_bytes(started.backend)?;
        let door = Door::again(self.way, &started.device, self.place.path())
            .context(|| "after the kill".to_owned())?;
        let recovery = moment.at.elapsed();
        bar.message("checking every write".to_owned());
        let mut io = door.open(door::Sync::Completed)?;
        let settle = |log: &Log, slot, block: &[u8]| log.settle(slot, block);
        let mut compared =
            read_all(&mut io, &logs.blocks, &bar, |slot, block| settle(&logs.blocks, slot, block))?;
        if let Some(root) = door.root() {
            compared =
                compared.and(logs.files.compare(root, |slot, block| settle(logs.files.log(), slot, block))?);
        }
        let kill = Kill {
            acknowledged: logs.acknowledged(),
            in_flight,
            dirty_bytes: moment.dirty_bytes,
            dirty_bytes_recovered,
            verified: compared.verified,
            lost: compared.lost,
            recovery_ms: u64::try_from(recovery.as_millis()).unwrap_or(u64::MAX),
            attempts: attempt,
            acknowledged_after: 0,
        };
        Ok((door, kill, compared))
    }

    /// Watches writers for `duration`; false if one of them ended.
    fn watch(&self, gauge: &Gauge, duration: Duration, bar: &Bar) -> Result<bool> {
        let begun = Instant::now();
        while begun.elapsed() < duration {
            interrupt::check()?;
            if gauge.failed() > 0 {
                return Ok(false);
            }
            bar.set(begun.elapsed().as_secs_f64() / duration.as_secs_f64());
            bar.message(format!("{} checksummed writes", grouped(gauge.acknowledged())));
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(true)
    }
}

/// Waits until there is dirty data and a request in flight, and kills.
fn pull_the_plug(gauge: &Gauge, daemon: &mut Daemon, backend: u32) -> Result<Moment> {
    let end = Instant::now() + Duration::from_secs(5);
    let watchdog = interrupt::Watchdog::new(DEATH_TIMEOUT);
    let mut dirty_bytes = daemon.dirty_bytes(backend)?;
    while dirty_bytes == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
        dirty_bytes = daemon.dirty_bytes(backend)?;
    }
    while gauge.in_flight() == 0 && Instant::now() < end {
        std::thread::yield_now();
    }
    let at = Instant::now();
    daemon.kill()?;
    Ok(Moment { at, dirty_bytes, _watchdog: watchdog })
}

fn first_failure(ended: Vec<Ended>) -> Result<()> {
    ended.into_iter().find_map(|ended| ended.unacknowledged).map_or(Ok(()), |(_, error)| Err(error))
}
