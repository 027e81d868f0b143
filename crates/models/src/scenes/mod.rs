//! The scenes: each a few threads at one place of the engine where they meet.
//!
//! Always true here: what a scene's threads do follows from the execution's seed; everybody's request ends.

mod damage;
mod everything;
mod flushes;
mod space;

use crate::setup::{BLOCK, LARGE, Setup, Shape};
use crate::stage::Stage;
use cbd_types::ByteRange;
use std::sync::Arc;

/// What has to be when the threads of a scene have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Everything is on the disk, without anybody having asked for it.
    Rest,
    /// Everything but what was damaged in the beginning, and that is known.
    Damage,
    /// Nobody waits; what was acknowledged is found by the next process.
    Stopped,
}

/// A scene.
pub struct Scene {
    /// What a person types.
    pub name: &'static str,
    /// What meets what, and what must not come of it.
    pub about: &'static str,
    /// Points of a usual execution: changes of priority and ends of the world are spread over so many.
    pub usual: u64,
    /// The world that it plays in.
    pub shape: Shape,
    /// How often the world ends in an execution.
    pub crashes: u64,
    /// Whether the bare disk is judged, whenever it has something to do.
    pub looks: bool,
    /// Whether something on the region is broken when it begins.
    pub is_damaged: bool,
    /// What has to be when its threads have ended.
    pub ending: Ending,
    /// How the world stands when it begins.
    pub prepare: fn(&mut Setup),
    /// Starts its threads.
    pub play: fn(&Arc<Stage>),
}

impl Scene {
    /// What most scenes are; they say in what they differ.
    const USUAL: Self = Self {
        name: "",
        about: "",
        usual: 500,
        shape: Shape::ONE_LANE,
        crashes: 1,
        looks: false,
        is_damaged: false,
        ending: Ending::Rest,
        prepare: |_| {},
        play: |_| {},
    };
}

/// All of them.
pub const ALL: &[Scene] = &[
    flushes::STRAGGLER,
    flushes::AT_ONCE,
    flushes::OLDEST,
    flushes::FLUSHES,
    flushes::SLEEP,
    space::PINS,
    space::FILL,
    space::WAITERS,
    space::STOP,
    space::SECOND_CHANCE,
    damage::QUARANTINE,
    damage::CONDEMNED,
    damage::READ_ANEW,
    everything::ZEROES,
    everything::SETTINGS,
];

/// The scene with this name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Scene> {
    ALL.iter().find(|scene| scene.name == name)
}

/// The `number`-th block of the device.
const fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// The `number`-th range of the device that is as large as a record can be; three of them fill a segment.
const fn large(number: u64) -> ByteRange {
    ByteRange::at(number * LARGE, LARGE)
}

/// The first large range of the oldest segment when [`fill_until`] two are free and all is drained: reclaim takes one.
const TAIL: u64 = 3;

/// Writes large ranges from the first on until so many segments are free.
fn fill_until(setup: &mut Setup, free: u32) {
    let mut number = 0;
    while setup.free_segments() > free {
        setup.write(large(number));
        number += 1;
    }
    // The last one opened the segment: now it is full.
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
