//! The reader of caches that dm-pcache left, on forged or damaged images.
//!
//! An input is a list of acts: append key sets with any numbers, set tails and generations, store and flip bytes, make pages
//! unreadable, cut off the end. Checksums are valid unless an act breaks them.
//!
//! Invariants: an image ends in an error or in an answer. The answer does not depend on the amount of memory. The offsets of the
//! extracted data ascend and lie within keys. If data has checksums and the log was only damaged, the reader extracts at an
//! offset only data that was written at that offset.

use crate::input::{Input, corner};
use cbd_pcache::{Cache, Image, Options, Scanned, Sink};
use cbd_testkit::pcache::{Sample, SampleKey};
use cbd_types::Result;

/// Segments of an image; an act may change the end of the image.
const SEGMENTS: u32 = 6;
/// Maximum number of acts of an input.
const ACTS_MAX: usize = 60;
/// Bytes of a key of a valid write.
const BLOCK: usize = 4096;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let data_crc = flags & 1 != 0;
    let mut image = Forged { sample: Sample::new(SEGMENTS, data_crc), next: 0, forged: false };
    for _ in 0..ACTS_MAX {
        if input.is_empty() {
            break;
        }
        image.act(&mut input);
    }
    let many = Options { past_damage: flags & 2 != 0, pieces_max: 1 << 16 };
    let few = Options { pieces_max: 4, ..many };
    let told = [many, few].map(|options| read(&image, options, data_crc));
    assert_eq!(told[0], told[1], "the answer depends on how much memory there is");
}

/// Inputs from which mutations are productive.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for flags in 0..4 {
        seeds.push([&[flags][..], &[0, 1, 0, 2, 0, 1, 3, 2, 0, 4, 0, 5]].concat());
        for act in 0..10 {
            seeds.push([&[flags, 0, 1, 0, 2][..], &[act; 20], &[0, 3]].concat());
        }
    }
    seeds
}

struct Forged {
    sample: Sample,
    /// The offset of the next data.
    next: u32,
    /// Whether an act stored data that dm-pcache would not have stored.
    forged: bool,
}

impl Forged {
    fn act(&mut self, input: &mut Input<'_>) {
        match input.u8() % 10 {
            0 => self.write(u64::from(input.u8() % 32)),
            1 => {
                let mut keys = vec![SampleKey::default(); usize::from(input.u8() % 130)];
                for key in keys.iter_mut().take(4) {
                    *key = self.any_key(input);
                }
                self.fits(keys.len() * 40 + 48);
                self.sample.append(&keys);
                self.forged = true;
            }
            2 => {
                let next = u32::from(input.u8()) % SEGMENTS;
                self.fits(24);
                self.sample.append_last(next);
                // A data segment now contains a log.
                self.forged = true;
            }
            3 => {
                let (sequence, generation) = (input.u8(), corner(input.u8()));
                self.sample.set_generation(u32::from(input.u8()) % SEGMENTS, sequence, generation);
                self.forged = true;
            }
            4 => {
                let (sequence, segment, offset) = (input.u8(), any_u32(input), any_u32(input));
                self.sample.set_dirty_tail(sequence, segment, offset);
                self.forged = true;
            }
            5 => {
                let (sequence, segment, offset) = (input.u8(), any_u32(input), any_u32(input));
                self.sample.set_key_tail(sequence, segment, offset);
                self.forged = true;
            }
            6 => {
                let at = place(input);
                self.sample.store(at, input.bytes(8));
                // Under a valid checksum: a superblock, an info, a small structure, a set of one key.
                let length = [24, 16, 64][usize::from(input.u8()) % 3];
                self.sample.reseal(at & !7 & !u64::from(input.u8() & 8), length);
                self.forged = true;
            }
            7 => {
                let at = place(input);
                self.sample.flip(at, input.u8());
            }
            8 => {
                let at = place(input);
                self.sample.poison(at);
            }
            _ => self.sample.truncate(u64::from(input.u16()) << 12),
        }
    }

    /// Stores a block as a client's write does; its content identifies its offset.
    fn write(&mut self, block: u64) {
        let bytes = [block as u8 | 0x80; BLOCK];
        self.fits(64 + 24);
        let key = self.sample.data(block * BLOCK as u64, 1, self.next, &bytes);
        self.next = (self.next + BLOCK as u32) % (1 << 20);
        self.sample.append(&[key]);
    }

    /// The log restarts in its segment if a set would not fit.
    fn fits(&mut self, bytes: usize) {
        let (segment, offset) = self.sample.head();
        if u64::from(offset) + bytes as u64 > (16 << 20) - 12288 {
            self.sample.set_head(segment, 0);
            self.forged = true;
        }
    }

    fn any_key(&self, input: &mut Input<'_>) -> SampleKey {
        SampleKey {
            offset: if input.u8() & 1 == 0 { u64::from(input.u8()) * 512 } else { corner(input.u8()) },
            length: if input.u8() & 1 == 0 { u32::from(input.u8()) * 512 } else { any_u32(input) },
            flags: u32::from(input.u8() & 3),
            segment: u32::from(input.u8() % 8),
            data_offset: if input.u8() & 1 == 0 { u32::from(input.u8()) * 512 } else { any_u32(input) },
            generation: corner(input.u8()),
            data_crc: input.u32(),
        }
    }
}

/// Small numbers, and numbers at which arithmetic fails.
fn any_u32(input: &mut Input<'_>) -> u32 {
    match input.u8() % 3 {
        0 => u32::from(input.u8()),
        1 => corner(input.u8()) as u32,
        _ => input.u32(),
    }
}

/// A byte near a structure.
fn place(input: &mut Input<'_>) -> u64 {
    let segment = u32::from(input.u8()) % SEGMENTS;
    let bases = [
        4096,
        8192,
        12288,
        16384,
        Sample::segment_at(segment),
        Sample::segment_at(segment) + 4096,
        Sample::segment_at(segment) + 8192,
        Sample::data_at(segment),
    ];
    bases[usize::from(input.u8()) % bases.len()] + u64::from(input.u16() & 0xfff)
}

/// The device that the extracted data produces.
struct Device<'a> {
    image: &'a Forged,
    only_what_was_written: bool,
    end: u64,
    bytes: u64,
    /// A digest of the bytes and offsets of all calls, independent of the borders between calls.
    print: u64,
}

impl Sink for Device<'_> {
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        assert!(
            offset >= self.end && !bytes.is_empty() && offset.is_multiple_of(512),
            "{offset} after {}",
            self.end
        );
        self.end = offset + bytes.len() as u64;
        self.bytes += bytes.len() as u64;
        for (number, sector) in bytes.chunks(512).enumerate() {
            assert_eq!(sector.len(), 512);
            let at = offset + 512 * number as u64;
            let block = at / BLOCK as u64;
            if self.only_what_was_written {
                assert!(
                    block < 32 && sector.iter().all(|&byte| byte == block as u8 | 0x80),
                    "at {at}: data that was not written there ({} bytes of image)",
                    self.image.sample.size()
                );
            }
            let words =
                sector.chunks(8).map(|word| word.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte)));
            let fold = |print: u64, word: u64| (print ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
            self.print = words.fold(fold(self.print, at), fold);
        }
        Ok(())
    }
}

/// The content that an image reports; `None` if it cannot be opened.
fn read(image: &Forged, options: Options, data_crc: bool) -> Option<(Scanned, u64)> {
    let cache = Cache::open(&image.sample, options).ok()?;
    let survey = cache.survey(&mut |_, _, _| {});
    assert!(survey.end.is_some() && survey.dirty_keys <= survey.keys);
    assert!(survey.dirty_key_sets <= survey.key_sets && survey.impossible_keys <= survey.dirty_keys);
    let mut device =
        Device { image, only_what_was_written: data_crc && !image.forged, end: 0, bytes: 0, print: 0 };
    let scanned = cache.scan(&mut device, &mut |_, done, of| assert!(done <= of));
    let Ok(mut scanned) = scanned else { panic!("the device takes everything") };
    assert_eq!(scanned.dirty.bytes, device.bytes);
    assert!(device.end <= survey.device_end, "behind the last key");
    assert!(scanned.dirty.bytes + scanned.damaged.bytes <= survey.logged_bytes);
    scanned.windows = 0;
    Some((scanned, device.print))
}
