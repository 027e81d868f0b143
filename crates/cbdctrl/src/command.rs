//! The commands that ask a daemon.

use crate::cli::Command;
use crate::progress::DrainBar;
use crate::table::Table;
use cbd_daemon::api::{
    BackendInfo, BackendStarted, BlkdevInfo, Done, Drain, ErrorAnswer, ErrorBody, HostInfo,
    RegisterTransport, Settings, StartBackend, StartBlkdev, Status, StopBackend, StopBlkdev, TransportInfo,
    TransportRegistered,
};
use cbd_daemon::client::Client;
use cbd_daemon::settings::parse_changes;
use cbd_daemon::size::format_size;
use cbd_types::{Error, ErrorKind, Result};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

/// Runs `command` against the daemon at `socket`.
pub fn run(command: Command, socket: &Path, json: bool) -> ExitCode {
    let output = Output { json };
    match execute(command, &Client::new(socket), &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
            if json {
                let _ = output.json(&ErrorAnswer { error: ErrorBody::from(&error) });
            }
            ExitCode::FAILURE
        }
    }
}

/// Where results go.
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    pub(crate) fn text(&self, text: &str) -> Result<()> {
        match std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(Error::new(ErrorKind::System, format!("the result cannot be printed: {error}")))
            }
            _ => Ok(()),
        }
    }

    /// JSON with an indent of 4, as the original prints it.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<()> {
        let mut text = Vec::new();
        let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
        value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter)).map_err(
            |error| Error::new(ErrorKind::System, format!("the result cannot be printed: {error}")),
        )?;
        text.push(b'\n');
        self.text(&String::from_utf8_lossy(&text))
    }

    /// A list: a table for people, JSON for programs.
    fn list<T: Serialize>(&self, list: &[T], table: impl FnOnce(&[T]) -> Table) -> Result<()> {
        if self.json || !std::io::stdout().is_terminal() {
            self.json(&list)
        } else {
            self.text(&table(list).render())
        }
    }

    /// The result of a command that has nothing to print for people unless `text` says so.
    fn result(&self, value: &impl Serialize, text: &str) -> Result<()> {
        if self.json { self.json(value) } else { self.text(text) }
    }
}

fn warn(warnings: &[String]) {
    for warning in warnings {
        eprintln!("cbdctrl: warning: {warning}");
    }
}

/// Paths go to the daemon whole: its working folder is not ours.
fn absolute(path: &Path) -> Result<String> {
    let malformed = |text: &str| {
        Error::new(ErrorKind::InvalidArgument, format!("the path \"{}\" {text}", path.display()))
    };
    if path.as_os_str().is_empty() {
        return Err(malformed("is empty"));
    }
    let path = std::path::absolute(path).map_err(|error| malformed(&error.to_string()))?;
    path.to_str().map(str::to_owned).ok_or_else(|| malformed("is not UTF-8"))
}

/// An export at a socket, with a path that means the same to the daemon.
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

fn execute(command: Command, client: &Client, output: &Output) -> Result<()> {
    match command {
        Command::TpReg { host, path, size, segment_size, format, force } => {
            let request =
                RegisterTransport { host, path: absolute(&path)?, size, segment_size, format, force };
            let registered: TransportRegistered = client.post("/v1/transports", &request)?;
            warn(&registered.warnings);
            output.result(&registered, "")
        }
        Command::TpUnreg { transport } => {
            client.delete(&format!("/v1/transports/{transport}"))?;
            output.result(&serde_json::json!({}), "")
        }
        Command::TpList => {
            let list: Vec<TransportInfo> = client.get("/v1/transports")?;
            output.list(&list, transport_table)
        }
        Command::HostList { on } => {
            let list: Vec<HostInfo> = client.get(&format!("/v1/transports/{}/hosts", on.transport))?;
            output.list(&list, host_table)
        }
        Command::BackendStart {
            on,
            path,
            cache_size,
            handlers,
            start_dev,
            export,
            consistency,
            data_crc,
        } => {
            let request = StartBackend {
                path: absolute(&path)?,
                cache_size,
                handlers,
                start_dev,
                export: absolute_export(export)?,
                consistency,
                data_crc,
            };
            let started: BackendStarted =
                client.post(&format!("/v1/transports/{}/backends", on.transport), &request)?;
            warn(&started.warnings);
            let device =
                started.blkdev.as_ref().map_or_else(String::new, |blkdev| format!("{}\n", blkdev.dev_name));
            if let Some(reason) = started.blkdev.as_ref().and_then(|blkdev| blkdev.note.as_ref()) {
                warn(std::slice::from_ref(reason));
            }
            output.result(&started, &device)
        }
        Command::BackendStop { on, backend, force, timeout, discard_dirty } => {
            let path = format!("/v1/transports/{}/backends/{backend}/stop", on.transport);
            long(client, output, &path, &StopBackend { force, timeout_s: timeout, discard_dirty })
        }
        Command::BackendList { on, all } => {
            let list: Vec<BackendInfo> =
                client.get(&format!("/v1/transports/{}/backends?all={all}", on.transport))?;
            output.list(&list, backend_table)
        }
        Command::DevStart { on, backend, export } => {
            let request = StartBlkdev { backend, export: absolute_export(export)? };
            let blkdev: BlkdevInfo =
                client.post(&format!("/v1/transports/{}/blkdevs", on.transport), &request)?;
            warn(blkdev.note.as_slice());
            output.result(&blkdev, &format!("{}\n", blkdev.dev_name))
        }
        Command::DevStop { on, dev, force } => {
            let path = format!("/v1/transports/{}/blkdevs/{dev}/stop", on.transport);
            client.post::<_, ()>(&path, &StopBlkdev { force })?;
            output.result(&serde_json::json!({}), "")
        }
        Command::DevList { on, all } => {
            let list: Vec<BlkdevInfo> =
                client.get(&format!("/v1/transports/{}/blkdevs?all={all}", on.transport))?;
            output.list(&list, blkdev_table)
        }
        Command::Status => {
            let status: Status = client.status()?;
            output.result(&status, &crate::status::page(&status))
        }
        Command::Set { on, backend, changes } => {
            let path = format!("/v1/transports/{}/backends/{backend}/settings", on.transport);
            let settings: Settings = client.patch(&path, &parse_changes(&changes)?)?;
            output.result(&settings, "")
        }
        Command::Checkpoint { on, backend, wait, timeout } => {
            let path = format!("/v1/transports/{}/checkpoint", on.transport);
            long(client, output, &path, &Drain { backend, wait, timeout_s: timeout })
        }
        Command::Drain { on, backend, timeout } => {
            let path = format!("/v1/transports/{}/drain", on.transport);
            long(client, output, &path, &Drain { backend, wait: true, timeout_s: timeout })
        }
        Command::Check(_)
        | Command::Dump(_)
        | Command::Repair(_)
        | Command::Rescue(_)
        | Command::Demo(_)
        | Command::Daemon(_)
        | Command::Keeper
        | Command::Completions { .. }
        | Command::Man { .. } => Err(Error::new(ErrorKind::Unsupported, "this command asks no daemon")),
    }
}

fn long(client: &Client, output: &Output, path: &str, request: &impl Serialize) -> Result<()> {
    let mut bar = DrainBar::default();
    let result: Result<Done> = client.post_long(path, request, |progress| bar.show(progress));
    bar.end();
    let done = result?;
    warn(&done.warnings);
    output.result(&done, "")
}

fn yes(value: bool) -> String {
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

fn host_table(list: &[HostInfo]) -> Table {
    let mut table = Table::new(&["ID", "NAME", "ALIVE"]);
    for it in list {
        table.row(vec![it.host_id.to_string(), it.hostname.clone(), yes(it.alive)]);
    }
    table
}

fn backend_table(list: &[BackendInfo]) -> Table {
    let mut table =
        Table::new(&["ID", "HOST", "ALIVE", "SEGMENTS", "USED", "GC%", "DEVICES", "BACKING DEVICE"]);
    for it in list {
        let devices: Vec<&str> = it.blkdevs.iter().map(|blkdev| blkdev.dev_name.as_str()).collect();
        table.row(vec![
            it.backend_id.to_string(),
            it.host_id.to_string(),
            yes(it.alive),
            it.cache_segs.to_string(),
            it.cache_used_segs.to_string(),
            it.cache_gc_percent.to_string(),
            if devices.is_empty() { "-".to_owned() } else { devices.join(" ") },
            it.error
                .as_ref()
                .map_or_else(|| it.backend_path.clone(), |error| format!("{} ({error})", it.backend_path)),
        ]);
    }
    table
}

fn blkdev_table(list: &[BlkdevInfo]) -> Table {
    let mut table = Table::new(&["ID", "HOST", "BACKEND", "ALIVE", "EXPORT", "DEVICE"]);
    for it in list {
        table.row(vec![
            it.blkdev_id.to_string(),
            it.host_id.to_string(),
            it.backend_id.to_string(),
            yes(it.alive),
            it.way.clone().unwrap_or_else(|| it.export.clone()),
            it.error
                .as_ref()
                .map_or_else(|| it.dev_name.clone(), |error| format!("{} ({error})", it.dev_name)),
        ]);
    }
    table
}
