//! Tests of the threads of a queue, with commands that end when the test lets them.

use super::*;
use crate::Offload;
use crate::commands::tests::{Device, Reply};
use crate::job::tests::disk_with;
use cbd_types::{BackingOp, ByteRange, OpToken};
use std::sync::RwLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const SECTOR: u64 = 512;
/// Far more than a thread needs to begin a command or to end.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Less than that; for what does not happen.
const PAUSE: Duration = Duration::from_millis(50);

/// Threads over a disk of which each command waits for the test.
struct Rig {
    target: Arc<Target>,
    threads: Threads,
    device: Arc<Device>,
    /// The first blocks of commands that have begun.
    begun: Receiver<u64>,
    /// Ends a command for each message.
    end: Sender<()>,
}

impl Rig {
    fn new(rotational: bool, depth: usize) -> Self {
        let (reply, begun) = channel();
        let (end, ends) = channel();
        let (reply, ends) = (Mutex::new(reply), Mutex::new(ends));
        let hook = move |sent: &crate::commands::tests::Sent| {
            // A test that has failed does not receive.
            let _ = reply.lock().expect("no panic").send(sent.first);
            // Commands that wait here have begun; which of them ends first does not matter.
            let ended = ends.lock().expect("no panic").recv_timeout(TIMEOUT);
            ended.is_err().then_some(Reply::Error(libc::ETIMEDOUT))
        };
        let device =
            Arc::new(Device { hook: Box::new(hook), unreadable: vec![3 * SECTOR], ..Device::nvme() });
        let mut target = disk_with(&[0; 1 << 16]);
        target.geometry.rotational = rotational;
        target.commands = RwLock::new(Arc::new(device.commands(&target, Offload::Auto, 0)));
        let target = Arc::new(target);
        let threads = Threads::new(Arc::clone(&target), depth).expect("an event");
        Self { target, threads, device, begun, end }
    }

    /// Submits a verification of one sector.
    fn submit(&mut self, sector: u64) {
        let op = BackingOp::Verify { range: ByteRange::at(sector * SECTOR, SECTOR) };
        self.threads.submit(Job::new(OpToken(sector), op, &self.target));
    }

    /// Waits for the beginning of commands, and returns their first blocks.
    fn begun(&self, count: usize) -> Vec<u64> {
        let next = |_| self.begun.recv_timeout(TIMEOUT).expect("a command begins");
        let mut blocks: Vec<_> = (0..count).map(next).collect();
        blocks.sort_unstable();
        blocks
    }

    fn end(&self, count: usize) {
        (0..count).for_each(|_| self.end.send(()).expect("the device waits"));
    }

    /// Collects until nothing is in flight, waiting for the descriptor each time; returns tokens and whether each succeeded.
    fn collect_all(&mut self) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        while self.threads.in_flight() > 0 {
            assert!(is_readable(self.threads.descriptor(), TIMEOUT), "nothing completes");
            self.threads.collect(&mut done);
        }
        let mut ended: Vec<_> = done.into_iter().map(|one| (one.token.0, one.result.is_ok())).collect();
        ended.sort_unstable();
        ended
    }
}

fn is_readable(descriptor: RawFd, timeout: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::fd::BorrowedFd;
    // SAFETY: the queue whose descriptor this is lives longer than the call.
    #[allow(unsafe_code)]
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let limit = Timespec::try_from(timeout).expect("it is short");
    let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
    poll(&mut entries, Some(&limit)).expect("poll") > 0
}

#[test]
fn each_operation_is_returned_once_with_its_own_result() {
    let mut rig = Rig::new(false, 4);
    rig.threads.collect(&mut Vec::new());
    (0..20).for_each(|sector| rig.submit(sector));
    assert_eq!(rig.threads.in_flight(), 20);
    rig.end(20);
    let expected: Vec<_> = (0..20).map(|sector| (sector, sector != 3)).collect();
    assert_eq!(rig.collect_all(), expected);
    assert_eq!(rig.begun(20), (0..20).collect::<Vec<_>>());
    assert_eq!(rig.threads.in_flight(), 0);
}

#[test]
fn the_descriptor_is_readable_while_something_can_be_returned() {
    let mut rig = Rig::new(false, 4);
    rig.submit(0);
    rig.begun(1);
    assert!(!is_readable(rig.threads.descriptor(), PAUSE), "it is not done");
    let mut done = Vec::new();
    rig.threads.collect(&mut done);
    assert_eq!((done.len(), rig.threads.in_flight()), (0, 1));
    rig.end(1);
    assert!(is_readable(rig.threads.descriptor(), TIMEOUT));
    rig.threads.collect(&mut done);
    assert_eq!((done.len(), rig.threads.in_flight()), (1, 0));
    assert!(!is_readable(rig.threads.descriptor(), PAUSE));
}

#[test]
fn a_disk_of_flash_executes_as_many_commands_at_once_as_the_queue_is_deep() {
    for (depth, most) in [(3, 3), (100, THREADS_MAX), (0, 1)] {
        let mut rig = Rig::new(false, depth);
        (0..20).for_each(|sector| rig.submit(sector));
        // The hook holds a lock while it waits, so only one of these has reached the channel of ends; all of them have begun.
        assert_eq!(rig.begun(most), (0..most as u64).collect::<Vec<_>>());
        assert!(rig.begun.recv_timeout(PAUSE).is_err(), "more than {most} at a depth of {depth}");
        rig.end(20);
        assert_eq!(rig.collect_all().len(), 20);
    }
}

#[test]
fn a_disk_with_heads_executes_one_command_at_a_time_in_order() {
    let mut rig = Rig::new(true, 8);
    (0..3).for_each(|sector| rig.submit(sector));
    for sector in 0..3 {
        assert_eq!(rig.begun(1), [sector]);
        assert!(rig.begun.recv_timeout(PAUSE).is_err(), "another begins beside {sector}");
        rig.end(1);
    }
    assert_eq!(rig.collect_all().len(), 3);
}

#[test]
fn a_thread_that_rests_takes_the_next_operation() {
    let mut rig = Rig::new(false, 8);
    for sector in 0..5 {
        rig.submit(sector);
        rig.end(1);
        assert_eq!(rig.collect_all(), [(sector, sector != 3)]);
        let deadline = Instant::now() + TIMEOUT;
        while rig.threads.shared.state().idle == 0 {
            assert!(Instant::now() < deadline, "the thread does not rest");
            std::thread::yield_now();
        }
    }
    assert_eq!(rig.threads.started, 1);
}

#[test]
fn when_the_queue_is_dropped_the_command_ends_and_the_rest_is_never_sent() {
    let mut rig = Rig::new(true, 8);
    (0..3).for_each(|sector| rig.submit(sector));
    assert_eq!(rig.begun(1), [0]);
    let Rig { target, threads, device, end, .. } = rig;
    drop(threads);
    assert!(Arc::strong_count(&target) > 1, "the target lasts as long as its command");
    end.send(()).expect("the device waits");
    let deadline = Instant::now() + TIMEOUT;
    while Arc::strong_count(&target) > 1 {
        assert!(Instant::now() < deadline, "the thread does not end");
        std::thread::yield_now();
    }
    let sent: Vec<_> = device.take().into_iter().map(|sent| sent.first).collect();
    assert_eq!(sent, [0]);
}
