//! Flushes against commits, against other flushes, and against a background worker that goes to sleep.

use super::{Scene, block};
use crate::setup::{Shape, must};
use cbd_types::{ByteRange, CHUNK, Operation};

/// A block of `client`, in one of the first two chunks, which belong to different lanes.
fn own_block(client: u64, random: &mut cbd_sim::Seeded) -> ByteRange {
    let number = random.below(2) * (CHUNK / 4096) + client * 2 + random.below(2);
    block(number)
}

pub(super) const STRAGGLER: Scene = Scene {
    name: "straggler",
    about: "commits in two lanes against the pass of a flush: an epoch gets no record after it was collected",
    usual: 1000,
    shape: Shape::TWO_LANES,
    looks: true,
    play: |stage| {
        for number in 0..2 {
            stage.client(move |client, random| {
                for _ in 0..3 {
                    must(client.write(own_block(number, random)));
                    if random.chance(600) {
                        must(client.flush());
                    }
                }
            });
        }
        stage.client(|client, _| {
            must(client.flush());
            must(client.flush());
        });
    },
    ..Scene::USUAL
};

pub(super) const AT_ONCE: Scene = Scene {
    name: "at-once",
    about: "writes submitted at once, some with FUA, which hold both lanes until one fence, against others and flushes: no deadlock, no late record in an epoch",
    usual: 1200,
    shape: Shape::TWO_LANES,
    looks: true,
    play: |stage| {
        for number in 0..2 {
            stage.client(move |client, random| {
                for _ in 0..2 {
                    // In either order, sometimes two in one lane, and sometimes with FUA.
                    let writes: [_; 3] =
                        std::array::from_fn(|_| (own_block(number, random), random.chance(200)));
                    must(client.write_at_once(&writes));
                    if random.chance(600) {
                        must(client.flush());
                    }
                }
            });
        }
        stage.client(|client, random| {
            must(client.flush());
            must(client.write(own_block(2, random)));
            must(client.flush());
        });
    },
    ..Scene::USUAL
};

pub(super) const OLDEST: Scene = Scene {
    name: "oldest",
    about: "a write and a flush in one lane and then in the other against writeback's search: the younger epoch is not the oldest",
    usual: 400,
    shape: Shape::TWO_LANES.in_a_hurry(),
    looks: true,
    play: |stage| {
        stage.client(|client, random| {
            let first = random.below(2);
            for chunk in [first, 1 - first] {
                must(client.write(block(chunk * (CHUNK / 4096))));
                must(client.flush());
            }
        });
    },
    ..Scene::USUAL
};

pub(super) const FLUSHES: Scene = Scene {
    name: "flushes",
    about: "flushes and FUA writes against each other: an epoch that another flush's pass covers was closed before the pass",
    usual: 800,
    shape: Shape::TWO_LANES,
    looks: true,
    play: |stage| {
        for number in 0..3 {
            stage.client(move |client, random| {
                must(client.write(own_block(number, random)));
                must(client.flush());
                must(client.ask(Operation::Write, own_block(number, random), true));
                must(client.write(own_block(number, random)));
            });
        }
    },
    ..Scene::USUAL
};

pub(super) const SLEEP: Scene = Scene {
    name: "sleep",
    about: "the first write after a rest against a background worker that goes to sleep: it is written back without a request",
    usual: 300,
    play: |stage| {
        for number in 0..2 {
            stage.client(move |client, random| {
                for _ in 0..random.between(1, 2) {
                    must(client.write(block(number)));
                    if random.chance(300) {
                        must(client.flush());
                    }
                }
            });
        }
    },
    ..Scene::USUAL
};
