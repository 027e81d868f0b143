//! The memory of a daemon after mixed requests on two devices, and after all of them are stopped.
//!
//! Invariants: the measured program is the `cbdctrl` in the directory of this program, as a user runs it. However the measurement
//! ends, the daemon is ended and its files are removed. The figure is the resident anonymous memory, which does not include the
//! region.

use crate::options::Options;
use crate::{Figures, rounded};
use cbd_types::{AlignedBuffer, Error, ErrorKind, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const DEVICES: usize = 2;
/// Requests in flight on each device.
const DEPTH: u64 = 32;
/// Requests are powers of two from 4 KiB to 1 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 12..=20;
/// Time between the last request and the measurement.
const REST: Duration = Duration::from_secs(3);
/// A daemon that takes longer to start or to end has failed.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the measurement, or reports why it is not possible.
///
/// # Errors
/// The errors of the system.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    figures.enter("daemon");
    let (cache, seconds) = if options.quick { (128 * MIB, 2) } else { (1024 * MIB, 20) };
    let mut daemon = match Daemon::start(cache) {
        Ok(daemon) => daemon,
        Err(error) => {
            figures.add("not_measured", error.line());
            return Ok(());
        }
    };
    let before = daemon.anonymous_bytes()?;
    daemon.load(Duration::from_secs(seconds))?;
    // Threads free the memory that they keep for further requests after a second without one.
    std::thread::sleep(REST);
    let (after, index) = (daemon.anonymous_bytes()?, daemon.index_bytes()?);
    daemon.stop_all()?;
    let stopped = daemon.anonymous_bytes()?;

    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let mut detail = Map::new();
    let absolute = format!("{:.1} MiB, of which the index has {:.1} MiB", mib(after), mib(index));
    detail.insert("absolute".to_owned(), json!(absolute));
    detail.insert("before_mib".to_owned(), json!(rounded(mib(before), 1)));
    detail.insert("cache_bytes".to_owned(), json!(cache));
    detail.insert("devices".to_owned(), json!(DEVICES));
    let over = rounded(mib(after.saturating_sub(index)), 1);
    figures.add_detailed("rss_over_index_mib", over, detail, None);
    figures.add("rss_after_stop_mib", rounded(mib(stopped), 1));
    Ok(())
}

fn failed(what: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::System, format!("{what}: {error}"))
}

/// A daemon with two cached devices.
struct Daemon {
    program: PathBuf,
    folder: tempfile::TempDir,
    process: Child,
    devices: Vec<PathBuf>,
    device_bytes: u64,
}

impl Daemon {
    fn start(cache: u64) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|error| failed("where this program is", &error))?
            .with_file_name("cbdctrl");
        if !program.is_file() {
            let text = format!("{} is missing: build it, as `cargo xtask bench` does", program.display());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let folder = tempfile::tempdir().map_err(|error| failed("a temporary folder", &error))?;
        let at = |name: &str| folder.path().join(name);
        for name in ["state", "run", "dev"] {
            fs::create_dir(at(name)).map_err(|error| failed("a temporary folder", &error))?;
        }
        fs::write(at("config"), "").map_err(|error| failed("a temporary file", &error))?;
        let log = File::create(at("log")).map_err(|error| failed("a temporary file", &error))?;
        let process = Command::new(&program)
            .arg("daemon")
            .args([Path::new("--state-dir"), &at("state"), Path::new("--run-dir"), &at("run")])
            .args([Path::new("--dev-dir"), &at("dev"), Path::new("--socket"), &at("socket")])
            .args([Path::new("--config"), &at("config")])
            // The allocator of this process is set up for the figures of the engine. A daemon sets up its own allocator.
            .env_remove("GLIBC_TUNABLES")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|error| failed("a daemon", &error))?;
        let (devices, device_bytes) = (Vec::new(), 2 * cache);
        let mut daemon = Self { program, folder, process, devices, device_bytes };
        daemon.wait_until_it_serves()?;
        let region = daemon.folder.path().join("region");
        let size = (DEVICES as u64 * cache + 256 * MIB).to_string();
        daemon.ask(&["tp-reg", "--path", &text(&region), "--size", &size, "--host", "bench", "--format"])?;
        for number in 0..DEVICES {
            let disk = daemon.folder.path().join(format!("disk{number}"));
            File::create(&disk)
                .and_then(|file| file.set_len(daemon.device_bytes))
                .map_err(|error| failed("a temporary file", &error))?;
            let cache = cache.to_string();
            let made = daemon.ask(&[
                "backend-start",
                "--path",
                &text(&disk),
                "--cache-size",
                &cache,
                "--start-dev",
                "--export",
                "fuse-loop",
            ])?;
            daemon.devices.push(PathBuf::from(made.trim()));
        }
        Ok(daemon)
    }

    fn wait_until_it_serves(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            match self.ask(&["status", "--json"]) {
                Ok(_) => return Ok(()),
                Err(error) if begun.elapsed() > TIMEOUT => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// The output of `cbdctrl`.
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.program)
            .arg("--socket")
            .arg(self.folder.path().join("socket"))
            .args(arguments)
            .output()
            .map_err(|error| failed("cbdctrl", &error))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
        Err(Error::new(ErrorKind::System, format!("cbdctrl {}: {said}", arguments.join(" "))))
    }

    fn anonymous_bytes(&self) -> Result<u64> {
        let path = format!("/proc/{}/smaps_rollup", self.process.id());
        let text = fs::read_to_string(&path).map_err(|error| failed(&path, &error))?;
        text.lines()
            .find_map(|line| line.strip_prefix("Anonymous:")?.trim().strip_suffix("kB")?.trim().parse().ok())
            .map(|kib: u64| kib * 1024)
            .ok_or_else(|| Error::new(ErrorKind::System, format!("{path} has no line \"Anonymous\"")))
    }

    /// The sizes of the indexes, as the caches report them.
    fn index_bytes(&self) -> Result<u64> {
        fn sum(value: &Value) -> u64 {
            match value {
                Value::Object(map) => map
                    .iter()
                    .map(|(name, value)| match name.as_str() {
                        "index_bytes" => value.as_u64().unwrap_or(0),
                        _ => sum(value),
                    })
                    .sum(),
                Value::Array(list) => list.iter().map(sum).sum(),
                _ => 0,
            }
        }
        let status = self.ask(&["status", "--json"])?;
        let status = serde_json::from_str(&status)
            .map_err(|error| Error::new(ErrorKind::System, format!("the status is no JSON: {error}")))?;
        Ok(sum(&status))
    }

    /// Reads and writes of all sizes on all devices at once.
    fn load(&self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..DEPTH)
                .flat_map(|seed| self.devices.iter().map(move |device| (seed, device)))
                .map(|(seed, device)| scope.spawn(move || client(device, self.device_bytes, seed, until)))
                .collect();
            let gone = || Err(Error::new(ErrorKind::System, "a client panicked"));
            clients.into_iter().map(|client| client.join().unwrap_or_else(|_| gone())).collect()
        });
        results.into_iter().collect()
    }

    fn stop_all(&mut self) -> Result<()> {
        for number in 0..self.devices.len() {
            self.ask(&["dev-stop", "--dev", &number.to_string()])?;
        }
        for number in 0..std::mem::take(&mut self.devices).len() {
            self.ask(&["backend-stop", "--backend", &number.to_string()])?;
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        for number in 0..self.devices.len() {
            let _ = self.ask(&["dev-stop", "--force", "--dev", &number.to_string()]);
        }
        // The daemon ends within seconds of this signal, even if a request hangs.
        if let Ok(process) = i32::try_from(self.process.id()) {
            let process = rustix::process::Pid::from_raw(process);
            let _ =
                process.map(|process| rustix::process::kill_process(process, rustix::process::Signal::TERM));
        }
        let _ = self.process.wait();
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// One client: one request at a time until `until`.
fn client(device: &Path, size: u64, seed: u64, until: Instant) -> Result<()> {
    let refused = |error: std::io::Error| failed(&text(device), &error);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)
        .map_err(refused)?;
    let mut random = SmallRng::seed_from_u64(seed);
    let mut buffer = AlignedBuffer::zeroed(1 << SIZES.end());
    while Instant::now() < until {
        let length = 1_u64 << random.random_range(SIZES);
        let at = random.random_range(0..=(size - length) / 4096) * 4096;
        buffer.resize(length as usize);
        if random.random() {
            file.write_all_at(&buffer, at).map_err(refused)?;
        } else {
            file.read_exact_at(&mut buffer, at).map_err(refused)?;
        }
    }
    Ok(())
}
