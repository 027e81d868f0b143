//! A Prometheus that reads the metrics of a daemon, and its answers.
//!
//! Invariants: it ends with its test, and keeps its files in the folder of the fixture.

use super::{Fixture, child, tail};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The path of a file of the package for Prometheus.
pub fn packaged(name: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus");
    folder.join(name).to_str().expect("UTF-8").to_owned()
}

/// A port of 127.0.0.1 that nothing uses.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

/// The answer to a request of these lines.
pub fn ask(mut stream: impl Read + Write, lines: &str) -> String {
    stream.write_all(format!("{}\r\n\r\n", lines.replace('\n', "\r\n")).as_bytes()).expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered");
    text
}

/// A running Prometheus.
pub struct Prometheus {
    process: Child,
    port: u16,
    log: PathBuf,
}

impl Prometheus {
    /// Reads the metrics at `port` with the token in the fixture, as those of the daemon `node0`, with the alert rules; both at
    /// this interval.
    pub fn start(fixture: &Fixture, port: u16, interval: &str) -> Self {
        let config = format!(
            "global: {{ scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval} }}\n\
             rule_files: ['{}']\n\
             scrape_configs:\n  - job_name: cbd\n    authorization: {{ credentials_file: '{}' }}\n    \
             static_configs: [{{ targets: ['127.0.0.1:{port}'], labels: {{ instance: node0 }} }}]\n",
            packaged("cbd.rules.yml"),
            fixture.text("token"),
        );
        std::fs::write(fixture.path("prometheus.yml"), config).expect("a file");
        let (own, log) = (free_port(), fixture.path("prometheus.log"));
        let mut command = Command::new("prometheus");
        command.arg(format!("--config.file={}", fixture.text("prometheus.yml")));
        command.arg(format!("--storage.tsdb.path={}", fixture.text("series")));
        command.arg(format!("--web.listen-address=127.0.0.1:{own}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).expect("a log"));
        child::dies_with_the_test(&mut command);
        Self { process: command.spawn().expect("prometheus"), port: own, log }
    }

    /// The data of the answer to a request; `None` while it does not answer.
    pub fn get(&self, path: &str) -> Option<Value> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket");
        let text = ask(stream, &format!("GET {path} HTTP/1.0"));
        let answer: Value = serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()?;
        Some(answer["data"].clone())
    }

    /// The result of a query: `path` is `query` or `query_range`, and `parameters` the others of the interface.
    #[track_caller]
    pub fn query(&self, path: &str, expression: &str, parameters: &str) -> Vec<Value> {
        let encoded: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let path = format!("/api/v1/{path}?query={encoded}{parameters}");
        let data = self.get(&path).unwrap_or_else(|| panic!("no answer to {expression}"));
        data["result"].as_array().unwrap_or_else(|| panic!("{expression} is refused")).clone()
    }

    /// The states of the alerts with this name.
    pub fn alerts(&self, name: &str) -> Vec<Value> {
        let Some(data) = self.get("/api/v1/alerts") else { return Vec::new() };
        let alerts = data["alerts"].as_array().cloned().unwrap_or_default();
        alerts.into_iter().filter(|alert| alert["labels"]["alertname"] == name).collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("the log of Prometheus ended with:\n{}", tail(&log, 20));
        }
    }
}
