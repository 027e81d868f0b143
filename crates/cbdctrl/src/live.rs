//! Commands that change a backend or a region while block devices are in use.

use crate::cli::{LiveCommand, OfBackend};
use crate::command::{Output, long, warn};
use crate::progress;
use cbd_daemon::api::{AttachCache, DetachCache, Done, MoveBackend, ResizeCache};
use cbd_daemon::client::Client;
use cbd_types::Result;

/// Runs `command`.
pub(crate) fn execute(command: LiveCommand, client: &Client, output: &Output) -> Result<()> {
    match command {
        LiveCommand::TpGrow { on, size } => {
            let client = client.clone().with_waiting_callback(progress::waiting);
            crate::grow::run_transport(&client, output, on.transport, size)
        }
        // It has exit codes of its own, and is not executed here.
        LiveCommand::Scrub(_) => Ok(()),
        LiveCommand::Pins(command) => crate::pins::execute(command, client, output),
        LiveCommand::BackendGrow { of } => {
            let client = client.clone().with_waiting_callback(progress::waiting);
            crate::grow::run(&client, output, of.on.transport, &of.backend)
        }
        LiveCommand::CacheAttach { of, size, cache_mode } => {
            let (cache_size, cache_max) = (size.cache_size.bytes, size.cache_size.max);
            let request = AttachCache { cache_size, cache_max, weight: size.weight, cache_mode };
            let client = client.clone().with_waiting_callback(progress::waiting);
            let done: Done = client.post(&of.path("attach"), &request)?;
            warn(&done.warnings);
            output.result(&done, "")
        }
        LiveCommand::BackendMove { of, to, timeout } => {
            let path = format!("/v1/transports/{}/backends/{}/move", of.on.transport, of.backend);
            long(client, output, &path, &MoveBackend { to, timeout_s: timeout })
        }
        LiveCommand::CacheDetach { of, timeout } => {
            long(client, output, &of.path("detach"), &DetachCache { timeout_s: timeout })
        }
        LiveCommand::CacheResize { of, size, timeout } => {
            let (cache_size, cache_max) = (size.cache_size.bytes, size.cache_size.max);
            let request = ResizeCache { cache_size, cache_max, weight: size.weight, timeout_s: timeout };
            long(client, output, &of.path("resize"), &request)
        }
    }
}

impl OfBackend {
    /// The path of a request to `change` the backend's cache.
    fn path(&self, change: &str) -> String {
        format!("/v1/transports/{}/backends/{}/cache/{change}", self.on.transport, self.backend)
    }
}
