//! The listener for metrics and for the page with plots: TCP and unix sockets, off unless the configuration has
//! addresses in `[web]`.
//!
//! Invariants: it changes nothing, and has only what `status` has. It runs on threads of its own, and their number is
//! bounded: whatever its clients do, the control socket and block devices are served as without them. An address that
//! cannot be used is a warning in `status` and in the log, and is tried again; the daemon serves without it.
//!
//! Elsewhere: the metrics ([`crate::metrics`]), the history that the page shows (`crate::history`), the control socket
//! ([`crate::server`]).

mod accept;
mod config;
#[cfg(feature = "page")]
mod page;
mod requests;
#[cfg(feature = "page")]
mod sampler;

pub use accept::{CONNECTION_LIMIT, CONNECTIONS_MAX, RETRY_INTERVAL};
pub use config::{ADDRESSES_MAX, Address, TOKEN_MIN, Token, WebConfig};

use crate::api::{DeviceMap, Status};
use crate::events::Events;
use crate::front_ends::FrontEnds;
#[cfg(feature = "page")]
use crate::history::History;
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Gives the status that is served; it may block.
pub type Source = Arc<dyn Fn() -> Result<Status> + Send + Sync>;

/// Gives the map of a backend by the numbers of its transport and itself, in at most so many cells; it may block.
pub type MapSource = Arc<dyn Fn(u32, u32, Option<usize>) -> Result<DeviceMap> + Send + Sync>;

/// What the page shows besides the status.
#[derive(Clone)]
pub struct PageSource {
    /// Maps of devices.
    pub map: MapSource,
    /// The record of events.
    pub events: Arc<Events>,
}

/// What is to be served: a valid configuration with its token.
#[derive(Clone, Debug)]
pub struct Plan {
    addresses: Vec<Address>,
    token: Option<Token>,
    /// Whether the page is served.
    #[cfg_attr(not(feature = "page"), expect(dead_code, reason = "this program has no page"))]
    page: bool,
    /// The group of unix sockets.
    group: Option<u32>,
    retry_interval: Duration,
    /// What the page shows of the time before.
    #[cfg(feature = "page")]
    history: Arc<History>,
}

impl Plan {
    /// Reads the token that the configuration names.
    ///
    /// # Errors
    /// What is wrong with the token's file, if an address needs it.
    pub fn new(config: &WebConfig, group: Option<u32>) -> Result<Self> {
        config.check()?;
        let needs_token = config.listen.iter().any(Address::needs_token);
        let token_file = config.token_file.as_deref().filter(|_| needs_token);
        let token = token_file.map(Token::read).transpose()?;
        Ok(Self {
            addresses: config.listen.clone(),
            token,
            page: config.page,
            group,
            retry_interval: RETRY_INTERVAL,
            #[cfg(feature = "page")]
            history: Arc::default(),
        })
    }

    /// The same with another time than [`RETRY_INTERVAL`] between attempts to use an address.
    #[must_use]
    pub fn with_retry_interval(self, retry_interval: Duration) -> Self {
        Self { retry_interval, ..self }
    }

    /// The same with a history that the samples of this run continue, instead of an empty one.
    #[cfg(feature = "page")]
    #[must_use]
    pub fn with_history(self, history: Arc<History>) -> Self {
        Self { history, ..self }
    }
}

/// Why addresses are not served at present, by address.
#[derive(Debug, Default)]
pub struct Problems(Mutex<BTreeMap<String, String>>);

impl Problems {
    /// Stores the problem of an address, or that it has none; true if that is new.
    fn set(&self, address: &Address, problem: Option<String>) -> bool {
        let (mut problems, address) = (self.0.lock(), address.to_string());
        match problem {
            Some(problem) => problems.insert(address, problem.clone()) != Some(problem),
            None => problems.remove(&address).is_some(),
        }
    }

    /// The problems as warnings.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.0.lock().values().cloned().collect()
    }
}

/// The running listener; it ends on drop.
#[derive(Debug)]
pub struct Web {
    stop: watch::Sender<bool>,
    ended: std::sync::mpsc::Receiver<()>,
    #[cfg(feature = "page")]
    sampler: Option<sampler::Sampler>,
}

/// Time for the thread to end. A unix socket on a file system that hangs may keep it longer: it is left then.
const END_TIMEOUT: Duration = Duration::from_secs(1);

impl Web {
    /// Serves `source` by `plan`, and `page` if the program has the page and `plan` does not turn it off; none without
    /// addresses.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the thread cannot start.
    pub fn start(
        plan: Plan,
        source: Source,
        page: PageSource,
        front_ends: Arc<FrontEnds>,
    ) -> Result<Option<Self>> {
        if plan.addresses.is_empty() {
            return Ok(None);
        }
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::System, "metrics are not served: their thread cannot start")
                .caused_by(error)
        };
        // A runtime of its own, without further threads: a flood of clients delays no request of the control socket.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(failed)?;
        let (stop, stopped) = watch::channel(false);
        let (ending, ended) = std::sync::mpsc::channel();
        #[cfg(feature = "page")]
        let (page, sampler) = if plan.page {
            let history = Arc::clone(&plan.history);
            let sampler =
                sampler::Sampler::start(Arc::clone(&source), Arc::clone(&history)).map_err(failed)?;
            (Some(requests::Page { shown: page, history }), Some(sampler))
        } else {
            (None, None)
        };
        #[cfg(not(feature = "page"))]
        drop(page);
        let serving = requests::Serving::new(
            source,
            #[cfg(feature = "page")]
            page,
            plan.token.clone(),
            Arc::clone(&front_ends),
        );
        let serve = move || {
            let _ending = ending;
            runtime.block_on(accept::serve(plan, serving, front_ends, stopped));
        };
        std::thread::Builder::new().name("cbd-web".to_owned()).spawn(serve).map_err(failed)?;
        Ok(Some(Self {
            stop,
            ended,
            #[cfg(feature = "page")]
            sampler,
        }))
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        let _ = self.ended.recv_timeout(END_TIMEOUT);
        #[cfg(feature = "page")]
        if let Some(sampler) = &mut self.sampler {
            sampler.end(END_TIMEOUT);
        }
    }
}
