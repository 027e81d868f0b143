//! Requests and replies over a real socket, with the crate's own client.

mod common;

use cbd_nbd::{CONTEXT_ALLOCATION, CONTEXT_STATE, Listen, Notice, Options, Server, transmission_flag};
use cbd_testkit::{BlockStatus, Client, ClientOptions, Command};
use cbd_types::{ErrorKind, Operation};
use common::{Calls, Counting, Failing, Slow, in_time, memory, serve, serve_with};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length)
        .map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed))
        .collect()
}

fn simple() -> ClientOptions {
    ClientOptions { structured: false, ..ClientOptions::default() }
}

#[test]
fn data_of_any_length_is_read_back_as_it_was_written() {
    in_time(|| {
        let served = serve(memory(40 * MIB));
        for options in [ClientOptions::default(), simple()] {
            let mut client = Client::connect_with(&served.listen, &options).expect("a client");
            assert_eq!(client.size(), 40 * MIB as u64);
            for (seed, length) in [512, 4096, 65_536, 131_072 + 512, MIB, 32 * MIB].into_iter().enumerate() {
                let data = pattern(length, seed as u8);
                client.write(MIB as u64 + 512, &data, seed % 2 == 0).expect("written");
                let mut back = vec![0; length + 1024];
                client.read(MIB as u64, &mut back[..length.min(32 * MIB - 512)]).expect("read");
                let length = length.min(32 * MIB - 512) - 512;
                assert!(back[512..512 + length] == data[..length]);
            }
        }
    });
}

#[test]
fn many_requests_of_mixed_sizes_in_flight_are_each_answered_once_with_their_data() {
    in_time(|| {
        let served = serve(memory(64 * MIB));
        for options in [ClientOptions::default(), simple()] {
            let mut client = Client::connect_with(&served.listen, &options).expect("a client");
            let sizes = [512, 4096, 100 * 512, MIB];
            let mut cookies = HashSet::new();
            for number in 0..64 {
                let data = pattern(sizes[number % 4], number as u8);
                let command = Command::Write { offset: (number * MIB) as u64, data: &data, fua: false };
                cookies.insert(client.submit(command).expect("submitted"));
            }
            while let Some(completed) = client.complete().expect("a reply") {
                completed.result.expect("written");
                assert!(cookies.remove(&completed.cookie));
            }
            assert!(cookies.is_empty());
            let mut asked = std::collections::HashMap::new();
            for number in 0..64 {
                let length = sizes[number % 4] as u32;
                let command = Command::Read { offset: (number * MIB) as u64, length };
                asked.insert(client.submit(command).expect("submitted"), number);
            }
            while let Some(completed) = client.complete().expect("a reply") {
                completed.result.expect("read");
                let number = asked.remove(&completed.cookie).expect("it was asked for");
                assert!(completed.data == pattern(sizes[number % 4], number as u8));
                client.recycle(completed.data);
            }
            assert!(asked.is_empty());
        }
    });
}

#[test]
fn a_parked_request_does_not_delay_later_ones() {
    in_time(|| {
        let device = Slow::over(memory(MIB), |request| {
            Some(Duration::from_millis(if request.operation == Operation::Read { 300 } else { 1 }))
        });
        let served = serve(device);
        let mut client = Client::connect(&served.listen).expect("a client");
        let read = client.submit(Command::Read { offset: 0, length: 4096 }).expect("submitted");
        let write =
            client.submit(Command::Write { offset: 8192, data: &[1; 4096], fua: true }).expect("submitted");
        let flush = client.submit(Command::Flush).expect("submitted");
        let order: Vec<_> = std::iter::from_fn(|| client.complete().expect("a reply"))
            .map(|completed| {
                completed.result.expect("done");
                completed.cookie
            })
            .collect();
        assert_eq!(order.len(), 3);
        assert_eq!(order[2], read);
        assert!(order.contains(&write) && order.contains(&flush));
    });
}

#[test]
fn a_single_write_calls_the_device_once() {
    in_time(|| {
        let calls = Arc::new(Calls::default());
        let served = serve(Arc::new(Counting { inner: memory(MIB), calls: Arc::clone(&calls) }));
        let mut client = Client::connect(&served.listen).expect("a client");
        for number in 0..20 {
            client.write(number * 4096, &pattern(4096, number as u8), number % 2 == 0).expect("written");
        }
        let count = |calls: &AtomicUsize| calls.load(Ordering::SeqCst);
        assert_eq!((count(&calls.submit), count(&calls.submit_plugged), count(&calls.poll)), (20, 0, 0));
    });
}

#[test]
fn plugged_writes_are_answered() {
    in_time(|| {
        let calls = Arc::new(Calls::default());
        let served = serve(Arc::new(Counting { inner: memory(MIB), calls: Arc::clone(&calls) }));
        let mut client = Client::connect(&served.listen).expect("a client");
        for depth in 1..20 {
            let data = pattern(4096, depth as u8);
            for number in 0..depth {
                let command = Command::Write { offset: number * 4096, data: &data, fua: false };
                client.submit(command).expect("submitted");
            }
            for _ in 0..depth {
                client.complete().expect("a reply").expect("a request is in flight").result.expect("written");
            }
            let mut back = vec![0; depth as usize * 4096];
            client.read(0, &mut back).expect("read");
            assert!(back.chunks(4096).all(|block| block == data));
        }
    });
}

#[test]
fn zeroes_trims_and_prefetches_are_executed() {
    in_time(|| {
        let served = serve(memory(16 * MIB));
        let mut client = Client::connect(&served.listen).expect("a client");
        client.write(0, &vec![9; 8 * MIB], false).expect("written");
        client.write_zeroes(4096, 4096, false, true).expect("zeroed");
        client.write_zeroes(12_288, 512, true, false).expect("zeroed");
        let fast =
            Command::WriteZeroes { offset: 13_312, length: 512, fua: false, no_hole: false, fast: true };
        client.run(fast).expect("zeroed");
        client.trim(MIB as u64, MIB as u32, true).expect("trimmed");
        client.cache(0, 16 * MIB as u32).expect("prefetched");
        client.cache(512, 3 * MIB as u32 + 512).expect("prefetched");
        client.flush().expect("flushed");
        let mut back = vec![0; 8 * MIB];
        client.read(0, &mut back).expect("read");
        let zero = |at: usize| {
            (4096..8192).contains(&at)
                || (12_288..12_800).contains(&at)
                || (13_312..13_824).contains(&at)
                || (MIB..2 * MIB).contains(&at)
        };
        assert!(back.iter().enumerate().all(|(at, &byte)| byte == if zero(at) { 0 } else { 9 }));
    });
}

#[test]
fn invalid_requests_are_answered_and_the_connection_continues() {
    in_time(|| {
        let served = serve(memory(MIB));
        for options in [ClientOptions::default(), simple()] {
            let mut client = Client::connect_with(&served.listen, &options).expect("a client");
            let size = MIB as u64;
            let too_long = vec![0; (32 << 20) + 512];
            for (command, kind) in [
                (Command::Read { offset: size, length: 512 }, ErrorKind::InvalidArgument),
                (Command::Read { offset: 1, length: 512 }, ErrorKind::InvalidArgument),
                (Command::Read { offset: 0, length: 0 }, ErrorKind::InvalidArgument),
                (Command::Read { offset: 0, length: (32 << 20) + 512 }, ErrorKind::InvalidArgument),
                (Command::Write { offset: size - 512, data: &[0; 1024], fua: false }, ErrorKind::NoSpace),
                (Command::Write { offset: u64::MAX - 511, data: &[0; 1024], fua: false }, ErrorKind::NoSpace),
                (Command::Write { offset: 0, data: &[0; 100], fua: false }, ErrorKind::InvalidArgument),
                (Command::Write { offset: 0, data: &too_long, fua: false }, ErrorKind::InvalidArgument),
                (Command::Write { offset: 0, data: &[], fua: false }, ErrorKind::InvalidArgument),
                (Command::Trim { offset: size, length: 512, fua: false }, ErrorKind::InvalidArgument),
                (Command::Cache { offset: size, length: 512 }, ErrorKind::InvalidArgument),
            ] {
                let error = client.run(command).expect_err("it is refused");
                assert_eq!(error.kind(), kind, "{error}");
            }
            client.write(0, &[1; 512], false).expect("it continues");
        }
    });
}

#[test]
fn a_failing_device_fails_requests_and_nothing_else() {
    in_time(|| {
        for (kind, seen) in [
            (ErrorKind::Media, ErrorKind::Backing),
            (ErrorKind::NoSpace, ErrorKind::NoSpace),
            (ErrorKind::Stopped, ErrorKind::Stopped),
            (ErrorKind::Unsupported, ErrorKind::Unsupported),
        ] {
            let served = serve(Arc::new(Failing(kind)));
            for options in [ClientOptions::default(), simple()] {
                let mut client = Client::connect_with(&served.listen, &options).expect("a client");
                for command in [
                    Command::Read { offset: 0, length: 4096 },
                    Command::Write { offset: 0, data: &[1; 4096], fua: true },
                    Command::Flush,
                    Command::Cache { offset: 0, length: 8192 },
                    Command::Trim { offset: 0, length: 4096, fua: false },
                ] {
                    let error = client.run(command).expect_err("it fails");
                    assert_eq!(error.kind(), seen, "{error}");
                    let has_reason = error.line().contains("a fault of the test");
                    assert_eq!(has_reason, options.structured, "{error}");
                }
            }
        }
    });
}

#[test]
fn block_status_reports_both_contexts_or_is_refused() {
    in_time(|| {
        let served = serve(memory(16 * MIB));
        let mut client = Client::connect(&served.listen).expect("a client");
        let status = |context| BlockStatus { context, offset: 4096, length: 8 << 20, flags: 0 };
        let found = client.block_status(4096, 8 << 20).expect("it is known");
        assert_eq!(found, [status(CONTEXT_ALLOCATION), status(CONTEXT_STATE)]);
        let options = ClientOptions { contexts: false, ..ClientOptions::default() };
        let mut client = Client::connect_with(&served.listen, &options).expect("a client");
        let refused = client.block_status(0, 4096).expect_err("no context was negotiated");
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    });
}

#[test]
fn a_read_only_export_is_marked_and_refuses_changes() {
    in_time(|| {
        let served = serve_with(memory(MIB), Options { read_only: true, ..Options::default() });
        let mut client = Client::connect(&served.listen).expect("a client");
        assert!(client.is_read_only());
        assert_eq!(client.flags() & (transmission_flag::SEND_TRIM | transmission_flag::SEND_WRITE_ZEROES), 0);
        assert_eq!(client.write(0, &[1; 512], false).expect_err("refused").kind(), ErrorKind::Permission);
        assert_eq!(client.trim(0, 512, false).expect_err("refused").kind(), ErrorKind::Permission);
        client.read(0, &mut [0; 512]).expect("it can be read");
        client.flush().expect("it can be flushed");
    });
}

#[test]
fn one_connection_reads_what_another_one_wrote() {
    in_time(|| {
        let served = serve(memory(MIB));
        let mut one = Client::connect(&served.listen).expect("a client");
        let mut other = Client::connect(&served.listen).expect("a client");
        assert_ne!(one.flags() & transmission_flag::CAN_MULTI_CONN, 0);
        assert_eq!(served.server.connections(), 2);
        one.write(4096, &[5; 4096], false).expect("written");
        other.flush().expect("flushed");
        let mut back = [0; 4096];
        other.read(4096, &mut back).expect("read");
        assert_eq!(back, [5; 4096]);
    });
}

#[test]
fn tcp_serves_as_the_unix_socket_does() {
    in_time(|| {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let server = Server::start(memory(4 * MIB), Listen::Tcp(any), Options::default()).expect("a server");
        let Listen::Tcp(address) = server.address() else { panic!("{}", server.address()) };
        assert_ne!(address.port(), 0);
        let mut client = Client::connect(server.address()).expect("a client");
        let data = pattern(MIB, 3);
        client.write(512, &data, true).expect("written");
        let mut back = vec![0; MIB];
        client.read(512, &mut back).expect("read");
        assert!(back == data);
        server.stop().expect("stopped");
        assert!(client.read(0, &mut back).is_err());
    });
}

#[test]
fn export_names_are_checked() {
    in_time(|| {
        let served = serve(memory(MIB));
        for (name, found) in [("", true), ("disk", true), ("dis", false), ("disk2", false)] {
            let options = ClientOptions { export_name: name.into(), ..ClientOptions::default() };
            match Client::connect_with(&served.listen, &options) {
                Ok(client) => {
                    assert!(found);
                    assert_eq!(client.description(), "a test");
                    assert_eq!(client.block_sizes(), Some([512, 4096, 32 << 20]));
                }
                Err(error) => {
                    assert!(!found);
                    assert_eq!(error.kind(), ErrorKind::NotFound);
                }
            }
        }
    });
}

#[test]
fn a_server_with_limits_of_zero_or_an_invalid_name_is_refused() {
    let listen = || Listen::Unix("/nonexistent/s".into());
    for options in [
        Options { connections_max: 0, ..Options::default() },
        Options { requests_max: 0, ..Options::default() },
        Options { export_name: "x".repeat(5000), ..Options::default() },
        Options { description: "a\0b".into(), ..Options::default() },
    ] {
        let refused = Server::start(memory(MIB), listen(), options).expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    }
    let absent = Client::connect(&listen()).expect_err("no server listens");
    assert_eq!(absent.kind(), ErrorKind::NotFound);
}

#[test]
fn stop_completes_what_is_in_flight_and_closes() {
    in_time(|| {
        let parked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&parked);
        let device = Slow::over(memory(MIB), move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            Some(Duration::from_millis(300))
        });
        let served = serve(device);
        let mut client = Client::connect(&served.listen).expect("a client");
        let mut idle = Client::connect(&served.listen).expect("a client");
        for number in 0..8 {
            let command =
                Command::Write { offset: number * 4096, data: &[number as u8 + 1; 4096], fua: false };
            client.submit(command).expect("submitted");
        }
        while parked.load(Ordering::SeqCst) < 8 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let began = Instant::now();
        served.server.stop().expect("stopped");
        assert!(began.elapsed() < Duration::from_secs(3));
        assert!(!served.path.exists());
        let mut answered = 0;
        while let Ok(Some(completed)) = client.complete() {
            completed.result.expect("written");
            answered += 1;
        }
        assert_eq!(answered, 8);
        assert!(client.flush().is_err());
        assert!(idle.flush().is_err());
        assert_eq!(Client::connect(&served.listen).expect_err("closed").kind(), ErrorKind::NotFound);
    });
}

#[test]
fn stop_is_bounded_even_if_the_device_never_answers() {
    in_time(|| {
        let device = Slow::over(memory(MIB), |_| None);
        let options = Options { stop_timeout: Duration::from_millis(200), ..Options::default() };
        let served = serve_with(device, options);
        let mut client = Client::connect(&served.listen).expect("a client");
        client.submit(Command::Flush).expect("submitted");
        std::thread::sleep(Duration::from_millis(50));
        let began = Instant::now();
        served.server.stop().expect("a parked request is given up");
        assert!(began.elapsed() < Duration::from_secs(2));
        assert_eq!(client.complete().expect_err("closed").kind(), ErrorKind::Stopped);
        assert_eq!(client.outstanding().count(), 1);
    });
}

#[test]
fn a_client_that_leaves_in_order_has_its_requests_completed() {
    in_time(|| {
        let memory = memory(MIB);
        let device = Slow::over(Arc::clone(&memory), |_| Some(Duration::from_millis(200)));
        let served = serve(device);
        let mut client = Client::connect(&served.listen).expect("a client");
        client.submit(Command::Write { offset: 0, data: &[7; 4096], fua: false }).expect("submitted");
        drop(client);
        let until = Instant::now() + Duration::from_secs(10);
        while served.server.connections() > 0 {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(5));
        }
        let other = serve(memory);
        let mut back = [0; 4096];
        Client::connect(&other.listen).expect("a client").read(0, &mut back).expect("read");
        assert_eq!(back, [7; 4096]);
    });
}

#[test]
fn each_data_thread_is_set_up_and_its_events_are_reported() {
    in_time(|| {
        let set_up = Arc::new(AtomicUsize::new(0));
        let reported = Arc::new(Mutex::new(Vec::new()));
        let options = Options {
            thread_setup: Some({
                let set_up = Arc::clone(&set_up);
                Arc::new(move || {
                    set_up.fetch_add(1, Ordering::SeqCst);
                })
            }),
            observer: Some({
                let reported = Arc::clone(&reported);
                Arc::new(move |notice: &Notice<'_>| {
                    let word = match notice {
                        Notice::Connected { connection } => format!("connected {connection}"),
                        Notice::Ended { connection, error } => {
                            format!("ended {connection} {}", error.is_some())
                        }
                        other => format!("{other:?}"),
                    };
                    reported.lock().expect("no thread panicked with the lock").push(word);
                })
            }),
            ..Options::default()
        };
        let served = serve_with(memory(MIB), options);
        drop(Client::connect(&served.listen).expect("a client"));
        served.server.stop().expect("stopped");
        assert_eq!(set_up.load(Ordering::SeqCst), 1);
        assert_eq!(
            *reported.lock().expect("no thread panicked with the lock"),
            ["connected 0", "ended 0 false"]
        );
    });
}
