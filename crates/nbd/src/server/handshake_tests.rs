//! The handshake byte by byte, over a stream that consists of two vectors.

use super::*;
use cbd_types::Geometry;
use std::io::{self, Cursor};

const SIZE: u64 = 1 << 30;

/// A client that sends all its bytes at once; the server's bytes are recorded.
struct Script {
    sent: Cursor<Vec<u8>>,
    received: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.sent.read(into)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.received.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn run(sent: Vec<u8>) -> (Result<Option<Negotiated>>, Vec<u8>) {
    run_with(sent, true)
}

fn run_with(sent: Vec<u8>, verifies: bool) -> (Result<Option<Negotiated>>, Vec<u8>) {
    let geometry = Geometry {
        size: SIZE,
        sector: 512,
        physical_sector: 4096,
        atomic_unit: 1 << 20,
        discard: true,
        discard_granularity: 4096,
        rotational: true,
        fast_zeroes: true,
    };
    let rules = Rules::new(&geometry, false, 32 << 20);
    let offer = Offer { name: "disk", description: "a test", rules: &rules, verifies };
    let mut script = Script { sent: Cursor::new(sent), received: Vec::new() };
    let mut accepted = 0;
    let outcome = negotiate(&mut script, &offer, &mut || accepted += 1);
    assert_eq!(accepted, i32::from(matches!(outcome, Ok(Some(_)))));
    (outcome, script.received)
}

/// Client flags and options.
fn client(options: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut sent = 3_u32.to_be_bytes().to_vec();
    for (code, data) in options {
        sent.extend_from_slice(&IHAVEOPT.to_be_bytes());
        sent.extend_from_slice(&code.to_be_bytes());
        sent.extend_from_slice(&(data.len() as u32).to_be_bytes());
        sent.extend_from_slice(data);
    }
    sent
}

/// Checks the greeting and returns the replies that follow it: option, kind and data.
fn replies(received: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut reader = Reader(received);
    assert_eq!(reader.u64(), Some(NBDMAGIC));
    assert_eq!(reader.u64(), Some(IHAVEOPT));
    assert_eq!(reader.u16(), Some(3));
    let mut replies = Vec::new();
    while !reader.is_empty() {
        assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
        let (code, kind) = (reader.u32().expect("a code"), reader.u32().expect("a kind"));
        replies.push((code, kind, reader.string().expect("data").to_vec()));
    }
    replies
}

fn named(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = Vec::new();
    put_string(&mut data, name);
    data.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    data
}

fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    put_string(&mut data, name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| put_string(&mut data, query));
    data
}

/// One option that is not the last, then an abort: its replies.
fn one(code: u32, data: Vec<u8>) -> Vec<(u32, Vec<u8>)> {
    let (outcome, received) = run(client(&[(code, data), (option::ABORT, vec![])]));
    assert_eq!(outcome.expect("in order"), None);
    let mut replies = replies(&received);
    assert_eq!(replies.pop(), Some((option::ABORT, option_reply::ACK, vec![])));
    replies
        .into_iter()
        .map(|(to, kind, data)| {
            assert_eq!(to, code);
            (kind, data)
        })
        .collect()
}

fn kinds(code: u32, data: Vec<u8>) -> Vec<u32> {
    one(code, data).into_iter().map(|reply| reply.0).collect()
}

#[test]
fn go_returns_size_flags_and_block_sizes_and_ends_the_handshake() {
    let (outcome, received) = run(client(&[(option::GO, named("disk", &[]))]));
    assert_eq!(outcome.expect("in order"), Some(Negotiated::default()));
    let replies = replies(&received);
    assert_eq!(replies.len(), 3);
    let mut export = Reader(&replies[0].2);
    assert_eq!((export.u16(), export.u64()), (Some(info::EXPORT), Some(SIZE)));
    // All but READ_ONLY, DF and RESIZE.
    assert_eq!(export.u16(), Some(0b1101_0111_1101));
    let mut blocks = Reader(&replies[1].2);
    assert_eq!(blocks.u16(), Some(info::BLOCK_SIZE));
    assert_eq!([blocks.u32(), blocks.u32(), blocks.u32()], [Some(512), Some(4096), Some(32 << 20)]);
    assert_eq!(replies[2], (option::GO, option_reply::ACK, vec![]));
}

#[test]
fn info_returns_name_and_description_on_request_and_the_handshake_continues() {
    let replies = one(option::INFO, named("", &[info::NAME, info::DESCRIPTION, 77]));
    assert_eq!(replies.len(), 5);
    assert_eq!(replies[2], (option_reply::INFO, [&info::NAME.to_be_bytes()[..], b"disk"].concat()));
    assert_eq!(replies[3], (option_reply::INFO, [&info::DESCRIPTION.to_be_bytes()[..], b"a test"].concat()));
    assert_eq!(replies[4].0, option_reply::ACK);
}

#[test]
fn an_unknown_export_is_an_error_and_the_handshake_continues() {
    assert_eq!(kinds(option::GO, named("other", &[])), [option_reply::ERR_UNKNOWN]);
    assert_eq!(kinds(option::INFO, named("dis", &[])), [option_reply::ERR_UNKNOWN]);
}

#[test]
fn export_name_answers_with_and_without_zeroes() {
    let (outcome, received) = run(client(&[(option::EXPORT_NAME, b"disk".to_vec())]));
    assert_eq!(outcome.expect("in order"), Some(Negotiated::default()));
    assert_eq!(received.len(), 18 + 10);
    assert_eq!(received[18..26], SIZE.to_be_bytes());

    let mut sent = client(&[(option::EXPORT_NAME, vec![])]);
    sent[..4].copy_from_slice(&1_u32.to_be_bytes());
    let (outcome, received) = run(sent);
    assert!(outcome.expect("in order").is_some());
    assert_eq!(received.len(), 18 + 10 + 124);
    assert!(received[28..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_wrong_export_name_ends_the_connection() {
    let (outcome, received) = run(client(&[(option::EXPORT_NAME, b"other".to_vec())]));
    assert!(outcome.is_err());
    assert_eq!(received.len(), 18);
}

#[test]
fn a_list_names_the_export() {
    let replies = one(option::LIST, vec![]);
    assert_eq!(replies[0], (option_reply::SERVER, b"\0\0\0\x04diska test".to_vec()));
    assert_eq!(replies[1], (option_reply::ACK, vec![]));
    assert_eq!(kinds(option::LIST, vec![1]), [option_reply::ERR_INVALID]);
}

#[test]
fn tls_and_unknown_options_are_not_supported() {
    for code in [4, 5, 11, 12, 0, u32::MAX] {
        assert_eq!(kinds(code, vec![1, 2, 3]), [option_reply::ERR_UNSUP], "option {code}");
    }
}

#[test]
fn contexts_need_structured_replies_first() {
    let data = queries("disk", &["base:allocation"]);
    assert_eq!(kinds(option::SET_META_CONTEXT, data.clone()), [option_reply::ERR_INVALID]);
    assert_eq!(kinds(option::LIST_META_CONTEXT, data), [option_reply::ERR_INVALID]);
}

/// The contexts, with their numbers, in the replies to an option that follows STRUCTURED_REPLY.
fn contexts(code: u32, data: Vec<u8>) -> (Option<Negotiated>, Vec<(u32, String)>) {
    let options = [(option::STRUCTURED_REPLY, vec![]), (code, data), (option::GO, named("disk", &[]))];
    let (outcome, received) = run(client(&options));
    let named = replies(&received)
        .into_iter()
        .filter(|reply| reply.1 == option_reply::META_CONTEXT)
        .map(|(_, _, data)| {
            let mut reader = Reader(&data);
            let id = reader.u32().expect("a number");
            (id, String::from_utf8(reader.0.to_vec()).expect("text"))
        })
        .collect();
    (outcome.expect("in order"), named)
}

#[test]
fn only_known_contexts_of_a_request_are_set() {
    let data =
        queries("disk", &["base:allocation", "qemu:dirty-bitmap:x", "cbd:state", "base:", "base:allocation"]);
    let (negotiated, named) = contexts(option::SET_META_CONTEXT, data);
    let chosen = Contexts { allocation: true, state: true, verify: false };
    assert_eq!(negotiated, Some(Negotiated { structured: true, contexts: chosen }));
    assert_eq!(named, [(ALLOCATION_ID, CONTEXT_ALLOCATION.into()), (STATE_ID, CONTEXT_STATE.into())]);

    let (negotiated, named) = contexts(option::SET_META_CONTEXT, queries("", &["base:"]));
    assert_eq!(negotiated.expect("it continues").contexts, Contexts::default());
    assert_eq!(named, []);
}

#[test]
fn contexts_are_listed_all_or_by_namespace_and_nothing_is_set() {
    let (negotiated, named) = contexts(option::LIST_META_CONTEXT, queries("disk", &[]));
    assert_eq!(negotiated.expect("it continues").contexts, Contexts::default());
    let of_cbd = [(0, CONTEXT_STATE.into()), (0, CONTEXT_VERIFY.into())];
    assert_eq!(named, [&[(0, CONTEXT_ALLOCATION.into())], &of_cbd[..]].concat());
    assert_eq!(contexts(option::LIST_META_CONTEXT, queries("", &["cbd:"])).1, of_cbd);
    assert_eq!(contexts(option::LIST_META_CONTEXT, queries("", &["nope:"])).1, []);
}

#[test]
fn the_context_of_verification_is_offered_only_if_the_device_can_verify() {
    for verifies in [true, false] {
        let options = [
            (option::STRUCTURED_REPLY, vec![]),
            (option::SET_META_CONTEXT, queries("disk", &["cbd:verify", "cbd:state"])),
            (option::LIST_META_CONTEXT, queries("disk", &["cbd:"])),
            (option::GO, named("disk", &[])),
        ];
        let (outcome, received) = run_with(client(&options), verifies);
        let contexts = outcome.expect("in order").expect("it continues").contexts;
        assert_eq!(contexts, Contexts { allocation: false, state: true, verify: verifies });
        let is_named =
            |kind, data: &[u8]| kind == option_reply::META_CONTEXT && data.ends_with(b"cbd:verify");
        let count = replies(&received).iter().filter(|(_, kind, data)| is_named(*kind, data)).count();
        assert_eq!(count, if verifies { 2 } else { 0 });
    }
}

#[test]
fn setting_contexts_again_replaces_the_earlier_ones() {
    let options = [
        (option::STRUCTURED_REPLY, vec![]),
        (option::SET_META_CONTEXT, queries("disk", &["base:allocation"])),
        (option::SET_META_CONTEXT, queries("disk", &["cbd:state"])),
        (option::GO, named("disk", &[])),
    ];
    let negotiated = run(client(&options)).0.expect("in order").expect("it continues");
    assert_eq!(negotiated.contexts, Contexts { allocation: false, state: true, verify: false });
}

#[test]
fn options_with_wrong_lengths_are_invalid() {
    for code in [option::GO, option::INFO] {
        for data in
            [vec![], vec![0, 0, 0], named("disk", &[])[..9].to_vec(), [named("disk", &[]), vec![0]].concat()]
        {
            assert_eq!(kinds(code, data), [option_reply::ERR_INVALID]);
        }
        let mut long = named("disk", &[]);
        long[0] = 0xFF;
        assert_eq!(kinds(code, long), [option_reply::ERR_INVALID]);
        let mut many = named("disk", &[]);
        many[8] = 0xFF;
        assert_eq!(kinds(code, many), [option_reply::ERR_INVALID]);
    }
    let mut many = queries("disk", &["base:allocation"]);
    many[8..12].fill(0xFF);
    let options =
        [(option::STRUCTURED_REPLY, vec![]), (option::SET_META_CONTEXT, many), (option::ABORT, vec![])];
    let (outcome, received) = run(client(&options));
    assert_eq!(outcome.expect("in order"), None);
    assert_eq!(replies(&received)[1].1, option_reply::ERR_INVALID);
}

#[test]
fn a_name_beyond_the_protocols_bound_is_invalid() {
    assert_eq!(kinds(option::GO, named(&"x".repeat(4097), &[])), [option_reply::ERR_INVALID]);
}

#[test]
fn an_option_that_is_too_long_is_skipped_and_a_huge_one_ends_the_connection() {
    assert_eq!(kinds(option::GO, vec![0; OPTION_MAX + 1]), [option_reply::ERR_TOO_BIG]);
    let mut sent = client(&[]);
    sent.extend_from_slice(&IHAVEOPT.to_be_bytes());
    sent.extend_from_slice(&option::GO.to_be_bytes());
    sent.extend_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(run(sent).0.expect_err("too much").kind(), ErrorKind::InvalidArgument);
}

#[test]
fn unknown_client_flags_and_wrong_magic_end_the_connection() {
    let mut sent = client(&[(option::GO, named("disk", &[]))]);
    sent[0] = 1;
    assert!(run(sent).0.is_err());
    let mut sent = client(&[(option::GO, named("disk", &[]))]);
    sent[4] ^= 1;
    assert!(run(sent).0.is_err());
}

/// A handshake that uses almost all options.
fn everything() -> Vec<u8> {
    client(&[
        (option::LIST, vec![]),
        (5, vec![]),
        (option::STRUCTURED_REPLY, vec![]),
        (option::LIST_META_CONTEXT, queries("disk", &["base:"])),
        (option::SET_META_CONTEXT, queries("disk", &["base:allocation", "cbd:state"])),
        (option::INFO, named("disk", &[info::NAME])),
        (option::GO, named("disk", &[info::BLOCK_SIZE])),
    ])
}

#[test]
fn a_handshake_that_ends_after_any_byte_is_an_error() {
    let sent = everything();
    assert!(run(sent.clone()).0.is_ok());
    for length in 0..sent.len() {
        let error = run(sent[..length].to_vec()).0.expect_err("it is not complete");
        assert_eq!(error.kind(), ErrorKind::Stopped, "after {length} bytes");
    }
}

#[test]
fn a_handshake_with_any_bit_flipped_ends_without_a_panic() {
    let sent = everything();
    for bit in 0..sent.len() * 8 {
        let mut sent = sent.clone();
        sent[bit / 8] ^= 1 << (bit % 8);
        let (_, received) = run(sent);
        assert!(received.len() < 8192, "bit {bit}");
    }
}
