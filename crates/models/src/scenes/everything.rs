//! Ranges over several lanes, and all operations against each other.

use super::{Scene, block};
use crate::client::Client;
use crate::setup::{Shape, must};
use cbd_engine::Consistency;
use cbd_sim::Seeded;
use cbd_types::{ByteRange, CHUNK, LaneId, Operation};

pub(super) const ZEROES: Scene = Scene {
    name: "zeroes",
    about: "zeroes and discards over both lanes against writes and reads inside them",
    usual: 1200,
    shape: Shape::TWO_LANES,
    looks: true,
    prepare: |setup| (0..8).for_each(|number| setup.write(border(number))),
    play: |stage| {
        stage.client(|client, random| {
            for operation in [Operation::Discard, Operation::WriteZeroes] {
                let end = border(7).end;
                // Sometimes a whole chunk and more.
                let start = if random.chance(50) { 0 } else { border(random.below(4)).start };
                must(client.ask(operation, ByteRange { start, end }, random.chance(300)));
            }
        });
        stage.client(|client, random| {
            for _ in 0..4 {
                must(client.write(border(random.below(8))));
                if random.chance(300) {
                    must(client.flush());
                }
            }
        });
        stage.client(|client, random| {
            for _ in 0..3 {
                must(client.read(border(random.below(8))));
                client.rest();
            }
        });
    },
    ..Scene::USUAL
};

/// Blocks on both sides of the border between two chunks, which belong to different lanes.
const fn border(number: u64) -> ByteRange {
    block(CHUNK / 4096 - 4 + number)
}

/// A request of any kind to a few blocks of both lanes.
fn any_request(client: &mut Client, random: &mut Seeded) {
    let start = random.below(2) * CHUNK + random.below(24) * 512;
    let range = ByteRange::at(start, random.between(1, 16) * 512);
    let (operation, range) = match random.below(10) {
        0..4 => (Operation::Write, range),
        4..7 => (Operation::Read, range),
        7 => (Operation::Flush, ByteRange::at(0, 0)),
        8 => (Operation::WriteZeroes, range),
        _ => (Operation::Discard, range),
    };
    let changes = !matches!(operation, Operation::Read | Operation::Flush);
    must(client.ask(operation, range, changes && random.chance(150)));
    client.rest();
}

pub(super) const RESIZES: Scene = Scene {
    name: "resizes",
    about: "two threads that resize the index against requests of every kind",
    usual: 1500,
    shape: Shape::TWO_LANES.reclaiming_above(10),
    prepare: |setup| (0..8).for_each(|number| setup.write(border(number))),
    play: |stage| {
        for _ in 0..3 {
            stage.client(|client, random| (0..4).for_each(|_| any_request(client, random)));
        }
        for _ in 0..2 {
            stage.spawn(|stage, random| {
                for _ in 0..2 {
                    let blocks = *random.pick(&[1, 100, 1500, 3000]);
                    must(stage.cache.resize_index(blocks, || {}));
                }
            });
        }
    },
    ..Scene::USUAL
};

pub(super) const SETTINGS: Scene = Scene {
    name: "settings",
    about: "settings, status and drains against requests of every kind",
    usual: 1500,
    shape: Shape::TWO_LANES.reclaiming_above(10).checkpointed(),
    crashes: 2,
    play: |stage| {
        for _ in 0..3 {
            stage.client(|client, random| (0..4).for_each(|_| any_request(client, random)));
        }
        stage.spawn(|stage, random| {
            for _ in 0..3 {
                let mut settings = stage.cache.settings();
                settings.consistency = *random.pick(&Consistency::ALL);
                settings.gc_percent = *random.pick(&[0, 10, 90]);
                settings.writeback_rate = *random.pick(&[0, 1 << 20]);
                must(stage.cache.set_settings(settings));
                stage.cache.status();
                stage.cache.extents(ByteRange::at(0, 64 << 10));
                if random.chance(300) {
                    let epoch = stage.cache.request_drain();
                    stage.cache.is_drained(epoch);
                }
            }
        });
    },
    ..Scene::USUAL
};

pub(super) const METADATA: Scene = Scene {
    name: "metadata",
    about: "verifications of metadata against writes, flushes, writeback and reclaim: what is being stored is not taken for damage, and a damaged header is repaired",
    usual: 1500,
    shape: Shape::TWO_LANES.reclaiming_above(10),
    prepare: |setup| {
        (0..8).for_each(|number| setup.write(border(number)));
        setup.drain();
    },
    play: |stage| {
        for _ in 0..2 {
            stage.client(|client, random| {
                for number in 0..3 {
                    must(client.write(super::large(random.below(2) * (CHUNK / super::LARGE) + number)));
                    must(client.flush());
                }
            });
        }
        stage.spawn(|stage, _| assert_eq!(stage.verify_metadata(), 0, "nothing is damaged"));
    },
    ..Scene::USUAL
};

pub(super) const REPAIRS: Scene = Scene {
    name: "repairs",
    about: "verifications that repair a copy of a header against writes and reclaim, which may free the segment: the other copy stays",
    usual: 1200,
    shape: Shape::ONE_LANE.reclaiming_above(10),
    prepare: |setup| {
        (0..6).for_each(|number| setup.write(super::large(number)));
        setup.drain();
    },
    play: |stage| {
        stage.client(|client, random| {
            for number in 0..4 {
                must(client.write(super::large(number)));
                if random.chance(500) {
                    must(client.flush());
                }
            }
        });
        stage.spawn(|stage, random| {
            let segments = stage.cache.log().segments(LaneId(0));
            if segments.is_empty() {
                return;
            }
            let copy = random.below(2) * stage.cache.log().shape().header_copy();
            stage.memory.flip(random.pick(&segments).base + copy + 40, 1);
            let repaired = stage.verify_metadata();
            assert!(repaired <= 1);
            assert_eq!(stage.verify_metadata(), 0, "it is repaired, or free");
        });
    },
    ..Scene::USUAL
};
