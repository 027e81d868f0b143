//! The command that the configuration names: it is run for each event, one event at a time.
//!
//! Invariants: the thread that records an event never waits for the command. The queue is bounded, what does not fit is
//! counted. Each run ends within its time limit and with the daemon, with all that it started in its process group. A
//! run has a clean environment, no descriptor of the daemon, the event as its standard input, and no output.

use super::{EventName, Events};
use crate::api::{Event, EventCommandInfo, Severity};
use crate::config::EventsConfig;
use crate::front_ends::LogRateLimit;
use cbd_sys::process::{Signals, bind_to_parent, close_inherited};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most events that wait for the command.
const QUEUE_MAX: usize = 256;
/// How long the events that are queued when the daemon ends may take.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long a process that was killed may take to end.
const KILL_LIMIT: Duration = Duration::from_secs(1);
/// The `PATH` of the command.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The events that wait for the command, and what became of others.
#[derive(Debug)]
pub struct CommandQueue {
    severity: Severity,
    /// The names that are wanted; none for all.
    names: Option<Vec<EventName>>,
    state: Mutex<State>,
    /// Notified when an event was added, or the end has come.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Arc<Event>>,
    /// When the thread must end.
    end: Option<Instant>,
    info: EventCommandInfo,
    /// Events that were dropped and are not logged yet.
    unlogged: u64,
}

impl CommandQueue {
    fn new(config: &EventsConfig) -> Self {
        let program = config.command.first().cloned().unwrap_or_default();
        let info = EventCommandInfo { program, ..EventCommandInfo::default() };
        Self {
            severity: config.severity,
            names: config.names.clone(),
            state: Mutex::new(State { info, ..State::default() }),
            changed: Condvar::new(),
        }
    }

    /// Adds an event that is wanted, if there is room.
    pub(super) fn add(&self, event: &Arc<Event>) {
        let is_wanted = |names: &Vec<EventName>| names.iter().any(|name| name.name() == event.name);
        if event.severity < self.severity || !self.names.as_ref().is_none_or(is_wanted) {
            return;
        }
        let mut state = self.state.lock();
        if state.waiting.len() < QUEUE_MAX {
            state.waiting.push_back(Arc::clone(event));
            drop(state);
            self.changed.notify_all();
        } else {
            state.info.dropped += 1;
            state.unlogged += 1;
        }
    }

    /// What became of the events.
    #[must_use]
    pub fn info(&self) -> EventCommandInfo {
        let state = self.state.lock();
        EventCommandInfo { waiting: state.waiting.len() as u64, ..state.info.clone() }
    }

    /// The next event, and how many were dropped since the last call; waits for one. None at the end.
    fn next(&self) -> Option<(Arc<Event>, u64)> {
        let mut state = self.state.lock();
        loop {
            if state.end.is_some_and(|end| Instant::now() >= end) {
                return None;
            }
            if let Some(event) = state.waiting.pop_front() {
                return Some((event, std::mem::take(&mut state.unlogged)));
            }
            if state.end.is_some() {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn note(&self, ended: &Ended) {
        let info = &mut self.state.lock().info;
        match ended {
            Ended::Succeeded => info.succeeded += 1,
            Ended::Failed(_) => info.failed += 1,
            Ended::TimedOut(_) => info.timed_out += 1,
        }
        if let Ended::Failed(why) | Ended::TimedOut(why) = ended {
            info.last_error = Some(why.clone());
        }
    }
}

/// How a run ended.
#[derive(Debug)]
enum Ended {
    Succeeded,
    Failed(String),
    TimedOut(String),
}

/// The thread that runs the command.
#[derive(Debug)]
pub struct CommandThread {
    queue: Arc<CommandQueue>,
    /// Its end wakes a thread that waits for a run.
    wake: OwnedFd,
    thread: JoinHandle<()>,
}

impl CommandThread {
    /// Starts the thread for the command in `config`; none if it names none, or if no thread can be started, which is
    /// logged.
    #[must_use]
    pub fn start(config: &EventsConfig, events: &Events) -> Option<Self> {
        if config.command.is_empty() {
            return None;
        }
        let queue = Arc::new(CommandQueue::new(config));
        let of_thread = Arc::clone(&queue);
        let mut runner = Runner { words: config.command.clone(), limit: config.timeout(), left: None };
        let started = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(std::io::Error::from)
            .and_then(|(woken, wake)| {
                let work = move || runner.run_all(&of_thread, &woken);
                let thread = std::thread::Builder::new().name("cbd-events".to_owned()).spawn(work)?;
                Ok(Self { queue: Arc::clone(&queue), wake, thread })
            });
        match started {
            Ok(started) => {
                events.set_command(queue);
                Some(started)
            }
            Err(error) => {
                tracing::warn!(
                    "no thread can be started for the command for events, which is not run: {error}"
                );
                None
            }
        }
    }

    /// Lets the events that are queued be handled for two seconds, then kills the command and ends the thread.
    pub fn end(self) {
        let Self { queue, wake, thread } = self;
        queue.state.lock().end = Some(Instant::now() + END_LIMIT);
        queue.changed.notify_all();
        drop(wake);
        let _ = thread.join();
    }
}

struct Runner {
    words: Vec<String>,
    limit: Duration,
    /// A process that was killed and has not ended: the kernel waits for something on its behalf.
    left: Option<Child>,
}

impl Runner {
    fn run_all(&mut self, queue: &CommandQueue, woken: &OwnedFd) {
        let (failures, drops) = (LogRateLimit::default(), LogRateLimit::default());
        while let Some((event, dropped)) = queue.next() {
            let program = self.words[0].clone();
            if dropped > 0 {
                drops.log(|more| {
                    tracing::warn!(
                        "the command for events, {program}, is slower than events come: it was not run for {dropped} of them{more}"
                    );
                });
            }
            let ended = self.run(&event, queue, woken);
            queue.note(&ended);
            if let Ended::Failed(why) | Ended::TimedOut(why) = &ended {
                failures.log(|more| {
                    tracing::warn!("the command for the event {}, {program}, {why}{more}", event.name);
                });
            }
        }
    }

    fn run(&mut self, event: &Event, queue: &CommandQueue, woken: &OwnedFd) -> Ended {
        if let Some(left) = &mut self.left {
            if matches!(left.try_wait(), Ok(None)) {
                let process = left.id();
                return Ended::Failed(format!(
                    "is not run: process {process} of an earlier event has not ended"
                ));
            }
            self.left = None;
        }
        let mut child = match self.command(event).spawn() {
            Ok(child) => child,
            Err(error) => return Ended::Failed(format!("cannot be run: {error}")),
        };
        // Less than a pipe holds, so that this does not wait for the command; one that does not read it is not wrong.
        if let Some(mut input) = child.stdin.take() {
            let _ = input.write_all(&json_line(event));
        }
        let group = Pid::from_raw(child.id().cast_signed());
        let process = group.ok_or(rustix::io::Errno::SRCH).and_then(|it| pidfd_open(it, PidfdFlags::empty()));
        let ended = match &process {
            Ok(process) => self.wait(process, queue, woken),
            Err(error) => Some(format!("cannot be watched ({error}), and was killed")),
        };
        // Its process is there until it is waited for, so no other group can have its number.
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        if let (Some(why), Ok(process)) = (&ended, &process)
            && !ends_within(process, KILL_LIMIT)
        {
            let why = format!("{why}, and has not ended");
            self.left = Some(child);
            return Ended::TimedOut(why);
        }
        match (ended, child.wait()) {
            (Some(why), _) => Ended::TimedOut(why),
            (None, Ok(status)) if status.success() => Ended::Succeeded,
            (None, Ok(status)) => Ended::Failed(format!("failed: {status}")),
            (None, Err(error)) => Ended::Failed(format!("cannot be waited for: {error}")),
        }
    }

    /// Waits until the command has ended, without taking its status; else says why it is killed.
    fn wait(&self, process: &OwnedFd, queue: &CommandQueue, woken: &OwnedFd) -> Option<String> {
        let limit = Instant::now() + self.limit;
        loop {
            let ending = queue.state.lock().end;
            let left = ending.map_or(limit, |end| end.min(limit)).saturating_duration_since(Instant::now());
            let both = &mut [PollFd::new(process, PollFlags::IN), PollFd::new(woken, PollFlags::IN)];
            // The end of the pipe stays readable.
            let watched = if ending.is_some() { &mut both[..1] } else { &mut both[..] };
            let polled = poll(watched, Timespec::try_from(left).ok().as_ref());
            let has_ended = polled.is_ok() && !watched[0].revents().is_empty();
            match polled {
                Ok(_) if has_ended => return None,
                Ok(0) if Instant::now() >= limit => {
                    return Some(format!("ran longer than {} s, and was killed", self.limit.as_secs_f64()));
                }
                Ok(0) if ending.is_some() => return Some("was killed, since the daemon ends".to_owned()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Some(format!("cannot be waited for ({error}), and was killed")),
            }
        }
    }

    fn command(&self, event: &Event) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).env_clear().env("PATH", PATH).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command.env("CBD_EVENT", &event.name).env("CBD_SEVERITY", event.severity.name());
        command.env("CBD_SEQUENCE", event.sequence.to_string()).env("CBD_INSTANCE", &event.instance);
        command.env("CBD_TIME_MS", event.time_ms.to_string()).env("CBD_TEXT", event.text.replace('\0', " "));
        for (name, number) in
            [("CBD_TRANSPORT", event.transport), ("CBD_BACKEND", event.backend), ("CBD_BLKDEV", event.blkdev)]
        {
            if let Some(number) = number {
                command.env(name, number.to_string());
            }
        }
        close_inherited(&mut command);
        bind_to_parent(&mut command, Signals::of(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]));
        command
    }
}

/// Whether a process that was killed ends within `limit`.
fn ends_within(process: &OwnedFd, limit: Duration) -> bool {
    let timeout = Timespec::try_from(limit).ok();
    matches!(poll(&mut [PollFd::new(process, PollFlags::IN)], timeout.as_ref()), Ok(1..))
}

fn json_line(event: &Event) -> Vec<u8> {
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::NewEvent;
    use std::collections::BTreeMap;
    use std::path::Path;

    /// Longer than anything here takes.
    const LIMIT: Duration = Duration::from_secs(60);

    fn event(name: EventName, severity: Severity, text: &str) -> NewEvent {
        let (transport, backend) = (Some(0), Some(3));
        let fields = BTreeMap::from([("path".to_owned(), serde_json::Value::from("/dev/sd \"b\"\n"))]);
        NewEvent { name, severity, transport, backend, blkdev: None, fields, text: text.to_owned() }
    }

    /// A script in `folder`, with `$1` for the folder.
    fn shell(folder: &Path, script: &str) -> EventsConfig {
        let words = ["/bin/sh", "-c", script, "sh", &folder.display().to_string()];
        EventsConfig { command: words.map(str::to_owned).to_vec(), ..EventsConfig::default() }
    }

    #[track_caller]
    fn until(mut holds: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !holds() {
            assert!(Instant::now() < end, "it does not come");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn info(events: &Events) -> EventCommandInfo {
        events.info().command.expect("a command")
    }

    #[test]
    fn the_command_has_the_event_a_clean_environment_and_no_descriptor_of_the_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let _open = std::fs::File::open("/dev/null").unwrap();
        let script =
            "cat > $1/event; env > $1/environment; ls -l /proc/self/fd > $1/descriptors; pwd > $1/folder";
        let events = Events::default();
        let thread = CommandThread::start(&shell(folder.path(), script), &events).expect("a thread");
        events.record(event(EventName::DiskFailing, Severity::Warning, "writeback fails: EIO"));
        until(|| info(&events).succeeded == 1);
        thread.end();
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let received: Event = serde_json::from_str(&read("event")).unwrap();
        assert_eq!(received, *events.after(0, 1).events[0]);
        let environment = read("environment");
        for line in ["CBD_EVENT=disk.failing", "CBD_SEVERITY=warning", "CBD_BACKEND=3", "CBD_SEQUENCE=1"] {
            assert!(environment.lines().any(|known| known == line), "{line}: {environment}");
        }
        assert!(!environment.contains("HOME=") && !environment.contains("CARGO"), "{environment}");
        // Those of `ls`: three standard ones and the folder that it reads.
        let descriptors = read("descriptors");
        assert_eq!(descriptors.lines().filter(|line| line.contains(" -> ")).count(), 4, "{descriptors}");
        assert_eq!(read("folder"), "/\n");
    }

    #[test]
    fn a_command_that_takes_too_long_is_killed_with_what_it_started_and_the_next_event_is_handled() {
        let folder = tempfile::tempdir().unwrap();
        let script = "sleep 1000 & echo $! > $1/started; [ $CBD_SEQUENCE = 2 ] || wait";
        let config = EventsConfig { timeout_s: 0.3, ..shell(folder.path(), script) };
        let events = Events::default();
        let thread = CommandThread::start(&config, &events).expect("a thread");
        for text in ["1", "2"] {
            events.record(event(EventName::DiskSilent, Severity::Warning, text));
        }
        until(|| info(&events).succeeded == 1);
        let now = info(&events);
        assert_eq!((now.timed_out, now.failed), (1, 0), "{now:?}");
        assert!(now.last_error.as_ref().is_some_and(|why| why.contains("longer than 0.3 s")), "{now:?}");
        let started = std::fs::read_to_string(folder.path().join("started")).unwrap();
        until(|| {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", started.trim()));
            state.is_err() || state.is_ok_and(|state| state.contains(") Z"))
        });
        thread.end();
    }

    #[test]
    fn events_beyond_the_queue_are_dropped_and_counted_and_none_waits_for_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let config = shell(folder.path(), "while [ ! -e $1/go ]; do sleep 0.05; done");
        let events = Events::default();
        let thread = CommandThread::start(&config, &events).expect("a thread");
        events.record(event(EventName::DiskSilent, Severity::Warning, "the first"));
        until(|| info(&events).waiting == 0);
        for _ in 0..QUEUE_MAX + 7 {
            events.record(event(EventName::DiskSilent, Severity::Warning, "another"));
        }
        let now = info(&events);
        assert_eq!((now.waiting, now.dropped, now.succeeded), (QUEUE_MAX as u64, 7, 0));
        std::fs::write(folder.path().join("go"), "").unwrap();
        until(|| info(&events).succeeded > 2);
        thread.end();
    }

    #[test]
    fn the_end_of_the_daemon_kills_the_command() {
        let folder = tempfile::tempdir().unwrap();
        let config = EventsConfig { timeout_s: 600.0, ..shell(folder.path(), "echo > $1/begun; sleep 1000") };
        let events = Events::default();
        let thread = CommandThread::start(&config, &events).expect("a thread");
        events.record(event(EventName::DaemonStopping, Severity::Info, "stopping"));
        until(|| folder.path().join("begun").exists());
        let begun = Instant::now();
        thread.end();
        assert!(begun.elapsed() < LIMIT);
        let now = info(&events);
        assert!(now.timed_out == 1 && now.last_error.is_some_and(|why| why.contains("the daemon ends")));
    }

    #[test]
    fn a_command_that_fails_or_does_not_exist_is_counted_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        for (config, part) in [
            (shell(folder.path(), "exit 3"), "exit status: 3"),
            (
                EventsConfig { command: vec!["/nonexistent/notify".to_owned()], ..EventsConfig::default() },
                "cannot be run: No such file",
            ),
        ] {
            let events = Events::default();
            let thread = CommandThread::start(&config, &events).expect("a thread");
            events.record(event(EventName::DiskSilent, Severity::Warning, "text"));
            until(|| info(&events).failed == 1);
            let why = info(&events).last_error.unwrap_or_default();
            assert!(why.contains(part), "{why}");
            thread.end();
        }
    }

    #[test]
    fn only_events_that_are_wanted_are_handled() {
        let folder = tempfile::tempdir().unwrap();
        let config = EventsConfig {
            severity: Severity::Warning,
            names: Some(vec![EventName::DiskSilent]),
            ..shell(folder.path(), "cat >> $1/events")
        };
        let events = Events::default();
        let thread = CommandThread::start(&config, &events).expect("a thread");
        events.record(event(EventName::DiskSilent, Severity::Info, "too mild"));
        events.record(event(EventName::DiskFailing, Severity::Error, "another name"));
        events.record(event(EventName::DiskSilent, Severity::Error, "wanted"));
        until(|| info(&events).succeeded == 1);
        thread.end();
        let handled = std::fs::read_to_string(folder.path().join("events")).unwrap();
        assert!(handled.contains("wanted") && handled.lines().count() == 1, "{handled}");
    }
}
