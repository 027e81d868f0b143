//! A file exerciser: random operations on one file or block device; each read is compared with a model in
//! memory.
//!
//! It follows the `fsx` that Avadis Tevanian wrote for NeXT in 1991 and that has since been used to test file
//! systems; no Debian package holds it.
//!
//! Invariants: the same seed gives the same operations, and a difference is reported with the bytes, the
//! operations that changed them and the seed.

use crate::random::Random;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Number of operations that are shown after a difference.
const HISTORY: usize = 40;

/// The parameters of the exerciser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// A file, created if missing and overwritten, or a block device.
    pub path: PathBuf,
    /// The seed of the operations.
    pub seed: u64,
    /// Number of operations.
    pub operations: u64,
    /// The largest size of a file, or the part of a device that is used, in bytes.
    pub size: u64,
    /// The alignment of all operations, for direct I/O. `None` allows any offset, and the I/O goes through the page cache.
    pub direct: Option<u64>,
}

/// Offset and length of an operation.
#[derive(Clone, Copy, Debug)]
struct Span {
    at: u64,
    length: u64,
}

struct Exerciser {
    plan: Plan,
    random: Random,
    file: File,
    is_device: bool,
    /// The expected content of the file.
    model: Vec<u8>,
    /// A value that identifies each write.
    stamp: u8,
    history: VecDeque<String>,
    /// A page-aligned buffer for direct I/O.
    room: Aligned,
}

/// Runs the plan.
///
/// # Errors
/// The first difference or failed operation, as text.
pub fn run(plan: &Plan) -> Result<(), String> {
    let mut exerciser = Exerciser::new(plan.clone())?;
    for number in 0..plan.operations {
        exerciser.step(number).map_err(|text| exerciser.explain(number, &text))?;
    }
    exerciser.compare_all().map_err(|text| exerciser.explain(plan.operations, &text))
}

impl Exerciser {
    fn new(plan: Plan) -> Result<Self, String> {
        let unit = plan.direct.unwrap_or(1);
        if unit == 0
            || !unit.is_power_of_two()
            || unit > 4096
            || plan.size < 16 * unit
            || !plan.size.is_multiple_of(unit)
        {
            return Err(format!("size {} and alignment {unit} do not go together", plan.size));
        }
        let is_device = plan.path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
        let file = open(&plan.path, plan.direct.is_some(), !is_device)?;
        let room = Aligned::new(usize_of(plan.size));
        let random = Random::new(plan.seed);
        let mut made = Self {
            plan,
            random,
            file,
            is_device,
            model: Vec::new(),
            stamp: 0,
            history: VecDeque::new(),
            room,
        };
        if is_device {
            made.model = vec![0; usize_of(made.plan.size)];
            let all = Span { at: 0, length: made.plan.size };
            made.load(all)?;
            made.model.copy_from_slice(made.room.bytes(usize_of(all.length)));
        }
        Ok(made)
    }

    fn step(&mut self, number: u64) -> Result<(), String> {
        let span = self.span();
        match self.random.below(100) {
            0..30 => self.read(span),
            30..65 => self.write(span),
            65..72 => self.punch(span),
            72..80 => self.zero(span),
            80..86 if !self.is_device => self.truncate(span.at),
            86..90 if !self.is_device => self.allocate(span),
            90..96 => self.sync(),
            96..99 => self.reopen(),
            99 if number.is_multiple_of(4) => self.compare_all(),
            _ => self.read(span),
        }
    }

    /// A random range within the largest size; short ranges are more frequent than long ones.
    fn span(&mut self) -> Span {
        let unit = self.plan.direct.unwrap_or(1);
        let units = self.plan.size / unit;
        let at = self.random.below(units);
        let longest = (units - at).min(1 << self.random.below(64 - u64::from(units.leading_zeros())));
        Span { at: at * unit, length: (1 + self.random.below(longest)) * unit }
    }

    fn read(&mut self, span: Span) -> Result<(), String> {
        let end = (span.at + span.length).min(self.model.len() as u64);
        if span.at >= end {
            return Ok(());
        }
        let span = Span { at: span.at, length: end - span.at };
        self.note("read", span);
        self.load(span)?;
        let (from, to) = (usize_of(span.at), usize_of(end));
        let found = self.room.bytes(to - from);
        let wanted = &self.model[from..to];
        if found == wanted {
            return Ok(());
        }
        let first = found.iter().zip(wanted).position(|(found, wanted)| found != wanted).unwrap_or(0);
        let wrong = found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count();
        Err(format!(
            "{wrong} of {} bytes differ; the first at {:#x}: {:#04x} instead of {:#04x}",
            span.length,
            span.at + first as u64,
            found[first],
            wanted[first]
        ))
    }

    fn write(&mut self, span: Span) -> Result<(), String> {
        self.note("write", span);
        self.stamp = self.stamp.checked_add(1).unwrap_or(1);
        self.grow(span.at + span.length);
        let length = usize_of(span.length);
        let place = usize_of(span.at)..usize_of(span.at) + length;
        for (index, byte) in self.model[place.clone()].iter_mut().enumerate() {
            *byte = self.stamp ^ ((span.at + index as u64) >> 9) as u8;
        }
        let room = self.room.bytes(length);
        room.copy_from_slice(&self.model[place]);
        self.file.write_all_at(room, span.at).map_err(|error| format!("write: {error}"))
    }

    fn punch(&mut self, span: Span) -> Result<(), String> {
        self.note("punch hole", span);
        self.change(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, span)?;
        self.clear(span, self.model.len() as u64);
        Ok(())
    }

    fn zero(&mut self, span: Span) -> Result<(), String> {
        self.note("zero range", span);
        let flags = if self.is_device {
            FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        if self.change(flags, span)? {
            self.grow(span.at + span.length);
            self.clear(span, self.model.len() as u64);
        }
        Ok(())
    }

    fn allocate(&mut self, span: Span) -> Result<(), String> {
        self.note("allocate", span);
        if self.change(FallocateFlags::empty(), span)? {
            self.grow(span.at + span.length);
        }
        Ok(())
    }

    fn truncate(&mut self, size: u64) -> Result<(), String> {
        self.note("truncate", Span { at: size, length: 0 });
        self.model.resize(usize_of(size), 0);
        self.file.set_len(size).map_err(|error| format!("truncate: {error}"))
    }

    fn sync(&mut self) -> Result<(), String> {
        self.note("sync", Span { at: 0, length: 0 });
        self.file.sync_data().map_err(|error| format!("sync: {error}"))
    }

    fn reopen(&mut self) -> Result<(), String> {
        self.note("reopen", Span { at: 0, length: 0 });
        self.file = open(&self.plan.path, self.plan.direct.is_some(), false)?;
        Ok(())
    }

    fn compare_all(&mut self) -> Result<(), String> {
        if !self.is_device {
            let size = self.file.metadata().map_err(|error| format!("size: {error}"))?.len();
            if size != self.model.len() as u64 {
                return Err(format!("the file has {size} bytes instead of {}", self.model.len()));
            }
        }
        self.read(Span { at: 0, length: self.plan.size })
    }

    fn change(&mut self, flags: FallocateFlags, span: Span) -> Result<bool, String> {
        change_allocation(&self.file, flags, span.at, span.length)
    }

    fn load(&mut self, span: Span) -> Result<(), String> {
        // With direct I/O the end of a file may lie inside the last unit, so the read has whole units.
        let unit = self.plan.direct.unwrap_or(1);
        let asked = span.length.next_multiple_of(unit);
        let room = self.room.bytes(usize_of(asked));
        let mut filled = 0;
        while filled < usize_of(span.length) {
            match self.file.read_at(&mut room[filled..], span.at + filled as u64) {
                Ok(0) => return Err(format!("the file ends {filled} bytes after {:#x}", span.at)),
                Ok(count) => filled += count,
                Err(error) => return Err(format!("read: {error}")),
            }
        }
        Ok(())
    }

    fn grow(&mut self, end: u64) {
        if self.model.len() < usize_of(end) {
            self.model.resize(usize_of(end), 0);
        }
    }

    fn clear(&mut self, span: Span, size: u64) {
        let end = (span.at + span.length).min(size);
        if span.at < end {
            self.model[usize_of(span.at)..usize_of(end)].fill(0);
        }
    }

    fn note(&mut self, operation: &str, span: Span) {
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(format!("{operation} {:#x}..{:#x}", span.at, span.at + span.length));
    }

    fn explain(&self, number: u64, text: &str) -> String {
        let mut all =
            format!("{}: operation {number} of seed {}: {text}", self.plan.path.display(), self.plan.seed);
        for line in &self.history {
            let _ = write!(all, "\n  {line}");
        }
        all
    }
}

/// Changes a file's allocation. Returns false if this kind of file does not support the operation. A failure to punch a hole is a
/// difference, because the following comparisons would fail.
pub fn change_allocation(file: &File, flags: FallocateFlags, at: u64, length: u64) -> Result<bool, String> {
    match fallocate(file, flags, at, length) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::OPNOTSUPP) if !flags.contains(FallocateFlags::PUNCH_HOLE) => Ok(false),
        Err(error) => Err(format!("fallocate {flags:?}: {error}")),
    }
}

fn open(path: &Path, direct: bool, make_empty: bool) -> Result<File, String> {
    let flags = if direct { OFlags::DIRECT } else { OFlags::empty() };
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(make_empty)
        .truncate(make_empty)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
        .map_err(|error| format!("cannot open {}: {error}", path.display()))
}

fn usize_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// A buffer that begins at a page boundary, as direct I/O requires.
struct Aligned {
    bytes: Vec<u8>,
    skip: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + 4096];
        let skip = bytes.as_ptr().align_offset(4096);
        Self { bytes, skip }
    }

    fn bytes(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.skip..self.skip + length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(name: &str) -> Plan {
        let path = std::env::temp_dir().join(format!("cbd-fsx-{name}-{}", std::process::id()));
        Plan { path, seed: 7, operations: 600, size: 1 << 20, direct: None }
    }

    #[test]
    fn a_sound_file_system_shows_no_difference() {
        let plan = plan("sound");
        let found = run(&plan);
        std::fs::remove_file(&plan.path).expect("the file is there");
        assert_eq!(found, Ok(()));
    }

    #[test]
    fn a_byte_that_another_process_changed_is_found() {
        let plan = plan("changed");
        let mut exerciser = Exerciser::new(plan.clone()).expect("a file can be made");
        exerciser.write(Span { at: 0, length: 8192 }).expect("it can be written");
        let wrong = !exerciser.model[5000];
        exerciser.file.write_all_at(&[wrong], 5000).expect("it can be written");
        let found = exerciser.compare_all();
        std::fs::remove_file(&plan.path).expect("the file is there");
        let text = found.expect_err("one byte differs");
        assert!(text.contains("1 of 8192 bytes differ; the first at 0x1388"), "{text}");
    }

    #[test]
    fn the_same_seed_gives_the_same_operations() {
        let plan = plan("seed");
        let mut histories = Vec::new();
        for _ in 0..2 {
            let mut exerciser = Exerciser::new(plan.clone()).expect("a file can be made");
            for number in 0..30 {
                exerciser.step(number).expect("no difference");
            }
            histories.push(exerciser.history);
        }
        std::fs::remove_file(&plan.path).expect("the file is there");
        assert_eq!(histories[0], histories[1]);
    }
}
