//! Reuse of space: reclaim concurrent with readers, fills, waiting writers, a stop, and newer writes.

use super::{Ending, Scene, TAIL, block, fill_until, large};
use crate::client::Client;
use crate::setup::{BLOCK, LARGE, Setup, Shape, must};
use cbd_types::{ByteRange, ErrorKind, Result};

/// The first range that is not cached when a scene begins with a full cache.
const FREE: u64 = 40;

/// Fills the cache; the data in its oldest segments is clean.
fn fill_with_a_clean_tail(setup: &mut Setup) {
    fill_until(setup, 2);
    setup.drain();
    assert!(setup.is_cached(large(TAIL), true), "the tail is not where it was");
    let mut number = FREE + 10;
    while setup.free_segments() > 1 {
        setup.write(large(number));
        number += 1;
    }
    setup.write(large(number));
    setup.write(large(number + 1));
}

pub(super) const PINS: Scene = Scene {
    name: "pins",
    about: "reads that copy from a segment against its reclaim and reuse: no byte of the reuse is returned",
    usual: 900,
    shape: Shape::ONE_LANE.without_checksums(),
    prepare: fill_with_a_clean_tail,
    play: |stage| {
        for _ in 0..2 {
            stage.client(|client, random| {
                for _ in 0..3 {
                    must(client.read(large(TAIL + random.below(3))));
                    client.rest();
                }
            });
        }
        // The fifth write reuses the segment that is reclaimed first.
        stage.client(|client, _| {
            for number in 0..5 {
                must(client.write(large(FREE + number)));
            }
        });
    },
    ..Scene::USUAL
};

pub(super) const FILL: Scene = Scene {
    name: "fill",
    about: "a fill in flight while its block is written, drained and reclaimed: its data is not recorded",
    usual: 1200,
    shape: Shape::ONE_LANE.reclaiming_above(0),
    play: |stage| {
        for _ in 0..2 {
            stage.client(|client, random| {
                for _ in 0..2 {
                    must(client.read(block(random.below(2))));
                    client.rest();
                }
            });
        }
        stage.client(|client, random| {
            let first = random.below(2);
            must(client.write(block(first)));
            for number in 0..4 {
                must(client.write(large(FREE + number)));
            }
            if random.chance(500) {
                must(client.ask(cbd_types::Operation::WriteZeroes, block(1 - first), false));
            }
            must(client.read(block(first)));
        });
    },
    ..Scene::USUAL
};

/// Bytes of a read of the scene `readahead`: two of them make a stream.
const PART: u64 = 64 << 10;

pub(super) const READAHEAD: Scene = Scene {
    name: "readahead",
    about: "data that was read ahead is written, drained and reclaimed: no read returns the former data",
    usual: 3000,
    shape: Shape::ONE_LANE.reclaiming_above(0),
    play: |stage| {
        stage.client(|client, _| {
            for number in 0..4 {
                must(client.read(ByteRange::at(number * PART, PART)));
                client.rest();
            }
        });
        stage.client(|client, random| {
            // In what is read ahead behind the first two reads.
            let written = block(2 * PART / BLOCK + random.below(2 * PART / BLOCK));
            must(client.write(written));
            for number in 0..4 {
                must(client.write(large(FREE + number)));
            }
            must(client.read(written));
        });
    },
    ..Scene::USUAL
};

pub(super) const WAITERS: Scene = Scene {
    name: "waiters",
    about: "writers that wait for space against reclaim: none is forgotten",
    usual: 2500,
    prepare: |setup| fill_until(setup, 1),
    play: |stage| {
        for writer in 0..3 {
            stage.client(move |client, _| {
                for number in 0..2 {
                    must(client.write(large(FREE + writer * 2 + number)));
                }
            });
        }
    },
    ..Scene::USUAL
};

/// Accepts an error only if it is the error of a stopped cache.
fn unless_stopped(result: Result<()>) {
    if let Err(error) = result
        && error.kind() != ErrorKind::Stopped
    {
        panic!("{error}");
    }
}

pub(super) const STOP: Scene = Scene {
    name: "stop",
    about: "a stop against writers that are about to wait for space: every request ends",
    usual: 2000,
    prepare: |setup| fill_until(setup, 1),
    play: |stage| {
        for writer in 0..2 {
            stage.client(move |client, _| {
                for number in 0..2 {
                    unless_stopped(client.write(large(FREE + writer * 2 + number)));
                }
                unless_stopped(client.flush());
            });
        }
        // The background worker has ended, so only the stop wakes the waiting writers.
        stage.spawn(|stage, _| {
            stage.end_worker();
            stage.cache.stop();
        });
    },
    ending: Ending::Stopped,
    ..Scene::USUAL
};

pub(super) const SECOND_CHANCE: Scene = Scene {
    name: "second-chance",
    about: "blocks that reclaim appends again against newer writes of them: the newer stay the newest",
    usual: 900,
    prepare: |setup| {
        fill_until(setup, 2);
        setup.drain();
        assert!(setup.is_cached(large(TAIL), true), "the tail is not where it was");
    },
    play: |stage| {
        // Reclaim appends those ranges of the oldest segment again that were read. The first write below opens a segment, which
        // starts reclaim.
        let mut reader = Client::new(stage);
        (0..2).for_each(|number| must(reader.read(large(TAIL + number))));
        for client in 0..2 {
            stage.client(move |queue, random| {
                let first = (TAIL + client) * LARGE / BLOCK;
                for number in 0..4 {
                    must(queue.write(block(first + number)));
                }
                must(queue.read(block(first + random.below(4))));
                queue.rest();
            });
        }
    },
    ..Scene::USUAL
};
