//! Random numbers whose sequence never changes: a failing seed must still fail after years, so the generator is part
//! of this crate and not of a library.
//!
//! Invariants: the sequence depends on the seed alone.

/// A small generator (splitmix64): every seed is good, neighbouring seeds are unrelated.
#[derive(Clone, Debug)]
pub struct Seeded(u64);

impl Seeded {
    /// The generator with this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { ((self.next() as u128 * bound as u128) >> 64) as u64 }
    }

    /// A number from `low` to `high`, both included.
    pub const fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True `permille` times in a thousand.
    pub const fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// One of `choices`, which must not be empty.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// A new generator, unrelated to the next numbers of this one.
    #[must_use]
    pub const fn fork(&mut self) -> Self {
        Self(self.next() ^ 0x5851_f42d_4c95_7f2d)
    }
}

/// Spreads the bits of a number (the finalizer of splitmix64).
#[must_use]
pub const fn mix(number: u64) -> u64 {
    let mut mixed = number;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The number in an environment variable, for longer runs and single seeds; `default` if the variable is not
/// set or not a number.
#[must_use]
pub fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever() {
        let mut random = Seeded::new(1);
        assert_eq!([random.next(), random.next()], [0x910a_2dec_8902_5cc1, 0xbeeb_8da1_658e_ec67]);
    }

    #[test]
    fn numbers_stay_below_their_bound() {
        let mut random = Seeded::new(7);
        assert!((0..1000).all(|_| random.below(3) < 3));
        assert_eq!(random.below(0), 0);
    }
}
