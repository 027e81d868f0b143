//! The clients of an export, and the rule for clients that reconnect.
//!
//! A broken connection can leave requests behind: some wait for space, some are in flight to the backing device. A client that
//! reconnects does not identify itself as the previous one. So an export answers the first request of a new client only when no
//! request of a client that had disconnected by then can change the device any more. Otherwise a write of the old connection
//! could overwrite data that was acknowledged on the new one.
//!
//! Invariants:
//! - A new client waits for a disconnected client until the latter's [`Client`] is dropped, even if the thread that serves it has
//!   not noticed the end of the connection; that thread is notified of the wait.
//! - No client waits for a client that disconnected before its own first request was seen: the disconnected client may not begin
//!   any more.
//! - No client waits for one that was still connected when the waiting client began, so two clients never wait for each other.
//! - There are as many entries as clients.
//!
//! Elsewhere: giving up requests that have not begun and completing the other ones
//! ([`RequestQueue::give_up`](crate::RequestQueue::give_up)), and the waiting itself (the exports' threads).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Notifies a client's thread that the state of its [`Client`] has changed.
pub type Notify = Box<dyn Fn() + Send>;

/// Whether the other end of a client's connection is closed.
pub type IsGone = Box<dyn Fn() -> bool + Send>;

/// The clients of one export.
#[derive(Clone, Default)]
pub struct Clients(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    next: u64,
    present: BTreeMap<u64, Entry>,
}

struct Entry {
    is_gone: IsGone,
    notify: Notify,
    /// The first request of the client was seen.
    begun: bool,
    /// No further request of the client is read.
    leaving: bool,
    /// Another client waits for the end of this one.
    awaited: bool,
    /// Numbers of the clients that this client waits for.
    waits_for: BTreeSet<u64>,
}

/// A client's entry among those of its export. Drop it when no request of the client can change the device any more.
pub struct Client {
    clients: Clients,
    number: u64,
}

impl fmt::Debug for Clients {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Clients({} present)", self.state().present.len())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Client({})", self.number)
    }
}

impl Clients {
    /// Creates an empty set of clients.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client that connects. Both functions are called from threads of other clients and must not block.
    #[must_use]
    pub fn connect(&self, is_gone: IsGone, notify: Notify) -> Client {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        let (begun, leaving, awaited, waits_for) = (false, false, false, BTreeSet::new());
        state.present.insert(number, Entry { is_gone, notify, begun, leaving, awaited, waits_for });
        Client { clients: self.clone(), number }
    }

    /// Number of clients whose first request waits for other clients.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.state().present.values().filter(|entry| !entry.waits_for.is_empty()).count()
    }
}

impl Client {
    /// Records that the first request of this client arrived: from now on it waits for all disconnected clients, and the thread
    /// of each of them is notified. Returns false if this client has disconnected itself and another client has begun since: then
    /// none of its requests may begin.
    #[must_use]
    pub fn begin(&self) -> bool {
        let mut state = self.clients.state();
        let mut waits_for = BTreeSet::new();
        for (&number, entry) in state.present.iter_mut().filter(|(number, _)| **number != self.number) {
            let unnoticed = !entry.leaving && (entry.is_gone)();
            if entry.leaving || unnoticed {
                entry.awaited = true;
                (entry.notify)();
                if entry.begun {
                    waits_for.insert(number);
                }
            }
        }
        let Some(entry) = state.present.get_mut(&self.number) else { return false };
        (entry.begun, entry.waits_for) = (true, waits_for);
        !entry.awaited
    }

    /// Number of disconnected clients that this client still waits for. When the number becomes 0, the first request of this
    /// client may be executed, and its thread is notified.
    #[must_use]
    pub fn waits_for(&self) -> usize {
        let state = self.clients.state();
        state.present.get(&self.number).map_or(0, |entry| entry.waits_for.len())
    }

    /// Whether another client waits for this one: then no request of this client may begin any more, and those that
    /// have not begun must be given up.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.clients.state().present.get(&self.number).is_some_and(|entry| entry.awaited)
    }

    /// Records that the connection has ended: no request of this client begins any more; some may be in flight.
    pub fn leave(&self) {
        if let Some(entry) = self.clients.state().present.get_mut(&self.number) {
            entry.leaving = true;
        }
    }
}

/// Whether a disconnected client is settled, given the number of its requests that can still change the device.
#[must_use]
pub fn is_settled(changes: usize) -> bool {
    changes == 0
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut state = self.clients.state();
        state.present.remove(&self.number);
        for entry in state.present.values_mut() {
            if entry.waits_for.remove(&self.number) && entry.waits_for.is_empty() {
                (entry.notify)();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// A client, whether its connection is closed, and how often it was notified.
    fn connect(clients: &Clients) -> (Client, Arc<AtomicBool>, Arc<AtomicUsize>) {
        let (gone, notified) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (is_gone, count) = (Arc::clone(&gone), Arc::clone(&notified));
        let client = clients.connect(
            Box::new(move || is_gone.load(Ordering::SeqCst)),
            Box::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            }),
        );
        (client, gone, notified)
    }

    #[test]
    fn a_new_client_waits_for_one_that_left_and_not_for_one_that_is_connected() {
        let clients = Clients::new();
        let (left, _, told) = connect(&clients);
        let (present, _, not_told) = connect(&clients);
        let (new, _, notified) = connect(&clients);
        assert!(left.begin() && present.begin());
        left.leave();
        assert!(new.begin());
        assert_eq!((new.waits_for(), clients.waiting()), (1, 1));
        assert_eq!((told.load(Ordering::SeqCst), not_told.load(Ordering::SeqCst)), (1, 0));
        assert!(left.is_awaited() && !present.is_awaited());
        drop(left);
        assert_eq!((new.waits_for(), clients.waiting()), (0, 0));
        assert_eq!(notified.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_connection_that_is_closed_and_not_noticed_is_waited_for() {
        let clients = Clients::new();
        let (old, gone, told) = connect(&clients);
        assert!(old.begin());
        gone.store(true, Ordering::SeqCst);
        let (new, _, _) = connect(&clients);
        assert!(new.begin());
        assert_eq!((new.waits_for(), told.load(Ordering::SeqCst)), (1, 1));
        drop(old);
        assert_eq!(new.waits_for(), 0);
    }

    #[test]
    fn a_client_that_was_gone_before_its_first_request_was_seen_never_begins() {
        let clients = Clients::new();
        let (old, gone, _) = connect(&clients);
        gone.store(true, Ordering::SeqCst);
        let (new, _, _) = connect(&clients);
        assert!(new.begin());
        assert_eq!(new.waits_for(), 0);
        assert!(!old.begin());
    }

    #[test]
    fn a_client_does_not_wait_for_one_that_leaves_after_it_began() {
        let clients = Clients::new();
        let (old, _, _) = connect(&clients);
        let (new, _, _) = connect(&clients);
        assert!(old.begin() && new.begin());
        old.leave();
        assert_eq!(new.waits_for(), 0);
        assert!(!old.is_awaited());
    }

    #[test]
    fn a_client_that_disconnects_while_it_waits_is_notified_and_waited_for() {
        let clients = Clients::new();
        let (old, _, _) = connect(&clients);
        assert!(old.begin());
        old.leave();
        let (first, gone, _) = connect(&clients);
        assert!(first.begin());
        gone.store(true, Ordering::SeqCst);
        let (second, _, _) = connect(&clients);
        assert!(second.begin());
        assert!(first.is_awaited());
        assert_eq!(second.waits_for(), 2);
        drop(first);
        drop(old);
        assert_eq!(second.waits_for(), 0);
    }
}
