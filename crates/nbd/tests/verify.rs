//! Block status in the context `cbd:verify`: what it reports, and that no client makes it unbounded.

mod common;

use cbd_nbd::{CONTEXT_ALLOCATION, CONTEXT_STATE, CONTEXT_VERIFY, Options};
use cbd_testkit::{BlockStatus, Client, ClientOptions, Command};
use cbd_types::{ErrorKind, Flaw, VerifyLevel};
use common::raw::{connect, request};
use common::verifying::Verifying;
use common::{Served, in_time, memory, serve, serve_with, until};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const BLOCK_STATUS: u16 = 7;

fn client(served: &Served) -> Client {
    let options = ClientOptions { verify: true, ..ClientOptions::default() };
    Client::connect_with(&served.listen, &options).expect("a client")
}

fn of(context: &str, status: &[BlockStatus]) -> Vec<(u64, u32, u32)> {
    let chosen = status.iter().filter(|extent| extent.context == context);
    chosen.map(|extent| (extent.offset, extent.length, extent.flags)).collect()
}

/// A client past its handshake, with `cbd:verify` alone, that reads no replies unless the test does.
fn raw_client(served: &Served) -> UnixStream {
    let mut contexts = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 10].to_vec();
    contexts.extend_from_slice(CONTEXT_VERIFY.as_bytes());
    let mut sent = 3_u32.to_be_bytes().to_vec();
    for (code, data) in [(8_u32, &[][..]), (10, &contexts), (7, &[0; 6])] {
        sent.extend_from_slice(b"IHAVEOPT");
        sent.extend_from_slice(&code.to_be_bytes());
        sent.extend_from_slice(&(data.len() as u32).to_be_bytes());
        sent.extend_from_slice(data);
    }
    let mut stream = connect(served);
    stream.write_all(&sent).expect("room");
    // Greeting; structured replies; the context and the end of the contexts; size, block sizes and the end of GO.
    let mut greeting = [0; 18 + 20 + (34 + 20) + (32 + 34 + 20)];
    stream.read_exact(&mut greeting).expect("a greeting");
    stream
}

#[test]
fn flaws_have_flags_and_the_reply_has_a_chunk_for_each_context() {
    in_time(|| {
        let findings = [
            (MIB, 4096, Flaw::DirtyDamaged),
            (2 * MIB, 512, Flaw::Unreadable),
            (3 * MIB, 4096, Flaw::CacheDamaged),
            (6 * MIB, 8192, Flaw::Quarantined),
        ];
        let device = Verifying::over(memory(8 << 20), &findings);
        let served = serve(device.clone());
        let status = client(&served).block_status(0, 8 << 20).expect("verified");
        assert_eq!(of(CONTEXT_ALLOCATION, &status), [(0, 8 << 20, 0)]);
        assert_eq!(of(CONTEXT_STATE, &status), [(0, 8 << 20, 0)]);
        let expected: [(u64, u64, u32); 7] = [
            (0, MIB, 1),
            (MIB, 4096, 3),
            (MIB + 4096, MIB - 4096, 1),
            (2 * MIB, 512, 5),
            (2 * MIB + 512, 4 * MIB - 512, 1),
            (6 * MIB, 8192, 3),
            (6 * MIB + 8192, 2 * MIB - 8192, 1),
        ];
        let expected = expected.map(|(offset, length, flags)| (offset, length as u32, flags));
        assert_eq!(of(CONTEXT_VERIFY, &status), expected);
        let state = device.state();
        assert!(state.submitted.iter().all(|verify| verify.level == VerifyLevel::Newest && !verify.repair));
    });
}

#[test]
fn a_reply_covers_a_part_of_a_long_request_and_the_first_extent_alone_if_only_that_is_wanted() {
    in_time(|| {
        let device = Verifying::over(memory(40 << 20), &[(5 * MIB, 512, Flaw::Unreadable)]);
        let served = serve(device.clone());
        let mut client = client(&served);
        let status = client.block_status(0, 40 << 20).expect("verified");
        let (offset, length, _) = *of(CONTEXT_VERIFY, &status).last().expect("it is selected");
        assert_eq!(offset + u64::from(length), 16 * MIB);
        assert_eq!(of(CONTEXT_STATE, &status), [(0, 40 << 20, 0)], "others cover the whole");
        device.state().submitted.clear();
        let command = Command::BlockStatus { offset: 0, length: 40 << 20, one: true };
        let status = client.run(command).expect("verified").status;
        assert_eq!(of(CONTEXT_VERIFY, &status), [(0, 5 << 20, 1)]);
        assert_eq!(device.state().submitted.len(), 2, "nothing behind the extent is verified");
    });
}

#[test]
fn nothing_is_verified_for_a_client_that_did_not_select_the_context() {
    in_time(|| {
        let device = Verifying::over(memory(1 << 20), &[]);
        let served = serve(device.clone());
        let status = Client::connect(&served.listen).expect("a client").block_status(0, 1 << 20);
        assert_eq!(status.expect("known").len(), 2);
        assert!(device.state().submitted.is_empty());
        // Bare memory cannot verify, and does not offer it.
        let served = serve(memory(1 << 20));
        assert_eq!(client(&served).block_status(0, 1 << 20).expect("known").len(), 2);
    });
}

#[test]
fn invalid_ranges_are_refused_and_an_error_of_the_device_is_reported() {
    in_time(|| {
        let device = Verifying::over(memory(1 << 20), &[]);
        let served = serve(device.clone());
        let mut client = client(&served);
        for (offset, length) in
            [(MIB, 512), (0, 2 << 20), (100, 512), (0, 100), (0, 0), (u64::MAX - 511, 512)]
        {
            let error = client.block_status(offset, length).expect_err("it is invalid");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{length} at {offset}: {error}");
        }
        assert!(device.state().submitted.is_empty());
        device.state().error = Some(ErrorKind::Media);
        assert!(client.block_status(0, 4096).is_err());
        device.state().error = None;
        assert_eq!(of(CONTEXT_VERIFY, &client.block_status(0, 4096).expect("verified")), [(0, 4096, 1)]);
    });
}

#[test]
fn other_requests_of_the_client_complete_while_a_verification_waits_for_the_disk() {
    in_time(|| {
        let device = Verifying::over(memory(8 << 20), &[]);
        device.hold();
        let served = serve(device.clone());
        let mut client = client(&served);
        let mut waiting = Vec::new();
        for _ in 0..8 {
            let command = Command::BlockStatus { offset: 0, length: 8 << 20, one: false };
            waiting.push(client.submit(command).expect("submitted"));
        }
        device.wait_until_held(2);
        for number in 0..50 {
            let sent = client.submit(Command::Write { offset: number * 4096, data: &[7; 4096], fua: true });
            let completed = client.complete().expect("a reply").expect("a request");
            assert_eq!(completed.cookie, sent.expect("submitted"));
            completed.result.expect("written");
        }
        assert_eq!(device.state().submitted.len(), 2, "the disk has two steps of the client at most");
        device.release();
        for cookie in waiting {
            let completed = client.complete().expect("a reply").expect("a request");
            completed.result.expect("verified");
            assert_eq!(completed.cookie, cookie, "in the order of the requests");
        }
        assert_eq!(device.state().most, 2);
    });
}

#[test]
fn verifications_are_cancelled_when_their_client_disconnects() {
    in_time(|| {
        let device = Verifying::over(memory(64 << 20), &[]);
        device.hold();
        let served = serve(device.clone());
        let mut stream = raw_client(&served);
        for cookie in 0..50 {
            stream.write_all(&request(BLOCK_STATUS, cookie, 0, 64 << 20)).expect("room");
        }
        device.wait_until_held(2);
        stream.shutdown(Shutdown::Both).expect("it is connected");
        until("the connection ends", || served.server.connections() == 0);
        let state = device.state();
        assert_eq!((state.given_up, state.held, state.submitted.len()), (2, 0, 2));
    });
}

#[test]
fn thousands_of_requests_of_a_client_that_reads_no_replies_are_bounded() {
    in_time(|| {
        // Alternating sectors are the longest replies.
        let findings: Vec<_> = (0..8192).map(|at| (at * 1024, 512, Flaw::Unreadable)).collect();
        let device = Verifying::over(memory(8 << 20), &findings);
        let served = serve(device.clone());
        let mut stream = raw_client(&served);
        stream.set_write_timeout(Some(Duration::from_millis(200))).expect("it can be set");
        let sent = (0..5000)
            .take_while(|&cookie| stream.write_all(&request(BLOCK_STATUS, cookie, 0, 8 << 20)).is_ok());
        assert!(sent.count() > 128);
        until("it stops", || {
            let before = device.state().submitted.len();
            std::thread::sleep(Duration::from_millis(100));
            before > 0 && device.state().submitted.len() == before
        });
        let state = device.state();
        // Two steps for each request that is read, of which there are 128 at most.
        assert!(state.submitted.len() <= 2 * (128 + 64), "{}", state.submitted.len());
        assert_eq!((state.most, state.held), (2, 0));
        drop(state);
        assert_eq!(client(&served).block_status(512, 512).expect("it is served").len(), 3);
        stream.shutdown(Shutdown::Both).expect("it is connected");
        until("the connections end", || served.server.connections() == 0);
    });
}

#[test]
fn a_stop_answers_each_request_and_submits_no_further_steps() {
    in_time(|| {
        let device = Verifying::over(memory(8 << 20), &[]);
        device.hold();
        let served = serve_with(
            device.clone(),
            Options { stop_timeout: Duration::from_secs(20), ..Options::default() },
        );
        let mut client = client(&served);
        for _ in 0..10 {
            let command = Command::BlockStatus { offset: 0, length: 8 << 20, one: false };
            client.submit(command).expect("submitted");
        }
        device.wait_until_held(2);
        let server = served.server;
        let stopping = std::thread::spawn(move || server.stop());
        let mut results = Vec::new();
        for _ in 0..8 {
            let completed = client.complete().expect("a reply").expect("a request");
            results.push(completed.result.expect_err("it had not begun").kind());
        }
        assert_eq!(results, [ErrorKind::Stopped; 8]);
        device.release();
        for _ in 0..2 {
            let completed = client.complete().expect("a reply").expect("a request");
            completed.result.expect("a part is verified");
            assert_eq!(of(CONTEXT_VERIFY, &completed.status), [(0, 4 << 20, 1)]);
        }
        stopping.join().expect("no panic").expect("stopped in time");
        assert_eq!(device.state().submitted.len(), 2);
    });
}

#[test]
fn a_stop_does_not_wait_longer_than_its_timeout_for_a_disk_that_hangs() {
    in_time(|| {
        let device = Verifying::over(memory(8 << 20), &[]);
        device.hold();
        let options = Options { stop_timeout: Duration::from_millis(200), ..Options::default() };
        let served = serve_with(device.clone(), options);
        let mut client = client(&served);
        client.submit(Command::BlockStatus { offset: 0, length: 4096, one: false }).expect("submitted");
        device.wait_until_held(1);
        served.server.stop().expect("stopped in time");
        until("the connection ends", || Arc::strong_count(&device) == 1);
    });
}
