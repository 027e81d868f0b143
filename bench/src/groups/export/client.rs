//! The interface of a client that reaches a device over an export.

use crate::processors::Processors;
use crate::scale::Sources;
use cbd_types::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// A client of an export, and the export itself.
pub trait ExportClient {
    /// Writes 4 KiB to each of `places`, with at most `depth` writes in flight; records the time of each in
    /// nanoseconds.
    ///
    /// # Errors
    /// The first error of a write.
    fn write(&mut self, places: &[u64], sources: &Sources, depth: usize, taken: &mut Vec<u32>) -> Result<()>;

    /// Ends the client and the export.
    ///
    /// # Errors
    /// When a resource could not be released.
    fn close(self: Box<Self>) -> Result<()>;
}

/// The folder of the exports' sockets and mounts, removed at the end, and the processors of their threads.
#[derive(Clone)]
pub struct Exports {
    directory: Arc<TempDir>,
    /// The processors for the client and for its server.
    pub processors: Arc<Processors>,
    server: usize,
}

impl Exports {
    /// Creates the directory.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn new() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("cbd-bench-").tempdir().map_err(|error| {
            Error::new(ErrorKind::System, format!("cannot make a directory for exports: {error}"))
        })?;
        Ok(Self { directory: Arc::new(directory), processors: Arc::new(Processors::new()?), server: 0 })
    }

    /// The same exports, with their threads pinned to processor `server`.
    pub fn serving_on(&self, server: usize) -> Self {
        Self { server, ..self.clone() }
    }

    /// The setup of a thread that serves an export.
    pub fn thread_setup(&self) -> Arc<dyn Fn() + Send + Sync> {
        let (processors, server) = (Arc::clone(&self.processors), self.server);
        // If the thread cannot be pinned, it runs wherever the system schedules it.
        Arc::new(move || drop(processors.pin(server)))
    }

    /// The path for `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}
