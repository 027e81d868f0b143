//! Clients that disconnect and reconnect: no request of a connection that has ended is executed after a new client was
//! answered.

mod common;

use cbd_export::{BlockDevice, Event, RequestQueue};
use cbd_nbd::{Listen, Notice, Options, Server};
use cbd_testkit::{Client, Command};
use cbd_types::{Completion, Error, ErrorKind, Geometry, Operation, Request, Result};
use common::{Served, in_time, memory, serve, serve_with, until};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
/// Writes at or above this offset wait for space and can be given up.
const WAITS_FOR_SPACE: u64 = 256 << 10;
/// Writes at or above this offset are in flight to the disk and cannot be given up.
const WITH_DISK: u64 = 512 << 10;

/// A device that holds writes until it is released.
struct Holding {
    inner: Arc<dyn BlockDevice>,
    released: Arc<AtomicBool>,
    held: Arc<AtomicUsize>,
    events: Arc<Mutex<Vec<cbd_export::Waker>>>,
}

impl Holding {
    fn new() -> Arc<Self> {
        let (released, held, events) = Default::default();
        Arc::new(Self { inner: memory(MIB), released, held, events })
    }

    fn release(&self) {
        self.released.store(true, Ordering::SeqCst);
        self.events.lock().unwrap().iter().for_each(cbd_export::Waker::wake);
    }

    fn wait_until_held(&self, count: usize) {
        until("requests are held", || self.held.load(Ordering::SeqCst) == count);
    }

    /// The byte of the device at `offset`, read without the server.
    fn byte(&self, offset: u64) -> u8 {
        let served = serve(Arc::clone(&self.inner));
        read(&mut Client::connect(&served.listen).unwrap(), offset)
    }
}

impl BlockDevice for Holding {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let event = Event::new()?;
        self.events.lock().unwrap().push(event.waker());
        Ok(Box::new(HoldingQueue {
            inner: self.inner.open_queue()?,
            released: Arc::clone(&self.released),
            count: Arc::clone(&self.held),
            held: Vec::new(),
            event,
        }))
    }
}

struct HoldingQueue {
    inner: Box<dyn RequestQueue>,
    released: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    held: Vec<Request>,
    event: Event,
}

impl RequestQueue for HoldingQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let holds = request.operation == Operation::Write && request.range.start >= WAITS_FOR_SPACE;
        if holds && !self.released.load(Ordering::SeqCst) {
            self.held.push(request);
            self.count.fetch_add(1, Ordering::SeqCst);
        } else {
            self.inner.submit(request, done);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.event.clear();
        if self.released.load(Ordering::SeqCst) {
            self.held.drain(..).for_each(|request| self.inner.submit(request, done));
        }
    }

    fn parked(&self) -> usize {
        self.held.len()
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        for request in self.held.extract_if(.., |request| request.range.start < WITH_DISK) {
            self.count.fetch_sub(1, Ordering::SeqCst);
            let result = Err(Error::new(ErrorKind::Stopped, "given up"));
            done.push(Completion { id: request.id, result, buffer: request.buffer });
        }
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.event.descriptor()]
    }
}

fn read(client: &mut Client, offset: u64) -> u8 {
    let mut block = [0; BLOCK];
    client.read(offset, &mut block).unwrap();
    block[0]
}

fn client(served: &Served) -> Client {
    Client::connect(&served.listen).unwrap()
}

/// A connection past its handshake that can be closed without DISC.
fn raw(served: &Served) -> UnixStream {
    negotiate(UnixStream::connect(&served.path).unwrap())
}

fn negotiate<S: Read + Write>(mut stream: S) -> S {
    let mut sent = 3_u32.to_be_bytes().to_vec();
    sent.extend_from_slice(b"IHAVEOPT");
    sent.extend_from_slice(&7_u32.to_be_bytes());
    sent.extend_from_slice(&6_u32.to_be_bytes());
    sent.extend_from_slice(&[0; 6]);
    stream.write_all(&sent).unwrap();
    stream.read_exact(&mut [0; 18 + 32 + 34 + 20]).unwrap();
    stream
}

fn write(stream: &mut impl Write, offset: u64, byte: u8) {
    let mut sent = 0x2560_9513_u32.to_be_bytes().to_vec();
    sent.extend_from_slice(&[0, 0, 0, 1]);
    sent.extend_from_slice(&offset.to_be_bytes());
    sent.extend_from_slice(&offset.to_be_bytes());
    sent.extend_from_slice(&(BLOCK as u32).to_be_bytes());
    sent.extend_from_slice(&[byte; BLOCK]);
    stream.write_all(&sent).unwrap();
}

#[test]
fn a_write_that_waits_for_space_is_given_up_when_its_connection_breaks() {
    in_time(|| {
        let device = Holding::new();
        let served = serve(Arc::clone(&device) as _);
        let mut old = raw(&served);
        write(&mut old, WAITS_FOR_SPACE, 1);
        device.wait_until_held(1);
        drop(old);
        until("the connection ends", || served.server.connections() == 0);
        device.release();
        assert_eq!(read(&mut client(&served), WAITS_FOR_SPACE), 0);
    });
}

#[test]
fn a_write_that_waits_for_space_is_given_up_for_a_new_client_after_its_client_disconnected_in_order() {
    in_time(|| {
        let device = Holding::new();
        let served = serve(Arc::clone(&device) as _);
        let mut old = client(&served);
        let data = [1; BLOCK];
        old.submit(Command::Write { offset: WAITS_FOR_SPACE, data: &data, fua: false }).unwrap();
        device.wait_until_held(1);
        drop(old);
        let mut new = client(&served);
        assert_eq!(read(&mut new, WAITS_FOR_SPACE), 0);
        device.release();
        new.write(WAITS_FOR_SPACE, &[2; BLOCK], true).unwrap();
        assert_eq!(read(&mut new, WAITS_FOR_SPACE), 2);
    });
}

#[test]
fn a_new_client_is_answered_only_after_the_disk_operations_of_an_ended_connection() {
    in_time(|| {
        let device = Holding::new();
        let reported = Arc::new(Mutex::new(Vec::new()));
        let notices = Arc::clone(&reported);
        let observer = move |notice: &Notice<'_>| match notice {
            Notice::Waits { clients, .. } => notices.lock().unwrap().push(format!("waits for {clients}")),
            Notice::Admitted { .. } => notices.lock().unwrap().push("admitted".to_owned()),
            _ => {}
        };
        let options = Options { observer: Some(Arc::new(observer)), ..Options::default() };
        let served = serve_with(Arc::clone(&device) as _, options);
        let mut old = raw(&served);
        write(&mut old, WITH_DISK, 1);
        device.wait_until_held(1);
        drop(old);
        let mut new = client(&served);
        new.submit(Command::Read { offset: WITH_DISK, length: BLOCK as u32 }).unwrap();
        until("the new client waits", || served.server.waiting() == 1);
        until("the wait is reported", || *reported.lock().unwrap() == ["waits for 1"]);
        device.release();
        let answer = new.complete().unwrap().unwrap();
        assert_eq!(answer.data[0], 1, "answered before the write of the ended connection was done");
        until("its end is reported", || *reported.lock().unwrap() == ["waits for 1", "admitted"]);
        assert_eq!(served.server.waiting(), 0);
    });
}

#[test]
fn a_tcp_connection_that_was_closed_is_settled_before_a_new_client_is_answered() {
    in_time(|| {
        let device = Holding::new();
        let any_port = Listen::Tcp("127.0.0.1:0".parse().unwrap());
        let server = Server::start(Arc::clone(&device) as _, any_port, Options::default()).unwrap();
        let Listen::Tcp(address) = server.address().clone() else { panic!("{:?}", server.address()) };
        let mut old = negotiate(TcpStream::connect(address).unwrap());
        write(&mut old, WAITS_FOR_SPACE, 1);
        write(&mut old, WITH_DISK, 1);
        device.wait_until_held(2);
        // The server sees only the end of the stream; the client may still wait for replies.
        drop(old);
        let mut new = Client::connect(server.address()).unwrap();
        new.submit(Command::Read { offset: WITH_DISK, length: BLOCK as u32 }).unwrap();
        until("the new client waits", || server.waiting() == 1);
        // If space is freed before the thread of the old connection gives up, the write completes, which is correct,
        // too.
        device.wait_until_held(1);
        device.release();
        assert_eq!(new.complete().unwrap().unwrap().data[0], 1);
        assert_eq!(read(&mut new, WAITS_FOR_SPACE), 0, "given up for the new client");
    });
}

#[test]
fn other_connections_are_served_while_a_new_client_waits() {
    in_time(|| {
        let device = Holding::new();
        let served = serve(Arc::clone(&device) as _);
        let mut other = client(&served);
        other.write(0, &[3; BLOCK], false).unwrap();
        let mut old = raw(&served);
        write(&mut old, WITH_DISK, 1);
        device.wait_until_held(1);
        drop(old);
        let mut new = client(&served);
        new.submit(Command::Flush).unwrap();
        until("the new client waits", || served.server.waiting() == 1);
        other.write(0, &[4; BLOCK], true).unwrap();
        assert_eq!(read(&mut other, 0), 4);
        device.release();
        new.complete().unwrap().unwrap().result.unwrap();
    });
}

#[test]
fn a_request_that_was_not_read_before_its_client_disconnected_is_not_executed() {
    in_time(|| {
        let device = Holding::new();
        let options = Options { requests_max: 1, ..Options::default() };
        let served = serve_with(Arc::clone(&device) as _, options);
        let mut old = raw(&served);
        write(&mut old, WITH_DISK, 1);
        device.wait_until_held(1);
        // The connection has its maximum of requests, so this one stays in the socket's buffer.
        write(&mut old, 0, 1);
        drop(old);
        let mut new = client(&served);
        new.submit(Command::Read { offset: 0, length: BLOCK as u32 }).unwrap();
        until("the new client waits", || served.server.waiting() == 1);
        device.release();
        assert_eq!(new.complete().unwrap().unwrap().data[0], 0);
        until("the old connection ends", || served.server.connections() == 1);
        assert_eq!(read(&mut new, 0), 0);
    });
}

#[test]
fn a_server_with_a_client_that_waits_stops_in_time() {
    in_time(|| {
        let device = Holding::new();
        let options = Options { stop_timeout: Duration::from_millis(200), ..Options::default() };
        let served = serve_with(Arc::clone(&device) as _, options);
        let mut old = raw(&served);
        write(&mut old, WITH_DISK, 1);
        device.wait_until_held(1);
        drop(old);
        let mut new = client(&served);
        new.submit(Command::Flush).unwrap();
        until("the new client waits", || served.server.waiting() == 1);
        let began = Instant::now();
        served.server.stop().unwrap();
        assert!(began.elapsed() < Duration::from_secs(2));
        assert!(new.complete().is_err());
        device.release();
        assert_eq!(device.byte(WITH_DISK), 0, "it is given up with its queue");
    });
}
