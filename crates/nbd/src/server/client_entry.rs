//! A connection's entry among the clients of its export: when its first request may be executed, and whether a new
//! client waits for its end.
//!
//! Invariants: the first request is read only when no request of an earlier, disconnected client can change the device;
//! the wait for that ends when the server stops and when the client disconnects; a long wait is reported when it begins
//! and when it ends.

use super::Notice;
use cbd_export::wake::{Interest, WaitSet, is_closed_by_peer};
use cbd_export::{Client, Clients, Event};
use cbd_types::Result;
use socket2::Socket;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A wait is reported after this time.
const REPORTED_AFTER: Duration = Duration::from_secs(1);

/// A connection's entry among the clients.
pub(super) struct ClientEntry {
    /// `None` once no request of the connection can change the device any more.
    client: Option<Client>,
    wakeup: Event,
}

impl ClientEntry {
    /// Enters the connection at `socket`, before its handshake.
    pub(super) fn enter(clients: &Clients, socket: &Arc<Socket>) -> Result<Self> {
        let wakeup = Event::new()?;
        let (watched, waker) = (Arc::clone(socket), wakeup.waker());
        let is_gone = Box::new(move || is_closed_by_peer(watched.as_raw_fd()));
        let client = clients.connect(is_gone, Box::new(move || waker.wake()));
        Ok(Self { client: Some(client), wakeup })
    }

    /// Waits for the first request, and until it may be executed; false if the server stops or the client disconnects
    /// before that.
    pub(super) fn admit(
        &self,
        connection: u64,
        socket: &Socket,
        stop: RawFd,
        notify: &dyn Fn(&Notice<'_>),
    ) -> Result<bool> {
        let Some(client) = &self.client else { return Ok(false) };
        let mut waits = WaitSet::new();
        let request = waits.add(socket.as_raw_fd(), Interest::Read);
        let stop = waits.add(stop, Interest::Read);
        let wakeup = waits.add(self.wakeup.descriptor(), Interest::Nothing);
        waits.wait(None)?;
        if waits.readable(stop) {
            return Ok(false);
        }
        if !client.begin() {
            return Ok(false);
        }
        waits.set(request, Interest::HangUp);
        waits.set(wakeup, Interest::Read);
        let began = Instant::now();
        let mut is_reported = false;
        loop {
            let left = client.waits_for();
            if left == 0 {
                if is_reported {
                    notify(&Notice::Admitted { connection, waited: began.elapsed() });
                }
                return Ok(true);
            }
            if !is_reported && began.elapsed() >= REPORTED_AFTER {
                is_reported = true;
                notify(&Notice::Waits { connection, clients: left });
            }
            waits.wait((!is_reported).then(|| REPORTED_AFTER.saturating_sub(began.elapsed())))?;
            if waits.readable(stop) || waits.failed(request) {
                return Ok(false);
            }
            self.wakeup.clear();
            if client.is_awaited() {
                return Ok(false);
            }
        }
    }

    /// Readable when [`is_awaited`](Self::is_awaited) may have changed.
    pub(super) fn descriptor(&self) -> RawFd {
        self.wakeup.descriptor()
    }

    /// Whether a new client waits for the end of this connection.
    pub(super) fn is_awaited(&self) -> bool {
        self.wakeup.clear();
        self.client.as_ref().is_some_and(Client::is_awaited)
    }

    /// No request of the connection begins any more.
    pub(super) fn leave(&self) {
        self.client.iter().for_each(Client::leave);
    }

    /// No request of the connection can change the device any more.
    pub(super) fn settled(&mut self) {
        self.client = None;
    }
}
