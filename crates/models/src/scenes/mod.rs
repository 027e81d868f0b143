//! The scenes: each has a few threads that meet at one point of the engine.
//!
//! Invariants: the seed of the execution decides the steps of a scene's threads; every request completes.

mod damage;
mod everything;
mod flushes;
mod route;
mod space;

use crate::setup::{BLOCK, LARGE, Setup, Shape};
use crate::stage::Stage;
use cbd_types::ByteRange;
use std::sync::Arc;

/// The condition that must hold when the threads of a scene have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// All data is on the disk, without an explicit request.
    Rest,
    /// All data is on the disk except the data that was damaged at the beginning, and the cache has recorded that damage.
    Damage,
    /// No thread waits; the next process finds all acknowledged data.
    Stopped,
}

/// A scene.
pub struct Scene {
    /// Its name on the command line.
    pub name: &'static str,
    /// The operations that run concurrently, and the condition that must hold.
    pub about: &'static str,
    /// Number of points of a usual execution: changes of priority and ends of the world are distributed over them.
    pub usual: u64,
    /// The shape of its world.
    pub shape: Shape,
    /// How often the world ends in an execution.
    pub crashes: u64,
    /// Whether the content of the disk alone is checked at each step of the disk.
    pub looks: bool,
    /// Whether data in the region is damaged when the scene begins.
    pub is_damaged: bool,
    /// Whether requests go straight to the disk when the scene begins, past a cache that is empty.
    pub is_uncached: bool,
    /// The condition that must hold when its threads have ended.
    pub ending: Ending,
    /// Prepares the initial world.
    pub prepare: fn(&mut Setup),
    /// Starts the threads of the scene.
    pub play: fn(&Arc<Stage>),
}

impl Scene {
    /// The usual values; each scene overrides some of them.
    const USUAL: Self = Self {
        name: "",
        about: "",
        usual: 500,
        shape: Shape::ONE_LANE,
        crashes: 1,
        looks: false,
        is_damaged: false,
        is_uncached: false,
        ending: Ending::Rest,
        prepare: |_| {},
        play: |_| {},
    };
}

/// All scenes.
pub const ALL: &[Scene] = &[
    flushes::STRAGGLER,
    flushes::AT_ONCE,
    flushes::OLDEST,
    flushes::FLUSHES,
    flushes::SLEEP,
    space::PINS,
    space::FILL,
    space::READAHEAD,
    space::WAITERS,
    space::STOP,
    space::SECOND_CHANCE,
    damage::QUARANTINE,
    damage::MARKED_BAD,
    damage::REREAD,
    everything::ZEROES,
    everything::SETTINGS,
    everything::RESIZES,
    everything::METADATA,
    everything::REPAIRS,
    route::ATTACH,
];

/// The scene with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scene> {
    ALL.iter().find(|scene| scene.name == name)
}

/// Block `number` of the device.
const fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// Range `number` of the device with the maximum length of a record; three of them fill a segment.
const fn large(number: u64) -> ByteRange {
    ByteRange::at(number * LARGE, LARGE)
}

/// Number of the first large range in the oldest segment after [`fill_until`] with two free segments and a drain,
/// which lets reclaim free one segment.
const TAIL: u64 = 3;

/// Writes large ranges, from the first on, until `free` segments are free.
fn fill_until(setup: &mut Setup, free: u32) {
    let mut number = 0;
    while setup.free_segments() > free {
        setup.write(large(number));
        number += 1;
    }
    // The last write opened the segment: the next writes fill it.
    setup.write(large(number));
    setup.write(large(number + 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scene_has_a_name_of_its_own() {
        for scene in ALL {
            assert_eq!(ALL.iter().filter(|other| other.name == scene.name).count(), 1, "{}", scene.name);
        }
    }
}
