//! Tables of guest memory: a front end that shares, adds and removes memory, with sizes, addresses, offsets and files that the
//! input chooses, over the connection of a virtual machine.
//!
//! Invariants: the server accepts a message exactly if the model allows it: the file has the bytes, no two pieces overlap, and
//! the limits of one front end and of all front ends are kept. The budget counts the sum of the present pieces, and 0 bytes after
//! the connection has ended.

use crate::input::{Input, corner};
use crate::wires::device;
use cbd_export::budget::Budget;
use cbd_vhost::{Options, serve_connected};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

/// Maximum number of bytes that one front end may share.
const EACH: u64 = 1 << 40;
/// Maximum number of bytes that all front ends may share; other front ends use some of it already.
const ALL: u64 = 7 << 38;
const OTHERS: u64 = 1 << 38;
/// Messages of one input.
const MESSAGES_MAX: usize = 64;
/// Maximum number of pieces in the protocol and in the server.
const PIECES_MAX: usize = 32;
const PAGE: u64 = 4096;
const PROTOCOL: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
/// Sizes of the files.
const FILES: [u64; 4] = [0, PAGE, 64 << 10, 1 << 41];
/// Time limit for the end of a connection, which takes microseconds.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    guest: u64,
    size: u64,
    front_end: u64,
    offset: u64,
    file: usize,
}

impl Piece {
    fn read(input: &mut Input<'_>) -> Self {
        let choice = input.u8();
        let number = |input: &mut Input<'_>, anywhere: bool, unit: u64| {
            if anywhere {
                corner(input.u8()).wrapping_add(u64::from(input.u8())).wrapping_sub(128)
            } else {
                u64::from(input.u8()) * unit
            }
        };
        let large = if choice & 1 == 0 { PAGE } else { 1 << 34 };
        let guest = number(input, choice & 2 != 0, large);
        let size = number(input, choice & 4 != 0, large);
        let front_end = number(input, choice & 8 != 0, large);
        let offset = if choice & 16 == 0 { 0 } else { number(input, choice & 32 != 0, PAGE) };
        Self { guest, size, front_end, offset, file: usize::from(choice >> 6) }
    }

    fn handed_over(&self, files: &[File]) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: self.guest,
            memory_size: self.size,
            userspace_addr: self.front_end,
            mmap_offset: self.offset,
            mmap_handle: files[self.file].as_raw_fd(),
        }
    }

    /// Whether it can be mapped.
    fn is_sound(&self) -> bool {
        let is_inside = |begin: u64| begin.checked_add(self.size).is_some();
        let end = self.offset.checked_add(self.size);
        self.size > 0
            && is_inside(self.guest)
            && is_inside(self.front_end)
            && self.offset.is_multiple_of(PAGE)
            && end.is_some_and(|end| end <= FILES[self.file])
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.guest < other.guest + other.size && other.guest < self.guest + self.size
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.guest, self.size, self.front_end) == (other.guest, other.size, other.front_end)
    }
}

/// The present pieces.
#[derive(Default)]
struct Model(Vec<Piece>);

impl Model {
    fn sum(pieces: &[Piece]) -> u64 {
        pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.size))
    }

    /// Whether these pieces can replace the present ones, with `new` bytes mapped while the old ones are still
    /// mapped.
    fn allows(&self, pieces: &[Piece], new: u64) -> bool {
        let counted = OTHERS + Self::sum(&self.0);
        pieces.len() <= PIECES_MAX
            && pieces.iter().all(Piece::is_sound)
            && pieces
                .iter()
                .enumerate()
                .all(|(at, piece)| pieces[..at].iter().all(|other| !piece.overlaps(other)))
            && Self::sum(pieces) <= EACH
            && counted.saturating_add(new) <= ALL
    }
}

/// One change of the memory; returns whether the server accepted it, which must agree with the model.
fn change(front_end: &mut Frontend, files: &[File], model: &mut Model, input: &mut Input<'_>) -> bool {
    let choice = input.u8();
    match choice % 4 {
        0 => {
            let pieces: Vec<Piece> = (0..=choice >> 2 & 7).map(|_| Piece::read(input)).collect();
            let expected = model.allows(&pieces, Model::sum(&pieces));
            let handed: Vec<_> = pieces.iter().map(|piece| piece.handed_over(files)).collect();
            let result = front_end.set_mem_table(&handed);
            assert_eq!(result.is_ok(), expected, "{pieces:?} after {:?}: {result:?}", model.0);
            model.0 = pieces;
            expected
        }
        1 | 2 => {
            let piece = Piece::read(input);
            let pieces = [&model.0[..], &[piece]].concat();
            let expected = model.allows(&pieces, piece.size);
            let result = front_end.add_mem_region(&piece.handed_over(files));
            assert_eq!(result.is_ok(), expected, "{piece:?} after {:?}: {result:?}", model.0);
            model.0 = pieces;
            expected
        }
        _ => {
            // Usually a present piece.
            let at = usize::from(choice >> 2);
            let piece = match model.0.get(at % model.0.len().max(1)) {
                Some(piece) if choice & 0x80 == 0 => *piece,
                _ => Piece::read(input),
            };
            let expected = model.0.iter().any(|other| other.is_same(&piece));
            let result = front_end.remove_mem_region(&piece.handed_over(files));
            assert_eq!(result.is_ok(), expected, "without {piece:?} of {:?}: {result:?}", model.0);
            model.0.retain(|other| !other.is_same(&piece));
            expected
        }
    }
}

/// The files of the shared memory; nothing is ever written to them.
fn files() -> Vec<File> {
    let file = |&size: &u64| {
        let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).expect("a file");
        file.set_len(size).expect("a sparse file");
        file
    };
    FILES.iter().map(file).collect()
}

/// Runs one front end.
///
/// # Panics
/// When the server accepts a change that it must reject, or rejects one that it must accept, or the budget's count is wrong.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let bound = Budget::new(ALL);
    let _others = bound.take(OTHERS).expect("nothing is used yet");
    let options = Options {
        name: "disk".to_owned(),
        guest_memory_max: EACH,
        guest_memory: Arc::clone(&bound),
        spin_max: Duration::ZERO,
        ..Options::default()
    };
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(TIMEOUT)).expect("it can be set");
    let server = std::thread::spawn(move || serve_connected(device(), theirs, options));
    let mut front_end = Frontend::from_stream(ours, 1);
    front_end.set_owner().expect("it answers");
    front_end.get_features().expect("it answers");
    front_end.set_features(PROTOCOL | VERSION_1).expect("agreed");
    front_end.get_protocol_features().expect("it answers");
    let wanted = VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    front_end.set_protocol_features(wanted).expect("agreed");
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let (files, mut model) = (files(), Model::default());
    for _ in 0..MESSAGES_MAX {
        if input.is_empty() || !change(&mut front_end, &files, &mut model, &mut input) {
            break;
        }
        assert_eq!(bound.used(), OTHERS + Model::sum(&model.0), "what is counted is not what is there");
    }
    drop(front_end);
    // The script determines how the connection ends.
    let _ = server.join().expect("the server does not fail");
    assert_eq!(bound.used(), OTHERS, "removed pieces are still counted");
}

/// Tables, pieces that are added and removed, and each limit exceeded by one.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    /// A piece of the large file: offset, size and address in units of 16 GiB.
    const LARGE: u8 = 3 << 6 | 1;
    /// A piece of 64 KiB in pages.
    const SMALL: u8 = 2 << 6;
    let add = |choice: u8, place: u8, size: u8| [1, choice, place, size, place];
    let mut seeds = vec![
        [&[0, SMALL, 1, 4, 1][..], &add(SMALL, 5, 4), &add(LARGE, 9, 16), &[3], &[7], &[11]].concat(),
        // A table of four pieces, replaced by another.
        [
            &[12][..],
            &[SMALL, 0, 1, 0],
            &[SMALL, 1, 1, 1],
            &[LARGE, 8, 2, 8],
            &[SMALL, 3, 16, 3],
            &[0, SMALL, 7, 1, 7],
        ]
        .concat(),
        // Adjacent pieces, and then two that overlap.
        [&add(SMALL, 1, 2)[..], &add(SMALL, 3, 2), &add(SMALL, 4, 2)].concat(),
        // More than the limit of one front end, and more than the limit of all.
        [&add(LARGE, 0, 32)[..], &add(LARGE, 32, 32), &add(LARGE, 64, 1)].concat(),
        [&[0, LARGE, 0, 64, 0][..], &[0, LARGE, 0, 64, 0]].concat(),
        // Offsets: inside, past the end, and inside a page.
        vec![1, SMALL | 16, 1, 2, 1, 14, 1, SMALL | 16, 3, 2, 3, 15],
        vec![1, SMALL | 16 | 32, 1, 2, 1, 12, 127],
        // Extreme values of every number.
        vec![1, SMALL | 2, 3, 128, 1, 1],
        vec![1, SMALL | 4, 1, 3, 128, 1],
        vec![1, SMALL | 8, 1, 1, 3, 128],
        // An empty file, a size of zero, and memory that is not present.
        vec![1, 0, 1, 1, 1],
        vec![1, SMALL, 1, 0, 1],
        vec![0x83, SMALL, 1, 1, 1],
    ];
    // One piece more than the maximum.
    seeds.push((0..33).flat_map(|place| add(SMALL, place, 1)).collect());
    seeds
}
