//! The hosts of a shared region: joining it, leaving it, and what each of them has.
//!
//! A host has an area of the region, rows of the tables of backends and blkdevs, and groups of segments. Who has what is decided by
//! [agreement](crate::agreement); what is in the rows and the segments only that host stores. So a store that comes late, by a
//! host that was paused, is in memory that no other host uses.
//!
//! A host joins by a decision on an area. It has an *incarnation*, a random number for each time that it joins: one that comes
//! back under its name gets its area, its rows and its groups again, once it is proved that its former process has ended. Such
//! proof, and every wait, is the caller's: the engine has no clocks.
//!
//! Invariants:
//! - a host stores into an area, a row or a segment only between the decision that gives it to the host and the one that takes it;
//! - a host that left or was cleared has nothing: what it had is taken from it before its area can be another host's;
//! - a new host's tables are blank, durably, before its area has a header that says so, and no table is read before that;
//! - no two hosts with tables have one name.
//!
//! Elsewhere: the tables in the area (`transport`), signs of life (`beats`), who keeps a name (`names`), locks and clocks (`cbd-runtime`).

mod beats;
mod names;

use crate::{
    Environment,
    agreement::{Votes, freed, held},
};
use alloc::{format, string::String, sync::Arc, vec, vec::Vec};
pub use beats::{Beat, Life};
use cbd_format::{
    AreaHeader, FieldText, Holding, Layout, Object, SharedLayout, crc32c,
    shared::{Decided, HOLDING_CLEARED},
    tables::decode_text,
};
use cbd_types::{BootId, Error, ErrorKind, HostId, MutationPoint, Region, Result};

use crate::slots::{InBoth, TwoSlots};

/// The mutation points of the header of an area.
const HEADER: InBoth = InBoth {
    first_fence: MutationPoint::AreaHeaderFirstFence,
    second: MutationPoint::AreaHeaderSecond,
    fence: MutationPoint::AreaHeaderFence,
};

/// Bytes that are blanked at a time.
const BLANK: u64 = 16 * cbd_format::PAGE;

/// A host that has an area.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Host {
    /// Its area.
    pub id: HostId,
    /// Its name; empty while it joins for the first time.
    pub name: String,
    /// Its present incarnation.
    pub incarnation: u64,
    /// Its last sign of life, if it has given one in this incarnation.
    pub beat: Option<Beat>,
    /// Whether what it had is being taken from it.
    pub is_being_cleared: bool,
}

/// Proves that no process acts as a host any more, and keeps others from beginning to. The arguments are the area; the host that
/// has it now, `None` for an area that no host has; and a function that looks for the host's last sign of life.
///
/// It returns [`ErrorKind::Busy`] if the host lives, or another process is about to be this host.
pub type Proof<'a> = dyn FnMut(HostId, Option<&Host>, &dyn Fn() -> Option<Beat>) -> Result<()> + 'a;

/// This process as a host of a shared region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its area.
    pub id: HostId,
    /// Its name.
    pub name: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// The decision by which this host got its area first.
    granted: u64,
}

/// An area that was decided to be of the process that joins.
struct Joined {
    id: HostId,
    /// [`Member::granted`].
    granted: u64,
    /// The claim with which it was decided.
    claim: u32,
    /// Whether the area has had tables of a host of this name.
    is_settled: bool,
}

/// The hosts of a shared region.
pub struct Members<E: Environment> {
    environment: Arc<E>,
    region: Arc<Region<E::Memory>>,
    layout: Layout,
    parts: SharedLayout,
}

impl<E: Environment> core::fmt::Debug for Members<E> {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(out, "Members({})", self.parts.groups)
    }
}

impl<E: Environment> Members<E> {
    /// The hosts of a region with this layout; `None` if it is not shared.
    pub fn new(environment: Arc<E>, region: Arc<Region<E::Memory>>, layout: Layout) -> Option<Self> {
        let parts = layout.shared_parts()?;
        Some(Self { environment, region, layout, parts })
    }

    fn votes(&self, object: Object) -> Votes<'_, E::Memory> {
        Votes::new(&self.region, self.parts, object)
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region<E::Memory>> {
        &self.region
    }

    fn ids(&self) -> impl Iterator<Item = HostId> + use<E> {
        (0..self.parts.hosts).map(HostId)
    }

    /// All hosts that have an area.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] or [`ErrorKind::Damaged`] if it cannot be read who has one.
    pub fn all(&self) -> Result<Vec<Host>> {
        let mut hosts = Vec::new();
        for id in self.ids() {
            if let Some(host) = self.host(id)? {
                hosts.push(host);
            }
        }
        Ok(hosts)
    }

    /// The host that has an area; `None` if no host has it.
    ///
    /// # Errors
    /// As [`all`](Self::all); [`ErrorKind::OutOfRange`] for an area that is not there.
    pub fn host(&self, id: HostId) -> Result<Option<Host>> {
        if id.0 >= self.parts.hosts {
            let text =
                format!("there is no host {id}: a shared region has hosts 0 to {}", self.parts.hosts - 1);
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
        let holding = self.votes(Object::Area(id.0)).known()?.holding;
        Ok((holding.state.get() != 0).then(|| self.host_of(id, &holding)))
    }

    /// The host that has an area by this decision.
    fn host_of(&self, id: HostId, holding: &Holding) -> Host {
        let header = self.header(id);
        let name = header
            .content()
            .filter(|header| header.granted == holding.granted)
            .and_then(|header| decode_text("host name", header.name_length, &header.name).ok())
            .unwrap_or_default();
        let incarnation = holding.incarnation.get();
        let beat = self.beat_of(id).filter(|beat| beat.incarnation == incarnation);
        Host { id, name, incarnation, beat, is_being_cleared: holding.state.get() == HOLDING_CLEARED }
    }

    /// The header of an area, as the host has published it.
    fn header(&self, id: HostId) -> TwoSlots<AreaHeader> {
        let at = self.parts.header(id.0);
        for at in at {
            self.region.observe(MutationPoint::VoteObserve, at, 128);
        }
        TwoSlots::read(&self.region, at, u64::from(id.0))
    }

    /// Becomes the host `name`: the one that there is, if `prove` shows that its process has ended, or a new one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a name that does not fit; [`ErrorKind::Busy`] if the host lives, or joins elsewhere at this
    /// moment; [`ErrorKind::AlreadyExists`] if two hosts have the name; [`ErrorKind::NoSpace`] if there are as many hosts as there
    /// can be; errors of `prove`, of reading and of storing.
    pub fn join(&self, name: &str, prove: &mut Proof<'_>) -> Result<Member> {
        let text = FieldText::<64>::new("host name", name)?;
        let incarnation = self.environment.random() | 1;
        let number = number_of(name);
        let joined = match self.former(name, number)? {
            Some(former) => {
                let id = former.host.id;
                prove(id, Some(&former.host), &|| self.beat_of(id))?;
                let joined = self.come_back(id, incarnation, &former.holding)?;
                Joined { is_settled: former.is_settled, ..joined }
            }
            None => self.join_new(number, incarnation, prove)?,
        };
        let member = Member { id: joined.id, name: name.into(), incarnation, granted: joined.granted };
        if !joined.is_settled {
            self.settle_name(&member, joined.claim, number, prove)?;
        }
        self.prepare_area(&member, text)?;
        Ok(member)
    }

    /// Takes the area of a host of the same name over, whose process has ended.
    fn come_back(&self, id: HostId, incarnation: u64, former: &Holding) -> Result<Joined> {
        let votes = self.votes(Object::Area(id.0));
        let claim =
            votes.take_claim(self.environment.random(), incarnation, Some(former.incarnation.get()))?;
        let decided = votes.decide(&*self.environment, (claim, incarnation), |last| {
            if last.holding == *former {
                return Ok(Some(*former));
            }
            if last.holding.incarnation.get() == incarnation {
                return Ok(None);
            }
            Err(Error::new(
                ErrorKind::Busy,
                format!("host {id} was started or cleared elsewhere at the same time"),
            ))
        })?;
        Ok(Joined { id, granted: decided.holding.granted.get(), claim, is_settled: false })
    }

    /// Gets the first area that no host has.
    fn join_new(&self, number: u64, incarnation: u64, prove: &mut Proof<'_>) -> Result<Joined> {
        for id in self.ids() {
            let votes = self.votes(Object::Area(id.0));
            if votes.known()?.holding.state.get() != 0 {
                continue;
            }
            match prove(id, None, &|| self.beat_of(id)) {
                // Another process on this machine is about to have it.
                Err(error) if error.kind() == ErrorKind::Busy => continue,
                proved => proved?,
            }
            let claim = votes.take_claim(self.environment.random(), incarnation, None)?;
            let decided = votes.decide(&*self.environment, (claim, incarnation), |last| {
                let granted = (last.version + 1).into();
                let wanted = Holding { granted, name: number.into(), ..held(id.0) };
                Ok((last.holding.state.get() == 0).then_some(wanted))
            })?;
            if decided.holding.incarnation.get() == incarnation {
                return Ok(Joined { id, granted: decided.holding.granted.get(), claim, is_settled: false });
            }
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "the region has {} hosts, as many as it can have: let one leave (tp-unreg there), or clear one that is dead",
                self.parts.hosts
            ),
        ))
    }

    fn decide_free(&self, id: HostId, claim: u32, incarnation: u64) -> Result<Decided> {
        self.votes(Object::Area(id.0)).decide(&*self.environment, (claim, incarnation), |last| {
            let is_mine = last.holding.incarnation.get() == incarnation && last.holding.state.get() != 0;
            Ok(is_mine.then(|| freed(id.0)))
        })
    }

    /// Blanks the tables of an area that belonged to another host, and then says whose they are.
    fn prepare_area(&self, member: &Member, name: FieldText<'_, 64>) -> Result<()> {
        let mut header = self.header(member.id);
        if header.is_lost() {
            // The tables may be those of this host, with all that its caches hold.
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "both copies of the header of the area of host {} are damaged, so that it is not known whose tables it has: \
                     what its caches hold is kept but cannot be reached",
                    member.id
                ),
            ));
        }
        if header.content().is_some_and(|header| header.granted.get() == member.granted) {
            return Ok(());
        }
        let own = self.layout.for_host(member.id.0).ok_or_else(not_shared)?;
        let end = self.parts.area(member.id.0) + self.parts.stride;
        let blank = vec![0; BLANK as usize];
        let mut stored = self.region.nothing_in_flight();
        let mut at = own.host_area;
        while at < end {
            let length = BLANK.min(end - at);
            stored = stored.and(self.region.store(at, &blank[..length as usize]));
            at += length;
        }
        self.region.fence(MutationPoint::AreaBlankFence, stored);
        self.region.sync(MutationPoint::AreaBlankSync, own.host_area, end - own.host_area)?;
        header.keep_in_both(&self.region, HEADER, |header| {
            header.granted = member.granted.into();
            name.write(&mut header.name_length, &mut header.name);
        })?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    /// Refuses a member that has left, was cleared, or came back in another process.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`]; errors of reading.
    pub fn check_member(&self, member: &Member) -> Result<()> {
        let last = self.votes(Object::Area(member.id.0)).known()?.holding;
        if last.is_held() && last.incarnation.get() == member.incarnation {
            return Ok(());
        }
        let what = if last.state.get() == 0 || last.state.get() == HOLDING_CLEARED {
            "was cleared by an operator, or has left"
        } else {
            "was started elsewhere"
        };
        Err(Error::new(
            ErrorKind::Stopped,
            format!("this process is host {} ({}) no more: the host {what}", member.id, member.name),
        ))
    }

    /// Leaves the region. The host has no backend and no blkdev.
    ///
    /// # Errors
    /// Errors of reading and storing; [`ErrorKind::Busy`] if other hosts never let it come to a decision. It can be repeated.
    pub fn leave(&self, member: &Member) -> Result<()> {
        self.check_member(member)?;
        for object in self.objects() {
            self.release(member, object)?;
        }
        self.end_beat(member);
        let votes = self.votes(Object::Area(member.id.0));
        let own = member.incarnation;
        let claim = votes.take_claim(self.environment.random(), own, Some(own))?;
        self.decide_free(member.id, claim, own).map(drop)
    }

    /// Takes everything from a host whose process has ended, as `prove` shows or an operator says. What its caches hold is dropped.
    /// `host` is what was known of it when that was decided.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it lives, or is not in that incarnation any more; errors of reading
    /// and storing. It can be repeated, by any host: until it has succeeded, no host has what the host had.
    pub fn clear(&self, host: &Host, by: &Member, prove: &mut Proof<'_>) -> Result<()> {
        let id = host.id;
        prove(id, Some(host), &|| self.beat_of(id))?;
        let votes = self.votes(Object::Area(id.0));
        let incarnation = self.environment.random() | 1;
        let claim = votes.take_claim(self.environment.random(), incarnation, None)?;
        let came_back =
            || Error::new(ErrorKind::Busy, format!("host {id} came back, or is being cleared elsewhere"));
        // 1. The host has nothing any more, and no other host has it yet.
        votes.decide(&*self.environment, (claim, incarnation), |last| {
            if last.holding.incarnation.get() == incarnation {
                return Ok(None);
            }
            if last.holding.incarnation.get() != host.incarnation {
                return Err(came_back());
            }
            Ok(Some(Holding { state: HOLDING_CLEARED.into(), ..last.holding }))
        })?;
        // 2. What it had is no host's.
        for object in self.objects() {
            self.vote_as(by, object, |last| Ok(last.holding.is_of(id.0).then(|| freed(id.0))))?;
        }
        // 3. Its area is.
        self.decide_free(id, claim, incarnation).map(drop)
    }

    /// The objects that hosts have, besides their areas.
    fn objects(&self) -> impl Iterator<Item = Object> + use<E> {
        let SharedLayout { backends, blkdevs, groups, .. } = self.parts;
        let rows = (0..backends).map(Object::Backend).chain((0..blkdevs).map(Object::Blkdev));
        rows.chain((0..groups).map(Object::Group))
    }

    fn vote_as(
        &self,
        member: &Member,
        object: Object,
        wanted: impl FnMut(&Decided) -> Result<Option<Holding>>,
    ) -> Result<Decided> {
        self.votes(object).decide(&*self.environment, (member.id.0, member.incarnation), wanted)
    }

    /// The last decision on an object.
    ///
    /// # Errors
    /// As [`all`](Self::all).
    pub fn decided(&self, object: Object) -> Result<Decided> {
        self.votes(object).known()
    }

    /// The host that has an object.
    ///
    /// # Errors
    /// As [`all`](Self::all).
    pub fn owner(&self, object: Object) -> Result<Option<HostId>> {
        let last = self.votes(object).known()?.holding;
        Ok(last.is_held().then(|| HostId(last.host.get())))
    }

    /// Gives an object to this host. `false` if another host has it.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`] if this process is the host no more; errors of reading and storing; [`ErrorKind::Busy`] if other hosts
    /// never let it come to a decision.
    pub fn acquire(&self, member: &Member, object: Object) -> Result<bool> {
        self.check_member(member)?;
        let id = member.id.0;
        let decided = self.vote_as(member, object, |last| Ok((!last.holding.is_held()).then(|| held(id))))?;
        if !decided.holding.is_of(id) {
            return Ok(false);
        }
        // A host that was paused and cleared meanwhile does not use it: the next host with its area gets it.
        self.check_member(member)?;
        Ok(true)
    }

    /// Gives an object of this host to another one, which has agreed to that.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`] if this process is the host no more, or does not have the object; as [`acquire`](Self::acquire). After
    /// another error it is not known whether the other host has it.
    pub fn pass_on(&self, member: &Member, object: Object, to: HostId) -> Result<()> {
        self.check_member(member)?;
        let (from, to) = (member.id.0, to.0);
        let decided = self.vote_as(member, object, |last| Ok(last.holding.is_of(from).then(|| held(to))))?;
        if decided.holding.is_of(to) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Stopped, format!("host {from} does not have {object:?} any more")))
    }

    /// The header of a host's area; `None` if it cannot be read now, or is not of the host that has the area.
    pub(crate) fn area_header(&self, id: HostId) -> Option<AreaHeader> {
        let holding = self.votes(Object::Area(id.0)).known().ok()?.holding;
        let header = self.header(id);
        header.content().filter(|header| holding.is_held() && header.granted == holding.granted).copied()
    }

    /// Changes the header of this host's area. No other thread of the process does so.
    pub(crate) fn change_header(&self, member: &Member, change: impl FnOnce(&mut AreaHeader)) -> Result<()> {
        self.check_member(member)?;
        let mut header = self.header(member.id);
        if header.content().is_none_or(|header| header.granted.get() != member.granted) {
            let text = format!("the header of the area of host {} cannot be read", member.id);
            return Err(Error::new(ErrorKind::Damaged, text));
        }
        header.keep_in_both(&self.region, HEADER, change)?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    /// Takes an object from this host, if it has it. It stores nothing there any more.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn release(&self, member: &Member, object: Object) -> Result<()> {
        let id = member.id.0;
        self.vote_as(member, object, |last| Ok(last.holding.is_of(id).then(|| freed(id)))).map(drop)
    }
}

/// A number for a name; the name itself is in the header of the area.
fn number_of(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
    u64::from(crc32c(bytes)) << 32 | u64::from(crc32c(&reversed)) ^ bytes.len() as u64
}

fn not_shared() -> Error {
    Error::new(ErrorKind::InvalidArgument, "the region is not shared by several hosts")
}

/// The boot of the machine on which a beat was stored.
impl Beat {
    /// Whether it is of this boot of this machine.
    #[must_use]
    pub fn is_of_boot(&self, boot: BootId) -> bool {
        self.boot.is_same_known(boot)
    }
}
