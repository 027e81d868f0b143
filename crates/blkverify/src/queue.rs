//! A queue of a backing device that is looked at: the operations Verify, Compare and Read.

use crate::look::{Answer, Ask, Look, Request};
use cbd_types::backing::{BackingDone, Expected};
use cbd_types::{AlignedBuffer, BackingOp, BackingQueue, ErrorKind, OpToken};

/// Requests of 1 MiB in flight: a disk reads ahead of none of them, and a striped one has several members.
pub const DEPTH: usize = 8;

/// Looks through a queue.
pub struct Queue<Q> {
    queue: Q,
    done: Vec<BackingDone>,
}

impl<Q: BackingQueue> Queue<Q> {
    /// Looks through `queue`.
    pub const fn new(queue: Q) -> Self {
        Self { queue, done: Vec::new() }
    }
}

impl<Q: BackingQueue> Look for Queue<Q> {
    fn submit(&mut self, token: u64, request: Request) {
        let Request { range, ask, .. } = request;
        let op = match ask {
            Ask::Readable => BackingOp::Verify { range },
            Ask::Zeroes => BackingOp::Compare { range, expected: Expected::Zeroes },
            Ask::Bytes(bytes) => BackingOp::Compare { range, expected: Expected::Bytes(bytes) },
            Ask::Content => {
                let length = usize::try_from(range.len()).unwrap_or(usize::MAX);
                BackingOp::Read { offset: range.start, buffer: AlignedBuffer::zeroed(length) }
            }
        };
        self.queue.submit(OpToken(token), op);
    }

    fn wait(&mut self, answers: &mut Vec<(u64, Answer)>) {
        self.queue.wait(&mut self.done);
        answers.extend(self.done.drain(..).map(|done| {
            let answer = match (done.result, done.op) {
                (Ok(()), BackingOp::Read { buffer, .. }) => Answer::Content(buffer),
                (Ok(()), _) => Answer::Right,
                (Err(error), _) if error.kind() == ErrorKind::Mismatch => Answer::Differs,
                (Err(error), _) => Answer::Failed(error),
            };
            (done.token.0, answer)
        }));
    }

    fn depth(&self) -> usize {
        DEPTH.min(self.queue.depth())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expected::{Expected as Wanted, Image};
    use crate::pass::{Pass, Piece, Seen};
    use cbd_types::{ByteRange, Error};
    use std::sync::atomic::AtomicBool;

    /// A disk whose operations end in reverse order.
    struct Device {
        bytes: Vec<u8>,
        bad: ByteRange,
        waiting: Vec<(OpToken, BackingOp)>,
    }

    impl Device {
        fn execute(&self, op: &mut BackingOp) -> cbd_types::Result<()> {
            let range = match op {
                BackingOp::Read { offset, buffer } => ByteRange::at(*offset, buffer.len() as u64),
                BackingOp::Verify { range } | BackingOp::Compare { range, .. } => *range,
                other => panic!("{other:?} changes the disk"),
            };
            if range.overlaps(&self.bad) {
                return Err(Error::new(ErrorKind::Media, "cannot be read").at_range(range));
            }
            let bytes = &self.bytes[range.start as usize..range.end as usize];
            match op {
                BackingOp::Read { buffer, .. } => buffer.copy_from_slice(bytes),
                BackingOp::Compare { expected, .. } if !expected.is(0, bytes) => {
                    return Err(Error::new(ErrorKind::Mismatch, "differs").at_range(range));
                }
                _ => {}
            }
            Ok(())
        }
    }

    impl BackingQueue for Device {
        fn submit(&mut self, token: OpToken, op: BackingOp) {
            self.waiting.push((token, op));
        }

        fn poll(&mut self, done: &mut Vec<BackingDone>) {
            self.wait(done);
        }

        fn wait(&mut self, done: &mut Vec<BackingDone>) {
            if let Some((token, mut op)) = self.waiting.pop() {
                let result = self.execute(&mut op);
                done.push(BackingDone { token, op, result });
            }
        }

        fn in_flight(&self) -> usize {
            self.waiting.len()
        }

        fn depth(&self) -> usize {
            64
        }
    }

    fn found(expected: &Wanted) -> Vec<(u64, u64, &'static str)> {
        let mut bytes = vec![0; 4 << 20];
        bytes[3_000_000] = 1;
        let device = Device { bytes, bad: ByteRange::at(1 << 20, 1024), waiting: Vec::new() };
        let mut queue = Queue::new(device);
        let (stop, mut seen, mut progress) = (AtomicBool::new(false), Seen::default(), |_| {});
        let mut pass = Pass { expected, sector: 512, stop: &stop, progress: &mut progress };
        pass.run(&mut queue, &[Piece { logical: 0, start: 0, length: 4 << 20 }], &mut seen);
        assert_eq!((seen.looked, seen.error.is_none()), (4 << 20, true));
        seen.findings.iter().map(|(range, what)| (range.start, range.len(), what.name())).collect()
    }

    #[test]
    fn operations_of_a_queue_find_what_is_unreadable_and_what_differs() {
        let unreadable = (1 << 20, 1024, "unreadable");
        assert_eq!(found(&Wanted::Readable), [unreadable]);
        let wrong = |what| (3_000_000 / 512 * 512, 512, what);
        assert_eq!(found(&Wanted::Zeroes), [unreadable, wrong("not_zero")]);
        let image = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(image.path(), vec![0; 4 << 20]).unwrap();
        let image = Wanted::Image(Image::open(image.path()).unwrap());
        assert_eq!(found(&image), [unreadable, wrong("differs")]);
    }
}
