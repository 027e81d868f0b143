//! Memory of zeroes: removed memory reads as zeroes and is marked; everything else is unchanged.

use cbd_guard::{Registration, losses};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

const PAGE: usize = 4096;

/// Registered pages of a file, full of ones.
struct Pages {
    file: File,
    start: *mut u8,
    length: usize,
    registration: Registration,
}

impl Pages {
    fn new(pages: usize) -> Self {
        let (file, length) = (tempfile::tempfile().expect("a file"), pages * PAGE);
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![1; length], 0).expect("written");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping of its own.
        let start =
            unsafe { libc::mmap(null_mut(), length, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the mapping is never unmapped, and accessed by volatile loads alone.
        let registration = unsafe { Registration::of_zeroes(start as usize, length) }.expect("a free entry");
        Self { file, start: start.cast(), length, registration }
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < self.length);
        // SAFETY: within the mapping.
        unsafe { self.start.add(at).read_volatile() }
    }
}

#[test]
fn truncated_memory_reads_as_zeroes_and_is_marked() {
    let (cut, other) = (Pages::new(4), Pages::new(1));
    let before = losses();
    cut.file.set_len(PAGE as u64).expect("cut");
    assert_eq!((cut.byte(0), cut.registration.is_lost()), (1, false), "the rest is still there");
    assert_eq!(cut.byte(3 * PAGE), 0);
    assert!(cut.registration.is_lost() && losses() > before);
    assert_eq!(cut.byte(0), 0, "all of it is gone at once");
    assert_eq!((other.byte(0), other.registration.is_lost()), (1, false));
}

#[test]
fn a_reused_entry_is_not_marked() {
    let cut = Pages::new(1);
    cut.file.set_len(0).expect("cut");
    assert_eq!(cut.byte(0), 0);
    drop(cut);
    assert!((0..8).all(|_| !Pages::new(1).registration.is_lost()));
}

#[test]
fn many_threads_may_access_truncated_memory_at_once() {
    for _ in 0..50 {
        let pages = Pages::new(64);
        pages.file.set_len(0).expect("cut");
        let (start, length) = (pages.start as usize, pages.length);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    for at in (0..length).step_by(PAGE) {
                        // SAFETY: within the mapping, which lives until the scope ends.
                        assert_eq!(unsafe { ((start + at) as *const u8).read_volatile() }, 0);
                    }
                });
            }
        });
        assert!(pages.registration.is_lost());
    }
}

/// Sends the signal that the kernel sends for a failed page.
fn send_bus_error(code: i32, address: usize) {
    // SAFETY: all zeroes is a valid value; the address is where the kernel puts it, behind three numbers and
    // padding.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        (info.si_signo, info.si_code) = (libc::SIGBUS, code);
        (&raw mut info).cast::<usize>().add(2).write(address);
        assert_eq!(info.si_addr() as usize, address);
        let (process, thread) = (libc::getpid(), libc::gettid());
        let sent = libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info);
        assert_eq!(sent, 0);
    }
}

#[test]
fn early_notice_of_an_unused_failed_page_removes_nothing() {
    let pages = Pages::new(2);
    send_bus_error(libc::BUS_MCEERR_AO, pages.start as usize + PAGE);
    assert_eq!((pages.byte(0), pages.byte(PAGE)), (1, 1));
    assert!(!pages.registration.is_lost());
}

#[test]
fn a_page_that_fails_under_an_access_removes_the_whole_memory() {
    let pages = Pages::new(2);
    send_bus_error(libc::BUS_MCEERR_AR, pages.start as usize + PAGE);
    assert_eq!((pages.byte(0), pages.byte(PAGE)), (0, 0));
    assert!(pages.registration.is_lost());
}
