//! Threads of this process, and the processor time that they have used.

use cbd_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::time::Duration;

/// The folder with a folder for each thread.
const FOLDER: &str = "/proc/self/task";

/// Some threads, by the numbers that the kernel gives them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Threads(BTreeSet<u32>);

impl Threads {
    /// All threads of this process.
    ///
    /// # Errors
    /// The system's.
    pub fn now() -> Result<Self> {
        let entries = std::fs::read_dir(FOLDER).map_err(|error| failed(FOLDER, &error))?;
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Ok(Self(numbers.collect()))
    }

    /// Those that are not among `others`.
    pub fn without(&self, others: &Self) -> Self {
        Self(self.0.difference(&others.0).copied().collect())
    }

    /// Their number.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The time that they have been on a processor since they began.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if a thread has ended, or the kernel does not count (`CONFIG_SCHED_INFO`).
    pub fn processor_time(&self) -> Result<Duration> {
        self.0.iter().map(|number| processor_time(*number)).sum()
    }
}

fn processor_time(number: u32) -> Result<Duration> {
    let path = format!("{FOLDER}/{number}/schedstat");
    let text = std::fs::read_to_string(&path).map_err(|error| failed(&path, &error))?;
    let first = text.split_whitespace().next().and_then(|first| first.parse().ok());
    let none = || Error::new(ErrorKind::System, format!("{path} begins with no number"));
    first.map(Duration::from_nanos).ok_or_else(none)
}

fn failed(path: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::System, format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn a_thread_that_works_has_its_time_and_one_that_waits_has_none() {
        let before = Threads::now().expect("threads");
        let (begin, begun) = channel::<()>();
        let (end, ended) = channel::<()>();
        let (done, worked) = channel::<()>();
        let thread = std::thread::spawn(move || {
            begun.recv().expect("the beginning");
            let since = Instant::now();
            while since.elapsed() < Duration::from_millis(50) {
                std::hint::spin_loop();
            }
            done.send(()).expect("a receiver");
            ended.recv().expect("the end");
        });
        // Tests of other threads begin and end meanwhile: this one is found by the time that it uses.
        let new = Threads::now().expect("threads").without(&before);
        assert!(new.count() >= 1);
        begin.send(()).expect("it waits");
        worked.recv().expect("it works");
        let used = new.0.iter().filter_map(|number| processor_time(*number).ok()).max().expect("a time");
        assert!(used > Duration::from_millis(1), "{used:?}");
        end.send(()).expect("it waits");
        thread.join().expect("it ends");
    }
}
