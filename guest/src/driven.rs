//! A guest that executes orders: for tests in which several guests work together.
//!
//! Invariants: an order is one line of shell. One shell executes them one after the other, and the answer is what is printed until
//! the exit code. Each order has a time limit, and so has the guest. A guest ends with its `Driven`: QEMU is killed.
//!
//! Elsewhere: what is ordered. What a guest's background processes tell at any time are *notes*, lines `note NUMBER`.

use crate::deadline;
use crate::guest::{Host, last_lines};
use crate::machine::Paths;
use crate::plan::Plan;
use crate::shell::Stream;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Number of the last lines of a guest's output that are shown if something goes wrong.
const LAST_LINES: usize = 60;

/// Opens the port of the orders in a guest.
const PORT: &str = "
    for folder in /sys/class/virtio-ports/*; do
        if [ \"$(cat $folder/name)\" = orders ]; then exec 4</dev/${folder##*/}; fi
    done
";

/// Executes orders until there are none: the end of a guest's script. If the host ends without killing QEMU, the port ends,
/// and so does the guest.
const AGENT: &str = "
    set +e
    number=0
    while read -r order <&4; do
        number=$((number + 1))
        eval \"$order\" 2>&1
        echo \"=$number $?\"
    done
";

/// A running guest.
pub struct Driven {
    name: &'static str,
    qemu: Child,
    orders: ChildStdin,
    lines: Receiver<(Stream, String)>,
    paths: Paths,
    end: Instant,
    sent: u64,
    noted: u64,
    log: VecDeque<String>,
}

impl Driven {
    /// Starts a guest that runs `script`, and then what it is ordered.
    ///
    /// # Errors
    /// Why it could not be started.
    pub fn start(host: &Host, name: &'static str, plan: Plan, script: &str) -> Result<Self, String> {
        let plan = Plan {
            takes_orders: true,
            command: Plan::of_script(&format!("{script}\n{PORT}\n{AGENT}")).command,
            ..plan
        };
        let kvm = host.uses_kvm(&plan)?;
        let (paths, command) = host.prepare(&plan, kvm)?;
        Self::of(name, command, paths, plan.timeout.min(deadline::left()))
    }

    fn of(name: &'static str, mut command: Command, paths: Paths, limit: Duration) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut qemu = command.spawn().map_err(|error| format!("QEMU cannot be started: {error}"))?;
        let (sender, lines) = channel();
        if let Some(output) = qemu.stdout.take() {
            forward(output, Stream::Output, sender.clone());
        }
        if let Some(error) = qemu.stderr.take() {
            forward(error, Stream::Error, sender);
        }
        let orders = qemu.stdin.take().ok_or("QEMU has no standard input")?;
        let end = Instant::now() + limit;
        let log = VecDeque::new();
        Ok(Self { name, qemu, orders, lines, paths, end, sent: 0, noted: 0, log })
    }

    /// Has a line of shell executed, and returns what it printed.
    ///
    /// # Errors
    /// If it fails or takes longer than `limit`, or the guest ends.
    pub fn order(&mut self, order: &str, limit: Duration) -> Result<String, String> {
        let name = self.name;
        let failed = |what: &str, said: &str| format!("{name}: '{order}' {what}\n{said}");
        if order.contains('\n') {
            return Err(failed("is more than one line", ""));
        }
        self.sent += 1;
        self.log(format!("> {order}"));
        if let Err(error) = writeln!(self.orders, "{order}") {
            return Err(failed(&format!("cannot be sent: {error}"), ""));
        }
        let answered = format!("={} ", self.sent);
        let (begun, mut said) = (Instant::now(), String::new());
        let end = (begun + limit).min(self.end);
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((Stream::Output, line)) => match line.strip_prefix(&answered) {
                    Some("0") => return Ok(said),
                    Some(code) => return Err(failed(&format!("failed with {code}:"), &said)),
                    None if self.takes_note(&line) => {}
                    None => {
                        said.push_str(&line);
                        said.push('\n');
                        self.log(line);
                    }
                },
                Ok((Stream::Error, line)) => self.log(line),
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = begun.elapsed().as_secs();
                    return Err(failed(&format!("was not done after {seconds} s:"), &said));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed("was not done: the guest died", &said));
                }
            }
        }
    }

    /// Continues with a guest that has migrated from `source`, which ends. No order was being executed.
    pub fn continue_from(&mut self, mut source: Self) {
        source.kill();
        source.read_lines();
        (self.sent, self.noted) = (source.sent, source.noted.max(self.noted));
        let mut log = std::mem::take(&mut source.log);
        log.append(&mut self.log);
        log.into_iter().for_each(|line| self.log(line));
    }

    /// The last number that it has noted.
    pub const fn noted(&self) -> u64 {
        self.noted
    }

    /// Cuts its power, and returns the last number that it had noted: a lower bound, since the guest does not know which of its
    /// lines have arrived.
    pub fn cut(mut self) -> u64 {
        self.kill();
        while let Ok((_, line)) = self.lines.recv_timeout(Duration::from_secs(2)) {
            let _ = self.takes_note(&line);
        }
        self.noted
    }

    /// The last lines of its orders, its output, its errors and its kernel.
    pub fn last_words(&mut self) -> String {
        self.read_lines();
        let log: Vec<&str> = self.log.iter().map(String::as_str).collect();
        let console = last_lines(&self.paths.console());
        format!(
            "the last lines of {}:\n{}\nof its kernel:\n{}",
            self.name,
            log.join("\n"),
            console.join("\n")
        )
    }

    /// Takes the lines that have arrived into the log.
    fn read_lines(&mut self) {
        while let Ok((_, line)) = self.lines.try_recv() {
            self.log(line);
        }
    }

    fn takes_note(&mut self, line: &str) -> bool {
        let number = line.strip_prefix("note ").and_then(|number| number.parse().ok());
        self.noted = number.unwrap_or(self.noted);
        number.is_some()
    }

    fn log(&mut self, line: String) {
        if self.log.len() == LAST_LINES {
            self.log.pop_front();
        }
        self.log.push_back(line);
    }

    fn kill(&mut self) {
        // It may have ended meanwhile, which is the goal.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.kill();
        // What cannot be removed is removed with its parent.
        let _ = std::fs::remove_dir_all(self.paths.folder());
    }
}

fn forward(from: impl Read + Send + 'static, stream: Stream, to: Sender<(Stream, String)>) {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while from.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
            if to.send((stream, text)).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell of this machine in place of a guest.
    fn shell(folder: &tempfile::TempDir) -> Driven {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec 4<&0\n{AGENT}")]);
        let paths = Paths::new(&folder.path().join("guest"));
        Driven::of("a", command, paths, Duration::from_secs(60)).expect("a shell starts")
    }

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder can be made")
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn orders_are_answered_by_what_they_print_and_share_a_shell() {
        let folder = folder();
        let mut guest = shell(&folder);
        assert_eq!(guest.order("word=some", SOON), Ok(String::new()));
        assert_eq!(guest.order("echo $word; echo words >&2", SOON), Ok("some\nwords\n".to_owned()));
        let failed = guest.order("echo why; false", SOON).expect_err("it fails");
        assert!(failed.contains("'echo why; false' failed with 1") && failed.contains("why"), "{failed}");
        assert!(guest.order("echo one\necho two", SOON).is_err());
        assert!(guest.order("true", SOON).is_ok());
    }

    #[test]
    fn an_order_that_takes_too_long_or_ends_the_guest_is_an_error() {
        let folder = folder();
        let mut guest = shell(&folder);
        let late =
            guest.order("echo begun; read -r never <&4", Duration::from_millis(500)).expect_err("it is late");
        assert!(late.contains("was not done after 0 s") && late.contains("begun"), "{late}");
        let mut guest = shell(&folder);
        let ended = guest.order("echo last; exit 3", SOON).expect_err("it ends");
        assert!(ended.contains("the guest died") && guest.last_words().contains("last"), "{ended}");
    }

    #[test]
    fn notes_are_no_answer_and_outlive_a_cut() {
        let folder = folder();
        let mut guest = shell(&folder);
        assert_eq!(guest.order("echo note 1; echo note; echo note 7", SOON), Ok("note\n".to_owned()));
        assert_eq!(guest.noted(), 7);
        assert_eq!(guest.order("echo note 8; echo note 9 >&2", SOON), Ok(String::new()));
        assert_eq!(guest.cut(), 9);
    }
}
