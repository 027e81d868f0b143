//! The hit ratio that a cache would have with less or more space.
//!
//! Elsewhere: the model (`lane::curve`).

use super::Cache;
use crate::{
    Environment,
    lane::{Curve, HitCurve},
};
use alloc::vec::Vec;
use cbd_types::{Error, ErrorKind, Result};

impl<E: Environment> Cache<E> {
    /// What reads have found at each size of the cache, since it was opened or since
    /// [`count_hits_up_to`](Self::count_hits_up_to).
    pub fn hit_curve(&self) -> HitCurve {
        let mut sum = HitCurve::default();
        self.lanes().iter().for_each(|lane| lane.lock().curve().add_to(&mut sum));
        sum
    }

    /// Resets the counted hits and counts those of sizes of the cache up to `bytes` of log segments.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without memory; nothing has changed then.
    pub fn count_hits_up_to(&self, bytes: u64) -> Result<()> {
        let lanes = self.lanes().len() as u64;
        let mut curves = Vec::new();
        let made = curves.try_reserve_exact(self.lanes().len()).is_ok()
            && self
                .lanes()
                .iter()
                .all(|_| Curve::new(bytes / lanes).map(|curve| curves.push(curve)).is_some());
        if !made {
            return Err(Error::new(
                ErrorKind::System,
                "no memory to count the hits of other sizes of the cache",
            ));
        }
        for (lane, curve) in self.lanes().iter().zip(curves) {
            // The former one is freed after the lane is unlocked.
            let _former = lane.lock().replace_curve(curve);
        }
        Ok(())
    }

    /// Whether a request waits for space.
    pub fn has_waiting_writers(&self) -> bool {
        self.base().pool().has_waiters()
    }
}
