//! Reads and writes that exceed the memory of their connection.

mod common;

use cbd_export::budget::Budget;
use cbd_nbd::Options;
use cbd_testkit::{Client, Command};
use common::raw::{ready, request};
use common::{Gate, Slow, in_time, memory, serve_with};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const MIB: usize = 1 << 20;

/// The next simple reply: the cookie of its request, and the data of a read of `length`.
fn simple_reply(stream: &mut UnixStream, length: impl Fn(u64) -> usize) -> (u64, Vec<u8>) {
    let mut head = [0; 16];
    stream.read_exact(&mut head).expect("a reply");
    assert_eq!(head[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "a reply without an error");
    let cookie = head[8..].iter().fold(0, |cookie, &byte| cookie << 8 | u64::from(byte));
    let mut data = vec![0; length(cookie)];
    stream.read_exact(&mut data).expect("all of it");
    (cookie, data)
}

#[test]
fn a_long_read_in_parts_is_one_simple_reply_and_no_other_reply_is_sent_in_between() {
    in_time(|| {
        // Memory for the reserved part of each connection, and no more.
        let options = Options { memory: Budget::new(3 << 20), ..Options::default() };
        let served = serve_with(memory(16 * MIB), options);
        let mut stream = ready(&served);
        for part in 0..8_u8 {
            let mut sent = request(1, 100 + u64::from(part), u64::from(part) * MIB as u64, MIB as u32);
            sent.extend(std::iter::repeat_n(part + 1, MIB));
            stream.write_all(&sent).expect("the socket accepts it");
            let mut reply = [0; 16];
            stream.read_exact(&mut reply).expect("a reply");
        }
        let mut sent = request(0, 1, 512, 6 << 20);
        sent.extend(request(3, 2, 0, 0));
        sent.extend(request(0, 3, 0, 512));
        stream.write_all(&sent).expect("the socket accepts it");
        let length = |cookie| [0, 6 * MIB, 0, 512][cookie as usize];
        let mut replies: Vec<_> = (0..3).map(|_| simple_reply(&mut stream, length)).collect();
        replies.sort_by_key(|(cookie, _)| *cookie);
        let [(1, long), (2, _), (3, short)] = &replies[..] else { panic!("other requests were answered") };
        assert!(long.iter().enumerate().all(|(at, &byte)| usize::from(byte) == (at + 512) / MIB + 1));
        assert_eq!(short[..], [1; 512]);
    });
}

#[test]
fn short_reads_behind_a_long_one_in_parts_do_not_take_the_memory_that_its_next_part_needs() {
    in_time(|| {
        let options = Options { memory: Budget::new(3 << 20), ..Options::default() };
        let served = serve_with(memory(16 * MIB), options);
        let mut stream = ready(&served);
        let length = |cookie| if cookie == 1 { 6 * MIB } else { 256 << 10 };
        stream.write_all(&request(0, 1, 512, 6 << 20)).expect("the socket accepts it");
        // From here on no other reply may be sent before the rest of this one.
        let mut head = [0; 16];
        stream.read_exact(&mut head).expect("a reply");
        let sent: Vec<u8> =
            (200..216).flat_map(|cookie| request(0, cookie, 0, length(cookie) as u32)).collect();
        stream.write_all(&sent).expect("the socket accepts it");
        stream.read_exact(&mut vec![0; 6 * MIB]).expect("the whole of the long read");
        let cookies: Vec<u64> = (0..16).map(|_| simple_reply(&mut stream, length).0).collect();
        assert!(cookies.into_iter().eq(200..216));
    });
}

#[test]
fn a_long_read_with_one_head_begins_only_when_no_other_reply_of_its_connection_can_wait_for_it() {
    in_time(|| {
        // 64 MiB besides what is reserved for a fourth connection and a quarter of that.
        let bound = Budget::new(67 << 20);
        let stop_timeout = Duration::from_millis(100);
        let options = Options { memory: Arc::clone(&bound), stop_timeout, ..Options::default() };
        let device = Gate::over(memory(64 * MIB));
        let served = serve_with(Arc::clone(&device) as _, options);
        let (ours, of_others) = (0, 40 << 20);
        let reads = |count: u64, offset| {
            (2..2 + count).flat_map(move |cookie| request(0, cookie, offset, MIB as u32))
        };

        // The first part of the long read is short, so it takes less memory than the next part needs.
        let mut stream = ready(&served);
        let sent: Vec<u8> = reads(12, ours).chain(request(0, 1, MIB as u64 - 512, 32 << 20)).collect();
        stream.write_all(&sent).expect("the socket accepts it");
        device.wait_until_held(12);
        // Other connections take the rest of the memory.
        let others = [16, 9].map(|count| {
            let held = device.held();
            let mut other = ready(&served);
            other.write_all(&reads(count, of_others).collect::<Vec<u8>>()).expect("the socket accepts it");
            device.wait_until_held(held + count as usize);
            other
        });
        device.release(move |request| request.range.start < of_others);
        let length = |cookie| if cookie == 1 { 32 * MIB } else { MIB };
        let mut cookies: Vec<u64> = (0..13).map(|_| simple_reply(&mut stream, length).0).collect();
        cookies.sort_unstable();
        assert!(cookies.into_iter().eq(1..14));
        drop(others);
    });
}

#[test]
fn a_stream_of_short_reads_does_not_take_the_memory_of_a_long_one() {
    in_time(|| {
        let options = Options { memory: Budget::new(3 << 20), ..Options::default() };
        // Requests that are parked take their memory before the next part of the long one can.
        let device = Slow::over(memory(16 * MIB), |_| Some(Duration::from_millis(1)));
        let served = serve_with(device, options);
        let mut client = Client::connect(&served.listen).expect("a client");
        let long = client.submit(Command::Read { offset: 0, length: 6 << 20 }).expect("submitted");
        for _ in 0..400 {
            client.submit(Command::Read { offset: 0, length: 256 << 10 }).expect("submitted");
        }
        let mut replies = std::iter::from_fn(|| client.complete().expect("a reply"));
        let before = replies.position(|reply| reply.cookie == long).expect("it is answered");
        assert!(before < 200, "{before} of 400 later reads were answered before it");
    });
}

#[test]
fn a_part_of_a_long_write_that_fails_is_an_error_of_the_write() {
    in_time(|| {
        let device = Slow::over(memory(16 * MIB), |_| Some(Duration::ZERO));
        let options = Options { memory: Budget::new(3 << 20), ..Options::default() };
        let served = serve_with(device, options);
        let mut stream = ready(&served);
        // It reaches past the end: it is refused as a whole, and its payload is discarded.
        let mut sent = request(1, 1, 12 << 20, 8 << 20);
        sent.extend(std::iter::repeat_n(1, 8 * MIB));
        sent.extend(request(1, 2, 8 << 20, 8 << 20));
        sent.extend(std::iter::repeat_n(2, 8 * MIB));
        let mut writer = stream.try_clone().expect("a second handle");
        let sending = std::thread::spawn(move || writer.write_all(&sent));
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).expect("a reply");
        assert_ne!(reply[4..8], [0; 4]);
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!((&reply[4..8], &reply[8..]), (&[0; 4][..], &2_u64.to_be_bytes()[..]));
        sending.join().expect("it ends").expect("all of it was read");
    });
}
