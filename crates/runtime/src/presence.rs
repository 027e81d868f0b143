//! The presence of this process as the host of a region, for other machines that have the same memory.
//!
//! The lock of a region's file excludes processes of one kernel. Machines that share a CXL device, and guests with one file as their
//! NVDIMM, lock nothing between them. So a host looks at the note in the region before it uses the region, waits for a sign of life
//! where another boot has it, and renews its own note from then on.
//!
//! Invariants: no byte of a region is stored while a host that gives signs of life has it. Once another host has taken the region, no
//! store of this process reaches it. The thread of a [`Presence`] holds the region only for the time of a renewal, and has ended when
//! the presence is dropped; all waits are bounded. Memory that only this kernel reaches has no note, thread or wait.
//!
//! Elsewhere: the note (`cbd-format`), the single steps (`cbd-engine`, `transport::owner`).

use crate::ProcessEnvironment;
use cbd_engine::{
    Environment, Transport,
    owner::{Beat, Ownership, Seen, host, living, look, may_announce},
};
use cbd_format::OwnerNote;
use cbd_types::{Error, ErrorKind, Pmem, Reach, Region, Result};
use parking_lot::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The times of a presence. All hosts of a region use the same ones.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two renewals of the note.
    pub beat: Duration,
    /// How long a host that opens a region waits for a sign of life of another one.
    pub limit: Duration,
    /// Between two looks meanwhile.
    pub poll: Duration,
    /// How long a host that has announced itself waits for another one that does the same at once.
    pub settle: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            beat: Duration::from_millis(500),
            limit: Duration::from_secs(4),
            poll: Duration::from_millis(100),
            settle: Duration::from_millis(100),
        }
    }
}

/// How often bytes that are no whole note are looked at again: they may be those of a note that is just being stored.
const TORN_LOOKS: usize = 3;

/// Waits without a wake-up.
pub(crate) fn pause(time: Duration) {
    let (_kept, never) = channel::<()>();
    let _ = never.recv_timeout(time);
}

/// Waits until it is known that no other machine has the region, at most [`Timing::limit`]. `see` looks at the note. Returns the note
/// of a host of another boot that had the region and is gone.
///
/// # Errors
/// [`ErrorKind::Busy`] for a region that a living host of another machine has.
pub fn refuse_living(region: &str, timing: &Timing, see: &dyn Fn() -> Seen) -> Result<Option<OwnerNote>> {
    let mut first = see();
    for _ in 0..TORN_LOOKS {
        if first != Seen::Torn {
            break;
        }
        pause(timing.poll);
        first = see();
    }
    let Seen::Other(first) = first else { return Ok(None) };
    tracing::info!(
        "{region}: {} of another boot had it last and did not close it: waiting up to {:.1} s for a sign of life",
        host(&first),
        timing.limit.as_secs_f64()
    );
    let end = Instant::now() + timing.limit;
    while Instant::now() < end {
        pause(timing.poll);
        match see() {
            Seen::Other(now) if now.first_line() != first.first_line() => return Err(living(&now, region)),
            // It may be about to be stored; the next look tells.
            Seen::Other(_) | Seen::Torn => {}
            Seen::Free | Seen::SameBoot => return Ok(Some(first)),
        }
    }
    tracing::warn!(
        "{region}: {} gives no sign of life: it is gone, and this host takes the region",
        host(&first)
    );
    Ok(Some(first))
}

/// As [`refuse_living`], for a region that is open for changes.
///
/// # Errors
/// As [`refuse_living`].
pub fn refuse_living_in<P: Pmem>(
    region: &Region<P>,
    path: &str,
    timing: &Timing,
) -> Result<Option<OwnerNote>> {
    match region.reach() {
        Reach::Kernel => Ok(None),
        Reach::Guests | Reach::Machines => refuse_living(path, timing, &|| look(region)),
    }
}

/// What is to be abandoned when the region was taken, and the number of its users.
type Guarded = Box<dyn Fn(Ask) -> usize + Send>;

#[derive(Clone, Copy)]
enum Ask {
    Abandon,
    Users,
}

/// This process as the host of a region. Dropping it releases the region, if no thread of this process uses it any more: drop it before
/// the transport, and after everything else that stores into the region.
#[derive(Debug)]
pub struct Presence {
    /// The process that has the thread: a forked child has none.
    process: u32,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    guarded: Arc<Mutex<Option<GuardedTransport>>>,
}

struct GuardedTransport(Guarded);

impl std::fmt::Debug for GuardedTransport {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("GuardedTransport")
    }
}

impl Presence {
    /// Announces this process, the host `name`, in a region in which no other host [lives](refuse_living_in); `gone` is the note
    /// of one that was there.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another machine announces itself at once; [`ErrorKind::Media`] if a store fails, and
    /// [`ErrorKind::System`] without a thread.
    pub fn begin<P: Pmem + 'static>(
        region: &Arc<Region<P>>,
        (path, name): (&str, &str),
        timing: &Timing,
        gone: Option<OwnerNote>,
    ) -> Result<Self> {
        let mut presence =
            Self { process: std::process::id(), stop: None, thread: None, guarded: Arc::default() };
        let reach = region.reach();
        if reach == Reach::Kernel {
            return Ok(presence);
        }
        if !Ownership::is_possible(&**region) {
            tracing::warn!(
                "{path}: the memory of the note that says who has the region cannot be read: another machine that opens it is not noticed"
            );
            return Ok(presence);
        }
        let ownership = Ownership::new(&**region, rand::random(), presence.process, name).after(gone);
        ownership.announce(region)?;
        if gone.is_some() || reach == Reach::Machines {
            pause(timing.settle);
            ownership.confirm(region).map_err(|error| error.while_doing(format!("opening {path}")))?;
        }
        let (stop, stopped) = channel();
        let beats = Beats {
            ownership,
            region: Arc::downgrade(region),
            stopped,
            every: timing.beat,
            path: path.to_owned(),
            guarded: Arc::clone(&presence.guarded),
        };
        let thread = std::thread::Builder::new().name("cbd-presence".to_owned()).spawn(move || beats.run());
        let no_thread = |error| {
            Error::new(ErrorKind::System, format!("no thread to renew the note in {path}")).caused_by(error)
        };
        presence.thread = Some(thread.map_err(no_thread)?);
        presence.stop = Some(stop);
        Ok(presence)
    }

    /// Abandons the caches of `transport` when another host has taken its region.
    pub fn guard<E: Environment>(&self, transport: &Arc<Transport<E>>) {
        if self.thread.is_none() {
            return;
        }
        let guarded = Arc::downgrade(transport);
        *self.guarded.lock() = Some(GuardedTransport(Box::new(move |ask| match ask {
            Ask::Users => guarded.strong_count(),
            Ask::Abandon => guarded.upgrade().map_or(0, |transport| {
                transport.abandon();
                0
            }),
        })));
        // It may have been taken before.
        if transport.region().taken().is_some() {
            transport.abandon();
        }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if self.process != std::process::id() {
            // The thread is the parent's.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The thread of a presence.
struct Beats<P> {
    ownership: Ownership,
    region: Weak<Region<P>>,
    stopped: Receiver<()>,
    every: Duration,
    path: String,
    guarded: Arc<Mutex<Option<GuardedTransport>>>,
}

impl<P: Pmem> Beats<P> {
    fn run(mut self) {
        let mut has_warned = false;
        while self.stopped.recv_timeout(self.every) == Err(RecvTimeoutError::Timeout) {
            let Some(region) = self.region.upgrade() else { return };
            match self.ownership.beat(&region) {
                // Failing memory is reported by those who store data.
                Beat::Renewed | Beat::Failed => {}
                Beat::Restored if has_warned => {}
                Beat::Restored => {
                    has_warned = true;
                    tracing::warn!(
                        "{}: the note that says who has the region was gone, and was stored again: something else writes to its \
                         first page",
                        self.path
                    );
                }
                Beat::Replaced(by) => tracing::warn!(
                    "{}: {} was taken for gone and has continued: it notices now that this host has the region, and could store into \
                     the region until then",
                    self.path,
                    host(&by)
                ),
                Beat::Taken(by) => {
                    region.give_up_to(&by.host_name().unwrap_or_default(), by.process.get());
                    let error = region.taken().map(|error| error.line()).unwrap_or_default();
                    tracing::error!("{}: {error}", self.path);
                    if let Some(GuardedTransport(guarded)) = &*self.guarded.lock() {
                        guarded(Ask::Abandon);
                    }
                    return;
                }
            }
        }
        let Some(region) = self.region.upgrade() else { return };
        let transports = self.guarded.lock().as_ref().map_or(0, |guarded| (guarded.0)(Ask::Users));
        // The caller's, and this one: others may still store. A host that did not release the region is waited for by the next one.
        if transports <= 1 && Arc::strong_count(&region) <= 2 {
            self.ownership.release(&region);
        }
    }
}

/// Opens the transport in a region as its host `name`, or makes it with `format`, which is called when no living host has the region.
///
/// # Errors
/// [`ErrorKind::Busy`] if another machine has the region; as [`Presence::begin`], and the errors of [`Transport::open`] and `format`.
pub fn open<P: Pmem + 'static>(
    environment: Arc<ProcessEnvironment<P>>,
    region: Region<P>,
    (path, name): (&str, &str),
    timing: &Timing,
    format: Option<Format<'_, P>>,
) -> Result<(Arc<Transport<ProcessEnvironment<P>>>, Presence)> {
    let gone = refuse_living_in(&region, path, timing)?;
    let (transport, presence) = if let Some(format) = format {
        let transport = format(environment, region)?;
        let presence = Presence::begin(&transport.shared_region(), (path, name), timing, gone)?;
        (transport, presence)
    } else {
        let region = Arc::new(region);
        let begin = || Presence::begin(&region, (path, name), timing, gone);
        // Opening stores into the region. Where it is not known to be one, this comes first.
        let early = if may_announce(&region) { Some(begin()?) } else { None };
        let transport = Transport::open_held(environment, Arc::clone(&region))?;
        let presence = early.map_or_else(begin, Ok)?;
        (transport, presence)
    };
    presence.guard(&transport);
    Ok((transport, presence))
}

/// Makes a transport in a region.
pub type Format<'a, P> = Box<
    dyn FnOnce(Arc<ProcessEnvironment<P>>, Region<P>) -> Result<Arc<Transport<ProcessEnvironment<P>>>> + 'a,
>;

/// The machine's name, as a valid host name.
#[must_use]
pub fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let allowed = |letter: &char| letter.is_ascii_alphanumeric() || ".-_".contains(*letter);
    let name: String = name.trim().chars().filter(allowed).take(63).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests;
