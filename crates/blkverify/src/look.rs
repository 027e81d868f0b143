//! What a pass asks of a disk or a file: that bytes are looked at, and several such requests at once.
//!
//! Invariants: each request is answered once. [`Readers`] reads past the page cache where the file system allows it, so that what
//! is read comes from the disk.
//!
//! Elsewhere: which bytes are looked at, and what follows from an answer (`pass`).

use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// Bytes of the largest request.
pub const UNIT: u64 = 1 << 20;

/// What is asked of a range.
#[derive(Debug)]
pub enum Ask {
    /// Whether it can be read.
    Readable,
    /// Whether all its bytes are zero.
    Zeroes,
    /// Whether it has this content.
    Bytes(AlignedBuffer),
    /// Its content.
    Content,
}

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// It is as asked.
    Right,
    /// It can be read and is not as asked.
    Differs,
    /// Its content.
    Content(AlignedBuffer),
    /// It cannot be read.
    Failed(Error),
}

/// A request: whole sectors, of which the first `useful` bytes matter. The others may be past the end of a file.
#[derive(Debug)]
pub struct Request {
    /// Where, on what is looked at.
    pub range: ByteRange,
    /// Bytes that must be there.
    pub useful: u64,
    /// What is asked.
    pub ask: Ask,
}

/// A disk or a file that is looked at.
pub trait Look {
    /// Begins a request; at most [`depth`](Self::depth) are in flight.
    fn submit(&mut self, token: u64, request: Request);

    /// Waits for at least one answer, if a request is in flight.
    fn wait(&mut self, answers: &mut Vec<(u64, Answer)>);

    /// The most requests in flight.
    fn depth(&self) -> usize;
}

/// Bytes of a file that are on no disk and read as zeroes.
#[derive(Default, Debug)]
pub struct Nothing(Vec<(u64, Answer)>);

impl Look for Nothing {
    fn submit(&mut self, token: u64, request: Request) {
        let length = usize::try_from(request.useful).unwrap_or(usize::MAX);
        let answer = match request.ask {
            Ask::Readable | Ask::Zeroes => Answer::Right,
            Ask::Bytes(expected) if are_zero(&expected[..length.min(expected.len())]) => Answer::Right,
            Ask::Bytes(_) => Answer::Differs,
            Ask::Content => Answer::Content(AlignedBuffer::zeroed(length)),
        };
        self.0.push((token, answer));
    }

    fn wait(&mut self, answers: &mut Vec<(u64, Answer)>) {
        answers.append(&mut self.0);
    }

    fn depth(&self) -> usize {
        1
    }
}

/// Requests that read at once.
const READERS: usize = 4;

/// Reads in threads of its own.
#[derive(Debug)]
pub struct Readers {
    jobs: Option<Sender<(u64, Request)>>,
    answers: Receiver<(u64, Answer)>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

impl Readers {
    /// Reads `file`, which is open with `O_DIRECT` where that is possible.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when no thread can be started.
    pub fn new(file: &Arc<File>) -> Result<Self> {
        let (jobs, todo) = channel::<(u64, Request)>();
        let (reply, answers) = channel();
        let todo = Arc::new(Mutex::new(todo));
        let mut threads = Vec::new();
        for _ in 0..READERS {
            let (file, todo, reply) = (file.clone(), todo.clone(), reply.clone());
            let work = move || {
                let mut buffer = AlignedBuffer::default();
                loop {
                    let next = todo.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((token, request)) = next else { return };
                    let answer = answer(&file, request, &mut buffer);
                    if reply.send((token, answer)).is_err() {
                        return;
                    }
                }
            };
            let started = thread::Builder::new().name("blkverify-read".to_owned()).spawn(work);
            threads.push(started.map_err(|error| {
                Error::new(ErrorKind::System, "no thread that reads can be started").caused_by(error)
            })?);
        }
        Ok(Self { jobs: Some(jobs), answers, threads, in_flight: 0 })
    }
}

impl Look for Readers {
    fn submit(&mut self, token: u64, request: Request) {
        if self.jobs.as_ref().is_some_and(|jobs| jobs.send((token, request)).is_ok()) {
            self.in_flight += 1;
        }
    }

    fn wait(&mut self, answers: &mut Vec<(u64, Answer)>) {
        if self.in_flight == 0 {
            return;
        }
        let first = self.answers.recv().ok();
        for answer in first.into_iter().chain(self.answers.try_iter()) {
            self.in_flight -= 1;
            answers.push(answer);
        }
    }

    fn depth(&self) -> usize {
        2 * READERS
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn answer(file: &File, request: Request, buffer: &mut AlignedBuffer) -> Answer {
    let Request { range, useful, ask } = request;
    buffer.resize(usize::try_from(range.len()).unwrap_or(usize::MAX));
    if let Err(error) = read(file, buffer, range.start, useful) {
        return Answer::Failed(error.at_range(range));
    }
    let is_right = |is_right| if is_right { Answer::Right } else { Answer::Differs };
    let useful = usize::try_from(useful).unwrap_or(usize::MAX).min(buffer.len());
    match ask {
        Ask::Readable => Answer::Right,
        Ask::Zeroes => is_right(are_zero(&buffer[..useful])),
        Ask::Bytes(expected) => is_right(expected.get(..useful) == Some(&buffer[..useful])),
        Ask::Content => Answer::Content(std::mem::take(buffer)),
    }
}

/// Whether all bytes are zero.
#[must_use]
pub fn are_zero(bytes: &[u8]) -> bool {
    // Words of 16 bytes: the compiler compares several at once.
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|&byte| byte == 0)
}

/// Fills the buffer, of which the first `useful` bytes must be there.
fn read(file: &File, buffer: &mut [u8], start: u64, useful: u64) -> Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], start + done as u64) {
            Ok(0) => break,
            Ok(bytes) => {
                done += bytes;
                // What a file has behind its last whole sector came at once; from an odd place no more can be read.
                if done as u64 >= useful {
                    break;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::new(ErrorKind::Backing, "cannot be read").caused_by(error)),
        }
    }
    if (done as u64) < useful {
        let text = format!("ends at byte {}: it is shorter than at the beginning", start + done as u64);
        return Err(Error::new(ErrorKind::OutOfRange, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn asked(look: &mut dyn Look, range: ByteRange, useful: u64, ask: Ask) -> Answer {
        look.submit(7, Request { range, useful, ask });
        let mut answers = Vec::new();
        look.wait(&mut answers);
        let (token, answer) = answers.pop().expect("an answer");
        assert_eq!(token, 7);
        answer
    }

    #[test]
    fn a_file_is_read_and_compared_up_to_its_odd_end() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; 4096]).and_then(|()| file.write_all(&[5; 100])).unwrap();
        let mut look = Readers::new(&Arc::new(file)).unwrap();
        let (first, last) = (ByteRange::at(0, 4096), ByteRange::at(4096, 4096));
        assert!(matches!(asked(&mut look, first, 4096, Ask::Zeroes), Answer::Right));
        assert!(matches!(asked(&mut look, last, 100, Ask::Zeroes), Answer::Differs));
        let expected = AlignedBuffer::from_slice(&[5; 100]);
        assert!(matches!(asked(&mut look, last, 100, Ask::Bytes(expected)), Answer::Right));
        assert!(matches!(asked(&mut look, last, 100, Ask::Readable), Answer::Right));
        let Answer::Failed(error) = asked(&mut look, last, 101, Ask::Readable) else {
            panic!("it is shorter")
        };
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
        let Answer::Content(bytes) = asked(&mut look, last, 100, Ask::Content) else { panic!("content") };
        assert_eq!(bytes[..100], [5; 100]);
    }

    #[test]
    fn one_byte_that_is_not_zero_is_seen_wherever_it_is() {
        assert!(are_zero(&[0; 35]));
        for at in 0..35 {
            let mut bytes = [0; 35];
            bytes[at] = 1;
            assert!(!are_zero(&bytes), "{at}");
        }
    }
}
