//! The threads of a server, and a report of what they wait for when they do not end in time.
//!
//! A thread that copies from or to a guest's memory waits in the kernel for a missing page, for an unlimited time if
//! the memory is a file on a file system that does not respond. The wait cannot be interrupted, but it can be reported.
//!
//! Invariants: a report on a thread reads `/proc` only, never another file system.

use std::fs;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The running threads.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    running: Mutex<Vec<Thread>>,
    /// Names of the files that the guest's memory is mapped from.
    files: Mutex<Vec<String>>,
}

#[derive(Clone, Debug)]
struct Thread {
    what: String,
    id: i32,
}

/// Registers a running thread until the thread drops it.
#[derive(Debug)]
pub(crate) struct Running {
    threads: Arc<Threads>,
    id: i32,
}

impl Threads {
    /// Registers the calling thread as `what`.
    pub(crate) fn register(self: &Arc<Self>, what: String) -> Running {
        let id = rustix::thread::gettid().as_raw_pid();
        self.running().push(Thread { what, id });
        Running { threads: Arc::clone(self), id }
    }

    /// Records the names of the files that the guest's memory is mapped from.
    pub(crate) fn set_files(&self, files: Vec<String>) {
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = files;
    }

    /// A text with what the running threads wait for.
    pub(crate) fn describe_waits(&self) -> String {
        let running = self.running().clone();
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner).join(", ");
        let lines: Vec<String> = running
            .iter()
            .map(|thread| format!("{} {}", thread.what, describe(&wait_of_thread(thread.id), &files)))
            .collect();
        if lines.is_empty() { "its threads are about to end".to_owned() } else { lines.join("; ") }
    }

    fn running(&self) -> MutexGuard<'_, Vec<Thread>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.threads.running().retain(|thread| thread.id != self.id);
    }
}

/// The name of an open file, from the kernel.
pub(crate) fn name_of(file: &impl AsRawFd) -> String {
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_or_else(|_| "a file that the kernel does not name".to_owned(), |path| path.display().to_string())
}

/// The system call that a thread is in, from `/proc`; empty if it cannot be read.
fn wait_of_thread(id: i32) -> String {
    fs::read_to_string(format!("/proc/self/task/{id}/syscall")).unwrap_or_default()
}

fn describe(system_call: &str, files: &str) -> String {
    match system_call.split_whitespace().next() {
        // Blocked outside of a system call: in a page fault.
        Some("-1") => {
            format!("waits for a page of the guest's memory; the memory is of {files}")
        }
        Some(number) if number.parse::<i64>().is_ok_and(is_poll) => "waits for the device".to_owned(),
        Some(number) if number.parse::<i64>().is_ok_and(is_futex) => "waits for another thread".to_owned(),
        Some(number) if number.parse::<i64>().is_ok() => format!("is in system call {number}"),
        _ => "runs".to_owned(),
    }
}

const fn is_futex(number: i64) -> bool {
    number == libc::SYS_futex
}

#[cfg(target_arch = "x86_64")]
const fn is_poll(number: i64) -> bool {
    number == libc::SYS_poll || number == libc::SYS_ppoll
}

#[cfg(not(target_arch = "x86_64"))]
const fn is_poll(number: i64) -> bool {
    number == libc::SYS_ppoll
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_reported_with_what_it_waits_for_until_it_ends() {
        let threads = Arc::new(Threads::default());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (begin, began) = std::sync::mpsc::channel();
        let thread = std::thread::spawn({
            let threads = Arc::clone(&threads);
            move || {
                let _running = threads.register("ring 3".to_owned());
                begin.send(()).expect("the thread waits");
                let _ = ended.recv();
            }
        });
        began.recv().expect("it runs");
        assert!(threads.describe_waits().starts_with("ring 3 "));
        drop(end);
        thread.join().expect("it ends");
        assert_eq!(threads.describe_waits(), "its threads are about to end");
    }

    #[test]
    fn a_page_fault_is_distinguished_from_system_calls() {
        assert!(describe("-1 0x7ffd 0x7f00\n", "/mnt/a").contains("the memory is of /mnt/a"));
        assert_eq!(describe("running\n", ""), "runs");
        assert_eq!(describe(&format!("{} 0x1\n", libc::SYS_ppoll), ""), "waits for the device");
        assert_eq!(describe("5 0x1\n", ""), "is in system call 5");
    }
}
