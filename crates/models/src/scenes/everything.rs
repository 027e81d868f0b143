//! Ranges over several lanes, and everything against everything.

use super::{Scene, block};
use crate::client::Client;
use crate::setup::{Shape, must};
use cbd_engine::Consistency;
use cbd_sim::Seeded;
use cbd_types::{ByteRange, CHUNK, Operation};

pub(super) const ZEROES: Scene = Scene {
    name: "zeroes",
    about: "zeroes and discards over both lanes against writes and reads inside them",
    usual: 1200,
    shape: Shape::TWO_LANES,
    prepare: |setup| {
        for chunk in 0..2 {
            for number in 0..2 {
                setup.write(block(chunk * CHUNK / 4096 + number));
            }
        }
    },
    play: |stage| {
        stage.client(|client, random| {
            for operation in [Operation::Discard, Operation::WriteZeroes] {
                let start = random.below(2) * 4096;
                must(client.ask(operation, ByteRange { start, end: CHUNK + 8192 }, random.chance(300)));
            }
        });
        stage.client(|client, random| {
            for _ in 0..4 {
                let number = random.below(2) * (CHUNK / 4096) + random.below(3);
                must(client.write(block(number)));
                if random.chance(300) {
                    must(client.flush());
                }
            }
        });
        stage.client(|client, random| {
            for _ in 0..3 {
                let number = random.below(2) * (CHUNK / 4096) + random.below(3);
                must(client.read(block(number)));
                client.rest();
            }
        });
    },
    ..Scene::USUAL
};

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

pub(super) const SETTINGS: Scene = Scene {
    name: "settings",
    about: "settings, status and drains against requests of every kind",
    usual: 1500,
    shape: Shape::TWO_LANES.reclaiming_above(10),
    crashes: 2,
    looks: 0,
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
