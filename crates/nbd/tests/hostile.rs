//! Clients that disconnect at any point, send invalid bytes, flood or do not read replies affect only their own
//! connection.

mod common;

use cbd_export::BlockDevice;
use cbd_export::budget::Budget;
use cbd_nbd::{Notice, Options};
use cbd_testkit::{Client, Command};
use cbd_types::{Durability, ErrorKind, MediaError, Operation, Pmem};
use common::raw::{assert_served, connect, handshake, ready, request};
use common::{Served, Slow, in_time, memory, serve, serve_with, until};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// A counter of connections that ended, and options whose observer increments it.
fn counted() -> (Arc<AtomicUsize>, Options) {
    let ended = Arc::new(AtomicUsize::new(0));
    let options = Options {
        observer: Some({
            let ended = Arc::clone(&ended);
            Arc::new(move |notice: &Notice<'_>| {
                if matches!(notice, Notice::Ended { .. }) {
                    ended.fetch_add(1, Ordering::SeqCst);
                }
            })
        }),
        ..Options::default()
    };
    (ended, options)
}

#[test]
fn a_client_that_disconnects_after_any_byte_leaves_no_connection_behind() {
    in_time(|| {
        let (ended, options) = counted();
        let served = serve_with(memory(MIB), options);
        let mut sent = handshake();
        sent.extend_from_slice(&request(1, 1, 0, 512));
        sent.extend_from_slice(&[7; 512]);
        sent.extend_from_slice(&request(3, 2, 0, 0));
        for length in 0..sent.len() {
            let mut stream = connect(&served);
            stream.write_all(&sent[..length]).expect("the socket accepts it");
            drop(stream);
        }
        until("all connections end", || ended.load(Ordering::SeqCst) == sent.len());
        assert_eq!(served.server.connections(), 0);
        assert_served(&served);
    });
}

#[test]
fn garbage_at_any_point_ends_the_connection() {
    in_time(|| {
        let served = serve(memory(MIB));
        let good = [handshake(), request(3, 2, 0, 0)].concat();
        let mut state = 1_u32;
        for length in 0..good.len() {
            let mut stream = connect(&served);
            let mut sent = good[..length].to_vec();
            sent.extend((0..300).map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            }));
            let _ = stream.write_all(&sent);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            // The server closes the connection, so its bytes end.
            let mut received = Vec::new();
            let _ = stream.read_to_end(&mut received);
            assert!(received.len() < 4096, "garbage after {length} bytes");
        }
        assert_served(&served);
    });
}

#[test]
fn a_request_with_a_wrong_magic_closes_the_connection() {
    in_time(|| {
        let served = serve(memory(MIB));
        let mut stream = ready(&served);
        let mut sent = request(3, 9, 0, 0);
        sent.extend_from_slice(&[0xEE; 28]);
        stream.write_all(&sent).expect("the socket accepts it");
        let mut received = Vec::new();
        stream.read_to_end(&mut received).expect("it closes");
        // Requests before the wrong magic number are answered.
        assert_eq!(received.len(), 16);
        assert_eq!(received[8..16], 9_u64.to_be_bytes());
        assert_served(&served);
    });
}

#[test]
fn a_request_that_arrives_byte_by_byte_is_decoded() {
    in_time(|| {
        let served = serve(memory(MIB));
        let mut stream = ready(&served);
        let mut sent = request(1, 5, 512, 512);
        sent.extend_from_slice(&[3; 512]);
        for byte in sent {
            stream.write_all(&[byte]).expect("the socket accepts it");
        }
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[4..8], [0; 4]);
    });
}

#[test]
fn a_client_that_sends_nothing_is_disconnected_in_time() {
    in_time(|| {
        let options = Options { handshake_timeout: Duration::from_millis(100), ..Options::default() };
        let served = serve_with(memory(MIB), options);
        let mut silent = connect(&served);
        let mut slow = connect(&served);
        let began = Instant::now();
        let mut received = Vec::new();
        // The timeout also holds for a client that sends a byte now and then.
        for byte in handshake() {
            if slow.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(15));
        }
        silent.read_to_end(&mut received).expect("it closes");
        assert_eq!(received.len(), 18);
        received.clear();
        slow.read_to_end(&mut received).expect("it closes");
        assert!(received.len() < 18 + 32);
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_served(&served);
    });
}

#[test]
fn a_client_beyond_the_maximum_is_refused_until_another_disconnects() {
    in_time(|| {
        let served = serve_with(memory(MIB), Options { connections_max: 2, ..Options::default() });
        let first = Client::connect(&served.listen).expect("a client");
        let _second = Client::connect(&served.listen).expect("a client");
        assert!(Client::connect(&served.listen).is_err());
        drop(first);
        until("there is room again", || Client::connect(&served.listen).is_ok());
    });
}

#[test]
fn a_client_that_does_not_read_its_replies_blocks_only_itself() {
    in_time(|| {
        let served = serve(memory(64 * MIB));
        let mut not_reading = ready(&served);
        not_reading.set_write_timeout(Some(Duration::from_millis(300))).expect("it can be set");
        // Requests far more data than the socket buffers hold.
        let mut asked = 0_u64;
        while asked < 100_000 && not_reading.write_all(&request(0, asked, 0, MIB as u32)).is_ok() {
            asked += 1;
        }
        assert!(asked < 100_000, "the server stopped reading");
        assert_served(&served);
        let began = Instant::now();
        drop(not_reading);
        until("the client that does not read is disconnected", || served.server.connections() == 0);
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn requests_of_a_client_that_reads_no_replies_are_bounded() {
    in_time(|| {
        let parked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&parked);
        let device = Slow::over(memory(64 * MIB), move |request| {
            count.fetch_add(1, Ordering::SeqCst);
            (request.operation != Operation::Read).then_some(Duration::ZERO)
        });
        let options = Options {
            requests_max: 10,
            bytes_max: 4 * MIB,
            stop_timeout: Duration::from_millis(200),
            ..Options::default()
        };
        let served = serve_with(device, options);
        let mut many = ready(&served);
        let sent: Vec<u8> = (0..1000).flat_map(|cookie| request(0, cookie, 0, 4096)).collect();
        many.write_all(&sent).expect("the socket accepts it");
        until("the bound on requests is reached", || parked.load(Ordering::SeqCst) == 10);
        let mut large = ready(&served);
        let sent: Vec<u8> = (0..1000).flat_map(|cookie| request(0, cookie, 0, MIB as u32)).collect();
        large.write_all(&sent).expect("the socket accepts it");
        until("the bound on bytes is reached", || parked.load(Ordering::SeqCst) == 14);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(parked.load(Ordering::SeqCst), 14);
        served.server.stop().expect("stopped");
    });
}

#[test]
fn a_request_larger_than_the_bound_is_admitted_alone() {
    in_time(|| {
        let served = serve_with(memory(16 * MIB), Options { bytes_max: MIB, ..Options::default() });
        let mut client = Client::connect(&served.listen).expect("a client");
        let data = vec![4; 3 * MIB];
        for number in 0..4 {
            let command = Command::Write { offset: number * 3 * MIB as u64, data: &data, fua: false };
            client.submit(command).expect("submitted");
        }
        while let Some(completed) = client.complete().expect("a reply") {
            completed.result.expect("written");
        }
    });
}

#[test]
fn stop_does_not_wait_for_a_client_that_does_not_read() {
    in_time(|| {
        let options = Options { stop_timeout: Duration::from_millis(200), ..Options::default() };
        let served = serve_with(memory(64 * MIB), options);
        let mut not_reading = ready(&served);
        for cookie in 0..100 {
            not_reading.write_all(&request(0, cookie, 0, MIB as u32)).expect("the socket accepts it");
        }
        std::thread::sleep(Duration::from_millis(50));
        let began = Instant::now();
        served.server.stop().expect("stopped");
        assert!(began.elapsed() < Duration::from_secs(2));
    });
}

#[test]
fn a_panic_of_the_device_ends_its_connection_only() {
    struct PanickingMemory;

    impl Pmem for PanickingMemory {
        fn len(&self) -> u64 {
            MIB as u64
        }
        fn durability(&self) -> Durability {
            Durability::ProcessCrash
        }
        fn store(&self, at: u64, _from: &[u8]) {
            assert_ne!(at, 4096, "a fault of the test");
        }
        fn store_summed(&self, _at: u64, _from: &[u8], _first: usize, _checksums: &mut [u32]) {}
        fn store_line(&self, _at: u64, _line: &[u8; 64]) {}
        fn fence(&self) {}
        fn load(&self, _at: u64, _into: &mut [u8]) -> Result<(), MediaError> {
            Ok(())
        }
        fn load_summed(&self, _at: u64, _into: &mut [u8]) -> Result<u32, MediaError> {
            Ok(0)
        }
        fn write_back(&self, _at: u64, _length: u64) {}
    }

    in_time(|| {
        let device = cbd_export::MemoryDevice::new(Arc::new(PanickingMemory), 512).expect("a device");
        let served = serve(Arc::new(device));
        let mut client = Client::connect(&served.listen).expect("a client");
        assert!(client.write(4096, &[0; 512], false).is_err());
        until("its thread is gone", || served.server.connections() == 0);
        assert_served(&served);
        served.server.stop().expect("stopped");
    });
}

/// Clients that request far more data than they read.
fn not_reading(served: &Served, count: usize, length: u32) -> Vec<UnixStream> {
    (0..count)
        .map(|_| {
            let mut stream = ready(served);
            stream.set_write_timeout(Some(Duration::from_millis(20))).expect("it can be set");
            let mut cookie = 0;
            while cookie < 100 && stream.write_all(&request(0, cookie, 0, length)).is_ok() {
                cookie += 1;
            }
            stream
        })
        .collect()
}

#[test]
fn clients_that_do_not_read_share_one_bound_of_memory_and_others_are_served() {
    in_time(|| {
        let bound = Budget::new(512 << 20);
        let options = || Options { memory: Arc::clone(&bound), ..Options::default() };
        let device: Arc<dyn BlockDevice> = memory(64 * MIB);
        let (served, other) = (serve_with(Arc::clone(&device), options()), serve_with(device, options()));
        // As many as leave the memory that a new client needs: an eighth of the bound admits no further connections.
        let _not_reading = (not_reading(&served, 12, MIB as u32), not_reading(&other, 12, 32 << 20));
        assert!(bound.used() <= bound.limit());
        assert!(
            bound.used() > bound.limit() / 2,
            "only {} bytes are used: too few for this test",
            bound.used()
        );
        // Requests of every length, although most of the memory is taken.
        let mut client = Client::connect(&served.listen).expect("there is room for one more");
        let data: Vec<u8> = (0..32 * MIB).map(|at| (at / 512 % 251) as u8).collect();
        client.write(512, &data, true).expect("a long write");
        let mut read = vec![0; data.len()];
        client.read(512, &mut read).expect("a long read");
        assert!(read == data);
        for length in [512, 4096, MIB, 3 * MIB + 512] {
            client.read(1024, &mut read[..length]).expect("a read");
            assert!(read[..length] == data[512..512 + length]);
        }
        assert!(bound.used() <= bound.limit());
    });
}

#[test]
fn silent_sockets_do_not_exclude_other_clients() {
    in_time(|| {
        let closed_handshakes = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&closed_handshakes);
        let options = Options {
            handshakes_max: 8,
            observer: Some(Arc::new(move |notice: &Notice<'_>| {
                if matches!(notice, Notice::HandshakeClosed { .. }) {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            })),
            ..Options::default()
        };
        let served = serve_with(memory(MIB), options);
        let mut silent: Vec<UnixStream> = (0..300).map(|_| connect(&served)).collect();
        let began = Instant::now();
        // The listen queue of the socket may be full for a moment; connecting does not wait for it.
        until("a new client is accepted", || Client::connect(&served.listen).is_ok());
        assert_served(&served);
        assert!(began.elapsed() < Duration::from_secs(5), "the new client waited for the silent ones");
        assert!(closed_handshakes.load(Ordering::SeqCst) >= 290);
        // The oldest connections were closed long before the handshake timeout.
        let mut received = Vec::new();
        silent[0].read_to_end(&mut received).expect("it closes");
        assert!(began.elapsed() < Duration::from_secs(8));
    });
}

/// Stops a server whose accepting thread waits for the end of closed handshakes, if it has reached that wait after
/// `pause`; returns why the client that it had accepted was refused.
fn refused_by_a_stop(pause: Duration) -> Option<ErrorKind> {
    let (release, hold) = std::sync::mpsc::channel::<()>();
    let hold = std::sync::Mutex::new(hold);
    let begun = Arc::new(AtomicUsize::new(0));
    let refused = Arc::new(std::sync::Mutex::new(None));
    let options = Options {
        handshakes_max: 1,
        stop_timeout: Duration::from_millis(100),
        // The threads do not begin, so that the closed handshakes do not end.
        thread_setup: Some(Arc::new({
            let begun = Arc::clone(&begun);
            move || {
                begun.fetch_add(1, Ordering::SeqCst);
                let _ = hold.lock().map(|hold| hold.recv());
            }
        })),
        observer: Some(Arc::new({
            let refused = Arc::clone(&refused);
            move |notice: &Notice<'_>| {
                if let Notice::Refused { error } = notice {
                    *refused.lock().expect("no thread panicked with the lock") = Some(error.kind());
                }
            }
        })),
        ..Options::default()
    };
    let served = serve_with(memory(MIB), options);
    let _turned_away: Vec<UnixStream> = (0..3).map(|_| connect(&served)).collect();
    until("three threads were started", || begun.load(Ordering::SeqCst) == 3);
    let _fourth = connect(&served);
    std::thread::sleep(pause);
    assert_eq!(served.server.stop().expect_err("threads are stuck").kind(), ErrorKind::TimedOut);
    drop(release);
    refused.lock().expect("no thread panicked with the lock").take()
}

#[test]
fn a_stop_ends_the_wait_for_refused_clients() {
    in_time(|| {
        // On a slow machine the fourth client may not have been accepted when the server stops.
        let refused =
            [50, 500, 5000].into_iter().find_map(|pause| refused_by_a_stop(Duration::from_millis(pause)));
        assert_eq!(refused, Some(ErrorKind::Stopped));
    });
}

#[test]
fn a_client_for_which_there_is_no_memory_is_refused_with_a_reason() {
    in_time(|| {
        let reported = Arc::new(std::sync::Mutex::new(String::new()));
        let text = Arc::clone(&reported);
        let options = Options {
            memory: Budget::new(5 << 20),
            observer: Some(Arc::new(move |notice: &Notice<'_>| {
                if let Notice::Refused { error } = notice {
                    *text.lock().expect("no thread panicked with the lock") = error.line();
                }
            })),
            ..Options::default()
        };
        let served = serve_with(memory(MIB), options);
        // A connection takes its memory after the handshake; a reply shows that it has done so.
        let [first, _second] = [(); 2].map(|()| {
            let mut client = Client::connect(&served.listen).expect("the socket accepts it");
            client.write(0, &[1; 512], false).expect("memory");
            client
        });
        let mut third = Client::connect(&served.listen).expect("a handshake");
        assert!(third.write(0, &[1; 512], false).is_err());
        until("the reason is reported", || {
            reported.lock().expect("no thread panicked with the lock").contains("nbd_memory")
        });
        drop(first);
        until("there is room again", || {
            Client::connect(&served.listen).is_ok_and(|mut client| client.write(0, &[1; 512], false).is_ok())
        });
    });
}

#[test]
fn clients_of_one_export_that_take_all_memory_leave_room_for_new_clients_of_another() {
    in_time(|| {
        let refused = Arc::new(AtomicUsize::new(0));
        let failed = Arc::new(AtomicUsize::new(0));
        let bound = Budget::new(64 << 20);
        let options = || {
            let (refused, failed) = (Arc::clone(&refused), Arc::clone(&failed));
            let observer = move |notice: &Notice<'_>| {
                match notice {
                    Notice::Refused { .. } => refused.fetch_add(1, Ordering::SeqCst),
                    Notice::Ended { error: Some(_), .. } => failed.fetch_add(1, Ordering::SeqCst),
                    _ => 0,
                };
            };
            Options { memory: Arc::clone(&bound), observer: Some(Arc::new(observer)), ..Options::default() }
        };
        let (attacked, other) = (serve_with(memory(MIB), options()), serve_with(memory(MIB), options()));
        // More connections than the budget has room for; a reply shows that a connection has its memory.
        let taken: Vec<Client> = (0..40)
            .filter_map(|_| {
                let mut client = Client::connect(&attacked.listen).ok()?;
                client.write(0, &[1; 512], false).ok()?;
                Some(client)
            })
            .collect();
        assert!(taken.len() > 4 && taken.len() < 40, "{} clients were admitted", taken.len());
        until("refused clients are counted as refused", || {
            refused.load(Ordering::SeqCst) == 40 - taken.len()
        });
        assert_eq!(failed.load(Ordering::SeqCst), 0);
        let own = [(); 4].map(|()| {
            let mut client = Client::connect(&other.listen).expect("room for a client of the other export");
            client.write(0, &[1; 512], false).expect("a client of the other export is served");
            client
        });
        assert!(bound.used() <= bound.limit());
        drop((own, taken));
    });
}
