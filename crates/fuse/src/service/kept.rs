//! A service that outlives its process: taken over from the previous process, and left to the next one.
//!
//! Invariants: the kernel is requested to send again the messages that any channel had delivered before the
//! first thread reads, and never after that. A takeover that fails leaves the connection to the next attempt.
//! A session that was ended is never stored again, however late a thread attempts it.
//!
//! Elsewhere: which process may take over, and when ([`crate::kept`]).

use super::{DROP_PATIENCE, Duty, KEPT_REASON, Service, Starting, Way, duplicate, left};
use crate::connection;
use crate::errors::system_error;
use crate::export::Options;
use crate::filesystem::Filesystem;
use crate::kept::{Keep, Remains};
use crate::life::Life;
use crate::ring::raw;
use crate::system;
use cbd_export::BlockDevice;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The descriptor store of a service, and the session that it holds.
pub struct Kept {
    keep: Arc<dyn Keep>,
    /// `None` once the session has ended.
    stage: Mutex<Option<Stage>>,
}

struct Stage {
    remains: Remains,
    is_held: bool,
}

impl Kept {
    fn new(keep: Arc<dyn Keep>, remains: Remains, is_held: bool) -> Self {
        Self { keep, stage: Mutex::new(Some(Stage { remains, is_held })) }
    }

    fn stage(&self) -> MutexGuard<'_, Option<Stage>> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_held(&self) -> bool {
        self.stage().as_ref().is_some_and(|stage| stage.is_held)
    }

    /// Puts the session into the descriptor store, unless it has ended.
    ///
    /// # Errors
    /// When the store does not confirm it.
    pub fn put(&self) -> Result<()> {
        let mut stage = self.stage();
        let Some(stage) = stage.as_mut() else { return Ok(()) };
        let put = self.keep.put(&stage.remains);
        stage.is_held = put.is_ok();
        if put.is_err() {
            // The store may have received it late.
            self.keep.remove();
        }
        put
    }

    /// A channel of the connection.
    pub fn door(&self) -> Option<OwnedFd> {
        duplicate(self.stage().as_ref()?.remains.doors.first()?).ok()
    }

    /// Removes the session from the store, until it is put again.
    fn take_back(&self) {
        if let Some(stage) = self.stage().as_mut() {
            stage.is_held = false;
            self.keep.remove();
        }
    }

    /// Removes the session from the store permanently.
    pub fn end(&self) {
        if self.stage().take().is_some_and(|stage| stage.is_held) {
            self.keep.remove();
        }
    }
}

impl Service {
    /// Takes over a connection that another process has served.
    ///
    /// # Errors
    /// The refused system call; the connection is unchanged.
    pub fn adopt(device: &Arc<dyn BlockDevice>, options: &Options, remains: &Remains) -> Result<Self> {
        let (stopped, stop) =
            std::io::pipe().map_err(|error| system_error("no pipe for the FUSE threads", &error))?;
        let state = &remains.state;
        let kept = match &options.keep {
            Some(keep) => Some(Arc::new(Kept::new(Arc::clone(keep), remains.another()?, true))),
            None => None,
        };
        let mut service = Self {
            name: state.name.clone(),
            mount_dir: state.mount_dir.clone(),
            life: Arc::new(Life::new(stop)?),
            threads: Vec::new(),
            mounted: false,
            connection: Some(state.connection),
            way: Way::Door { reason: KEPT_REASON.into() },
            cannot_be_kept: None,
            doors: Vec::new(),
            kept,
        };
        if let Err(error) = service.bring_back(device, options, remains, Arc::new(stopped)) {
            // The threads that already serve end; the requests of the other channels wait for the next
            // attempt.
            let _ = service.leave(Instant::now() + DROP_PATIENCE);
            return Err(error);
        }
        service.mounted = true;
        Ok(service)
    }

    fn bring_back(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        remains: &Remains,
        stop: Arc<PipeReader>,
    ) -> Result<()> {
        let state = &remains.state;
        let filesystem = Arc::new(Filesystem {
            name: state.name.clone(),
            geometry: device.geometry(),
            read_only: options.read_only,
            over_ring: false,
        });
        // The loop device has the file open; an earlier process answered that OPEN.
        self.life.change(|state| state.open_files = 1);
        let mut starting = Vec::with_capacity(remains.doors.len());
        for door in &remains.doors {
            let connection = duplicate(door).map(File::from)?;
            system::do_not_block(connection.as_fd())
                .map_err(|error| system_error("a channel of the FUSE connection", &error))?;
            starting.push(Starting {
                connection,
                device: Arc::clone(device),
                filesystem: Arc::clone(&filesystem),
                stop: Arc::clone(&stop),
                leaving: self.entering(false, Some(duplicate(door)?)),
                setup: options.thread_setup.clone(),
                duty: Duty::Door,
            });
        }
        // Before the first thread reads: the kernel sends again what any channel has delivered, not only to a
        // predecessor.
        match starting.first() {
            Some(first) => connection::resend(&first.connection)?,
            None => return Err(Error::new(ErrorKind::Damaged, "nothing is left of the FUSE connection")),
        }
        self.start_threads(starting)
    }

    /// Checks that a later process can take the connection over; returns its number.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the missing requirement.
    pub fn check_may_be_kept(&self) -> Result<u32> {
        let missing = self.cannot_be_kept.or_else(|| {
            self.connection.is_none().then_some("the number of its FUSE connection is not known")
        });
        match (missing, self.connection) {
            (None, Some(connection)) => Ok(connection),
            (missing, _) => Err(Error::new(ErrorKind::Unsupported, missing.unwrap_or_default())),
        }
    }

    /// The duplicates of the channels.
    pub fn take_doors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.doors)
    }

    /// Puts the session into the descriptor store.
    ///
    /// # Errors
    /// When the store refuses.
    pub fn keep(&mut self, keep: &Arc<dyn Keep>, remains: Remains) -> Result<()> {
        self.kept.insert(Arc::new(Kept::new(Arc::clone(keep), remains, false))).put()
    }

    /// Whether it outlives this process.
    pub fn is_kept(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.is_held())
    }

    /// Removes the session from the store: it would now end with this process. Returns the handle to put it
    /// back, if it was stored.
    pub fn take_back(&self) -> Option<Arc<Kept>> {
        let kept = self.kept.as_ref().filter(|kept| kept.is_held())?;
        kept.take_back();
        Some(Arc::clone(kept))
    }

    /// The threads answer the requests that they have read and end; the connection stays, with the requests
    /// that were not answered.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below.
    pub fn leave(&mut self, end: Instant) -> Result<()> {
        self.life.stop();
        self.mounted = false;
        if !self.life.wait(left(end), |state| state.serving == 0) {
            return Err(self.still_waiting("they end with this process"));
        }
        self.threads.drain(..).for_each(raw::join);
        Ok(())
    }
}
