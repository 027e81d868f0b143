//! Commands that change a backend while its block devices are in use.

use crate::cli::LiveCommand;
use crate::command::{Output, long, warn};
use crate::progress;
use cbd_daemon::api::{AttachCache, DetachCache, Done, ResizeCache};
use cbd_daemon::client::Client;
use cbd_types::Result;

/// Runs `command`.
pub(crate) fn execute(command: LiveCommand, client: &Client, output: &Output) -> Result<()> {
    match command {
        LiveCommand::BackendGrow { on, backend } => {
            let client = client.clone().with_waiting_callback(progress::waiting);
            crate::grow::run(&client, output, on.transport, &backend)
        }
        LiveCommand::CacheAttach { on, backend, cache_size, weight } => {
            let path = format!("/v1/transports/{}/backends/{backend}/cache/attach", on.transport);
            let request = AttachCache { cache_size: cache_size.bytes, cache_max: cache_size.max, weight };
            let client = client.clone().with_waiting_callback(progress::waiting);
            let done: Done = client.post(&path, &request)?;
            warn(&done.warnings);
            output.result(&done, "")
        }
        LiveCommand::CacheDetach { on, backend, timeout } => {
            let path = format!("/v1/transports/{}/backends/{backend}/cache/detach", on.transport);
            long(client, output, &path, &DetachCache { timeout_s: timeout })
        }
        LiveCommand::CacheResize { on, backend, cache_size, weight, timeout } => {
            let path = format!("/v1/transports/{}/backends/{backend}/cache/resize", on.transport);
            let (cache_size, cache_max) = (cache_size.bytes, cache_size.max);
            long(client, output, &path, &ResizeCache { cache_size, cache_max, weight, timeout_s: timeout })
        }
    }
}
