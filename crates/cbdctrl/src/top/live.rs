//! The live page: threads for samples, keys and signals, and the loop that draws.
//!
//! Invariants: the loop waits for messages alone, a second at most, so that ages grow on the page; each signal that
//! ends a process ends this one with the terminal restored, at the latest two seconds later, even if the terminal takes
//! no output.
//!
//! Elsewhere: the terminal's modes ([`super::terminal`]), the state ([`super::state`]).

use super::Source;
use super::events::Events;
use super::keys::action_of;
use super::sample::{Recorded, Sample};
use super::state::{Action, Mapped, State};
use super::terminal::{Screen, leave_at_once};
use cbd_daemon::api::DeviceMap;
use cbd_sys::process::{Signals, exit_now};
use cbd_types::{Error, ErrorKind, Result};
use crossterm::event::Event;
use rustix::process::{Signal, getpid, kill_process};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How long the loop waits for a message.
const TICK: Duration = Duration::from_secs(1);
/// How long a signal waits until the loop has taken note of it.
const NOTICE: Duration = Duration::from_secs(2);
/// The longest time between two questions to a daemon that is away.
const RETRY: Duration = Duration::from_secs(1);
/// The most messages that wait.
const MESSAGES: usize = 64;
/// The signals that end a process, and those that stop and continue it.
const SIGNALS: [Signal; 6] =
    [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::TSTP, Signal::CONT];

/// What the threads tell the loop.
enum Message {
    Sample(Box<Sample>),
    Events(Vec<String>),
    Map(Mapped, DeviceMap),
    Failed {
        at: Duration,
        why: String,
    },
    Input(Event),
    InputEnded(std::io::Error),
    Signal(i32),
    /// The process continues after it was stopped.
    Continued,
}

/// What the loop tells the thread of samples.
enum Order {
    Interval(Duration),
    Pause(bool),
    /// The page shows the map of this cache from now on, or of none.
    Map(Option<Mapped>),
}

/// Shows the page until the user or a signal ends it.
///
/// # Errors
/// That of the terminal. The daemon may come and go.
pub fn run(source: Source, events: Events, first: Sample, mut state: State) -> Result<ExitCode> {
    // Before the first thread: each inherits it.
    let signals = Signals::of(&SIGNALS.map(Signal::as_raw));
    signals.block();
    let (sender, messages) = sync_channel(MESSAGES);
    let (orders, ordered) = sync_channel(MESSAGES);
    let (notices, noticed) = sync_channel(MESSAGES);
    let recorded = first.events.clone();
    state.sampled(first);
    let mut screen = Screen::enter().map_err(|error| failed(&error))?;
    start("samples", {
        let (sender, interval) = (sender.clone(), state.interval);
        move || take_samples(&source, events, recorded, interval, &ordered, &sender)
    })?;
    start("keys", {
        let sender = sender.clone();
        move || read_keys(&sender)
    })?;
    start("signals", move || wait_for_signals(signals, &sender, &noticed))?;
    Loop { state, orders, notices, is_stopped: false, mapped: None }.run(&mut screen, &messages)
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(format!("top-{name}")).spawn(work);
    started.map(|_| ()).map_err(|error| {
        Error::new(ErrorKind::System, format!("a thread for {name} cannot be started")).caused_by(error)
    })
}

fn failed(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::System, format!("the terminal cannot be used: {error}"))
}

struct Loop {
    state: State,
    orders: SyncSender<Order>,
    notices: SyncSender<()>,
    /// The process is about to be stopped: the terminal is not ours.
    is_stopped: bool,
    /// The cache of which the thread of samples fetches maps.
    mapped: Option<Mapped>,
}

impl Loop {
    fn run(mut self, screen: &mut Screen, messages: &Receiver<Message>) -> Result<ExitCode> {
        let began = Instant::now();
        let offset = self.state.now;
        loop {
            self.state.now = self.state.now.max(offset + began.elapsed());
            if !self.is_stopped {
                screen.draw(&self.state).map_err(|error| failed(&error))?;
            }
            let mut next = match messages.recv_timeout(TICK) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(ExitCode::SUCCESS),
            };
            // All that waits, before it is drawn.
            while let Some(message) = next {
                if let Some(code) = self.take(message, screen)? {
                    return Ok(code);
                }
                next = messages.try_recv().ok();
            }
            let wanted = self.state.wanted_map();
            if self.mapped != wanted && self.orders.try_send(Order::Map(wanted)).is_ok() {
                self.mapped = wanted;
            }
        }
    }

    /// Takes a message in; returns the exit code if it ends the command.
    fn take(&mut self, message: Message, screen: &mut Screen) -> Result<Option<ExitCode>> {
        match message {
            Message::Sample(sample) => self.state.sampled(*sample),
            Message::Events(events) => self.state.events = Some(events),
            Message::Map(of, map) => self.state.map = Some((of, map)),
            Message::Failed { at, why } => self.state.failed(at, why),
            Message::Input(event) => {
                if let Some(action) = action_of(&event) {
                    return self.act(action, screen);
                }
            }
            Message::InputEnded(error) => return Err(failed(&error)),
            Message::Continued => {
                self.is_stopped = false;
                screen.enter_again().map_err(|error| failed(&error))?;
            }
            Message::Signal(signal) if signal == Signal::TSTP.as_raw() => {
                self.is_stopped = true;
                super::terminal::leave();
                let _ = self.notices.try_send(());
            }
            Message::Signal(signal) if signal == Signal::CONT.as_raw() => {
                let _ = self.notices.try_send(());
                if !self.is_stopped {
                    screen.enter_again().map_err(|error| failed(&error))?;
                }
            }
            Message::Signal(signal) => {
                super::terminal::leave();
                return Ok(Some(ExitCode::from(code_of(signal))));
            }
        }
        Ok(None)
    }

    fn act(&mut self, action: Action, screen: &mut Screen) -> Result<Option<ExitCode>> {
        match action {
            Action::Quit => return Ok(Some(ExitCode::SUCCESS)),
            Action::Redraw => screen.redraw().map_err(|error| failed(&error))?,
            Action::Suspend => {
                // As the terminal would, were its input not raw.
                let _ = kill_process(getpid(), Signal::TSTP);
            }
            _ => {}
        }
        let (interval, paused) = (self.state.interval, self.state.paused);
        self.state.apply(action);
        if self.state.interval != interval {
            let _ = self.orders.try_send(Order::Interval(self.state.interval));
        }
        if self.state.paused != paused {
            let _ = self.orders.try_send(Order::Pause(self.state.paused));
        }
        Ok(None)
    }
}

/// The exit code of a shell for a process that a signal has ended.
fn code_of(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

fn take_samples(
    source: &Source,
    mut events: Events,
    recorded: Option<Recorded>,
    mut interval: Duration,
    orders: &Receiver<Order>,
    messages: &SyncSender<Message>,
) {
    let (mut paused, mut is_away, mut mapped) = (false, false, None);
    if let Some(recorded) = &recorded
        && events.update(&source.client(interval), recorded).unwrap_or(false)
    {
        let _ = messages.send(Message::Events(events.lines()));
    }
    // The first sample has been taken.
    let mut began = Instant::now();
    loop {
        loop {
            let pause = if is_away { interval.min(RETRY) } else { interval };
            let order = if paused {
                orders.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                orders.recv_timeout((began + pause).saturating_duration_since(Instant::now()))
            };
            match order {
                Ok(Order::Interval(chosen)) => interval = chosen,
                Ok(Order::Pause(chosen)) => paused = chosen,
                Ok(Order::Map(wanted)) => {
                    mapped = wanted;
                    send_map(source, mapped, interval, messages);
                }
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        began = Instant::now();
        let sent = match source.take(interval) {
            Ok(sample) => {
                is_away = false;
                // A failure to get them is one to get the next sample, too.
                let recorded = sample.events.as_ref();
                if recorded.is_some_and(|it| events.update(&source.client(interval), it).unwrap_or(false)) {
                    let _ = messages.send(Message::Events(events.lines()));
                }
                send_map(source, mapped, interval, messages);
                messages.send(Message::Sample(Box::new(sample)))
            }
            Err(error) => {
                is_away = true;
                let why = error.line().replace('\n', " ");
                messages.send(Message::Failed { at: source.now(), why })
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Fetches the map of a cache. A daemon of an earlier version has none, and the page then goes without.
fn send_map(source: &Source, mapped: Option<Mapped>, interval: Duration, messages: &SyncSender<Message>) {
    let Some(of) = mapped else { return };
    if let Ok(map) = source.map(of, interval) {
        // The loop may have ended; the next sample notices.
        let _ = messages.send(Message::Map(of, map));
    }
}

fn read_keys(messages: &SyncSender<Message>) {
    loop {
        let sent = match crossterm::event::read() {
            Ok(event) => messages.send(Message::Input(event)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            Err(error) => {
                let _ = messages.send(Message::InputEnded(error));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Passes signals on. The loop may be held up by a terminal that takes no output: then this thread ends the process.
fn wait_for_signals(signals: Signals, messages: &SyncSender<Message>, notices: &Receiver<()>) {
    let stop = Signals::of(&[Signal::TSTP.as_raw()]);
    loop {
        let signal = signals.wait();
        while notices.try_recv().is_ok() {}
        let _ = messages.try_send(Message::Signal(signal));
        let noticed = notices.recv_timeout(NOTICE).is_ok();
        let is_stop = signal == Signal::TSTP.as_raw();
        if is_stop && noticed {
            // The default action stops the process, if there is a shell to continue it. Other threads have the signal
            // blocked.
            stop.unblock();
            let _ = kill_process(getpid(), Signal::TSTP);
            stop.block();
            if messages.send(Message::Continued).is_err() {
                return;
            }
        } else if !noticed && !is_stop && signal != Signal::CONT.as_raw() {
            leave_at_once();
            exit_now(i32::from(code_of(signal)));
        }
    }
}
