//! The time that the clients of a killed daemon wait, over a region in shared memory with a full cache.
//!
//! Invariants: a new process opens the region, as the next daemon would, so its processor caches are cold. The measured time ends
//! with the answer to the first request of a client.
//!
//! Elsewhere: the time that a service manager takes to start a process.

use crate::options::Options;
use crate::rig::Rig;
use crate::scale::Scale;
use crate::statistics::{Summary, rounded};
use crate::window::Window;
use crate::{Figures, full};
use cbd_device::Device;
use cbd_nbd::{Listen, Options as NbdOptions, Server};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_runtime::ServedDevice;
use cbd_testkit::Client;
use cbd_types::{Error, ErrorKind, Pmem, Result};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the region is opened again.
const TIMES: usize = 5;
/// The folder of the region.
const FOLDER: &str = "/dev/shm";
/// The parts of the time, in order.
const PARTS: [&str; 5] = ["calibrate_ms", "lock_ms", "map_ms", "replay_ms", "exports_ms"];

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine, and of the measured process.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let failed = |error: std::io::Error| Error::new(ErrorKind::System, format!("{FOLDER}: {error}"));
    let folder = tempfile::Builder::new().prefix("cbd-bench-").tempdir_in(FOLDER).map_err(failed)?;
    let region = folder.path().join("region");
    let size = Scale::of(options).restart_region.min(spare_memory() / 2);
    let records = {
        let how = OpenOptions { size: Some(size), create: true, ..OpenOptions::default() };
        full::rig(&Arc::new(Mapping::open(&region, &how)?), size)?.records()
    };
    let runs = (0..TIMES).map(|_| in_a_process(&region)).collect::<Result<Vec<Value>>>()?;
    let median = |name: &str| {
        let taken: Vec<f64> = runs.iter().filter_map(|run| run[name].as_f64()).collect();
        rounded(Summary::of(&taken).median, 1)
    };
    let mut detail = Map::new();
    detail.insert("region_bytes".to_owned(), json!(size));
    detail.insert("records".to_owned(), json!(records));
    detail.insert("times".to_owned(), json!(TIMES));
    for part in PARTS {
        detail.insert(part.to_owned(), json!(median(part)));
    }
    figures.enter("restart");
    figures.add_detailed("serve_ms", median("serve_ms"), detail, None);
    Ok(())
}

/// Bytes of memory that the machine has available for a region.
fn spare_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib << 10)
}

fn in_a_process(region: &Path) -> Result<Value> {
    let failed = |text: String| Error::new(ErrorKind::System, format!("the process that restarts: {text}"));
    let output = Command::new("/proc/self/exe").arg("--restart-of").arg(region).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))
}

/// Opens the region as the next daemon would, until a client has an answer; returns the times of the parts.
///
/// # Errors
/// The errors of the engine and of the export.
pub fn restart(region: &Path) -> Result<Value> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let begun = Instant::now();
    let mapping = Mapping::open(region, &OpenOptions::default())?;
    let (opened, opening) = (begun.elapsed(), mapping.info().opening);
    let length = mapping.len();
    let rig = Rig::reopen(Window::new(Arc::new(mapping), 0, length))?;
    let replayed = begun.elapsed();
    let device = Arc::new(Device::cached(rig.share(), rig.disk().geometry()));
    let served = Arc::new(ServedDevice::new(device, Arc::clone(rig.disk())));
    let socket = region.with_extension("sock");
    let listen = Listen::Unix(socket.clone());
    let server = Server::start(served, listen.clone(), NbdOptions::default())?;
    Client::connect(&listen)?.read(0, &mut [0; 4096])?;
    let answered = begun.elapsed();
    let result = json!({
        "calibrate_ms": ms(opened.saturating_sub(opening.lock + opening.map)),
        "lock_ms": ms(opening.lock),
        "map_ms": ms(opening.map),
        "replay_ms": ms(replayed - opened),
        "exports_ms": ms(answered - replayed),
        "serve_ms": ms(answered),
    });
    drop(server);
    let _ = std::fs::remove_file(socket);
    Ok(result)
}
