//! Independent parts of a measurement that does not measure time, on several processors.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Calls `work` with each number below `count`, on at most `threads_max` threads; the results are in the order of the numbers.
pub fn in_parallel<T: Send>(count: usize, threads_max: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let number = next.fetch_add(1, Ordering::Relaxed)
            && number < count
        {
            done.push((number, work(number)));
        }
        done
    };
    let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut all = thread::scope(|scope| {
        let threads = processors.min(count).min(threads_max);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        let ended = workers.into_iter().map(|worker| worker.join());
        ended.flat_map(|done| done.unwrap_or_else(|panic| resume_unwind(panic))).collect::<Vec<_>>()
    });
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, done)| done).collect()
}
