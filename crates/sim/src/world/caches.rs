//! Caches that come and go, grow and shrink while the clients go on.
//!
//! Invariants: one change goes on at a time; whoever waits for a request lets the change go on, because it may hold the route.

use super::World;
use super::neighbour::Neighbour;
use crate::process::Advanced;
use cbd_types::{Class, Epoch, Error, ErrorKind};
use std::sync::Arc;

/// Turns out of a thousand in which a change begins or goes on.
const CHANGE_PERMILLE: u64 = 200;
/// Turns out of a thousand in which the other backend has a request.
const NEIGHBOUR_PERMILLE: u64 = 100;
/// Changes out of a thousand that are given up before their next step.
const GIVEN_UP_PERMILLE: u64 = 20;

impl World {
    /// Executes an event that only worlds with changing caches have; returns whether it did.
    pub(super) fn turn_of_caches(&mut self) -> bool {
        if self.options.varies_size && self.random.chance(NEIGHBOUR_PERMILLE) {
            self.turn_of_neighbour();
            return true;
        }
        if !self.options.varies_caches() || !self.random.chance(CHANGE_PERMILLE) {
            return false;
        }
        if self.process().is_changing() {
            if self.random.chance(GIVEN_UP_PERMILLE) {
                self.give_change_up();
            } else {
                self.advance_change();
            }
        } else {
            self.begin_change();
        }
        true
    }

    fn turn_of_neighbour(&mut self) {
        let environment = Arc::clone(&self.environment);
        let Some(neighbour) = &mut self.neighbour else { return };
        for _ in 0..self.random.below(3) {
            neighbour.maintain(environment.clock_ms());
        }
        let turned = neighbour.turn(&environment, &mut self.random);
        // Stores up to here happened before the client is told.
        self.check_points();
        let ended = turned.unwrap_or_else(|text| self.fail(text));
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.note(ended);
        }
    }

    /// The memory becomes larger by `bytes`, the region grows to its end, and the cache, which stays open, gets all segments that are
    /// free then.
    pub fn grow_region(&mut self, bytes: u64) {
        self.memory.extend(&vec![0; bytes as usize]);
        let grown = self.process().grow_region();
        if let Err(error) = grown {
            self.fail(format!("the region does not grow: {error}"));
        }
    }

    /// Sets the class of requests that have none, until the process ends.
    pub fn set_class(&mut self, class: Class) {
        self.process().set_class(class);
    }

    fn begin_change(&mut self) {
        self.route_changes += 1;
        let is_cached = self.process().cached().is_some();
        let choices = u64::from(self.options.varies_route) * 2 + u64::from(self.options.varies_size) * 4;
        let choice = self.random.below(choices) + if self.options.varies_route { 0 } else { 2 };
        let segments = self.random.between(1, 3) as u32;
        let is_own = self.random.chance(500) && is_cached;
        let other = self.neighbour.as_ref().filter(|_| !is_own);
        let other = other.and_then(|neighbour| Some((neighbour.backend, neighbour.cache()?)));
        let begun = match choice {
            0 | 1 if is_cached => self.process().begin_detach(),
            0 | 1 => {
                let size = self.options.segment_size;
                let free = u64::from(self.process().transport().info().free_segments);
                let wanted = self.random.between(9, free.max(9));
                let lanes_max = self.options.lanes_max;
                self.process().begin_attach(wanted * size, lanes_max)
            }
            2 | 3 => {
                self.process().begin_grow(other, segments);
                Ok(())
            }
            _ => self.process().begin_shrink(other, segments),
        };
        match begun {
            Ok(()) => {}
            // The caches have the segments, or need them.
            Err(error) if error.kind() == ErrorKind::NoSpace => {}
            Err(error) => self.fail(format!("a change of the cache does not begin: {error}")),
        }
        self.check_points();
    }

    /// The change that goes on takes a step.
    pub(super) fn advance_change(&mut self) {
        for _ in 0..self.random.below(4) {
            self.maintain();
        }
        let environment = Arc::clone(&self.environment);
        for _ in 0..self.random.below(4) {
            self.neighbour.as_mut().map(|neighbour| neighbour.maintain(environment.clock_ms()));
        }
        let advanced = self.process().advance_change();
        self.note_advanced(advanced);
    }

    /// Notes the outcome of a step, which may have run beside other threads.
    pub(super) fn note_advanced(&mut self, advanced: Result<Advanced, Error>) {
        self.check_points();
        match advanced.unwrap_or_else(|error| self.fail(format!("a change of the cache fails: {error}"))) {
            Advanced::Goes => return,
            Advanced::Attached => self.happened.attached += 1,
            Advanced::Detached => {
                self.happened.detached += 1;
                self.draining = None;
                self.drained_epoch = Epoch(0);
                self.parked_seen = (0, 0);
            }
            Advanced::Grown => self.happened.grown += 1,
            Advanced::Shrunk => self.happened.shrunk += 1,
            Advanced::Refused => {}
        }
        self.route_changes += 1;
        self.check_sizes();
    }

    /// Gives the change that goes on up.
    pub(super) fn give_change_up(&mut self) {
        self.happened.given_up += 1;
        self.route_changes += 1;
        if let Err(error) = self.process().give_change_up() {
            self.fail(format!("a change of the cache cannot be given up: {error}"));
        }
        self.check_points();
    }

    /// Lets a change that goes on end.
    pub(super) fn finish_change(&mut self) {
        for _ in 0..100_000 {
            if !self.process().is_changing() {
                return;
            }
            for client in 0..self.options.clients {
                self.poll(client);
            }
            self.advance_change();
            let now = self.environment.clock_ms();
            self.environment.advance(u64::from(now.is_multiple_of(7)));
        }
        // A cache that must keep more than it has to give up.
        self.give_change_up();
    }

    /// The caches have the segments that their rows say, and no other cache has them.
    fn check_sizes(&mut self) {
        let backend = self.backend;
        let other = self.neighbour.as_ref().map(|neighbour| (neighbour.backend, neighbour.cache()));
        let process = self.process();
        let mut wrong = Vec::new();
        let own = process.cached().map(|cache| cache.status().segments);
        let mut caches = vec![(backend, own)];
        caches.extend(other.map(|(backend, cache)| (backend, cache.map(|cache| cache.status().segments))));
        let info = process.transport().info();
        let mut owned = info.free_segments;
        for (backend, running) in caches {
            let Ok(entry) = process.transport().backend(backend) else { continue };
            owned += entry.cache_segments;
            if running.is_some_and(|running| running < entry.log_segments()) {
                wrong.push(format!("{backend} has {running:?} log segments of {}", entry.log_segments()));
            }
        }
        if owned > info.layout.segment_count {
            wrong.push(format!("{owned} segments of {}", info.layout.segment_count));
        }
        if !wrong.is_empty() {
            self.fail(format!("{wrong:?}"));
        }
    }

    /// Opens the cache of the other backend in a new process.
    pub(super) fn open_neighbour(&mut self) {
        let Some(process) = &self.process else { return };
        let transport = Arc::clone(process.transport());
        let Some(neighbour) = &mut self.neighbour else { return };
        if let Err(error) = neighbour.open(&transport) {
            self.fail(format!("the other cache does not open: {error}"));
        }
    }

    /// Compares what the other backend has.
    pub(super) fn check_neighbour(
        &mut self,
        check: impl FnOnce(&mut Neighbour, &crate::SimEnvironment) -> Result<(), String>,
    ) {
        let environment = Arc::clone(&self.environment);
        let Some(neighbour) = &mut self.neighbour else { return };
        let verdict = check(neighbour, &environment);
        verdict.unwrap_or_else(|text| self.fail(text));
    }
}
