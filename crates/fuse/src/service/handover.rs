//! A service that outlives its process: taken over from the previous process, and handed over to the next one.
//!
//! Invariants: the kernel is requested to send again the messages that any channel had delivered before the
//! first thread reads, and never after that. A takeover that fails leaves the connection to the next attempt.
//! A session that was ended is never stored again, however late a thread attempts it.
//!
//! Elsewhere: which process may take over, and when ([`crate::session`]).

use super::{DROP_TIMEOUT, Service, duplicate, left};
use crate::connection;
use crate::export::Options;
use crate::session::{Session, SessionStore};
use crate::shared::Shared;
use cbd_export::{BlockDevice, system_error};
use cbd_types::{Error, ErrorKind, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The descriptor store of a service, and the session that it holds.
pub struct Handover {
    store: Arc<dyn SessionStore>,
    /// `None` once the session has ended.
    state: Mutex<Option<State>>,
}

struct State {
    session: Session,
    is_stored: bool,
}

impl Handover {
    fn new(store: Arc<dyn SessionStore>, session: Session, is_stored: bool) -> Self {
        Self { store, state: Mutex::new(Some(State { session, is_stored })) }
    }

    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stored(&self) -> bool {
        self.state().as_ref().is_some_and(|state| state.is_stored)
    }

    /// Puts the session into the descriptor store, unless it has ended.
    ///
    /// # Errors
    /// When the store does not confirm it.
    pub fn put(&self) -> Result<()> {
        let mut state = self.state();
        let Some(state) = state.as_mut() else { return Ok(()) };
        let put = self.store.put(&state.session);
        state.is_stored = put.is_ok();
        if put.is_err() {
            // The store may have received it late.
            self.store.remove();
        }
        put
    }

    /// A channel of the connection.
    pub fn channel(&self) -> Option<OwnedFd> {
        duplicate(self.state().as_ref()?.session.channels.first()?).ok()
    }

    /// Removes the session from the store, until it is put again.
    fn withdraw(&self) {
        if let Some(state) = self.state().as_mut() {
            state.is_stored = false;
            self.store.remove();
        }
    }

    /// Removes the session from the store permanently.
    pub fn end(&self) {
        if self.state().take().is_some_and(|state| state.is_stored) {
            self.store.remove();
        }
    }
}

impl Service {
    /// Takes over a connection that another process has served.
    ///
    /// # Errors
    /// The refused system call; the connection is unchanged.
    pub fn take_over(device: &Arc<dyn BlockDevice>, options: &Options, session: &Session) -> Result<Self> {
        let state = &session.state;
        let handover = match &options.store {
            Some(store) => Some(Arc::new(Handover::new(Arc::clone(store), session.try_clone()?, true))),
            None => None,
        };
        let mut service = Self {
            name: state.name.clone(),
            mount_dir: state.mount_dir.clone(),
            shared: Arc::new(Shared::new()?),
            filesystem: None,
            threads: Vec::new(),
            mounted: false,
            connection: Some(state.connection),
            resends: true,
            channels: Vec::new(),
            handover,
        };
        if let Err(error) = service.resume(device, options, session) {
            // The threads that already serve end; the requests of the other channels wait for the next
            // attempt.
            let _ = service.hand_over(Instant::now() + DROP_TIMEOUT);
            return Err(error);
        }
        service.mounted = true;
        Ok(service)
    }

    fn resume(&mut self, device: &Arc<dyn BlockDevice>, options: &Options, session: &Session) -> Result<()> {
        // The loop device has the file open; an earlier process answered that OPEN.
        self.shared.change(|state| state.open_files = 1);
        let channels = session.channels.iter().map(|channel| duplicate(channel).map(File::from));
        let channels = channels.collect::<Result<Vec<_>>>()?;
        for channel in &channels {
            fcntl_getfl(channel)
                .and_then(|flags| fcntl_setfl(channel, flags | OFlags::NONBLOCK))
                .map_err(|error| system_error("a channel of the FUSE connection", &error.into()))?;
        }
        // Before the first thread reads: the kernel sends again what any channel has delivered, not only to a
        // predecessor.
        match channels.first() {
            Some(first) => connection::resend(first)?,
            None => return Err(Error::new(ErrorKind::Damaged, "no channel of the FUSE connection is left")),
        }
        self.start_threads(device, options, channels, true)
    }

    /// Checks that a later process can take the connection over; returns its number.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the missing requirement.
    pub fn check_may_be_preserved(&self) -> Result<u32> {
        let missing = |text| Error::new(ErrorKind::Unsupported, text);
        if !self.resends {
            return Err(missing("the kernel is older than Linux 6.9"));
        }
        self.connection.ok_or_else(|| missing("the number of its FUSE connection is not known"))
    }

    /// The duplicates of the channels.
    pub fn take_channels(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.channels)
    }

    /// Puts the session into the descriptor store.
    ///
    /// # Errors
    /// When the store refuses.
    pub fn preserve(&mut self, store: &Arc<dyn SessionStore>, session: Session) -> Result<()> {
        self.handover.insert(Arc::new(Handover::new(Arc::clone(store), session, false))).put()
    }

    /// Whether it outlives this process.
    pub fn is_preserved(&self) -> bool {
        self.handover.as_ref().is_some_and(|handover| handover.is_stored())
    }

    /// Removes the session from the store: it would now end with this process. Returns the handle to put it
    /// back, if it was stored.
    pub fn withdraw(&self) -> Option<Arc<Handover>> {
        let handover = self.handover.as_ref().filter(|handover| handover.is_stored())?;
        handover.withdraw();
        Some(Arc::clone(handover))
    }

    /// The threads answer the requests that they have read and end; the connection stays, with the requests
    /// that were not answered.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below.
    pub fn hand_over(&mut self, end: Instant) -> Result<()> {
        self.shared.stop();
        self.mounted = false;
        if !self.shared.wait(left(end), |state| state.serving == 0) {
            return Err(self.still_waiting("they end with this process"));
        }
        self.join();
        Ok(())
    }
}
