//! A kill of the daemon while clients write, and the comparison after its restart.
//!
//! Invariants: the blocks are compared with the log before the first write after the restart.

use crate::block::Log;
use crate::interrupt;
use crate::measure::{Compared, read_all};
use crate::output::{Bar, grouped};
use crate::report::{Kill, Report};
use crate::servers::{Daemon, Started};
use crate::steps::{Demo, seed};
use crate::target::{self, Target};
use crate::work::{self, Ended, Gauge, Logs};
use cbd_daemon::size::format_size;
use cbd_types::{Context, Error, ErrorKind, Result};
use std::time::{Duration, Instant};

/// Most kills until one finds requests in flight and dirty data: more than one only if the machine is very busy.
const ATTEMPTS: u32 = 5;
/// Timeout of waits for the device of a killed daemon.
const DEATH_TIMEOUT: Duration = Duration::from_secs(20);

/// The moment of the kill.
struct Moment {
    at: Instant,
    dirty_bytes: u64,
    /// Ends waits for the device of the killed daemon.
    _watchdog: interrupt::Watchdog,
}

impl Demo {
    /// Kills the daemon until a kill finds requests in flight, and continues to write after that.
    pub(crate) fn kill(
        &self,
        mut target: Target,
        logs: &Logs,
        daemon: &mut Daemon,
        started: &Started,
        report: &mut Report,
    ) -> Result<Target> {
        logs.count_from_here();
        for attempt in 1..=ATTEMPTS {
            let (kill, compared);
            (target, kill, compared) = self.kill_once(target, logs, daemon, started, attempt)?;
            report.kill = Some(kill);
            compared.check("after the kill")?;
            if kill.in_flight > 0 && kill.dirty_bytes > 0 {
                break;
            }
            self.output.print("   No write was in flight at that moment: the kill is repeated.");
        }
        let Some(kill) = &mut report.kill else { return Ok(target) };
        if kill.acknowledged == 0 || kill.in_flight == 0 || kill.dirty_bytes == 0 {
            let text = "the daemon could not be killed with requests in flight and dirty data: is this machine busy?";
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        self.output.print(&format!(
            "   Killed with {} requests in flight and {} in the cache only; back after {} ms.",
            kill.in_flight,
            format_size(kill.dirty_bytes),
            kill.recovery_ms
        ));
        self.output.print(&format!(
            "   {} writes had been acknowledged; {} were checked and are there, {} are lost.",
            grouped(kill.acknowledged),
            grouped(kill.verified),
            kill.lost
        ));
        let bar = self.output.bar("going on");
        let (_, ended) =
            work::write_while(&target, logs, seed(), |gauge| self.watch(gauge, self.scale.after, &bar))?;
        first_failure(ended)?;
        kill.acknowledged_after = logs.acknowledged() - kill.acknowledged;
        self.output.print(&format!("   Work continued: {} more writes.", grouped(kill.acknowledged_after)));
        Ok(target)
    }

    fn kill_once(
        &self,
        target: Target,
        logs: &Logs,
        daemon: &mut Daemon,
        started: &Started,
        attempt: u32,
    ) -> Result<(Target, Kill, Compared)> {
        let bar = self.output.bar("checksummed writes");
        let (moment, ended) = work::write_while(&target, logs, seed(), |gauge| {
            if self.watch(gauge, self.scale.before, &bar)? {
                kill_in_flight(gauge, daemon, started.backend).map(Some)
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
        // The device has ended, but the file system can be unmounted.
        target.close().context(|| "after the kill".to_owned())?;
        bar.message("starting it again".to_owned());
        daemon.restart().context(|| "after the kill".to_owned())?;
        let dirty_bytes_recovered = daemon.dirty_bytes(started.backend)?;
        let target = Target::open_existing(self.export, &started.device, self.folder.path())
            .context(|| "after the kill".to_owned())?;
        let recovery = moment.at.elapsed();
        bar.message("checking every write".to_owned());
        let mut io = target.open(target::Sync::Completed)?;
        let validate_and_record = |log: &Log, slot, block: &[u8]| log.validate_and_record(slot, block);
        let mut compared = read_all(&mut io, &logs.blocks, &bar, |slot, block| {
            validate_and_record(&logs.blocks, slot, block)
        })?;
        if let Some(root) = target.root() {
            compared = compared.and(
                logs.files.compare(root, |slot, block| validate_and_record(logs.files.log(), slot, block))?,
            );
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
        Ok((target, kill, compared))
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

/// Waits until there is dirty data and a request in flight, then kills the daemon.
fn kill_in_flight(gauge: &Gauge, daemon: &mut Daemon, backend: u32) -> Result<Moment> {
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
