//! Memory that fails (here: a truncated file) is an error, and the process continues.

use cbd_pmem::{CopyMethod, Mapping, OpenOptions};
use cbd_types::Pmem;
use std::fs::File;
use std::path::PathBuf;

const SIZE: u64 = 1 << 20;
const LEFT: u64 = 8192;

struct Cut {
    mapping: Mapping,
    _directory: tempfile::TempDir,
}

/// Regions of which only the first two pages are left, one for each copy method.
fn cut_short() -> Vec<Cut> {
    let methods = CopyMethod::ALL.into_iter().map(Some).chain([None]);
    let mappings = methods.filter_map(|copy| {
        let directory = tempfile::tempdir().expect("a directory");
        let path: PathBuf = directory.path().join("region");
        let options = OpenOptions { size: Some(SIZE), create: true, copy, ..OpenOptions::default() };
        let mapping = Mapping::open(&path, &options).ok()?;
        File::options().write(true).open(&path).and_then(|file| file.set_len(LEFT)).expect("cut");
        Some(Cut { mapping, _directory: directory })
    });
    let all: Vec<_> = mappings.collect();
    assert!(all.len() >= 2, "the portable method and the chosen one at least");
    all
}

#[test]
fn a_load_of_failing_memory_is_an_error_with_its_offset() {
    for Cut { mapping, .. } in cut_short() {
        let mut bytes = vec![0; 4096];
        assert_eq!(mapping.load(0, &mut bytes), Ok(()));
        assert_eq!(mapping.load(LEFT, &mut bytes).map_err(|error| error.at), Err(LEFT));
        let at = mapping.load(LEFT - 1000, &mut bytes).expect_err("part of it is gone").at;
        assert!((LEFT..LEFT + 4096).contains(&at), "{at}");
        assert_eq!(mapping.failed(), None, "a load reports its own failure");
    }
}

#[test]
fn a_summed_load_of_failing_memory_is_an_error() {
    for Cut { mapping, .. } in cut_short() {
        for length in [1_usize, 8, 100, 256, 512, 4096, 10_000] {
            let mut bytes = vec![0; length];
            let at = mapping.load_summed(LEFT, &mut bytes).expect_err("it is gone").at;
            assert!((LEFT..LEFT + length as u64).contains(&at), "{at}");
        }
    }
}

#[test]
fn a_store_to_failing_memory_is_recorded() {
    for length in [1_usize, 8, 63, 64, 100, 512, 4096, 70_000, 300_000] {
        for Cut { mapping, .. } in cut_short() {
            mapping.store(0, &[1; 64]);
            mapping.fence();
            assert_eq!(mapping.failed(), None);
            mapping.store(LEFT, &vec![7; length]);
            mapping.fence();
            assert_eq!(mapping.failed(), Some(LEFT));
        }
    }
}

#[test]
fn a_summed_store_to_failing_memory_is_recorded() {
    for length in [1_usize, 64, 512, 4096, 70_000] {
        for Cut { mapping, .. } in cut_short() {
            mapping.store_summed(LEFT, &vec![7; length], 4096, &mut [0; 20]);
            mapping.fence();
            assert_eq!(mapping.failed(), Some(LEFT));
        }
    }
}

#[test]
fn a_line_and_a_write_back_that_fail_are_remembered() {
    for Cut { mapping, .. } in cut_short() {
        mapping.store_line(LEFT + 64, &[7; 64]);
        assert_eq!(mapping.failed(), Some(LEFT + 64));
    }
    for Cut { mapping, .. } in cut_short() {
        mapping.share(LEFT, &[7; 100]);
        assert_eq!(mapping.failed(), Some(LEFT));
    }
    for Cut { mapping, .. } in cut_short() {
        mapping.share_summed(LEFT, &[7; 100]);
        assert_eq!(mapping.failed(), Some(LEFT));
    }
    for Cut { mapping, .. } in cut_short() {
        mapping.write_back(LEFT, 64);
        // A line that is in no cache may need no write-back.
        assert!(matches!(mapping.failed(), None | Some(LEFT)));
    }
}

#[test]
fn the_first_failure_is_the_recorded_one() {
    for Cut { mapping, .. } in cut_short() {
        mapping.store(LEFT + 4096, &[7; 64]);
        mapping.store(LEFT, &[7; 64]);
        assert_eq!(mapping.failed(), Some(LEFT + 4096));
    }
}

#[test]
fn many_threads_may_access_failing_memory_at_once() {
    let cuts = cut_short();
    std::thread::scope(|scope| {
        for cut in &cuts {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut bytes = vec![0; 4096];
                    for page in 0..64 {
                        let at = LEFT + page * 4096;
                        assert_eq!(
                            cut.mapping.load_summed(at, &mut bytes).map_err(|error| error.at),
                            Err(at)
                        );
                    }
                });
            }
        }
    });
}

/// Set for the tests that end their process: a run of all ignored tests must not end in them.
const CHILD: &str = "CBD_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs this test binary again, only for the test `name`, in a process of its own.
fn in_a_child(name: &str) -> std::process::ExitStatus {
    std::process::Command::new(std::env::current_exe().expect("known"))
        .env(CHILD, "1")
        .args([name, "--exact", "--ignored", "--test-threads=1"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .expect("started")
}

fn died_of_bus_error(status: std::process::ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(libc::SIGBUS)
}

#[test]
fn a_failure_outside_the_routines_ends_the_process() {
    assert!(died_of_bus_error(in_a_child("child_touches_a_foreign_mapping")));
}

#[test]
#[ignore = "run by its parent test"]
fn child_touches_a_foreign_mapping() {
    if !is_child() {
        return;
    }
    let _ours = Mapping::anonymous(SIZE).expect("memory");
    let file = tempfile::tempfile().expect("a file");
    file.set_len(4096).expect("sized");
    use std::os::fd::AsRawFd;
    // SAFETY: a fresh mapping; the test checks the read of a missing page, in a process of its own.
    unsafe {
        let base =
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED);
        file.set_len(0).expect("cut");
        std::hint::black_box(base.cast::<u8>().read_volatile());
    }
}

#[test]
fn a_sent_bus_error_ends_the_process() {
    assert!(died_of_bus_error(in_a_child("child_is_sent_a_bus_error")));
}

#[test]
#[ignore = "run by its parent test"]
fn child_is_sent_a_bus_error() {
    if !is_child() {
        return;
    }
    // The handler of std takes a first signal for its own stack check and ignores it.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let _ours = Mapping::anonymous(SIZE).expect("memory");
    // SAFETY: it ends this process, which runs this test only.
    unsafe { libc::raise(libc::SIGBUS) };
}

#[test]
fn an_earlier_handler_still_receives_its_signals() {
    assert_eq!(in_a_child("child_had_a_handler_before").code(), Some(42));
}

extern "C" fn leave(_signal: i32) {
    // SAFETY: allowed in a signal handler.
    unsafe { libc::_exit(42) };
}

#[test]
#[ignore = "run by its parent test"]
fn child_had_a_handler_before() {
    if !is_child() {
        return;
    }
    // SAFETY: the handler only ends the process.
    unsafe { libc::signal(libc::SIGBUS, leave as *const () as libc::sighandler_t) };
    let _ours = Mapping::anonymous(SIZE).expect("memory");
    // SAFETY: as above.
    unsafe { libc::raise(libc::SIGBUS) };
}

/// A page for which the kernel sends SIGBUS as for a page whose memory has failed: by a marker in the page
/// table, as a virtual machine gets one for memory that failed on the machine before its migration
/// (`UFFDIO_POISON`, Linux 6.6).
struct PoisonedPage {
    page: *mut libc::c_void,
    _held: std::os::fd::OwnedFd,
}

/// The requests; `struct uffdio_api`, `uffdio_register` and `uffdio_poison` consist of 64-bit words.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_POISON: libc::c_ulong = 0xc020_aa08;

impl PoisonedPage {
    /// Poisons the page `at` of the mapping of `path`; `None` where the kernel cannot.
    fn new(path: &std::path::Path, at: u64) -> Option<Self> {
        use std::os::fd::FromRawFd;
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let line = maps.lines().find(|line| line.ends_with(path.to_str().unwrap_or("?")))?;
        let start = u64::from_str_radix(line.split('-').next()?, 16).ok()? + at;
        let page = start as *mut libc::c_void;
        let call = |descriptor: i32, request: libc::c_ulong, words: &mut [u64]| {
            // SAFETY: the words are as many as the request's structure has, and live while it runs.
            unsafe { libc::ioctl(descriptor, request, words.as_mut_ptr()) == 0 }
        };
        // SAFETY: a system call without pointers; 1 is UFFD_USER_MODE_ONLY.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) };
        if descriptor < 0 {
            return None;
        }
        // SAFETY: it was just opened and has no other owner.
        let held = unsafe { std::os::fd::OwnedFd::from_raw_fd(descriptor as i32) };
        let descriptor = descriptor as i32;
        // The interface's number and UFFD_FEATURE_POISON; then the page, for write protection, which the test
        // does not use.
        if !call(descriptor, UFFDIO_API, &mut [0xaa, 1 << 14, 0])
            || !call(descriptor, UFFDIO_REGISTER, &mut [start, 4096, 2, 0])
        {
            return None;
        }
        // Removes the page's entry, its bytes stay in the file; no access precedes the marker.
        // SAFETY: a page of a shared mapping of a file, which loses nothing by it.
        unsafe { libc::madvise(page, 4096, libc::MADV_DONTNEED) };
        call(descriptor, UFFDIO_POISON, &mut [start, 4096, 0, 0]).then_some(Self { page, _held: held })
    }

    /// Removes the failure.
    fn heal(self) {
        // SAFETY: as above; the marker goes with the entry.
        unsafe { libc::madvise(self.page, 4096, libc::MADV_DONTNEED) };
    }
}

#[test]
fn a_poisoned_page_fails_only_accesses_to_it() {
    for copy in CopyMethod::ALL.into_iter().map(Some).chain([None]) {
        // In shared memory: for the page cache of a disk the kernel has no such marker.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let path = directory.path().join("region");
        let options = OpenOptions { size: Some(SIZE), create: true, copy, ..OpenOptions::default() };
        let Ok(mapping) = Mapping::open(&path, &options) else { continue };
        let data: Vec<u8> = (0..3 * 4096).map(|at: u32| (at % 251) as u8).collect();
        mapping.store(LEFT, &data);
        mapping.fence();
        let Some(poisoned) = PoisonedPage::new(&path, LEFT + 4096) else {
            let wanted = std::env::var_os("CBD_SYSTEM_TESTS").is_some_and(|value| value == "1");
            assert!(
                !wanted,
                "the kernel has no UFFDIO_POISON (Linux 6.6), or does not let this user have it"
            );
            return println!("not run: it needs UFFDIO_POISON (Linux 6.6); CBD_SYSTEM_TESTS=1 insists on it");
        };
        let mut bytes = vec![0; 4096];
        assert_eq!(mapping.load(LEFT, &mut bytes), Ok(()));
        assert!(bytes == data[..4096]);
        assert_eq!(mapping.load_summed(LEFT + 8192, &mut bytes).map(drop), Ok(()));
        assert!(bytes == data[8192..]);
        let mut all = vec![0; 3 * 4096];
        let poison = LEFT + 4096..LEFT + 8192;
        for failed in [mapping.load(LEFT, &mut all), mapping.load_summed(LEFT, &mut all).map(drop)] {
            assert!(poison.contains(&failed.expect_err("poisoned").at), "{failed:?}");
        }
        assert_eq!(mapping.failed(), None, "a load reports its own failure");
        mapping.store_line(LEFT + 4096 + 64, &[7; 64]);
        assert!(mapping.failed().is_some_and(|at| poison.contains(&at)), "{:?}", mapping.failed());
        poisoned.heal();
        assert_eq!(mapping.load(LEFT, &mut all), Ok(()));
        assert!(all == data, "no byte has changed");
        assert!(mapping.failed().is_some(), "a failure stays recorded");
    }
}
