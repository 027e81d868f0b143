//! The life of a daemon: start, restore, serve, end.
//!
//! Invariants: the daemon changes nothing before it holds the locks. It sends `READY` when all objects that can be
//! restored are restored. It ends within seconds of the signal, whatever is open, and acknowledged data is in the
//! regions.

use crate::config::Config;
use crate::control::Control;
use crate::events::command::CommandThread;
use crate::events::{EventName, Events};
use crate::logging::LogFormat;
use crate::manager::Manager;
use crate::paths::{PathChoices, Paths};
use crate::server::{self, Access};
use crate::socket::{ControlSocket, Lock, PREDECESSOR_TIMEOUT};
use crate::state::StateDir;
use crate::web::{PageSource, Plan, Web};
use crate::{logging, notify, system};
use cbd_backing::Decorator;
use cbd_types::{BootId, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Longest time from the signal to the end; tasks that have not ended by then (a disk that hangs) end with the process.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// Most threads that serve short requests of the control socket.
const CONTROL_THREADS: usize = 64;
/// Idle time after which such a thread ends: longer than a daemon runs.
const CONTROL_THREAD_LIFE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Additional time for syncing regions in ordinary files: without the sync they are not recovered after a restart of
/// the machine.
const SYNC_LIMIT: Duration = Duration::from_secs(90);

/// The options of a daemon.
#[derive(Clone, Debug)]
pub struct Options {
    /// Its folders and files.
    pub paths: Paths,
    /// Serve no region that does not survive a power failure.
    pub require_persistent: bool,
    /// The program that preserves FUSE devices when it is run with the argument `store-process`; if none, FUSE devices
    /// end with the daemon, unless systemd's descriptor store preserves them.
    pub store_program: Option<PathBuf>,
    /// A decorator for backing devices, for demonstrations and tests.
    pub decorator: Option<Decorator>,
    /// For tests: the boot ID under which regions are used, to simulate a crash of the machine; none for the kernel's
    /// boot ID. No argument sets it.
    pub boot: Option<BootId>,
    /// The format of log lines.
    pub log_format: LogFormat,
    /// Whether debug lines are logged, too.
    pub verbose: bool,
    /// The record of events, which [`run`] fills from the log.
    pub events: Arc<Events>,
}

impl Options {
    /// A daemon with all its files below `folder` and no other options. Such daemons share nothing.
    #[must_use]
    pub fn below(folder: &Path) -> Self {
        let within = |name: &str| Some(folder.join(name));
        let paths = Paths::choose(PathChoices {
            config: within("cbd.toml"),
            state_dir: within("state"),
            run_dir: within("run"),
            socket: None,
            dev_dir: within("dev"),
            rules_dir: within("rules.d"),
        });
        Self {
            paths: Paths { config_may_be_missing: true, ..paths },
            require_persistent: false,
            store_program: None,
            decorator: None,
            boot: None,
            log_format: LogFormat::Text,
            verbose: false,
            events: Arc::default(),
        }
    }
}

/// Runs a daemon until it receives SIGTERM, SIGINT or SIGHUP.
///
/// # Errors
/// When it cannot start: another daemon uses the socket or the state folder, the configuration is malformed, or a
/// region does not survive a power failure although persistence is required.
pub fn run(options: Options) -> Result<()> {
    system::return_freed_memory();
    logging::start(options.log_format, options.verbose, &options.events);
    logging::abort_on_panic();
    system::unblock_end_signals();
    system::ignore_file_size_signal();
    system::raise_descriptor_limit();
    let config = Config::read(&options.paths.config, options.paths.config_may_be_missing)?;
    let group = config.daemon.group.as_deref().map(system::group_id).transpose()?;
    let web = Plan::new(&config.web, group)?;
    let mut socket = ControlSocket::listen(&options.paths.socket, group)?;
    let state = StateDir::open(&options.paths.state_dir)?;
    let _lock = Lock::take(
        &options.paths.state_dir.join("lock"),
        &format!("the state folder {}", options.paths.state_dir.display()),
        PREDECESSOR_TIMEOUT,
    )?;
    let command = CommandThread::start(&config.events, &options.events);
    let manager = Arc::new(Manager::new(&options, config, state)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("cbd-control")
        .max_blocking_threads(CONTROL_THREADS)
        // Threads are kept: if no further thread can be started, requests wait for an existing one instead of failing.
        .thread_keep_alive(CONTROL_THREAD_LIFE)
        .build()
        .map_err(|error| Error::new(ErrorKind::System, "the control plane cannot start").caused_by(error))?;
    let access = Access { user: system::user_id(), group };
    manager.set_control_socket(socket.path());
    let web = serve_metrics(web, &manager);
    let result = runtime.block_on(serve(&mut socket, &manager, access));
    drop(web);
    let syncing = Arc::new(AtomicBool::new(false));
    end_within(STOP_LIMIT, &syncing);
    notify::stopping();
    if result.is_err() {
        log_stopping();
    }
    let ended = manager.end();
    syncing.store(true, Ordering::SeqCst);
    let hung = ended.sync();
    // Operations on control threads were told to end and own no state that is needed.
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(socket);
    if let Some(command) = command {
        command.end();
    }
    tracing::info!("stopped");
    match hung.len() {
        0 => result,
        _ => result.and(Err(Error::new(
            ErrorKind::TimedOut,
            format!("stopped, but not everything ended in time: {}", hung.join(" | ")),
        ))),
    }
}

/// Serves metrics and the page where the configuration says so. The daemon serves its devices without them, too.
fn serve_metrics(plan: Plan, manager: &Arc<Manager>) -> Option<Web> {
    let status_of = Arc::clone(manager);
    let source = Arc::new(move || status_of.status());
    let map_of = Arc::clone(manager);
    let page = PageSource {
        map: Arc::new(move |transport, backend, cells| map_of.map(transport, backend, cells)),
        events: manager.events(),
    };
    Web::start(plan, source, page, manager.front_ends()).unwrap_or_else(|error| {
        tracing::warn!("{}", error.line());
        None
    })
}

fn log_stopping() {
    tracing::info!(event = EventName::DaemonStopping.name(), "stopping: dirty data stays in the regions");
}

/// Time for requests in progress to respond when the daemon ends.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

async fn serve(socket: &mut ControlSocket, manager: &Arc<Manager>, access: Access) -> Result<()> {
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::System, "the control plane cannot start").caused_by(error)
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
    let listener =
        socket.take_listener().ok_or_else(|| Error::new(ErrorKind::System, "the socket is taken"))?;
    let listener = tokio::net::UnixListener::from_std(listener).map_err(failed)?;
    // If no thread can be started, tokio would abort the process during the start.
    let tried = std::thread::Builder::new().spawn(|| ()).map(std::thread::JoinHandle::join);
    drop(tried.map_err(failed)?);
    let restoring = Arc::clone(manager);
    let mut restored = tokio::task::spawn_blocking(move || restoring.restore());
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let mut serving = std::pin::pin!(server::serve(
        listener,
        Arc::clone(manager) as _,
        access,
        manager.front_ends(),
        async {
            let _ = stopped.await;
        }
    ));
    let mut is_restored = false;
    loop {
        tokio::select! {
            result = &mut restored, if !is_restored => {
                is_restored = true;
                let summary = result.map_err(|_| Error::new(ErrorKind::Stopped, "the daemon is stopping"))??;
                tracing::info!(
                    event = EventName::DaemonStarted.name(),
                    version = env!("CARGO_PKG_VERSION"),
                    pid = std::process::id(),
                    "ready: {summary}"
                );
                notify::ready(&summary);
            }
            () = &mut serving => return Ok(()),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => break,
        }
    }
    // Before those that follow events are ended.
    log_stopping();
    // New requests are refused; clients that wait for a drain get an error.
    manager.begin_stop();
    let _ = stop.send(());
    let _ = tokio::time::timeout(RESPONSE_TIMEOUT, serving).await;
    Ok(())
}

/// Ends the process when the stop takes longer than `limit`, or, once `syncing` is set because regions are being
/// synced, [`SYNC_LIMIT`] longer.
fn end_within(limit: Duration, syncing: &Arc<AtomicBool>) {
    let syncing = Arc::clone(syncing);
    let limited = std::thread::Builder::new().name("cbd-stop-limit".to_owned()).spawn(move || {
        std::thread::sleep(limit);
        if syncing.load(Ordering::SeqCst) {
            std::thread::sleep(SYNC_LIMIT);
            tracing::error!(
                "syncing the regions took more than {} s; ending at once: a region in an ordinary file is recovered only \
                 until the machine is restarted",
                SYNC_LIMIT.as_secs()
            );
            system::exit_now(1);
        }
        tracing::error!(
            "stopping took more than {} s (a backing device that hangs?); ending at once: acknowledged data is in the regions",
            limit.as_secs()
        );
        system::exit_now(1);
    });
    if let Err(error) = limited {
        tracing::warn!(
            "no thread could be started to limit the time of the stop ({error}); SIGALRM ends it in time"
        );
        system::alarm(limit);
    }
}
