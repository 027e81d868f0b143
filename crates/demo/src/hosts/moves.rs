//! Moves of the backend from one host to the other one while clients of both write.
//!
//! Invariants: no request of either host fails. What a client writes through one host it reads through the other one,
//! also during the move.
//!
//! Elsewhere: what a client does (`clients`).

use super::clients::{go_on, play};
use super::kills::milliseconds;
use super::report::Move;
use super::{A, B, Scene, until, untrue};
use crate::output::grouped;
use crate::steps::seed;
use cbd_daemon::size::format_size;
use cbd_types::{Context, Result};
use std::time::Instant;

/// Requests of each host that must complete after a move.
const PROGRESS: u64 = 50;

impl Scene {
    /// Moves the backend from one host to the other one. Host a is asked to, which sends it or gets it.
    pub(super) fn move_backend(&mut self, from: usize, to: usize) -> Result<Move> {
        let on_a = self.clients(A).reading_through(self.hosts[B].target());
        let on_b = self.clients(B).reading_through(self.hosts[A].target());
        let both = [&on_a, &on_b];
        let bar = self.output.bar("clients of both hosts write");
        let (former, next, asked) = (&self.hosts[from], &self.hosts[to], &self.hosts[A]);
        let (scale, backend) = (self.scale, self.backend);
        let mut moved = play(&both, &self.log, seed(), || {
            go_on(&both, scale.writes, &bar)?;
            let dirty_bytes = former.dirty_bytes(backend)?;
            let moves = former.moves()?.len();
            let before = both.map(|clients| {
                clients.take_slowest_ms();
                clients.completed()
            });
            let begun = Instant::now();
            bar.message(format!("moving to {}", next.name()));
            asked
                .move_backend(backend, next.name(), &bar)
                .context(|| format!("moving the backend to host {}", next.name()))?;
            let duration_ms = milliseconds(begun.elapsed());
            let [on_a_during, on_b_during] = both.map(|clients| clients.completed());
            if !next.has_backend(backend)? || former.has_backend(backend)? {
                return Err(untrue(format!("the backend is not on host {} alone", next.name())));
            }
            for clients in both {
                clients.until_progress(PROGRESS)?;
            }
            bar.message("clients of both hosts write".to_owned());
            go_on(&both, scale.writes, &bar)?;
            let mut reported = former.moves()?;
            until("the event backend.moved", || {
                reported = former.moves()?;
                Ok(reported.len() > moves)
            })?;
            let Some(event) = reported.pop().filter(|event| event.to == next.name()) else {
                return Err(untrue(format!("host {} reports no move to {}", former.name(), next.name())));
            };
            Ok(Move {
                from: former.name(),
                to: next.name(),
                dirty_bytes,
                asked: asked.name(),
                duration_ms,
                pause_ms: event.pause_ms,
                slowest_on_a_ms: on_a.take_slowest_ms(),
                slowest_on_b_ms: on_b.take_slowest_ms(),
                completed_on_a: on_a_during - before[0],
                completed_on_b: on_b_during - before[1],
                ..Move::default()
            })
        })?;
        drop(bar);
        moved.compared = self.compare(&format!("after the move to host {}", moved.to))?;
        self.output.print(&format!(
            "   To host {}, with {} of dirty data: {:.1} s, in which {} requests completed. Requests were held for {} ms; \
             the slowest took {:.0} ms on a and {:.0} ms on b, and none failed.",
            moved.to,
            format_size(moved.dirty_bytes),
            moved.duration_ms / 1000.0,
            grouped(moved.completed_on_a + moved.completed_on_b),
            moved.pause_ms,
            moved.slowest_on_a_ms,
            moved.slowest_on_b_ms
        ));
        Ok(moved)
    }
}
