//! The processors as the kernel numbers them for its queues, and their assignment to threads.
//!
//! Invariants: each queue is served by exactly one thread, and each thread serves at least one.

use crate::errors::system_error;
use cbd_types::{Error, ErrorKind, Result};
use std::fs;

const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
const ONLINE: &str = "/sys/devices/system/cpu/online";
/// A list with a larger number is invalid.
const NUMBER_MAX: usize = 1 << 16;

/// The processors of a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Processors {
    /// Number of possible processors: the kernel has a queue for each.
    pub possible: usize,
    /// Whether the processor with this number is online.
    online: Vec<bool>,
}

impl Processors {
    /// The processors of this machine.
    ///
    /// # Errors
    /// When sysfs cannot be read.
    pub fn of_this_machine() -> Result<Self> {
        let read = |path: &str| fs::read_to_string(path).map_err(|error| system_error(path, &error));
        Self::parse(&read(POSSIBLE)?, &read(ONLINE)?)
            .ok_or_else(|| Error::new(ErrorKind::System, format!("{POSSIBLE} holds no list of processors")))
    }

    fn parse(possible: &str, online: &str) -> Option<Self> {
        let possible = list(possible)?.len();
        let mut works = vec![false; possible];
        for number in list(online)? {
            if let Some(place) = works.get_mut(number) {
                *place = true;
            }
        }
        (possible > 0).then_some(Self { possible, online: works })
    }

    /// Whether a processor is online.
    pub fn is_online(&self, number: usize) -> bool {
        self.online.get(number).copied().unwrap_or_default()
    }

    /// Assigns the queues to at most `threads` threads. Neighbours go to different threads.
    pub fn share_out(&self, threads: usize) -> Vec<Vec<u16>> {
        let threads = threads.clamp(1, self.possible);
        let queues_of = |thread| (thread..self.possible).step_by(threads);
        let numbers = |thread| queues_of(thread).filter_map(|queue| u16::try_from(queue).ok()).collect();
        (0..threads).map(numbers).collect()
    }
}

/// Parses a list such as `0-3,8,10-11`.
fn list(text: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last > NUMBER_MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn possible_and_online_processors_are_told_apart() {
        let processors = Processors::parse("0-7\n", "0,2-3\n").unwrap();
        assert_eq!(processors.possible, 8);
        let online: Vec<_> = (0..9).filter(|&number| processors.is_online(number)).collect();
        assert_eq!(online, [0, 2, 3]);
    }

    #[test]
    fn an_invalid_list_is_refused() {
        for text in ["", "a", "1-", "-1", "0-99999999", "0,,1"] {
            assert_eq!(Processors::parse(text, "0"), None, "{text:?}");
        }
    }

    #[test]
    fn each_queue_has_one_thread_and_each_thread_at_least_one_queue() {
        for possible in 1..9 {
            let processors = Processors::parse(&format!("0-{}", possible - 1), "0").unwrap();
            for threads in 1..12 {
                let shares = processors.share_out(threads);
                assert_eq!(shares.len(), threads.min(possible));
                assert!(shares.iter().all(|share| !share.is_empty()));
                let mut queues: Vec<_> = shares.concat();
                queues.sort_unstable();
                assert_eq!(queues, (0..possible as u16).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn this_machine_has_processors() {
        let processors = Processors::of_this_machine().unwrap();
        assert!((0..processors.possible).any(|number| processors.is_online(number)));
    }
}
