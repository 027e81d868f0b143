//! NBD over a unix socket.

use super::client::{ExportClient, Exports};
use crate::scale::Sources;
use crate::turns::since;
use cbd_export::BlockDevice;
use cbd_nbd::{Listen, Options, Server};
use cbd_testkit::{Client, Command};
use cbd_types::Result;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

struct Nbd {
    client: Client,
    server: Server,
}

/// Serves `device` and connects to it.
///
/// # Errors
/// The errors of the server and of the client.
pub fn open(exports: &Exports, device: Arc<dyn BlockDevice>, name: &str) -> Result<Box<dyn ExportClient>> {
    let listen = Listen::Unix(exports.path(&format!("{name}.sock")));
    let options = Options { thread_setup: Some(exports.thread_setup()), ..Options::default() };
    let server = Server::start(device, listen.clone(), options)?;
    Ok(Box::new(Nbd { client: Client::connect(&listen)?, server }))
}

impl ExportClient for Nbd {
    fn write(&mut self, places: &[u64], sources: &Sources, depth: usize, taken: &mut Vec<u32>) -> Result<()> {
        let mut begun = HashMap::with_capacity(depth);
        let mut rest = places.iter().enumerate();
        while taken.len() < places.len() {
            while self.client.in_flight() < depth
                && let Some((number, &offset)) = rest.next()
            {
                let now = Instant::now();
                let command = Command::Write { offset, data: sources.get(number), fua: false };
                begun.insert(self.client.submit(command)?, now);
            }
            if let Some(completed) = self.client.complete()? {
                completed.result?;
                self.client.recycle(completed.data);
                taken.extend(begun.remove(&completed.cookie).map(since));
            }
        }
        Ok(())
    }

    fn close(self: Box<Self>) -> Result<()> {
        drop(self.client);
        self.server.stop()
    }
}
