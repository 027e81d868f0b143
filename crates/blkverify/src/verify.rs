//! What PATH is, and how that is verified.
//!
//! Invariants: see [`crate::cbd`] for block devices of CBD; everything else is looked at by passes of this process.

use crate::beneath::Block;
use crate::bounds;
use crate::cbd::{self, Cached, News};
use crate::cli::{Cli, Offload};
use crate::disk::{Disk, refused};
use crate::expected::{Expected, Image};
use crate::file;
use crate::interrupt::Interrupt;
use crate::look::Look;
use crate::pass::{Pass, Piece, Seen};
use crate::progress::Bar;
use crate::report::{Report, Wrong};
use cbd_daemon::api::{VerifiedInfo, VerifyRange, printable};
use cbd_daemon::size::format_size;
use cbd_sys::DeviceNumber;
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::{self, FileType, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;
use std::sync::mpsc::channel;

/// One verification.
pub struct Job<'a> {
    /// The options.
    pub cli: &'a Cli,
    /// What ends it early.
    pub interrupt: &'a Interrupt,
    /// The path in texts.
    pub name: String,
    /// The control socket.
    pub socket: PathBuf,
}

/// Verifies what the options name.
///
/// # Errors
/// Why nothing could be looked at.
pub fn run(cli: &Cli, interrupt: &Interrupt) -> Result<Report> {
    let name = printable(&cli.path.display().to_string());
    let socket = cli.socket.clone().unwrap_or_else(cbd_daemon::paths::default_socket);
    let status = fs::metadata(&cli.path).map_err(|error| refused(&name, error))?;
    let job = Job { cli, interrupt, name, socket };
    let kind = status.file_type();
    if kind.is_block_device() {
        block_device(&job, &status)
    } else if kind.is_file() {
        file::verify(&job)
    } else {
        Err(Error::new(ErrorKind::InvalidArgument, format!("{} is {}", job.name, no_object(&kind))))
    }
}

fn no_object(kind: &FileType) -> &'static str {
    if kind.is_dir() {
        "a directory: name a file in it, or the disk of its file system"
    } else if kind.is_fifo() {
        "a pipe, which is on no disk: name a disk or a file"
    } else if kind.is_char_device() {
        "a character device: name the block device (for NVMe /dev/nvme0n1)"
    } else {
        "neither a block device nor a file: name one"
    }
}

fn block_device(job: &Job<'_>, status: &Metadata) -> Result<Report> {
    let number = DeviceNumber::from_stat(status.rdev());
    let cached = cbd::find(number, &job.socket)?;
    let offload = if cached.is_some() { Offload::Never } else { job.cli.offload };
    let mut disk = Disk::open(&job.cli.path, offload, &job.name)?;
    let (range, expected) = job.chosen(disk.size, disk.sector)?;
    let mut report = job.report(range, &expected);
    let bar = job.bar(range);
    if let Some(cached) = &cached
        && matches!(expected, Expected::Readable)
    {
        report.object = "cbd";
        report.level = Some(cbd_types::VerifyLevel::from(job.cli.level()).name());
        if let Some(info) = job.ask(cached, range, &bar, 0)? {
            job.add(&mut report, info, cached.start, 0);
        }
        job.finish(&mut report, Seen::default());
        return Ok(report);
    }
    report.object = "disk";
    if let Some(cached) = &cached {
        report.notes.push(format!(
            "only the newest data of {} was compared; its copies are verified without --zero and --compare",
            cached.name
        ));
    } else {
        job.check_copies(&mut report, &cached_beneath(number, job))?;
    }
    let mut seen = Seen::default();
    let piece = Piece { logical: range.start, start: range.start, length: range.len() };
    job.pass(&expected, disk.sector, disk.look.as_mut(), &[piece], &mut seen, &bar);
    report.method = disk.method();
    report.verified_bytes = seen.looked;
    job.finish(&mut report, seen);
    Ok(report)
}

/// The block devices of CBD that a disk stands on.
pub fn cached_beneath(number: DeviceNumber, job: &Job<'_>) -> Vec<String> {
    let is_stack = Block::of(std::path::Path::new("/sys"), number)
        .is_some_and(|block| ["dm-", "md", "loop"].iter().any(|prefix| block.name.starts_with(prefix)));
    if is_stack { cbd::members(number, &job.socket) } else { Vec::new() }
}

impl Job<'_> {
    /// The range, and what its bytes should be.
    ///
    /// # Errors
    /// What is wrong with the options.
    pub fn chosen(&self, size: u64, sector: u64) -> Result<(ByteRange, Expected)> {
        let range = bounds::range(self.cli.offset, self.cli.length, size, sector, &self.name)?;
        let expected = match &self.cli.compare {
            _ if self.cli.zero => Expected::Zeroes,
            None => Expected::Readable,
            Some(path) => {
                let image = Image::open(path)?;
                image.check(range, self.cli.length.is_some(), sector, &self.name)?;
                Expected::Image(image)
            }
        };
        Ok((range, expected))
    }

    /// A report without results.
    #[must_use]
    pub fn report(&self, range: ByteRange, expected: &Expected) -> Report {
        Report {
            path: self.cli.path.display().to_string(),
            check: expected.name(),
            offset: range.start,
            length: range.len(),
            complete: true,
            ..Report::default()
        }
    }

    /// A progress bar, if the user wants one.
    #[must_use]
    pub fn bar(&self, range: ByteRange) -> Bar {
        Bar::new(!self.cli.no_progress, range.len(), &self.name)
    }

    /// Refuses to repair what has one copy, and notes that a level makes no difference.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with `--repair`, and for copies where only the `cached` devices of CBD beneath have some.
    pub fn check_copies(&self, report: &mut Report, cached: &[String]) -> Result<()> {
        if self.cli.repair {
            let text = format!(
                "{} is no block device of CBD and has no other copy to repair it from: leave out --repair",
                self.name
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if let Some(member) = cached.first().filter(|_| self.cli.asks_for_copies()) {
            let text = format!(
                "{} stands on {member}, which answers reads from its cache, so its copies are not looked at: blkverify {member} looks at them",
                self.name
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        report.notes.extend(cached.iter().map(|member| {
            format!("it stands on {member}, which answers from its cache: verify its copies with blkverify {member}")
        }));
        if self.cli.asks_for_copies() {
            report.notes.push("it has one copy: the level makes no difference".to_owned());
        }
        Ok(())
    }

    /// Looks at pieces.
    pub fn pass(
        &self,
        expected: &Expected,
        sector: u64,
        look: &mut dyn Look,
        pieces: &[Piece],
        seen: &mut Seen,
        bar: &Bar,
    ) {
        let mut progress = |looked| bar.show(looked);
        let stop = self.interrupt.stop();
        Pass { expected, sector, stop, progress: &mut progress }.run(look, pieces, seen);
    }

    /// Asks the daemon about a range of `cached`; `done` bytes were done before. None after a signal.
    ///
    /// # Errors
    /// The daemon's.
    pub fn ask(
        &self,
        cached: &Cached,
        range: ByteRange,
        bar: &Bar,
        done: u64,
    ) -> Result<Option<VerifiedInfo>> {
        let (sender, news) = channel();
        self.interrupt.tell(&sender);
        let request = VerifyRange {
            offset: cached.start + range.start,
            length: Some(range.len()),
            level: self.cli.level(),
            repair: self.cli.repair,
        };
        cbd::start(cached, request, sender)?;
        loop {
            match news.recv() {
                Ok(News::Progress(bytes)) => bar.show(done + bytes),
                Ok(News::Done(result)) => return result.map(Some),
                Ok(News::Stop) | Err(_) => return Ok(None),
            }
        }
    }

    /// Adds what the daemon found in a range that begins at `physical` of its backend and at `logical` of PATH.
    pub fn add(&self, report: &mut Report, info: VerifiedInfo, physical: u64, logical: u64) {
        report.verified_bytes += info.verified_bytes;
        report.done_bytes += info.verified_bytes;
        report.cache_bytes += info.cache_bytes;
        report.backing_bytes += info.backing_bytes;
        report.changed_bytes += info.changed_bytes;
        report.found += info.found;
        report.repaired += info.repaired;
        report.findings.extend(info.findings.into_iter().map(|finding| Wrong {
            start: (finding.start + logical).saturating_sub(physical),
            length: finding.length,
            what: finding.flaw,
            repaired: finding.repaired,
        }));
        report.method = info.method;
        if let Some(error) = info.error {
            report.incomplete(error);
        }
    }

    /// Completes a report.
    pub fn finish(&self, report: &mut Report, seen: Seen) {
        report.found += seen.findings.count();
        report.findings.extend(seen.findings.iter().map(|(range, what)| Wrong {
            start: range.start,
            length: range.len(),
            what: what.name().to_owned(),
            repaired: false,
        }));
        report.findings.sort_by_key(|wrong| wrong.start);
        report.changed_bytes += seen.changed;
        report.done_bytes += seen.looked;
        if seen.is_coarse {
            report.notes.push(
                "there were so many errors that unreadable ranges are no longer narrowed to sectors"
                    .to_owned(),
            );
        }
        if let Some(error) = seen.error {
            report.incomplete(format!("{}: {}", self.name, error.line()));
        }
        report.done_bytes = report.done_bytes.min(report.length);
        // A signal that came behind the last answer ended nothing.
        if self.interrupt.has_come() && report.done_bytes < report.length {
            report.incomplete(format!(
                "{}: ended by a signal when {} of {} were done ({} of {} bytes)",
                self.name,
                format_size(report.done_bytes),
                format_size(report.length),
                report.done_bytes,
                report.length
            ));
        }
    }
}
