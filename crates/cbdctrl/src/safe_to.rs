//! `cbdctrl safe-to`: whether the daemon can be removed, restarted, or replaced by an older version. The scripts of packages
//! ask it.
//!
//! Invariants: what cannot be found out is a reason against the plan. Nothing is changed.
//!
//! Elsewhere: the daemon's answers (`cbd-daemon`), reading a region without it (`cbd-inspect`).

use crate::cli::{Plan, SafeToArguments};
use crate::command::Output;
use crate::offline::held;
use cbd_daemon::api::{BackendStatus, BlkdevUser, Status, TransportStatus};
use cbd_daemon::client::{Client, Timeout};
use cbd_daemon::paths::{PathChoices, Paths, default_socket};
use cbd_daemon::seal::look::Known;
use cbd_daemon::seal::rules::{self, Subject};
use cbd_daemon::size::format_size;
use cbd_daemon::state::{StateDir, TransportEntry};
use cbd_format::superblock::{FEATURE_BYPASS, FEATURE_GROWN, FEATURE_SHARED, FEATURE_USE_NOTES};
use cbd_inspect::check::DataChecked;
use cbd_inspect::{BackendSummary, Report};
use cbd_types::{ErrorKind, Result};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// The incompatible features of regions, each with the first version that knows it.
const FEATURES: [(u64, Version); 4] = [
    (FEATURE_USE_NOTES, Version(0, 1, 0)),
    (FEATURE_BYPASS, Version(0, 1, 0)),
    (FEATURE_GROWN, Version(0, 1, 0)),
    (FEATURE_SHARED, Version(0, 1, 0)),
];

/// Timeout for the daemon to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A released version, without what packages append to it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Version(u32, u32, u32);

impl Version {
    /// Reads `[EPOCH:]A.B.C[ANYTHING]`, as packages write it.
    fn parse(text: &str) -> Option<Self> {
        let upstream = text.split_once(':').map_or(text, |(_, rest)| rest);
        let end =
            upstream.find(|byte: char| !(byte.is_ascii_digit() || byte == '.')).unwrap_or(upstream.len());
        let mut numbers = upstream.get(..end)?.split('.').map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Self(next()?, next()?, next()?))
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Runs the command against the daemon at `socket`, or that of the run folder.
pub fn run(arguments: &SafeToArguments, socket: Option<&Path>, json: bool) -> ExitCode {
    let paths = Paths::choose(PathChoices {
        state_dir: arguments.state_dir.clone(),
        run_dir: arguments.run_dir.clone(),
        rules_dir: arguments.rules_dir.clone(),
        socket: socket.map(Path::to_owned).or_else(|| arguments.run_dir.is_none().then(default_socket)),
        ..PathChoices::default()
    });
    if arguments.plan != Plan::Downgrade && arguments.version.is_some() {
        eprintln!("error: only downgrade has a version");
        return ExitCode::from(2);
    }
    let reasons = match arguments.plan {
        Plan::Remove => against_removal(&paths, arguments.stopped),
        Plan::Restart => against_restart(&paths),
        Plan::Downgrade => match arguments.version.as_deref().and_then(Version::parse) {
            Some(version) => against_downgrade(&paths, version),
            None => {
                eprintln!("error: a version has three numbers, such as 0.1.0");
                return ExitCode::from(2);
            }
        },
    };
    let is_safe = reasons.is_empty();
    let text: String = reasons.iter().map(|reason| format!("no: {reason}\n")).collect();
    let text = if is_safe { "yes\n".to_owned() } else { text };
    match (Output { json }).result(&json!({ "safe": is_safe, "reasons": reasons }), &text) {
        Ok(()) if is_safe => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line());
            ExitCode::FAILURE
        }
    }
}

fn client(paths: &Paths) -> Client {
    Client::new(&paths.socket).with_timeout(Timeout::Limit(TIMEOUT))
}

/// The answer of the daemon; none if none runs.
fn asked<T: serde::de::DeserializeOwned>(paths: &Paths, path: &str) -> Result<Option<T>> {
    match client(paths).get(path) {
        Ok(answer) => Ok(Some(answer)),
        // A daemon that does not know the path is there.
        Err(error) if error.kind() == ErrorKind::NotFound && !is_reached(paths) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_reached(paths: &Paths) -> bool {
    client(paths).get::<Vec<serde_json::Value>>("/v1/transports").is_ok()
}

fn against_removal(paths: &Paths, stopped: bool) -> Vec<String> {
    match asked::<Status>(paths, "/v1/status") {
        Ok(Some(status)) if stopped => {
            vec![format!("a daemon still runs (process {}): end it first", status.pid)]
        }
        Ok(Some(status)) => {
            let mut reasons: Vec<String> = status.transports.iter().flat_map(of_transport).collect();
            match client(paths).get::<Vec<BlkdevUser>>("/v1/blkdev-users") {
                Ok(users) => reasons.extend(users.iter().map(of_user)),
                Err(error) => {
                    reasons.push(format!("the users of block devices are not known: {}", error.line()))
                }
            }
            let backends = status.transports.iter().flat_map(|transport| &transport.backends);
            let known = backends.map(|backend| backend.info.uuid.clone()).collect();
            unregistered(paths, known, &mut reasons);
            reasons
        }
        Ok(None) => {
            let mut reasons = of_waiting_devices(&paths.run_dir);
            let mut known = BTreeSet::new();
            reasons.extend(of_state(paths, |entry, report| {
                known.extend(report.backends.iter().map(|backend| backend.uuid.clone()));
                of_report(entry, report, paths)
            }));
            unregistered(paths, known, &mut reasons);
            reasons
        }
        Err(error) => vec![not_answered(&error)],
    }
}

fn not_answered(error: &cbd_types::Error) -> String {
    format!("the daemon does not say what it holds: {}", error.line())
}

fn of_user(user: &BlkdevUser) -> String {
    format!("block device {} is in use: {}; end that first", user.blkdev_id, user.user)
}

fn of_transport(transport: &TransportStatus) -> Vec<String> {
    let id = transport.info.transport_id;
    if let Some(error) = &transport.info.error {
        let path = &transport.info.path;
        return vec![format!(
            "transport {id} ({path}) is not up, and what is dirty in it is not known: {error}; correct that, or tp-unreg -t {id}"
        )];
    }
    transport.backends.iter().filter_map(|backend| of_backend(id, backend)).collect()
}

fn of_backend(transport: u32, backend: &BackendStatus) -> Option<String> {
    let name = format!(
        "backend {} of transport {transport} ({})",
        backend.info.backend_id, backend.info.backend_path
    );
    let number = backend.info.backend_id;
    let stop = format!("cbdctrl backend-stop -t {transport} -b {number} writes it to the disk");
    let advice = match &backend.info.error {
        // That has the commands for a disk that was written without its cache.
        Some(error) if !backend.info.alive => {
            format!("it is not served, so correct that first ({error}); then {stop}")
        }
        _ => stop,
    };
    let (dirty, quarantined) = match (&backend.cache, &backend.held) {
        (Some(cache), _) => (cache.dirty_bytes, cache.quarantined_bytes),
        (None, Some(held)) if held.dirty_bytes == 0 && held.dirty_records > 0 => {
            return Some(format!("{name} has {} dirty records; {advice}", held.dirty_records));
        }
        (None, Some(held)) => (held.dirty_bytes, held.quarantined_bytes),
        (None, None) if backend.info.cache_segs == 0 => return None,
        (None, None) => {
            let why = backend.held_error.as_deref().unwrap_or("its cache was not examined yet");
            return Some(format!("{name} is not up, and what is dirty in its cache is not known: {why}"));
        }
    };
    of_bytes(&name, dirty, quarantined, &advice)
}

fn of_bytes(name: &str, dirty: u64, quarantined: u64, advice: &str) -> Option<String> {
    match (dirty, quarantined) {
        (0, 0) => None,
        (0, lost) => Some(format!(
            "{name} has ranges that are damaged in its cache, {}, and the disk has older data there; see \
             QUARANTINED in cbdctrl status",
            format_size(lost)
        )),
        (dirty, _) => Some(format!("{name} has {} dirty ({dirty} bytes); {advice}", format_size(dirty))),
    }
}

/// What the registered regions say while no daemon runs.
fn of_state(paths: &Paths, mut look: impl FnMut(&TransportEntry, &Report) -> Vec<String>) -> Vec<String> {
    if !paths.state_dir.exists() {
        return Vec::new();
    }
    let registered = match StateDir::open(&paths.state_dir).and_then(|state| state.transports()) {
        Ok(registered) => registered,
        Err(error) => return vec![format!("the registered regions are not known: {}", error.line())],
    };
    let of_entry = |entry: &TransportEntry| match cbd_inspect::open::to_read(Path::new(&entry.path)) {
        Ok((reader, _)) => {
            look(entry, &cbd_inspect::check::check(Arc::new(reader), DataChecked::Dirty, &mut |_| {}))
        }
        Err(error) => vec![format!(
            "what is dirty in {} is not known: {}; correct that, or start the daemon and tp-unreg -t {}",
            entry.path,
            error.line(),
            entry.transport_id
        )],
    };
    registered.iter().flat_map(of_entry).collect()
}

fn of_report(entry: &TransportEntry, report: &Report, paths: &Paths) -> Vec<String> {
    let Some(transport) = &report.transport else {
        return vec![format!("{} cannot be opened (cbdctrl check reports why)", entry.path)];
    };
    if transport.uuid != entry.uuid {
        return vec![format!(
            "{} is not the region that was registered, which may have dirty data",
            entry.path
        )];
    }
    report.backends.iter().filter_map(|backend| of_summary(&entry.path, backend, paths)).collect()
}

fn of_summary(region: &str, backend: &BackendSummary, paths: &Paths) -> Option<String> {
    let name = format!("backend {} of {region} ({})", backend.backend, backend.path);
    if let Some(error) = &backend.error {
        return Some(format!("{name} cannot be opened: {error}"));
    }
    let quarantined = backend.damaged.iter().map(|range| range.bytes).sum();
    let known = Known::of(&paths.state_dir, paths.rules_dir.as_deref(), &backend.uuid);
    let advice = if known.is_changed() {
        "its disk was written without its cache: if the region is right, use cbdctrl rescue --changed-disk; if the disk is right, \
         start the daemon and cbdctrl backend-stop --discard-dirty"
    } else {
        "start the daemon and cbdctrl backend-stop it, or use cbdctrl rescue"
    };
    match of_bytes(&name, backend.dirty_bytes, quarantined, advice) {
        None if backend.dirty_records > 0 => {
            Some(format!("{name} has {} dirty records; {advice}", backend.dirty_records))
        }
        reason => reason,
    }
}

/// Adds reasons for cached disks that are in no registered region: another daemon has them, or the list of regions was lost.
/// `known` are the backends of registered regions.
fn unregistered(paths: &Paths, mut known: BTreeSet<String>, reasons: &mut Vec<String>) {
    for file in paths.rules_dir.iter().flat_map(|folder| rules::files(folder)) {
        let Some(subject) = rules::read(&file) else {
            reasons.push(format!(
                "{} seals a disk and cannot be read, so its region is not known",
                file.display()
            ));
            continue;
        };
        if known.insert(subject.backend.clone()) {
            reasons.extend(of_sealed(&subject, paths));
        }
    }
    // What cannot be read has backends that are not known here.
    if !reasons.is_empty() {
        return;
    }
    let folder = paths.state_dir.join("disks");
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
        Err(error) => {
            reasons.push(format!(
                "the cached disks are not known: {} cannot be read: {error}",
                folder.display()
            ));
            return;
        }
    };
    for file in entries.flatten().map(|entry| entry.path()) {
        let uuid = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if file.extension().is_some_and(|extension| extension == "json") && !known.contains(&uuid) {
            reasons.push(format!(
                "{} is of a cached disk whose region is not registered, so what is dirty there is not known: register the region with \
                 tp-reg; if its data is not needed, remove that file",
                file.display()
            ));
        }
    }
}

/// Why a sealed disk, whose region is not registered, is a reason; none if its region has nothing that the disk lacks.
fn of_sealed(subject: &Subject, paths: &Paths) -> Option<String> {
    match held(subject) {
        Ok(backend) => of_summary(&subject.region, &backend, paths),
        Err(error) => Some(format!(
            "{} is sealed by a daemon with the state folder {}, and what is dirty in its region {} is not known: {}; correct that, or \
             cbdctrl unseal {}",
            subject.disk,
            subject.state_dir,
            subject.region,
            error.line(),
            subject.disk
        )),
    }
}

/// The kernel devices that wait for a daemon: their users would wait for ever.
fn of_waiting_devices(run_dir: &Path) -> Vec<String> {
    let waits = |what: String| format!("{what} waits for a daemon: start it, and end its users");
    let mut reasons = Vec::new();
    let folder = run_dir.join("fuse");
    match cbd_sys::mounts::list() {
        Ok(mounts) => reasons.extend(
            mounts
                .into_iter()
                .filter(|mount| mount.target.starts_with(&folder))
                .map(|mount| waits(format!("the device at {}", mount.target.display()))),
        ),
        Err(error) => reasons.push(format!("the mounts are not known: {error}")),
    }
    for entry in std::fs::read_dir(run_dir.join("ublk")).into_iter().flatten().flatten() {
        if Path::new("/sys/block").join(entry.file_name()).exists() {
            reasons.push(waits(entry.file_name().to_string_lossy().into_owned()));
        }
    }
    reasons
}

fn against_restart(paths: &Paths) -> Vec<String> {
    match asked::<Vec<BlkdevUser>>(paths, "/v1/blkdev-users") {
        Ok(users) => {
            let ends = |user: &&BlkdevUser| !user.outlives_daemon;
            let users = users.iter().flatten().filter(ends);
            users.map(|user| format!("users of {} would see errors: {}", user.dev_name, user.user)).collect()
        }
        Err(error) => vec![format!("the users of block devices are not known: {}", error.line())],
    }
}

fn against_downgrade(paths: &Paths, version: Version) -> Vec<String> {
    match asked::<Status>(paths, "/v1/status") {
        Ok(Some(status)) => {
            let of_transport = |transport: &TransportStatus| {
                let (path, info) = (&transport.info.path, &transport.info);
                let digits = info.flags.trim_start_matches("0x");
                match u64::from_str_radix(digits, 16) {
                    Ok(features) if info.error.is_none() => of_features(path, features, version),
                    _ => Some(format!("the features of {path} are not known: it is not up")),
                }
            };
            status.transports.iter().filter_map(of_transport).collect()
        }
        Ok(None) => of_state(paths, |entry, report| match &report.transport {
            Some(transport) => of_features(&entry.path, transport.features, version).into_iter().collect(),
            None => vec![format!("{} cannot be opened (cbdctrl check reports why)", entry.path)],
        }),
        Err(error) => vec![not_answered(&error)],
    }
}

/// Why `version` would refuse a region with these features.
fn of_features(path: &str, features: u64, version: Version) -> Option<String> {
    let unknown = (0..u64::BITS).filter(|bit| features & (1 << bit) != 0).find_map(|bit| {
        match FEATURES.iter().find(|(feature, _)| *feature == 1 << bit) {
            Some((_, since)) if version >= *since => None,
            Some((_, since)) => Some(format!("feature {bit}, which version {since} brought")),
            None => Some(format!("feature {bit}")),
        }
    })?;
    Some(format!(
        "version {version} would refuse {path}, which uses {unknown}; before the downgrade, backend-stop its \
         backends and tp-unreg it"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_has_a_version_that_is_not_newer_than_this() {
        let known = FEATURES.iter().fold(0, |known, (feature, _)| known | feature);
        assert_eq!(known, cbd_format::superblock::INCOMPATIBLE_KNOWN);
        let own = Version::parse(env!("CARGO_PKG_VERSION")).expect("three numbers");
        assert!(FEATURES.iter().all(|(_, since)| *since <= own));
    }

    #[test]
    fn versions_of_packages_are_read() {
        for text in ["1.2.3", "1.2.3-1", "1.2.3~git20261128.abc", "2:1.2.3+b1", "1.2.3.4"] {
            assert_eq!(Version::parse(text), Some(Version(1, 2, 3)), "{text}");
        }
        for text in ["", "1.2", "a.b.c", "1..3", "~1.2.3", "99999999999.0.0"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
        assert!(Version(0, 10, 0) > Version(0, 9, 9));
    }

    #[test]
    fn a_version_that_lacks_a_feature_in_use_is_named() {
        assert_eq!(of_features("/r", 0, Version(0, 0, 1)), None);
        assert_eq!(of_features("/r", FEATURE_GROWN, Version(0, 1, 0)), None);
        let text = of_features("/r", FEATURE_GROWN, Version(0, 0, 9)).expect("a reason");
        assert!(
            text.contains("0.0.9 would refuse /r") && text.contains("feature 2, which version 0.1.0"),
            "{text}"
        );
        let text = of_features("/r", 1 << 40, Version(9, 0, 0)).expect("a reason");
        assert!(text.contains("feature 40;"), "{text}");
    }

    #[test]
    fn without_a_state_folder_nothing_is_known_to_be_dirty() {
        let folder = tempfile::tempdir().expect("a folder");
        let paths = Paths::choose(PathChoices {
            state_dir: Some(folder.path().join("none")),
            run_dir: Some(folder.path().join("run")),
            ..PathChoices::default()
        });
        assert_eq!(against_removal(&paths, true), Vec::<String>::new());
        assert!(!folder.path().join("none").exists());
    }

    #[test]
    fn a_damaged_list_of_regions_is_a_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("transports.json"), "{").expect("a file");
        let paths = Paths::choose(PathChoices {
            state_dir: Some(folder.path().to_owned()),
            run_dir: Some(folder.path().join("run")),
            ..PathChoices::default()
        });
        let reasons = against_removal(&paths, false);
        assert!(reasons.len() == 1 && reasons[0].contains("is damaged"), "{reasons:?}");
        assert_eq!(against_downgrade(&paths, Version(0, 1, 0)).len(), 1);
    }
}
