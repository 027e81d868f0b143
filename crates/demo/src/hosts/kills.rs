//! Kills of the daemon of either host while clients write, and the comparison after its restart.
//!
//! Invariants: while the daemon of the host that has the backend is dead, no request of another host completes and none
//! fails. While that of another host is dead, clients of the host that has the backend go on.
//!
//! Elsewhere: what a client does (`clients`).

use super::clients::{CLIENTS, Clients, go_on, play};
use super::report::{KillOfA, KillOfB};
use super::{A, B, Scene, untrue};
use crate::output::grouped;
use crate::steps::seed;
use cbd_daemon::size::format_size;
use cbd_types::{Context, Result};
use std::time::{Duration, Instant};

/// Requests that must complete after a restart before the client's work counts as continued.
const PROGRESS: u64 = 50;

impl Scene {
    /// The clients of a host.
    pub(super) fn clients(&self, index: usize) -> Clients {
        let host = &self.hosts[index];
        Clients::new(if index == A { 0 } else { 1 }, host.name(), host.target())
    }

    /// Kills the daemon that has the backend while clients of the other host write.
    pub(super) fn kill_a(&mut self) -> Result<KillOfA> {
        let on_b = self.clients(B);
        let bar = self.output.bar("clients of b write");
        let (scale, backend, log, panics) = (self.scale, self.backend, &self.log, self.panics);
        let a = &mut self.hosts[A];
        let mut kill = play(&[&on_b], log, seed(), || {
            go_on(&[&on_b], scale.writes, &bar)?;
            assert!(!panics, "a panic was requested");
            let dirty_bytes = a.dirty_bytes(backend)?;
            on_b.until_in_flight()?;
            on_b.take_slowest_ms();
            let killed = Instant::now();
            a.kill()?;
            let before = on_b.completed();
            bar.message("a is dead, clients of b wait".to_owned());
            go_on(&[&on_b], scale.down, &bar)?;
            let completed_while_down = on_b.completed() - before;
            // The last reply of each client may have been on its way.
            if completed_while_down > u64::from(CLIENTS) {
                let text = format!(
                    "{completed_while_down} requests of host b completed while the daemon of the backend was dead"
                );
                return Err(untrue(text));
            }
            let down_ms = milliseconds(killed.elapsed());
            a.restart().context(|| "host a after the kill".to_owned())?;
            let back_ms = milliseconds(killed.elapsed());
            on_b.until_progress(PROGRESS)?;
            bar.message("clients of b write".to_owned());
            go_on(&[&on_b], scale.writes, &bar)?;
            let pause_ms = on_b.take_slowest_ms();
            if pause_ms < down_ms {
                let text = format!(
                    "no request of host b waited for the daemon of the backend: the slowest took {pause_ms} ms"
                );
                return Err(untrue(text));
            }
            Ok(KillOfA { dirty_bytes, down_ms, back_ms, pause_ms, ..KillOfA::default() })
        })?;
        drop(bar);
        kill.compared = self.compare("after the kill of host a")?;
        self.output.print(&format!(
            "   Dead for {:.0} ms with {} in the cache only, and serving again after {:.0} ms. Clients of b saw a pause of \
             {:.0} ms and no error.",
            kill.down_ms,
            format_size(kill.dirty_bytes),
            kill.back_ms,
            kill.pause_ms
        ));
        self.print_compared(kill.compared.verified);
        Ok(kill)
    }

    /// Kills the daemon of the other host while clients of both write.
    pub(super) fn kill_b(&mut self) -> Result<KillOfB> {
        let (on_a, on_b) = (self.clients(A), self.clients(B).that_reconnect());
        let bar = self.output.bar("clients of both hosts write");
        let (scale, log) = (self.scale, &self.log);
        let b = &mut self.hosts[B];
        let mut kill = play(&[&on_a, &on_b], log, seed(), || {
            go_on(&[&on_a, &on_b], scale.writes, &bar)?;
            on_b.until_in_flight()?;
            on_a.take_slowest_ms();
            let killed = Instant::now();
            b.kill()?;
            let before = on_a.completed();
            bar.message("b is dead, clients of a write".to_owned());
            go_on(&[&on_a, &on_b], scale.down, &bar)?;
            on_a.until_progress(PROGRESS)?;
            let completed_on_a_while_down = on_a.completed() - before;
            let down_ms = milliseconds(killed.elapsed());
            b.restart().context(|| "host b after the kill".to_owned())?;
            on_b.until("that each client connects again", || on_b.reconnected() == CLIENTS)?;
            let back_ms = milliseconds(killed.elapsed());
            bar.message("clients of both hosts write".to_owned());
            on_b.until_progress(PROGRESS)?;
            go_on(&[&on_a, &on_b], scale.writes, &bar)?;
            Ok(KillOfB {
                down_ms,
                back_ms,
                reconnected_clients: on_b.reconnected(),
                interrupted_writes: on_b.interrupted(),
                completed_on_a_while_down,
                slowest_on_a_ms: on_a.take_slowest_ms(),
                ..KillOfB::default()
            })
        })?;
        drop(bar);
        if on_b.reconnected() != CLIENTS {
            return Err(untrue("a client of host b lost its connection without a kill"));
        }
        kill.compared = self.compare("after the kill of host b")?;
        self.output.print(&format!(
            "   Dead for {:.0} ms; clients of b had {} writes in flight. {} requests of clients of a completed meanwhile, \
             the slowest in {:.1} ms. Both clients of b were connected again after {:.0} ms.",
            kill.down_ms,
            kill.interrupted_writes,
            grouped(kill.completed_on_a_while_down),
            kill.slowest_on_a_ms,
            kill.back_ms
        ));
        self.print_compared(kill.compared.verified);
        Ok(kill)
    }

    fn print_compared(&self, verified: u64) {
        let text = format!("   {} writes were acknowledged until now; all are there.", grouped(verified));
        self.output.print(&text);
    }
}

/// A duration in milliseconds, with one decimal.
pub fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}
