//! This process as a host of a shared region: the proof that a former process of it has ended, and its signs of life.
//!
//! On one machine the kernel's locks prove that a process has ended. Of a host on another machine only its signs of life are seen:
//! if it gives none for [`SILENT`], it counts as dead for a process that comes back under its name. A paused virtual machine gives
//! none either; so a name belongs to one machine, and operators clear the hosts of others.
//!
//! Invariants: while a [`Living`] lives, its process has the lock of its host, and gives a sign of life each [`BEAT`]; once another
//! process is that host, or it was cleared, its caches are abandoned: nothing is served or written back any more.
//!
//! Elsewhere: decisions (`cbd-engine`, `members`), locks (`cbd-pmem`).

use crate::ProcessEnvironment;
use crate::presence::pause;
use crate::region::OpenTransport;
use cbd_engine::{Beat, Host, Life, Member, Members, Transport};
use cbd_format::shared::HOSTS_MAX;
use cbd_pmem::{HostLocks, Mapping};
use cbd_types::{BootId, Context, Error, ErrorKind, HostId, Pmem, Region, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between two signs of life.
pub const BEAT: Duration = Duration::from_millis(500);

/// How long a host on another machine gives no sign of life before it counts as dead for its successor.
pub const SILENT: Duration = Duration::from_secs(4);

/// What to do about a host that lives, for a process that would be that host.
const JOINING: &str = "a host is one process of one machine; register under another name, or end that one";

/// The same for one that would clear it.
const CLEARING: &str = "a host that lives is not cleared; tp-unreg there lets it leave";

/// How often an observer looks.
const LOOK: Duration = Duration::from_millis(100);

/// How long a process looks before it says of a host that it has seen no sign of life: more than two times [`BEAT`].
pub const FIRST_LOOK: Duration = Duration::from_millis(1200);

/// A host that was seen to live within this time is alive.
pub const ALIVE: Duration = Duration::from_secs(3);

/// Time without a look of its own after which a process does not know whether others gave signs of life: it was paused.
const LATE: Duration = Duration::from_millis(1000);

/// Signs of life between two looks at who has an area.
const HOSTS_EVERY: u64 = 4;

/// The members of a shared region.
pub type ProcessMembers = Members<ProcessEnvironment>;

/// Opens the transport of a shared region as the host `name`. Waits up to [`SILENT`] for signs of life of a host of this name on
/// another machine.
///
/// # Errors
/// Those of [`Transport::open_shared`]; [`ErrorKind::Busy`] with what is known of the process if that host lives.
pub fn join(
    environment: Arc<ProcessEnvironment>,
    region: Region<Mapping>,
    name: &str,
) -> Result<OpenTransport> {
    let locks = region.memory().share_with_hosts()?.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "memory that no other process can open has no other hosts")
    })?;
    let boot = region.boot();
    let mut proved = Vec::new();
    let transport = Transport::open_shared(environment, region, name, &mut |id, host, look| {
        prove_ended(&locks, boot, id, host, look, JOINING).context(|| format!("becoming host {name}"))?;
        proved.push(id);
        Ok(())
    })?;
    let own = transport.members().map(|(_, member)| member.id);
    // Areas that it did not get, or of which it freed what a process left that died while it joined.
    for id in proved.into_iter().filter(|id| Some(*id) != own) {
        locks.release(id.0);
    }
    let living = Living::begin(&transport, locks)?;
    Ok(OpenTransport { living: Some(living), presence: None, transport })
}

/// Refuses a shared region of which a host on another machine lives: waits up to [`SILENT`] for signs of life, if a host gave one
/// last. Any other region is accepted.
///
/// # Errors
/// [`ErrorKind::Busy`] with the host's name.
pub fn refuse_living<P: Pmem + 'static>(
    environment: &Arc<ProcessEnvironment<P>>,
    region: &Arc<Region<P>>,
) -> Result<()> {
    let Ok(Some(members)) = Transport::members_of(Arc::clone(environment), Arc::clone(region)) else {
        return Ok(());
    };
    let boot = region.boot();
    // A process of this boot would have the region locked. Who has an area of which the votes are damaged is not known, but its host
    // gives signs of life all the same.
    let may_live = |id: &HostId| {
        let beat = members.beat_of(*id);
        beat.is_some_and(|beat| beat.incarnation != 0 && !beat.is_of_boot(boot))
            && !matches!(members.host(*id), Ok(None))
    };
    let others: Vec<HostId> = (0..HOSTS_MAX).map(HostId).filter(may_live).collect();
    let begun = Instant::now();
    let mut lives = vec![Life::default(); others.len()];
    while !others.is_empty() && begun.elapsed() < SILENT {
        let now = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        for (id, life) in others.iter().zip(&mut lives) {
            life.note(members.beat_of(*id).as_ref(), now);
            if life.since_ms(now).is_some() {
                let name = members.host(*id).ok().flatten().map_or_else(String::new, |host| host.name);
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "host {id} ({name}) of the region is alive on another machine: end its daemon first"
                    ),
                ));
            }
        }
        pause(LOOK);
    }
    Ok(())
}

/// As [`refuse_living`], for a region that is to be formatted.
pub(crate) fn refuse_living_owned(
    environment: &Arc<ProcessEnvironment>,
    region: Region<Mapping>,
) -> Result<Region<Mapping>> {
    let region = Arc::new(region);
    refuse_living(environment, &region)?;
    Arc::into_inner(region).ok_or_else(|| Error::new(ErrorKind::Busy, "the region is in use in this process"))
}

/// Proves that no process is the host `id` any more: by the kernel's lock, which it takes, and for another boot of a machine by the
/// absence of signs of life.
fn prove_ended(
    locks: &HostLocks,
    boot: BootId,
    id: HostId,
    host: Option<&Host>,
    look: &dyn Fn() -> Option<Beat>,
    advice: &str,
) -> Result<()> {
    let busy = |text: String| Err(Error::new(ErrorKind::Busy, text));
    let named =
        |host: &Host| if host.name.is_empty() { "of this name".to_owned() } else { host.name.clone() };
    let lock = locks.take(id.0).map_err(|error| {
        Error::new(ErrorKind::System, format!("the lock of host {id} cannot be taken: {error}"))
    })?;
    if !lock {
        return busy(match host {
            Some(host) => format!(
                "host {} is alive on this machine{}: {advice}",
                named(host),
                host.beat.map_or_else(String::new, |beat| format!(", process {}", beat.process))
            ),
            None => format!("another process of this machine is becoming host {id}"),
        });
    }
    let Some(host) = host else { return Ok(()) };
    if host.beat.is_some_and(|beat| beat.is_of_boot(boot)) {
        // Its process would have the lock.
        return Ok(());
    }
    tracing::info!(
        "host {} was last seen on another machine, or before a restart of this one: waiting {} s for a sign of life",
        named(host),
        SILENT.as_secs()
    );
    let (begun, mut life) = (Instant::now(), Life::default());
    while begun.elapsed() < SILENT {
        let now = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        life.note(look().as_ref(), now);
        if life.since_ms(now).is_some() {
            locks.release(id.0);
            return busy(format!("host {} is alive on another machine: {advice}", named(host)));
        }
        pause(LOOK);
    }
    Ok(())
}

/// What was seen of the hosts of a region.
#[derive(Debug, Default)]
struct Seen {
    lives: Vec<Life>,
    /// When they were looked at last.
    looked_ms: u64,
    /// The hosts that had an area when it was last looked who has one.
    hosts: Vec<Host>,
    /// Why this process is the host no more.
    lost: Option<String>,
}

impl Seen {
    /// Time since the last sign of life of a host. Up to the last look, if that was long ago: it says nothing of the time after it.
    fn since(&self, host: HostId, now_ms: u64) -> Option<Duration> {
        let is_late = now_ms > self.looked_ms + LATE.as_millis() as u64;
        let until = if is_late { self.looked_ms } else { now_ms };
        self.lives.get(host.0 as usize)?.since_ms(until).map(Duration::from_millis)
    }
}

#[derive(Debug)]
struct Shared {
    seen: Mutex<Seen>,
    stop: Mutex<bool>,
    stopped: Condvar,
    begun: Instant,
    /// Set when this process is the host no more, before anything else says so.
    is_lost: Arc<AtomicBool>,
}

impl Shared {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Keeps this process the host that it has become: a thread gives signs of life and looks for those of others. The drop ends it; the
/// host stays, and is not alive.
pub struct Living {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    members: Arc<ProcessMembers>,
    member: Member,
    locks: Arc<HostLocks>,
}

impl std::fmt::Debug for Living {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Living({:?})", self.member)
    }
}

/// A host, as this process sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeenHost {
    /// The host.
    pub host: Host,
    /// Whether it is this process.
    pub is_self: bool,
    /// Time since its last sign of life that this process has seen come; `None` if it has seen none.
    pub since: Option<Duration>,
}

impl SeenHost {
    /// Whether it is alive, as far as this process knows.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.is_self || self.since.is_some_and(|since| since < ALIVE)
    }
}

impl Living {
    fn begin(transport: &Arc<Transport<ProcessEnvironment>>, locks: HostLocks) -> Result<Self> {
        let Some((members, member)) = transport.members().map(|(all, own)| (Arc::clone(all), own.clone()))
        else {
            return Err(Error::new(ErrorKind::InvalidArgument, "the region is not shared"));
        };
        members.beat(&member, 1, std::process::id());
        let shared = Arc::new(Shared {
            seen: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            begun: Instant::now(),
            is_lost: Arc::default(),
        });
        let beating = Beating {
            shared: Arc::clone(&shared),
            transport: Arc::downgrade(transport),
            members: Arc::clone(&members),
            member: member.clone(),
        };
        let thread =
            std::thread::Builder::new().name("cbd-host".to_owned()).spawn(move || beating.run()).map_err(
                |error| Error::new(ErrorKind::System, format!("no thread for signs of life: {error}")),
            )?;
        Ok(Self { shared, thread: Some(thread), members, member, locks: Arc::new(locks) })
    }

    /// The hosts of the region, and when this process has last seen them live. Waits at most [`FIRST_LOOK`] after this process has
    /// joined: before, it has seen no host live.
    ///
    /// # Errors
    /// Those of [`Members::all`].
    pub fn hosts(&self) -> Result<Vec<SeenHost>> {
        if let Some(left) = FIRST_LOOK.checked_sub(self.shared.begun.elapsed()) {
            pause(left);
        }
        let hosts = self.members.all()?;
        Ok(self.with_lives(&self.shared.seen.lock(), hosts))
    }

    /// As [`hosts`](Self::hosts), without a wait and without reading the region: who has an area is up to some seconds old. None for
    /// [`FIRST_LOOK`] after this process has joined: it does not know yet who lives.
    #[must_use]
    pub fn last_seen(&self) -> Vec<SeenHost> {
        if self.shared.begun.elapsed() < FIRST_LOOK {
            return Vec::new();
        }
        let seen = self.shared.seen.lock();
        self.with_lives(&seen, seen.hosts.clone())
    }

    fn with_lives(&self, seen: &Seen, hosts: Vec<Host>) -> Vec<SeenHost> {
        let now = self.shared.now_ms();
        let with_life = |host: Host| {
            let since = seen.since(host.id, now);
            SeenHost { is_self: host.id == self.member.id, host, since }
        };
        hosts.into_iter().map(with_life).collect()
    }

    /// Why this process is the host no more; `None` while it is.
    #[must_use]
    pub fn lost(&self) -> Option<String> {
        self.shared.seen.lock().lost.clone()
    }

    /// A flag that is set when this process is the host no more: threads that store into the region look at it before they do.
    #[must_use]
    pub fn loss(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.is_lost)
    }

    /// Leaves the region by `leave`: no sign of life is given meanwhile, nor afterwards if it succeeds.
    ///
    /// # Errors
    /// That of `leave`.
    pub fn leave(&self, leave: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut stop = self.shared.stop.lock();
        leave()?;
        *stop = true;
        Ok(())
    }

    /// Proves that a host is dead, waiting up to [`SILENT`] for a sign of life. While the result lives, no process of this machine can
    /// become that host.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is this process, or lives; errors of the lock.
    pub fn prove_dead<'a>(&'a self, host: &'a Host) -> Result<DeadHost<'a>> {
        let id = host.id;
        if id == self.member.id {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("host {id} is this daemon itself; tp-unreg lets it leave"),
            ));
        }
        let boot = self.members.region().boot();
        let dead = DeadHost { living: self, host };
        prove_ended(&self.locks, boot, id, Some(host), &|| self.members.beat_of(id), CLEARING)
            .context(|| format!("clearing host {id}"))?;
        Ok(dead)
    }
}

/// A host that is [proved](Living::prove_dead) to be dead.
#[derive(Debug)]
pub struct DeadHost<'a> {
    living: &'a Living,
    host: &'a Host,
}

impl DeadHost<'_> {
    /// Takes everything from it.
    ///
    /// # Errors
    /// Those of [`Members::clear`]: if a process of another machine has become this host meanwhile, nothing is taken.
    pub fn clear(self) -> Result<()> {
        self.living.members.clear(self.host, &self.living.member, &mut |_, _, _| Ok(()))
    }
}

impl Drop for DeadHost<'_> {
    fn drop(&mut self) {
        self.living.locks.release(self.host.id.0);
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        *self.shared.stop.lock() = true;
        self.shared.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic was reported by its hook.
            let _ = thread.join();
        }
    }
}

/// The thread of a [`Living`].
struct Beating {
    shared: Arc<Shared>,
    transport: Weak<Transport<ProcessEnvironment>>,
    members: Arc<ProcessMembers>,
    member: Member,
}

impl Beating {
    fn run(self) {
        let mut number = 1;
        loop {
            // What cannot be read is reported by those who use it.
            let hosts = if number % HOSTS_EVERY == 1 { self.members.all().ok() } else { None };
            self.look(hosts);
            // Locked while the sign of life is stored: none comes after the host has left.
            let mut stop = self.shared.stop.lock();
            if !*stop {
                self.shared.stopped.wait_for(&mut stop, BEAT);
            }
            if *stop {
                return;
            }
            match self.members.check_member(&self.member) {
                Err(error) if error.kind() == ErrorKind::Stopped => return self.lose(&error),
                // Memory that fails is reported by those who use it.
                _ => {}
            }
            number += 1;
            self.members.beat(&self.member, number, std::process::id());
        }
    }

    /// Notes the signs of life of all hosts, and who they are.
    fn look(&self, hosts: Option<Vec<Host>>) {
        let beats: Vec<Option<Beat>> = (0..HOSTS_MAX).map(|id| self.members.beat_of(HostId(id))).collect();
        let now = self.shared.now_ms();
        let mut seen = self.shared.seen.lock();
        seen.hosts = hosts.unwrap_or_else(|| std::mem::take(&mut seen.hosts));
        seen.looked_ms = now;
        seen.lives.resize_with(beats.len(), Life::default);
        for (life, beat) in seen.lives.iter_mut().zip(&beats) {
            life.note(beat.as_ref(), now);
        }
    }

    fn lose(&self, error: &Error) {
        self.shared.is_lost.store(true, Ordering::SeqCst);
        tracing::error!("{}: its caches are served no more", error.line());
        if let Some(transport) = self.transport.upgrade() {
            transport.abandon();
        }
        self.shared.seen.lock().lost = Some(error.line());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::BootId;

    #[test]
    fn a_process_that_was_paused_does_not_say_that_others_were_silent_meanwhile() {
        let mut seen = Seen { lives: vec![Life::default()], ..Seen::default() };
        let beat = |number| Beat { incarnation: 1, number, boot: BootId([1; 16]), process: 1 };
        for (number, now_ms) in [(1, 500), (2, 1000)] {
            seen.lives[0].note(Some(&beat(number)), now_ms);
            seen.looked_ms = now_ms;
        }
        let since = |seen: &Seen, now_ms| seen.since(HostId(0), now_ms).map(|since| since.as_millis());
        assert_eq!(since(&seen, 1700), Some(700));
        assert_eq!(since(&seen, 60_000), Some(0), "it has not looked");
        assert_eq!(seen.since(HostId(1), 1700), None);
        // The host has given none meanwhile.
        seen.lives[0].note(Some(&beat(2)), 60_000);
        seen.looked_ms = 60_000;
        assert_eq!(since(&seen, 60_000), Some(59_000));
    }
}
