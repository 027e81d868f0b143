//! The division of the space of a transport among the caches that share it.
//!
//! For each cache the engine counts the hits that it has or would have at each size (`cbd_engine::HitCurve`). Space goes where a segment brings
//! most hits, weighted: the curves' concave hulls are cut into pieces, and the pieces are served from the steepest to the flattest. A
//! hull and not the curve itself, because admission keeps a part of a loop that does not fit, so that hits rise with the size where
//! those of a plain LRU cache rise at one step only.
//!
//! Invariants: no size is below its minimum or above its maximum, and together they are the space that there is; a cache gives up at
//! most a tenth of itself in a round, and begins with nothing for a gain below a hundredth of the hits or below what chance
//! can make of the sample, so that noise moves nothing.
//!
//! Elsewhere: counting ([`cbd_engine`]), growing and shrinking caches (`resize`), when that is done (the daemon).

mod curve;
#[cfg(test)]
mod tests;

pub use curve::{Curve, Tracker};

/// The share of its segments that a cache gives up in a round, one in so many.
const STEP_ONE_IN: u32 = 10;
/// Gain below which no cache begins to give up anything, as a share of the hits.
const GAIN_MIN: f64 = 0.01;
/// The same while caches are giving up segments: they go on almost to the end, so that the next small change does not begin it again.
const GAIN_LEFT: f64 = 0.002;
/// Reads of the sample that a gain must be worth.
const SAMPLES_MIN: f64 = 8.0;

/// A cache that shares its space. Sizes are in segments, the state segment included.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its present size.
    pub segments: u32,
    /// What it keeps.
    pub min: u32,
    /// What it grows to.
    pub max: u32,
    /// What a hit counts.
    pub weight: u16,
    /// The hits at each size.
    pub curve: Curve,
    /// Whether its writers wait for space.
    pub is_waiting: bool,
}

/// A round: who gives up how much, and who is to get it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The sizes that are best.
    pub targets: Vec<u32>,
    /// Segments that each cache gives up in this round.
    pub shrinks: Vec<u32>,
    /// Hits a second, weighted, that the targets bring beyond the present sizes.
    pub gain: f64,
}

/// A part of a hull.
struct Piece {
    member: usize,
    /// Hits a second for each segment, weighted.
    slope: f64,
    segments: f64,
}

/// The next round for `members`, which share their segments and `free` ones. `is_moving`: caches gave up segments in the last round.
#[must_use]
pub fn plan(members: &[Member], free: u32, is_moving: bool) -> Plan {
    let low: Vec<u32> = members.iter().map(Member::low).collect();
    let high: Vec<u32> = members.iter().map(Member::high).collect();
    let all: u64 = members.iter().map(|member| u64::from(member.segments)).sum::<u64>() + u64::from(free);
    let targets = divide(members, &low, &high, all);
    let hits = |sizes: &dyn Fn(usize) -> u32| -> f64 {
        members.iter().enumerate().map(|(number, member)| member.hits_at(sizes(number))).sum()
    };
    let (before, after) = (hits(&|number| members[number].segments), hits(&|number| targets[number]));
    let gain = after - before;
    let of_samples =
        members.iter().map(|member| f64::from(member.weight) * member.curve.sample).fold(0.0, f64::max);
    let is_urgent =
        members.iter().zip(&targets).any(|(member, target)| member.is_waiting && *target > member.segments);
    let (share, samples) = if is_moving { (GAIN_LEFT, SAMPLES_MIN / 4.0) } else { (GAIN_MIN, SAMPLES_MIN) };
    let is_worth = gain > 0.0 && gain >= share * after && gain >= samples * of_samples;
    let shrinks =
        if is_worth || is_urgent { shrinks(members, &targets, free) } else { vec![0; members.len()] };
    Plan { targets, shrinks, gain }
}

/// What each cache gives up in a round on the way to `targets`; free segments are used first.
fn shrinks(members: &[Member], targets: &[u32], free: u32) -> Vec<u32> {
    let pairs = || members.iter().zip(targets);
    let lacking: u64 =
        pairs().map(|(member, target)| u64::from(target.saturating_sub(member.segments))).sum();
    let excess: u64 =
        pairs().map(|(member, target)| u64::from(member.segments.saturating_sub(*target))).sum();
    let needed = lacking.saturating_sub(u64::from(free)).min(excess);
    pairs()
        .map(|(member, target)| {
            let own = member.segments.saturating_sub(*target);
            let fair = (u64::from(own) * needed).div_ceil(excess.max(1)) as u32;
            fair.min((member.segments / STEP_ONE_IN).max(1)).min(member.segments.saturating_sub(member.min))
        })
        .collect()
}

/// How many of `free` segments each cache gets: on the way to `targets` as far as these are above the present sizes, and the rest
/// where it brings most.
#[must_use]
pub fn grow(members: &[Member], targets: &[u32], free: u32) -> Vec<u32> {
    let present: Vec<u32> = members.iter().map(|member| member.segments).collect();
    let high: Vec<u32> = members
        .iter()
        .zip(targets)
        .map(|(member, target)| (*target).clamp(member.segments, member.high().max(member.segments)))
        .collect();
    let all = present.iter().map(|segments| u64::from(*segments)).sum::<u64>() + u64::from(free);
    let sizes = divide(members, &present, &high, all);
    sizes.iter().zip(&present).map(|(size, before)| size - before).collect()
}

/// What each cache gives up so that `needed` segments become free, where that costs the fewest hits.
///
/// # Errors
/// The number of segments that the caches have above their minima, if these are fewer.
pub fn make_room(members: &[Member], needed: u32) -> Result<Vec<u32>, u32> {
    let above: u64 =
        members.iter().map(|member| u64::from(member.segments - member.low().min(member.segments))).sum();
    if above < u64::from(needed) {
        return Err(above as u32);
    }
    let low: Vec<u32> = members.iter().map(|member| member.low().min(member.segments)).collect();
    let high: Vec<u32> = members.iter().map(|member| member.segments).collect();
    let all: u64 = high.iter().map(|segments| u64::from(*segments)).sum();
    let sizes = divide(members, &low, &high, all - u64::from(needed));
    Ok(high.iter().zip(sizes).map(|(before, size)| before - size).collect())
}

/// Divides `all` segments: each cache gets from `low` to `high`, and beyond `low` those whose hits rise most. What brings no hits goes
/// to caches whose writers wait; then caches keep what they have; then by weight.
fn divide(members: &[Member], low: &[u32], high: &[u32], all: u64) -> Vec<u32> {
    let mut sizes = low.to_vec();
    let mut left = all.saturating_sub(low.iter().map(|segments| u64::from(*segments)).sum());
    let mut pieces: Vec<Piece> = Vec::new();
    for (number, member) in members.iter().enumerate() {
        let weight = f64::from(member.weight);
        pieces.extend(
            member.curve.hull(low[number], high[number]).into_iter().map(|(slope, segments)| Piece {
                member: number,
                slope: slope * weight,
                segments,
            }),
        );
    }
    // Stable: pieces of one cache stay in their order.
    pieces.sort_by(|one, other| other.slope.total_cmp(&one.slope));
    let mut reached: Vec<f64> = low.iter().map(|segments| f64::from(*segments)).collect();
    for piece in pieces.iter().filter(|piece| piece.slope > 0.0) {
        let number = piece.member;
        reached[number] += piece.segments;
        let wanted = (reached[number].round() as u32).clamp(sizes[number], high[number]) - sizes[number];
        let given = u64::from(wanted).min(left);
        sizes[number] += given as u32;
        left -= given;
    }
    let room = |sizes: &[u32], limit: &dyn Fn(usize) -> u32| -> Vec<u32> {
        sizes.iter().enumerate().map(|(number, size)| limit(number).saturating_sub(*size)).collect()
    };
    let waiting = |number: usize| if members[number].is_waiting { high[number] } else { 0 };
    let kept = |number: usize| members[number].segments.min(high[number]);
    let most = |number: usize| high[number];
    for limit in [&waiting as &dyn Fn(usize) -> u32, &kept, &most] {
        let room = room(&sizes, limit);
        left = spread(members, &mut sizes, room, left);
    }
    sizes
}

/// Gives `left` segments by weight, each cache at most its `room`; returns what is left then.
fn spread(members: &[Member], sizes: &mut [u32], mut room: Vec<u32>, mut left: u64) -> u64 {
    while left > 0 {
        let weights: u64 = members
            .iter()
            .zip(&room)
            .filter(|(_, room)| **room > 0)
            .map(|(member, _)| u64::from(member.weight))
            .sum();
        if weights == 0 {
            break;
        }
        let round = left;
        for (number, member) in members.iter().enumerate().filter(|(_, member)| member.weight > 0) {
            // Rounded up, so that each turn gives something.
            let fair = (round * u64::from(member.weight)).div_ceil(weights);
            let given = fair.min(u64::from(room[number])).min(left);
            sizes[number] += given as u32;
            room[number] -= given as u32;
            left -= given;
        }
    }
    left
}

impl Member {
    /// The least size: the present one, if it is below the minimum.
    fn low(&self) -> u32 {
        self.min.min(self.segments.max(1))
    }

    fn high(&self) -> u32 {
        self.max.max(self.low())
    }

    /// Hits a second at a size, weighted.
    fn hits_at(&self, segments: u32) -> f64 {
        self.curve.hull_at(self.low(), self.high(), segments) * f64::from(self.weight)
    }

    /// Hits a second that it would have more with its maximum.
    #[must_use]
    pub fn gain_at_max(&self) -> f64 {
        (self.curve.hits_at(self.high().into()) - self.curve.hits_at(self.segments.into())).max(0.0)
    }
}
