//! The store process, which holds descriptors for successive daemons.

mod support;

use cbd_daemon::handover::DescriptorStore;
use cbd_daemon::handover::process_store::ProcessStore;
use cbd_types::ErrorKind;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use support::{child, store_process_at, until};

/// A folder with a store process's socket. A drop removes all entries of the store process, so that it exits.
struct StoreFolder {
    folder: tempfile::TempDir,
}

impl StoreFolder {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("keeper.sock")
    }

    /// Connects as a daemon: returns the store, and the names of the entries of a predecessor with the numbers in their
    /// files.
    fn open(&self) -> (ProcessStore, Vec<(String, Vec<u8>)>) {
        let program = Path::new(env!("CARGO_BIN_EXE_cbdctrl"));
        let (store, entries) = ProcessStore::open(&self.socket(), program).expect("a store");
        let number = |file: File| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 0).expect("read");
            byte[0]
        };
        let entries = entries.into_iter().map(|entry| {
            (entry.name, entry.descriptors.into_iter().map(|descriptor| number(descriptor.into())).collect())
        });
        (store, entries.collect())
    }

    /// The processes that have the socket open.
    fn processes(&self) -> Vec<String> {
        store_process_at(&self.socket()).into_iter().collect()
    }
}

impl Drop for StoreFolder {
    fn drop(&mut self) {
        let program = Path::new(env!("CARGO_BIN_EXE_cbdctrl"));
        if let Ok((store, entries)) = ProcessStore::open(&self.socket(), program) {
            entries.iter().for_each(|entry| store.remove(&entry.name));
        }
    }
}

fn file(number: u8) -> File {
    let file = tempfile::tempfile().expect("a file");
    file.write_all_at(&[number], 0).expect("written");
    file
}

#[test]
fn an_entry_is_found_by_the_next_daemon_until_it_is_removed() {
    let folder = StoreFolder::new();
    let (store, left) = folder.open();
    assert!(left.is_empty());
    let (one, two) = (file(1), file(2));
    store.put("cbd-a", &[one.as_fd(), two.as_fd()]).expect("kept");
    store.put("cbd-b", &[two.as_fd()]).expect("kept");
    let mode = std::fs::metadata(folder.socket()).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(store);
    let (store, left) = folder.open();
    assert_eq!(left, [("cbd-a".to_owned(), vec![1, 2]), ("cbd-b".to_owned(), vec![2])]);
    store.put("cbd-a", &[two.as_fd()]).expect("kept");
    store.remove("cbd-b");
    drop(store);
    let (store, left) = folder.open();
    assert_eq!(left, [("cbd-a".to_owned(), vec![2])]);
    store.remove("cbd-a");
    drop(store);
    assert!(folder.open().1.is_empty());
}

#[test]
fn a_store_process_without_entries_ends_with_its_daemon() {
    let folder = StoreFolder::new();
    let (store, _) = folder.open();
    let one = file(1);
    store.put("cbd-a", &[one.as_fd()]).expect("kept");
    assert_eq!(folder.processes().len(), 1);
    store.remove("cbd-a");
    drop(store);
    until("the store process's end", || folder.processes().is_empty());
    assert!(!folder.socket().exists());
}

#[test]
fn a_second_daemon_is_refused_while_the_first_is_connected_to_the_store_process() {
    let folder = StoreFolder::new();
    let (store, _) = folder.open();
    let one = file(1);
    store.put("cbd-a", &[one.as_fd()]).expect("kept");
    let program = Path::new(env!("CARGO_BIN_EXE_cbdctrl"));
    let error = ProcessStore::open(&folder.socket(), program).expect_err("it is taken");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    store.put("cbd-a", &[one.as_fd()]).expect("the first continues");
    drop(store);
}

#[test]
fn a_store_process_that_dies_is_replaced_and_its_successor_holds_its_entries() {
    let folder = StoreFolder::new();
    let (store, _) = folder.open();
    let (one, two) = (file(1), file(2));
    store.put("cbd-a", &[one.as_fd()]).expect("kept");
    let first = folder.processes();
    child::signal(&first[0], libc::SIGKILL);
    until("another store process", || {
        store.maintain();
        let now = folder.processes();
        now.len() == 1 && now != first
    });
    // A store process that dies just before a put.
    child::signal(&folder.processes()[0], libc::SIGKILL);
    store.put("cbd-b", &[two.as_fd()]).expect("kept");
    drop(store);
    assert_eq!(folder.open().1, [("cbd-a".to_owned(), vec![1]), ("cbd-b".to_owned(), vec![2])]);
}

/// A late put would leave descriptors that no daemon knows: a device whose daemon dies would not end for its users.
#[test]
fn a_silent_store_process_delays_one_call_and_its_late_commands_are_undone() {
    let folder = StoreFolder::new();
    let (store, _) = folder.open();
    let (one, two) = (file(1), file(2));
    store.put("cbd-a", &[one.as_fd()]).expect("kept");
    store.put("cbd-b", &[one.as_fd()]).expect("kept");
    let process = folder.processes().remove(0);
    child::signal(&process, libc::SIGSTOP);
    let began = Instant::now();
    let error = store.put("cbd-c", &[two.as_fd()]).expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let again = Instant::now();
    store.put("cbd-d", &[two.as_fd()]).expect_err("no answer");
    store.remove("cbd-b");
    assert!(again.elapsed() < Duration::from_millis(500), "{:?}", again.elapsed());
    child::signal(&process, libc::SIGCONT);
    until("an answer", || {
        store.maintain();
        store.put("cbd-e", &[two.as_fd()]).is_ok()
    });
    drop(store);
    assert_eq!(folder.open().1, [("cbd-a".to_owned(), vec![1]), ("cbd-e".to_owned(), vec![2])]);
}

#[test]
fn a_store_process_that_may_have_entries_is_found_by_the_next_daemon() {
    let folder = StoreFolder::new();
    let (store, _) = folder.open();
    let one = file(1);
    store.put("cbd-a", &[one.as_fd()]).expect("kept");
    let process = folder.processes().remove(0);
    child::signal(&process, libc::SIGSTOP);
    store.remove("cbd-a");
    drop(store);
    assert!(folder.socket().exists());
    child::signal(&process, libc::SIGCONT);
}

#[test]
fn a_store_process_that_a_user_starts_ends_with_an_error() {
    for input in ["/dev/null", "/dev/zero"] {
        let mut process = std::process::Command::new(env!("CARGO_BIN_EXE_cbdctrl"))
            .arg("store-process")
            .stdin(File::open(input).expect("a file"))
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("it starts");
        let status = support::wait(&mut process, Duration::from_secs(20));
        if status.is_none() {
            let _ = process.kill();
        }
        assert_eq!(status.and_then(|status| status.code()), Some(1), "{input}");
        let said = std::io::read_to_string(process.stderr.take().expect("a pipe")).expect("text");
        assert!(said.contains("no socket that listens") && said.lines().count() == 1, "{said}");
    }
}
