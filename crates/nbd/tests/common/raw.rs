//! A client that sends exactly the bytes of a test.

use super::Served;
use cbd_testkit::Client;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The client's half of a handshake without structured replies: flags, and GO for the default export.
pub fn handshake() -> Vec<u8> {
    let mut sent = 3_u32.to_be_bytes().to_vec();
    sent.extend_from_slice(b"IHAVEOPT");
    sent.extend_from_slice(&7_u32.to_be_bytes());
    sent.extend_from_slice(&6_u32.to_be_bytes());
    sent.extend_from_slice(&[0; 6]);
    sent
}

/// The head of a request without flags.
pub fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut sent = 0x2560_9513_u32.to_be_bytes().to_vec();
    sent.extend_from_slice(&0_u16.to_be_bytes());
    sent.extend_from_slice(&command.to_be_bytes());
    sent.extend_from_slice(&cookie.to_be_bytes());
    sent.extend_from_slice(&offset.to_be_bytes());
    sent.extend_from_slice(&length.to_be_bytes());
    sent
}

/// A stream before its handshake.
pub fn connect(served: &Served) -> UnixStream {
    let stream = UnixStream::connect(&served.path).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("it can be set");
    stream.set_write_timeout(Some(Duration::from_secs(10))).expect("it can be set");
    stream
}

/// A stream past its handshake.
pub fn ready(served: &Served) -> UnixStream {
    let mut stream = connect(served);
    stream.write_all(&handshake()).expect("room");
    let mut greeting = [0; 18 + 32 + 34 + 20];
    stream.read_exact(&mut greeting).expect("a greeting");
    stream
}

/// Checks that a client is served.
pub fn assert_served(served: &Served) {
    let mut client = Client::connect(&served.listen).expect("it still serves");
    client.write(0, &[1; 512], false).expect("it still writes");
}
