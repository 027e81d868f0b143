//! `cbdd`, and `cbdctrl daemon`.

use crate::cli::DaemonArguments;
use cbd_backing::{Decorator, Throttle};
use cbd_daemon::paths::{PathChoices, Paths};
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the store process, which holds descriptors for the daemon.
pub fn run_store_process() -> ExitCode {
    match cbd_daemon::handover::run_store_process() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdctrl store-process: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the daemon until a signal ends it.
pub fn run(arguments: DaemonArguments) -> ExitCode {
    let decorator = arguments
        .throttle
        .map(|parameters| Decorator::new(move |device| Arc::new(Throttle::new(device, parameters))));
    #[cfg(feature = "testkit")]
    let decorator = arguments.decorate.or(decorator);
    let options = cbd_daemon::run::Options {
        boot: None,
        paths: Paths::choose(PathChoices {
            config: arguments.config,
            state_dir: arguments.state_dir,
            run_dir: arguments.run_dir,
            socket: arguments.socket,
            dev_dir: arguments.dev_dir,
            rules_dir: arguments.rules_dir,
        }),
        require_persistent: arguments.require_persistent,
        // The running executable, even if the file at its path was replaced.
        store_program: Some("/proc/self/exe".into()),
        decorator,
        log_format: arguments.log_format.0,
        verbose: arguments.verbose,
        events: Arc::default(),
    };
    match cbd_daemon::run::run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdd: {error}");
            ExitCode::FAILURE
        }
    }
}
