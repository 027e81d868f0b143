//! A connection's place among the clients of its export: when its first request may be carried out, and who waits for its end.
//!
//! Always true here: the first request is read only when no request of a client that was gone by then can change the device any more; a
//! wait for that ends with the server and with the client; one that takes long is told when it begins and when it ends.
//!
//! Left to others: to give up and to complete requests (`connection`).

use super::Notice;
use cbd_export::wake::{Interest, WaitSet, is_closed_by_peer};
use cbd_export::{Client, Clients, Event};
use cbd_types::Result;
use socket2::Socket;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A wait is told of after this time.
const LONG: Duration = Duration::from_secs(1);

/// A connection's place.
pub(super) struct Presence {
    /// None once nothing of it can change the device any more.
    client: Option<Client>,
    told: Event,
}

impl Presence {
    /// The place of the connection at `socket`, from before its handshake on.
    pub(super) fn enter(clients: &Clients, socket: &Arc<Socket>) -> Result<Self> {
        let told = Event::new()?;
        let (watched, waker) = (Arc::clone(socket), told.waker());
        let is_gone = Box::new(move || is_closed_by_peer(watched.as_raw_fd()));
        let client = clients.connect(is_gone, Box::new(move || waker.wake()));
        Ok(Self { client: Some(client), told })
    }

    /// Waits for the first request, and until it may be carried out; false if the server stops or the client goes before that.
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
        let told = waits.add(self.told.descriptor(), Interest::Nothing);
        waits.wait(None)?;
        if waits.readable(stop) {
            return Ok(false);
        }
        if !client.begin() {
            return Ok(false);
        }
        waits.set(request, Interest::HangUp);
        waits.set(told, Interest::Read);
        let began = Instant::now();
        let mut is_told = false;
        loop {
            let left = client.waits_for();
            if left == 0 {
                if is_told {
                    notify(&Notice::Admitted { connection, waited: began.elapsed() });
                }
                return Ok(true);
            }
            if !is_told && began.elapsed() >= LONG {
                is_told = true;
                notify(&Notice::Waits { connection, clients: left });
            }
            waits.wait((!is_told).then(|| LONG.saturating_sub(began.elapsed())))?;
            if waits.readable(stop) || waits.failed(request) {
                return Ok(false);
            }
            self.told.clear();
            if client.is_awaited() {
                return Ok(false);
            }
        }
    }

    /// What to wait on for [`is_awaited`](Self::is_awaited).
    pub(super) fn descriptor(&self) -> RawFd {
        self.told.descriptor()
    }

    /// Whether a new client waits for the end of this one.
    pub(super) fn is_awaited(&self) -> bool {
        self.told.clear();
        self.client.as_ref().is_some_and(Client::is_awaited)
    }

    /// No request of the connection begins any more.
    pub(super) fn leave(&self) {
        self.client.iter().for_each(Client::leave);
    }

    /// Nothing of the connection can change the device any more.
    pub(super) fn settled(&mut self) {
        self.client = None;
    }
}
