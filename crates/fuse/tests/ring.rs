//! Behaviour that is specific to the io_uring transport, and unchanged behaviour where it is not available.
#![allow(missing_docs)]

mod support;

use cbd_fuse::{FuseLoop, Options, RING_DEPTH, StopMode, Way};
use cbd_types::AlignedBuffer;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::{MIB, TestDevice, Wanted, in_sandbox, in_sandbox_by, options, start, start_with};

const SOON: Duration = Duration::from_secs(10);

/// Runs with io_uring; on a kernel without it, checks the fallback.
fn by_ring(test: &str, body: impl FnOnce(&Path)) {
    let known = Path::new("/sys/module/fuse/parameters/enable_uring").exists();
    in_sandbox_by(&[if known { Wanted::Ring } else { Wanted::Fallback }], test, body);
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).expect("the device")
}

fn run_on(processor: usize) {
    // SAFETY: all zeroes are the empty set; the kernel reads a set of the size that it is told.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    assert_eq!(result, 0, "processor {processor}: {}", std::io::Error::last_os_error());
}

fn processors() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn every_processor_has_a_queue_and_requests_are_served_on_their_processor() {
    by_ring("every_processor_has_a_queue_and_requests_are_served_on_their_processor", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start_with(&device, options(dir, processors()));
        let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
        let last: usize = possible.trim().rsplit(['-', ',']).next().unwrap().parse().unwrap();
        let path = export.file_path();
        if let Way::Ring { queues, threads, depth } = *export.way() {
            assert_eq!((queues, threads, depth), (last + 1, processors(), RING_DEPTH));
            device.served.lock().unwrap().clear();
            for processor in 0..processors() {
                let path = path.clone();
                let client = std::thread::spawn(move || {
                    run_on(processor);
                    let file = open_direct(&path);
                    for turn in 0..50 {
                        let place = (processor as u64 * 50 + turn) * 4096;
                        file.write_all_at(&AlignedBuffer::zeroed(4096), place).unwrap();
                    }
                });
                client.join().unwrap();
            }
            let served = device.served.lock().unwrap();
            let writes: Vec<_> = served.iter().filter(|(place, ..)| *place < 400 * 4096).collect();
            assert!(writes.len() >= 50 * processors());
            for (place, on, thread) in writes {
                let made_on = (place / 4096 / 50) as usize;
                assert_eq!((*on, thread.as_str()), (made_on, format!("cbd-fuse-{made_on}").as_str()));
            }
        }
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn one_thread_can_serve_all_processors() {
    in_sandbox("one_thread_can_serve_all_processors", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start_with(&device, options(dir, 1));
        if let Way::Ring { threads, .. } = *export.way() {
            assert_eq!(threads, 1);
        }
        let path = export.file_path();
        for processor in 0..processors() {
            let path = path.clone();
            let client = std::thread::spawn(move || {
                run_on(processor);
                open_direct(&path)
                    .write_all_at(&AlignedBuffer::from_slice(&[7; 4096]), 4096 * processor as u64)
            });
            client.join().unwrap().unwrap();
        }
        let written = device.bytes.read().unwrap();
        assert!(written[..4096 * processors()].iter().all(|&byte| byte == 7));
        drop(written);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn a_parked_request_delays_no_other_request_of_its_processor() {
    in_sandbox("a_parked_request_delays_no_other_request_of_its_processor", |dir| {
        let device = TestDevice { parks: true, parks_from: 4 * MIB, ..TestDevice::new(8 * MIB, 512) };
        let device = Arc::new(device);
        let mut export = start_with(&device, options(dir, 2));
        device.stuck.store(true, Ordering::Relaxed);
        let path = export.file_path();
        let parked = {
            let path = path.clone();
            std::thread::spawn(move || {
                run_on(0);
                open_direct(&path).write_all_at(&AlignedBuffer::from_slice(&[9; 4096]), 4 * MIB)
            })
        };
        let (done, waiting) = mpsc::channel();
        std::thread::spawn(move || {
            run_on(0);
            std::thread::sleep(Duration::from_millis(100));
            let file = open_direct(&path);
            let result =
                (0..100).try_for_each(|turn| file.write_all_at(&AlignedBuffer::zeroed(4096), turn * 4096));
            done.send(result).unwrap();
        });
        waiting.recv_timeout(SOON).expect("the other requests complete").unwrap();
        assert!(!parked.is_finished());
        device.stuck.store(false, Ordering::Relaxed);
        parked.join().unwrap().unwrap();
        assert_eq!(device.bytes.read().unwrap()[4 * MIB as usize], 9);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn requests_beyond_the_ring_depth_wait_for_a_slot() {
    in_sandbox("requests_beyond_the_ring_depth_wait_for_a_slot", |dir| {
        let device = TestDevice { parks: true, ..TestDevice::new(64 * MIB, 512) };
        let device = Arc::new(device);
        let how = options(dir, 2);
        let mut export = start_with(&device, Options { ring_depth: how.ring_depth.min(2), ..how });
        device.stuck.store(true, Ordering::Relaxed);
        let path = export.file_path();
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..12_u64)
                .map(|client| {
                    let path = &path;
                    scope.spawn(move || {
                        run_on(client as usize % processors());
                        let file = open_direct(path);
                        let written = AlignedBuffer::from_slice(&vec![client as u8 + 1; 1 << 20]);
                        file.write_all_at(&written, client * MIB).unwrap();
                        let mut read = AlignedBuffer::zeroed(1 << 20);
                        file.read_exact_at(&mut read, client * MIB).unwrap();
                        assert!(*read == *written, "{client}");
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(200));
            assert!(clients.iter().all(|client| !client.is_finished()));
            device.stuck.store(false, Ordering::Relaxed);
        });
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn the_device_works_if_the_kernel_offers_no_ring() {
    in_sandbox_by(&[Wanted::Fallback], "the_device_works_if_the_kernel_offers_no_ring", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start(&device, dir);
        assert!(export.way().to_string().contains("enable_uring"), "{}", export.way());
        open_direct(export.device_path()).write_all_at(&AlignedBuffer::from_slice(&[5; 4096]), MIB).unwrap();
        assert_eq!(device.bytes.read().unwrap()[MIB as usize], 5);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// From here on the calling thread cannot create an io_uring.
fn forbid_rings() {
    let instruction = |code: u32, skip, k| libc::sock_filter { code: code as u16, jt: 0, jf: skip, k };
    let number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let refusal = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    let mut filter = [
        instruction(number, 0, 0),
        instruction(equal, 1, libc::SYS_io_uring_setup as u32),
        instruction(answer, 0, refusal),
        instruction(answer, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel reads the program while the call lasts; it concerns this thread alone.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn no_ring_is_used_if_one_queue_fails() {
    by_ring("no_ring_is_used_if_one_queue_fails", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        // The last thread of the first attempt: the other threads have their queues by then, or soon.
        let begun = Arc::new(AtomicUsize::new(0));
        let setup = {
            let begun = Arc::clone(&begun);
            move || {
                if begun.fetch_add(1, Ordering::Relaxed) + 1 == processors() {
                    std::thread::sleep(Duration::from_millis(100));
                    forbid_rings();
                }
            }
        };
        let how = Options { thread_setup: Some(Arc::new(setup)), ..options(dir, processors()) };
        let mut export = FuseLoop::start(Arc::new(support::Exported(Arc::clone(&device))), how).unwrap();
        let Way::Door { reason } = export.way() else { panic!("{}", export.way()) };
        println!("{reason}");
        if Wanted::here() == Wanted::Ring {
            assert!(reason.contains("cannot be had"), "{reason}");
            assert_eq!(begun.load(Ordering::Relaxed), 2 * processors());
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let is_ours = |line: &&str| line.contains("fuse.cbd") && line.contains(dir.to_str().unwrap());
        assert_eq!(mounts.lines().filter(is_ours).count(), 1);
        open_direct(export.device_path()).write_all_at(&AlignedBuffer::from_slice(&[5; 4096]), MIB).unwrap();
        assert_eq!(device.bytes.read().unwrap()[MIB as usize], 5);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn an_externally_aborted_connection_is_a_failure_and_leaves_no_client_waiting() {
    in_sandbox("an_externally_aborted_connection_is_a_failure_and_leaves_no_client_waiting", |dir| {
        let device = Arc::new(TestDevice { parks: true, ..TestDevice::new(8 * MIB, 512) });
        let mut export = start(&device, dir);
        device.stuck.store(true, Ordering::Relaxed);
        let path = export.file_path();
        let reader =
            std::thread::spawn(move || open_direct(&path).read_at(&mut AlignedBuffer::zeroed(4096), 0));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(cbd_fuse::abort_connections(dir).unwrap(), 1);
        assert!(reader.join().unwrap().is_err());
        device.stuck.store(false, Ordering::Relaxed);
        let end = Instant::now() + SOON;
        while export.failure().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(export.failure().unwrap().contains("ended from outside"));
        export.stop(StopMode::Force, SOON).unwrap();
    });
}

/// Address space and resident memory.
fn memory_kib() -> [u64; 2] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    ["VmData:", "VmRSS:"].map(|name| field(name).trim().trim_end_matches(" kB").parse().unwrap())
}

#[test]
fn memory_lent_to_the_kernel_is_freed_after_every_kind_of_stop() {
    in_sandbox("memory_lent_to_the_kernel_is_freed_after_every_kind_of_stop", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut sizes = Vec::new();
        for turn in 0..12 {
            let mut export = start(&device, dir);
            let used = (turn % 2 == 1).then(|| open_direct(export.device_path()));
            let mode = if used.is_some() { StopMode::Force } else { StopMode::WhenUnused };
            export.stop(mode, SOON).unwrap();
            drop((used, export));
            sizes.push(memory_kib());
        }
        println!("{sizes:?}");
        // The slots of two processors take 64 MiB each time.
        assert!(sizes[11][0] <= sizes[1][0] + 48 * 1024, "{sizes:?}");
        assert!(sizes.iter().all(|[_, memory]| *memory <= sizes[0][1] + 16 * 1024), "{sizes:?}");
    });
}
