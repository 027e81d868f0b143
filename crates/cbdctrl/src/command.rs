//! The commands that send requests to a daemon.

use crate::cli::{CheckpointArguments, Command, LiveCommand, RequestTimeout};
use crate::hosts;
use crate::progress::{self, DrainBar};
use crate::table::{Table, fit, terminal_width};
use cbd_daemon::api::{
    BackendInfo, BackendStarted, BlkdevInfo, BlkdevStopped, CacheMode, CommonCheckpoint, Done, Drain,
    ErrorAnswer, ErrorBody, NumberOrName, RegisterTransport, SettingsChanged, StartBackend, StartBlkdev,
    Status, StopBackend, StopBlkdev, TransportInfo, TransportRegistered,
};
use cbd_daemon::client::{Client, Timeout};
use cbd_daemon::settings::{parse_blkdev_changes, parse_changes};
use cbd_daemon::size::{format_size, format_time, typed_size};
use cbd_types::{Error, ErrorKind, Result};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// The time between two questions whether a mode is in force.
const MODE_POLL: Duration = Duration::from_millis(200);

/// Runs `command` against the daemon at `socket`.
pub fn run(command: Command, socket: &Path, json: bool) -> ExitCode {
    let output = Output { json };
    let client = Client::new(socket);
    if let Command::Live(LiveCommand::Scrub(arguments)) = &command {
        return crate::scrub::run(arguments, &client, &output);
    }
    if let Command::Events(arguments) = &command {
        return crate::events::run(arguments, &client, &output);
    }
    let result = execute(command, &client, &output);
    progress::end_waiting();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error, &output),
    }
}

/// One line on standard error and, with `--json`, the error in JSON.
pub(crate) fn failed(error: &Error, output: &Output) -> ExitCode {
    // The terminal may have gone.
    let _ = writeln!(std::io::stderr(), "cbdctrl: {}", error.line().replace('\n', " "));
    if output.json {
        let _ = output.json(&ErrorAnswer { error: ErrorBody::from(error) });
    }
    ExitCode::FAILURE
}

/// The format and destination of results.
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    pub(crate) fn text(&self, text: &str) -> Result<()> {
        match std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(Error::new(ErrorKind::System, "the result cannot be printed").caused_by(error))
            }
            _ => Ok(()),
        }
    }

    /// JSON with an indent of 4, as the original `cbdctrl` prints it.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<()> {
        let mut text = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter)).map_err(
            |error| Error::new(ErrorKind::System, "the result cannot be printed").caused_by(error),
        )?;
        text.push(b'\n');
        self.text(&String::from_utf8_lossy(&text))
    }

    /// A list: a table for people, JSON for programs.
    pub(crate) fn list<T: Serialize>(&self, list: &[T], table: impl FnOnce(&[T]) -> Table) -> Result<()> {
        match terminal_width() {
            Some(width) if !self.json => self.text(&table(list).render(width)),
            _ => self.json(&list),
        }
    }

    /// The result of a command: `text` for people, `value` for programs.
    pub(crate) fn result(&self, value: &impl Serialize, text: &str) -> Result<()> {
        if self.json { self.json(value) } else { self.text(text) }
    }
}

pub(crate) fn warn(warnings: &[String]) {
    for warning in warnings {
        eprintln!("cbdctrl: warning: {warning}");
    }
}

/// Makes a path absolute: the daemon has another working folder.
pub(crate) fn absolute(path: &Path) -> Result<String> {
    let malformed = |text: &str| {
        Error::new(ErrorKind::InvalidArgument, format!("the path \"{}\" {text}", path.display()))
    };
    if path.as_os_str().is_empty() {
        return Err(malformed("is empty"));
    }
    let path = std::path::absolute(path).map_err(|error| malformed(&error.to_string()))?;
    path.to_str().map(str::to_owned).ok_or_else(|| malformed("is not UTF-8"))
}

/// The requested export; with `require_kernel` one that is never NBD.
fn chosen_export(export: Option<String>, require_kernel: bool) -> Result<Option<String>> {
    match export.as_deref() {
        _ if !require_kernel => absolute_export(export),
        None | Some("auto") => Ok(Some("kernel".to_owned())),
        Some("kernel" | "ublk" | "fuse-loop") => Ok(export),
        Some(other) => Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("\"{other}\" makes no kernel block device: leave --require-kernel out, or --export"),
        )),
    }
}

/// Makes the path of an export's socket absolute.
fn absolute_export(export: Option<String>) -> Result<Option<String>> {
    for kind in ["nbd:unix:", "vhost-user:"] {
        match export.as_deref().and_then(|text| text.strip_prefix(kind)) {
            Some(path) if !path.is_empty() => {
                return Ok(Some(format!("{kind}{}", absolute(Path::new(path))?)));
            }
            _ => {}
        }
    }
    Ok(export)
}

/// The client for a query, which has a timeout.
fn limited(client: &Client, request: RequestTimeout) -> Client {
    client.clone().with_timeout(Timeout::Limit(Duration::from_secs(request.timeout)))
}

/// Executes a command. A long operation has no timeout while the daemon is alive; the terminal shows that it continues.
fn execute(command: Command, plain: &Client, output: &Output) -> Result<()> {
    let client = &plain.clone().with_waiting_callback(progress::waiting);
    match command {
        Command::TpReg { host, path, size, segment_size, format, force, shared } => {
            let path = absolute(&path)?;
            let request = RegisterTransport { host, path, size, segment_size, format, force, shared };
            let registered: TransportRegistered = client.post("/v1/transports", &request)?;
            warn(&registered.warnings);
            output.result(&registered, "")
        }
        Command::TpUnreg { transport } => {
            client.delete(&format!("/v1/transports/{transport}"))?;
            output.result(&serde_json::json!({}), "")
        }
        Command::TpList { request } => {
            output.list(&limited(client, request).get::<Vec<_>>("/v1/transports")?, transport_table)
        }
        Command::HostList { on, request } => hosts::list(&limited(client, request), on.transport, output),
        Command::HostClear { on, host, discard_dirty } => {
            hosts::clear(client, (on.transport, host), discard_dirty, output)
        }
        Command::BackendStart {
            on,
            path,
            cache_size,
            weight,
            handlers,
            start_dev,
            export,
            require_kernel,
            allow_remote,
            consistency,
            cache_mode,
            data_crc,
            older_region,
            changed_disk,
            name,
            recovery_point_max_age,
        } => {
            let request = StartBackend {
                path: absolute(&path)?,
                cache_size: cache_size.map(|size| size.bytes),
                cache_max: cache_size.and_then(|size| size.max),
                weight,
                handlers,
                start_dev,
                export: chosen_export(export, require_kernel)?,
                allow_remote,
                consistency,
                cache_mode,
                data_crc,
                older_region,
                changed_disk,
                name,
                recovery_point_max_age_s: recovery_point_max_age,
            };
            let started: BackendStarted =
                client.post(&format!("/v1/transports/{}/backends", on.transport), &request)?;
            print_started(output, &started)
        }
        Command::BackendStop { on, backend, force, timeout, discard_dirty, verify } => {
            let path = format!("/v1/transports/{}/backends/{backend}/stop", on.transport);
            long(plain, output, &path, &StopBackend { force, timeout_s: timeout, discard_dirty, verify })
        }
        Command::BackendList { on, all, request } => {
            let path = format!("/v1/transports/{}/backends?all={all}", on.transport);
            let list: Vec<BackendInfo> = limited(client, request).get(&path)?;
            output.list(&list, backend_table)
        }
        Command::Live(command) => crate::live::execute(command, plain, output),
        Command::DevStart { on, backend, export, allow_remote, require_kernel, name, shared } => {
            let export = chosen_export(export, require_kernel)?;
            let request = StartBlkdev { backend, export, allow_remote, name, shared };
            let blkdev: BlkdevInfo =
                client.post(&format!("/v1/transports/{}/blkdevs", on.transport), &request)?;
            warn(blkdev.note.as_slice());
            output.result(&blkdev, &format!("{}\n", blkdev.dev_name))
        }
        Command::DevStop { on, dev, force } => {
            let path = format!("/v1/transports/{}/blkdevs/{dev}/stop", on.transport);
            stop_blkdev(client, output, &path, &StopBlkdev { force })
        }
        Command::DevList { on, all, request } => {
            let path = format!("/v1/transports/{}/blkdevs?all={all}", on.transport);
            let list: Vec<BlkdevInfo> = limited(client, request).get(&path)?;
            output.list(&list, blkdev_table)
        }
        Command::Status { transport, backend, request } => {
            let status: Status = limited(client, request).get(&status_path(transport, backend.as_ref()))?;
            output.result(&status, &fit(&crate::status::page(&status)))
        }
        Command::Set { on, backend, dev, changes, no_wait } => match (backend, dev) {
            (Some(backend), _) => {
                output.result(&set(client, on.transport, &backend, &changes, !no_wait)?, "")
            }
            (None, dev) => set_blkdev(client, output, on.transport, dev.as_ref(), &changes),
        },
        Command::Checkpoint(arguments) => checkpoint(plain, output, arguments),
        Command::Drain { on, backend, timeout, verify } => {
            let path = format!("/v1/transports/{}/drain", on.transport);
            long(plain, output, &path, &Drain { backend, wait: true, timeout_s: timeout, verify })
        }
        // The others are executed by their own modules (lib.rs).
        _ => Err(Error::new(ErrorKind::Unsupported, "this command asks no daemon")),
    }
}

/// Prints the block device of a backend that was started, and warnings.
fn print_started(output: &Output, started: &BackendStarted) -> Result<()> {
    warn(&started.warnings);
    let device = started.blkdev.as_ref().map_or_else(String::new, |blkdev| format!("{}\n", blkdev.dev_name));
    if let Some(reason) = started.blkdev.as_ref().and_then(|blkdev| blkdev.note.as_ref()) {
        warn(std::slice::from_ref(reason));
    }
    output.result(&started, &device)
}

/// The path of the part of the status that the user asks for.
pub(crate) fn status_path(transport: Option<u32>, backend: Option<&NumberOrName>) -> String {
    let transport = transport.map(|transport| format!("transport={transport}"));
    let backend = backend.map(|backend| format!("backend={backend}"));
    let query: Vec<String> = transport.into_iter().chain(backend).collect();
    format!("/v1/status?{}", query.join("&"))
}

/// Changes a block device.
fn set_blkdev(
    client: &Client,
    output: &Output,
    transport: u32,
    dev: Option<&NumberOrName>,
    changes: &[String],
) -> Result<()> {
    let change = parse_blkdev_changes(changes)?;
    // The definitions of the options demand one of both.
    let dev = dev.ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, "name a backend (-b) or a block device (-d)")
    })?;
    let blkdev: BlkdevInfo =
        client.patch(&format!("/v1/transports/{transport}/blkdevs/{dev}/settings"), &change)?;
    warn(blkdev.note.as_slice());
    output.result(&blkdev, "")
}

fn stop_blkdev(client: &Client, output: &Output, path: &str, request: &StopBlkdev) -> Result<()> {
    // A daemon of an earlier version answers with null.
    let done: Option<BlkdevStopped> = client.post(path, request)?;
    let done = done.unwrap_or_default();
    warn(&done.warnings);
    output.result(&done, "")
}

fn checkpoint(client: &Client, output: &Output, arguments: CheckpointArguments) -> Result<()> {
    let CheckpointArguments { on, backend, wait, together, hold, timeout } = arguments;
    if together {
        let request = CommonCheckpoint { backends: backend, hold_s: hold, timeout_s: timeout };
        return checkpoint_together(client, output, on.transport, &request);
    }
    let path = format!("/v1/transports/{}/checkpoint", on.transport);
    long(client, output, &path, &Drain { backend: only(&backend)?, wait, timeout_s: timeout, verify: false })
}

/// The one backend of a checkpoint that is not of several together.
fn only(backends: &[NumberOrName]) -> Result<Option<NumberOrName>> {
    match backends {
        [] => Ok(None),
        [backend] => Ok(Some(backend.clone())),
        _ => {
            let text = "several backends have a checkpoint of their own each: give --together for one at a common moment, or one \
                        backend at a time";
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
    }
}

/// Brings the disks of several backends to a common moment, and says how long they stay there.
fn checkpoint_together(
    client: &Client,
    output: &Output,
    transport: u32,
    request: &CommonCheckpoint<NumberOrName>,
) -> Result<()> {
    let path = format!("/v1/transports/{transport}/checkpoint-together");
    let mut bar = DrainBar::default();
    let result: Result<Done> = client.post_long(&path, request, |progress| bar.show(progress));
    bar.end();
    let done = result?;
    warn(&done.warnings);
    let moment = done.moment.unwrap_or_default();
    let on = if transport == 0 { String::new() } else { format!(" -t {transport}") };
    let mut text = format!(
        "the disks are at {}: everything that had completed before is there, and nothing that depends on later writes\n\
         they stay so until {}; to end that earlier:\n",
        format_time(moment.at_ms),
        format_time(moment.held_until_ms)
    );
    for backend in &request.backends {
        text.push_str(&format!("  cbdctrl set{on} -b {backend} writeback=on\n"));
    }
    output.result(&done, &text)
}

pub(crate) fn long(client: &Client, output: &Output, path: &str, request: &impl Serialize) -> Result<()> {
    let mut bar = DrainBar::default();
    let result: Result<Done> = client.post_long(path, request, |progress| bar.show(progress));
    bar.end();
    let done = result?;
    warn(&done.warnings);
    output.result(&done, "")
}

/// Changes settings of a backend; waits until a new mode is in force, if `waits`.
fn set(
    client: &Client,
    transport: u32,
    backend: &NumberOrName,
    changes: &[String],
    waits: bool,
) -> Result<SettingsChanged> {
    let change = parse_changes(changes)?;
    let path = format!("/v1/transports/{transport}/backends/{backend}/settings");
    let changed: SettingsChanged = client.patch(&path, &change)?;
    if let Some(mode) = change.cache_mode.filter(|_| waits) {
        wait_for_mode(client, transport, changed.backend_id, mode)?;
    }
    Ok(changed)
}

/// Waits until the mode of a backend is in force, and says what is written to the backing device before.
fn wait_for_mode(client: &Client, transport: u32, backend: u32, mode: CacheMode) -> Result<()> {
    let wanted = mode.name();
    let mut shown = false;
    loop {
        let status = client.status()?;
        let transports = status.transports.iter().filter(|known| known.info.transport_id == transport);
        let mut backends = transports.flat_map(|known| &known.backends);
        let cache =
            backends.find(|known| known.info.backend_id == backend).and_then(|known| known.cache.as_ref());
        let cache = cache.ok_or_else(|| {
            let text =
                format!("backend {backend} is not served any more; it is not known whether {wanted} was in force before");
            Error::new(ErrorKind::Stopped, text)
        })?;
        if cache.settings.cache_mode != mode {
            let now = cache.settings.cache_mode.name();
            let text = format!("another command has set cache_mode={now} before {wanted} was in force");
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        if !cache.is_changing_mode {
            return Ok(());
        }
        if !shown {
            shown = true;
            eprintln!(
                "cbdctrl: writing {} of dirty data to the backing device before {wanted} is in force; interrupting this command \
                 does not stop the change, cache_mode=writeback does",
                format_size(cache.dirty_bytes)
            );
        }
        if let Some(error) = &cache.last_error {
            return Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "the backing device fails ({error}): {wanted} is in force when it has taken what is dirty; \
                     cache_mode=writeback cancels the change"
                ),
            ));
        }
        let kept = cache.parked.len() + cache.quarantined.len();
        if kept > 0 {
            return Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "{kept} ranges are parked or quarantined (status lists them): {wanted} is in force when the backing device has \
                     taken them, or they are overwritten; cache_mode=writeback cancels the change"
                ),
            ));
        }
        std::thread::sleep(MODE_POLL);
    }
}

pub(crate) fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

fn transport_table(list: &[TransportInfo]) -> Table {
    let mut table =
        Table::new(&["ID", "HOST", "ALIVE", "SEGMENT", "SEGMENTS", "FREE", "DURABILITY", "REGION"]);
    for it in list {
        table.row(vec![
            it.transport_id.to_string(),
            format!("{} ({})", it.host_id, it.host),
            yes(it.alive),
            format_size(it.bytes_per_segment),
            it.segment_num.to_string(),
            it.free_segments.to_string(),
            it.durability.clone(),
            it.error.as_ref().map_or_else(|| it.path.clone(), |error| format!("{} ({error})", it.path)),
        ]);
    }
    table
}

fn backend_table(list: &[BackendInfo]) -> Table {
    let one_host = list.windows(2).all(|pair| pair[0].host_id == pair[1].host_id);
    let no_names = list.iter().all(|it| it.name.is_none());
    let shares = list.iter().any(|it| it.cache_max.is_some());
    let mut heads = vec![
        "ID",
        "NAME",
        "HOST",
        "STATE",
        "SIZE",
        "CACHE USED",
        "SHARE",
        "DIRTY",
        "DEVICES",
        "BACKING DEVICE",
    ];
    let is_left_out = |head: &str| {
        (one_host && head == "HOST") || (no_names && head == "NAME") || (!shares && head == "SHARE")
    };
    let shown: Vec<bool> = heads.iter().map(|head| !is_left_out(head)).collect();
    heads.retain(|head| !is_left_out(head));
    let mut table = Table::new(&heads);
    for it in list {
        let devices: Vec<&str> = it.blkdevs.iter().map(|blkdev| blkdev.dev_name.as_str()).collect();
        let used = match it.cache_segs {
            0 => "no cache".to_owned(),
            segments if it.alive => format!("{} %", it.cache_used_segs * 100 / segments),
            _ => "?".to_owned(),
        };
        let dirty = match it.dirty_bytes {
            Some(bytes) => format_size(bytes),
            None if it.cache_segs == 0 => "-".to_owned(),
            None => "?".to_owned(),
        };
        let path = &it.backend_path;
        let cells = vec![
            it.backend_id.to_string(),
            shown_name(it.name.as_ref()),
            it.host_id.to_string(),
            it.state.clone(),
            format_size(it.size),
            used,
            share(it),
            dirty,
            if devices.is_empty() { "-".to_owned() } else { devices.join(" ") },
            it.error.as_ref().map_or_else(|| path.clone(), |error| format!("{path} ({error})")),
        ];
        table.row(cells.into_iter().zip(&shown).filter_map(|(cell, shown)| shown.then_some(cell)).collect());
    }
    table
}

/// The size of a cache that shares space, and its bounds.
fn share(backend: &BackendInfo) -> String {
    match (backend.cache_min, backend.cache_max) {
        (Some(min), Some(max)) => {
            format!("{} of {}..{}", format_size(backend.cache_size), typed_size(min), typed_size(max))
        }
        _ => "-".to_owned(),
    }
}

fn blkdev_table(list: &[BlkdevInfo]) -> Table {
    let no_names = list.iter().all(|it| it.name.is_none());
    let mut heads = vec!["ID", "NAME", "HOST", "BACKEND", "ALIVE", "DEVICE", "EXPORT"];
    heads.retain(|head| !(no_names && *head == "NAME"));
    let mut table = Table::new(&heads);
    for it in list {
        let method = it.method.as_ref().unwrap_or(&it.export);
        let mut cells = vec![
            it.blkdev_id.to_string(),
            shown_name(it.name.as_ref()),
            it.host_id.to_string(),
            it.backend_id.to_string(),
            yes(it.alive),
            it.dev_name.clone(),
            it.error
                .as_ref()
                .or(it.note.as_ref())
                .map_or_else(|| method.clone(), |text| format!("{method} ({text})")),
        ];
        if no_names {
            cells.remove(1);
        }
        table.row(cells);
    }
    table
}

fn shown_name(name: Option<&String>) -> String {
    name.cloned().unwrap_or_else(|| "-".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_backends_has_size_dirty_bytes_and_state_on_80_columns() {
        let backend = |error: Option<&str>| {
            let state = if error.is_none() { "serving" } else { "NOT SERVED" };
            let device = serde_json::json!({
                "blkdev_id": 0, "host_id": 0, "backend_id": 11, "dev_name": "/dev/cbd0", "alive": true, "export": "auto",
            });
            let backend = serde_json::json!({
                "backend_id": 11, "host_id": 0, "backend_path": "/dev/disk/by-id/wwn-0x5000c500a1b2c3d4", "alive": error.is_none(),
                "cache_segs": 256, "cache_gc_percent": 90, "cache_used_segs": 192, "size": 3_u64 << 40,
                "dirty_bytes": error.is_none().then_some(12 << 20), "state": state, "blkdevs": [device], "error": error,
            });
            serde_json::from_value::<BackendInfo>(backend).expect("a backend")
        };
        let text =
            backend_table(&[backend(None), backend(Some("the disk does not exist any more"))]).render(80);
        for part in ["STATE", "serving", "NOT SERVED", "3 TiB", "75 %", "12 MiB", "?", "/dev/cbd0"] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!(!text.contains("HOST"), "there is one host:\n{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_list_of_block_devices_has_the_error_of_each_or_its_note() {
        let shown = |error: Option<&str>, note: Option<&str>| {
            let device = serde_json::json!({
                "blkdev_id": 0, "host_id": 0, "backend_id": 0, "dev_name": "/dev/cbd0", "alive": true, "export": "auto",
                "method": "NBD", "error": error, "note": note,
            });
            let list: Vec<BlkdevInfo> =
                serde_json::from_value(serde_json::json!([device])).expect("a device");
            blkdev_table(&list).render(200)
        };
        assert!(shown(None, None).trim_end().ends_with("NBD"));
        assert!(shown(None, Some("/run/s was removed")).contains("NBD (/run/s was removed)"));
        let both = shown(Some("it does not start"), Some("/run/s was removed"));
        assert!(both.contains("NBD (it does not start)") && !both.contains("removed"), "{both}");
    }
}
