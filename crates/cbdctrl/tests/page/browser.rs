//! Chromium without a window, driven by its DevTools protocol over a pair of pipes.
//!
//! Invariants: every wait has a limit. The browser ends with its owner, also when that panics, and keeps its files in the
//! folder that it is given.

use super::support::child;
use base64::Engine as _;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest time for an answer of the browser, its start included.
const TIMEOUT: Duration = Duration::from_secs(40);

/// A browser with one page.
pub struct Browser {
    process: Child,
    commands: PipeWriter,
    messages: Receiver<Value>,
    /// The page's session.
    session: Option<String>,
    last_id: u64,
    /// What the console and the log of the page have said that is an error or a warning.
    problems: Vec<Problem>,
}

/// A line of the console or the log of the page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// `network` for requests that failed.
    pub source: String,
    pub text: String,
}

impl Browser {
    /// Starts it with an empty page.
    pub fn start(folder: &Path) -> Self {
        let profile = folder.join("chromium");
        std::fs::create_dir_all(&profile).expect("a folder");
        let mut command = Command::new("chromium");
        command.args(["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]);
        command.args(["--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"]);
        command.args(["--disable-component-update", "--disable-extensions", "--no-proxy-server"]);
        command.arg(format!("--user-data-dir={}", profile.display())).env("HOME", &profile);
        let log = File::create(folder.join("chromium.log")).expect("a log");
        command.arg("about:blank").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let (its_commands, commands) = std::io::pipe().expect("a pipe");
        let (answers, its_answers) = std::io::pipe().expect("a pipe");
        child::hands_over(&mut command, &[its_commands.into(), its_answers.into()]);
        child::dies_with_the_test(&mut command);
        let process = command.spawn().expect("chromium");
        // Its copies of the pipes would keep them open behind its end.
        drop(command);
        let (sender, messages) = channel();
        // It ends with the browser, whose end closes the pipe.
        std::thread::spawn(move || {
            for message in BufReader::new(answers).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("JSON");
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser =
            Self { process, commands, messages, session: None, last_id: 0, problems: Vec::new() };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)["sessionId"].clone();
        browser.session = session.as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Sends a command; returns its result.
    #[track_caller]
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut command = json!({ "id": self.last_id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        self.commands.write_all(format!("{command}\0").as_bytes()).expect("the browser runs");
        let end = Instant::now() + TIMEOUT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let message = self.messages.recv_timeout(left);
            let message = message.unwrap_or_else(|error| panic!("no answer to {method}: {error}"));
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.problems.extend(problem_of(&message));
        }
    }

    /// Shows the page at an address; returns when it was loaded.
    #[track_caller]
    pub fn open(&mut self, address: &str) {
        // An address that differs behind the # alone would not load the page again.
        self.call("Page.navigate", json!({ "url": "about:blank" }));
        let answer = self.call("Page.navigate", json!({ "url": address }));
        assert!(answer["errorText"].is_null(), "{address}: {answer}");
        super::support::until("the page is loaded", || {
            self.value("document.readyState === 'complete' && location.protocol !== 'about:'") == true
        });
    }

    /// The value of an expression of the page.
    #[track_caller]
    pub fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// The text of an expression of the page.
    #[track_caller]
    pub fn text(&mut self, expression: &str) -> String {
        self.value(expression).as_str().unwrap_or_else(|| panic!("{expression} is no text")).to_owned()
    }

    /// Gives the page this size.
    pub fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Moves the mouse to this place of the window, in pixels.
    pub fn point_at(&mut self, x: f64, y: f64) {
        self.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": x, "y": y }));
    }

    /// Prefers `light` or `dark`.
    pub fn prefer(&mut self, scheme: &str) {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", json!({ "features": [feature] }));
    }

    /// Errors and warnings of the page so far.
    pub fn problems(&mut self) -> Vec<Problem> {
        // What precedes the answer to a command has come with it.
        self.value("0");
        self.problems.clone()
    }

    /// A picture of the window, as a file of PNG.
    pub fn picture(&mut self) -> Vec<u8> {
        let answer = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let text = answer["data"].as_str().expect("a picture");
        base64::engine::general_purpose::STANDARD.decode(text).expect("base64")
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        child::kill_with_children(self.process.id());
        let _ = self.process.wait();
    }
}

/// The problem that an event of the protocol tells.
fn problem_of(message: &Value) -> Option<Problem> {
    let parameters = &message["params"];
    let problem = |source: &Value, text: &Value| Problem {
        source: source.as_str().unwrap_or_default().to_owned(),
        text: text.to_string(),
    };
    let is_bad = |level: &Value| ["error", "warning", "assert"].iter().any(|bad| level == bad);
    match message["method"].as_str()? {
        "Runtime.exceptionThrown" => Some(problem(&"exception".into(), &parameters["exceptionDetails"])),
        "Runtime.consoleAPICalled" if is_bad(&parameters["type"]) => {
            Some(problem(&"console".into(), &parameters["args"]))
        }
        // Advice about how the tests read pixels.
        "Log.entryAdded" if parameters["entry"]["source"] == "rendering" => None,
        "Log.entryAdded" if is_bad(&parameters["entry"]["level"]) => {
            Some(problem(&parameters["entry"]["source"], &parameters["entry"]))
        }
        _ => None,
    }
}
