//! What `top` shows, and what the user has chosen.
//!
//! Invariants: the state changes by [`State::apply`], by samples and by failures alone; drawing changes nothing. The
//! selected row is one that exists, if there is any.
//!
//! Elsewhere: drawing ([`super::view`]), keys ([`super::keys`]), samples ([`super::live`]).

use super::rates::{Key, Rates, Row};
use super::sample::Sample;
use cbd_daemon::api::DeviceMap;
use std::cmp::Reverse;
use std::time::Duration;

/// The intervals that the keys `+` and `-` step through, in milliseconds.
const STEPS_MS: [u64; 9] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000];

/// What is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Page {
    /// All devices.
    #[default]
    Overview,
    /// The selected device.
    Device,
    /// The keys.
    Help,
}

/// The order of the rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sort {
    /// By number.
    #[default]
    Number,
    /// The most bytes a second first.
    Load,
    /// The most dirty bytes first.
    Dirty,
    /// The slowest first: by the 99th percentile of reads and writes.
    Latency,
}

impl Sort {
    /// The order in a word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Load => "load",
            Self::Dirty => "dirty",
            Self::Latency => "latency",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::Number => Self::Load,
            Self::Load => Self::Dirty,
            Self::Dirty => Self::Latency,
            Self::Latency => Self::Number,
        }
    }
}

/// What a key asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Select another row, this many further down.
    Move(i64),
    /// Show the selected device.
    Enter,
    /// Back to the overview.
    Back,
    /// Another order of the rows.
    Sort,
    /// The keys.
    Help,
    /// A longer interval.
    Slower,
    /// A shorter interval.
    Faster,
    /// Stop and continue taking samples.
    Pause,
    /// Draw everything again.
    Redraw,
    /// Stop the process until the shell continues it.
    Suspend,
    /// End.
    Quit,
}

/// What the terminal can show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Looks {
    /// Colours, bold and reverse.
    pub styled: bool,
    /// Characters beyond ASCII.
    pub unicode: bool,
}

/// The daemon has not answered the last questions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Away {
    /// Since when, by the clock of the samples.
    pub since: Duration,
    /// Why, in one line.
    pub why: String,
}

/// A cache of which there is a map: the numbers of the transport and of the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// Number of the transport.
    pub transport: u64,
    /// Number of the backend.
    pub backend: u64,
}

impl From<Key> for Mapped {
    fn from(key: Key) -> Self {
        Self { transport: key.transport, backend: key.backend }
    }
}

/// The state.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The last figures.
    pub rates: Rates,
    /// The sample that they came from.
    last: Option<Sample>,
    /// The daemon is away.
    pub away: Option<Away>,
    /// The present time, by the clock of the samples.
    pub now: Duration,
    /// The interval of samples.
    pub interval: Duration,
    /// No samples are taken.
    pub paused: bool,
    /// The page.
    pub page: Page,
    /// The page to which help returns.
    before_help: Page,
    /// The order of the rows.
    pub sort: Sort,
    /// The selected row.
    pub selected: Option<Key>,
    /// The last events, the newest last; absent if the daemon has none to show.
    pub events: Option<Vec<String>>,
    /// The last map that came.
    pub map: Option<(Mapped, DeviceMap)>,
    /// What the terminal can show.
    pub looks: Looks,
}

impl State {
    /// The state before the first sample.
    #[must_use]
    pub fn new(interval: Duration, looks: Looks) -> Self {
        Self { interval, looks, ..Self::default() }
    }

    /// Takes a sample in.
    pub fn sampled(&mut self, sample: Sample) {
        self.rates = Rates::between(self.last.as_ref(), &sample);
        self.now = self.now.max(sample.at);
        self.last = Some(sample);
        self.away = None;
        let exists = |key: Key| self.rates.rows.iter().any(|row| row.key == key);
        if !self.selected.is_some_and(exists) {
            if self.page == Page::Device && self.selected.is_some() {
                self.page = Page::Overview;
            }
            self.selected = self.rows().first().map(|row| row.key);
        }
    }

    /// The daemon has not answered the question of this moment.
    pub fn failed(&mut self, at: Duration, why: String) {
        self.now = self.now.max(at);
        let since = self.away.as_ref().map_or(at, |away| away.since);
        self.away = Some(Away { since, why });
    }

    /// The rows in the chosen order.
    #[must_use]
    pub fn rows(&self) -> Vec<&Row> {
        let mut rows: Vec<&Row> = self.rates.rows.iter().collect();
        match self.sort {
            Sort::Number => {}
            Sort::Load => rows.sort_by_key(|row| Reverse(load(row))),
            Sort::Dirty => rows.sort_by_key(|row| Reverse(row.backend.now.dirty_bytes)),
            Sort::Latency => rows.sort_by_key(|row| Reverse(latency(row))),
        }
        rows
    }

    /// The selected row.
    #[must_use]
    pub fn selected_row(&self) -> Option<&Row> {
        let selected = self.selected?;
        self.rates.rows.iter().find(|row| row.key == selected)
    }

    /// The cache of which the page shows a map.
    #[must_use]
    pub fn wanted_map(&self) -> Option<Mapped> {
        let row = self.selected_row().filter(|_| self.page == Page::Device)?;
        row.backend.now.cache.as_ref().map(|_| row.key.into())
    }

    /// The map of the cache of a row, if it came.
    #[must_use]
    pub fn map_of(&self, row: &Row) -> Option<&DeviceMap> {
        let (of, map) = self.map.as_ref()?;
        (*of == Mapped::from(row.key)).then_some(map)
    }

    /// Does what a key asks for, as far as it concerns what is shown.
    pub fn apply(&mut self, action: Action) {
        match action {
            Action::Move(by) => self.select(by),
            Action::Enter if self.page == Page::Overview && self.selected.is_some() => {
                self.page = Page::Device;
            }
            Action::Back => {
                let before = if self.page == Page::Help { self.before_help } else { Page::Overview };
                self.page = before;
            }
            Action::Sort => self.sort = self.sort.next(),
            Action::Help if self.page == Page::Help => self.page = self.before_help,
            Action::Help => {
                self.before_help = self.page;
                self.page = Page::Help;
            }
            Action::Slower => self.interval = step(self.interval, true),
            Action::Faster => self.interval = step(self.interval, false),
            Action::Pause => self.paused = !self.paused,
            Action::Enter | Action::Redraw | Action::Suspend | Action::Quit => {}
        }
    }

    fn select(&mut self, by: i64) {
        let rows = self.rows();
        let at = rows.iter().position(|row| Some(row.key) == self.selected).unwrap_or(0);
        let last = i64::try_from(rows.len()).unwrap_or(i64::MAX) - 1;
        let at = i64::try_from(at).unwrap_or(0).saturating_add(by).min(last).max(0);
        self.selected = usize::try_from(at).ok().and_then(|at| rows.get(at)).map(|row| row.key);
    }
}

/// Bytes of clients in the interval.
fn load(row: &Row) -> u64 {
    row.operations.iter().flat_map(|operations| operations.values()).map(|it| it.bytes).sum()
}

fn latency(row: &Row) -> Option<u64> {
    let of = |name: &str| row.operation(name).and_then(|it| it.latency.percentile(0.99));
    of("read").max(of("write"))
}

/// The next longer or shorter interval.
fn step(interval: Duration, longer: bool) -> Duration {
    let mut steps = STEPS_MS.map(Duration::from_millis).into_iter();
    let found =
        if longer { steps.find(|step| *step > interval) } else { steps.rev().find(|step| *step < interval) };
    found.unwrap_or(interval)
}
