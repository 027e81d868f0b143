//! A regular file: its extents on the disk beneath, or its bytes through the file system.
//!
//! Invariants: a place is looked at only for a file system that is known to use the one device ([`crate::beneath`]); bytes that were
//! elsewhere after they had been looked at are looked at again, and count as changed if they do not rest. Contents are
//! compared through the file system, which decrypts and decompresses them, and never with a place of the disk.

use crate::beneath;
use crate::cbd::{self, Cached};
use crate::disk::{Disk, Through};
use crate::expected::Expected;
use crate::extents::{Mapped, Place, map, moved};
use crate::look::Nothing;
use crate::pass::{Piece, Seen};
use crate::progress::Bar;
use crate::report::Report;
use crate::verify::{Job, cached_beneath};
use cbd_types::{ByteRange, Result};
use std::fs::File;
use std::os::fd::AsFd;

/// How often bytes that move are looked at.
const ROUNDS: usize = 4;

/// What is beneath the file.
enum Beneath {
    Disk(Disk),
    Cached(Cached),
    Unknown,
}

/// A file, and the results so far.
struct Pages<'a> {
    job: &'a Job<'a>,
    expected: Expected,
    through: Through,
    beneath: Beneath,
    report: Report,
    seen: Seen,
    bar: Bar,
}

/// Verifies the file that the options name.
///
/// # Errors
/// Why nothing could be looked at.
pub fn verify(job: &Job<'_>) -> Result<Report> {
    let through = Through::open(&job.cli.path, &job.name)?;
    let examined = through.file.metadata();
    let size = examined.map_err(|error| crate::disk::refused(&job.name, error))?.len();
    let (range, expected) = job.chosen(size, through.sector)?;
    let mut report = job.report(range, &expected);
    report.object = "file";
    let beneath = match expected {
        Expected::Readable => beneath(job, &through.file, &mut report)?,
        _ => Beneath::Unknown,
    };
    match &beneath {
        Beneath::Cached(_) => report.level = Some(cbd_types::VerifyLevel::from(job.cli.level()).name()),
        Beneath::Disk(disk) => job.check_copies(&mut report, &cached_beneath(disk.number, job))?,
        Beneath::Unknown => job.check_copies(&mut report, &[])?,
    }
    let bar = job.bar(range);
    report.method.clone_from(&through.method);
    let pages = Pages { job, expected, through, beneath, report, seen: Seen::default(), bar };
    pages.rounds(range, size)
}

/// Finds the disk beneath; notes why there is none. A file on a block device of CBD whose daemon is missing is refused.
fn beneath(job: &Job<'_>, file: &File, report: &mut Report) -> Result<Beneath> {
    let note = |why: &str| format!("the file is read through its file system: {why}");
    let (number, node) = match beneath::disk_of(file) {
        Ok(found) => found,
        Err(why) => {
            report.notes.push(note(why));
            return Ok(Beneath::Unknown);
        }
    };
    if let Some(cached) = cbd::find(number, &job.socket)? {
        return Ok(Beneath::Cached(cached));
    }
    match Disk::open(&node, job.cli.offload, &node.display().to_string()) {
        Ok(disk) if disk.number == number => Ok(Beneath::Disk(disk)),
        Ok(_) => Ok(Beneath::Unknown),
        Err(error) if job.cli.offload == crate::cli::Offload::On => Err(error),
        Err(error) => {
            report.notes.push(note(&error.line()));
            Ok(Beneath::Unknown)
        }
    }
}

impl Pages<'_> {
    /// Looks at `range` until its bytes rest.
    fn rounds(mut self, range: ByteRange, size: u64) -> Result<Report> {
        let mut todo = vec![range];
        for round in 1.. {
            let before = self.map(size);
            let parts: Vec<Mapped> =
                todo.iter().flat_map(|range| before.iter().filter_map(|part| part.within(*range))).collect();
            self.look(&parts)?;
            let is_ended = self.seen.error.is_some() || self.job.interrupt.has_come();
            let unrest = if is_ended { Vec::new() } else { moved(&parts, &self.map(size)) };
            self.forget(&unrest);
            self.count(&parts, &unrest);
            if unrest.is_empty() {
                break;
            }
            if round == ROUNDS {
                self.report.changed_bytes += unrest.iter().map(ByteRange::len).sum::<u64>();
                self.report.notes.push("some of its bytes are written or moved all the time".to_owned());
                break;
            }
            todo = unrest;
        }
        let Self { job, beneath, mut report, seen, .. } = self;
        if let Beneath::Disk(disk) = &beneath {
            report.method = disk.method();
        }
        job.finish(&mut report, seen);
        Ok(report)
    }

    /// Drops what was found in places where the bytes are no more.
    fn forget(&mut self, unrest: &[ByteRange]) {
        let Self { seen, report, .. } = self;
        for range in unrest {
            seen.findings.remove(*range);
            report.findings.retain(|wrong| {
                let is_kept = !range.overlaps(&ByteRange::at(wrong.start, wrong.length));
                report.found -= u64::from(!is_kept);
                report.repaired -= u64::from(!is_kept && wrong.repaired);
                is_kept
            });
        }
    }

    /// Where the bytes are at this moment.
    fn map(&mut self, size: u64) -> Vec<Mapped> {
        match cbd_sys::extents::of_file(self.through.file.as_fd()) {
            Ok(extents) => map(&extents, size),
            Err(error) => {
                let note = format!(
                    "its file system does not say where its bytes are, so holes are read too: {error}"
                );
                if !self.report.notes.contains(&note) {
                    self.report.notes.push(note);
                }
                vec![Mapped { range: ByteRange { start: 0, end: size }, place: Place::Inner }]
            }
        }
    }

    /// Looks at parts once.
    fn look(&mut self, parts: &[Mapped]) -> Result<()> {
        let (mut on_disk, mut through, mut nowhere, mut cached) = (vec![], vec![], vec![], vec![]);
        for part in parts {
            let piece = |start| Piece { logical: part.range.start, start, length: part.range.len() };
            match (part.place, &self.beneath) {
                (place, _) if place.is_empty() => nowhere.push(piece(part.range.start)),
                (Place::Disk(start), Beneath::Disk(_)) => on_disk.push(piece(start)),
                (Place::Disk(start), Beneath::Cached(_)) => cached.push(piece(start)),
                _ => through.push(piece(part.range.start)),
            }
        }
        // A file may be in many places; a disk reads in order.
        on_disk.sort_by_key(|piece| piece.start);
        let Self { job, expected, seen, bar, report, .. } = self;
        let sector = self.through.sector;
        if let Beneath::Disk(disk) = &mut self.beneath {
            let before = seen.looked;
            job.pass(expected, disk.sector, disk.look.as_mut(), &on_disk, seen, bar);
            report.verified_bytes += seen.looked - before;
        }
        let before = seen.looked;
        job.pass(expected, sector, self.through.look.as_mut(), &through, seen, bar);
        report.through_file_bytes += seen.looked - before;
        job.pass(expected, sector, &mut Nothing::default(), &nowhere, seen, bar);
        if let Beneath::Cached(found) = &self.beneath {
            for piece in cached {
                // The daemon knows whole sectors.
                let range = ByteRange::at(piece.start, piece.length.next_multiple_of(sector));
                let done = seen.looked + report.verified_bytes;
                let Some(info) = job.ask(found, range, bar, done)? else { break };
                job.add(report, info, found.start + piece.start, piece.logical);
            }
        }
        Ok(())
    }

    /// Counts bytes by their kind, but for those in `unrest`.
    fn count(&mut self, parts: &[Mapped], unrest: &[ByteRange]) {
        for part in parts {
            let moved = unrest.iter().filter_map(|range| part.range.intersection(range));
            let bytes = part.range.len() - moved.map(|range| range.len()).sum::<u64>();
            match part.place {
                Place::Hole => self.report.hole_bytes += bytes,
                Place::Unwritten => self.report.unwritten_bytes += bytes,
                Place::Inline => self.report.inline_bytes += bytes,
                Place::Disk(_) | Place::Inner => {}
            }
        }
    }
}
