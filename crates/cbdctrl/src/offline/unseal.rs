//! `cbdctrl unseal`: gives the disk below a cache to others, in an emergency, without a daemon.
//!
//! Invariants: a disk is unsealed only if the user has typed what is lost by using it alone, and never while a daemon has
//! its backend. The next daemon learns of it. Nothing is written to the disk or the region.
//!
//! Elsewhere: the rules ([`cbd_daemon::seal`]).

use super::UnsealArguments;
use crate::command::{Output, warn};
use crate::table::{Table, terminal_width};
use cbd_daemon::client::{Client, Timeout};
use cbd_daemon::seal::{rules, rules::Subject, udev};
use cbd_daemon::size::format_size;
use cbd_inspect::BackendSummary;
use cbd_inspect::check::DataChecked;
use cbd_types::{Error, ErrorKind, Result};
use serde::Serialize;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a daemon may take to answer.
const DAEMON_LIMIT: Duration = Duration::from_secs(10);

/// What the user types where the region cannot be read.
const UNKNOWN: &str = "unknown";

/// The result of unsealing a disk.
#[derive(Serialize)]
struct Unsealed {
    disk: String,
    backend: String,
    /// The bytes that the disk lacks; none if they are not known.
    dirty_bytes: Option<u64>,
}

/// Runs `unseal`.
#[must_use]
pub fn unseal(arguments: &UnsealArguments, socket: &Path, json: bool) -> ExitCode {
    let output = Output { json };
    let result = match (&arguments.disk, &arguments.backend) {
        (None, None) => list(&arguments.rules_dir, &output),
        _ => unseal_one(arguments, socket, &output),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            super::failed(&error, &output);
            ExitCode::FAILURE
        }
    }
}

fn list(folder: &Path, output: &Output) -> Result<()> {
    let sealed = rules::all(folder);
    let table = |sealed: &[Subject]| {
        let mut table = Table::new(&["DISK", "BACKEND", "NAME", "REGION", "UUID"]);
        for one in sealed {
            let name = one.name.clone().unwrap_or_default();
            table.row(vec![
                one.disk.clone(),
                one.number.to_string(),
                name,
                one.region.clone(),
                one.backend.clone(),
            ]);
        }
        table
    };
    output.list(&sealed, table)?;
    if sealed.is_empty() && !output.json && terminal_width().is_some() {
        eprintln!("cbdctrl: no disk is sealed by a rule in {}", folder.display());
    }
    Ok(())
}

fn unseal_one(arguments: &UnsealArguments, socket: &Path, output: &Output) -> Result<()> {
    let folder = &arguments.rules_dir;
    let subject = find(arguments)?;
    refuse_with_a_daemon(&subject, socket)?;
    let held = held(&subject);
    let (lost, typed) = match &held {
        Ok(held) => (
            format!(
                "{} ({} bytes) that were written are in the region {} alone; {}",
                format_size(held.dirty_bytes),
                held.dirty_bytes,
                subject.region,
                super::recovery_point(held)
            ),
            held.dirty_bytes.to_string(),
        ),
        Err(error) => (
            format!(
                "what the disk lacks is not known, since its region cannot be read ({}); it may lack everything that was written last",
                error.line()
            ),
            UNKNOWN.to_owned(),
        ),
    };
    // After a rescue.
    let has_everything = held
        .as_ref()
        .is_ok_and(|held| held.error.is_none() && held.dirty_records == 0 && held.damaged.is_empty());
    if !has_everything && arguments.discard_dirty.as_deref() != Some(&typed) {
        let id = &subject.disk;
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{id} is not complete: {lost}. cbdctrl rescue {} --yes writes it to the disk. To use the disk without it, at the cost of \
                 these bytes, type cbdctrl unseal {id} --discard-dirty {typed}",
                subject.region
            ),
        ));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    rules::unseal_by_hand(folder, &subject.backend, now).map_err(|error| {
        let file = rules::file_of(folder, &subject.backend);
        let text = format!("the rule {} cannot be removed, so the disk stays sealed", file.display());
        Error::new(ErrorKind::System, text).caused_by(error)
    })?;
    let mut warnings = vec![format!(
        "{lost}. The next daemon seals the disk again, and serves it only with backend-start --changed-disk"
    )];
    if let Err(error) = udev::apply(folder, udev::folder_of(&subject.disk).as_deref()) {
        warnings.push(format!(
            "udev was not told ({error}): udevadm control --reload && udevadm trigger {}",
            subject.disk
        ));
    }
    warn(&warnings);
    let dirty_bytes = held.ok().map(|held| held.dirty_bytes);
    output.result(&Unsealed { disk: subject.disk, backend: subject.backend, dirty_bytes }, "")
}

/// The sealed disk that the user names.
fn find(arguments: &UnsealArguments) -> Result<Subject> {
    let folder = &arguments.rules_dir;
    let node = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        Some(found.rdev()).filter(|&number| number != 0)
    };
    let is_it = |subject: &Subject| {
        let by_disk = arguments.disk.as_ref().is_none_or(|disk| {
            let same_node = || node(disk).is_some() && node(disk) == node(Path::new(&subject.disk));
            Path::new(&subject.disk) == disk || same_node()
        });
        let by_backend = arguments.backend.as_ref().is_none_or(|name| {
            *name == subject.number.to_string()
                || Some(name) == subject.name.as_ref()
                || *name == subject.backend
        });
        by_disk && by_backend
    };
    let all = rules::all(folder);
    let found: Vec<&Subject> = all.iter().filter(|subject| is_it(subject)).collect();
    let named = |of: &[&Subject]| {
        let each = of.iter().map(|subject| format!("{} ({})", subject.disk, subject.backend));
        each.collect::<Vec<_>>().join(", ")
    };
    match found.as_slice() {
        [one] => Ok((*one).clone()),
        [] if all.is_empty() => Err(Error::new(
            ErrorKind::NotFound,
            format!("no disk is sealed by a rule in {}", folder.display()),
        )),
        [] => {
            let all: Vec<&Subject> = all.iter().collect();
            Err(Error::new(
                ErrorKind::NotFound,
                format!("that disk is not sealed; sealed are {}", named(&all)),
            ))
        }
        several => {
            let text = format!("several disks are meant: {}; name one by its disk or UUID", named(several));
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

/// Refuses while a daemon answers that has the backend: it would seal the disk again, or holds it.
fn refuse_with_a_daemon(subject: &Subject, socket: &Path) -> Result<()> {
    let client = Client::new(socket).with_timeout(Timeout::Limit(DAEMON_LIMIT));
    let Ok(status) = client.status() else { return Ok(()) };
    let has_it = |uuid: &str| uuid == subject.backend;
    let transports = status.transports.iter();
    let backends = transports.flat_map(|transport| transport.backends.iter());
    if !backends.into_iter().any(|backend| has_it(&backend.info.uuid)) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Busy,
        format!(
            "the daemon (process {}) has the backend of {}: cbdctrl backend-stop -b {} gives the disk back, complete; if that is impossible, \
             with --discard-dirty. To unseal the disk as it is, end the daemon first",
            status.pid, subject.disk, subject.number
        ),
    ))
}

/// What the region holds for the disk.
///
/// # Errors
/// Of opening the region; [`ErrorKind::Foreign`] if the region does not hold the cache of the disk, or it cannot be opened.
pub(crate) fn held(subject: &Subject) -> Result<BackendSummary> {
    let (region, warning) = cbd_inspect::open::to_read(Path::new(&subject.region))?;
    warn(&Vec::from_iter(warning));
    let report = cbd_inspect::check::check(Arc::new(region), DataChecked::None, &mut |_| ());
    let refused = |what: &str| Error::new(ErrorKind::Foreign, what.to_owned());
    let is_it = report.transport.as_ref().is_some_and(|transport| transport.uuid == subject.transport);
    if !is_it {
        return Err(refused("it does not hold the transport of the disk"));
    }
    let found = report.backends.into_iter().find(|backend| backend.backend == subject.number);
    let found = found.ok_or_else(|| refused("it does not hold the backend of the disk"))?;
    match &found.error {
        Some(error) => Err(refused(error)),
        None => Ok(found),
    }
}
